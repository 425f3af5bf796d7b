package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/code"
)

// CS1: no state is a trap. Every state but Closed can be left; every state but Fatal and Closed can be left for Ready
// without the user doing anything; Closed is reachable from everywhere; Fatal is left by the user only.
func TestLinkHasNoSink(t *testing.T) {
	all := []State{Disconnected, Connecting, Ready, Backoff, Fatal, Closed}
	require.Len(t, transitions, len(all))
	for _, s := range all {
		edges := transitions[s]
		if s == Closed {
			require.Empty(t, edges)
			continue
		}
		require.Equal(t, Closed, edges[EventClose], "close from %s", s)
		require.True(t, reaches(s, Closed, nil))
		if s == Fatal {
			require.Equal(t, map[Event]State{EventReset: Disconnected, EventClose: Closed}, edges)
			continue
		}
		require.True(t, s == Ready || reaches(s, Ready, map[Event]bool{EventReset: true, EventClose: true}), "%s never becomes ready by itself", s)
	}
	for _, s := range all {
		require.True(t, s == Disconnected || reaches(Disconnected, s, nil), "%s is unreachable", s)
	}
}

// reaches walks the table from a to b without the barred events.
func reaches(a, b State, barred map[Event]bool) bool {
	seen := map[State]bool{a: true}
	todo := []State{a}
	for len(todo) > 0 {
		s := todo[0]
		todo = todo[1:]
		for e, next := range transitions[s] {
			if barred[e] || seen[next] {
				continue
			}
			if next == b {
				return true
			}
			seen[next] = true
			todo = append(todo, next)
		}
	}
	return false
}

// Every edge of the table can fire: the methods that calls use take each of them.
func TestLinkFiresEveryEdge(t *testing.T) {
	now := time.Unix(1000, 0)
	pause := func(int) time.Duration { return time.Second }
	into := map[State]func(*link){
		Disconnected: func(*link) {},
		Connecting:   func(l *link) { l.take(now) },
		Ready:        func(l *link) { l.take(now); l.answered() },
		Backoff:      func(l *link) { l.take(now); l.failed(now, pause) },
		Fatal:        func(l *link) { l.take(now); l.refused(code.New(code.WrongFleet, "")) },
	}
	cause := map[Event]func(*link){
		EventUse:      func(l *link) { l.take(now) },
		EventAnswered: func(l *link) { l.answered() },
		EventFailed:   func(l *link) { l.failed(now, pause) },
		EventDue:      func(l *link) { l.take(now.Add(time.Second)) },
		EventRefused:  func(l *link) { l.refused(code.New(code.NotAuthenticated, "")) },
		EventReset:    func(l *link) { l.reset() },
		EventClose:    func(l *link) { l.fire(EventClose) },
	}
	for s, enter := range into {
		for e, want := range transitions[s] {
			l := newLink("h:1")
			enter(l)
			got, _ := l.snapshot()
			require.Equal(t, s, got)
			cause[e](l)
			got, _ = l.snapshot()
			require.Equal(t, want, got, "%s on %s", s, e)
		}
	}
}

// A backoff link is not usable before it is due, doubles its pause at each failure, and starts over after an answer.
func TestLinkBackoff(t *testing.T) {
	now := time.Unix(1000, 0)
	var asked []int
	pause := func(n int) time.Duration { asked = append(asked, n); return time.Second << n }
	l := newLink("h:1")
	for n := range 3 {
		l.take(now)
		l.failed(now, pause)
		l.failed(now, pause) // a second call that failed at the same time does not count
		ok, due := l.usable(now)
		require.False(t, ok)
		require.Equal(t, now.Add(time.Second<<n), due)
		now = due
		ok, _ = l.usable(now)
		require.True(t, ok)
	}
	l.take(now)
	l.answered()
	l.failed(now, pause)
	require.Equal(t, []int{0, 1, 2, 0}, asked)
}

// A refused token is tried a few times, since tokens may be on their way to a host; then the link is lost.
func TestLinkAuthAttempts(t *testing.T) {
	l := newLink("h:1")
	for range maxAuthAttempts - 1 {
		l.take(time.Time{})
		require.False(t, l.refused(code.New(code.AuthFailed, "")))
	}
	require.True(t, l.refused(code.New(code.AuthFailed, "")))
	s, e := l.snapshot()
	require.Equal(t, Fatal, s)
	require.Equal(t, code.AuthFailed, e.Code)
}

func TestRouterNeverLeavesTheSeeds(t *testing.T) {
	clock := newFakeClock()
	r := newRouter([]string{"a:1", "http://b:1", "a:1"}, clock, func(int) time.Duration { return time.Second }, func() time.Duration { return 0 })
	r.learn([]string{"c:1"})
	leader := route{kind: toLeader, queue: "q"}
	r.hint(leader, "c:1", "")

	l, _, err := r.pick(leader, "")
	require.Nil(t, err)
	require.Equal(t, "c:1", l.addr)
	r.failed(l)
	require.Empty(t, r.hints, "a hint that led to a failure is forgotten")

	l, _, _ = r.pick(leader, "")
	require.Equal(t, "a:1", l.addr)
	r.failed(l)
	l, _, _ = r.pick(leader, "")
	require.Equal(t, "b:1", l.addr)
	r.failed(l)

	l, wait, err := r.pick(leader, "")
	require.Nil(t, l)
	require.Nil(t, err)
	require.Equal(t, time.Second, wait)
	clock.Advance(time.Second)
	l, _, _ = r.pick(leader, "")
	require.NotNil(t, l)

	r.learn(nil)
	require.Len(t, r.states(), 2, "seeds stay")
}

// When the host in use goes away, one that was away for long is tried soon: of two full hosts, the other has taken over.
func TestRouterTriesTheOthersWhenOneGoes(t *testing.T) {
	clock := newFakeClock()
	pause := func(n int) time.Duration { return min(time.Second<<n, 30*time.Second) }
	r := newRouter([]string{"a:1", "b:1"}, clock, pause, func() time.Duration { return time.Minute })
	home := route{kind: toHome, queue: "q"}
	pick := func(addr string) *link {
		t.Helper()
		r.hint(home, addr, "")
		l, _, err := r.pick(home, "")
		require.Nil(t, err)
		require.NotNil(t, l)
		require.Equal(t, addr, l.addr)
		return l
	}
	for range 6 { // a is away
		r.failed(pick("a:1"))
		clock.Advance(time.Minute)
	}
	r.failed(pick("a:1"))
	b := pick("b:1")
	b.answered()
	r.failed(b)
	l, wait, err := r.pick(home, "")
	require.Nil(t, err)
	require.Nil(t, l)
	require.Equal(t, time.Second, wait)
	clock.Advance(wait)
	l, _, _ = r.pick(home, "")
	require.NotNil(t, l, "either of them, a among them")
	ok, _ := r.links["a:1"].usable(clock.Now())
	require.True(t, ok)
	r.failed(r.links["a:1"])
	_, due := r.links["a:1"].usable(clock.Now())
	require.Equal(t, clock.Now().Add(2*time.Second), due, "its pauses begin anew")
}

func TestCompleteAddr(t *testing.T) {
	for _, c := range [][3]string{
		{"10.0.0.1:7188", "x:1", "10.0.0.1:7188"}, {":7188", "10.0.0.9:1", "10.0.0.9:7188"},
		{"0.0.0.0:7188", "h:1", "h:7188"}, {"[::]:7188", "h:1", "h:7188"}, {"", "h:1", ""}, {"junk", "h:1", ""}, {"h:0", "h:1", ""},
	} {
		require.Equal(t, c[2], completeAddr(c[0], c[1]), c[0])
	}
}
