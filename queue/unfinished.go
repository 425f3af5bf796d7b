package queue

import "github.com/tierq/tierq/queue/store"

// unfinished walks the addresses of a group that are neither finished nor gone; dead letters are among them. It
// costs a search per stored range, not per address, and its memory is fixed. Close it.
type unfinished struct {
	g    *group
	gone *rangeSet
	last Address
	done rangeCursor
	away rangeCursor
	// Per lane, positions pos..end-64 are known to be unfinished, and none is between the last one asked for and pos.
	pos, end [lanes]Address
}

func newUnfinished(r store.Reader, g *group, gone *rangeSet, last Address) *unfinished {
	return &unfinished{g: g, gone: gone, last: last,
		done: rangeCursor{r: r, seen: g.done.writes}, away: rangeCursor{r: r, seen: gone.writes}}
}

func (u *unfinished) close() {
	u.done.Close()
	u.away.Close()
}

// next finds the least unfinished address at or above a.
func (u *unfinished) next(a Address) (Address, bool) {
	a = max(a, u.g.start+1)
	for misses := 0; a <= u.last; a++ {
		l := laneOf(a)
		if a >= u.end[l] {
			u.advance(l, a)
		}
		if a >= u.pos[l] {
			return a, true
		}
		if misses++; misses == lanes {
			misses = 0
			a = max(a, u.leastPos()-1)
		}
	}
	return 0, false
}

func (u *unfinished) leastPos() Address {
	least := u.pos[0]
	for _, p := range &u.pos {
		least = min(least, p)
	}
	return least
}

// advance finds the first unfinished stretch of a lane at or above a position.
func (u *unfinished) advance(l int, a Address) {
	a = max(a, u.g.next[l])
	for {
		r, covered := u.g.done.covering(&u.done, a)
		if !covered {
			r, covered = u.gone.covering(&u.away, a)
		}
		if !covered {
			break
		}
		a = r.last + lanes
	}
	u.pos[l] = a
	u.end[l] = min(u.done.freeUntil(u.g.done, a), u.away.freeUntil(u.gone, a))
}

// freeUntil needs a position that is not covered, and returns the first covered one above it.
func (c *rangeCursor) freeUntil(s *rangeSet, a Address) Address {
	l := laneOf(a)
	if a > s.top[l].last {
		return MaxAddress + 1
	}
	return c.free[l].last + lanes
}

// count counts the unfinished addresses in (low, high].
func (u *unfinished) count(low, high Address) (n uint64) {
	low, high = max(low, u.g.start), min(high, u.last)
	for l := range lanes {
		for a := firstInLane(l, low); a <= high; a = u.end[l] {
			u.advance(l, a)
			if u.pos[l] > high {
				break
			}
			n += laneCount(l, u.pos[l]-1, min(high, u.end[l]-1))
		}
	}
	return n
}
