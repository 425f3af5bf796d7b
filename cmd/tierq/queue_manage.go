package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

func queuePurge(a *app) *cobra.Command {
	var req tierqv1.PurgeQueueRequest
	var in partitionFlag
	c := &cobra.Command{
		Use:   "purge QUEUE",
		Short: "remove all messages, or those up to an address, for every group",
		Long: "Remove messages whatever groups do with them: leased, delayed and dead ones too. A consumer that holds one finds its\n" +
			"ack without effect. Messages that are published meanwhile stay.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if req.All == (req.ToAddress > 0) {
				return usagef("say --all, or --to ADDRESS")
			}
			req.Queue, req.Partition = args[0], in.given
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.PurgeQueue(ctx, &req)
				if err != nil {
					return err
				}
				t := newTable("QUEUE", "PURGED", "PURGED_TO")
				t.add(args[0], res.Purged, res.PurgedTo)
				return a.printOne(t)
			})
		},
	}
	c.Flags().BoolVar(&req.All, "all", false, "all that is there now")
	c.Flags().Uint64Var(&req.ToAddress, "to", 0, "everything up to this address")
	in.add(c, "all; --to needs it when there are several")
	return c
}

func queuePause(a *app) *cobra.Command {
	return queueSwitch(a, "pause", "hand out nothing from a queue; publishing, acks and leases go on", (*client.Client).PauseQueue)
}

func queueResume(a *app) *cobra.Command {
	return queueSwitch(a, "resume", "hand out from a queue again", (*client.Client).ResumeQueue)
}

func queueSwitch(a *app, use, short string, do func(*client.Client, context.Context, string) (*tierqv1.Queue, error)) *cobra.Command {
	return &cobra.Command{
		Use:   use + " QUEUE",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				q, err := do(c, ctx, args[0])
				if err != nil {
					return err
				}
				t := newTable("QUEUE", "PAUSED", "VERSION")
				t.add(q.Name, q.Options.GetPaused(), q.Options.GetVersion())
				return a.printOne(t)
			})
		},
	}
}

// keepFlags are the options of what a queue keeps, for create and configure.
type keepFlags struct {
	mode            string
	retain, dedup   time.Duration
	bytes, messages uint64
}

func (k *keepFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&k.mode, "mode", "work", "work: a message goes when every group has finished it; log: messages are kept for replay")
	f.DurationVar(&k.retain, "retain-age", 0, "log mode: keep messages for so long (default: no limit of age)")
	f.Uint64Var(&k.bytes, "retain-bytes", 0, "log mode: keep about so many bytes (default: no limit)")
	f.Uint64Var(&k.messages, "retain-messages", 0, "log mode: keep about so many messages (default: no limit)")
	f.DurationVar(&k.dedup, "dedup-window", 0, "how long dedup ids are remembered (default 5m)")
}

// apply sets the options whose flags were given.
func (k *keepFlags) apply(c *cobra.Command, o *tierqv1.QueueOptions) error {
	if k.retain < 0 || k.dedup < 0 {
		return usagef("--retain-age and --dedup-window cannot be below zero")
	}
	switch k.mode {
	case "work":
		whenGiven(c, "mode", &o.Mode, tierqv1.QueueMode_QUEUE_MODE_WORK)
	case "log":
		o.Mode = tierqv1.QueueMode_QUEUE_MODE_LOG
	default:
		return usagef("--mode %q: it is work or log", k.mode)
	}
	whenGiven(c, "retain-age", &o.RetainMs, uint64(k.retain.Milliseconds()))
	whenGiven(c, "retain-bytes", &o.RetainBytes, k.bytes)
	whenGiven(c, "retain-messages", &o.RetainMessages, k.messages)
	whenGiven(c, "dedup-window", &o.DedupMs, uint64(k.dedup.Milliseconds()))
	return nil
}

// whenGiven sets a field to its flag's value if the flag was given.
func whenGiven[T any](c *cobra.Command, flag string, field *T, value T) {
	if c.Flags().Changed(flag) {
		*field = value
	}
}

func queueConfigure(a *app) *cobra.Command {
	var (
		keep                 keepFlags
		given                tierqv1.QueueOptions
		overflow, durability string
		ttl, maxDelay        time.Duration
		partitions           uint32
	)
	c := &cobra.Command{
		Use:   "configure QUEUE",
		Short: "change options of a queue; without flags, show them",
		Long:  "Change the options whose flags are given, and show all. The change is refused when somebody else has made one meanwhile.",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if err := queueChoices(&given, "none", overflow, durability); err != nil {
				return err
			}
			if ttl < 0 || maxDelay < 0 {
				return usagef("--ttl and --max-delay cannot be below zero")
			}
			change := func(o *tierqv1.QueueOptions) error {
				whenGiven(cmd, "overflow", &o.Overflow, given.Overflow)
				whenGiven(cmd, "durability", &o.Durability, given.Durability)
				whenGiven(cmd, "strict-sequence", &o.StrictSequence, given.StrictSequence)
				whenGiven(cmd, "max-body-bytes", &o.MaxBodyBytes, given.MaxBodyBytes)
				whenGiven(cmd, "max-bytes", &o.MaxBytes, given.MaxBytes)
				whenGiven(cmd, "max-messages", &o.MaxMessages, given.MaxMessages)
				whenGiven(cmd, "ttl", &o.TtlMs, uint64(ttl.Milliseconds()))
				whenGiven(cmd, "max-delay", &o.MaxDelayMs, uint64(maxDelay.Milliseconds()))
				return keep.apply(cmd, o)
			}
			if err := change(&tierqv1.QueueOptions{}); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				q, err := c.DescribeQueue(ctx, args[0])
				if err != nil {
					return err
				}
				if n := len(q.Partitions); cmd.Flags().Changed("partitions") && int(partitions) != n {
					return code.New(code.InvalidArgument, "queue %q has %d partitions: `tierq queue grow %s --partitions %d` gives a queue without key order more; with key order, create another queue with %d, and move producers, then consumers over", args[0], n, args[0], partitions, partitions)
				}
				want := proto.CloneOf(q.Options)
				_ = change(want) // looked at above
				if !proto.Equal(want, q.Options) {
					if q, err = c.ConfigureQueue(ctx, args[0], want); err != nil {
						return err
					}
				}
				return a.printOne(optionsTable(q))
			})
		},
	}
	f := c.Flags()
	f.Uint32Var(&partitions, "partitions", 0, "refused unless it is what the queue has: see tierq queue grow")
	f.StringVar(&overflow, "overflow", "reject", "what a full queue does: reject, or drop-oldest")
	f.StringVar(&durability, "durability", "available", "without a second copy: available answers with one, strict refuses")
	f.BoolVar(&given.StrictSequence, "strict-sequence", false, "demand contiguous seqs of every producer")
	f.Uint32Var(&given.MaxBodyBytes, "max-body-bytes", 0, "largest body; 0 is the default")
	f.Uint64Var(&given.MaxBytes, "max-bytes", 0, "limit of the whole queue; 0 is the default")
	f.Uint64Var(&given.MaxMessages, "max-messages", 0, "limit of the whole queue; 0 is none")
	f.DurationVar(&ttl, "ttl", 0, "time to live of messages; 0 is none")
	f.DurationVar(&maxDelay, "max-delay", 0, "longest delay of a message; 0 is the default")
	keep.add(c)
	return c
}

func optionsTable(q *tierqv1.Queue) *table {
	o := q.Options
	mode, overflow := "work", "reject"
	if o.GetMode() == tierqv1.QueueMode_QUEUE_MODE_LOG {
		mode = "log"
	}
	if o.GetOverflow() == tierqv1.Overflow_OVERFLOW_DROP_OLDEST {
		overflow = "drop-oldest"
	}
	t := newTable("QUEUE", "VERSION", "PAUSED", "MODE", "ORDERING", "OVERFLOW", "DURABILITY", "MAX_BODY_BYTES", "MAX_BYTES", "MAX_MESSAGES", "TTL_MS",
		"MAX_DELAY_MS", "RETAIN_MS", "RETAIN_BYTES", "RETAIN_MESSAGES", "DEDUP_MS", "STRICT_SEQUENCE")
	t.add(q.Name, o.GetVersion(), o.GetPaused(), mode, orderingName(o), overflow, durabilityName(o), o.GetMaxBodyBytes(), o.GetMaxBytes(), o.GetMaxMessages(),
		o.GetTtlMs(), o.GetMaxDelayMs(), o.GetRetainMs(), o.GetRetainBytes(), o.GetRetainMessages(), o.GetDedupMs(), o.GetStrictSequence())
	return t
}
