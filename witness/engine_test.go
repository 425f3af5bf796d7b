package witness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
)

// TestApplyAgreesWithTheEngine asks a real fleet for random config changes, right and wrong ones, and
// compares the answer and the membership of each with Apply, and at the end of each shard the whole log with
// Replay.
//
// TIERQ_TEST_SEED repeats a run.
func TestApplyAgreesWithTheEngine(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("TIERQ_TEST_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("seed %d", seed)
	shards, changes := uint64(16), 40
	if testing.Short() {
		shards, changes = 4, 20
	}
	f := startFleet(t)
	seen := map[string]int{}
	for shardID := uint64(1); shardID <= shards; shardID++ {
		s := &shardUnderTest{
			fleet: f, shardID: shardID, ordered: shardID%2 == 1, seen: seen,
			rand: rand.New(rand.NewPCG(seed, shardID)),
		}
		s.start(t)
		if shardID%4 < 2 {
			for replicaID := uint64(2); replicaID <= fleetHosts; replicaID++ {
				s.addFullReplica(t, replicaID)
			}
			s.changeByEveryRule(t)
		}
		for range changes {
			s.change(t, s.draw())
		}
		s.compareWithLog(t)
		s.stop(t)
	}
	for situation := range seen {
		if strings.HasPrefix(situation, "AddNode of a non-voting") && strings.HasSuffix(situation, "accepted true") {
			seen["promotions"] += seen[situation]
		}
	}
	require.NotZero(t, seen["promotions"])
	for _, situation := range slices.Sorted(maps.Keys(seen)) {
		t.Logf("%4d %s", seen[situation], situation)
	}
}

// shardUnderTest is one shard: replica n on host n, for all hosts or for the first alone. Everything else
// that joins it is a phantom, a member that nobody runs, so there must always be fewer voting phantoms than
// live replicas.
type shardUnderTest struct {
	fleet   *fleet
	shardID uint64
	ordered bool
	rand    *rand.Rand
	members raftpb.Membership // as the engine last said
	nextID  uint64            // greater than every replica id used
	started map[uint64]bool   // the replicas that somebody runs, or ran until they were removed
	seen    map[string]int
}

const fleetHosts = 5

func (s *shardUnderTest) start(t *testing.T) {
	s.nextID = fleetHosts + 1
	s.started = map[uint64]bool{1: true}
	s.fleet.startReplica(t, s.shardID, 1, map[uint64]string{1: target(1)}, s.ordered)
	s.members = s.read(t)
}

// addFullReplica starts the replica before it is a member: the change commits without it, but the shard needs
// it from then on.
func (s *shardUnderTest) addFullReplica(t *testing.T, replicaID uint64) {
	s.started[replicaID] = true
	s.fleet.startReplica(t, s.shardID, replicaID, nil, s.ordered)
	s.change(t, raftpb.ConfigChange{Type: raftpb.AddNode, ReplicaID: replicaID, Address: target(replicaID), ConfigChangeId: s.members.ConfigChangeId})
}

// changeByEveryRule meets each of the rules once, but the last member's, which the shards of one replica meet
// often.
func (s *shardUnderTest) changeByEveryRule(t *testing.T) {
	const id, other, burned = 11, 12, 13
	upper := strings.ToUpper(target(id))
	for _, c := range []struct {
		kind      raftpb.ConfigChangeType
		replicaID uint64
		address   string
	}{
		{raftpb.AddNonVoting, id, target(id)},
		{raftpb.AddNonVoting, id, target(burned)}, // rule 3
		{raftpb.AddWitness, id, target(id)},       // rule 9
		{raftpb.AddNode, id, target(burned)},      // rule 10
		{raftpb.AddNode, id, upper},               // promoted
		{raftpb.AddNonVoting, id, target(id)},     // rule 5
		{raftpb.AddWitness, id, target(id)},       // rule 6
		{raftpb.AddWitness, other, target(id)},    // rule 4
		{raftpb.AddWitness, other, target(other)},
		{raftpb.AddWitness, other, target(burned)},   // rule 3
		{raftpb.AddNode, other, target(other)},       // rule 7
		{raftpb.AddNonVoting, other, target(other)},  // rule 8
		{raftpb.AddNonVoting, burned, target(other)}, // rule 4
		{raftpb.RemoveNode, burned, ""},              // accepted: nobody had the id
		{raftpb.AddNode, burned, target(burned)},     // rule 2
		{raftpb.RemoveNode, other, ""},
		{raftpb.AddWitness, other, target(other)}, // rule 2
		{raftpb.RemoveNode, id, ""},
	} {
		s.change(t, raftpb.ConfigChange{Type: c.kind, ReplicaID: c.replicaID, Address: c.address, ConfigChangeId: s.members.ConfigChangeId})
	}
	s.change(t, raftpb.ConfigChange{Type: raftpb.RemoveNode, ReplicaID: other, ConfigChangeId: s.members.ConfigChangeId - 1}) // rule 1
}

func (s *shardUnderTest) stop(t *testing.T) {
	for _, nh := range s.fleet.hosts {
		if err := nh.StopShard(s.shardID); err != nil {
			require.ErrorIs(t, err, dragonboat.ErrShardNotFound)
		}
	}
}

// draw returns a change that leaves the shard with a quorum of live replicas, and replica 1 in it, if it is
// accepted.
func (s *shardUnderTest) draw() raftpb.ConfigChange {
	for {
		cc := s.drawAny()
		next, accepted := Apply(s.members, cc, s.members.ConfigChangeId+1, s.ordered)
		if !accepted {
			return cc
		}
		live := 0
		for replicaID := range s.started {
			if RoleOf(next, replicaID) == Full {
				live++
			}
		}
		if RoleOf(next, 1) == Full && live > (len(next.Addresses)+len(next.Witnesses))/2 {
			return cc
		}
	}
}

func (s *shardUnderTest) drawAny() raftpb.ConfigChange {
	kinds := []raftpb.ConfigChangeType{raftpb.AddNode, raftpb.AddNode, raftpb.AddNonVoting, raftpb.AddNonVoting, raftpb.AddWitness, raftpb.RemoveNode}
	cc := raftpb.ConfigChange{
		Type:           kinds[s.rand.IntN(len(kinds))],
		ReplicaID:      1 + s.rand.Uint64N(s.nextID),
		ConfigChangeId: s.members.ConfigChangeId,
	}
	if s.rand.IntN(8) == 0 {
		cc.ConfigChangeId = s.rand.Uint64N(s.members.ConfigChangeId + 3)
	}
	if s.rand.IntN(4) == 0 {
		cc.ReplicaID = s.nextID
	}
	if cc.Type == raftpb.RemoveNode {
		return cc
	}
	cc.Address = target(1 + s.rand.Uint64N(12))
	if own := addressOf(s.members, cc.ReplicaID); own != "" && s.rand.IntN(2) == 0 {
		cc.Address = own
	}
	if s.rand.IntN(4) == 0 {
		cc.Address = strings.ToUpper(cc.Address)
	}
	return cc
}

func addressOf(m raftpb.Membership, replicaID uint64) string {
	return m.Addresses[replicaID] + m.NonVotings[replicaID] + m.Witnesses[replicaID]
}

// change asks the engine for cc and compares.
func (s *shardUnderTest) change(t *testing.T, cc raftpb.ConfigChange) {
	t.Helper()
	s.nextID = max(s.nextID, cc.ReplicaID+1)
	before := s.members
	accepted := s.request(t, cc)
	s.members = s.read(t)
	next, want := Apply(before, cc, s.members.ConfigChangeId, s.ordered)
	where := fmt.Sprintf("shard %d, ordered %v: %v of replica %d at %q, decided at %d, on %+v", s.shardID, s.ordered, cc.Type, cc.ReplicaID, cc.Address, cc.ConfigChangeId, before)
	require.Equal(t, want, accepted, where)
	require.Equal(t, next, s.members, where)
	role := RoleOf(before, cc.ReplicaID).String()
	if before.Removed[cc.ReplicaID] {
		role = "removed"
	}
	s.seen[fmt.Sprintf("%v of a %s replica, address in use %v, order kept %v: accepted %v", cc.Type, role,
		addressInUse(before, cc.Address), cc.ConfigChangeId == before.ConfigChangeId, accepted)]++
}

// request returns whether the engine accepted cc. While there is no leader it asks again; the engine says
// that such a request was dropped.
func (s *shardUnderTest) request(t *testing.T, cc raftpb.ConfigChange) (accepted bool) {
	t.Helper()
	nh := s.fleet.hosts[0]
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var err error
		switch cc.Type {
		case raftpb.AddNode:
			err = nh.SyncRequestAddReplica(ctx, s.shardID, cc.ReplicaID, cc.Address, cc.ConfigChangeId)
		case raftpb.AddNonVoting:
			err = nh.SyncRequestAddNonVoting(ctx, s.shardID, cc.ReplicaID, cc.Address, cc.ConfigChangeId)
		case raftpb.AddWitness:
			err = nh.SyncRequestAddWitness(ctx, s.shardID, cc.ReplicaID, cc.Address, cc.ConfigChangeId)
		case raftpb.RemoveNode:
			err = nh.SyncRequestDeleteReplica(ctx, s.shardID, cc.ReplicaID, cc.ConfigChangeId)
		}
		accepted = err == nil
		if err != nil && !errors.Is(err, dragonboat.ErrRejected) {
			require.ErrorIs(t, err, dragonboat.ErrShardNotReady, "the outcome is unknown")
			return false
		}
		return true
	}, time.Minute, 10*time.Millisecond)
	return accepted
}

func (s *shardUnderTest) read(t *testing.T) (m raftpb.Membership) {
	t.Helper()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		got, err := s.fleet.hosts[0].SyncGetShardMembership(ctx, s.shardID)
		if err != nil {
			return false
		}
		m = clone(raftpb.Membership{ConfigChangeId: got.ConfigChangeID, Addresses: got.Nodes, NonVotings: got.NonVotings, Witnesses: got.Witnesses})
		for replicaID := range got.Removed {
			m.Removed[replicaID] = true
		}
		return true
	}, time.Minute, 10*time.Millisecond)
	return m
}

// compareWithLog replays the shard's log, initial members and refused changes and all.
func (s *shardUnderTest) compareWithLog(t *testing.T) {
	t.Helper()
	reader, err := s.fleet.hosts[0].GetLogReader(s.shardID)
	require.NoError(t, err)
	first, last := reader.GetRange()
	require.EqualValues(t, 1, first)
	entries, err := reader.Entries(first, last+1, 64<<20)
	require.NoError(t, err)
	require.Len(t, entries, int(last))
	m, err := Replay(raftpb.Membership{}, entries, s.ordered)
	require.NoError(t, err)
	require.Equal(t, s.members, m, "shard %d", s.shardID)
}

// target names host n; the fleet has the first few. It has letters, whose case the engine ignores in
// memberships.
func target(n uint64) string { return fmt.Sprintf("abcdefab-cdef-4bcd-8bcd-%012d", n) }

// fleet is fleetHosts NodeHosts, the n-th at index n-1.
type fleet struct {
	addresses map[string]string
	hosts     []*dragonboat.NodeHost
}

func startFleet(t *testing.T) *fleet {
	t.Helper()
	f := newFleet(t, fleetHosts)
	for i := range f.hosts {
		f.hosts[i] = f.startHost(t, i, t.TempDir(), nil)
		t.Cleanup(f.hosts[i].Close)
	}
	return f
}

// newFleet returns a fleet of n hosts with addresses, none of them started.
func newFleet(t *testing.T, n int) *fleet {
	f := &fleet{addresses: map[string]string{}, hosts: make([]*dragonboat.NodeHost, n)}
	for i := range f.hosts {
		f.addresses[target(uint64(i+1))] = freeport.For(t)
	}
	return f
}

// startHost returns a NodeHost in dir, on the given log or, if nil, the engine's default. The caller closes it.
func (f *fleet) startHost(t *testing.T, i int, dir string, log config.LogDBFactory) *dragonboat.NodeHost {
	t.Helper()
	id := target(uint64(i + 1))
	logDB := config.GetTinyMemLogDBConfig()
	logDB.Shards = 1
	nh, err := dragonboat.NewNodeHost(config.NodeHostConfig{
		NodeHostID: id, NodeHostDir: dir, RaftAddress: f.addresses[id], RTTMillisecond: 20,
		Expert: config.ExpertConfig{
			NodeRegistryFactory: addressBook{f.addresses},
			LogDBFactory:        log,
			LogDB:               logDB,
			Engine:              config.EngineConfig{ExecShards: 1, CommitShards: 1, ApplyShards: 1, SnapshotShards: 2, CloseShards: 1},
		},
	})
	require.NoError(t, err)
	require.NotNil(t, nh)
	return nh
}

func (f *fleet) startReplica(t *testing.T, shardID, replicaID uint64, initial map[uint64]string, ordered bool) {
	t.Helper()
	cfg := replicaConfig(shardID, replicaID)
	cfg.OrderedConfigChange = ordered
	require.NoError(t, f.hosts[replicaID-1].StartReplica(initial, initial == nil, newNothing, cfg))
}

func replicaConfig(shardID, replicaID uint64) config.Config {
	return config.Config{
		ShardID: shardID, ReplicaID: replicaID, ElectionRTT: 20, HeartbeatRTT: 2,
		CheckQuorum: true, PreVote: true, OrderedConfigChange: true, WaitReady: true,
	}
}

func newNothing(shardID, replicaID uint64) statemachine.IStateMachine { return nothing{} }

// nothing accepts what the test never proposes.
type nothing struct{ stub }

func (nothing) Update(statemachine.Entry) (statemachine.Result, error) {
	return statemachine.Result{}, nil
}

// addressBook is a node registry in which only some targets have an address.
type addressBook struct{ addresses map[string]string }

func (a addressBook) Create(string, uint64, config.TargetValidator) (raftio.INodeRegistry, error) {
	return &bookRegistry{addresses: a.addresses}, nil
}

type bookRegistry struct {
	addresses map[string]string
	targets   sync.Map
}

func (r *bookRegistry) Close() error { return nil }
func (r *bookRegistry) Add(shardID, replicaID uint64, target string) {
	r.targets.LoadOrStore(raftio.GetNodeInfo(shardID, replicaID), strings.ToLower(target))
}
func (r *bookRegistry) Remove(shardID, replicaID uint64) {
	r.targets.Delete(raftio.GetNodeInfo(shardID, replicaID))
}
func (r *bookRegistry) RemoveShard(uint64) {}
func (r *bookRegistry) Resolve(shardID, replicaID uint64) (string, string, error) {
	target, ok := r.targets.Load(raftio.GetNodeInfo(shardID, replicaID))
	if !ok {
		return "", "", errors.New("unknown replica")
	}
	address, ok := r.addresses[target.(string)]
	if !ok {
		return "", "", errors.New("nobody runs it")
	}
	return address, fmt.Sprint(address, shardID%4), nil
}
