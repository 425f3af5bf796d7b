package home

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func claim(t *testing.T, k *Keeper, req ClaimRequest) Claimed {
	t.Helper()
	c, err := k.ClaimIdle(within(10*time.Second), "g", req)
	require.NoError(t, err)
	return c
}

// Idle leases change hands: each counts an attempt, the old receipt is refused, the new one is good, and the longest
// idle goes first.
func TestClaimIdle(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := serving(t, r, queue.GroupConfig{LeaseMs: 60_000}, 5)
		first := get(t, k, ReceiveRequest{Max: 2, Consumer: "gone"})
		pass(5 * time.Second)
		second := get(t, k, ReceiveRequest{Max: 2, Consumer: "gone"})
		pass(5 * time.Second)
		require.Equal(t, code.OK, extend(t, k, first[0].Receipt, time.Minute))
		require.Empty(t, claim(t, k, ClaimRequest{Consumer: "new", MinIdle: time.Minute, Max: 10}).Deliveries)
		got := claim(t, k, ClaimRequest{Consumer: "new", MinIdle: 4 * time.Second, Max: 2}).Deliveries
		require.Equal(t, []int{2, 3}, bodies(got), "the first one was extended: it is not idle")
		info, _ := r.replicas[0].state.Group(id)
		require.EqualValues(t, 1, info.Epoch, "a claim is no matter of the epoch")
		for i, old := range []Delivery{first[1], second[0]} {
			require.Equal(t, code.UnknownDelivery, ack(t, k, old.Receipt)[0])
			require.Equal(t, code.UnknownDelivery, extend(t, k, old.Receipt, time.Minute))
			require.EqualValues(t, 2, got[i].Attempt)
			require.Equal(t, time.Minute, got[i].Lease)
		}
		held, err := k.Held("g", 10)
		require.NoError(t, err)
		require.Equal(t, "new", held[1].Consumer)
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, k, receipts(got...)...))
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, k, first[0].Receipt, second[1].Receipt), "the others stand")
	})
}

// A claim of a recorded lease deletes the record, so that no later home honours the old receipt.
func TestClaimOfARecordedLease(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{}, 1)
		old := get(t, ka, ReceiveRequest{Consumer: "gone"})[0]
		pass(1100 * time.Millisecond)
		now := claim(t, ka, ClaimRequest{Consumer: "new"}).Deliveries[0]
		_, lease, _, _ := a.state.RetryOf(id, 1)
		require.Zero(t, lease)
		require.NoError(t, ka.Move(within(5*time.Second), "g", b.id))
		require.Equal(t, code.StaleOwner, ack(t, kb, old.Receipt)[0])
		require.Equal(t, code.OK, ack(t, kb, now.Receipt)[0])
	})
}

// A message without an attempt left is no gift: it becomes a dead letter, as when its lease ran out.
func TestClaimOfTheLastAttempt(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := serving(t, r, queue.GroupConfig{MaxAttempts: 2}, 1)
		get(t, k, ReceiveRequest{})
		require.Len(t, claim(t, k, ClaimRequest{Consumer: "a"}).Deliveries, 1)
		got := claim(t, k, ClaimRequest{Consumer: "b"})
		require.Empty(t, got.Deliveries)
		require.Equal(t, 1, got.Dead)
		dead, _, err := r.replicas[0].state.DeadLetters(id, 0, 10, false)
		require.NoError(t, err)
		require.Equal(t, claimReason, dead[0].Reason)
		require.EqualValues(t, 2, dead[0].Attempts)
	})
}

// What is being settled is not claimed, and what is being claimed is not settled.
func TestClaimBesideOtherOutcomes(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{}, 2)
		ds := get(t, k, ReceiveRequest{Max: 2})
		r.setDelay(100 * time.Millisecond)
		acked := ackLater(k, ds[0].Receipt)
		synctest.Wait()
		claimed := make(chan Claimed, 1)
		go func() {
			c, _ := k.ClaimIdle(within(time.Second), "g", ClaimRequest{Max: 5})
			claimed <- c
		}()
		synctest.Wait()
		require.Equal(t, code.Skipped, ack(t, k, ds[1].Receipt)[0])
		require.Empty(t, claim(t, k, ClaimRequest{Max: 5}).Deliveries)
		require.Equal(t, code.OK, (<-acked)[0].Code)
		got := (<-claimed).Deliveries
		require.Equal(t, []int{2}, bodies(got))
		require.Equal(t, code.OK, ack(t, k, got[0].Receipt)[0])
	})
}

// A claimer that gives up has nothing: what its claim brings in the end is ready for everybody.
func TestClaimGivenUp(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{}, 1)
		old := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(queue.Command) fate { return fateLost })
		_, err := k.ClaimIdle(within(time.Second), "g", ClaimRequest{})
		require.Equal(t, code.QuorumLost, refusal(t, err))
		require.Empty(t, get(t, k, ReceiveRequest{}))
		a.setFate(nil)
		pass(2 * time.Second)
		require.Equal(t, code.UnknownDelivery, ack(t, k, old.Receipt)[0], "not a late ack: the lease was taken away")
		again := get(t, k, ReceiveRequest{Wait: 5 * time.Second})
		require.EqualValues(t, 2, again[0].Attempt)
		require.Equal(t, code.UnknownDelivery, ack(t, k, old.Receipt)[0])
		require.Equal(t, code.OK, ack(t, k, again[0].Receipt)[0])
	})
}

// Limits and places: a consumer's own limit bounds what it takes over, and a single active consumer keeps its place
// unless everything it holds is taken.
func TestClaimLimits(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := serving(t, r, queue.GroupConfig{MaxInFlightPerConsumer: 2}, 4)
		get(t, k, ReceiveRequest{Max: 2, Consumer: "a"})
		get(t, k, ReceiveRequest{Max: 2, Consumer: "b"})
		require.Empty(t, claim(t, k, ClaimRequest{Max: 10, Consumer: "b", MinIdle: time.Second}).Deliveries)
		require.Len(t, claim(t, k, ClaimRequest{Max: 10, Consumer: "c"}).Deliveries, 2)
		require.Len(t, claim(t, k, ClaimRequest{Max: 10, Consumer: "c"}).Deliveries, 2, "its own may be claimed anew")
		cfg := queue.GroupConfig{SingleActiveConsumer: true, MaxAttempts: 10}
		cfg.EnsureDefaults()
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupConfigure, ID: id, Config: cfg})
		_, err := k.ClaimIdle(within(time.Second), "g", ClaimRequest{})
		require.Equal(t, code.InvalidArgument, refusal(t, err))
		pass(time.Minute)
		held := get(t, k, ReceiveRequest{Max: 2, Consumer: "active"})
		require.Len(t, held, 2)
		require.Empty(t, claim(t, k, ClaimRequest{Max: 1, Consumer: "other"}).Deliveries, "one of two")
		require.Len(t, claim(t, k, ClaimRequest{Max: 5, Consumer: "other"}).Deliveries, 2)
		require.Empty(t, get(t, k, ReceiveRequest{Max: 2, Consumer: "active"}))
		require.Len(t, get(t, k, ReceiveRequest{Max: 5, Consumer: "other"}), 2, "it has the place")
	})
}

// Claims go where receives go, and wait for the home lease.
func TestClaimRefusals(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := serving(t, r, queue.GroupConfig{}, 1)
		get(t, ka, ReceiveRequest{Consumer: "c"})
		_, err := kb.ClaimIdle(within(time.Second), "g", ClaimRequest{})
		require.Equal(t, code.NotOwner, refusal(t, err))
		_, err = ka.ClaimIdle(within(time.Second), "g", ClaimRequest{MinIdle: -1})
		require.Equal(t, code.InvalidArgument, refusal(t, err))
		pass(5 * time.Second) // the home lease has ended meanwhile: nothing renews an idle one
		r.setDelay(100 * time.Millisecond)
		begun := r.boot()
		require.Len(t, claim(t, ka, ClaimRequest{}).Deliveries, 1)
		require.Less(t, r.boot()-begun, 150*time.Millisecond)
		a.setCut(true)
		pass(5 * time.Second)
		_, err = ka.ClaimIdle(within(time.Second), "g", ClaimRequest{})
		require.Equal(t, code.NoLeader, refusal(t, err))
		a.setCut(false)
		cfg := queue.GroupConfig{Paused: true}
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupConfigure, ID: id, Config: cfg})
		_, err = ka.ClaimIdle(within(5*time.Second), "g", ClaimRequest{})
		require.Equal(t, code.GroupPaused, refusal(t, err))
		require.NoError(t, ka.Move(within(5*time.Second), "g", b.id))
		_, err = ka.ClaimIdle(within(time.Second), "g", ClaimRequest{})
		require.Equal(t, code.NotOwner, refusal(t, err))
	})
}

// A claim that is answered while its group is being moved gives the message to nobody: it is ready at the new home.
func TestClaimDuringAMove(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		serving(t, r, queue.GroupConfig{}, 1)
		get(t, ka, ReceiveRequest{Consumer: "gone"})
		r.setDelay(100 * time.Millisecond)
		claimed := make(chan Claimed, 1)
		go func() {
			c, _ := ka.ClaimIdle(within(time.Second), "g", ClaimRequest{Consumer: "new"})
			claimed <- c
		}()
		synctest.Wait()
		require.NoError(t, ka.Move(within(5*time.Second), "g", b.id))
		require.Equal(t, Claimed{Skipped: 1}, <-claimed)
		require.Empty(t, entries(a, queue.ExpireLease), "a lease that nobody holds was recorded")
		again := get(t, kb, ReceiveRequest{Wait: 5 * time.Second})
		require.Equal(t, []int{1}, bodies(again))
		require.EqualValues(t, 2, again[0].Attempt)
	})
}

// A claim takes the place of a single active consumer as a whole or not at all: not for as much as the bytes allow, and
// not while the active one goes on receiving.
func TestClaimMakesNoSecondActiveConsumer(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{SingleActiveConsumer: true, MaxAttempts: 10}, 0)
		r.send(4, func(m *queue.Message) { m.Body = make([]byte, 100) })
		require.Len(t, get(t, k, ReceiveRequest{Max: 2, Consumer: "active"}), 2)
		require.Empty(t, claim(t, k, ClaimRequest{Max: 5, MaxBytes: 150, Consumer: "other"}).Deliveries, "one of two")
		require.Empty(t, entries(a, queue.ExpireClaim))
		r.setDelay(100 * time.Millisecond)
		claimed := make(chan Claimed, 1)
		go func() {
			c, _ := k.ClaimIdle(within(time.Second), "g", ClaimRequest{Max: 5, Consumer: "other"})
			claimed <- c
		}()
		synctest.Wait()
		parked := receiveLater(k, ReceiveRequest{Consumer: "active", Wait: time.Second})
		require.Empty(t, get(t, k, ReceiveRequest{Consumer: "active"}), "it may be replaced in the next moment")
		require.Len(t, (<-claimed).Deliveries, 2)
		require.Empty(t, (<-parked).ds)
		require.Len(t, get(t, k, ReceiveRequest{Consumer: "other"}), 1)

		// A claim that came to nothing leaves the place to the active one, at once.
		a.setFate(func(queue.Command) fate { return fateRefuse })
		_, err := k.ClaimIdle(within(500*time.Millisecond), "g", ClaimRequest{Max: 5, Consumer: "third"})
		require.Error(t, err)
		a.setFate(nil)
		require.Len(t, get(t, k, ReceiveRequest{Consumer: "other"}), 1)
	})
}
