package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

const (
	// stepTimeout bounds one proposal, one publish, or one question to the fleet.
	stepTimeout = 10 * time.Second
	// firstPause and longestPause bound the pauses between attempts of what is parked; they double.
	firstPause   = 100 * time.Millisecond
	longestPause = 5 * time.Second
	// pageBytes bounds the messages that a step holds in memory, but for the last one, and the bytes of one publish.
	pageBytes = queue.MaxCommandMessageBytes / 2
	// seqReach bounds how far above the least unresolved number the next ones may lie: the target's window is wider.
	seqReach = queue.ProducerWindow / 2
	// firstWindow is how many letters may be unresolved at first: those that are cannot be redriven or purged, and whether the
	// target takes them is not known yet. It doubles with every success up to MaxUnresolved.
	firstWindow = 16
)

// worker carries the dead letters of one group. Its own goroutine alone uses it, but for again and parked.
type worker struct {
	b   *Outbox
	id  queue.GroupID
	log *zap.Logger

	again  bool    // guarded by b.mu: something has changed since the state was read
	parked *Parked // guarded by b.mu

	pause  time.Duration
	window int
	// fits is, by target, how many letters are published at once: 0 is MaxUnresolved. It shrinks when a publish is refused, so
	// that what fits goes, and the one that does not is found.
	fits map[uint64]int
}

func newWorker(b *Outbox, id queue.GroupID) *worker {
	return &worker{b: b, id: id, log: b.o.Logger.With(zap.Uint64("group", uint64(id))), window: firstWindow, fits: map[uint64]int{}}
}

func (w *worker) run() {
	defer w.b.tasks.Done()
	for w.b.ctx.Err() == nil {
		w.fresh()
		s := &step{w: w}
		err := s.run()
		w.learn(s)
		switch {
		case err == nil && !s.more && s.stuck == nil:
			w.park(nil)
			if w.b.ends(w) {
				return
			}
		case err == nil && s.stuck == nil:
			w.park(nil)
		default:
			if err != nil {
				s.stuck = &Parked{Err: err, Queue: s.group.Config.DeadLetterQueue}
			}
			w.park(s.stuck)
			if !s.progress {
				w.rest()
			}
		}
	}
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	delete(w.b.workers, w.id)
}

// learn adapts to how a step went.
func (w *worker) learn(s *step) {
	if s.progress {
		w.pause = 0
	}
	switch {
	case s.stuck != nil:
		w.window = firstWindow
	case s.exported > 0:
		w.window = min(2*w.window, MaxUnresolved)
	}
}

// fresh notes that the state is about to be read.
func (w *worker) fresh() {
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	w.again = false
}

// rest pauses before what is parked is tried again, or until a nudge.
func (w *worker) rest() {
	w.b.mu.Lock()
	nudged := w.b.nudged
	w.b.mu.Unlock()
	w.pause = min(max(2*w.pause, firstPause), longestPause)
	select {
	case <-w.b.o.After(w.pause):
	case <-nudged:
		w.pause = 0
	case <-w.b.ctx.Done():
	}
}

// park notes why the letters do not go on; nil: they do.
func (w *worker) park(p *Parked) {
	w.b.mu.Lock()
	defer w.b.mu.Unlock()
	switch {
	case p == nil && w.parked != nil:
		w.log.Info("dead letters go on", event.Is("dead-letters-go-on"))
	case p != nil && w.parked == nil:
		p.Since = w.b.o.Now()
		w.log.Warn("dead letters are parked", event.Is("dead-letters-parked"), zap.String("dead-letter queue", p.Queue), zap.Uint64("target shard", p.Target),
			zap.Uint64("export number", p.Number), zap.Error(p.Err))
	case p != nil:
		p.Since = w.parked.Since
	}
	w.parked = p
}

// step is one look at the state, and what follows from it: the exporting letters are published, those that the targets
// have are marked, and the next ones get their target.
type step struct {
	w     *worker
	group queue.GroupInfo
	low   queue.Seq

	entries  []queue.ExpireEntry
	exported int
	givenUp  int

	progress bool    // something moved
	more     bool    // there may be more to do at once
	stuck    *Parked // the first letter that does not go on, and why
}

func (s *step) run() error {
	var ok bool
	o := &s.w.b.o
	s.group, ok = o.State.Group(s.w.id)
	if !ok || s.group.Home != o.Self || s.group.Exports == 0 {
		return nil
	}
	list, err := o.State.Exports(s.w.id, 0, MaxUnresolved, pageBytes, true)
	if err != nil || len(list) == 0 {
		return err
	}
	name, partition, ok := o.Targets.Source()
	if !ok {
		return code.New(code.UnknownQueue, "the queue of shard %d is not known here now", o.Shard)
	}
	s.low = queue.Seq(list[0].ExportNumber)
	from := Origin{Queue: name, Partition: partition, Group: s.group.Name}
	s.publish(list, from)
	s.choose(list, from)
	return s.propose()
}

// publish publishes the exporting letters, target by target, in the order of their numbers, and notes those that are there.
func (s *step) publish(list []queue.DeadLetter, from Origin) {
	var targets []uint64
	byTarget := map[uint64][]*queue.DeadLetter{}
	for i := range list {
		if d := &list[i]; d.ExportState == queue.ExportExporting {
			if byTarget[d.Target] == nil {
				targets = append(targets, d.Target)
			}
			byTarget[d.Target] = append(byTarget[d.Target], d)
		}
	}
	for _, t := range targets {
		s.publishTo(t, byTarget[t], from)
	}
}

// publishTo publishes letters to one target, as many at once as fit, until one does not.
func (s *step) publishTo(target uint64, letters []*queue.DeadLetter, from Origin) {
	for len(letters) > 0 && s.w.b.ctx.Err() == nil {
		n := min(len(letters), s.w.fit(target))
		err := s.attempt(target, letters[:n], from)
		if err == nil {
			for _, d := range letters[:n] {
				s.entry(d, queue.ExportDone, target)
			}
			s.exported += n
			letters = letters[n:]
			s.w.fits[target] = min(2*n, MaxUnresolved)
			continue
		}
		if n > 1 && aboutMessages(err) {
			s.w.fits[target] = n / 2
			continue
		}
		if s.gone(target, err) {
			for _, d := range letters {
				s.entry(d, queue.ExportPending, target)
			}
			return
		}
		s.waits(letters[0], target, err)
		return
	}
}

func (w *worker) fit(target uint64) int {
	if n := w.fits[target]; n > 0 {
		return n
	}
	return MaxUnresolved
}

// aboutMessages says whether fewer messages might be taken where many were refused.
func aboutMessages(err error) bool {
	switch codeOf(err) {
	case code.QueueFull, code.TooLarge, code.BatchTooLarge, code.InvalidArgument, code.SeqExpired, code.Backpressure:
		return true
	}
	return false
}

func codeOf(err error) code.Code {
	var e *code.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return code.Internal
}

// attempt publishes letters, all or none. Each has been stored as exporting to this target.
func (s *step) attempt(target uint64, letters []*queue.DeadLetter, from Origin) error {
	o := &s.w.b.o
	p := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerOutbox, ID: o.Shard, Sub: uint64(s.w.id)}, Low: s.low, Atomic: true,
		Messages: make([]queue.Message, 0, len(letters))}
	for _, d := range letters {
		m, why := Copy(d, from)
		if why != "" {
			return code.New(code.InvalidArgument, "dead letter %d: %s", uint64(d.Address), why)
		}
		p.Messages = append(p.Messages, m)
	}
	ctx, cancel := context.WithTimeout(s.w.b.ctx, stepTimeout)
	defer cancel()
	res, err := o.Targets.Publish(ctx, target, p)
	if err != nil {
		return err
	}
	if res.Code != code.OK {
		return &code.Error{Code: res.Code, Effect: code.EffectNone}
	}
	for i := range res.Messages {
		if c := res.Messages[i].Code; c != code.OK {
			return &code.Error{Code: c, Effect: code.EffectNone}
		}
	}
	if len(res.Messages) != len(letters) {
		return code.Maybe(code.Internal, nil, "%d of %d dead letters were answered", len(res.Messages), len(letters))
	}
	return nil
}

// gone asks whether a target that failed exists no more.
func (s *step) gone(target uint64, err error) bool {
	if aboutMessages(err) {
		return false
	}
	ctx, cancel := context.WithTimeout(s.w.b.ctx, stepTimeout)
	defer cancel()
	gone, err := s.w.b.o.Targets.Gone(ctx, target)
	return gone && err == nil
}

// choose gives the next letters their targets, in the order of their numbers, as many as may be unresolved. It ends at the
// first one that cannot go now.
func (s *step) choose(list []queue.DeadLetter, from Origin) {
	if s.group.Config.DeadLetterQueue == "" || s.stuck != nil {
		return // they stay here until the group names one again, or those before them go on
	}
	unresolved := s.unresolved(list)
	for i := range list {
		d := &list[i]
		if d.ExportState != queue.ExportPending {
			continue
		}
		if queue.Seq(d.ExportNumber) >= s.low+seqReach || unresolved >= s.w.window {
			return
		}
		m, why := Copy(d, from)
		if why != "" {
			s.w.log.Warn("a dead letter stays where it is", zap.Uint64("address", uint64(d.Address)), zap.String("why", why))
			s.entry(d, queue.ExportNone, 0)
			s.givenUp++
			continue
		}
		target, err := s.route(d)
		if err == nil && len(m.Body) > target.MaxBodyBytes {
			err = code.New(code.TooLarge, "dead letter %d has %d bytes, dead-letter queue %s takes %d: raise its max body bytes, or redrive or purge the letter",
				uint64(d.Address), len(m.Body), s.group.Config.DeadLetterQueue, target.MaxBodyBytes)
		}
		if err != nil {
			s.waits(d, 0, err)
			return
		}
		s.entry(d, queue.ExportExporting, target.Shard)
		unresolved++
		s.more = true
	}
}

// unresolved counts the letters that are exporting and stay so in this step.
func (s *step) unresolved(list []queue.DeadLetter) int {
	n := -len(s.entries)
	for i := range list {
		if list[i].ExportState == queue.ExportExporting {
			n++
		}
	}
	return n
}

func (s *step) route(d *queue.DeadLetter) (Target, error) {
	ctx, cancel := context.WithTimeout(s.w.b.ctx, stepTimeout)
	defer cancel()
	return s.w.b.o.Targets.Route(ctx, s.group.Config.DeadLetterQueue, d)
}

func (s *step) entry(d *queue.DeadLetter, to queue.ExportState, target uint64) {
	s.entries = append(s.entries, queue.ExpireEntry{Kind: queue.ExpireExport, Address: d.Address, Change: d.Change, ExportState: to, Target: target})
}

// waits notes the first letter that does not go on.
func (s *step) waits(d *queue.DeadLetter, target uint64, err error) {
	if s.stuck == nil {
		s.stuck = &Parked{Err: err, Number: d.ExportNumber, At: d.Address, Target: target, Queue: s.group.Config.DeadLetterQueue}
	}
}

// propose commits what was decided. What is refused or skipped was decided on an older state, and what is unknown may have
// been applied: either way a barrier comes before the next look.
func (s *step) propose() error {
	if len(s.entries) == 0 {
		return nil
	}
	o := &s.w.b.o
	ctx, cancel := context.WithTimeout(s.w.b.ctx, stepTimeout)
	defer cancel()
	res, err := o.Propose(ctx, &queue.Expire{Stamp: o.Stamp(), Group: s.w.id, Epoch: s.group.Epoch, Entries: s.entries})
	if err == nil && res.Code == code.OK && len(res.Expires) == len(s.entries) {
		for i := range res.Expires {
			s.progress = s.progress || res.Expires[i].Applied
		}
		s.more = true // whatever was applied or not, the state has changed
		o.Exported(s.exported, s.givenUp)
		if s.progress {
			return nil
		}
		return s.barrier(ctx)
	}
	if err == nil && res.Code == code.StaleOwner {
		s.more = true
		return s.barrier(ctx) // this host is home no more, or under another epoch
	}
	if err == nil {
		err = fmt.Errorf("dead letters cannot be marked: %w", &code.Error{Code: res.Code, Effect: code.EffectMaybe})
	}
	_ = s.barrier(ctx)
	return err
}

// barrier brings the state here to what is committed.
func (s *step) barrier(ctx context.Context) error { return s.w.b.o.ReadIndex(ctx) }
