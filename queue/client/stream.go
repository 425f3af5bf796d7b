package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

type streamKey struct {
	queue     string
	partition uint32
}

// stream is this client's producer in one partition: it numbers messages, packs them into batches, keeps several in
// flight, and answers the publishes. It has no goroutine of its own: a batch has one while it is in flight, and whoever
// changes what limits sending calls pumpLocked.
//
// A stream is in line, every seq following the last stored one, or with Options.Unordered loose. Either way several batches
// are in flight: in line they leave in order by one PublishStream, and the state machine stores none without the ones before it.
// By unary calls a stream in line has one at a time. The first SEQ_GAP gets a loose stream in line: the queue demands it (`ordering: key`).
//
// Until a message of a sequence is stored there is one batch in flight, and so there is when the partition may have forgotten the producer: of one
// that it does not know the state machine takes any seq for the first one, also that of a batch which overtakes the one before it while both are
// repeated.
//
// Invariants:
//  1. A seq names one message for ever (within the producer's epoch): a message that may have been stored keeps its seq.
//  2. Every seq in flight lies in [low, low+8191], low being the lowest unanswered one, so the state machine never
//     forgets an unanswered seq.
//  3. New messages wait while a batch is being retried, so what is stored later was published later where possible.
//  4. In line, what may have been stored and was given up on ends the epoch: the next one starts a new sequence. An epoch is
//     begun only for a random producer id: the caller's own may be the next process's too, which would then send the same seqs.
//  5. In line, when a message in flight is refused or comes back, nothing new is sent until all in flight are answered; then
//     what is left is numbered anew behind the last stored one.
type stream struct {
	c   *Client
	key streamKey

	mu       sync.Mutex
	pending  []*item // in publish order; in line also what goes back, with its seq
	batches  map[*batch]struct{}
	nextSeq  uint64
	epoch    uint64
	inLine   bool
	stored   uint64          // the greatest seq known to be stored
	storedAt time.Time       // when that was heard last; zero: the partition may not know the producer
	lostLine bool            // in line: a seq that may be stored was given up on
	broken   bool            // in line: what is in flight is not one sequence any more
	lastSent <-chan struct{} // in line: closed when the last batch has its place in the order
	holding  int             // batches that are being retried
	// registered counts the new sequences begun since a message was last stored.
	registered int
	// pendingBytes is the size of pending, or more while some of that was given up on.
	pendingBytes int
	fill         fill
	impatient    *time.Timer // ends the wait for a request that hangs
	waiting      bool        // impatient runs
	expiry       *time.Timer // answers pending messages whose time ran out
	expiresAt    time.Time
	closed       bool

	pipeMu     sync.Mutex // below mu
	pipe       *pipe
	silent     int // pipes in a row that ended without an answer
	unaryUntil time.Time
}

// batch is one request's worth of messages in seq order, in flight until all are answered.
type batch struct {
	items  []*item
	began  time.Time
	ctx    context.Context
	cancel context.CancelCauseFunc
	inLine bool // sent while the stream was in line
	held   bool
	// next: when its request was made, everything before it was stored, so that a gap is not one of ours.
	next   bool
	turn   <-chan struct{} // in line: closed when the batch before has its place in the order
	placed func()          // says that this one has
	// chunk bounds how many messages go into a request after one was refused for a message in it; 0: all.
	chunk      int
	refused    int         // rounds in which a message was refused for now
	lastRefuse *code.Error // of those
}

func (c *Client) streamOf(k streamKey) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return nil
	}
	s := c.streams[k]
	if s == nil {
		s = &stream{
			c: c, key: k, nextSeq: 1, epoch: c.opts.ProducerEpoch, inLine: !c.opts.Unordered,
			batches: map[*batch]struct{}{},
		}
		c.streams[k] = s
	}
	return s
}

// knownStream is streamOf without making one.
func (c *Client) knownStream(k streamKey) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[k]
}

func (c *Client) failStreams() {
	c.mu.Lock()
	c.ended = true
	streams := make([]*stream, 0, len(c.streams))
	for _, s := range c.streams {
		streams = append(streams, s)
	}
	c.mu.Unlock()
	for _, s := range streams {
		s.close()
	}
}

func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.failLocked(s.pending, errClosed())
	s.pending = nil
	for _, t := range []*time.Timer{s.expiry, s.impatient} {
		if t != nil {
			t.Stop()
		}
	}
}

// turnMessages is how many messages without a key go to one partition in turn while its requests are in flight: enough to share a request, and
// so few that all partitions fill side by side.
const turnMessages = 64

// filling says that messages wait for a request that has room for more.
func (s *stream) filling() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending) > 0 && len(s.pending) < min(turnMessages, s.c.opts.MaxBatchMessages)
}

// add takes over the messages of p at places, nil for all.
func (s *stream) add(p *publish, msgs []Message, places []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(places)
	if places == nil {
		n = len(msgs)
	}
	items := make([]item, n)
	for j := range items {
		i := j
		if places != nil {
			i = places[j]
		}
		it := &items[j]
		it.p, it.i, it.size = p, i, msgs[i].size()
		msgs[i].wire(&it.msg)
		s.pending = append(s.pending, it)
		s.pendingBytes += it.size
	}
	if s.closed {
		s.failLocked(s.pending, errClosed())
		s.pending = nil
		return
	}
	s.pumpLocked()
	if len(s.pending) > 0 {
		s.expireByLocked(p.deadline)
	}
}

// pumpLocked sends what may be sent.
func (s *stream) pumpLocked() {
	for s.maySendLocked() {
		b := s.takeLocked()
		if b == nil {
			return
		}
		s.batches[b] = struct{}{}
		sent := make(chan struct{})
		b.turn, b.placed = s.lastSent, sync.OnceFunc(func() { close(sent) })
		if s.inLine {
			s.lastSent = sent
		}
		s.c.wg.Add(1)
		s.c.hands.Do(func() { s.run(b) })
	}
}

func (s *stream) maySendLocked() bool {
	if s.closed || s.holding > 0 || len(s.pending) == 0 {
		return false
	}
	limit, pipes := s.c.opts.MaxBatchesInFlight, s.pipes()
	switch {
	case s.unknownLocked(), s.inLine && (!pipes || s.broken):
		limit = 1
	case pipes && s.growsLocked():
		if small := s.fill.small(); len(s.batches) >= small && !s.hangsLocked() {
			return false
		}
	}
	return len(s.batches) < limit
}

// knownFor is how long a partition is taken to know a producer that it has stored a message of: it forgets one after a day, or when many others have
// come.
const knownFor = time.Hour

// unknownLocked says whether the partition may not know this producer, or not this sequence of it.
func (s *stream) unknownLocked() bool {
	return time.Since(s.storedAt) > knownFor
}

// hangsLocked says whether even the last request takes much longer than they did lately: its host may have lost its quorum, and then refuses
// the next one at once; by a stream the answer comes behind those before it. While it does not, that is looked at again in time. Of
// requests that hang there is one more each time, no flood.
func (s *stream) hangsLocked() bool {
	var last time.Time
	for b := range s.batches {
		if b.began.After(last) {
			last = b.began
		}
	}
	wait := s.fill.patience() - time.Since(last)
	switch {
	case wait <= 0:
		return true
	case s.waiting:
	case s.impatient == nil:
		s.waiting, s.impatient = true, time.AfterFunc(wait, s.lookAgain)
	default:
		s.waiting = true
		s.impatient.Reset(wait)
	}
	return false
}

func (s *stream) lookAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = false
	s.pumpLocked()
}

// growsLocked says whether the next request is small, and would be greater if it waited.
func (s *stream) growsLocked() bool {
	o := &s.c.opts
	return len(s.pending) < min(fillMessages, o.MaxBatchMessages) && s.pendingBytes < min(fillBytes, o.MaxBatchBytes) &&
		!s.pending[0].p.exclusive() && !s.pending[len(s.pending)-1].p.exclusive()
}

// lowLocked is the lowest unanswered seq, in flight or gone back to pending, or the next one.
func (s *stream) lowLocked() uint64 {
	low := s.nextSeq
	if len(s.pending) > 0 && s.pending[0].seq != 0 {
		low = min(low, s.pending[0].seq)
	}
	for b := range s.batches {
		for _, it := range b.items {
			if !it.done {
				low = min(low, it.seq)
				break
			}
		}
	}
	return low
}

// takeLocked makes a batch of the head of pending and numbers it, or returns nil if the window is full.
func (s *stream) takeLocked() *batch {
	if s.inLine && len(s.batches) == 0 {
		s.realignLocked()
		s.broken = false
	}
	n := s.headLocked(s.lowLocked() + producerWindow - s.nextSeq)
	if n == 0 {
		return nil
	}
	b := &batch{items: slices.Clone(s.pending[:n]), began: time.Now(), inLine: s.inLine}
	s.pending = s.pending[n:]
	for _, it := range b.items {
		s.pendingBytes -= it.size
	}
	if len(s.pending) == 0 {
		s.pending, s.pendingBytes = nil, 0 // let the array go
	}
	deadline := time.Time{}
	for _, it := range b.items {
		it.seq = s.nextSeq
		s.nextSeq++
		if it.p.deadline.After(deadline) {
			deadline = it.p.deadline
		}
	}
	timed, stop := context.WithDeadline(s.c.base, deadline)
	ctx, cancel := context.WithCancelCause(timed)
	b.ctx, b.cancel = ctx, func(cause error) { cancel(cause); stop() }
	return b
}

// headLocked counts the messages that go into the next batch: at most window, within the batch limits, an exclusive
// publish alone and whole.
func (s *stream) headLocked(window uint64) int {
	if len(s.pending) == 0 {
		return 0
	}
	if p := s.pending[0].p; p.exclusive() {
		n := 0
		for n < len(s.pending) && s.pending[n].p == p {
			n++
		}
		if uint64(n) > window {
			return 0
		}
		return n
	}
	n, bytes := 0, 0
	for _, it := range s.pending {
		if n == s.c.opts.MaxBatchMessages || uint64(n) == window || it.p.exclusive() {
			break
		}
		if n > 0 && bytes+it.size > s.c.opts.MaxBatchBytes {
			break
		}
		n, bytes = n+1, bytes+it.size
	}
	return n
}

// expireByLocked makes pending messages be looked at when t comes.
func (s *stream) expireByLocked(t time.Time) {
	if s.closed || (!s.expiresAt.IsZero() && !t.Before(s.expiresAt)) {
		return
	}
	s.expiresAt = t
	if s.expiry == nil {
		s.expiry = time.AfterFunc(time.Until(t), s.expire)
		return
	}
	s.expiry.Reset(time.Until(t))
}

// expire answers what ran out of time before it was sent.
func (s *stream) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.expiresAt = time.Time{}
	next := time.Time{}
	s.pending = slices.DeleteFunc(s.pending, func(it *item) bool {
		if now.Before(it.p.deadline) {
			if next.IsZero() || it.p.deadline.Before(next) {
				next = it.p.deadline
			}
			return false
		}
		s.failOneLocked(it, code.New(code.DeadlineExceeded, "the time ran out while earlier messages of this producer were being tried"))
		return true
	})
	if !next.IsZero() {
		s.expireByLocked(next)
	}
	s.pumpLocked()
}

// realignLocked makes the next seq follow the last stored one. Only called with nothing in flight. A message that may
// have been stored under another seq than it would get now, or one that was given up on, ends the epoch: of a random producer
// the next one begins; with a ProducerID of the caller's the epochs are the caller's too, and everything fails from here on.
func (s *stream) realignLocked() {
	next := s.stored + 1
	broken := s.lostLine
	for i, it := range s.pending {
		if it.seq == 0 {
			break
		}
		broken = broken || (it.maybe && it.seq != next+uint64(i))
	}
	switch {
	case broken && !s.c.randomProducer:
		s.lostLine = true
		s.failLocked(s.pending, code.New(code.ProducerEpochStale, "the sequence of producer %d in epoch %d cannot go on, as a message's outcome is unknown or the fleet remembers other ones: go on with a client of a greater ProducerEpoch", s.c.opts.ProducerID, s.epoch))
		s.pending = nil
		return
	case broken:
		s.registerLocked()
	}
	s.nextSeq = s.stored + 1
	for i, it := range s.pending {
		if it.seq == 0 {
			break
		}
		it.seq = s.nextSeq + uint64(i)
	}
}

// registerLocked starts a new sequence of this producer: the state machine refuses what is left of the old one. Messages
// of the old one that may have been stored are answered so.
func (s *stream) registerLocked() {
	s.epoch++
	s.registered++
	s.stored, s.storedAt, s.nextSeq, s.lostLine = 0, time.Time{}, 1, false
	s.c.log.Info("producer begins a new sequence", zap.String("queue", s.key.queue), zap.Uint64("epoch", s.epoch))
	s.pending = slices.DeleteFunc(s.pending, func(it *item) bool {
		if it.maybe {
			s.failOneLocked(it, code.New(code.SeqExpired, "its producer had to begin a new sequence"))
		}
		return it.done
	})
}

// run drives one batch until all its messages are answered or, in line, go back to pending.
func (s *stream) run(b *batch) {
	defer s.c.wg.Done()
	defer b.cancel(nil)
	defer b.placed()
	if b.inLine && b.turn != nil {
		select {
		case <-b.turn:
		case <-b.ctx.Done():
		}
	}
	for {
		req, sent := s.request(b)
		var from string
		res, err := call(b.ctx, s.c, how{
			to: s.route(), mutates: true, idempotent: true, brisk: true, timeout: s.c.opts.PublishTimeout, from: &from,
			failed: func(e *code.Error) { s.tryFailed(b, sent, e) },
		}, s.publishStub(b.placed), req)
		if err == nil && res.LeaderApi != "" {
			s.c.router.hint(s.route(), res.LeaderApi, from)
		}
		b.items[0].p.placer.hear(res.GetPartitions())
		pause, more := s.settle(b, sent, res, err)
		if !more {
			return
		}
		if s.c.sleep(b.ctx, pause) != nil || !s.again(b) {
			s.finish(b)
			return
		}
	}
}

func (s *stream) route() route {
	return route{kind: toLeader, queue: s.key.queue, partition: s.key.partition}
}

// request builds the next request of b and returns the items that it carries.
func (s *stream) request(b *batch) (*tierqv1.PublishRequest, []*item) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := b.items[0].p
	req := &tierqv1.PublishRequest{
		Queue: s.key.queue, Partition: proto.Uint32(s.key.partition), ProducerId: s.c.opts.ProducerID, ProducerEpoch: s.epoch,
		Low: s.lowLocked(), Contiguous: s.inLine, Atomic: first.opts.Atomic, ExpectedLastAddress: first.opts.ExpectedLastAddress,
	}
	req.Messages = make([]*tierqv1.OutMessage, 0, len(b.items))
	sent := make([]*item, 0, len(b.items))
	for _, it := range b.items {
		if it.done {
			continue
		}
		if b.chunk > 0 && len(sent) == b.chunk {
			break
		}
		if len(sent) == 0 {
			b.next = it.seq == s.stored+1
		}
		it.msg.Seq = it.seq
		req.Messages = append(req.Messages, &it.msg)
		sent = append(sent, it)
	}
	return req, sent
}

// tryFailed notes a failed try while the call goes on.
func (s *stream) tryFailed(b *batch, sent []*item, e *code.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holdLocked(b)
	if e.Effect == code.EffectMaybe {
		for _, it := range sent {
			it.maybe = true
		}
	}
}

// holdLocked keeps new messages back until b is through.
func (s *stream) holdLocked(b *batch) {
	if !b.held {
		b.held = true
		s.holding++
	}
}

// settle takes the answer to one request. more says that messages of b are left to send, after pause.
func (s *stream) settle(b *batch, sent []*item, res *tierqv1.PublishResponse, err error) (pause time.Duration, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		pause = s.refusedLocked(b, sent, codeOf(err))
	} else {
		pause = s.answeredLocked(b, sent, res)
	}
	if b.leftLocked() == 0 {
		s.finishLocked(b)
		return 0, false
	}
	if s.inLine && pause == 0 {
		s.finishLocked(b)
		return 0, false
	}
	return pause, true
}

func (b *batch) leftLocked() int {
	n := 0
	for _, it := range b.items {
		if !it.done {
			n++
		}
	}
	return n
}

// refusedLocked deals with a request that was refused or failed as a whole.
func (s *stream) refusedLocked(b *batch, sent []*item, e *code.Error) time.Duration {
	switch {
	case isGap(e):
		return s.gapLocked(b, sent, e)
	case e.Code == code.ProducerEpochStale && s.mayRegisterLocked():
		s.reenterLocked()
		return 0
	case blamesOne(e) && len(sent) > 1 && !sent[0].p.exclusive():
		b.chunk = len(sent) / 2
		if s.inLine {
			return time.Millisecond // stay a batch, with smaller requests
		}
		return 0
	}
	if e.Code == code.DeadlineExceeded && b.lastRefuse != nil {
		e = b.lastRefuse
	}
	if blamesOne(e) {
		s.failLocked(sent, e) // the only one in its request
	} else {
		s.failLocked(b.items, e)
	}
	return 0
}

// isGap reports whether the last try was refused for a gap. An earlier one that may have been applied, which tryFailed has
// noted, does not make the gap go away: had it been, its repeat would have been answered as one.
func isGap(e *code.Error) bool {
	var last *code.Error
	return e.Code == code.SeqGap || (errors.As(e.Cause, &last) && last.Code == code.SeqGap)
}

// blamesOne reports whether one message of a request can be what the whole was refused for.
func blamesOne(e *code.Error) bool {
	if e.Effect != code.EffectNone {
		return false
	}
	switch e.Code {
	case code.TooLarge, code.InvalidArgument, code.DelayTooLong, code.BatchTooLarge:
		return true
	}
	return false
}

// answeredLocked deals with the results of one request, one a message.
func (s *stream) answeredLocked(b *batch, sent []*item, res *tierqv1.PublishResponse) time.Duration {
	if len(res.Results) != len(sent) {
		s.failLocked(b.items, code.Maybe(code.Internal, nil, "the host answered %d results to %d messages", len(res.Results), len(sent)))
		return 0
	}
	var pause time.Duration
	known := false
	b.chunk *= 2
	for i, r := range res.Results {
		it := sent[i]
		c := code.Code(r.Code)
		if c == 0 || c == code.OK {
			known = true
			s.storedLocked(it, r, res)
			continue
		}
		e := &code.Error{Code: c, Effect: code.EffectNone, Text: r.Text}
		switch {
		case c == code.SeqGap:
			pause = max(pause, s.gapLocked(b, sent[i:], e))
		case c == code.ProducerEpochStale && s.mayRegisterLocked():
			s.reenterLocked()
			return 0
		case c == code.QuorumLost:
			it.maybe = true
			fallthrough
		case c.Info().Class == code.ClassTransient || c == code.StaleLeader:
			s.holdLocked(b)
			b.lastRefuse = e
			pause = max(pause, s.c.retryPause(b.refused, e))
		default:
			s.failOneLocked(it, e)
		}
	}
	if known {
		s.storedAt = time.Now()
	}
	if pause > 0 {
		b.refused++
	}
	return pause
}

func (s *stream) storedLocked(it *item, r *tierqv1.PublishResult, res *tierqv1.PublishResponse) {
	s.stored, s.registered = max(s.stored, it.seq), 0
	s.resolveLocked(it, Published{
		Address: r.Address, Seq: it.seq, Duplicate: r.Duplicate, Shard: res.Shard, Index: res.Index,
		DataCopies: res.DataCopies, Warning: code.Code(res.Warning),
	})
}

// maxRegistrations bounds the new sequences that are begun in a row with nothing stored.
const maxRegistrations = 3

// mayRegisterLocked: a random producer id is nobody else's, so a stale epoch is the fleet's doing (a forced recovery).
func (s *stream) mayRegisterLocked() bool {
	return s.c.randomProducer && s.registered < maxRegistrations
}

// gapLocked: the queue wants every seq to follow the last one, and a predecessor of these is missing: in flight, refused,
// or given up on. Get in line.
func (s *stream) gapLocked(b *batch, items []*item, e *code.Error) time.Duration {
	if b.inLine && b.next && items[0].seq == s.stored+1 {
		// Nothing of ours is missing, so what the fleet remembers of this producer is not what we know.
		if s.registered >= maxRegistrations {
			s.failLocked(b.items, e)
			return 0
		}
		s.reenterLocked()
		return 0
	}
	s.inLine = true
	return 0
}

// reenterLocked lets what is left go under a new epoch, in line from then on.
func (s *stream) reenterLocked() {
	s.inLine, s.lostLine, s.broken = true, true, true
}

// again reports whether b may send its next request with the seqs that it has. In line, a refused message leaves its seq
// to the next one, so only a batch without holes goes on.
func (s *stream) again(b *batch) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.inLine {
		return true
	}
	next := s.stored + 1
	for _, it := range b.items {
		if it.done {
			continue
		}
		if it.seq != next {
			return false
		}
		next++
	}
	return b.inLine
}

// finish ends b; what is left of it fails if its time ran out, and is numbered anew if not.
func (s *stream) finish(b *batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.c.base.Err() != nil:
		s.failLocked(b.items, errClosed())
	case b.ctx.Err() != nil && b.lastRefuse != nil:
		s.failLocked(b.items, b.lastRefuse)
	case b.ctx.Err() != nil:
		s.failLocked(b.items, &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: context.Cause(b.ctx)})
	}
	s.finishLocked(b)
}

// finishLocked takes b out of flight. What is not answered goes back to the head of pending, in seq order.
func (s *stream) finishLocked(b *batch) {
	delete(s.batches, b)
	if b.held {
		s.holding--
	}
	var back []*item
	for _, it := range b.items {
		if !it.done {
			back = append(back, it)
			s.pendingBytes += it.size
		}
	}
	if len(back) > 0 {
		s.broken = true
		s.pending = append(back, s.pending...)
		slices.SortStableFunc(s.pending, bySeq)
	}
	if s.closed {
		s.failLocked(s.pending, errClosed())
		s.pending = nil
	}
	s.pumpLocked()
}

// bySeq orders numbered messages before new ones.
func bySeq(a, b *item) int {
	switch {
	case a.seq == b.seq:
		return 0
	case b.seq == 0 || (a.seq != 0 && a.seq < b.seq):
		return -1
	}
	return 1
}

func (s *stream) failLocked(items []*item, e *code.Error) {
	for _, it := range items {
		s.failOneLocked(it, e)
	}
}

func (s *stream) failOneLocked(it *item, e *code.Error) {
	if it.done {
		return
	}
	e = sticky(e, it.maybe)
	if it.seq != 0 {
		s.broken = true
	}
	if e.Effect == code.EffectMaybe {
		s.lostLine = true
	}
	if e.Code == code.UnknownPartition || e.Code == code.WrongPartition || e.Code == code.UnknownQueue {
		s.storedAt = time.Time{} // another queue of the name does not know the producer
		s.c.forgetPlaces(s.key.queue)
	}
	s.resolveLocked(it, Published{Seq: it.seq, Err: e})
}

func (s *stream) resolveLocked(it *item, r Published) {
	if it.done {
		return
	}
	it.done = true
	r.Partition = s.key.partition
	it.p.resolve(it.i, r)
}

// abandon gives p's messages up and reports whether every one that is left here will be answered at once.
func (s *stream) abandon(p *publish, cause error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = slices.DeleteFunc(s.pending, func(it *item) bool {
		if it.p != p {
			return false
		}
		s.failOneLocked(it, unsent(cause))
		return true
	})
	all := true
	for b := range s.batches {
		mine, others := b.waitingFor(p)
		switch {
		case mine && others:
			all = false
		case mine:
			b.cancel(cause)
		}
	}
	return all
}

// waitingFor reports whether messages of p are left in b, and whether others are that somebody waits for.
func (b *batch) waitingFor(p *publish) (mine, others bool) {
	for _, it := range b.items {
		if !it.done {
			mine = mine || it.p == p
			others = others || !it.p.abandoned.Load()
		}
	}
	return mine, others
}
