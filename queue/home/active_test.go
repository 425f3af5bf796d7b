package home

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// activePart is one of a queue's partitions, with two replicas.
type activePart struct {
	*fakeRaft
	id     queue.GroupID
	ka, kb *Keeper
}

// Each partition has its own single active consumer: two may be active at once, one in each. A partition's changes only when it has
// nothing and is gone for 10 s, whatever it does in others; a home that moves keeps the one that holds recorded leases, and without one
// takes who asks first.
func TestSingleActiveConsumerOfEachPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var parts [2]activePart
		for i := range parts {
			r := newFakeRaft(t, 2, queue.QueueOptions{})
			parts[i] = activePart{fakeRaft: r, ka: r.replicas[0].open(), kb: r.replicas[1].open()}
			synctest.Wait()
			parts[i].id = serving(t, r, queue.GroupConfig{SingleActiveConsumer: true, LeaseMs: 4000, DelaysMs: []uint64{1}}, 20)
			defer r.replicas[0].close()
			defer r.replicas[1].close()
		}
		p, q := parts[0], parts[1]
		asks := func(k *Keeper, consumer string) int {
			t.Helper()
			ds := get(t, k, ReceiveRequest{Consumer: consumer})
			for _, d := range ds[min(1, len(ds)):] {
				t.Fatalf("%s got %v too", consumer, d.Message.Address)
			}
			return len(ds)
		}
		require.Equal(t, 1, asks(p.ka, "one"))
		died := p.boot() // of one: it asks no more, and holds a message
		require.Equal(t, 1, asks(q.ka, "two"))
		require.Zero(t, asks(p.ka, "two"))
		require.Zero(t, asks(q.ka, "one"), "it is heard of here, which does not help it there")

		for p.boot() < died+activeGrace-500*time.Millisecond { // its lease ends after 4 s
			require.Zero(t, asks(p.ka, "two"), "at %v", p.boot()-died)
			ds := get(t, q.ka, ReceiveRequest{Consumer: "two"})
			require.Len(t, ds, 1, "two goes on in its own partition")
			require.Equal(t, code.OK, ack(t, q.ka, ds[0].Receipt)[0])
			require.Zero(t, asks(q.ka, "one"))
			pass(time.Second)
		}
		pass(time.Second)
		require.Equal(t, 1, asks(p.ka, "two"), "now one consumer has both")
		require.Zero(t, asks(p.ka, "one"), "who comes back waits like others")

		// The home of the second partition dies; two holds a message there, which is recorded.
		held := get(t, q.ka, ReceiveRequest{Consumer: "two", Lease: time.Minute, HasLease: true})
		pass(1100 * time.Millisecond)
		q.replicas[0].close()
		q.giveHome(q.id, q.replicas[1])
		require.Empty(t, get(t, q.kb, ReceiveRequest{Consumer: "one", Wait: 5 * time.Second}))
		next := get(t, q.kb, ReceiveRequest{Consumer: "two", Wait: 5 * time.Second})
		require.Len(t, next, 1)
		require.Equal(t, code.OK, ack(t, q.kb, held[0].Receipt)[0])
		require.Equal(t, code.OK, ack(t, q.kb, next[0].Receipt)[0])

		// A home that moves when nobody holds anything knows nobody.
		ka := q.replicas[0].open()
		synctest.Wait()
		require.NoError(t, q.kb.Move(within(time.Second), "g", 1))
		require.Len(t, get(t, ka, ReceiveRequest{Consumer: "one", Wait: 5 * time.Second}), 1)
		require.Zero(t, asks(ka, "two"))
	})
}
