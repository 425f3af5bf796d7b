package queue

import (
	"crypto/sha256"

	"github.com/tierq/tierq/queue/code"
)

// once runs a command with an operation id unless that id was answered before: then the first answer is given again
// and nothing changes. Another command under an id that was used is refused with MutationFenced. Refusals are kept
// too, so that a late copy of a refused command stays refused.
func (t *tx) once(id, fingerprint uint64, r *Result, apply func()) {
	if id == 0 {
		apply()
		return
	}
	var known opValue
	found, err := t.r.View(appendKey1(t.key[:0], kindOp, id), known.decode)
	check(err)
	if !found {
		apply()
		t.keepOp(id, fingerprint, r)
		return
	}
	if known.fingerprint != fingerprint {
		r.Code = code.MutationFenced
		return
	}
	first, err := DecodeResult(known.result)
	if err != nil {
		check(corruptf("operation %d: %v", id, err))
	}
	*r = first
}

func (t *tx) keepOp(id, fingerprint uint64, r *Result) {
	v := opValue{expiresAt: t.meta.Clock + opKept, fingerprint: fingerprint, result: EncodeResult(nil, r)}
	t.b.Set(appendKey1(t.key[:0], kindOp, id), v.encode(t.val[:0]))
	t.b.Set(appendKey2(t.key[:0], kindOpAge, uint64(v.expiresAt), id), nil)
}

// groupFingerprint and retentionFingerprint name what a command asks for, whenever it was stamped.
func groupFingerprint(c *Group) uint64 {
	if c.OperationID == 0 {
		return 0
	}
	same := *c
	same.Stamp, same.FirstHome = 0, 0
	return fingerprint(&same)
}

func retentionFingerprint(c *Retention) uint64 {
	if c.OperationID == 0 {
		return 0
	}
	same := *c
	same.Stamp = 0
	return fingerprint(&same)
}

func fingerprint(c Command) uint64 {
	sum := sha256.Sum256(appendCommand(nil, c))
	return be.Uint64(sum[:])
}
