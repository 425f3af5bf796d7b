package client_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
)

// BenchmarkPublishAsync publishes messages of 256 bytes to a fake fleet in this process, 1,024 in flight: allocations of the client, and of
// the fake host, which has some too.
func BenchmarkPublishAsync(b *testing.B) {
	f := clienttest.New(b, 1)
	c, err := client.New(client.Options{Addrs: f.Addrs(), MaxBufferedMessages: 1024})
	require.NoError(b, err)
	defer func() { require.NoError(b, c.Close(context.Background())) }()
	_, err = c.CreateQueue(b.Context(), &tierqv1.CreateQueueRequest{Name: "q"})
	require.NoError(b, err)
	body := make([]byte, 256)
	_, err = c.Publish(b.Context(), "q", client.Message{Body: body})
	require.NoError(b, err)
	futures := make(chan *client.Future, 1024)
	done := make(chan error, 1)
	go func() {
		var failed error
		for f := range futures {
			if _, err := f.Wait(b.Context()); err != nil {
				failed = err
			}
		}
		done <- failed
	}()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		futures <- c.PublishAsync(b.Context(), "q", client.Message{Body: body})
	}
	close(futures)
	require.NoError(b, <-done)
}

// BenchmarkPublish publishes one message of 256 bytes after the other, as each of many clients does.
func BenchmarkPublish(b *testing.B) {
	f := clienttest.New(b, 1)
	c, err := client.New(client.Options{Addrs: f.Addrs()})
	require.NoError(b, err)
	defer func() { require.NoError(b, c.Close(context.Background())) }()
	_, err = c.CreateQueue(b.Context(), &tierqv1.CreateQueueRequest{Name: "q"})
	require.NoError(b, err)
	body := make([]byte, 256)
	b.ReportAllocs()
	for b.Loop() {
		_, err := c.Publish(b.Context(), "q", client.Message{Body: body})
		require.NoError(b, err)
	}
}
