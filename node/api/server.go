package api

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Bounds of a call.
const (
	// maxRequestBytes bounds a request's encoded bytes: the greatest message and room for its headers.
	maxRequestBytes = 24 << 20
	// defaultDeadline holds for calls without a deadline of their own, and longPollSlack is added to a receive's wait.
	defaultDeadline = 10 * time.Second
	longPollSlack   = 10 * time.Second
	// maxWait bounds a receive's wait.
	maxWait = 20 * time.Second
	// maxReceive bounds the messages of one receive, maxSettle the receipts of one settle.
	maxReceive = 1000
	// maxReceiveBytes bounds the bytes of one receive, but for the first message: an answer is held in memory here, and clients take 64 MiB.
	maxReceiveBytes = 32 << 20
	maxSettle       = 1000
)

// Server serves tierq.v1 over a Backend. Forward is nil on the peer API: there a call that belongs elsewhere is
// refused with the right host's name, so that a call is forwarded at most twice, by the host that took it.
type Server struct {
	backend Backend
	forward Forward
	log     *zap.Logger
	turns   *turns
	// onForward and onRefusal count; they may be nil.
	onForward func()
	onRefusal func(code.Code)
	admit     func(ctx context.Context, messages int) error
}

// Forward returns the client and base URL of a host's peer API.
type Forward func(host uint64) (client *http.Client, baseURL string)

// Mux is where handlers are registered; *http.ServeMux is one.
type Mux interface {
	Handle(pattern string, handler http.Handler)
}

// Options configure a Server.
type Options struct {
	Backend Backend
	// Forward finds other hosts' peer APIs; nil refuses calls that belong elsewhere.
	Forward   Forward
	Logger    *zap.Logger
	OnForward func()
	OnRefusal func(code.Code)
	// Admit may refuse the messages of a publish before anything is done with them; nil admits all.
	Admit func(ctx context.Context, messages int) error
}

// NewServer makes a server; register its handlers with Mount.
func NewServer(o Options) *Server {
	s := &Server{turns: new(turns), backend: o.Backend, forward: o.Forward, log: o.Logger, onForward: o.OnForward, onRefusal: o.OnRefusal, admit: o.Admit}
	if s.log == nil {
		s.log = zap.NewNop()
	}
	if s.onForward == nil {
		s.onForward = func() {}
	}
	if s.onRefusal == nil {
		s.onRefusal = func(code.Code) {}
	}
	if s.admit == nil {
		s.admit = func(context.Context, int) error { return nil }
	}
	return s
}

// Mount registers the services on mux.
func (s *Server) Mount(mux Mux) {
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxRequestBytes),
		connect.WithCompressMinBytes(math.MaxInt), // compressing answers costs more CPU than the network they save
		connect.WithInterceptors(connect.UnaryInterceptorFunc(s.intercept)),
	}
	mux.Handle(tierqv1connect.NewQueueServiceHandler(queueService{s}, opts...))
	mux.Handle(tierqv1connect.NewGroupServiceHandler(groupService{s}, opts...))
	mux.Handle(tierqv1connect.NewAdminServiceHandler(adminService{s}, opts...))
	mux.Handle(tierqv1connect.NewStatusServiceHandler(statusService{s}, opts...))
	mux.Handle(tierqv1connect.NewFleetServiceHandler(fleetService{s}, opts...))
	mux.Handle(tierqv1connect.NewAccessServiceHandler(accessService{s}, opts...))
	mux.Handle(tierqv1connect.NewSnapshotServiceHandler(snapshotService{s}, opts...))
	mux.Handle(tierqv1connect.NewStreamServiceHandler(streamService{s}, opts...))
}

// intercept gives every call a deadline, and every error its details.
func (s *Server) intercept(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, deadlineOf(req.Any()))
			defer cancel()
		}
		resp, err := next(ctx, req)
		if err == nil {
			return resp, nil
		}
		if _, ok := err.(*connect.Error); !ok {
			e := asCode(err)
			s.onRefusal(e.Code)
			if e.Code == code.Internal {
				s.log.Error("call failed", zap.String("procedure", req.Spec().Procedure), zap.Error(err))
			}
		}
		return nil, toConnect(err)
	}
}

func deadlineOf(req any) time.Duration {
	r, ok := req.(interface{ GetWaitMs() uint32 })
	if !ok {
		return defaultDeadline
	}
	return time.Duration(r.GetWaitMs())*time.Millisecond + longPollSlack
}

// elsewhere forwards a call that another host must answer to that host's peer API, and once more if that one knows better: a host
// without a replica of the partition does not know who is the home of a group.
func elsewhere[Req, Resp any](ctx context.Context, s *Server, err error, req *Req,
	call func(ctx context.Context, host uint64, req *connect.Request[Req]) (*connect.Response[Resp], error)) (*connect.Response[Resp], error) {
	var e *ElsewhereError
	if !errors.As(err, &e) {
		return nil, err
	}
	if s.forward == nil || e.Host == 0 {
		return nil, e.Cause
	}
	s.onForward()
	resp, err := call(ctx, e.Host, connect.NewRequest(req))
	if err == nil {
		return resp, nil
	}
	err = forwardFailure(err)
	next := s.nextHop(e.Host, detailOf(err))
	if next == 0 {
		return nil, err
	}
	s.onForward()
	if resp, err = call(ctx, next, connect.NewRequest(req)); err != nil {
		return nil, forwardFailure(err)
	}
	return resp, nil
}

// nextHop is the host that a refusal without effect names as the right one, 0 if it names none but the one that was asked, or
// this one.
func (s *Server) nextHop(asked uint64, refusal *tierqv1.ErrorDetail) uint64 {
	switch code.Code(refusal.GetCode()) {
	case code.NotOwner, code.NotReplica, code.StaleLeader:
	default:
		return 0
	}
	next := cmp.Or(refusal.GetHomeHost(), refusal.GetLeaderHost())
	if refusal.GetEffect() != tierqv1.Effect_EFFECT_NONE || next == 0 || next == asked || next == s.backend.Fleet().Self {
		return 0
	}
	return next
}

// unreachedRetry is when a caller should repeat what could not be forwarded because nothing listens at the other host: it has probably ended, and this
// host learns of that in less.
const unreachedRetry = 50

// forwardFailure passes the other host's refusal on as it is, and turns a transport failure into an unknown outcome.
func forwardFailure(err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) && len(ce.Details()) > 0 {
		out := connect.NewError(ce.Code(), errors.New(ce.Message()))
		for _, d := range ce.Details() {
			out.AddDetail(d)
		}
		return out
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return &code.Error{Code: code.Unavailable, Effect: code.EffectNone, RetryAfterMs: unreachedRetry, Cause: err}
	}
	return code.Maybe(code.QuorumLost, err, "the host that serves this did not answer: the outcome is unknown")
}
