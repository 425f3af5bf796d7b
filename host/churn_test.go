package host

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// TestMembershipChurn drains hosts, takes drains back, moves replicas, and restarts hosts at random under running publishers. In the end
// every shard's membership is what the catalog says, and nothing that was acknowledged is lost or stored twice.
//
// TIERQ_TEST_SEED repeats a run's choices.
func TestMembershipChurn(t *testing.T) {
	f := newTestFleet(t, 4, 2)
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("TIERQ_TEST_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	f.startAll()
	shards := []uint64{f.create(1, "a", 3, 0).Shards[0], f.create(1, "b", 2, 1).Shards[0], f.create(1, "c", 2, 1).Shards[0]}
	publishers := make(map[uint64]*testPublisher)
	for _, shard := range shards {
		f.settled(shard)
		publishers[shard] = f.publishAt(shard, func(turn int) *RaftHost { return f.running(uint64(turn%4 + 1)) })
	}
	for range 14 {
		f.churn(random, shards)
		for shard, p := range publishers {
			had := p.acked.Load()
			eventually(t, "publishes to shard "+strconv.FormatUint(shard, 10)+" go on", func() bool { return p.acked.Load() > had+3 })
		}
	}
	for _, spec := range f.specs {
		f.change(&catalog.DrainHost{HostID: spec.ID, Cancel: true})
	}
	eventually(t, "everything has moved", func() bool {
		v := f.any().Catalog()
		return len(v.Moves()) == 0 && len(v.Evacuation(func(uint64) bool { return true })) == 0
	})
	for _, shard := range append(shards, catalog.ShardID) {
		f.agrees(shard)
	}
	for _, shard := range shards {
		var holders []uint64
		p, _ := f.any().Catalog().Placement(shard)
		for _, r := range p.Replicas {
			if r.Votes() && r.Birth != catalog.BirthWitness {
				holders = append(holders, r.HostID)
			}
		}
		f.complete(shard, publishers[shard], holders...)
	}
}

// churn does one random thing to the fleet.
func (f *testFleet) churn(random *rand.Rand, shards []uint64) {
	f.t.Helper()
	host := f.specs[random.IntN(len(f.specs))].ID
	switch v := f.any().Catalog(); random.IntN(4) {
	case 0:
		for _, s := range f.specs { // of one role, one host at a time
			if v.HostState(s.ID) == catalog.HostDraining {
				f.change(&catalog.DrainHost{HostID: s.ID, Cancel: true})
			}
		}
		f.change(&catalog.DrainHost{HostID: host})
	case 1:
		f.change(&catalog.DrainHost{HostID: host, Cancel: true})
	case 2:
		shard := shards[random.IntN(len(shards))]
		p, _ := v.Placement(shard)
		r := p.Replicas[random.IntN(len(p.Replicas))]
		// It may be refused.
		_, err := f.any().ProposeCatalog(within(f.t, patience), &catalog.StartMove{Shard: shard, From: r.ID, ToHost: host})
		require.NoError(f.t, err)
	case 3:
		f.restart(host)
	}
}

// agrees waits until a shard's membership is that of the catalog.
func (f *testFleet) agrees(shard uint64) {
	f.t.Helper()
	eventually(f.t, "the membership is the catalog's", func() bool {
		h := f.leader(shard)
		p, _ := h.Catalog().Placement(shard)
		full, witnesses := map[queue.ReplicaID]uint64{}, map[queue.ReplicaID]uint64{}
		for _, r := range p.Replicas {
			switch {
			case !r.Votes():
			case r.Birth == catalog.BirthWitness:
				witnesses[r.ID] = r.HostID
			default:
				full[r.ID] = r.HostID
			}
		}
		m, err := h.Membership(within(f.t, time.Second), shard)
		return err == nil && len(m.NonVoting) == 0 && equalMaps(m.Full, full) && equalMaps(m.Witnesses, witnesses)
	})
}

func equalMaps(a, b map[queue.ReplicaID]uint64) bool {
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return len(a) == len(b)
}
