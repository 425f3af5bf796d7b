package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// A queue of one partition grows to four while it is published into and groups are made and deleted: every message is in every group,
// once. Drivers that stop are in TestGrowWhileDriversStop, and in the model of node/api (TestGroupsWhileGrowing).
func TestGrow(t *testing.T) {
	d, ctx := devFleet(t, 2*time.Minute)
	f := &partitionFleet{T: t, d: d, ctx: ctx}
	f.c = f.client(client.Options{})
	for _, test := range []struct {
		name string
		run  func(*partitionFleet)
	}{
		{"refusals", testGrowRefusals},
		{"under load", testGrowUnderLoad},
		{"cancel", testGrowCancel},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := *f
			f.T = t
			test.run(&f)
		})
	}
}

func testGrowRefusals(f *partitionFleet) {
	f.queue("keyed", 2, &tierqv1.QueueOptions{Ordering: tierqv1.Ordering_ORDERING_KEY})
	_, err := f.c.GrowQueue(f.ctx, "keyed", 4)
	f.refused(err, code.InvalidArgument)
	require.ErrorContains(f, err, "create another queue")
	_, err = f.c.GrowQueue(f.ctx, "keyed", 1)
	f.refused(err, code.InvalidArgument)
	f.queue("plain", 1, nil)
	_, err = f.c.GrowQueue(f.ctx, "plain", 65)
	f.refused(err, code.InvalidArgument)
	_, err = f.c.GrowQueue(f.ctx, "nobody", 2)
	f.refused(err, code.UnknownQueue)
	q, err := f.c.GrowQueue(f.ctx, "plain", 1)
	require.NoError(f, err, "it has them")
	require.Zero(f, q.GrowingTo)
}

// grown waits until a queue has its partitions and nothing is left to do.
func (f *partitionFleet) grown(name string, partitions int) {
	f.Helper()
	require.Eventually(f, func() bool {
		for _, n := range f.d.Nodes[:2] {
			q, ok := n.view().Queue("", name)
			if !ok || len(q.Shards) != partitions || len(n.view().Growths()) > 0 {
				return false
			}
		}
		return true
	}, time.Minute, 20*time.Millisecond)
}

func testGrowUnderLoad(f *partitionFleet) {
	f.queue("grows", 1, nil)
	_, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "grows", Name: "first", Config: &tierqv1.GroupConfig{MaxAttempts: 9}})
	require.NoError(f, err)
	_, err = f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "grows", Name: "paused"})
	require.NoError(f, err)
	_, err = f.c.PauseGroup(f.ctx, "grows", "paused")
	require.NoError(f, err)

	publishing, stop := context.WithCancel(f.ctx)
	var published atomic.Int64
	var publishers sync.WaitGroup
	producer := f.client(client.Options{ProducerID: 77})
	for i := range 2 {
		publishers.Go(func() {
			for n := 0; publishing.Err() == nil; n++ {
				_, err := producer.Publish(f.ctx, "grows", client.Message{Body: fmt.Appendf(nil, "%d-%d", i, n)})
				if !errors.Is(err, context.Canceled) {
					require.NoError(f, err)
				}
				published.Add(1)
			}
		})
	}
	require.Eventually(f, func() bool { return published.Load() > 50 }, time.Minute, time.Millisecond)
	q, err := f.c.GrowQueue(f.ctx, "grows", 4)
	require.NoError(f, err)
	require.EqualValues(f, 4, q.GrowingTo)
	require.Len(f, q.Partitions, 1)
	_, err = f.c.GrowQueue(f.ctx, "grows", 3)
	if err != nil { // else it has them, and 3 are too few
		require.Error(f, err)
	}
	for i := range 3 {
		_, err = f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "grows", Name: fmt.Sprintf("meanwhile%d", i), Start: &tierqv1.Start{At: "earliest"}})
		require.NoError(f, err)
	}
	require.NoError(f, f.c.DeleteGroup(f.ctx, "grows", "meanwhile1"))
	f.grown("grows", 4)
	_, err = f.c.CreateQueue(f.ctx, &tierqv1.CreateQueueRequest{Name: "grows", Partitions: 1})
	f.refused(err, code.QueueExistsMismatch)
	require.ErrorContains(f, err, "queue grow")
	// A client that connects now, or has seen the growth, publishes into all of them.
	late := f.client(client.Options{})
	for i := range 8 {
		_, err := late.Publish(f.ctx, "grows", client.Message{Body: fmt.Appendf(nil, "late-%d", i)})
		require.NoError(f, err)
		published.Add(1)
	}
	stop()
	publishers.Wait()
	list, err := f.c.ListGroups(f.ctx, "grows")
	require.NoError(f, err)
	require.Len(f, list, 4)
	for _, g := range list {
		require.Len(f, g.Partitions, 4, g.Name)
		for _, p := range g.Partitions {
			require.Equal(f, g.Name == "paused", p.Config.Paused, "%s in partition %d", g.Name, p.Partition)
			if g.Name == "first" {
				require.EqualValues(f, 9, p.Config.MaxAttempts)
			}
		}
		require.EqualValues(f, published.Load(), g.Unfinished, g.Name)
	}
	requireAll(f, late, "grows", "meanwhile2", int(published.Load()))
}

// growingSeries is how many growths a host's metrics tell of.
func growingSeries(f require.TestingT, n *Node) int {
	families, err := n.gatherer().Gather()
	require.NoError(f, err)
	for _, m := range families {
		if m.GetName() == "tierq_queue_growing_seconds" {
			return len(m.GetMetric())
		}
	}
	return 0
}

// requireAll consumes a group until every one of n messages was acked once.
func requireAll(f *partitionFleet, c *client.Client, name, group string, n int) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, time.Minute)
	defer cancel()
	var mu sync.Mutex
	seen, partitions := map[string]int{}, map[uint32]bool{}
	err := c.Consume(ctx, name, group, func(_ context.Context, d *client.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		seen[string(d.Body)]++
		partitions[d.Partition] = true
		if len(seen) == n {
			cancel()
		}
		return nil
	}, client.ConsumeOptions{Concurrency: 4})
	require.NoError(f, err)
	require.Len(f, seen, n)
	require.Len(f, partitions, 4)
}

// A growth is cancelled before it is open, and begun again; a queue that grows is deleted.
func testGrowCancel(f *partitionFleet) {
	f.queue("cancelled", 1, nil)
	_, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "cancelled", Name: "g"})
	require.NoError(f, err)
	_, err = f.c.CancelGrowth(f.ctx, "cancelled")
	require.NoError(f, err, "there is none")
	_, err = f.c.GrowQueue(f.ctx, "cancelled", 3)
	require.NoError(f, err)
	_, err = f.c.CancelGrowth(f.ctx, "cancelled")
	if err != nil { // it was open already
		f.refused(err, code.MutationFenced)
	}
	_, err = f.c.GrowQueue(f.ctx, "cancelled", 3)
	require.NoError(f, err)
	f.grown("cancelled", 3)
	g, err := f.c.ListGroups(f.ctx, "cancelled")
	require.NoError(f, err)
	require.Len(f, g[0].Partitions, 3)
	_, err = f.c.GrowQueue(f.ctx, "cancelled", 5)
	require.NoError(f, err)
	require.NoError(f, f.c.DeleteQueue(f.ctx, "cancelled"))
	require.Eventually(f, func() bool { return len(f.d.Nodes[0].view().Growths()) == 0 }, time.Minute, 10*time.Millisecond)
}
