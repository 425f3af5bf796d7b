package client

import (
	"context"
	"errors"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// apis are the stubs of one address, each service's made when it is used first: most clients use few of them, and there may be many clients.
type apis struct {
	addr   string
	queue  func() tierqv1connect.QueueServiceClient
	group  func() tierqv1connect.GroupServiceClient
	status func() tierqv1connect.StatusServiceClient
	admin  func() tierqv1connect.AdminServiceClient
	stream func() tierqv1connect.StreamServiceClient
	fleet  func() tierqv1connect.FleetServiceClient
	access func() tierqv1connect.AccessServiceClient

	snapshot func() tierqv1connect.SnapshotServiceClient
}

// maxResponseBytes bounds one answer: a receive returns 4 MiB by default, and one message of 16 MiB whatever is asked.
const maxResponseBytes = 64 << 20

func newAPIs(hc connect.HTTPClient, scheme, addr string) *apis {
	base := scheme + "://" + addr
	return &apis{
		addr:   addr,
		queue:  stubs(tierqv1connect.NewQueueServiceClient, hc, base),
		group:  stubs(tierqv1connect.NewGroupServiceClient, hc, base),
		status: stubs(tierqv1connect.NewStatusServiceClient, hc, base),
		admin:  stubs(tierqv1connect.NewAdminServiceClient, hc, base),
		stream: stubs(tierqv1connect.NewStreamServiceClient, hc, base),
		fleet:  stubs(tierqv1connect.NewFleetServiceClient, hc, base),
		access: stubs(tierqv1connect.NewAccessServiceClient, hc, base),

		snapshot: stubs(tierqv1connect.NewSnapshotServiceClient, hc, base),
	}
}

func stubs[T any](of func(connect.HTTPClient, string, ...connect.ClientOption) T, hc connect.HTTPClient, base string) func() T {
	return sync.OnceValue(func() T {
		return of(hc, base,
			connect.WithReadMaxBytes(maxResponseBytes),
			connect.WithAcceptCompression("gzip", nil, nil), // the network is near: bytes are cheaper than gzip
		)
	})
}

// stub picks a method of one address's stubs.
type stub[Req, Res any] func(*apis) func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error)

// how says how a call may be tried.
type how struct {
	to route
	// mutates: a lost answer is an unknown outcome.
	mutates bool
	// idempotent: a call of unknown outcome may be repeated.
	idempotent bool
	// wait is how long the host may hold the call by design (long poll).
	wait time.Duration
	// timeout replaces CallTimeout for a context without a deadline.
	timeout time.Duration
	// brisk: the first tries are shorter than AttemptTimeout, see briskTry.
	brisk bool
	// failed, if set, hears of every try that failed.
	failed func(*code.Error)
	// from, if set, receives the address that answered.
	from *string
}

// maxHops bounds the redirects that are followed without a pause.
const maxHops = 4

// call does one call: it picks a host, follows hints, and tries again as far as h and the error allow, until ctx ends.
// The error is a *code.Error; once a try may have been applied its effect stays EffectMaybe, unless a later try answers.
func call[Req, Res any](ctx context.Context, c *Client, h how, f stub[Req, Res], req *Req) (*Res, error) {
	ctx, cancel := c.bound(ctx, h)
	defer cancel()
	t := &tries{c: c, h: h}
	for {
		l, err := t.next(ctx)
		if err != nil {
			return nil, err
		}
		res, e := try(ctx, c, h, t.timeout(ctx), l, f, req)
		if e == nil {
			if h.from != nil {
				*h.from = l.addr
			}
			return res, nil
		}
		if err := t.after(ctx, l, e); err != nil {
			return nil, err
		}
	}
}

// bound gives ctx a deadline if it has none, and ends it when the client closes.
func (c *Client) bound(ctx context.Context, h how) (context.Context, context.CancelFunc) {
	timeout := c.opts.CallTimeout + h.wait
	if h.timeout > 0 {
		timeout = h.timeout
	}
	cancelTimeout := context.CancelFunc(func() {})
	if _, ok := ctx.Deadline(); !ok {
		ctx, cancelTimeout = context.WithTimeout(ctx, timeout)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.base, func() { cancel(errClosed()) })
	return ctx, func() { stop(); cancel(nil); cancelTimeout() }
}

// tries is the memory of one call over its tries.
type tries struct {
	c       *Client
	h       how
	last    *code.Error
	maybe   bool
	n       int // tries so far
	hops    int
	refused int
	avoid   string
}

// next waits for a host to try.
func (t *tries) next(ctx context.Context) (*link, error) {
	for {
		if ctx.Err() != nil {
			return nil, t.outOfTime(ctx)
		}
		l, wait, fatal := t.c.router.pick(t.h.to, t.avoid)
		switch {
		case l != nil:
			return l, nil
		case fatal != nil:
			return nil, sticky(fatal, t.maybe)
		case t.c.opts.FailFast && t.last != nil && t.c.router.allFailed():
			return nil, sticky(t.last, t.maybe)
		}
		if err := t.c.sleep(ctx, wait); err != nil {
			return nil, t.outOfTime(ctx)
		}
	}
}

// after decides about a failed try: nil means try again, now.
func (t *tries) after(ctx context.Context, l *link, e *code.Error) error {
	t.maybe = t.maybe || e.Effect == code.EffectMaybe
	if t.last == nil || e.Code != code.DeadlineExceeded || ctx.Err() == nil {
		t.last = e // a try that the caller's deadline cut short says less than the one before it
	}
	if t.h.failed != nil {
		t.h.failed(e)
	}
	switch judge(e, t.h.idempotent) {
	case giveUp:
		return sticky(e, t.maybe)
	case lost:
		t.c.router.moveOn(l.addr)
		return nil
	}
	if t.redirected(l, e) {
		return nil
	}
	t.avoid = ""
	if hostBound(t.h.to, e.Code) {
		t.avoid = l.addr
		t.c.router.moveOn(l.addr)
	}
	if e.Cause != nil && !answeredError(e) {
		return nil // the link pauses; with another address at hand this call does not
	}
	if err := t.c.sleep(ctx, t.c.retryPause(t.refused, e)); err != nil {
		return t.outOfTime(ctx)
	}
	t.refused++
	return nil
}

// redirected follows the hint of e, unless it leads back, to a host in backoff, or too often.
func (t *tries) redirected(l *link, e *code.Error) bool {
	addr := ""
	switch t.h.to.kind {
	case toHome:
		addr = e.HomeAPI
	case toLeader:
		addr = e.LeaderAPI
	}
	if addr = t.c.router.hint(t.h.to, addr, l.addr); addr == "" {
		t.c.router.forget(t.h.to, l.addr)
		return false
	}
	if addr == l.addr || t.hops >= maxHops || !t.c.router.usable(addr) {
		t.hops = 0
		return false
	}
	t.hops++
	t.avoid = ""
	return true
}

// outOfTime is the error of a call whose context ended: the last refusal if there is one, since it says why.
func (t *tries) outOfTime(ctx context.Context) error {
	cause := context.Cause(ctx)
	var closed *code.Error
	if errors.As(cause, &closed) {
		return sticky(closed, t.maybe)
	}
	if t.maybe {
		return code.Maybe(code.QuorumLost, errors.Join(cause, t.last), "the time ran out and the outcome is unknown; the last try said: %s", t.last.Error())
	}
	if t.last == nil && t.c.router.allFailed() {
		return t.c.noHostAnswers(cause)
	}
	if t.last == nil {
		return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: cause}
	}
	e := *t.last
	e.Cause = errors.Join(cause, e.Cause)
	return &e
}

func (c *Client) noHostAnswers(cause error) *code.Error {
	return &code.Error{Code: code.Unavailable, Effect: code.EffectNone, Text: "no host answers at " + c.router.list() + ": check the addresses and that the hosts run", Cause: cause}
}

// try does one try at one host and tells its link how it went.
func try[Req, Res any](ctx context.Context, c *Client, h how, timeout time.Duration, l *link, f stub[Req, Res], req *Req) (*Res, *code.Error) {
	began := time.Now()
	sent := new(atomic.Bool)
	tctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tctx = httptrace.WithClientTrace(tctx, &httptrace.ClientTrace{
		// From here the request may be on the wire, also after this try was given up.
		GotConn: func(httptrace.GotConnInfo) { sent.Store(true) },
	})
	res, err := f(c.apisOf(l.addr))(tctx, connect.NewRequest(req))
	if err == nil {
		l.answered()
		return res.Msg, nil
	}
	e, answered := asError(err, l.addr, sent.Load(), h.mutates)
	switch {
	case !answered:
		// A caller that went away says nothing about the host; one whose time ran out does, if it waited long enough.
		if ctx.Err() == nil || (errors.Is(context.Cause(ctx), context.DeadlineExceeded) && time.Since(began) >= patience+h.wait) {
			c.router.failed(l)
			c.wantRefresh()
		}
	case e.Code == code.NotAuthenticated || e.Code == code.WrongFleet || e.Code == code.AuthFailed:
		l.refused(e)
	default:
		l.answered()
	}
	return nil, e
}

// patience is how long a host may be silent before a caller's own short deadline counts against it.
const patience = 500 * time.Millisecond

// briskTry is how long the first try of a publish may take, doubled by each further one up to AttemptTimeout: a host
// that sends it on to a leader that has just died cannot know better for a while, and the same seqs may go elsewhere.
const briskTry = 2 * time.Second

// timeout bounds the next try. It leaves half of the time to a second host if the call may be repeated.
func (t *tries) timeout(ctx context.Context) time.Duration {
	d := t.c.opts.AttemptTimeout + t.h.wait
	if t.h.brisk {
		d = min(d, briskTry<<min(t.n, 10))
	}
	t.n++
	if deadline, ok := ctx.Deadline(); ok && t.h.idempotent && t.h.wait == 0 {
		if half := time.Until(deadline) / 2; half < d {
			d = max(half, patience)
		}
	}
	return d
}

// hostBound reports whether c says something about the host that answered, so that another one may do better. A home without
// a quorum may be cut off: the others know where the group is by now.
func hostBound(to route, c code.Code) bool {
	switch c {
	case code.QuorumLost, code.ReadOnlyDegraded:
		return to.kind == toHome
	case code.NotOwner, code.NotReplica, code.StaleLeader, code.LeaseExpired, code.StaleGeneration, code.NoLeader,
		code.ShuttingDown, code.ClockSkew, code.Divergent, code.Unavailable, code.DeadlineExceeded, code.AuthFailed:
		return true
	}
	return false
}

// answeredError reports whether a host spoke: its errors carry connect's as cause and were read off the wire.
func answeredError(e *code.Error) bool {
	var ce *connect.Error
	return errors.As(e.Cause, &ce) && connect.IsWireError(e.Cause)
}

// electionPause bounds the pause while the fleet chooses a leader or a home, which takes one to three seconds: who asks a few times a
// second learns of the new one soon after it is there.
const electionPause = 300 * time.Millisecond

// retryPause is the pause after the nth refusal: what the host asked for, or full jitter over a doubling bound.
func (c *Client) retryPause(n int, e *code.Error) time.Duration {
	limit := c.opts.RetryCap
	switch e.Code {
	case code.NotOwner, code.NoLeader, code.StaleLeader:
		limit = min(limit, electionPause)
	}
	d := c.jitter(c.opts.RetryBase, limit, n)
	if asked := time.Duration(e.RetryAfterMs) * time.Millisecond; asked > 0 {
		d = asked + c.jitter(asked, c.opts.RetryCap, 0)/4
	}
	return max(d, time.Millisecond)
}

// reconnectPause is the pause of a link before its nth reconnect.
func (c *Client) reconnectPause(n int) time.Duration {
	return c.jitter(c.opts.ReconnectBase, c.opts.ReconnectCap, n)
}

// jitter draws from [0, min(cap, base × 2^n)).
func (c *Client) jitter(base, limit time.Duration, n int) time.Duration {
	d := limit
	if n < 30 && base<<n < limit {
		d = base << n
	}
	return time.Duration(c.opts.Rand() * float64(d))
}

// sleep waits for d or until ctx ends.
func (c *Client) sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	select {
	case <-c.opts.Clock.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
