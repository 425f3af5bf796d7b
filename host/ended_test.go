package host

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/queue"
)

// TestHastenPlan: the replicas of a shard begin their elections one after the other, who goes first differs from shard to shard, and many shards
// do not begin at once.
func TestHastenPlan(t *testing.T) {
	random := func() float64 { return 0.99 }
	firsts := map[int]int{}
	for shard := range uint64(10) {
		var plans [2][]hastenTry
		for own := range plans {
			s := lostShard{shard: shard, run: &running{id: queue.ReplicaID(own + 2)}, dead: 1}
			require.True(t, s.place(threeFull(), map[uint64]bool{2: true, 3: true}))
			require.Equal(t, 2, s.ranks)
			plans[own] = hastenPlan([]lostShard{s}, random)
			require.Len(t, plans[own], hastenRounds)
		}
		first := 0
		if plans[1][0].at < plans[0][0].at {
			first = 1
		}
		firsts[first]++
		require.Equal(t, hastenFirst, plans[first][0].at)
		require.Greater(t, plans[1-first][0].at-plans[first][0].at, hastenStep/2)
		require.Greater(t, plans[first][1].at-plans[1-first][0].at, hastenStep/4)
	}
	require.Equal(t, map[int]int{0: 5, 1: 5}, firsts)

	var many []lostShard
	for range 3 * hastenAtOnce {
		many = append(many, lostShard{ranks: 1})
	}
	plan := hastenPlan(many, random)
	require.Equal(t, hastenFirst, plan[hastenAtOnce-1].at)
	require.Equal(t, 3*hastenFirst, plan[3*hastenAtOnce-1].at)
}

// threeFull is a placement on the hosts 1 to 3.
func threeFull() (p catalog.Placement) {
	for id := uint64(1); id <= 3; id++ {
		p.Replicas = append(p.Replicas, catalog.Replica{ID: queue.ReplicaID(id), HostID: id, Birth: catalog.BirthInitial, State: catalog.ReplicaStarted})
	}
	return p
}

// TestHastenNeedsQuorum: a host begins no election that it cannot win, nor where the others still hear the leader.
func TestHastenNeedsQuorum(t *testing.T) {
	place := func(self uint64, p catalog.Placement, agree ...uint64) bool {
		m := map[uint64]bool{}
		for _, id := range agree {
			m[id] = true
		}
		s := lostShard{shard: 2, run: &running{id: queue.ReplicaID(self)}, dead: 1}
		return s.place(p, m)
	}
	require.True(t, place(2, threeFull(), 2, 3))
	require.False(t, place(2, threeFull(), 2), "the third host hears the leader, or cannot be asked")
	require.False(t, place(2, threeFull(), 1, 2), "the leader itself does not count")
	require.False(t, place(4, threeFull(), 2, 3, 4), "no replica of the shard")

	withWitness := threeFull()
	withWitness.Replicas[2].Birth, withWitness.Replicas[2].Member = catalog.BirthWitness, true
	require.True(t, place(2, withWitness, 2, 3), "a witness counts for the quorum")
	require.False(t, place(2, withWitness, 2))
	require.False(t, place(3, withWitness, 2, 3), "and never leads")

	joining := threeFull()
	joining.Replicas[2].Birth = catalog.BirthNonVoting
	require.False(t, place(2, joining, 2, 3), "who has no vote does not")
}

// TestRefusesConnections: only a refusal of the operating system is one.
func TestRefusesConnections(t *testing.T) {
	ctx := within(t, patience)
	address := freeport.For(t)
	require.True(t, refusesConnections(ctx, address))
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	require.False(t, refusesConnections(ctx, address))
	over, cancel := context.WithCancel(ctx)
	cancel()
	require.False(t, refusesConnections(over, freeport.For(t)), "nobody was asked")
}

// agreeing are hosts that have all lost each other.
type agreeing struct{ losses }

func (agreeing) Answers(uint64) bool                          { return true }
func (agreeing) AskLost(context.Context, uint64, uint64) bool { return true }

// TestManyAreAsked: the hosts of a fleet are asked side by side, and whoever does not agree yet is; under the race detector.
func TestManyAreAsked(t *testing.T) {
	const hosts = 64
	var listed []HostSpec
	for id := uint64(1); id <= hosts; id++ {
		listed = append(listed, HostSpec{ID: id})
	}
	e := newEndings(&RaftHost{cfg: Config{HostID: 1}, book: newAddressBook(NewRegistry(), listed)})
	e.losses = agreeing{}
	agree := map[uint64]bool{1: true}
	for range 2 {
		e.ask(within(t, patience), 2, agree)
		require.Len(t, agree, hosts-1, "all but the lost one")
	}
}

// mistaken takes a host for lost that is not, and may think that the others do too.
type mistaken struct {
	losses
	about, agree atomic.Uint64
}

func (m *mistaken) Lost(id uint64) bool  { return m.about.Load() == id || m.losses.Lost(id) }
func (m *mistaken) Ended(id uint64) bool { return m.about.Load() == id || m.losses.Ended(id) }
func (m *mistaken) AskLost(ctx context.Context, id, lost uint64) bool {
	return m.agree.Load() == lost || m.losses.AskLost(ctx, id, lost)
}

// TestEndedLeader: a leader whose host has ended is replaced without the wait for an election timeout; connections that come and go,
// and a host that alone has lost the leader, change nothing; and a mistake of all costs one change of leaders.
func TestEndedLeader(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.tune = func(c *Config) { c.ElectionTicks = 100 } // 1 s to 2 s
	views := map[uint64]*mistaken{}
	f.beforeStart = func(h *RaftHost) {
		m := &mistaken{losses: h.endings.losses}
		h.endings.losses, h.endings.refuses = m, func(ctx context.Context, address string) bool {
			return m.about.Load() != 0 || refusesConnections(ctx, address)
		}
		h.endings.again = 20 * time.Millisecond
		views[h.HostID()] = m
	}
	f.startAll()
	shard := f.create(1, "q", 3, 0).Shards[0]
	leader := f.leader(shard)
	f.enqueue(leader, shard)
	var other *RaftHost
	for _, h := range f.hosts {
		if h != leader {
			other = h
			eventually(t, "it hears the leader", func() bool { return h.peers.Answers(leader.HostID()) })
		}
	}
	term := func() uint64 { _, term := other.ownLeader(shard); return term }
	before := term()
	looked := func(of *RaftHost, looks uint64) func() bool {
		return func() bool { return of.endings.looks.Load() >= looks }
	}

	// Connections that come and go.
	for range 1000 {
		other.endings.lost(leader.HostID())
	}
	eventually(t, "a look", looked(other, 1))
	require.Zero(t, other.endings.ended.Load(), "it is there")
	eventually(t, "the next look may begin", func() bool {
		other.endings.lost(leader.HostID())
		return looked(other, 2)()
	})
	require.Zero(t, other.endings.hastened.Load())

	// One host alone is mistaken.
	view := views[other.HostID()]
	view.about.Store(leader.HostID())
	eventually(t, "it is mistaken", func() bool {
		other.endings.lost(leader.HostID())
		return other.endings.ended.Load() == 1
	})
	eventually(t, "its look ends", looked(other, 3))
	require.Zero(t, other.endings.hastened.Load(), "the third host hears the leader")
	require.Equal(t, before, term())

	// So are all.
	view.agree.Store(leader.HostID())
	eventually(t, "an election", func() bool {
		other.endings.lost(leader.HostID())
		return other.endings.hastened.Load() > 0
	})
	leaves := func(shard uint64) func() bool {
		return func() bool { _, at, _, ok := other.Leader(shard); return ok && at != leader.HostID() }
	}
	eventually(t, "another leader", leaves(shard))
	eventually(t, "another leader of the catalog", leaves(catalog.ShardID))
	f.enqueue(f.leader(shard), shard)
	looksOn := func() {
		looks := other.endings.looks.Load()
		eventually(t, "more looks", func() bool {
			other.endings.lost(leader.HostID())
			return looked(other, looks+2)()
		})
	}
	looksOn()
	elections := other.endings.hastened.Load()
	require.LessOrEqual(t, elections, uint64(2*hastenRounds), "of two shards")
	looksOn()
	require.Equal(t, elections, other.endings.hastened.Load(), "it leads no more")
	view.about.Store(0)
	view.agree.Store(0)

	// A host ends.
	leader = f.leader(shard)
	f.stop(leader.HostID())
	for _, h := range f.hosts {
		eventually(t, "its end is noticed", func() bool { alive, _ := h.Alive(leader.HostID()); return !alive })
	}
	f.enqueue(f.leader(shard), shard)
}
