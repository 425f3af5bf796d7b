package home

import (
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Recorded leases. A lease that is still open a while after its hand-out, and every extend, is told to the state by an
// Expire entry, so that a new home honours it and its receipt. The receive does not wait for that; the extend does.

// recordDue begins the records of leases that are old enough, or of all when the group is being moved. The next few are
// taken along: one command then does for many. Nothing is recorded while this host's clock is refused (stamp 0), since
// the deadline could not be made absolute.
func (l *Ledger) recordDue(now time.Duration, stamp queue.Stamp) {
	if stamp == 0 || l.recordAt() > now {
		return
	}
	upTo := now - l.recordAfter() + l.recordAfter()/20
	for e := l.ages.oldest; e != nil && (l.leaving || e.handed <= upTo); e = l.ages.oldest {
		l.begin(&op{e: e, address: e.address, own: true, deadline: e.deadline, expire: l.record(e, e.deadline-now, now, stamp)}, now)
	}
}

// recordAt is when the next record is due; never if every lease has one.
func (l *Ledger) recordAt() time.Duration {
	switch {
	case l.ages.oldest == nil:
		return never
	case l.leaving:
		return 0
	}
	return l.ages.oldest.handed + l.recordAfter()
}

func (l *Ledger) recordAfter() time.Duration { return ms(l.cfg.RecordAfterMs) }

// record is the entry that says how long a lease lasts from now, and when it was handed out.
func (l *Ledger) record(e *entry, left, now time.Duration, stamp queue.Stamp) queue.ExpireEntry {
	if e.begun == 0 {
		e.begun = stampBefore(stamp, now-e.handed)
	}
	return queue.ExpireEntry{
		Kind: queue.ExpireLease, Address: e.address, Attempts: e.attempts, Lease: e.lease, NotBefore: e.begun,
		Deadline: stampAfter(stamp, left), Consumer: e.consumer.name,
	}
}

// proposed notes that from here on apply may have a record of a lease: until then the ledger alone knows it.
func (o *op) proposed() {
	if o.expire.Kind == queue.ExpireLease {
		o.e.recorded = true
	}
}

// unrecorded says whether apply has no record of an entry's lease and never will. A record that waits is withdrawn.
func (l *Ledger) unrecorded(e *entry) bool {
	l.withdrawRecord(e)
	return !e.recorded && e.rec == nil
}

// withdrawRecord takes back a record of the ledger's own that was not proposed.
func (l *Ledger) withdrawRecord(e *entry) {
	if o := e.rec; o != nil && o.own && o.batch == nil {
		o.canceled = true
		e.rec = nil
	}
}

// abandonRecord forgets a record that is under way, and what waits for it: the message is finished, or changed.
func (l *Ledger) abandonRecord(e *entry, c code.Code) {
	for _, o := range [...]*op{e.rec, e.then} {
		if o != nil {
			o.canceled = true
			resolveAll(o.refs, plain(c))
		}
	}
	e.rec, e.then = nil, nil
}

// extend sets a lease's deadline to d from now, once apply has recorded it. 0 lets the lease run out, which counts.
func (l *Ledger) extend(r Receipt, d time.Duration, by ref, now time.Duration, stamp queue.Stamp) code.Code {
	e, c := l.heldBy(r, now)
	if e != nil {
		e.unseen = false
	}
	joins := c == code.Skipped && e.then != nil && e.then.extends
	switch {
	case c != 0 && !joins:
		return c
	case stamp == 0:
		return code.ClockSkew
	case now+d > e.handed+MaxLease:
		return code.InvalidArgument
	case joins && d == 0:
		return code.Skipped // a failure, and another outcome is under way
	case joins:
		l.prolong(e.then, d, now, stamp)
		e.then.join(by)
		return 0
	case d == 0:
		o := l.fail(e, ranOut, nil, now, stamp)
		o.runOut = true
		o.join(by)
		return 0
	}
	o := e.rec
	switch {
	case o == nil:
		o = &op{e: e, address: e.address, expire: l.record(e, d, now, stamp)}
		l.begin(o, now)
	case o.batch != nil:
		o = &op{e: e, address: e.address, expire: l.record(e, d, now, stamp)}
		e.then = o
	}
	l.prolong(o, d, now, stamp)
	o.join(by)
	return 0
}

// prolong makes a record that was not proposed yet an extend to d from now.
func (l *Ledger) prolong(o *op, d, now time.Duration, stamp queue.Stamp) {
	o.own, o.extends, o.asked, o.deadline = false, true, now, now+d
	o.expire.Deadline = stampAfter(stamp, d)
}

// recordAnswered takes the outcome of a record: the lease is in the heap of deadlines again, or what has waited begins.
func (l *Ledger) recordAnswered(o *op, r queue.ExpireResult, ours bool, now time.Duration) error {
	e := o.e
	e.rec = nil
	switch {
	case ours:
		e.change, e.deadline, e.kept = r.Change, o.deadline, true
		if o.extends {
			e.touched = o.asked
		}
		resolveAll(o.refs, plain(code.OK))
	case e.ack != nil: // its answer says what became of the message
		if !r.Finished {
			e.change = r.Change
		}
		l.abandonRecord(e, code.Skipped)
		resolveAll(o.refs, plain(code.Skipped))
		return nil
	default:
		l.abandonRecord(e, code.Skipped)
		return l.skipped(o, r)
	}
	l.settleDown(e, now)
	return nil
}

// settleDown puts a message whose lease goes on where it belongs: with its ack unresolved nowhere; else what waited for
// the record begins, or the lease may run out again.
func (l *Ledger) settleDown(e *entry, now time.Duration) {
	switch o := e.then; {
	case e.ack != nil || e.rec != nil || e.exp != nil:
	case o != nil:
		e.then = nil
		l.begin(o, now)
	default:
		l.lease(e)
	}
}

// recordAtEnd is what an extend is told whose epoch has ended: the state knows whether it was applied.
func (l *Ledger) recordAtEnd(o *op, refusal code.Code, decisive bool) ItemResult {
	if o.batch == nil {
		return plain(l.movedOr(o.e, refusal))
	}
	_, lease, _, err := l.reader.RetryOf(l.id, o.address)
	switch {
	case err != nil || !decisive:
		return ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
	case lease.Name == o.e.lease && lease.Deadline == o.expire.Deadline:
		return plain(code.OK)
	case lease.Name == o.e.lease:
		return plain(code.NotOwner)
	}
	return plain(refusal)
}

// movedOr is NotOwner for a lease that apply has a record of: its receipt is good at the group's new home.
func (l *Ledger) movedOr(e *entry, refusal code.Code) code.Code {
	if !e.recorded || refusal != code.StaleOwner {
		return refusal
	}
	if _, lease, _, err := l.reader.RetryOf(l.id, e.address); err == nil && lease.Name == e.lease {
		return code.NotOwner
	}
	return refusal
}
