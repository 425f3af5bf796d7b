package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

// An atomic publish that was lost with its stream, and whose repeat comes before that of the publish ahead of it, goes again.
func TestLostAtomicPublishGoesAgainAfterGap(t *testing.T) {
	f := clienttest.New(t, 1)
	c, err := New(Options{Addrs: f.Addrs(), RefreshEvery: -1, ReconnectBase: time.Millisecond, RetryBase: time.Millisecond, RetryCap: 5 * time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	defer func() { require.NoError(t, c.Close(ctx)) }()
	_, err = c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "q"})
	require.NoError(t, err)
	_, err = c.Publish(ctx, "q", Message{Body: []byte("first of its sequence")})
	require.NoError(t, err)

	gate := make(chan struct{})
	atomics := 0 // asked for by one stream after the other
	f.SetHook(func(call clienttest.Call) clienttest.Fate {
		switch {
		case call.Procedure != "Publish":
		case call.N == 2:
			return clienttest.Fate{Hold: gate, LoseRequest: true}
		case call.Publish.Atomic:
			if atomics++; atomics == 1 {
				return clienttest.Fate{Err: code.New(code.SeqGap, "")}
			}
		}
		return clienttest.Fate{}
	})
	first := c.PublishAsync(ctx, "q", Message{Body: []byte("a")})
	require.Eventually(t, func() bool { return f.Calls("Publish") == 2 }, 30*time.Second, time.Millisecond)
	second := make(chan error, 1)
	go func() {
		_, err := c.PublishWith(ctx, "q", PublishOptions{Atomic: true}, Message{Body: []byte("b")}, Message{Body: []byte("c")})
		second <- err
	}()
	s := c.streamOf(streamKey{queue: "q"})
	require.Eventually(t, func() bool {
		s.pipeMu.Lock()
		defer s.pipeMu.Unlock()
		s.pipe.mu.Lock()
		defer s.pipe.mu.Unlock()
		return len(s.pipe.waiting) == 2
	}, 30*time.Second, time.Millisecond)
	close(gate)
	_, err = first.Wait(ctx)
	require.NoError(t, err)
	require.NoError(t, <-second)
	require.Equal(t, []string{"first of its sequence", "a", "b", "c"}, f.Bodies("q"))
	require.Equal(t, 2, atomics)
}
