package home

import (
	"time"

	"github.com/tierq/tierq/queue"
)

// take is what one receive asks of the ledger.
type take struct {
	max, maxBytes int
	lease         time.Duration
	consumer      string
}

// hindrance says why a receive that got nothing got nothing.
type hindrance uint8

const (
	nothing     hindrance = iota // nothing is ready
	limited                      // the group holds as much as it may
	ownLimit                     // the consumer does
	standby                      // another consumer is the active one
	paused                       // the group or the queue is
	gated                        // something is ready, but the home may not start deliveries
	overtracked                  // the look-ahead is used up by retrying and blocked messages
	reading                      // the end of what may be ready is not reached
)

// take leases ready messages to one consumer and appends them to out. Each is in the ledger, leased, when take
// returns; undo takes back what will not be sent. An error is one of the state's reads; what was taken before it is
// returned with it.
func (l *Ledger) take(t take, now time.Duration, stamp queue.Stamp, out []Delivery) ([]Delivery, hindrance, error) {
	if !l.elect(t.consumer, now) {
		return out, standby, nil
	}
	room, why := l.room(t.consumer)
	if room <= 0 {
		return out, why, nil
	}
	messages := l.reader.Messages()
	defer messages.Close()
	bytes := 0
	for n := min(t.max, room); n > 0; {
		e, err := l.pick(now, stamp)
		if err != nil {
			return out, nothing, err
		}
		if e == nil {
			break
		}
		m, ok, err := l.load(messages, e, stamp)
		if err != nil {
			l.putBack(e)
			return out, nothing, err
		}
		if !ok {
			continue
		}
		size := messageBytes(&m)
		if bytes > 0 && bytes+size > t.maxBytes {
			l.putBack(e)
			break
		}
		bytes += size
		out = append(out, l.lend(e, m, t, now, stamp))
		n--
	}
	switch {
	case l.full():
		return out, overtracked, nil
	case l.unread:
		return out, reading, nil
	}
	return out, nothing, nil
}

// room is how many messages a consumer may get now, and whose limit that is.
func (l *Ledger) room(name string) (int, hindrance) {
	room := int(l.cfg.MaxInFlight) - l.leased
	own := int(l.cfg.MaxInFlightPerConsumer)
	if own == 0 || name == "" {
		return room, limited
	}
	if c := l.holders[name]; c != nil {
		own -= c.held
	}
	if own < room {
		return own, ownLimit
	}
	return room, limited
}

// elect says whether a consumer may receive: with a single active consumer only the active one, and nobody while a
// claim may take its place. Another takes it when it holds nothing and has not been heard of for a while.
func (l *Ledger) elect(name string, now time.Duration) bool {
	if !l.cfg.SingleActiveConsumer {
		l.retire()
		return true
	}
	if l.replacing() {
		l.touch(name, now)
		return false
	}
	c := l.consumer(name, now)
	if a := l.active; a != nil && a != c {
		if a.held > 0 || now-a.seen < activeGrace {
			l.forgetIdle(c)
			return false
		}
		l.retire()
	}
	l.active = c
	return true
}

// touch notes that a consumer is there.
func (l *Ledger) touch(name string, now time.Duration) {
	if c := l.holders[name]; c != nil {
		c.seen = max(c.seen, now)
	}
}

// retire takes the active consumer its place.
func (l *Ledger) retire() {
	if c := l.active; c != nil {
		l.active = nil
		l.forgetIdle(c)
	}
}

// messageSource is a queue.Reader or queue.MessageReader.
type messageSource interface {
	Message(a queue.Address) (queue.StoredMessage, bool, error)
}

// load reads the message of a picked entry. False drops it from the ledger, or puts it back for later: it was
// finished elsewhere (purged, cancelled), rescheduled, or is past its time to live.
func (l *Ledger) load(from messageSource, e *entry, stamp queue.Stamp) (queue.StoredMessage, bool, error) {
	m, ok, err := from.Message(e.address)
	switch {
	case err != nil:
		return m, false, err
	case !ok, m.ExpiresAt != 0 && m.ExpiresAt <= stamp:
		l.drop(e)
		return m, false, nil
	case m.VisibleAt > stamp:
		l.requeue(e, max(e.notBefore, m.VisibleAt))
		return m, false, nil
	}
	return m, true, nil
}

// lend leases a picked message.
func (l *Ledger) lend(e *entry, m queue.StoredMessage, t take, now time.Duration, stamp queue.Stamp) Delivery {
	l.number++
	e.lease, e.recorded, e.kept = queue.LeaseName{Epoch: l.epoch, Number: l.number}, false, false
	e.handed, e.touched, e.deadline, e.unseen, e.begun = now, now, now+t.lease, false, 0
	if e.first == 0 {
		e.first = stamp
	}
	l.hold(e, t.consumer, now)
	l.leases.push(e)
	l.ages.add(e)
	l.counters.handed++
	return Delivery{
		Message: m, Attempt: e.attempts + 1, Round: e.round, Lease: t.lease, Deadline: stampAfter(stamp, t.lease),
		FirstDelivered: e.first, Reason: e.reason, lease: e.lease,
	}
}

// undo takes back deliveries that never left: they do not count, and are the next ones again; those of which a record
// was proposed once apply has released them.
func (l *Ledger) undo(ds []Delivery, now time.Duration) {
	for i := range ds {
		e := l.tracked[ds[i].Message.Address]
		if e == nil || !e.live || e.lease != ds[i].lease || e.ack != nil || e.exp != nil || e.then != nil {
			continue
		}
		l.counters.handed--
		if l.unrecorded(e) {
			l.giveBack(e)
		} else {
			l.decide(e, queue.ExpireEntry{Kind: queue.ExpireRelease, Attempts: e.attempts}, now).own = true
		}
	}
}

// giveBack makes a leased message ready without counting.
func (l *Ledger) giveBack(e *entry) {
	l.lift(e)
	l.unhold(e)
	e.forget()
	l.requeue(e, 0)
}

// ranOut is the reason of a failure that nobody has told.
const ranOut = "lease ran out"

// runOut starts to record the leases whose time is over; not while this host's clock is refused (stamp 0), since their
// backoff could not be made absolute.
func (l *Ledger) runOut(now time.Duration, stamp queue.Stamp) {
	if stamp == 0 {
		return
	}
	for e := l.leases.peek(); e != nil && e.deadline <= now; e = l.leases.peek() {
		if e.unseen {
			l.lapse(e, now)
			continue
		}
		l.fail(e, ranOut, nil, now, stamp).runOut = true
	}
}

// fail decides a failure of a leased message: it comes again after the group's backoff, or delay if that is not
// nil; the last attempt makes it a dead letter.
func (l *Ledger) fail(e *entry, reason string, delay *time.Duration, now time.Duration, stamp queue.Stamp) *op {
	attempts := e.attempts + 1
	if attempts >= l.cfg.MaxAttempts {
		return l.decide(e, queue.ExpireEntry{Kind: queue.ExpireDead, Attempts: attempts, Reason: reason}, now)
	}
	notBefore := stamp + queue.Stamp(backoffMs(&l.cfg, attempts, l.random()))
	if delay != nil {
		notBefore = stampAfter(stamp, *delay)
	}
	return l.decide(e, queue.ExpireEntry{Kind: queue.ExpireUpdate, Attempts: attempts, NotBefore: notBefore, Reason: reason}, now)
}

// decide makes the one unresolved Expire entry of a message. While its lease is being recorded the entry waits for
// the answer: a record that was not proposed yet is withdrawn for it.
func (l *Ledger) decide(e *entry, x queue.ExpireEntry, now time.Duration) *op {
	x.Address = e.address
	o := &op{e: e, address: e.address, expire: x}
	if l.withdrawRecord(e); e.rec != nil {
		e.then = o
	} else {
		l.begin(o, now)
	}
	return o
}

// begin makes an entry the unresolved one of its message, on the present change number.
func (l *Ledger) begin(o *op, now time.Duration) {
	l.lift(o.e)
	o.expire.Change = o.e.change
	if o.expire.Kind == queue.ExpireLease {
		o.e.rec = o
	} else {
		o.e.exp = o
	}
	l.expires.add(o, now)
}

// messageBytes is what a message counts against a receive's bytes.
func messageBytes(m *queue.StoredMessage) int {
	n := len(m.Body) + len(m.Key)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}
