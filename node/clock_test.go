package node

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// TestClockJumps: the clock of a group's home jumps far ahead, then far back. The host stops to serve, another one becomes home, and nothing
// comes early: no delayed message, and none that a consumer holds. When an operator accepts it, or it is right again, the host is back.
func TestClockJumps(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	ahead := make(map[uint64]*atomic.Int64)
	d := openDevWith(t, t.TempDir(), func(h HostConfig, c *Config) {
		by := new(atomic.Int64)
		ahead[h.ID] = by
		c.wall = func() time.Time { return time.Now().Add(time.Duration(by.Load())) }
	})
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()

	f := &adminFleet{t: t, d: d, ctx: ctx}
	f.create("q", queue.QueueOptions{})
	publish := func(body string, delay time.Duration) {
		t.Helper()
		_, err := publishAnywhere(ctx, d, api.Publish{Queue: "q", Delays: []time.Duration{delay}, Publish: queue.Publish{Messages: []queue.Message{{Body: []byte(body)}}}})
		require.NoError(t, err)
	}
	publish("held", 0)
	publish("delayed", time.Hour)
	var leader uint64
	require.Eventually(t, func() bool {
		info, err := d.Nodes[0].LocateQueue(ctx, "q")
		leader = info.Partitions[0].LeaderHost
		return err == nil && leader != 0
	}, 30*time.Second, 10*time.Millisecond)
	jumps, other := d.Nodes[2-leader], d.Nodes[leader-1] // of the two full hosts the one that does not lead, and the leader
	must(f, func(n *Node) (api.GroupInfo, error) {
		return n.CreateGroup(ctx, api.CreateGroup{Queue: "q", Name: "g", HomeHost: jumps.id})
	})
	receive := func(n *Node, wait time.Duration) ([]api.Delivery, error) {
		lease := 10 * time.Minute
		ds, _, err := n.Receive(ctx, api.Receive{Queue: "q", Group: "g", Max: 10, MaxBytes: 1 << 20, Wait: wait, Lease: &lease})
		return ds, err
	}
	var held []api.Delivery
	require.Eventually(t, func() bool {
		ds, err := receive(jumps, time.Second)
		held = append(held, ds...)
		return err == nil && len(held) > 0
	}, 30*time.Second, 10*time.Millisecond)
	require.Len(t, held, 1)
	require.Equal(t, "held", string(held[0].Message.Body))
	// A lease that is not recorded yet ends with its home's process, not with its clock; an extend records it.
	require.Eventually(t, func() bool {
		lease := 10 * time.Minute
		res, err := jumps.Settle(ctx, api.Settle{Kind: api.SettleExtend, Queue: "q", Group: "g", Receipts: []string{held[0].Receipt}, Lease: lease})
		return err == nil && res[0].Err == nil
	}, 30*time.Second, 50*time.Millisecond)

	for _, jump := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		by := ahead[jumps.id]
		by.Store(int64(jump))
		var seen api.ClockState
		require.Eventually(t, func() bool {
			var err error
			seen, err = jumps.AcceptClock(ctx, jumps.id, true)
			return err == nil && seen.Refused && seen.Asked == 2 // of one other host and this one, the median is either's
		}, 30*time.Second, 10*time.Millisecond, "by %v", jump)
		require.InDelta(t, -jump.Seconds(), seen.Offset.Seconds(), 30)
		require.Eventually(t, func() bool { // when its home lease is over
			ds, err := receive(jumps, 0)
			require.Empty(t, ds)
			var c *code.Error
			return errors.As(err, &c) && (c.Code == code.ClockSkew || c.Code == code.NotOwner)
		}, 30*time.Second, 20*time.Millisecond)
		// Another host takes over, and waits for the old home's lease.
		require.Eventually(t, func() bool {
			ds, err := receive(other, 100*time.Millisecond)
			require.Empty(t, ds, "a clock that is %v ahead made it early", jump)
			return err == nil
		}, 40*time.Second, 50*time.Millisecond)
		require.True(t, clockRow(t, ctx, other, jumps.id).ClockRefused)

		if jump < 0 {
			_, err := jumps.AcceptClock(ctx, jumps.id, false)
			require.NoError(t, err)
		} else {
			by.Store(0)
		}
		require.Eventually(t, func() bool { return !clockRow(t, ctx, other, jumps.id).ClockRefused }, 30*time.Second, 20*time.Millisecond)
		if jump > 0 {
			must(f, func(n *Node) (api.GroupInfo, error) { return n.MoveGroup(ctx, "q", nil, "g", jumps.id) })
		}
	}
	res, err := other.Settle(ctx, api.Settle{Kind: api.SettleAck, Queue: "q", Group: "g", Receipts: []string{held[0].Receipt}})
	require.NoError(t, err)
	require.NoError(t, res[0].Err, "the lease has outlived it all")

	// The leader's clock jumps: leadership leaves its host, and publishes go on.
	leads := d.Nodes[0]
	require.Eventually(t, func() bool {
		info, err := d.Nodes[0].LocateQueue(ctx, "q")
		if err == nil && info.Partitions[0].LeaderHost == d.Nodes[1].id {
			leads = d.Nodes[1]
		}
		return err == nil && info.Partitions[0].LeaderHost == leads.id
	}, 30*time.Second, 10*time.Millisecond)
	ahead[leads.id].Store(int64(3 * time.Hour))
	shard := must(f, func(n *Node) (api.QueueInfo, error) { return n.LocateQueue(ctx, "q") }).Partitions[0].Shard
	require.Eventually(t, func() bool {
		_, at, _, ok := leads.raft.Leader(shard)
		return ok && at != leads.id
	}, 60*time.Second, 20*time.Millisecond, "leadership leaves the host whose clock is refused")
	require.Eventually(t, func() bool {
		_, err := publishAnywhere(ctx, d, api.Publish{Queue: "q", Publish: queue.Publish{Messages: []queue.Message{{Body: []byte("after")}}}})
		return err == nil
	}, 30*time.Second, 20*time.Millisecond)
}

// clockRow is what a host says of the clock of another.
func clockRow(t *testing.T, ctx context.Context, n *Node, id uint64) api.HostDetail {
	t.Helper()
	l, err := n.ListHosts(ctx)
	require.NoError(t, err)
	for _, h := range l.Hosts {
		if h.ID == id {
			return h
		}
	}
	t.Fatalf("host %d is not listed", id)
	return api.HostDetail{}
}
