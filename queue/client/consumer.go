package client

import (
	"context"
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
	// MaxBytes bounds the bodies; 0 means 4 MiB. At least one message is returned whatever its size.
	MaxBytes int
	// Wait is the long poll, at most 20 s; 0 means 5 s, NoWait returns at once.
	Wait time.Duration
	// Lease overrides the group's; 0 keeps it.
	Lease time.Duration
	// Consumer names this consumer, for limits and for people.
	Consumer string
	// MinIndex waits until the home has applied this index of the shard: read your writes (Published.Index).
	MinIndex uint64
}

const defaultWait = 5 * time.Second

// Receive leases up to o.Max messages of group (empty: the default group, made by the first receive) to the caller. It
// returns none, and no error, when the wait ends with nothing ready. A message whose answer is lost on the way comes again
// when its lease runs out.
func (c *Client) Receive(ctx context.Context, queue, group string, o ReceiveOptions) ([]*Delivery, error) {
	if o.Wait == 0 {
		o.Wait = defaultWait
	}
	req := &tierqv1.ReceiveRequest{
		Queue: queue, Group: group, MaxMessages: uint32(max(o.Max, 0)), MaxBytes: uint32(max(o.MaxBytes, 0)),
		WaitMs: proto.Uint32(uint32(wireMillis(o.Wait))), Consumer: o.Consumer, MinIndex: o.MinIndex,
	}
	if o.Lease > 0 {
		req.LeaseMs = proto.Uint64(wireMillis(o.Lease))
	}
	res, err := call(ctx, c, how{to: homeOf(queue, group), idempotent: true, wait: max(o.Wait, 0)}, receiveStub, req)
	if err != nil {
		return nil, err
	}
	out := make([]*Delivery, len(res.Messages))
	for i, m := range res.Messages {
		out[i] = deliveryOf(m)
	}
	return out, nil
}

func homeOf(queue, group string) route { return route{kind: toHome, queue: queue, group: group} }

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
	return settle(ctx, c, queue, group, receipts, true, ackStub, &tierqv1.AckRequest{Queue: queue, Group: group, Receipts: receipts})
}

// Nack gives messages back and counts a failure. delay overrides the group's backoff; below 0 it does not. A nack of
// unknown outcome is not repeated: the message comes again anyway, at the latest when its lease runs out.
func (c *Client) Nack(ctx context.Context, queue, group string, delay time.Duration, reason string, receipts ...string) ([]Settled, error) {
	req := &tierqv1.NackRequest{Queue: queue, Group: group, Receipts: receipts, Reason: reason}
	if delay >= 0 {
		req.DelayMs = proto.Uint64(wireMillis(delay))
	}
	return settle(ctx, c, queue, group, receipts, false, nackStub, req)
}

// Release gives messages back without counting a failure. Like Nack it is not repeated when its outcome is unknown.
func (c *Client) Release(ctx context.Context, queue, group string, receipts ...string) ([]Settled, error) {
	return settle(ctx, c, queue, group, receipts, false, releaseStub, &tierqv1.ReleaseRequest{Queue: queue, Group: group, Receipts: receipts})
}

// Reject makes dead letters of messages now.
func (c *Client) Reject(ctx context.Context, queue, group, reason string, receipts ...string) ([]Settled, error) {
	return settle(ctx, c, queue, group, receipts, false, rejectStub, &tierqv1.RejectRequest{Queue: queue, Group: group, Receipts: receipts, Reason: reason})
}

// Extend makes leases end lease from now. One of unknown outcome is repeated.
func (c *Client) Extend(ctx context.Context, queue, group string, lease time.Duration, receipts ...string) ([]Settled, error) {
	return settle(ctx, c, queue, group, receipts, true, extendStub,
		&tierqv1.ExtendRequest{Queue: queue, Group: group, Receipts: receipts, LeaseMs: wireMillis(lease)})
}

func settle[Req any](ctx context.Context, c *Client, queue, group string, receipts []string, idempotent bool, f stub[Req, tierqv1.SettleResponse], req *Req) ([]Settled, error) {
	if len(receipts) == 0 {
		return nil, code.New(code.BatchEmpty, "no receipt given")
	}
	maybe := false // an earlier try may have been applied, so that a refusal is no proof that nothing was
	h := how{to: homeOf(queue, group), mutates: true, idempotent: idempotent, failed: func(e *code.Error) { maybe = maybe || e.Effect == code.EffectMaybe }}
	res, err := call(ctx, c, h, f, req)
	if err != nil {
		return settleAll(receipts, codeOf(err)), err
	}
	if len(res.Results) != len(receipts) {
		e := code.Maybe(code.Internal, nil, "the host answered %d results to %d receipts", len(res.Results), len(receipts))
		return settleAll(receipts, e), e
	}
	out := make([]Settled, len(receipts))
	var first error
	for i, r := range res.Results {
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
