package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
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
	var which deadFilter
	var in partitionFlag
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
			if err := which.check(); err != nil {
				return err
			}
			req := &tierqv1.ListDeadLettersRequest{Queue: args[0], Partition: in.given, Group: group, FromAddress: from, ReasonPrefix: which.reason, OlderThanMs: which.ms()}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error { return a.listDead(ctx, c, req, limit) })
		},
	}
	c.Flags().StringVar(&group, "group", "", "consumer group (default: the queue's default group)")
	c.Flags().Uint64Var(&from, "from", 0, "from this address on")
	c.Flags().Uint32Var(&limit, "limit", 100, "most dead letters")
	in.add(c, "all, one after the other")
	which.add(c)
	return c
}

// deadFilter selects dead letters.
type deadFilter struct {
	reason string
	older  time.Duration
}

func (f *deadFilter) add(c *cobra.Command) {
	c.Flags().StringVar(&f.reason, "reason", "", "only those whose reason begins so")
	c.Flags().DurationVar(&f.older, "older", 0, "only those that have been dead for so long")
}

func (f *deadFilter) check() error {
	if f.older < 0 || len(f.reason) > 255 {
		return usagef("--older cannot be below zero, --reason is at most 255 bytes")
	}
	return nil
}

func (f *deadFilter) ms() uint64 { return uint64(f.older.Milliseconds()) }

func (a *app) listDead(ctx context.Context, c *client.Client, req *tierqv1.ListDeadLettersRequest, limit uint32) error {
	t := newTable("ADDRESS", "ATTEMPTS", "REASON", "FIRST_FAILURE", "DEAD", "BYTES", "EXPORT", "EXPORT_NUMBER")
	if a.json {
		t.columns = append(t.columns, "BODY", "BODY_BASE64")
	}
	t.columns = append(t.columns, "PARTITION")
	for left := limit; left > 0; {
		req.Limit = min(left, 1000)
		res, err := c.FindDeadLetters(ctx, req)
		if err != nil {
			return err
		}
		for _, d := range res.DeadLetters {
			t.rows = append(t.rows, append(deadRow(d, a.json), d.Partition))
		}
		left -= min(left, uint32(len(res.DeadLetters)))
		req.FromPartition = res.NextPartition
		if req.FromAddress = res.NextAddress; res.NextAddress == 0 {
			break
		}
	}
	return a.print(t)
}

func deadRow(d *tierqv1.DeadLetter, body bool) []any {
	row := []any{d.Address, d.Attempts, d.Reason, stamp(d.FirstFailureUnixMs), stamp(d.DeadUnixMs), len(d.Body), d.ExportState, d.ExportNumber}
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

// deadSelection is what redrive and purge have in common.
type deadSelection struct {
	deadFilter
	in          partitionFlag
	group       string
	all, dryRun bool
	from, limit uint64
	next        uint32 // the partition to go on in, when all are meant
}

func (f *deadSelection) add(c *cobra.Command) {
	fs := c.Flags()
	fs.StringVar(&f.group, "group", "", "consumer group (default: the queue's default group)")
	fs.BoolVar(&f.all, "all", false, "all dead letters of the group")
	fs.Uint64Var(&f.from, "from", 0, "from this address on")
	fs.Uint64Var(&f.limit, "limit", 0, "most dead letters (default: no limit)")
	fs.BoolVar(&f.dryRun, "dry-run", false, "count only")
	f.in.add(c, "all; addresses and --from need it when there are several")
	f.deadFilter.add(c)
}

// args reads QUEUE [ADDRESS...] and demands addresses, a filter, or --all, so that a slip does not hit everything.
func (f *deadSelection) args(args []string) ([]uint64, error) {
	if err := checkNames(args[0], f.group); err != nil {
		return nil, err
	}
	if err := f.check(); err != nil {
		return nil, err
	}
	filtered := f.reason != "" || f.older > 0
	switch {
	case len(args) == 1 && !f.all && !filtered:
		return nil, usagef("name addresses, or say --all, --reason or --older")
	case len(args) > 1 && (f.all || filtered || f.from > 0):
		return nil, usagef("addresses exclude --all, --reason, --older and --from")
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

// rounds repeats a call about dead letters until it says that nothing is left, each with the time of a call of its own.
// A round that fails names where to go on.
func (a *app) rounds(ctx context.Context, f *deadSelection, round func(ctx context.Context, c *client.Client, from, limit uint64) (done, next uint64, err error)) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	o.FailFast = true
	return withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		for from, left := f.from, f.limit; ; {
			done, next, err := round(ctx, c, from, left)
			switch {
			case err != nil && from != f.from:
				where := ""
				if f.next > 0 {
					where = " --partition " + strconv.FormatUint(uint64(f.next), 10) + ", and with the partitions behind it"
				}
				a.complain("not all is done: go on with --from " + strconv.FormatUint(from, 10) + where)
				return err
			case err != nil || next == 0 || f.limit > 0 && done >= left:
				return err
			}
			if from = next; f.limit > 0 {
				left -= done
			}
		}
	})
}

func deadRedrive(a *app) *cobra.Command {
	var f deadSelection
	var rate uint32
	c := &cobra.Command{
		Use:   "redrive QUEUE [ADDRESS...]",
		Short: "make dead letters deliverable again",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			addresses, err := f.args(args)
			if err != nil {
				return err
			}
			var redriven, skipped, matched uint64
			err = a.rounds(cmd.Context(), &f, func(ctx context.Context, c *client.Client, from, limit uint64) (uint64, uint64, error) {
				res, err := c.RedriveSelected(ctx, &tierqv1.RedriveDeadLettersRequest{
					Queue: args[0], Partition: f.in.given, FromPartition: f.next, Group: f.group, Addresses: rest(addresses, from), ReasonPrefix: f.reason, OlderThanMs: f.ms(), FromAddress: unless(addresses, from),
					Limit: limit, RatePerSecond: rate, DryRun: f.dryRun,
				})
				if err != nil {
					return 0, 0, err
				}
				f.next = res.NextPartition
				redriven, skipped, matched = redriven+res.Redriven, skipped+res.Skipped, matched+res.Matched
				return res.Redriven + res.Skipped + res.Matched, res.NextAddress, nil
			})
			t := newTable("REDRIVEN", "SKIPPED")
			t.add(redriven, skipped)
			if f.dryRun {
				t = newTable("MATCHED")
				t.add(matched)
			}
			if err != nil && redriven+skipped+matched == 0 {
				return err
			}
			return errors.Join(a.printOne(t), err)
		},
	}
	f.add(c)
	c.Flags().Uint32Var(&rate, "rate", 0, "at most so many a second (default: no limit)")
	return c
}

// rest is what is left of named addresses, in their order, from one on; 0 is all.
func rest(addresses []uint64, from uint64) []uint64 {
	if i := slices.Index(addresses, from); i >= 0 {
		return addresses[i:]
	}
	return addresses
}

// unless is an address to go on from where none are named.
func unless(addresses []uint64, from uint64) uint64 {
	if len(addresses) > 0 {
		return 0
	}
	return from
}

func deadPurge(a *app) *cobra.Command {
	var f deadSelection
	c := &cobra.Command{
		Use:   "purge QUEUE [ADDRESS...]",
		Short: "remove dead letters for good",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			addresses, err := f.args(args)
			if err != nil {
				return err
			}
			var purged, matched uint64
			err = a.rounds(cmd.Context(), &f, func(ctx context.Context, c *client.Client, from, limit uint64) (uint64, uint64, error) {
				res, err := c.PurgeSelected(ctx, &tierqv1.PurgeDeadLettersRequest{
					Queue: args[0], Partition: f.in.given, FromPartition: f.next, Group: f.group, Addresses: rest(addresses, from), ReasonPrefix: f.reason, OlderThanMs: f.ms(), FromAddress: unless(addresses, from),
					Limit: limit, DryRun: f.dryRun,
				})
				if err != nil {
					return 0, 0, err
				}
				f.next = res.NextPartition
				purged, matched = purged+res.Purged, matched+res.Matched
				return res.Purged + res.Matched, res.NextAddress, nil
			})
			t := newTable("PURGED")
			t.add(purged)
			if f.dryRun {
				t = newTable("MATCHED")
				t.add(matched)
			}
			if err != nil && purged+matched == 0 {
				return err
			}
			return errors.Join(a.printOne(t), err)
		},
	}
	f.add(c)
	return c
}
