package host

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGateNeverWaits: a call that waits inside for the engine, whose goroutines enter too, is not in the way of a hand-over or of a
// close that has begun: those goroutines once waited for it, and it for them, for ever.
func TestGateNeverWaits(t *testing.T) {
	g, s := newGate(), holds{}
	require.True(t, g.enter(), "a call that waits for the engine")
	s.hold(3) // does not wait for it
	require.True(t, g.enter(), "the engine")
	g.leave()

	closed := make(chan struct{})
	go func() {
		g.close()
		close(closed)
	}()
	require.Eventually(t, func() bool {
		entered := g.enter()
		if entered {
			g.leave()
		}
		return !entered
	}, patience, time.Millisecond, "the engine is turned away, and does not wait")
	select {
	case <-closed:
		t.Fatal("closed with a call inside")
	default:
	}
	g.leave()
	<-closed
	require.False(t, g.enter())
}

// TestGateClosesUnderCalls: whoever is inside leaves before close returns, and nobody enters after it.
func TestGateClosesUnderCalls(t *testing.T) {
	for range 200 {
		g := newGate()
		var calls sync.WaitGroup
		freed := make(chan struct{})
		for range 8 {
			calls.Go(func() {
				for g.enter() {
					select {
					case <-freed:
						t.Error("inside a closed gate")
					default:
					}
					g.leave()
				}
			})
		}
		g.close()
		close(freed)
		calls.Wait()
	}
}

// TestHolds: a shard is held until everybody who held it lets go; the others go on.
func TestHolds(t *testing.T) {
	var s holds
	called := 0
	call := func() { called++ }
	s.hold(1)
	s.hold(1)
	s.free(1)
	require.False(t, s.propose(1, call))
	require.True(t, s.propose(2, call))
	s.free(1)
	require.True(t, s.propose(1, call))
	require.Equal(t, 2, called)
	require.Empty(t, s.shards)
}
