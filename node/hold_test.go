package node

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// TestPublishIsHeldForALeader: a publish that finds the leader's host gone is held, by the host that takes it, until there is another leader; where
// none can be, it is answered NO_LEADER before its time is over, and what is held is bounded.
func TestPublishIsHeldForALeader(t *testing.T) {
	t.Parallel()
	f := openFaultFleet(t, layoutOf{full: 2, witnesses: 1, adjust: func(c *host.Config) { c.ElectionTicks = 40 }}, 90*time.Second)
	f.awaitHealthy()
	leader := f.awaitLeader(nil)
	other := f.follower()
	publish := func(timeout time.Duration) error {
		ctx, cancel := context.WithTimeout(f.ctx, timeout)
		defer cancel()
		_, err := other.Publish(ctx, api.Publish{Queue: "q", Publish: queue.Publish{Messages: []queue.Message{{Body: []byte("m")}}}})
		return err
	}
	other.mu.RLock()
	d := other.desks[f.shard]
	other.mu.RUnlock()
	d.hold = time.Minute // an election takes as long as it takes
	f.stop(int(leader.id) - 1)
	f.eventually("its end is noticed", func() bool { return !other.Alive(leader.id) })
	require.NoError(t, publish(60*time.Second))
	d.hold = leaderHold

	f.stop(2) // the witness
	f.eventually("nobody leads", func() bool { _, _, _, ok := other.raft.Leader(f.shard); return !ok })
	refused := make(chan error, 1)
	go func() { refused <- publish(20 * time.Second) }()
	f.eventually("a publish is held", func() bool { return d.held.Load() > 0 })
	requireNoLeader(t, <-refused)
	require.Zero(t, d.held.Load())
	for range 1000 { // half an hour, if each were held
		requireNoLeader(t, publish(20*time.Second))
	}
	f.start(2)
	f.eventually("somebody leads", func() bool { _, _, _, ok := other.raft.Leader(f.shard); return ok })
	require.NoError(t, publish(60*time.Second))
	require.Zero(t, d.leaderless.Load())
	f.stop(2)
	f.eventually("nobody leads again", func() bool { _, _, _, ok := other.raft.Leader(f.shard); return !ok })
	d.held.Add(queuedBytes)
	requireNoLeader(t, publish(20*time.Second))
	require.EqualValues(t, queuedBytes, d.held.Load(), "no room for another one")
	d.held.Add(-queuedBytes)
}

// TestMayHold: the time counts from the first publish that finds no leader, ends when one is heard of, and begins anew after a while.
func TestMayHold(t *testing.T) {
	now := 5 * time.Second
	d := &desk{boot: func() time.Duration { return now }, hold: leaderHold}
	require.Equal(t, leaderHold, d.mayHold())
	now += leaderHold / 3
	require.Equal(t, leaderHold*2/3, d.mayHold())
	now += leaderHold
	require.Negative(t, d.mayHold())
	d.heardOfLeader()
	require.Equal(t, leaderHold, d.mayHold())
	now += leaderlessAgain
	require.Negative(t, d.mayHold())
	now++
	require.Equal(t, leaderHold, d.mayHold(), "an old mark, which nobody has taken away")
	require.Equal(t, leaderHold, d.mayHold())
}

func requireNoLeader(t *testing.T, err error) {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, code.NoLeader, e.Code)
	require.Equal(t, code.EffectNone, e.Effect)
}
