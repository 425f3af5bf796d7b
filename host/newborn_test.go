package host

import (
	"fmt"
	"sync"
	"testing"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// TestFirstLeader: the partitions of a queue begin with the leaders that balancing would give them, and single ones take turns.
func TestFirstLeader(t *testing.T) {
	p := threeFull()
	p.Replicas[0].HostID, p.Replicas[2].HostID = 3, 1
	p.Replicas = append(p.Replicas, catalog.Replica{ID: 4, HostID: 4, Birth: catalog.BirthWitness})
	p.Shard, p.Partition = 8, 1
	first, other := firstLeader(p, 2)
	require.Equal(t, []queue.ReplicaID{2, 1}, []queue.ReplicaID{first, other}, "partition 1: the second host")
	first, other = firstLeader(p, 1)
	require.Equal(t, []queue.ReplicaID{1, 3}, []queue.ReplicaID{first, other}, "shard 8: the third")
	p.Replicas = p.Replicas[:1]
	first, _ = firstLeader(p, 1)
	require.Zero(t, first)
}

// TestNewbornIsLedAtOnce: the replica whose turn it is begins a new shard's first election, and no other one does.
func TestNewbornIsLedAtOnce(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.startAll()
	f.ready()
	var mu sync.Mutex
	var begun []raftpb.Message // with the host in From
	for _, h := range f.full(catalog.ShardID) {
		engine := *h.endings.deliver.Load()
		deliver := func(m raftpb.Message) {
			mu.Lock()
			begun = append(begun, m)
			begun[len(begun)-1].From = h.cfg.HostID
			mu.Unlock()
			engine(m)
		}
		h.endings.deliver.Store(&deliver)
	}
	for i := 0; ; i++ { // a busy machine may get to it later than to the election timeout
		q := f.create(1, fmt.Sprintf("q%d", i), 3, 0)
		f.serves(q.Shards[0])
		p, ok := f.any().placement(q.Shards[0])
		require.True(t, ok)
		first, _ := firstLeader(p, 1)
		mu.Lock()
		got := begun
		mu.Unlock()
		for _, m := range got {
			if m.ShardID != p.Shard {
				continue
			}
			r, _ := p.Replica(first)
			require.Equal(t, raftpb.TimeoutNow, m.Type)
			require.Equal(t, []uint64{uint64(first), r.HostID, bootstrapTerm}, []uint64{m.To, m.From, m.Term})
			leader, _, term, _ := f.any().Leader(p.Shard)
			t.Logf("shard %d: replica %d leads in term %d", p.Shard, leader, term)
			return
		}
	}
}
