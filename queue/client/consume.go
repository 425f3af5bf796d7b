package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	// MaxInFlight bounds the messages leased at once: those that handlers work on, and those that wait for one, which hides
	// the way to the host behind short work. At least Concurrency. Defaults to 256, and no more than Ahead says; one that is
	// set is used whole, unless Ahead is set too. In a queue of several partitions it holds for all of them together, and goes
	// where the messages are.
	MaxInFlight int
	// Ahead bounds what waits for a handler by time: no more messages than the handlers finish in it, as fast as they were
	// lately, and at first none. One that has waited twice as long is given back without counting, for any consumer. Defaults
	// to 250 ms; below 0 there is no such bound.
	Ahead time.Duration
	// MaxInFlightBytes bounds the bodies and keys of those that wait, but for one message whatever its size. Defaults to 2 MiB.
	MaxInFlightBytes int
	// Wait is one long poll, at most 20 s, with hosts that do not stream. Defaults to 5 s.
	Wait time.Duration
	// Lease overrides the group's.
	Lease time.Duration
	// Consumer names this consumer.
	Consumer string
	// NoExtend lets leases run out under a handler, and before one has time. By default a lease is lengthened at its half.
	NoExtend bool
	// DrainTimeout is how long handlers may go on when the consumer stops, after which their contexts end, and how long it
	// tries to give back what no handler has seen. Defaults to 30 s.
	DrainTimeout time.Duration
	// AckTimeout bounds one settling call. Defaults to 30 s.
	AckTimeout time.Duration
	// OnSettled, if set, hears of every message that was settled; it must not block.
	OnSettled func(d *Delivery, s Settled)
}

const (
	defaultWindow = 256
	defaultAhead  = 250 * time.Millisecond
)

func (o *ConsumeOptions) ensureDefaults() {
	orInt(&o.Concurrency, 1)
	if o.MaxInFlight > 0 && o.Ahead == 0 {
		o.Ahead = -1
	}
	orInt(&o.MaxInFlight, defaultWindow)
	o.MaxInFlight = max(o.MaxInFlight, o.Concurrency)
	orDuration(&o.Ahead, defaultAhead)
	orInt(&o.MaxInFlightBytes, 2<<20)
	orDuration(&o.Wait, defaultWait)
	orDuration(&o.DrainTimeout, 30*time.Second)
	orDuration(&o.AckTimeout, 30*time.Second)
}

// Consume runs h on the messages of group until ctx ends or the fleet says that there is nothing to go on with (the
// queue or group does not exist, this client has no right). It is served from every partition at once, by a stream to the
// group's home in each, which it follows when it moves; a host or proxy that does not stream is polled. On the way out it
// starts no new message, lets handlers finish, settles what they finished, and releases what no handler has seen. It returns
// nil if ctx ended it.
func (c *Client) Consume(ctx context.Context, queue, group string, h Handler, o ConsumeOptions) error {
	if e := checkText("the names of queue, group and consumer", queue, group, o.Consumer); e != nil {
		return e
	}
	o.ensureDefaults()
	l := &consumer{c: c, queue: queue, group: group, h: h, o: o}
	return l.run(ctx)
}

// consumer is one running Consume.
type consumer struct {
	c            *Client
	queue, group string
	h            Handler
	o            ConsumeOptions
	lanesMu      sync.Mutex
	lanes        []*lane         // one for each partition; more may come
	stopped      <-chan struct{} // closed: no handler starts any more
	backlog      *backlog
	pace         *pace
	shares       *shares
	workers      sync.WaitGroup
	leases       *leases
}

// job is one leased message on its way through a consumer.
type job struct {
	*Delivery
	lane    *lane
	session *session // nil: it was polled
	size    int
	came    time.Time

	// Guarded by the leases' mu.
	due  time.Time // when its lease is to be lengthened
	lost func()    // ends its handler's context; nil before it has one
	gone bool      // the lease is lost
}

func (l *consumer) run(ctx context.Context) error {
	n, err := l.partitions(ctx)
	if n == 0 {
		return err
	}
	serving, stop := context.WithCancel(ctx)
	defer stop()
	l.stopped = serving.Done()
	l.backlog, l.pace, l.leases = newBacklog(), newPace(l), newLeases(l)
	defer context.AfterFunc(serving, l.backlog.stop)()
	l.makeLanes(int(n))
	keeping := l.leases.start()
	pacing := l.pace.start()
	handlers, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	for i := range l.o.Concurrency {
		l.workers.Go(func() { l.worker(handlers, i) })
	}
	err = l.serve(serving, stop)
	stop()
	l.backlog.stop()
	var releasing sync.WaitGroup
	l.releaseQueued(&releasing)
	l.drain(cancel)
	releasing.Wait()
	pacing()
	for _, n := range l.allLanes() {
		n.acks.wait()
	}
	l.closeLanes()
	keeping()
	return err
}

// partitions asks until it is told, or told that there is nothing to ask for. 0 without an error: ctx ended.
func (l *consumer) partitions(ctx context.Context) (uint32, error) {
	for refused := 0; ; refused++ {
		n, err := l.c.partitionsOf(ctx, l.queue)
		switch {
		case err == nil:
			return n, nil
		case ctx.Err() != nil:
			return 0, nil
		case !worthWaiting(codeOf(err)):
			return 0, err
		}
		if l.c.sleep(ctx, l.c.retryPause(refused, codeOf(err))) != nil {
			return 0, nil
		}
	}
}

// makeLanes makes a lane for each of n partitions.
func (l *consumer) makeLanes(n int) {
	for p := range n {
		l.lanes = append(l.lanes, newLane(l, uint32(p), 0, 1))
	}
	l.shares = newShares(n)
	l.divide()
}

// divide divides what may be in flight among the lanes, as things are, and returns when to do that again; 0: when something
// happens. One goroutine at a time calls it.
func (l *consumer) divide() time.Duration {
	total := l.pace.wanted()
	orders, again := l.shares.plan(total, l.c.opts.Clock.Now())
	lanes := l.allLanes()
	for _, o := range orders {
		lane := lanes[o.lane]
		if s := lane.resize(o.window, max(l.o.MaxInFlightBytes/total*o.window, 1), o.confirm); s != nil {
			l.pace.calls.Go(func() { lane.grow(s) }) // a host that takes nothing holds up its lane only
		}
	}
	return again
}

// allLanes returns the lanes that there are, by partition.
func (l *consumer) allLanes() []*lane {
	l.lanesMu.Lock()
	defer l.lanesMu.Unlock()
	return l.lanes[:len(l.lanes):len(l.lanes)]
}

// serve runs the lanes until ctx ends or one of them has nothing to go on with, which ends all. Partitions that the queue gets meanwhile
// are served too.
func (l *consumer) serve(ctx context.Context, stop func()) error {
	var lanes sync.WaitGroup
	var once sync.Once
	var first error
	begin := func(n *lane) {
		lanes.Go(func() {
			if err := n.serve(ctx); err != nil {
				once.Do(func() { first = err })
				stop()
			}
		})
	}
	for _, n := range l.allLanes() {
		begin(n)
	}
	lanes.Go(func() { l.follow(ctx, begin) })
	lanes.Wait()
	return first
}

// follow adds a lane for every partition that the queue gets, until ctx ends.
func (l *consumer) follow(ctx context.Context, begin func(*lane)) {
	for n := 0; ; {
		known, grown := l.c.knownPartitions(l.queue)
		n = max(n, int(known))
		for p := len(l.allLanes()); p < n; p++ {
			added := newLane(l, uint32(p), 0, 1)
			l.lanesMu.Lock()
			l.lanes = append(l.lanes, added)
			l.lanesMu.Unlock()
			l.shares.add()
			begin(added)
			l.c.log.Info("the queue has grown", zap.String("queue", l.queue), zap.String("group", l.group), zap.Int("partition", p))
			l.pace.look()
		}
		select {
		case <-grown:
		case <-l.c.opts.Clock.After(refreshPartitions):
			n = int(l.c.relocate(ctx, l.queue))
		case <-ctx.Done():
			return
		}
	}
}

func (l *consumer) closeLanes() {
	var all sync.WaitGroup
	for _, n := range l.allLanes() {
		all.Go(n.close)
	}
	all.Wait()
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

// worthWaiting reports whether a receive may succeed later without anybody changing this program.
func worthWaiting(e *code.Error) bool {
	switch e.Code.Info().Class {
	case code.ClassTransient, code.ClassRenegotiate:
		return e.Code != code.ShuttingDown || e.Cause != nil // else: this client was closed
	}
	return false
}

func (l *consumer) worker(ctx context.Context, i int) {
	for {
		select {
		case <-l.stopped:
			return
		default:
		}
		j := l.backlog.pop()
		if j == nil {
			return
		}
		l.pace.begin(i)
		l.handle(ctx, j)
		l.pace.end(i)
		j.lane.free(j)
	}
}

// releaseQueued gives back what no handler will see.
func (l *consumer) releaseQueued(calls *sync.WaitGroup) {
	js := l.backlog.rest()
	for _, j := range js {
		l.leases.drop(j)
	}
	l.release(js, calls)
}

// release gives messages back without counting, all of a lane together and at most for DrainTimeout; what cannot be told by then
// comes again when its lease runs out.
func (l *consumer) release(js []*job, calls *sync.WaitGroup) {
	queued := map[*lane][]*job{}
	for _, j := range js {
		queued[j.lane] = append(queued[j.lane], j)
	}
	for n, js := range queued {
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), l.o.DrainTimeout)
			defer cancel()
			for some := range slices.Chunk(js, maxReceipts) {
				rs, _ := n.settle(ctx, &settling{kind: "release"}, receiptsOf(some))
				l.settled(some, rs)
			}
		})
	}
}

func receiptsOf(js []*job) []string {
	out := make([]string, len(js))
	for i, j := range js {
		out[i] = j.Receipt
	}
	return out
}

// handle runs the handler and settles the message by what it returned.
func (l *consumer) handle(ctx context.Context, j *job) {
	hctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !l.leases.begin(j, cancel) {
		// It was lost while it waited, and comes again. The home is told all the same: it counts in the stream's window.
		call, cancel := context.WithTimeout(context.Background(), l.o.AckTimeout)
		defer cancel()
		_, _ = j.lane.settle(call, &settling{kind: "release"}, []string{j.Receipt})
		return
	}
	err := l.h(hctx, j.Delivery)
	cancel()
	l.leases.drop(j)
	var reject *Reject
	switch {
	case err == nil:
		j.lane.acks.add(j)
		return
	case errors.Is(err, ErrRelease):
		l.settle(j, &settling{kind: "release"})
		return
	case errors.As(err, &reject):
		l.settle(j, &settling{kind: "reject", reason: reasonOf(reject.Reason)})
		return
	}
	s := &settling{kind: "nack", delay: -1, reason: reasonOf(err.Error())}
	var after *NackAfter
	if errors.As(err, &after) {
		s.delay = after.Delay
	}
	l.settle(j, s)
}

// reasonOf makes of what a handler says what a dead letter keeps: text, and not too long. Anything else would be refused, and the
// message would come again only when its lease runs out.
func reasonOf(s string) string {
	const maxReason = 200
	return strings.ToValidUTF8(s[:min(len(s), maxReason)], "")
}

// settle does one settling call for one message. It ignores the consumer's end: what was finished is reported.
func (l *consumer) settle(j *job, s *settling) {
	ctx, cancel := context.WithTimeout(context.Background(), l.o.AckTimeout)
	defer cancel()
	rs, _ := j.lane.settle(ctx, s, []string{j.Receipt})
	l.settled([]*job{j}, rs)
}

func (l *consumer) settled(js []*job, rs []Settled) {
	for i, j := range js {
		if i >= len(rs) {
			continue
		}
		if rs[i].Err != nil {
			l.c.log.Debug("not settled", zap.String("queue", l.queue), zap.Uint64("address", j.Address), zap.Error(rs[i].Err))
		}
		if l.o.OnSettled != nil {
			l.o.OnSettled(j.Delivery, rs[i])
		}
	}
}
