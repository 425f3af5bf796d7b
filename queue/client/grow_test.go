package client_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
)

// hastyClock is the system's, but that half a minute passes at once.
type hastyClock struct{}

func (hastyClock) Now() time.Time { return time.Unix(0, time.Now().UnixNano()*1000) }

func (hastyClock) After(d time.Duration) <-chan time.Time { return time.After(d / 1000) }

// A consumer and a producer that run while their queue grows come to use the new partitions, and never hold more than they may.
func TestQueueGrowsUnderConsumer(t *testing.T) {
	f := partitioned(t, 1)
	o := quick(f.Addrs()...)
	o.Clock = hastyClock{}
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
		rs, err := c.Publish(within(t, 20*time.Second), "q", bodiesFrom(published, 3)...)
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
