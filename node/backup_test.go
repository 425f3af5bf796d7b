package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/node/backup"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// contents is what consumers and administrators can see of a partition.
type contents struct {
	Messages []queue.StoredMessage
	Groups   []queue.GroupInfo
	Delivers [][]queue.Deliverable
	Dead     [][]queue.DeadLetter
}

// contentsOf reads a queue's only partition at a host that has a replica of it.
func contentsOf(ctx context.Context, t *testing.T, n *Node, name string) (c contents) {
	t.Helper()
	_, d, err := n.deskOf(ctx, name, nil)
	require.NoError(t, err)
	require.NoError(t, d.raft.ReadIndex(ctx))
	m := d.reader.(*queue.QueueStateMachine)
	require.NoError(t, m.Check())
	for a := queue.Address(1); a <= min(m.Meta().Last, 10_000); a++ {
		msg, ok, err := m.Message(a)
		require.NoError(t, err)
		if ok {
			sum := sha256.Sum256(msg.Body)
			msg.Body = sum[:]
			c.Messages = append(c.Messages, msg)
		}
	}
	for _, g := range m.Groups() {
		list, _, err := m.Deliverables(g.ID, 0, 10_000, false)
		require.NoError(t, err)
		for i := range list {
			list[i].Lease, list[i].HasLease = queue.RecordedLease{}, false
		}
		dead, _, err := m.DeadLetters(g.ID, 0, 10_000, true)
		require.NoError(t, err)
		c.Delivers, c.Dead = append(c.Delivers, list), append(c.Dead, dead)
		g.Home, g.HomeIndex, g.Released, g.Epoch, g.Floor, g.WatermarkBytes, g.Counters.Leased = 0, 0, false, 0, 0, 0, 0
		c.Groups = append(c.Groups, g)
	}
	return c
}

// faulty is a fleet whose connection breaks after so many chunks.
type faulty struct {
	*client.Client
	left int
}

var errBroken = errors.New("the connection broke")

func (f *faulty) ImportChunk(ctx context.Context, r *tierqv1.ImportChunkRequest) (*tierqv1.ImportChunkResponse, error) {
	if f.left--; f.left < 0 {
		return nil, errBroken
	}
	return f.Client.ImportChunk(ctx, r)
}

func newClient(t *testing.T, d *Dev, o client.Options) *client.Client {
	t.Helper()
	for _, n := range d.Nodes {
		if a := n.APIAddr(); a != nil {
			o.Addrs = append(o.Addrs, a.String())
		}
	}
	c, err := client.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// fill gives a queue messages, a group with attempts and a dead letter, acked and delayed messages.
func fill(ctx context.Context, t *testing.T, d *Dev, c *client.Client, name string) (receipt string) {
	t.Helper()
	_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: name})
	require.NoError(t, err)
	publish := func(seq int, size int, delay time.Duration) {
		_, err := publishAnywhere(ctx, d, api.Publish{Queue: name, Delays: []time.Duration{delay}, Publish: queue.Publish{
			Producer: queue.Producer{Kind: queue.ProducerClient, ID: 7}, Low: 1,
			Messages: []queue.Message{{Seq: queue.Seq(seq), Body: bytes.Repeat([]byte{byte(seq)}, size), Headers: []queue.Header{{Name: "h", Value: []byte{1}}}}},
		}})
		require.NoError(t, err)
	}
	// No lease is recorded while the test looks: a restore would turn it into a retry.
	_, err = c.CreateGroup(ctx, &tierqv1.CreateGroupRequest{Queue: name, Name: "g", Config: &tierqv1.GroupConfig{LeaseMs: 600_000, RecordAfterMs: 600_000}})
	require.NoError(t, err)
	for i := range 30 {
		publish(i+1, 100_000, 0)
	}
	publish(31, 10, time.Hour)
	got, err := c.Receive(ctx, name, "g", client.ReceiveOptions{Max: 4, Wait: 5 * time.Second})
	require.NoError(t, err)
	require.Len(t, got, 4)
	settled := func(s []client.Settled, err error) {
		require.NoError(t, err)
		require.Nil(t, s[0].Err)
	}
	settled(c.Ack(ctx, name, "g", got[0].Receipt))
	settled(c.Nack(ctx, name, "g", time.Hour, "no stock", got[1].Receipt))
	settled(c.Reject(ctx, name, "g", "broken", got[2].Receipt))
	return got[3].Receipt
}

// TestBackup saves a queue, publishes more, restores it under another name with a break in between, and finds what was saved.
func TestBackup(t *testing.T) {
	d, ctx := devFleet(t, time.Minute)
	c := newClient(t, d, client.Options{})
	receipt := fill(ctx, t, d, c, "orders")
	var want contents
	require.Eventually(t, func() bool { // the acked message goes
		want = contentsOf(ctx, t, d.Nodes[0], "orders")
		return len(want.Messages) == 30
	}, 30*time.Second, 50*time.Millisecond)
	require.Len(t, want.Dead[0], 1)

	dir := filepath.Join(t.TempDir(), "backup")
	m, err := backup.Save(ctx, c, []string{"orders"}, dir, nil)
	require.NoError(t, err)
	_, err = backup.Save(ctx, c, []string{"orders"}, dir, nil)
	require.ErrorContains(t, err, "holds a backup already")
	again, err := backup.Verify(dir, nil)
	require.NoError(t, err)
	require.Equal(t, m.ID, again.ID)
	examined, err := backup.Examine(ctx, c, "orders", nil)
	require.NoError(t, err)
	require.Len(t, examined, 2)
	for _, e := range examined {
		require.NoError(t, e.Err)
		require.Equal(t, m.Queues[0].Partitions[0].Root, e.Found.Root, e.API)
	}
	after := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: 7}, Low: 1, Messages: []queue.Message{{Seq: 32, Body: []byte("later")}}}
	_, err = publishAnywhere(ctx, d, api.Publish{Queue: "orders", Publish: after})
	require.NoError(t, err)

	_, err = backup.Restore(ctx, c, dir, backup.RestoreOptions{})
	requireCode(t, code.QueueExistsMismatch, err)
	_, err = backup.Restore(ctx, &faulty{c, 2}, dir, backup.RestoreOptions{As: "orders-2"})
	require.ErrorIs(t, err, errBroken)
	_, err = c.LocateQueue(ctx, "orders-2")
	requireCode(t, code.UnknownQueue, err)
	done, err := backup.Restore(ctx, c, dir, backup.RestoreOptions{As: "orders-2"})
	require.NoError(t, err)
	require.Len(t, done, 1)
	require.Equal(t, want, contentsOf(ctx, t, d.Nodes[0], "orders-2"))
	require.Equal(t, want, contentsOf(ctx, t, d.Nodes[1], "orders-2"), "both replicas")
	done, err = backup.Restore(ctx, c, dir, backup.RestoreOptions{As: "orders-2"})
	require.NoError(t, err)
	require.True(t, done[0].Before, "a repeated restore finds that it is done")

	after.Messages[0].Seq = 33
	requireCode(t, code.ProducerEpochStale, publishToLeader(ctx, d, api.Publish{Queue: "orders-2", Publish: after}))
	after.ProducerEpoch++
	require.NoError(t, publishToLeader(ctx, d, api.Publish{Queue: "orders-2", Publish: after}))
	got, err := c.Receive(ctx, "orders-2", "g", client.ReceiveOptions{Max: 100, Wait: 5 * time.Second})
	require.NoError(t, err)
	require.EqualValues(t, want.Delivers[0][1].Address, got[0].Address, "the nacked one waits, the leased one does not")
	acked, err := c.Ack(ctx, "orders-2", "g", got[0].Receipt)
	require.NoError(t, err)
	require.Nil(t, acked[0].Err)
	_, err = c.Ack(ctx, "orders-2", "g", receipt)
	requireCode(t, code.InvalidReceipt, err)

	before, err := c.SnapshotQueue(ctx, "orders")
	require.NoError(t, err)
	for range 2 { // the second time it is done
		done, err = backup.Restore(ctx, c, dir, backup.RestoreOptions{Replace: before.QueueId})
		require.NoError(t, err)
	}
	require.True(t, done[0].Before)
	now, err := c.SnapshotQueue(ctx, "orders")
	require.NoError(t, err)
	require.NotEqual(t, before.Partitions[0].Shard, now.Partitions[0].Shard)
	require.Equal(t, want, contentsOf(ctx, t, d.Nodes[0], "orders"), "what was published after the save is gone")
}

// publishToLeader tries the full hosts until one that leads has an answer.
func publishToLeader(ctx context.Context, d *Dev, p api.Publish) error {
	for {
		for _, n := range d.Nodes[:2] {
			_, err := n.Publish(ctx, p)
			var e *api.ElsewhereError
			if !errors.As(err, &e) && !isCode(err, code.NoLeader) || ctx.Err() != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func requireCode(t *testing.T, want code.Code, err error) {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, want, e.Code, "%v", err)
}

// copyDir copies a data directory as a crash would leave it: what a store has in memory is not there.
func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(to, os.DirFS(from)))
	return to
}

// TestForcedRecovery: the host with the newest copy of everything, the catalog's too, is gone for good. What the other full host has is
// taken to a new fleet, within what was told to be lost.
func TestForcedRecovery(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	dir := t.TempDir()
	d := openDev(t, dir)
	c := newClient(t, d, client.Options{})
	receipt := fill(ctx, t, d, c, "orders")
	producer := queue.Producer{Kind: queue.ProducerClient, ID: 9}
	publish := func(seq queue.Seq) api.PublishReply {
		reply, err := publishAnywhere(ctx, d, api.Publish{Queue: "orders", Publish: queue.Publish{Producer: producer, Low: 1, Messages: []queue.Message{{Seq: seq, Body: []byte("x")}}}})
		require.NoError(t, err)
		return reply
	}
	kept := publish(1).Result.Messages[0].Address
	require.Eventually(t, func() bool { // the other host has it
		_, dk, err := d.Nodes[1].deskOf(ctx, "orders", nil)
		return err == nil && dk.reader.Meta().Last >= kept
	}, 30*time.Second, 20*time.Millisecond)
	require.Eventually(t, func() bool { // and knows of the queue also when it is stopped
		b, err := os.ReadFile(filepath.Join(dir, "host-2", "catalog.copy"))
		if err != nil {
			return false
		}
		v, err := catalog.DecodeView(b)
		return err == nil && len(v.Queues("")) == 1
	}, 30*time.Second, 50*time.Millisecond)
	survivor := copyDir(t, filepath.Join(dir, "host-2")) // killed: nothing was flushed
	require.NoError(t, c.Close(ctx))                     // a host waits for open streams when it stops
	require.NoError(t, d.Nodes[1].stop())
	const lost = 5
	for i := range lost {
		publish(queue.Seq(2 + i))
	}
	require.NoError(t, d.Close())
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "host-1")))
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "host-2")))

	_, err := backup.OpenPlan(filepath.Join(dir, "host-3"), nil, "", nil)
	require.ErrorContains(t, err, "witness")
	p, err := backup.OpenPlan(survivor, []string{filepath.Join(dir, "host-3")}, "", nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	_, err = backup.OpenPlan(survivor, nil, "", nil)
	require.ErrorContains(t, err, "in use")
	require.Len(t, p.Shards, 1)
	s := &p.Shards[0]
	told, known := s.MayBeLost()
	require.True(t, known)
	require.GreaterOrEqual(t, told, uint64(lost))
	require.Greater(t, s.Last, uint64(s.Applied), "the store is behind its log")
	require.Equal(t, s.Last, p.Number())
	out := filepath.Join(t.TempDir(), "recovered")
	_, err = p.Save(out, nil)
	require.NoError(t, err)
	m, err := backup.Verify(out, nil)
	require.NoError(t, err)
	require.Equal(t, s.Last, m.Queues[0].Partitions[0].Salvaged.LastIndex)

	fresh := openDev(t, t.TempDir())
	defer func() { require.NoError(t, fresh.Close()) }()
	nc := newClient(t, fresh, client.Options{})
	_, err = backup.Restore(ctx, nc, out, backup.RestoreOptions{})
	require.NoError(t, err)
	got := contentsOf(ctx, t, fresh.Nodes[0], "orders")
	last := got.Messages[len(got.Messages)-1]
	require.Equal(t, kept, last.Address, "all that the survivor had, and no more")
	require.Len(t, got.Dead[0], 1)
	_, err = nc.Ack(ctx, "orders", "g", receipt)
	requireCode(t, code.InvalidReceipt, err)
	next := queue.Publish{Producer: producer, Low: 7, Messages: []queue.Message{{Seq: 7, Body: []byte("y")}}}
	requireCode(t, code.ProducerEpochStale, publishToLeader(ctx, fresh, api.Publish{Queue: "orders", Publish: next}))
	next.ProducerEpoch++
	require.NoError(t, publishToLeader(ctx, fresh, api.Publish{Queue: "orders", Publish: next}))
	list, err := nc.Receive(ctx, "orders", "g", client.ReceiveOptions{Max: 100, MaxBytes: 16 << 20, Wait: 5 * time.Second})
	require.NoError(t, err)
	require.Greater(t, list[len(list)-1].Address, uint64(kept)+lost, "no address is given out twice")
}

// TestForcedRecoveryInPlace: the catalog still has its quorum, and a queue has lost the host with its newest copy. What the other full host
// has takes the queue's place, on hosts that are left.
func TestForcedRecoveryInPlace(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	f := openHosts(ctx, t, RoleFull, RoleFull, RoleFull, RoleWitness)
	publish := func(body string) uint64 { // by a client of its own: a host waits for open streams when it stops
		c := newClient(t, &Dev{Nodes: f.running()}, client.Options{})
		reply, err := c.Publish(ctx, "orders", client.Message{Body: []byte(body)})
		require.NoError(t, err)
		require.NoError(t, c.Close(ctx))
		return reply[0].Address
	}
	c := newClient(t, &Dev{Nodes: f.running()}, client.Options{})
	_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "orders", Replicas: 2, Witnesses: 1})
	require.NoError(t, err)
	kept := publish("kept")
	q, err := c.LocateQueue(ctx, "orders")
	require.NoError(t, err)
	var full []uint64
	for _, r := range q.Partitions[0].Replicas {
		if r.Role == "full" {
			full = append(full, r.Host)
		}
	}
	require.Len(t, full, 2)
	survivor, gone := full[0], full[1]
	f.stop(survivor)
	publish("lost")
	f.stop(gone)
	require.NoError(t, os.RemoveAll(f.configs[gone-1].Data))

	p, err := backup.OpenPlan(f.configs[survivor-1].Data, nil, "", []string{"orders"})
	require.NoError(t, err)
	out := filepath.Join(t.TempDir(), "recovered")
	_, err = p.Save(out, nil)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	f.start(survivor)
	require.NoError(t, f.nodes[survivor].AwaitReady(ctx))
	_, err = f.nodes[survivor].RemoveHost(ctx, gone, true)
	require.NoError(t, err)
	before, err := c.SnapshotQueue(ctx, "orders")
	require.NoError(t, err)
	_, err = backup.Restore(ctx, c, out, backup.RestoreOptions{Replace: before.QueueId})
	require.NoError(t, err)
	require.Greater(t, publish("after"), kept+1<<20)
	got, err := c.Receive(ctx, "orders", "", client.ReceiveOptions{Max: 10, Wait: 10 * time.Second})
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, "kept", string(got[0].Body))
	require.Equal(t, "after", string(got[1].Body))
}

// hosts is a fleet whose hosts stop and start one by one.
type hosts struct {
	t       *testing.T
	configs []Config
	nodes   map[uint64]*Node
}

func openHosts(ctx context.Context, t *testing.T, roles ...Role) *hosts {
	t.Helper()
	f := &hosts{t: t, nodes: map[uint64]*Node{}}
	ports, err := FreePorts(3 * len(roles))
	require.NoError(t, err)
	var list []HostConfig
	for i, role := range roles {
		h := HostConfig{ID: uint64(i + 1), Role: role, Raft: addr(ports[3*i]), Peer: addr(ports[3*i+1]), Domain: string(rune('a' + i))}
		if role == RoleFull {
			h.API = addr(ports[3*i+2])
		}
		list = append(list, h)
	}
	dir := t.TempDir()
	for _, h := range list {
		f.configs = append(f.configs, Config{Host: h.ID, Data: filepath.Join(dir, itoa(h.ID)), Hosts: list, Admin: "off"})
		f.start(h.ID)
	}
	t.Cleanup(func() { _ = (&Dev{Nodes: f.running()}).Close() })
	for _, n := range f.running() {
		require.NoError(t, n.AwaitReady(ctx))
	}
	return f
}

func (f *hosts) running() (list []*Node) {
	for _, c := range f.configs {
		if n := f.nodes[c.Host]; n != nil {
			list = append(list, n)
		}
	}
	return list
}

func (f *hosts) start(id uint64) {
	f.t.Helper()
	n, err := Open(f.configs[id-1], Listeners{}, zaptest.NewLogger(f.t, zaptest.Level(zapLevel)))
	require.NoError(f.t, err)
	f.nodes[id] = n
}

func (f *hosts) stop(id uint64) {
	f.t.Helper()
	require.NoError(f.t, f.nodes[id].stop())
	delete(f.nodes, id)
}
