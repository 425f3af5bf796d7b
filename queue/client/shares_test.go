package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sharesWorld is shares between lanes whose hosts hand out as much as they may, over a network that takes its time: what a lane
// is told, and what it is sent, arrives in order.
type sharesWorld struct {
	s     *shares
	now   time.Time
	total int
	most  int // the greatest total whose charges may not all be over
	hosts []sharesHost
}

type sharesHost struct {
	backlog int
	window  int
	handed  int // in all
	out     int // handed out and not settled
	told    []order
	sent    []int // messages on their way
	taken   int
	held    int
	owed    int // handed out when the awaited window was confirmed; -1: not confirmed
}

func (w *sharesWorld) plan() {
	orders, _ := w.s.plan(w.total, w.now)
	for _, o := range orders {
		w.hosts[o.lane].told = append(w.hosts[o.lane].told, o)
		if o.confirm {
			w.hosts[o.lane].owed = -1
		}
	}
}

// tell lets the host of a lane have the next order.
func (w *sharesWorld) tell(i int) {
	h := &w.hosts[i]
	if len(h.told) == 0 {
		return
	}
	h.window = h.told[0].window
	if h.told[0].confirm {
		h.owed = h.handed
	}
	h.told = h.told[1:]
	w.confirm(i)
}

func (w *sharesWorld) confirm(i int) {
	h := &w.hosts[i]
	waits := false
	for _, o := range h.told {
		waits = waits || o.confirm
	}
	if !waits && h.owed >= 0 && h.taken >= h.owed {
		w.s.confirmed(i)
	}
}

func (w *sharesWorld) push(i int) {
	h := &w.hosts[i]
	if n := min(h.window-h.out, h.backlog); n > 0 {
		h.backlog, h.out, h.handed = h.backlog-n, h.out+n, h.handed+n
		h.sent = append(h.sent, n)
	}
}

func (w *sharesWorld) arrive(i int) {
	h := &w.hosts[i]
	if len(h.sent) == 0 {
		return
	}
	for range h.sent[0] {
		w.s.took(i)
		h.taken, h.held = h.taken+1, h.held+1
	}
	h.sent = h.sent[1:]
	w.confirm(i)
}

func (w *sharesWorld) settle(i int) {
	if h := &w.hosts[i]; h.held > 0 {
		h.held, h.out = h.held-1, h.out-1
		w.s.freed(i)
	}
}

func (w *sharesWorld) inFlight() int {
	n := 0
	for i := range w.hosts {
		n += w.hosts[i].out
	}
	return n
}

// However the network delays and whatever the lanes have: what is in flight over all of them never exceeds the total, and where
// there is enough, in however few lanes, all of it is used.
func TestSharesNeverExceedTheTotal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "lanes")
		w := &sharesWorld{s: newShares(n), now: time.Unix(1, 0), total: rapid.IntRange(1, 20).Draw(t, "total"), hosts: make([]sharesHost, n)}
		w.most = w.total
		w.plan()
		lane := func(t *rapid.T) int { return rapid.IntRange(0, n-1).Draw(t, "lane") }
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				require.LessOrEqual(t, w.inFlight(), w.most)
				if charged := w.s.charged(); charged <= w.total {
					w.most = w.total
				} else {
					require.LessOrEqual(t, charged, w.most)
				}
			},
			"publish": func(t *rapid.T) { w.hosts[lane(t)].backlog += rapid.IntRange(1, 30).Draw(t, "messages") },
			"tell":    func(t *rapid.T) { w.tell(lane(t)) },
			"push":    func(t *rapid.T) { w.push(lane(t)) },
			"arrive":  func(t *rapid.T) { w.arrive(lane(t)) },
			"settle":  func(t *rapid.T) { w.settle(lane(t)) },
			"time": func(t *rapid.T) {
				w.now = w.now.Add(time.Duration(rapid.IntRange(0, 150).Draw(t, "ms")) * time.Millisecond)
			},
			"plan": func(*rapid.T) { w.plan() },
			"pace": func(t *rapid.T) {
				w.total = rapid.IntRange(1, 20).Draw(t, "total")
				w.most = max(w.most, w.total)
				w.plan()
			},
		})
		// Everything is done with, the network at rest, and then all messages are in one lane: that lane gets everything.
		for i := range w.hosts {
			w.hosts[i].backlog = 0
		}
		only := -1
		for round := range 200 {
			if round == 100 {
				only = lane(t)
				w.hosts[only].backlog = 100
			}
			w.now = w.now.Add(turnEvery)
			w.plan()
			for k := range w.hosts {
				for len(w.hosts[k].told) > 0 {
					w.tell(k)
				}
				for w.push(k); len(w.hosts[k].sent) > 0; {
					w.arrive(k)
				}
				for k != only && w.hosts[k].held > 0 {
					w.settle(k)
				}
			}
			require.LessOrEqual(t, w.inFlight(), w.most)
		}
		if w.total >= n {
			require.Equal(t, w.total-(n-1), w.inFlight(), "the other lanes keep one each to notice new messages")
		} else {
			require.Equal(t, w.total, w.inFlight())
		}
	})
}
