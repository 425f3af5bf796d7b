package store

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
)

func open(t testing.TB, fs vfs.FS) *Store {
	t.Helper()
	s, err := Open("state", testOptions(fs))
	require.NoError(t, err)
	return s
}

func testOptions(fs vfs.FS) Options {
	return Options{FS: fs, CacheBytes: 1 << 20, MemTableBytes: 256 << 10}
}

func openMem(t testing.TB) *Store {
	s := open(t, vfs.NewMem())
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func shard(t testing.TB, s *Store, id uint64) *Shard {
	t.Helper()
	h, err := s.Shard(id)
	require.NoError(t, err)
	return h
}

func put(t testing.TB, h *Shard, pairs ...string) {
	t.Helper()
	b := h.NewBatch()
	for i := 0; i < len(pairs); i += 2 {
		b.Set([]byte(pairs[i]), []byte(pairs[i+1]))
	}
	require.NoError(t, h.Commit(b))
}

// dump reads a whole key space as "k=v k=v".
func dump(t testing.TB, r Reader) string {
	t.Helper()
	it, err := r.NewIter(nil, nil)
	require.NoError(t, err)
	out := ""
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		require.NoError(t, err)
		out += fmt.Sprintf("%s=%s ", it.Key(), v)
	}
	require.NoError(t, it.Close())
	return out
}

func TestShardsDoNotSeeEachOther(t *testing.T) {
	s := openMem(t)
	ids := []uint64{1, 2, 255, 256, math.MaxUint64 - 1, math.MaxUint64}
	for _, id := range ids {
		put(t, shard(t, s, id), "a", fmt.Sprint(id), "\xff\xff", "z")
	}
	for _, id := range ids {
		require.Equal(t, fmt.Sprintf("a=%d \xff\xff=z ", id), dump(t, shard(t, s, id)))
	}
	got, err := s.Shards()
	require.NoError(t, err)
	require.Equal(t, ids, got)

	require.NoError(t, s.DeleteShard(255))
	require.NoError(t, s.DeleteShard(math.MaxUint64))
	require.NoError(t, s.DeleteShard(77), "one that does not exist")
	got, err = s.Shards()
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 2, 256, math.MaxUint64 - 1}, got)
	require.Empty(t, dump(t, shard(t, s, 255)))
	require.NotEmpty(t, dump(t, shard(t, s, 256)))
}

func TestReadingAShardWritesNothing(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 9)
	_, found, err := h.Get([]byte("k"))
	require.NoError(t, err)
	require.False(t, found)
	require.Equal(t, uint64(1), h.Incarnation())
	ids, err := s.Shards()
	require.NoError(t, err)
	require.Empty(t, ids)
	require.Same(t, h, shard(t, s, 9))
}

func TestBatch(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "a", "1", "b", "2", "c", "3", "d", "4")

	b := h.NewIndexedBatch()
	b.Delete([]byte("a"))
	b.SetFunc([]byte("e"), 5, func(dst []byte) { copy(dst, "large") })
	b.DeleteRange([]byte("b"), []byte("d"))
	require.Equal(t, "d=4 e=large ", dump(t, b), "a batch sees its own writes")
	require.Equal(t, "a=1 b=2 c=3 d=4 ", dump(t, h), "nobody else does")
	v, found, err := b.Get([]byte("e"))
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, "large", string(v))
	require.NoError(t, h.Commit(b))
	require.NoError(t, b.Close())
	require.Equal(t, "d=4 e=large ", dump(t, h))

	b = h.NewBatch()
	b.DeleteRange(nil, nil)
	require.NoError(t, h.Commit(b))
	require.Empty(t, dump(t, h))
}

func TestIterMoves(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "a", "1", "b", "2", "c", "3")
	put(t, shard(t, s, 2), "z", "below")
	put(t, shard(t, s, 4), "a", "above")
	it, err := h.NewIter([]byte("b"), nil)
	require.NoError(t, err)
	require.True(t, it.Last())
	require.Equal(t, "c", string(it.Key()))
	require.True(t, it.Prev())
	require.False(t, it.Prev())
	require.True(t, it.SeekLT([]byte("c")))
	require.Equal(t, "b", string(it.Key()))
	require.True(t, it.SeekGE([]byte("a")))
	require.Equal(t, "b", string(it.Key()), "bounds hold")
	require.False(t, it.SeekGE([]byte("d")))
	require.False(t, it.Valid())
	require.NoError(t, it.Err())
	require.NoError(t, it.Close())
}

func TestSnapshotStaysAsItWas(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "a", "1", "b", "2")
	snaps := []*Snapshot{h.Snapshot(), h.ReadSnapshot()}
	same := func(when string) {
		for _, snap := range snaps {
			require.Equal(t, "a=1 b=2 ", dump(t, snap), when)
			require.Equal(t, uint64(1), snap.Incarnation())
		}
	}
	put(t, h, "a", "new")
	same("after a write")
	h.Sync() // the snapshot may become one of files
	same("after a flush")

	in, err := h.BeginInstall()
	require.NoError(t, err)
	require.NoError(t, in.Set([]byte("x"), []byte("9")))
	require.NoError(t, in.Finish())
	h.Sync()
	same("after an install")
	for _, snap := range snaps {
		v, found, err := snap.Get([]byte("a"))
		require.NoError(t, err)
		require.True(t, found)
		require.Equal(t, "1", string(v))
		require.NoError(t, snap.Close())
	}
	require.Equal(t, "x=9 ", dump(t, h))
}

// A reader beside an install sees the old state or the new one, never the emptied old incarnation.
func TestReadersBesideInstalls(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "k", "0")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	read := func(f func() bool) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if !f() {
					t.Error("a reader missed the key")
					return
				}
			}
		})
	}
	read(func() bool {
		_, found, err := h.Get([]byte("k"))
		return found && err == nil
	})
	for _, take := range []func() *Snapshot{h.Snapshot, h.ReadSnapshot} {
		read(func() bool {
			snap := take()
			defer snap.Close()
			_, found, err := snap.Get([]byte("k"))
			return found && err == nil
		})
	}
	read(func() bool {
		it, err := h.NewIter(nil, nil)
		return err == nil && it.First() && it.Close() == nil
	})
	for i := range 100 {
		in, err := h.BeginInstall()
		require.NoError(t, err)
		require.NoError(t, in.Set([]byte("k"), fmt.Append(nil, i)))
		require.NoError(t, in.Finish())
	}
	close(stop)
	wg.Wait()
}

func TestInstallSwitchesAtOnce(t *testing.T) {
	fs := vfs.NewMem()
	s := open(t, fs)
	h := shard(t, s, 3)
	put(t, h, "a", "old")
	stale := h.NewBatch()
	stale.Set([]byte("a"), []byte("late"))

	in, err := h.BeginInstall()
	require.NoError(t, err)
	_, err = h.BeginInstall()
	require.ErrorContains(t, err, "another one is under way")
	require.Equal(t, uint64(2), in.Incarnation())
	for i := range 3000 { // several batches
		require.NoError(t, in.Set(fmt.Appendf(nil, "k%04d", i), make([]byte, 1000)))
	}
	require.Equal(t, "a=old ", dump(t, h), "the old one is whole until then")
	put(t, h, "b", "still written")
	require.NoError(t, in.Finish())
	require.NoError(t, in.Abort(), "after the end: nothing")
	require.Equal(t, uint64(2), h.Incarnation())
	_, found, err := h.Get([]byte("a"))
	require.NoError(t, err)
	require.False(t, found)
	require.ErrorIs(t, h.Commit(stale), ErrSuperseded)

	require.NoError(t, s.Close())
	s = open(t, fs)
	h = shard(t, s, 3)
	require.Equal(t, uint64(2), h.Incarnation())
	_, found, err = h.Get([]byte("k2999"))
	require.NoError(t, err)
	require.True(t, found)
	require.NoError(t, s.Close())
}

func TestInstallAborts(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "a", "old")
	in, err := h.BeginInstall()
	require.NoError(t, err)
	require.NoError(t, in.Set([]byte("x"), make([]byte, installBatchBytes)))
	require.NoError(t, in.Abort())
	require.NoError(t, in.Abort())
	require.Equal(t, "a=old ", dump(t, h))
	some, err := s.anyKey(appendPrefix(nil, 3, 2), shardEnd(3))
	require.NoError(t, err)
	require.False(t, some, "nothing is left behind")
	in, err = h.BeginInstall()
	require.NoError(t, err)
	require.Equal(t, uint64(3), in.Incarnation(), "numbers are not used twice")
	require.NoError(t, in.Finish())
	require.Empty(t, dump(t, h))
}

func TestOpenDropsWhatAnInstallLeft(t *testing.T) {
	fs := vfs.NewCrashableMem()
	s := open(t, fs)
	h := shard(t, s, 3)
	put(t, h, "a", "old")
	put(t, shard(t, s, 4), "b", "neighbour")
	in, err := h.BeginInstall()
	require.NoError(t, err)
	require.NoError(t, in.Set([]byte("x"), make([]byte, installBatchBytes)))
	s.Sync()
	crashed := fs.CrashClone(vfs.CrashCloneCfg{})
	require.NoError(t, in.Abort())
	require.NoError(t, s.Close())

	s = open(t, crashed)
	h = shard(t, s, 3)
	require.Equal(t, "a=old ", dump(t, h))
	require.Equal(t, "b=neighbour ", dump(t, shard(t, s, 4)))
	some, err := s.anyKey(appendPrefix(nil, 3, 2), shardEnd(3))
	require.NoError(t, err)
	require.False(t, some)
	in, err = h.BeginInstall()
	require.NoError(t, err)
	require.Equal(t, uint64(3), in.Incarnation())
	require.NoError(t, in.Finish())
	require.NoError(t, s.Close())
}

func TestDeletedShardTakesNoBatch(t *testing.T) {
	s := openMem(t)
	h := shard(t, s, 3)
	put(t, h, "a", "1")
	b := h.NewBatch()
	b.Set([]byte("a"), []byte("2"))
	require.NoError(t, s.DeleteShard(3))
	require.ErrorIs(t, h.Commit(b), ErrSuperseded)
	_, err := h.BeginInstall()
	require.ErrorIs(t, err, ErrSuperseded)
	again := shard(t, s, 3)
	require.NotSame(t, h, again)
	require.Empty(t, dump(t, again))
	// Two deletions got the same handle, and the shard was begun anew between them.
	put(t, again, "b", "1")
	require.NoError(t, s.delete(h))
	require.NotEmpty(t, dump(t, again))
	require.Same(t, again, shard(t, s, 3))
}

func TestSyncOfACleanShardDoesNotFlush(t *testing.T) {
	s := openMem(t)
	h, other := shard(t, s, 3), shard(t, s, 4)
	put(t, h, "a", "1")
	h.Sync()
	rounds := s.flush.finished()
	for range 100 {
		h.Sync()
		other.Sync()
	}
	require.Equal(t, rounds, s.flush.finished())
	put(t, other, "b", "2")
	h.Sync()
	require.Equal(t, rounds, s.flush.finished(), "another shard's writes are not its business")
	other.Sync()
	require.Equal(t, rounds+1, s.flush.finished())
}

// A flush serves everybody who asked before it began, so N waiters need far fewer than N flushes: at the most two
// while nobody writes in between.
func TestOneFlushServesAll(t *testing.T) {
	s := openMem(t)
	const n = 64
	for i := range uint64(n) {
		put(t, shard(t, s, i+1), "a", "1")
	}
	before := s.flush.finished()
	var wg sync.WaitGroup
	for i := range uint64(n) {
		h := shard(t, s, i+1)
		wg.Go(h.Sync)
	}
	wg.Wait()
	require.LessOrEqual(t, s.flush.finished()-before, uint64(2))
}

func TestUnflushedBytesForceAFlush(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	o.MemTableBytes, o.MaxUnflushedBytes = 64<<20, 64<<10
	s, err := Open("state", o)
	require.NoError(t, err)
	h := shard(t, s, 3)
	before := s.flush.finished()
	for range 8 {
		put(t, h, "a", string(make([]byte, 10<<10)))
	}
	s.flush.waitIdle()
	require.Greater(t, s.flush.finished(), before)
	require.NoError(t, s.Close())
}

func TestAFailedFlushIsFatalAndNothingIsCalledDurable(t *testing.T) {
	var broken errorfs.Toggle
	broken.Injector = errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSync || op.Kind == errorfs.OpFileSyncData {
			return errors.New("injected")
		}
		return nil
	})
	o := testOptions(errorfs.Wrap(vfs.NewMem(), &broken))
	fatal := make(chan error, 1)
	o.OnFatal = func(err error) {
		select {
		case fatal <- err:
		default:
		}
		broken.Off() // the host would end; let this test end
	}
	s, err := Open("state", o)
	require.NoError(t, err)
	h := shard(t, s, 3)
	put(t, h, "a", "1")
	broken.On()
	h.Sync()
	require.ErrorContains(t, <-fatal, "injected")
	require.NoError(t, s.Close())
}

func TestCloseMakesDurableAndRefusesAfterwards(t *testing.T) {
	fs := vfs.NewCrashableMem()
	s := open(t, fs)
	h := shard(t, s, 3)
	put(t, h, "a", "1")
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	b := &Batch{shard: h, space: h.space.Load()}
	require.ErrorIs(t, h.Commit(b), ErrSuperseded)
	_, err := s.Shard(3)
	require.ErrorIs(t, err, ErrClosed)
	s = open(t, fs.CrashClone(vfs.CrashCloneCfg{}))
	require.Equal(t, "a=1 ", dump(t, shard(t, s, 3)))
	require.NoError(t, s.Close())
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	onDisk, err := Open(dir, testOptions(vfs.Default))
	require.NoError(t, err)
	_, err = Open(dir, testOptions(vfs.Default))
	require.Error(t, err, "opened twice")
	require.NoError(t, onDisk.Close())

	fs := vfs.NewMem()
	s := open(t, fs)
	b := s.db.NewBatch()
	require.NoError(t, b.Set(append(appendPrefix(nil, 0, 0), recordOwn), []byte{2}, nil))
	require.NoError(t, s.commit(b))
	require.NoError(t, s.Close())
	_, err = Open("state", testOptions(fs))
	require.ErrorContains(t, err, "start the newer one")

	_, err = Open("other", Options{FS: vfs.NewMem(), CacheBytes: 1, MaxUnflushedBytes: 1, MemTableBytes: 1, MaxOpenFiles: 1})
	for _, name := range []string{"CacheBytes", "MaxUnflushedBytes", "MemTableBytes", "MaxOpenFiles"} {
		require.ErrorContains(t, err, name)
	}
}

func TestPointerDecode(t *testing.T) {
	p := pointer{live: 3, installing: 5, last: 5}
	got, err := decodePointer(p.encode())
	require.NoError(t, err)
	require.Equal(t, p, got)
	for _, bad := range []pointer{{}, {live: 2, last: 1}, {live: 1, installing: 1, last: 1}, {live: 1, installing: 2, last: 1}} {
		_, err := decodePointer(bad.encode())
		require.Error(t, err, "%+v", bad)
	}
	_, err = decodePointer([]byte{1, 2})
	require.Error(t, err)
	wrong := p.encode()
	wrong[0] = 9
	_, err = decodePointer(wrong)
	require.Error(t, err)
}

func TestSuccessor(t *testing.T) {
	require.Equal(t, []byte{1, 3}, successor([]byte{1, 2}))
	require.Equal(t, []byte{2}, successor([]byte{1, 0xff}))
	max := binary.BigEndian.AppendUint64(nil, math.MaxUint64)
	require.Greater(t, string(successor(max)), string(appendPrefix(nil, math.MaxUint64, math.MaxUint64-1))+"\xff\xff\xff")
}

func TestDiskUsage(t *testing.T) {
	s := openMem(t)
	h, other := shard(t, s, 3), shard(t, s, 4)
	value := make([]byte, 200<<10)
	_, err := rand.Read(value)
	require.NoError(t, err)
	put(t, h, "a", string(value))
	put(t, other, "a", "small")
	s.Sync()
	n, err := h.DiskUsage()
	require.NoError(t, err)
	require.Greater(t, n, uint64(150<<10))
	small, err := other.DiskUsage()
	require.NoError(t, err)
	require.Less(t, small, n)
	require.GreaterOrEqual(t, s.DiskUsage(), n)
	require.Positive(t, s.Metrics().Flush.Count)
}
