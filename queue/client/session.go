package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// session is one Consume stream of a lane, from the host's start to its end. Its reader ends it.
type session struct {
	n         *lane
	link      *link
	bidi      *connect.BidiStreamForClient[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse]
	end       context.CancelCauseFunc
	delivered atomic.Bool

	sendMu sync.Mutex // one sender at a time; above the lane's mu
	closed bool       // nothing more may be sent

	// Guarded by the lane's mu.
	windowed bool   // the host confirms windows
	taken    uint64 // messages that have come
	awaiting uint64 // the id of a window that is not confirmed; 0: none
	known    bool   // the host has: it is in force when so many messages have come
	handed   uint64

	mu      sync.Mutex
	lastID  uint64
	pending map[uint64]chan []*tierqv1.SettleResult

	ended    chan struct{} // closed when the reader is done; then these hold:
	err      *code.Error
	answered bool // a host ended it, not the network
}

// read takes what the host sends until the stream ends.
func (s *session) read(first *tierqv1.ConsumeResponse) {
	for m, err := first, error(nil); ; m, err = s.bidi.Receive() {
		if err != nil {
			s.finish(err)
			return
		}
		switch {
		case m.GetMessages() != nil:
			s.delivered.Store(true)
			s.n.take(s, m.GetMessages().GetMessages())
		case m.GetSettled() != nil:
			s.settled(m.GetSettled())
		case m.GetWindowed() != nil:
			s.n.inForce(s, m.GetWindowed())
		case m.GetStarted() != nil:
			s.n.l.c.heardPartitions(s.n.l.queue, m.GetStarted().GetPartitions())
		case m.GetPartitions() != 0:
			s.n.l.c.heardPartitions(s.n.l.queue, m.GetPartitions())
		}
	}
}

func (s *session) settled(m *tierqv1.ConsumeSettled) {
	s.mu.Lock()
	one := s.pending[m.GetId()]
	delete(s.pending, m.GetId())
	s.mu.Unlock()
	if one != nil {
		results := m.GetResults()
		if results == nil {
			results = []*tierqv1.SettleResult{}
		}
		one <- results
	}
}

func (s *session) finish(err error) {
	if errors.Is(err, io.EOF) {
		s.err, s.answered = &code.Error{Code: code.Unavailable, Effect: code.EffectNone, Text: s.link.addr + " ended the stream"}, true
	} else {
		s.err, s.answered = asError(err, s.link.addr, true, false)
	}
	s.end(nil)
	s.closeAll()
	close(s.ended)
}

// closeAll frees what the stream has of the connection.
func (s *session) closeAll() {
	s.closeRequest()
	_ = s.bidi.CloseResponse()
}

// cut frees whoever sends or reads once the session's context has ended, see pipe.cut.
func (s *session) cut() {
	_ = s.bidi.CloseRequest()
	_ = s.bidi.CloseResponse()
	s.closeRequest()
}

func (s *session) closeRequest() {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if !s.closed {
		s.closed = true
		_ = s.bidi.CloseRequest()
	}
}

// send sends one request. A failure ends the stream at its reader, which knows why; a host that takes nothing ends it when ctx
// ends, or after AttemptTimeout.
func (s *session) send(ctx context.Context, m *tierqv1.ConsumeRequest) bool {
	return s.sendNext(ctx, func() *tierqv1.ConsumeRequest { return m })
}

// sendNext is send of what next returns when its turn has come.
func (s *session) sendNext(ctx context.Context, next func() *tierqv1.ConsumeRequest) bool {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if s.closed || ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.n.l.c.opts.AttemptTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { s.end(context.Cause(ctx)) })
	defer stop()
	_ = s.bidi.Send(next())
	return true
}

// settle settles by the stream. Without results the stream has ended, or ctx: sent says whether the host may have got it.
func (s *session) settle(ctx context.Context, how *settling, receipts []string) (results []*tierqv1.SettleResult, sent bool) {
	answer := make(chan []*tierqv1.SettleResult, 1)
	s.mu.Lock()
	s.lastID++
	id := s.lastID
	s.pending[id] = answer
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.pending, id)
	}()
	m := &tierqv1.ConsumeSettle{Id: id, Kind: how.kind, Receipts: receipts, DelayMs: how.delayMs(), Reason: how.reason, LeaseMs: wireMillis(how.lease), Patient: how.patient}
	if !s.send(ctx, &tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: m}}) {
		return nil, false
	}
	select {
	case results := <-answer:
		return results, true
	case <-s.ended:
	case <-ctx.Done():
	}
	select {
	case results := <-answer:
		return results, true
	default:
		return nil, true
	}
}
