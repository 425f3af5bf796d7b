package client

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/code"
)

// leases lengthens the leases of what a consumer holds, at the half of each, whether a handler works on it or it waits for
// one. One goroutine keeps the time for all; an extend carries all receipts of a partition that are due together, and one that
// is not answered holds up no other.
type leases struct {
	l     *consumer
	wake  chan struct{}
	calls sync.WaitGroup

	mu    sync.Mutex
	held  map[*job]struct{}
	first time.Time // what the goroutine waits for; zero: nothing
}

func newLeases(l *consumer) *leases {
	return &leases{l: l, wake: make(chan struct{}, 1), held: map[*job]struct{}{}}
}

// start runs until the returned function is called, which waits for the end.
func (k *leases) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// add takes j, which has just been leased, into care.
func (k *leases) add(j *job) {
	if j.Lease <= 0 || k.l.o.NoExtend {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	j.due = k.l.c.opts.Clock.Now().Add(j.Lease / 2)
	k.held[j] = struct{}{}
	if k.first.IsZero() || j.due.Before(k.first) {
		k.look()
	}
}

// begin says that j's handler starts, whose context lost ends; false when the lease is lost already.
func (k *leases) begin(j *job, lost func()) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	j.lost = lost
	return !j.gone
}

// drop says that j is done.
func (k *leases) drop(j *job) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.held, j)
}

func (k *leases) run(ctx context.Context) {
	defer k.calls.Wait()
	for {
		due := k.next()
		var timer <-chan time.Time
		if !due.IsZero() {
			timer = k.l.c.opts.Clock.After(max(due.Sub(k.l.c.opts.Clock.Now()), 0))
		}
		select {
		case <-timer:
			k.extend(ctx, k.dueBy(due))
		case <-k.wake:
		case <-ctx.Done():
			return
		}
	}
}

// next is when the first lease is to be lengthened.
func (k *leases) next() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.first = time.Time{}
	for j := range k.held {
		if k.first.IsZero() || j.due.Before(k.first) {
			k.first = j.due
		}
	}
	return k.first
}

// together is the part of a lease within which leases are lengthened together.
const together = 16

// dueBy collects what is due at t, or soon after it, by lane and lease. Until the answer is there they are not due again.
func (k *leases) dueBy(t time.Time) map[leaseGroup][]*job {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[leaseGroup][]*job{}
	for j := range k.held {
		g := leaseGroup{j.lane, j.Lease}
		if j.due.After(t.Add(j.Lease/together)) || len(out[g]) == maxReceipts {
			continue
		}
		out[g] = append(out[g], j)
		j.due = t.Add(j.Lease)
	}
	return out
}

// maxReceipts bounds the receipts of one settling call.
const maxReceipts = 1000

type leaseGroup struct {
	lane  *lane
	lease time.Duration
}

func (k *leases) extend(ctx context.Context, due map[leaseGroup][]*job) {
	for g, js := range due {
		k.calls.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, g.lease/2)
			defer cancel()
			rs, _ := g.lane.settle(ctx, &settling{kind: "extend", lease: g.lease}, receiptsOf(js))
			k.extended(js, rs)
			k.look()
		})
	}
}

// look makes the goroutine find out anew what it waits for.
func (k *leases) look() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// extended notes the answers: a lease that is lost ends its handler's context.
func (k *leases) extended(js []*job, rs []Settled) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.l.c.opts.Clock.Now()
	for i, j := range js {
		if _, held := k.held[j]; !held || i >= len(rs) {
			continue
		}
		e := rs[i].Err
		switch {
		case e == nil:
			j.due = now.Add(j.Lease / 2)
		case e.Code == code.UnknownDelivery || e.Code == code.StaleOwner:
			k.l.c.log.Warn("lease lost under a handler", zap.String("queue", k.l.queue), zap.Uint64("address", j.Address), zap.Error(e))
			delete(k.held, j)
			j.gone = true
			if j.lost != nil {
				j.lost()
			}
		default:
			j.due = now.Add(j.Lease / 8)
		}
	}
}
