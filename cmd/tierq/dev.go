package main

import (
	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node"
)

func devCommand(a *app) *cobra.Command {
	var cfg node.DevConfig
	c := &cobra.Command{
		Use:   "dev",
		Short: "run a whole fleet in this process, to try things: two full hosts and a witness",
		Long: "Run two full hosts and a witness in this process, on real loopback TCP and with real disk writes. The first host has\n" +
			"the default ports, so that the other commands find it. Stop it with Ctrl-C; the data stay in --dir.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Out, cfg.Version = a.out, versionText()
			return hostError(node.RunDev(cmd.Context(), cfg))
		},
	}
	fs := c.Flags()
	fs.StringVar(&cfg.Dir, "dir", "./tierq-data", "directory of the hosts' data")
	fs.StringVar(&cfg.API, "api", defaultAddr, "API address of the first host")
	fs.StringVar(&cfg.Admin, "admin", "127.0.0.1:7191", "admin address of the first host")
	fs.StringVar(&cfg.Log, "log", "warn", "least level that is logged on stderr: debug, info, warn, error")
	return c
}
