package peer

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/certs/certstest"
	"github.com/tierq/tierq/queue/code"
)

// TestLostConnections: the end of a host's connections is noticed, with and without TLS, and not taken for the host's end.
func TestLostConnections(t *testing.T) {
	for _, mode := range []string{"plain", "tls"} {
		t.Run(mode, func(t *testing.T) {
			ca := certstest.NewCA(t, "a")
			a, b := newPairWith(t, func(c *Config) {
				c.Silence = 10 * time.Second // far beyond what the test waits for
				if mode == "tls" {
					cert, key, roots := ca.Files(t.TempDir(), time.Hour, "127.0.0.1")
					store, err := certs.Open(certs.Options{Files: certs.Files{Cert: cert, Key: key, CA: roots}, Mutual: true})
					require.NoError(t, err)
					c.TLS = store
				}
			})
			a.Start()
			b.Start()
			alive := func(of *testHost, id uint64) bool { ok, _ := of.Alive(id); return ok }
			eventually(t, "both report", func() bool { return alive(a, 2) && alive(b, 1) && a.Answers(2) })
			require.False(t, a.Lost(2))
			require.False(t, a.Ended(2), "it is there")

			// The connections break, and the host reports by new ones.
			require.Zero(t, a.lost.Load())
			b.transport.CloseIdleConnections()
			eventually(t, "a connection has ended, or all have been busy", func() bool {
				b.transport.CloseIdleConnections()
				return a.lost.Load() == 2
			})
			eventually(t, "it is heard of again", func() bool {
				a.Peers.mu.Lock()
				defer a.Peers.mu.Unlock()
				return a.conns[2] > 0 && !a.Peers.others[2].lost()
			})
			require.True(t, alive(a, 2))

			a.lost.Store(0)
			require.NoError(t, b.Close())
			eventually(t, "the end of the connections is noticed", func() bool { return a.lost.Load() == 2 && a.Lost(2) })
			require.False(t, a.AskLost(context.Background(), 2, 1), "nobody answers")
			require.True(t, a.Ended(2))
			require.False(t, alive(a, 2), "at once")
			require.False(t, a.Answers(2))
			require.Empty(t, a.ClockOffsets())
			a.Peers.mu.Lock()
			require.Empty(t, a.conns)
			a.Peers.mu.Unlock()
		})
	}
}

// TestLostIsAnswered: a host answers what it has lost.
func TestLostIsAnswered(t *testing.T) {
	a, b := newPair(t)
	b.Start()
	ctx := context.Background()
	require.False(t, a.AskLost(ctx, 2, 7), "of whom it never heard")
	now := time.Now()
	b.Peers.mu.Lock()
	b.Peers.others[7] = &other{heard: now, sure: now, broke: now.Add(time.Millisecond)}
	b.Peers.mu.Unlock()
	require.True(t, a.AskLost(ctx, 2, 7))
	b.Peers.mu.Lock()
	b.Peers.conns[7] = 1
	b.Peers.mu.Unlock()
	require.False(t, a.AskLost(ctx, 2, 7), "another connection")
}

// TestLostIsSilentSoon: a host that is lost and has not been seen to end is silent before its silence would make it so.
func TestLostIsSilentSoon(t *testing.T) {
	now := time.Now()
	o := &other{heard: now, sure: now, broke: now.Add(time.Nanosecond)}
	require.True(t, o.alive(time.Hour), "it may come back")
	o.ended = true
	require.False(t, o.alive(time.Hour), "it has ended")
	o.ended = false
	o.heard, o.sure, o.broke = now.Add(-2*breakGrace), now.Add(-2*breakGrace), now.Add(-breakGrace)
	require.False(t, o.alive(time.Hour))
	o.heard, o.sure = now, now
	require.True(t, o.alive(time.Hour), "heard of again")
}

// TestUnheard: that a host does not answer a report in time is no unknown outcome of anything.
func TestUnheard(t *testing.T) {
	require.Equal(t, code.Unavailable, codeOf(t, unheard(context.DeadlineExceeded)).Code)
	require.Equal(t, code.QuorumLost, codeOf(t, FromConnect(context.DeadlineExceeded)).Code, "of a proposal it is one")
	own := code.New(code.WrongFleet, "x")
	require.Equal(t, own, unheard(own))
}
