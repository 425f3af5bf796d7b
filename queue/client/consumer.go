package client

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// NoWait as ReceiveOptions.Wait returns at once with what is ready.
const NoWait time.Duration = -1

// ReceiveOptions say what one receive wants. The zero value: one message, a long poll of 5 s, the group's lease.
type ReceiveOptions struct {
	// Max is 1 to 1,000; 0 means 1.
	Max int
	// MaxBytes bounds the bodies; 0 means 4 MiB, and hosts give no more than 32 MiB. At least one message is returned whatever its size.
	MaxBytes int
	// Wait is the long poll, at most 20 s; 0 means 5 s, NoWait returns at once.
	Wait time.Duration
	// Lease overrides the group's; 0 keeps it.
	Lease time.Duration
	// Consumer names this consumer, for limits and for people.
	Consumer string
	// MinIndex waits until the home has applied this index of the shard: read your writes (Published.Index). In a queue of
	// several partitions it needs Partition.
	MinIndex uint64
	// Partition asks one partition; nil all of them.
	Partition *uint32
}

const defaultWait = 5 * time.Second

// Receive leases up to o.Max messages of group (empty: the default group, made by the first receive) to the caller. It
// returns none, and no error, when the wait ends with nothing ready. A message whose answer is lost on the way comes again
// when its lease runs out.
//
// In a queue of several partitions it goes from home to home, and stays a moment at each while it waits; Consume waits at all
// of them at once.
func (c *Client) Receive(ctx context.Context, queue, group string, o ReceiveOptions) ([]*Delivery, error) {
	if o.Wait == 0 {
		o.Wait = defaultWait
	}
	if o.Partition != nil {
		res, err := c.receive(ctx, homeIn(queue, *o.Partition, group), o.Partition, o)
		return deliveriesOf(res), err
	}
	n, err := c.partitionsOf(ctx, queue)
	switch {
	case err != nil:
		return nil, err
	case n > 1:
		return c.receiveAround(ctx, queue, group, o, n)
	}
	res, err := c.receive(ctx, homeOf(queue, group), nil, o)
	return deliveriesOf(res), err
}

func (c *Client) receive(ctx context.Context, to route, partition *uint32, o ReceiveOptions) (*tierqv1.ReceiveResponse, error) {
	req := &tierqv1.ReceiveRequest{
		Queue: to.queue, Partition: partition, Group: to.group, MaxMessages: uint32(max(o.Max, 0)), MaxBytes: uint32(max(o.MaxBytes, 0)),
		WaitMs: proto.Uint32(uint32(wireMillis(o.Wait))), Consumer: o.Consumer, MinIndex: o.MinIndex,
	}
	if o.Lease > 0 {
		req.LeaseMs = proto.Uint64(wireMillis(o.Lease))
	}
	var from string
	res, err := call(ctx, c, how{to: to, idempotent: true, wait: max(o.Wait, 0), from: &from}, receiveStub, req)
	c.heardPartitions(to.queue, res.GetPartitions())
	for _, e := range res.GetElsewhere() {
		if e.Api != "" {
			c.router.hint(homeIn(to.queue, e.Partition, to.group), e.Api, from)
		}
	}
	return res, err
}

func deliveriesOf(res *tierqv1.ReceiveResponse) []*Delivery {
	out := make([]*Delivery, len(res.GetMessages()))
	for i, m := range res.GetMessages() {
		out[i] = deliveryOf(m)
	}
	return out
}

func homeOf(queue, group string) route { return homeIn(queue, 0, group) }

func homeIn(queue string, partition uint32, group string) route {
	return route{kind: toHome, queue: queue, partition: partition, group: group}
}

// Settled is the answer to one receipt.
type Settled struct {
	Receipt string
	Address uint64
	// Already says that the message had been finished before.
	Already bool
	// Err is why nothing was changed (EffectNone), or that it is not known (EffectMaybe).
	Err *code.Error
}

// Ack finishes messages: nil means applied, and they are never delivered again (G5). The results are in the receipts'
// order; the error is the first one's that has one, or the call's. An ack of unknown outcome is repeated until ctx ends.
func (c *Client) Ack(ctx context.Context, queue, group string, receipts ...string) ([]Settled, error) {
	return c.settle(ctx, homeOf(queue, group), nil, &settling{kind: "ack"}, receipts)
}

// Nack gives messages back and counts a failure. delay overrides the group's backoff; below 0 it does not. A nack of
// unknown outcome is not repeated: the message comes again anyway, at the latest when its lease runs out.
func (c *Client) Nack(ctx context.Context, queue, group string, delay time.Duration, reason string, receipts ...string) ([]Settled, error) {
	return c.settle(ctx, homeOf(queue, group), nil, &settling{kind: "nack", delay: delay, reason: reason}, receipts)
}

// Release gives messages back without counting a failure. Like Nack it is not repeated when its outcome is unknown.
func (c *Client) Release(ctx context.Context, queue, group string, receipts ...string) ([]Settled, error) {
	return c.settle(ctx, homeOf(queue, group), nil, &settling{kind: "release"}, receipts)
}

// Reject makes dead letters of messages now.
func (c *Client) Reject(ctx context.Context, queue, group, reason string, receipts ...string) ([]Settled, error) {
	return c.settle(ctx, homeOf(queue, group), nil, &settling{kind: "reject", reason: reason}, receipts)
}

// Extend makes leases end lease from now. One of unknown outcome is repeated.
func (c *Client) Extend(ctx context.Context, queue, group string, lease time.Duration, receipts ...string) ([]Settled, error) {
	return c.settle(ctx, homeOf(queue, group), nil, &settling{kind: "extend", lease: lease}, receipts)
}

// settling is what is done to leases. kind is ack, nack, release, reject or extend.
type settling struct {
	kind   string
	delay  time.Duration // nack: below 0, the group's backoff
	reason string
	lease  time.Duration
	// patient: of an ack by a stream whose answer nobody waits for
	patient bool
}

// repeats says that the call may be made again when its outcome is unknown.
func (s *settling) repeats() bool { return s.kind == "ack" || s.kind == "extend" }

func (s *settling) delayMs() *uint64 {
	if s.kind != "nack" || s.delay < 0 {
		return nil
	}
	return proto.Uint64(wireMillis(s.delay))
}

// settle makes the unary call; partition nil lets the host find the receipts' partitions. Receipts whose home moved while
// the others were settled are taken to the new one: they are good there.
func (c *Client) settle(ctx context.Context, to route, partition *uint32, s *settling, receipts []string) ([]Settled, error) {
	if e := checkText("a reason", s.reason); e != nil {
		return settleAll(receipts, e), e
	}
	out, err := c.settleOnce(ctx, to, partition, s, receipts)
	var moved []string
	for _, r := range out {
		if r.Err != nil && r.Err.Code == code.NotOwner && r.Err.Effect == code.EffectNone {
			moved = append(moved, r.Receipt)
		}
	}
	if len(moved) == 0 || len(moved) == len(out) { // all of them: the call was refused, after it had looked for the home
		return out, err
	}
	again, _ := c.settleOnce(ctx, to, partition, s, moved)
	err = nil
	for i := range out {
		if len(again) > 0 && out[i].Receipt == again[0].Receipt && out[i].Err != nil && out[i].Err.Code == code.NotOwner {
			out[i], again = again[0], again[1:]
		}
		if err == nil && out[i].Err != nil {
			err = out[i].Err
		}
	}
	return out, err
}

func (c *Client) settleOnce(ctx context.Context, to route, partition *uint32, s *settling, receipts []string) ([]Settled, error) {
	q, g := to.queue, to.group
	switch s.kind {
	case "ack":
		return settle(ctx, c, to, receipts, s, ackStub, &tierqv1.AckRequest{Queue: q, Partition: partition, Group: g, Receipts: receipts})
	case "nack":
		return settle(ctx, c, to, receipts, s, nackStub, &tierqv1.NackRequest{Queue: q, Partition: partition, Group: g, Receipts: receipts, Reason: s.reason, DelayMs: s.delayMs()})
	case "release":
		return settle(ctx, c, to, receipts, s, releaseStub, &tierqv1.ReleaseRequest{Queue: q, Partition: partition, Group: g, Receipts: receipts})
	case "reject":
		return settle(ctx, c, to, receipts, s, rejectStub, &tierqv1.RejectRequest{Queue: q, Partition: partition, Group: g, Receipts: receipts, Reason: s.reason})
	}
	return settle(ctx, c, to, receipts, s, extendStub, &tierqv1.ExtendRequest{Queue: q, Partition: partition, Group: g, Receipts: receipts, LeaseMs: wireMillis(s.lease)})
}

func settle[Req any](ctx context.Context, c *Client, to route, receipts []string, s *settling, f stub[Req, tierqv1.SettleResponse], req *Req) ([]Settled, error) {
	if len(receipts) == 0 {
		return nil, code.New(code.BatchEmpty, "no receipt given")
	}
	maybe := false // an earlier try may have been applied, so that a refusal is no proof that nothing was
	h := how{to: to, mutates: true, idempotent: s.repeats(), failed: func(e *code.Error) { maybe = maybe || e.Effect == code.EffectMaybe }}
	res, err := call(ctx, c, h, f, req)
	if err != nil {
		return settleAll(receipts, codeOf(err)), err
	}
	return settledOf(receipts, res.Results, maybe)
}

// settledOf reads the results of one call. maybe says that an earlier try of it may have been applied.
func settledOf(receipts []string, results []*tierqv1.SettleResult, maybe bool) ([]Settled, error) {
	if len(results) != len(receipts) {
		e := code.Maybe(code.Internal, nil, "the host answered %d results to %d receipts", len(results), len(receipts))
		return settleAll(receipts, e), e
	}
	out := make([]Settled, len(receipts))
	var first error
	for i, r := range results {
		out[i] = Settled{Receipt: receipts[i], Address: r.Address, Already: r.Already}
		if cd := code.Code(r.Code); cd != 0 && cd != code.OK {
			out[i].Err = sticky(&code.Error{Code: cd, Effect: effectOf(r.Effect, cd), Text: r.Text}, maybe)
			if first == nil {
				first = out[i].Err
			}
		}
	}
	return out, first
}

func settleAll(receipts []string, e *code.Error) []Settled {
	out := make([]Settled, len(receipts))
	for i, r := range receipts {
		out[i] = Settled{Receipt: r, Err: e}
	}
	return out
}

const (
	// aroundStay is how long a receive waits at one home before it looks at the next.
	aroundStay = 200 * time.Millisecond
	// aroundTry is how long a home that does not answer is tried before the next has its turn.
	aroundTry = time.Second
)

// passes reports whether one home's refusal leaves hope in the others, or in itself later.
func passes(e *code.Error) bool {
	switch e.Code {
	case code.DeadlineExceeded, code.GroupPaused, code.ConsumerLimit, code.MaxWaitingPulls:
		return true
	}
	return worthWaiting(e)
}

// receiveAround goes from home to home of n partitions until something comes or the wait is over. It fails only when no home
// has answered.
func (c *Client) receiveAround(ctx context.Context, queue, group string, o ReceiveOptions, n uint32) ([]*Delivery, error) {
	began, wait := time.Now(), max(o.Wait, 0)
	for round := 0; ; round++ {
		served := make([]bool, n)
		answered, failed := false, error(nil)
		for i := range n {
			p := (i + uint32(round)) % n
			if served[p] {
				continue
			}
			one := o
			if one.Wait = min(aroundStay, wait-time.Since(began)); one.Wait <= 0 || round == 0 {
				one.Wait = NoWait
			}
			try, cancel := context.WithTimeout(ctx, aroundTry+max(one.Wait, 0))
			res, err := c.receive(try, homeIn(queue, p, group), nil, one)
			cancel()
			switch {
			case err != nil && !passes(codeOf(err)):
				return nil, err
			case err != nil:
				failed = err
				continue
			case len(res.Messages) > 0:
				return deliveriesOf(res), nil
			}
			answered = true
			for i := range served {
				served[i] = served[i] || !slices.ContainsFunc(res.Elsewhere, func(e *tierqv1.PartitionHome) bool { return e.Partition == uint32(i) })
			}
		}
		switch {
		case time.Since(began) < wait && ctx.Err() == nil && answered:
		case time.Since(began) < wait && ctx.Err() == nil:
			// Some refusals come at once, such as that too many wait already.
			if c.sleep(ctx, min(c.retryPause(round, codeOf(failed)), wait-time.Since(began))) != nil {
				return nil, failed
			}
		case answered:
			return nil, nil
		default:
			return nil, failed
		}
	}
}
