package replica_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	sm "github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/replica"
	"github.com/tierq/tierq/queue/store"
)

// host is a NodeHost with one replica of shard 7 on a store in memory.
type host struct {
	nh        *dragonboat.NodeHost
	store     *store.Store
	address   string
	replica   *replica.Replica
	installed chan queue.Index
	stuck     chan error
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{address: freeport.For(t), installed: make(chan queue.Index, 8), stuck: make(chan error, 8)}
	var err error
	h.store, err = store.Open("store", store.Options{FS: vfs.NewMem(), MemTableBytes: 4 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, h.store.Close()) })
	c := config.NodeHostConfig{NodeHostDir: t.TempDir(), RTTMillisecond: 10, RaftAddress: h.address}
	c.Expert.LogDB = config.GetTinyMemLogDBConfig()
	h.nh, err = dragonboat.NewNodeHost(c)
	require.NoError(t, err)
	t.Cleanup(h.nh.Close)
	return h
}

func (h *host) start(t *testing.T, id uint64, members map[uint64]string, join bool) {
	t.Helper()
	opts := replica.Options{Store: h.store, Installer: plain{}, EvidenceDir: t.TempDir(),
		OnInstalled: func(_, _ uint64, index queue.Index) { h.installed <- index },
		OnStuck:     func(_, _ uint64, err error, _ string) { h.stuck <- err },
	}
	create := func(shard, id uint64) sm.IOnDiskStateMachine {
		h.replica = replica.New(shard, id, opts)
		return h.replica
	}
	c := config.Config{ShardID: 7, ReplicaID: id, ElectionRTT: 20, HeartbeatRTT: 2, CheckQuorum: true, PreVote: true, IsNonVoting: join}
	require.Eventually(t, func() bool { // a replica that was stopped may still be closing
		err := h.nh.StartOnDiskReplica(members, join, create, c)
		if !errors.Is(err, dragonboat.ErrShardAlreadyExist) {
			require.NoError(t, err)
		}
		return err == nil
	}, 90*time.Second, 5*time.Millisecond)
}

func (h *host) propose(t *testing.T, cmd []byte) sm.Result {
	t.Helper()
	var r sm.Result
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		var err error
		r, err = h.nh.SyncPropose(ctx, h.nh.GetNoOPSession(7), cmd)
		return err == nil
	}, 90*time.Second, 10*time.Millisecond)
	return r
}

// TestOnTheEngine runs the adapter below a real NodeHost: proposals, a snapshot streamed to a new replica whose log
// is gone at the leader, and a poison entry that stops the shard and not the host.
func TestOnTheEngine(t *testing.T) {
	if testing.Short() {
		t.Skip("starts two hosts")
	}
	a, b := newHost(t), newHost(t)
	a.start(t, 1, map[uint64]string{1: a.address}, false)
	for i := range 20 {
		cmd, err := queue.EncodeCommand(nil, publish(fmt.Sprint("message ", i)))
		require.NoError(t, err)
		require.EqualValues(t, code.OK, a.propose(t, cmd).Value)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	_, err := a.nh.SyncRequestSnapshot(ctx, 7, dragonboat.SnapshotOption{OverrideCompactionOverhead: true, CompactionOverhead: 1})
	require.NoError(t, err)
	require.NoError(t, a.nh.SyncRequestAddNonVoting(ctx, 7, 2, b.address, 0))
	b.start(t, 2, nil, true)
	require.GreaterOrEqual(t, <-b.installed, queue.Index(20))
	cmd, err := queue.EncodeCommand(nil, publish("after"))
	require.NoError(t, err)
	a.propose(t, cmd)
	require.Eventually(t, func() bool { return b.replica.Reader().Meta().Last == 21 }, 90*time.Second, 5*time.Millisecond)
	ia, da, err := a.replica.Reader().Digest()
	require.NoError(t, err)
	ib, db, err := b.replica.Reader().Digest()
	require.NoError(t, err)
	require.Equal(t, ia, ib)
	require.Equal(t, da, db)

	_, err = a.nh.Propose(a.nh.GetNoOPSession(7), []byte{1, 99}, time.Second)
	require.NoError(t, err)
	for _, h := range []*host{a, b} { // both, before the leader stops: it is who tells the other that the entry is committed
		var poison *queue.PoisonError
		require.ErrorAs(t, <-h.stuck, &poison)
	}
	for _, h := range []*host{a, b} {
		require.NoError(t, h.nh.StopShard(7))
		require.Equal(t, ia, h.replica.Reader().Meta().Applied)
	}
}

// TestNoSnapshotOfAPoisonedReplica: dragonboat asks for a local snapshot while a replica is on a poison entry. It records
// none, the host goes on, and the shard starts again.
func TestNoSnapshotOfAPoisonedReplica(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a host")
	}
	a := newHost(t)
	a.start(t, 1, map[uint64]string{1: a.address}, false)
	for i := range 5 {
		cmd, err := queue.EncodeCommand(nil, publish(fmt.Sprint("message ", i)))
		require.NoError(t, err)
		require.EqualValues(t, code.OK, a.propose(t, cmd).Value)
	}
	a.replica.SetStuck(true)
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	_, err := a.nh.SyncRequestSnapshot(ctx, 7, dragonboat.SnapshotOption{})
	require.ErrorIs(t, err, dragonboat.ErrRejected)
	a.replica.SetStuck(false)
	cmd, err := queue.EncodeCommand(nil, publish("one more"))
	require.NoError(t, err)
	require.EqualValues(t, code.OK, a.propose(t, cmd).Value)
	var at uint64
	require.Eventually(t, func() bool { // dragonboat rejects a second request until it has done with the first
		at, err = a.nh.SyncRequestSnapshot(ctx, 7, dragonboat.SnapshotOption{})
		return !errors.Is(err, dragonboat.ErrRejected)
	}, 90*time.Second, 5*time.Millisecond)
	require.NoError(t, err)
	require.NotZero(t, at)

	_, err = a.nh.Propose(a.nh.GetNoOPSession(7), []byte{1, 99}, time.Second)
	require.NoError(t, err)
	require.Error(t, <-a.stuck)
	_, err = a.nh.RequestSnapshot(7, dragonboat.SnapshotOption{}, time.Second)
	require.NoError(t, err)
	require.NoError(t, a.nh.StopShard(7))
	a.start(t, 1, nil, false)
	var poison *queue.PoisonError
	require.ErrorAs(t, <-a.stuck, &poison, "the same entry, and no panic")
	require.NoError(t, a.nh.StopShard(7))
}
