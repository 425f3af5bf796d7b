package queue

import "github.com/tierq/tierq/queue/code"

// How far a Recovery moves what may have been given out beyond the state that it continues from. Part of the format.
const (
	recoveryEpochs    Epoch   = 1 << 32
	recoveryAddresses Address = 1 << 20
	recoveryExports   uint64  = 1 << 20
)

// Recovery begins a new life of a shard whose state is an older one than what the world has seen: after a restore, or a forced
// recovery. It rides in a Retention.
type Recovery struct {
	Expected uint64 // the recovery number that it was decided on
}

// recover applies a Recovery:
//
//	recovery number   + 1: receipts of before are refused
//	groups            epoch + 2^32 and no home; recorded leases are over; the next export number + 2^20
//	addresses         the next one + 2^20, so that none is given out twice; those between exist for nobody
//	producers         client producers must register again: ProducerEpochStale until they come with a greater epoch
//	import            ends
//
// Attempts, delays and dead letters stay. Refused: MutationFenced, with the number in Result.Version, unless Expected is the
// stored one, and while the chunks of an import are not complete.
func (t *tx) recover(c *Recovery, r *Result) {
	m := &t.meta
	r.Version = m.RecoveryNumber
	if c.Expected != m.RecoveryNumber || t.imp != nil && !t.imp.loaded {
		r.Code = code.MutationFenced
		return
	}
	m.RecoveryNumber++
	r.Version = m.RecoveryNumber
	t.skipAddresses()
	for _, id := range t.liveGroups() {
		t.renewGroup(t.edit(id))
		t.event.Groups = append(t.event.Groups, id)
	}
	t.b.DeleteRange([]byte{kindLease}, []byte{kindLease + 1})
	if t.imp != nil {
		t.b.Delete(importKey)
		t.imp = nil
	}
}

// skipAddresses leaves a gap behind the last address. It is recorded as gone: a group must not wait for what lies in it.
func (t *tx) skipAddresses() {
	m := &t.meta
	from, to := m.Last, min(m.Last+recoveryAddresses, MaxAddress)
	if to == from {
		return
	}
	t.gone = t.s.gone.clone()
	for l := range lanes {
		first := firstInLane(l, from)
		if n := laneCount(l, from, to); n > 0 {
			t.addRange(t.gone, laneRange{first, first + Address((n-1)*lanes)})
		}
	}
	m.Last = to
}

func (t *tx) renewGroup(g *group) {
	g.epoch += recoveryEpochs
	g.home, g.homeIndex, g.released = 0, t.index, false
	g.exported += recoveryExports
	g.c.Leased = 0
	for l := range lanes {
		g.setNext(l, t.freeFrom(g, g.next[l]))
	}
}
