package host

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// codeOf returns the registry code and effect of an error.
func codeOf(t *testing.T, err error) (code.Code, code.Effect) {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, err, &e)
	return e.Code, e.Effect
}

// create makes a queue at a host and waits until its shards run with its options everywhere.
func (f *testFleet) create(at uint64, name string, replicas, witnesses uint32) catalog.Queue {
	f.t.Helper()
	q, err := f.hosts[at].CreateQueue(within(f.t, patience), catalog.CreateQueue{
		OperationID: uint64(time.Now().UnixNano()), Name: name, Replicas: replicas, Witnesses: witnesses,
	})
	require.NoError(f.t, err)
	for _, shard := range q.Shards {
		f.serves(shard)
	}
	return q
}

// serves waits until a shard's full replicas on running hosts have the queue's options.
func (f *testFleet) serves(shard uint64) {
	f.t.Helper()
	for _, h := range f.full(shard) {
		eventually(f.t, "the shard has its options", func() bool {
			r, ok := h.Reader(shard)
			return ok && r.Meta().Options.Version > 0
		})
	}
}

// full returns the running hosts with a full replica of a shard.
func (f *testFleet) full(shard uint64) []*RaftHost {
	f.t.Helper()
	var hosts []*RaftHost
	for _, h := range f.hosts {
		p, _ := h.Catalog().Placement(shard)
		if r, ok := p.OnHost(h.HostID()); ok && r.Birth != catalog.BirthWitness {
			hosts = append(hosts, h)
		}
	}
	return hosts
}

// leader waits for a shard to have a leader on a running host and returns that host.
func (f *testFleet) leader(shard uint64) *RaftHost {
	f.t.Helper()
	var leader *RaftHost
	eventually(f.t, "the shard has a leader", func() bool {
		for _, h := range f.full(shard) {
			self, ok := h.SelfReplica(shard)
			if l, _ := h.ownLeader(shard); ok && l == self {
				leader = h
				return true
			}
		}
		return false
	})
	return leader
}

// enqueue proposes at a host until a proposal is applied.
func (f *testFleet) enqueue(h *RaftHost, shard uint64) queue.Result {
	f.t.Helper()
	var result queue.Result
	eventually(f.t, "a proposal is applied", func() bool {
		stamp, err := h.Stamp(shard)
		require.NoError(f.t, err)
		cmd, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: stamp, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("body")}}}}})
		require.NoError(f.t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		result, err = h.Propose(ctx, shard, cmd)
		return err == nil
	})
	require.Equal(f.t, code.OK, result.Code)
	return result
}

// TestQueueLife creates queues of both layouts, proposes on leader and follower, restarts everything, and deletes them.
func TestQueueLife(t *testing.T) {
	f := newTestFleet(t, 3, 1)
	f.startAll()
	shards := []uint64{f.create(1, "three", 3, 0).Shards[0], f.create(4, "two", 2, 1).Shards[0]}
	for _, shard := range shards {
		f.settled(shard)
		for _, h := range f.full(shard) {
			index := f.enqueue(h, shard).Index
			require.NoError(t, h.ReadIndex(within(t, patience), shard))
			r, _ := h.Reader(shard)
			require.GreaterOrEqual(t, r.Meta().Applied, index)
		}
	}
	fleet := f.hosts[1].Fleet()
	f.stopAll()
	f.startAll()
	require.Equal(t, fleet, f.hosts[2].Fleet())
	for _, shard := range shards {
		f.settled(shard)
		h := f.leader(shard)
		f.enqueue(h, shard)
		r, _ := h.Reader(shard)
		require.EqualValues(t, len(f.full(shard))+1, r.Meta().Last, "nothing was lost, nothing applied twice")
	}
	for _, name := range []string{"three", "two"} {
		q, ok := f.hosts[2].Catalog().Queue("", name)
		require.True(t, ok)
		require.NoError(t, f.hosts[4].DeleteQueue(within(t, patience), catalog.DeleteQueue{OperationID: 5, Name: name, ExpectedID: q.ID}))
	}
	for _, h := range f.hosts {
		for _, shard := range shards {
			eventually(t, "the replica is removed", func() bool {
				p, _ := h.Catalog().Placement(shard)
				_, running := h.SelfReplica(shard)
				for _, r := range p.Replicas {
					if r.State != catalog.ReplicaRemoved {
						return false
					}
				}
				return !running
			})
			if h.states != nil {
				left, err := h.states.store.Shards()
				require.NoError(t, err)
				require.NotContains(t, left, shard)
			}
		}
	}
	f.stopAll()
	f.startAll()
	require.Empty(t, f.hosts[1].Catalog().Queues(""))
}

// TestOneFullHostLost kills one of two full hosts: the other goes on with the witness.
func TestOneFullHostLost(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(3, "q", 2, 1).Shards[0]
	f.settled(shard)
	f.settled(catalog.ShardID)
	lost := f.leader(shard)
	f.enqueue(lost, shard)
	left := f.hosts[3-lost.HostID()]
	f.stop(lost.HostID())
	f.enqueue(left, shard)
	r, _ := left.Reader(shard)
	last := r.Meta().Last
	require.GreaterOrEqual(t, last, queue.Address(2), "more when a publish without an answer was repeated")
	eventually(t, "the silence is noticed", func() bool {
		alive, since := left.Alive(lost.HostID())
		return !alive && since > 0
	})
	// A new queue is placed meanwhile, and begins when both of its first members are there: a witness cannot be one.
	q, err := left.CreateQueue(within(t, patience), catalog.CreateQueue{OperationID: 7, Name: "other", Replicas: 2, Witnesses: 1})
	require.NoError(t, err)
	f.start(lost.HostID())
	f.serves(q.Shards[0])
	f.settled(q.Shards[0])
	eventually(t, "the lost host catches up", func() bool {
		r, ok := f.hosts[lost.HostID()].Reader(shard)
		return ok && r.Meta().Last == last
	})
}

func TestProposeOutcomes(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	h := f.hosts[1]
	cmd, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: 1, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("b")}}}}})
	require.NoError(t, err)

	_, err = h.Propose(within(t, patience), 99, cmd)
	c, effect := codeOf(t, err)
	require.Equal(t, code.NotReplica, c)
	require.Equal(t, code.EffectNone, effect)
	_, err = f.hosts[3].Propose(within(t, patience), shard, cmd)
	c, _ = codeOf(t, err)
	require.Equal(t, code.NotReplica, c, "a witness takes no proposals")
	_, err = h.Propose(within(t, time.Millisecond), shard, cmd)
	c, effect = codeOf(t, err)
	require.Equal(t, code.DeadlineExceeded, c)
	require.Equal(t, code.EffectNone, effect)
	_, err = h.ProposeAsync(shard, make([]byte, maxInMemLogBytes+1), time.Second)
	c, _ = codeOf(t, err)
	require.Equal(t, code.TooLarge, c)

	// A pipeline, with one goroutine.
	var pendings []*Pending
	for range 32 {
		p, err := h.ProposeAsync(shard, cmd, patience)
		require.NoError(t, err)
		pendings = append(pendings, p)
	}
	var last queue.Index
	for _, p := range pendings {
		r, err := p.Wait(within(t, patience))
		require.NoError(t, err)
		require.Greater(t, r.Index, last, "proposals of one host keep their order")
		last = r.Index
	}
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	p, err := h.ProposeAsync(shard, cmd, patience)
	require.NoError(t, err)
	if _, err := p.Wait(canceled); err != nil {
		c, effect = codeOf(t, err)
		require.Equal(t, code.QuorumLost, c)
		require.Equal(t, code.EffectMaybe, effect)
	}

	// Without a quorum: nothing hangs past its deadline.
	f.stop(2)
	f.stop(3)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := h.Propose(within(t, 500*time.Millisecond), shard, cmd)
		assert.Error(t, err)
		assert.Error(t, h.ReadIndex(within(t, 500*time.Millisecond), shard))
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		require.FailNow(t, "hangs")
	}
	require.NoError(t, h.Close())
	_, err = h.Propose(within(t, patience), shard, cmd)
	c, _ = codeOf(t, err)
	require.Equal(t, code.ShuttingDown, c)
}

func TestTransferLeaderAndMembership(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	h := f.leader(shard)
	m, err := h.Membership(within(t, patience), shard)
	require.NoError(t, err)
	require.Equal(t, map[queue.ReplicaID]uint64{1: 1, 2: 2}, m.Full)
	require.Equal(t, map[queue.ReplicaID]uint64{3: 3}, m.Witnesses)
	self, _ := h.SelfReplica(shard)
	require.NoError(t, h.TransferLeader(within(t, patience), shard, 3-self))
	require.NotEqual(t, h.HostID(), f.leader(shard).HostID())
	c, _ := codeOf(t, h.TransferLeader(within(t, patience), shard, 3))
	require.Equal(t, code.InvalidArgument, c)
	eventually(t, "the witness host hears who leads", func() bool {
		_, hostID, _, ok := f.hosts[3].Leader(shard)
		return ok && hostID == 3-h.HostID()
	})
}

// TestDrain hands the leadership of everything over; then a stop of the host interrupts nothing.
func TestDrain(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.startAll()
	var shards []uint64
	for _, name := range []string{"a", "b", "c", "d"} {
		shards = append(shards, f.create(1, name, 3, 0).Shards[0])
	}
	f.settled(shards[3])
	eventually(t, "nothing is led here", func() bool { return f.hosts[1].Drain(within(t, patience)) == 0 })
	for _, shard := range append(shards, catalog.ShardID) {
		require.NotEqual(t, uint64(1), f.leader(shard).HostID())
	}
}

// TestHostMoves: a host that starts at other addresses tells the catalog, and the others find it there.
func TestHostMoves(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.startAll()
	shard := f.create(1, "q", 3, 0).Shards[0]
	f.settled(shard)
	f.stop(3)
	moved := f.config(3)
	moved.Hosts = slices.Clone(f.specs)
	moved.Hosts[2].RaftAddr, moved.Hosts[2].PeerAddr, moved.Hosts[2].ClientAddr = freeport.For(t), freeport.For(t), "client-3:2"
	h, err := Open(moved)
	require.NoError(t, err)
	f.hosts[3] = h
	h.Start()
	f.ready()
	eventually(t, "another host knows where it is", func() bool {
		seen, ok := f.hosts[1].Catalog().Host(3)
		return ok && seen.ClientAddr == "client-3:2"
	})
	f.enqueue(h, shard)
	f.stop(2)
	f.enqueue(f.hosts[1], shard)
	eventually(t, "the moved host has everything", func() bool {
		r, ok := h.Reader(shard)
		return ok && r.Meta().Last >= 2
	})
}

// TestPoisonedReplicaStopsAlone: a committed entry that a replica cannot apply stops that shard, and nothing else.
func TestPoisonedReplicaStopsAlone(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	var poisoned atomic.Uint64
	f.tune = func(c *Config) { c.OnPoisoned = func(shard uint64, err error) { poisoned.Add(shard) } }
	f.startAll()
	bad := f.create(1, "bad", 2, 1).Shards[0]
	good := f.create(1, "good", 2, 1).Shards[0]
	f.settled(bad)
	f.settled(good)
	p, err := f.leader(bad).ProposeAsync(bad, []byte("not a command"), time.Second)
	require.NoError(t, err)
	_, err = p.Wait(within(t, patience))
	_, effect := codeOf(t, err)
	require.Equal(t, code.EffectMaybe, effect)
	for _, id := range []uint64{1, 2} {
		eventually(t, "the replica is stopped", func() bool { _, ok := f.hosts[id].SelfReplica(bad); return !ok })
	}
	eventually(t, "the host is told", func() bool { return poisoned.Load() == 2*bad })
	f.enqueue(f.leader(good), good)
}

// TestInstall: a replica that was away longer than its leader's log reaches back gets the whole state.
func TestInstall(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	var installs atomic.Int64
	f.tune = func(c *Config) {
		c.SnapshotEntries = 40
		c.OnInstalled = func(uint64) { installs.Add(1) }
	}
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	away := 3 - f.leader(shard).HostID()
	left := f.hosts[3-away]
	f.stop(away)
	r, ok := left.Reader(shard)
	require.True(t, ok)
	known := r.Meta().Applied
	eventually(t, "the log begins behind what the other one has", func() bool {
		f.enqueue(left, shard)
		log, err := left.nodeHost.GetLogReader(shard)
		require.NoError(t, err)
		first, _ := log.GetRange()
		return first > uint64(known)+1
	})
	last := r.Meta().Last
	f.start(away)
	eventually(t, "the state is installed", func() bool {
		r, ok := f.hosts[away].Reader(shard)
		return ok && r.Meta().Last == last && installs.Load() > 0
	})
	f.enqueue(f.hosts[away], shard)
	eventually(t, "both have the same state", func() bool {
		want, err := digest(left, shard) // each time: a publish that was repeated may be applied late
		require.NoError(t, err)
		got, err := digest(f.hosts[away], shard)
		require.NoError(t, err)
		return got == want
	})
}

func digest(h *RaftHost, shard uint64) ([32]byte, error) {
	r, _ := h.Reader(shard)
	_, d, err := r.Digest()
	return d, err
}

// TestDamagedState: a state that does not open stops its shard alone, is tried again, and does not hold up Close.
func TestDamagedState(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	bad := f.create(1, "bad", 2, 1).Shards[0]
	good := f.create(1, "good", 2, 1).Shards[0]
	f.settled(bad)
	f.settled(good)
	for range 3 {
		f.enqueue(f.leader(bad), bad)
	}
	f.stop(2)
	s, err := store.Open(filepath.Join(f.config(2).DataDir, stateDir), store.Options{})
	require.NoError(t, err)
	h, err := s.Shard(bad)
	require.NoError(t, err)
	b := h.NewBatch()
	it, err := h.NewIter(nil, nil)
	require.NoError(t, err)
	for ok := it.First(); ok; ok = it.Next() {
		b.Set(it.Key(), []byte("damage"))
	}
	require.NoError(t, it.Close())
	require.NoError(t, h.Commit(b))
	require.NoError(t, s.Close())

	f.start(2)
	f.ready()
	f.serves(good)
	f.enqueue(f.hosts[2], good)
	eventually(t, "the replica is stopped", func() bool { return f.hosts[2].resting(bad) != nil })
	_, ok := f.hosts[2].Reader(bad)
	require.False(t, ok)
	f.stop(2)
}

// TestCreateWhileTheFleetBegins: a creation may be asked for before the hosts have formed the fleet.
func TestCreateWhileTheFleetBegins(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.start(1, 2, 3)
	q, err := f.hosts[1].CreateQueue(within(t, patience), catalog.CreateQueue{OperationID: 1, Name: "q", Replicas: 2, Witnesses: 1})
	require.NoError(t, err)
	f.serves(q.Shards[0])
}

func TestRefusals(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	f.create(1, "q", 2, 1)
	h := f.hosts[1]
	for want, c := range map[code.Code]catalog.CreateQueue{
		code.InvalidArgument:     {OperationID: 1, Name: "one", Replicas: 1},
		code.NoPlacement:         {OperationID: 1, Name: "three", Replicas: 3},
		code.InvalidName:         {OperationID: 1, Name: "$x", Replicas: 2, Witnesses: 1},
		code.QueueExistsMismatch: {OperationID: 1, Name: "q", Replicas: 2, Witnesses: 1, Options: queue.QueueOptions{Ordering: queue.OrderKey}},
	} {
		_, err := h.CreateQueue(within(t, patience), c)
		got, effect := codeOf(t, err)
		require.Equal(t, want, got)
		require.Equal(t, code.EffectNone, effect)
	}
	c, _ := codeOf(t, h.DeleteQueue(within(t, patience), catalog.DeleteQueue{OperationID: 1, Name: "none"}))
	require.Equal(t, code.UnknownQueue, c)
}

// TestOpenRefusals: each is one line that names what to do, and leaves nothing open.
func TestOpenRefusals(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	h, err := Open(f.config(1))
	require.NoError(t, err)
	f.hosts[1] = h

	_, err = Open(f.config(1))
	require.ErrorContains(t, err, "is in use by another host of this process")
	require.NotContains(t, err.Error(), "\n")

	f.stop(1)
	wrong := f.config(2)
	wrong.DataDir = f.config(1).DataDir
	_, err = Open(wrong)
	require.ErrorContains(t, err, "belongs to host 1, but this is host 2")

	busy, err := net.Listen("tcp", f.specs[0].RaftAddr)
	require.NoError(t, err)
	_, err = Open(f.config(1))
	require.ErrorContains(t, err, "the Raft address "+f.specs[0].RaftAddr+" cannot be bound")
	require.NoError(t, busy.Close())
	busy, err = net.Listen("tcp", f.specs[0].PeerAddr)
	require.NoError(t, err)
	_, err = Open(f.config(1))
	require.ErrorContains(t, err, "the peer address "+f.specs[0].PeerAddr+" cannot be bound")
	require.NoError(t, busy.Close())

	h, err = Open(f.config(1))
	require.NoError(t, err, "nothing was left behind")
	require.NoError(t, h.Close())
	require.NoError(t, h.Close(), "twice")
	require.NoError(t, os.Remove(filepath.Join(f.config(1).DataDir, identityFile)))
	_, err = Open(f.config(1))
	require.ErrorContains(t, err, "has data but no identity.json")
}

// TestCopiedDirectory: a copy of the data directory of a host that runs is refused before it has voted; alone, it may go on elsewhere.
func TestCopiedDirectory(t *testing.T) {
	f := newTestFleet(t, 2, 0)
	f.startAll()
	f.stop(2)
	cfg := f.config(2)
	copied := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(copied, os.DirFS(cfg.DataDir)))
	f.start(2)
	require.Eventually(t, func() bool { ok, _ := f.hosts[1].Alive(2); return ok }, 90*time.Second, 10*time.Millisecond)
	cfg.DataDir, cfg.Hosts = copied, slices.Clone(cfg.Hosts)
	cfg.Hosts[1].RaftAddr, cfg.Hosts[1].PeerAddr = freeport.For(t), freeport.For(t)
	_, err := Open(cfg)
	require.ErrorContains(t, err, "host 2 runs already: host 1 hears it from")
	f.stop(2)
	h, err := Open(cfg)
	require.NoError(t, err, "it was moved")
	require.NoError(t, h.Close())
}

// TestWrongFleet: a host with the data of one fleet, started with the addresses of another, is refused by it.
func TestWrongFleet(t *testing.T) {
	a := newTestFleet(t, 2, 0)
	b := &testFleet{t: t, dir: t.TempDir(), hosts: make(map[uint64]*RaftHost), specs: slices.Clone(a.specs)}
	for i := range b.specs {
		b.specs[i].RaftAddr, b.specs[i].PeerAddr = freeport.For(t), freeport.For(t)
	}
	t.Cleanup(b.stopAll)
	a.startAll()
	b.startAll()
	a.stop(2)
	cfg := a.config(2)
	cfg.Hosts = b.specs
	b.stop(2)
	_, err := Open(cfg)
	require.ErrorContains(t, err, a.hosts[1].Fleet().String())
	require.ErrorContains(t, err, b.hosts[1].Fleet().String())
	require.False(t, errors.Is(err, context.DeadlineExceeded))
}
