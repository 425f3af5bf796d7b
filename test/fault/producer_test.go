package fault

import (
	"context"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// window is how far above its lowest unanswered seq a producer may run.
const window = 8192

// publishSeqs sends one request with the seqs from first to last, and repeats it until some host answers it: what a client
// without memory does with an outcome that it does not know.
func (f *fleet) publishSeqs(queue string, producer, low, first, last uint64) []*tierqv1.PublishResult {
	f.t.Helper()
	req := &tierqv1.PublishRequest{Queue: queue, ProducerId: producer, Low: low}
	for seq := first; seq <= last; seq++ {
		req.Messages = append(req.Messages, &tierqv1.OutMessage{Seq: seq, Body: fmt.Appendf(nil, "seq %d", seq)})
	}
	var out []*tierqv1.PublishResult
	eventually(f.t, readyWithin, fmt.Sprintf("seqs %d to %d are answered", first, last), func() error {
		err := errNotYet
		for _, h := range f.full() {
			if !h.running() {
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), callTime)
			var res *connect.Response[tierqv1.PublishResponse]
			res, err = h.raw().queue.Publish(ctx, connect.NewRequest(req))
			cancel()
			if err == nil {
				out = res.Msg.Results
				return nil
			}
		}
		return err
	})
	require.Len(f.t, out, len(req.Messages))
	return out
}

// TestFaultProducer: a (producer, seq) sent again after a leader change and after a restart of every process is answered
// with its first address and stores nothing (G2); and of 8,192 seqs in flight of which a batch in the middle was dropped and
// came late, every one is stored once.
func TestFaultProducer(t *testing.T) {
	needsProcesses(t)
	r := newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "producer", nil)

	t.Run("before and after a leader change and a full restart", func(t *testing.T) {
		id := r.Uint64()
		first := f.publishSeqs("producer", id, 1, 1, 10)
		for i, res := range first {
			require.Zero(t, res.Code, res.Text)
			require.False(t, res.Duplicate, "seq %d", i+1)
		}
		requireSame := func(what string) {
			t.Helper()
			again := f.publishSeqs("producer", id, 1, 1, 10)
			for i, res := range again {
				require.Zero(t, res.Code, "%s: seq %d: %s", what, i+1, res.Text)
				require.True(t, res.Duplicate, "%s: seq %d is a duplicate", what, i+1)
				require.Equal(t, first[i].Address, res.Address, "%s: seq %d keeps its address", what, i+1)
			}
		}
		requireSame("at once")

		leader := f.leaderHost("producer")
		leader.kill()
		requireSame("with a new leader")
		require.NotEqual(t, leader.id, f.leaderHost("producer").id)
		leader.restart()
		requireSame("after the old leader's return")

		for _, h := range f.hosts {
			h.kill()
		}
		for _, h := range f.hosts {
			h.start()
		}
		f.awaitReady()
		requireSame("after a restart of every process")
		fresh := f.publishSeqs("producer", id, 1, 11, 11)
		require.False(t, fresh[0].Duplicate)
		require.Equal(t, first[9].Address+1, fresh[0].Address, "nothing was stored in between")
		require.EqualValues(t, 11, f.stored("producer"))
	})

	t.Run("8,192 in flight with a dropped batch in the middle", func(t *testing.T) {
		id := r.Uint64()
		before := f.stored("producer")
		addresses := map[uint64]uint64{}
		note := func(first uint64, rs []*tierqv1.PublishResult, duplicate bool) {
			t.Helper()
			for i, res := range rs {
				seq := first + uint64(i)
				require.Zero(t, res.Code, "seq %d: %s", seq, res.Text)
				require.Equal(t, duplicate, res.Duplicate, "seq %d", seq)
				if duplicate {
					require.Equal(t, addresses[seq], res.Address, "seq %d keeps its address", seq)
				}
				addresses[seq] = res.Address
			}
		}
		send := func(first, last uint64, duplicate bool) {
			t.Helper()
			for ; first <= last; first += 1000 {
				end := min(first+999, last)
				note(first, f.publishSeqs("producer", id, 1, first, end), duplicate)
			}
		}
		send(1, 4000, false)
		send(4101, window, false)
		send(4001, 4100, false) // the batch that was dropped on the way comes last
		send(1, window, true)   // and everything again
		used := map[uint64]bool{}
		for _, a := range addresses {
			used[a] = true
		}
		require.Len(t, used, window, "every seq has an address of its own")
		require.Equal(t, before+window, f.stored("producer"))

		beyond := f.publishSeqs("producer", id, 1, window+2, window+2)
		require.Equal(t, code.Backpressure, code.Code(beyond[0].Code), "beyond the window: %s", beyond[0].Text)
		below := f.publishSeqs("producer", id, 100, 99, 99)
		require.Equal(t, code.SeqExpired, code.Code(below[0].Code), "below low: %s", below[0].Text)
		require.Equal(t, before+window, f.stored("producer"))
		s := totals{sent: window, acknowledged: window, lost: window - int(f.stored("producer")-before)}
		noteAccount(t, "", s)
		require.Zero(t, s.lost)
	})
	f.awaitConverged("producer")
}

// stored is the number of messages in a queue, as its leader says.
func (f *fleet) stored(queue string) uint64 {
	f.t.Helper()
	var n uint64
	eventually(f.t, readyWithin, "queue "+queue+" is described", func() error {
		q, err := f.describe(queue)
		if err == nil {
			n = q.Messages
		}
		return err
	})
	return n
}

// TestFaultClientProducer: the Go client's own producer keeps a message single while its first tries have unknown outcomes:
// the leader's process is frozen with publishes under way, and goes on when another one leads.
func TestFaultClientProducer(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{AttemptTimeout: 2 * time.Second})
	f.createQueue(c, "frozen", nil)
	leader := f.leaderHost("frozen")
	f.awaitCaughtUp(f.other(leader), "frozen")
	a := newAccount()
	stop := consume(f, a, "frozen", "", 2, nil)
	const messages = 3000
	publishAll := func(from, to uint64) {
		lines := make([][]byte, 0, to-from+1)
		for id := from; id <= to; id++ {
			lines = append(lines, fmt.Appendf(nil, "message %d", id))
		}
		publishNumbered(c, a, "frozen", from, lines)
	}
	publishAll(1, messages/3)
	leader.pause()
	publishAll(messages/3+1, 2*messages/3)
	leader.resume()
	publishAll(2*messages/3+1, messages)
	f.awaitCaughtUp(leader, "frozen")
	f.awaitFinished("frozen", "$default", readyWithin)
	stop()
	f.awaitConverged("frozen")
	s := a.verify(t)
	require.Equal(t, messages, s.acknowledged)
	require.EqualValues(t, messages, mustStats(t, leader, "frozen").Partitions[0].Last, "addresses used")
	t.Logf("longest time between two acknowledgements %v", a.longestGap.Round(time.Millisecond))
}

func mustStats(t *testing.T, h *host, queue string) *queueStats {
	t.Helper()
	s, err := h.stats(queue)
	require.NoError(t, err)
	return s
}
