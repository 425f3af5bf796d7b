package client

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/code"
)

// asError turns what a call returned into a *code.Error. answered reports whether a TierQ host spoke: else the network
// failed. sent says that bytes of the request may have left this process; mutates that the call changes something, so
// that a lost answer is an unknown outcome.
func asError(err error, addr string, sent, mutates bool) (e *code.Error, answered bool) {
	var known *code.Error
	if errors.As(err, &known) {
		return known, true
	}
	var ce *connect.Error
	if errors.As(err, &ce) && connect.IsWireError(err) {
		if e := fromDetail(ce); e != nil {
			return e, true
		}
		return fromStatus(ce, addr, mutates), true
	}
	effect := code.EffectNone
	if sent && mutates && !certs.Refused(err) {
		effect = code.EffectMaybe
	}
	if local := fromLocal(ce, addr, effect); local != nil {
		return local, true
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || (ce != nil && ce.Code() == connect.CodeDeadlineExceeded) {
		return timedOut(err, addr, effect), false
	}
	return &code.Error{Code: unreachableCode(effect), Effect: effect, Text: unreachableText(addr, effect, err), Cause: err}, false
}

func fromDetail(ce *connect.Error) *code.Error {
	for _, d := range ce.Details() {
		v, err := d.Value()
		if err != nil {
			continue
		}
		m, ok := v.(*tierqv1.ErrorDetail)
		if !ok {
			continue
		}
		e := errorOf(m)
		e.Cause = ce
		return e
	}
	return nil
}

func effectOf(e tierqv1.Effect, c code.Code) code.Effect {
	switch e {
	case tierqv1.Effect_EFFECT_MAYBE:
		return code.EffectMaybe
	case tierqv1.Effect_EFFECT_DONE:
		return code.EffectDone
	case tierqv1.Effect_EFFECT_NONE:
		return code.EffectNone
	}
	if c == code.QuorumLost {
		return code.EffectMaybe
	}
	return code.EffectNone
}

// fromStatus reads an answer without a detail: from a proxy, from connect's own checks, or from a handler that panicked.
func fromStatus(ce *connect.Error, addr string, mutates bool) *code.Error {
	unknown := code.EffectNone
	if mutates {
		unknown = code.EffectMaybe
	}
	e := &code.Error{Effect: code.EffectNone, Text: addr + " answered: " + ce.Message(), Cause: ce}
	switch ce.Code() {
	case connect.CodeInvalidArgument:
		e.Code = code.InvalidArgument
	case connect.CodeResourceExhausted:
		e.Code = code.TooLarge
	case connect.CodeUnauthenticated:
		e.Code = code.NotAuthenticated
	case connect.CodePermissionDenied:
		e.Code = code.AuthFailed
	case connect.CodeUnimplemented:
		e.Code, e.Text = code.Malformed, addr+" does not speak tierq.v1 or lacks this call: check the address and its version"
	case connect.CodeUnavailable:
		e.Code, e.Effect = unreachableCode(unknown), unknown
	case connect.CodeDeadlineExceeded, connect.CodeCanceled:
		return timedOut(ce, addr, unknown)
	default:
		e.Code, e.Effect = code.Internal, unknown
	}
	return e
}

// fromLocal reads an error that connect made in this process and that says something about the answer, not about the
// network.
func fromLocal(ce *connect.Error, addr string, unknown code.Effect) *code.Error {
	switch {
	case ce == nil:
		return nil
	case ce.Code() == connect.CodeResourceExhausted && strings.Contains(ce.Message(), "configured max"):
		return &code.Error{Code: code.TooLarge, Effect: unknown, Text: "the answer is larger than this client reads: ask for less", Cause: ce}
	case ce.Code() == connect.CodeUnimplemented:
		return &code.Error{Code: code.Malformed, Effect: code.EffectNone, Text: addr + " does not speak tierq.v1: check the address", Cause: ce}
	}
	return nil
}

func timedOut(cause error, addr string, effect code.Effect) *code.Error {
	if effect == code.EffectMaybe {
		return code.Maybe(code.QuorumLost, cause, "%s did not answer in time: the outcome is unknown", addr)
	}
	return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Text: addr + " did not answer in time", Cause: cause}
}

func unreachableCode(e code.Effect) code.Code {
	if e == code.EffectMaybe {
		return code.QuorumLost
	}
	return code.Unavailable
}

func unreachableText(addr string, e code.Effect, err error) string {
	if why := certs.Explain(err); why != "" && e != code.EffectMaybe {
		return "no TLS connection to " + addr + ": " + why
	}
	if e == code.EffectMaybe {
		return "the connection to " + addr + " broke before the answer: the outcome is unknown"
	}
	return "cannot reach " + addr + ": check the address and that the host runs"
}

// verdict is what to do about a failed try.
type verdict uint8

const (
	// giveUp: the caller gets the error.
	giveUp verdict = iota + 1
	// again: repeat after a pause, elsewhere if there is an elsewhere.
	again
	// lost: repeat elsewhere; this address will not serve us.
	lost
)

// judge decides about one error. idempotent says that repeating a call of unknown outcome is harmless.
func judge(e *code.Error, idempotent bool) verdict {
	if e.Effect != code.EffectNone && !idempotent {
		return giveUp
	}
	switch e.Code {
	case code.NotAuthenticated, code.WrongFleet:
		return lost
	case code.NotOwner, code.NotReplica, code.StaleLeader, code.LeaseExpired, code.StaleGeneration,
		code.ClockSkew, code.Divergent, code.DeadlineExceeded:
		return again
	case code.GroupPaused, code.MaxWaitingPulls, code.ConsumerLimit, code.DeadTargetDown:
		return giveUp // the caller decides how long that is worth waiting for
	}
	if e.Code.Info().Class == code.ClassTransient {
		return again
	}
	return giveUp
}

// sticky returns e as the outcome of a call whose earlier try may have been applied: a later refusal does not undo it.
func sticky(e *code.Error, maybe bool) *code.Error {
	if !maybe || e.Effect == code.EffectMaybe {
		return e
	}
	return code.Maybe(code.QuorumLost, e, "the outcome is unknown; the last try said: %s", e.Error())
}
