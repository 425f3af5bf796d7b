package queue

import (
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// Ack finishes messages of a group, and drops their retry state and recorded leases.
//
// Refused as a whole: what Validate refuses; UnknownGroup; StaleOwner, with home and epoch, unless the epoch equals
// the group's. Per address: AckDone, AckAlready, AckUnknown (not the group's), AckDead (a dead letter whose export
// has begun; an ack of any other dead letter removes it: acked wins).
// It counts as purged; before format level 3 as acked.
//
// Version 1: as above.
func (t *tx) ack(c *Ack, r *Result) {
	g := t.fenced(c.Group, c.Epoch, r)
	if g == nil {
		return
	}
	a := newFinisher(t, g)
	defer a.close()
	n := 0
	for _, x := range c.Ranges {
		n += int(x.Last-x.First) + 1
	}
	r.Acks = make([]AckState, 0, n)
	for _, x := range c.Ranges {
		for at := x.First; at <= x.Last; at++ {
			r.Acks = append(r.Acks, a.ack(at))
		}
	}
}

// fenced returns the group to be changed by a command of its home, or nil and the refusal.
func (t *tx) fenced(id GroupID, epoch Epoch, r *Result) *group {
	g := t.group(id)
	switch {
	case g == nil:
		r.Code = code.UnknownGroup
		return nil
	case g.epoch != epoch:
		r.Code, r.Group, r.Epoch, r.Home = code.StaleOwner, g.id, g.epoch, g.home
		return nil
	}
	return t.edit(id)
}

// finisher finishes addresses of one group.
type finisher struct {
	t      *tx
	g      *group
	retry  keyCursor
	lease  keyCursor
	dead   keyCursor
	parked keyCursor
}

func newFinisher(t *tx, g *group) *finisher {
	f := &finisher{t: t, g: g,
		retry:  groupCursorOf(t.r, kindRetry, g.id, g.c.Retrying > 0),
		lease:  groupCursorOf(t.r, kindLease, g.id, g.c.Leased > 0),
		dead:   groupCursorOf(t.r, kindDead, g.id, g.c.Dead > 0),
		parked: keyCursor{r: t.r, prefix: []byte{kindParked}, some: t.meta.Counters.Parked > 0},
	}
	for _, c := range [...]*keyCursor{&f.retry, &f.lease, &f.dead, &f.parked} {
		c.reach = finishReach
	}
	return f
}

// finishReach is how far, in addresses, a finisher looks ahead for the next key. The keys of what was finished are
// deleted, and a search without a bound walks over all deletions since the last flush.
const finishReach = 256

func (f *finisher) close() {
	f.retry.close()
	f.lease.close()
	f.dead.close()
	f.parked.close()
}

func (f *finisher) ack(a Address) AckState {
	if !f.g.owns(a, f.t.meta.Last) {
		return AckUnknown
	}
	if f.t.isFinished(f.g, a) {
		return AckAlready
	}
	if f.dead.has(a) {
		d, err := readDead(a, f.dead.value())
		check(err)
		if d.ExportState >= ExportExporting {
			return AckDead
		}
		f.countPurge()
	} else {
		f.g.c.Acked++
	}
	f.finish(a)
	return AckDone
}

// countPurge counts a dead letter that was removed: nobody has acked it. Before format level 3 it counted as acked.
func (f *finisher) countPurge() {
	if f.t.meta.FormatLevel >= levelPurgedDead {
		f.g.c.Purged++
	} else {
		f.g.c.Acked++
	}
}

// finish finishes an owned, unfinished address and removes what the group keeps about it; the caller has counted it.
func (f *finisher) finish(a Address) {
	f.forget(a)
	f.t.finish(f.g, a)
	if f.parked.has(a) {
		f.t.releaseParked(a, f.parked.value())
	}
}

// forget removes retry state, recorded lease and dead letter of an address.
func (f *finisher) forget(a Address) {
	t, c, id := f.t, &f.g.c, f.g.id
	if f.retry.has(a) {
		t.b.Delete(appendGroupAddressKey(t.key[:0], kindRetry, id, a))
		c.Retrying--
	}
	if f.lease.has(a) {
		t.b.Delete(appendGroupAddressKey(t.key[:0], kindLease, id, a))
		c.Leased--
	}
	if f.dead.has(a) {
		t.dropExportAt(f.g, a, f.dead.value())
		t.b.Delete(appendGroupAddressKey(t.key[:0], kindDead, id, a))
		c.Dead--
	}
}

// releaseParked deletes a parked message, unless a group still wants it or the queue keeps its messages for replay.
func (t *tx) releaseParked(a Address, value []byte) {
	if t.meta.Options.Mode == ModeLog || !t.finishedByAll(a) {
		return
	}
	h, err := readHead(value)
	check(err)
	t.deleteMessage(a, true, &h)
	t.meta.Counters.Reclaimed++
}

// deleteMessage removes a message that every group has finished; the caller counts why.
func (t *tx) deleteMessage(a Address, parked bool, h *messageHead) {
	c, count := &t.meta.Counters, t.count(a)
	c.Messages--
	c.Bytes -= h.size
	if !parked {
		count.messages--
		count.bytes -= h.size
		t.b.Delete(appendMessageKey(t.key[:0], a))
		t.vanish(a)
		return
	}
	count.parked--
	count.parkedBytes -= h.size
	c.Parked--
	t.b.Delete(appendKey1(t.key[:0], kindParked, uint64(a)))
	if h.flags&messageDelayed != 0 {
		count.delayed--
		c.Delayed--
		t.b.Delete(appendDelayedKey(t.key[:0], DelayedKey{h.visibleAt, a}))
	}
	t.vanish(a)
}

// keyCursor looks up keys that end in an address. Going upwards costs a search per key found, not per address, and less where the next
// address has the next key.
// It shows what was there when it was first used.
type keyCursor struct {
	r      store.Reader
	prefix []byte
	some   bool // false: there are no such keys
	it     *store.Iter
	reach  Address // if not 0: how far a search looks
	from   Address // no key lies in from..at-1
	at     Address // the key that it stands on; MaxAddress+1: none; with reach also where the search ended
	found  bool    // there is a key at at
	key    [24]byte
	limit  [24]byte
}

func groupCursorOf(r store.Reader, kind byte, id GroupID, some bool) keyCursor {
	return keyCursor{r: r, prefix: appendKey1(nil, kind, uint64(id)), some: some}
}

// has says whether there is a key of an address; value then returns its value.
func (c *keyCursor) has(a Address) bool {
	if !c.some {
		return false
	}
	if c.it == nil || a < c.from || a > c.at || a == c.at && !c.found {
		c.seek(a)
	}
	return c.found && c.at == a
}

func (c *keyCursor) seek(a Address) {
	if c.it == nil {
		c.it = openIter(c.r, c.prefix, be.AppendUint64(append([]byte(nil), c.prefix...), uint64(MaxAddress)+1))
	}
	next := c.found && c.reach == 0 && a == c.at+1 // a step, not a search
	c.from, c.at = a, MaxAddress+1
	key := be.AppendUint64(append(c.key[:0], c.prefix...), uint64(a))
	switch {
	case next:
		c.found = c.it.Next()
	case c.reach == 0:
		c.found = c.it.SeekGE(key)
	default:
		c.at = min(c.at, a+c.reach)
		c.found = c.it.SeekGEBelow(key, be.AppendUint64(append(c.limit[:0], c.prefix...), uint64(c.at)))
	}
	if c.found {
		c.at = Address(lastU64(c.it.Key()))
	}
	check(c.it.Err())
}

// value is valid until the next has of another address.
func (c *keyCursor) value() []byte {
	v, err := c.it.Value()
	check(err)
	return v
}

func (c *keyCursor) close() {
	if c.it != nil {
		_ = c.it.Close()
		c.it = nil
	}
}
