package home

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
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

// A call that settles while the group is being moved waits, and is sent to the new home, where its receipt is good.
func TestSettleDuringAMove(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		r.create("g", a, queue.GroupConfig{})
		r.send(1)
		d := get(t, ka, ReceiveRequest{})[0]
		r.setDelay(100 * time.Millisecond)
		moved := make(chan error)
		go func() { moved <- ka.Move(within(5*time.Second), "g", b.id) }()
		pass(50 * time.Millisecond)
		refused := make(chan error)
		go func() {
			_, err := ka.Ack(within(5*time.Second), "g", []string{d.Receipt})
			refused <- err
		}()
		require.NoError(t, <-moved)
		require.Equal(t, code.NotOwner, refusal(t, <-refused))
		require.Empty(t, slices.DeleteFunc(a.commands(), func(c queue.Command) bool { return !isAck(c) }))
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, d.Receipt))
	})
}

// A home that is replaced while acks are under way: those whose leases are recorded are sent to the new home, the others
// are lost.
func TestReplacedWhileSettling(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := r.create("g", a, queue.GroupConfig{})
		r.send(2)
		old := get(t, ka, ReceiveRequest{})[0]
		pass(1100 * time.Millisecond)
		young := get(t, ka, ReceiveRequest{})[0]
		a.setFate(func(queue.Command) fate { return fateHang })
		both := ackLater(ka, old.Receipt, young.Receipt)
		one := make(chan error)
		go func() {
			_, err := ka.Ack(within(time.Minute), "g", []string{old.Receipt})
			one <- err
		}()
		pass(100 * time.Millisecond)
		r.giveHome(id, b)
		require.Equal(t, code.NotOwner, refusal(t, <-one), "refused as a whole: the client looks for the home")
		items := <-both
		require.Equal(t, plain(code.NotOwner), items[0])
		require.Equal(t, plain(code.StaleOwner), items[1])
		require.Equal(t, []code.Code{code.OK}, ack(t, kb, old.Receipt))
		require.Equal(t, []int{2}, bodies(get(t, kb, ReceiveRequest{Max: 5, Wait: 5 * time.Second})))
	})
}

// What was not proposed yet when the home was replaced, and an ack of a lease whose run-out was not recorded, goes to the
// new home: the recorded lease stands there.
func TestReplacedBeforeAnythingWasProposed(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		a, b := r.replicas[0], r.replicas[1]
		id := r.create("g", a, queue.GroupConfig{})
		r.send(2)
		ds := get(t, ka, ReceiveRequest{Max: 1, Lease: time.Minute, HasLease: true})
		ds = append(ds, get(t, ka, ReceiveRequest{Max: 1, Lease: 1200 * time.Millisecond, HasLease: true})...)
		pass(1100 * time.Millisecond)
		require.Len(t, entries(a, queue.ExpireLease), 2)
		a.setFate(func(queue.Command) fate { return fateRefuse })
		pass(200 * time.Millisecond)
		late := ackLater(ka, ds[1].Receipt)
		nacked := make(chan error)
		go func() {
			_, err := ka.Nack(within(time.Minute), "g", []NackItem{{Receipt: ds[0].Receipt}})
			nacked <- err
		}()
		pass(10 * time.Millisecond)
		r.giveHome(id, b)
		require.Equal(t, code.NotOwner, refusal(t, <-nacked))
		require.Nil(t, <-late, "the call is refused as a whole")
		require.Equal(t, []code.Code{code.OK, code.OK}, ack(t, kb, receipts(ds...)...))
	})
}

// mover is a group that is moved back and forth while consumers work on it.
type mover struct {
	t       *testing.T
	keepers []*Keeper
	mu      sync.Mutex
	out     map[int]int // deliveries by message
	acked   int
}

// Planned moves under load redeliver nothing: every message is delivered once, and every ack succeeds, at one home or
// the other, whenever it comes.
func TestMovesUnderLoadRedeliverNothing(t *testing.T) {
	for seed := range uint64(4) {
		two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
			t.Logf("seed %d", seed)
			const messages, consumers = 400, 8
			r.create("g", r.replicas[0], queue.GroupConfig{LeaseMs: 20_000})
			r.setDelay(3 * time.Millisecond)
			m := &mover{t: t, keepers: []*Keeper{ka, kb}, out: map[int]int{}}
			stop := make(chan struct{})
			var working sync.WaitGroup
			for n := range uint64(consumers) {
				rng := rand.New(rand.NewPCG(seed, n))
				working.Go(func() { m.consume(stop, rng) })
			}
			rng := rand.New(rand.NewPCG(seed, 100))
			for sent, at := 0, 0; sent < messages; {
				n := 1 + rng.IntN(20)
				r.send(n)
				sent += n
				pass(time.Duration(rng.IntN(300)) * time.Millisecond)
				if rng.IntN(2) == 0 {
					begun := r.boot()
					require.NoError(t, m.keepers[at].Move(within(10*time.Second), "g", queue.ReplicaID(2-at)))
					require.Less(t, r.boot()-begun, 50*time.Millisecond)
					at = 1 - at
				}
			}
			begun := r.boot()
			for m.left(r) {
				require.Less(t, r.boot()-begun, time.Minute)
				pass(100 * time.Millisecond)
			}
			close(stop)
			working.Wait()
			for body, n := range m.out {
				require.Equal(t, 1, n, "message %d was delivered %d times", body, n)
			}
			require.Equal(t, len(m.out), m.acked)
		})
	}
}

func (m *mover) left(r *fakeRaft) bool {
	left, _, _ := r.replicas[0].state.Deliverables(1, 0, 1, true)
	return len(left) > 0
}

func (m *mover) consume(stop <-chan struct{}, rng *rand.Rand) {
	for at := 0; ; {
		select {
		case <-stop:
			return
		default:
		}
		ds, err := m.keepers[at].Receive(within(time.Minute), "g", ReceiveRequest{Max: 1 + rng.IntN(5), Wait: time.Second})
		if err != nil {
			at = 1 - at
			pass(time.Millisecond)
			continue
		}
		for _, d := range ds {
			m.mu.Lock()
			m.out[bodies([]Delivery{d})[0]]++
			m.mu.Unlock()
		}
		pass(time.Duration(rng.IntN(2500)) * time.Millisecond)
		if rng.IntN(3) == 0 {
			at = m.follow(at, ds, func(k *Keeper, rs []string) ([]ItemResult, error) {
				items := make([]ExtendItem, len(rs))
				for i, r := range rs {
					items[i] = ExtendItem{Receipt: r, Lease: 20 * time.Second}
				}
				return k.Extend(within(time.Minute), "g", items)
			})
		}
		at = m.follow(at, ds, func(k *Keeper, rs []string) ([]ItemResult, error) { return k.Ack(within(time.Minute), "g", rs) })
		m.mu.Lock()
		m.acked += len(ds)
		m.mu.Unlock()
	}
}

// follow settles at the home, wherever that is.
func (m *mover) follow(at int, ds []Delivery, do func(*Keeper, []string) ([]ItemResult, error)) int {
	for len(ds) > 0 {
		items, err := do(m.keepers[at], receipts(ds...))
		if err != nil {
			if codeOf(err, 0) != code.NotOwner {
				m.t.Errorf("settle: %v", err)
				return at
			}
			at = 1 - at
			pass(time.Millisecond)
			continue
		}
		var rest []Delivery
		for i, it := range items {
			switch it.Code {
			case code.OK:
			case code.NotOwner:
				rest = append(rest, ds[i])
			default:
				m.t.Errorf("%s: %v", ds[i].Message.Address, it.Code)
			}
		}
		ds = rest
	}
	return at
}
