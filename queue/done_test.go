package queue_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// TestRangesAreWhatIsStored acks in random order, with few and many ranges in memory: what is in memory must always be
// what is stored, also after a reopen, and the account must be right at every step.
func TestRangesAreWhatIsStored(t *testing.T) {
	for _, near := range []int{1, 2, 5, 64} {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("%d in memory, seed %d", near, seed), func(t *testing.T) {
				queue.LowerMaxNear(t, near)
				ackAtRandom(t, rand.New(rand.NewPCG(seed, 3)))
			})
		}
	}
}

func ackAtRandom(t *testing.T, r *rand.Rand) {
	const perLane, n = 40, 40 * 64
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	publishMany(t, m, n)
	// Two lanes are acked in random order, so that they have many holes; the rest in order.
	order := make([]queue.Address, 0, n)
	for _, lane := range []queue.Address{1, 30} {
		for _, i := range r.Perm(perLane) {
			order = append(order, lane+queue.Address(i)*64)
		}
	}
	for a := queue.Address(1); a <= n; a++ {
		if l := a % 64; l != 1 && l != 30 {
			order = append(order, a)
		}
	}
	acked := uint64(0)
	for i := 0; i < len(order); {
		step := min(1+r.IntN(3), len(order)-i)
		if i >= 2*perLane {
			step = min(1000, len(order)-i)
		}
		var ranges []queue.AddressRange
		for _, a := range order[i : i+step] {
			ranges = append(ranges, queue.AddressRange{First: a, Last: a})
		}
		i += step
		for range 2 {
			res := m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: ranges})
			require.Equal(t, code.OK, res.Code)
			for _, s := range res.Acks {
				require.True(t, s == queue.AckDone || s == queue.AckAlready)
				if s == queue.AckDone {
					acked++
				}
			}
		}
		info, _ := m.Group(g)
		require.EqualValues(t, i, acked)
		require.EqualValues(t, acked, info.Counters.Acked)
		require.NoError(t, m.Check())
		if r.IntN(10) == 0 {
			require.NoError(t, m.Reload())
			require.NoError(t, m.Check())
		}
	}
	info, _ := m.Group(g)
	require.Zero(t, info.Counters.Unfinished)
	m.RequireSame()
}

// publishMany publishes n small messages.
func publishMany(t testing.TB, m *queuetest.Machine, n int) {
	bodies := make([]string, 0, 512)
	for n > 0 {
		bodies = bodies[:0]
		for range min(n, 512) {
			bodies = append(bodies, "x")
		}
		n -= len(bodies)
		res := m.Do(publish(t0, bodies...))
		require.Equal(t, code.OK, res.Publishes[0].Code)
	}
}
