package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/statemachine"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// errHandedOver: this host leads the shard and is about to lead it no more.
var errHandedOver = errors.New("the shard is handed over to another leader")

// Pending is a proposal on its way. Wait must be called once, by one goroutine.
type Pending struct {
	shard    uint64
	request  *dragonboat.RequestState
	deadline time.Time
}

// deadlineGrace is how long after its deadline a proposal may still be answered: the engine looks at deadlines every few ticks,
// and not while it waits for a disk.
const deadlineGrace = time.Second

// ProposeAsync queues a command at this host's replica of a shard and returns without waiting; the engine forwards it to the leader. cmd
// may be reused when it returns. Proposals of one host to one leader keep their order. An error means that the command
// was not queued and never takes effect: a *code.Error with EffectNone.
//
// It takes no goroutine: a pipeline waits for its oldest proposal.
func (h *RaftHost) ProposeAsync(shard uint64, cmd []byte, timeout time.Duration) (*Pending, error) {
	r, err := h.running(shard)
	if err != nil {
		return nil, err
	}
	if timeout < h.shortest() {
		return nil, code.New(code.DeadlineExceeded, "%v is too short for a proposal", timeout)
	}
	if !h.gate.enter() {
		return nil, shuttingDown()
	}
	defer h.gate.leave()
	var request *dragonboat.RequestState
	if !h.holds.propose(shard, func() { request, err = h.nodeHost.Propose(r.session, cmd, h.engineTime(timeout)) }) {
		return nil, noLeader(shard, errHandedOver)
	}
	if err != nil {
		return nil, notProposed(shard, err)
	}
	return &Pending{shard: shard, request: request, deadline: time.Now().Add(timeout + deadlineGrace)}, nil
}

// Wait returns the command's outcome:
//
//   - a result, which may be a refusal, if it was applied on this host;
//   - a *code.Error with EffectNone if it will never take effect;
//   - a *code.Error with EffectMaybe if that cannot be told: the time ran out, ctx ended, the replica stopped, or
//     the entry was skipped because an install had covered it.
//
// It returns within a second of the proposal's deadline, and at once when ctx ends.
func (p *Pending) Wait(ctx context.Context) (queue.Result, error) {
	raw, err := p.wait(ctx)
	if err != nil {
		return queue.Result{}, err
	}
	if raw.Value == 0 {
		return queue.Result{}, maybe(p.shard, errors.New("the entry was covered by an install"))
	}
	result, err := queue.DecodeResult(raw.Data)
	if err != nil {
		return queue.Result{}, &code.Error{Code: code.Internal, Effect: code.EffectMaybe, Text: "the result cannot be decoded", Cause: err}
	}
	if result.Code == 0 {
		return queue.Result{}, maybe(p.shard, errors.New("the entry was covered by an install"))
	}
	return result, nil
}

func (p *Pending) wait(ctx context.Context) (statemachine.Result, error) {
	select {
	case r := <-p.request.AppliedC():
		return p.done(r)
	default:
	}
	timer := time.NewTimer(time.Until(p.deadline))
	defer timer.Stop()
	select {
	case r := <-p.request.AppliedC():
		return p.done(r)
	case <-ctx.Done():
		return statemachine.Result{}, maybe(p.shard, ctx.Err())
	case <-timer.C:
		return statemachine.Result{}, maybe(p.shard, dragonboat.ErrTimeout)
	}
}

// done sorts the engine's answer. The request may be reused afterwards; an unanswered one is left to the collector.
func (p *Pending) done(r dragonboat.RequestResult) (statemachine.Result, error) {
	defer p.request.Release()
	switch {
	case r.Completed():
		return r.GetResult(), nil
	case r.Dropped():
		return statemachine.Result{}, notProposed(p.shard, dragonboat.ErrShardNotReady)
	case r.Timeout():
		return statemachine.Result{}, maybe(p.shard, dragonboat.ErrTimeout)
	case r.Terminated():
		return statemachine.Result{}, maybe(p.shard, errors.New("the replica was stopped"))
	default:
		return statemachine.Result{}, maybe(p.shard, errors.New("the proposal was aborted"))
	}
}

// Propose proposes a command and waits for its outcome, as ProposeAsync and Wait. Without a deadline in ctx, it has
// Config.ProposeTimeout.
func (h *RaftHost) Propose(ctx context.Context, shard uint64, cmd []byte) (queue.Result, error) {
	timeout, err := h.timeout(ctx)
	if err != nil {
		return queue.Result{}, err
	}
	p, err := h.ProposeAsync(shard, cmd, timeout)
	if err != nil {
		return queue.Result{}, err
	}
	return p.Wait(ctx)
}

// readAttempt is after how long ReadIndex asks again. The engine sends a request to the leader once: if that host has just died, or the
// connection breaks, nothing answers. After readsAtFirst attempts the pauses double, so that few are on their way, however long it takes.
const (
	readAttempt  = 300 * time.Millisecond
	readsAtFirst = 4
)

// ReadIndex returns nil once this host's replica of a shard has applied everything that was committed when ReadIndex was
// called, as a quorum confirmed. Its errors are *code.Error with EffectNone. It returns by ctx's deadline.
//
// It asks again when an answer is late, and takes the first one that comes: where a quorum answers slowly, as on slow disks, an answer
// must not be thrown away for a question that takes as long.
func (h *RaftHost) ReadIndex(ctx context.Context, shard uint64) error {
	if _, err := h.running(shard); err != nil {
		return err
	}
	timeout, err := h.timeout(ctx)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(timeout)
	late, over := make(chan dragonboat.RequestResult), make(chan struct{})
	defer close(over)
	for n, wait := 1, readAttempt; ; n++ {
		left := time.Until(deadline)
		if left <= 0 {
			return noLeader(shard, dragonboat.ErrTimeout)
		}
		if n > readsAtFirst {
			wait *= 2
		}
		request, err := h.askRead(shard, left)
		if err != nil {
			return err
		}
		timer := time.NewTimer(min(wait, left))
		select {
		case r := <-request.AppliedC():
			timer.Stop()
			request.Release()
			if !r.Timeout() {
				return readOutcome(shard, r)
			}
		case r := <-late:
			timer.Stop()
			go passOn(request, late, over)
			if !r.Timeout() {
				return readOutcome(shard, r)
			}
		case <-ctx.Done():
			timer.Stop()
			return noLeader(shard, ctx.Err())
		case <-timer.C:
			go passOn(request, late, over)
		}
	}
}

// askRead has the engine ask for a read index.
func (h *RaftHost) askRead(shard uint64, timeout time.Duration) (*dragonboat.RequestState, error) {
	if !h.gate.enter() {
		return nil, shuttingDown()
	}
	defer h.gate.leave()
	request, err := h.nodeHost.ReadIndex(shard, h.engineTime(timeout))
	if err != nil {
		return nil, notProposed(shard, err)
	}
	return request, nil
}

// passOn gives a late answer to who still waits for one, until it is over.
func passOn(request *dragonboat.RequestState, late chan<- dragonboat.RequestResult, over <-chan struct{}) {
	select {
	case r := <-request.AppliedC():
		request.Release()
		select {
		case late <- r:
		case <-over:
		}
	case <-over:
	}
}

func readOutcome(shard uint64, r dragonboat.RequestResult) error {
	switch {
	case r.Completed():
		return nil
	case r.Terminated():
		return notProposed(shard, dragonboat.ErrShardClosed)
	default:
		return noLeader(shard, dragonboat.ErrShardNotReady)
	}
}

// timeout returns the time left until ctx's deadline, or the default.
func (h *RaftHost) timeout(ctx context.Context) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: err}
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		return h.cfg.ProposeTimeout, nil
	}
	left := time.Until(deadline)
	if left < h.shortest() {
		return 0, code.New(code.DeadlineExceeded, "%v are too short to ask the shard's replicas", left.Round(time.Millisecond))
	}
	return left, nil
}

// shortest is the least time in which anything is tried.
func (h *RaftHost) shortest() time.Duration { return min(2*h.cfg.RTT, 100*time.Millisecond) }

// engineTime is what the engine, which counts ticks, is told of a timeout. Who waits does not wait for it longer than its own.
func (h *RaftHost) engineTime(timeout time.Duration) time.Duration { return max(timeout, 2*h.cfg.RTT) }

// notProposed sorts the errors that the engine gives before it has queued anything: none has an effect.
func notProposed(shard uint64, err error) *code.Error {
	e := &code.Error{Code: code.Unavailable, Effect: code.EffectNone, Text: fmt.Sprintf("shard %d: %v", shard, err), Cause: err}
	switch {
	case errors.Is(err, dragonboat.ErrShardNotReady), errors.Is(err, dragonboat.ErrShardNotInitialized):
		return noLeader(shard, err)
	case errors.Is(err, dragonboat.ErrShardNotFound), errors.Is(err, dragonboat.ErrInvalidOperation):
		return notReplica(shard)
	case errors.Is(err, dragonboat.ErrSystemBusy):
		e.Code, e.Text = code.Backpressure, code.Backpressure.Info().Text
		e.RetryAfterMs = 20
	case errors.Is(err, dragonboat.ErrPayloadTooBig):
		e.Code, e.Text = code.TooLarge, code.TooLarge.Info().Text
	case errors.Is(err, dragonboat.ErrTimeoutTooSmall):
		e.Code, e.Text = code.DeadlineExceeded, code.DeadlineExceeded.Info().Text
	case errors.Is(err, dragonboat.ErrClosed), errors.Is(err, dragonboat.ErrShardClosed):
		e.Code, e.Text = code.ShuttingDown, code.ShuttingDown.Info().Text
	}
	return e
}

func noLeader(shard uint64, cause error) *code.Error {
	return &code.Error{
		Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 100, Cause: cause,
		Text: fmt.Sprintf("shard %d has no leader that this host can reach: repeat after a pause", shard),
	}
}

func notReplica(shard uint64) *code.Error {
	return code.New(code.NotReplica, "this host holds no replica of shard %d", shard)
}

func maybe(shard uint64, cause error) *code.Error {
	return code.Maybe(code.QuorumLost, cause, "shard %d: the outcome is unknown: repeat with the same producer id and seq, or read", shard)
}
