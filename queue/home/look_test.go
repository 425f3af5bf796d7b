package home

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// What consumers hold, and why a message waits, can be looked up at the home, and at no other place.
func TestLook(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{Ordering: queue.OrderKey}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		seen, err := k.Look("g", 1)
		require.NoError(t, err)
		require.False(t, seen.Serving)
		r.send(3, func(m *queue.Message) { m.Key = []byte("k") })
		get(t, k, ReceiveRequest{Max: 10, Consumer: "one"})
		pass(time.Second)
		held, err := k.Held("g", 10)
		require.NoError(t, err)
		require.Equal(t, []Held{{Address: 1, Consumer: "one", Attempt: 1, HeldFor: time.Second, Left: 29 * time.Second}}, held)
		seen, err = k.Look("g", 1)
		require.NoError(t, err)
		require.True(t, seen.Leased)
		require.Equal(t, held[0], seen.Held)
		seen, err = k.Look("g", 3)
		require.NoError(t, err)
		require.Equal(t, Seen{Serving: true, Tracked: true, Head: 1}, seen)
		seen, err = k.Look("g", 4)
		require.NoError(t, err)
		require.True(t, seen.Ahead)
		r.must(&queue.Retention{Stamp: r.stamp(), PurgeTo: 3})
		pass(2 * time.Second)
		require.Zero(t, k.Stats()[0].Leased, "what was purged is not in flight, though nobody asks for messages")
		_, err = k.Held("none", 10)
		require.Equal(t, code.UnknownGroup, refusal(t, err))
	})
}
