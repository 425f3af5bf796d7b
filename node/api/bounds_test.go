package api

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// A settle of a stream has the bounds of the unary calls: 2^64 / 10^6 ms and a bit is no delay of less than a millisecond.
func TestConsumeSettleRefusesBadDurations(t *testing.T) {
	stream := consume(t, newShelf(0), 8)
	const wraps = 18_446_744_073_710
	for i, settle := range []*tierqv1.ConsumeSettle{
		{Kind: "nack", DelayMs: proto.Uint64(wraps), Receipts: []string{"r"}},
		{Kind: "extend", LeaseMs: wraps, Receipts: []string{"r"}},
	} {
		settle.Id = uint64(i + 1)
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: settle}}))
		resp, err := stream.Receive()
		require.NoError(t, err)
		require.Equal(t, settle.Id, resp.GetSettled().GetId())
		require.Equal(t, "INVALID_ARGUMENT", resp.GetSettled().GetResults()[0].GetName())
		require.Contains(t, resp.GetSettled().GetResults()[0].GetText(), "_ms: 18446744073710, at most 43200000")
	}
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

// asked is a shelf that tells how many bytes a receive asks for.
type asked struct {
	*shelf
	bytes chan int
}

func (a *asked) Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	select {
	case a.bytes <- r.MaxBytes:
	default:
	}
	return a.shelf.Receive(ctx, r)
}

// A push is no larger than a client takes in one message, however large its window is.
func TestConsumePushesBoundedBytes(t *testing.T) {
	a := &asked{shelf: newShelf(0), bytes: make(chan int, 1)}
	stream := streamClient(t, Options{Backend: a}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowBytes: maxWindowBytes}}}))
	require.LessOrEqual(t, <-a.bytes, maxReceiveBytes)
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}
