package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node"
	"github.com/tierq/tierq/queue/code"
)

func serveCommand(a *app) *cobra.Command {
	return hostCommand("serve", "run one full host of a fleet, until stopped", node.RoleFull)
}

func witnessCommand(a *app) *cobra.Command {
	return hostCommand("witness", "run one witness host of a fleet, which votes and stores no message, until stopped", node.RoleWitness)
}

// hostCommand runs the host that a file describes. The command names the role so that nobody starts a host as what it is
// not by taking the wrong file.
func hostCommand(use, short string, role node.Role) *cobra.Command {
	var path string
	c := &cobra.Command{
		Use:   use + " --config FILE",
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return usagef("say --config: the YAML file of this host")
			}
			cfg, err := node.LoadConfig(path)
			if err != nil {
				return configError(err)
			}
			cfg.Version = versionText()
			if have := cfg.Self().Role; have != role {
				return usagef("%s: host %d is a %s host: start it with `tierq %s`", path, cfg.Host, have, commandOf(have))
			}
			log, err := node.NewLogger(cfg.Log)
			if err != nil {
				return usagef("%s: log: %q is not a level: use debug, info, warn or error", path, cfg.Log)
			}
			defer func() { _ = log.Sync() }()
			return hostError(node.Run(cmd.Context(), cfg, log))
		},
	}
	c.Flags().StringVar(&path, "config", "", "YAML file of this host")
	return c
}

func commandOf(r node.Role) string {
	if r == node.RoleWitness {
		return "witness"
	}
	return "serve"
}

// configError tells a file that cannot be read from one that is wrong: both are for the user to fix.
func configError(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return usagef("%v: name the host's YAML file with --config", err)
	}
	return usagef("%v", err)
}

// hostError keeps a host's own refusals (a directory in use, another host's data) one line with the code's remedy.
func hostError(err error) error {
	var e *code.Error
	if err == nil || errors.Is(err, context.Canceled) || errors.As(err, &e) {
		return err
	}
	return fmt.Errorf("the host cannot run: %w", err)
}
