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
	ratiosFor     = flag.Duration("wal.ratios", 0, "time of the comparison of ratios; 0 skips it")
	ratiosOf      = flag.String("wal.of", "own:48,own:1,tan:48,tan:1,stock-pebble:48,memory:48", "what to compare with the first: log:shards[:exec workers]")
	ratiosWindow  = flag.Duration("wal.window", 500*time.Millisecond, "how long each log runs before it is the next one's turn")
	ratiosQuiet   = flag.Float64("wal.quiet", 0.15, "share of the processors that others may take from a window that counts")
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

// bench is three hosts in this process, each with its log of one kind, and what is measured on them.
type bench struct {
	*cluster
	regs     []*prometheus.Registry
	shards   int
	perShard int // proposals in flight on each shard
}

// newBench starts the hosts, with their files under a new directory, and waits for leaders. The shards are led by chance.
func newBench(t testing.TB, kind Kind, workers, shards, inFlight int) *bench {
	dir, err := os.MkdirTemp(*tableDir, "walbench")
	require.NoError(t, err)
	b := &bench{shards: shards, perShard: min(256, max(1, inFlight/shards))}
	for range 3 {
		b.regs = append(b.regs, prometheus.NewRegistry())
	}
	b.cluster = newCluster(t, dir, 3, func(i int) Options {
		return Options{Kind: kind, ExecWorkers: uint64(workers), Registerer: b.regs[i]}
	})
	b.create = func(uint64, uint64) sm.IStateMachine { return nullSM{} }
	for i := range b.hosts {
		b.startBench(i)
		for s := 1; s <= shards; s++ {
			members := map[uint64]dragonboat.Target{1: b.addrs[0], 2: b.addrs[1], 3: b.addrs[2]}
			cfg := b.config(uint64(s), i)
			cfg.ElectionRTT, cfg.HeartbeatRTT, cfg.SnapshotEntries, cfg.CompactionOverhead = 60, 6, 20000, 5000
			require.NoError(t, b.hosts[i].StartReplica(members, false, b.create, cfg))
		}
	}
	b.leaders()
	return b
}

// close stops the hosts and removes their files.
func (b *bench) close() {
	for i := range b.hosts {
		b.stop(i)
	}
	require.NoError(b.t, os.RemoveAll(b.dir))
}

// leaders returns the host that leads each shard.
func (b *bench) leaders() []int {
	leaders := make([]int, b.shards)
	for s := range leaders {
		leaders[s] = int(b.waitLeader(uint64(s+1), 0, 1, 2)) - 1
	}
	return leaders
}

// measure keeps inFlight proposals going over the shards, through their leaders' hosts.
func measure(t testing.TB, kind Kind, workers, shards, bytes, inFlight int, d time.Duration) cell {
	b := newBench(t, kind, workers, shards, inFlight)
	defer b.close()
	b.drive(bytes, d/4)
	return b.cell(bytes, d)
}

// cell measures for d.
func (b *bench) cell(bytes int, d time.Duration) cell {
	before, beforeSeconds := syncs(b.regs)
	cpu := cpuTime()
	lat, failed := b.drive(bytes, d)
	cpu = cpuTime() - cpu
	after, afterSeconds := syncs(b.regs)
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

// drive keeps perShard proposals going on each shard for d, waits for the last ones, and returns their latencies. What it counts
// behind the end of d makes up for what it misses while the first ones are under way.
func (b *bench) drive(bytes int, d time.Duration) ([]time.Duration, int64) {
	var failed atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []time.Duration
	leaders := b.leaders()
	end := time.Now().Add(d)
	for s, leader := range leaders {
		for range b.perShard {
			wg.Add(1)
			go func() {
				defer wg.Done()
				nh := b.hosts[leader]
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

// machineTime is the processor time that everything on the machine has used, in steps of 10 ms for each processor.
func machineTime(t testing.TB) time.Duration {
	raw, err := os.ReadFile("/proc/stat")
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(raw), "\n")
	var ticks time.Duration
	for i, f := range strings.Fields(line)[1:9] { // user nice system idle iowait irq softirq steal
		if n, err := strconv.Atoi(f); i != 3 && i != 4 {
			require.NoError(t, err)
			ticks += time.Duration(n)
		}
	}
	return ticks * 10 * time.Millisecond
}

// rival is one log in the comparison of ratios, with the windows that counted.
type rival struct {
	name  string
	b     *bench
	cells []cell
	tried int
}

// newRival starts what spec, a part of -wal.of, says.
func newRival(t testing.TB, spec string) *rival {
	kind, numbers, _ := strings.Cut(spec, ":")
	shards, workers, ok := strings.Cut(numbers, ":")
	if !ok {
		workers = "1"
	}
	return &rival{name: spec, b: newBench(t, Kind(kind), ints(t, workers)[0], ints(t, shards)[0], *tableInFlight)}
}

// othersTime is the processor time that everything but this process has used.
func othersTime(t testing.TB) time.Duration { return machineTime(t) - cpuTime() }

// quiet reports whether others took little of the processors since start, when they had used before.
func quiet(t testing.TB, before time.Duration, start time.Time) bool {
	return float64(othersTime(t)-before) <= *ratiosQuiet*float64(runtime.NumCPU())*float64(time.Since(start))
}

// awaitQuiet returns when others have had little to do for a moment, or at end.
func awaitQuiet(t testing.TB, end time.Time) {
	for time.Now().Before(end) {
		before, start := othersTime(t), time.Now()
		<-time.After(200 * time.Millisecond)
		if quiet(t, before, start) {
			return
		}
	}
}

// window lets the rival run for one window, which counts if nobody else took much of the processors meanwhile.
func (r *rival) window(bytes int) {
	before, start := othersTime(r.b.t), time.Now()
	c := r.b.cell(bytes, *ratiosWindow)
	r.tried++
	if quiet(r.b.t, before, start) {
		r.cells = append(r.cells, c)
	}
}

// median returns the median of f over the windows that counted.
func (r *rival) median(f func(c *cell) float64) float64 {
	var vs []float64
	for i := range r.cells {
		vs = append(vs, f(&r.cells[i]))
	}
	sort.Float64s(vs)
	return vs[len(vs)/2]
}

// TestComparisonRatios has several logs run by turns, window by window, with their hosts all up, and prints the medians. On a
// machine with other work, or a disk whose pace changes, it tells more than cells one after another. It waits for quiet moments.
//
//	go test ./wal -run TestComparisonRatios -wal.ratios 2m -wal.bytes 256 -timeout 10m
func TestComparisonRatios(t *testing.T) {
	if *ratiosFor == 0 {
		t.Skip("needs -wal.ratios")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(*tableProcs))
	bytes := ints(t, *tableBytes)[0]
	var rivals []*rival
	for _, spec := range strings.Split(*ratiosOf, ",") {
		r := newRival(t, spec)
		defer r.b.close()
		r.b.drive(bytes, time.Second)
		rivals = append(rivals, r)
	}
	for end := time.Now().Add(*ratiosFor); time.Now().Before(end); {
		for _, r := range rivals {
			awaitQuiet(t, end)
			r.window(bytes)
		}
	}
	fmt.Printf("GOMAXPROCS %d, windows of %s, %d in flight, %d bytes, three hosts in one process\n", *tableProcs, *ratiosWindow, *tableInFlight, bytes)
	fmt.Printf("%-18s %8s %9s %6s %9s %9s %12s %9s %8s\n", "log", "windows", "props/s", "ratio", "p50", "p99", "props/fsync", "fsync", "cpu")
	for _, r := range rivals {
		r.print(rivals[0])
	}
}

// print writes the rival's medians, and its rate as a share of base's.
func (r *rival) print(base *rival) {
	if len(r.cells) == 0 || len(base.cells) == 0 {
		fmt.Printf("%-18s %4d/%3d\n", r.name, len(r.cells), r.tried)
		return
	}
	rate := func(c *cell) float64 { return c.rate }
	ms := func(f func(c *cell) time.Duration) string {
		return fmt.Sprintf("%.2fms", 1e3*r.median(func(c *cell) float64 { return f(c).Seconds() }))
	}
	fmt.Printf("%-18s %4d/%3d %9.0f %6.2f %9s %9s %12.1f %9s %8s\n", r.name, len(r.cells), r.tried, r.median(rate), r.median(rate)/base.median(rate),
		ms(func(c *cell) time.Duration { return c.p50 }), ms(func(c *cell) time.Duration { return c.p99 }),
		r.median(func(c *cell) float64 { return c.perSync }), ms(func(c *cell) time.Duration { return c.sync }),
		fmt.Sprintf("%.1fµs", 1e6*r.median(func(c *cell) float64 { return c.cpu.Seconds() })))
}
