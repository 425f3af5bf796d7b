package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

func queueGrow(a *app) *cobra.Command {
	var (
		partitions     uint32
		cancel, noWait bool
	)
	c := &cobra.Command{
		Use:   "grow QUEUE",
		Short: "give a queue without key order more partitions, and wait for them",
		Long: "Give a queue more partitions while it is used. They are made, with every group in each, and then opened all at once; nothing is\n" +
			"moved. It goes on when this command ends, or the host that does it: the same again waits for it. What is not open yet is taken\n" +
			"back by --cancel. Dedup ids hold on either side of a growth, not over it.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if cancel == cmd.Flags().Changed("partitions") {
				return usagef("say --partitions N, or --cancel")
			}
			if !cancel && partitions == 0 {
				return usagef("--partitions begins at 1")
			}
			return a.withClientFor(cmd.Context(), time.Minute, func(ctx context.Context, c *client.Client) error {
				var q *tierqv1.Queue
				var err error
				if cancel {
					q, err = c.CancelGrowth(ctx, args[0])
				} else if q, err = c.GrowQueue(ctx, args[0], partitions); err == nil && !noWait {
					q, err = a.awaitGrowth(ctx, c, q, partitions)
				}
				if err != nil {
					return err
				}
				return a.printOne(grownTable(q))
			})
		},
	}
	c.Flags().Uint32Var(&partitions, "partitions", 0, "partitions that there shall be in all, at most 64")
	c.Flags().BoolVar(&cancel, "cancel", false, "take back the partitions that are not open yet")
	c.Flags().BoolVar(&noWait, "no-wait", false, "begin it and return")
	return c
}

const (
	// growthLook is how often a growth is looked at.
	growthLook = 100 * time.Millisecond
	// growthGone is for how long no growth is seen before it is taken for cancelled: a host may not have heard of it yet.
	growthGone = 3 * time.Second
)

// awaitGrowth waits until a queue has its partitions, or the command's time is over: the growth goes on then.
func (a *app) awaitGrowth(ctx context.Context, c *client.Client, q *tierqv1.Queue, partitions uint32) (*tierqv1.Queue, error) {
	seen := time.Now()
	for len(q.GetPartitions()) < int(partitions) {
		if q.GetGrowingTo() != 0 {
			seen = time.Now()
		} else if time.Since(seen) > growthGone {
			return nil, code.New(code.MutationFenced, "the growth of queue %q was cancelled", q.GetName())
		}
		select {
		case <-ctx.Done():
			return nil, code.Maybe(code.DeadlineExceeded, ctx.Err(), "queue %q has %d partitions and goes on growing to %d: the same command waits for it, --cancel ends it; `tierq queue describe %s` tells what it waits for", q.GetName(), len(q.GetPartitions()), partitions, q.GetName())
		case <-time.After(growthLook):
		}
		list, err := c.ListQueues(ctx, q.GetName())
		if err != nil {
			if ctx.Err() != nil {
				continue
			}
			return nil, err
		}
		found := false
		for _, have := range list {
			if have.GetName() == q.GetName() && have.GetId() == q.GetId() {
				q, found = have, true
			}
		}
		if !found {
			return nil, code.New(code.UnknownQueue, "queue %q was deleted meanwhile", q.GetName())
		}
	}
	return q, nil
}

func grownTable(q *tierqv1.Queue) *table {
	t := newTable("QUEUE", "RESULT", "PARTITIONS", "GROWING_TO")
	result, to := "has them", "-"
	if n := q.GetGrowingTo(); n != 0 {
		result, to = "growing", fmt.Sprint(n)
	}
	t.add(q.GetName(), result, len(q.GetPartitions()), to)
	return t
}

// growthOf is how far a queue's growth is; nil: it does not grow, or nobody can tell.
func growthOf(ctx context.Context, c *client.Client, queue string) *tierqv1.Growth {
	gs, err := c.Growths(ctx, queue)
	if err != nil || len(gs) == 0 {
		return nil
	}
	return gs[0]
}

func growthTable(g *tierqv1.Growth) *table {
	t := newTable("FROM", "TO", "PHASE", "SINCE", "HOST", "PARTITION", "SHARD", "WAITS_FOR")
	host, part, shard, waits := any("-"), any("-"), any("-"), g.GetWaits()
	if g.GetHost() != 0 {
		host = g.GetHost()
	}
	if g.GetShard() != 0 {
		part, shard = g.GetPartition(), g.GetShard()
	}
	if waits == "" {
		waits = "-"
	}
	t.add(g.GetFrom(), g.GetTo(), g.GetPhase(), stamp(g.GetBeganUnixMs()), host, part, shard, waits)
	return t
}

// growthStands is how long a growth may be under way before the doctor doubts it: it takes seconds.
const growthStands = time.Minute

func (d *doctor) examineGrowths(name string, gs []*tierqv1.Growth) {
	if len(gs) == 0 {
		d.check("growth", name, true, resultWarn, "")
	}
	for _, g := range gs {
		stands := time.Duration(g.GetForMs())*time.Millisecond >= growthStands
		d.check("growth", name, !stands, resultWarn, "%s", growthText(g))
	}
}

// growthText is a growth as a sentence.
func growthText(g *tierqv1.Growth) string {
	text := fmt.Sprintf("it grows from %d to %d partitions and is at %s", g.GetFrom(), g.GetTo(), g.GetPhase())
	if ms := g.GetForMs(); ms > 0 {
		text += fmt.Sprintf(", for %v", (time.Duration(ms) * time.Millisecond).Round(time.Second))
	}
	if g.GetWaits() != "" {
		text += ": " + g.GetWaits()
	}
	if g.GetPhase() != "last-look" {
		text += fmt.Sprintf(" (`tierq queue grow %s --cancel` takes it back)", g.GetQueue())
	}
	return text
}
