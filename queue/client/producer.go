package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// PublishOptions are conditions on one publish.
type PublishOptions struct {
	// Partition puts all messages into one partition; nil lets the client choose: by key, else by dedup id, else all of them
	// into the next one.
	Partition *uint32
	// Atomic stores all messages or none. They must fit one request.
	Atomic bool
	// ExpectedLastAddress, if set, refuses the publish unless the partition's last address is this.
	ExpectedLastAddress *uint64
}

// Publish stores msgs in queue, in order, and waits until every one is answered or ctx ends. The results are in msgs'
// order. The error is the first message's that has one: EffectNone, it was not stored; EffectMaybe, it may have been.
// It waits for room in the buffer, unless FailWhenFull is set. The same seqs are used in all tries of one Publish, so a
// message is stored once whatever is retried; a second Publish of the same message is a second message. In a queue of
// several partitions order holds within each; messages of one key meet in one.
func (c *Client) Publish(ctx context.Context, queue string, msgs ...Message) ([]Published, error) {
	return c.PublishWith(ctx, queue, PublishOptions{}, msgs...)
}

// PublishWith is Publish under conditions.
func (c *Client) PublishWith(ctx context.Context, queue string, o PublishOptions, msgs ...Message) ([]Published, error) {
	if len(msgs) == 0 {
		return nil, code.New(code.BatchEmpty, "")
	}
	p := c.newPublish(ctx, o, len(msgs))
	if e := c.enqueue(ctx, queue, p, msgs); e != nil {
		return p.refuseAll(e), e
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.abandon(ctx.Err())
	}
	return p.outcome()
}

// Future is the coming answer to one asynchronous publish.
type Future struct{ p *publish }

// Done is closed when the answer is there.
func (f *Future) Done() <-chan struct{} { return f.p.done }

// Wait returns the answer. When ctx ends first it returns an error of EffectMaybe, and the message is still being tried:
// Wait may be called again.
func (f *Future) Wait(ctx context.Context) (Published, error) {
	select {
	case <-f.p.done:
		rs, err := f.p.outcome()
		return rs[0], err
	case <-ctx.Done():
		return Published{}, code.Maybe(code.QuorumLost, ctx.Err(), "the publish is still being tried")
	}
}

// PublishAsync buffers msg for queue and returns at once, or when there is room in the buffer; ctx bounds that wait only.
// The publish is tried for PublishTimeout. Whatever goes wrong is in the future.
func (c *Client) PublishAsync(ctx context.Context, queue string, msg Message) *Future {
	p := c.newPublish(context.Background(), PublishOptions{}, 1)
	p.msg[0] = msg
	p.future.p = p
	if e := c.enqueue(ctx, queue, p, p.msg[:]); e != nil {
		p.refuseAll(e)
	}
	return &p.future
}

// Flush waits until every publish that began before it is answered, or ctx ends.
func (c *Client) Flush(ctx context.Context) error { return c.flush(ctx) }

func (c *Client) flush(ctx context.Context) error {
	for _, p := range c.openPublishes() {
		select {
		case <-p.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (c *Client) openPublishes() []*publish {
	c.openMu.Lock()
	defer c.openMu.Unlock()
	all := make([]*publish, 0, len(c.open))
	for p := range c.open {
		all = append(all, p)
	}
	return all
}

// publish is one call of Publish or PublishAsync: its messages may travel in several requests, to several partitions.
type publish struct {
	c        *Client
	opts     PublishOptions
	deadline time.Time
	began    time.Time // when its room in the buffer was taken
	messages int       // as taken from the buffer
	bytes    int64
	placer   *placer
	streams  []*stream // guarded by the placer's mu; nil until it is placed

	// What one asynchronous message, or one partition, needs.
	future Future
	msg    [1]Message // until it is placed
	into   [1]*stream

	abandoned atomic.Bool
	done      chan struct{} // closed when left is 0, after which results do not change

	mu      sync.Mutex // below the streams' locks
	results []Published
	one     [1]Published // the results of one message
	left    int
}

func (c *Client) newPublish(ctx context.Context, o PublishOptions, messages int) *publish {
	p := &publish{c: c, opts: o, left: messages, done: make(chan struct{})}
	if messages == 1 {
		p.results = p.one[:]
	} else {
		p.results = make([]Published, messages)
	}
	if d, ok := ctx.Deadline(); ok {
		p.deadline = d
	} else {
		p.deadline = time.Now().Add(c.opts.PublishTimeout)
	}
	return p
}

// exclusive reports whether the messages must travel together and alone.
func (p *publish) exclusive() bool { return p.opts.Atomic || p.opts.ExpectedLastAddress != nil }

// enqueue checks the messages and hands them to the queue's stream.
func (c *Client) enqueue(ctx context.Context, queue string, p *publish, msgs []Message) *code.Error {
	if queue == "" {
		return code.New(code.InvalidName, "no queue named: names are 1 to 80 of A-Z a-z 0-9 . _ -")
	}
	if e := checkText("a queue's name", queue); e != nil {
		return e
	}
	if p.exclusive() && len(msgs) > c.opts.MaxBatchMessages {
		return code.New(code.BatchTooLarge, "an atomic publish has %d messages: at most %d travel in one request", len(msgs), c.opts.MaxBatchMessages)
	}
	var bytes int64
	for i := range msgs {
		if e := msgs[i].check(); e != nil {
			return e
		}
		bytes += int64(msgs[i].size())
	}
	p.messages, p.bytes = c.buffer.clamp(len(msgs), bytes)
	l := c.placerOf(queue)
	if l == nil {
		return errClosed()
	}
	if !c.buffer.take(p.messages, p.bytes) {
		if e := c.awaitRoom(ctx, p); e != nil {
			return e
		}
	}
	p.placer, p.began = l, time.Now()
	c.openMu.Lock()
	c.open[p] = struct{}{}
	c.openMu.Unlock()
	l.add(p, msgs)
	return nil
}

// awaitRoom waits for p's room in the buffer, unless FailWhenFull is set.
func (c *Client) awaitRoom(ctx context.Context, p *publish) *code.Error {
	wait, cancel := context.WithDeadline(ctx, p.deadline)
	defer cancel()
	stop := context.AfterFunc(c.base, cancel)
	defer stop()
	e := c.buffer.acquire(wait, p.messages, p.bytes, c.opts.FailWhenFull)
	if e != nil && c.base.Err() != nil {
		return errClosed()
	}
	return e
}

// resolve answers one message; the first answer stands.
func (p *publish) resolve(i int, r Published) {
	r.Elapsed = time.Since(p.began)
	p.mu.Lock()
	p.results[i] = r
	p.left--
	through := p.left == 0
	p.mu.Unlock()
	if !through {
		return
	}
	p.c.openMu.Lock()
	delete(p.c.open, p)
	p.c.openMu.Unlock()
	p.c.buffer.release(p.messages, p.bytes)
	close(p.done)
}

// failAll answers every message of a publish that no stream has.
func (p *publish) failAll(e *code.Error) {
	for i := range p.results {
		p.resolve(i, Published{Err: e})
	}
}

// abandon gives p up because its caller's context ended: what was not sent is answered, what only such callers wait for
// is no longer tried, and the rest stays unknown.
func (p *publish) abandon(cause error) {
	p.abandoned.Store(true)
	if p.placer.abandon(p, unsent(cause)) {
		return
	}
	p.placer.mu.Lock()
	streams := p.streams
	p.placer.mu.Unlock()
	all := true
	for _, s := range streams {
		all = s.abandon(p, cause) && all
	}
	if !all {
		return
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-p.done: // its requests were cut off, and end now
	case <-late.C: // one is stuck behind another's at a host that reads nothing
	}
}

func unsent(cause error) *code.Error {
	return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Text: "the caller's time ran out before the message was sent", Cause: cause}
}

// refuseAll answers every message with e; for a publish that no stream has seen.
func (p *publish) refuseAll(e *code.Error) []Published {
	for i := range p.results {
		p.results[i].Err = e
	}
	close(p.done)
	return p.results
}

// outcome returns the results; with a message that is not answered, a copy of what is known.
func (p *publish) outcome() ([]Published, error) {
	select {
	case <-p.done:
	default:
		return p.partial()
	}
	return p.results, firstError(p.results)
}

// partial copies what is known of p, which is not through.
func (p *publish) partial() ([]Published, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rs := slices.Clone(p.results)
	unanswered := code.Maybe(code.QuorumLost, nil, "the caller's time ran out before the answer: the outcome is unknown")
	for i := range rs {
		if rs[i].Err == nil && rs[i].Address == 0 {
			rs[i].Err = unanswered
		}
	}
	return rs, firstError(rs)
}

func firstError(rs []Published) error {
	for i := range rs {
		if rs[i].Err != nil {
			return rs[i].Err
		}
	}
	return nil
}

// codeOf reads the error of a call, which is always a *code.Error.
func codeOf(err error) *code.Error {
	var e *code.Error
	if errors.As(err, &e) {
		return e
	}
	return &code.Error{Code: code.Internal, Effect: code.EffectMaybe, Text: err.Error(), Cause: err}
}

// item is one message on its way.
type item struct {
	p    *publish
	i    int // its place in p
	msg  tierqv1.OutMessage
	size int
	seq  uint64 // 0 until it is first sent
	// maybe: a request that carried it under seq has an unknown outcome.
	maybe bool
	done  bool
}
