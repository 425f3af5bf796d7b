package queue

import (
	"slices"
	"sort"

	"github.com/tierq/tierq/queue/code"
)

// lookup finds the address of a seq that was accepted.
func (p *producerValue) lookup(s Seq) (Address, bool) {
	i := sort.Search(len(p.runs), func(i int) bool { return p.runs[i].seq > s }) - 1
	if i < 0 || s-p.runs[i].seq >= Seq(p.runs[i].n) {
		return 0, false
	}
	return p.runs[i].first + Address(s-p.runs[i].seq), true
}

// admits says whether a seq that is not a duplicate may be new.
//
// A client that does not say its low is not held to the window: its low follows its greatest seq.
func (p *producerValue) admits(s, low Seq, contiguous bool) code.Code {
	switch {
	case s < p.low:
		return code.SeqExpired
	case low != 0 && s > p.low+ProducerWindow:
		return code.Backpressure
	case contiguous && p.last != 0 && s != p.last+1:
		return code.SeqGap
	}
	return code.OK
}

// renew takes up a publish's epoch and low, under the shard's recovery number.
func (p *producerValue) renew(c *Publish, recovery uint64) {
	if c.ProducerEpoch > p.epoch {
		p.epoch, p.low, p.last, p.runs = c.ProducerEpoch, 0, 0, nil
	}
	p.recovery = recovery
	p.raise(c.Low)
}

// raise moves low up and drops the runs below it.
func (p *producerValue) raise(low Seq) {
	if low <= p.low {
		return
	}
	p.low = low
	n := 0
	for n < len(p.runs) && p.runs[n].seq+Seq(p.runs[n].n) <= low {
		n++
	}
	p.runs = slices.Delete(p.runs, 0, n)
	if len(p.runs) > 0 && p.runs[0].seq < low {
		r := &p.runs[0]
		d := low - r.seq
		r.seq, r.first, r.n = low, r.first+Address(d), r.n-uint64(d)
	}
}

// record notes that a seq was answered with an address. It may have been before. Low 0 means that the client did
// not say its own, so it follows the greatest seq.
func (p *producerValue) record(s Seq, a Address, low Seq) {
	if _, known := p.lookup(s); !known {
		p.insert(s, a)
	}
	p.last = max(p.last, s)
	if low == 0 && p.last > defaultLowDistance {
		p.raise(p.last - defaultLowDistance)
	}
	if p.low == 0 {
		p.low = 1
	}
}

func (p *producerValue) insert(s Seq, a Address) {
	i := sort.Search(len(p.runs), func(i int) bool { return p.runs[i].seq > s })
	if i > 0 {
		if b := &p.runs[i-1]; b.seq+Seq(b.n) == s && b.first+Address(b.n) == a {
			b.n++
			p.join(i)
			return
		}
	}
	p.runs = slices.Insert(p.runs, i, run{s, a, 1})
	p.join(i + 1)
}

// join merges run i into the one before it, if they fit.
func (p *producerValue) join(i int) {
	if i >= len(p.runs) {
		return
	}
	b, r := &p.runs[i-1], p.runs[i]
	if b.seq+Seq(b.n) == r.seq && b.first+Address(b.n) == r.first {
		b.n += r.n
		p.runs = slices.Delete(p.runs, i, i+1)
	}
}

// producerOf finds or makes the record of a publish's producer; nil for none. Making one changes nothing stored.
func (e *enqueuer) producerOf(p *Publish) *producer {
	if p.Producer.Kind == ProducerNone {
		return nil
	}
	for _, x := range e.producers {
		if x.name == p.Producer {
			return x
		}
	}
	x := &producer{name: p.Producer}
	x.v, x.stored = e.s.producer(p.Producer)
	x.usedAt = x.v.use
	e.producers = append(e.producers, x)
	return x
}

// producer returns a producer's record, which the one who applies may change.
func (s *QueueStateMachine) producer(name Producer) (v *producerValue, stored bool) {
	if v, ok := s.producers[name]; ok {
		return v, true
	}
	v = &producerValue{}
	ok, err := s.shard.View(appendProducerKey(nil, name), v.decode)
	check(err)
	if ok {
		s.cacheProducer(name, v)
	}
	return v, ok
}

func (s *QueueStateMachine) cacheProducer(name Producer, v *producerValue) {
	if len(s.producers) >= s.opts.ProducerCache {
		for victim := range s.producers { // any will do: the cache decides nothing
			delete(s.producers, victim)
			break
		}
	}
	s.producers[name] = v
}

// stale says whether a publish's producer must register first: its epoch is an older one, or it goes on with a sequence of before
// the shard's last recovery. One that the state does not know may have lost messages in that recovery, unless it only begins:
// what it comes with is then remembered, and a greater epoch demanded, once.
func (e *enqueuer) stale(x *producer, p *Publish) bool {
	if p.ProducerEpoch < x.v.epoch {
		return true
	}
	now := e.meta.RecoveryNumber
	switch {
	case now == 0 || p.Producer.Kind == ProducerOutbox:
		return false
	case x.stored || x.changed:
		return x.v.recovery != now && p.ProducerEpoch == x.v.epoch
	case begins(p):
		return false
	}
	x.v.epoch, x.v.recovery = p.ProducerEpoch, now-1
	x.v.use = e.meta.Clock - e.meta.Clock%useGrain
	x.changed = true
	return true
}

// begins says whether a publish is the first of its sequence.
func begins(p *Publish) bool {
	return p.Low <= 1 && len(p.Messages) > 0 && p.Messages[0].Seq <= 1
}

// touch takes up what the publish says of its producer.
func (e *enqueuer) touch(x *producer, p *Publish) {
	before := *x.v
	x.v.renew(p, e.meta.RecoveryNumber)
	x.v.use = max(x.v.use, e.meta.Clock-e.meta.Clock%useGrain)
	if before.epoch != x.v.epoch || before.recovery != x.v.recovery || before.low != x.v.low || before.use != x.v.use {
		x.changed = x.changed || x.stored
	}
}

// writeProducers writes the records that changed, and forgets the least recently used beyond the limit.
func (e *enqueuer) writeProducers() {
	c := &e.meta.Counters
	for _, x := range e.producers {
		if !x.changed {
			continue
		}
		if !x.stored {
			c.Producers++
			e.s.cacheProducer(x.name, x.v)
		}
		e.b.Set(appendProducerKey(e.key[:0], x.name), x.v.encode(e.val[:0]))
		if x.name.Kind == ProducerOutbox || x.stored && x.usedAt == x.v.use {
			continue
		}
		if x.stored {
			e.b.Delete(appendProducerUseKey(e.key[:0], x.usedAt, x.name))
		}
		e.b.Set(appendProducerUseKey(e.key[:0], x.v.use, x.name), nil)
		e.s.useFrom = min(e.s.useFrom, x.v.use)
	}
}
