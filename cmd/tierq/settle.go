package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

func settleCommand(a *app) *cobra.Command {
	return parent("settle", "ack, nack, release, reject or extend what was received, by receipt",
		settleAck(a), settleNack(a), settleRelease(a), settleReject(a), settleExtend(a))
}

// settling is one of the five calls.
type settling func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error)

// settleOne makes a command that takes QUEUE RECEIPT...; check looks at the flags before a fleet is asked.
func settleOne(a *app, use, short string, check func() error, do settling) *cobra.Command {
	var group string
	c := &cobra.Command{
		Use:   use + " QUEUE RECEIPT...",
		Short: short,
		Args:  cobra.RangeArgs(2, 1001),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], group); err != nil {
				return err
			}
			if err := check(); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				results, err := do(ctx, c, args[0], group, args[1:])
				t := newTable("ADDRESS", "RESULT", "ALREADY", "RECEIPT")
				for _, r := range results {
					result := code.OK.String()
					if r.Err != nil {
						result = r.Err.Code.String()
					}
					t.add(r.Address, result, r.Already, r.Receipt)
				}
				return errors.Join(a.print(t), err)
			})
		},
	}
	c.Flags().StringVar(&group, "group", "", "consumer group (default: the queue's default group)")
	return c
}

func noCheck() error { return nil }

func settleAck(a *app) *cobra.Command {
	return settleOne(a, "ack", "finish messages", noCheck, func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error) {
		return c.Ack(ctx, queue, group, receipts...)
	})
}

func settleNack(a *app) *cobra.Command {
	var delay time.Duration
	var reason string
	c := settleOne(a, "nack", "give messages back as failed", func() error {
		if delay < -1 || delay > 12*time.Hour {
			return usagef("--delay is 0 to 12h")
		}
		return checkReason(reason)
	}, func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error) {
		return c.Nack(ctx, queue, group, delay, reason, receipts...)
	})
	c.Flags().DurationVar(&delay, "delay", -1, "when they come again (default: the group's backoff)")
	c.Flags().StringVar(&reason, "reason", "", "why, for whoever looks at the retry or dead letter")
	return c
}

func checkReason(reason string) error {
	if len(reason) > 255 {
		return usagef("--reason has %d bytes: at most 255", len(reason))
	}
	return nil
}

func settleRelease(a *app) *cobra.Command {
	return settleOne(a, "release", "give messages back without counting a failure", noCheck, func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error) {
		return c.Release(ctx, queue, group, receipts...)
	})
}

func settleReject(a *app) *cobra.Command {
	var reason string
	c := settleOne(a, "reject", "make dead letters of messages now", func() error { return checkReason(reason) },
		func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error) {
			return c.Reject(ctx, queue, group, reason, receipts...)
		})
	c.Flags().StringVar(&reason, "reason", "", "why, for whoever looks at the dead letter")
	return c
}

func settleExtend(a *app) *cobra.Command {
	var lease time.Duration
	c := settleOne(a, "extend", "let leases end so long from now", func() error {
		if lease <= 0 || lease > 12*time.Hour {
			return usagef("say --lease: above 0, at most 12h")
		}
		return nil
	}, func(ctx context.Context, c *client.Client, queue, group string, receipts []string) ([]client.Settled, error) {
		return c.Extend(ctx, queue, group, lease, receipts...)
	})
	c.Flags().DurationVar(&lease, "lease", 0, "how long from now they end")
	return c
}
