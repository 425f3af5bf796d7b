package main

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func groupCommand(a *app) *cobra.Command {
	return parent("group", "create, list, explain, configure, pause, move, reset and delete consumer groups",
		groupCreate(a), groupList(a), groupLag(a), groupConsumers(a), groupExplain(a), groupConfigure(a), groupPause(a), groupResume(a),
		groupClaim(a), groupMove(a), groupReset(a), groupDelete(a))
}

// byPartition is what a table of groups lists: them, or each in every partition, with the column that says which.
func byPartition(t *table, gs []*tierqv1.Group, split bool) []*tierqv1.Group {
	if !split {
		return gs
	}
	t.columns = append(t.columns, "PARTITION")
	var out []*tierqv1.Group
	for _, g := range gs {
		if len(g.Partitions) == 0 {
			out = append(out, g)
		}
		out = append(out, g.Partitions...)
	}
	return out
}

func withPartition(g *tierqv1.Group, split bool, row ...any) []any {
	if split {
		row = append(row, g.Partition)
	}
	return row
}

func splitFlag(c *cobra.Command, split *bool) {
	c.Flags().BoolVar(split, "by-partition", false, "a row for each partition of the queue, in place of sums and the first one's home")
}

func groupTable(gs []*tierqv1.Group) *table { return groupTableOf(gs, false) }

func groupTableOf(gs []*tierqv1.Group, split bool) *table {
	t := newTable("GROUP", "ID", "HOME", "EPOCH", "FLOOR", "UNFINISHED", "IN_FLIGHT", "RETRYING", "DEAD", "ACKED", "WAITING", "HOME_API")
	for _, g := range byPartition(t, gs, split) {
		t.rows = append(t.rows, withPartition(g, split, g.Name, g.Id, g.HomeHost, g.Epoch, g.Floor, g.Unfinished, g.InFlight, g.Retrying, g.Dead, g.Acked, g.WaitingReceives, g.HomeApi))
	}
	return t
}

func groupCreate(a *app) *cobra.Command {
	var (
		cfg            tierqv1.GroupConfig
		start          string
		lease, backoff time.Duration
		record         time.Duration
		home           uint64
	)
	c := &cobra.Command{
		Use:   "create QUEUE GROUP",
		Short: "create a consumer group; the same create again gives the same answer",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			s, err := parseStart(start)
			if err != nil {
				return err
			}
			if lease < 0 || lease > 12*time.Hour || backoff < 0 || record < 0 || record > 12*time.Hour {
				return usagef("--lease and --record-after are 0 to 12h, --backoff not below 0")
			}
			cfg.LeaseMs, cfg.BackoffBaseMs = uint64(lease.Milliseconds()), uint64(backoff.Milliseconds())
			cfg.RecordAfterMs = uint64(record.Milliseconds())
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				g, err := c.CreateGroup(ctx, &tierqv1.CreateGroupRequest{Queue: args[0], Name: args[1], Config: &cfg, Start: s, HomeHost: home})
				if err != nil {
					return err
				}
				return a.printOne(groupTable([]*tierqv1.Group{g}))
			})
		},
	}
	f := c.Flags()
	f.StringVar(&start, "start", "earliest", "earliest, latest, address:N, or time:RFC3339")
	f.DurationVar(&lease, "lease", 0, "how long a received message stays hidden (default 30s)")
	f.Uint32Var(&cfg.MaxAttempts, "max-attempts", 0, "failures before a dead letter (default 5)")
	f.DurationVar(&backoff, "backoff", 0, "pause after the first failure, doubled by each further one (default 1s)")
	f.Uint32Var(&cfg.MaxInFlight, "max-in-flight", 0, "messages leased at once (default: the fleet's)")
	f.Uint32Var(&cfg.MaxInFlightPerConsumer, "max-in-flight-per-consumer", 0, "messages leased at once by one consumer")
	f.BoolVar(&cfg.SingleActiveConsumer, "single-active-consumer", false, "hand out to one consumer at a time")
	f.BoolVar(&cfg.Paused, "paused", false, "hand out nothing yet")
	f.DurationVar(&record, "record-after", 0, "a lease open so long outlives its home (default 1s)")
	f.StringVar(&cfg.DeadLetterQueue, "dead-letter-queue", "", "queue that dead letters go on to (default: they stay)")
	f.Uint64Var(&home, "home", 0, "host that serves the group (default: the fleet chooses)")
	return c
}

// checkNames checks two names that are to be created or named by hand.
func checkNames(queue, group string) error {
	if err := checkName("queue", queue); err != nil {
		return err
	}
	return checkGroup(group)
}

func parseStart(s string) (*tierqv1.Start, error) {
	at, value, _ := strings.Cut(s, ":")
	switch at {
	case "earliest", "latest":
		if value == "" {
			return &tierqv1.Start{At: at}, nil
		}
	case "address":
		if n, err := strconv.ParseUint(value, 10, 64); err == nil && n > 0 {
			return &tierqv1.Start{At: at, Address: n}, nil
		}
	case "time":
		if t, err := time.Parse(time.RFC3339, value); err == nil && t.UnixMilli() > 0 {
			return &tierqv1.Start{At: at, UnixMs: uint64(t.UnixMilli())}, nil
		}
	}
	return nil, usagef("--start %q: it is earliest, latest, address:N, or time:2006-01-02T15:04:05Z", s)
}

func groupList(a *app) *cobra.Command {
	var split bool
	c := &cobra.Command{
		Use:   "list QUEUE",
		Short: "list a queue's groups",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				gs, err := c.ListGroups(ctx, args[0])
				if err != nil {
					return err
				}
				return a.print(groupTableOf(gs, split))
			})
		},
	}
	splitFlag(c, &split)
	return c
}

func groupMove(a *app) *cobra.Command {
	var in partitionFlag
	c := &cobra.Command{
		Use:   "move QUEUE GROUP HOST",
		Short: "hand a group to another host",
		Args:  cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			host, err := strconv.ParseUint(args[2], 10, 64)
			if err != nil || host == 0 {
				return usagef("host %q: it is a host's number, see `tierq status`", args[2])
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				g, err := c.MoveGroup(ctx, args[0], args[1], host, in.list()...)
				if err != nil {
					return err
				}
				return a.printOne(groupTable([]*tierqv1.Group{g}))
			})
		},
	}
	in.add(c, allPartitions)
	return c
}

func groupReset(a *app) *cobra.Command {
	var start string
	var in partitionFlag
	c := &cobra.Command{
		Use:   "reset QUEUE GROUP --start WHERE",
		Short: "move a group's start: what lies after it is delivered again",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			if start == "" {
				return usagef("say --start: earliest, latest, address:N, or time:RFC3339")
			}
			s, err := parseStart(start)
			if err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				g, err := c.ResetGroup(ctx, args[0], args[1], s, in.list()...)
				if err != nil {
					return err
				}
				return a.printOne(groupTable([]*tierqv1.Group{g}))
			})
		},
	}
	c.Flags().StringVar(&start, "start", "", "earliest, latest, address:N, or time:RFC3339")
	in.add(c, "all; address:N needs it when there are several")
	return c
}

func groupDelete(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "delete QUEUE GROUP",
		Short: "delete a group and what it knows; the messages stay",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if err := c.DeleteGroup(ctx, args[0], args[1]); err != nil {
					return err
				}
				t := newTable("GROUP", "RESULT")
				t.add(args[1], "deleted")
				return a.printOne(t)
			})
		},
	}
}
