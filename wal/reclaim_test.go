package wal

import (
	"errors"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func save(t testing.TB, l *Log, shard, first, n uint64, bytes int) {
	t.Helper()
	ents := make([]raftpb.Entry, n)
	for i := range ents {
		ents[i] = raftpb.Entry{Index: first + uint64(i), Term: 1, Cmd: make([]byte, bytes)}
	}
	require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: shard, ReplicaID: 1,
		State: raftpb.State{Term: 1, Commit: first + n - 1}, EntriesToSave: ents}}, 1))
}

// settled waits until the log has at most n segments.
func settled(t testing.TB, l *Log, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.wakeReclaim()
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.segments) <= n
	}, 120*time.Second, time.Millisecond)
}

// Compaction after compaction, in many shards, must leave nothing behind: neither files, nor memory, nor
// bookkeeping.
func TestCompactionsDoNotLeak(t *testing.T) {
	rounds := uint64(20_000) // × 50 shards: a million shard compactions
	if testing.Short() {
		rounds = 400
	}
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.CacheBytes = 1 << 20
	l, err := openFS(o, fs)
	require.NoError(t, err)
	const shards = 50
	for round := uint64(1); round <= rounds; round++ {
		var uds []raftpb.Update
		for s := uint64(1); s <= shards; s++ {
			uds = append(uds, raftpb.Update{ShardID: s, ReplicaID: 1, State: raftpb.State{Term: 1, Commit: round},
				EntriesToSave: []raftpb.Entry{{Index: round, Term: 1, Cmd: make([]byte, 64)}}})
		}
		require.NoError(t, l.SaveRaftState(uds, 1))
		for s := uint64(1); s <= shards; s++ {
			require.NoError(t, l.RemoveEntriesTo(s, 1, round-1))
		}
	}
	settled(t, l, 6)
	require.NoError(t, l.Check())
	l.mu.Lock()
	for _, r := range l.replicas {
		require.LessOrEqual(t, len(r.spans), 1)
		require.LessOrEqual(t, cap(r.spans), 16)
	}
	require.LessOrEqual(t, len(l.replicas), shards)
	l.mu.Unlock()
	require.NoError(t, l.Close())
	names, err := fs.List("/log")
	require.NoError(t, err)
	require.LessOrEqual(t, len(names), 6+o.RecycleSegments+1, names)
	l, err = openFS(o, fs)
	require.NoError(t, err)
	for s := uint64(1); s <= shards; s++ {
		ents, _, err := l.IterateEntries(nil, 0, s, 1, rounds, rounds+1, noLimit)
		require.NoError(t, err)
		require.Len(t, ents, 1)
	}
	require.NoError(t, l.Close())
}

// An idle shard's entries in an old segment do not keep that segment: they are moved, stay readable all
// the while, and survive a restart.
func TestIdleShardDoesNotPinSegments(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.CacheBytes = 1
	l, err := openFS(o, fs)
	require.NoError(t, err)
	for i := uint64(1); i <= 30; i++ { // a little of the idle shard between a lot of the busy one
		save(t, l, 1, i, 1, 2000)
		save(t, l, 2, 1+(i-1)*10, 10, 20_000)
	}
	l.mu.Lock()
	before := len(l.segments)
	l.mu.Unlock()
	require.Greater(t, before, 6)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() { // reads while its entries move
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			ents, _, err := l.IterateEntries(nil, 0, 1, 1, 1, 31, noLimit)
			if err != nil || len(ents) != 30 {
				stopped <- fmt.Errorf("%d entries, %w", len(ents), err)
				return
			}
		}
	}()
	require.NoError(t, l.RemoveEntriesTo(2, 1, 299))
	settled(t, l, 4)
	close(stop)
	require.NoError(t, <-stopped)
	check := func() {
		ents, _, err := l.IterateEntries(nil, 0, 1, 1, 1, 31, noLimit)
		require.NoError(t, err)
		require.Len(t, ents, 30)
		ents, _, err = l.IterateEntries(nil, 0, 2, 1, 300, 301, noLimit)
		require.NoError(t, err)
		require.Len(t, ents, 1)
		require.NoError(t, l.Check())
	}
	check()
	require.NoError(t, l.Close())
	l, err = openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	check()
	require.NoError(t, l.Close())
}

// What the index takes does not follow the number of saves, and what was copied together is as it was.
func TestIndexIsBounded(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.CacheBytes, o.IndexBytes = 1, 500*spanBytes
	l, err := openFS(o, fs)
	require.NoError(t, err)
	const n = 10_000
	for i := uint64(1); i <= n; i++ {
		require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1 + i%2, ReplicaID: 1, State: raftpb.State{Term: 1, Commit: i / 2},
			EntriesToSave: []raftpb.Entry{{Index: (i + 1) / 2, Term: 1, Key: i, Cmd: make([]byte, 400)}}}}, 1))
	}
	sealed := func() (spans int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, r := range l.replicas {
			for i := range r.spans {
				if r.spans[i].seg.sealed {
					spans++
				}
			}
		}
		return spans
	}
	require.Eventually(t, func() bool {
		l.wakeReclaim()
		return sealed() <= 500
	}, 120*time.Second, time.Millisecond)
	for range 2 {
		require.NoError(t, l.Check())
		for s := uint64(1); s <= 2; s++ {
			ents, _, err := l.IterateEntries(nil, 0, s, 1, 1, n/2+1, noLimit)
			require.NoError(t, err)
			require.Len(t, ents, n/2)
			for i := range ents {
				require.Equal(t, 1+ents[i].Key%2, s)
				require.Equal(t, uint64(i+1), (ents[i].Key+1)/2)
			}
		}
		require.NoError(t, l.Close())
		l, err = openFS(o, fs)
		require.NoError(t, err)
		require.LessOrEqual(t, sealed(), 500)
	}
	require.NoError(t, l.Close())
}

// Removed replicas leave a tombstone while older segments may hold their records, and nothing after.
func TestRemovedReplicasGo(t *testing.T) {
	fs := newCrashFS()
	l, err := openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	for s := uint64(10); s < 200; s++ {
		require.NoError(t, l.SaveBootstrapInfo(s, 1, raftpb.Bootstrap{Join: true}))
		save(t, l, s, 1, 5, 300)
		require.NoError(t, l.RemoveNodeData(s, 1))
	}
	infos, err := l.ListNodeInfo()
	require.NoError(t, err)
	require.Empty(t, infos)
	next := uint64(1)
	require.Eventually(t, func() bool {
		save(t, l, 1, next, 1, 40_000)
		require.NoError(t, l.RemoveEntriesTo(1, 1, next-1))
		next++
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.replicas) == 1
	}, 120*time.Second, time.Millisecond)
	require.NoError(t, l.Close())
}

// A removed replica that is imported again is the imported one, whatever older records say.
func TestImportReplaces(t *testing.T) {
	fs := newCrashFS()
	l, err := openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	save(t, l, 1, 1, 100, 100)
	ss := raftpb.Snapshot{ShardID: 1, Index: 40, Term: 1, Type: raftpb.OnDiskStateMachine, Imported: true,
		Membership: raftpb.Membership{ConfigChangeId: 1, Addresses: map[uint64]string{1: "a"}}}
	require.NoError(t, l.ImportSnapshot(ss, 1))
	for range 2 {
		rs, err := l.ReadRaftState(1, 1, 40)
		require.NoError(t, err)
		require.Equal(t, raftpb.State{Term: 1, Commit: 40}, rs.State)
		require.Zero(t, rs.EntryCount)
		got, err := l.GetSnapshot(1, 1)
		require.NoError(t, err)
		require.Equal(t, uint64(40), got.Index)
		b, err := l.GetBootstrapInfo(1, 1)
		require.NoError(t, err)
		require.True(t, b.Join)
		require.NoError(t, l.Check())
		require.NoError(t, l.Close())
		l, err = openFS(testOptions(1<<20), fs)
		require.NoError(t, err)
	}
	require.NoError(t, l.Close())
}

// A failed write or sync is told to the host once, and no later save succeeds.
func TestFailedWriteStopsTheLog(t *testing.T) {
	for _, bad := range []string{"write", "sync"} {
		t.Run(bad, func(t *testing.T) {
			fs := newCrashFS()
			var failures atomic.Int64
			o := testOptions(1 << 20)
			o.OnFailure = func(error) { failures.Add(1) }
			l, err := openFS(o, fs)
			require.NoError(t, err)
			save(t, l, 1, 1, 1, 10)
			broken := errors.New("the disk is gone")
			fs.mu.Lock()
			fs.fail = func(op, _ string) error {
				if op == bad {
					return broken
				}
				return nil
			}
			fs.mu.Unlock()
			ud := []raftpb.Update{{ShardID: 1, ReplicaID: 1, State: raftpb.State{Term: 2, Commit: 1}}}
			require.ErrorIs(t, l.SaveRaftState(ud, 1), broken)
			fs.mu.Lock()
			fs.fail = nil
			fs.mu.Unlock()
			require.ErrorIs(t, l.SaveRaftState(ud, 1), broken)
			_, err = l.GetSnapshot(1, 1)
			require.ErrorIs(t, err, broken)
			require.Equal(t, int64(1), failures.Load())
			require.NoError(t, l.Close())
		})
	}
}

// A damaged record that has to be moved is not skipped, nor tried for ever: the log fails with its place and its replica.
func TestReclaimFailsOnADamagedRecord(t *testing.T) {
	fs := newCrashFS()
	failures := make(chan error, 2)
	o := testOptions(1 << 20)
	o.CacheBytes = 1
	o.OnFailure = func(err error) { failures <- err }
	l, err := openFS(o, fs)
	require.NoError(t, err)
	for i := uint64(1); i <= 30; i++ {
		save(t, l, 1, i, 1, 2000)
		save(t, l, 2, 1+(i-1)*10, 10, 20_000)
	}
	l.mu.Lock()
	s := l.replicas[replicaKey{1, 1}].spans[0]
	l.mu.Unlock()
	fs.flip(s.seg.path, int64(s.off+s.size)-1, 1)
	require.NoError(t, l.RemoveEntriesTo(2, 1, 299))
	var bad *CorruptionError
	require.ErrorAs(t, <-failures, &bad)
	require.Equal(t, s.seg.path, bad.Path)
	require.Equal(t, int64(s.off), bad.Offset)
	require.Equal(t, uint64(1), bad.ShardID)
	require.ErrorIs(t, l.SaveRaftState([]raftpb.Update{{ShardID: 2, ReplicaID: 1, State: raftpb.State{Term: 2}}}, 1), ErrCorrupt)
	require.NoError(t, l.Close())
	require.Empty(t, failures)
}

// What is set aside for the replicas that are dirty is what they will write: a commit index takes no room for the
// snapshot record beside it.
func TestDirtyLimit(t *testing.T) {
	r := &replica{snap: make([]byte, 1000), boot: make([]byte, 100), spans: make([]span, 50), metaDirty: true}
	bytes, records := r.dirtyLimit()
	require.Equal(t, metaLimit, bytes)
	require.Equal(t, 1, records)
	r.snapDirty, r.bootDirty, r.runsDirty = true, true, true
	bytes, records = r.dirtyLimit()
	require.Equal(t, metaLimit+1100+3*recordOverhead+50*30, bytes)
	require.Equal(t, 54, records)
	bytes, records = new(replica).dirtyLimit()
	require.Zero(t, bytes)
	require.Zero(t, records)
}

// A full disk must not stop a log that still has room in what it holds already; it is reported.
func TestFullDiskIsReportedAndSparesServe(t *testing.T) {
	fs := newCrashFS()
	reports := make(chan SpaceReport, 10)
	o := testOptions(1 << 20)
	o.LowSpaceBytes = 1000
	o.OnSpace = func(r SpaceReport) { reports <- r }
	l, err := openFS(o, fs)
	require.NoError(t, err)
	fs.mu.Lock()
	fs.free = 999
	fs.mu.Unlock()
	require.Equal(t, SpaceReport{Low: true, FreeBytes: 999}, <-reports)
	full := errors.New("no space left on device")
	fs.mu.Lock()
	fs.fail = func(op, name string) error {
		if op == "create" {
			return full
		}
		return nil
	}
	fs.mu.Unlock()
	for i := uint64(1); i <= 20; i++ { // in the segments that are there
		save(t, l, 1, i, 1, 10_000)
	}
	fs.mu.Lock()
	fs.fail, fs.free = nil, 1<<30
	fs.mu.Unlock()
	require.Equal(t, SpaceReport{Low: false, FreeBytes: 1 << 30}, <-reports)
	for i := uint64(21); i <= 200; i++ {
		save(t, l, 1, i, 1, 10_000)
	}
	require.NoError(t, l.Close())
}

// A save larger than a whole segment gets a segment of its own.
func TestHugeSave(t *testing.T) {
	fs := newCrashFS()
	l, err := openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	save(t, l, 1, 1, 3, 100)
	save(t, l, 1, 4, 7, 1<<20)
	save(t, l, 1, 11, 3, 100)
	require.NoError(t, l.Close())
	l, err = openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	ents, _, err := l.IterateEntries(nil, 0, 1, 1, 1, 14, noLimit)
	require.NoError(t, err)
	require.Len(t, ents, 13)
	require.Len(t, ents[5].Cmd, 1<<20)
	require.NoError(t, l.Close())
}

// So does one that comes when the next segment could not be made ready.
func TestHugeSaveWithoutAPreparedSegment(t *testing.T) {
	fs := newCrashFS()
	var failed atomic.Int64
	tried := make(chan struct{})
	fs.fail = func(op, name string) error {
		if op == "create" && filepath.Base(name) == "0000000000000002"+spareSuffix && failed.Add(1) == 1 {
			close(tried)
			return errors.New("no space left on device")
		}
		return nil
	}
	l, err := openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	<-tried
	save(t, l, 1, 1, 3, 1<<20)
	require.NoError(t, l.Close())
	fs.mu.Lock()
	for _, n := range fs.names {
		require.Zero(t, len(n.data)%pageBytes)
	}
	fs.mu.Unlock()
	l, err = openFS(testOptions(1<<20), fs)
	require.NoError(t, err)
	ents, _, err := l.IterateEntries(nil, 0, 1, 1, 1, 4, noLimit)
	require.NoError(t, err)
	require.Len(t, ents, 3)
	require.NoError(t, l.Close())
}

// Saves that wait at the same moment share an fsync, and each finds its own entries afterwards.
func TestConcurrentSavesShareSyncs(t *testing.T) {
	l, err := Open(Options{Dir: t.TempDir()})
	require.NoError(t, err)
	var wg sync.WaitGroup
	const savers, saves = 16, 200
	for s := uint64(1); s <= savers; s++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewSource(int64(s)))
			for i := uint64(1); i <= saves; i++ {
				save(t, l, s, i, 1, rng.Intn(5000))
				if i%20 == 0 {
					ents, _, err := l.IterateEntries(nil, 0, s, 1, i-5, i+1, noLimit)
					require.NoError(t, err)
					require.Len(t, ents, 6)
				}
				if i%50 == 0 {
					require.NoError(t, l.SaveSnapshots([]raftpb.Update{{ShardID: s, ReplicaID: 1, Snapshot: raftpb.Snapshot{Index: i, Term: 1}}}))
					require.NoError(t, l.RemoveEntriesTo(s, 1, i-10))
				}
			}
		}()
	}
	wg.Wait()
	require.NoError(t, l.Check())
	dir := l.o.Dir
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	require.Less(t, l.batchNumber, uint64(savers*saves))
	t.Logf("%d saves in %d batches", savers*saves, l.batchNumber)
	rep, err := Verify(dir)
	require.NoError(t, err)
	require.Empty(t, rep.Problems)
	l, err = Open(Options{Dir: dir})
	require.NoError(t, err)
	for s := uint64(1); s <= savers; s++ {
		rs, err := l.ReadRaftState(s, 1, saves)
		require.NoError(t, err)
		require.Equal(t, uint64(saves), rs.State.Commit)
	}
	require.NoError(t, l.Close())
}

// Ten thousand replicas open, and how long it takes is printed.
func TestOpensManyReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("writes a large log")
	}
	dir := t.TempDir()
	l, err := Open(Options{Dir: dir, CacheBytes: 1})
	require.NoError(t, err)
	const replicas = 10_000
	rounds := 8
	if *large { // 4 GiB
		rounds = 107
	}
	for round := 0; round < rounds; round++ {
		for from := uint64(1); from <= replicas; from += 500 {
			var uds []raftpb.Update
			for s := from; s < from+500; s++ {
				ents := make([]raftpb.Entry, 4)
				for i := range ents {
					ents[i] = raftpb.Entry{Index: uint64(round*4 + i + 1), Term: 1, Cmd: make([]byte, 1000)}
				}
				uds = append(uds, raftpb.Update{ShardID: s, ReplicaID: 1, State: raftpb.State{Term: 1, Commit: uint64(round * 4)}, EntriesToSave: ents})
			}
			require.NoError(t, l.SaveRaftState(uds, 1))
		}
	}
	require.NoError(t, l.Close())
	start := time.Now()
	l, err = Open(Options{Dir: dir, Logger: zap.NewExample()})
	require.NoError(t, err)
	took := time.Since(start)
	t.Logf("%d replicas, %d MiB of log opened in %s", replicas, logBytes(t, dir)>>20, took)
	require.Len(t, l.replicas, replicas)
	require.NoError(t, l.Close())
}

// The directory holds segments, spares and the lock, and a second opener is kept out.
func TestDirectory(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := t.TempDir()
	l, err := Open(Options{Dir: dir})
	require.NoError(t, err)
	_, err = Open(Options{Dir: dir})
	require.ErrorContains(t, err, "in use")
	save(t, l, 1, 1, 1, 1)
	require.NoError(t, l.Close())
	ents, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range ents {
		ok := e.Name() == lockName || strings.HasSuffix(e.Name(), segmentSuffix) || strings.HasSuffix(e.Name(), spareSuffix)
		require.True(t, ok, filepath.Join(dir, e.Name()))
	}
}
