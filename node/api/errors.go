package api

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// toConnect turns a refusal or failure into a Connect error with an ErrorDetail.
func toConnect(err error) error {
	if err == nil {
		return nil
	}
	if ce, ok := err.(*connect.Error); ok { // not errors.As: a *code.Error may be caused by one
		return ce
	}
	e := asCode(err)
	out := connect.NewError(connectCode(e), errors.New(e.Error()))
	if d, derr := connect.NewErrorDetail(Detail(e)); derr == nil {
		out.AddDetail(d)
	}
	return out
}

// asCode finds the *code.Error in err. A deadline that ran out before anything was tried, and any other unexpected
// failure, get codes of their own; the text of an unexpected failure stays in the log.
func asCode(err error) *code.Error {
	var e *code.Error
	if errors.As(err, &e) {
		return e
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return code.Maybe(code.QuorumLost, err, "the time ran out before the outcome was known")
	}
	return code.Maybe(code.Internal, err, "an internal fault: see the host's log")
}

// sentence is what an error says beside its name.
func sentence(e *code.Error) string {
	if e.Text == "" {
		return e.Code.Info().Text
	}
	return e.Text
}

// Detail is the wire form of an error.
func Detail(e *code.Error) *tierqv1.ErrorDetail {
	return &tierqv1.ErrorDetail{
		Code: uint32(e.Code), Name: e.Code.String(), Effect: effect(e.Effect), Text: sentence(e),
		HomeHost: e.HomeHost, HomeApi: e.HomeAPI, Epoch: e.Epoch,
		LeaderHost: e.LeaderHost, LeaderApi: e.LeaderAPI, RetryAfterMs: e.RetryAfterMs,
	}
}

func effect(e code.Effect) tierqv1.Effect {
	switch e {
	case code.EffectNone:
		return tierqv1.Effect_EFFECT_NONE
	case code.EffectMaybe:
		return tierqv1.Effect_EFFECT_MAYBE
	case code.EffectDone:
		return tierqv1.Effect_EFFECT_DONE
	}
	return tierqv1.Effect_EFFECT_UNSPECIFIED
}

// connectCode maps a registry code to the gRPC status that generic clients understand. Unknown outcomes are never
// "unavailable": middleware repeats those by itself.
func connectCode(e *code.Error) connect.Code {
	if e.Effect == code.EffectMaybe {
		if e.Code == code.Internal {
			return connect.CodeInternal
		}
		return connect.CodeDeadlineExceeded
	}
	switch e.Code {
	case code.UnknownQueue, code.UnknownGroup, code.UnknownPartition, code.UnknownMessage, code.UnknownHost:
		return connect.CodeNotFound
	case code.QueueExistsMismatch, code.GroupExistsMismatch:
		return connect.CodeAlreadyExists
	case code.QueueFull, code.Backpressure, code.QuotaExceeded, code.RateLimited, code.StorageHighWatermark,
		code.LimitReached, code.ConsumerLimit, code.MaxWaitingPulls:
		return connect.CodeResourceExhausted
	case code.NotAuthenticated, code.AuthFailed:
		return connect.CodeUnauthenticated
	case code.NotPermitted:
		return connect.CodePermissionDenied
	case code.DeadlineExceeded:
		return connect.CodeDeadlineExceeded
	case code.Internal:
		return connect.CodeInternal
	}
	switch e.Code.Info().Class {
	case code.ClassTransient:
		return connect.CodeUnavailable
	case code.ClassRenegotiate, code.ClassOperator, code.ClassNoop:
		return connect.CodeFailedPrecondition
	}
	return connect.CodeInvalidArgument
}
