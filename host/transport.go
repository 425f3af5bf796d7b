package host

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/raftnet"
	"github.com/tierq/tierq/queue"
)

// transports makes the transport: raftnet, with TLS or over plain TCP in the engine's own format. One rule is added to either: a witness
// is not told of entries before the other full replica, as long as that one is in sync.
//
// In a shard of two full replicas and a witness, the leader and the witness are a majority, and the witness, whose
// entries are tiny, is usually the faster one. If the leader is then lost, the witness rightly refuses its vote to the
// other full replica, which lacks what the two had committed: the shard stands still until the leader is back. With
// the rule, what the witness has is on both full replicas' disks, so either can lead without the other. When the other
// full replica is out of sync (its connection broke, or it made no progress for copyTimeout), the witness is told at
// once, and the shard goes on with leader and witness.
//
// Raft allows any message to be late, so holding one back changes nothing that it relies on.
type transports struct{ h *RaftHost }

// Create implements config.TransportFactory.
func (t *transports) Create(nhc config.NodeHostConfig, requests raftio.MessageHandler, chunks raftio.ChunkHandler) raftio.ITransport {
	t.h.endings.connect(requests, nhc.GetDeploymentID())
	gate := &gatekeeper{fleet: t.h.fleetName, deployment: nhc.GetDeploymentID(), log: t.h.log}
	requests, chunks = gate.messages(t.h.readMarks(requests)), gate.chunks(t.h.noteInstalls(chunks))
	var under raftio.ITransport
	if t.h.cfg.TLS == nil {
		under = raftnet.NewPlain(nhc.GetListenAddress(), t.h.log, requests, chunks)
	} else {
		under = raftnet.New(raftnet.Options{Listen: nhc.GetListenAddress(), TLS: t.h.cfg.TLS, Logger: t.h.log, CheckSource: t.h.checkSource, CheckTarget: t.h.checkTarget}, requests, chunks)
	}
	if t.h.cfg.Faults != nil {
		under = t.h.cfg.Faults.Raft(t.h.cfg.HostID, under, t.h.book.hostAt)
	}
	under = &signingTransport{under, t.h.fleetName}
	under = &markingTransport{under, t.h}
	under = &reconnecting{ITransport: under, ctx: t.h.ctx, process: t.h.processAt}
	return &holdingTransport{ITransport: under, h: t.h}
}

// Validate implements config.TransportFactory.
func (t *transports) Validate(address string) bool { return checkAddress(0, "Raft", address) == nil }

// processAt names the process that has last reported from a Raft address; 0: none has.
func (h *RaftHost) processAt(address string) uint64 {
	id, ok := h.book.hostAt(address)
	if !ok || h.peers == nil {
		return 0
	}
	return h.peers.Process(id)
}

type holdingTransport struct {
	raftio.ITransport
	h *RaftHost
}

// GetConnection implements raftio.ITransport.
func (t *holdingTransport) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	conn, err := t.ITransport.GetConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	return newHoldingConn(t.h, conn), nil
}

func newHoldingConn(h *RaftHost, conn raftio.IConnection) *holdingConn {
	c := &holdingConn{h: h, conn: conn, held: make(map[uint64][]raftpb.Message)}
	c.ctx, c.cancel = context.WithCancel(h.ctx)
	return c
}

// maxHeld bounds the messages that are held for one shard; beyond it they are dropped, and Raft sends again.
const maxHeld = 4096

var errConnClosed = errors.New("the connection is closed")

// holdingConn is one connection. The engine uses it from one goroutine; what was held is sent from others, which end
// with Close.
type holdingConn struct {
	h      *RaftHost
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	sendMu sync.Mutex // held while something is sent
	conn   raftio.IConnection
	closed bool

	mu   sync.Mutex
	held map[uint64][]raftpb.Message // by shard, in order; a key means that a goroutine waits for its first
	like raftpb.MessageBatch         // what batches of this host look like, without messages
}

// Close implements raftio.IConnection.
func (c *holdingConn) Close() {
	c.cancel()
	c.sendMu.Lock()
	c.closed = true
	c.conn.Close()
	c.sendMu.Unlock()
	c.tasks.Wait()
}

// SendMessageBatch implements raftio.IConnection.
func (c *holdingConn) SendMessageBatch(batch raftpb.MessageBatch) error {
	if rest, some := c.hold(batch); some {
		if len(rest) == 0 {
			return nil
		}
		batch.Requests = rest
	}
	return c.send(batch)
}

func (c *holdingConn) send(batch raftpb.MessageBatch) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.closed {
		return errConnClosed
	}
	return c.conn.SendMessageBatch(batch)
}

// hold keeps the messages back that must wait, and returns the others; some says whether it kept any.
func (c *holdingConn) hold(batch raftpb.MessageBatch) (rest []raftpb.Message, some bool) {
	for i := range batch.Requests {
		m := &batch.Requests[i]
		if m.Type != raftpb.Replicate || !c.h.toWitness(m) || !c.keep(m, batch) {
			if some {
				rest = append(rest, *m)
			}
			continue
		}
		if !some {
			rest, some = append(make([]raftpb.Message, 0, len(batch.Requests)), batch.Requests[:i]...), true
		}
	}
	return rest, some
}

// toWitness says whether a message goes to a witness.
func (h *RaftHost) toWitness(m *raftpb.Message) bool {
	p, ok := h.placement(m.ShardID)
	if !ok {
		return false
	}
	r, ok := p.Replica(queue.ReplicaID(m.To))
	return ok && r.Birth == catalog.BirthWitness
}

// lastOf is the index of a message's last entry.
func lastOf(m *raftpb.Message) uint64 { return m.LogIndex + uint64(len(m.Entries)) }

// keep holds a message unless nothing waits before it and no other full replica that is in sync lacks its entries.
func (c *holdingConn) keep(m *raftpb.Message, batch raftpb.MessageBatch) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	queued, waits := c.held[m.ShardID]
	if !waits && c.h.copies.mayTell(m.ShardID, m.Term, lastOf(m)) {
		return false
	}
	if len(queued) >= maxHeld {
		return true // dropped
	}
	kept := *m
	kept.Entries = slices.Clone(m.Entries)
	c.held[m.ShardID] = append(queued, kept)
	c.like = raftpb.MessageBatch{DeploymentId: batch.DeploymentId, SourceAddress: batch.SourceAddress, BinVer: batch.BinVer}
	if !waits {
		c.tasks.Go(func() { c.release(c.ctx, kept.ShardID) })
	}
	return true
}

// witnessPause is how long a witness is not told what is committed without it: it then costs one message, one sync and one answer
// in that time, not two of each for every entry.
const witnessPause = 20 * time.Millisecond

// release sends what is held for a shard, in order, as the other full replicas get it, and not more often than needed.
func (c *holdingConn) release(ctx context.Context, shard uint64) {
	for {
		c.mu.Lock()
		queued := c.held[shard]
		if len(queued) == 0 {
			delete(c.held, shard)
			c.mu.Unlock()
			return
		}
		first := queued[0]
		c.mu.Unlock()
		c.h.awaitCopies(ctx, shard, first.Term, lastOf(&first), true)
		c.pause(ctx, &first)
		err := ctx.Err() // at the end of the host nothing is let go that still had to wait
		if err == nil {
			err = c.send(c.take(shard))
		}
		if err != nil {
			c.mu.Lock()
			delete(c.held, shard)
			c.mu.Unlock()
			return
		}
	}
}

// pause waits while a message's last entry needs no vote of the witness: enough other voters have it on disk.
func (c *holdingConn) pause(ctx context.Context, m *raftpb.Message) {
	p, _ := c.h.placement(m.ShardID)
	voters := 0
	for _, r := range p.Replicas {
		if r.Votes() {
			voters++
		}
	}
	have := 1 + c.h.copies.voters(m.ShardID, m.Term, lastOf(m), func(id uint64) bool {
		r, ok := p.Replica(queue.ReplicaID(id))
		return ok && id != m.From && r.Votes()
	})
	if have > voters/2 {
		pause(ctx, witnessPause)
	}
}

// joined appends a message to those before it, as part of the last one where that has just what comes before.
func joined(ms []raftpb.Message, m raftpb.Message) []raftpb.Message {
	if n := len(ms); n > 0 {
		last := &ms[n-1]
		if last.To == m.To && last.From == m.From && last.Term == m.Term && m.LogIndex == lastOf(last) {
			last.Entries = append(last.Entries, m.Entries...)
			last.Commit = max(last.Commit, m.Commit)
			return ms
		}
	}
	return append(ms, m)
}

// take removes the first message and those behind it that need not wait either.
func (c *holdingConn) take(shard uint64) raftpb.MessageBatch {
	c.mu.Lock()
	defer c.mu.Unlock()
	queued := c.held[shard]
	c.h.copies.tell(shard, queued[0].Term, lastOf(&queued[0]))
	n := 1
	for n < len(queued) && c.h.copies.mayTell(shard, queued[n].Term, lastOf(&queued[n])) {
		n++
	}
	batch := c.like
	for _, m := range queued[:n] {
		batch.Requests = joined(batch.Requests, m)
	}
	c.held[shard] = append(queued[:0:0], queued[n:]...)
	return batch
}
