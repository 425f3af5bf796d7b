package main

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func deadCommand(a *app) *cobra.Command {
	return parent("dead", "list, redrive and purge dead letters", deadList(a), deadRedrive(a), deadPurge(a))
}

func deadList(a *app) *cobra.Command {
	var group string
	var from uint64
	var limit uint32
	c := &cobra.Command{
		Use:   "list QUEUE",
		Short: "list a group's dead letters; with --json also their bodies",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], group); err != nil {
				return err
			}
			if limit < 1 {
				return usagef("--limit %d: it is at least 1", limit)
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				return a.listDead(ctx, c, args[0], group, from, limit)
			})
		},
	}
	c.Flags().StringVar(&group, "group", "", "consumer group (default: the queue's default group)")
	c.Flags().Uint64Var(&from, "from", 0, "from this address on")
	c.Flags().Uint32Var(&limit, "limit", 100, "most dead letters")
	return c
}

func (a *app) listDead(ctx context.Context, c *client.Client, queue, group string, from uint64, limit uint32) error {
	t := newTable("ADDRESS", "ATTEMPTS", "REASON", "FIRST_FAILURE", "DEAD", "BYTES")
	if a.json {
		t.columns = append(t.columns, "BODY", "BODY_BASE64")
	}
	for left := limit; left > 0; {
		ds, next, err := c.ListDeadLetters(ctx, queue, group, from, min(left, 1000))
		if err != nil {
			return err
		}
		for _, d := range ds {
			t.rows = append(t.rows, deadRow(d, a.json))
		}
		if next == 0 || len(ds) == 0 {
			break
		}
		left, from = left-min(left, uint32(len(ds))), next
	}
	return a.print(t)
}

func deadRow(d *tierqv1.DeadLetter, body bool) []any {
	row := []any{d.Address, d.Attempts, d.Reason, stamp(d.FirstFailureUnixMs), stamp(d.DeadUnixMs), len(d.Body)}
	if body {
		text, raw := jsonBody(d.Body)
		row = append(row, text, json.RawMessage("null"))
		if raw != nil {
			row[len(row)-1] = raw
		}
	}
	return row
}

// stamp is a time of the fleet's; none is the zero time.
func stamp(ms uint64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms)).UTC()
}

// deadArgs reads QUEUE [ADDRESS...] and demands addresses or --all, so that a slip does not hit everything.
func deadArgs(args []string, group string, all bool) ([]uint64, error) {
	if err := checkNames(args[0], group); err != nil {
		return nil, err
	}
	if all == (len(args) > 1) {
		return nil, usagef("name addresses, or say --all")
	}
	var addresses []uint64
	for _, s := range args[1:] {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n == 0 {
			return nil, usagef("address %q: it is a number from 1, see `tierq dead list`", s)
		}
		addresses = append(addresses, n)
	}
	return addresses, nil
}

func deadRedrive(a *app) *cobra.Command {
	var group string
	var all bool
	c := &cobra.Command{
		Use:   "redrive QUEUE [ADDRESS...]",
		Short: "make dead letters deliverable again",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			addresses, err := deadArgs(args, group, all)
			if err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				redriven, skipped, err := c.RedriveDeadLetters(ctx, args[0], group, addresses...)
				if err != nil {
					return err
				}
				t := newTable("REDRIVEN", "SKIPPED")
				t.add(redriven, skipped)
				return a.printOne(t)
			})
		},
	}
	c.Flags().StringVar(&group, "group", "", "consumer group (default: the queue's default group)")
	c.Flags().BoolVar(&all, "all", false, "all dead letters of the group")
	return c
}

func deadPurge(a *app) *cobra.Command {
	var group string
	var all bool
	c := &cobra.Command{
		Use:   "purge QUEUE [ADDRESS...]",
		Short: "remove dead letters for good",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			addresses, err := deadArgs(args, group, all)
			if err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				n, err := c.PurgeDeadLetters(ctx, args[0], group, addresses...)
				if err != nil {
					return err
				}
				t := newTable("PURGED")
				t.add(n)
				return a.printOne(t)
			})
		},
	}
	c.Flags().StringVar(&group, "group", "", "consumer group (default: the queue's default group)")
	c.Flags().BoolVar(&all, "all", false, "all dead letters of the group")
	return c
}
