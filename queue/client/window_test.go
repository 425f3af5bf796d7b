package client_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
)

// consumeInto runs a consumer of q and g until the returned function is called, which waits for its end.
func consumeInto(ctx context.Context, t *testing.T, c *client.Client, o client.ConsumeOptions, h client.Handler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Consume(ctx, "q", "g", h, o) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
	}
}

// By default a quick handler has up to 256 messages fetched for it. When it gets stuck they are given back, uncounted, and
// another consumer has them at once.
func TestDefaultWindow(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c, other := open(t, quick(f.Addrs()...)), open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	const n, quickly = 1000, 300
	_, err := c.Publish(ctx, "q", bodies(n)...)
	require.NoError(t, err)
	var handled atomic.Int64
	stuck, release := make(chan struct{}), make(chan struct{})
	stopFirst := consumeInto(ctx, t, c, client.ConsumeOptions{}, func(context.Context, *client.Delivery) error {
		if handled.Add(1) == quickly {
			close(stuck)
			<-release
		}
		return nil
	})
	<-stuck
	require.LessOrEqual(t, f.MostLeased("q", "g"), 2*256, "256, and at most as many whose ack is on its way")
	leased := func() int { k, _ := f.Outstanding("q", "g"); return k }
	require.Eventually(t, func() bool { return leased() == 1 }, 30*time.Second, time.Millisecond, "%d leased", leased())
	require.Positive(t, f.Calls("Release"))
	var counted atomic.Int64
	stopOther := consumeInto(ctx, t, other, client.ConsumeOptions{}, func(_ context.Context, d *client.Delivery) error {
		if d.Attempt != 1 {
			counted.Add(1)
		}
		return nil
	})
	require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == n-1 }, 30*time.Second, time.Millisecond)
	require.Zero(t, counted.Load())
	close(release)
	require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == n }, 30*time.Second, time.Millisecond)
	stopFirst()
	stopOther()
}

// A consumer that knows nothing of its handlers yet takes one message for each, so that the first of two does not take all.
func TestWindowBeginsSmall(t *testing.T) {
	f := fleetWithQueue(t, 1)
	ctx := within(t, clienttest.Patience)
	c := open(t, quick(f.Addrs()...))
	_, err := c.Publish(ctx, "q", bodies(10)...)
	require.NoError(t, err)
	var started atomic.Int64
	release := make(chan struct{})
	var stops []func()
	for range 3 {
		stops = append(stops, consumeInto(ctx, t, open(t, quick(f.Addrs()...)), client.ConsumeOptions{Concurrency: 2},
			func(context.Context, *client.Delivery) error {
				started.Add(1)
				<-release
				return nil
			}))
	}
	require.Eventually(t, func() bool { return started.Load() == 6 }, 30*time.Second, time.Millisecond)
	leased, _ := f.Outstanding("q", "g")
	require.Equal(t, 6, leased)
	close(release)
	require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == 10 }, 30*time.Second, time.Millisecond)
	for _, stop := range stops {
		stop()
	}
}

// A stop gives what was fetched ahead back at once, in one call, and does not wait for the handler.
func TestDefaultWindowStopsClean(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx := within(t, clienttest.Patience)
	_, err := c.Publish(ctx, "q", bodies(200)...)
	require.NoError(t, err)
	var handled atomic.Int64
	stuck, release := make(chan struct{}), make(chan struct{})
	stopped := make(chan struct{})
	// An hour ahead: nothing is given back before the stop.
	stop := consumeInto(ctx, t, c, client.ConsumeOptions{Ahead: time.Hour}, func(context.Context, *client.Delivery) error {
		if handled.Add(1) == 10 {
			close(stuck)
			<-release
		}
		return nil
	})
	<-stuck
	held := func() int { k, acked := f.Outstanding("q", "g"); return k + acked }
	require.Eventually(t, func() bool { return held() == 200 }, 30*time.Second, time.Millisecond)
	go func() {
		defer close(stopped)
		stop()
	}()
	require.Eventually(t, func() bool { k, acked := f.Outstanding("q", "g"); return k == 1 && acked == 9 }, 30*time.Second, time.Millisecond)
	require.Equal(t, 1, f.Calls("Release"))
	close(release)
	<-stopped
	leased, acked := f.Outstanding("q", "g")
	require.Equal(t, []int{0, 10}, []int{leased, acked})
}
