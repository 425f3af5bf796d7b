package client

import (
	"context"
	"errors"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// PublishOptions are conditions on one publish.
type PublishOptions struct {
	// Partition defaults to 0, the only one of most queues.
	Partition uint32
	// Atomic stores all messages or none. They must fit one request.
	Atomic bool
	// ExpectedLastAddress, if set, refuses the publish unless the partition's last address is this.
	ExpectedLastAddress *uint64
}

// Publish stores msgs in queue, in order, and waits until every one is answered or ctx ends. The results are in msgs'
// order. The error is the first message's that has one: EffectNone, it was not stored; EffectMaybe, it may have been.
// It waits for room in the buffer, unless FailWhenFull is set. The same seqs are used in all tries of one Publish, so a
// message is stored once whatever is retried; a second Publish of the same message is a second message.
func (c *Client) Publish(ctx context.Context, queue string, msgs ...Message) ([]Published, error) {
	return c.PublishWith(ctx, queue, PublishOptions{}, msgs...)
}

// PublishWith is Publish under conditions.
func (c *Client) PublishWith(ctx context.Context, queue string, o PublishOptions, msgs ...Message) ([]Published, error) {
	if len(msgs) == 0 {
		return nil, code.New(code.BatchEmpty, "")
	}
	p := c.newPublish(ctx, o, msgs)
	if e := c.enqueue(ctx, queue, p, msgs); e != nil {
		return p.refuseAll(e), e
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.stream.abandon(p, ctx.Err())
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
	msgs := []Message{msg}
	p := c.newPublish(context.Background(), PublishOptions{}, msgs)
	if e := c.enqueue(ctx, queue, p, msgs); e != nil {
		p.refuseAll(e)
	}
	return &Future{p}
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
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*publish
	for _, s := range c.streams {
		all = append(all, s.open()...)
	}
	return all
}

// publish is one call of Publish or PublishAsync: its messages may travel in several requests.
type publish struct {
	opts     PublishOptions
	deadline time.Time
	began    time.Time // when its room in the buffer was taken
	messages int       // as taken from the buffer
	bytes    int64
	stream   *stream

	done chan struct{} // closed when left is 0, after which results do not change
	// Guarded by the stream's mu until done is closed.
	results   []Published
	left      int
	abandoned bool
}

func (c *Client) newPublish(ctx context.Context, o PublishOptions, msgs []Message) *publish {
	p := &publish{opts: o, results: make([]Published, len(msgs)), left: len(msgs), done: make(chan struct{})}
	var bytes int64
	for i := range msgs {
		bytes += int64(msgs[i].size())
	}
	p.messages, p.bytes = c.buffer.clamp(len(msgs), bytes)
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
	if p.exclusive() && len(msgs) > c.opts.MaxBatchMessages {
		return code.New(code.BatchTooLarge, "an atomic publish has %d messages: at most %d travel in one request", len(msgs), c.opts.MaxBatchMessages)
	}
	for i := range msgs {
		if e := msgs[i].check(); e != nil {
			return e
		}
	}
	s := c.streamOf(streamKey{queue, p.opts.Partition})
	if s == nil {
		return errClosed()
	}
	wait, cancel := context.WithDeadline(ctx, p.deadline)
	defer cancel()
	stop := context.AfterFunc(c.base, cancel)
	defer stop()
	if e := c.buffer.acquire(wait, p.messages, p.bytes, c.opts.FailWhenFull); e != nil {
		if c.base.Err() != nil {
			return errClosed()
		}
		return e
	}
	p.stream, p.began = s, time.Now()
	s.add(p, msgs)
	return nil
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
		return p.stream.partial(p)
	}
	return p.results, firstError(p.results)
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
	msg  *tierqv1.OutMessage
	size int
	seq  uint64 // 0 until it is first sent
	// maybe: a request that carried it under seq has an unknown outcome.
	maybe bool
	done  bool
}
