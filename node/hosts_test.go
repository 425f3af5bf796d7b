package node

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/node/api"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func TestPlanLeaders(t *testing.T) {
	all := func(hosts ...uint64) func(uint64) []uint64 { return func(uint64) []uint64 { return hosts } }
	require.Empty(t, planLeaders(nil, nil, all(1, 2)))
	require.Empty(t, planLeaders(map[uint64]uint64{2: 1}, []uint64{2}, all(1, 2)), "one more is even")
	require.Equal(t, []leaderMove{{2, 1, 2}}, planLeaders(map[uint64]uint64{2: 1, 3: 1}, []uint64{2, 3}, all(1, 2)))
	require.Equal(t, []leaderMove{{3, 1, 2}}, planLeaders(map[uint64]uint64{2: 1, 3: 1}, []uint64{3}, all(1, 2)), "what is not movable stays")
	require.Empty(t, planLeaders(map[uint64]uint64{2: 1, 3: 1}, []uint64{2, 3}, all(1)))
	leads := map[uint64]uint64{}
	var shards []uint64
	for shard := uint64(2); shard < 11; shard++ {
		leads[shard] = 1
		shards = append(shards, shard)
	}
	count := map[uint64]int{1: 9}
	for _, m := range planLeaders(leads, shards, all(1, 2, 3)) {
		require.Equal(t, leads[m.shard], m.from)
		count[m.from]--
		count[m.to]++
	}
	require.Equal(t, map[uint64]int{1: 3, 2: 3, 3: 3}, count)
}

// TestHostDrainsUnderLoad: while clients publish and consume, a host joins a fleet of two full hosts and a witness, and the host with the leader
// and the home is drained, removed and stopped. Every acknowledged message arrives, once.
func TestHostDrainsUnderLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	dir := t.TempDir()
	d := openDev(t, dir)
	f := &partitionFleet{T: t, d: d}
	defer func() { require.NoError(t, d.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	f.ctx = ctx
	f.c = f.client(client.Options{})
	q := f.queue("q", 1, nil)
	require.Eventually(t, func() bool {
		_, host, _, ok := d.Nodes[0].raft.Leader(q.Partitions[0].Shard)
		return ok && host != 0
	}, 30*time.Second, 10*time.Millisecond)
	_, leaving, _, _ := d.Nodes[0].raft.Leader(q.Partitions[0].Shard)
	_, err := f.c.CreateGroup(ctx, &tierqv1.CreateGroupRequest{Queue: "q", Name: "g", HomeHost: leaving})
	require.NoError(t, err)

	four := joinDev(t, ctx, d, dir, 4)
	defer func() { require.NoError(t, four.Close()) }()

	seen, acked := map[string]int{}, 0
	var mu sync.Mutex
	consuming, stopConsuming := context.WithCancel(ctx)
	consumer := f.client(client.Options{})
	var work, publisher sync.WaitGroup
	work.Go(func() {
		_ = consumer.Consume(consuming, "q", "g", func(_ context.Context, m *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			seen[string(m.Body)]++
			return nil
		}, client.ConsumeOptions{})
	})
	publishing, stopPublishing := context.WithCancel(ctx)
	publisher.Go(func() {
		for publishing.Err() == nil {
			if _, err := f.c.Publish(ctx, "q", client.Message{Body: fmt.Append(nil, acked)}); err == nil {
				acked++
			}
		}
	})

	require.NoError(t, f.c.DrainHost(ctx, leaving, false))
	require.Eventually(t, func() bool {
		l, err := f.c.ListHosts(ctx)
		require.NoError(t, err)
		for _, h := range l.Hosts {
			if h.Id == leaving {
				return h.State == "draining" && h.Replicas == 0 && h.Leaders == 0
			}
		}
		return false
	}, 30*time.Second, 50*time.Millisecond)
	removed, err := f.c.RemoveHost(ctx, leaving, false)
	require.NoError(t, err)
	require.True(t, removed)
	gone := d.Nodes[leaving-1]
	require.NoError(t, gone.Close())
	stopPublishing()
	publisher.Wait()
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) >= acked
	}, 90*time.Second, 20*time.Millisecond, "everything arrives")
	stopConsuming()
	work.Wait()
	require.Greater(t, acked, 10)
	for body, n := range seen {
		require.Equal(t, 1, n, "message %s", body)
	}
	t.Logf("%d messages", acked)
	g, err := f.c.ListGroups(ctx, "q")
	require.NoError(t, err)
	for _, g := range g {
		require.NotEqual(t, leaving, g.HomeHost)
	}
	plan, err := f.c.Rebalance(ctx, true)
	require.NoError(t, err)
	require.Empty(t, plan.Moves)
}

// joinDev lets a full host join a development fleet.
func joinDev(t *testing.T, ctx context.Context, d *Dev, dir string, id uint64) *Node {
	t.Helper()
	ports, err := FreePorts(3)
	require.NoError(t, err)
	cfg := d.Nodes[0].cfg
	cfg.Host, cfg.Admin, cfg.Data = id, "off", filepath.Join(dir, "host-"+itoa(id))
	cfg.Hosts = append(append([]HostConfig(nil), cfg.Hosts...), HostConfig{
		ID: id, Role: RoleFull, Raft: addr(ports[0]), Peer: addr(ports[1]), API: addr(ports[2]), Domain: "joined-" + itoa(id),
	})
	log := zaptest.NewLogger(t, zaptest.Level(zapLevel))
	token, _, err := d.Nodes[0].CreateJoinToken(ctx, time.Minute)
	require.NoError(t, err)
	require.Error(t, Join(ctx, cfg, token[:len(token)-2]+"00", log))
	require.NoError(t, Join(ctx, cfg, token, log))
	n, err := Open(cfg, Listeners{}, log)
	require.NoError(t, err)
	require.NoError(t, n.AwaitReady(ctx))
	return n
}

var _ api.Hosts = (*Node)(nil)
