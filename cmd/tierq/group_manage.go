package main

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

func groupConsumers(a *app) *cobra.Command {
	var messages bool
	var in partitionFlag
	c := &cobra.Command{
		Use:   "consumers QUEUE GROUP",
		Short: "show who holds what",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.ListConsumers(ctx, args[0], args[1], messages, in.list()...)
				if err != nil {
					return err
				}
				if messages {
					return a.print(heldTable(res))
				}
				t := newTable("CONSUMER", "IN_FLIGHT", "ACTIVE")
				for _, x := range res.Consumers {
					t.add(x.Name, x.InFlight, x.Active)
				}
				return a.print(t)
			})
		},
	}
	c.Flags().BoolVar(&messages, "messages", false, "list the messages that they hold, 1,000 at most of a partition")
	in.add(c, allPartitions)
	return c
}

func heldTable(res *tierqv1.ListConsumersResponse) *table {
	t := newTable("CONSUMER", "ADDRESS", "ATTEMPT", "HELD_MS", "LEFT_MS", "PARTITION")
	for _, x := range res.Consumers {
		for _, m := range x.Messages {
			t.add(x.Name, m.Address, m.Attempt, m.HeldMs, m.LeftMs, m.Partition)
		}
	}
	return t
}

func groupExplain(a *app) *cobra.Command {
	var key string
	var in partitionFlag
	c := &cobra.Command{
		Use:   "explain QUEUE GROUP [ADDRESS]",
		Short: "tell why a message, a key, or the whole group is not delivered",
		Args:  cobra.RangeArgs(2, 3),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			req := &tierqv1.ExplainGroupRequest{Queue: args[0], Group: args[1], Partition: in.given}
			if key != "" {
				req.Key = []byte(key)
			}
			if len(args) == 3 {
				var err error
				if req.Address, err = parseAddress(args[2]); err != nil {
					return err
				}
				if key != "" {
					return usagef("ADDRESS and --key exclude each other")
				}
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.ExplainGroup(ctx, req)
				if err != nil {
					return err
				}
				text := res.Text
				if g := growthOf(ctx, c, args[0]); g != nil {
					text += "; the queue grows: " + growthText(g)
				}
				t := newTable("VERDICT", "ADDRESS", "ATTEMPTS", "NOT_BEFORE", "CONSUMER", "LEASE_ENDS", "BLOCKED_BY", "BEHIND", "READY", "IN_FLIGHT", "RETRYING", "BLOCKED",
					"WAITING", "TEXT")
				t.add(res.Verdict, res.Address, res.Attempts, stamp(res.NotBeforeUnixMs), res.LeaseConsumer, stamp(res.LeaseDeadlineUnixMs), res.BlockedBy, res.Behind,
					res.Ready, res.InFlight, res.Retrying, res.BlockedMessages, res.WaitingReceives, text)
				return a.printOne(t)
			})
		},
	}
	c.Flags().StringVar(&key, "key", "", "explain the first unfinished message of this ordering key")
	in.add(c, "all; an address needs it when there are several")
	return c
}

func parseAddress(s string) (uint64, error) {
	n, err := strconv.ParseUint(s, 10, 48)
	if err != nil || n == 0 {
		return 0, usagef("address %q: it is a number from 1", s)
	}
	return n, nil
}

func groupPause(a *app) *cobra.Command {
	return groupSwitch(a, "pause", "hand out nothing to a group; acks and leases go on", (*client.Client).PauseGroup)
}

func groupResume(a *app) *cobra.Command {
	return groupSwitch(a, "resume", "hand out to a group again", (*client.Client).ResumeGroup)
}

func groupSwitch(a *app, use, short string, do func(*client.Client, context.Context, string, string) (*tierqv1.Group, error)) *cobra.Command {
	return &cobra.Command{
		Use:   use + " QUEUE GROUP",
		Short: short,
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				g, err := do(c, ctx, args[0], args[1])
				if err != nil {
					return err
				}
				t := newTable("GROUP", "PAUSED", "CONFIG_VERSION")
				t.add(g.Name, g.Config.GetPaused(), g.ConfigVersion)
				return a.printOne(t)
			})
		},
	}
}

func groupLag(a *app) *cobra.Command {
	var split bool
	c := &cobra.Command{
		Use:   "lag QUEUE",
		Short: "show how far behind each group is",
		Long: "Show what each group has not finished, and how long the oldest message that could have been finished has waited.\n" +
			"IN_FLIGHT and WAITING are 0 for a group whose home does not answer within a second.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				gs, err := c.ListGroups(ctx, args[0])
				if err != nil {
					return err
				}
				t := newTable("GROUP", "UNFINISHED", "IN_FLIGHT", "RETRYING", "DEAD", "WAITING", "OLDEST_ADDRESS", "OLDEST_AGE_MS", "PAUSED", "EXPORTS", "PARKED")
				for _, g := range byPartition(t, gs, split) {
					t.rows = append(t.rows, withPartition(g, split, g.Name, g.Unfinished, g.InFlight, g.Retrying, g.Dead, g.WaitingReceives, g.OldestAddress, g.OldestAgeMs, g.Config.GetPaused(), g.Exports, g.GetParked().GetName()))
				}
				return a.print(t)
			})
		},
	}
	splitFlag(c, &split)
	return c
}

func groupConfigure(a *app) *cobra.Command {
	var (
		given                   tierqv1.GroupConfig
		lease, backoff, longest time.Duration
		record                  time.Duration
		factor                  float64
		jitter                  uint32
		delays                  []time.Duration
	)
	c := &cobra.Command{
		Use:   "configure QUEUE GROUP",
		Short: "change a group's policy; without flags, show it",
		Long: "Change what the given flags name, and show all. It holds for leases and failures from then on; receipts stay good. The\n" +
			"change is refused when somebody else has made one meanwhile.",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkNames(args[0], args[1]); err != nil {
				return err
			}
			if lease < 0 || lease > 12*time.Hour || backoff < 0 || longest < 0 || factor < 0 || factor > 100 || jitter > 100 || record < 0 || record > 12*time.Hour {
				return usagef("--lease and --record-after are 0 to 12h, --backoff and --backoff-cap not below 0, --backoff-factor 1 to 100, --jitter 0 to 100")
			}
			var delaysMs []uint64
			for _, d := range delays {
				if d < 0 {
					return usagef("--delays %s: none is below 0", d)
				}
				delaysMs = append(delaysMs, uint64(d.Milliseconds()))
			}
			change := func(c *tierqv1.GroupConfig) {
				whenGiven(cmd, "lease", &c.LeaseMs, uint64(lease.Milliseconds()))
				whenGiven(cmd, "max-attempts", &c.MaxAttempts, given.MaxAttempts)
				whenGiven(cmd, "backoff", &c.BackoffBaseMs, uint64(backoff.Milliseconds()))
				whenGiven(cmd, "backoff-factor", &c.BackoffFactorPermille, uint32(factor*1000))
				whenGiven(cmd, "backoff-cap", &c.BackoffCapMs, uint64(longest.Milliseconds()))
				whenGiven(cmd, "jitter", &c.JitterPermille, jitter*10)
				whenGiven(cmd, "delays", &c.DelaysMs, delaysMs)
				whenGiven(cmd, "max-in-flight", &c.MaxInFlight, given.MaxInFlight)
				whenGiven(cmd, "max-in-flight-per-consumer", &c.MaxInFlightPerConsumer, given.MaxInFlightPerConsumer)
				whenGiven(cmd, "single-active-consumer", &c.SingleActiveConsumer, given.SingleActiveConsumer)
				whenGiven(cmd, "record-after", &c.RecordAfterMs, uint64(record.Milliseconds()))
				whenGiven(cmd, "dead-letter-queue", &c.DeadLetterQueue, given.DeadLetterQueue)
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				g, err := findGroup(ctx, c, args[0], args[1])
				if err != nil {
					return err
				}
				want := proto.CloneOf(g.Config)
				change(want)
				if !proto.Equal(want, g.Config) {
					if g, err = c.ConfigureGroup(ctx, args[0], args[1], want, g.ConfigVersion); err != nil {
						return err
					}
				}
				return a.printOne(policyTable(g))
			})
		},
	}
	f := c.Flags()
	f.DurationVar(&lease, "lease", 0, "how long a received message stays hidden")
	f.Uint32Var(&given.MaxAttempts, "max-attempts", 0, "failures before a dead letter")
	f.DurationVar(&backoff, "backoff", 0, "pause after the first failure")
	f.Float64Var(&factor, "backoff-factor", 0, "how much longer each further pause is")
	f.DurationVar(&longest, "backoff-cap", 0, "longest pause")
	f.Uint32Var(&jitter, "jitter", 0, "up to so many percent on top of a pause; 0 is the default")
	f.DurationSliceVar(&delays, "delays", nil, "pauses after the first, second, … failure in place of the backoff; the last one repeats; none: --delays=")
	f.Uint32Var(&given.MaxInFlight, "max-in-flight", 0, "messages leased at once")
	f.Uint32Var(&given.MaxInFlightPerConsumer, "max-in-flight-per-consumer", 0, "messages leased at once by one named consumer; 0 is no limit of its own")
	f.BoolVar(&given.SingleActiveConsumer, "single-active-consumer", false, "hand out to one consumer at a time")
	f.DurationVar(&record, "record-after", 0, "a lease open so long outlives its home; 0 is the default, 1s")
	f.StringVar(&given.DeadLetterQueue, "dead-letter-queue", "", "queue that dead letters go on to; they stay: --dead-letter-queue=")
	return c
}

// findGroup finds a group by name; "" is the default group.
func findGroup(ctx context.Context, c *client.Client, queue, name string) (*tierqv1.Group, error) {
	gs, err := c.ListGroups(ctx, queue)
	if err != nil {
		return nil, err
	}
	for _, g := range gs {
		if g.Name == name || name == "" && g.Name == "$default" {
			if g.Config == nil {
				g.Config = &tierqv1.GroupConfig{}
			}
			return g, nil
		}
	}
	return nil, code.New(code.UnknownGroup, "group %q does not exist: create it with `tierq group create %s %s`", name, queue, name)
}

func policyTable(g *tierqv1.Group) *table {
	c := g.Config
	var delays []string
	for _, d := range c.GetDelaysMs() {
		delays = append(delays, strconv.FormatUint(d, 10))
	}
	t := newTable("GROUP", "CONFIG_VERSION", "PAUSED", "LEASE_MS", "MAX_ATTEMPTS", "BACKOFF_MS", "BACKOFF_FACTOR", "BACKOFF_CAP_MS", "JITTER_PERMILLE", "DELAYS_MS",
		"MAX_IN_FLIGHT", "MAX_IN_FLIGHT_PER_CONSUMER", "SINGLE_ACTIVE_CONSUMER", "RECORD_AFTER_MS", "DEAD_LETTER_QUEUE")
	t.add(g.Name, g.ConfigVersion, c.GetPaused(), c.GetLeaseMs(), c.GetMaxAttempts(), c.GetBackoffBaseMs(), float64(c.GetBackoffFactorPermille())/1000,
		c.GetBackoffCapMs(), c.GetJitterPermille(), strings.Join(delays, ","), c.GetMaxInFlight(), c.GetMaxInFlightPerConsumer(), c.GetSingleActiveConsumer(),
		c.GetRecordAfterMs(), c.GetDeadLetterQueue())
	return t
}
