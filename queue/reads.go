package queue

import (
	"crypto/sha256"
	"hash"

	"github.com/tierq/tierq/queue/store"
)

var _ Reader = (*QueueStateMachine)(nil)

// view is the state at one applied index. Close it.
type view struct {
	meta  metaValue
	group *group // nil unless asked for and found
	gone  *rangeSet
	snap  *store.Snapshot
}

// view takes a view, with one group or none.
func (s *QueueStateMachine) view(id GroupID) *view {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return &view{meta: s.meta, group: s.groups[id], gone: s.gone, snap: s.shard.Snapshot()}
}

func (v *view) close() { _ = v.snap.Close() }

// Meta implements Reader.
func (s *QueueStateMachine) Meta() Meta {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.meta.Meta
}

// ReadStats implements Reader.
func (s *QueueStateMachine) ReadStats() (Meta, []GroupInfo) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	infos := make([]GroupInfo, 0, len(s.ids))
	for _, id := range s.ids {
		infos = append(infos, s.groups[id].info(&s.meta))
	}
	return s.meta.Meta, infos
}

// Groups implements Reader.
func (s *QueueStateMachine) Groups() []GroupInfo {
	_, infos := s.ReadStats()
	return infos
}

// Group implements Reader.
func (s *QueueStateMachine) Group(id GroupID) (GroupInfo, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	g := s.groups[id]
	if g == nil {
		return GroupInfo{}, false
	}
	return g.info(&s.meta), true
}

// GroupByName implements Reader.
func (s *QueueStateMachine) GroupByName(name string) (GroupInfo, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	g := s.groups[s.names[name]]
	if g == nil {
		return GroupInfo{}, false
	}
	return g.info(&s.meta), true
}

// Watermark returns a copy of a group's watermark.
func (s *QueueStateMachine) Watermark(id GroupID) (Watermark, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	g := s.groups[id]
	if g == nil {
		return Watermark{}, false
	}
	return g.wm, true
}

// Checkpoint returns the id of the last checkpoint, 0 for none.
func (s *QueueStateMachine) Checkpoint() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.meta.checkpoint
}

// Message implements Reader.
func (s *QueueStateMachine) Message(a Address) (m StoredMessage, ok bool, err error) {
	for _, kind := range [...]byte{kindMessage, kindParked, kindMessage} { // it may be parked in between
		ok, err = s.shard.View(appendKey1(nil, kind, uint64(a)), func(v []byte) (err error) {
			m, err = readMessage(a, kind == kindParked, v)
			return err
		})
		if ok || err != nil {
			return m, ok, err
		}
	}
	return StoredMessage{}, false, nil
}

// messageWalk reads the first message by its key: often there is no other. For those behind it one iterator is cheaper than to search every
// table for each.
type messageWalk struct {
	s       *QueueStateMachine
	started bool
	inline  keyCursor
}

// Messages implements Reader.
func (s *QueueStateMachine) Messages() MessageReader { return &messageWalk{s: s} }

// Message implements MessageReader.
func (w *messageWalk) Message(a Address) (m StoredMessage, ok bool, err error) {
	if !w.started {
		w.started = true
		return w.s.Message(a)
	}
	defer recoverFault(&err)
	if w.inline.r == nil {
		w.inline = keyCursor{r: w.s.shard, prefix: []byte{kindMessage}, some: true}
	}
	if !w.inline.has(a) {
		return w.s.Message(a) // parked, gone, or younger than the iterator
	}
	m, err = readMessage(a, false, w.inline.value())
	return m, err == nil, err
}

// Close implements MessageReader.
func (w *messageWalk) Close() { w.inline.close() }

// Finished implements Reader.
func (s *QueueStateMachine) Finished(id GroupID, a Address) (finished bool, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	g := v.group
	switch {
	case g == nil || a > v.meta.Last:
		return false, nil
	case a <= g.start || a < g.next[laneOf(a)]:
		return true, nil
	}
	done, away := rangeCursor{r: v.snap, seen: g.done.writes}, rangeCursor{r: v.snap, seen: v.gone.writes}
	defer done.Close()
	defer away.Close()
	if _, ok := g.done.covering(&done, a); ok {
		return true, nil
	}
	_, ok := v.gone.covering(&away, a)
	return ok, nil
}

// lister walks unfinished messages of a group.
type lister struct {
	*view
	walk   *unfinished
	inline keyCursor
	parked keyCursor
	retry  keyCursor
	lease  keyCursor
	dead   keyCursor
}

func (v *view) lister() *lister {
	g := v.group
	return &lister{view: v, walk: newUnfinished(v.snap, g, v.gone, v.meta.Last),
		inline: keyCursor{r: v.snap, prefix: []byte{kindMessage}, some: true},
		parked: keyCursor{r: v.snap, prefix: []byte{kindParked}, some: v.meta.Counters.Parked > 0},
		retry:  groupCursorOf(v.snap, kindRetry, g.id, g.c.Retrying > 0),
		lease:  groupCursorOf(v.snap, kindLease, g.id, g.c.Leased > 0),
		dead:   groupCursorOf(v.snap, kindDead, g.id, g.c.Dead > 0),
	}
}

func (l *lister) close() {
	l.walk.close()
	for _, c := range [...]*keyCursor{&l.inline, &l.parked, &l.retry, &l.lease, &l.dead} {
		c.close()
	}
}

// maxListSteps bounds what a list call looks at beside what it returns.
const maxListSteps = 16 << 10

// Deliverables implements Reader. Besides the limit a call looks at no more than maxListSteps addresses, so it may
// return fewer than limit, even none, and an address to go on from.
func (s *QueueStateMachine) Deliverables(id GroupID, from Address, limit int, withParked bool) (list []Deliverable, next Address, err error) {
	return s.list(id, from, limit, func(l *lister, a Address) (Deliverable, bool) { return l.deliverable(a, withParked) })
}

func (s *QueueStateMachine) list(id GroupID, from Address, limit int, pick func(*lister, Address) (Deliverable, bool)) (list []Deliverable, next Address, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	if v.group == nil {
		return nil, 0, nil
	}
	l := v.lister()
	defer l.close()
	for steps := 0; ; steps++ {
		a, ok := l.walk.next(from)
		if !ok {
			return list, 0, nil
		}
		if len(list) >= limit || steps >= maxListSteps+limit {
			return list, a, nil
		}
		if d, ok := pick(l, a); ok {
			list = append(list, d)
		}
		from = a + 1
	}
}

// deliverable describes an unfinished address unless it is dead, or parked when those are not wanted.
func (l *lister) deliverable(a Address, withParked bool) (Deliverable, bool) {
	parked := !l.inline.has(a)
	if parked && !withParked || l.dead.has(a) {
		return Deliverable{}, false
	}
	return l.describe(a, parked), true
}

func (l *lister) describe(a Address, parked bool) Deliverable {
	c := &l.inline
	if parked {
		c = &l.parked
		if !c.has(a) {
			check(corruptf("message %s is not finished by group %d and does not exist", a, l.group.id))
		}
	}
	h, err := readHead(c.value())
	check(err)
	d := Deliverable{Address: a, VisibleAt: h.visibleAt, ExpiresAt: h.expiresAt, Parked: parked, Size: int(h.size)}
	if l.meta.Options.Ordering == OrderKey && len(h.key) > 0 {
		d.Key = append([]byte(nil), h.key...)
	}
	if d.HasRetry = l.retry.has(a); d.HasRetry {
		d.Retry, err = readRetryState(l.retry.value())
		check(err)
	}
	if d.HasLease = l.lease.has(a); d.HasLease {
		d.Lease, err = readLease(l.lease.value())
		check(err)
	}
	return d
}

func readRetryState(b []byte) (RetryState, error) {
	var v retryValue
	err := v.decode(b)
	return v.RetryState, err
}

// ParkedStragglers implements Reader: parked messages without an entry in the delayed index that the group has
// neither finished nor dead.
func (s *QueueStateMachine) ParkedStragglers(id GroupID, from Address, limit int) (list []Deliverable, next Address, err error) {
	return s.listKeyed(id, from, limit, kindParked, func(l *lister, c *keyCursor, a Address) (Deliverable, bool) {
		h, err := readHead(c.value())
		check(err)
		if h.flags&messageDelayed != 0 || l.dead.has(a) {
			return Deliverable{}, false
		}
		return l.describe(a, true), true
	})
}

// Retrying implements Reader. A recorded lease always has a retry entry beside it.
func (s *QueueStateMachine) Retrying(id GroupID, from Address, limit int) (list []Deliverable, next Address, err error) {
	return s.listKeyed(id, from, limit, kindRetry, func(l *lister, _ *keyCursor, a Address) (Deliverable, bool) {
		return l.describe(a, !l.inline.has(a)), true
	})
}

// listKeyed walks keys that end in an address, those of the group for retry keys, and picks from the unfinished.
func (s *QueueStateMachine) listKeyed(id GroupID, from Address, limit int, kind byte, pick func(*lister, *keyCursor, Address) (Deliverable, bool)) (list []Deliverable, next Address, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	if v.group == nil {
		return nil, 0, nil
	}
	l := v.lister()
	defer l.close()
	c := keyCursor{r: v.snap, prefix: []byte{kind}, some: true}
	if kind == kindRetry {
		c = groupCursorOf(v.snap, kind, id, v.group.c.Retrying > 0)
	}
	defer c.close()
	a := max(from, v.group.start+1)
	for steps := 0; c.some; steps++ {
		if !c.has(a) {
			if a = c.at; a > MaxAddress {
				break
			}
		}
		if len(list) >= limit || steps >= maxListSteps+limit {
			return list, a, nil
		}
		if u, ok := l.walk.next(a); ok && u == a {
			if d, ok := pick(l, &c, a); ok {
				list = append(list, d)
			}
		}
		a++
	}
	return list, 0, nil
}

// Due implements Reader.
func (s *QueueStateMachine) Due(after DelayedKey, upTo Stamp, limit int) (list []DelayedKey, err error) {
	err = s.eachDelayed(after, func(k DelayedKey) bool {
		if k.VisibleAt > upTo || len(list) >= limit {
			return false
		}
		list = append(list, k)
		return true
	})
	return list, err
}

// NextDue implements Reader.
func (s *QueueStateMachine) NextDue(after DelayedKey) (at Stamp, ok bool, err error) {
	err = s.eachDelayed(after, func(k DelayedKey) bool {
		at, ok = k.VisibleAt, true
		return false
	})
	return at, ok, err
}

// eachDelayed walks the delayed index above a key until f returns false, without what a purge left behind.
func (s *QueueStateMachine) eachDelayed(after DelayedKey, f func(DelayedKey) bool) (err error) {
	defer recoverFault(&err)
	if s.Meta().Counters.Delayed == 0 {
		return nil
	}
	v := s.view(0)
	defer v.close()
	after.Address++
	it := openIter(v.snap, appendDelayedKey(nil, after), []byte{kindDelayed + 1})
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		k := delayedKeyOf(it.Key())
		if v.meta.sweeping && k.Address <= v.meta.purgedTo {
			continue
		}
		if !f(k) {
			break
		}
	}
	return it.Err()
}

// DeadLetters implements Reader. It returns at most limit letters and, with bodies, little more than 8 MiB of them.
func (s *QueueStateMachine) DeadLetters(id GroupID, from Address, limit int, withBody bool) (list []DeadLetter, next Address, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	if v.group == nil || v.group.c.Dead == 0 {
		return nil, 0, nil
	}
	parked := keyCursor{r: v.snap, prefix: []byte{kindParked}, some: true}
	defer parked.close()
	it := openIter(v.snap, appendGroupAddressKey(nil, kindDead, id, from), appendKey1(nil, kindDead, uint64(id)+1))
	defer it.Close()
	bytes := 0
	for ok := it.First(); ok; ok = it.Next() {
		a := Address(lastU64(it.Key()))
		if len(list) >= limit || bytes > maxReadBytes {
			return list, a, nil
		}
		d := deadAt(it, a)
		if withBody {
			if !parked.has(a) {
				check(corruptf("dead letter %s has no message", a))
			}
			d.Message, err = readMessage(a, true, parked.value())
			check(err)
			bytes += len(d.Message.Body)
		}
		list = append(list, d)
	}
	check(it.Err())
	return list, 0, nil
}

func deadAt(it *store.Iter, a Address) DeadLetter {
	raw, err := it.Value()
	check(err)
	d, err := readDead(a, raw)
	check(err)
	return d
}

// RetryOf implements Reader. For a dead letter it gives the change number, round, attempts and reason of that.
func (s *QueueStateMachine) RetryOf(id GroupID, a Address) (state RetryState, lease RecordedLease, found bool, err error) {
	defer recoverFault(&err)
	v := s.view(0)
	defer v.close()
	ok, err := v.snap.View(appendGroupAddressKey(nil, kindRetry, id, a), func(b []byte) (err error) {
		state, err = readRetryState(b)
		return err
	})
	check(err)
	if !ok {
		ok, err = v.snap.View(appendGroupAddressKey(nil, kindDead, id, a), func(b []byte) error {
			d, err := readDead(a, b)
			state = RetryState{Change: d.Change, Round: d.Round, Attempts: d.Attempts, Reason: d.Reason}
			return err
		})
		return state, lease, ok, err
	}
	_, err = v.snap.View(appendGroupAddressKey(nil, kindLease, id, a), func(b []byte) (err error) {
		lease, err = readLease(b)
		return err
	})
	return state, lease, ok, err
}

// Digest implements Reader: SHA-256 over every key and value, each after its length, in order of key.
func (s *QueueStateMachine) Digest() (index Index, sum [32]byte, err error) {
	defer recoverFault(&err)
	v := s.view(0)
	defer v.close()
	h := sha256.New()
	it := openIter(v.snap, nil, nil)
	defer it.Close()
	var buf []byte
	for ok := it.First(); ok; ok = it.Next() {
		val, err := it.Value()
		check(err)
		buf = hashPair(h, buf, it.Key(), val)
	}
	check(it.Err())
	return v.meta.Applied, [32]byte(h.Sum(nil)), nil
}

func hashPair(h hash.Hash, buf, key, value []byte) []byte {
	buf = putBytes(buf[:0], key)
	buf = putUint(buf, uint64(len(value)))
	h.Write(buf)
	h.Write(value)
	return buf
}
