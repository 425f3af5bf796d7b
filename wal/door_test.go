package wal

import (
	"testing"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

func TestStockPebbleThroughTheDoor(t *testing.T) {
	var last [4]uint64
	nhc := config.NodeHostConfig{NodeHostDir: t.TempDir()}
	require.NoError(t, Configure(&nhc, Options{Kind: KindPebble, OnLastEntry: func(s, r, i, term uint64) {
		last = [4]uint64{s, r, i, term}
	}}))
	require.Equal(t, uint64(1), nhc.Expert.LogDB.Shards)
	require.Equal(t, uint64(1), nhc.Expert.Engine.ExecShards)
	require.NoError(t, nhc.Prepare())
	l, err := nhc.Expert.LogDBFactory.Create(nhc, nil, []string{t.TempDir()}, []string{t.TempDir()})
	require.NoError(t, err)
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{
		ShardID: 1, ReplicaID: 2, State: raftpb.State{Term: 3, Commit: 1},
		EntriesToSave: []raftpb.Entry{{Index: 1, Term: 3}},
	}}, 1))
	require.Equal(t, [4]uint64{1, 2, 1, 3}, last)
	require.NoError(t, l.Close())
}

func TestOptionsValidateJoinsEveryProblem(t *testing.T) {
	o := Options{Kind: "floppy", SegmentBytes: 1, ExecWorkers: 1000}
	err := o.Validate()
	require.ErrorContains(t, err, "floppy")
	require.ErrorContains(t, err, "SegmentBytes")
	require.ErrorContains(t, err, "ExecWorkers")
}

func TestOwnLogThroughTheDoor(t *testing.T) {
	var opened *Log
	nhc := config.NodeHostConfig{NodeHostDir: t.TempDir()}
	require.NoError(t, Configure(&nhc, Options{Dir: t.TempDir(), OnOpen: func(l *Log) { opened = l }}))
	l, err := nhc.Expert.LogDBFactory.Create(nhc, nil, nil, nil)
	require.NoError(t, err)
	require.Same(t, opened, l)
	require.Equal(t, nhc.Expert.LogDBFactory.Name(), l.Name())
	save(t, opened, 1, 1, 10, 1000)
	require.InDelta(t, 10_000, opened.EntryBytes(1, 1), 500)
	r, ok := opened.Replica(1, 1)
	require.True(t, ok)
	require.EqualValues(t, 10, r.Last)
	_, ok = opened.Replica(1, 2)
	require.False(t, ok)
	requireLast := func(replica, index, term uint64) {
		t.Helper()
		i, n, err := opened.LastEntry(1, replica)
		require.NoError(t, err)
		require.Equal(t, [2]uint64{index, term}, [2]uint64{i, n})
	}
	requireLast(1, 10, 1)
	requireLast(2, 0, 0)
	require.NoError(t, opened.SaveSnapshots([]raftpb.Update{{ShardID: 1, ReplicaID: 3, Snapshot: raftpb.Snapshot{Index: 7, Term: 5}}}))
	requireLast(3, 7, 5)
	require.NoError(t, opened.RemoveEntriesTo(1, 1, 10))
	require.Zero(t, opened.EntryBytes(1, 1))
	require.NoError(t, l.Close())
	_, err = l.GetSnapshot(1, 1)
	require.ErrorIs(t, err, ErrClosed)
}
