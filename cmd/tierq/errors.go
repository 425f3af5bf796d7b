package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/code"
)

var classNames = map[code.Class]string{
	code.ClassOK: "ok", code.ClassFatal: "fatal", code.ClassRenegotiate: "ask-again", code.ClassTransient: "retry",
	code.ClassPermanent: "permanent", code.ClassNoop: "nothing-to-do", code.ClassOperator: "operator", code.ClassWarning: "warning",
}

func errorsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "errors",
		Short: "list every result code, what a client does about it, and what it means",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			t := newTable("CODE", "NAME", "CLASS", "TEXT")
			for _, i := range code.All() {
				t.add(fmt.Sprintf("0x%04x", uint16(i.Code)), i.Name, classNames[i.Class], i.Text)
			}
			return a.print(t)
		},
	}
}
