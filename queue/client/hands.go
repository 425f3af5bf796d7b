package client

import "sync"

// hands are the goroutines that batches are sent from. A new one for each batch begins with a small stack, which must grow, by being copied, on the
// way to the transport; so a few of those that have done their work wait for more, until the client is closed.
type hands struct {
	work  chan func()
	idle  chan struct{} // one for each that waits
	all   sync.WaitGroup
	close func() // lets them end when they are done, and waits for it; do must not be called any more
}

// idleHands bounds those that wait, as each keeps its stack.
const idleHands = 4

func newHands() *hands {
	h := &hands{work: make(chan func()), idle: make(chan struct{}, idleHands)}
	h.close = sync.OnceFunc(func() {
		close(h.work)
		h.all.Wait()
	})
	return h
}

// do calls f from another goroutine.
func (h *hands) do(f func()) {
	select {
	case h.work <- f:
	default:
		h.all.Go(func() { h.run(f) })
	}
}

func (h *hands) run(f func()) {
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
