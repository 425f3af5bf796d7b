package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// moving is a group that consumers work on while it is moved from host to host.
type moving struct {
	t  *testing.T
	d  *Dev
	mu sync.Mutex
	// by body: how often it was delivered
	out   map[string]int
	acked int
}

// TestPlannedMovesRedeliverNothing moves a group back and forth under consumers that hold messages over many moves:
// each is delivered once, and its receipt is good wherever the group is.
func TestPlannedMovesRedeliverNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	d := openDev(t, t.TempDir())
	defer func() { require.NoError(t, d.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	_, _, err := d.Nodes[0].CreateQueue(ctx, api.CreateQueue{Name: "moved"})
	require.NoError(t, err)
	_, err = d.Nodes[0].CreateGroup(ctx, api.CreateGroup{Queue: "moved", Name: "g", HomeHost: d.Nodes[0].id, OperationID: 1})
	require.NoError(t, err)
	m := &moving{t: t, d: d, out: map[string]int{}}
	const messages, moves, consumers = 600, 12, 4
	var working sync.WaitGroup
	for n := range consumers {
		working.Go(func() { m.consume(ctx, n, messages) })
	}
	for i := range moves {
		p := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: 7}, Low: 1}
		for n := range messages / moves {
			seq := i*messages/moves + n + 1
			p.Messages = append(p.Messages, queue.Message{Seq: queue.Seq(seq), Body: []byte(itoa(uint64(seq)))})
		}
		_, err := publishAnywhere(ctx, d, api.Publish{Queue: "moved", Publish: p})
		require.NoError(t, err)
		from, to := d.Nodes[i%2], d.Nodes[1-i%2]
		require.Eventually(t, func() bool { // its replica may not have applied the last move yet
			_, err := from.MoveGroup(ctx, "moved", nil, "g", to.id)
			return err == nil
		}, 90*time.Second, 10*time.Millisecond)
	}
	working.Wait()
	require.Equal(t, messages, m.acked)
	require.Len(t, m.out, messages)
	for body, n := range m.out {
		require.Equal(t, 1, n, "message %s", body)
	}
}

func (m *moving) done(messages int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.acked == messages
}

// consume keeps two batches: it acks the older one only when the next has come, so that leases are open at any move.
func (m *moving) consume(ctx context.Context, n, messages int) {
	var held []api.Delivery
	for at := n % 2; !m.done(messages) && ctx.Err() == nil; {
		ds, _, err := m.d.Nodes[at].Receive(ctx, api.Receive{Queue: "moved", Group: "g", Max: 8, MaxBytes: 1 << 20, Wait: 200 * time.Millisecond})
		if err != nil {
			at = 1 - at
			continue
		}
		m.mu.Lock()
		for _, d := range ds {
			m.out[string(d.Message.Body)]++
		}
		m.mu.Unlock()
		at = m.ack(ctx, at, held)
		held = ds
	}
}

// ack acks at the home, wherever that is.
func (m *moving) ack(ctx context.Context, at int, ds []api.Delivery) int {
	for len(ds) > 0 && ctx.Err() == nil {
		receipts := make([]string, len(ds))
		for i, d := range ds {
			receipts[i] = d.Receipt
		}
		results, err := m.d.Nodes[at].Settle(ctx, api.Settle{Kind: api.SettleAck, Queue: "moved", Group: "g", Receipts: receipts})
		if err != nil {
			at = 1 - at
			continue
		}
		var rest []api.Delivery
		for i, r := range results {
			var e *code.Error
			switch {
			case r.Err == nil:
				m.mu.Lock()
				m.acked++
				m.mu.Unlock()
			case errors.As(r.Err, &e) && (e.Code == code.NotOwner || e.Effect == code.EffectMaybe):
				rest = append(rest, ds[i])
			default:
				m.t.Errorf("%s: %v", ds[i].Message.Address, r.Err)
			}
		}
		ds = rest
	}
	return at
}
