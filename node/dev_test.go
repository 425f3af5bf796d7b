package node

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// openDev opens a development fleet in a fresh directory, or in dir again.
func openDev(t *testing.T, dir string) *Dev {
	t.Helper()
	ports, err := FreePorts(2)
	require.NoError(t, err)
	d, err := OpenDev(DevConfig{Dir: dir, API: addr(ports[0]), Admin: addr(ports[1])}, zaptest.NewLogger(t, zaptest.Level(zapLevel)))
	require.NoError(t, err)
	// A test that fails on its way leaves no host behind whose directory is taken away: that would end the process, and hide why.
	t.Cleanup(func() { _ = d.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, n := range d.Nodes {
		require.NoError(t, n.AwaitReady(ctx))
	}
	return d
}

// devFleet is a fleet of two full hosts and a witness, which ends with the test, and a context of so long. It runs beside other tests, and not
// under -short.
func devFleet(t *testing.T, long time.Duration) (*Dev, context.Context) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	d := openDev(t, t.TempDir())
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), long)
	t.Cleanup(cancel)
	return d, ctx
}

// openDevWith is such a fleet with more in each host's configuration, in a directory.
func openDevWith(t *testing.T, dir string, more func(HostConfig, *Config)) *Dev {
	t.Helper()
	ports, err := FreePorts(1)
	require.NoError(t, err)
	hosts, err := devHosts(DevConfig{Dir: dir, API: addr(ports[0])})
	require.NoError(t, err)
	d := &Dev{}
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	for _, h := range hosts {
		cfg := Config{Host: h.ID, Data: filepath.Join(dir, "host-"+itoa(h.ID)), Hosts: hosts, Admin: "127.0.0.1:0"}
		more(h, &cfg)
		n, err := Open(cfg, Listeners{}, zaptest.NewLogger(t, zaptest.Level(zapLevel)))
		require.NoError(t, err)
		d.Nodes = append(d.Nodes, n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, n := range d.Nodes {
		require.NoError(t, n.AwaitReady(ctx))
	}
	return d
}

func addr(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// TestDevFleet moves a message through a fleet of two full hosts and a witness, stops it, and finds the rest again.
func TestDevFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	dir := t.TempDir()
	d := openDev(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	info, created, err := d.Nodes[0].CreateQueue(ctx, api.CreateQueue{Name: "orders"})
	require.NoError(t, err)
	require.True(t, created)
	require.Len(t, info.Partitions[0].Replicas, 3)
	publish := func(bodies ...string) api.PublishReply {
		t.Helper()
		p := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: 7}, Low: 1}
		for i, b := range bodies {
			p.Messages = append(p.Messages, queue.Message{Seq: queue.Seq(i + 1), Body: []byte(b)})
		}
		reply, err := publishAnywhere(ctx, d, api.Publish{Queue: "orders", Publish: p})
		require.NoError(t, err)
		return reply
	}
	first := publish("a", "b", "c")
	require.Equal(t, queue.Address(1), first.Result.Messages[0].Address)
	again := publish("a", "b", "c")
	require.True(t, again.Result.Messages[2].Duplicate, "the same seqs store nothing new")
	require.Equal(t, uint32(2), again.DataCopies, "both full replicas hold the bodies")

	lease := 2 * time.Second // it outlives the fleet: what is not acked comes again when it is over
	got, _, err := d.Nodes[0].Receive(ctx, api.Receive{Queue: "orders", Group: api.DefaultGroup, Max: 2, MaxBytes: 1 << 20, Wait: 5 * time.Second, Lease: &lease})
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, "a", string(got[0].Message.Body))
	_, _, err = d.Nodes[1].Receive(ctx, api.Receive{Queue: "orders", Group: api.DefaultGroup, Max: 1, MaxBytes: 1 << 20})
	require.Equal(t, code.NotOwner, err.(*code.Error).Code)
	require.Equal(t, d.Nodes[0].APIAddr().String(), err.(*code.Error).HomeAPI)
	res, err := d.Nodes[0].Settle(ctx, api.Settle{Kind: api.SettleAck, Queue: "orders", Group: api.DefaultGroup, Receipts: []string{got[0].Receipt, "garbage"}})
	require.NoError(t, err)
	require.NoError(t, res[0].Err)
	require.Equal(t, code.InvalidReceipt, res[1].Err.(*code.Error).Code)
	requireSound(ctx, t, d)
	one, err := d.Nodes[0].Digest(ctx, "orders", 0)
	require.NoError(t, err)
	require.NoError(t, d.Close())

	d = openDev(t, dir)
	defer func() { require.NoError(t, d.Close()) }()
	var rest []api.Delivery
	require.Eventually(t, func() bool {
		for _, n := range d.Nodes[:2] {
			ds, _, err := n.Receive(ctx, api.Receive{Queue: "orders", Group: api.DefaultGroup, Max: 10, MaxBytes: 1 << 20, Wait: time.Second})
			if err == nil {
				rest = append(rest, ds...)
			}
		}
		return len(rest) >= 2
	}, 40*time.Second, 50*time.Millisecond)
	require.Len(t, rest, 2, "the acked one is gone, the other two are there once")
	two, err := d.Nodes[1].Digest(ctx, "orders", 0)
	require.NoError(t, err)
	require.Equal(t, one.Shard, two.Shard)
	require.GreaterOrEqual(t, two.Applied, one.Applied)
}

// requireSound checks on live stats what `tierq doctor` checks.
func requireSound(ctx context.Context, t *testing.T, d *Dev) {
	t.Helper()
	for _, n := range d.Nodes[:2] {
		v, err := n.stats(ctx, "orders")
		require.NoError(t, err)
		p := v.(QueueStats).Partitions[0]
		require.True(t, p.Here)
		require.Positive(t, p.LogCommit)
		require.LessOrEqual(t, p.LogCommit, p.LogLast)
		require.LessOrEqual(t, p.LogSnapshot, p.LogLast)
		require.LessOrEqual(t, p.Applied, p.LogLast)
		for _, g := range p.Groups {
			c := g.Counters
			require.Equal(t, c.Assigned, c.Unfinished+c.Acked+c.Dead+c.Exported+c.Expired+c.Purged+c.Cancelled)
			if g.AtHome != nil {
				require.LessOrEqual(t, g.AtHome.Leased, int(g.MaxInFlight))
			}
		}
	}
}

// publishAnywhere tries the full hosts until one leads.
func publishAnywhere(ctx context.Context, d *Dev, p api.Publish) (api.PublishReply, error) {
	for {
		var err error
		for _, n := range d.Nodes[:2] {
			var reply api.PublishReply
			if reply, err = n.Publish(ctx, p); err == nil {
				return reply, nil
			}
		}
		select {
		case <-ctx.Done():
			return api.PublishReply{}, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// zapLevel is the least level that tests print.
const zapLevel = zapcore.InfoLevel
