package client

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
)

// TestFill: one small request keeps a host busy that is near, and more the farther it is; what takes long to be read says nothing.
func TestFill(t *testing.T) {
	const ms = time.Millisecond
	var f fill
	require.Equal(t, math.MaxInt, f.small(), "nothing is known")
	f.heard("a", 5*ms, 0)
	require.Equal(t, math.MaxInt, f.small(), "the host does not say")

	for range 100 {
		f.heard("a", 2*ms+200*time.Microsecond, 2*ms)
	}
	require.Equal(t, 1, f.small())
	f.heard("a", 300*ms, 2*ms)
	require.Equal(t, 1, f.small(), "one answer that was read late")
	f.heard("a", ms, 2*ms)
	require.Equal(t, 1, f.small(), "a host that counts more than there was")

	for range 1000 {
		f.heard("a", 52*ms, 2*ms)
	}
	require.Equal(t, 26, f.small(), "the way has become longer, or the client is far away")
	f.heard("a", 2*ms+200*time.Microsecond, 2*ms)
	require.Equal(t, 1, f.small())

	for range 100 {
		f.heard("a", 10*time.Second, 10*time.Second)
	}
	f.heard("b", 52*ms, 2*ms)
	require.Equal(t, 26, f.small(), "another host")
	f.heard("b", time.Second+50*ms, time.Second)
	require.Greater(t, f.small(), 10, "one answer that hung")
	f.heard("c", 5*ms, 0)
	require.Equal(t, math.MaxInt, f.small(), "another one, which does not say")

	far := fill{}
	far.heard("b", 101*ms, ms)
	require.Equal(t, 101, far.small())
}

// TestWhatCannotGrowLeaves: an atomic publish goes alone, so it does not wait, nor does what is before one.
func TestWhatCannotGrowLeaves(t *testing.T) {
	c, err := New(Options{Addrs: []string{"127.0.0.1:1"}})
	require.NoError(t, err)
	defer func() { _ = c.Close(t.Context()) }()
	s := c.streamOf(streamKey{queue: "q"})
	plain, whole := &item{p: &publish{}}, &item{p: &publish{opts: PublishOptions{Atomic: true}}}
	require.True(t, whole.p.exclusive())
	for _, row := range []struct {
		pending []*item
		grows   bool
	}{
		{[]*item{plain}, true}, {[]*item{plain, plain}, true}, {[]*item{whole}, false}, {[]*item{whole, plain}, false}, {[]*item{plain, whole}, false},
	} {
		s.pending = row.pending
		require.Equal(t, row.grows, s.growsLocked())
	}
	s.pending = nil
}

// TestSmallRequestsFill: while a request is in flight to a host that is near, what is published waits for its answer and goes out together; what
// makes a full request does not wait. A host that is far, or does not say, gets each at once.
func TestSmallRequestsFill(t *testing.T) {
	for name, row := range map[string]struct {
		served time.Duration
		batch  int // MaxBatchMessages; 0: the default
		more   int // messages that are published one by one while a request is in flight
		calls  int // requests that are taken of them before it is answered
	}{
		"near":                {time.Hour, 0, 20, 0},
		"near and full":       {time.Hour, 0, 600, 1},
		"near, small batches": {time.Hour, 16, 40, 2},
		"far":                 {time.Microsecond, 0, 20, 7},
		"does not say":        {0, 0, 20, 7},
	} {
		t.Run(name, func(t *testing.T) {
			f := clienttest.New(t, 1)
			f.SetServed(row.served)
			c, ctx := publisher(t, f, Options{MaxBatchMessages: row.batch})
			began := f.Calls("Publish")
			gate, first := make(chan struct{}), make(chan struct{}, 1)
			f.SetHook(func(c clienttest.Call) clienttest.Fate {
				if c.Procedure != "Publish" {
					return clienttest.Fate{}
				}
				select {
				case first <- struct{}{}:
				default:
				}
				return clienttest.Fate{Hold: gate}
			})
			c.PublishAsync(ctx, "q", Message{Body: []byte("held")})
			<-first
			for range row.more {
				c.PublishAsync(ctx, "q", Message{Body: []byte("m")})
			}
			s := c.knownStream(streamKey{queue: "q"})
			s.mu.Lock()
			require.Len(t, s.batches, 1+row.calls)
			s.mu.Unlock()
			close(gate)
			require.NoError(t, c.Flush(ctx))
			require.Len(t, f.Bodies("q"), 2+row.more)
			if row.calls == 0 {
				require.Equal(t, began+2, f.Calls("Publish"), "one for all that waited")
			}
		})
	}
}

// TestFirstOfASequence: the first request of a producer is lost on its way, time after time, while more is published. What follows it is not
// stored before it: whoever does not know the producer would take any seq for its first.
func TestFirstOfASequence(t *testing.T) {
	for range 5 {
		f := clienttest.New(t, 1)
		c, err := New(Options{
			Addrs: f.Addrs(), RefreshEvery: -1, AttemptTimeout: clienttest.Patience, PublishTimeout: clienttest.Patience,
			RetryBase: time.Millisecond, RetryCap: 10 * time.Millisecond, ReconnectBase: time.Millisecond, ReconnectCap: 10 * time.Millisecond,
		})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), clienttest.Patience)
		_, err = c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "q"})
		require.NoError(t, err)
		var lost atomic.Int32
		f.SetHook(func(c clienttest.Call) clienttest.Fate {
			return clienttest.Fate{LoseRequest: c.Procedure == "Publish" && lost.Add(1) <= 3}
		})
		var want []string
		for i := range 12 {
			want = append(want, fmt.Sprint("m", i))
			c.PublishAsync(ctx, "q", Message{Body: []byte(want[i])})
		}
		require.NoError(t, c.Flush(ctx))
		require.Equal(t, want, f.Bodies("q"))
		require.NoError(t, c.Close(ctx))
		cancel()
	}
}

// TestForgottenProducer: a partition that may have forgotten the producer gets one request, as one that never knew it.
func TestForgottenProducer(t *testing.T) {
	f := clienttest.New(t, 1)
	c, _ := publisher(t, f, Options{})
	s := c.knownStream(streamKey{queue: "q"})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches[&batch{}] = struct{}{}
	s.pending = []*item{{p: &publish{}}}
	defer func() { clear(s.batches); s.pending = nil }()
	require.True(t, s.maySendLocked(), "it has stored a message just now")
	for _, at := range []time.Time{{}, time.Now().Add(-2 * knownFor)} {
		s.storedAt = at
		require.False(t, s.maySendLocked())
	}
}

// publisher is a client that has published one message to the new queue q.
func publisher(t *testing.T, f *clienttest.Fleet, o Options) (*Client, context.Context) {
	t.Helper()
	o.Addrs, o.RefreshEvery, o.AttemptTimeout, o.PublishTimeout = f.Addrs(), -1, clienttest.Patience, clienttest.Patience
	c, err := New(o)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), clienttest.Patience)
	t.Cleanup(func() {
		defer cancel()
		require.NoError(t, c.Close(ctx))
	})
	_, err = c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "q"})
	require.NoError(t, err)
	_, err = c.Publish(ctx, "q", Message{Body: []byte("first")})
	require.NoError(t, err)
	return c, ctx
}

// TestNothingWaitsForWhatHangs: a request that takes much longer than those before it holds the next ones back no more.
func TestNothingWaitsForWhatHangs(t *testing.T) {
	f := clienttest.New(t, 1)
	c, ctx := publisher(t, f, Options{})
	s := c.knownStream(streamKey{queue: "q"})
	s.mu.Lock()
	s.fill = fill{host: f.Addrs()[0], served: time.Millisecond}
	s.mu.Unlock()
	gate := make(chan struct{})
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Publish" {
			return clienttest.Fate{Hold: gate}
		}
		return clienttest.Fate{}
	})
	for range 3 {
		c.PublishAsync(ctx, "q", Message{Body: []byte("m")})
	}
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.batches) > 1 && len(s.pending) == 0
	}, 60*time.Second, time.Millisecond)
	close(gate)
	require.NoError(t, c.Flush(ctx))
	require.Len(t, f.Bodies("q"), 4)
}
