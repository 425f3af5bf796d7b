package queue

import "github.com/tierq/tierq/queue/code"

// dropTo finishes everything at or below an address for every group and deletes it. Nothing is walked but the count
// records, half a bucket, and the finished ranges, retry states, leases and dead letters at or below the address.
func (t *tx) dropTo(to Address, purge bool) {
	to = min(to, t.meta.Last)
	if to == 0 {
		return
	}
	for _, id := range t.liveGroups() {
		t.dropFor(id, to, purge)
	}
	n := t.takeInPlace(to) + t.takeParked(to)
	c := &t.meta.Counters
	if purge {
		c.Purged += n
	} else {
		c.Dropped += n
	}
	if to > t.meta.Line {
		t.moveLine(to)
	}
	t.event.Redrive = true
}

// dropFor finishes a group's addresses at or below an address.
func (t *tx) dropFor(id GroupID, to Address, purge bool) {
	if g := t.group(id); to <= g.start || to <= g.wm.Lane(0).Floor {
		return
	}
	g := t.edit(id)
	dropped := t.unfinishedUpTo(g, to)
	t.dropExportsTo(g, to)
	c := &g.c
	for _, x := range [...]struct {
		kind byte
		n    *uint64
	}{{kindDead, &c.Dead}, {kindRetry, &c.Retrying}, {kindLease, &c.Leased}} {
		*x.n -= t.dropKeys(x.kind, id, to, *x.n)
	}
	if purge {
		c.Purged += dropped
	} else {
		c.Expired += dropped
	}
	t.raise(g, to)
}

// unfinishedUpTo counts what a group has not finished at or below an address, dead letters too. It walks the finished
// ranges of the shorter side.
func (t *tx) unfinishedUpTo(g *group, to Address) uint64 {
	all := g.unfinished(&t.meta) + g.c.Dead
	floor := g.wm.Floor()
	if to <= floor {
		return t.countUnfinished(g, g.start, to)
	}
	if t.meta.Last-to <= to-floor {
		return all - t.countUnfinished(g, to, t.meta.Last)
	}
	return t.countUnfinished(g, floor, to)
}

func (t *tx) countUnfinished(g *group, low, high Address) uint64 {
	if low >= high {
		return 0
	}
	u := newUnfinished(t.r, g, t.goneSet(), t.meta.Last)
	defer u.close()
	return u.count(low, high)
}

// dropKeys removes a group's keys of a kind at or below an address and returns how many there were, of all.
func (t *tx) dropKeys(kind byte, id GroupID, to Address, all uint64) (n uint64) {
	if all == 0 {
		return 0
	}
	low, high := appendGroupAddressKey(nil, kind, id, 0), appendGroupAddressKey(nil, kind, id, to+1)
	if to >= t.meta.Last {
		t.b.DeleteRange(low, high)
		return all
	}
	return t.deleteKeys(low, high)
}

// deleteKeys removes the keys of a range, which it walks, and returns how many there were.
func (t *tx) deleteKeys(low, high []byte) (n uint64) {
	it := openIter(t.r, low, high)
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		if n++; n <= manyKeys {
			t.b.Delete(it.Key())
		}
	}
	check(it.Err())
	if n > manyKeys {
		t.b.DeleteRange(low, high)
	}
	return n
}

// takeParked deletes the parked messages at or below an address and returns how many there were.
func (t *tx) takeParked(to Address) (n uint64) {
	if t.meta.Counters.Parked == 0 {
		return 0
	}
	t.writeCounts()
	last, delayed, c := bucketOf(to), uint64(0), &t.meta.Counters
	t.eachCount(0, last, func(b uint64, v *countValue) {
		took := *v
		if b == last {
			took.parked, took.parkedBytes, took.delayed = t.parkedUpTo(to, v)
		}
		v.parked -= took.parked
		v.parkedBytes -= took.parkedBytes
		v.delayed -= took.delayed
		c.Bytes -= took.parkedBytes
		n += took.parked
		delayed += took.delayed
	})
	c.Messages -= n
	c.Parked -= n
	c.Delayed -= delayed
	t.b.DeleteRange(appendKey1(nil, kindParked, 0), appendKey1(nil, kindParked, uint64(to)+1))
	if delayed > 0 {
		t.leaveStale(to)
	}
	return n
}

// parkedUpTo counts the parked messages at or below an address in its bucket, walking the shorter side.
func (t *tx) parkedUpTo(to Address, v *countValue) (n, size, delayed uint64) {
	first, end := bucketFirst(bucketOf(to)), min(bucketLast(bucketOf(to)), t.meta.Last)
	if to >= end || v.parked == 0 {
		return v.parked, v.parkedBytes, v.delayed
	}
	below := to-first < end-to
	if !below {
		first, to = to+1, end
	}
	t.walkHeads(kindParked, first, to, func(_ Address, h *messageHead) {
		n++
		size += h.size
		if h.flags&messageDelayed != 0 {
			delayed++
		}
	})
	if !below {
		return v.parked - n, v.parkedBytes - size, v.delayed - delayed
	}
	return n, size, delayed
}

// leaveStale leaves the delayed index to sweep: it is in order of time, and only the addresses tell what is gone.
func (t *tx) leaveStale(to Address) {
	m := &t.meta
	if m.Counters.Delayed == 0 {
		t.b.DeleteRange([]byte{kindDelayed}, []byte{kindDelayed + 1})
		m.sweeping, m.sweepAt = false, DelayedKey{}
		return
	}
	m.purgedTo = max(m.purgedTo, to)
	m.sweeping, m.sweepAt = true, DelayedKey{}
}

// sweep removes entries of the delayed index that leaveStale left, looking at no more than MaxHousekeeping.
func (t *tx) sweep() {
	m := &t.meta
	if !m.sweeping {
		return
	}
	it := openIter(t.r, appendDelayedKey(nil, m.sweepAt), []byte{kindDelayed + 1})
	defer it.Close()
	n := 0
	for ok := it.First(); ok; ok = it.Next() {
		k := delayedKeyOf(it.Key())
		if n++; n > MaxHousekeeping {
			m.sweepAt = k
			return
		}
		if k.Address <= m.purgedTo {
			t.b.Delete(it.Key())
		}
	}
	check(it.Err())
	m.sweeping, m.sweepAt = false, DelayedKey{}
}

// mayDrop says whether an Enqueue could overflow a queue that then drops its oldest messages.
func (s *QueueStateMachine) mayDrop(c *Enqueue) bool {
	o := &s.meta.Options
	if o.Overflow != OverflowDropOldest || s.meta.Retired {
		return false
	}
	n, size := c.load()
	return overflows(o, &s.meta.Counters, n, size)
}

func (c *Enqueue) load() (messages, bytes uint64) {
	for i := range c.Publishes {
		p := &c.Publishes[i]
		messages += uint64(len(p.Messages))
		for j := range p.Messages {
			bytes += uint64(p.Messages[j].Bytes())
		}
	}
	return messages, bytes
}

func overflows(o *QueueOptions, c *Counters, n, size uint64) bool {
	return c.Bytes+size > o.MaxBytes || o.MaxMessages > 0 && c.Messages+n > o.MaxMessages
}

// maxDrop bounds the messages that one Enqueue counts one by one to make room.
const maxDrop = 2 * MaxBatchMessages

// freshLoad is the load of what the command may store. What was answered before and what is refused however much room
// there is needs none: otherwise a publisher that repeats itself would empty a full queue.
func (t *tx) freshLoad(c *Enqueue) (messages, bytes uint64) {
	e := &enqueuer{tx: t}
	for i := range c.Publishes {
		p := &c.Publishes[i]
		if p.CheckLast && p.ExpectedLast < t.meta.Last {
			continue // all duplicates, or refused
		}
		for j := range p.Messages {
			if m := &p.Messages[j]; e.mayStore(p, m) {
				messages++
				bytes += uint64(m.Bytes())
			}
		}
	}
	return messages, bytes
}

// mayStore needs to be right only when it says no.
func (e *enqueuer) mayStore(p *Publish, m *Message) bool {
	if p.Producer.Kind != ProducerNone {
		v, stored := e.s.producer(p.Producer)
		if stored && p.ProducerEpoch < v.epoch || m.Seq < p.Low {
			return false
		}
		if _, known := v.lookup(m.Seq); stored && p.ProducerEpoch == v.epoch && (known || m.Seq < v.low) {
			return false
		}
	}
	if len(m.DedupID) > 0 {
		if _, known := e.dedup(hashDedup(m.DedupID)); known {
			return false
		}
	}
	c := e.admit(m, &Counters{})
	return c == code.OK || c == code.QueueFull
}

// dropForRoom drops the oldest messages, in address order, until what the command may store fits, or maxDrop are
// gone. Messages that turn out to be refused, or duplicates of others in the command, are counted: a little more may
// go than must.
func (t *tx) dropForRoom(c *Enqueue) {
	o := &t.meta.Options
	n, size := t.freshLoad(c)
	if n == 0 {
		return
	}
	if size > o.MaxBytes || o.MaxMessages > 0 && n > o.MaxMessages {
		n, size = min(n, max(o.MaxMessages, 1)), min(size, o.MaxBytes)
	}
	room := t.meta.Counters
	to, seen := Address(0), 0
	step := func(a Address, h *messageHead) bool {
		if !overflows(o, &room, n, size) || seen == maxDrop {
			return false
		}
		seen++
		room.Messages--
		room.Bytes -= h.size
		to = a
		return true
	}
	t.eachStored(step)
	t.dropTo(to, false)
}

// eachStored walks messages in place and parked ones together in address order, until f returns false.
func (t *tx) eachStored(f func(a Address, h *messageHead) bool) {
	its := [2]keyCursor{
		{r: t.r, prefix: []byte{kindMessage}, some: true},
		{r: t.r, prefix: []byte{kindParked}, some: t.meta.Counters.Parked > 0},
	}
	for i := range its {
		defer its[i].close()
	}
	for a := Address(1); ; a++ {
		next := MaxAddress + 1
		for i := range its {
			if its[i].some && !its[i].has(a) {
				next = min(next, its[i].at)
			} else if its[i].some {
				next = a
			}
		}
		if next > MaxAddress {
			return
		}
		a = next
		for i := range its {
			if !its[i].has(a) {
				continue
			}
			h, err := readHead(its[i].value())
			check(err)
			if !f(a, &h) {
				return
			}
		}
	}
}
