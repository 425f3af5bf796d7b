package client

import (
	"context"
	"sync"
	"time"
)

// Limits of ack batching: an ack leaves at once when none is in flight, else with the next ones, at the latest when so
// many are together or so much time has passed. So many is an eighth of what may be in flight, within these bounds: a small window must not wait for
// itself, and with a large one calls cost more than acks.
const (
	leastAckBatch = 32
	mostAckBatch  = 256
	maxAckDelay   = 20 * time.Millisecond
	// Finished messages whose ack is not answered are bounded by what may be in flight, within these bounds; beyond it handlers wait.
	leastUnacked = 1024
	mostUnacked  = 4096
)

// acker batches the acks of one lane. Several calls may be in flight.
type acker struct {
	n    *lane
	room chan struct{}

	mu       sync.Mutex
	waiting  []*job
	inFlight int
	timed    bool
	calls    sync.WaitGroup
}

func newAcker(n *lane) *acker {
	return &acker{n: n, room: make(chan struct{}, min(max(n.l.o.MaxInFlight, leastUnacked), mostUnacked))}
}

// ackBatch is how many acks leave together at the latest.
func (n *lane) ackBatch() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return min(max(n.window/8, leastAckBatch), mostAckBatch)
}

// add takes over j, which is done. It waits while too many acks are unanswered.
func (a *acker) add(j *job) {
	a.room <- struct{}{}
	batch := a.n.ackBatch()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, j)
	switch {
	case a.inFlight == 0 || len(a.waiting) >= batch:
		a.flushLocked()
	case !a.timed:
		a.timed = true
		a.calls.Add(1)
		go a.flushLater()
	}
}

func (a *acker) flushLater() {
	defer a.calls.Done()
	<-a.n.l.c.opts.Clock.After(maxAckDelay)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timed = false
	a.flushLocked()
}

func (a *acker) flushLocked() {
	if len(a.waiting) == 0 {
		return
	}
	js := a.waiting
	a.waiting = nil
	a.inFlight++
	a.calls.Add(1)
	go a.send(js)
}

func (a *acker) send(js []*job) {
	defer a.calls.Done()
	ctx, cancel := context.WithTimeout(context.Background(), a.n.l.o.AckTimeout)
	defer cancel()
	rs, _ := a.n.settle(ctx, &settling{kind: "ack", patient: true}, receiptsOf(js))
	a.n.l.settled(js, rs)
	for range js {
		<-a.room
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.inFlight--; a.inFlight == 0 {
		a.flushLocked()
	}
}

// wait returns when every ack that was added has been answered.
func (a *acker) wait() { a.calls.Wait() }
