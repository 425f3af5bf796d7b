package client

import (
	"slices"
	"sync"
	"time"
)

// shares divides what a consumer may have in flight among the lanes of its partitions, by need: a lane that was full lately gets
// what the others do not use. With at least as many as lanes, each keeps one to notice new messages; with fewer, lanes take turns.
//
// Invariant: the charges of all lanes are together at most the total, or what they were when that became smaller. A lane's charge
// is what it holds or may yet be sent: a smaller window frees its part only when the host has confirmed it, so no more is ever
// in flight than the total, wherever the messages are.
type shares struct {
	mu      sync.Mutex
	total   int
	lanes   []laneShare
	planned time.Time // the last time that wants were made
	turn    int       // whose turn is next, with fewer than lanes
}

// laneShare is one lane's part.
type laneShare struct {
	window  int // the last that was told
	old     int // the one before it, while that is not known to be over
	pending bool
	want    int
	held    int
	most    int  // of held, since the last plan
	full    bool // more might have come since the last plan
}

// order tells a lane its window.
type order struct {
	lane, window int
	confirm      bool // it must say when that is in force
}

const (
	planEvery = 20 * time.Millisecond
	turnEvery = 100 * time.Millisecond
)

func newShares(lanes int) *shares { return &shares{lanes: make([]laneShare, lanes)} }

// add adds a lane, which gets its part at the next plan.
func (s *shares) add() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes = append(s.lanes, laneShare{})
	s.total = 0 // the wants are made anew
}

func (s *laneShare) charge() int {
	if s.pending {
		return max(s.old, s.window, s.held)
	}
	return max(s.window, s.held)
}

// took notes a message that has come, and reports whether the lane is full now and others may have room.
func (s *shares) took(lane int) (full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &s.lanes[lane]
	l.held++
	l.most = max(l.most, l.held)
	if l.held < l.window || l.full {
		return false
	}
	l.full = true
	return len(s.lanes) > 1
}

// freed notes one that is done with.
func (s *shares) freed(lane int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lanes[lane].held--
}

// confirmed notes that the lane's last window is in force, and reports whether it was awaited.
func (s *shares) confirmed(lane int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.lanes[lane].pending
	s.lanes[lane].pending = false
	return was
}

// plan returns what the lanes are to be told now, and when to plan again; 0: when something happens. Whoever calls it tells them
// before it calls it again.
func (s *shares) plan(total int, now time.Time) (orders []order, again time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	every, few := planEvery, total < len(s.lanes)
	if few {
		every = turnEvery
	}
	due := s.planned.Add(every).Sub(now)
	if total != s.total || due <= 0 && !(few && s.owes()) {
		s.makeWants(total, now)
		due = turnEvery
	}
	orders = s.tell()
	if few && len(orders) > 0 {
		s.planned = now // a turn begins when the lane has it
		due = turnEvery
	}
	if few && !s.owes() || slices.ContainsFunc(s.lanes, func(l laneShare) bool { return l.full }) {
		again = max(due, planEvery)
	}
	return orders, again
}

// owes says whether a lane gets what it should have as soon as others confirm, or now. What they hold does not count: that may
// last.
func (s *shares) owes() bool {
	room, wants := s.total, false
	for i := range s.lanes {
		l := &s.lanes[i]
		if l.pending {
			return true
		}
		room -= l.charge()
		wants = wants || l.want > l.window
	}
	return wants && room > 0
}

func (s *shares) makeWants(total int, now time.Time) {
	fresh := total != s.total
	s.total, s.planned = total, now
	if total < len(s.lanes) {
		s.takeTurns()
	} else {
		s.fill(fresh)
	}
	for i := range s.lanes {
		l := &s.lanes[i]
		l.full, l.most = l.held > 0 && l.held >= l.window, l.held
	}
}

// takeTurns lets what there is go around, but for lanes that were full: those share all but one, and have their turn with that too.
func (s *shares) takeTurns() {
	var hungry []*laneShare
	for i := range s.lanes {
		s.lanes[i].want = 0
		if s.lanes[i].full {
			hungry = append(hungry, &s.lanes[i])
		}
	}
	around := s.total
	if len(hungry) > 0 {
		around = 1
		for i := range s.total - 1 {
			hungry[i%len(hungry)].want++
		}
	}
	for i := range around {
		s.lanes[(s.turn+i)%len(s.lanes)].want++
	}
	s.turn = (s.turn + around) % len(s.lanes)
}

// fill divides the total by need: lanes that were full share what the others leave. When none was, all stays as it is, but for a
// total that has changed.
func (s *shares) fill(fresh bool) {
	hungry := slices.ContainsFunc(s.lanes, func(l laneShare) bool { return l.full })
	if !hungry && !fresh {
		return
	}
	byNeed := make([]*laneShare, len(s.lanes))
	need := func(l *laneShare) int {
		if l.full || !hungry {
			return s.total
		}
		return max(l.most, 1)
	}
	for i := range s.lanes {
		byNeed[i] = &s.lanes[i]
	}
	slices.SortStableFunc(byNeed, func(a, b *laneShare) int { return need(a) - need(b) })
	left := s.total
	for i, l := range byNeed {
		l.want = min(need(l), left/(len(byNeed)-i))
		left -= l.want
	}
}

// tell makes windows smaller at once, and larger as far as that leaves room.
func (s *shares) tell() []order {
	var out []order
	room := s.total
	for i := range s.lanes {
		l := &s.lanes[i]
		if l.want < l.window && !l.pending {
			l.old, l.window, l.pending = l.window, l.want, true
			out = append(out, order{i, l.window, true})
		}
		room -= l.charge()
	}
	for i := range s.lanes {
		l := &s.lanes[i]
		if l.pending || l.want <= l.window {
			continue
		}
		charge := l.charge()
		window := min(l.want, charge+max(room, 0))
		if window <= l.window {
			continue
		}
		l.window = window
		room -= l.charge() - charge
		out = append(out, order{i, window, false})
	}
	return out
}

// charged is what may be in flight.
func (s *shares) charged() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for i := range s.lanes {
		n += s.lanes[i].charge()
	}
	return n
}
