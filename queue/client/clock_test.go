package client

import (
	"sync"
	"time"
)

// fakeClock moves when told, or at once past every pause if auto is set.
type fakeClock struct {
	mu     sync.Mutex
	now    time.Time
	auto   bool
	timers []fakeTimer
	pauses []time.Duration
}

type fakeTimer struct {
	at time.Time
	c  chan time.Time
}

func newFakeClock() *fakeClock { return &fakeClock{now: time.Unix(1_700_000_000, 0)} }

func (f *fakeClock) Now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}

func (f *fakeClock) After(d time.Duration) <-chan time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pauses = append(f.pauses, d)
	c := make(chan time.Time, 1)
	f.timers = append(f.timers, fakeTimer{f.now.Add(d), c})
	if f.auto {
		f.now = f.now.Add(d)
	}
	f.fireLocked()
	return c
}

func (f *fakeClock) Advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now = f.now.Add(d)
	f.fireLocked()
}

func (f *fakeClock) fireLocked() {
	left := f.timers[:0]
	for _, t := range f.timers {
		if t.at.After(f.now) {
			left = append(left, t)
			continue
		}
		t.c <- f.now
	}
	f.timers = left
}
