package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func statusCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "show the fleet and its hosts",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				st, err := c.FleetStatus(ctx)
				if err != nil {
					return err
				}
				return a.printStatus(st)
			})
		},
	}
}

func (a *app) printStatus(st *tierqv1.FleetStatusResponse) error {
	head := newTable("FLEET", "HOST", "VERSION", "UPTIME_S", "CATALOG_LEADER", "CATALOG_EPOCH", "CATALOG_VERSION")
	row := []any{st.FleetId, st.Host, st.Version, st.UptimeMs / 1000, st.CatalogLeaderHost, st.CatalogLeaderEpoch, st.CatalogVersion}
	hosts := newTable("HOST", "ROLE", "ALIVE", "ANSWERS", "API", "DOMAIN", "SILENT")
	for _, h := range st.Hosts {
		silent := any((time.Duration(h.SilentMs) * time.Millisecond).String())
		if a.json {
			silent = h.SilentMs
		}
		hosts.add(h.Id, h.Role, h.Alive, h.Self, h.Api, h.Domain, silent)
	}
	if a.json {
		hosts.columns[6] = "SILENT_MS"
		hj, err := hosts.array()
		if err != nil {
			return err
		}
		head.columns = append(head.columns, "HOSTS")
		head.add(append(row, hj)...)
		return a.printOne(head)
	}
	head.add(row...)
	if err := head.writeText(a.out); err != nil {
		return err
	}
	fmt.Fprintln(a.out)
	return hosts.writeText(a.out)
}
