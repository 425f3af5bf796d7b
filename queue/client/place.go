package client

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// located is a queue's partitions as a host told them.
type located struct {
	queueID    uint64 // 0: it was not told
	partitions uint32
}

func locateQueue(a *apis) method[tierqv1.LocateQueueRequest, tierqv1.LocateQueueResponse] {
	return a.queue().LocateQueue
}

// locate asks how many partitions a queue has, and learns who leads them.
func (c *Client) locate(ctx context.Context, queue string) (located, error) {
	var from string
	h := read(route{})
	h.from = &from
	res, err := call(ctx, c, h, locateQueue, &tierqv1.LocateQueueRequest{Name: queue})
	if err != nil {
		if codeOf(err).Code == code.Malformed {
			return located{partitions: 1}, nil // a host that does not know the call knows no partitions either
		}
		return located{}, err
	}
	for _, p := range res.Partitions {
		if p.LeaderApi != "" {
			c.router.hint(route{kind: toLeader, queue: queue, partition: p.Number}, p.LeaderApi, from)
		}
	}
	return located{res.Id, uint32(max(len(res.Partitions), 1))}, nil
}

// partitionsOf is how many partitions a queue has, as far as this client knows; it asks once.
func (c *Client) partitionsOf(ctx context.Context, queue string) (uint32, error) {
	l := c.placerOf(queue)
	if l == nil {
		return 0, errClosed()
	}
	if n := l.partitions.Load(); n != 0 {
		return n, nil
	}
	at, err := c.locate(ctx, queue)
	if err != nil {
		return 0, err
	}
	return l.know(at), nil
}

// refreshPartitions is how often a queue that is used is asked whether it has more partitions than before.
const refreshPartitions = 30 * time.Second

// refreshLocked asks for the partitions beside the publishes, now and then. Who is placed meanwhile is placed among those known.
func (l *placer) refreshLocked() {
	now := l.c.opts.Clock.Now()
	if l.refreshed.IsZero() {
		l.refreshed = now
	}
	if now.Sub(l.refreshed) < refreshPartitions || l.c.base.Err() != nil {
		return
	}
	l.refreshed = now
	l.c.wg.Add(1)
	go func() {
		defer l.c.wg.Done()
		l.c.relocate(l.c.base, l.queue)
	}()
}

// relocate asks how many partitions a queue has now, and remembers it; 0: that was not told.
func (c *Client) relocate(ctx context.Context, queue string) uint32 {
	ctx, cancel := context.WithTimeout(ctx, c.opts.CallTimeout)
	defer cancel()
	l := c.placerOf(queue)
	if l == nil {
		return 0
	}
	at, err := c.locate(ctx, queue)
	if err != nil {
		return 0
	}
	return l.know(at)
}

// know takes up what a host has told, and returns how many partitions there are: a host may not have heard yet that the same queue has
// grown.
func (l *placer) know(at located) uint32 {
	l.knownMu.Lock()
	defer l.knownMu.Unlock()
	before := l.partitions.Load()
	if at.queueID == l.queueID && at.partitions < before {
		return before
	}
	l.queueID = at.queueID
	l.partitions.Store(at.partitions)
	if at.partitions > before {
		close(l.grown)
		l.grown = make(chan struct{})
	}
	return at.partitions
}

// knownPartitions is how many partitions a queue has as far as this client knows, 0 if it does not, and a channel that is closed when
// it comes to know of more.
func (c *Client) knownPartitions(queue string) (uint32, <-chan struct{}) {
	l := c.placerOf(queue)
	if l == nil {
		return 0, nil
	}
	l.knownMu.Lock()
	defer l.knownMu.Unlock()
	return l.partitions.Load(), l.grown
}

// heardPartitions is hear for whoever has no placer at hand.
func (c *Client) heardPartitions(queue string, n uint32) {
	if n <= 1 {
		return
	}
	if l := c.placerOf(queue); l != nil {
		l.hear(n)
	}
}

// hear takes a host's word in passing that the queue has n partitions: if that is more than this client knows of, the queue is asked for
// at once.
func (l *placer) hear(n uint32) {
	if known := l.partitions.Load(); known == 0 || n <= known || !l.hearing.CompareAndSwap(false, true) {
		return
	}
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	if l.c.closing {
		return
	}
	l.c.wg.Add(1)
	go func() {
		defer l.c.wg.Done()
		defer l.hearing.Store(false)
		// The host that answers may hear of the growth later than the one that told of it.
		for i := 0; i < hearTries && l.c.relocate(l.c.base, l.queue) < n; i++ {
			if l.c.sleep(l.c.base, hearPause) != nil {
				return
			}
		}
	}()
}

const (
	// hearTries is how often a host is asked for partitions that another one told of, hearPause the time in between.
	hearTries = 20
	hearPause = 100 * time.Millisecond
)

// placer gives the messages of one queue their partitions: by key, else by dedup id, else the whole publish to the partition
// whose turn it is. A message is placed once: whatever is retried, it stays in its partition with its seq.
//
// Until the queue's partitions are known publishes wait here, in order.
type placer struct {
	c     *Client
	queue string

	partitions atomic.Uint32 // 0: not known
	hearing    atomic.Bool   // what was heard in passing is being asked for

	knownMu sync.Mutex    // below mu
	queueID uint64        // that has them
	grown   chan struct{} // closed and replaced when it comes to have more

	mu   sync.Mutex
	turn uint32
	// refreshed is when the partitions were asked for again last, or first used.
	refreshed time.Time
	waiting   []placing
	asking    bool
}

type placing struct {
	p    *publish
	msgs []Message
}

func (c *Client) placerOf(queue string) *placer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return nil
	}
	l := c.placers[queue]
	if l == nil {
		l = &placer{c: c, queue: queue, grown: make(chan struct{}), turn: uint32(c.opts.Rand() * float64(1<<16))}
		c.placers[queue] = l
	}
	return l
}

// add takes over p, whose buffer room has been acquired.
func (l *placer) add(p *publish, msgs []Message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.partitions.Load(); n != 0 || p.opts.Partition != nil { // a stream may forget it at any time
		l.placeLocked(p, msgs, n)
		l.refreshLocked()
		return
	}
	l.waiting = append(l.waiting, placing{p, msgs})
	if !l.asking {
		l.asking = true
		l.c.wg.Add(1)
		go l.ask()
	}
}

// ask finds the partitions out for those who wait, each until its deadline.
func (l *placer) ask() {
	defer l.c.wg.Done()
	for {
		ctx, cancel := context.WithDeadline(l.c.base, l.lastDeadline())
		at, err := l.c.locate(ctx, l.queue)
		cancel()
		if l.asked(at, err) {
			return
		}
	}
}

// lastDeadline is the latest of those that wait; new ones may come with later ones.
func (l *placer) lastDeadline() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := time.Now()
	for _, w := range l.waiting {
		if w.p.deadline.After(last) {
			last = w.p.deadline
		}
	}
	return last
}

// asked places or fails those who wait; false when somebody still has time to ask again.
func (l *placer) asked(at located, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.waiting
	l.waiting = nil
	if err == nil {
		n := l.know(at)
		for _, w := range list {
			l.placeLocked(w.p, w.msgs, n)
		}
		l.asking = false
		return true
	}
	e := codeOf(err)
	again := worthWaiting(e) && !l.c.opts.FailFast && l.c.base.Err() == nil
	for _, w := range list {
		if again && time.Now().Before(w.p.deadline) {
			l.waiting = append(l.waiting, w)
			continue
		}
		w.p.failAll(e)
	}
	l.asking = len(l.waiting) > 0
	return !l.asking
}

// forgetPlaces makes the next publish ask again: the queue is another one than it was. May be called with a stream's lock.
func (c *Client) forgetPlaces(queue string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.placers[queue]; l != nil {
		l.partitions.Store(0)
	}
}

// abandon takes p out of those who wait; false when it is not among them.
func (l *placer) abandon(p *publish, e *code.Error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, w := range l.waiting {
		if w.p == p {
			l.waiting = append(l.waiting[:i], l.waiting[i+1:]...)
			if l.c.router.allFailed() {
				e = l.c.noHostAnswers(e.Cause)
			}
			p.failAll(e)
			return true
		}
	}
	return false
}

// placeLocked gives p's messages to the streams of their partitions, n in all, or fails p whole. n may be 0 if p names its own.
func (l *placer) placeLocked(p *publish, msgs []Message, n uint32) {
	defer clear(p.msg[:]) // whoever keeps the future does not keep the body
	if sole, ok := p.sole(n); ok {
		s := l.c.streamOf(streamKey{l.queue, sole})
		if s == nil {
			p.failAll(errClosed())
			return
		}
		p.into[0] = s
		p.streams = p.into[:]
		s.add(p, msgs, nil)
		return
	}
	to, e := l.chooseLocked(p, msgs, n)
	var streams []*stream
	if e == nil {
		streams, e = l.streamsOf(to)
	}
	if e != nil {
		p.failAll(e)
		return
	}
	p.streams = streams // before any of them can answer
	for i, s := range streams {
		s.add(p, msgs, to[i].places)
	}
}

// sole is the partition that all of a publish goes to whatever is in it.
func (p *publish) sole(n uint32) (uint32, bool) {
	if p.opts.Partition != nil {
		return *p.opts.Partition, true
	}
	return 0, n == 1
}

// share is what one partition gets of a publish: the places of its messages, in order; nil for all.
type share struct {
	partition uint32
	places    []int
}

func (l *placer) streamsOf(to []share) ([]*stream, *code.Error) {
	out := make([]*stream, len(to))
	for i, sh := range to {
		if out[i] = l.c.streamOf(streamKey{l.queue, sh.partition}); out[i] == nil {
			return nil, errClosed()
		}
	}
	return out, nil
}

// chooseLocked splits a publish that has no sole partition.
func (l *placer) chooseLocked(p *publish, msgs []Message, n uint32) ([]share, *code.Error) {
	if p.opts.ExpectedLastAddress != nil {
		return nil, code.New(code.InvalidArgument, "the expected last address is of one partition, queue %q has %d: name it in PublishOptions.Partition", l.queue, n)
	}
	var out []share
	index := map[uint32]int{}
	whole := -1
	for i := range msgs {
		in, ok := msgs[i].partition(n)
		if !ok {
			if whole < 0 {
				whole = int(l.nextTurnLocked(n))
			}
			in = uint32(whole)
		}
		at, known := index[in]
		if !known {
			at = len(out)
			index[in] = at
			out = append(out, share{partition: in})
		}
		out[at].places = append(out[at].places, i)
	}
	if p.opts.Atomic && len(out) > 1 {
		return nil, code.New(code.AtomicPartitions, "the keys of the messages belong to %d partitions: %s", len(out), code.AtomicPartitions.Info().Text)
	}
	if len(out) == 1 {
		out[0].places = nil
	}
	return out, nil
}

// nextTurnLocked is the partition of a publish without keys: the one whose next request is filling, so that messages share
// a request, else the next one.
func (l *placer) nextTurnLocked(n uint32) uint32 {
	if s := l.c.knownStream(streamKey{l.queue, l.turn % n}); s == nil || !s.filling() {
		l.turn++
	}
	return l.turn % n
}

// partition is where a message belongs by itself.
func (m *Message) partition(n uint32) (uint32, bool) {
	return (&tierqv1.OutMessage{Key: m.Key, DedupId: m.DedupID}).PartitionOf(n)
}
