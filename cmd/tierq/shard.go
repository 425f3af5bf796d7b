package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func shardCommand(a *app) *cobra.Command {
	return parent("shard", "look at the replicas of a queue's partition, make one anew, and recover from what is left of them", shardDigest(a), shardVerify(a), shardRebuild(a), shardRecover(a))
}

func shardDigest(a *app) *cobra.Command {
	var in partitionFlag
	var wait bool
	c := &cobra.Command{
		Use:   "digest QUEUE",
		Short: "compare the state of the full replicas; exit 4 when they differ at equal index",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withClientFor(cmd.Context(), time.Minute, func(ctx context.Context, c *client.Client) error {
				return a.digests(ctx, c, args[0], in, wait)
			})
		},
	}
	in.add(c, "all, one after the other")
	c.Flags().BoolVar(&wait, "wait", false, "ask again until all replicas answer at one index, within --timeout")
	return c
}

const digestPause = 200 * time.Millisecond

// digests compares one partition, or each.
func (a *app) digests(ctx context.Context, c *client.Client, queue string, in partitionFlag, wait bool) error {
	if in.given != nil {
		return a.digest(ctx, c, queue, *in.given, wait)
	}
	q, err := c.LocateQueue(ctx, queue)
	if err != nil {
		return err
	}
	for _, p := range q.Partitions {
		err = errors.Join(err, a.digest(ctx, c, queue, p.Number, wait))
	}
	return err
}

func (a *app) digest(ctx context.Context, c *client.Client, queue string, partition uint32, wait bool) error {
	var res *tierqv1.ShardDigestResponse
	for {
		now, err := c.ShardDigest(ctx, queue, partition)
		switch {
		case err == nil:
			res = now
		case res == nil || ctx.Err() == nil:
			return err
		} // else the time has run out: what was seen last is told
		equal, comparable, detail := compareDigests(res.Replicas)
		if !comparable && wait {
			select {
			case <-time.After(digestPause):
				continue
			case <-ctx.Done():
			}
		}
		t := newTable("SHARD", "REPLICA", "HOST", "APPLIED_INDEX", "DIGEST", "ERROR")
		for _, r := range res.Replicas {
			t.add(res.Shard, r.ReplicaId, r.Host, r.AppliedIndex, r.Digest, r.Error)
		}
		if err := a.print(t); err != nil {
			return err
		}
		switch {
		case !equal:
			return &checkError{"the replicas differ: " + detail + ": tierq shard verify may say which of them is wrong; RB-2 of the runbook says what to do"}
		case !comparable && wait:
			return &checkError{"not comparable: " + detail + ": pause the traffic, or bring the missing replica back"}
		case !comparable:
			fmt.Fprintln(a.err, "not comparable: "+detail+": run it again with --wait while nothing is published")
		}
		return nil
	}
}

// compareDigests looks for two replicas with different digests at one index. comparable says that all of them answered
// at one.
func compareDigests(rs []*tierqv1.ReplicaDigest) (equal, comparable bool, detail string) {
	at := map[uint64]*tierqv1.ReplicaDigest{}
	answered := 0
	for _, r := range rs {
		if r.Error != "" || r.Digest == "" {
			detail = fmt.Sprintf("host %d did not answer", r.Host)
			continue
		}
		answered++
		if other := at[r.AppliedIndex]; other != nil && other.Digest != r.Digest {
			return false, true, fmt.Sprintf("hosts %d and %d at index %d", other.Host, r.Host, r.AppliedIndex)
		}
		at[r.AppliedIndex] = r
	}
	if answered == len(rs) && len(at) > 1 {
		detail = "the replicas answered at different indexes"
	}
	return true, answered == len(rs) && len(at) == 1, detail
}
