package client

import (
	"context"
	"errors"
	"io"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// pipe is one PublishStream of one partition's producer to one host: requests leave in the order of their calls, and the
// answers come in that order. It has one goroutine, and ends by itself when it is idle.
type pipe struct {
	s    *stream
	addr string
	bidi *connect.BidiStreamForClient[tierqv1.PublishRequest, tierqv1.PublishStreamResponse]
	end  context.CancelCauseFunc

	connected atomic.Bool // from here what is sent may be on the wire

	sendMu sync.Mutex // one sender at a time: the order of requests is that of waiting

	mu       sync.Mutex
	closed   bool // nothing more may be sent; set with both locks held
	waiting  []chan pipeAnswer
	answered bool // at least one request was
	err      error
	idle     *time.Timer
}

type pipeAnswer struct {
	res    *tierqv1.PublishResponse
	err    error
	served time.Duration // by the host; 0: it did not say
}

// pipeIdle is how long a pipe without requests stays open.
const pipeIdle = 30 * time.Second

// errUnsent says that a request did not leave by this pipe.
var errUnsent = errors.New("the stream had ended")

// publishStub is how a batch is sent: by a pipe, or by a unary call where streams are not to be had. sent is called once the
// request has its place in the order.
func (s *stream) publishStub(sent func()) stub[tierqv1.PublishRequest, tierqv1.PublishResponse] {
	return func(a *apis) method[tierqv1.PublishRequest, tierqv1.PublishResponse] {
		return func(ctx context.Context, r *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
			for s.pipes() {
				res, err := s.pipeTo(a).publish(ctx, r.Msg, sent)
				switch {
				case err == nil:
					return connect.NewResponse(res), nil
				case errors.Is(err, errUnsent) && ctx.Err() == nil:
					continue // by a new one, or by none
				}
				return nil, err
			}
			defer sent()
			return a.queue().Publish(ctx, r)
		}
	}
}

// served notes how long an answer took, and how long by its host.
func (s *stream) served(host string, took, byHost time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fill.heard(host, took, byHost)
}

// pipes reports whether streams are to be tried.
func (s *stream) pipes() bool {
	s.pipeMu.Lock()
	defer s.pipeMu.Unlock()
	return !s.c.opts.Clock.Now().Before(s.unaryUntil)
}

// pipeTo returns the open pipe to a host. There is one a stream: one to another host ends when what it carries is answered.
func (s *stream) pipeTo(a *apis) *pipe {
	s.pipeMu.Lock()
	defer s.pipeMu.Unlock()
	if p := s.pipe; p != nil {
		if p.addr == a.addr && p.usable() {
			return p
		}
		p.retire()
	}
	ctx, end := context.WithCancelCause(s.c.base)
	p := &pipe{s: s, addr: a.addr, end: end}
	p.bidi = a.stream().PublishStream(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { p.connected.Store(true) },
	}))
	context.AfterFunc(ctx, p.cut)
	s.pipe = p
	s.c.wg.Add(1)
	go p.read()
	return p
}

func (p *pipe) usable() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err == nil && !p.closed
}

// retire lets the pipe end once it is idle.
func (p *pipe) retire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.idleLocked(time.Millisecond)
	}
}

func (p *pipe) idleLocked(d time.Duration) {
	if p.idle == nil {
		p.idle = time.AfterFunc(d, p.closeIdle)
		return
	}
	p.idle.Reset(d)
}

func (p *pipe) closeIdle() {
	p.sendMu.Lock() // nobody is about to send
	defer p.sendMu.Unlock()
	p.mu.Lock()
	busy := len(p.waiting) > 0
	if busy {
		p.idleLocked(pipeIdle)
	}
	p.mu.Unlock()
	if !busy {
		p.closeSending()
	}
}

// cut frees whoever sends or reads once the pipe's context has ended. The transport looks at that only when it has nothing to
// read from the sender, and not while the host's flow control holds it up. Both closes may run beside a Send and a Receive.
func (p *pipe) cut() {
	_ = p.bidi.CloseRequest()
	_ = p.bidi.CloseResponse()
	p.closeRequest()
}

func (p *pipe) closeRequest() {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	p.closeSending()
}

// closeSending needs sendMu.
func (p *pipe) closeSending() {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	if first {
		_ = p.bidi.CloseRequest()
	}
}

// publish sends one request and waits for its answer. errUnsent: the pipe had ended before.
func (p *pipe) publish(ctx context.Context, req *tierqv1.PublishRequest, sent func()) (*tierqv1.PublishResponse, error) {
	answer, err := p.send(ctx, req)
	if err != nil {
		return nil, err
	}
	sent()
	began := time.Now()
	defer p.mark(ctx)
	select {
	case a := <-answer:
		p.s.served(p.addr, time.Since(began), a.served)
		return a.res, a.err
	case <-ctx.Done():
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && time.Since(began) >= patience {
		p.end(errNoStart) // whatever else it carries waits for the same silence
	}
	return nil, ctx.Err()
}

// mark tells the call's trace whether its request may have been on the wire.
func (p *pipe) mark(ctx context.Context) {
	if t := httptrace.ContextClientTrace(ctx); t != nil && t.GotConn != nil && p.connected.Load() {
		t.GotConn(httptrace.GotConnInfo{})
	}
}

func (p *pipe) send(ctx context.Context, req *tierqv1.PublishRequest) (<-chan pipeAnswer, error) {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	answer := make(chan pipeAnswer, 1)
	p.mu.Lock()
	if p.closed || p.err != nil {
		p.mu.Unlock()
		return nil, errUnsent
	}
	p.waiting = append(p.waiting, answer)
	p.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { p.end(context.Cause(ctx)) }) // a host that reads nothing must not hold it up for ever
	defer stop()
	_ = p.bidi.Send(req) // the reader learns why it failed
	return answer, nil
}

// read answers requests in their order until the stream ends.
func (p *pipe) read() {
	defer p.s.c.wg.Done()
	for {
		m, err := p.bidi.Receive()
		if err != nil {
			p.finish(err)
			return
		}
		p.mu.Lock()
		if len(p.waiting) == 0 {
			p.mu.Unlock()
			p.finish(errors.New("the host answered more than it was asked"))
			return
		}
		one := p.waiting[0]
		p.waiting = p.waiting[1:]
		p.answered = true
		if len(p.waiting) == 0 {
			p.waiting = nil
			p.idleLocked(pipeIdle)
		}
		p.mu.Unlock()
		one <- answerOf(m)
	}
}

func answerOf(m *tierqv1.PublishStreamResponse) pipeAnswer {
	served := time.Duration(m.GetServedUs()) * time.Microsecond
	if r := m.GetPublished(); r != nil {
		return pipeAnswer{res: r, served: served}
	}
	d := m.GetRefused()
	return pipeAnswer{err: errorOf(d), served: served}
}

// finish answers what is waiting with the reason of the end.
func (p *pipe) finish(err error) {
	if errors.Is(err, io.EOF) {
		err = errors.New("the host ended the stream")
	}
	e, _ := asError(err, p.addr, true, true)
	p.mu.Lock()
	none := noStreams(e) && !p.answered
	if none {
		err = errUnsent
	}
	p.err = err
	waiting, answered := p.waiting, p.answered
	p.waiting = nil
	if p.idle != nil {
		p.idle.Stop()
	}
	p.mu.Unlock()
	p.s.pipeEnded(none, answered || len(waiting) == 0)
	p.end(nil)
	p.closeRequest()
	_ = p.bidi.CloseResponse()
	for _, one := range waiting {
		one <- pipeAnswer{err: err}
	}
}

// silentPipes is how many pipes in a row may end without an answer before requests go by unary calls: a proxy may hold
// streams back.
const silentPipes = 3

// pipeEnded notes how a pipe went. none: streams are not offered there.
func (s *stream) pipeEnded(none, worked bool) {
	s.pipeMu.Lock()
	defer s.pipeMu.Unlock()
	if worked {
		s.silent = 0
		return
	}
	if s.silent++; none || s.silent >= silentPipes {
		s.silent = 0
		s.unaryUntil = s.c.opts.Clock.Now().Add(pollFor)
	}
}

// errorOf reads a refusal that came inside a stream.
func errorOf(d *tierqv1.ErrorDetail) *code.Error {
	return &code.Error{
		Code: code.Code(d.GetCode()), Effect: effectOf(d.GetEffect(), code.Code(d.GetCode())), Text: d.GetText(),
		HomeHost: d.GetHomeHost(), HomeAPI: d.GetHomeApi(), Epoch: d.GetEpoch(),
		LeaderHost: d.GetLeaderHost(), LeaderAPI: d.GetLeaderApi(), RetryAfterMs: d.GetRetryAfterMs(),
	}
}
