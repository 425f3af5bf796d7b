package wal

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/client"
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/logger"
	sm "github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
)

func init() {
	for _, p := range []string{"dragonboat", "raft", "rsm", "transport", "grpc", "logdb", "tan", "config", "settings", "raftpb", "registry", "server", "utils", "tests", "order", "nodehost"} {
		logger.GetLogger(p).SetLevel(logger.CRITICAL)
	}
}

// countSM counts its updates. It is an in-memory state machine, so a restart replays the log or takes a
// snapshot file, and the count shows whether anything was lost.
type countSM struct{ n uint64 }

func newCountSM(uint64, uint64) sm.IStateMachine { return &countSM{} }

func (c *countSM) Update(sm.Entry) (sm.Result, error) {
	c.n++
	return sm.Result{Value: c.n}, nil
}
func (c *countSM) Lookup(interface{}) (interface{}, error) { return c.n, nil }
func (c *countSM) SaveSnapshot(w io.Writer, _ sm.ISnapshotFileCollection, _ <-chan struct{}) error {
	return binary.Write(w, binary.LittleEndian, c.n)
}
func (c *countSM) RecoverFromSnapshot(r io.Reader, _ []sm.SnapshotFile, _ <-chan struct{}) error {
	return binary.Read(r, binary.LittleEndian, &c.n)
}
func (c *countSM) Close() error { return nil }

// cluster is a few NodeHosts in this process, each with a log of its own.
type cluster struct {
	t      testing.TB
	dir    string
	opts   func(i int) Options
	addrs  []string
	hosts  []*dragonboat.NodeHost
	create sm.CreateStateMachineFunc
}

func newCluster(t testing.TB, dir string, n int, opts func(i int) Options) *cluster {
	c := &cluster{t: t, dir: dir, opts: opts, hosts: make([]*dragonboat.NodeHost, n), create: newCountSM}
	for i := 0; i < n; i++ {
		c.addrs = append(c.addrs, freeport.For(t))
	}
	return c
}

func (c *cluster) start(i int) {
	nhc := config.NodeHostConfig{
		NodeHostDir:    filepath.Join(c.dir, fmt.Sprint("nh", i)),
		RTTMillisecond: 20,
		RaftAddress:    c.addrs[i],
	}
	o := c.opts(i)
	if o.Dir == "" {
		o.Dir = filepath.Join(c.dir, fmt.Sprint("wal", i))
	}
	require.NoError(c.t, Configure(&nhc, o))
	nhc.Expert.Engine.ApplyShards, nhc.Expert.Engine.SnapshotShards = 4, 8
	nh, err := dragonboat.NewNodeHost(nhc)
	require.NoError(c.t, err)
	require.NotNil(c.t, nh)
	c.hosts[i] = nh
}

func (c *cluster) stop(i int) {
	c.hosts[i].Close()
	c.hosts[i] = nil
}

func (c *cluster) config(shard uint64, i int) config.Config {
	return config.Config{ShardID: shard, ReplicaID: uint64(i + 1), ElectionRTT: 10, HeartbeatRTT: 1,
		CheckQuorum: true, PreVote: true, OrderedConfigChange: true, SnapshotEntries: 500, CompactionOverhead: 50,
		MaxInMemLogSize: 64 << 20}
}

// startShard starts the shard's replica on host i as one of the initial members 1..n.
func (c *cluster) startShard(shard uint64, i, n int) {
	members := map[uint64]dragonboat.Target{}
	for j := 0; j < n; j++ {
		members[uint64(j+1)] = c.addrs[j]
	}
	require.NoError(c.t, c.hosts[i].StartReplica(members, false, c.create, c.config(shard, i)))
}

func (c *cluster) waitLeader(shard uint64, hosts ...int) uint64 {
	var leader uint64
	require.Eventually(c.t, func() bool {
		for _, i := range hosts {
			id, _, ok, err := c.hosts[i].GetLeaderID(shard)
			if err != nil || !ok || c.hosts[id-1] == nil {
				return false
			}
			leader = id
		}
		return true
	}, 120*time.Second, 5*time.Millisecond)
	return leader
}

// propose proposes until one is accepted, and returns the count that it made.
func (c *cluster) propose(shard uint64, i int) uint64 {
	var res sm.Result
	require.Eventually(c.t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		var err error
		res, err = c.hosts[i].SyncPropose(ctx, c.hosts[i].GetNoOPSession(shard), make([]byte, 100))
		return err == nil
	}, 120*time.Second, 5*time.Millisecond)
	return res.Value
}

func (c *cluster) read(shard uint64, i int) uint64 {
	var n uint64
	require.Eventually(c.t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		v, err := c.hosts[i].SyncRead(ctx, shard, nil)
		if err == nil {
			n = v.(uint64)
		}
		return err == nil
	}, 120*time.Second, 5*time.Millisecond)
	return n
}

// load keeps inFlight proposals going on each shard through host at until total are accepted.
func (c *cluster) load(shards []uint64, at int, inFlight int, total int64) {
	var done atomic.Int64
	fin := make(chan struct{})
	workers := 0
	for _, s := range shards {
		for range inFlight {
			workers++
			go func() {
				defer func() { fin <- struct{}{} }()
				nh, cmd := c.hosts[at], make([]byte, 256)
				var session *client.Session = nh.GetNoOPSession(s)
				for done.Load() < total {
					rs, err := nh.Propose(session, cmd, 5*time.Second)
					if err != nil {
						continue
					}
					if r := <-rs.AppliedC(); r.Completed() {
						done.Add(1)
					}
					rs.Release()
				}
			}()
		}
	}
	for range workers {
		<-fin
	}
}

func TestClusterOnOwnLog(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts NodeHosts")
	}
	var reports atomic.Int64
	c := newCluster(t, t.TempDir(), 3, func(int) Options {
		return Options{Kind: KindOwn, SegmentBytes: 1 << 20, OnLastEntry: func(_, _, _, _ uint64) { reports.Add(1) }}
	})
	shards := []uint64{1, 2, 3, 4, 5}
	for i := range c.hosts {
		c.start(i)
		for _, s := range shards {
			c.startShard(s, i, 3)
		}
	}
	for _, s := range shards {
		c.waitLeader(s, 0, 1, 2)
	}
	c.load(shards, 0, 8, 20_000)
	require.Positive(t, reports.Load())
	counts := map[uint64]uint64{}
	for _, s := range shards {
		counts[s] = c.read(s, 0)
	}
	for round := 0; round < 3; round++ {
		i := round
		c.stop(i)
		for _, s := range shards {
			c.waitLeader(s, (i+1)%3, (i+2)%3)
			c.propose(s, (i+1)%3)
			counts[s]++
		}
		c.start(i)
		for _, s := range shards {
			c.startShard(s, i, 3)
		}
		for _, s := range shards {
			require.Equal(t, counts[s], c.read(s, i), "shard %d on host %d after its restart", s, i)
		}
	}
	for i := range c.hosts {
		c.stop(i)
	}
	// A restart of all, from the logs alone.
	for i := range c.hosts {
		c.start(i)
		for _, s := range shards {
			c.startShard(s, i, 3)
		}
	}
	for _, s := range shards {
		require.Equal(t, counts[s], c.read(s, 0))
		require.Equal(t, counts[s]+1, c.propose(s, 1))
	}
	for i := range c.hosts {
		c.stop(i)
	}
}
