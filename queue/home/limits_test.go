package home

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func TestInFlightLimits(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{MaxInFlight: 5, MaxInFlightPerConsumer: 3})
		r.send(10)
		one := get(t, k, ReceiveRequest{Max: 10, Consumer: "one"})
		require.Len(t, one, 3)
		_, err := k.Receive(within(time.Second), "g", ReceiveRequest{Max: 10, Consumer: "one"})
		require.Equal(t, code.ConsumerLimit, refusal(t, err))
		// A consumer at its limit does not stand in the way of others.
		parked := receiveLater(k, ReceiveRequest{Max: 10, Consumer: "one", Wait: 20 * time.Second})
		synctest.Wait()
		require.Len(t, get(t, k, ReceiveRequest{Max: 10, Consumer: "two"}), 2)
		_, err = k.Receive(within(time.Second), "g", ReceiveRequest{Max: 10})
		require.Equal(t, code.ConsumerLimit, refusal(t, err))
		s := k.Stats()[0]
		require.Equal(t, 5, s.Leased)
		require.Equal(t, []ConsumerStats{{Name: "one", Leased: 3}, {Name: "two", Leased: 2}}, s.Consumers)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, one[0].Receipt))
		require.Len(t, (<-parked).ds, 1)
	})
}

func TestMaxBytes(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(5, func(m *queue.Message) { m.Body = make([]byte, 100) })
		require.Len(t, get(t, k, ReceiveRequest{Max: 10, MaxBytes: 250}), 2)
		one := get(t, k, ReceiveRequest{Max: 10, MaxBytes: 1})
		require.Len(t, one, 1, "the first whatever its size")
		require.EqualValues(t, 3, one[0].Message.Address, "in order")
	})
}

func TestSingleActiveConsumer(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{SingleActiveConsumer: true})
		_, err := k.Receive(within(time.Second), "g", ReceiveRequest{})
		require.Equal(t, code.InvalidArgument, refusal(t, err))
		r.send(3)
		d := get(t, k, ReceiveRequest{Consumer: "one"})[0]
		parked := receiveLater(k, ReceiveRequest{Consumer: "two", Wait: 20 * time.Second})
		synctest.Wait()
		require.Len(t, get(t, k, ReceiveRequest{Consumer: "one"}), 1)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, d.Receipt))
		pass(15 * time.Second)
		select {
		case got := <-parked:
			t.Fatalf("two got %v while one holds a message", bodies(got.ds))
		default:
		}
		require.Empty(t, (<-parked).ds)
		pass(time.Minute) // one's lease ran out and it has gone
		require.Len(t, get(t, k, ReceiveRequest{Consumer: "two"}), 1)
		require.Empty(t, get(t, k, ReceiveRequest{Consumer: "one"}))
	})
}

func TestPause(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := r.create("g", r.replicas[0], queue.GroupConfig{Paused: true})
		r.send(1)
		_, err := k.Receive(within(time.Second), "g", ReceiveRequest{})
		require.Equal(t, code.GroupPaused, refusal(t, err))
		parked := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second})
		synctest.Wait()
		begun := r.boot()
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupConfigure, ID: id})
		require.Len(t, (<-parked).ds, 1)
		require.Equal(t, begun, r.boot())
	})
}

func TestWaiterBound(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		k.o.MaxWaiters = 1
		r.create("g", r.replicas[0], queue.GroupConfig{})
		parked := receiveLater(k, ReceiveRequest{Wait: time.Second})
		synctest.Wait()
		_, err := k.Receive(within(time.Second), "g", ReceiveRequest{Wait: time.Second})
		require.Equal(t, code.MaxWaitingPulls, refusal(t, err))
		<-parked
	})
}

// First come, first served.
func TestWaitersAreServedInOrder(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		var parked []<-chan received
		for range 10 {
			parked = append(parked, receiveLater(k, ReceiveRequest{Wait: 20 * time.Second}))
			synctest.Wait()
		}
		r.send(10)
		for i, ch := range parked {
			require.Equal(t, []int{i + 1}, bodies((<-ch).ds))
		}
	})
}

// Acks go at once when nothing is in flight, else with the next, never later than 20 ms or 32.
func TestAckBatching(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(100)
		ds := get(t, k, ReceiveRequest{Max: 100})
		r.setDelay(time.Second)
		begun := r.boot()
		at := func() []time.Duration { return a.times() }
		var late []<-chan []ItemResult
		ackOne := func(i int) { late = append(late, ackLater(k, ds[i].Receipt)); synctest.Wait() }
		ackOne(0)
		require.Equal(t, []time.Duration{begun}, at(), "at once")
		ackOne(1)
		require.Len(t, at(), 1, "with the next")
		pass(19 * time.Millisecond)
		synctest.Wait()
		require.Len(t, at(), 1)
		pass(2 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, begun+20*time.Millisecond, at()[1], "never later than 20 ms")
		for i := 2; i < 33; i++ {
			ackOne(i)
		}
		require.Len(t, at(), 2)
		ackOne(33)
		require.Len(t, at(), 3, "never more than 32")
		require.Equal(t, []queue.AddressRange{{First: 3, Last: 34}}, a.commands()[2].(*queue.Ack).Ranges)
		for _, ch := range late {
			require.Equal(t, code.OK, (<-ch)[0].Code)
		}
	})
}

func TestBadInput(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.create("h", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		d := get(t, k, ReceiveRequest{})[0]
		ctx := within(time.Second)
		for _, req := range []ReceiveRequest{
			{Max: -1}, {Max: MaxReceive + 1}, {MaxBytes: -1}, {Wait: -1}, {Wait: MaxWait + 1},
			{HasLease: true, Lease: -1}, {HasLease: true, Lease: MaxLease + 1}, {Consumer: string(make([]byte, 81))},
		} {
			_, err := k.Receive(ctx, "g", req)
			require.Equal(t, code.InvalidArgument, refusal(t, err), "%+v", req)
		}
		_, err := k.Receive(ctx, "nobody", ReceiveRequest{})
		require.Equal(t, code.UnknownGroup, refusal(t, err))
		_, err = k.Ack(ctx, "nobody", []string{d.Receipt})
		require.Equal(t, code.UnknownGroup, refusal(t, err))
		_, err = k.Ack(ctx, "g", nil)
		require.Equal(t, code.BatchEmpty, refusal(t, err))
		_, err = k.Ack(ctx, "g", make([]string, MaxSettle+1))
		require.Equal(t, code.BatchTooLarge, refusal(t, err))
		require.Equal(t, []code.Code{code.InvalidReceipt, code.InvalidReceipt, code.OK}, ack(t, k, "garbage", "", d.Receipt))
		require.Equal(t, []code.Code{code.InvalidReceipt}, codes(t)(k.Ack(ctx, "h", []string{d.Receipt})), "of another group")
		require.Equal(t, []code.Code{code.InvalidArgument}, codes(t)(k.Nack(ctx, "g", []NackItem{{Receipt: d.Receipt, HasDelay: true, Delay: -1}})))
		require.Equal(t, []code.Code{code.InvalidArgument}, codes(t)(k.Extend(ctx, "g", []ExtendItem{{Receipt: d.Receipt, Lease: MaxLease + 1}})))
		other := k.receipts.Encode(Receipt{Shard: 8, Group: 1, Lease: d.lease, Address: 1})
		require.Equal(t, []code.Code{code.InvalidReceipt}, codes(t)(k.Ack(ctx, "g", []string{other})), "of another queue")
	})
}

func TestExtendAndRelease(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{LeaseMs: 2000})
		r.send(1)
		d := get(t, k, ReceiveRequest{})[0]
		for range 5 {
			pass(1900 * time.Millisecond)
			require.Equal(t, []code.Code{code.OK}, codes(t)(k.Extend(within(time.Second), "g", []ExtendItem{{Receipt: d.Receipt, Lease: 2 * time.Second}})))
		}
		proposed := len(a.commands())
		require.Equal(t, 1+5, proposed, "the record after a second, and one for each extend")
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Release(within(time.Second), "g", []string{d.Receipt})))
		require.Len(t, a.commands(), proposed+1, "a recorded lease is released by a command")
		again := get(t, k, ReceiveRequest{})[0]
		require.EqualValues(t, 1, again.Attempt)
		require.Equal(t, d.FirstDelivered, again.FirstDelivered)
		require.Equal(t, []code.Code{code.UnknownDelivery}, ack(t, k, d.Receipt))
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Release(within(time.Second), "g", []string{again.Receipt})))
		require.Len(t, a.commands(), proposed+1, "a lease that was never recorded is released in the ledger alone")
	})
}

func TestPurge(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := r.create("g", a, queue.GroupConfig{})
		r.send(6)
		ds := get(t, k, ReceiveRequest{Max: 2})
		dead := get(t, k, ReceiveRequest{})
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Reject(within(time.Second), "g", []RejectItem{{Receipt: dead[0].Receipt, Reason: "bad"}})))
		res, err := k.PurgeDead(within(time.Second), "g", nil, 10)
		require.NoError(t, err)
		require.Equal(t, []DeadResult{{Address: 3, ItemResult: plain(code.OK)}}, res)
		left, _, _ := a.state.DeadLetters(id, 0, 10, false)
		require.Empty(t, left)
		r.must(&queue.Retention{Stamp: r.stamp(), PurgeTo: 5})
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt), "finished is finished")
		require.Equal(t, []int{6}, bodies(get(t, k, ReceiveRequest{Max: 10, Wait: time.Second})))
		pass(2 * time.Second)
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10, Wait: time.Second}))
		require.Equal(t, 1, k.Stats()[0].Leased, "the purged ones are held no more")
	})
}

// Patient acks go at once after a pause, then together; one whose caller waits takes the others along, and so does a whole command's worth. What
// others wait for is not held up: the next message of a key, and room below a limit.
func TestPatientAcks(t *testing.T) {
	for name, c := range map[string]struct {
		options queue.QueueOptions
		config  queue.GroupConfig
		waits   bool
	}{
		"plain":            {waits: true},
		"key order":        {options: queue.QueueOptions{Ordering: queue.OrderKey}},
		"consumer's limit": {config: queue.GroupConfig{MaxInFlightPerConsumer: 1000}},
		"group's limit":    {config: queue.GroupConfig{MaxInFlight: 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 1, c.options, func(t *testing.T, r *fakeRaft, k *Keeper) {
				c.config.EnsureDefaults()
				r.create("g", r.replicas[0], c.config)
				r.send(600)
				rs := receipts(get(t, k, ReceiveRequest{Max: 600})...)
				pass(ackPause)
				begun := len(r.replicas[0].commands())
				var wg sync.WaitGroup
				send := func(f func(context.Context, string, []string) ([]ItemResult, error), n int) {
					part := rs[:n]
					rs = rs[n:]
					wg.Go(func() { require.NotContains(t, codes(t)(f(within(time.Second), "g", part)), code.UnknownDelivery) })
					synctest.Wait()
				}
				acks := func() (sizes []int) {
					for _, c := range r.replicas[0].commands()[begun:] {
						n := 0
						for _, x := range c.(*queue.Ack).Ranges {
							n += int(x.Last-x.First) + 1
						}
						sizes = append(sizes, n)
					}
					return sizes
				}
				send(k.AckPatiently, 1)
				require.Equal(t, []int{1}, acks(), "nothing was acked of late")
				pass(2 * time.Millisecond)
				send(k.AckPatiently, 2)
				if !c.waits {
					require.Equal(t, []int{1, 2}, acks())
					wg.Wait()
					return
				}
				send(k.AckPatiently, 40)
				require.Equal(t, []int{1}, acks())
				pass(ackPause)
				synctest.Wait()
				require.Equal(t, []int{1, 42}, acks())
				pass(2 * time.Millisecond)
				send(k.AckPatiently, 2)
				send(k.Ack, 1)
				require.Equal(t, []int{1, 42, 3}, acks(), "somebody waits, and nothing is in flight")
				send(k.AckPatiently, ackCount)
				require.Equal(t, []int{1, 42, 3, ackCount}, acks())
				pass(2 * time.Millisecond)

				r.setDelay(100 * time.Millisecond)
				send(k.Ack, 1)
				send(k.AckPatiently, 1)
				pass(batchDelay - time.Millisecond)
				synctest.Wait()
				require.Len(t, acks(), 5, "beside one that is in flight they wait as others do")
				pass(time.Millisecond)
				synctest.Wait()
				require.Equal(t, []int{1, 1}, acks()[4:])
				wg.Wait()
			})
		})
	}
}

// A patient ack goes on when its caller is gone, and at once when somebody asks for it who waits.
func TestPatientAcksGoOn(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{LeaseMs: 2000})
		r.send(3)
		rs := receipts(get(t, k, ReceiveRequest{Max: 3})...)
		pass(ackPause)
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.AckPatiently(within(time.Second), "g", rs[:1])))
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.Equal(t, []code.Code{code.QuorumLost}, codes(t)(k.AckPatiently(ctx, "g", rs[1:2])))
		pass(ackPause)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, rs[1]))
		commands := len(r.replicas[0].commands())

		var wg sync.WaitGroup
		wg.Go(func() {
			require.Equal(t, []code.Code{code.OK}, codes(t)(k.AckPatiently(within(time.Second), "g", rs[2:])))
		})
		synctest.Wait()
		require.Len(t, r.replicas[0].commands(), commands)
		wg.Go(func() { require.Equal(t, []code.Code{code.OK}, ack(t, k, rs[2])) })
		synctest.Wait()
		require.Len(t, r.replicas[0].commands(), commands+1)
		wg.Wait()
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
	})
}

// A purge that is refused while its letter is being exported, and of which a copy is under way: that copy must not finish the message after
// the export was taken back and the letter redriven.
func TestLateCopyOfARefusedPurge(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(2)
		dead := get(t, k, ReceiveRequest{})
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Reject(within(time.Second), "g", []RejectItem{{Receipt: dead[0].Receipt}})))
		set := func(to queue.ExportState) { // as the outbox does, and nobody tells the ledger
			a.state.mu.Lock()
			defer a.state.mu.Unlock()
			d := a.state.groups[worldGroup].dead[1]
			d.Change, d.ExportState = d.Change+1, to
		}
		var late queue.Command
		a.setFate(func(c queue.Command) fate {
			if _, isAck := c.(*queue.Ack); !isAck || late != nil {
				return fateCommit
			}
			late = c // it is on its way
			set(queue.ExportExporting)
			return fateLost
		})
		res, err := k.PurgeDead(within(time.Second), "g", []queue.Address{1}, 0)
		require.NoError(t, err)
		require.Equal(t, []DeadResult{{Address: 1, ItemResult: ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}}}, res)
		set(queue.ExportPending)
		other := get(t, k, ReceiveRequest{})
		require.Equal(t, []int{2}, bodies(other), "nobody is held up")

		var codes [3]code.Code
		var wg sync.WaitGroup
		for i := range codes {
			wg.Go(func() {
				res, err := k.Redrive(within(10*time.Second), "g", []queue.Address{1}, 0)
				require.NoError(t, err)
				codes[i] = res[0].Code
			})
		}
		wg.Wait()
		require.Contains(t, codes, code.OK)
		require.Equal(t, code.StaleOwner, (<-r.commit(late, a)).Code)
		again := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{1}, bodies(again))
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, k, receipts(other[0], again[0])...), "what was leased stays so")
		g, _ := a.state.Group(worldGroup)
		require.Equal(t, queue.Epoch(2), g.Epoch)
	})
}

// A key that stands still is remembered up to a bound; keys that were met before go on.
func TestLookAheadIsBounded(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{Ordering: queue.OrderKey}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{LeaseMs: 60_000})
		r.send(2, func(m *queue.Message) { m.Key = []byte("b") })
		r.send(lookAheadKeyed+2*readAhead, func(m *queue.Message) { m.Key = []byte("a") })
		r.send(1, func(m *queue.Message) { m.Key = []byte("c") })
		ds := get(t, k, ReceiveRequest{Max: 10, Wait: 5 * time.Second})
		require.Equal(t, []int{1, 3}, bodies(ds))
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
		s := k.Stats()[0]
		require.True(t, s.More)
		require.InDelta(t, lookAheadKeyed, s.Blocked, readAhead)
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, k, receipts(ds...)...))
		require.Equal(t, []int{2, 4}, bodies(get(t, k, ReceiveRequest{Max: 10, Wait: 5 * time.Second})))
	})
}
