package hands

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestHands: what is to be done is begun at once, however much is under way, and few wait afterwards.
func TestHands(t *testing.T) {
	h := New()
	const n = 3 * idleHands
	goOn := make(chan struct{})
	began, ended := make(chan int, n), make(chan int, n)
	for i := range n {
		h.Do(func() { began <- i; <-goOn; ended <- i })
	}
	for range n {
		<-began
	}
	close(goOn)
	for range n {
		<-ended
	}
	require.Eventually(t, func() bool { return len(h.idle) == idleHands }, 30*time.Second, time.Millisecond)
	h.Do(func() { ended <- 0 })
	<-ended
	h.Close()
	require.Eventually(t, func() bool { return len(h.idle) == 0 }, 30*time.Second, time.Millisecond)
}

// BenchmarkHands does one thing after the other that needs 8 KiB of stack, as a publish does, from a new goroutine each and from one that has done
// such a thing before.
func BenchmarkHands(b *testing.B) {
	h := New()
	defer h.Close()
	for _, way := range []struct {
		name string
		do   func(func())
	}{{"new", func(f func()) { go f() }}, {"hands", h.Do}} {
		b.Run(way.name, func(b *testing.B) {
			done := make(chan byte)
			for b.Loop() {
				way.do(func() { done <- deep(32) })
				<-done
			}
		})
	}
}

//go:noinline
func deep(n int) byte {
	var frame [256]byte
	if n > 0 {
		frame[n] = deep(n - 1)
	}
	return frame[n] + byte(n)
}
