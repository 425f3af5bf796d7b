package host

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// lose removes a part of a host's data directory while the host is stopped.
func (f *testFleet) lose(id uint64, part string) {
	f.t.Helper()
	f.stop(id)
	require.NoError(f.t, os.RemoveAll(filepath.Join(f.config(id).DataDir, part)))
}

// rebuilt waits until a host has another replica of a shard than it had, which votes, and nothing moves.
func (f *testFleet) rebuilt(shard, hostID uint64, had queue.ReplicaID) {
	f.t.Helper()
	defer func() {
		if f.t.Failed() {
			p, _ := f.any().Catalog().Placement(shard)
			f.t.Logf("shard %d on host %d: replicas %+v, moves %+v", shard, hostID, p.Replicas, f.any().Catalog().Moves())
		}
	}()
	eventually(f.t, "the replica is rebuilt", func() bool {
		v := f.any().Catalog()
		p, _ := v.Placement(shard)
		r, _ := p.OnHost(hostID)
		_, moves := v.Move(shard)
		return !moves && r.ID != had && r.State == catalog.ReplicaStarted && r.Votes()
	})
}

func (f *testFleet) equal(shard, a, b uint64) {
	f.t.Helper()
	eventually(f.t, "equal states", func() bool {
		want, errA := digest(f.hosts[a], shard)
		got, errB := digest(f.hosts[b], shard)
		return errA == nil && errB == nil && got == want
	})
}

// TestLostReplicaIsRebuilt: a host of two full ones and a witness loses its store, then its log, and the witness its log. Each replica is made
// again where it was, without anybody's doing, while the others go on; whoever reports a step stops before the catalog hears of it, at
// every step.
func TestLostReplicaIsRebuilt(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	var mu sync.Mutex
	crashed, armed := map[any]bool{}, true
	crash := make(chan uint64, 16)
	dies := func(h *RaftHost, shard uint64, at any) error {
		mu.Lock()
		defer mu.Unlock()
		if !armed || shard == catalog.ShardID || crashed[at] {
			return nil
		}
		crashed[at] = true
		crash <- h.HostID()
		<-h.ctx.Done()
		return errors.New("the host crashes here")
	}
	f.beforeStart = func(h *RaftHost) {
		h.beforeMoveReport = func(m catalog.Move, e catalog.MoveEvent) error { return dies(h, m.Shard, e) }
		h.beforeRemovedReport = func(shard uint64, _ queue.ReplicaID) error { return dies(h, shard, "removed") }
	}
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	f.settled(catalog.ShardID)
	for range 20 {
		f.enqueue(f.leader(shard), shard)
	}
	f.equal(shard, 1, 2)

	was := f.replicaOn(shard, 2)
	f.lose(2, stateDir)
	f.start(2)
	for range 4 { // cleared, removed, added, promoted
		select {
		case id := <-crash:
			cfg := f.hosts[id].cfg
			f.stop(id)
			f.open(cfg)
		case <-time.After(patience):
			t.Fatalf("no further step: %v", f.any().Catalog().Moves())
		}
	}
	f.rebuilt(shard, 2, queue.ReplicaID(was))
	f.equal(shard, 1, 2)
	require.EqualValues(t, 2, f.replicaOn(catalog.ShardID, 2), "the catalog is not in the store")
	mu.Lock()
	armed = false
	mu.Unlock()
	f.enqueue(f.leader(shard), shard)
	eventually(t, "two data copies", func() bool { return f.leader(shard).InSync(shard) == 2 })

	// The log holds every replica, the catalog's too. The first host is in the lead of nothing then.
	was = f.replicaOn(shard, 1)
	f.lose(1, walDir)
	f.start(1)
	f.rebuilt(catalog.ShardID, 1, 1)
	f.rebuilt(shard, 1, queue.ReplicaID(was))
	f.equal(shard, 1, 2)
	was = f.replicaOn(shard, 3)
	f.lose(3, walDir)
	f.start(3)
	f.rebuilt(shard, 3, queue.ReplicaID(was))
	f.rebuilt(catalog.ShardID, 3, 3)
	f.agrees(shard)
	f.agrees(catalog.ShardID)

	// The new ones carry it: a full host is down.
	f.stop(1)
	f.enqueue(f.leader(shard), shard)
	eventually(t, "the catalog goes on", func() bool { // it may elect
		_, err := f.hosts[2].ReadCatalog(within(t, time.Second))
		return err == nil
	})
}

// TestRebuildOnDemand: an operator has a replica that runs made again, under publishers; not while the others could not go on.
func TestRebuildOnDemand(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	eventually(t, "hosts tell of themselves", func() bool { return f.hosts[1].notYet(f.hosts[1].Catalog()) == nil })
	require.Equal(t, code.UnknownPartition, f.refusedCode(f.hosts[1].Rebuild(within(t, patience), 99, 2)))
	require.Equal(t, code.NotReplica, f.refusedCode(f.hosts[1].Rebuild(within(t, patience), shard, 9)))
	p := f.publish(shard, f.hosts[1], f.hosts[2])
	was := f.leader(shard).HostID() // the leader hands over and goes
	had := queue.ReplicaID(f.replicaOn(shard, was))
	eventually(t, "both copies are there, so that it may be begun", func() bool { return f.hosts[1].Rebuild(within(t, patience), shard, was) == nil })
	f.rebuilt(shard, was, had)
	require.NotEqual(t, was, f.leader(shard).HostID())
	f.complete(shard, p, 1, 2)

	f.stop(3)
	eventually(t, "the witness is silent", func() bool { alive, _ := f.hosts[1].Alive(3); return !alive })
	require.Equal(t, code.ReplicaNeeded, f.refusedCode(f.hosts[1].Rebuild(within(t, patience), shard, was)))
	f.start(3)
	f.ready()

	// What the catalog lets begin, the leader does only when the others run: the old replica stays meanwhile.
	had = queue.ReplicaID(f.replicaOn(shard, 2))
	f.lose(2, stateDir)
	f.stop(3)
	require.Equal(t, 1, len(f.hosts))
	f.start(2)
	eventually(t, "it is known to be lost", func() bool {
		p, _ := f.hosts[1].Catalog().Placement(shard)
		r, _ := p.Replica(had)
		return r.State == catalog.ReplicaLost
	})
	f.start(3)
	f.rebuilt(shard, 2, had)
	f.equal(shard, 1, 2)
	require.False(t, slices.ContainsFunc(f.hosts[1].Planned(), func(p catalog.Planned) bool { return p.Shard == shard }))
}

func (f *testFleet) refusedCode(err error) code.Code {
	f.t.Helper()
	var e *code.Error
	require.ErrorAs(f.t, err, &e)
	return e.Code
}
