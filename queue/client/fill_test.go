package client

import (
	"context"
	"math"
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
	f.heard(5*ms, 0)
	require.Equal(t, math.MaxInt, f.small(), "the host does not say")

	for range 100 {
		f.heard(2*ms+200*time.Microsecond, 2*ms)
	}
	require.Equal(t, 1, f.small())
	f.heard(300*ms, 2*ms)
	require.Equal(t, 1, f.small(), "one answer that was read late")
	f.heard(ms, 2*ms)
	require.Equal(t, 1, f.small(), "a host that counts more than there was")

	for range 1000 {
		f.heard(52*ms, 2*ms)
	}
	require.Equal(t, 26, f.small(), "the way has become longer, or the client is far away")
	f.heard(2*ms+200*time.Microsecond, 2*ms)
	require.Equal(t, 1, f.small())

	far := fill{}
	far.heard(101*ms, ms)
	require.Equal(t, 101, far.small())
}

// TestSmallRequestsFill: while a request is in flight to a host that is near, what is published waits for its answer and goes out together; what
// makes a full request does not wait. A host that is far, or does not say, gets each at once.
func TestSmallRequestsFill(t *testing.T) {
	for name, row := range map[string]struct {
		served time.Duration
		more   int // messages that are published one by one while a request is in flight
		calls  int // requests that are taken of them before it is answered
	}{
		"near":          {time.Hour, 20, 0},
		"near and full": {time.Hour, 600, 1},
		"far":           {time.Microsecond, 20, 7},
		"does not say":  {0, 20, 7},
	} {
		t.Run(name, func(t *testing.T) {
			f := clienttest.New(t, 1)
			f.SetServed(row.served)
			c, err := New(Options{Addrs: f.Addrs(), RefreshEvery: -1, AttemptTimeout: clienttest.Patience, PublishTimeout: clienttest.Patience})
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), clienttest.Patience)
			defer cancel()
			defer func() { require.NoError(t, c.Close(ctx)) }()
			_, err = c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "q"})
			require.NoError(t, err)
			_, err = c.Publish(ctx, "q", Message{Body: []byte("first")})
			require.NoError(t, err)
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
