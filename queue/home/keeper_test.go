package home

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// bubble runs a test on a shard of n replicas, the first of which has a keeper.
func bubble(t *testing.T, n int, o queue.QueueOptions, f func(t *testing.T, r *fakeRaft, k *Keeper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newFakeRaft(t, n, o)
		k := r.replicas[0].open()
		synctest.Wait()
		defer func() {
			for _, p := range r.replicas {
				p.close()
			}
		}()
		f(t, r, k)
	})
}

func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// pass lets a bubble's time pass.
func pass(d time.Duration) { <-time.After(d) }

// get receives and expects no error.
func get(t *testing.T, k *Keeper, req ReceiveRequest) []Delivery {
	t.Helper()
	ds, err := k.Receive(within(time.Minute), "g", req)
	require.NoError(t, err)
	return ds
}

// bodies lists what was delivered.
func bodies(ds []Delivery) []int {
	var out []int
	for _, d := range ds {
		n, _ := strconv.Atoi(string(d.Message.Body))
		out = append(out, n)
	}
	return out
}

func receipts(ds ...Delivery) []string {
	var out []string
	for _, d := range ds {
		out = append(out, d.Receipt)
	}
	return out
}

// ack acks and returns the codes.
func ack(t *testing.T, k *Keeper, rs ...string) []code.Code {
	t.Helper()
	return codes(t)(k.Ack(within(10*time.Second), "g", rs))
}

func codes(t *testing.T) func([]ItemResult, error) []code.Code {
	return func(items []ItemResult, err error) []code.Code {
		t.Helper()
		require.NoError(t, err)
		var out []code.Code
		for _, i := range items {
			out = append(out, i.Code)
		}
		return out
	}
}

func refusal(t *testing.T, err error) code.Code {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, err, &e)
	return e.Code
}

// A new group of a new queue is served at once: no wait of a new home, no timer.
func TestReceiveAckOfANewGroup(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(3)
		before := r.boot()
		ds := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{1, 2, 3}, bodies(ds))
		require.Equal(t, before, r.boot(), "a receive with messages ready waited")
		require.EqualValues(t, 1, ds[0].Attempt)
		require.Equal(t, []code.Code{code.OK, code.OK, code.OK}, ack(t, k, receipts(ds...)...))
		require.Equal(t, r.delay, r.boot()-before, "an ack with nothing in flight waited")
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10}))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt), "a repeated ack learns that it took effect")
	})
}

// A shard has no leader when its keeper starts, and reads fail. Once one is known, the first read is asked again at once, so
// that a group which is made then is served without the wait of a new home.
func TestReceiveOfANewGroupAfterTheFirstElection(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, _ *Keeper) {
		p := r.replicas[0]
		cut := func(cut bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			p.cut = cut
		}
		cut(true)
		k := p.restart()
		pass(4 * time.Second) // several reads fail, and the next is seconds away
		cut(false)
		k.LeaderKnown()
		synctest.Wait()
		require.True(t, k.baseKnown())
		before := r.boot()
		r.create("g", p, queue.GroupConfig{})
		r.send(1)
		require.Equal(t, []int{1}, bodies(get(t, k, ReceiveRequest{Max: 1})))
		require.Less(t, r.boot()-before, DefaultHomeLease/10, "it waited")
		k.LeaderKnown() // again, for nothing
	})
}

// Where a quorum takes longer to answer than a third of the home lease, as on slow disks, deliveries are slow, and go on.
func TestSlowQuorumDelivers(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.mu.Lock()
		r.readFor = DefaultHomeLease * 3 / 5
		r.mu.Unlock()
		for range 10 {
			pass(2 * DefaultHomeLease) // no read is fresh any more
			r.send(1)
			require.Len(t, get(t, k, ReceiveRequest{Max: 1, Wait: 2 * DefaultHomeLease}), 1)
		}
	})
}

// B03: a poller that goes away gets nothing: the next message goes to the next poller, with attempt 1.
func TestB03CanceledLongPoll(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		for range 100 {
			ctx, cancel := context.WithCancel(context.Background())
			gone := receiveLaterCtx(ctx, k, ReceiveRequest{Wait: 20 * time.Second})
			synctest.Wait()
			next := receiveLater(k, ReceiveRequest{Wait: 5 * time.Second})
			synctest.Wait()
			cancel() // noticed by the waiter before or after the message is there
			r.send(1)
			require.Equal(t, code.DeadlineExceeded, refusal(t, (<-gone).err))
			got := <-next
			require.NoError(t, got.err)
			require.Len(t, got.ds, 1)
			require.EqualValues(t, 1, got.ds[0].Attempt)
			require.Equal(t, []code.Code{code.OK}, ack(t, k, got.ds[0].Receipt))
		}
		require.Zero(t, k.Stats()[0].Waiters)
	})
}

// B03: what wakes a poller, within a moment and not at the end of its wait.
func TestB03LongPollWakes(t *testing.T) {
	wakes := map[string]struct {
		arrange func(r *fakeRaft, k *Keeper) // before the poll
		event   func(r *fakeRaft, k *Keeper) // after 2 s of it
		within  time.Duration
	}{
		"a message is sent": {func(*fakeRaft, *Keeper) {}, func(r *fakeRaft, _ *Keeper) { r.send(1) }, 0},
		"a lease runs out": {
			func(r *fakeRaft, k *Keeper) {
				r.send(1)
				_, _ = k.Receive(within(time.Second), "g", ReceiveRequest{Lease: 2 * time.Second, HasLease: true})
			},
			func(*fakeRaft, *Keeper) {}, 1100 * time.Millisecond,
		},
		"a delayed message falls due": {
			func(r *fakeRaft, _ *Keeper) {
				r.send(1, func(m *queue.Message) { m.VisibleAt = r.stamp() + 2500 })
			},
			func(*fakeRaft, *Keeper) {}, 600 * time.Millisecond,
		},
		"a dead letter is redriven": {
			func(r *fakeRaft, k *Keeper) {
				r.send(1)
				ds, _ := k.Receive(within(time.Second), "g", ReceiveRequest{})
				_, _ = k.Reject(within(time.Second), "g", []RejectItem{{Receipt: ds[0].Receipt}})
			},
			func(_ *fakeRaft, k *Keeper) {
				res, _ := k.Redrive(within(time.Second), "g", nil, 10)
				if len(res) != 1 {
					panic("no dead letter")
				}
			}, 10 * time.Millisecond,
		},
		"a delayed message is moved to now": {
			func(r *fakeRaft, _ *Keeper) {
				r.send(1, func(m *queue.Message) { m.VisibleAt = r.stamp() + 10_000 })
			},
			func(r *fakeRaft, _ *Keeper) {
				r.must(&queue.Retention{Stamp: r.stamp(), Delayed: []queue.DelayedChange{{Address: 1, NewVisibleAt: r.stamp() - 5000}}})
			}, 1100 * time.Millisecond,
		},
		"the queue's pause ends": {
			func(r *fakeRaft, _ *Keeper) {
				r.send(1)
				r.must(&queue.Retention{Stamp: r.stamp(), Options: &queue.QueueOptions{Paused: true}})
			},
			func(r *fakeRaft, _ *Keeper) {
				r.must(&queue.Retention{Stamp: r.stamp(), Options: &queue.QueueOptions{}})
			}, time.Second,
		},
	}
	for name, w := range wakes {
		t.Run(name, func(t *testing.T) {
			bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
				r.create("g", r.replicas[0], queue.GroupConfig{})
				w.arrange(r, k)
				start := r.boot()
				ch := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second})
				synctest.Wait()
				pass(2*time.Second - (r.boot() - start))
				event := r.boot()
				w.event(r, k)
				got := <-ch
				require.NoError(t, got.err)
				require.Len(t, got.ds, 1)
				require.LessOrEqual(t, r.boot()-event, w.within)
			})
		})
	}
}

// B14: counts are exact and durable; 1-2-4-8 s, dead at the fifth failure, with its reason.
func TestB14AttemptsSchedule(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := r.create("g", a, queue.GroupConfig{LeaseMs: 1000})
		r.send(1)
		for n, backoff := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 0} {
			ds := get(t, k, ReceiveRequest{Wait: 20 * time.Second})
			require.Len(t, ds, 1)
			require.EqualValues(t, n+1, ds[0].Attempt)
			failed := r.boot()
			if n%2 == 0 {
				items, err := k.Nack(within(time.Second), "g", []NackItem{{Receipt: ds[0].Receipt, Reason: "no"}})
				require.NoError(t, err)
				require.Equal(t, n == 4, items[0].Dead)
			} else {
				pass(ds[0].Lease)
				failed = r.boot()
			}
			if n == 4 {
				break
			}
			next := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second, Lease: time.Minute, HasLease: true})
			got := <-next
			require.Len(t, got.ds, 1)
			require.InDelta(t, backoff, r.boot()-failed, float64(10*time.Millisecond))
			require.Equal(t, []code.Code{code.OK}, codes(t)(k.Release(within(time.Second), "g", receipts(got.ds...))))
		}
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 20 * time.Second}))
		dead, _, _ := a.state.DeadLetters(id, 0, 10, false)
		require.Len(t, dead, 1)
		require.EqualValues(t, 5, dead[0].Attempts)
		require.Equal(t, "no", dead[0].Reason)
		res, err := k.Redrive(within(time.Second), "g", []queue.Address{1, 2}, 0)
		require.NoError(t, err)
		require.Equal(t, code.OK, res[0].Code)
		require.Equal(t, code.UnknownMessage, res[1].Code)
		ds := get(t, k, ReceiveRequest{})
		require.EqualValues(t, 1, ds[0].Attempt)
		require.EqualValues(t, 1, ds[0].Round)
	})
}

// What is redriven is in memory until a consumer has it, so there is a bound (G9).
func TestRedriveIsBounded(t *testing.T) {
	defer func(was int) { redriveAhead = was }(redriveAhead)
	redriveAhead = 4
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{MaxAttempts: 1})
		r.send(6)
		for _, d := range get(t, k, ReceiveRequest{Max: 6}) {
			_, err := k.Reject(within(time.Second), "g", []RejectItem{{Receipt: d.Receipt}})
			require.NoError(t, err)
		}
		res, err := k.Redrive(within(time.Second), "g", []queue.Address{1, 2, 3}, 0)
		require.NoError(t, err)
		require.Len(t, res, 3)
		_, err = k.Redrive(within(time.Second), "g", []queue.Address{4, 5}, 0)
		require.Equal(t, code.Backpressure, refusal(t, err))
		_, err = k.PurgeDead(within(time.Second), "g", []queue.Address{4}, 0)
		require.NoError(t, err, "what is purged goes")
		get(t, k, ReceiveRequest{Max: 2})
		res, err = k.Redrive(within(time.Second), "g", []queue.Address{5, 6}, 0)
		require.NoError(t, err)
		require.Equal(t, code.OK, res[1].Code)
	})
}

// B01: a stale receipt must not touch somebody else's lease.
func TestB01StaleReceipt(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		old := get(t, k, ReceiveRequest{Lease: 2 * time.Second, HasLease: true})[0].Receipt
		pass(2500 * time.Millisecond) // ran out, in its backoff: nobody has had it since
		require.Equal(t, []code.Code{code.UnknownDelivery}, codes(t)(k.Extend(within(time.Second), "g", []ExtendItem{{Receipt: old, Lease: time.Minute}})))
		ds := get(t, k, ReceiveRequest{Wait: 5 * time.Second, Lease: time.Minute, HasLease: true})
		require.NotEqual(t, old, ds[0].Receipt)
		unknown := []code.Code{code.UnknownDelivery}
		require.Equal(t, unknown, ack(t, k, old))
		require.Equal(t, unknown, codes(t)(k.Extend(within(time.Second), "g", []ExtendItem{{Receipt: old}})))
		require.Equal(t, unknown, codes(t)(k.Nack(within(time.Second), "g", []NackItem{{Receipt: old}})))
		require.Equal(t, unknown, codes(t)(k.Release(within(time.Second), "g", []string{old})))
		require.Equal(t, unknown, codes(t)(k.Reject(within(time.Second), "g", []RejectItem{{Receipt: old}})))
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt))
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
	})
}

// B01: the newest receipt of a lease that ran out still finishes the message, also while the run-out is recorded.
func TestB01LateAckIsHonoured(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(2)
		lease := ReceiveRequest{Lease: time.Second, HasLease: true}
		first := get(t, k, lease)[0].Receipt
		pass(1500 * time.Millisecond)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, first))
		second := get(t, k, lease)[0].Receipt
		r.setDelay(time.Second) // the recording takes that long
		pass(1200 * time.Millisecond)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, second))
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
	})
}

// B01: delete and expiry at the same moment: gone for good, or again with a higher count, never both.
func TestB01AckAtTheDeadline(t *testing.T) {
	for off := -3 * time.Millisecond; off <= 3*time.Millisecond; off += time.Millisecond {
		bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
			r.create("g", r.replicas[0], queue.GroupConfig{})
			r.send(1)
			d := get(t, k, ReceiveRequest{Lease: time.Second, HasLease: true})[0]
			pass(time.Second + off)
			c := ack(t, k, d.Receipt)[0]
			again := get(t, k, ReceiveRequest{Wait: 5 * time.Second})
			require.Equal(t, c == code.OK, len(again) == 0, "%v: %v", off, c)
		})
	}
}

// B01: one copy in one response, also with a lease of 0, which runs out at once and counts.
func TestB01LeaseOfZero(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		require.Len(t, get(t, k, ReceiveRequest{Max: 10, HasLease: true}), 1)
		ds := get(t, k, ReceiveRequest{Max: 10, Wait: 5 * time.Second})
		require.Len(t, ds, 1)
		require.EqualValues(t, 2, ds[0].Attempt)
	})
}

// B11: one message of a key at a time, in address order, whatever fails; other keys are not held up.
func TestB11KeyOrder(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{Ordering: queue.OrderKey}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{MaxAttempts: 2})
		key := func(s string) func(*queue.Message) { return func(m *queue.Message) { m.Key = []byte(s) } }
		r.send(3, key("a")) // 1 2 3
		r.send(2, key("b")) // 4 5
		r.send(1)           // 6: no key
		ds := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{1, 4, 6}, bodies(ds))
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10}))
		require.Equal(t, 2, k.Stats()[0].BlockedKeys)
		// A failed head blocks its key through its backoff.
		_, err := k.Nack(within(time.Second), "g", []NackItem{{Receipt: ds[0].Receipt}})
		require.NoError(t, err)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[1].Receipt))
		require.Equal(t, []int{5}, bodies(get(t, k, ReceiveRequest{Max: 10})))
		head := get(t, k, ReceiveRequest{Max: 10, Wait: 5 * time.Second})
		require.Equal(t, []int{1}, bodies(head))
		// A dead head lets the next go.
		items, err := k.Nack(within(time.Second), "g", []NackItem{{Receipt: head[0].Receipt}})
		require.NoError(t, err)
		require.True(t, items[0].Dead)
		two := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{2}, bodies(two))
		// A redriven one goes behind.
		_, err = k.Redrive(within(time.Second), "g", nil, 10)
		require.NoError(t, err)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, two[0].Receipt))
		three := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{3}, bodies(three))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, three[0].Receipt))
		require.Equal(t, []int{1}, bodies(get(t, k, ReceiveRequest{Max: 10})))
	})
}

// A delayed head blocks its key until it is due, is moved, or is cancelled.
func TestDelayedHeadOfAKey(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{Ordering: queue.OrderKey}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		for _, s := range []string{"a", "b", "c"} {
			r.send(1, func(m *queue.Message) { m.Key, m.VisibleAt = []byte(s), r.stamp()+20_000 })
			r.send(1, func(m *queue.Message) { m.Key = []byte(s) })
		}
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10, Wait: time.Second}))
		r.must(&queue.Retention{Stamp: r.stamp(), Delayed: []queue.DelayedChange{{Address: 1}, {Address: 3, NewVisibleAt: r.stamp()}}})
		ds := get(t, k, ReceiveRequest{Max: 10, Wait: 5 * time.Second})
		require.ElementsMatch(t, []int{2, 3}, bodies(ds))
		require.Equal(t, []int{5}, bodies(get(t, k, ReceiveRequest{Max: 10, Wait: 20 * time.Second, Lease: 0})), "c is due by now")
	})
}

// What was given back is not acked by its old receipt, even while nobody has had the message since.
func TestAckAfterNack(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		d := get(t, k, ReceiveRequest{})[0]
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Nack(within(time.Second), "g", []NackItem{{Receipt: d.Receipt}})))
		require.Equal(t, []code.Code{code.UnknownDelivery}, ack(t, k, d.Receipt))
		require.Len(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}), 1)
	})
}

// A delayed message whose commit took longer than its delay lies behind what was read of the delayed index already.
func TestDelayShorterThanTheCommit(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1, func(m *queue.Message) { m.VisibleAt = r.stamp() + 100 })
		late := &queue.Enqueue{Stamp: r.stamp(), Publishes: []queue.Publish{{Messages: []queue.Message{{VisibleAt: r.stamp() + 50, Body: []byte("2")}}}}}
		pass(200 * time.Millisecond)
		require.Equal(t, []int{1}, bodies(get(t, k, ReceiveRequest{})))
		r.must(late)
		require.Equal(t, []int{2}, bodies(get(t, k, ReceiveRequest{})))
	})
}

// A delayed message that is moved to before what was read of the delayed index comes within a moment.
func TestRescheduledBehindTheCursor(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		past := r.stamp() + 1
		r.send(1, func(m *queue.Message) { m.VisibleAt = r.stamp() + 60_000 })
		r.send(1, func(m *queue.Message) { m.VisibleAt = r.stamp() + 100 })
		pass(200 * time.Millisecond)
		require.Equal(t, []int{2}, bodies(get(t, k, ReceiveRequest{})))
		pass(time.Second)
		r.send(1)
		require.Equal(t, []int{3}, bodies(get(t, k, ReceiveRequest{})), "the clock has moved on")
		r.must(&queue.Retention{Stamp: r.stamp(), Delayed: []queue.DelayedChange{{Address: 1, NewVisibleAt: past}}})
		begun := r.boot()
		require.Equal(t, []int{1}, bodies(get(t, k, ReceiveRequest{Wait: 20 * time.Second})))
		require.LessOrEqual(t, r.boot()-begun, 2*time.Second)
	})
}

// Calls that wait for the epoch are told at once that the group was deleted, whoever notices it.
func TestDeletedWhileCallsWait(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		g, err := k.group("g")
		require.NoError(t, err)
		waits := make(chan error, 1)
		go func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			waits <- g.awaitOr(within(time.Minute), true, func() (bool, error) { return false, g.enter() })
		}()
		pass(time.Second)
		g.mu.Lock() // a command is applied, and a call comes before what follows the log has looked
		p := r.replicas[0]
		p.state.apply(99, &queue.Group{Op: queue.GroupDelete, ID: g.id, ExpectedEpoch: g.info.Epoch})
		k.version.Add(1)
		require.Error(t, g.enter())
		g.mu.Unlock()
		begun := r.boot()
		require.Equal(t, code.UnknownGroup, refusal(t, <-waits))
		require.Less(t, r.boot()-begun, time.Second)
	})
}

// A receipt from before a recovery is refused, whatever its epoch.
func TestReceiptFromBeforeARecovery(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		d := get(t, k, ReceiveRequest{})[0]
		old := k.receipts.Encode(Receipt{Shard: 7, Recovery: 1, Group: 1, Lease: d.lease, Address: 1})
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, d.Receipt))
	})
}
