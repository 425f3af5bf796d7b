package queue

import (
	"slices"

	"github.com/tierq/tierq/queue/store"
)

// laneRange is First, First+64, …, Last: positions of one lane. The zero value is no range.
type laneRange struct{ first, last Address }

func (r laneRange) covers(a Address) bool { return r.last != 0 && r.first <= a && a <= r.last }

// rangeSet is a set of addresses as ranges of lanes, stored under done keys; set 0 is what exists no more, the
// others are what a group has finished above its watermark.
//
// Only the greatest range of each lane and at most maxNear below it are in memory, so memory does not grow with the
// number of holes. A set is changed by one tx, on a copy (clone), and is immutable once that tx is committed.
//
// Invariants: (1) ranges of a lane are disjoint and at least one free position lies between two of them; (2) stored
// is what the set holds, once flush has written the dirty tops; (3) near is what is stored, from its bound on.
type rangeSet struct {
	id    GroupID
	top   [lanes]laneRange
	dirty uint64 // lanes whose top is not yet written, a bit each
	// low is a bound for searches: no range of the lane begins below it. It decides nothing. Without it a search that finds
	// nothing walks over all that was deleted below since the last flush, which is whatever the group has finished.
	low  [lanes]Address
	near [lanes]nearRanges
	// owned tells the lanes whose list of near ranges is this copy's own, a bit each.
	owned uint64
	// writes counts changes of what is stored, so that a rangeCursor notices them.
	writes uint64
}

func (s *rangeSet) clone() *rangeSet {
	c := *s
	c.owned = 0
	return &c
}

// loadRangeSet finds the greatest ranges of each lane.
func loadRangeSet(r store.Reader, id GroupID) *rangeSet {
	s := &rangeSet{id: id}
	it := openIter(r, appendKey1(nil, kindDone, uint64(id)), appendKey1(nil, kindDone, uint64(id)+1))
	defer it.Close()
	for ok := it.Last(); ok; {
		lane := int(it.Key()[9])
		s.top[lane] = rangeAt(it)
		n := s.own(lane)
		for ok = it.Prev(); ok && int(it.Key()[9]) == lane; ok = it.Prev() {
			if len(n.list) == maxNear {
				n.from = n.list[len(n.list)-1].first
				ok = it.SeekLT(appendDoneKey(nil, id, lane, 0))
				break
			}
			n.list = append(n.list, rangeAt(it))
		}
		slices.Reverse(n.list)
	}
	check(it.Err())
	return s
}

// rangeAt decodes the range that an iterator over done keys stands on.
func rangeAt(it *store.Iter) laneRange {
	v, err := it.Value()
	check(err)
	last, err := decodeDone(v)
	check(err)
	return laneRange{Address(lastU64(it.Key())), last}
}

// covering returns the range that holds a. The search goes to the store only below the lane's greatest range.
func (s *rangeSet) covering(c *rangeCursor, a Address) (laneRange, bool) {
	top := s.top[laneOf(a)]
	switch {
	case a > top.last:
		return laneRange{}, false
	case a >= top.first:
		return top, true
	}
	return c.covering(s, a)
}

// rangeCursor searches a set in the store. It remembers per lane the last range found and the gap after it, so a
// walk upwards costs a search per range, not per address. Close it.
type rangeCursor struct {
	r    store.Reader
	it   *store.Iter
	at   [lanes]laneRange // the last range found
	free [lanes]laneRange // first..last of known uncovered positions
	seen uint64           // rangeSet.writes
	key  [24]byte
	from [24]byte
}

// refresh forgets everything when the set was written to.
func (c *rangeCursor) refresh(s *rangeSet) {
	if c.seen == s.writes {
		return
	}
	c.Close()
	c.at, c.free, c.seen = [lanes]laneRange{}, [lanes]laneRange{}, s.writes
}

func (c *rangeCursor) covering(s *rangeSet, a Address) (laneRange, bool) {
	c.refresh(s)
	l := laneOf(a)
	if c.at[l].covers(a) {
		return c.at[l], true
	}
	if c.free[l].covers(a) {
		return laneRange{}, false
	}
	switch r, found, known := s.nearBelow(l, a); {
	case found && r.covers(a):
		c.at[l] = r
		return r, true
	case known:
		c.free[l] = laneRange{a, s.nearAbove(l, a) - lanes}
		return laneRange{}, false
	}
	if c.it == nil {
		c.it = openIter(c.r, appendKey1(nil, kindDone, uint64(s.id)), appendKey1(nil, kindDone, uint64(s.id)+1))
	}
	if c.it.SeekLTFrom(appendDoneKey(c.key[:0], s.id, l, a+1), appendDoneKey(c.from[:0], s.id, l, s.low[l])) && int(c.it.Key()[9]) == l {
		if r := rangeAt(c.it); r.covers(a) {
			c.at[l] = r
			return r, true
		}
	}
	// Below the top there is a next range, though it may be the top itself and unwritten.
	end := s.top[l].first
	if c.it.SeekGE(appendDoneKey(c.key[:0], s.id, l, a+1)) && int(c.it.Key()[9]) == l {
		end = min(end, Address(lastU64(c.it.Key())))
	}
	check(c.it.Err())
	c.free[l] = laneRange{a, end - lanes}
	return laneRange{}, false
}

// Close releases the iterator.
func (c *rangeCursor) Close() {
	if c.it != nil {
		_ = c.it.Close()
		c.it = nil
	}
}

// add puts a range into a set that is being edited. It must not overlap what the set holds.
func (t *tx) addRange(s *rangeSet, add laneRange) {
	l := laneOf(add.first)
	top := &s.top[l]
	switch {
	case top.last == 0:
		*top = add
	case add.first == top.last+lanes:
		top.last = add.last
	case add.first > top.last:
		t.flushTop(s, l)
		s.keep(l, *top)
		*top = add
	default:
		t.insertRange(s, l, add)
		return
	}
	s.dirty |= 1 << l
}

// insertRange merges a range that lies below the lane's top.
func (t *tx) insertRange(s *rangeSet, l int, add laneRange) {
	s.writes++
	if before, ok := t.rangeBelow(s, l, add.first); ok && before.last+lanes == add.first {
		s.drop(l, before.first)
		add.first = before.first // the same key is written again
	}
	next := add.last + lanes
	if top := &s.top[l]; next == top.first {
		t.deleteRange(s, l, top.first)
		top.first = add.first
		s.dirty |= 1 << l
		return
	}
	if after, ok := t.rangeFrom(s, l, next); ok {
		add.last = after.last
		t.deleteRange(s, l, next)
	}
	t.storeRange(s, l, add)
}

// storeRange writes a range that is not the lane's top, or will not be.
func (t *tx) storeRange(s *rangeSet, l int, r laneRange) {
	s.writes++
	t.b.Set(appendDoneKey(t.key[:0], s.id, l, r.first), encodeDone(t.val[:0], r.last))
	s.keep(l, r)
}

// rangeFrom finds the stored range that begins at a, which is not the lane's top.
func (t *tx) rangeFrom(s *rangeSet, l int, a Address) (laneRange, bool) {
	if r, found, known := s.nearBelow(l, a); known {
		return r, found && r.first == a
	}
	v, ok, err := t.r.Get(appendDoneKey(t.key[:0], s.id, l, a))
	check(err)
	if !ok {
		return laneRange{}, false
	}
	last, err := decodeDone(v)
	check(err)
	return laneRange{a, last}, true
}

// rangeBelow finds the stored range with the greatest first position below a. The batch must be an indexed one.
func (t *tx) rangeBelow(s *rangeSet, l int, a Address) (laneRange, bool) {
	if r, found, known := s.nearBelow(l, a-1); known {
		return r, found
	}
	it := openIter(t.r, appendDoneKey(nil, s.id, l, min(s.low[l], a)), appendDoneKey(nil, s.id, l, a))
	defer it.Close()
	ok := it.Last()
	check(it.Err())
	if !ok {
		return laneRange{}, false
	}
	return rangeAt(it), true
}

// take removes and returns the range that begins at a.
func (t *tx) takeRange(s *rangeSet, a Address) (laneRange, bool) {
	l := laneOf(a)
	top := &s.top[l]
	if a > top.last || top.last == 0 {
		return laneRange{}, false
	}
	if a == top.first {
		r := *top
		t.deleteRange(s, l, a)
		*top = laneRange{}
		s.dirty &^= 1 << l
		return r, true
	}
	r, ok := t.rangeFrom(s, l, a)
	if ok {
		t.deleteRange(s, l, a)
	}
	return r, ok
}

// takeRanges removes the ranges that begin in from..to, which lie in one lane, and returns the end of the last one, or
// to. Nothing of the lane lies below from.
func (t *tx) takeRanges(s *rangeSet, from, to Address) Address {
	l := laneOf(from)
	top := &s.top[l]
	if top.last < from {
		return to
	}
	end := to
	it := openIter(t.r, appendDoneKey(nil, s.id, l, from), appendDoneKey(nil, s.id, l, to+1))
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		end = max(end, rangeAt(it).last)
		t.deleteRange(s, l, Address(lastU64(it.Key())))
	}
	check(it.Err())
	if top.first <= to {
		end = max(end, top.last)
		t.deleteRange(s, l, top.first)
		*top = laneRange{}
		s.dirty &^= 1 << l
	}
	return end
}

func (t *tx) deleteRange(s *rangeSet, l int, first Address) {
	s.writes++
	s.drop(l, first)
	t.b.Delete(appendDoneKey(t.key[:0], s.id, l, first))
}

func (t *tx) flushTop(s *rangeSet, l int) {
	if s.dirty&(1<<l) == 0 {
		return
	}
	s.dirty &^= 1 << l
	s.writes++
	t.b.Set(appendDoneKey(t.key[:0], s.id, l, s.top[l].first), encodeDone(t.val[:0], s.top[l].last))
}

// flush writes the tops that changed.
func (t *tx) flushRanges(s *rangeSet) {
	for l := range lanes {
		t.flushTop(s, l)
	}
}

// trimRanges removes everything at or below a.
func (t *tx) trimRanges(s *rangeSet, a Address) {
	for l := range lanes {
		top := s.top[l]
		if top.last == 0 || a < firstInLane(l, 0) {
			continue
		}
		t.trimLane(s, l, a, top)
	}
}

func (t *tx) trimLane(s *rangeSet, l int, a Address, top laneRange) {
	s.writes++
	next := firstInLane(l, a)
	defer func() { s.low[l] = max(s.low[l], next) }()
	straddling, ok := t.straddling(s, l, a, top)
	s.dropBelow(l, next)
	if ok {
		straddling.first = next
		if straddling.last == top.last {
			s.top[l] = straddling
			s.dirty |= 1 << l
		} else {
			t.deleteKeys(appendDoneKey(nil, s.id, l, 0), appendDoneKey(nil, s.id, l, next))
			t.storeRange(s, l, straddling)
			return
		}
	} else if top.last <= a {
		s.top[l] = laneRange{}
		s.dirty &^= 1 << l
	}
	t.deleteKeys(appendDoneKey(nil, s.id, l, 0), appendDoneKey(nil, s.id, l, next))
}

// straddling finds the range with first <= a < last.
func (t *tx) straddling(s *rangeSet, l int, a Address, top laneRange) (laneRange, bool) {
	if top.first <= a {
		return top, top.last > a
	}
	r, ok := t.rangeBelow(s, l, a+1)
	return r, ok && r.last > a
}
