package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func queueCommand(a *app) *cobra.Command {
	return parent("queue", "create, list, describe, configure, grow, pause, purge and delete queues",
		queueCreate(a), queueList(a), queueDescribe(a), queueDelete(a), queueConfigure(a), queueGrow(a), queuePause(a), queueResume(a), queuePurge(a))
}

func queueCreate(a *app) *cobra.Command {
	var (
		req                            tierqv1.CreateQueueRequest
		opts                           tierqv1.QueueOptions
		ordering, overflow, durability string
		ttl, maxDelay                  time.Duration
		keep                           keepFlags
	)
	c := &cobra.Command{
		Use:   "create NAME",
		Short: "create a queue; the same create again is answered `existed`",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if err := queueChoices(&opts, ordering, overflow, durability); err != nil {
				return err
			}
			if ttl < 0 || maxDelay < 0 {
				return usagef("--ttl and --max-delay cannot be below zero")
			}
			if err := keep.apply(cmd, &opts); err != nil {
				return err
			}
			opts.TtlMs, opts.MaxDelayMs = uint64(ttl.Milliseconds()), uint64(maxDelay.Milliseconds())
			req.Name, req.Options = args[0], &opts
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.CreateQueue(ctx, &req)
				if err != nil {
					return err
				}
				return a.printOne(createdTable(res))
			})
		},
	}
	f := c.Flags()
	f.Uint32Var(&req.Partitions, "partitions", 0, "partitions, 1 to 64: each has its own leader, order holds within each (default 1)")
	f.Uint32Var(&req.Replicas, "replicas", 0, "full replicas: 2 with one witness, 3, or 5 (default: what the fleet can hold)")
	f.Uint32Var(&req.Witnesses, "witnesses", 0, "witness replicas")
	f.StringVar(&ordering, "ordering", "none", "none, or key: one message of a key at a time, in order")
	f.StringVar(&overflow, "overflow", "reject", "what a full queue does: reject, or drop-oldest")
	f.StringVar(&durability, "durability", "available", "without a second copy: available answers with one, strict refuses")
	f.BoolVar(&opts.StrictSequence, "strict-sequence", false, "demand contiguous seqs of every producer")
	f.Uint32Var(&opts.MaxBodyBytes, "max-body-bytes", 0, "largest body (default 1 MiB)")
	f.Uint64Var(&opts.MaxBytes, "max-bytes", 0, "limit of the whole queue (default 16 GiB)")
	f.Uint64Var(&opts.MaxMessages, "max-messages", 0, "limit of the whole queue (default none)")
	f.DurationVar(&ttl, "ttl", 0, "time to live of messages (default none)")
	f.DurationVar(&maxDelay, "max-delay", 0, "longest delay of a message (default 720h)")
	keep.add(c)
	return c
}

func queueChoices(o *tierqv1.QueueOptions, ordering, overflow, durability string) error {
	switch ordering {
	case "none":
	case "key":
		o.Ordering = tierqv1.Ordering_ORDERING_KEY
	default:
		return usagef("--ordering %q: it is none or key", ordering)
	}
	switch overflow {
	case "reject":
	case "drop-oldest":
		o.Overflow = tierqv1.Overflow_OVERFLOW_DROP_OLDEST
	default:
		return usagef("--overflow %q: it is reject or drop-oldest", overflow)
	}
	switch durability {
	case "available":
	case "strict":
		o.Durability = tierqv1.Durability_DURABILITY_STRICT
	default:
		return usagef("--durability %q: it is available or strict", durability)
	}
	return nil
}

func createdTable(res *tierqv1.CreateQueueResponse) *table {
	t := newTable("QUEUE", "RESULT", "ID", "SHARD", "LEADER", "PARTITIONS")
	result := "existed"
	if res.Created {
		result = "created"
	}
	p := firstPartition(res.Queue)
	t.add(res.Queue.GetName(), result, res.Queue.GetId(), p.GetShard(), p.GetLeaderHost(), len(res.Queue.GetPartitions()))
	return t
}

func firstPartition(q *tierqv1.Queue) *tierqv1.Partition {
	if ps := q.GetPartitions(); len(ps) > 0 {
		return ps[0]
	}
	return nil
}

func queueList(a *app) *cobra.Command {
	var prefix string
	c := &cobra.Command{
		Use:   "list",
		Short: "list queues",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				qs, err := c.ListQueues(ctx, prefix)
				if err != nil {
					return err
				}
				t := newTable("QUEUE", "ID", "PARTITIONS", "ORDERING", "DURABILITY", "SHARD", "LEADER", "QUORUM")
				for _, q := range qs {
					p := firstPartition(q)
					t.add(q.Name, q.Id, len(q.Partitions), orderingName(q.Options), durabilityName(q.Options), p.GetShard(), p.GetLeaderHost(), quorumName(p.GetQuorumState()))
				}
				return a.print(t)
			})
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "only queues whose names begin so")
	return c
}

func orderingName(o *tierqv1.QueueOptions) string {
	if o.GetOrdering() == tierqv1.Ordering_ORDERING_KEY {
		return "key"
	}
	return "none"
}

func durabilityName(o *tierqv1.QueueOptions) string {
	if o.GetDurability() == tierqv1.Durability_DURABILITY_STRICT {
		return "strict"
	}
	return "available"
}

var quorumNames = []string{"healthy", "soft", "read-only", "electing", "quarantined"}

func quorumName(n uint32) string {
	if int(n) < len(quorumNames) {
		return quorumNames[n]
	}
	return fmt.Sprintf("unknown(%d)", n)
}

func queueDescribe(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "describe NAME",
		Short: "show a queue with its partitions and groups",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				q, err := c.DescribeQueue(ctx, args[0])
				if err != nil {
					return err
				}
				return a.printQueue(q, growthOf(ctx, c, args[0]))
			})
		},
	}
}

// printQueue writes three tables, and one of the queue's growth if it grows; as JSON one object whose partitions and groups are arrays.
func (a *app) printQueue(q *tierqv1.Queue, g *tierqv1.Growth) error {
	head := newTable("QUEUE", "ID", "MESSAGES", "BYTES", "DELAYED", "LAST_ADDRESS", "ORDERING", "DURABILITY")
	row := []any{q.Name, q.Id, q.Messages, q.Bytes, q.Delayed, q.LastAddress, orderingName(q.Options), durabilityName(q.Options)}
	if q.GetGrowingTo() != 0 {
		head.columns = append(head.columns, "GROWING_TO")
		row = append(row, q.GetGrowingTo())
	}
	parts := newTable("PARTITION", "SHARD", "REPLICA", "HOST", "ROLE", "LEADER", "API")
	for _, p := range q.Partitions {
		for _, r := range p.Replicas {
			parts.add(p.Number, p.Shard, r.ReplicaId, r.Host, r.Role, r.Host == p.LeaderHost, r.Api)
		}
	}
	groups := groupTable(q.Groups)
	if a.json {
		pj, err := parts.array()
		if err != nil {
			return err
		}
		gj, err := groups.array()
		if err != nil {
			return err
		}
		head.columns = append(head.columns, "REPLICAS", "GROUPS")
		row = append(row, pj, gj)
		if g != nil {
			grows, err := growthTable(g).array()
			if err != nil {
				return err
			}
			head.columns = append(head.columns, "GROWTH")
			row = append(row, grows)
		}
		head.add(row...)
		return a.printOne(head)
	}
	head.add(row...)
	tables := []*table{head, parts, groups}
	if g != nil {
		tables = append(tables, growthTable(g))
	}
	for i, t := range tables {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := t.writeText(a.out); err != nil {
			return err
		}
	}
	return nil
}

func queueDelete(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "delete NAME",
		Short: "delete a queue with all its messages and groups",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if err := c.DeleteQueue(ctx, args[0]); err != nil {
					return err
				}
				t := newTable("QUEUE", "RESULT")
				t.add(args[0], "deleted")
				return a.printOne(t)
			})
		},
	}
}
