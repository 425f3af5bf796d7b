package wal

import (
	"context"
	"errors"
	"math/rand"
	"os"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// addAll is a membership rule for tests: every config change is accepted.
func addAll(base raftpb.Membership, changes []raftpb.Entry) (raftpb.Membership, error) {
	m := raftpb.Membership{ConfigChangeId: base.ConfigChangeId, Addresses: map[uint64]string{}, Witnesses: map[uint64]string{},
		NonVotings: map[uint64]string{}, Removed: map[uint64]bool{}}
	for id, a := range base.Addresses {
		m.Addresses[id] = a
	}
	for id, a := range base.Witnesses {
		m.Witnesses[id] = a
	}
	for i := range changes {
		var cc raftpb.ConfigChange
		if err := cc.Unmarshal(changes[i].Cmd); err != nil {
			return m, err
		}
		m.ConfigChangeId = changes[i].Index
		switch cc.Type {
		case raftpb.AddNode:
			m.Addresses[cc.ReplicaID] = cc.Address
		case raftpb.AddWitness:
			m.Witnesses[cc.ReplicaID] = cc.Address
		}
	}
	return m, nil
}

func configChange(t testing.TB, index, term uint64, cc raftpb.ConfigChange) raftpb.Entry {
	raw, err := cc.Marshal()
	require.NoError(t, err)
	return raftpb.Entry{Type: raftpb.ConfigChangeEntry, Index: index, Term: term, Cmd: raw}
}

func metadata(first, n, term uint64) []raftpb.Entry {
	ents := make([]raftpb.Entry, n)
	for i := range ents {
		ents[i] = raftpb.Entry{Type: raftpb.MetadataEntry, Index: first + uint64(i), Term: term}
	}
	return ents
}

func logBytes(t testing.TB, dir string) int64 {
	total := int64(0)
	ents, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range ents {
		st, err := e.Info()
		require.NoError(t, err)
		total += st.Size()
	}
	return total
}

// beginWitness writes what a witness's log begins with: the two initial members and the witness.
func beginWitness(t testing.TB, l *Log, shard uint64) {
	require.NoError(t, l.SaveBootstrapInfo(shard, 3, raftpb.Bootstrap{Join: true, Type: raftpb.OnDiskStateMachine}))
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: shard, ReplicaID: 3, State: raftpb.State{Term: 1, Commit: 3},
		EntriesToSave: []raftpb.Entry{
			configChange(t, 1, 1, raftpb.ConfigChange{Type: raftpb.AddNode, ReplicaID: 1, Address: "a1", Initialize: true}),
			configChange(t, 2, 1, raftpb.ConfigChange{Type: raftpb.AddNode, ReplicaID: 2, Address: "a2", Initialize: true}),
			configChange(t, 3, 1, raftpb.ConfigChange{Type: raftpb.AddWitness, ReplicaID: 3, Address: "a3"}),
		}}}, 1))
}

// What a witness keeps on disk, and what a restart costs it, must not grow with the proposals.
func TestWitnessDoesNotGrow(t *testing.T) {
	t.Parallel()
	batches := uint64(10_000) // × 1,000 entries
	if testing.Short() {
		batches = 200
	}
	fs := newCrashFS()
	o := Options{Dir: "/log", WitnessMembership: addAll}
	l, err := openFS(o, fs)
	require.NoError(t, err)
	beginWitness(t, l, 1)
	next := uint64(4)
	var atOne, readAtOne int64
	reopen := func() (read int64) {
		require.NoError(t, l.Close())
		before := fs.read
		l, err = openFS(o, fs)
		require.NoError(t, err)
		return fs.read - before
	}
	for i := uint64(0); i < batches; i++ {
		ents := metadata(next, 1000, 1+i/(batches/4))
		next += 1000
		require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3,
			State: raftpb.State{Term: 1 + i/(batches/4), Commit: next - 1001}, EntriesToSave: ents}}, 1))
		if i == batches/10 {
			atOne, readAtOne = fs.size(), reopen()
		}
	}
	l.mu.Lock()
	spans := len(l.replicas[replicaKey{1, 3}].spans)
	l.mu.Unlock()
	require.LessOrEqual(t, spans, 10)
	atEnd, readAtEnd := fs.size(), reopen()
	t.Logf("%d entries: %d bytes of files, of which an open reads %d; %d and %d at a tenth of them", next-1, atEnd, readAtEnd, atOne, readAtOne)
	// Segments are as large as they fill fast, so a faster run has a few larger ones.
	const slack = 8 << 20
	require.LessOrEqual(t, atEnd, atOne+slack)
	require.LessOrEqual(t, readAtEnd, readAtOne+slack)
	ss, err := l.GetSnapshot(1, 3)
	require.NoError(t, err)
	require.True(t, ss.Witness)
	require.Equal(t, next-1001, ss.Index)
	require.Equal(t, map[uint64]string{1: "a1", 2: "a2"}, ss.Membership.Addresses)
	require.Equal(t, map[uint64]string{3: "a3"}, ss.Membership.Witnesses)
	require.Equal(t, uint64(3), ss.Membership.ConfigChangeId)
	rs, err := l.ReadRaftState(1, 3, ss.Index)
	require.NoError(t, err)
	require.Equal(t, next-1-ss.Index, rs.FirstIndex+rs.EntryCount-1-ss.Index)
	require.NoError(t, l.Close())
}

// A membership that cannot be computed costs that witness its snapshot, and nobody else anything.
func TestWitnessWithoutMembershipReplays(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.WitnessMembership = func(base raftpb.Membership, changes []raftpb.Entry) (raftpb.Membership, error) {
		return raftpb.Membership{}, errors.New("no rule for it")
	}
	l, err := openFS(o, fs)
	require.NoError(t, err)
	beginWitness(t, l, 1)
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3,
		State: raftpb.State{Term: 1, Commit: 50}, EntriesToSave: metadata(4, 97, 1)}}, 1))
	require.NoError(t, l.Close())
	l, err = openFS(o, fs)
	require.NoError(t, err)
	ss, err := l.GetSnapshot(1, 3)
	require.NoError(t, err)
	require.True(t, raftpb.IsEmptySnapshot(ss))
	ents, _, err := l.IterateEntries(nil, 0, 1, 3, 1, 101, noLimit)
	require.NoError(t, err)
	require.Len(t, ents, 100)
	require.NoError(t, l.Close())
}

// A meta record that is written before the made snapshot does not say that the entries below it are gone.
func TestWitnessSnapshotAndCompactionGoTogether(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.WitnessMembership = addAll
	l, err := openFS(o, fs)
	require.NoError(t, err)
	beginWitness(t, l, 1)
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3,
		State: raftpb.State{Term: 1, Commit: 50}, EntriesToSave: metadata(4, 97, 1)}}, 1))
	require.NoError(t, l.Close())
	l, err = openFS(o, fs)
	require.NoError(t, err)
	l.mu.Lock()
	require.Equal(t, uint64(50), l.replicas[replicaKey{1, 3}].snapIndex)
	l.dirty = nil // as if the batch had no room for what is dirty
	l.mu.Unlock()
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3, State: raftpb.State{Term: 2, Vote: 1, Commit: 60}}}, 1))
	require.NoError(t, l.Check())
	fs.powerOff()
	_ = l.Close()
	l, err = openFS(o, fs.crash(rand.New(rand.NewSource(1))))
	require.NoError(t, err)
	ss, err := l.GetSnapshot(1, 3)
	require.NoError(t, err)
	require.Equal(t, uint64(60), ss.Index)
	require.Equal(t, map[uint64]string{1: "a1", 2: "a2"}, ss.Membership.Addresses)
	require.NoError(t, l.Close())
}

// The made snapshot outlives a compaction up to it, which dragonboat asks for after every start, and is
// the base of the next one.
func TestWitnessSnapshotIsKept(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.WitnessMembership = addAll
	l, err := openFS(o, fs)
	require.NoError(t, err)
	beginWitness(t, l, 1)
	save := func(first, n, term, commit uint64) {
		require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3,
			State: raftpb.State{Term: term, Commit: commit}, EntriesToSave: metadata(first, n, term)}}, 1))
	}
	reopen := func() raftpb.Snapshot {
		require.NoError(t, l.Close())
		l, err = openFS(o, fs)
		require.NoError(t, err)
		require.NoError(t, l.Check())
		ss, err := l.GetSnapshot(1, 3)
		require.NoError(t, err)
		return ss
	}
	save(4, 100, 1, 50)
	ss := reopen()
	require.Equal(t, uint64(50), ss.Index)
	require.Equal(t, uint64(1), ss.Term)
	require.NoError(t, l.RemoveEntriesTo(1, 3, 40))
	again, err := l.GetSnapshot(1, 3)
	require.NoError(t, err)
	require.Equal(t, ss, again)
	ents, _, err := l.IterateEntries(nil, 0, 1, 3, 51, 104, noLimit)
	require.NoError(t, err)
	require.Equal(t, metadata(51, 53, 1), ents)
	save(104, 100, 2, 150)
	ss = reopen()
	require.Equal(t, uint64(150), ss.Index)
	require.Equal(t, uint64(2), ss.Term)
	require.Equal(t, map[uint64]string{1: "a1", 2: "a2"}, ss.Membership.Addresses)
	// A newer one from the leader wins and empties the log.
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 3, State: raftpb.State{Term: 3, Commit: 900},
		Snapshot: raftpb.Snapshot{ShardID: 1, Index: 900, Term: 3, Witness: true, Membership: ss.Membership}}}, 1))
	ss = reopen()
	require.Equal(t, uint64(900), ss.Index)
	rs, err := l.ReadRaftState(1, 3, 900)
	require.NoError(t, err)
	require.Zero(t, rs.EntryCount)
	require.NoError(t, l.Close())
}

// A witness that was killed comes back from its runs and elects with the one full replica that is left.
func TestWitnessElectsAfterRestart(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts NodeHosts")
	}
	c := newCluster(t, t.TempDir(), 3, func(int) Options {
		return Options{Kind: KindOwn, SegmentBytes: 1 << 20, WitnessMembership: addAll}
	})
	for i := range c.hosts {
		c.start(i)
	}
	for i := 0; i < 2; i++ {
		c.startShard(1, i, 2)
	}
	c.waitLeader(1, 0, 1)
	witness := func() {
		cfg := c.config(1, 2)
		cfg.IsWitness, cfg.SnapshotEntries = true, 0
		require.NoError(t, c.hosts[2].StartReplica(nil, true, c.create, cfg))
	}
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		m, err := c.hosts[0].SyncGetShardMembership(ctx, 1)
		if err != nil {
			return false
		}
		if _, ok := m.Witnesses[3]; ok {
			return true
		}
		_ = c.hosts[0].SyncRequestAddWitness(ctx, 1, 3, c.addrs[2], m.ConfigChangeID)
		return false
	}, 120*time.Second, 10*time.Millisecond)
	witness()
	c.waitLeader(1, 0, 1, 2)
	c.load([]uint64{1}, 0, 64, 5000)
	for round := 0; round < 3; round++ {
		c.stop(2)
		c.propose(1, 0)
		c.start(2)
		witness()
		c.waitLeader(1, 0, 1, 2)
		lost, kept := round%2, 1-round%2
		before := c.propose(1, kept)
		c.stop(lost)
		require.Greater(t, c.propose(1, kept), before, "the witness and host %d commit without host %d", kept, lost)
		c.start(lost)
		c.startShard(1, lost, 2)
		c.waitLeader(1, 0, 1, 2)
		require.Eventually(t, func() bool { return c.read(1, lost) >= before }, 120*time.Second, 10*time.Millisecond)
		c.load([]uint64{1}, kept, 16, 1000)
	}
	for i := range c.hosts {
		c.stop(i)
	}
}

// TestThousandWitnesses opens a log of 1,000 witnesses with a million entries each.
func TestThousandWitnesses(t *testing.T) {
	if !*large {
		t.Skip("needs -wal.large: writes a billion entries, as runs")
	}
	dir := t.TempDir()
	o := Options{Dir: dir, WitnessMembership: addAll}
	l, err := Open(o)
	require.NoError(t, err)
	const shards, rounds, n = 1000, 10, 100_000
	for s := uint64(1); s <= shards; s++ {
		beginWitness(t, l, s)
	}
	for r := uint64(0); r < rounds; r++ {
		ents := metadata(4+r*n, n, 1+r)
		for s := uint64(1); s <= shards; s++ {
			require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: s, ReplicaID: 3,
				State: raftpb.State{Term: 1 + r, Commit: 3 + r*n}, EntriesToSave: ents}}, 1))
		}
	}
	require.NoError(t, l.Close())
	start := time.Now()
	l, err = Open(o)
	require.NoError(t, err)
	took := time.Since(start)
	t.Logf("opened %d witnesses of %d entries each in %s, %d bytes of files", shards, rounds*n, took, logBytes(t, dir))
	ss, err := l.GetSnapshot(shards, 3)
	require.NoError(t, err)
	require.Equal(t, uint64(3+(rounds-1)*n), ss.Index)
	require.NoError(t, l.Close())
}
