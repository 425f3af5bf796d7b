// Package code is the registry of result codes that the state machine, the listeners, and the client share: number,
// name, segment, what a repeat may do, and a sentence that names the fix. Numbers are never reused and never change
// meaning; unassigned numbers decode to themselves and read "UNKNOWN(0x....)".
package code

import "fmt"

// Code is a registered outcome. The zero value is invalid on purpose: a result that was never set is not success.
type Code uint16

// Effect says what a failed call did.
type Effect uint8

const (
	// EffectNone: nothing was stored or changed, now or later.
	EffectNone Effect = 1
	// EffectMaybe: the outcome is unknown; repeat with the same idempotency key.
	EffectMaybe Effect = 2
	// EffectDone: it took effect (warnings beside an OK).
	EffectDone Effect = 3
)

// Error is a failure or a refusal on its way to a caller.
type Error struct {
	Code   Code
	Effect Effect
	// Text adds to the registry's sentence: the operand, the limit, the name. It leaks nothing internal.
	Text string
	// Home, HomeAPI and Epoch tell where to go for NotOwner; Leader and LeaderAPI for a leader's work.
	HomeHost   uint64
	HomeAPI    string
	Epoch      uint64
	LeaderHost uint64
	LeaderAPI  string
	// RetryAfterMs is a hint; 0: none.
	RetryAfterMs uint32
	// Cause is for logs only.
	Cause error
}

// New makes a refusal without effect.
func New(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Effect: EffectNone, Text: fmt.Sprintf(format, args...)}
}

// Maybe makes a failure whose outcome is unknown.
func Maybe(c Code, cause error, format string, args ...any) *Error {
	return &Error{Code: c, Effect: EffectMaybe, Text: fmt.Sprintf(format, args...), Cause: cause}
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s (0x%04x): %s", e.Code, uint16(e.Code), e.Code.Info().Text)
	}
	return fmt.Sprintf("%s (0x%04x): %s", e.Code, uint16(e.Code), e.Text)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }
