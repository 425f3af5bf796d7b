package witness

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/plugin/tan"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// TestWitnessOfARealShard runs a witness on the stub state machine beside two full replicas, restarts it from
// a snapshot made of nothing but its own log and Replay, and lets it carry the shard when a full replica is
// gone.
func TestWitnessOfARealShard(t *testing.T) {
	const shardID = 1
	f := newFleet(t, 3)
	initial := map[uint64]string{1: target(1), 2: target(2)}
	for i := range 2 {
		f.hosts[i] = f.startHost(t, i, t.TempDir(), nil)
		f.startReplica(t, shardID, uint64(i+1), initial, true)
	}
	defer func() { f.hosts[0].Close() }()
	propose(t, f.hosts[0], shardID, 100)

	log := &synthesizing{shardID: shardID}
	dir := t.TempDir()
	f.hosts[2] = f.startHost(t, 2, dir, log)
	s := &shardUnderTest{fleet: f, shardID: shardID, ordered: true, seen: map[string]int{}}
	s.members = s.read(t)
	s.change(t, raftpb.ConfigChange{Type: raftpb.AddWitness, ReplicaID: 3, Address: target(3), ConfigChangeId: s.members.ConfigChangeId})
	cfg := Config(replicaConfig(shardID, 3), Witness)
	require.NoError(t, f.hosts[2].StartReplica(nil, true, NewStateMachine, cfg))
	// Committed, and refused at apply: whoever takes it for accepted tells the witness of a member that does
	// not exist.
	s.change(t, raftpb.ConfigChange{Type: raftpb.AddWitness, ReplicaID: 4, Address: target(3), ConfigChangeId: s.members.ConfigChangeId})
	require.Equal(t, None, RoleOf(s.members, 4))
	propose(t, f.hosts[0], shardID, 200)

	_, err := f.hosts[2].StaleRead(shardID, nil)
	require.ErrorIs(t, err, dragonboat.ErrInvalidOperation, "the engine does not even ask the stub")
	waitForLog(t, f.hosts[2], f.hosts[0], shardID)
	require.Zero(t, log.last().Index, "the first start had no log to make a snapshot of")
	f.hosts[2].Close()

	f.hosts[2] = f.startHost(t, 2, dir, log)
	defer func() { f.hosts[2].Close() }()
	require.NoError(t, f.hosts[2].StartReplica(nil, true, NewStateMachine, cfg))
	snapshot := log.last()
	require.Greater(t, snapshot.Index, uint64(200))
	require.Equal(t, s.members, clone(snapshot.Membership))
	f.hosts[1].Close()
	propose(t, f.hosts[0], shardID, 50)
	require.Equal(t, s.members, s.read(t))
}

// propose commits n proposals of 1 KiB through nh, waiting for a leader.
func propose(t *testing.T, nh *dragonboat.NodeHost, shardID uint64, n int) {
	t.Helper()
	body := bytes.Repeat([]byte{'x'}, 1024)
	for range n {
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			_, err := nh.SyncPropose(ctx, nh.GetNoOPSession(shardID), body)
			return err == nil
		}, time.Minute, time.Millisecond)
	}
}

// waitForLog returns when the log of nh reaches as far as that of other.
func waitForLog(t *testing.T, nh, other *dragonboat.NodeHost, shardID uint64) {
	t.Helper()
	require.Eventually(t, func() bool { return lastIndex(t, nh, shardID) == lastIndex(t, other, shardID) }, time.Minute, 10*time.Millisecond)
}

func lastIndex(t *testing.T, nh *dragonboat.NodeHost, shardID uint64) uint64 {
	reader, err := nh.GetLogReader(shardID)
	require.NoError(t, err)
	_, last := reader.GetRange()
	return last
}

// synthesizing opens a stock log that presents a witness with a snapshot at its commit index, made at the
// first question after each open, as a log with bounded witnesses does.
type synthesizing struct {
	shardID uint64

	mu       sync.Mutex
	snapshot raftpb.Snapshot
}

func (s *synthesizing) Name() string { return tan.Factory.Name() }

func (s *synthesizing) Create(c config.NodeHostConfig, cb config.LogDBCallback, dirs, lowLatencyDirs []string) (raftio.ILogDB, error) {
	inner, err := tan.Factory.Create(c, cb, dirs, lowLatencyDirs)
	if err != nil {
		return nil, err
	}
	return &synthesizingLog{ILogDB: inner, factory: s}, nil
}

// last returns the snapshot that was presented last.
func (s *synthesizing) last() raftpb.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snapshot
}

type synthesizingLog struct {
	raftio.ILogDB
	factory *synthesizing
	once    sync.Once
	err     error
}

func (l *synthesizingLog) GetSnapshot(shardID, replicaID uint64) (raftpb.Snapshot, error) {
	l.once.Do(func() {
		var s raftpb.Snapshot
		s, l.err = l.synthesize(shardID, replicaID)
		l.factory.mu.Lock()
		defer l.factory.mu.Unlock()
		l.factory.snapshot = s
	})
	return l.factory.last(), l.err
}

func (l *synthesizingLog) synthesize(shardID, replicaID uint64) (raftpb.Snapshot, error) {
	stored, err := l.ILogDB.GetSnapshot(shardID, replicaID)
	if err != nil {
		return stored, err
	}
	state, err := l.ReadRaftState(shardID, replicaID, stored.Index)
	if err != nil || state.State.Commit <= stored.Index {
		return stored, nil // nothing saved yet
	}
	entries, _, err := l.IterateEntries(nil, 0, shardID, replicaID, stored.Index+1, state.State.Commit+1, 64<<20)
	if err != nil {
		return stored, err
	}
	members, err := Membership(stored.Membership, entries)
	if err != nil {
		return stored, err
	}
	last := entries[len(entries)-1]
	return raftpb.Snapshot{
		ShardID: shardID, Index: last.Index, Term: last.Term, Witness: true,
		Type: raftpb.RegularStateMachine, Membership: members,
	}, nil
}
