package queue

import (
	"crypto/sha256"

	"github.com/tierq/tierq/queue/code"
)

// Enqueue appends publishes in list order.
//
// Refused as a whole: what Validate refuses; QueueRetired.
// Refused per publish, nothing of it stored: ProducerEpochStale; ExpectedLastAddress (unless all its messages are
// duplicates); when atomic, the code of the first message that is refused.
// Refused per message: ProducerSeqInvalid, SeqExpired (below low), Backpressure (beyond the window), SeqGap
// (contiguous producers), TooLarge, DelayTooLong, QueueFull, LimitReached (no address left).
// A duplicate by (producer, seq) or dedup id answers the first address, and changes nothing but low.
// A message whose visible-at lies above the shard's clock is parked and enters the delayed index.
//
// Version 1: as above.

// useGrain is how exactly the last use of a producer is known. Part of the format.
const useGrain Stamp = 60 * 1000

// defaultLowDistance is how far below its greatest seq a producer without low remembers.
const defaultLowDistance = 1023

// enqueuer is one Enqueue being applied.
type enqueuer struct {
	*tx
	results []MessageResult // backing of all publishes' results
	head    []byte
}

// producer is a producer that this command uses.
type producer struct {
	name    Producer
	v       *producerValue
	stored  bool
	usedAt  Stamp // as stored
	changed bool
}

func (t *tx) enqueue(c *Enqueue, r *Result) {
	if t.meta.Retired {
		t.meta.Counters.Refused += uint64(len(c.Publishes))
		r.Code = code.QueueRetired
		return
	}
	if t.r == t.b {
		t.dropForRoom(c)
	}
	e := &enqueuer{tx: t}
	n := 0
	for i := range c.Publishes {
		n += len(c.Publishes[i].Messages)
	}
	e.results = make([]MessageResult, 0, n)
	r.Publishes = make([]PublishResult, len(c.Publishes))
	for i := range c.Publishes {
		r.Publishes[i] = e.publish(&c.Publishes[i])
		if r.Publishes[i].Code != code.OK {
			t.meta.Counters.Refused++
		}
	}
	e.writeProducers()
}

func (e *enqueuer) publish(p *Publish) PublishResult {
	pr := e.producerOf(p)
	if pr != nil && e.stale(pr, p) {
		return PublishResult{Code: code.ProducerEpochStale, Last: e.meta.Last}
	}
	if c := e.precheck(p, pr); c != code.OK {
		return PublishResult{Code: c, Last: e.meta.Last}
	}
	if pr != nil {
		e.touch(pr, p)
	}
	from := len(e.results)
	for i := range p.Messages {
		e.results = append(e.results, e.message(p, &p.Messages[i], pr))
	}
	return PublishResult{Code: code.OK, Last: e.meta.Last, Messages: e.results[from:len(e.results):len(e.results)]}
}

// precheck decides about publishes that are refused as a whole, before anything changes.
func (e *enqueuer) precheck(p *Publish, pr *producer) code.Code {
	if !p.Atomic && !p.CheckLast {
		return code.OK
	}
	trial := e.trial(p, pr)
	room := e.meta.Counters
	fresh := false
	for i := range p.Messages {
		m := &p.Messages[i]
		_, duplicate, c := e.classify(p, m, trial)
		if c == code.OK && !duplicate {
			fresh = true
			c = e.admit(m, &room)
		}
		if c != code.OK && p.Atomic {
			return c
		}
		if c == code.OK && trial != nil {
			trial.record(m.Seq, 0, p.Low)
		}
	}
	if p.CheckLast && fresh && p.ExpectedLast != e.meta.Last {
		return code.ExpectedLastAddress
	}
	return code.OK
}

// trial is a copy of the producer's record as the publish would leave it before its first message.
func (e *enqueuer) trial(p *Publish, pr *producer) *producerValue {
	if pr == nil {
		return nil
	}
	v := *pr.v
	v.runs = append([]run(nil), pr.v.runs...)
	v.renew(p, e.meta.RecoveryNumber)
	return &v
}

// message appends one message, or says why not.
func (e *enqueuer) message(p *Publish, m *Message, pr *producer) MessageResult {
	var v *producerValue
	if pr != nil {
		v = pr.v
	}
	first, duplicate, c := e.classify(p, m, v)
	if c == code.OK && !duplicate {
		c = e.admit(m, &e.meta.Counters)
	}
	if c != code.OK {
		return MessageResult{Code: c}
	}
	if duplicate {
		e.meta.Counters.Duplicates++
	} else {
		first = e.append(p, m)
	}
	if pr != nil {
		v.record(m.Seq, first, p.Low)
		pr.changed = true
	}
	return MessageResult{Code: code.OK, Address: first, Duplicate: duplicate}
}

// classify tells a duplicate from a new message, and refuses seqs.
func (e *enqueuer) classify(p *Publish, m *Message, v *producerValue) (first Address, duplicate bool, c code.Code) {
	if v != nil {
		if first, ok := v.lookup(m.Seq); ok {
			return first, true, code.OK
		}
		if c := v.admits(m.Seq, p.Low, e.contiguous(p)); c != code.OK {
			return 0, false, c
		}
	}
	if len(m.DedupID) == 0 {
		return 0, false, code.OK
	}
	first, duplicate = e.dedup(hashDedup(m.DedupID))
	return first, duplicate, code.OK
}

func (e *enqueuer) contiguous(p *Publish) bool {
	if p.Producer.Kind == ProducerOutbox {
		return false
	}
	o := &e.meta.Options
	return p.Contiguous || o.StrictSequence || o.Ordering == OrderKey
}

// admit checks what a new message needs; count is what is stored, and is counted up.
func (e *enqueuer) admit(m *Message, count *Counters) code.Code {
	o, size := &e.meta.Options, uint64(m.Bytes())
	switch {
	case len(m.Body) > int(o.MaxBodyBytes):
		return code.TooLarge
	case o.MaxDelayMs > 0 && m.VisibleAt > max(e.meta.Clock, e.stamp)+Stamp(o.MaxDelayMs):
		return code.DelayTooLong
	case e.meta.Last >= MaxAddress:
		return code.LimitReached
	case count.Bytes+size > o.MaxBytes, o.MaxMessages > 0 && count.Messages+1 > o.MaxMessages:
		return code.QueueFull
	}
	if count != &e.meta.Counters {
		count.Bytes += size
		count.Messages++
	}
	return code.OK
}

// append stores a message under the next address.
func (e *enqueuer) append(p *Publish, m *Message) Address {
	e.meta.Last++
	a, clock := e.meta.Last, e.meta.Clock
	h := messageHead{size: uint64(m.Bytes()), stamp: clock, expiresAt: m.ExpiresAt, producer: p.Producer, seq: m.Seq, key: m.Key}
	if h.expiresAt == 0 && e.meta.Options.TTLMs > 0 {
		h.expiresAt = clock + Stamp(e.meta.Options.TTLMs)
	}
	if h.expiresAt != 0 {
		e.expiring++
	}
	kind := byte(kindMessage)
	count := e.count(a)
	c := &e.meta.Counters
	if m.VisibleAt > clock {
		kind = kindParked
		h.visibleAt, h.flags = m.VisibleAt, messageDelayed
		e.b.Set(appendDelayedKey(e.key[:0], DelayedKey{m.VisibleAt, a}), nil)
		count.parked++
		count.parkedBytes += h.size
		count.delayed++
		c.Parked++
		c.Delayed++
		e.event.Delayed = true
	} else {
		count.messages++
		count.bytes += h.size
	}
	e.head = h.put(e.head[:0], m.Priority)
	e.b.SetFunc(appendKey1(e.key[:0], kind, uint64(a)), len(e.head)+tailLen(m), func(dst []byte) { fillMessage(dst, e.head, m) })
	if len(m.DedupID) > 0 {
		e.remember(hashDedup(m.DedupID), a)
	}
	c.Messages++
	c.Bytes += h.size
	c.Published++
	c.PublishedBytes += h.size
	if p.Producer.Kind == ProducerNone {
		c.NonIdempotent++
	}
	e.event.Appended = true
	return a
}

// dedup ids

func hashDedup(id []byte) dedupHash {
	sum := sha256.Sum256(id)
	return dedupHash(sum[:dedupHashBytes])
}

// dedup finds the address that a dedup id stands for. A clamped command forgets nothing by age: its clock may be wrong.
func (e *enqueuer) dedup(h dedupHash) (Address, bool) {
	if a, ok := e.dedups[h]; ok {
		return a, true
	}
	v, ok := e.storedDedup(h)
	return v.address, ok && (e.clamped || v.expiresAt > e.meta.Clock)
}

func (e *enqueuer) storedDedup(h dedupHash) (dedupValue, bool) {
	var v dedupValue
	ok, err := e.r.View(appendDedupKey(e.key[:0], h), v.decode)
	check(err)
	return v, ok
}

func (e *enqueuer) remember(h dedupHash, a Address) {
	if old, ok := e.storedDedup(h); ok { // run out, not yet forgotten
		e.b.Delete(appendDedupAgeKey(e.key[:0], old.expiresAt, h))
	}
	v := dedupValue{address: a, expiresAt: e.meta.Clock + Stamp(e.meta.Options.DedupMs)}
	e.b.Set(appendDedupKey(e.key[:0], h), v.encode(e.val[:0]))
	e.b.Set(appendDedupAgeKey(e.key[:0], v.expiresAt, h), nil)
	if e.dedups == nil {
		e.dedups = make(map[dedupHash]Address)
	}
	e.dedups[h] = a
}
