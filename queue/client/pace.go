package client

import (
	"context"
	"sync"
	"time"
)

// pace decides how far a consumer fetches ahead of its handlers: as many messages as they finish in Ahead, at least one for
// each handler and at most MaxInFlight. What has waited for twice that, because a handler got stuck or slow, is given back, so
// that no message waits behind one handler while another consumer has nothing to do. Without Ahead it is always MaxInFlight.
type pace struct {
	l     *consumer
	wake  chan struct{}
	calls sync.WaitGroup

	mu     sync.Mutex
	each   time.Duration // what one message takes a handler, lately; 0: none has been finished
	began  []time.Time   // by handler: since when it works on a message; zero: it waits for one
	target int           // messages that may be leased at once
	armed  bool          // the goroutine looks at the backlog by itself
}

func newPace(l *consumer) *pace {
	p := &pace{l: l, wake: make(chan struct{}, 1), began: make([]time.Time, l.o.Concurrency)}
	p.target = p.wantedLocked(time.Time{})
	return p
}

// start runs until the returned function is called, which waits for the end.
func (p *pace) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.run(ctx)
	}()
	p.look()
	return func() {
		cancel()
		<-done
	}
}

// wantedLocked is how many messages may be leased at once as things are.
func (p *pace) wantedLocked(now time.Time) int {
	o := &p.l.o
	if o.Ahead < 0 {
		return o.MaxInFlight
	}
	if p.each <= 0 {
		return o.Concurrency
	}
	free := 0
	for _, t := range p.began {
		if t.IsZero() || now.Sub(t) <= max(o.Ahead, 2*p.each) {
			free++
		}
	}
	ahead := float64(free) * float64(o.Ahead) / float64(p.each)
	return o.Concurrency + int(min(ahead, float64(o.MaxInFlight-o.Concurrency)))
}

// begin says that a handler starts.
func (p *pace) begin(handler int) {
	now := p.l.c.opts.Clock.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began[handler] = now
}

// end says that it has finished, and settled, its message.
func (p *pace) end(handler int) {
	if p.l.o.Ahead < 0 {
		return
	}
	now := p.l.c.opts.Clock.Now()
	p.mu.Lock()
	took := max(now.Sub(p.began[handler]), 1)
	p.began[handler] = time.Time{}
	if p.each == 0 {
		p.each = took
	}
	p.each = max(p.each+(took-p.each)/4, 1)
	changed := p.retargetLocked(now)
	p.mu.Unlock()
	if changed {
		p.look()
	}
}

// retargetLocked takes up what is wanted now if that differs enough to tell the hosts.
func (p *pace) retargetLocked(now time.Time) bool {
	wanted, o := p.wantedLocked(now), &p.l.o
	bound := wanted == o.Concurrency || wanted == o.MaxInFlight
	if wanted == p.target || !bound && wanted < p.target+p.target/4 && wanted > p.target-p.target/4 {
		return false
	}
	p.target = wanted
	return true
}

// came says that a message waits where none did.
func (p *pace) came() {
	if p.l.o.Ahead < 0 {
		return
	}
	p.mu.Lock()
	armed := p.armed
	p.armed = true
	p.mu.Unlock()
	if !armed {
		p.look()
	}
}

// wanted is how many messages may be leased at once.
func (p *pace) wanted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.target
}

// look makes the goroutine look at the lanes and the backlog now.
func (p *pace) look() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *pace) run(ctx context.Context) {
	defer p.calls.Wait()
	var timer <-chan time.Time
	var at time.Time
	for {
		select {
		case <-p.wake:
		case <-timer:
			timer = nil
		case <-ctx.Done():
			return
		}
		due := p.round()
		if due == 0 {
			timer = nil
			continue
		}
		if next := p.l.c.opts.Clock.Now().Add(due); timer == nil || next.Before(at) {
			timer, at = p.l.c.opts.Clock.After(due), next
		}
	}
}

// patience is how long a message may wait for a handler.
func (p *pace) patience() time.Duration { return 2 * p.l.o.Ahead }

// round tells the hosts what may be out, gives back what has waited too long, and returns when to look again; 0: when
// something happens.
func (p *pace) round() time.Duration {
	if p.l.o.Ahead < 0 {
		return p.l.divide()
	}
	now := p.l.c.opts.Clock.Now()
	oldest, some := p.l.backlog.oldest()
	late := some && now.Sub(oldest) >= p.patience()
	if late {
		p.mu.Lock()
		p.retargetLocked(now)
		p.mu.Unlock()
	}
	again := p.l.divide()
	if late {
		p.giveBack(p.l.backlog.takeUntil(now.Add(-p.patience())))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if oldest, p.armed = p.l.backlog.oldest(); p.armed {
		due := max(oldest.Add(p.patience()).Sub(now), time.Millisecond)
		if again == 0 || due < again {
			again = due
		}
	}
	return again
}

// giveBack releases messages that no handler has seen; they are somebody else's, or come again when there is room.
func (p *pace) giveBack(js []*job) {
	for _, j := range js {
		p.l.leases.drop(j)
		j.lane.free(j)
	}
	p.l.release(js, &p.calls)
}
