package home

import (
	"context"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// waiter is one receive that has not been answered. Guarded by the group's lock; once finished, its results belong
// to the receiving goroutine.
type waiter struct {
	ctx        context.Context
	take       take
	leaseSet   bool
	short      bool // does not wait for messages, only for the home lease
	why        hindrance
	finished   bool
	ch         chan struct{} // closed when finished; nil: nobody is parked on it
	prev, next *waiter

	out      []Delivery
	err      error
	led      *Ledger // of out
	epoch    queue.Epoch
	recovery uint64
}

// finish answers a waiter. The caller removes it from the list.
func (w *waiter) finish(ds []Delivery, err error) {
	w.out, w.err, w.finished = ds, err, true
	if w.ch != nil {
		close(w.ch)
	}
}

// waiters is the receives of a group in order of arrival.
type waiters struct {
	first, last *waiter
	n           int
	shorts      int
}

func (l *waiters) add(w *waiter) {
	w.prev = l.last
	if l.last == nil {
		l.first = w
	} else {
		l.last.next = w
	}
	l.last = w
	l.n++
	if w.short {
		l.shorts++
	}
}

func (l *waiters) remove(w *waiter) {
	if w.prev == nil {
		l.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		l.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
	l.n--
	if w.short {
		l.shorts--
	}
}

// failAll answers everybody with a refusal.
func (l *waiters) failAll(err error) {
	for w := l.first; w != nil; w = l.first {
		l.remove(w)
		w.finish(nil, err)
	}
}

// Receive leases up to req.Max messages to a consumer. It waits up to req.Wait for the first one and returns an empty
// list when none came. Messages of one call are in hand-out order.
//
// Nothing is handed out to a call whose ctx is done; what was leased to it in the same moment is given back without
// counting. Refusals:
//
//	UnknownGroup      no such group as applied here
//	NotOwner          this replica is not the group's home: HomeOf says who is; at once, also while waiting
//	InvalidArgument   a field is out of bounds, or a single active consumer has no name
//	MaxWaitingPulls   too many receives wait already
//	ConsumerLimit     the wait ended with the group's or the consumer's in-flight limit reached
//	GroupPaused       the wait ended with the group or queue paused
//	ReadOnlyDegraded, NoLeader …  the wait ended without the home lease: the shard has no quorum
//	DeadlineExceeded  ctx ended
func (k *Keeper) Receive(ctx context.Context, group string, req ReceiveRequest) ([]Delivery, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, ended(ctx)
	}
	g, err := k.group(group)
	if err != nil {
		return nil, err
	}
	w := &waiter{
		ctx: ctx, leaseSet: req.HasLease, short: req.Wait == 0,
		take: take{max: max(req.Max, 1), maxBytes: req.MaxBytes, lease: req.Lease, consumer: req.Consumer},
	}
	if w.take.maxBytes == 0 {
		w.take.maxBytes = DefaultReceiveBytes
	}
	if err := g.join(w); err != nil {
		return nil, err
	}
	if w.ch != nil {
		g.park(w, req.Wait)
	}
	return g.hand(w)
}

func (r *ReceiveRequest) check() error {
	switch {
	case r.Max < 0 || r.Max > MaxReceive:
		return code.New(code.InvalidArgument, "max messages is %d: allow 1 to %d", r.Max, MaxReceive)
	case r.MaxBytes < 0:
		return code.New(code.InvalidArgument, "max bytes is %d: it cannot be negative", r.MaxBytes)
	case r.Wait < 0 || r.Wait > MaxWait:
		return code.New(code.InvalidArgument, "wait is %v: allow 0 to %v", r.Wait, MaxWait)
	case r.HasLease && (r.Lease < 0 || r.Lease > MaxLease):
		return code.New(code.InvalidArgument, "lease is %v: allow 0 to %v", r.Lease, MaxLease)
	case len(r.Consumer) > queue.MaxNameBytes:
		return code.New(code.InvalidArgument, "the consumer's name has %d bytes: at most %d", len(r.Consumer), queue.MaxNameBytes)
	}
	return nil
}

// join lines a waiter up behind the others and serves whom it can. Afterwards the waiter is finished, or parked with
// its channel made.
func (g *group) join(w *waiter) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.enter(); err != nil {
		return err
	}
	if g.waiters.n >= g.k.o.MaxWaiters {
		return code.New(code.MaxWaitingPulls, "%d receives wait for group %q already", g.waiters.n, g.info.Name)
	}
	if g.info.Config.SingleActiveConsumer && w.take.consumer == "" {
		return code.New(code.InvalidArgument, "group %q has a single active consumer: name the consumer", g.info.Name)
	}
	g.waiters.add(w)
	g.pump()
	if !w.finished {
		w.ch = make(chan struct{})
	}
	return nil
}

// park waits until the waiter is answered or its time is over.
func (g *group) park(w *waiter, wait time.Duration) {
	if w.short {
		wait = 2 * g.k.o.HomeLease / 3 // for the home lease; dismissShort ends it earlier
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-w.ch:
		return
	case <-timer.C:
	case <-w.ctx.Done():
	case <-g.k.ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case w.finished:
	case g.k.ctx.Err() != nil: // before shut came to this group
		g.waiters.remove(w)
		w.finish(nil, code.New(code.ShuttingDown, ""))
		g.note()
	default:
		g.dismiss(w)
	}
}

// dismiss answers a waiter that gets nothing.
func (g *group) dismiss(w *waiter) {
	g.waiters.remove(w)
	w.finish(nil, g.reason(w))
	g.note()
}

// dismissShort answers receives that do not wait, unless the home lease is on its way.
func (g *group) dismissShort() {
	if g.waiters.shorts == 0 || g.why == gated || g.why == reading {
		return
	}
	for w := g.waiters.first; w != nil; {
		next := w.next
		if w.short {
			g.dismiss(w)
		}
		w = next
	}
}

// reason is what a receive that got nothing is told; nil: there was nothing.
func (g *group) reason(w *waiter) error {
	why := w.why
	if why == nothing {
		why = g.why
	}
	switch why {
	case limited, ownLimit:
		return code.New(code.ConsumerLimit, "")
	case paused:
		return code.New(code.GroupPaused, "group %q or its queue is paused: resume it", g.info.Name)
	case gated:
		return g.gateReason()
	}
	return nil
}

// gateReason says why the home may not hand out, if that is a failure.
func (g *group) gateReason() error {
	err := g.k.readFailure()
	if err == nil {
		err = g.failure
	}
	if err == nil {
		return nil
	}
	return &code.Error{
		Code: codeOf(err, code.ReadOnlyDegraded), Effect: code.EffectNone, Cause: err,
		Text: "the home of group " + g.info.Name + " cannot reach a quorum: deliveries are paused until it can",
	}
}

// hand returns a finished waiter's messages to its caller, unless the caller is gone: then they never left.
func (g *group) hand(w *waiter) ([]Delivery, error) {
	if w.ctx.Err() != nil {
		if len(w.out) > 0 {
			g.mu.Lock()
			if g.led == w.led {
				g.led.undo(w.out, g.k.o.Boot())
				g.pump()
			}
			g.mu.Unlock()
		}
		return nil, ended(w.ctx)
	}
	r := Receipt{Shard: g.k.o.Shard, Recovery: w.recovery, Group: g.id}
	for i := range w.out {
		d := &w.out[i]
		r.Lease, r.Address = d.lease, d.Message.Address
		d.Receipt = g.k.receipts.Encode(r)
	}
	return w.out, w.err
}

// ended is what a call is told whose ctx ended before anything was done.
func ended(ctx context.Context) error {
	return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: ctx.Err()}
}
