package host

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// join takes a new host into the fleet with a token, and starts it. The other hosts' lists stay as they are.
func (f *testFleet) join(id uint64, role catalog.HostRole) *RaftHost {
	f.t.Helper()
	spec := HostSpec{ID: id, Role: role, RaftAddr: freeport.For(f.t), PeerAddr: freeport.For(f.t), ClientAddr: "client:1", Domain: "rack-" + string(rune('0'+id))}
	if role == catalog.HostWitness {
		spec.ClientAddr = ""
	}
	specs := f.specs
	f.joined = append(f.joined, spec)
	f.specs = append(slices.Clone(specs), f.joined...)
	cfg := f.config(id)
	f.specs = specs
	token, _, err := f.any().CreateJoinToken(within(f.t, patience), time.Minute)
	require.NoError(f.t, err)
	h, err := Join(within(f.t, patience), cfg, token)
	require.NoError(f.t, err)
	require.Equal(f.t, id, h.ID)
	f.open(cfg)
	require.NoError(f.t, f.hosts[id].AwaitReady(within(f.t, patience)))
	return f.hosts[id]
}

func (f *testFleet) open(cfg Config) {
	f.t.Helper()
	h, err := Open(cfg)
	require.NoError(f.t, err)
	f.hosts[cfg.HostID] = h
	if f.beforeStart != nil {
		f.beforeStart(h)
	}
	h.Start()
}

// any returns the running host with the smallest id.
func (f *testFleet) any() *RaftHost {
	var best *RaftHost
	for id, h := range f.hosts {
		if best == nil || id < best.HostID() {
			best = h
		}
	}
	return best
}

// change proposes a catalog command, which must be taken.
func (f *testFleet) change(c catalog.Command) {
	f.t.Helper()
	r, err := f.any().ProposeCatalog(within(f.t, patience), c)
	require.NoError(f.t, err)
	require.NoError(f.t, r.Err())
}

// on returns the hosts on which a shard's replicas live.
func (f *testFleet) on(shard uint64) []uint64 {
	p, _ := f.any().Catalog().Placement(shard)
	var hosts []uint64
	for _, r := range p.Replicas {
		if r.State != catalog.ReplicaRetired && r.State != catalog.ReplicaRemoved {
			hosts = append(hosts, r.HostID)
		}
	}
	slices.Sort(hosts)
	return hosts
}

// becomes waits until a shard lives on these hosts and nothing moves.
func (f *testFleet) becomes(shard uint64, hosts ...uint64) {
	f.t.Helper()
	defer func() {
		if f.t.Failed() {
			p, _ := f.any().Catalog().Placement(shard)
			f.t.Logf("shard %d is not on hosts %v: replicas %+v, moves %+v", shard, hosts, p.Replicas, f.any().Catalog().Moves())
		}
	}()
	eventually(f.t, "the shard has moved", func() bool {
		_, moves := f.any().Catalog().Move(shard)
		return !moves && slices.Equal(f.on(shard), hosts)
	})
}

// testPublisher publishes one numbered message after the other, at whichever host takes it, until it is stopped.
type testPublisher struct {
	stop  chan struct{}
	done  sync.WaitGroup
	acked atomic.Int64
	gap   time.Duration // the longest time between two acknowledgements
}

func (f *testFleet) publish(shard uint64, hosts ...*RaftHost) *testPublisher {
	return f.publishAt(shard, func(turn int) *RaftHost { return hosts[turn%len(hosts)] })
}

// publishAt is publish at the hosts that at names by turns; one that is nil is passed over.
func (f *testFleet) publishAt(shard uint64, at func(turn int) *RaftHost) *testPublisher {
	p := &testPublisher{stop: make(chan struct{})}
	p.done.Go(func() {
		last := time.Now()
		for turn := 0; ; turn++ {
			select {
			case <-p.stop:
				return
			default:
			}
			h := at(turn)
			if h == nil {
				continue
			}
			if publishOne(h, shard, int(p.acked.Load())+1) {
				p.gap = max(p.gap, time.Since(last))
				last = time.Now()
				p.acked.Add(1)
				turn--
			}
		}
	})
	f.t.Cleanup(p.end)
	return p
}

// running returns a host, nil while it is stopped; from any goroutine, where hosts are only stopped and started by restart.
func (f *testFleet) running(id uint64) *RaftHost {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hosts[id]
}

// restart stops a host and starts it again with its data.
func (f *testFleet) restart(id uint64) {
	f.t.Helper()
	f.mu.Lock()
	h := f.hosts[id]
	delete(f.hosts, id)
	f.mu.Unlock()
	require.NoError(f.t, h.Close())
	next, err := Open(h.cfg)
	require.NoError(f.t, err)
	next.Start()
	f.mu.Lock()
	f.hosts[id] = next
	f.mu.Unlock()
}

func (p *testPublisher) end() {
	select {
	case <-p.stop:
	default:
		close(p.stop)
	}
	p.done.Wait()
}

func publishOne(h *RaftHost, shard uint64, seq int) bool {
	stamp, err := h.Stamp(shard)
	if err != nil {
		return false
	}
	cmd, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: stamp, Publishes: []queue.Publish{{
		Producer: queue.Producer{Kind: queue.ProducerClient, ID: 7}, Low: queue.Seq(max(seq-100, 1)),
		Messages: []queue.Message{{Seq: queue.Seq(seq), Body: []byte("body")}},
	}}})
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	r, err := h.Propose(ctx, shard, cmd)
	return err == nil && r.Code == code.OK
}

// complete checks that every replica of a shard has every acknowledged message once, and equal states.
func (f *testFleet) complete(shard uint64, p *testPublisher, hosts ...uint64) {
	f.t.Helper()
	eventually(f.t, "the publisher goes on", func() bool { return p.acked.Load() > 10 })
	p.end()
	acked := int(p.acked.Load())
	f.t.Logf("%d acknowledged, longest gap %v", acked, p.gap)
	for _, id := range hosts {
		eventually(f.t, "the replica has everything", func() bool {
			r, ok := f.hosts[id].Reader(shard)
			return ok && int(r.Meta().Last) >= acked
		})
		r, _ := f.hosts[id].Reader(shard)
		require.LessOrEqual(f.t, int(r.Meta().Last), acked+1, "nothing twice: only the last one's answer may be missing")
	}
	for _, id := range hosts[1:] {
		eventually(f.t, "equal states", func() bool {
			want, errA := digest(f.hosts[hosts[0]], shard) // each time: an attempt of the publisher may be applied late
			got, errB := digest(f.hosts[id], shard)
			return errA == nil && errB == nil && got == want
		})
	}
}

func (f *testFleet) refusedBy(cfg Config) {
	f.t.Helper()
	h, err := Open(cfg)
	require.NoError(f.t, err)
	defer func() { require.NoError(f.t, h.Close()) }()
	h.Start()
	err = h.AwaitReady(within(f.t, patience))
	got, _ := codeOf(f.t, err)
	require.Equal(f.t, code.HostRefused, got, "%v", err)
	require.ErrorContains(f.t, err, "tierq host join")
}

// TestHostsJoinAndLeave: in a fleet of two full hosts and a witness a full host joins, the leader's host is drained under a running
// publisher and removed, and the witness's host is lost and replaced. The catalog moves with them.
func TestHostsJoinAndLeave(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	f.settled(catalog.ShardID)
	four := f.join(4, catalog.HostFull)

	leaving := f.leader(shard).HostID()
	staying := 3 - leaving
	r, err := four.ProposeCatalog(within(t, patience), &catalog.RemoveHost{HostID: leaving})
	require.NoError(t, err)
	require.Equal(t, code.MutationFenced, r.Code)
	p := f.publish(shard, f.hosts[1], f.hosts[2], four)
	f.change(&catalog.DrainHost{HostID: leaving})
	f.becomes(shard, min(3, staying), max(3, staying), 4)
	f.becomes(catalog.ShardID, min(3, staying), max(3, staying), 4)
	eventually(t, "the data are removed", func() bool { return four.Catalog().Left(leaving) == 0 })
	left, err := f.hosts[leaving].states.store.Shards()
	require.NoError(t, err)
	require.Empty(t, left)
	f.change(&catalog.RemoveHost{HostID: leaving})
	f.complete(shard, p, staying, 4)
	cfg := f.config(leaving)
	f.stop(leaving)
	f.refusedBy(cfg)

	// What was promoted is started as it was born.
	cfg = four.cfg
	f.stop(4)
	f.open(cfg)
	four = f.hosts[4]
	require.NoError(t, four.AwaitReady(within(t, patience)))
	f.enqueue(f.leader(shard), shard)

	// The witness's host burns down.
	f.stop(3)
	f.join(5, catalog.HostWitness)
	f.change(&catalog.RemoveHost{HostID: 3, Lost: true})
	f.becomes(shard, staying, 4, 5)
	f.becomes(catalog.ShardID, staying, 4, 5)
	eventually(t, "the lost host is gone", func() bool { return four.Catalog().RemovedHost(3) })

	// So does that of the other full replica: one full replica and the witness are left, and a quorum.
	f.stop(staying)
	f.enqueue(four, shard)
	six := f.join(6, catalog.HostFull)
	f.change(&catalog.RemoveHost{HostID: staying, Lost: true})
	f.becomes(shard, 4, 5, 6)
	f.becomes(catalog.ShardID, 4, 5, 6)
	f.enqueue(f.leader(shard), shard)
	eventually(t, "equal states", func() bool {
		_, here := six.Reader(shard)
		if !here {
			return false
		}
		a, errA := digest(four, shard)
		b, errB := digest(six, shard)
		return errA == nil && errB == nil && a == b
	})
	eventually(t, "two data copies", func() bool { return f.leader(shard).InSync(shard) == 2 })
}

// TestWipedHostIsReplaced: a host that comes back without its data is refused, declared lost, and replaced, also in the catalog.
func TestWipedHostIsReplaced(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.startAll()
	f.settled(catalog.ShardID)
	shard := f.create(1, "q", 3, 0).Shards[0]
	f.settled(shard)
	f.join(4, catalog.HostFull)
	f.stop(2)
	require.NoError(t, os.RemoveAll(f.config(2).DataDir))
	p := f.publish(shard, f.hosts[1], f.hosts[3])
	f.refusedBy(f.config(2))
	f.change(&catalog.RemoveHost{HostID: 2, Lost: true})
	f.becomes(shard, 1, 3, 4)
	f.becomes(catalog.ShardID, 1, 3, 4)
	eventually(t, "the lost host is gone", func() bool { return f.hosts[4].Catalog().RemovedHost(2) })
	f.complete(shard, p, 1, 3, 4)

	// Host 3 loses its store only: that replica is lost, and replaced without anybody's doing on the host that has room for it.
	f.join(5, catalog.HostFull)
	f.lose(3, stateDir)
	f.start(3)
	f.becomes(shard, 1, 4, 5)
	f.enqueue(f.leader(shard), shard)
	require.Equal(t, []uint64{1, 3, 4}, f.on(catalog.ShardID), "the catalog is not in the store")
}

// TestMoveSurvivesCrashes: whoever reports a step of a move stops before the catalog hears of it, at every step, and the move goes on when
// that host is back.
func TestMoveSurvivesCrashes(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	var mu sync.Mutex
	crashed := map[catalog.MoveEvent]bool{}
	crash := make(chan uint64, 16)
	f.beforeStart = func(h *RaftHost) {
		h.beforeMoveReport = func(m catalog.Move, e catalog.MoveEvent) error {
			mu.Lock()
			defer mu.Unlock()
			if m.Shard == catalog.ShardID || crashed[e] {
				return nil
			}
			crashed[e] = true
			crash <- h.HostID()
			<-h.ctx.Done()
			return errors.New("the host crashes here")
		}
	}
	f.startAll()
	shard := f.create(1, "q", 3, 0).Shards[0]
	f.settled(shard)
	f.join(4, catalog.HostFull)
	leaving := f.leader(shard).HostID()
	f.enqueue(f.hosts[leaving], shard)
	f.change(&catalog.StartMove{Shard: shard, From: queue.ReplicaID(f.replicaOn(shard, leaving)), ToHost: 4})
	for range 4 {
		select {
		case id := <-crash:
			cfg := f.hosts[id].cfg
			f.stop(id)
			f.open(cfg)
		case <-time.After(patience):
			t.Fatalf("no further step: %v", f.any().Catalog().Moves())
		}
	}
	want := slices.DeleteFunc([]uint64{1, 2, 3, 4}, func(id uint64) bool { return id == leaving })
	f.becomes(shard, want...)
	require.Len(t, crashed, 4)
	eventually(t, "the data are removed", func() bool { return f.any().Catalog().Left(leaving) < 2 })
	h := f.leader(shard)
	f.enqueue(h, shard)
	m, err := h.Membership(within(t, patience), shard)
	require.NoError(t, err)
	require.Len(t, m.Full, 3)
	require.Empty(t, m.NonVoting)

	// A move to a host that does not come is given up, and can be made again.
	f.stop(4)
	p, _ := h.Catalog().Placement(shard)
	to, _ := p.OnHost(4)
	require.True(t, to.Votes())
	f.change(&catalog.StartMove{Shard: shard, From: to.ID, ToHost: leaving})
	f.change(&catalog.MoveReport{Shard: shard, To: to.ID + 1, Event: catalog.MoveAborted})
	f.becomes(shard, want...)
	eventually(t, "the data are removed", func() bool { return f.any().Catalog().Left(leaving) < 2 })
}

func (f *testFleet) replicaOn(shard, hostID uint64) uint64 {
	p, _ := f.any().Catalog().Placement(shard)
	r, _ := p.OnHost(hostID)
	return uint64(r.ID)
}
