package store

import (
	"sync"
	"sync/atomic"
)

// flusher runs at most one flush at a time. Whoever asks while one runs is served, with all others, by the next one:
// that one began after they asked.
type flusher struct {
	store *Store
	// failed: a flush failed, so a final one would not return.
	failed atomic.Bool
	// unflushed counts the bytes committed since the last flush began.
	unflushed atomic.Int64

	mu sync.Mutex
	// durable: every commit numbered at or below it survives a power loss.
	durable uint64
	running bool
	// next is closed when a flush that has not begun yet is done; nil when nobody asked for one.
	next chan struct{}
	idle sync.Cond // !running
	// rounds counts finished flushes.
	rounds uint64
}

func (f *flusher) init(s *Store) {
	f.store = s
	f.idle.L = &f.mu
}

// wait returns when every commit numbered at or below n is durable.
func (f *flusher) wait(n uint64) {
	f.mu.Lock()
	if n <= f.durable {
		f.mu.Unlock()
		return
	}
	done := f.askLocked()
	f.mu.Unlock()
	<-done
}

// wrote counts committed bytes and asks for a flush, without waiting, when they pass the bound.
func (f *flusher) wrote(n int) {
	if f.unflushed.Add(int64(n)) < f.store.opts.MaxUnflushedBytes {
		return
	}
	f.mu.Lock()
	if f.unflushed.Load() >= f.store.opts.MaxUnflushedBytes {
		f.askLocked()
	}
	f.mu.Unlock()
}

// askLocked returns a channel that is closed when a flush that begins after this call is done. Needs mu.
func (f *flusher) askLocked() <-chan struct{} {
	if f.next == nil {
		f.next = make(chan struct{})
	}
	if !f.running {
		f.running = true
		go f.run()
	}
	return f.next
}

// run flushes until nobody asks. Close waits for it.
func (f *flusher) run() {
	f.mu.Lock()
	for f.next != nil {
		done := f.next
		f.next = nil
		f.mu.Unlock()
		cut := f.flushOnce()
		f.mu.Lock()
		f.durable = max(f.durable, cut)
		f.rounds++
		close(done)
	}
	f.running = false
	f.idle.Broadcast()
	f.mu.Unlock()
}

// flushOnce returns the number of the last commit that it made durable. A failed flush has been told to OnFatal by
// then; Pebble goes on trying, so it does not return before the data is durable.
func (f *flusher) flushOnce() uint64 {
	f.unflushed.Store(0)
	cut := f.store.commits.Load()
	if err := f.store.db.Flush(); err != nil {
		f.store.fatal(err)
		select {} // only reached when OnFatal let the process live: nothing may be called durable
	}
	return cut
}

// close waits for the running flush, then flushes what is left.
func (f *flusher) close() {
	if f.failed.Load() {
		return
	}
	f.wait(f.store.commits.Load())
	f.mu.Lock()
	for f.running {
		f.idle.Wait()
	}
	f.mu.Unlock()
}
