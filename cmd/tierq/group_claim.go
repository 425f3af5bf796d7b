package main

import (
	"bufio"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/queue/client"
)

func groupClaim(a *app) *cobra.Command {
	var (
		o       client.ClaimOptions
		release bool
		output  string
		in      partitionFlag
	)
	c := &cobra.Command{
		Use:   "claim QUEUE GROUP --min-idle DURATION",
		Short: "take over messages that consumers hold and do nothing with",
		Long: "Take over messages that were handed out, or whose leases were extended, at least --min-idle ago, those first that were\n" +
			"idle longest, and print them as `tierq receive` does. Each counts an attempt; one without an attempt left becomes a\n" +
			"dead letter. The receipts of their former holders are refused from then on. With --release they are then given back,\n" +
			"so that any consumer gets them at once.",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			switch {
			case !cmd.Flags().Changed("min-idle"):
				return usagef("say --min-idle: how long a message must have been held in vain; 0s takes all that is held")
			case o.MinIdle < 0 || o.MinIdle > 12*time.Hour || o.Lease < 0 || o.Lease > 12*time.Hour:
				return usagef("--min-idle and --lease are 0 to 12h")
			case o.Max < 1 || o.Max > 1000:
				return usagef("--max %d: it is 1 to 1000", o.Max)
			case output != "body" && output != "json":
				return usagef("--output %q: it is body or json", output)
			}
			if a.json {
				output = "json"
			}
			o.Partition = in.given
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				return a.claim(ctx, c, args[0], args[1], o, release, output)
			})
		},
	}
	f := c.Flags()
	f.DurationVar(&o.MinIdle, "min-idle", 0, "how long ago the messages were handed out, or their leases extended")
	f.IntVar(&o.Max, "max", 1, "most messages, up to 1000")
	f.StringVar(&o.Consumer, "consumer", "", "name of the consumer that gets them")
	f.DurationVar(&o.Lease, "lease", 0, "how long they stay hidden from others (default: the group's)")
	f.BoolVar(&release, "release", false, "give them back at once, for any consumer")
	f.StringVar(&output, "output", "body", "body, or json")
	in.add(c, allPartitions)
	return c
}

func (a *app) claim(ctx context.Context, c *client.Client, queue, group string, o client.ClaimOptions, release bool, output string) error {
	got, err := c.ClaimIdle(ctx, queue, group, o)
	if err != nil {
		return err
	}
	r := &receiver{a: a, c: c, queue: queue, f: receiveFlags{group: group, output: output}, out: bufio.NewWriter(a.out)}
	var receipts []string
	for _, d := range got.Deliveries {
		receipts = append(receipts, d.Receipt)
		if err := r.write(d); err != nil {
			return fmt.Errorf("write a message: %w", err)
		}
	}
	if err := r.out.Flush(); err != nil {
		return fmt.Errorf("write messages: %w", err)
	}
	released := 0
	if release && len(receipts) > 0 {
		var rs []client.Settled
		rs, err = c.Release(ctx, queue, group, receipts...)
		for _, s := range rs {
			if s.Err == nil {
				released++
			}
		}
	}
	fmt.Fprintf(a.err, "claimed %d, released %d, dead-lettered %d, settled meanwhile %d\n", len(got.Deliveries), released, got.Dead, got.Skipped)
	return err
}
