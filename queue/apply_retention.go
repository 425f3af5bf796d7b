package queue

import (
	"github.com/tierq/tierq/queue/code"
)

// Retention is housekeeping of the shard. Its parts apply in the order of the command's fields, each as far as it is
// still right, so a late or repeated copy is harmless; only Options and FormatLevel can refuse the command, and they
// are looked at before anything else.
//
//	ReclaimLine  the line moves up to it, but never past a message in place that a group has not finished; in log
//	             mode and without groups only over addresses that hold nothing in place. One command deletes whole
//	             buckets, and counts at most maxHousekeeping messages of the last one: propose it again for the rest.
//	Reclaim      deletes messages that every group has finished (not in log mode, not without groups), and messages
//	             whose expires-at has come: those are finished as expired for every group where they are neither
//	             dead nor held by a recorded lease that runs.
//	DropTo       finishes everything at or below it for every group (Expired), also what is leased, delayed or dead,
//	             and deletes it (Dropped).
//	PurgeTo      the same, counted as Purged.
//	Park         parks messages that a group has not finished, so that the line can pass them.
//	Delayed      cancels or reschedules: Skipped when the message is no more delayed, or its visible-at is another
//	             one or has come; UnknownMessage when it does not exist.
//	Options      MutationFenced unless its Version is the stored one; the stored version moves by one.
//	Retire       publishes are refused from here on.
//	FormatLevel  never falls; LimitReached above what this version knows.
//	Forget       forgets what outboxes have published: only for those whose source exists no more.
//	Import       takes a chunk of a saved state into a fresh shard (import.go); alone in its command.
//	Recover      begins a new life of the shard (recovery.go); alone in its command.
//	CheckpointID is stored, so that replicas can compare their state right after this entry.
//
// An empty command goes on removing entries of the delayed index that a purge left behind, like every other.
//
// Version 1: as above.
func (t *tx) retention(c *Retention, r *Result) {
	if r.Code = t.mayRetain(c); r.Code != code.OK {
		r.Version = t.meta.Options.Version
		return
	}
	if c.Import != nil {
		t.importChunk(c.Import, r)
		return
	}
	if c.Recover != nil {
		t.recover(c.Recover, r)
		return
	}
	if t.imp != nil { // only options get here
		t.setOptions(c)
		r.Version = t.meta.Options.Version
		return
	}
	t.reclaimTo(c.ReclaimLine)
	t.reclaim(c.Reclaim)
	t.dropTo(c.DropTo, false)
	t.dropTo(c.PurgeTo, true)
	t.parkAll(c.Park)
	r.Delayed = t.changeDelayed(c.Delayed)
	t.setOptions(c)
	t.forgetOutboxes(c.Forget)
	t.sweep()
	r.Version = t.meta.Options.Version
}

func (t *tx) mayRetain(c *Retention) code.Code {
	switch {
	case c.Options != nil && c.Options.Version != t.meta.Options.Version:
		return code.MutationFenced
	case c.FormatLevel > maxFormatLevel:
		return code.LimitReached
	}
	return code.OK
}

func (t *tx) setOptions(c *Retention) {
	m := &t.meta
	if c.Options != nil {
		version := m.Options.Version
		m.Options = *c.Options
		m.Options.Version = version + 1
	}
	m.Retired = m.Retired || c.Retire
	m.FormatLevel = max(m.FormatLevel, c.FormatLevel)
	if c.CheckpointID != 0 {
		m.checkpoint = c.CheckpointID
	}
}

// reclaimTo moves the line.
func (t *tx) reclaimTo(to Address) {
	to = min(to, t.meta.Last)
	if to <= t.meta.Line {
		return
	}
	to = min(to, t.finishedLine(to))
	to = t.countableLine(to)
	if to <= t.meta.Line {
		return
	}
	n := t.takeInPlace(to)
	t.meta.Counters.Reclaimed += n
	t.moveLine(to)
}

// finishedLine is the greatest address up to which nothing in place is wanted; not much above to.
func (t *tx) finishedLine(to Address) Address {
	if t.meta.Options.Mode == ModeLog || len(t.liveGroups()) == 0 {
		return t.firstInPlace(t.meta.Line+1) - 1
	}
	line := to
	for _, id := range t.liveGroups() {
		line = min(line, t.holdOf(id, to))
	}
	return line
}

// firstInPlace finds the least address at or above a that holds a message in place; the next to be assigned if none.
func (t *tx) firstInPlace(a Address) Address {
	it := openIter(t.r, appendMessageKey(nil, a), []byte{kindMessage + 1})
	defer it.Close()
	if it.First() {
		return Address(lastU64(it.Key()))
	}
	check(it.Err())
	return t.meta.Last + 1
}

// holdOf is the greatest address, up to a bound, at or below which everything that a group has not finished is
// parked. It is kept in the group, so that each parked address is passed once.
func (t *tx) holdOf(id GroupID, bound Address) Address {
	g := t.group(id)
	hold := max(g.hold, g.start)
	if hold >= bound {
		return hold
	}
	u := newUnfinished(t.r, g, t.goneSet(), t.meta.Last)
	defer u.close()
	inPlace := keyCursor{r: t.r, prefix: []byte{kindMessage}, some: true}
	defer inPlace.close()
	for n := 0; ; n++ {
		a, ok := u.next(hold + 1)
		if !ok || a > bound {
			hold = bound
			break
		}
		if inPlace.has(a) {
			hold = a - 1
			break
		}
		hold = a
		if n == MaxHousekeeping {
			break
		}
	}
	if hold > g.hold {
		t.edit(id).hold = hold
	}
	return hold
}

// countableLine lowers a line so that at most MaxHousekeeping messages, and little more than maxReadBytes, of the
// last, partial bucket have to be counted one by one.
func (t *tx) countableLine(to Address) Address {
	if to <= t.meta.Line || to == bucketLast(bucketOf(to)) || to == t.meta.Last {
		return to
	}
	low := t.meta.Line
	if first := bucketFirst(bucketOf(to)); first > low+1 {
		low = first - 1
	}
	it := openIter(t.r, appendMessageKey(nil, low+1), appendMessageKey(nil, to+1))
	defer it.Close()
	n, bytes := 0, uint64(0)
	for ok := it.First(); ok; ok = it.Next() {
		if n++; n > MaxHousekeeping || bytes > maxReadBytes {
			return Address(lastU64(it.Key())) - 1
		}
		v, err := it.Value()
		check(err)
		bytes += uint64(len(v))
	}
	check(it.Err())
	return to
}

// maxReadBytes bounds what a command reads to count messages.
const maxReadBytes = 8 << 20

// takeInPlace deletes the messages in place at or below an address, and returns how many there were.
func (t *tx) takeInPlace(to Address) (n uint64) {
	t.writeCounts()
	last := bucketOf(to)
	t.eachCount(bucketOf(t.meta.Line+1), last, func(b uint64, v *countValue) {
		took, bytes := v.messages, v.bytes
		if b == last {
			took, bytes = t.upTo(kindMessage, to, took, bytes)
		}
		v.messages -= took
		v.bytes -= bytes
		t.meta.Counters.Messages -= took
		t.meta.Counters.Bytes -= bytes
		n += took
	})
	t.deleteInPlace(t.meta.Line+1, to)
	return n
}

// manyKeys is how many keys are worth a range delete, which costs later reads of every shard in the memtable.
const manyKeys = 128

// deleteInPlace removes the messages of first..last. Nothing in place lies below first, so range deletes of one line
// after the other do not overlap.
func (t *tx) deleteInPlace(first, last Address) {
	if last-first >= manyKeys {
		t.b.DeleteRange(appendMessageKey(nil, first), appendMessageKey(nil, last+1))
		return
	}
	for a := first; a <= last; a++ {
		t.b.Delete(appendMessageKey(t.key[:0], a))
	}
}

// eachCount calls f for the count records of buckets first..last and stores what f makes of them.
func (t *tx) eachCount(first, last uint64, f func(b uint64, v *countValue)) {
	it := openIter(t.r, appendKey1(nil, kindCount, first), appendKey1(nil, kindCount, last+1))
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		c := bucketCount{bucket: lastU64(it.Key())}
		raw, err := it.Value()
		check(err)
		check(c.v.decode(raw))
		f(c.bucket, &c.v)
		t.counts = append(t.counts, c)
	}
	check(it.Err())
	t.writeCounts()
}

// upTo counts the messages of a kind in the bucket of an address, at or below it, given the bucket's totals. It walks
// the shorter side.
func (t *tx) upTo(kind byte, to Address, messages, bytes uint64) (n, size uint64) {
	first, last := bucketFirst(bucketOf(to)), bucketLast(bucketOf(to))
	end := min(last, t.meta.Last)
	if to >= end || messages == 0 {
		return messages, bytes
	}
	if to-first < end-to {
		n, size = t.sum(kind, first, to)
		return n, size
	}
	n, size = t.sum(kind, to+1, end)
	return messages - n, bytes - size
}

// sum walks the messages of a kind in first..last.
func (t *tx) sum(kind byte, first, last Address) (n, size uint64) {
	t.walkHeads(kind, first, last, func(_ Address, h *messageHead) {
		n++
		size += h.size
	})
	return n, size
}

func (t *tx) walkHeads(kind byte, first, last Address, f func(a Address, h *messageHead)) {
	it := openIter(t.r, appendKey1(nil, kind, uint64(first)), appendKey1(nil, kind, uint64(last)+1))
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		check(err)
		h, err := readHead(v)
		check(err)
		f(Address(lastU64(it.Key())), &h)
	}
	check(it.Err())
}

// moveLine records that nothing is in place at or below an address. What is gone is remembered above the least floor of
// the groups: one that began after an address had gone, and holds something parked below it, knows of it only by this.
func (t *tx) moveLine(to Address) {
	t.meta.Line = to
	s := t.goneSet()
	if s.empty() {
		return
	}
	for _, id := range t.liveGroups() {
		to = min(to, t.group(id).wm.Floor())
	}
	if t.gone == nil {
		t.gone = s.clone()
	}
	t.trimRanges(t.gone, to)
}

// storedAbove counts the stored messages above an address.
func (t *tx) storedAbove(a Address) (n uint64) {
	if a >= t.meta.Last {
		return 0
	}
	t.writeCounts()
	first := bucketOf(a)
	it := openIter(t.r, appendKey1(nil, kindCount, first), []byte{kindCount + 1})
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		raw, err := it.Value()
		check(err)
		var v countValue
		check(v.decode(raw))
		n += v.messages + v.parked
		if lastU64(it.Key()) == first {
			below, _ := t.upTo(kindMessage, a, v.messages, v.bytes)
			parked, _ := t.upTo(kindParked, a, v.parked, v.parkedBytes)
			n -= below + parked
		}
	}
	check(it.Err())
	return n
}

func (t *tx) liveGroups() []GroupID { return t.s.ids }

// reclaim deletes single messages that are finished or expired.
func (t *tx) reclaim(list []Address) {
	for _, a := range list {
		t.reclaimOne(a)
	}
}

func (t *tx) reclaimOne(a Address) {
	value, parked, ok := t.stored(a)
	if !ok {
		return
	}
	h, err := readHead(value)
	check(err)
	expired := h.expiresAt != 0 && h.expiresAt <= t.meta.Clock && !t.clamped
	if expired {
		t.expireFor(a)
	}
	keeps := t.meta.Options.Mode == ModeLog || len(t.liveGroups()) == 0
	if !expired && keeps || !t.finishedByAll(a) {
		return
	}
	t.deleteMessage(a, parked, &h)
	if expired {
		t.meta.Counters.Expired++
	} else {
		t.meta.Counters.Reclaimed++
	}
}

// expireFor finishes an expired message for the groups where it is neither dead nor leased.
func (t *tx) expireFor(a Address) {
	for _, id := range t.liveGroups() {
		g := t.group(id)
		if !g.owns(a, t.meta.Last) || t.isFinished(g, a) || t.isDead(id, a) || t.isLeased(id, a) {
			continue
		}
		t.finishFor(t.edit(id), a)
		t.edit(id).c.Expired++
	}
}

// finishFor finishes a message, not dead, for a group, and removes what the group keeps about it.
func (t *tx) finishFor(g *group, a Address) {
	for _, x := range [...]struct {
		kind byte
		n    *uint64
	}{{kindRetry, &g.c.Retrying}, {kindLease, &g.c.Leased}} {
		key := appendGroupAddressKey(t.key[:0], x.kind, g.id, a)
		if *x.n > 0 && t.has(key) {
			t.b.Delete(key)
			*x.n--
		}
	}
	t.finish(g, a)
}

func (t *tx) has(key []byte) bool {
	ok, err := t.r.View(key, func([]byte) error { return nil })
	check(err)
	return ok
}

func (t *tx) isDead(id GroupID, a Address) bool {
	return t.group(id).c.Dead > 0 && t.has(appendGroupAddressKey(t.key[:0], kindDead, id, a))
}

func (t *tx) isLeased(id GroupID, a Address) bool {
	if t.group(id).c.Leased == 0 {
		return false
	}
	var l RecordedLease
	ok, err := t.r.View(appendGroupAddressKey(t.key[:0], kindLease, id, a), func(v []byte) (err error) {
		l, err = readLease(v)
		return err
	})
	check(err)
	return ok && l.Deadline > t.meta.Clock
}

// stored reads a message's value, in place or parked.
func (t *tx) stored(a Address) (value []byte, parked, ok bool) {
	value, ok, err := t.r.Get(appendMessageKey(t.key[:0], a))
	check(err)
	if ok {
		return value, false, true
	}
	value, ok, err = t.r.Get(appendKey1(t.key[:0], kindParked, uint64(a)))
	check(err)
	return value, true, ok
}

// parkAll parks messages that a group has not finished, as far as maxRewriteBytes goes.
func (t *tx) parkAll(list []Address) {
	var rewritten uint64
	for _, a := range list {
		if a <= t.meta.Line || a > t.meta.Last || len(t.liveGroups()) == 0 || t.finishedByAll(a) {
			continue
		}
		if !t.park(a, messageStraggler, &rewritten) {
			return
		}
	}
}

func (t *tx) changeDelayed(list []DelayedChange) []code.Code {
	if len(list) == 0 {
		return nil
	}
	codes := make([]code.Code, len(list))
	var rewritten uint64
	for i, c := range list {
		codes[i] = t.changeOne(c, &rewritten)
	}
	return codes
}

func (t *tx) changeOne(c DelayedChange, rewritten *uint64) code.Code {
	value, parked, ok := t.stored(c.Address)
	if !ok {
		return code.UnknownMessage
	}
	h, err := readHead(value)
	check(err)
	if !parked || h.flags&messageDelayed == 0 || h.visibleAt != c.Expected || h.visibleAt <= t.meta.Clock {
		return code.Skipped
	}
	if c.NewVisibleAt == 0 {
		t.cancel(c.Address, &h)
		return code.OK
	}
	if *rewritten > 0 && *rewritten+h.size > maxRewriteBytes {
		return code.Backpressure
	}
	*rewritten += h.size + 1
	moved, err := rewriteMessage(value, h.flags, c.NewVisibleAt)
	check(err)
	t.b.Delete(appendDelayedKey(t.key[:0], DelayedKey{h.visibleAt, c.Address}))
	t.b.Set(appendDelayedKey(t.key[:0], DelayedKey{c.NewVisibleAt, c.Address}), nil)
	t.b.Set(appendKey1(t.key[:0], kindParked, uint64(c.Address)), moved)
	t.event.Delayed = true
	return code.OK
}

// cancel finishes a delayed message, which nobody has seen, for every group.
func (t *tx) cancel(a Address, h *messageHead) {
	for _, id := range t.liveGroups() {
		g := t.group(id)
		if !g.owns(a, t.meta.Last) || t.isFinished(g, a) {
			continue
		}
		g = t.edit(id)
		if t.isDead(id, a) { // rejected before its time
			t.dropDead(g, a)
		}
		t.finishFor(g, a)
		g.c.Cancelled++
	}
	t.deleteMessage(a, true, h)
	t.meta.Counters.Cancelled++
	t.event.Delayed = true
}
