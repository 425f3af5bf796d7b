package peer

import (
	"context"
	"errors"
	"net"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/queue/code"
)

// ToConnect makes an error travel with its registry code. One that has none travels as INTERNAL, with effect maybe and
// without its text, which is for this host's log only.
func ToConnect(err error) error {
	if err == nil {
		return nil
	}
	var e *code.Error
	if !errors.As(err, &e) {
		e = &code.Error{Code: code.Internal, Effect: code.EffectMaybe}
	}
	out := connect.NewError(connectCode(e), errors.New(e.Error()))
	detail, derr := connect.NewErrorDetail(&peerv1.ErrorDetail{
		Code: uint32(e.Code), Effect: uint32(e.Effect), Text: e.Text,
		HomeHost: e.HomeHost, HomeApi: e.HomeAPI, Epoch: uint64(e.Epoch),
		LeaderHost: e.LeaderHost, LeaderApi: e.LeaderAPI, RetryAfterMs: e.RetryAfterMs,
	})
	if derr == nil {
		out.AddDetail(detail)
	}
	return out
}

func connectCode(e *code.Error) connect.Code {
	switch e.Code.Info().Class {
	case code.ClassTransient:
		return connect.CodeUnavailable
	case code.ClassOperator:
		return connect.CodeInternal
	default:
		return connect.CodeFailedPrecondition
	}
}

// FromConnect returns what ToConnect sent, as a *code.Error. An error that comes from the way there has effect none if no
// request can have been sent, else maybe.
func FromConnect(err error) error {
	if err == nil {
		return nil
	}
	var own *code.Error
	if errors.As(err, &own) {
		return own
	}
	if e, ok := remote(err); ok {
		return e
	}
	e := &code.Error{Code: code.Unavailable, Effect: code.EffectMaybe, Text: "the other host did not answer: repeat after a pause", Cause: err}
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		e.Effect, e.Text = code.EffectNone, "the other host cannot be reached: repeat after a pause"
	case errors.Is(err, context.DeadlineExceeded), connect.CodeOf(err) == connect.CodeDeadlineExceeded:
		e.Code, e.Text = code.QuorumLost, code.QuorumLost.Info().Text
	}
	return e
}

// remote returns the error that the other host sent.
func remote(err error) (*code.Error, bool) {
	var c *connect.Error
	if !errors.As(err, &c) {
		return nil, false
	}
	for _, d := range c.Details() {
		m, derr := d.Value()
		if derr != nil {
			continue
		}
		if p, ok := m.(*peerv1.ErrorDetail); ok {
			return &code.Error{
				Code: code.Code(p.Code), Effect: code.Effect(p.Effect), Text: p.Text,
				HomeHost: p.HomeHost, HomeAPI: p.HomeApi, Epoch: p.Epoch,
				LeaderHost: p.LeaderHost, LeaderAPI: p.LeaderApi, RetryAfterMs: p.RetryAfterMs,
			}, true
		}
	}
	return nil, false
}
