package client_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quick has pauses of a few milliseconds, so that tests of retries are fast.
func quick(addrs ...string) client.Options {
	return client.Options{
		Addrs: addrs, ReconnectBase: 2 * time.Millisecond, ReconnectCap: 20 * time.Millisecond,
		RetryBase: time.Millisecond, RetryCap: 10 * time.Millisecond, RefreshEvery: -1,
		PublishTimeout: clienttest.Patience, CallTimeout: clienttest.Patience,
	}
}

func open(t *testing.T, o client.Options) *client.Client {
	t.Helper()
	c, err := client.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func fleetWithQueue(t *testing.T, hosts int) *clienttest.Fleet {
	t.Helper()
	f := clienttest.New(t, hosts)
	c := open(t, quick(f.Addrs()...))
	_, err := c.CreateQueue(within(t, clienttest.Patience), &tierqv1.CreateQueueRequest{Name: "q"})
	require.NoError(t, err)
	_, err = c.CreateGroup(within(t, clienttest.Patience), &tierqv1.CreateGroupRequest{Queue: "q", Name: "g"})
	require.NoError(t, err)
	require.NoError(t, c.Close(context.Background()))
	return f
}

func bodies(n int) []client.Message {
	ms := make([]client.Message, n)
	for i := range ms {
		ms[i].Body = fmt.Appendf(nil, "m%05d", i)
	}
	return ms
}

func requireCode(t *testing.T, err error, c code.Code, e code.Effect) {
	t.Helper()
	var ce *code.Error
	require.ErrorAs(t, err, &ce)
	require.Equal(t, c.String(), ce.Code.String(), "%v", err)
	require.Equal(t, e, ce.Effect, "%v", err)
}

// A publish to a host that does not lead goes to the leader that the host names, and the next one goes there at once.
func TestPublishFollowsLeaderHint(t *testing.T) {
	f := fleetWithQueue(t, 3)
	f.SetLeader(3)
	c := open(t, quick(f.Addr(1)))
	ctx := within(t, clienttest.Patience)
	rs, err := c.Publish(ctx, "q", bodies(2)...)
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 2}, []uint64{rs[0].Address, rs[1].Address})
	require.Equal(t, uint32(2), rs[0].DataCopies)
	require.Equal(t, 1, f.Calls("Publish"), "who leads was told with the partitions")
	_, err = c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)
	require.Equal(t, 2, f.Calls("Publish"))

	f.SetLeader(2)
	_, err = c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)
	require.Equal(t, 4, f.Calls("Publish"), "the old leader sends on to the new one")
}

// A receive at the wrong host is sent home by NOT_OWNER, and so is an ack after the home has moved.
func TestReceiveFollowsHome(t *testing.T) {
	f := fleetWithQueue(t, 3)
	f.SetHome(3)
	c := open(t, quick(f.Addr(1)))
	ctx := within(t, clienttest.Patience)
	_, err := c.Publish(ctx, "q", bodies(2)...)
	require.NoError(t, err)
	ds, err := c.Receive(ctx, "q", "g", client.ReceiveOptions{Max: 10})
	require.NoError(t, err)
	require.Len(t, ds, 2)
	require.Equal(t, 2, f.Calls("Receive"))

	f.SetHome(2)
	_, err = c.Ack(ctx, "q", "g", ds[0].Receipt)
	requireCode(t, err, code.StaleOwner, code.EffectNone)
	ds, err = c.Receive(ctx, "q", "g", client.ReceiveOptions{Max: 10})
	require.NoError(t, err)
	require.Len(t, ds, 2)
	rs, err := c.Ack(ctx, "q", "g", ds[0].Receipt, ds[1].Receipt)
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 2}, []uint64{rs[0].Address, rs[1].Address})
}

// G2: a publish whose answer is lost is sent again with the same seq and gets the first address.
func TestUnknownOutcomeIsRetriedWithTheSameSeq(t *testing.T) {
	for _, fate := range []clienttest.Fate{{LoseAnswer: true}, {LoseRequest: true}, {Err: code.Maybe(code.QuorumLost, nil, "")}} {
		f := fleetWithQueue(t, 1)
		var mu sync.Mutex
		var seqs []uint64
		f.SetHook(func(c clienttest.Call) clienttest.Fate {
			if c.Publish == nil {
				return clienttest.Fate{}
			}
			mu.Lock()
			defer mu.Unlock()
			seqs = append(seqs, c.Publish.Messages[0].Seq)
			if len(seqs) <= 2 {
				return fate
			}
			return clienttest.Fate{}
		})
		c := open(t, quick(f.Addrs()...))
		rs, err := c.Publish(within(t, clienttest.Patience), "q", client.Message{Body: []byte("x")})
		require.NoError(t, err)
		require.Equal(t, uint64(1), rs[0].Address)
		require.Equal(t, fate.LoseAnswer, rs[0].Duplicate)
		require.Equal(t, []string{"x"}, f.Bodies("q"))
		require.Equal(t, []uint64{1, 1, 1}, seqs)
	}
}

// 8,192 in flight, batches lost before and after they took effect in the middle: every message is stored once.
func TestBatchDroppedInTheMiddle(t *testing.T) {
	f := fleetWithQueue(t, 1)
	var n atomic.Int64
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil {
			return clienttest.Fate{}
		}
		switch n.Add(1) {
		case 3, 9:
			return clienttest.Fate{LoseRequest: true}
		case 4, 5:
			return clienttest.Fate{LoseAnswer: true}
		}
		return clienttest.Fate{}
	})
	o := quick(f.Addrs()...)
	o.Unordered, o.MaxBufferedMessages, o.MaxBatchMessages = true, 8192, 1024
	c := open(t, o)
	ctx := within(t, clienttest.Patience)
	var futures []*client.Future
	for _, m := range bodies(16384) {
		futures = append(futures, c.PublishAsync(ctx, "q", m))
	}
	require.NoError(t, c.Flush(ctx))
	seen := map[uint64]bool{}
	for i, fu := range futures {
		p, err := fu.Wait(ctx)
		require.NoError(t, err, i)
		require.False(t, seen[p.Address])
		seen[p.Address] = true
	}
	requireAllOnce(t, f.Bodies("q"), 16384)
}

func requireAllOnce(t *testing.T, got []string, n int) {
	t.Helper()
	slices.Sort(got)
	require.Equal(t, n, len(got))
	for i, b := range got {
		require.Equal(t, fmt.Sprintf("m%05d", i), b)
	}
}

// The order is kept whatever is lost; a queue that demands contiguous seqs gets it of an unordered client too.
func TestOrderSurvivesLosses(t *testing.T) {
	for _, strict := range []bool{false, true} {
		f := fleetWithQueue(t, 2)
		f.SetStrictSequence(strict)
		var n atomic.Int64
		f.SetHook(func(c clienttest.Call) clienttest.Fate {
			if c.Publish == nil {
				return clienttest.Fate{}
			}
			switch k := n.Add(1); {
			case k%5 == 2:
				return clienttest.Fate{LoseAnswer: true}
			case k%5 == 4:
				return clienttest.Fate{LoseRequest: true}
			}
			return clienttest.Fate{}
		})
		o := quick(f.Addrs()...)
		o.Unordered, o.MaxBatchMessages = strict, 64
		c := open(t, o)
		ctx := within(t, clienttest.Patience)
		var futures []*client.Future
		for _, m := range bodies(2000) {
			futures = append(futures, c.PublishAsync(ctx, "q", m))
		}
		for _, fu := range futures {
			_, err := fu.Wait(ctx)
			require.NoError(t, err)
		}
		got := f.Bodies("q")
		require.True(t, slices.IsSorted(got), "strict=%v", strict)
		requireAllOnce(t, got, 2000)
	}
}

// A message that is refused for good leaves its seq to the next one where seqs must be contiguous.
func TestRefusedMessageLeavesNoGap(t *testing.T) {
	f := clienttest.New(t, 1)
	f.SetStrictSequence(true)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "q", Options: &tierqv1.QueueOptions{MaxBodyBytes: 4}})
	require.NoError(t, err)
	rs, err := c.Publish(ctx, "q", client.Message{Body: []byte("a")}, client.Message{Body: []byte("too long")}, client.Message{Body: []byte("b")}, client.Message{Body: []byte("c")})
	requireCode(t, err, code.TooLarge, code.EffectNone)
	require.Nil(t, rs[0].Err)
	require.NotNil(t, rs[1].Err)
	require.Nil(t, rs[3].Err)
	_, err = c.Publish(ctx, "q", client.Message{Body: []byte("d")})
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b", "c", "d"}, f.Bodies("q"))
}

// After a forced recovery the fleet asks producers to register again: a new epoch, and nothing stored twice.
func TestProducerRegistersAgain(t *testing.T) {
	f := fleetWithQueue(t, 1)
	var epochs []uint64
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil {
			return clienttest.Fate{}
		}
		epochs = append(epochs, c.Publish.ProducerEpoch)
		if c.Publish.ProducerEpoch < 1 {
			return clienttest.Fate{Err: code.New(code.ProducerEpochStale, "")}
		}
		return clienttest.Fate{}
	})
	c := open(t, quick(f.Addrs()...))
	_, err := c.Publish(within(t, clienttest.Patience), "q", bodies(3)...)
	require.NoError(t, err)
	requireAllOnce(t, f.Bodies("q"), 3)
	require.Equal(t, []uint64{0, 1}, epochs)

	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		return clienttest.Fate{Err: code.New(code.ProducerEpochStale, "")}
	})
	_, err = c.Publish(within(t, clienttest.Patience), "q", bodies(1)...)
	requireCode(t, err, code.ProducerEpochStale, code.EffectNone)
}

// A host that comes back on another port is found again through the hosts that know it; one at the same port by its seed.
func TestReconnectAfterRestart(t *testing.T) {
	f := fleetWithQueue(t, 2)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	_, err := c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)

	f.Stop(1)
	f.Restart(1, "")
	_, err = c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err, "host 2 names the leader's new port")

	old := f.Addr(2)
	f.SetLeader(2)
	f.Stop(2)
	done := make(chan error, 1)
	go func() {
		_, err := c.Publish(ctx, "q", bodies(1)...)
		done <- err
	}()
	require.Eventually(t, func() bool { return c.Links()[old] == client.Backoff }, 30*time.Second, time.Millisecond)
	f.Restart(2, old)
	require.NoError(t, <-done)
}

// The addresses of the fleet's hosts are learned from any of them.
func TestLearnsTheFleet(t *testing.T) {
	f := fleetWithQueue(t, 3)
	o := quick(f.Addr(2))
	o.RefreshEvery = time.Hour
	c := open(t, o)
	require.Eventually(t, func() bool { return len(c.Links()) == 3 }, 30*time.Second, time.Millisecond)
	f.Stop(2)
	_, err := c.ListQueues(within(t, clienttest.Patience), "")
	require.NoError(t, err, "the only seed is down")
}

// One bad address among good ones costs nothing; none good is told apart from a refusal, and nothing outlives its deadline.
func TestDeadlines(t *testing.T) {
	f := fleetWithQueue(t, 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dead := ln.Addr().String()
	require.NoError(t, ln.Close())

	c := open(t, quick(dead, f.Addr(1)))
	_, err = c.Publish(within(t, clienttest.Patience), "q", bodies(1)...)
	require.NoError(t, err)

	// One try, then a pause beyond the deadline.
	slow := func(addr string) client.Options {
		o := quick(addr)
		o.ReconnectBase, o.ReconnectCap, o.RetryBase, o.RetryCap = time.Hour, time.Hour, time.Hour, time.Hour
		o.Rand = func() float64 { return 0.99 }
		return o
	}
	c = open(t, slow(dead))
	clienttest.Ends(t, "the pause outlives the deadline", func() {
		_, err = c.Publish(within(t, 300*time.Millisecond), "q", bodies(1)...)
	})
	requireCode(t, err, code.Unavailable, code.EffectNone)
	clienttest.Ends(t, "the pause outlives the deadline", func() {
		_, err = c.ListQueues(within(t, 300*time.Millisecond), "")
	})
	requireCode(t, err, code.Unavailable, code.EffectNone)

	o := quick(dead)
	o.FailFast = true
	_, err = open(t, o).ListQueues(context.Background(), "")
	requireCode(t, err, code.Unavailable, code.EffectNone)

	f.SetLeader(0)
	c = open(t, slow(f.Addr(1)))
	_, err = c.Publish(within(t, time.Second), "q", bodies(1)...)
	requireCode(t, err, code.NoLeader, code.EffectNone)

	f.SetLeader(1)
	c = open(t, quick(f.Addr(1)))
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		return clienttest.Fate{LoseAnswer: c.Publish != nil}
	})
	_, err = c.Publish(within(t, time.Second), "q", bodies(1)...)
	requireCode(t, err, code.QuorumLost, code.EffectMaybe)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = c.Publish(within(t, time.Second), "", bodies(1)...)
	requireCode(t, err, code.InvalidName, code.EffectNone)
}

// A settle whose answer is lost is an unknown outcome; an ack is repeated and found done.
func TestSettleOutcomes(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	_, err := c.Publish(ctx, "q", bodies(3)...)
	require.NoError(t, err)
	ds, err := c.Receive(ctx, "q", "g", client.ReceiveOptions{Max: 3})
	require.NoError(t, err)
	var lost atomic.Bool
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		return clienttest.Fate{LoseAnswer: (c.Procedure == "Ack" || c.Procedure == "Nack") && lost.CompareAndSwap(false, true)}
	})
	rs, err := c.Ack(ctx, "q", "g", ds[0].Receipt)
	require.NoError(t, err)
	require.True(t, rs[0].Already)
	lost.Store(false)
	rs, err = c.Nack(ctx, "q", "g", 0, "no", ds[1].Receipt)
	requireCode(t, err, code.QuorumLost, code.EffectMaybe)
	require.Equal(t, code.EffectMaybe, rs[0].Err.Effect)

	// The lost ack was applied, and the home that answers its repeat knows the receipt no more.
	lost.Store(false)
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Ack" && lost.CompareAndSwap(false, true) {
			return clienttest.Fate{Err: code.Maybe(code.QuorumLost, nil, "")}
		}
		return clienttest.Fate{}
	})
	f.SetHome(1)
	_, err = c.Ack(ctx, "q", "g", ds[2].Receipt)
	requireCode(t, err, code.QuorumLost, code.EffectMaybe)
	_, err = c.Ack(ctx, "q", "g", ds[2].Receipt)
	requireCode(t, err, code.StaleOwner, code.EffectNone)
	_, err = c.Ack(ctx, "q", "g", "garbage")
	requireCode(t, err, code.InvalidReceipt, code.EffectNone)
	_, err = c.Ack(ctx, "q", "g")
	requireCode(t, err, code.BatchEmpty, code.EffectNone)
	_, err = c.Receive(ctx, "q", "nobody", client.ReceiveOptions{})
	requireCode(t, err, code.UnknownGroup, code.EffectNone)
}

// A full buffer refuses or blocks, as asked, and has room again when answers come.
func TestBufferIsBounded(t *testing.T) {
	f := fleetWithQueue(t, 1)
	gate := make(chan struct{})
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil {
			return clienttest.Fate{}
		}
		return clienttest.Fate{Hold: gate}
	})
	o := quick(f.Addrs()...)
	o.MaxBufferedMessages, o.FailWhenFull = 10, true
	c := open(t, o)
	ctx := within(t, clienttest.Patience)
	for _, m := range bodies(10) {
		c.PublishAsync(ctx, "q", m)
	}
	_, err := c.PublishAsync(ctx, "q", bodies(1)[0]).Wait(ctx)
	requireCode(t, err, code.Backpressure, code.EffectNone)

	o.FailWhenFull = false
	blocking := open(t, o)
	for _, m := range bodies(10) {
		blocking.PublishAsync(ctx, "q", m)
	}
	_, err = blocking.PublishAsync(within(t, 20*time.Millisecond), "q", bodies(1)[0]).Wait(ctx)
	requireCode(t, err, code.Backpressure, code.EffectNone)
	got := make(chan error, 1)
	go func() {
		_, err := blocking.PublishAsync(ctx, "q", bodies(1)[0]).Wait(ctx)
		got <- err
	}()
	close(gate)
	require.NoError(t, <-got)
	require.NoError(t, c.Flush(ctx))
	_, err = c.PublishAsync(ctx, "q", bodies(1)[0]).Wait(ctx)
	require.NoError(t, err)
}

// Close answers what it can, says so about the rest, and leaves nothing running (goleak).
func TestClose(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	for _, m := range bodies(500) {
		c.PublishAsync(context.Background(), "q", m)
	}
	require.NoError(t, c.Close(within(t, clienttest.Patience)))
	requireAllOnce(t, f.Bodies("q"), 500)
	_, err := c.Publish(context.Background(), "q", bodies(1)...)
	requireCode(t, err, code.ShuttingDown, code.EffectNone)
	_, err = c.ListQueues(context.Background(), "")
	requireCode(t, err, code.ShuttingDown, code.EffectNone)
	require.NoError(t, c.Close(context.Background()))
	require.Equal(t, client.Closed, c.Links()[f.Addr(1)])

	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil {
			return clienttest.Fate{}
		}
		return clienttest.Fate{Hold: make(chan struct{})}
	})
	c = open(t, quick(f.Addrs()...))
	fu := c.PublishAsync(context.Background(), "q", bodies(1)[0])
	require.Eventually(t, func() bool { return f.Calls("Publish") > 1 && len(f.Bodies("q")) > 500 }, 30*time.Second, time.Millisecond)
	require.ErrorIs(t, c.Close(within(t, 20*time.Millisecond)), context.DeadlineExceeded)
	_, err = fu.Wait(context.Background())
	requireCode(t, err, code.QuorumLost, code.EffectMaybe)
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []client.Options{{}, {Addrs: []string{"nonsense"}}, {Addrs: []string{"h:1"}, MaxBatchMessages: 9000}} {
		_, err := client.New(o)
		requireCode(t, err, code.InvalidArgument, code.EffectNone)
	}
}

// A host that takes a publish and never answers holds it up for the first, short try only.
func TestFrozenHostIsLeftSoon(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a try to time out")
	}
	f := fleetWithQueue(t, 2)
	o := quick(f.Addrs()...)
	o.PublishTimeout, o.AttemptTimeout = 2*time.Hour, time.Hour // any but the short try is one of an hour
	c := open(t, o)
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil || c.Host != 1 {
			return clienttest.Fate{}
		}
		f.SetLeader(2) // meanwhile
		return clienttest.Fate{Err: nil, Hold: make(chan struct{})}
	})
	clienttest.Ends(t, "the first try is not a short one", func() {
		_, err := c.Publish(within(t, 2*time.Hour), "q", bodies(1)...)
		require.NoError(t, err)
	})
}

// A home that moves while it settles leaves receipts that are good at the next one: they are taken there.
func TestSettleFollowsAMovedHome(t *testing.T) {
	f := fleetWithQueue(t, 2)
	c := open(t, quick(f.Addrs()...))
	_, err := c.Publish(within(t, clienttest.Patience), "q", bodies(5)...)
	require.NoError(t, err)
	ds, err := c.Receive(within(t, clienttest.Patience), "q", "g", client.ReceiveOptions{Max: 5})
	require.NoError(t, err)
	var receipts []string
	for _, d := range ds {
		receipts = append(receipts, d.Receipt)
	}
	f.SetHook(func(call clienttest.Call) clienttest.Fate {
		if call.Procedure == "Ack" && call.N == 1 {
			return clienttest.Fate{Moved: 2}
		}
		return clienttest.Fate{}
	})
	rs, err := c.Ack(within(t, clienttest.Patience), "q", "g", append(receipts[:4:4], "garbage", receipts[4])...)
	require.Error(t, err, "garbage")
	for i, r := range rs {
		if r.Receipt == "garbage" {
			require.Equal(t, code.InvalidReceipt, r.Err.Code)
			continue
		}
		require.Nil(t, r.Err, "receipt %d", i)
		require.NotZero(t, r.Address)
	}
	require.Len(t, rs, 6)
}

// Publishes that never left are not of unknown outcome: the fleet goes away after it was found, before the first publish.
func TestUnsentIsNotUnknown(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	_, err := c.Publish(within(t, clienttest.Patience), "q", bodies(1)...)
	require.NoError(t, err)
	f.Stop(1)
	_, err = c.Publish(within(t, 300*time.Millisecond), "q", bodies(1)...) // the open stream breaks: this one may have been sent
	require.Error(t, err)
	_, err = c.Publish(within(t, 200*time.Millisecond), "q", bodies(1)...)
	requireCode(t, err, code.Unavailable, code.EffectNone)
}

// A producer id of the caller's stays in the epoch that the caller gave: the next one is the next process's, whose messages
// would be taken for repeats of these.
func TestFixedProducerKeepsItsEpoch(t *testing.T) {
	f := fleetWithQueue(t, 1)
	o := quick(f.Addrs()...)
	o.ProducerID, o.ProducerEpoch = 7, 5
	c := open(t, o)
	_, err := c.Publish(within(t, clienttest.Patience), "q", client.Message{Body: []byte("a")})
	require.NoError(t, err)
	f.SetHook(func(c clienttest.Call) clienttest.Fate { return clienttest.Fate{LoseAnswer: c.Publish != nil} })
	_, err = c.Publish(within(t, 300*time.Millisecond), "q", client.Message{Body: []byte("b")})
	requireCode(t, err, code.QuorumLost, code.EffectMaybe)
	f.SetHook(nil)
	for range 2 {
		_, err = c.Publish(within(t, clienttest.Patience), "q", client.Message{Body: []byte("c")})
		requireCode(t, err, code.ProducerEpochStale, code.EffectNone)
		require.ErrorContains(t, err, "greater ProducerEpoch")
	}
	require.NoError(t, c.Close(context.Background()))

	o.ProducerEpoch = 6
	c = open(t, o)
	rs, err := c.Publish(within(t, clienttest.Patience), "q", bodies(3)...)
	require.NoError(t, err)
	for _, r := range rs {
		require.False(t, r.Duplicate)
	}
	require.Equal(t, []string{"a", "b", "m00000", "m00001", "m00002"}, f.Bodies("q"))
}
