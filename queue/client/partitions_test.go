package client_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

// partitioned is a fleet of three hosts with a queue q of n partitions, group g, whose leaders and homes are spread.
func partitioned(t *testing.T, n uint32) *clienttest.Fleet {
	t.Helper()
	f := clienttest.New(t, 3)
	c := open(t, quick(f.Addrs()...))
	_, err := c.CreateQueue(within(t, clienttest.Patience), &tierqv1.CreateQueueRequest{Name: "q", Partitions: n})
	require.NoError(t, err)
	_, err = c.CreateGroup(within(t, clienttest.Patience), &tierqv1.CreateGroupRequest{Queue: "q", Name: "g"})
	require.NoError(t, err)
	for p := range n {
		f.SetPartitionLeader("q", p, uint64(p%3)+1)
		f.SetPartitionHome("q", p, uint64((p+1)%3)+1)
	}
	require.NoError(t, c.Close(context.Background()))
	return f
}

func keyed(n int) []client.Message {
	ms := bodies(n)
	for i := range ms {
		ms[i].Key = fmt.Appendf(nil, "key-%d", i%37)
	}
	return ms
}

// Keys decide, dedup ids where there is no key, and what has neither takes turns whole.
func TestPlacing(t *testing.T) {
	f := partitioned(t, 4)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	ms := keyed(100)
	rs, err := c.Publish(ctx, "q", ms...)
	require.NoError(t, err)
	for i, r := range rs {
		require.Equal(t, tierqv1.PartitionOfKey(ms[i].Key, 4), r.Partition)
		require.Equal(t, string(ms[i].Body), f.PartitionBodies("q")[r.Partition][r.Address-1])
	}
	rs, err = c.Publish(ctx, "q", client.Message{DedupID: []byte("d")})
	require.NoError(t, err)
	require.Equal(t, tierqv1.PartitionOfKey([]byte("d"), 4), rs[0].Partition)
	var turns []uint32
	for range 8 {
		rs, err = c.Publish(ctx, "q", bodies(5)...)
		require.NoError(t, err)
		for _, r := range rs {
			require.Equal(t, rs[0].Partition, r.Partition, "a publish without keys stays whole")
		}
		turns = append(turns, rs[0].Partition)
	}
	require.Equal(t, turns[:4], turns[4:])
	slices.Sort(turns)
	require.Equal(t, []uint32{0, 0, 1, 1, 2, 2, 3, 3}, turns)
	require.Equal(t, 1, f.Calls("LocateQueue"))

	_, err = c.PublishWith(ctx, "q", client.PublishOptions{Atomic: true}, keyed(20)...)
	requireCode(t, err, code.AtomicPartitions, code.EffectNone)
	_, err = c.PublishWith(ctx, "q", client.PublishOptions{ExpectedLastAddress: new(uint64)}, bodies(1)...)
	requireCode(t, err, code.InvalidArgument, code.EffectNone)
	_, err = c.Publish(ctx, "nosuch", bodies(1)...)
	requireCode(t, err, code.UnknownQueue, code.EffectNone)
}

// breaker breaks streams at random points of the kinds that it is given.
type breaker struct {
	mu    sync.Mutex
	rand  *rand.Rand
	kinds []string
	every int
	left  int
}

func newBreaker(t *testing.T, every, most int, kinds ...string) *breaker {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return &breaker{rand: rand.New(rand.NewPCG(seed, 1)), kinds: kinds, every: every, left: most}
}

func (b *breaker) fate(c clienttest.Call) clienttest.Fate {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 || !slices.Contains(b.kinds, c.Procedure) || b.rand.IntN(b.every) > 0 {
		return clienttest.Fate{}
	}
	b.left--
	if b.rand.IntN(2) == 0 {
		return clienttest.Fate{LoseRequest: true}
	}
	return clienttest.Fate{LoseAnswer: true}
}

// onlyAllIfShort leaves only the storm of all kinds to a short run.
func onlyAllIfShort(t *testing.T, name string) {
	if testing.Short() && name != "all" {
		t.Skip("-short runs the storm of all kinds only")
	}
}

// Connections break at every point of a publish stream, leaders move, and every message is stored once, those of a key in
// order, whether the queue demands contiguous seqs or the producer alone.
func TestPublishStreamBreaks(t *testing.T) {
	for _, strict := range []bool{false, true} {
		for name, kinds := range map[string][]string{"streams": {"PublishStream"}, "publishes": {"Publish"}, "all": {"PublishStream", "Publish", "LocateQueue"}} {
			t.Run(fmt.Sprintf("%s strict=%v", name, strict), func(t *testing.T) {
				onlyAllIfShort(t, name)
				f := partitioned(t, 4)
				f.SetStrictSequence(strict)
				o := quick(f.Addrs()...)
				o.MaxBatchMessages = 20
				c := open(t, o)
				ctx := within(t, clienttest.Patience)
				b := newBreaker(t, 5, 60, kinds...)
				var calls atomic.Int64
				f.SetHook(func(c clienttest.Call) clienttest.Fate {
					if n := calls.Add(1); n%31 == 0 {
						f.SetPartitionLeader("q", uint32(n)%4, uint64(n)%3+1)
					}
					return b.fate(c)
				})
				ms := keyed(2000)
				futures := make([]*client.Future, len(ms))
				for i, m := range ms {
					futures[i] = c.PublishAsync(ctx, "q", m)
				}
				require.NoError(t, c.Flush(ctx))
				for i, fu := range futures {
					r, err := fu.Wait(ctx)
					require.NoError(t, err)
					require.Equal(t, string(ms[i].Body), f.PartitionBodies("q")[r.Partition][r.Address-1])
				}
				requireAllOnce(t, f.Bodies("q"), len(ms))
				for _, list := range f.PartitionBodies("q") {
					require.True(t, slices.IsSorted(list), "a partition keeps the producer's order")
				}
			})
		}
	}
}

// Several requests of one producer are in flight, in order.
func TestPublishPipeline(t *testing.T) {
	f := fleetWithQueue(t, 1)
	o := quick(f.Addrs()...)
	o.MaxBatchMessages = 1
	c := open(t, o)
	gate := make(chan struct{})
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Publish" {
			return clienttest.Fate{Hold: gate}
		}
		return clienttest.Fate{}
	})
	ctx := within(t, clienttest.Patience)
	for _, m := range bodies(40) {
		c.PublishAsync(ctx, "q", m)
	}
	require.Eventually(t, func() bool { return f.Calls("Publish") == 1 }, 30*time.Second, time.Millisecond)
	close(gate)
	require.NoError(t, c.Flush(ctx))
	require.True(t, slices.IsSorted(f.Bodies("q")))
	requireAllOnce(t, f.Bodies("q"), 40)
	require.Equal(t, 1, f.Calls("PublishStream"))
}

// TestKeylessSpreadWhileFilling: messages without a key fill the requests of all partitions side by side, not those of the slowest.
func TestKeylessSpreadWhileFilling(t *testing.T) {
	f := partitioned(t, 3)
	f.SetServed(time.Hour) // near
	o := quick(f.Addrs()...)
	o.AttemptTimeout = clienttest.Patience
	c := open(t, o)
	ctx := within(t, clienttest.Patience)
	for range 9 {
		_, err := c.Publish(ctx, "q", client.Message{Body: []byte("known")})
		require.NoError(t, err)
	}
	gate := make(chan struct{})
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Publish" {
			return clienttest.Fate{Hold: gate}
		}
		return clienttest.Fate{}
	})
	for range 600 {
		c.PublishAsync(ctx, "q", client.Message{Body: []byte("m")})
	}
	close(gate)
	require.NoError(t, c.Flush(ctx))
	for _, list := range f.PartitionBodies("q") {
		require.InDelta(t, 203, len(list), 70)
	}
}

// What cannot stream is served by unary calls: a host or proxy that does not know the streams, and a client over HTTP/1.1.
func TestWithoutStreams(t *testing.T) {
	for name, set := range map[string]func(*clienttest.Fleet, *client.Options){
		"not offered": func(f *clienttest.Fleet, _ *client.Options) { f.SetStreams(false) },
		"HTTP/1.1": func(_ *clienttest.Fleet, o *client.Options) {
			tr := &http.Transport{}
			t.Cleanup(tr.CloseIdleConnections)
			o.HTTPClient = &http.Client{Transport: tr}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := partitioned(t, 4)
			o := quick(f.Addrs()...)
			set(f, &o)
			c := open(t, o)
			ctx := within(t, clienttest.Patience)
			const n = 300
			for _, m := range keyed(n) {
				c.PublishAsync(ctx, "q", m)
			}
			require.NoError(t, c.Flush(ctx))
			requireAllOnce(t, f.Bodies("q"), n)
			for _, list := range f.PartitionBodies("q") {
				require.True(t, slices.IsSorted(list))
			}
			run, stop := context.WithCancel(ctx)
			var acked atomic.Int64
			require.NoError(t, c.Consume(run, "q", "g", func(context.Context, *client.Delivery) error { return nil }, client.ConsumeOptions{
				Concurrency: 4, MaxInFlight: 16, Wait: 50 * time.Millisecond,
				OnSettled: func(_ *client.Delivery, s client.Settled) {
					if s.Err == nil && acked.Add(1) == n {
						stop()
					}
				},
			}))
			_, done := f.Outstanding("q", "g")
			require.Equal(t, n, done)
		})
	}
}

// One consumer works off four partitions while streams break at every point and homes move. Every message is handled and
// acked, none after its ack, and when the storm is over exactly MaxInFlight are in flight: no credit has leaked or doubled.
func TestConsumeStreamBreaks(t *testing.T) {
	for name, kinds := range map[string][]string{
		"connects": {"Consume"}, "pushes": {"Push"}, "acks": {"Ack"}, "all": {"Consume", "Push", "Ack", "Nack", "Extend"},
	} {
		t.Run(name, func(t *testing.T) {
			onlyAllIfShort(t, name)
			f := partitioned(t, 4)
			c := open(t, quick(f.Addrs()...))
			ctx, stop := context.WithCancel(within(t, clienttest.Patience))
			defer stop()
			const n, inFlight = 800, 16
			_, err := c.Publish(ctx, "q", keyed(n)...)
			require.NoError(t, err)
			b := newBreaker(t, 6, 40, kinds...)
			var calls atomic.Int64
			f.SetHook(func(c clienttest.Call) clienttest.Fate {
				if k := calls.Add(1); k%97 == 0 {
					f.SetPartitionHome("q", uint32(k)%4, uint64(k)%3+1)
				}
				return b.fate(c)
			})
			var mu sync.Mutex
			acked, again := map[string]bool{}, 0
			handled := map[string]int{}
			block := make(chan struct{})
			var blocking atomic.Bool
			done := make(chan error, 1)
			go func() {
				done <- c.Consume(ctx, "q", "g", func(hctx context.Context, d *client.Delivery) error {
					if blocking.Load() {
						<-block
						return client.ErrRelease
					}
					mu.Lock()
					defer mu.Unlock()
					id := fmt.Sprintf("%d/%d", d.Partition, d.Address)
					handled[id]++
					// One whose lease the test has ended meanwhile, as a slow consumer finds it, may have been acked under another one.
					if acked[id] && f.Leased("q", "g", d.Partition, d.Receipt) {
						again++
					}
					return nil
				}, client.ConsumeOptions{Concurrency: 4, MaxInFlight: inFlight, OnSettled: func(d *client.Delivery, s client.Settled) {
					if s.Err == nil {
						mu.Lock()
						acked[fmt.Sprintf("%d/%d", d.Partition, d.Address)] = true
						mu.Unlock()
					}
				}})
			}()
			last, since := 0, time.Now()
			require.Eventually(t, func() bool {
				_, done := f.Outstanding("q", "g")
				if done != last {
					last, since = done, time.Now()
				}
				if time.Since(since) > 30*time.Millisecond { // what was pushed into a broken stream runs out
					f.ExpireLeases("q", "g")
					since = time.Now()
				}
				return done == n
			}, 50*time.Second, time.Millisecond)
			mu.Lock()
			require.Zero(t, again, "delivered after its ack")
			require.Len(t, handled, n)
			mu.Unlock()

			f.SetHook(nil)
			f.ExpireLeases("q", "g")
			blocking.Store(true)
			_, err = c.Publish(ctx, "q", keyed(400)...)
			require.NoError(t, err)
			leased := func() int { n, _ := f.Outstanding("q", "g"); return n }
			require.Eventually(t, func() bool { return leased() == inFlight }, 30*time.Second, time.Millisecond, "%d in flight", leased())
			_, err = c.Publish(ctx, "q", keyed(40)...) // whoever had too much room would take these
			require.NoError(t, err)
			require.Never(t, func() bool { return leased() > inFlight }, 50*time.Millisecond, time.Millisecond)
			stop()
			close(block)
			require.NoError(t, <-done)
			require.Zero(t, leased(), "a clean end gives everything back")
		})
	}
}

// A reconnect does not hand out what the window holds already, and the window opens again as that is done with.
func TestConsumeCreditOverReconnect(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	defer stop()
	_, err := c.Publish(ctx, "q", bodies(100)...)
	require.NoError(t, err)
	var broken atomic.Bool
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		return clienttest.Fate{LoseAnswer: c.Procedure == "Push" && broken.CompareAndSwap(false, true)}
	})
	work := make(chan struct{})
	var started atomic.Int64
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(context.Context, *client.Delivery) error {
			started.Add(1)
			<-work
			return nil
		}, client.ConsumeOptions{Concurrency: 5, MaxInFlight: 5})
	}()
	// Five came by a stream that has broken since. While none of them is done with, no stream is opened that could bring more.
	require.Eventually(t, func() bool { return started.Load() == 5 }, 30*time.Second, time.Millisecond)
	require.Never(t, func() bool { n, _ := f.Outstanding("q", "g"); return n > 5 }, 50*time.Millisecond, time.Millisecond)
	for i := range 100 {
		work <- struct{}{}
		require.Eventually(t, func() bool { return started.Load() == min(int64(i)+6, 100) }, 30*time.Second, time.Millisecond)
	}
	require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == 100 }, 30*time.Second, time.Millisecond)
	require.LessOrEqual(t, f.MostLeased("q", "g"), 5+5, "five at work, and at most as many whose ack is on its way")
	stop()
	require.NoError(t, <-done)
}

// A receive that names no partition goes from home to home.
func TestReceiveGoesAround(t *testing.T) {
	f := partitioned(t, 4)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	_, err := c.Publish(ctx, "q", keyed(80)...)
	require.NoError(t, err)
	two := uint32(2)
	ds, err := c.Receive(ctx, "q", "g", client.ReceiveOptions{Max: 100, Partition: &two})
	require.NoError(t, err)
	require.Len(t, ds, len(f.PartitionBodies("q")[2]))
	for _, d := range ds {
		require.Equal(t, two, d.Partition)
	}
	_, err = c.Ack(ctx, "q", "g", ds[0].Receipt, ds[1].Receipt)
	require.NoError(t, err)
}

// Homes that refuse a receive at once are asked again after a pause, not at full speed.
func TestReceiveAroundPauses(t *testing.T) {
	f := partitioned(t, 2)
	o := quick(f.Addrs()...)
	o.RetryBase, o.RetryCap, o.Rand = 100*time.Millisecond, 100*time.Millisecond, func() float64 { return 0.9 }
	c := open(t, o)
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Receive" {
			return clienttest.Fate{Err: code.New(code.MaxWaitingPulls, "")}
		}
		return clienttest.Fate{}
	})
	_, err := c.Receive(within(t, clienttest.Patience), "q", "g", client.ReceiveOptions{Wait: 300 * time.Millisecond})
	requireCode(t, err, code.MaxWaitingPulls, code.EffectNone)
	require.LessOrEqual(t, f.Calls("Receive"), 2*6, "a round takes 90 ms")
}

// What may be in flight goes where the messages are, and is never exceeded in the sum: also with all messages in one partition,
// and with fewer in flight than partitions.
func TestInFlightGoesWhereTheMessagesAre(t *testing.T) {
	for name, c := range map[string]struct{ inFlight, most int }{"more than partitions": {16, 13}, "fewer": {2, 2}, "one": {1, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := partitioned(t, 4)
			cl := open(t, quick(f.Addrs()...))
			ctx := within(t, clienttest.Patience)
			two := uint32(2)
			_, err := cl.PublishWith(ctx, "q", client.PublishOptions{Partition: &two}, bodies(40)...)
			require.NoError(t, err)
			block := make(chan struct{})
			var working, most, exceeded atomic.Int64
			stop := consumeInto(ctx, t, cl, client.ConsumeOptions{Concurrency: c.inFlight, MaxInFlight: c.inFlight}, func(context.Context, *client.Delivery) error {
				if n := working.Add(1); n > most.Load() {
					most.Store(n)
				}
				if leased, _ := f.Outstanding("q", "g"); leased > c.inFlight && most.Load() <= int64(c.most) {
					select {
					case <-block: // acks are on their way from here on
					default:
						exceeded.Add(1)
					}
				}
				<-block
				working.Add(-1)
				return nil
			})
			require.Eventually(t, func() bool { return working.Load() == int64(c.most) }, 90*time.Second, time.Millisecond)
			for p := range uint32(4) {
				_, err := cl.PublishWith(ctx, "q", client.PublishOptions{Partition: &p}, bodies(10)...)
				require.NoError(t, err)
			}
			require.Eventually(t, func() bool { return working.Load() == int64(c.inFlight) }, 90*time.Second, time.Millisecond)
			require.Never(t, func() bool { n, _ := f.Outstanding("q", "g"); return n > c.inFlight }, 250*time.Millisecond, time.Millisecond)
			close(block)
			require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == 80 }, 90*time.Second, time.Millisecond)
			require.Zero(t, exceeded.Load())
			stop()
		})
	}
}
