package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/wal"
)

func walCommand(a *app) *cobra.Command {
	return parent("wal", "look into a host's Raft log, also while the host runs", walDump(a), walVerify(a), walStats(a))
}

func walDump(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "dump PATH",
		Short: "print every record of a log's directory or of one segment file, a line each",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			out := bufio.NewWriterSize(a.out, 256<<10)
			err := wal.Dump(out, args[0])
			return walError(errors.Join(err, out.Flush()))
		},
	}
}

func walVerify(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "verify PATH",
		Short: "check every byte of a log's directory; exit 4 when something is wrong",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := wal.Verify(args[0])
			if err != nil {
				return walError(err)
			}
			if err := a.printLog(r); err != nil {
				return err
			}
			if n := len(r.Problems); n > 0 {
				return &checkError{fmt.Sprintf("%d problems in %s: keep a copy of it, and replace this host's replicas from the others", n, args[0])}
			}
			return nil
		},
	}
}

func walStats(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "stats PATH",
		Short: "show how much of each segment is live, and every replica's state",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			r, err := wal.Stats(args[0])
			if err != nil {
				return walError(err)
			}
			return a.printLog(r)
		},
	}
}

func (a *app) printLog(r wal.Report) error {
	if a.json {
		return json.NewEncoder(a.out).Encode(r)
	}
	return r.Print(a.out)
}

// walError tells a wrong path, which the user can mend, from a damaged log.
func walError(err error) error {
	var path *fs.PathError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wal.ErrCorrupt):
		return &checkError{err.Error() + ": keep a copy of it, and replace this host's replicas from the others"}
	case errors.As(err, &path) && errors.Is(err, fs.ErrNotExist):
		return usagef("%v: name the directory of a host's log", err)
	}
	return err
}
