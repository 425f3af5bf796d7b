package host

import (
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
)

// markedHost is a host with a full replica of a shard that has a witness.
func markedHost(t *testing.T, replica queue.ReplicaID) (*RaftHost, *running) {
	t.Helper()
	h := witnessed(t)
	h.gate.close() // there is no engine to ask
	run := &running{shard: catalog.FirstQueueShard, id: replica}
	run.hasWitness.Store(true)
	h.replicas.Store(run.shard, run)
	return h, run
}

// deliver takes a message from one host to another, as the transport does, and returns what the engine there gets.
func deliver(t *testing.T, from, to *RaftHost, m raftpb.Message) raftpb.Message {
	t.Helper()
	wire := &recorder{}
	require.NoError(t, (&markingConn{wire, from}).SendMessageBatch(raftpb.MessageBatch{Requests: []raftpb.Message{m}}))
	var got raftpb.MessageBatch
	to.readMarks(func(b raftpb.MessageBatch) { got = b })(raftpb.MessageBatch{Requests: wire.sent})
	require.Len(t, got.Requests, 1)
	return got.Requests[0]
}

// TestMarks: a follower's answer to Raft tells the leader's host what is on the follower's disk; the engines notice nothing.
func TestMarks(t *testing.T) {
	leader, _ := markedHost(t, 1)
	follower, run := markedHost(t, 2)
	shard := run.shard
	answer := func(index uint64) raftpb.Message {
		return raftpb.Message{Type: raftpb.ReplicateResp, ShardID: shard, From: 2, To: 1, Term: 3, LogIndex: index}
	}
	has := func(index uint64) bool { have, _, _ := leader.copies.look(shard, 3, index, true); return have > 0 }

	m := replicate(shard, 2, 4, 1)
	m.Commit = 4
	require.False(t, run.marksFor(1))
	require.Equal(t, m, deliver(t, leader, follower, m))
	require.True(t, run.marksFor(1), "the leader says that it reads marks")

	run.applied.Store(4)
	require.Equal(t, answer(5), deliver(t, follower, leader, answer(5)))
	require.False(t, has(5), "no stream of reports is open, whose end would be noticed")
	leader.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 4, Term: 3, Applied: 4}, 3, 4)
	require.Equal(t, answer(5), deliver(t, follower, leader, answer(5)))
	require.True(t, has(5))
	leader.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 4, Term: 3, Applied: 3}, 3, 4)
	require.True(t, has(5), "an older report takes nothing back")
	leader.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 4, Term: 2, Applied: 3}, 3, 4)
	require.True(t, has(5), "nor does one of an older term")

	rejected := answer(9)
	rejected.Reject = true
	require.Equal(t, rejected, deliver(t, follower, leader, rejected))
	require.False(t, has(6))

	// A whole state is on its way: what it covers is in the log's record only.
	follower.noteInstalls(func(raftpb.Chunk) bool { return true })(raftpb.Chunk{ShardID: shard, ReplicaID: 2, Index: 50})
	deliver(t, follower, leader, answer(50))
	require.False(t, has(50))
	leader.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Applied: 4}, 3, 4)
	require.False(t, has(5), "nor does what its log had before")
	run.applied.Store(50)
	deliver(t, follower, leader, answer(51))
	require.True(t, has(51))

	leader.copies.ended(2)
	deliver(t, follower, leader, answer(52))
	require.False(t, has(51), "with the stream's end nothing counts any more")
}

// A state that came whole and is told of late takes nothing back from the next one, which is on its way: the log does not count until
// that is installed.
func TestMarksWhileTheNextStateComes(t *testing.T) {
	h, run := markedHost(t, 2)
	h.log = zap.NewNop()
	run.lastIndex, run.lastTerm = 200, 3
	take := h.noteInstalls(func(raftpb.Chunk) bool { return true })
	require.True(t, take(raftpb.Chunk{ShardID: run.shard, ReplicaID: 2, Index: 200}))
	(&systemEvents{h: h}).SnapshotReceived(raftio.SnapshotInfo{ShardID: run.shard, ReplicaID: 2, Index: 100})
	run.applied.Store(100)
	require.Equal(t, peer.CopyReport{Shard: run.shard, Replica: 2, Applied: 100}, run.copyReport())
	run.applied.Store(200)
	require.EqualValues(t, 200, run.copyReport().Durable)
}

// TestMarksOfOlderVersions: a leader that sends no marks is told in time by reports.
func TestMarksOfOlderVersions(t *testing.T) {
	follower, run := markedHost(t, 2)
	read := follower.readMarks(func(raftpb.MessageBatch) {})
	m := replicate(run.shard, 2, 4, 1)
	m.HintHigh = copyMark
	read(raftpb.MessageBatch{Requests: []raftpb.Message{m}})
	require.True(t, run.marksFor(1))
	read(raftpb.MessageBatch{Requests: []raftpb.Message{replicate(run.shard, 2, 5, 1)}})
	require.False(t, run.marksFor(1), "it was replaced by an older one")
	require.False(t, run.marksFor(3))
}

// TestWitnessIsToldOfSeveralAtOnce: while the others commit without its vote, a witness gets what has gathered as one message.
func TestWitnessIsToldOfSeveralAtOnce(t *testing.T) {
	h := witnessed(t)
	shard := catalog.FirstQueueShard
	report := func(durable uint64) {
		h.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: durable, Term: 1, Applied: durable}, 1, 1)
	}
	report(10)
	conn := &recorder{}
	c := newHoldingConn(h, conn)
	defer c.Close()
	var batch raftpb.MessageBatch
	for prev := uint64(10); prev < 20; prev++ {
		m := replicate(shard, 3, prev, 1)
		m.Commit = prev
		batch.Requests = append(batch.Requests, m)
	}
	batch.Requests = append(batch.Requests, replicate(shard, 3, 12, 1))
	require.NoError(t, c.SendMessageBatch(batch))
	require.Empty(t, conn.lasts())
	report(20)
	require.Eventually(t, func() bool { return len(conn.lasts()) == 2 }, 30*time.Second, time.Millisecond)
	require.Equal(t, []uint64{20, 13}, conn.lasts(), "what follows on is one message, what does not is its own")
	conn.mu.Lock()
	defer conn.mu.Unlock()
	require.Len(t, conn.sent[0].Entries, 10)
	require.Equal(t, uint64(10), conn.sent[0].LogIndex)
	require.Equal(t, uint64(19), conn.sent[0].Commit)
}
