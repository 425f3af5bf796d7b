package api

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// ClaimIdle asks a group's home for what other consumers hold and do nothing with. Lease is nil for the group's own.
type ClaimIdle struct {
	Queue     string
	Partition Partition
	Group     string
	Consumer  string
	MinIdle   time.Duration
	Max       int
	MaxBytes  int
	Lease     *time.Duration
}

// Claimed is what a claim brought.
type Claimed struct {
	Deliveries []Delivery
	Dead       int
	Skipped    int
	Epoch      queue.Epoch
}

// ClaimIdle is forwarded to the home. Partitions are claimed from one after the other: how many are wanted of the next
// depends on the last.
func (s groupService) ClaimIdle(ctx context.Context, req *connect.Request[tierqv1.ClaimIdleRequest]) (*connect.Response[tierqv1.ClaimIdleResponse], error) {
	r, err := claimIdle(req.Msg)
	if err != nil {
		return nil, err
	}
	got, err := s.backend.ClaimIdle(ctx, r)
	if n, ok := several(err); ok {
		return s.claimFromEach(ctx, req.Msg, r, n)
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ClaimIdleRequest]) (*connect.Response[tierqv1.ClaimIdleResponse], error) {
			return s.client(host).ClaimIdle(ctx, r)
		})
	}
	out := &tierqv1.ClaimIdleResponse{DeadLettered: uint32(got.Dead), Skipped: uint32(got.Skipped), Epoch: uint64(got.Epoch)}
	for _, d := range got.Deliveries {
		out.Messages = append(out.Messages, protoMessage(d, r.Partition))
	}
	return connect.NewResponse(out), nil
}

// claimFromEach claims from n partitions. A partition that fails ends it; what was claimed until then is returned, since
// an error would leave it to nobody.
func (s groupService) claimFromEach(ctx context.Context, m *tierqv1.ClaimIdleRequest, r ClaimIdle, n int) (*connect.Response[tierqv1.ClaimIdleResponse], error) {
	out := &tierqv1.ClaimIdleResponse{}
	bytes := r.MaxBytes
	for p := 0; p < n && len(out.Messages) < r.Max && bytes > 0; p++ {
		one := inPartition(m, uint32(p))
		one.MaxMessages, one.MaxBytes = uint32(r.Max-len(out.Messages)), uint32(bytes)
		resp, err := s.ClaimIdle(ctx, connect.NewRequest(one))
		if err != nil {
			if len(out.Messages)+int(out.DeadLettered) > 0 {
				break
			}
			return nil, err
		}
		out.Messages = append(out.Messages, resp.Msg.GetMessages()...)
		for _, got := range resp.Msg.GetMessages() {
			bytes -= len(got.GetBody())
		}
		out.DeadLettered += resp.Msg.GetDeadLettered()
		out.Skipped += resp.Msg.GetSkipped()
		out.Epoch = resp.Msg.GetEpoch()
	}
	return connect.NewResponse(out), nil
}

func claimIdle(m *tierqv1.ClaimIdleRequest) (ClaimIdle, error) {
	// The bounds of what is asked for are those of a receive.
	w, err := receive(&tierqv1.ReceiveRequest{MaxMessages: m.GetMaxMessages(), MaxBytes: m.GetMaxBytes(), LeaseMs: m.LeaseMs, Consumer: m.GetConsumer()})
	if err != nil {
		return ClaimIdle{}, err
	}
	if m.GetMinIdleMs() > uint64(maxLease.Milliseconds()) {
		return ClaimIdle{}, code.New(code.InvalidArgument, "min_idle_ms: %d, at most %d (12 h) are allowed", m.GetMinIdleMs(), maxLease.Milliseconds())
	}
	return ClaimIdle{
		Queue: m.GetQueue(), Partition: m.Partition, Group: groupName(m.GetGroup()), Consumer: m.GetConsumer(), Max: w.Max, MaxBytes: w.MaxBytes,
		Lease: w.Lease, MinIdle: time.Duration(m.GetMinIdleMs()) * time.Millisecond,
	}, nil
}
