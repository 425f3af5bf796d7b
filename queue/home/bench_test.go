package home

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// instant is a shard whose commits cost nothing: what is left is ours. Its reads are a slice.
type instant struct {
	*fakeState
	n    queue.Address
	body []byte
}

func (s *instant) Meta() queue.Meta { return queue.Meta{Last: s.n, Applied: 5} }
func (s *instant) Group(queue.GroupID) (queue.GroupInfo, bool) {
	return queue.GroupInfo{ID: 1, Name: "g", Home: 1, HomeIndex: 9, Epoch: 1, Released: true}, true
}
func (s *instant) GroupByName(string) (queue.GroupInfo, bool) { return s.Group(1) }
func (s *instant) Retrying(queue.GroupID, queue.Address, int) ([]queue.Deliverable, queue.Address, error) {
	return nil, 0, nil
}
func (s *instant) ParkedStragglers(queue.GroupID, queue.Address, int) ([]queue.Deliverable, queue.Address, error) {
	return nil, 0, nil
}
func (s *instant) Due(queue.DelayedKey, queue.Stamp, int) ([]queue.DelayedKey, error) {
	return nil, nil
}
func (s *instant) NextDue(queue.DelayedKey) (queue.Stamp, bool, error) { return 0, false, nil }
func (s *instant) Message(a queue.Address) (queue.StoredMessage, bool, error) {
	return queue.StoredMessage{Address: a, Body: s.body}, true, nil
}
func (s *instant) Messages() queue.MessageReader { return oneByOne{s} }
func (s *instant) Deliverables(_ queue.GroupID, from queue.Address, limit int, _ bool) ([]queue.Deliverable, queue.Address, error) {
	out := make([]queue.Deliverable, 0, limit)
	for a := from; a <= s.n && len(out) < limit; a++ {
		out = append(out, queue.Deliverable{Address: a, Size: len(s.body)})
	}
	return out, from + queue.Address(len(out)), nil
}

func (s *instant) propose(_ context.Context, cmd queue.Command) (queue.Result, error) {
	res := queue.Result{Code: code.OK}
	if c, ok := cmd.(*queue.Ack); ok {
		for _, r := range c.Ranges {
			for a := r.First; a <= r.Last; a++ {
				res.Acks = append(res.Acks, queue.AckDone)
			}
		}
	}
	return res, nil
}

func BenchmarkReceiveAck(b *testing.B) {
	for _, batch := range []int{1, 10, 100} {
		b.Run(fmt.Sprint(batch), func(b *testing.B) {
			s := &instant{n: 1 << 40, body: make([]byte, 256)}
			start := time.Now()
			k, err := NewKeeper(Options{
				Shard: 1, Self: 1, Reader: s, Propose: s.propose, ReadIndex: func(context.Context) error { return nil },
				Stamp: func() queue.Stamp { return queue.Stamp(time.Now().UnixMilli()) },
				Boot:  func() time.Duration { return time.Since(start) }, ReceiptKey: goldenSecret,
			})
			if err != nil {
				b.Fatal(err)
			}
			defer k.Close(context.Background())
			ctx := context.Background()
			b.ReportAllocs()
			for n := 0; n < b.N; {
				ds, err := k.Receive(ctx, "g", ReceiveRequest{Max: batch, Wait: time.Second})
				if err != nil {
					b.Fatal(err)
				}
				rs := make([]string, len(ds))
				for i := range ds {
					rs[i] = ds[i].Receipt
				}
				if _, err := k.Ack(ctx, "g", rs); err != nil {
					b.Fatal(err)
				}
				n += len(ds)
			}
		})
	}
}
