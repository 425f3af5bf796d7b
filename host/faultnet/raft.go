package faultnet

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
)

// Raft puts the network between a host and the others that its Raft transport reaches. hostAt says whose an address is; what goes
// to nobody's is left alone.
func (n *Net) Raft(from uint64, under raftio.ITransport, hostAt func(address string) (hostID uint64, ok bool)) raftio.ITransport {
	return &transport{ITransport: under, net: n, from: from, hostAt: hostAt}
}

type transport struct {
	raftio.ITransport
	net    *Net
	from   uint64
	hostAt func(string) (uint64, bool)
}

// GetConnection implements raftio.ITransport.
func (t *transport) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	to, ok := t.hostAt(target)
	if !ok {
		return t.ITransport.GetConnection(ctx, target)
	}
	d := direction{t.from, to}
	if err := t.net.passable(ctx, d); err != nil {
		return nil, err
	}
	under, err := t.ITransport.GetConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	c := &conn{net: t.net, way: d, under: under, wake: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return c, nil
}

// GetSnapshotConnection implements raftio.ITransport.
func (t *transport) GetSnapshotConnection(ctx context.Context, target string) (raftio.ISnapshotConnection, error) {
	to, ok := t.hostAt(target)
	if !ok {
		return t.ITransport.GetSnapshotConnection(ctx, target)
	}
	d := direction{t.from, to}
	if err := t.net.passable(ctx, d); err != nil {
		return nil, err
	}
	under, err := t.ITransport.GetSnapshotConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	return &chunkConn{ISnapshotConnection: under, ctx: ctx, net: t.net, way: d}, nil
}

// parcel is a message on its way.
type parcel struct {
	m   raftpb.Message
	due time.Time
}

// conn is one connection for messages. What is not delayed is sent by the caller, the rest by a goroutine, which ends with Close.
type conn struct {
	net    *Net
	way    direction
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{}
	tasks  sync.WaitGroup

	mu       sync.Mutex
	under    raftio.IConnection
	parcels  []parcel // by due
	last     time.Time
	like     raftpb.MessageBatch // what batches look like, without messages
	carrying bool                // the goroutine runs
	cutSince time.Time
	failed   error
}

// Close implements raftio.IConnection. What is still on its way is lost.
func (c *conn) Close() {
	c.mu.Lock()
	c.cancel()
	c.failed = errClosed
	c.mu.Unlock()
	c.tasks.Wait()
	c.under.Close()
}

// SendMessageBatch implements raftio.IConnection. An error is one of this batch, or of one before it that was on its way.
func (c *conn) SendMessageBatch(batch raftpb.MessageBatch) error {
	r, _ := c.net.rule(c.way)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.failed != nil:
		return c.failed
	case r.Refuse:
		return ErrRefused
	case c.brokenLocked(r.Cut && r.Only == nil):
		return ErrCut
	case r.none() && len(c.parcels) == 0:
		return c.under.SendMessageBatch(batch)
	}
	rest := make([]raftpb.Message, 0, len(batch.Requests))
	for i := range batch.Requests {
		m := &batch.Requests[i]
		if r.Only != nil && !r.Only(m.Type) {
			rest = append(rest, *m)
			continue
		}
		c.postLocked(&r, m)
	}
	c.like = raftpb.MessageBatch{DeploymentId: batch.DeploymentId, SourceAddress: batch.SourceAddress, BinVer: batch.BinVer}
	if len(rest) == 0 {
		return nil
	}
	batch.Requests = rest
	return c.under.SendMessageBatch(batch)
}

// brokenLocked says whether the connection has been cut for so long that it breaks.
func (c *conn) brokenLocked(cut bool) bool {
	if !cut {
		c.cutSince = time.Time{}
		return false
	}
	if c.cutSince.IsZero() {
		c.cutSince = time.Now()
	}
	return time.Since(c.cutSince) >= giveUp
}

// postLocked puts a message on its way, or loses it.
func (c *conn) postLocked(r *Rule, m *raftpb.Message) {
	lost, late, delay := c.net.fate(r)
	if lost {
		return
	}
	p := parcel{m: *m, due: time.Now().Add(delay)}
	p.m.Entries = slices.Clone(m.Entries)
	if !late {
		if p.due.Before(c.last) {
			p.due = c.last
		}
		c.last = p.due
	}
	i, _ := slices.BinarySearchFunc(c.parcels, p.due, func(q parcel, due time.Time) int {
		if q.due.After(due) {
			return 1
		}
		return -1 // behind those that are due at the same time
	})
	c.parcels = slices.Insert(c.parcels, i, p)
	if !c.carrying {
		c.carrying = true
		c.tasks.Go(c.deliver)
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// deliver sends what is due until Close.
func (c *conn) deliver() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if next, some := c.sendDue(); some {
			timer.Reset(next)
		}
		select {
		case <-timer.C:
		case <-c.wake:
		case <-c.ctx.Done():
			return
		}
	}
}

// sendDue sends what is due, unless it has been cut off meanwhile, and returns when the next is, if there is any.
func (c *conn) sendDue() (next time.Duration, some bool) {
	r, _ := c.net.rule(c.way)
	c.mu.Lock()
	defer c.mu.Unlock()
	now, due := time.Now(), 0
	for due < len(c.parcels) && !c.parcels[due].due.After(now) {
		due++
	}
	batch := c.like
	for _, p := range c.parcels[:due] {
		if (r.Cut || r.Refuse) && (r.Only == nil || r.Only(p.m.Type)) {
			continue
		}
		batch.Requests = append(batch.Requests, p.m)
	}
	c.parcels = slices.Delete(c.parcels, 0, due)
	if len(batch.Requests) > 0 && c.failed == nil {
		c.failed = c.under.SendMessageBatch(batch)
	}
	if len(c.parcels) == 0 {
		return 0, false
	}
	return c.parcels[0].due.Sub(now), true
}

// chunkConn carries the chunks of one snapshot, in order: they are late, or their stream breaks.
type chunkConn struct {
	raftio.ISnapshotConnection
	ctx context.Context
	net *Net
	way direction
}

// SendChunk implements raftio.ISnapshotConnection.
func (c *chunkConn) SendChunk(chunk raftpb.Chunk) error {
	if err := c.net.carry(c.ctx, c.way, true); err != nil {
		return err
	}
	return c.ISnapshotConnection.SendChunk(chunk)
}
