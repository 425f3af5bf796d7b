package home

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// B14: what a consumer had fetched ahead when it broke off runs out without counting; what a handler may have had counts.
func TestB14UnseenLeasesDoNotCount(t *testing.T) {
	for name, lease := range map[string]time.Duration{"young": 900 * time.Millisecond, "recorded": 10 * time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
				serving(t, r, queue.GroupConfig{DelaysMs: []uint64{1}}, 3)
				ds := get(t, k, ReceiveRequest{Max: 3, Lease: lease, HasLease: true})
				require.Equal(t, []code.Code{code.OK, code.OK}, codes(t)(k.Unseen(within(time.Second), "g", []string{ds[1].Receipt, ds[2].Receipt})))
				require.Empty(t, get(t, k, ReceiveRequest{Max: 3, Wait: lease - 100*time.Millisecond}), "they last to their deadline")
				pass(200 * time.Millisecond)
				attempts := map[queue.Address]uint32{}
				for _, d := range get(t, k, ReceiveRequest{Max: 3}) {
					attempts[d.Message.Address] = d.Attempt
				}
				require.Equal(t, map[queue.Address]uint32{1: 2, 2: 1, 3: 1}, attempts)
			})
		})
	}
}

// A lease that is extended has its consumer back, and counts; an ack is honoured before the deadline and after it.
func TestUnseenAndThenSeen(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{DelaysMs: []uint64{1}}, 3)
		ds := get(t, k, ReceiveRequest{Max: 3, Lease: 900 * time.Millisecond, HasLease: true})
		for _, d := range ds {
			require.Equal(t, []code.Code{code.OK}, codes(t)(k.Unseen(within(time.Second), "g", []string{d.Receipt})))
		}
		require.Equal(t, code.OK, extend(t, k, ds[0].Receipt, 2*time.Second))
		require.Equal(t, code.OK, ack(t, k, ds[1].Receipt)[0])
		pass(time.Second)
		require.Equal(t, code.OK, ack(t, k, ds[2].Receipt)[0], "nobody has had it since")
		pass(1500 * time.Millisecond)
		again := get(t, k, ReceiveRequest{Max: 3})
		require.Len(t, again, 1)
		require.EqualValues(t, 2, again[0].Attempt)
		require.Equal(t, []code.Code{code.UnknownDelivery}, codes(t)(k.Unseen(within(time.Second), "g", []string{ds[0].Receipt})))
	})
}
