package client

import (
	"sync"
	"time"
)

// backlog is the messages of a consumer that wait for a handler, in the order in which they came.
type backlog struct {
	mu      sync.Mutex
	some    sync.Cond
	jobs    []*job
	head    int
	stopped bool // no handler starts any more
}

func newBacklog() *backlog {
	b := &backlog{}
	b.some.L = &b.mu
	return b
}

// push adds a message and reports whether it is the only one.
func (b *backlog) push(j *job) (first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.jobs = append(b.jobs, j)
	b.some.Signal()
	return len(b.jobs)-b.head == 1
}

// pop waits for the next message; nil: no handler starts any more.
func (b *backlog) pop() *job {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.stopped && b.head == len(b.jobs) {
		b.some.Wait()
	}
	if b.stopped {
		return nil
	}
	return b.popLocked()
}

func (b *backlog) popLocked() *job {
	j := b.jobs[b.head]
	b.jobs[b.head] = nil
	b.head++
	if b.head > len(b.jobs)/2 { // also when messages always wait, what has gone takes no room for long
		n := copy(b.jobs, b.jobs[b.head:])
		clear(b.jobs[n:])
		b.jobs, b.head = b.jobs[:n], 0
	}
	return j
}

// stop ends every pop.
func (b *backlog) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
	b.some.Broadcast()
}

// takeUntil takes out what came at t or before.
func (b *backlog) takeUntil(t time.Time) []*job {
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []*job
	for b.head < len(b.jobs) && !b.jobs[b.head].came.After(t) {
		out = append(out, b.popLocked())
	}
	return out
}

// rest takes out everything.
func (b *backlog) rest() []*job {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.jobs[b.head:]
	b.jobs, b.head = nil, 0
	return out
}

// oldest is when the message came that has waited longest; false: none waits.
func (b *backlog) oldest() (time.Time, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.head == len(b.jobs) {
		return time.Time{}, false
	}
	return b.jobs[b.head].came, true
}
