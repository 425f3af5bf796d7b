package queue

import (
	"sync"
	"sync/atomic"
)

// Chores are what a shard's housekeeper may propose now. They are hints: apply decides again. The zero value: nothing.
type Chores struct {
	Line    Address   // the line can move up to here (ReclaimLine)
	Reclaim []Address // expired messages, and parked ones that no group wants any more
	Park    []Address // stragglers of a stalled line
	DropTo  Address   // log mode: retention has passed these
	Sweep   bool      // an empty Retention goes on sweeping the delayed index
	// Next is where the next look for expired and unwanted messages goes on; 0: it came to the end.
	Next Address
}

// Empty says whether there is nothing to propose. An idle shard writes nothing.
func (c *Chores) Empty() bool {
	return c.Line == 0 && len(c.Reclaim) == 0 && len(c.Park) == 0 && c.DropTo == 0 && !c.Sweep
}

// Retention makes the command, to be stamped.
func (c *Chores) Retention(stamp Stamp) *Retention {
	return &Retention{Stamp: stamp, ReclaimLine: c.Line, Reclaim: c.Reclaim, Park: c.Park, DropTo: c.DropTo}
}

const (
	// stalledAddresses is how many finished addresses above the lowest unfinished one make the line stalled.
	stalledAddresses = 65_536
	// scanMessages and scanBytes bound the messages that one call of Chores looks at for expiry.
	scanMessages = 2048
	scanBytes    = 1 << 20
)

// Chores finds what there is to do at a time. Expired and unwanted messages are looked for from an address on, a
// bounded number a call: go on with Next. The call reads at most a few thousand keys.
func (s *QueueStateMachine) Chores(now Stamp, from Address) (c Chores, err error) {
	defer recoverFault(&err)
	if from == 0 {
		s.expiry.begin() // before the view: what is committed later counts as appended since
	}
	k := s.everything()
	defer k.close()
	k.now = now
	c.Sweep = k.meta.sweeping
	k.line(&c)
	k.scan(&c, from, s.expiry.needed())
	s.expiry.looked(k.sawExpiry, c.Next == 0)
	if k.meta.Options.Mode == ModeLog {
		c.DropTo = k.retained()
	}
	return c, nil
}

// expiryHint remembers that no stored message has a time to live, so that a backlog is not read over and over to look
// for expired ones. It is found out by looking at all of them once per process, and holds until one is appended.
type expiryHint struct {
	appended atomic.Uint64 // messages with a time to live, since Open

	mu      sync.Mutex
	begun   uint64 // appended when the look under way began
	looking bool
	found   bool // that look has found one
	none    bool // there was none when appended was begun
}

func (h *expiryHint) needed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.none || h.begun != h.appended.Load()
}

func (h *expiryHint) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.appended.Load()
	h.none = h.none && h.begun == now
	h.begun, h.looking, h.found = now, true, false
}

// looked notes what a part of the look found, and whether it was the last one.
func (h *expiryHint) looked(found, last bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.found = h.found || found
	if last && h.looking {
		h.none, h.looking = !h.found, false
	}
}

// reset forgets, as the messages are others now.
func (h *expiryHint) reset() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.none, h.looking = false, false
}

type housekeeper struct {
	*view
	now       Stamp
	groups    []*group
	sawExpiry bool
}

// line finds how far the line can move, and the stragglers if it is stalled.
func (k *housekeeper) line(c *Chores) {
	m := &k.meta
	if m.Options.Mode == ModeLog || len(k.groups) == 0 {
		if first := k.firstInPlace(m.Line + 1); first-1 > m.Line {
			c.Line = first - 1
		}
		return
	}
	lowest := m.Last + 1
	wanted, most := uint64(0), uint64(0)
	for _, g := range k.groups {
		lowest = min(lowest, k.hold(g)+1)
		wanted += g.unfinished(m) + g.c.Dead
		most = max(most, g.unfinished(m)+g.c.Dead)
	}
	if lowest-1 > m.Line {
		c.Line = lowest - 1
	}
	if k.stalled(lowest, wanted, most) {
		c.Park = k.stragglers(lowest)
	}
}

func (k *housekeeper) firstInPlace(a Address) Address {
	it := openIter(k.snap, appendMessageKey(nil, a), []byte{kindMessage + 1})
	defer it.Close()
	if it.First() {
		return Address(lastU64(it.Key()))
	}
	check(it.Err())
	return k.meta.Last + 1
}

// hold looks for the lowest unfinished address of a group that is in place, a bounded number of parked ones on.
func (k *housekeeper) hold(g *group) Address {
	u := newUnfinished(k.snap, g, k.gone, k.meta.Last)
	defer u.close()
	inPlace := keyCursor{r: k.snap, prefix: []byte{kindMessage}, some: true}
	defer inPlace.close()
	hold := max(g.hold, g.start)
	for range MaxHousekeeping {
		a, ok := u.next(hold + 1)
		if !ok {
			return k.meta.Last
		}
		if inPlace.has(a) {
			return a - 1
		}
		hold = a
	}
	return hold
}

// stalled says whether finished messages pile up above the lowest unfinished one: more than stalledAddresses, or half
// of the queue's limit. What is finished is counted from below: an address that some group wants is not, nor is one that a recovery
// has skipped. wanted is what the groups want, most the greatest part of one of them.
func (k *housekeeper) stalled(lowest Address, wanted, most uint64) bool {
	m := &k.meta
	if lowest > m.Last {
		return false
	}
	span := uint64(m.Last - lowest + 1)
	if span <= wanted {
		return false
	}
	finished := min(span-wanted, m.Counters.Messages-min(m.Counters.Messages, most))
	if finished > stalledAddresses {
		return true
	}
	o := &m.Options
	if o.MaxMessages > 0 && finished > o.MaxMessages/2 {
		return true
	}
	return m.Counters.Messages > 0 && finished*(m.Counters.Bytes/m.Counters.Messages) > o.MaxBytes/2
}

// stragglers lists unfinished messages in place from the lowest on.
func (k *housekeeper) stragglers(lowest Address) []Address {
	walks := make([]*unfinished, len(k.groups))
	for i, g := range k.groups {
		walks[i] = newUnfinished(k.snap, g, k.gone, k.meta.Last)
		defer walks[i].close()
	}
	inPlace := keyCursor{r: k.snap, prefix: []byte{kindMessage}, some: true}
	defer inPlace.close()
	var list []Address
	for n := 0; n < 2*MaxHousekeeping && len(list) < MaxHousekeeping/2; n++ {
		a := k.meta.Last + 1
		for _, w := range walks {
			if x, ok := w.next(lowest); ok {
				a = min(a, x)
			}
		}
		if a > k.meta.Last {
			break
		}
		if inPlace.has(a) {
			list = append(list, a)
		}
		lowest = a + 1
	}
	return list
}

// scan looks for expired messages, parked ones and, when asked to, those in place, and for parked ones that no group
// wants.
func (k *housekeeper) scan(c *Chores, from Address, inPlace bool) {
	most := MaxHousekeeping - len(c.Park)
	in := keyCursor{r: k.snap, prefix: []byte{kindMessage}, some: inPlace}
	parked := keyCursor{r: k.snap, prefix: []byte{kindParked}, some: k.meta.Counters.Parked > 0}
	defer in.close()
	defer parked.close()
	w := k.wants()
	defer w.close()
	a := max(from, 1)
	for n, read := 0, 0; ; n++ {
		cur := &in
		if !in.has(a) {
			cur = &parked
			if !parked.has(a) {
				if a = nextKey(&in, &parked); a > MaxAddress {
					return
				}
				continue
			}
		}
		if n >= scanMessages || read > scanBytes || len(c.Reclaim) >= most {
			c.Next = a
			return
		}
		value := cur.value()
		read += len(value)
		h, err := readHead(value)
		check(err)
		k.sawExpiry = k.sawExpiry || h.expiresAt != 0
		if k.reclaimable(w, a, cur == &parked, &h) {
			c.Reclaim = append(c.Reclaim, a)
		}
		a++
	}
}

// nextKey is the lower of the keys that cursors, which have not found an address, stand on.
func nextKey(cursors ...*keyCursor) Address {
	next := MaxAddress + 1
	for _, c := range cursors {
		if c.some {
			next = min(next, c.at)
		}
	}
	return next
}

func (k *housekeeper) reclaimable(w *wants, a Address, parked bool, h *messageHead) bool {
	if h.expiresAt != 0 && h.expiresAt <= k.now {
		return !w.held(a, k.now)
	}
	return parked && k.meta.Options.Mode == ModeWork && len(k.groups) > 0 && !w.any(a)
}

// wants tells what groups still want, or hold on to.
type wants struct {
	walks  []*unfinished
	dead   []keyCursor
	leases []keyCursor
}

func (k *housekeeper) wants() *wants {
	w := &wants{}
	for _, g := range k.groups {
		w.walks = append(w.walks, newUnfinished(k.snap, g, k.gone, k.meta.Last))
		w.dead = append(w.dead, groupCursorOf(k.snap, kindDead, g.id, g.c.Dead > 0))
		w.leases = append(w.leases, groupCursorOf(k.snap, kindLease, g.id, g.c.Leased > 0))
	}
	return w
}

func (w *wants) close() {
	for i := range w.walks {
		w.walks[i].close()
		w.dead[i].close()
		w.leases[i].close()
	}
}

func (w *wants) any(a Address) bool {
	for _, u := range w.walks {
		if x, ok := u.next(a); ok && x == a {
			return true
		}
	}
	return false
}

// held says whether a message is a dead letter, or leased at a time, somewhere, so that expiry must leave it.
func (w *wants) held(a Address, now Stamp) bool {
	for i := range w.dead {
		if w.dead[i].has(a) {
			return true
		}
		if w.leases[i].has(a) {
			l, err := readLease(w.leases[i].value())
			check(err)
			if l.Deadline > now {
				return true
			}
		}
	}
	return false
}

// retained finds up to where log mode's retention drops: by age, messages and bytes, the last two by whole buckets.
func (k *housekeeper) retained() Address {
	o, m := &k.meta.Options, &k.meta
	to := Address(0)
	if o.RetainMs > 0 && k.now > Stamp(o.RetainMs) {
		since := firstSince(k.snap, m, kindMessage, k.now-Stamp(o.RetainMs))
		to = max(to, since-1)
	}
	if o.RetainMessages > 0 && m.Counters.Messages > o.RetainMessages || o.RetainBytes > 0 && m.Counters.Bytes > o.RetainBytes {
		to = max(to, k.beyondSize())
	}
	if to <= m.Line {
		return 0
	}
	return to
}

// beyondSize finds the last address of the newest bucket without which a limit of retention is still reached.
func (k *housekeeper) beyondSize() (to Address) {
	o, messages, bytes := &k.meta.Options, k.meta.Counters.Messages, k.meta.Counters.Bytes
	it := openIter(k.snap, []byte{kindCount}, []byte{kindCount + 1})
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		raw, err := it.Value()
		check(err)
		var v countValue
		check(v.decode(raw))
		messages, bytes = messages-v.messages-v.parked, bytes-v.bytes-v.parkedBytes
		enough := o.RetainMessages > 0 && messages >= o.RetainMessages || o.RetainBytes > 0 && bytes >= o.RetainBytes
		if last := bucketLast(lastU64(it.Key())); enough && last < k.meta.Last {
			to = last
			continue
		}
		break
	}
	check(it.Err())
	return to
}
