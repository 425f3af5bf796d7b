package home

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Minimal traces of earlier readings of the lease protocol, found by its model, each with the promise that it broke.
// Here keepers run them against a shard whose commits can be lost, late, or silent.

// serving opens a keeper's epoch: the group is there, with n messages.
func serving(t *testing.T, r *fakeRaft, cfg queue.GroupConfig, n int) queue.GroupID {
	t.Helper()
	id := r.create("g", r.replicas[0], cfg)
	if n > 0 {
		r.send(n)
	}
	return id
}

func isExpire(c queue.Command) bool { _, ok := c.(*queue.Expire); return ok }
func isAck(c queue.Command) bool    { _, ok := c.(*queue.Ack); return ok }

// G4: two live leases from one ledger.
func TestTraceTimedOutCommandCountsAsResolved(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(c queue.Command) fate {
			if isExpire(c) {
				return fateLost
			}
			return fateCommit
		})
		items, err := k.Nack(within(2*time.Second), "g", []NackItem{{Receipt: d.Receipt}})
		require.NoError(t, err)
		require.Equal(t, ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}, items[0])
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 20 * time.Second}), "handed out beside an unresolved failure")
		a.setFate(nil)
		next := get(t, k, ReceiveRequest{Wait: 20 * time.Second})
		require.Equal(t, []int{1}, bodies(next))
		require.EqualValues(t, 2, next[0].Attempt)
		first := a.commands()[0]
		for _, c := range a.commands()[1:] {
			require.Same(t, first, c, "the same bytes are proposed again")
		}
	})
}

// G5: finished under the lease of somebody else.
func TestTraceClaimBesideAnUnresolvedAck(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{LeaseMs: 1000}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(c queue.Command) fate {
			if isAck(c) {
				return fateLost
			}
			return fateCommit
		})
		items, err := k.Ack(within(500*time.Millisecond), "g", []string{d.Receipt})
		require.NoError(t, err)
		require.Equal(t, code.EffectMaybe, items[0].Effect)
		require.Equal(t, []code.Code{code.Skipped}, codes(t)(k.Nack(within(time.Second), "g", []NackItem{{Receipt: d.Receipt}})))
		require.Equal(t, []code.Code{code.Skipped}, codes(t)(k.Release(within(time.Second), "g", []string{d.Receipt})))
		require.Equal(t, []code.Code{code.Skipped}, codes(t)(k.Reject(within(time.Second), "g", []RejectItem{{Receipt: d.Receipt}})))
		require.Equal(t, []code.Code{code.Skipped}, codes(t)(k.Extend(within(time.Second), "g", []ExtendItem{{Receipt: d.Receipt}})))
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}), "the lease ran out beside an unresolved ack")
		for _, c := range a.commands() {
			require.True(t, isAck(c), "%T beside an unresolved ack", c)
		}
		a.setFate(nil)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, d.Receipt), "the repeated call joins the ack")
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}))
	})
}

// G4: a recorded lease is live beside a new one; matching on (round, attempts) let an entry apply twice.
func TestTraceEntriesMatchedOnRoundAndAttempts(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		silent := 0
		a.setFate(func(c queue.Command) fate {
			if isExpire(c) && silent == 0 {
				silent++
				return fateSilent // committed, and the home does not learn it
			}
			return fateCommit
		})
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Nack(within(5*time.Second), "g", []NackItem{{Receipt: d.Receipt}})))
		require.Len(t, a.commands(), 2)
		st, _, _, _ := a.state.RetryOf(id, 1)
		require.EqualValues(t, 1, st.Change, "the second copy is skipped")
		require.EqualValues(t, 1, st.Attempts)
		next := get(t, k, ReceiveRequest{Wait: 5 * time.Second})
		require.EqualValues(t, 2, next[0].Attempt, "and the home knows that the first was its own")
		r.must(a.commands()[0]) // and later once more
		st, _, _, _ = a.state.RetryOf(id, 1)
		require.EqualValues(t, 1, st.Change)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, next[0].Receipt))
	})
}

// recorded makes the state hold a lease of another home.
func recorded(r *fakeRaft, id queue.GroupID, epoch queue.Epoch, number uint64, deadline time.Duration) queue.LeaseName {
	n := queue.LeaseName{Epoch: epoch, Number: number}
	r.must(&queue.Expire{Stamp: r.stamp(), Group: id, Epoch: epoch, Entries: []queue.ExpireEntry{{
		Kind: queue.ExpireLease, Address: 1, Lease: n, Deadline: stampAfter(r.stamp(), deadline), Consumer: "c",
	}}})
	return n
}

// G5: delivered after an ack that was answered OK: a release must reach the state when the lease is recorded.
func TestTraceReleaseInTheLedgerOnly(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{}, 1)
		name := recorded(r, id, 1, 9, 10*time.Second)
		r.giveHome(id, a)
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}), "the recorded lease is honoured")
		text := k.receipts.Encode(Receipt{Shard: 7, Group: id, Lease: name, Address: 1})
		require.Equal(t, []code.Code{code.OK}, codes(t)(k.Release(within(time.Second), "g", []string{text})))
		require.True(t, isExpire(a.commands()[len(a.commands())-1]), "a recorded lease is released by a command")
		_, _, has, _ := a.state.RetryOf(id, 1)
		require.False(t, has)
		ds := get(t, k, ReceiveRequest{})
		require.EqualValues(t, 1, ds[0].Attempt, "released, not failed")
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, text))
	})
}

// G4: a recorded, unexpired lease is live beside a new one: the deadline is the wall time of another host.
func TestTraceRecordedDeadlineSkewedClock(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := serving(t, r, queue.GroupConfig{}, 1)
		recorded(r, id, 1, 9, 5*time.Second)
		end := r.boot() + 5*time.Second
		r.giveHome(id, r.replicas[0])
		require.Len(t, get(t, k, ReceiveRequest{Wait: 20 * time.Second}), 1)
		require.GreaterOrEqual(t, r.boot(), end+2*time.Second, "twice 500 ms of skew, then the backoff")
	})
}

// G5: finished under the lease of somebody else: numbers begin again in each ledger, epochs do not.
func TestTraceLeaseNumberAloneNamesALease(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		b := r.replicas[1]
		kb := b.open()
		synctest.Wait()
		id := serving(t, r, queue.GroupConfig{}, 1)
		atA := get(t, k, ReceiveRequest{})[0]
		r.giveHome(id, b)
		atB := get(t, kb, ReceiveRequest{Wait: 5 * time.Second})[0]
		require.Equal(t, atA.lease.Number, atB.lease.Number)
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, kb, atA.Receipt))
		_, err := k.Ack(within(time.Second), "g", []string{atA.Receipt})
		require.Equal(t, code.NotOwner, refusal(t, err))
		done, _ := b.state.Finished(id, 1)
		require.False(t, done, "nothing changed")
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, atB.Receipt))
	})
}

// G5: delivered after an ack that was answered OK.
func TestTraceLedgerBuiltBeforeItsHome(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, _ *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		kb := b.open()
		synctest.Wait()
		id := serving(t, r, queue.GroupConfig{}, 1)
		a.close()
		a.stall(true)
		r.mustAt(b, &queue.Home{Stamp: r.stamp(), Group: id, ExpectedHome: 1, ExpectedEpoch: 1, NewHome: 2})
		d := get(t, kb, ReceiveRequest{Wait: 5 * time.Second})[0]
		k := a.open() // still at the state in which message 1 is unfinished
		wait := receiveLater(k, ReceiveRequest{Wait: 15 * time.Second})
		synctest.Wait()
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, d.Receipt))
		r.mustAt(b, &queue.Home{Stamp: r.stamp(), Group: id, ExpectedHome: 2, ExpectedEpoch: 2, NewHome: 1})
		a.stall(false)
		got := <-wait
		if got.err != nil {
			require.Equal(t, code.NotOwner, refusal(t, got.err))
		}
		require.Empty(t, got.ds)
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 5 * time.Second}), "delivered after an ack that was answered OK")
	})
}

// Leases die with their home, and with them their receipts; the messages come again, uncounted. (The bound on how
// many is a matter of recorded leases.)
func TestTraceBoundedByTheLastSecond(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{}, 1)
		old := get(t, k, ReceiveRequest{})[0]
		k = a.restart()
		synctest.Wait()
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt), "a receipt from before a restart of the same home")
		before := r.boot()
		again := get(t, k, ReceiveRequest{Wait: 5 * time.Second})[0]
		require.GreaterOrEqual(t, r.boot()-before, 1100*time.Millisecond, "the wait of a new home")
		require.EqualValues(t, 1, again.Attempt, "only recorded failures count")
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt))
		done, _ := a.state.Finished(id, 1)
		require.False(t, done)
	})
}

// G5: an ack of the deleted group finished a message of the new one.
func TestTraceNoGroupID(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		id := serving(t, r, queue.GroupConfig{}, 1)
		old := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(c queue.Command) fate {
			if isAck(c) {
				return fateLost
			}
			return fateCommit
		})
		late := ackLater(k, old.Receipt)
		pass(100 * time.Millisecond)
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupDelete, ID: id})
		next := serving(t, r, queue.GroupConfig{}, 0)
		require.Equal(t, code.UnknownGroup, (<-late)[0].Code)
		<-r.commit(a.commands()[0], a) // the old ack, at last
		done, _ := a.state.Finished(next, 1)
		require.False(t, done)
		a.setFate(nil)
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt))
		require.Equal(t, []int{1}, bodies(get(t, k, ReceiveRequest{})))
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt))
	})
}

// G4: a command of the old home, committed late, must not move what the new one does.
func TestTraceNoEpochCheck(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		kb := b.open()
		synctest.Wait()
		id := serving(t, r, queue.GroupConfig{}, 2)
		ds := get(t, k, ReceiveRequest{Max: 2})
		a.setFate(func(queue.Command) fate { return fateHang })
		late := ackLater(k, ds[0].Receipt)
		pass(100 * time.Millisecond)
		r.giveHome(id, b)
		synctest.Wait()
		require.Equal(t, code.StaleOwner, (<-late)[0].Code, "decided: no copy of it applies any more")
		atB := get(t, kb, ReceiveRequest{Max: 2, Wait: 5 * time.Second})
		require.Equal(t, code.StaleOwner, (<-r.commit(a.commands()[0], b)).Code)
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, kb, receipts(atB...)...))
	})
}

// An ack that was applied before the home moved is answered OK, though the home never heard of it.
func TestAckAppliedSilentlyBeforeAMove(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{}, 1)
		d := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(queue.Command) fate { return fateSilent })
		late := ackLater(k, d.Receipt)
		pass(10 * time.Millisecond)
		r.giveHome(id, b)
		require.Equal(t, code.OK, (<-late)[0].Code)
	})
}

// A paused old home: what it had started stands, what it starts after its lease does not.
func TestTraceG4TakenAtTheSend(t *testing.T) {
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		kb := b.open()
		synctest.Wait()
		id := serving(t, r, queue.GroupConfig{}, 2)
		started := get(t, k, ReceiveRequest{}) // checked, in the ledger; its bytes may leave at any time
		a.stall(true)
		a.setCut(true)
		r.mustAt(b, &queue.Home{Stamp: r.stamp(), Group: id, ExpectedHome: 1, ExpectedEpoch: 1, NewHome: 2})
		atB := get(t, kb, ReceiveRequest{Max: 2, Wait: 5 * time.Second})
		require.Equal(t, []int{1, 2}, bodies(atB))
		ds, err := k.Receive(within(time.Minute), "g", ReceiveRequest{Wait: time.Second})
		require.Empty(t, ds, "a delivery was started without a lease")
		require.Equal(t, code.NoLeader, refusal(t, err))
		items, err := k.Ack(within(time.Second), "g", receipts(started...))
		require.NoError(t, err)
		require.NotEqual(t, code.OK, items[0].Code)
		a.setCut(false)
		a.stall(false)
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, kb, receipts(atB...)...))
	})
}

// mustAt is must, answered by another replica.
func (r *fakeRaft) mustAt(p *fakeReplica, cmd queue.Command) {
	r.t.Helper()
	require.Equal(r.t, code.OK, (<-r.commit(cmd, p)).Code)
}

type received struct {
	ds  []Delivery
	err error
}

// receiveLater receives in the background.
func receiveLater(k *Keeper, req ReceiveRequest) <-chan received {
	return receiveLaterCtx(within(time.Minute), k, req)
}

func receiveLaterCtx(ctx context.Context, k *Keeper, req ReceiveRequest) <-chan received {
	ch := make(chan received, 1)
	go func() {
		ds, err := k.Receive(ctx, "g", req)
		ch <- received{ds, err}
	}()
	return ch
}

// ackLater acks in the background.
func ackLater(k *Keeper, rs ...string) <-chan []ItemResult {
	ch := make(chan []ItemResult, 1)
	go func() {
		items, _ := k.Ack(within(time.Minute), "g", rs)
		ch <- items
	}()
	return ch
}

// deadWorld is a ledger with a queue of one message, and the outbox of its group.
func deadWorld(t *testing.T) (*fakeState, *Ledger) {
	s := newFakeState(queue.QueueOptions{})
	cfg := queue.GroupConfig{MaxAttempts: 1}
	cfg.EnsureDefaults()
	s.apply(1, &queue.Group{Stamp: stampZero, Op: queue.GroupCreate, Name: "g", FirstHome: 1, Config: cfg})
	s.apply(2, &queue.Enqueue{Stamp: stampZero, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("x")}}}}})
	info, _ := s.Group(worldGroup)
	l, err := newLedger(s, &marks{}, info, s.Meta().Options, func() uint64 { return 0 }, 0, stampZero)
	require.NoError(t, err)
	return s, l
}

// exporting is the outbox's first step: it changes the dead letter under the home's epoch.
func exporting(s *fakeState) {
	d := s.groups[worldGroup].dead[1]
	d.Change, d.ExportState = d.Change+1, queue.ExportExporting
}

// again lets a command in flight be answered after an attempt of unknown outcome.
func again(t *testing.T, s *fakeState, l *Ledger, b *batch) {
	b.maybe = true
	res, _ := s.apply(4, b.command)
	require.NoError(t, l.answered(b, &res, 0, stampZero))
	require.NoError(t, l.Check())
}

// A redrive that was lost, and whose change number the outbox reaches: the message is on its way to the dead-letter
// queue and must not become ready as well.
func TestLostRedriveBesideTheOutbox(t *testing.T) {
	s, l := deadWorld(t)
	s.apply(3, &queue.Expire{Stamp: stampZero, Group: worldGroup, Epoch: 1, Entries: []queue.ExpireEntry{{
		Kind: queue.ExpireDead, Address: 1, Attempts: 1,
	}}})
	dead, _, _ := s.DeadLetters(worldGroup, 0, 1, false)
	c := newCall(1)
	require.True(t, l.deadOp(&dead[0], true, ref{c, 0}, 0))
	b := l.next(0, stampZero)
	exporting(s)
	again(t, s, l, b)
	require.Equal(t, code.Skipped, c.results[0].Code)
	require.Empty(t, l.tracked, "an exported message is ready")
}

// A dead entry that was applied silently, before the outbox moved the dead letter on: it took effect.
func TestSilentDeathBesideTheOutbox(t *testing.T) {
	for name, finished := range map[string]bool{"exporting": false, "exported": true} {
		t.Run(name, func(t *testing.T) {
			s, l := deadWorld(t)
			ds, _, err := l.take(take{max: 1, maxBytes: 1, lease: time.Second}, 0, stampZero, nil)
			require.NoError(t, err)
			r := Receipt{Group: worldGroup, Lease: ds[0].lease, Address: 1}
			l.runOut(time.Second, stampZero+1000)
			c, nacked := newCall(1), newCall(1)
			got, err := l.ack(r, false, ref{c, 0}, time.Second)
			require.NoError(t, err)
			require.Zero(t, got)
			l.tracked[1].exp.join(ref{nacked, 0})
			b := l.next(time.Second, stampZero)
			s.apply(3, b.command)
			if exporting(s); finished {
				s.groups[worldGroup].finish(1)
			}
			again(t, s, l, b)
			require.Equal(t, code.UnknownDelivery, c.results[0].Code, "an ack of a dead letter took no effect")
			if !finished {
				require.Equal(t, ItemResult{Code: code.OK, Effect: code.EffectDone, Dead: true}, nacked.results[0])
			}
			require.Empty(t, l.tracked)
		})
	}
}
