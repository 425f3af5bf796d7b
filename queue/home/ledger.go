package home

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Look-ahead bounds: how many messages a ledger remembers beside the leased ones before it stops reading ahead. What
// is remembered is retrying, delayed at the head of a key, or behind such a head. Past the bound only what is
// remembered is served until some of it is done.
const (
	lookAheadKeyed = 16_384
	lookAhead      = 131_072
	readAhead      = 256 // messages of one read
	maxPages       = 8   // reads of one pick
	straggleGap    = 4096
	straggleEvery  = 5 * time.Second
	sweepEvery     = time.Second
	recheckChunk   = 256
	activeGrace    = 10 * time.Second // an idle single active consumer keeps its place so long
)

// redriveAhead bounds what a ledger remembers beside the leased ones, redriven messages included: those lie behind the scan, so it has to
// remember them all.
var redriveAhead = 2 * lookAhead // tests lower it

// marks is what the apply goroutine tells every ledger of a shard. Values only grow.
type marks struct {
	last     atomic.Uint64 // the greatest address assigned
	delayed  atomic.Uint64 // +1 per change of the delayed index
	disorder atomic.Uint64 // +1 when messages became deliverable, or finished, out of order
}

// noteLast raises last.
func (m *marks) noteLast(a queue.Address) {
	for {
		old := m.last.Load()
		if old >= uint64(a) || m.last.CompareAndSwap(old, uint64(a)) {
			return
		}
	}
}

// Ledger is what one group's home knows under one epoch: which messages are ready, delayed, leased, or retrying, and
// which of its commands apply has not answered. It lives in memory only and is built from applied state that
// includes its own Home; from then on only this home's commands, purges and cancels change the group, so results
// keep it true. It asks no clock: now is boot time, stamp what a proposer would give now. Not safe for concurrent
// use.
//
// Invariants (Check):
//  1. A message has at most one live lease.
//  2. A message has at most one unresolved Expire entry, and never an ack beside one that does more than record the
//     lease; with either it gets no lease and its lease does not run out.
//  3. Of one key at most one message is leased or ready, and it is the first tracked one.
//  4. leased and every consumer's held are the numbers of live leases.
//  5. A lease without a record is among the ages, in order of hand-out, unless a command for its message is unresolved.
//  6. Every unfinished message below scan is tracked, was passed by the straggler scan's rules, or is in the delayed
//     index above the due cursor.
type Ledger struct {
	reader queue.Reader
	marks  *marks
	random func() uint64

	id    queue.GroupID
	epoch queue.Epoch
	start queue.Address
	cfg   queue.GroupConfig
	keyed bool
	gone  bool // its epoch has ended

	// doubtful: an ack that was refused for a dead letter may be applied yet, and would finish the message if it were redriven before.
	// So no redrive begins under this epoch.
	doubtful bool

	tracked  map[queue.Address]*entry
	chains   map[string]*chain
	timed    entryHeap // by (not-before, address): heads of keys, retrying, given back
	leases   entryHeap // by deadline
	ages     ages      // of leases: those without a record
	leaving  bool      // the group is being moved: every open lease is recorded now
	fresh    buffer    // read ahead, in address order
	due      buffer    // delayed messages that are due, in (visible-at, address) order
	blocked  int
	number   uint64 // the last lease's
	leased   int
	holders  map[string]*consumer
	active   *consumer // single active consumer
	claims   []*op     // those that take its place; answered ones are removed when it matters
	acks     batcher
	expires  batcher
	counters counters

	scan      queue.Address // everything below was read
	unread    bool          // pick stopped before it found anything, or the end
	straggle  queue.Address // parked stragglers below were read, after scan had passed them
	straggled time.Duration // when

	dueAfter  queue.DelayedKey // the delayed index was read up to here
	dueAt     queue.Stamp      // nothing more is due before it
	dueSeen   uint64           // marks.delayed as of the last read
	clockSeen queue.Stamp      // the shard's clock before that read
	sweep     bool             // the whole due part of the index is to be read again
	sweepFrom time.Duration    // not before
	swept     int              // entries passed since the last sweep began

	disorderSeen uint64
	delayedSeen  uint64
	recheckFrom  time.Duration
	recheck      []queue.Address // tracked addresses that are yet to be compared with the state
}

type counters struct{ handed, acked, failed, dead uint64 }

// newLedger builds the ledger of a group whose Home for this process is applied. The group must have been read
// after that apply, and this is called after it.
func newLedger(r queue.Reader, m *marks, g queue.GroupInfo, o queue.QueueOptions, random func() uint64,
	now time.Duration, stamp queue.Stamp) (*Ledger, error) {
	l := &Ledger{
		reader: r, marks: m, random: random,
		id: g.ID, epoch: g.Epoch, start: g.Start, cfg: policy(g.Config), keyed: o.Ordering == queue.OrderKey,
		tracked: map[queue.Address]*entry{}, chains: map[string]*chain{}, holders: map[string]*consumer{},
		timed:  entryHeap{less: byNotBefore, place: placeTimed},
		leases: entryHeap{less: byDeadline, place: placeLeased},
		scan:   max(g.Floor, g.Start) + 1,
	}
	l.dueSeen, l.disorderSeen, l.delayedSeen = m.delayed.Load(), m.disorder.Load(), l.delayedMark()
	m.noteLast(r.Meta().Last)
	if l.keyed && g.Counters.Leased == 0 {
		return l, nil // the scan meets retrying messages at their place in their key
	}
	for from := queue.Address(0); ; {
		page, next, err := r.Retrying(l.id, from, readAhead)
		if err != nil {
			return nil, err
		}
		for i := range page {
			// With key order a message that is out blocks its key, so it is known before the scan meets the others.
			if !l.keyed || page[i].HasLease {
				l.discover(&page[i], now, stamp)
			}
		}
		if next == 0 {
			return l, nil
		}
		from = next
	}
}

// policy is a group's configuration with the defaults that a zero value stands for; no jitter stays none.
func policy(c queue.GroupConfig) queue.GroupConfig {
	jitter := c.JitterPermille
	c.EnsureDefaults()
	c.JitterPermille = jitter
	return c
}

// configure takes a changed configuration; the epoch is the same.
func (l *Ledger) configure(g queue.GroupInfo) { l.cfg = policy(g.Config) }

// discover tracks a message that a read has met, unless it is tracked already.
func (l *Ledger) discover(d *queue.Deliverable, now time.Duration, stamp queue.Stamp) *entry {
	if l.tracked[d.Address] != nil {
		return nil
	}
	e := &entry{
		address: d.Address, change: d.Retry.Change, round: d.Retry.Round, attempts: d.Retry.Attempts,
		notBefore: max(d.Retry.NotBefore, d.VisibleAt), reason: d.Retry.Reason, place: placeBusy,
	}
	if e.notBefore <= stamp && !d.HasRetry {
		e.notBefore = 0
	}
	l.tracked[e.address] = e
	if l.keyed && len(d.Key) > 0 {
		l.enchain(e, d.Key)
	}
	if d.HasLease {
		l.honour(e, d.Lease, now, stamp)
	}
	switch {
	case e.place != placeBusy: // leased, or behind the head of its key
	case e.notBefore == 0:
		l.fresh.push(e)
	default:
		l.timed.push(e)
	}
	return e
}

// enchain puts an entry behind the others of its key.
func (l *Ledger) enchain(e *entry, key []byte) {
	c := l.chains[string(key)]
	if c == nil {
		c = &chain{key: string(key)}
		l.chains[c.key] = c
	}
	c.add(e)
	if c.head != e {
		e.place = placeBlocked
		l.blocked++
	}
}

// skewMargin is twice the greatest difference between two hosts' clocks, in ms: so much longer than its recorded
// deadline lasts a lease that was recorded by another process.
const skewMargin = 1000

// lateGrace is how long a lease that is over is still held by a new ledger: an ack that made it be built comes first. An
// ack that comes after the run-out was begun does not save the last attempt.
const lateGrace = 100 * time.Millisecond

// honour takes over a lease that apply has recorded, with its hand-out: it lasts to its deadline and the margin, whatever the clocks say
// no longer than MaxLease. One that is over by then runs out after lateGrace, and counts.
func (l *Ledger) honour(e *entry, r queue.RecordedLease, now time.Duration, stamp queue.Stamp) {
	if e.place == placeBlocked {
		return
	}
	e.lease, e.recorded, e.kept = r.Name, true, true
	left := lateGrace
	if end := r.Deadline + skewMargin; end > stamp {
		left = max(left, min(ms(uint64(end-stamp)), MaxLease))
	}
	e.deadline, e.handed, e.touched, e.begun = now+left, now, now, r.Begun
	if r.Begun != 0 && r.Begun < stamp { // it is as old as it is: it may not be lengthened for ever by moves
		e.handed = now - ms(uint64(stamp-r.Begun))
	}
	l.hold(e, r.Consumer, now)
	if l.cfg.SingleActiveConsumer && l.active == nil {
		l.active = e.consumer
	}
	l.lease(e)
}

// lease puts a live lease into the heap of deadlines; one without a record is to get it when it is old enough.
func (l *Ledger) lease(e *entry) {
	l.leases.push(e)
	if !e.kept {
		l.ages.putBack(e)
	}
}

// requeue makes an entry deliverable from its not-before on; 0 is at once and before everything fresh.
func (l *Ledger) requeue(e *entry, notBefore queue.Stamp) {
	e.notBefore = notBefore
	if e.chain != nil && e.chain.head != e {
		e.place = placeBlocked
		l.blocked++
		return
	}
	l.timed.push(e)
}

// lift takes an entry out of the structure that holds it.
func (l *Ledger) lift(e *entry) {
	switch e.place {
	case placeTimed:
		l.timed.remove(e)
	case placeLeased:
		l.leases.remove(e)
		if l.ages.holds(e) {
			l.ages.remove(e)
		}
	case placeBlocked:
		l.blocked--
	case placeFresh:
		l.unbuffer(e)
	}
	e.place = placeBusy
}

// unbuffer forgets an entry that still stands in a buffer: pop will skip it, so it must not be pushed there again.
func (l *Ledger) unbuffer(e *entry) {
	for _, b := range [...]*buffer{&l.fresh, &l.due} {
		for i := b.head; i < len(b.items); i++ {
			if b.items[i] == e {
				b.items = append(b.items[:i], b.items[i+1:]...)
				b.size--
				return
			}
		}
	}
}

// drop stops tracking a message: it is finished, dead, or not there. The next of its key may go.
func (l *Ledger) drop(e *entry) {
	l.lift(e)
	l.unhold(e)
	l.abandonRecord(e, code.UnknownDelivery)
	e.place = placeGone
	delete(l.tracked, e.address)
	c := e.chain
	if c == nil {
		return
	}
	wasHead := c.head == e
	c.remove(e)
	switch {
	case c.head == nil:
		delete(l.chains, c.key)
	case wasHead && c.head.place == placeBlocked:
		l.blocked--
		l.timed.push(c.head)
	}
}

// hold makes an entry's lease live for a consumer.
func (l *Ledger) hold(e *entry, name string, now time.Duration) {
	c := l.consumer(name, now)
	c.held++
	e.consumer, e.live = c, true
	l.leased++
}

// unhold ends a live lease; the entry's lease name stays for a late ack.
func (l *Ledger) unhold(e *entry) {
	if !e.live {
		return
	}
	e.live = false
	l.leased--
	e.consumer.held--
	l.forgetIdle(e.consumer)
	e.consumer = nil
}

// consumer finds or makes a consumer.
func (l *Ledger) consumer(name string, now time.Duration) *consumer {
	c := l.holders[name]
	if c == nil {
		c = &consumer{name: name}
		l.holders[name] = c
	}
	c.seen = max(c.seen, now)
	return c
}

// forgetIdle drops a consumer that holds nothing and has no place to keep.
func (l *Ledger) forgetIdle(c *consumer) {
	if c.held == 0 && c != l.active {
		delete(l.holders, c.name)
	}
}

// forget clears the lease of an entry: a receipt of it is worth nothing from here on.
func (e *entry) forget() { e.lease, e.recorded, e.kept = queue.LeaseName{}, false, false }

// ms turns milliseconds into a duration, saturating.
func ms(n uint64) time.Duration {
	if n > uint64(math.MaxInt64)/uint64(time.Millisecond) {
		return never
	}
	return time.Duration(n) * time.Millisecond
}

// stampAfter is a stamp a duration after another, at least 0.
func stampAfter(s queue.Stamp, d time.Duration) queue.Stamp {
	if d <= 0 {
		return s
	}
	return s + queue.Stamp((d+time.Millisecond-1)/time.Millisecond)
}

// stampBefore is the time a while ago, and never 0, which is no time.
func stampBefore(s queue.Stamp, d time.Duration) queue.Stamp {
	ago := queue.Stamp(max(0, d/time.Millisecond))
	if ago >= s {
		return 1
	}
	return s - ago
}
