// Package hands keeps goroutines for work that comes again and again and must not hold up who gives it. A new goroutine begins with a small stack,
// which must grow, by being copied, on the way to a log or a transport; so a few of those that have done their work wait for more.
package hands

import "sync"

// Hands are such goroutines; there are as many as there is work at once. Do may be called from any goroutine.
type Hands struct {
	work  chan func()
	idle  chan struct{} // one for each that waits
	all   sync.WaitGroup
	close func()
}

// idleHands bounds those that wait, as each keeps its stack.
const idleHands = 4

// New returns hands, none of which is there yet. Their owner ends them by Close.
func New() *Hands {
	h := &Hands{work: make(chan func()), idle: make(chan struct{}, idleHands)}
	h.close = sync.OnceFunc(func() {
		close(h.work)
		h.all.Wait()
	})
	return h
}

// Do calls f from another goroutine, and does not wait for it.
func (h *Hands) Do(f func()) {
	select {
	case h.work <- f:
	default:
		h.all.Go(func() { h.run(f) })
	}
}

func (h *Hands) run(f func()) {
	for ok := true; ok; {
		f()
		select {
		case h.idle <- struct{}{}:
		default:
			return
		}
		f, ok = <-h.work
		<-h.idle
	}
}

// Close waits until all that was given is done, and ends the goroutines. Do must not be called any more; Close may be.
func (h *Hands) Close() { h.close() }
