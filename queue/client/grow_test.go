package client_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
)

// hastyClock is the system's, but that half a minute passes at once.
type hastyClock struct{}

func (hastyClock) Now() time.Time { return time.Unix(0, time.Now().UnixNano()*1000) }

func (hastyClock) After(d time.Duration) <-chan time.Time { return time.After(d / 1000) }

// A consumer and a producer that run while their queue grows come to use the new partitions, and never hold more than they may: at once
// if hosts tell of them in their answers, with the next look half a minute later if not.
func TestQueueGrowsUnderConsumer(t *testing.T) {
	for name, c := range map[string]struct {
		clock          client.Clock // nil: it takes half a minute
		hints, streams bool
	}{
		"told by streams": {nil, true, true},
		"told by calls":   {nil, true, false},
		"not told":        {hastyClock{}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := partitioned(t, 1)
			f.SetGrowthHints(c.hints)
			f.SetStreams(c.streams)
			growUnderConsumer(t, f, c.clock)
		})
	}
}

// A consumer hears of new partitions without a message.
func TestIdleConsumerHearsOfGrowth(t *testing.T) {
	f := partitioned(t, 1)
	f.SetStreams(true)
	c := open(t, quick(f.Addrs()...))
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	got := make(chan uint32, 1)
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(_ context.Context, d *client.Delivery) error {
			got <- d.Partition
			return nil
		}, client.ConsumeOptions{})
	}()
	require.Eventually(t, func() bool { return f.Waiting("q", "g") == 1 }, 30*time.Second, time.Millisecond)
	f.Grow("q", 2)
	f.SetPartitionLeader("q", 1, 2)
	f.SetPartitionHome("q", 1, 3)
	require.Eventually(t, func() bool { return f.Waiting("q", "g") == 2 }, 30*time.Second, time.Millisecond)
	one := uint32(1)
	_, err := c.PublishWith(within(t, clienttest.Patience), "q", client.PublishOptions{Partition: &one}, bodies(1)...)
	require.NoError(t, err)
	require.Equal(t, one, <-got)
	cancel()
	require.NoError(t, <-done)
}

func growUnderConsumer(t *testing.T, f *clienttest.Fleet, clock client.Clock) {
	o := quick(f.Addrs()...)
	o.Clock = clock
	c := open(t, o)
	ctx, cancel := context.WithCancel(within(t, time.Minute))
	var mu sync.Mutex
	seen, partitions := map[string]int{}, map[uint32]int{}
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			seen[string(d.Body)]++
			partitions[d.Partition]++
			return nil
		}, client.ConsumeOptions{Concurrency: 2, MaxInFlight: 8, Ahead: -1})
	}()
	published := 0
	publish := func() {
		rs, err := c.Publish(within(t, clienttest.Patience), "q", bodiesFrom(published, 3)...)
		require.NoError(t, err)
		published += len(rs)
	}
	publish()
	f.Grow("q", 4)
	for p := range uint32(4) {
		f.SetPartitionLeader("q", p, uint64(p%3)+1)
		f.SetPartitionHome("q", p, uint64((p+1)%3)+1)
	}
	require.Eventually(t, func() bool {
		publish()
		mu.Lock()
		defer mu.Unlock()
		return len(partitions) == 4
	}, 30*time.Second, 5*time.Millisecond)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == published
	}, 30*time.Second, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-done)
}

func bodiesFrom(first, n int) []client.Message {
	return bodies(first + n)[first:]
}
