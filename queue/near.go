package queue

import "slices"

// maxNear bounds the ranges of a lane that are in memory below the greatest one: at most 1 KiB a lane.
var maxNear = 64 // tests lower it

// nearRanges are the ranges of one lane just below its greatest one: those that acks meet. They are in memory
// because a search in the store walks over every version and every deletion of what lies between, since the last
// flush: with one message stuck, that is whatever was finished above it.
//
// list is in ascending order, and complete from its bound on: a stored range that begins at or above from is in it,
// unless it is the lane's greatest one. It is shared with older copies of its set; see rangeSet.owned.
type nearRanges struct {
	list []laneRange
	from Address
}

// search returns the place of the first range that begins above a.
func (n *nearRanges) search(a Address) int {
	i, _ := slices.BinarySearchFunc(n.list, a, func(r laneRange, a Address) int {
		if r.first <= a {
			return -1
		}
		return 1
	})
	return i
}

// nearBelow finds the range with the greatest first position at or below a, if memory can tell; found is false if
// there is none. The lane's greatest range is not looked at.
func (s *rangeSet) nearBelow(l int, a Address) (r laneRange, found, known bool) {
	n := &s.near[l]
	if i := n.search(a); i > 0 {
		return n.list[i-1], true, true
	}
	return laneRange{}, false, n.from <= s.low[l]
}

// nearAbove is the first position above a that is covered, when nearBelow has told about a. The lane's greatest
// range must begin above a.
func (s *rangeSet) nearAbove(l int, a Address) Address {
	n := &s.near[l]
	if i := n.search(a); i < len(n.list) {
		return n.list[i].first
	}
	return s.top[l].first
}

// own makes a lane's list one that may be changed.
func (s *rangeSet) own(l int) *nearRanges {
	n := &s.near[l]
	if s.owned&(1<<l) == 0 {
		s.owned |= 1 << l
		n.list = slices.Clone(n.list)
	}
	return n
}

// keep adds a range that is stored, and is not the lane's greatest one, or replaces the one that begins there.
func (s *rangeSet) keep(l int, r laneRange) {
	if n := &s.near[l]; r.first < n.from && n.from > s.low[l] {
		return
	}
	n := s.own(l)
	i := n.search(r.first)
	if i > 0 && n.list[i-1].first == r.first {
		n.list[i-1] = r
		return
	}
	n.list = slices.Insert(n.list, i, r)
	if len(n.list) > maxNear {
		n.list = slices.Delete(n.list, 0, len(n.list)/2)
		n.from = n.list[0].first
	}
}

// drop forgets the range that begins at first, if memory has it.
func (s *rangeSet) drop(l int, first Address) {
	n := &s.near[l]
	if i := n.search(first); i > 0 && n.list[i-1].first == first {
		n = s.own(l)
		n.list = slices.Delete(n.list, i-1, i)
	}
}

// dropBelow forgets the ranges that begin below a.
func (s *rangeSet) dropBelow(l int, a Address) {
	if n := &s.near[l]; len(n.list) > 0 && n.list[0].first < a {
		n = s.own(l)
		n.list = slices.Delete(n.list, 0, n.search(a-1))
	}
}
