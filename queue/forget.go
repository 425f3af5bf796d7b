package queue

import (
	"slices"

	"github.com/tierq/tierq/queue/store"
)

const (
	// producerIdle is how long an idle producer is remembered.
	producerIdle Stamp = 24 * 3600 * 1000
	// opKept is how long the answer to an operation id is remembered.
	opKept Stamp = 24 * 3600 * 1000
	// maxForget bounds what one command forgets of each kind.
	maxForget = 1024
)

// forget removes what has run out: dedup ids, operations, idle producers, at most maxForget of each; and producers
// beyond MaxProducers. A clamped command forgets nothing by age. What this command wrote is not looked at: it is new.
func (t *tx) forget() {
	if !t.clamped {
		t.forgetDedups()
		t.forgetOps()
	}
	t.noteExpiries()
	t.forgetProducers()
}

// noteExpiries lowers the bounds to what this command may have written, also when it is clamped: a bound above a
// stored expiry would let this replica keep what one that was opened since forgets.
func (t *tx) noteExpiries() {
	s, clock := t.s, t.meta.Clock
	if len(t.dedups) > 0 {
		s.dedupFrom = min(s.dedupFrom, clock+Stamp(t.meta.Options.DedupMs))
	}
	s.opFrom = min(s.opFrom, clock+opKept)
}

func (t *tx) forgetDedups() {
	s, clock := t.s, t.meta.Clock
	if s.dedupFrom <= clock {
		s.dedupFrom = forgetAged(s.shard, kindDedupAge, clock, func(key []byte) {
			h := dedupHash(key[9:])
			if _, renewed := t.dedups[h]; renewed {
				return // remember has replaced it
			}
			t.b.Delete(key)
			t.b.Delete(appendDedupKey(t.key[:0], h))
		})
	}
}

func (t *tx) forgetOps() {
	s, clock := t.s, t.meta.Clock
	if s.opFrom <= clock {
		s.opFrom = forgetAged(s.shard, kindOpAge, clock, func(key []byte) {
			t.b.Delete(key)
			t.b.Delete(appendKey1(t.key[:0], kindOp, lastU64(key)))
		})
	}
}

// forgetAged calls forget for the keys of an index by age whose time has come, at most maxForget, and returns a
// lower bound of the times left.
func forgetAged(shard *store.Shard, kind byte, clock Stamp, forget func(key []byte)) Stamp {
	it := openIter(shard, []byte{kind}, []byte{kind + 1})
	defer it.Close()
	n := 0
	for ok := it.First(); ok; ok = it.Next() {
		at := Stamp(be.Uint64(it.Key()[1:]))
		if at > clock || n == maxForget {
			return at
		}
		forget(it.Key())
		n++
	}
	check(it.Err())
	return MaxStamp
}

// forgetProducers forgets producers, least recently used first: those beyond MaxProducers, and the idle.
func (t *tx) forgetProducers() {
	c, s := &t.meta.Counters, t.s
	idle := func(use Stamp) bool { return !t.clamped && use+producerIdle <= t.meta.Clock }
	if c.Producers <= MaxProducers && !idle(s.useFrom) {
		return
	}
	it := openIter(s.shard, []byte{kindProducerUse}, []byte{kindProducerUse + 1})
	defer it.Close()
	s.useFrom = t.meta.Clock - t.meta.Clock%useGrain // of what this command writes, at the earliest
	for n, ok := 0, it.First(); ok; ok = it.Next() {
		use, name := producerOfUseKey(it.Key())
		if c.Producers <= MaxProducers && !idle(use) || n == maxForget {
			s.useFrom = min(s.useFrom, use)
			return
		}
		if slices.ContainsFunc(t.producers, func(x *producer) bool { return x.name == name && x.changed }) {
			continue
		}
		t.b.Delete(it.Key())
		t.b.Delete(appendProducerKey(t.key[:0], name))
		delete(s.producers, name)
		c.Producers--
		n++
	}
	check(it.Err())
}

// forgetOutboxes forgets the named outboxes.
func (t *tx) forgetOutboxes(list []Producer) {
	for _, name := range list {
		key := appendProducerKey(t.key[:0], name)
		if !t.has(key) {
			continue
		}
		t.b.Delete(key)
		delete(t.s.producers, name)
		t.meta.Counters.Producers--
	}
}
