package home

import (
	"math"
	"time"

	"github.com/tierq/tierq/queue"
)

// Where messages come from. Without key order there are three sources: the scan of messages in address order; the
// delayed index by due time; and, behind the scan, parked stragglers: a message may be parked after the scan's read
// passed it or before the scan reached it, and the second case is met by reading the stragglers of a range only
// after the scan has read it. With key order one scan reads everything in address order, delayed ones too, since a
// delayed head blocks its key.

// pick takes the next message that may be handed out now out of its structure; nil if there is none. Messages that
// were given back or failed go first, by not-before and address, then delayed ones that are due, then fresh ones.
//
// It reads a bounded number of pages; unread says that it stopped there, and the caller should come again.
func (l *Ledger) pick(now time.Duration, stamp queue.Stamp) (*entry, error) {
	l.unread = false
	for pages := 0; ; pages++ {
		if e := l.timed.peek(); e != nil && e.notBefore <= stamp {
			l.timed.remove(e)
			return e, nil
		}
		if err := l.readDue(now, stamp); err != nil {
			return nil, err
		}
		if e := l.due.pop(); e != nil {
			return e, nil
		}
		if e := l.fresh.pop(); e != nil {
			return e, nil
		}
		if l.unread = pages == maxPages; l.unread {
			return nil, nil
		}
		if more, err := l.readAhead(now, stamp); err != nil || !more {
			return nil, err
		}
	}
}

// ready says whether pick would find something. It may read ahead.
func (l *Ledger) ready(now time.Duration, stamp queue.Stamp) (bool, error) {
	e, err := l.pick(now, stamp)
	if e != nil {
		l.putBack(e)
	}
	return e != nil, err
}

// putBack undoes a pick: the message is the next one again.
func (l *Ledger) putBack(e *entry) { l.requeue(e, e.notBefore) }

// full says whether the look-ahead is used up.
func (l *Ledger) full() bool {
	bound := lookAhead
	if l.keyed {
		bound = lookAheadKeyed
	}
	return len(l.tracked)-l.leased >= bound
}

// readAhead reads one more page of the scan or of the stragglers; false when there is nothing to read now.
func (l *Ledger) readAhead(now time.Duration, stamp queue.Stamp) (bool, error) {
	if l.full() {
		return false, nil
	}
	last := queue.Address(l.marks.last.Load())
	if l.scan <= last {
		return true, l.readScan(last, now, stamp)
	}
	if !l.keyed && l.stragglersDue(now) {
		return true, l.readStragglers(now, stamp)
	}
	return false, nil
}

// readScan reads the next page in address order. last was assigned, and is visible, before the read.
func (l *Ledger) readScan(last queue.Address, now time.Duration, stamp queue.Stamp) error {
	page, next, err := l.reader.Deliverables(l.id, l.scan, readAhead, l.keyed)
	if err != nil {
		return err
	}
	for i := range page {
		l.discover(&page[i], now, stamp)
		last = max(last, page[i].Address)
	}
	if next == 0 {
		next = last + 1
	}
	l.scan = max(next, l.scan)
	return nil
}

// stragglersDue says whether the range between the straggler scan and the scan is worth a read: it is wide, or it
// was not looked at for a while. A message is parked only when very many finished ones lie above it.
func (l *Ledger) stragglersDue(now time.Duration) bool {
	if l.straggle >= l.scan {
		return false
	}
	return l.straggled == 0 || l.scan-l.straggle >= straggleGap || now-l.straggled >= straggleEvery
}

func (l *Ledger) readStragglers(now time.Duration, stamp queue.Stamp) error {
	page, next, err := l.reader.ParkedStragglers(l.id, l.straggle, readAhead)
	if err != nil {
		return err
	}
	for i := range page {
		if page[i].Address >= l.scan {
			next = 0
			break
		}
		l.discover(&page[i], now, stamp)
	}
	if next == 0 || next > l.scan {
		next = l.scan
	}
	l.straggle, l.straggled = next, max(now, 1)
	return nil
}

// readDue reads delayed messages that have become due into their buffer, when it is empty.
func (l *Ledger) readDue(now time.Duration, stamp queue.Stamp) error {
	if l.keyed || l.due.size > 0 {
		return nil
	}
	l.noteDelayed()
	if l.sweep && l.dueAt > stamp && now >= l.sweepFrom {
		l.beginSweep(now)
	}
	for stamp >= l.dueAt && l.due.size == 0 && !l.full() {
		if err := l.readDuePage(now, stamp); err != nil {
			return err
		}
	}
	return nil
}

// noteDelayed takes up a change of the delayed index. A message is put there only if it is due later than the
// shard's clock at its apply, so a new entry may lie behind the cursor, but not behind the clock as it was before
// the last read. A rescheduled one may lie anywhere: for it the due part is read again, at a bounded rate.
func (l *Ledger) noteDelayed() {
	seen := l.marks.delayed.Load()
	if seen == l.dueSeen {
		return
	}
	l.dueSeen, l.dueAt, l.sweep = seen, 0, true
	if l.dueAfter.VisibleAt > l.clockSeen {
		l.dueAfter = queue.DelayedKey{VisibleAt: l.clockSeen, Address: queue.MaxAddress}
	}
}

func (l *Ledger) beginSweep(now time.Duration) {
	l.sweep = false
	l.sweepFrom = now + sweepEvery + time.Duration(l.swept)*time.Millisecond
	l.dueAfter, l.dueAt, l.swept = queue.DelayedKey{}, 0, 0
}

func (l *Ledger) readDuePage(now time.Duration, stamp queue.Stamp) error {
	clock := l.reader.Meta().Clock
	keys, err := l.reader.Due(l.dueAfter, stamp, readAhead)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if err := l.takeDue(k.Address, now, stamp); err != nil {
			return err
		}
		l.dueAfter = k
	}
	l.clockSeen = clock
	l.swept += len(keys)
	if len(keys) == readAhead {
		return nil
	}
	next, any, err := l.reader.NextDue(l.dueAfter)
	if err != nil {
		return err
	}
	if l.dueAt = math.MaxUint64; any {
		l.dueAt = max(next, stamp+1) // what has become due during this read is met by the next change mark
	}
	return nil
}

// takeDue buffers a delayed message that is due, if this group still has to do with it.
func (l *Ledger) takeDue(a queue.Address, now time.Duration, stamp queue.Stamp) error {
	if l.tracked[a] != nil || a <= l.start {
		return nil
	}
	page, _, err := l.reader.Deliverables(l.id, a, 1, true)
	if err != nil || len(page) == 0 || page[0].Address != a {
		return err
	}
	e := l.discover(&page[0], now, stamp)
	if e != nil && e.place == placeFresh { // in the order of its due time, not behind what was read ahead
		l.fresh.items = l.fresh.items[:len(l.fresh.items)-1]
		l.fresh.size--
		l.due.push(e)
	}
	return nil
}

// tidy compares some of what is tracked with the state after messages were finished or moved out of order:
// purged, cancelled, rescheduled. Without it a purged head would block its key until its due time. It says whether it
// looked at anything: then something may be ready that was not.
func (l *Ledger) tidy(now time.Duration, stamp queue.Stamp) (looked bool, err error) {
	l.planRecheck(now, stamp)
	looked = len(l.recheck) > 0
	for n := min(len(l.recheck), recheckChunk); n > 0; n-- {
		a := l.recheck[len(l.recheck)-1]
		l.recheck = l.recheck[:len(l.recheck)-1]
		if e := l.tracked[a]; e != nil && e.resolved() {
			if err := l.recheckOne(e, stamp); err != nil {
				return looked, err
			}
		}
	}
	return looked, nil
}

// planRecheck lists what is to be compared, at a bounded rate: everything after a disorder, delayed heads of keys
// after a change of the delayed index.
func (l *Ledger) planRecheck(now time.Duration, stamp queue.Stamp) {
	disorder, delayed := l.marks.disorder.Load(), l.delayedMark()
	if disorder == l.disorderSeen && delayed == l.delayedSeen || len(l.recheck) > 0 || now < l.recheckFrom {
		return
	}
	all := disorder != l.disorderSeen
	l.disorderSeen, l.delayedSeen, l.recheckFrom = disorder, delayed, now+sweepEvery
	for a, e := range l.tracked {
		if all || e.place == placeTimed && e.notBefore > stamp {
			l.recheck = append(l.recheck, a)
		}
	}
}

// delayedMark is the change mark of the delayed index where tracked entries depend on it.
func (l *Ledger) delayedMark() uint64 {
	if !l.keyed {
		return 0
	}
	return l.marks.delayed.Load()
}

func (l *Ledger) recheckOne(e *entry, stamp queue.Stamp) error {
	page, _, err := l.reader.Deliverables(l.id, e.address, 1, true)
	if err != nil {
		return err
	}
	if len(page) == 0 || page[0].Address != e.address {
		l.drop(e)
		return nil
	}
	due := max(page[0].VisibleAt, page[0].Retry.NotBefore)
	if e.place == placeTimed && e.notBefore > stamp && e.notBefore != due {
		l.timed.remove(e)
		l.requeue(e, due)
	}
	return nil
}

// nextReady is when, as a stamp, the next message becomes deliverable that is not yet; math.MaxUint64 if none is
// known.
func (l *Ledger) nextReady() queue.Stamp {
	next := queue.Stamp(math.MaxUint64)
	if e := l.timed.peek(); e != nil {
		next = e.notBefore
	}
	if !l.keyed && !l.full() {
		next = min(next, l.dueAt)
	}
	return next
}
