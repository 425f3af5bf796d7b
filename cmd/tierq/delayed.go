package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func delayedCommand(a *app) *cobra.Command {
	return parent("delayed", "list, cancel and reschedule delayed messages", delayedList(a), delayedCancel(a), delayedReschedule(a))
}

func delayedList(a *app) *cobra.Command {
	var limit uint32
	var in partitionFlag
	c := &cobra.Command{
		Use:   "list QUEUE",
		Short: "list delayed messages in the order in which they become due",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if limit < 1 {
				return usagef("--limit %d: it is at least 1", limit)
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				t := newTable("ADDRESS", "DUE", "PUBLISHED", "BYTES", "KEY", "PARTITION")
				req := &tierqv1.ListDelayedRequest{Queue: args[0], Partition: in.given}
				for left := limit; left > 0; {
					req.Limit = min(left, 1000)
					res, err := c.ListDelayed(ctx, req)
					if err != nil {
						return err
					}
					for _, m := range res.Messages {
						t.add(m.Address, stamp(m.VisibleUnixMs), stamp(m.PublishedUnixMs), m.Bytes, string(m.Key), m.Partition)
					}
					left -= min(left, uint32(len(res.Messages)))
					if req.After = res.Next; res.Next == nil {
						break
					}
				}
				return a.print(t)
			})
		},
	}
	c.Flags().Uint32Var(&limit, "limit", 100, "most messages")
	in.add(c, allPartitions)
	return c
}

// delayedArgs checks QUEUE ADDRESS and --due.
func delayedArgs(args []string, due string) (address, expected uint64, err error) {
	if err := checkName("queue", args[0]); err != nil {
		return 0, 0, err
	}
	if address, err = parseAddress(args[1]); err != nil || due == "" {
		return address, 0, err
	}
	at, err := time.Parse(time.RFC3339, due)
	if err != nil || at.UnixMilli() <= 0 {
		return 0, 0, usagef("--due %q: it is a time as `tierq delayed list --json` prints it", due)
	}
	return address, uint64(at.UnixMilli()), nil
}

const dueUsage = "refuse unless it is still due at this time, as `delayed list --json` prints it"

func delayedCancel(a *app) *cobra.Command {
	var due string
	var in partitionFlag
	c := &cobra.Command{
		Use:   "cancel QUEUE ADDRESS",
		Short: "remove a delayed message that is not due yet",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			address, expected, err := delayedArgs(args, due)
			if err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if err := c.CancelDelayed(ctx, &tierqv1.CancelDelayedRequest{Queue: args[0], Partition: in.given, Address: address, ExpectedVisibleUnixMs: expected}); err != nil {
					return err
				}
				t := newTable("ADDRESS", "RESULT")
				t.add(address, "cancelled")
				return a.printOne(t)
			})
		},
	}
	c.Flags().StringVar(&due, "due", "", dueUsage)
	in.add(c, onlyPartition)
	return c
}

func delayedReschedule(a *app) *cobra.Command {
	var due string
	var in partitionFlag
	var delay time.Duration
	c := &cobra.Command{
		Use:   "reschedule QUEUE ADDRESS --delay D",
		Short: "make a delayed message due at another time",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			address, expected, err := delayedArgs(args, due)
			if err != nil {
				return err
			}
			if delay < time.Millisecond {
				return usagef("say --delay: how long from now it becomes due, at least 1ms")
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.RescheduleDelayed(ctx, &tierqv1.RescheduleDelayedRequest{
					Queue: args[0], Partition: in.given, Address: address, ExpectedVisibleUnixMs: expected, DelayMs: uint64(delay.Milliseconds()),
				})
				if err != nil {
					return err
				}
				t := newTable("ADDRESS", "DUE")
				t.add(res.Address, stamp(res.VisibleUnixMs))
				return a.printOne(t)
			})
		},
	}
	c.Flags().StringVar(&due, "due", "", dueUsage)
	in.add(c, onlyPartition)
	c.Flags().DurationVar(&delay, "delay", 0, "how long from now it becomes due")
	return c
}
