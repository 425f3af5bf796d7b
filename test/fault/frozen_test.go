package fault

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// TestFaultFrozenHome stops the home's process without ending it (SIGSTOP) until another host is home, and lets it go on:
// it must deliver nothing and take no ack under its old epoch, however soon it is asked (G4, G5).
func TestFaultFrozenHome(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "frozen-home", nil)
	old := f.other(f.leaderHost("frozen-home"))
	next := f.other(old)
	// No lease is recorded by itself: what the old home hands out ends with it.
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "frozen-home", Name: "g", HomeHost: old.id, Config: &tierqv1.GroupConfig{RecordAfterMs: 3600_000}})
	const messages = 40
	for range messages {
		_, err := c.Publish(context.Background(), "frozen-home", client.Message{Body: []byte("x")})
		require.NoError(t, err)
	}
	var held []*tierqv1.Message
	for range 5 {
		m, err := old.receive("frozen-home", "g", time.Hour)
		require.NoError(t, err)
		held = append(held, m)
	}

	old.pause()
	eventually(t, readyWithin, "another host is home", func() error {
		g, err := f.group("frozen-home", "g")
		if err == nil && g.HomeHost != next.id {
			err = errNotYet
		}
		return err
	})
	taken := make(map[uint64]string)
	for len(taken) < messages {
		var m *tierqv1.Message
		eventually(t, readyWithin, "the new home delivers", func() (err error) {
			m, err = next.receive("frozen-home", "g", time.Hour)
			return err
		})
		require.NotContains(t, taken, m.Address, "no message comes twice from the new home")
		taken[m.Address] = m.Receipt
	}
	// Most are acked, some stay leased: the old home's memory still calls all but five of them ready.
	for a, receipt := range taken {
		if a%4 != 0 {
			res, err := next.settle("ack", "frozen-home", "g", receipt)
			require.NoError(t, err)
			require.Zero(t, res.Code, res.Text)
		}
	}

	old.resume()
	for range 50 { // the first ones arrive before it knows what has happened
		m, err := old.receive("frozen-home", "g", time.Hour)
		require.Error(t, err, "%v", m)
		if c := codeOf(err); c == code.NotOwner {
			break
		}
	}
	for _, m := range held {
		for _, h := range []*host{old, next} {
			res, err := h.settle("ack", "frozen-home", "g", m.Receipt)
			switch {
			case err != nil:
				require.Equal(t, code.NotOwner, codeOf(err), "%v", err)
			default:
				require.Contains(t, []code.Code{code.StaleOwner, code.NotOwner}, code.Code(res.Code), res.Text)
			}
		}
	}
	for a, receipt := range taken {
		if a%4 == 0 {
			res, err := next.settle("ack", "frozen-home", "g", receipt)
			require.NoError(t, err)
			require.Zero(t, res.Code, res.Text)
		}
	}
	g := f.awaitFinished("frozen-home", "g", readyWithin)
	require.EqualValues(t, messages, g.Counters.Acked)
	f.awaitConverged("frozen-home")
	f.noteGroups(t, "frozen-home", totals{sent: messages, acknowledged: messages, deliveries: len(held) + messages, duplicates: len(held)}, "g")
}
