package home

import (
	"cmp"
	"slices"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// What consumers do with a lease, by receipt. Each returns a code at once, or 0: the item waits for apply, and ref
// will be resolved. The receipt's shard, recovery number and group are the caller's to check.

// leasedBy finds the message whose present or last lease a receipt names. One of a later epoch is good at a home that
// this replica does not know of yet.
func (l *Ledger) leasedBy(r Receipt) (*entry, code.Code) {
	e := l.tracked[r.Address]
	if e != nil && e.lease == r.Lease && r.Lease.Number != 0 {
		return e, 0
	}
	switch {
	case r.Lease.Epoch > l.epoch:
		return nil, code.NotOwner
	case r.Lease.Epoch < l.epoch:
		return nil, code.StaleOwner
	}
	return nil, code.UnknownDelivery
}

// ack finishes a message. A lease that ran out is honoured while nobody has had the message since and it is not
// dead; while its failure is being recorded the ack waits for that. An ack of what this group has finished already
// is OK: a repeated call after an unknown outcome must learn that it took effect.
//
// A patient ack may wait for others, unless what it finishes has others wait: the next message of its key, or a place below a limit.
func (l *Ledger) ack(r Receipt, patient bool, by ref, now time.Duration) (code.Code, error) {
	patient = patient && !l.keyed && l.cfg.MaxInFlightPerConsumer == 0 && 2*l.leased < int(l.cfg.MaxInFlight)
	e, c := l.leasedBy(r)
	switch {
	case c == code.UnknownDelivery:
		return l.ackForgotten(r)
	case c != 0:
		return c, nil
	case e.ack != nil:
		e.ack.join(by)
		l.acks.hurry = l.acks.hurry || !patient
		return 0, nil
	case e.exp != nil && e.exp.runOut:
		e.exp.late = append(e.exp.late, by)
		by.c.ops[by.i] = e.exp
		return 0, nil
	case e.exp != nil || e.then != nil && !e.then.extends:
		return code.Skipped, nil
	}
	l.beginAck(e, patient, now).join(by)
	return 0, nil
}

func (l *Ledger) ackForgotten(r Receipt) (code.Code, error) {
	if l.tracked[r.Address] != nil {
		return code.UnknownDelivery, nil
	}
	done, err := l.reader.Finished(l.id, r.Address)
	if done && err == nil {
		return code.OK, nil
	}
	return code.UnknownDelivery, err
}

// beginAck makes the one unresolved ack of a message. From here on its lease does not run out. A record of the lease may
// be under way beside it: the ack removes what that leaves.
func (l *Ledger) beginAck(e *entry, patient bool, now time.Duration) *op {
	l.lift(e)
	l.withdrawRecord(e)
	if e.live {
		e.consumer.seen = max(e.consumer.seen, now)
	}
	o := &op{e: e, address: e.address, patient: patient}
	e.ack = o
	l.acks.add(o, now)
	return o
}

// heldBy finds a message for anything but an ack: its lease must be live, in time, and nothing may be under way but a
// record of it.
func (l *Ledger) heldBy(r Receipt, now time.Duration) (*entry, code.Code) {
	e, c := l.leasedBy(r)
	switch {
	case c != 0:
		return nil, c
	case !e.live || e.exp != nil && e.exp.runOut:
		return nil, code.UnknownDelivery
	case e.ack != nil || e.exp != nil || e.then != nil:
		return e, code.Skipped
	case e.deadline <= now && (e.rec == nil || e.rec.deadline <= now):
		return nil, code.UnknownDelivery
	}
	e.consumer.seen = max(e.consumer.seen, now)
	return e, 0
}

// repeats joins a call to an unresolved entry of the same kind for the same lease: a client asks again.
func repeats(e *entry, by ref, kinds ...queue.ExpireKind) bool {
	if e == nil {
		return false
	}
	for _, o := range [...]*op{e.exp, e.then} {
		if o != nil && slices.Contains(kinds, o.expire.Kind) {
			o.join(by)
			return true
		}
	}
	return false
}

// nack gives a message back as failed.
func (l *Ledger) nack(r Receipt, n NackItem, by ref, now time.Duration, stamp queue.Stamp) code.Code {
	e, c := l.heldBy(r, now)
	if c != 0 {
		if repeats(e, by, queue.ExpireUpdate, queue.ExpireDead) {
			return 0
		}
		return c
	}
	if stamp == 0 {
		return code.ClockSkew // this host's clock is refused: the delay cannot be made absolute
	}
	var delay *time.Duration
	if n.HasDelay {
		delay = &n.Delay
	}
	l.fail(e, cutReason(n.Reason), delay, now, stamp).join(by)
	return 0
}

// reject makes a message a dead letter now.
func (l *Ledger) reject(r Receipt, reason string, by ref, now time.Duration) code.Code {
	e, c := l.heldBy(r, now)
	if c != 0 {
		if repeats(e, by, queue.ExpireDead) {
			return 0
		}
		return c
	}
	l.decide(e, queue.ExpireEntry{Kind: queue.ExpireDead, Attempts: e.attempts + 1, Reason: cutReason(reason)}, now).join(by)
	return 0
}

// release gives a message back without counting. A lease that apply has no record of, and never will, is a matter of
// the ledger alone.
func (l *Ledger) release(r Receipt, by ref, now time.Duration) code.Code {
	e, c := l.heldBy(r, now)
	if c != 0 {
		if repeats(e, by, queue.ExpireRelease) {
			return 0
		}
		return c
	}
	if l.unrecorded(e) {
		l.giveBack(e)
		return code.OK
	}
	l.decide(e, queue.ExpireEntry{Kind: queue.ExpireRelease, Attempts: e.attempts}, now).join(by)
	return 0
}

// deadOp begins a redrive or purge of a dead letter; false when something is under way for it already.
func (l *Ledger) deadOp(d *queue.DeadLetter, redrive bool, by ref, now time.Duration) bool {
	if l.tracked[d.Address] != nil {
		return false
	}
	e := &entry{address: d.Address, change: d.Change, round: d.Round, attempts: d.Attempts, place: placeBusy, dead: true}
	l.tracked[e.address] = e
	if redrive {
		l.decide(e, queue.ExpireEntry{Kind: queue.ExpireRedrive}, now).join(by)
	} else {
		l.beginAck(e, false, now).join(by)
	}
	return true
}

// next makes the next command that is due, nil if none is. The caller proposes it until apply answers.
func (l *Ledger) next(now time.Duration, stamp queue.Stamp) *batch {
	if l.acks.due() <= now {
		if b := l.acks.take(now); b != nil {
			slices.SortFunc(b.ops, func(x, y *op) int { return cmp.Compare(x.address, y.address) })
			b.command = &queue.Ack{Stamp: stamp, Group: l.id, Epoch: l.epoch, Ranges: ranges(b.ops)}
			return b
		}
	}
	if l.expires.due() <= now {
		if b := l.expires.take(now); b != nil {
			entries := make([]queue.ExpireEntry, len(b.ops))
			for i, o := range b.ops {
				entries[i] = o.expire
				o.proposed()
			}
			b.command = &queue.Expire{Stamp: stamp, Group: l.id, Epoch: l.epoch, Entries: entries}
			return b
		}
	}
	return nil
}

// answered takes what apply said about a batch under this epoch.
func (l *Ledger) answered(b *batch, res *queue.Result, now time.Duration, stamp queue.Stamp) error {
	b.from.settled()
	var first error
	for i, o := range b.ops {
		var err error
		if b.from == &l.acks {
			l.acked(o, itemOr(res.Acks, i, queue.AckUnknown), b.maybe)
		} else {
			err = l.expired(o, itemOr(res.Expires, i, queue.ExpireResult{}), b.maybe, now, stamp)
		}
		if first == nil {
			first = err
		}
	}
	return first
}

func itemOr[T any](items []T, i int, or T) T {
	if i < len(items) {
		return items[i]
	}
	return or
}

// acked takes one address's outcome; again says that an earlier copy of the command may be applied yet. A letter whose export had begun
// when this copy was applied may be an ordinary one again when the earlier copy is, or even redriven: what the ack does is not known, and
// nothing is redriven under this epoch any more (ADR 43).
func (l *Ledger) acked(o *op, s queue.AckState, again bool) {
	o.e.ack = nil
	l.drop(o.e)
	switch {
	case s == queue.AckDone || s == queue.AckAlready:
		l.counters.acked++
		resolveAll(o.refs, plain(code.OK))
	case s == queue.AckDead && again:
		l.doubtful = true
		resolveAll(o.refs, ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe})
	case s == queue.AckDead:
		resolveAll(o.refs, plain(code.DeadExporting))
	default:
		resolveAll(o.refs, plain(code.UnknownMessage))
	}
}

// appliedBefore says whether a copy of an entry was applied before the one that was skipped with r. Under this epoch the
// ledger alone changes a message that is not dead, so the change number tells. The outbox moves dead letters: one that
// the ledger has just made is its own whatever the number, and one that is still dead was not redriven.
func (o *op) appliedBefore(r queue.ExpireResult) bool {
	if o.expire.Kind == queue.ExpireDead {
		return r.Dead
	}
	return !r.Finished && !r.Dead && r.Change == o.expire.Change+1
}

// expired takes one entry's outcome. An entry that was proposed more than once, and whose first copy was applied, is
// skipped at the next.
func (l *Ledger) expired(o *op, r queue.ExpireResult, again bool, now time.Duration, stamp queue.Stamp) error {
	e := o.e
	ours := r.Applied || again && o.appliedBefore(r)
	switch o {
	case e.rec:
		return l.recordAnswered(o, r, ours, now)
	case e.exp:
		e.exp = nil
	default:
		return nil // a record of a message that was finished before the answer came
	}
	if postponed := o.expire.Kind == queue.ExpireDead && !r.Dead && r.Change == o.expire.Change; postponed && !ours && !r.Finished {
		e.exp, o.batch = o, nil // the command had parked enough: propose it again
		l.expires.add(o, now)
		return nil
	}
	if !ours {
		if again && r.Finished && o.expire.Kind == queue.ExpireDead { // perhaps it died, and was exported
			resolveAll(o.late, plain(code.UnknownDelivery))
		}
		return l.skipped(o, r)
	}
	e.change = r.Change
	switch o.expire.Kind {
	case queue.ExpireDead:
		l.counters.failed++
		l.counters.dead++
		l.drop(e)
		resolveAll(o.refs, ItemResult{Code: code.OK, Effect: code.EffectDone, Dead: true})
		resolveAll(o.late, plain(code.UnknownDelivery))
	case queue.ExpireUpdate:
		l.failed(o, now)
	case queue.ExpireRelease:
		l.giveBack(e)
		resolveAll(o.refs, plain(code.OK))
	case queue.ExpireClaim:
		return l.claimed(o, r, now, stamp)
	case queue.ExpireRedrive:
		resolveAll(o.refs, plain(code.OK))
		return l.redriven(e, r)
	}
	return nil
}

// failed takes a recorded failure. An ack that came while the run-out was being recorded is honoured: nobody has had
// the message since.
func (l *Ledger) failed(o *op, now time.Duration) {
	e := o.e
	l.counters.failed++
	e.attempts, e.notBefore, e.reason = o.expire.Attempts, o.expire.NotBefore, o.expire.Reason
	l.unhold(e)
	e.recorded, e.kept = false, false
	resolveAll(o.refs, ItemResult{Code: code.OK, Effect: code.EffectDone, NotBefore: e.notBefore})
	if !o.runOut {
		e.forget()
	}
	if len(o.late) > 0 {
		a := l.beginAck(e, false, now)
		for _, r := range o.late {
			a.join(r)
		}
		return
	}
	l.requeue(e, e.notBefore)
}

// redriven makes a dead letter deliverable again; with key order it goes behind what is tracked of its key.
func (l *Ledger) redriven(e *entry, r queue.ExpireResult) error {
	e.dead, e.attempts, e.round, e.notBefore = false, 0, r.Round, 0
	if l.keyed {
		m, ok, err := l.reader.Message(e.address)
		if err != nil || !ok {
			l.drop(e) // the scan of the next epoch meets it again
			return err
		}
		if len(m.Key) > 0 {
			e.place = placeBusy
			l.enchain(e, m.Key)
			if e.place == placeBlocked {
				return nil
			}
		}
	}
	l.requeue(e, 0)
	return nil
}

// skipped takes an entry that apply did not apply: the message has changed since, or is finished. The ledger takes
// over what is stored.
func (l *Ledger) skipped(o *op, r queue.ExpireResult) error {
	e := o.e
	resolveAll(o.refs, plain(code.Skipped))
	if r.Finished {
		resolveAll(o.late, plain(code.OK))
		l.drop(e)
		return nil
	}
	resolveAll(o.late, plain(code.UnknownDelivery))
	if r.Dead || e.dead {
		l.drop(e)
		return nil
	}
	l.unhold(e)
	e.forget()
	e.change, e.round, e.attempts = r.Change, r.Round, r.Attempts
	st, _, _, err := l.reader.RetryOf(l.id, e.address)
	if err == nil {
		e.notBefore = st.NotBefore
	}
	l.requeue(e, e.notBefore)
	return err
}

// refused takes a refusal of a whole command that is not about the epoch: nothing of it changed anything.
func (l *Ledger) refused(b *batch, res ItemResult, now time.Duration) {
	b.from.settled()
	b.from.rest(now)
	for _, o := range b.ops {
		resolveAll(o.refs, res)
		resolveAll(o.late, res)
		l.restore(o, now)
	}
}

// unqueued takes back a batch that was never queued. Ops that nobody waits for are withdrawn; the rest is proposed
// again after a pause.
func (l *Ledger) unqueued(b *batch, now time.Duration) {
	b.from.unqueued(b, now)
	for _, o := range b.ops {
		l.withdrawIdle(o, now)
	}
}

// leave ends a call whose time is over: what was proposed is unknown, what was not is withdrawn.
func (l *Ledger) leave(c *call, now time.Duration, unknown, untried ItemResult) {
	for i, o := range c.ops {
		if o == nil {
			continue
		}
		late := slices.ContainsFunc(o.late, func(r ref) bool { return r.c == c && r.i == i })
		if o.batch == nil && !o.patient || late {
			ref{c, i}.resolve(untried)
		} else {
			ref{c, i}.resolve(unknown)
		}
		o.leave(c)
		l.withdrawIdle(o, now)
	}
}

// withdrawIdle takes back a waiting op that nobody waits for any more, unless nobody ever did.
func (l *Ledger) withdrawIdle(o *op, now time.Duration) {
	if o.batch == nil && !o.canceled && !o.runOut && !o.own && !o.patient && len(o.refs) == 0 {
		o.canceled = true
		l.restore(o, now)
	}
}

// restore puts a message back to where it was before an op that came to nothing.
func (l *Ledger) restore(o *op, now time.Duration) {
	e := o.e
	switch o {
	case e.ack:
		e.ack = nil
	case e.exp:
		e.exp = nil
	case e.rec:
		e.rec = nil
	case e.then:
		e.then = nil
		return // the record goes on
	default:
		return // the message has been finished
	}
	switch {
	case e.dead:
		l.drop(e)
	case e.live:
		l.settleDown(e, now)
	default:
		l.requeue(e, e.notBefore)
	}
}

// end answers everything that is unresolved: the epoch is over, as applied here, so no command of it takes effect
// any more. An ack took effect if its message is finished.
//
// decisive false says that the epoch may not be over: the outcome of what was proposed is unknown.
func (l *Ledger) end(refusal code.Code, decisive bool) {
	l.gone = true
	for _, e := range l.tracked {
		if e.ack != nil {
			resolveAll(e.ack.refs, l.ackAtEnd(e.ack, refusal, decisive))
		}
		if e.exp != nil {
			moved := plain(l.movedOr(e, refusal))
			res := moved
			if e.exp.batch != nil {
				res = ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
			}
			resolveAll(e.exp.refs, res)
			resolveAll(e.exp.late, moved)
		}
		if e.rec != nil {
			resolveAll(e.rec.refs, l.recordAtEnd(e.rec, refusal, decisive))
		}
		if e.then != nil {
			resolveAll(e.then.refs, plain(l.movedOr(e, refusal)))
		}
	}
}

func (l *Ledger) ackAtEnd(o *op, refusal code.Code, decisive bool) ItemResult {
	if o.batch == nil {
		return plain(l.movedOr(o.e, refusal))
	}
	if !decisive {
		return ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
	}
	switch done, err := l.reader.Finished(l.id, o.address); {
	case err != nil:
		return ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
	case done:
		return plain(code.OK)
	}
	return plain(l.movedOr(o.e, refusal))
}

// nextEvent is the boot time at which the ledger has something to do by itself; waiting says whether a receive
// waits, so that messages becoming ready matters.
func (l *Ledger) nextEvent(now time.Duration, stamp queue.Stamp, waiting bool) time.Duration {
	at := min(l.acks.due(), l.expires.due())
	if e := l.leases.peek(); e != nil {
		own := min(e.deadline, l.recordAt())
		if stamp == 0 && own <= now { // nothing runs out, or is recorded, while the clock is refused
			own = now + time.Second
		}
		at = min(at, own)
	}
	if !waiting {
		return at
	}
	soon := func(t time.Duration) { // what is past waits for something else
		if t > now {
			at = min(at, t)
		}
	}
	if next := l.nextReady(); next > stamp {
		if d := ms(uint64(next - stamp)); d < never-now {
			soon(now + d)
		}
	}
	if !l.keyed && l.sweep {
		soon(l.sweepFrom)
	}
	if !l.keyed && l.straggle < l.scan {
		soon(l.straggled + straggleEvery)
	}
	if len(l.recheck) > 0 || l.unread {
		return now
	}
	if l.disorderSeen != l.marks.disorder.Load() || l.delayedSeen != l.delayedMark() {
		soon(l.recheckFrom)
	}
	return at
}
