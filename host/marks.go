package host

import (
	"context"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"

	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
)

// A leader with a witness answers a publish when another full replica has it on disk (G1). The same replica's answer to Raft, which
// commits the entry, is sent when it is on disk. So that answer carries a mark, and what the replica has applied, and the
// leader need not wait for a report by the peer API, which takes longer and costs both hosts more. The reports go on, less often:
// they say who is connected, and what no answer says.
//
// The mark stands in fields of a message that the engine does not use in messages of its type: HintHigh, and Commit for the applied
// index. A host from before marks sends none and ignores them. A replica reports in time, as before, until it has seen that the
// leader reads marks: by the mark in what that sends.
const copyMark = 0x7188_0001

// readMarks takes up what the messages that arrive say beside Raft's part.
func (h *RaftHost) readMarks(next raftio.MessageHandler) raftio.MessageHandler {
	return func(batch raftpb.MessageBatch) {
		for i := range batch.Requests {
			if m := &batch.Requests[i]; m.Type == raftpb.Replicate || m.Type == raftpb.ReplicateResp {
				h.readMark(m)
			}
		}
		next(batch)
	}
}

func (h *RaftHost) readMark(m *raftpb.Message) {
	v, ok := h.replicas.Load(m.ShardID)
	if !ok {
		return
	}
	run, marked := v.(*running), m.HintHigh == copyMark
	switch {
	case uint64(run.id) != m.To: // the engine drops it
	case m.Type == raftpb.Replicate && marked:
		m.HintHigh = 0
		run.marked.Store(m.From)
	case m.Type == raftpb.Replicate:
		run.marked.CompareAndSwap(m.From, 0) // a version that does not know marks leads now
	case marked && !m.Reject:
		r := peer.CopyReport{Shard: m.ShardID, Replica: m.From, Durable: m.LogIndex, Term: m.Term, Applied: m.Commit}
		m.HintHigh, m.Commit = 0, 0
		_, term := h.ownLeader(m.ShardID)
		h.copies.marked(r, term, run.applied.Load())
	}
}

// markingTransport marks what this host sends.
type markingTransport struct {
	raftio.ITransport
	h *RaftHost
}

// GetConnection implements raftio.ITransport.
func (t *markingTransport) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	c, err := t.ITransport.GetConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	return &markingConn{c, t.h}, nil
}

type markingConn struct {
	raftio.IConnection
	h *RaftHost
}

// SendMessageBatch implements raftio.IConnection. The batch is the engine's, which is done with it when this returns.
func (c *markingConn) SendMessageBatch(batch raftpb.MessageBatch) error {
	for i := range batch.Requests {
		c.h.mark(&batch.Requests[i])
	}
	return c.IConnection.SendMessageBatch(batch)
}

// mark marks one message.
func (h *RaftHost) mark(m *raftpb.Message) {
	if m.Type != raftpb.Replicate && (m.Type != raftpb.ReplicateResp || m.Reject) {
		return
	}
	v, ok := h.replicas.Load(m.ShardID)
	if !ok {
		return
	}
	run := v.(*running)
	if !run.reportsCopies() || uint64(run.id) != m.From {
		return
	}
	if m.Type == raftpb.Replicate {
		m.HintHigh = copyMark
		return
	}
	// The engine sends this after the save. While a state that came whole is not installed, the log's word does not count.
	if applied := run.applied.Load(); applied >= run.received.Load() {
		m.HintHigh, m.Commit = copyMark, applied
	}
}

// marksFor says whether a leader learns by marks what this replica has on disk.
func (r *running) marksFor(leader queue.ReplicaID) bool { return r.marked.Load() == uint64(leader) }

// noteReceived takes it that something of a whole state has come. The engine tells of one that came whole when the next one may be on its way.
func (r *running) noteReceived(index uint64) {
	for {
		was := r.received.Load()
		if index <= was || r.received.CompareAndSwap(was, index) {
			return
		}
	}
}

// noteInstalls notes that a whole state comes before the engine has any of it.
func (h *RaftHost) noteInstalls(next raftio.ChunkHandler) raftio.ChunkHandler {
	return func(chunk raftpb.Chunk) bool {
		if v, ok := h.replicas.Load(chunk.ShardID); ok {
			if run := v.(*running); uint64(run.id) == chunk.ReplicaID {
				run.noteReceived(chunk.Index)
			}
		}
		return next(chunk)
	}
}
