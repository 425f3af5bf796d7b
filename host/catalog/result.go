package catalog

import (
	"fmt"

	"github.com/tierq/tierq/queue/code"
)

// Result answers one command.
type Result struct {
	Code   code.Code
	Detail string // with a refusal: the operand or the limit, for a person
	// Version is the view's version after the command; a view of at least that version shows its effect.
	Version uint64
	Index   uint64  // the entry's index
	Fleet   FleetID // InitFleet: the id that stands
	Host    Host    // RegisterHost: the host as it is stored, also on a refusal
	Queue   Queue   // CreateQueue, ConfigureQueue: the queue as it is stored, also on a refusal
}

// Err returns the refusal as an error, nil for OK.
func (r *Result) Err() error {
	if r.Code == code.OK {
		return nil
	}
	return &code.Error{Code: r.Code, Effect: code.EffectNone, Text: r.Detail}
}

const resultVersion = 1

// EncodeResult returns the bytes of a result.
func EncodeResult(r Result) []byte {
	e := &encoder{}
	e.u8(resultVersion)
	e.u16(uint16(r.Code))
	e.str(r.Detail)
	e.u64(r.Version)
	e.u64(r.Index)
	e.b = append(e.b, r.Fleet[:]...)
	e.host(r.Host)
	e.queue(r.Queue)
	return e.b
}

// DecodeResult reads what EncodeResult wrote.
func DecodeResult(b []byte) (Result, error) {
	d := &decoder{b: b}
	var r Result
	if v := d.u8(); v != resultVersion {
		return r, fmt.Errorf("catalog result version %d: %w", v, errMalformed)
	}
	r.Code = code.Code(d.u16())
	r.Detail = d.str()
	r.Version = d.u64()
	r.Index = d.u64()
	copy(r.Fleet[:], d.take(len(r.Fleet)))
	r.Host = d.host()
	r.Queue = d.queue()
	if err := d.end(); err != nil {
		return Result{}, fmt.Errorf("catalog result: %w", err)
	}
	return r, nil
}
