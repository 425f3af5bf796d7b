package client

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// lane is one partition's part of a consumer. It holds a stream to the group's home there, one after the other, and polls
// where it cannot.
//
// Invariants:
//  1. held ≤ window, or what it was before: a stream is opened with what is left of the window, and grows as what came before
//     it is done with. The window is this lane's share of the consumer's, and shares knows which of the two may be used.
//  2. A message that came counts until its handler is done, whatever becomes of the stream that it came by.
//  3. A settle goes by the stream, and by a call of its own when that is gone; one whose answer was lost with the stream is
//     made again only if that is harmless.
type lane struct {
	l       *consumer
	number  uint32
	windowB int
	acks    *acker
	readers sync.WaitGroup

	mu        sync.Mutex
	window    int
	opening   bool // a stream or poll is under way with the window as it was
	lastID    uint64
	confirm   bool // the window is to be confirmed when that is over
	held      int
	heldB     int
	older     int // of held, what the present session has not brought
	olderB    int
	session   *session // the present one; nil: none, or it has ended
	stopping  bool
	room      chan struct{} // one token: there may be room again
	pollUntil time.Time     // streams are not offered: poll until then
	slow      int           // streams in a row that were accepted and said nothing
}

func newLane(l *consumer, number uint32, window, windowB int) *lane {
	n := &lane{l: l, number: number, window: window, windowB: windowB, room: make(chan struct{}, 1)}
	n.acks = newAcker(n)
	return n
}

func (n *lane) route() route { return homeIn(n.l.queue, n.number, n.l.group) }

const (
	// pollFor is how long a lane polls before it tries to stream again.
	pollFor = time.Minute
	// slowStreams is how many streams in a row may say nothing before a lane polls: a proxy may hold them back.
	slowStreams = 2
	// longSession is what counts as a stream that worked, also when it brought nothing.
	longSession = time.Second
	// closeTimeout bounds the wait for the host's end of a stream.
	closeTimeout = 3 * time.Second
)

// serve brings messages until ctx ends or there is nothing to go on with.
func (n *lane) serve(ctx context.Context) error {
	c := n.l.c
	for refused, hops := 0, 0; ; {
		if !n.awaitRoom(ctx) {
			return nil
		}
		worked, err := n.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if worked {
			refused, hops = 0, 0
		}
		if err == nil {
			continue
		}
		e := codeOf(err)
		if !worthWaiting(e) {
			return err
		}
		c.log.Debug("consume", zap.String("queue", n.l.queue), zap.String("group", n.l.group), zap.Uint32("partition", n.number), zap.Error(err))
		if e.Code == code.NotOwner && e.HomeAPI != "" && hops < maxHops {
			hops++ // go where the old home says, at once
			continue
		}
		if c.sleep(ctx, c.retryPause(refused, e)) != nil {
			return nil
		}
		refused++
	}
}

// awaitRoom waits until a message may be leased; false when ctx ended.
func (n *lane) awaitRoom(ctx context.Context) bool {
	for ctx.Err() == nil {
		n.mu.Lock()
		free := n.window - n.held
		n.mu.Unlock()
		if free > 0 {
			return true
		}
		select {
		case <-n.room:
		case <-ctx.Done():
		}
	}
	return false
}

// once holds one stream until it ends, or polls for a while. worked says that the fleet has served it.
func (n *lane) once(ctx context.Context) (worked bool, err error) {
	n.mu.Lock()
	poll := n.pollUntil
	n.mu.Unlock()
	if n.l.c.opts.Clock.Now().Before(poll) {
		return n.poll(ctx, poll)
	}
	s, err := n.connect(ctx)
	if err != nil || s == nil {
		return false, err
	}
	began := time.Now()
	select {
	case <-s.ended:
	case <-ctx.Done():
		n.stop(s)
		return true, nil
	}
	n.mu.Lock()
	n.session = nil
	if s.awaiting != 0 {
		n.confirmLocked()
	}
	n.mu.Unlock()
	e := s.err
	worked = s.delivered.Load() || time.Since(began) >= longSession
	if !s.answered {
		n.l.c.router.failed(s.link)
		n.l.c.wantRefresh()
	} else if n.l.c.router.hint(n.route(), e.HomeAPI, s.link.addr) == "" {
		n.l.c.router.forget(n.route(), s.link.addr)
		if hostBound(n.route(), e.Code) {
			n.l.c.router.moveOn(s.link.addr)
		}
	}
	return worked, e
}

// connect opens a stream where the group's home is, as a call would find it. nil without an error: poll.
func (n *lane) connect(ctx context.Context) (*session, error) {
	c := n.l.c
	h := how{to: n.route(), idempotent: true}
	ctx, cancel := c.bound(ctx, h)
	defer cancel()
	t := &tries{c: c, h: h}
	for {
		l, err := t.next(ctx)
		if err != nil {
			return nil, err
		}
		s, e := n.open(ctx, l)
		switch {
		case e == nil:
			return s, nil
		case n.mustPoll(e):
			return nil, nil
		}
		if err := t.after(ctx, l, e); err != nil {
			return nil, err
		}
	}
}

// errNoStart is the cause of a stream that was given up on because its host, or what lies between, said nothing.
var errNoStart = errors.New("the stream was not answered in time")

// mustPoll reports whether e says that streams are not to be had here.
func (n *lane) mustPoll(e *code.Error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if errors.Is(e.Cause, errNoStart) {
		n.slow++
	}
	if !noStreams(e) && n.slow < slowStreams {
		return false
	}
	n.slow = 0
	n.pollUntil = n.l.c.opts.Clock.Now().Add(pollFor)
	return true
}

// noStreams reports whether e is how a host or proxy says that it does not do streams.
func noStreams(e *code.Error) bool {
	var ce *connect.Error
	if !errors.As(e.Cause, &ce) {
		return false
	}
	return ce.Code() == connect.CodeUnimplemented || strings.Contains(ce.Message(), "HTTP status 505") || strings.Contains(ce.Message(), "HTTP Version")
}

// use begins something that leases what is left of the window; false when nothing is. used ends it.
func (n *lane) use() (messages, bytes uint32, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	messages, bytes = n.windowLocked(n.held, n.heldB)
	n.opening = messages > 0
	return messages, bytes, n.opening
}

func (n *lane) used() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opening = false
	if n.confirm {
		n.confirm = false
		n.confirmLocked()
	}
}

// open opens a stream at one host and waits until it is served. nil without an error: the window has no room any more.
func (n *lane) open(ctx context.Context, l *link) (*session, *code.Error) {
	messages, bytes, ok := n.use()
	if !ok {
		return nil, nil
	}
	defer n.used()
	c := n.l.c
	sctx, end := context.WithCancelCause(c.base)
	stop := context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	late := time.AfterFunc(c.opts.AttemptTimeout, func() { end(errNoStart) })
	s := &session{n: n, link: l, end: end, pending: map[uint64]chan []*tierqv1.SettleResult{}, ended: make(chan struct{})}
	s.bidi = c.apisOf(l.addr).stream().Consume(sctx)
	context.AfterFunc(sctx, s.cut)
	start := &tierqv1.ConsumeStart{
		Queue: n.l.queue, Partition: proto.Uint32(n.number), Group: n.l.group, Consumer: n.l.o.Consumer,
		WindowMessages: messages, WindowBytes: bytes, Handlers: uint32(n.l.o.Concurrency),
	}
	if n.l.o.Lease > 0 {
		start.LeaseMs = proto.Uint64(wireMillis(n.l.o.Lease))
	}
	_ = s.bidi.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: start}}) // Receive tells why it failed
	res, err := s.bidi.Receive()
	if !late.Stop() || !stop() || err != nil {
		if err == nil {
			err = context.DeadlineExceeded
		}
		e, answered := asError(err, l.addr, true, false)
		if errors.Is(context.Cause(sctx), errNoStart) {
			e = &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Text: l.addr + " did not answer in time", Cause: errNoStart}
		}
		end(nil)
		s.closeAll()
		switch {
		case !answered && ctx.Err() == nil:
			c.router.failed(l)
			c.wantRefresh()
		case e.Code == code.NotAuthenticated || e.Code == code.WrongFleet || e.Code == code.AuthFailed:
			l.refused(e)
		case answered:
			l.answered()
		}
		return nil, e
	}
	l.answered()
	n.begin(s, res)
	return s, nil
}

// begin makes s the present session.
func (n *lane) begin(s *session, first *tierqv1.ConsumeResponse) {
	n.mu.Lock()
	n.session, n.older, n.olderB, n.slow = s, n.held, n.heldB, 0
	s.windowed = first.GetStarted().GetWindowed()
	if n.confirm && s.windowed {
		n.confirm, s.awaiting = false, n.nextIDLocked()
	}
	n.mu.Unlock()
	n.readers.Add(1)
	go func() {
		defer n.readers.Done()
		s.read(first)
	}()
	n.grow(s) // some of what was held may be done with since the window was told
}

// take hands messages to the workers; s is nil for polled ones.
func (n *lane) take(s *session, ms []*tierqv1.Message) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s != nil {
		s.taken += uint64(len(ms))
		n.inForceLocked(s)
	}
	if n.stopping {
		return // the stream's end releases them; a poll's messages come again
	}
	now := n.l.c.opts.Clock.Now()
	for _, m := range ms {
		j := &job{Delivery: deliveryOf(m), lane: n, session: s, size: len(m.Body) + len(m.Key), came: now}
		n.held++
		n.heldB += j.size
		if s == nil || s != n.session {
			n.older++
			n.olderB += j.size
		}
		if n.l.shares.took(int(n.number)) {
			n.l.pace.look()
		}
		n.l.leases.add(j)
		if n.l.backlog.push(j) {
			n.l.pace.came()
		}
	}
}

// free gives back what j took of the window.
func (n *lane) free(j *job) {
	n.mu.Lock()
	n.held--
	n.heldB -= j.size
	s := n.session
	older := s == nil || s != j.session
	if older {
		n.older--
		n.olderB -= j.size
	}
	n.mu.Unlock()
	n.l.shares.freed(int(n.number))
	n.tellRoom()
	if older && s != nil {
		n.grow(s)
	}
}

func (n *lane) tellRoom() {
	select {
	case n.room <- struct{}{}:
	default:
	}
}

// resize sets the lane's window and returns the session that is to be told, if there is one. With confirm, shares hears when
// nothing can come any more under the window before.
func (n *lane) resize(window, windowB int, confirm bool) *session {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.window, n.windowB = window, windowB
	switch s := n.session; {
	case !confirm:
	case s != nil && s.windowed:
		s.awaiting, s.known = n.nextIDLocked(), false
	case s == nil && n.opening:
		n.confirm = true
	default: // nobody has it, or a host that does not confirm
		n.confirmLocked()
	}
	n.tellRoom()
	return n.session
}

func (n *lane) nextIDLocked() uint64 {
	n.lastID++
	return n.lastID
}

func (n *lane) confirmLocked() {
	if n.l.shares.confirmed(int(n.number)) {
		n.l.pace.look()
	}
}

// inForce takes the host's word that a window is in force once what was handed out before has come.
func (n *lane) inForce(s *session, w *tierqv1.ConsumeWindowed) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w.GetId() == s.awaiting && !s.known {
		s.known, s.handed = true, w.GetHanded()
		n.inForceLocked(s)
	}
}

func (n *lane) inForceLocked(s *session) {
	if s.awaiting != 0 && s.known && s.taken >= s.handed {
		s.awaiting, s.known = 0, false
		n.confirmLocked()
	}
}

// grow tells the host the part of the window that a session may use, as it is when it is sent: the last word is the newest.
func (n *lane) grow(s *session) {
	s.sendNext(context.Background(), func() *tierqv1.ConsumeRequest {
		n.mu.Lock()
		defer n.mu.Unlock()
		messages, bytes := n.windowLocked(n.older, n.olderB)
		return &tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Window{Window: &tierqv1.ConsumeWindow{Messages: messages, Bytes: bytes, Id: s.awaiting}}}
	})
}

// Hosts take no larger windows.
const (
	maxWindow  = 10_000
	maxWindowB = 64 << 20
)

// windowLocked is what a stream may bring beside what is taken.
func (n *lane) windowLocked(taken, takenB int) (messages, bytes uint32) {
	return uint32(min(max(n.window-taken, 0), maxWindow)), uint32(min(max(n.windowB-takenB, 1), maxWindowB))
}

// stop lets a session bring nothing more; what it has brought may still be settled by it.
func (n *lane) stop(s *session) {
	n.mu.Lock()
	n.stopping = true
	n.mu.Unlock()
	if s != nil {
		s.send(context.Background(), &tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Drain{Drain: true}})
	}
}

// close ends the lane after everything is settled: a clean end releases at once what was on its way.
func (n *lane) close() {
	n.mu.Lock()
	s := n.session
	n.mu.Unlock()
	if s != nil {
		s.closeRequest()
		select {
		case <-s.ended:
		case <-time.After(closeTimeout):
			s.end(nil)
		}
	}
	n.readers.Wait()
}

// poll leases by unary calls until a time.
func (n *lane) poll(ctx context.Context, until time.Time) (worked bool, err error) {
	for n.awaitRoom(ctx) && n.l.c.opts.Clock.Now().Before(until) {
		free, bytes, ok := n.use()
		if !ok {
			continue
		}
		res, err := n.l.c.receive(ctx, n.route(), &n.number, ReceiveOptions{
			Max: min(int(free), maxReceipts), MaxBytes: int(bytes), Wait: n.l.o.Wait, Lease: n.l.o.Lease, Consumer: n.l.o.Consumer,
		})
		n.take(nil, res.GetMessages())
		n.used()
		if err != nil {
			return worked, err
		}
		worked = true
	}
	return worked, nil
}

// settle settles receipts of this partition, by the stream or else by a call.
func (n *lane) settle(ctx context.Context, how *settling, receipts []string) ([]Settled, error) {
	n.mu.Lock()
	s := n.session
	n.mu.Unlock()
	maybe := false
	if s != nil {
		results, sent := s.settle(ctx, how, receipts)
		switch {
		case results != nil:
			out, err := settledOf(receipts, results, false)
			if !elsewhereNow(out, how) {
				return out, err
			}
			// The call's refusal does not undo what the stream may have done.
			maybe = slices.ContainsFunc(out, func(r Settled) bool { return r.Err.Effect == code.EffectMaybe })
		case sent && !how.repeats():
			e := code.Maybe(code.QuorumLost, nil, "the stream broke before the answer: the outcome is unknown")
			return settleAll(receipts, e), e
		default:
			maybe = sent
		}
	}
	out, err := n.l.c.settle(ctx, n.route(), &n.number, how, receipts)
	for i := range out {
		if out[i].Err != nil {
			out[i].Err = sticky(out[i].Err, maybe)
		}
	}
	return out, err
}

// elsewhereNow reports whether a settle was refused as a whole for a reason that a call of its own may get around: another
// host is the home, or the home had no quorum for a moment.
func elsewhereNow(rs []Settled, how *settling) bool {
	for _, r := range rs {
		if r.Err == nil || r.Err.Code != rs[0].Err.Code || judge(r.Err, how.repeats()) != again {
			return false
		}
	}
	return true
}
