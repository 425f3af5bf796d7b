package main

import (
	"context"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

func leaderCommand(a *app) *cobra.Command {
	return parent("leader", "show who leads a queue", leaderGet(a))
}

func leaderGet(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "get QUEUE",
		Short: "show the leader's host and term (leader_epoch), and how healthy the quorum is; exit 4 without a leader",
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
				if err := a.askLeaders(ctx, q); err != nil {
					return err
				}
				t := newTable("LEADER_ID", "LEADER_EPOCH", "QUORUM_STATE", "DATA_COPIES", "PARTITION", "SHARD", "LEADER_API")
				led := len(q.Partitions) > 0
				for _, p := range q.Partitions {
					t.add(p.LeaderHost, p.LeaderEpoch, quorumName(p.QuorumState), p.DataCopies, p.Number, p.Shard, p.LeaderApi)
					led = led && p.LeaderHost != 0
				}
				if err := a.print(t); err != nil {
					return err
				}
				if !led {
					return code.New(code.NoLeader, "")
				}
				return nil
			})
		},
	}
}

// askLeaders completes what only a partition's leader knows: how many full replicas are in sync. A leader that does not answer
// leaves it at 0.
func (a *app) askLeaders(ctx context.Context, q *tierqv1.Queue) error {
	asked := map[string]*tierqv1.Queue{}
	for i, p := range q.Partitions {
		if p.DataCopies != 0 || p.LeaderApi == "" {
			continue
		}
		if _, ok := asked[p.LeaderApi]; !ok {
			o, err := a.options()
			if err != nil {
				return err
			}
			o.Addrs, o.FailFast, o.RefreshEvery = []string{p.LeaderApi}, true, -1
			_ = withOptions(ctx, o, func(ctx context.Context, c *client.Client) (err error) {
				asked[p.LeaderApi], err = c.DescribeQueue(ctx, q.Name)
				return err
			})
		}
		if at := asked[p.LeaderApi]; at != nil && i < len(at.Partitions) && at.Partitions[i].DataCopies != 0 {
			q.Partitions[i] = at.Partitions[i]
		}
	}
	return nil
}
