package host

import (
	"sync"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/peer"
)

// recorder is a connection that keeps what is sent.
type recorder struct {
	mu     sync.Mutex
	sent   []raftpb.Message
	closed bool
}

func (r *recorder) Close() { r.mu.Lock(); defer r.mu.Unlock(); r.closed = true }
func (r *recorder) SendMessageBatch(b raftpb.MessageBatch) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent = append(r.sent, b.Requests...)
	return nil
}

// lasts returns the last indexes of the Replicate messages to the witness that were sent.
func (r *recorder) lasts() (out []uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.sent {
		if r.sent[i].Type == raftpb.Replicate && r.sent[i].To == 3 {
			out = append(out, lastOf(&r.sent[i]))
		}
	}
	return out
}

// witnessed is a host, without an engine, in whose catalog copyShard has two full replicas and a witness.
func witnessed(t *testing.T) *RaftHost {
	t.Helper()
	h := newRaftHost(Config{HostID: 1, Hosts: []HostSpec{{ID: 1}}})
	t.Cleanup(h.cancel)
	s := catalog.NewState()
	index := uint64(0)
	apply := func(c catalog.Command) {
		index++
		r := s.Apply(index, c)
		require.NoError(t, r.Err())
	}
	apply(&catalog.InitFleet{FleetID: catalog.FleetID{1}, Members: []catalog.Replica{{ID: 1, HostID: 1, Birth: catalog.BirthInitial}, {ID: 2, HostID: 2, Birth: catalog.BirthInitial}}})
	for id := uint64(1); id <= 3; id++ {
		host := catalog.Host{ID: id, Role: catalog.HostFull, RaftAddr: "h:1", PeerAddr: "h:2", ClientAddr: "h:3"}
		if id == 3 {
			host.Role, host.ClientAddr = catalog.HostWitness, ""
		}
		apply(&catalog.RegisterHost{Host: host})
	}
	c := &catalog.CreateQueue{OperationID: 1, Name: "q", Replicas: 2, Witnesses: 1}
	c.Options.EnsureDefaults()
	apply(c)
	h.view.Store(s.Seal())
	return h
}

func replicate(shard, to, prev uint64, entries int) raftpb.Message {
	return raftpb.Message{Type: raftpb.Replicate, ShardID: shard, From: 1, To: to, Term: 1, LogIndex: prev, Entries: make([]raftpb.Entry, entries)}
}

// TestWitnessWaitsForTheOtherFullReplica: the witness never has what an in-sync full replica lacks, so the loss of the leader
// leaves a shard that elects.
func TestWitnessWaitsForTheOtherFullReplica(t *testing.T) {
	h := witnessed(t)
	shard := catalog.FirstQueueShard
	report := func(durable uint64) {
		h.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: durable, Term: 1, Applied: durable}, 1, 1)
	}
	report(10)
	conn := &recorder{}
	c := newHoldingConn(h, conn)
	defer c.Close()
	send := func(ms ...raftpb.Message) { require.NoError(t, c.SendMessageBatch(raftpb.MessageBatch{Requests: ms})) }
	sent := func() int { conn.mu.Lock(); defer conn.mu.Unlock(); return len(conn.sent) }

	send(replicate(shard, 3, 5, 5))
	require.Equal(t, []uint64{10}, conn.lasts(), "what the other has goes at once")
	send(replicate(shard, 2, 10, 4), replicate(shard, 3, 10, 4), raftpb.Message{Type: raftpb.Heartbeat, ShardID: shard, To: 3}, replicate(shard, 3, 14, 1))
	require.Equal(t, 3, sent(), "only entries for the witness wait, not those for the other, nor heartbeats")
	send(replicate(shard, 3, 3, 1))
	require.Equal(t, []uint64{10}, conn.lasts(), "what comes behind a held message keeps its place")

	report(14)
	require.Eventually(t, func() bool { return len(conn.lasts()) >= 2 }, patience, time.Millisecond)
	require.Equal(t, uint64(14), conn.lasts()[1])
	h.copies.ended(2)
	require.Eventually(t, func() bool { return len(conn.lasts()) == 4 }, patience, time.Millisecond, "the other is gone: the witness is told")
	require.Equal(t, []uint64{10, 14, 15, 4}, conn.lasts())
	send(replicate(shard, 3, 15, 1))
	require.Len(t, conn.lasts(), 5, "and is told at once from then on")

	h.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 15, Term: 1, Applied: 15}, 1, 15)
	require.Zero(t, h.copies.inSync(shard), "what comes back may not lead before it has what the witness was told without it")
	send(replicate(shard, 3, 16, 1))
	require.Len(t, conn.lasts(), 5, "but the witness waits for it again")
	report(16)
	require.Equal(t, 1, h.copies.inSync(shard))
}

// TestInSyncInANewTerm: what a witness was told in an older term does not count under a leader of a newer one, whose first
// entry outranks it.
func TestInSyncInANewTerm(t *testing.T) {
	h := witnessed(t)
	shard := catalog.FirstQueueShard
	require.True(t, h.copies.mayTell(shard, 1, 100))
	h.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 50, Term: 1, Applied: 50}, 1, 50)
	require.Zero(t, h.copies.inSync(shard))
	require.True(t, h.copies.mayTell(shard, 2, 50))
	require.Equal(t, 1, h.copies.inSync(shard))
	require.False(t, h.copies.mayTell(shard, 1, 100), "a late message of the old term waits like any other")
	require.Equal(t, 1, h.copies.inSync(shard))
}

// TestHeldMessagesEndWithTheConnection: nothing is sent, and no goroutine is left, after Close.
func TestHeldMessagesEndWithTheConnection(t *testing.T) {
	h := witnessed(t)
	shard := catalog.FirstQueueShard
	h.copies.report(2, peer.CopyReport{Shard: shard, Replica: 2, Durable: 1, Term: 1, Applied: 1}, 1, 1)
	conn := &recorder{}
	c := newHoldingConn(h, conn)
	require.NoError(t, c.SendMessageBatch(raftpb.MessageBatch{Requests: []raftpb.Message{replicate(shard, 3, 1, 1)}}))
	c.Close()
	require.Empty(t, conn.lasts())
	require.True(t, conn.closed)
	require.ErrorIs(t, c.SendMessageBatch(raftpb.MessageBatch{Requests: []raftpb.Message{{Type: raftpb.Heartbeat, ShardID: shard, To: 3}}}), errConnClosed)
}

// TestWitnessWaitsForEveryReplicaInSync: a replica that is being added may be ahead of the one that votes.
func TestWitnessWaitsForEveryReplicaInSync(t *testing.T) {
	h := witnessed(t)
	shard := catalog.FirstQueueShard
	report := func(replica, durable uint64) {
		h.copies.report(replica, peer.CopyReport{Shard: shard, Replica: replica, Durable: durable, Term: 1, Applied: durable}, 1, 1)
	}
	report(2, 10)
	report(4, 20)
	require.False(t, h.copies.mayTell(shard, 1, 20))
	report(2, 20)
	require.True(t, h.copies.mayTell(shard, 1, 20))
}
