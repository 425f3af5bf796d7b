package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/code"
)

// Handler works on one message. nil acks it; an error nacks it, see NackAfter, Reject and ErrRelease for other ends. Its
// context ends when the lease is lost, or when the consumer stops and DrainTimeout has passed.
type Handler func(ctx context.Context, d *Delivery) error

// ErrRelease, returned by a Handler, gives the message back without counting a failure.
var ErrRelease = errors.New("release")

// NackAfter is the error of a Handler that overrides the group's backoff.
type NackAfter struct {
	Delay time.Duration
	Err   error
}

func (e *NackAfter) Error() string { return fmt.Sprintf("again after %s: %v", e.Delay, e.Err) }

// Unwrap returns the reason.
func (e *NackAfter) Unwrap() error { return e.Err }

// Reject is the error of a Handler that makes the message a dead letter now.
type Reject struct{ Reason string }

func (e *Reject) Error() string { return "reject: " + e.Reason }

// ConsumeOptions shape a consumer loop. Zero values mean the defaults.
type ConsumeOptions struct {
	// Concurrency is how many handlers run at once. Defaults to 1.
	Concurrency int
	// MaxInFlight bounds the messages leased at once: those that handlers work on, and those that wait for one, whose
	// leases nobody lengthens. Defaults to Concurrency; more hides the way to the host behind short work.
	MaxInFlight int
	// Wait is one long poll, at most 20 s. Defaults to 5 s.
	Wait time.Duration
	// Lease overrides the group's.
	Lease time.Duration
	// Consumer names this consumer.
	Consumer string
	// NoExtend lets leases run out under a handler. By default a lease is lengthened at its half.
	NoExtend bool
	// DrainTimeout is how long handlers may go on when the consumer stops; then their contexts end. Defaults to 30 s.
	DrainTimeout time.Duration
	// AckTimeout bounds one settling call. Defaults to 30 s.
	AckTimeout time.Duration
	// OnSettled, if set, hears of every message that was settled; it must not block.
	OnSettled func(d *Delivery, s Settled)
}

func (o *ConsumeOptions) ensureDefaults() {
	orInt(&o.Concurrency, 1)
	o.MaxInFlight = max(o.MaxInFlight, o.Concurrency)
	orDuration(&o.Wait, defaultWait)
	orDuration(&o.DrainTimeout, 30*time.Second)
	orDuration(&o.AckTimeout, 30*time.Second)
}

// Limits of ack batching: an ack leaves at once when none is in flight, else with the next ones, at the latest when so
// many are together or so much time has passed.
const (
	maxAckBatch = 32
	maxAckDelay = 20 * time.Millisecond
	// maxUnacked bounds the finished messages whose ack is not answered; beyond it handlers wait.
	maxUnacked = 1024
)

// Consume runs h on the messages of group until ctx ends or the fleet says that there is nothing to go on with (the
// queue or group does not exist, this client has no right). It follows the group's home. On the way out it starts no new
// message, lets handlers finish, settles what they finished, and releases what no handler has seen. It returns nil if
// ctx ended it.
func (c *Client) Consume(ctx context.Context, queue, group string, h Handler, o ConsumeOptions) error {
	o.ensureDefaults()
	l := &consumer{c: c, queue: queue, group: group, h: h, o: o, slots: make(chan struct{}, o.MaxInFlight), work: make(chan *Delivery, o.MaxInFlight)}
	return l.run(ctx)
}

// consumer is one running Consume.
type consumer struct {
	c            *Client
	queue, group string
	h            Handler
	o            ConsumeOptions
	slots        chan struct{} // one token a leased message
	work         chan *Delivery
	workers      sync.WaitGroup
	stopped      <-chan struct{} // ctx's end: what no handler has seen is released
	acks         acker
}

func (l *consumer) run(ctx context.Context) error {
	l.stopped = ctx.Done()
	l.acks = acker{l: l, room: make(chan struct{}, maxUnacked)}
	handlers, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	for range l.o.Concurrency {
		l.workers.Add(1)
		go l.worker(handlers)
	}
	err := l.fetch(ctx)
	close(l.work)
	l.drain(cancel)
	l.acks.wait()
	return err
}

// drain waits for the handlers, and ends their contexts if that takes too long.
func (l *consumer) drain(cancel context.CancelFunc) {
	done := make(chan struct{})
	go func() {
		l.workers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-l.c.opts.Clock.After(l.o.DrainTimeout):
		cancel()
		<-done
	}
}

// fetch leases messages as slots come free.
func (l *consumer) fetch(ctx context.Context) error {
	refused := 0
	for {
		n := l.takeSlots(ctx)
		if n == 0 {
			return nil
		}
		ds, err := l.c.Receive(ctx, l.queue, l.group, ReceiveOptions{Max: n, Wait: l.o.Wait, Lease: l.o.Lease, Consumer: l.o.Consumer})
		l.freeSlots(n - len(ds))
		for _, d := range ds {
			l.work <- d
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			refused = 0
			continue
		case !worthWaiting(codeOf(err)):
			return err
		}
		l.c.log.Debug("receive", zap.String("queue", l.queue), zap.String("group", l.group), zap.Error(err))
		if l.c.sleep(ctx, l.c.retryPause(refused, codeOf(err))) != nil {
			return nil
		}
		refused++
	}
}

// worthWaiting reports whether a receive may succeed later without anybody changing this program.
func worthWaiting(e *code.Error) bool {
	switch e.Code.Info().Class {
	case code.ClassTransient, code.ClassRenegotiate:
		return e.Code != code.ShuttingDown || e.Cause != nil // else: this client was closed
	}
	return false
}

// takeSlots waits for one free slot and takes up to a receive's worth; 0 when ctx ended.
func (l *consumer) takeSlots(ctx context.Context) int {
	select {
	case l.slots <- struct{}{}:
	case <-ctx.Done():
		return 0
	}
	if ctx.Err() != nil {
		return 0
	}
	n := 1
	for ; n < 1000; n++ {
		select {
		case l.slots <- struct{}{}:
		default:
			return n
		}
	}
	return n
}

func (l *consumer) freeSlots(n int) {
	for range n {
		<-l.slots
	}
}

func (l *consumer) worker(ctx context.Context) {
	defer l.workers.Done()
	for d := range l.work {
		select {
		case <-l.stopped:
			l.release(d)
		default:
			l.handle(ctx, d)
		}
		<-l.slots
	}
}

// handle runs the handler and settles the message by what it returned.
func (l *consumer) handle(ctx context.Context, d *Delivery) {
	hctx, cancel := context.WithCancel(ctx)
	extended := make(chan struct{})
	go func() {
		defer close(extended)
		l.extend(hctx, cancel, d)
	}()
	err := l.h(hctx, d)
	cancel()
	<-extended
	var reject *Reject
	switch {
	case err == nil:
		l.acks.add(d)
		return
	case errors.Is(err, ErrRelease):
		l.release(d)
		return
	case errors.As(err, &reject):
		l.settle(d, func(ctx context.Context) ([]Settled, error) {
			return l.c.Reject(ctx, l.queue, l.group, reject.Reason, d.Receipt)
		})
		return
	}
	delay := time.Duration(-1)
	var after *NackAfter
	if errors.As(err, &after) {
		delay = after.Delay
	}
	l.settle(d, func(ctx context.Context) ([]Settled, error) {
		return l.c.Nack(ctx, l.queue, l.group, delay, reasonOf(err), d.Receipt)
	})
}

// reasonOf cuts a handler's error to what a dead letter keeps.
func reasonOf(err error) string {
	const maxReason = 200
	s := err.Error()
	return s[:min(len(s), maxReason)]
}

// extend lengthens d's lease at its half until ctx ends, and ends the handler's context when the lease is lost.
func (l *consumer) extend(ctx context.Context, lost context.CancelFunc, d *Delivery) {
	lease := d.Lease
	if lease <= 0 || l.o.NoExtend {
		return
	}
	for l.c.sleep(ctx, lease/2) == nil {
		call, cancel := context.WithTimeout(ctx, lease/2)
		_, err := l.c.Extend(call, l.queue, l.group, lease, d.Receipt)
		cancel()
		if err == nil || ctx.Err() != nil {
			continue
		}
		if e := codeOf(err); e.Code == code.UnknownDelivery || e.Code == code.StaleOwner {
			l.c.log.Warn("lease lost under a handler", zap.String("queue", l.queue), zap.Uint64("address", d.Address), zap.Error(e))
			lost()
			return
		}
	}
}

func (l *consumer) release(d *Delivery) {
	l.settle(d, func(ctx context.Context) ([]Settled, error) {
		return l.c.Release(ctx, l.queue, l.group, d.Receipt)
	})
}

// settle does one settling call for one message. It ignores the consumer's end: what was finished is reported.
func (l *consumer) settle(d *Delivery, f func(context.Context) ([]Settled, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), l.o.AckTimeout)
	defer cancel()
	rs, _ := f(ctx)
	l.settled([]*Delivery{d}, rs)
}

func (l *consumer) settled(ds []*Delivery, rs []Settled) {
	for i, d := range ds {
		if i >= len(rs) {
			continue
		}
		if rs[i].Err != nil {
			l.c.log.Debug("not settled", zap.String("queue", l.queue), zap.Uint64("address", d.Address), zap.Error(rs[i].Err))
		}
		if l.o.OnSettled != nil {
			l.o.OnSettled(d, rs[i])
		}
	}
}

// acker batches the acks of one consumer. Several calls may be in flight.
type acker struct {
	l    *consumer
	room chan struct{}

	mu       sync.Mutex
	waiting  []*Delivery
	inFlight int
	timed    bool
	calls    sync.WaitGroup
}

// add takes over d, which is done. It waits while too many acks are unanswered.
func (a *acker) add(d *Delivery) {
	a.room <- struct{}{}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, d)
	switch {
	case a.inFlight == 0 || len(a.waiting) >= maxAckBatch:
		a.flushLocked()
	case !a.timed:
		a.timed = true
		a.calls.Add(1)
		go a.flushLater()
	}
}

func (a *acker) flushLater() {
	defer a.calls.Done()
	<-a.l.c.opts.Clock.After(maxAckDelay)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timed = false
	a.flushLocked()
}

func (a *acker) flushLocked() {
	if len(a.waiting) == 0 {
		return
	}
	ds := a.waiting
	a.waiting = nil
	a.inFlight++
	a.calls.Add(1)
	go a.send(ds)
}

func (a *acker) send(ds []*Delivery) {
	defer a.calls.Done()
	receipts := make([]string, len(ds))
	for i, d := range ds {
		receipts[i] = d.Receipt
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.l.o.AckTimeout)
	defer cancel()
	rs, _ := a.l.c.Ack(ctx, a.l.queue, a.l.group, receipts...)
	a.l.settled(ds, rs)
	for range ds {
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
