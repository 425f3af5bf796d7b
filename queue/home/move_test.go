package home

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// two runs a test with a keeper on each of two replicas.
func two(t *testing.T, f func(t *testing.T, r *fakeRaft, ka, kb *Keeper)) {
	t.Helper()
	bubble(t, 2, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, ka *Keeper) {
		kb := r.replicas[1].open()
		synctest.Wait()
		f(t, r, ka, kb)
	})
}

// A planned move: no wait at the new home, waiters are sent there at once, nothing comes again, receipts stay good.
func TestMoveReleases(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := r.create("g", a, queue.GroupConfig{})
		r.send(2)
		held := get(t, ka, ReceiveRequest{})[0]
		_, err := kb.Receive(within(time.Second), "g", ReceiveRequest{Wait: 20 * time.Second})
		require.Equal(t, code.NotOwner, refusal(t, err), "elsewhere a receive fails at once")
		home, epoch, ok := kb.HomeOf("g")
		require.True(t, ok)
		require.Equal(t, a.id, home)
		require.EqualValues(t, 1, epoch)
		acking := get(t, ka, ReceiveRequest{})[0]
		parked := receiveLater(ka, ReceiveRequest{Wait: 20 * time.Second})
		synctest.Wait()
		r.setDelay(100 * time.Millisecond)
		late := ackLater(ka, acking.Receipt)
		synctest.Wait()
		begun := r.boot()
		require.NoError(t, ka.Move(within(5*time.Second), "g", b.id))
		require.Equal(t, 200*time.Millisecond, r.boot()-begun, "the ack, then the Home")
		require.Equal(t, code.OK, (<-late)[0].Code, "an ack that was under way is waited for")
		require.Equal(t, code.NotOwner, refusal(t, (<-parked).err))
		require.Equal(t, begun+200*time.Millisecond, r.boot(), "waiters are answered at once")
		info, _ := a.state.Group(id)
		require.True(t, info.Released)
		r.setDelay(0)
		r.send(1)
		require.Equal(t, []int{3}, bodies(get(t, kb, ReceiveRequest{Max: 10})), "served at once, by a receive that does not wait")
		require.Equal(t, begun+200*time.Millisecond, r.boot())
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, held.Receipt), "honoured")
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, kb, acking.Receipt), "of a message that is finished")
	})
}

// A home that is still in its own wait hands over without `released`.
func TestMoveInsideTheOwnWait(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		b := r.replicas[1]
		id := r.create("g", r.replicas[0], queue.GroupConfig{})
		r.giveHome(id, b)
		synctest.Wait()
		require.NoError(t, kb.Move(within(time.Second), "g", 1))
		info, _ := b.state.Group(id)
		require.False(t, info.Released)
		require.EqualValues(t, 1, info.Home)
	})
}

// A move whose outcome is unknown: nothing is delivered under the epoch that was given away.
func TestMoveUnknown(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a := r.replicas[0]
		id := r.create("g", a, queue.GroupConfig{})
		r.send(1)
		a.setFate(func(queue.Command) fate { return fateHang })
		err := ka.Move(within(2*time.Second), "g", 2)
		require.Equal(t, code.QuorumLost, refusal(t, err))
		require.Empty(t, get(t, ka, ReceiveRequest{Wait: 5 * time.Second}))
		a.setFate(nil)
		ds := get(t, ka, ReceiveRequest{Wait: 5 * time.Second})
		require.Len(t, ds, 1)
		require.EqualValues(t, 2, ds[0].lease.Epoch, "a new epoch of its own")
		require.IsType(t, &queue.Home{}, a.commands()[0])
		require.NotEqual(t, code.OK, (<-r.commit(a.commands()[0], a)).Code, "the late Home is refused")
		info, _ := a.state.Group(id)
		require.Equal(t, a.id, info.Home)
		require.NoError(t, ka.Move(within(time.Second), "g", 2))
		require.Empty(t, get(t, kb, ReceiveRequest{Max: 5, Wait: 5 * time.Second}))
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, ds[0].Receipt))
	})
}

func TestReleaseAll(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		for _, name := range []string{"g", "h", "i", "stays"} {
			r.create(name, a, queue.GroupConfig{})
		}
		r.create("elsewhere", b, queue.GroupConfig{})
		require.NoError(t, ka.ReleaseAll(within(time.Second), func(g string) queue.ReplicaID {
			if g == "stays" {
				return 0
			}
			return b.id
		}))
		for _, g := range b.state.Groups() {
			want := b.id
			if g.Name == "stays" {
				want = a.id
			}
			require.Equal(t, want, g.Home, g.Name)
			require.True(t, g.Released, "created after this process started: nothing else can deliver")
		}
	})
}

// The home dies: the leader gives the group to another, which waits out the dead one's lease.
func TestReplacementWaits(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		id := r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		get(t, ka, ReceiveRequest{})
		r.replicas[0].close()
		begun := r.boot()
		r.giveHome(id, r.replicas[1])
		require.Len(t, get(t, kb, ReceiveRequest{Wait: 5 * time.Second}), 1)
		require.InDelta(t, 1100*time.Millisecond, r.boot()-begun, float64(10*time.Millisecond))
	})
}

// A group with nothing to do writes nothing, and asks nothing.
func TestIdleWritesNothing(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, _ *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(1)
		k := a.restart()
		pass(time.Hour)
		require.Empty(t, a.commands())
		ds := get(t, k, ReceiveRequest{Wait: 5 * time.Second})
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt))
		proposed, reads := len(a.commands()), a.reads.Load()
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 20 * time.Second}))
		pass(time.Hour)
		require.Len(t, a.commands(), proposed)
		require.Equal(t, reads, a.reads.Load(), "waiting costs nothing")
	})
}

// No quorum: deliveries pause when the home lease ends, leases do not expire, acks stay leased.
func TestNoQuorum(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{LeaseMs: 3000})
		r.send(3)
		ds := get(t, k, ReceiveRequest{Max: 2})
		a.setCut(true)
		pass(900 * time.Millisecond)
		require.Len(t, get(t, k, ReceiveRequest{}), 1, "the lease holds")
		pass(200 * time.Millisecond)
		_, err := k.Receive(within(time.Minute), "g", ReceiveRequest{Wait: 20 * time.Second})
		require.NoError(t, err, "nothing is ready: leases do not expire")
		items, err := k.Ack(within(2*time.Second), "g", receipts(ds...))
		require.NoError(t, err)
		for _, i := range items {
			require.NotEqual(t, code.OK, i.Code)
		}
		a.setCut(false)
		again := get(t, k, ReceiveRequest{Max: 10, Wait: 20 * time.Second})
		require.NotEmpty(t, again)
		for _, d := range again {
			require.EqualValues(t, 2, d.Attempt)
		}
	})
}

// A command that cannot be queued is tried again; a call that gives up has changed nothing.
func TestNotQueued(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(2)
		ds := get(t, k, ReceiveRequest{Max: 2})
		a.setFate(func(queue.Command) fate { return fateRefuse })
		items, err := k.Ack(within(2*time.Second), "g", []string{ds[0].Receipt})
		require.NoError(t, err)
		require.Equal(t, ItemResult{Code: code.NoLeader, Effect: code.EffectNone}, items[0])
		acks := func() int {
			return len(slices.DeleteFunc(a.commands(), func(c queue.Command) bool { return !isAck(c) }))
		}
		tries := acks()
		require.Less(t, tries, 12)
		pass(10 * time.Second)
		require.Equal(t, tries, acks(), "withdrawn: nobody waits for it")
		require.Less(t, len(a.commands()), 50, "records are tried again ever more slowly")
		a.setFate(nil)
		late := ackLater(k, ds[1].Receipt)
		require.Equal(t, code.OK, (<-late)[0].Code)
		pass(time.Minute) // the first lease runs out as ever
		require.EqualValues(t, 2, get(t, k, ReceiveRequest{})[0].Attempt)
	})
}

// Close answers everybody and leaves nothing behind.
func TestClose(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		r.create("g", a, queue.GroupConfig{})
		r.send(1)
		d := get(t, k, ReceiveRequest{})[0]
		a.setFate(func(queue.Command) fate { return fateHang })
		parked := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second})
		late := ackLater(k, d.Receipt)
		synctest.Wait()
		require.NoError(t, k.Close(context.Background()))
		require.NoError(t, k.Close(context.Background()))
		require.Equal(t, code.ShuttingDown, refusal(t, (<-parked).err))
		require.Equal(t, code.EffectMaybe, (<-late)[0].Effect)
		_, err := k.Receive(within(time.Second), "g", ReceiveRequest{})
		require.Equal(t, code.ShuttingDown, refusal(t, err))
	})
}

// An install ends every ledger; the group is served again under a new epoch.
func TestInstalled(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		old := get(t, k, ReceiveRequest{})[0]
		k.Installed()
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt))
		ds := get(t, k, ReceiveRequest{Wait: 5 * time.Second})
		require.EqualValues(t, 2, ds[0].lease.Epoch)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt))
	})
}

// A reset: the ledger ends, waiters stay, everything comes again.
func TestReset(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		id := r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(1)
		old := get(t, k, ReceiveRequest{})[0]
		require.Equal(t, []code.Code{code.OK}, ack(t, k, old.Receipt))
		parked := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second})
		synctest.Wait()
		r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupReset, ID: id, ExpectedEpoch: 1})
		got := <-parked
		require.NoError(t, got.err)
		require.Len(t, got.ds, 1)
		require.Equal(t, []code.Code{code.StaleOwner}, ack(t, k, old.Receipt))
	})
}
