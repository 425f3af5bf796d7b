package faultnet

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// wire is a transport that remembers what arrives, and when.
type wire struct {
	mu     sync.Mutex
	begun  time.Time
	got    []uint64 // log indexes of messages, ids of chunks
	at     []time.Duration
	closed int
}

func (w *wire) Name() string { return "wire" }
func (w *wire) Start() error { return nil }
func (w *wire) Close() error { return nil }

func (w *wire) GetConnection(context.Context, string) (raftio.IConnection, error) {
	return (*wireConn)(w), nil
}

func (w *wire) GetSnapshotConnection(context.Context, string) (raftio.ISnapshotConnection, error) {
	return (*wireChunks)(w), nil
}

func (w *wire) take(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.got = append(w.got, id)
	w.at = append(w.at, time.Since(w.begun))
}

func (w *wire) indexes() []uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]uint64{}, w.got...)
}

type wireConn wire

func (c *wireConn) Close() { c.closed++ }
func (c *wireConn) SendMessageBatch(b raftpb.MessageBatch) error {
	for _, m := range b.Requests {
		(*wire)(c).take(m.LogIndex)
	}
	return nil
}

type wireChunks wire

func (c *wireChunks) Close() { c.closed++ }
func (c *wireChunks) SendChunk(k raftpb.Chunk) error {
	(*wire)(c).take(k.ChunkId)
	return nil
}

// hostAt knows host 2 only.
func hostAt(address string) (uint64, bool) { return 2, address == "two" }

func open(t *testing.T, n *Net) (*wire, raftio.IConnection) {
	t.Helper()
	w := &wire{begun: time.Now()}
	c, err := n.Raft(1, w, hostAt).GetConnection(t.Context(), "two")
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return w, c
}

func batch(indexes ...uint64) (b raftpb.MessageBatch) {
	for _, i := range indexes {
		b.Requests = append(b.Requests, raftpb.Message{Type: raftpb.Replicate, LogIndex: i})
	}
	return b
}

func numbers(from, to uint64) (out []uint64) {
	for i := from; i <= to; i++ {
		out = append(out, i)
	}
	return out
}

// advance moves a bubble's clock on.
func advance(d time.Duration) { <-time.After(d) }

// TestDelayKeepsOrder: with a delay and jitter messages are late and in order, also those sent after the delay has ended.
func TestDelayKeepsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		w, c := open(t, n)
		require.NoError(t, c.SendMessageBatch(batch(1)))
		require.Equal(t, numbers(1, 1), w.indexes(), "without a rule a message is sent by the caller")
		n.Set(1, 2, Rule{Delay: 100 * time.Millisecond, Jitter: 50 * time.Millisecond})
		for i := uint64(2); i <= 50; i++ {
			require.NoError(t, c.SendMessageBatch(batch(i)))
		}
		n.Heal()
		require.NoError(t, c.SendMessageBatch(batch(51)))
		advance(99 * time.Millisecond)
		require.Len(t, w.indexes(), 1)
		advance(time.Second)
		require.Equal(t, numbers(1, 51), w.indexes())
		require.Less(t, w.at[len(w.at)-1], 160*time.Millisecond)
	})
}

// TestReorderAndLoss: some messages overtake others, some are lost, none comes twice; the other direction is left alone.
func TestReorderAndLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(2)
		w, c := open(t, n)
		n.Set(2, 1, Rule{Cut: true})
		n.Set(1, 2, Rule{Delay: 10 * time.Millisecond, Loss: 0.1, Reorder: 0.3})
		for i := uint64(1); i <= 500; i++ {
			require.NoError(t, c.SendMessageBatch(batch(i)))
			advance(time.Millisecond)
		}
		advance(time.Second)
		got, seen, overtaken := w.indexes(), map[uint64]bool{}, 0
		for i, m := range got {
			require.False(t, seen[m])
			seen[m] = true
			if i > 0 && m < got[i-1] {
				overtaken++
			}
		}
		require.Equal(t, 500, len(got)+n.Lost())
		require.InDelta(t, 50, n.Lost(), 25)
		require.Greater(t, overtaken, 20)
	})
}

// TestCut: what is on its way when a cut begins does not arrive; a cut that lasts breaks the connection, and none is made behind
// it; a refusal does at once.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(3)
		w, c := open(t, n)
		n.Set(1, 2, Rule{Delay: time.Second})
		require.NoError(t, c.SendMessageBatch(batch(1, 2)))
		n.Set(1, 2, Rule{Cut: true})
		advance(giveUp - time.Second)
		require.NoError(t, c.SendMessageBatch(batch(3)), "nobody has noticed yet")
		require.Empty(t, w.indexes())
		advance(giveUp)
		require.ErrorIs(t, c.SendMessageBatch(batch(4)), ErrCut)
		_, err := n.Raft(1, w, hostAt).GetConnection(t.Context(), "two")
		require.ErrorIs(t, err, ErrCut)
		_, err = n.Raft(1, w, hostAt).GetConnection(t.Context(), "three")
		require.NoError(t, err, "what is not a host's is left alone")

		n.Set(1, 2, Rule{Refuse: true})
		require.ErrorIs(t, c.SendMessageBatch(batch(5)), ErrRefused)
		_, err = n.Raft(1, w, hostAt).GetConnection(t.Context(), "two")
		require.ErrorIs(t, err, ErrRefused)
		n.Heal()
		require.NoError(t, c.SendMessageBatch(batch(6)))
		require.Equal(t, []uint64{6}, w.indexes())
	})
}

// TestOnly: a rule for entries leaves heartbeats, chunks and the peer API alone.
func TestOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(4)
		w, c := open(t, n)
		n.Set(1, 2, Rule{Delay: time.Second, Only: Entries})
		require.NoError(t, c.SendMessageBatch(raftpb.MessageBatch{Requests: []raftpb.Message{
			{Type: raftpb.Replicate, LogIndex: 1}, {Type: raftpb.Heartbeat, LogIndex: 2},
		}}))
		require.Equal(t, []uint64{2}, w.indexes())
		require.NoError(t, n.carry(t.Context(), direction{1, 2}, true))
		advance(time.Second)
		synctest.Wait()
		require.Equal(t, []uint64{2, 1}, w.indexes())
	})
}

// TestChunks: chunks are late and in order, wait behind a short cut, and break behind a long one.
func TestChunks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(5)
		w := &wire{begun: time.Now()}
		c, err := n.Raft(1, w, hostAt).GetSnapshotConnection(t.Context(), "two")
		require.NoError(t, err)
		n.Set(1, 2, Rule{Delay: 10 * time.Millisecond})
		require.NoError(t, c.SendChunk(raftpb.Chunk{ChunkId: 1}))
		n.Set(1, 2, Rule{Cut: true})
		time.AfterFunc(time.Second, n.Heal)
		require.NoError(t, c.SendChunk(raftpb.Chunk{ChunkId: 2}))
		require.Equal(t, []time.Duration{10 * time.Millisecond, 1010 * time.Millisecond}, w.at)
		n.Set(1, 2, Rule{Cut: true})
		require.ErrorIs(t, c.SendChunk(raftpb.Chunk{ChunkId: 3}), ErrCut)
		n.Set(1, 2, Rule{Loss: 1})
		require.ErrorIs(t, c.SendChunk(raftpb.Chunk{ChunkId: 3}), ErrLost)
		c.Close()
		require.Equal(t, 1, w.closed)
	})
}

// answer is a peer API that counts calls.
type answer struct {
	mu    sync.Mutex
	calls int
}

func (a *answer) RoundTrip(r *http.Request) (*http.Response, error) {
	a.mu.Lock()
	a.calls++
	a.mu.Unlock()
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(body)))}, nil
}

// TestPeer: a lost request is not served, a lost answer is to one that was; both take until the caller gives up; a stream breaks
// behind a cut.
func TestPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, a := New(6), &answer{}
		rt := n.Peer(1, 2, a)
		call := func() (took time.Duration, err error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			r, rerr := http.NewRequestWithContext(ctx, http.MethodPost, "http://host-2", strings.NewReader("hello"))
			require.NoError(t, rerr)
			began := time.Now()
			resp, err := rt.RoundTrip(r)
			if err == nil {
				var b []byte
				b, err = io.ReadAll(resp.Body)
				require.Equal(t, "hello", string(b))
			}
			return time.Since(began), err
		}
		n.Both(1, 2, Rule{Delay: 20 * time.Millisecond})
		took, err := call()
		require.NoError(t, err)
		require.Equal(t, 40*time.Millisecond, took)

		n.Heal()
		n.Set(1, 2, Rule{Cut: true})
		took, err = call()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, took)
		require.Equal(t, 1, a.calls)

		n.Heal()
		n.Set(2, 1, Rule{Loss: 1})
		_, err = call()
		require.ErrorIs(t, err, ErrLost)
		require.Equal(t, 2, a.calls, "it was served")

		n.Set(2, 1, Rule{Refuse: true})
		took, err = call()
		require.ErrorIs(t, err, ErrRefused)
		require.Zero(t, took)

		n.Heal()
		r, w := io.Pipe()
		b := newBody(t.Context(), n, direction{1, 2}, r)
		go func() {
			_, _ = w.Write([]byte("a"))
			n.Set(1, 2, Rule{Cut: true})
			_, _ = w.Write([]byte("b"))
		}()
		_, err = io.ReadAll(b)
		require.ErrorIs(t, err, ErrCut)
		require.NoError(t, b.Close())
		require.True(t, errors.Is(n.carry(b.ctx, direction{1, 2}, false), context.Canceled), "the end of a stream ends its wait")
	})
}
