package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// paced is a pace with so many handlers, on a clock that moves when told.
func paced(o ConsumeOptions) (*pace, *fakeClock) {
	clock := newFakeClock()
	o.ensureDefaults()
	return newPace(&consumer{c: &Client{opts: Options{Clock: clock}}, o: o}), clock
}

// work has one handler finish n messages that take d each.
func (p *pace) work(clock *fakeClock, handler, n int, d time.Duration) {
	for range n {
		p.begin(handler)
		clock.Advance(d)
		p.end(handler)
	}
}

// What is fetched ahead is what the handlers finish in Ahead.
func TestPaceFollowsHandlers(t *testing.T) {
	p, clock := paced(ConsumeOptions{Concurrency: 2})
	require.Equal(t, 2, p.target, "nothing is known yet")
	p.work(clock, 0, 1, 100*time.Microsecond)
	require.Equal(t, 256, p.target)
	p.work(clock, 1, 60, 10*time.Millisecond)
	require.InDelta(t, 2+2*25, p.target, 13)
	p.work(clock, 0, 60, 10*time.Second)
	require.Equal(t, 2, p.target)
	p.work(clock, 0, 60, 10*time.Microsecond)
	require.Equal(t, 256, p.target)
}

// A handler that is stuck is not counted on.
func TestPaceLeavesStuckHandlersOut(t *testing.T) {
	p, clock := paced(ConsumeOptions{Concurrency: 2})
	p.work(clock, 0, 60, 5*time.Millisecond)
	require.InDelta(t, 2+2*50, p.target, 26)
	p.begin(0)
	clock.Advance(time.Second)
	p.work(clock, 1, 1, 5*time.Millisecond)
	require.InDelta(t, 2+50, p.target, 13)
	p.begin(1)
	clock.Advance(time.Second)
	require.True(t, p.retargetLocked(clock.Now()))
	require.Equal(t, 2, p.target)
}

// A window that the user has chosen is used whole; with Ahead as well, no more of it than that.
func TestPaceOptions(t *testing.T) {
	p, clock := paced(ConsumeOptions{MaxInFlight: 40})
	p.work(clock, 0, 10, time.Hour)
	require.Equal(t, 40, p.target)
	p, clock = paced(ConsumeOptions{MaxInFlight: 40, Ahead: time.Second})
	p.work(clock, 0, 1, time.Millisecond)
	require.Equal(t, 40, p.target)
	p.work(clock, 0, 100, 100*time.Millisecond)
	require.InDelta(t, 11, p.target, 3)
	p, _ = paced(ConsumeOptions{Concurrency: 300})
	require.Equal(t, 300, p.l.o.MaxInFlight)
}
