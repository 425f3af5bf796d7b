package node

import (
	"context"
	"sync"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Limits of the batcher. A batch goes out at once when nothing is in flight; while the pipeline is full the next one
// fills (group commit without a timer).
const (
	// pipelineDepth bounds the proposals of one shard that are in flight.
	pipelineDepth = 4
	// batchMessages bounds the messages of one proposal.
	batchMessages = 4096
	// queuedBytes bounds what waits for its turn in one shard; beyond it a publish is refused with BACKPRESSURE.
	queuedBytes = 64 << 20
	// fillBytes and fillMessages are what a further proposal must carry while others are in flight: below that it
	// waits for one of them and fills, so that many small publishes share a commit.
	fillBytes    = 256 << 10
	fillMessages = 512
	// messageOverhead is what a message costs in a command beside its body, headers and key.
	messageOverhead = 64
)

// proposeFunc queues a command for Raft without blocking, keeps the order of its calls, and calls done exactly once,
// later and from another goroutine: with a result and the number of disks that hold the bodies (G1), or with a
// *code.Error whose Effect tells whether it may still be applied. cmd is not read after done was called with a result.
type proposeFunc func(cmd []byte, timeout time.Duration, done func(res queue.Result, copies int, err error))

// batcher joins the publishes of one shard at its leader's host into proposals. Safe for concurrent use.
//
// Invariants: (1) publishes leave in arrival order; (2) a publish is in exactly one proposal, and is never proposed
// twice (a publish without a producer must not be, and one with a producer is repeated by its client under the same
// seq); (3) at most pipelineDepth proposals are in flight; (4) a proposal carries at most 1 MiB of messages or one
// publish.
type batcher struct {
	propose proposeFunc
	stamp   func() queue.Stamp
	timeout time.Duration
	metrics *metrics

	mu       sync.Mutex
	waiting  []*pendingPublish
	bytes    int
	messages int
	inFlight int
	closed   bool
	bufs     [][]byte
}

type pendingPublish struct {
	publish queue.Publish
	delays  []time.Duration // per message, nil: none; made absolute with the proposal's stamp
	ttls    []time.Duration
	size    int
	done    chan publishOutcome
}

type publishOutcome struct {
	result queue.PublishResult
	index  queue.Index
	copies int
	err    error
}

func newBatcher(propose proposeFunc, stamp func() queue.Stamp, timeout time.Duration, m *metrics) *batcher {
	return &batcher{propose: propose, stamp: stamp, timeout: timeout, metrics: m}
}

// Publish waits until the publish is applied, refused, or ctx ends. On ctx's end the outcome is unknown if it was
// proposed (code.QuorumLost, Maybe), else it is withdrawn and had no effect.
//
// queued, if not nil, is called once the publish has its place in the order.
func (b *batcher) Publish(ctx context.Context, p queue.Publish, delays, ttls []time.Duration, queued func()) publishOutcome {
	pp := &pendingPublish{publish: p, delays: delays, ttls: ttls, size: publishSize(&p), done: make(chan publishOutcome, 1)}
	b.mu.Lock()
	switch {
	case b.closed:
		b.mu.Unlock()
		return publishOutcome{err: code.New(code.NoLeader, "this host no longer leads the partition")}
	case b.bytes+pp.size > queuedBytes && b.bytes > 0:
		b.mu.Unlock()
		return publishOutcome{err: &code.Error{Code: code.Backpressure, Effect: code.EffectNone, RetryAfterMs: 50}}
	}
	b.waiting = append(b.waiting, pp)
	b.bytes += pp.size
	b.messages += len(p.Messages)
	b.mu.Unlock()
	if queued != nil {
		queued()
	}
	b.pump()
	select {
	case out := <-pp.done:
		return out
	case <-ctx.Done():
		if b.withdraw(pp) {
			return publishOutcome{err: &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: ctx.Err()}}
		}
		return publishOutcome{err: code.Maybe(code.QuorumLost, ctx.Err(), "the publish was proposed but not confirmed in time: repeat it with the same producer id and seq")}
	}
}

// withdraw removes a publish that has not been proposed.
func (b *batcher) withdraw(pp *pendingPublish) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, w := range b.waiting {
		if w == pp {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			b.bytes -= pp.size
			b.messages -= len(pp.publish.Messages)
			return true
		}
	}
	return false
}

// pump sends batches while the pipeline has room. Proposals are handed over under mu, so they leave in order.
func (b *batcher) pump() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.mayCutLocked() {
		batch := b.takeLocked()
		b.inFlight++
		b.sendLocked(batch)
	}
}

// mayCutLocked says whether the next batch goes out now: at once when nothing is in flight, else when it is full
// enough to be worth a commit of its own.
func (b *batcher) mayCutLocked() bool {
	if len(b.waiting) == 0 || b.inFlight >= pipelineDepth {
		return false
	}
	return b.inFlight == 0 || b.bytes >= fillBytes || b.messages >= fillMessages
}

// takeLocked cuts the next batch from the front of the waiting publishes.
func (b *batcher) takeLocked() []*pendingPublish {
	n, size, messages := 0, 0, 0
	for n < len(b.waiting) {
		w := b.waiting[n]
		if n > 0 && (size+w.size > queue.MaxCommandMessageBytes || messages+len(w.publish.Messages) > batchMessages) {
			break
		}
		size += w.size
		messages += len(w.publish.Messages)
		n++
	}
	batch := make([]*pendingPublish, n)
	copy(batch, b.waiting)
	rest := copy(b.waiting, b.waiting[n:])
	clear(b.waiting[rest:])
	b.waiting = b.waiting[:rest]
	b.bytes -= size
	b.messages -= messages
	return batch
}

func (b *batcher) sendLocked(batch []*pendingPublish) {
	stamp := b.stamp()
	if stamp == 0 {
		// This host's clock is refused: delays and times to live cannot be made absolute.
		b.inFlight--
		fail(batch, &code.Error{Code: code.ClockSkew, Effect: code.EffectNone})
		return
	}
	cmd := &queue.Enqueue{Stamp: stamp, Publishes: make([]queue.Publish, len(batch))}
	for i, pp := range batch {
		pp.makeAbsolute(stamp)
		cmd.Publishes[i] = pp.publish
	}
	raw, err := queue.EncodeCommand(b.bufferLocked(), cmd)
	if err != nil {
		b.inFlight--
		fail(batch, code.New(code.Internal, "%v", err))
		return
	}
	b.metrics.batchMessages.Observe(float64(countMessages(batch)))
	started := time.Now()
	b.propose(raw, b.timeout, func(res queue.Result, copies int, err error) {
		b.metrics.commitSeconds.Observe(time.Since(started).Seconds())
		b.mu.Lock()
		b.inFlight--
		if err == nil {
			b.recycleLocked(raw)
		}
		b.mu.Unlock()
		b.pump()
		answer(batch, res, copies, err)
	})
}

func (pp *pendingPublish) makeAbsolute(now queue.Stamp) {
	for i := range pp.publish.Messages {
		m := &pp.publish.Messages[i]
		if pp.delays != nil && pp.delays[i] > 0 {
			m.VisibleAt = now + queue.Stamp(pp.delays[i].Milliseconds())
		}
		if pp.ttls != nil && pp.ttls[i] > 0 {
			m.ExpiresAt = max(now, m.VisibleAt) + queue.Stamp(pp.ttls[i].Milliseconds())
		}
	}
}

// answer distributes a proposal's outcome.
func answer(batch []*pendingPublish, res queue.Result, copies int, err error) {
	if err != nil {
		fail(batch, err)
		return
	}
	if res.Code == code.OK && len(res.Publishes) == len(batch) {
		for i, pp := range batch {
			pp.done <- publishOutcome{result: res.Publishes[i], index: res.Index, copies: copies}
		}
		return
	}
	// A refused command stored nothing; any other answer (skipped as applied before) says nothing about the outcome.
	if res.Code == code.OK || res.Code == code.Unknown {
		fail(batch, code.Maybe(code.QuorumLost, nil, "the outcome of the publish is unknown: repeat it with the same producer id and seq"))
		return
	}
	fail(batch, &code.Error{Code: res.Code, Effect: code.EffectNone})
}

func fail(batch []*pendingPublish, err error) {
	for _, pp := range batch {
		pp.done <- publishOutcome{err: err}
	}
}

// Close refuses what waits and what comes; what is in flight is answered by its proposal.
func (b *batcher) Close() {
	b.mu.Lock()
	b.closed = true
	waiting := b.waiting
	b.waiting, b.bytes, b.messages = nil, 0, 0
	b.mu.Unlock()
	fail(waiting, code.New(code.NoLeader, "this host no longer leads the partition"))
}

func (b *batcher) bufferLocked() []byte {
	if n := len(b.bufs); n > 0 {
		buf := b.bufs[n-1]
		b.bufs = b.bufs[:n-1]
		return buf
	}
	return nil
}

func (b *batcher) recycleLocked(buf []byte) {
	if cap(buf) <= 2<<20 && len(b.bufs) < pipelineDepth {
		b.bufs = append(b.bufs, buf[:0])
	}
}

func countMessages(batch []*pendingPublish) (n int) {
	for _, pp := range batch {
		n += len(pp.publish.Messages)
	}
	return n
}

func publishSize(p *queue.Publish) int {
	n := messageOverhead
	for i := range p.Messages {
		n += messageSize(&p.Messages[i])
	}
	return n
}

func messageSize(m *queue.Message) int {
	n := messageOverhead + len(m.Body) + len(m.Key) + len(m.DedupID)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}
