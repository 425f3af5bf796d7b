package wal

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	sm "github.com/lni/dragonboat/v4/statemachine"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

var (
	tableFor      = flag.Duration("wal.table", 0, "time of one cell of the comparison table; 0 skips it")
	tableLogs     = flag.String("wal.logs", "own,tan,stock-pebble,memory", "logs to compare")
	tableShards   = flag.String("wal.shards", "1,8,16,48", "numbers of busy shards")
	tableBytes    = flag.String("wal.bytes", "16,256,1024", "sizes of a proposal")
	tableInFlight = flag.Int("wal.inflight", 1024, "proposals in flight over all shards; at most 256 a shard")
	tableWorkers  = flag.String("wal.workers", "1", "numbers of exec workers, for the own log")
	tableProcs    = flag.Int("wal.procs", 8, "GOMAXPROCS during the table")
	tableDir      = flag.String("wal.dir", "", "directory on the disk to measure; the temporary one if empty")
	large         = flag.Bool("wal.large", false, "run the tests that take minutes")
	tableLone     = flag.Bool("wal.lone", true, "measure the latency of a lone proposal too")
)

// nullSM keeps nothing, so that the log is what is measured.
type nullSM struct{}

func (nullSM) Update(sm.Entry) (sm.Result, error)      { return sm.Result{Value: 1}, nil }
func (nullSM) Lookup(interface{}) (interface{}, error) { return nil, nil }
func (nullSM) SaveSnapshot(io.Writer, sm.ISnapshotFileCollection, <-chan struct{}) error {
	return nil
}
func (nullSM) RecoverFromSnapshot(io.Reader, []sm.SnapshotFile, <-chan struct{}) error { return nil }
func (nullSM) Close() error                                                            { return nil }

func ints(t testing.TB, list string) []int {
	var ns []int
	for _, s := range strings.Split(list, ",") {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		ns = append(ns, n)
	}
	return ns
}

// cell is one measurement.
type cell struct {
	rate     float64
	p50, p99 time.Duration
	perSync  float64       // proposals per fsync and replica, 0 if the log does not count them
	sync     time.Duration // mean time of an fsync, 0 if the log does not count them
	cpu      time.Duration // of the process, for one proposal on all three replicas and its client
	failed   int64
}

// cpuTime is the processor time that the process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// syncs adds up the fsyncs of the own logs, and the seconds that they took.
func syncs(regs []*prometheus.Registry) (n, seconds float64) {
	for _, reg := range regs {
		fams, _ := reg.Gather()
		for _, f := range fams {
			if f.GetName() == "tierq_wal_fsync_seconds" {
				h := f.GetMetric()[0].GetHistogram()
				n += float64(h.GetSampleCount())
				seconds += h.GetSampleSum()
			}
		}
	}
	return n, seconds
}

// measure runs three hosts in this process, each with its log of the given kind, and keeps inFlight
// proposals going over the shards, which are led by chance, through their leaders' hosts.
func measure(t testing.TB, kind Kind, workers, shards, bytes, inFlight int, d time.Duration) cell {
	dir, err := os.MkdirTemp(*tableDir, "walbench")
	require.NoError(t, err)
	defer func() { require.NoError(t, os.RemoveAll(dir)) }()
	regs := []*prometheus.Registry{prometheus.NewRegistry(), prometheus.NewRegistry(), prometheus.NewRegistry()}
	c := newCluster(t, dir, 3, func(i int) Options {
		return Options{Kind: kind, ExecWorkers: uint64(workers), Registerer: regs[i]}
	})
	c.create = func(uint64, uint64) sm.IStateMachine { return nullSM{} }
	for i := range c.hosts {
		c.startBench(i)
		for s := 1; s <= shards; s++ {
			members := map[uint64]dragonboat.Target{1: c.addrs[0], 2: c.addrs[1], 3: c.addrs[2]}
			cfg := c.config(uint64(s), i)
			cfg.ElectionRTT, cfg.HeartbeatRTT, cfg.SnapshotEntries, cfg.CompactionOverhead = 20, 2, 20000, 5000
			require.NoError(t, c.hosts[i].StartReplica(members, false, c.create, cfg))
		}
	}
	defer func() {
		for i := range c.hosts {
			c.stop(i)
		}
	}()
	leaders := make([]int, shards)
	for s := range leaders {
		leaders[s] = int(c.waitLeader(uint64(s+1), 0, 1, 2)) - 1
	}
	perShard := min(256, max(1, inFlight/shards))
	c.drive(leaders, perShard, bytes, d/4)
	before, beforeSeconds := syncs(regs)
	cpu := cpuTime()
	lat, failed := c.drive(leaders, perShard, bytes, d)
	cpu = cpuTime() - cpu
	after, afterSeconds := syncs(regs)
	sort.Slice(lat, func(i, j int) bool { return lat[i] < lat[j] })
	res := cell{rate: float64(len(lat)) / d.Seconds(), failed: failed}
	if len(lat) > 0 {
		res.p50, res.p99 = lat[len(lat)/2], lat[len(lat)*99/100]
		res.cpu = cpu / time.Duration(len(lat))
	}
	if after > before {
		res.perSync = 3 * float64(len(lat)) / (after - before)
		res.sync = time.Duration((afterSeconds - beforeSeconds) / (after - before) * float64(time.Second))
	}
	return res
}

// startBench starts host i with the settings of a real host.
func (c *cluster) startBench(i int) {
	nhc := config.NodeHostConfig{NodeHostDir: filepath.Join(c.dir, fmt.Sprint("nh", i)), RTTMillisecond: 50, RaftAddress: c.addrs[i]}
	o := c.opts(i)
	o.Dir = filepath.Join(c.dir, fmt.Sprint("wal", i))
	require.NoError(c.t, Configure(&nhc, o))
	nh, err := dragonboat.NewNodeHost(nhc)
	require.NoError(c.t, err)
	require.NotNil(c.t, nh)
	c.hosts[i] = nh
}

// drive keeps perShard proposals going on each shard for d and returns their latencies.
func (c *cluster) drive(leaders []int, perShard, bytes int, d time.Duration) ([]time.Duration, int64) {
	var failed atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []time.Duration
	end := time.Now().Add(d)
	for s, leader := range leaders {
		for range perShard {
			wg.Add(1)
			go func() {
				defer wg.Done()
				nh := c.hosts[leader]
				session, cmd := nh.GetNoOPSession(uint64(s+1)), make([]byte, bytes)
				var lat []time.Duration
				for {
					start := time.Now()
					if start.After(end) {
						break
					}
					rs, err := nh.Propose(session, cmd, 10*time.Second)
					if err != nil {
						failed.Add(1)
						continue
					}
					if r := <-rs.AppliedC(); r.Completed() {
						lat = append(lat, time.Since(start))
					} else {
						failed.Add(1)
					}
					rs.Release()
				}
				mu.Lock()
				all = append(all, lat...)
				mu.Unlock()
			}()
		}
	}
	wg.Wait()
	return all, failed.Load()
}

// TestComparisonTable prints proposals per second and latencies of this log beside the others', in one run.
//
//	go test ./wal -run TestComparisonTable -wal.table 3s -timeout 60m
func TestComparisonTable(t *testing.T) {
	if *tableFor == 0 {
		t.Skip("needs -wal.table")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(*tableProcs))
	fmt.Printf("GOMAXPROCS %d, %s a cell, %d in flight, three hosts in one process\n", *tableProcs, *tableFor, *tableInFlight)
	fmt.Printf("%-13s %7s %6s %6s %10s %9s %9s %12s %9s %8s %6s\n", "log", "workers", "shards", "bytes", "props/s", "p50", "p99", "props/fsync", "fsync", "cpu", "failed")
	row := func(kind Kind, workers, shards, bytes, inFlight int) {
		c := measure(t, kind, workers, shards, bytes, inFlight, *tableFor)
		per, sync := "-", "-"
		if c.perSync > 0 {
			per, sync = fmt.Sprintf("%.1f", c.perSync), c.sync.Round(time.Microsecond).String()
		}
		fmt.Printf("%-13s %7d %6d %6d %10.0f %9s %9s %12s %9s %8s %6d\n", kind, workers, shards, bytes, c.rate,
			c.p50.Round(10*time.Microsecond), c.p99.Round(10*time.Microsecond), per, sync, c.cpu.Round(100*time.Nanosecond), c.failed)
	}
	kinds := strings.Split(*tableLogs, ",")
	if *tableLone {
		for _, k := range kinds {
			row(Kind(k), 1, 1, 256, 1)
		}
	}
	for _, n := range ints(t, *tableShards) {
		for _, b := range ints(t, *tableBytes) {
			for _, k := range kinds {
				for _, w := range ints(t, *tableWorkers) {
					if k != string(KindOwn) && w > 1 {
						continue
					}
					row(Kind(k), w, n, b, *tableInFlight)
				}
			}
		}
	}
}
