package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// partitionFleet is a development fleet, seen through its API as clients see it.
type partitionFleet struct {
	*testing.T
	d   *Dev
	c   *client.Client
	ctx context.Context
}

func (f *partitionFleet) client(o client.Options) *client.Client {
	f.Helper()
	for _, n := range f.d.Nodes[:2] {
		o.Addrs = append(o.Addrs, n.APIAddr().String())
	}
	c, err := client.New(o)
	require.NoError(f, err)
	f.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (f *partitionFleet) queue(name string, partitions uint32, o *tierqv1.QueueOptions) *tierqv1.Queue {
	f.Helper()
	res, err := f.c.CreateQueue(f.ctx, &tierqv1.CreateQueueRequest{Name: name, Partitions: partitions, Options: o})
	require.NoError(f, err) // a client that has repeated it is told that the queue is there
	require.Len(f, res.Queue.Partitions, int(partitions))
	return res.Queue
}

func (f *partitionFleet) refused(err error, want code.Code) {
	f.Helper()
	var e *code.Error
	require.True(f, errors.As(err, &e), "%v", err)
	require.Equal(f, want.String(), e.Code.String(), "%v", err)
	require.Equal(f, code.EffectNone, e.Effect, "%v", err)
}

// Queues of four partitions on a fleet of two full hosts and a witness: placing, sums over partitions, one consumer for all,
// order by key over home moves.
func TestPartitions(t *testing.T) {
	d, ctx := devFleet(t, 4*time.Minute)
	for _, test := range []struct {
		name string
		run  func(*partitionFleet)
	}{
		{"spread", testPartitionsSpread},
		{"publish", testPartitionsPublish},
		{"groups", testPartitionsGroups},
		{"plain calls", testPartitionsPlain},
		{"single active consumers", testPartitionsActive},
		{"publish over moves", testPartitionsPublishOverMoves},
		{"key order over moves", testPartitionsKeyOrder},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := &partitionFleet{T: t, d: d, ctx: ctx}
			f.c = f.client(client.Options{})
			test.run(f)
		})
	}
}

// Leaders and homes do not all sit on one host.
func testPartitionsSpread(f *partitionFleet) {
	f.queue("spread", 4, nil)
	g, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "spread", Name: "g"})
	require.NoError(f, err)
	require.Len(f, g.Partitions, 4)
	homes := map[uint64]int{}
	for _, p := range g.Partitions {
		homes[p.HomeHost]++
	}
	require.Equal(f, map[uint64]int{1: 2, 2: 2}, homes)
	require.Eventually(f, func() bool {
		q, err := f.c.DescribeQueue(f.ctx, "spread")
		leaders := map[uint64]int{}
		for _, p := range q.GetPartitions() {
			leaders[p.LeaderHost]++
		}
		return err == nil && leaders[1] == 2 && leaders[2] == 2
	}, 30*time.Second, 100*time.Millisecond, "leaders are spread too")
	again, err := f.c.CreateQueue(f.ctx, &tierqv1.CreateQueueRequest{Name: "spread", Partitions: 4})
	require.NoError(f, err)
	require.False(f, again.Created)
	_, err = f.c.CreateQueue(f.ctx, &tierqv1.CreateQueueRequest{Name: "spread", Partitions: 3})
	f.refused(err, code.QueueExistsMismatch)
	_, err = f.c.CreateQueue(f.ctx, &tierqv1.CreateQueueRequest{Name: "wide", Partitions: 65})
	f.refused(err, code.InvalidArgument)
}

func testPartitionsPublish(f *partitionFleet) {
	f.queue("publish", 4, nil)
	// Keyless publishes stay whole and take turns.
	seen := map[uint32]int{}
	for range 8 {
		rs, err := f.c.Publish(f.ctx, "publish", client.Message{Body: []byte("a")}, client.Message{Body: []byte("b")})
		require.NoError(f, err)
		require.Equal(f, rs[0].Partition, rs[1].Partition)
		require.Equal(f, rs[0].Address+1, rs[1].Address)
		seen[rs[0].Partition]++
	}
	require.Equal(f, map[uint32]int{0: 2, 1: 2, 2: 2, 3: 2}, seen)
	// Keys decide, message by message.
	var keyed []client.Message
	for i := range 40 {
		keyed = append(keyed, client.Message{Key: fmt.Appendf(nil, "k%d", i), Body: fmt.Appendf(nil, "keyed %d", i)})
	}
	rs, err := f.c.Publish(f.ctx, "publish", keyed...)
	require.NoError(f, err)
	for i, r := range rs {
		require.Equal(f, tierqv1.PartitionOfKey(keyed[i].Key, 4), r.Partition)
	}
	// Dedup holds over the whole queue.
	for i := range 3 {
		rs, err := f.c.Publish(f.ctx, "publish", client.Message{DedupID: []byte("once"), Body: []byte("once")})
		require.NoError(f, err)
		require.Equal(f, i > 0, rs[0].Duplicate)
	}
	_, err = f.c.PublishWith(f.ctx, "publish", client.PublishOptions{Atomic: true}, keyed...)
	f.refused(err, code.AtomicPartitions)
	_, err = f.c.PublishWith(f.ctx, "publish", client.PublishOptions{Atomic: true}, client.Message{Key: []byte("k")}, client.Message{Key: []byte("k")})
	require.NoError(f, err)
	zero := uint64(0)
	_, err = f.c.PublishWith(f.ctx, "publish", client.PublishOptions{ExpectedLastAddress: &zero}, client.Message{})
	f.refused(err, code.InvalidArgument)
	two := uint32(2)
	rs, err = f.c.PublishWith(f.ctx, "publish", client.PublishOptions{Partition: &two}, keyed...)
	require.NoError(f, err, "where keys have no order, a publisher may choose")
	require.Equal(f, two, rs[7].Partition)
	nine := uint32(9)
	_, err = f.c.PublishWith(f.ctx, "publish", client.PublishOptions{Partition: &nine}, client.Message{})
	f.refused(err, code.UnknownPartition)
	q, err := f.c.DescribeQueue(f.ctx, "publish")
	require.NoError(f, err)
	require.EqualValues(f, 16+40+1+2+40, q.Messages)
	// What only leaders know comes from each of them, but for the moment of a hand-over.
	require.Eventually(f, func() bool {
		q, err := f.c.DescribeQueue(f.ctx, "publish")
		return err == nil && !slices.ContainsFunc(q.Partitions, func(p *tierqv1.Partition) bool { return p.LeaderHost == 0 || p.DataCopies != 2 })
	}, 90*time.Second, 50*time.Millisecond)
}

// A group is one thing in all partitions.
func testPartitionsGroups(f *partitionFleet) {
	f.queue("groups", 4, nil)
	g, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "groups", Name: "g", Config: &tierqv1.GroupConfig{MaxAttempts: 2}})
	require.NoError(f, err)
	var ms []client.Message
	for i := range 60 {
		ms = append(ms, client.Message{Key: fmt.Appendf(nil, "k%d", i)})
	}
	_, err = f.c.Publish(f.ctx, "groups", ms...)
	require.NoError(f, err)
	list, err := f.c.ListGroups(f.ctx, "groups")
	require.NoError(f, err)
	require.Len(f, list, 1)
	require.EqualValues(f, 60, list[0].Unfinished)
	require.Len(f, list[0].Partitions, 4)
	g, err = f.c.ConfigureGroup(f.ctx, "groups", "g", &tierqv1.GroupConfig{MaxAttempts: 7}, g.ConfigVersion)
	require.NoError(f, err)
	for _, p := range g.Partitions {
		require.EqualValues(f, 7, p.Config.MaxAttempts)
	}
	g, err = f.c.PauseGroup(f.ctx, "groups", "g")
	require.NoError(f, err)
	for _, p := range g.Partitions {
		require.True(f, p.Config.Paused)
	}
	x, err := f.c.ExplainGroup(f.ctx, &tierqv1.ExplainGroupRequest{Queue: "groups", Group: "g"})
	require.NoError(f, err)
	require.Equal(f, "paused-group", x.Verdict)
	require.EqualValues(f, 60, x.Unfinished)
	_, err = f.c.ExplainGroup(f.ctx, &tierqv1.ExplainGroupRequest{Queue: "groups", Group: "g", Address: 1})
	f.refused(err, code.InvalidArgument)
	_, err = f.c.ResumeGroup(f.ctx, "groups", "g")
	require.NoError(f, err)
	g, err = f.c.MoveGroup(f.ctx, "groups", "g", 1)
	require.NoError(f, err)
	for _, p := range g.Partitions {
		require.EqualValues(f, 1, p.HomeHost)
	}
	p, err := f.c.PurgeQueue(f.ctx, &tierqv1.PurgeQueueRequest{Queue: "groups", All: true})
	require.NoError(f, err)
	require.EqualValues(f, 60, p.Purged)
	_, err = f.c.Publish(f.ctx, "groups", ms...)
	require.NoError(f, err)
	g, err = f.c.ResetGroup(f.ctx, "groups", "g", &tierqv1.Start{At: "latest"})
	require.NoError(f, err)
	require.Zero(f, g.Unfinished)
	_, err = f.c.ResetGroup(f.ctx, "groups", "g", &tierqv1.Start{At: "address", Address: 3})
	f.refused(err, code.InvalidArgument)
	require.NoError(f, f.c.DeleteGroup(f.ctx, "groups", "g"))
	list, err = f.c.ListGroups(f.ctx, "groups")
	require.NoError(f, err)
	require.Empty(f, list)
	f.refused(f.c.DeleteGroup(f.ctx, "groups", "g"), code.UnknownGroup)
}

// Calls that name no partition: a receive is served by every home in turn, receipts find their partitions, lists go on from
// partition to partition.
func testPartitionsPlain(f *partitionFleet) {
	f.queue("plain", 4, nil)
	_, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "plain", Name: "g"})
	require.NoError(f, err)
	const n = 40
	var ms []client.Message
	for i := range n {
		ms = append(ms, client.Message{Key: fmt.Appendf(nil, "k%d", i), Body: fmt.Appendf(nil, "m%d", i)})
	}
	_, err = f.c.Publish(f.ctx, "plain", ms...)
	require.NoError(f, err)

	browsed := map[string]bool{}
	for at := (&tierqv1.BrowseRequest{Queue: "plain", Limit: 7}); ; {
		res, err := f.c.Browse(f.ctx, at)
		require.NoError(f, err)
		require.LessOrEqual(f, len(res.Messages), 7)
		for _, m := range res.Messages {
			require.Equal(f, tierqv1.PartitionOfKey(m.Key, 4), m.Partition)
			browsed[string(m.Body)] = true
		}
		if res.NextAddress == 0 {
			break
		}
		at.FromPartition, at.FromAddress = res.NextPartition, res.NextAddress
	}
	require.Len(f, browsed, n)

	var receipts []string
	partitions := map[uint32]bool{}
	for len(receipts) < n {
		ds, err := f.c.Receive(f.ctx, "plain", "g", client.ReceiveOptions{Max: 9, Wait: 5 * time.Second, Consumer: "one"})
		require.NoError(f, err)
		require.NotEmpty(f, ds)
		for _, d := range ds {
			require.Equal(f, tierqv1.PartitionOfKey(d.Key, 4), d.Partition)
			receipts = append(receipts, d.Receipt)
			partitions[d.Partition] = true
		}
	}
	require.Len(f, partitions, 4)
	held, err := f.c.ListConsumers(f.ctx, "plain", "g", true)
	require.NoError(f, err)
	require.Len(f, held.Consumers, 1)
	require.EqualValues(f, n, held.InFlight)
	require.Len(f, held.Consumers[0].Messages, n)

	rs, err := f.c.Ack(f.ctx, "plain", "g", append(receipts[:20:20], "nonsense")...)
	require.Error(f, err)
	for _, r := range rs[:20] {
		require.Nil(f, r.Err)
	}
	require.Equal(f, code.InvalidReceipt, rs[20].Err.Code)
	_, err = f.c.Reject(f.ctx, "plain", "g", "no use", receipts[20:]...)
	require.NoError(f, err)

	dead := 0
	for at := (&tierqv1.ListDeadLettersRequest{Queue: "plain", Group: "g", Limit: 3}); ; {
		res, err := f.c.FindDeadLetters(f.ctx, at)
		require.NoError(f, err)
		dead += len(res.DeadLetters)
		if res.NextAddress == 0 {
			break
		}
		at.FromPartition, at.FromAddress = res.NextPartition, res.NextAddress
	}
	require.Equal(f, 20, dead)
	redriven, _, err := f.c.RedriveDeadLetters(f.ctx, "plain", "g")
	require.NoError(f, err)
	require.EqualValues(f, 20, redriven)

	// Nothing ready: the receive waits, and is answered when something comes to a partition of another home.
	late := f.client(client.Options{})
	got := make(chan int, 1)
	go func() {
		n := 0
		for n < 20+8 {
			ds, err := late.Receive(f.ctx, "plain", "g", client.ReceiveOptions{Max: 50, Wait: 10 * time.Second})
			if err != nil {
				f.Error(err)
				break
			}
			n += len(ds)
		}
		got <- n
	}()
	for i := range 8 {
		_, err := f.c.Publish(f.ctx, "plain", client.Message{Body: fmt.Appendf(nil, "late %d", i)})
		require.NoError(f, err)
	}
	require.Equal(f, 28, <-got)

	// Delayed messages of all partitions are one list in due order.
	for i := range 12 {
		_, err := f.c.Publish(f.ctx, "plain", client.Message{Delay: time.Hour + time.Duration(12-i)*time.Minute})
		require.NoError(f, err)
	}
	var due []uint64
	at := &tierqv1.ListDelayedRequest{Queue: "plain", Limit: 5}
	for {
		res, err := f.c.ListDelayed(f.ctx, at)
		require.NoError(f, err)
		require.EqualValues(f, 12, res.Total)
		for _, m := range res.Messages {
			due = append(due, m.VisibleUnixMs)
		}
		if res.Next == nil {
			break
		}
		at.After = res.Next
	}
	require.Len(f, due, 12)
	require.IsIncreasing(f, due)
	f.refused(f.c.CancelDelayed(f.ctx, &tierqv1.CancelDelayedRequest{Queue: "plain", Address: 1}), code.InvalidArgument)
}

// Leaders move under one producer that has several requests in flight: every message is stored once, in its key's order, and
// answered with the address where it is.
func testPartitionsPublishOverMoves(f *partitionFleet) {
	q := f.queue("moving", 4, nil)
	producer := f.client(client.Options{MaxBatchMessages: 16})
	const n = 6000
	type sent struct {
		body string
		key  string
		f    *client.Future
	}
	var all []sent
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range n {
			m := client.Message{Key: fmt.Appendf(nil, "k%d", i%50), Body: fmt.Appendf(nil, "%06d", i)}
			all = append(all, sent{string(m.Body), string(m.Key), producer.PublishAsync(f.ctx, "moving", m)})
		}
		if err := producer.Flush(f.ctx); err != nil {
			f.Error(err)
		}
	}()
	moves := 0
	for i := 0; ; i++ {
		select {
		case <-done:
		default:
			p := q.Partitions[i%4]
			for _, h := range f.d.Nodes[:2] {
				ctx, cancel := context.WithTimeout(f.ctx, 2*time.Second)
				if leader, at, _, ok := h.raft.Leader(p.Shard); ok && at == h.id {
					for _, r := range h.FullReplicas(p.Shard) {
						if r.Replica != leader && h.raft.HandOver(ctx, p.Shard, r.Replica) == nil {
							moves++
						}
					}
				}
				cancel()
			}
			continue
		}
		break
	}
	f.Logf("%d leaders moved", moves)
	at := map[string]string{}
	for _, s := range all {
		r, err := s.f.Wait(f.ctx)
		require.NoError(f, err)
		at[fmt.Sprint(r.Partition, "/", r.Address)] = s.body
	}
	require.Len(f, at, n, "an address for each")
	last, seen := map[string]string{}, 0
	req := &tierqv1.BrowseRequest{Queue: "moving", Limit: 1000}
	for {
		res, err := f.c.Browse(f.ctx, req)
		require.NoError(f, err)
		for _, m := range res.Messages {
			require.Equal(f, string(m.Body), at[fmt.Sprint(m.Partition, "/", m.Address)])
			require.Less(f, last[string(m.Key)], string(m.Body), "the order of key %s", m.Key)
			last[string(m.Key)] = string(m.Body)
			seen++
		}
		if req.FromPartition, req.FromAddress = res.NextPartition, res.NextAddress; res.NextAddress == 0 {
			break
		}
	}
	require.Equal(f, n, seen, "stored once each")
}

// One consumer works on keyed messages of four partitions while their homes move: every message is finished once, and the
// messages of a key come in order.
func testPartitionsKeyOrder(f *partitionFleet) {
	f.queue("keyed", 4, &tierqv1.QueueOptions{Ordering: tierqv1.Ordering_ORDERING_KEY})
	_, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "keyed", Name: "g"})
	require.NoError(f, err)
	three := uint32(3)
	wrong := []byte("a") // of partition 3
	require.EqualValues(f, 3, tierqv1.PartitionOfKey(wrong, 4))
	three--
	_, err = f.c.PublishWith(f.ctx, "keyed", client.PublishOptions{Partition: &three}, client.Message{Key: wrong})
	f.refused(err, code.WrongPartition)

	const keys, each = 16, 30
	producer := f.client(client.Options{})
	go func() {
		for i := range each {
			for k := range keys {
				producer.PublishAsync(f.ctx, "keyed", client.Message{Key: fmt.Appendf(nil, "key-%d", k), Body: fmt.Append(nil, i)})
			}
		}
		if err := producer.Flush(f.ctx); err != nil {
			f.Error(err)
		}
	}()
	var mu sync.Mutex
	next := map[string]int{} // of each key, the message that has not been seen yet
	finished := map[string]bool{}
	var broken []string
	ctx, stop := context.WithCancel(f.ctx)
	defer stop()
	done := make(chan error, 1)
	consumer := f.client(client.Options{})
	go func() {
		done <- consumer.Consume(ctx, "keyed", "g", func(_ context.Context, d *client.Delivery) error {
			var i int
			_, _ = fmt.Sscan(string(d.Body), &i)
			mu.Lock()
			defer mu.Unlock()
			key := string(d.Key)
			if i > next[key] || finished[key+"/"+string(d.Body)] {
				broken = append(broken, fmt.Sprintf("%s: %d before %d", key, i, next[key]))
			}
			next[key] = max(next[key], i+1)
			return nil
		}, client.ConsumeOptions{Concurrency: 8, MaxInFlight: 32, OnSettled: func(d *client.Delivery, s client.Settled) {
			if s.Err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			finished[string(d.Key)+"/"+string(d.Body)] = true
			if len(finished) == keys*each {
				stop()
			}
		}})
	}()
	for move := uint64(0); ctx.Err() == nil && move < 6; move++ {
		select {
		case <-ctx.Done():
		case <-time.After(300 * time.Millisecond):
			_, err := f.c.MoveGroup(f.ctx, "keyed", "g", move%2+1)
			if err != nil {
				f.Logf("move: %v", err)
			}
		}
	}
	require.NoError(f, <-done)
	require.Len(f, finished, keys*each)
	require.Empty(f, broken)
	g, err := f.c.ListGroups(f.ctx, "keyed")
	require.NoError(f, err)
	require.EqualValues(f, keys*each, g[0].Acked)
	require.Zero(f, g[0].Unfinished)
}
