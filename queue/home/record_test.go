package home

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// entries lists the Expire entries of a kind that were proposed at a replica.
func entries(p *fakeReplica, kind queue.ExpireKind) []queue.ExpireEntry {
	var out []queue.ExpireEntry
	for _, c := range p.commands() {
		if x, ok := c.(*queue.Expire); ok {
			for _, e := range x.Entries {
				if e.Kind == kind {
					out = append(out, e)
				}
			}
		}
	}
	return out
}

func extend(t *testing.T, k *Keeper, receipt string, d time.Duration) code.Code {
	t.Helper()
	return codes(t)(k.Extend(within(10*time.Second), "g", []ExtendItem{{Receipt: receipt, Lease: d}}))[0]
}

func nack(t *testing.T, k *Keeper, receipt string) code.Code {
	t.Helper()
	return codes(t)(k.Nack(within(10*time.Second), "g", []NackItem{{Receipt: receipt}}))[0]
}

func release(t *testing.T, k *Keeper, receipt string) code.Code {
	t.Helper()
	return codes(t)(k.Release(within(10*time.Second), "g", []string{receipt}))[0]
}

// extendLater extends in the background.
func extendLater(k *Keeper, receipt string, d time.Duration) <-chan code.Code {
	ch := make(chan code.Code, 1)
	go func() {
		items, err := k.Extend(within(time.Minute), "g", []ExtendItem{{Receipt: receipt, Lease: d}})
		if err != nil {
			ch <- codeOf(err, code.Internal)
			return
		}
		ch <- items[0].Code
	}()
	return ch
}

// A lease that is still open record_after after its hand-out is recorded, many in one command; the receive does not
// wait for it, and what is settled before costs nothing.
func TestRecordedAfterAWhile(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{}, 40)
		before := r.boot()
		ds := get(t, k, ReceiveRequest{Max: 40, Consumer: "c", Lease: 10 * time.Second, HasLease: true})
		require.Equal(t, before, r.boot())
		require.Equal(t, code.OK, ack(t, k, ds[0].Receipt)[0])
		require.Equal(t, code.OK, release(t, k, ds[1].Receipt))
		pass(900 * time.Millisecond)
		require.Empty(t, entries(a, queue.ExpireLease))
		pass(200 * time.Millisecond)
		recorded := entries(a, queue.ExpireLease)
		require.Len(t, recorded, 38)
		require.Len(t, a.commands(), 2, "one command for all")
		_, lease, found, _ := a.state.RetryOf(id, 3)
		require.True(t, found)
		end := stampZero + queue.Stamp((before+10*time.Second)/time.Millisecond)
		require.Equal(t, queue.RecordedLease{Name: ds[2].lease, Begun: stampZero + queue.Stamp(before/time.Millisecond), Deadline: end, Consumer: "c"}, lease)
		pass(5 * time.Second)
		require.Len(t, a.commands(), 2, "once is enough")
	})
}

// record_after is the group's, and may be changed.
func TestRecordAfterOfTheGroup(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{RecordAfterMs: 100}, 2)
		get(t, k, ReceiveRequest{})
		pass(150 * time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 1)
		cfg := queue.GroupConfig{RecordAfterMs: 5000}
		cfg.EnsureDefaults()
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupConfigure, ID: id, Config: cfg})
		get(t, k, ReceiveRequest{})
		pass(4900 * time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 1)
		pass(200 * time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 2)
	})
}

// The home dies, and another takes the group over: what was recorded is still held, and every way to settle it works
// there at once, also while the new home waits; what was not comes again.
func TestReceiptsOutliveTheirHome(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{}, 7)
		ds := get(t, ka, ReceiveRequest{Max: 6, Consumer: "c"})
		pass(1100 * time.Millisecond)
		young := get(t, ka, ReceiveRequest{})[0]
		a.close()
		r.giveHome(id, b)
		begun := r.boot()
		require.Equal(t, code.StaleOwner, ack(t, kb, young.Receipt)[0], "never recorded")
		require.Equal(t, begun, r.boot(), "refused at once")
		require.Equal(t, code.OK, ack(t, kb, ds[0].Receipt)[0])
		require.Less(t, r.boot()-begun, 10*time.Millisecond, "a receipt need not wait for the end of the old home's lease")
		require.Equal(t, code.OK, nack(t, kb, ds[1].Receipt))
		require.Equal(t, code.OK, release(t, kb, ds[2].Receipt))
		require.Equal(t, []code.Code{code.OK}, codes(t)(kb.Reject(within(time.Second), "g", []RejectItem{{Receipt: ds[3].Receipt}})))
		require.Equal(t, code.OK, extend(t, kb, ds[4].Receipt, time.Minute))
		again := get(t, kb, ReceiveRequest{Max: 10, Wait: 5 * time.Second})
		require.InDelta(t, 1100*time.Millisecond, r.boot()-begun, float64(10*time.Millisecond))
		require.Equal(t, []int{3, 2, 7}, bodies(again), "released, given back, and never recorded")
		require.Equal(t, []uint32{1, 2, 1}, []uint32{again[0].Attempt, again[1].Attempt, again[2].Attempt})
		held, err := kb.Held("g", 10)
		require.NoError(t, err)
		require.Len(t, held, 5)
		require.Equal(t, "c", held[3].Consumer, "a lease keeps its consumer")
		require.Equal(t, code.OK, ack(t, kb, ds[5].Receipt)[0])
		require.Equal(t, []code.Code{code.OK, code.OK, code.OK}, ack(t, kb, receipts(again...)...))
		require.Equal(t, code.StaleOwner, ack(t, kb, young.Receipt)[0], "somebody else has it")
	})
}

// A restart of the same home, in the same place: its leases stand, under a new epoch.
func TestReceiptsOutliveARestart(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{}, 2)
		old := get(t, k, ReceiveRequest{})[0]
		pass(1100 * time.Millisecond)
		young := get(t, k, ReceiveRequest{})[0]
		k = a.restart()
		require.Equal(t, code.StaleOwner, ack(t, k, young.Receipt)[0])
		require.Equal(t, []int{2}, bodies(get(t, k, ReceiveRequest{Max: 5, Wait: 5 * time.Second})))
		require.Equal(t, code.OK, ack(t, k, old.Receipt)[0])
		require.Equal(t, code.StaleOwner, ack(t, k, young.Receipt)[0], "somebody else has it")
	})
}

// A process that starts behind the log does not refuse a receipt whose record it has not applied yet.
func TestReceiptAtAReplicaThatIsBehind(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, _ *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		serving(t, r, queue.GroupConfig{}, 1)
		d := get(t, ka, ReceiveRequest{})[0]
		a.close()
		a.stall(true)
		name := d.lease
		r.mustAt(b, &queue.Expire{Stamp: r.stamp(), Group: 1, Epoch: 1, Entries: []queue.ExpireEntry{{
			Kind: queue.ExpireLease, Address: 1, Lease: name, Deadline: stampAfter(r.stamp(), time.Minute),
		}}}) // the record of the process that died, committed after it did
		a.setCut(true)
		k := a.open()
		late := ackLater(k, d.Receipt)
		pass(time.Second)
		require.Empty(t, late)
		a.setCut(false)
		a.stall(false)
		require.Equal(t, code.OK, (<-late)[0].Code)
	})
}

// A former home that does not know yet that it is one refuses no receipt of its successor for good, whether it has just
// started or serves its old epoch.
func TestReceiptOfALaterHome(t *testing.T) {
	for name, restarted := range map[string]bool{"restarted": true, "serving": false} {
		t.Run(name, func(t *testing.T) {
			two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
				a, b := r.replicas[0], r.replicas[1]
				id := serving(t, r, queue.GroupConfig{}, 2)
				get(t, ka, ReceiveRequest{})
				a.stall(true)
				a.setCut(true)
				r.mustAt(b, &queue.Home{Stamp: r.stamp(), Group: id, ExpectedHome: a.id, ExpectedEpoch: 1, NewHome: b.id})
				d := get(t, kb, ReceiveRequest{Wait: 5 * time.Second})[0]
				if restarted {
					a.close()
					ka = a.open()
					late := extendLater(ka, d.Receipt, time.Minute)
					pass(time.Second)
					require.Empty(t, late, "before the first read of the log")
					a.setCut(false)
					a.stall(false)
					require.Equal(t, code.NotOwner, <-late)
				} else {
					require.Equal(t, code.NotOwner, extend(t, ka, d.Receipt, time.Minute))
				}
				require.Equal(t, code.OK, ack(t, kb, d.Receipt)[0])
			})
		})
	}
}

// An extend is answered once apply has recorded it; its deadline counts from the call, at this home and at the next.
func TestExtendIsRecorded(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{LeaseMs: 1000}, 1)
		d := get(t, ka, ReceiveRequest{})[0]
		r.setDelay(500 * time.Millisecond)
		pass(800 * time.Millisecond)
		begun := r.boot()
		require.Equal(t, code.OK, extend(t, ka, d.Receipt, 10*time.Second))
		require.Equal(t, 500*time.Millisecond, r.boot()-begun, "answered after apply, beyond the end of the lease that it extends")
		r.setDelay(time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 1)
		_, lease, _, _ := a.state.RetryOf(id, 1)
		require.Equal(t, stampZero+queue.Stamp((begun+10*time.Second)/time.Millisecond), lease.Deadline)
		a.close()
		r.giveHome(id, b)
		require.Empty(t, get(t, kb, ReceiveRequest{Wait: 5 * time.Second}))
		require.Equal(t, code.OK, extend(t, kb, d.Receipt, 10*time.Second))
		require.Empty(t, get(t, kb, ReceiveRequest{Wait: 8 * time.Second}))
		require.Equal(t, code.OK, ack(t, kb, d.Receipt)[0])
	})
}

// An extend whose outcome is unknown says so, and holds if it was applied; one that was never queued has no effect.
func TestExtendUnknown(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{LeaseMs: 900}, 2)
		ds := get(t, k, ReceiveRequest{Max: 2})
		a.setFate(func(queue.Command) fate { return fateRefuse })
		items, err := k.Extend(within(500*time.Millisecond), "g", []ExtendItem{{Receipt: ds[0].Receipt, Lease: time.Minute}})
		require.NoError(t, err)
		require.Equal(t, ItemResult{Code: code.NoLeader, Effect: code.EffectNone}, items[0])
		a.setFate(func(queue.Command) fate { return fateLost })
		items, err = k.Extend(within(300*time.Millisecond), "g", []ExtendItem{{Receipt: ds[1].Receipt, Lease: time.Minute}})
		require.NoError(t, err)
		require.Equal(t, ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}, items[0])
		a.setFate(nil)
		again := get(t, k, ReceiveRequest{Max: 2, Wait: 20 * time.Second})
		require.Equal(t, []int{1}, bodies(again), "the second lease was lengthened in the end")
		require.EqualValues(t, 2, again[0].Attempt)
		require.Equal(t, code.OK, ack(t, k, ds[1].Receipt)[0])
	})
}

// An extend to nothing lets the lease run out, which counts, and is answered when that is recorded.
func TestExtendToNothing(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{BackoffBaseMs: 1}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		require.Equal(t, code.OK, extend(t, k, d.Receipt, 0))
		again := get(t, k, ReceiveRequest{Wait: time.Second})[0]
		require.EqualValues(t, 2, again.Attempt)
		require.Equal(t, ranOut, again.Reason)
	})
}

// The deadline is wall time of another host: a new home adds 1 s, and then the lease counts as run out.
func TestRecordedLeaseRunsOut(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{LeaseMs: 4000}, 2)
		ds := get(t, ka, ReceiveRequest{Max: 2})
		end := r.boot() + 4*time.Second
		pass(1100 * time.Millisecond)
		a.close()
		r.giveHome(id, b)
		require.Empty(t, get(t, kb, ReceiveRequest{Wait: 3 * time.Second}))
		require.Less(t, r.boot(), end+time.Second)
		pass(end + 990*time.Millisecond - r.boot())
		require.Equal(t, code.OK, ack(t, kb, ds[0].Receipt)[0], "within the margin of the clocks")
		again := get(t, kb, ReceiveRequest{Wait: 10 * time.Second})
		require.Equal(t, []int{2}, bodies(again))
		require.EqualValues(t, 2, again[0].Attempt, "a lease that ran out counts, whoever sees it")
		require.InDelta(t, end+2*time.Second, r.boot(), float64(20*time.Millisecond), "the margin, and the backoff")
		require.Equal(t, code.StaleOwner, ack(t, kb, ds[1].Receipt)[0])
	})
}

// A lease that ran out while there was no home counts as soon as there is one, and a late ack is honoured until then.
func TestRanOutWithoutAHome(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		id := serving(t, r, queue.GroupConfig{LeaseMs: 3000}, 2)
		ds := get(t, ka, ReceiveRequest{Max: 2})
		pass(1100 * time.Millisecond)
		r.replicas[0].close()
		pass(time.Hour)
		r.giveHome(id, r.replicas[1])
		late := ackLater(kb, ds[0].Receipt)
		again := get(t, kb, ReceiveRequest{Max: 2, Wait: 10 * time.Second})
		require.Equal(t, code.OK, (<-late)[0].Code)
		require.Equal(t, []int{2}, bodies(again))
		require.EqualValues(t, 2, again[0].Attempt)
	})
}

// The ack that makes a new home look at the leases is in time for those that are over, the last attempt's, too.
func TestLateAckOfTheLastAttempt(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{LeaseMs: 3000, MaxAttempts: 1}, 2)
		ds := get(t, ka, ReceiveRequest{Max: 2})
		pass(1100 * time.Millisecond)
		a.close()
		pass(time.Hour)
		r.giveHome(id, b)
		require.Equal(t, code.OK, ack(t, kb, ds[0].Receipt)[0])
		pass(time.Second)
		dead, _, err := b.state.DeadLetters(id, 0, 10, false)
		require.NoError(t, err)
		require.Len(t, dead, 1)
		require.EqualValues(t, 2, dead[0].Address, "nobody settled it")
	})
}

// A message has one unresolved Expire entry at a time. What comes while its record is under way waits for that, but an
// ack, which removes what the record leaves.
func TestSettledWhileBeingRecorded(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{BackoffBaseMs: 500}, 6)
		ds := get(t, k, ReceiveRequest{Max: 6})
		r.setDelay(100 * time.Millisecond)
		pass(time.Second + 10*time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 6)
		late := ackLater(k, ds[0].Receipt)
		results := make([]code.Code, 4)
		done := make(chan struct{})
		for i, f := range []func() code.Code{
			func() code.Code { return nack(t, k, ds[1].Receipt) },
			func() code.Code { return release(t, k, ds[2].Receipt) },
			func() code.Code {
				return codes(t)(k.Reject(within(time.Second), "g", []RejectItem{{Receipt: ds[3].Receipt}}))[0]
			},
			func() code.Code { return extend(t, k, ds[4].Receipt, time.Minute) },
		} {
			go func() {
				results[i] = f()
				done <- struct{}{}
			}()
		}
		synctest.Wait()
		require.Equal(t, code.Skipped, release(t, k, ds[1].Receipt), "another outcome is under way")
		require.Equal(t, code.Skipped, ack(t, k, ds[1].Receipt)[0], "for an ack, too")
		require.Equal(t, code.Skipped, extend(t, k, ds[4].Receipt, 0), "a run-out, beside an extend that waits")
		require.Equal(t, code.InvalidArgument, extend(t, k, ds[4].Receipt, MaxLease), "one that waits is no way past the bound")
		a.setClock(0, true)
		require.Equal(t, code.ClockSkew, extend(t, k, ds[4].Receipt, time.Minute))
		a.setClock(0, false)
		joined := extendLater(k, ds[4].Receipt, 2*time.Minute)
		for _, c := range a.commands() {
			x, ok := c.(*queue.Expire)
			require.True(t, !ok || len(entries(a, x.Entries[0].Kind)) == 6, "a second entry beside the record")
		}
		for range 4 {
			<-done
		}
		require.Equal(t, []code.Code{code.OK, code.OK, code.OK, code.OK}, results)
		require.Equal(t, code.OK, <-joined, "an extend that waits takes the later one along")
		require.Equal(t, code.OK, (<-late)[0].Code)
		again := get(t, k, ReceiveRequest{Max: 10, Wait: time.Second})
		require.Equal(t, []int{3}, bodies(again))
		require.EqualValues(t, 1, again[0].Attempt)
		again = get(t, k, ReceiveRequest{Max: 10, Wait: time.Second})
		require.Equal(t, []int{2}, bodies(again))
		require.EqualValues(t, 2, again[0].Attempt)
		for _, n := range []queue.Address{1, 2, 3, 4} {
			_, lease, _, _ := a.state.RetryOf(id, n)
			require.Zero(t, lease, "%s: whatever ends a lease deletes its record", n)
		}
		_, lease, _, _ := a.state.RetryOf(id, 5)
		require.Greater(t, lease.Deadline, stampAfter(r.stamp(), 115*time.Second))
		require.Equal(t, code.OK, ack(t, k, ds[5].Receipt)[0])
	})
}

// A lease does not run out beside its unresolved record; afterwards it does, and counts once.
func TestRunsOutWhileBeingRecorded(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{LeaseMs: 1100}, 1)
		get(t, k, ReceiveRequest{})
		lost := 0
		a.setFate(func(queue.Command) fate {
			if lost++; lost < 5 {
				return fate([]fate{fateLost, fateSilent, fateLost, fateSilent}[lost-1])
			}
			return fateCommit
		})
		again := get(t, k, ReceiveRequest{Wait: 20 * time.Second})
		require.EqualValues(t, 2, again[0].Attempt)
		var first queue.Command
		for _, c := range a.commands() {
			if c.(*queue.Expire).Entries[0].Kind != queue.ExpireLease {
				break
			}
			if first == nil {
				first = c
			}
			require.Same(t, first, c, "the same bytes until apply answers")
		}
		require.Equal(t, code.OK, ack(t, k, again[0].Receipt)[0])
	})
}

// A young lease that is put back, its nack not queued, does not hide the older ones from being recorded.
func TestLeasesArePutBackInOrder(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{}, 3)
		get(t, k, ReceiveRequest{})
		pass(300 * time.Millisecond)
		middle := get(t, k, ReceiveRequest{})[0]
		pass(300 * time.Millisecond)
		get(t, k, ReceiveRequest{})
		a.setFate(func(queue.Command) fate { return fateRefuse })
		_, err := k.Nack(within(100*time.Millisecond), "g", []NackItem{{Receipt: middle.Receipt}})
		require.NoError(t, err)
		a.setFate(nil)
		for n := range 3 {
			pass(350 * time.Millisecond)
			require.Len(t, entries(a, queue.ExpireLease), n+1)
		}
	})
}

// An ack whose command overtakes the record, and a record that overtakes the ack: the message is finished.
func TestAckBesideItsRecord(t *testing.T) {
	for _, ackFirst := range []bool{true, false} {
		t.Run(fmt.Sprint("ack first ", ackFirst), func(t *testing.T) {
			bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
				a := r.replicas[0]
				id := serving(t, r, queue.GroupConfig{}, 1)
				d := get(t, k, ReceiveRequest{})[0]
				a.setFate(func(c queue.Command) fate {
					if isAck(c) == ackFirst {
						return fateCommit
					}
					return fateLost
				})
				pass(1010 * time.Millisecond)
				items, err := k.Ack(within(500*time.Millisecond), "g", []string{d.Receipt})
				require.NoError(t, err)
				if ackFirst {
					require.Equal(t, code.OK, items[0].Code)
				} else {
					require.Equal(t, code.EffectMaybe, items[0].Effect)
				}
				a.setFate(nil)
				require.Equal(t, code.OK, ack(t, k, d.Receipt)[0])
				pass(time.Minute)
				_, lease, found, _ := a.state.RetryOf(id, 1)
				require.False(t, found)
				require.Zero(t, lease)
				require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
			})
		})
	}
}

// A record that waits for others is not proposed any more when its message is settled.
func TestRecordWithdrawn(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{DelaysMs: []uint64{60_000}}, 5)
		ds := get(t, k, ReceiveRequest{Max: 4})
		pass(500 * time.Millisecond)
		last := get(t, k, ReceiveRequest{})[0]
		r.setDelay(200 * time.Millisecond)
		pass(400 * time.Millisecond)
		done := make(chan code.Code)
		go func() { done <- nack(t, k, last.Receipt) }() // in flight for a while: what comes next waits for more
		pass(101 * time.Millisecond)
		require.Empty(t, entries(a, queue.ExpireLease), "due, and waiting")
		late := ackLater(k, ds[0].Receipt)
		go func() { done <- nack(t, k, ds[1].Receipt) }()
		require.Equal(t, code.OK, release(t, k, ds[2].Receipt), "in the ledger alone")
		require.Equal(t, code.OK, <-done)
		require.Equal(t, code.OK, <-done)
		require.Equal(t, code.OK, (<-late)[0].Code)
		recorded := entries(a, queue.ExpireLease)
		require.Len(t, recorded, 1)
		require.EqualValues(t, 4, recorded[0].Address)
		require.Empty(t, entries(a, queue.ExpireRelease))
	})
}

// A receive that is gone after its lease was recorded: the message comes back by a command, uncounted.
func TestUndoOfARecordedLease(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{}, 1)
		ds := get(t, k, ReceiveRequest{})
		pass(1100 * time.Millisecond)
		g, err := k.group("g")
		require.NoError(t, err)
		g.mu.Lock()
		g.led.undo(ds, r.boot())
		g.pump()
		g.mu.Unlock()
		again := get(t, k, ReceiveRequest{Wait: time.Second})
		require.Len(t, entries(a, queue.ExpireRelease), 1)
		require.EqualValues(t, 1, again[0].Attempt)
	})
}

// A reset ends recorded leases: the receipts are refused and everything comes again.
func TestResetEndsRecordedLeases(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := serving(t, r, queue.GroupConfig{}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		pass(1100 * time.Millisecond)
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupReset, ID: id, ExpectedEpoch: 1})
		require.Equal(t, code.StaleOwner, ack(t, k, d.Receipt)[0])
		require.Len(t, get(t, k, ReceiveRequest{Wait: time.Second}), 1)
		require.Equal(t, code.StaleOwner, ack(t, k, d.Receipt)[0])
		require.Equal(t, code.StaleOwner, extend(t, k, d.Receipt, time.Minute))
	})
}

// An install ends the ledger; recorded leases are in the state that was installed.
func TestInstallKeepsRecordedLeases(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{}, 2)
		d := get(t, k, ReceiveRequest{})[0]
		pass(1100 * time.Millisecond)
		k.Installed()
		require.Equal(t, code.OK, ack(t, k, d.Receipt)[0])
		require.Equal(t, []int{2}, bodies(get(t, k, ReceiveRequest{Max: 5, Wait: 5 * time.Second})))
	})
}

// With key order a recorded lease blocks its key at the next home, though messages of the key were made deliverable in
// front of it.
func TestRecordedLeaseBlocksItsKey(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{Ordering: queue.OrderKey}, func(t *testing.T, r *fakeRaft, ka *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		kb := b.open()
		synctest.Wait()
		id := serving(t, r, queue.GroupConfig{}, 0)
		r.send(3, func(m *queue.Message) { m.Key = []byte("k") })
		first := get(t, ka, ReceiveRequest{})[0]
		require.Equal(t, []code.Code{code.OK}, codes(t)(ka.Reject(within(time.Second), "g", []RejectItem{{Receipt: first.Receipt}})))
		second := get(t, ka, ReceiveRequest{Wait: time.Second})[0]
		require.Equal(t, []int{2}, bodies([]Delivery{second}))
		_, err := ka.Redrive(within(time.Second), "g", []queue.Address{1}, 0)
		require.NoError(t, err)
		pass(1100 * time.Millisecond)
		a.close()
		r.giveHome(id, b)
		require.Empty(t, get(t, kb, ReceiveRequest{Max: 5, Wait: 5 * time.Second}), "one message of a key at a time")
		require.Equal(t, code.OK, ack(t, kb, second.Receipt)[0])
		require.Equal(t, []int{1}, bodies(get(t, kb, ReceiveRequest{Max: 5, Wait: time.Second})))
	})
}

// A single active consumer stays the active one over a home change, as long as it holds something.
func TestActiveConsumerOverAHomeChange(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		id := serving(t, r, queue.GroupConfig{SingleActiveConsumer: true}, 3)
		get(t, ka, ReceiveRequest{Consumer: "one"})
		pass(1100 * time.Millisecond)
		r.replicas[0].close()
		r.giveHome(id, r.replicas[1])
		require.Empty(t, get(t, kb, ReceiveRequest{Consumer: "two", Wait: 5 * time.Second}))
		require.Len(t, get(t, kb, ReceiveRequest{Consumer: "one", Wait: 5 * time.Second}), 1)
	})
}

// Clocks that are as far apart as they may be: a recorded lease never ends before its deadline as its own home knew it,
// and at most twice the margin after.
func TestRecordedDeadlineOfASkewedClock(t *testing.T) {
	for _, skew := range []time.Duration{-time.Second, -500 * time.Millisecond, 0, 500 * time.Millisecond, time.Second} {
		t.Run(skew.String(), func(t *testing.T) {
			two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
				id := serving(t, r, queue.GroupConfig{LeaseMs: 4000, DelaysMs: []uint64{1}}, 1)
				r.replicas[1].setClock(skew, false)
				get(t, ka, ReceiveRequest{})
				end := r.boot() + 4*time.Second
				pass(1100 * time.Millisecond)
				r.replicas[0].close()
				r.giveHome(id, r.replicas[1])
				again := get(t, kb, ReceiveRequest{Wait: 20 * time.Second})
				require.EqualValues(t, 2, again[0].Attempt)
				require.GreaterOrEqual(t, r.boot(), end)
				require.LessOrEqual(t, r.boot(), end+2*time.Second+20*time.Millisecond)
			})
		})
	}
}

// A lease may be lengthened for MaxLease in all, wherever its homes are: a crash or a move does not begin that anew.
func TestBoundOverHomes(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{LeaseMs: 60_000, DelaysMs: []uint64{1}}, 1)
		d := get(t, ka, ReceiveRequest{})[0]
		begun := r.boot()
		recorded := func() queue.Stamp {
			_, lease, _, err := a.state.RetryOf(id, 1)
			require.NoError(t, err)
			return lease.Begun
		}
		pass(1100 * time.Millisecond)
		first := stampZero + queue.Stamp(begun/time.Millisecond)
		require.Equal(t, first, recorded())
		bounded := func(k *Keeper) {
			t.Helper()
			left := begun + MaxLease - r.boot()
			require.Equal(t, code.InvalidArgument, extend(t, k, d.Receipt, left+time.Second))
			require.Equal(t, code.OK, extend(t, k, d.Receipt, left-time.Second))
			require.Equal(t, first, recorded(), "an extend is of the same lease")
		}
		bounded(ka)
		pass(5 * time.Hour)
		r.giveHome(id, b) // it is taken for dead
		bounded(kb)
		pass(5 * time.Hour)
		require.NoError(t, kb.Move(within(time.Second), "g", 1))
		bounded(ka)
		held, err := ka.Held("g", 10)
		require.NoError(t, err)
		require.InDelta(t, 10*time.Hour, held[0].HeldFor, float64(time.Minute))
		pass(begun + MaxLease - r.boot() - 10*time.Second)
		again := get(t, ka, ReceiveRequest{Wait: 20 * time.Second})[0]
		require.EqualValues(t, 2, again.Attempt)
		require.InDelta(t, MaxLease, r.boot()-begun, float64(3*time.Second))
		pass(1100 * time.Millisecond)
		require.Greater(t, recorded(), first, "the next hand-out is a lease of its own")
		require.Equal(t, code.OK, ack(t, ka, again.Receipt)[0])
	})
}

// A record of before hand-outs were kept begins at the home that takes it over.
func TestBoundOfAnOldRecord(t *testing.T) {
	for _, begun := range []queue.Stamp{0, stampZero - 40_000, stampZero + 5} {
		s := newFakeState(queue.QueueOptions{})
		s.apply(1, &queue.Group{Stamp: stampZero, Op: queue.GroupCreate, Name: "g", FirstHome: 1})
		s.apply(2, &queue.Enqueue{Stamp: stampZero, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("x")}}}}})
		s.apply(3, &queue.Expire{Stamp: stampZero, Group: 1, Epoch: 1, Entries: []queue.ExpireEntry{{
			Kind: queue.ExpireLease, Address: 1, NotBefore: begun, Lease: queue.LeaseName{Epoch: 1, Number: 1}, Deadline: stampAfter(stampZero, time.Hour),
		}}})
		info, _ := s.Group(1)
		l, err := newLedger(s, &marks{}, info, s.Meta().Options, func() uint64 { return 0 }, time.Minute, stampZero)
		require.NoError(t, err)
		want := time.Minute
		if begun != 0 && begun < stampZero {
			want -= 40 * time.Second
		}
		require.Equal(t, want, l.tracked[1].handed, begun)
	}
}

// A clock that is off by a lot, or refused, makes no recorded lease last longer than any lease may.
func TestRecordedDeadlineIsBounded(t *testing.T) {
	s := newFakeState(queue.QueueOptions{})
	s.apply(1, &queue.Group{Stamp: stampZero, Op: queue.GroupCreate, Name: "g", FirstHome: 1})
	s.apply(2, &queue.Enqueue{Stamp: stampZero, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("x")}}}}})
	s.apply(3, &queue.Expire{Stamp: stampZero, Group: 1, Epoch: 1, Entries: []queue.ExpireEntry{{
		Kind: queue.ExpireLease, Address: 1, Lease: queue.LeaseName{Epoch: 1, Number: 1}, Deadline: stampAfter(stampZero, MaxLease),
	}}})
	info, _ := s.Group(1)
	for _, stamp := range []queue.Stamp{0, 1, stampZero} {
		l, err := newLedger(s, &marks{}, info, s.Meta().Options, func() uint64 { return 0 }, time.Minute, stamp)
		require.NoError(t, err)
		require.Equal(t, time.Minute+MaxLease, l.tracked[1].deadline)
	}
}

// While a host's clock is refused nothing is recorded or extended there, and a ledger that would have to tell recorded
// deadlines from past ones is not built.
func TestRefusedClock(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{}, 2)
		d := get(t, ka, ReceiveRequest{})[0]
		a.setClock(0, true)
		pass(5 * time.Second)
		require.Empty(t, a.commands())
		require.Equal(t, code.ClockSkew, extend(t, ka, d.Receipt, time.Minute))
		a.setClock(0, false)
		pass(1100 * time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 1)
		a.close()
		b.setClock(0, true)
		r.giveHome(id, b)
		late := ackLater(kb, d.Receipt)
		pass(3 * time.Second)
		require.Empty(t, late)
		b.setClock(0, false)
		require.Equal(t, code.OK, (<-late)[0].Code)
	})
}

// B23: homes that change do not lengthen leases: a recorded one ends once, a margin after its deadline, however many homes
// it has seen.
func TestB23HomeChangesDoNotExtendLeases(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		id := serving(t, r, queue.GroupConfig{LeaseMs: 10_000, DelaysMs: []uint64{1}}, 1)
		get(t, ka, ReceiveRequest{})
		end := r.boot() + 10*time.Second
		pass(1100 * time.Millisecond)
		keepers := []*Keeper{ka, kb}
		at := 0
		for r.boot() < end {
			if at = 1 - at; at == 0 {
				require.NoError(t, kb.Move(within(time.Second), "g", 1))
			} else {
				r.giveHome(id, r.replicas[1])
			}
			require.Empty(t, get(t, keepers[at], ReceiveRequest{Wait: 1200 * time.Millisecond}))
		}
		again := get(t, keepers[at], ReceiveRequest{Wait: 10 * time.Second})
		require.EqualValues(t, 2, again[0].Attempt)
		require.InDelta(t, end+time.Second, r.boot(), float64(50*time.Millisecond))
	})
}
