package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// ClaimOptions say what one claim wants. The zero value: one message, whoever holds it, the group's lease.
type ClaimOptions struct {
	// Consumer names who gets the messages, for limits and for people.
	Consumer string
	// MinIdle is how long ago a lease was handed out, extended, or taken over from another home: 0 to 12 h.
	MinIdle time.Duration
	// Max is 1 to 1,000; 0 means 1. MaxBytes bounds the bodies; 0 means 4 MiB, hosts give no more than 32 MiB, and one message comes
	// whatever its size.
	Max, MaxBytes int
	// Lease overrides the group's; 0 keeps it.
	Lease time.Duration
	// Partition asks one partition; nil all of them.
	Partition *uint32
}

// Claimed is what a claim brought: messages that are leased to the caller now, and how many had no attempt left and
// became dead letters, or were settled in the same moment.
type Claimed struct {
	Deliveries    []*Delivery
	Dead, Skipped int
}

// ClaimIdle takes over messages of group (empty: the default group) whose holders do nothing with them, those first that
// were idle longest. Each counts an attempt, and its old receipt is refused from then on. A claim of unknown outcome is
// not repeated: what it brought comes again when its lease runs out, or at once.
func (c *Client) ClaimIdle(ctx context.Context, queue, group string, o ClaimOptions) (Claimed, error) {
	req := &tierqv1.ClaimIdleRequest{
		Queue: queue, Group: group, Consumer: o.Consumer, MinIdleMs: wireMillis(o.MinIdle), MaxMessages: uint32(max(o.Max, 0)),
		MaxBytes: uint32(max(o.MaxBytes, 0)), Partition: o.Partition,
	}
	if o.Lease > 0 {
		req.LeaseMs = proto.Uint64(wireMillis(o.Lease))
	}
	to := homeOf(queue, group)
	if o.Partition != nil {
		to = homeIn(queue, *o.Partition, group)
	}
	res, err := call(ctx, c, writeTo(to, false), func(a *apis) method[tierqv1.ClaimIdleRequest, tierqv1.ClaimIdleResponse] { return a.group().ClaimIdle }, req)
	if err != nil {
		return Claimed{}, err
	}
	out := Claimed{Dead: int(res.DeadLettered), Skipped: int(res.Skipped)}
	for _, m := range res.Messages {
		out.Deliveries = append(out.Deliveries, deliveryOf(m))
	}
	return out, nil
}
