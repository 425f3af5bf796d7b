package node

import (
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// testClaim takes over what a consumer holds in vain, whose lease has been recorded meanwhile.
func testClaim(f *adminFleet) {
	f.create("claim", queue.QueueOptions{})
	g := f.group("claim", "g", queue.GroupConfig{RecordAfterMs: 1})
	require.EqualValues(f.t, 1, g.Config.RecordAfterMs)
	f.bodies("claim", 3)
	held := f.receive("claim", "g", "stuck", 2)
	require.Eventually(f.t, func() bool { return f.info("claim", "g").Counters.Leased == 2 }, 90*time.Second, 10*time.Millisecond)
	claim := func(r api.ClaimIdle) (api.Claimed, error) {
		r.Queue, r.Group, r.MaxBytes = "claim", "g", 1<<20
		return try(f, func(n *Node) (api.Claimed, error) { return n.ClaimIdle(f.ctx, r) })
	}
	got, err := claim(api.ClaimIdle{MinIdle: time.Hour, Max: 10})
	require.NoError(f.t, err)
	require.Empty(f.t, got.Deliveries)
	got, err = claim(api.ClaimIdle{Consumer: "other", Max: 10})
	require.NoError(f.t, err)
	require.Len(f.t, got.Deliveries, 2)
	require.EqualValues(f.t, 2, got.Deliveries[0].Attempt)
	res := must(f, func(n *Node) ([]api.SettleResult, error) {
		return n.Settle(f.ctx, api.Settle{Kind: api.SettleAck, Queue: "claim", Group: "g", Receipts: []string{held[0].Receipt}})
	})
	f.refused(code.UnknownDelivery, res[0].Err)
	f.settle(api.SettleAck, "claim", "g", "", got.Deliveries[0])
	f.settle(api.SettleRelease, "claim", "g", "", got.Deliveries[1])
	require.EqualValues(f.t, 1, f.info("claim", "g").ClaimGeneration)
	require.Len(f.t, f.receive("claim", "g", "other", 5), 2, "the released one, and the third")
	_, err = claim(api.ClaimIdle{MinIdle: 13 * time.Hour})
	f.refused(code.InvalidArgument, err)
}
