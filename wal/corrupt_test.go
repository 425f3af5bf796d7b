package wal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand"
	"strings"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// sample builds a log with every type of record, several sealed segments and one that is not.
func sample(t testing.TB) (*crashFS, Options, *generator, *memoryLog) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.RewriteBytesPerSecond = 1 << 40
	l, err := openFS(o, fs)
	require.NoError(t, err)
	g := newGenerator(rand.New(rand.NewSource(7)), 4, 12000)
	g.witness = true
	m := newMemoryLog()
	do := func(x op) {
		require.NoError(t, x.apply(m), "%v", x)
		require.NoError(t, x.apply(l), "%v", x)
	}
	// A slow shard, whose entries stay and have to be moved.
	slow := replicaKey{9, 9}
	for i := uint64(1); i <= 600; i++ {
		do(g.next())
		if i%10 != 0 {
			continue
		}
		ud := raftpb.Update{ShardID: slow.shardID, ReplicaID: slow.replicaID, State: raftpb.State{Term: 1, Commit: i/10 - 1},
			EntriesToSave: []raftpb.Entry{{Index: i / 10, Term: 1, Cmd: bytes.Repeat([]byte{byte(i)}, 40_000)}}}
		do(op{"slow", []raftpb.Update{ud}, func(l raftio.ILogDB) error { return l.SaveRaftState([]raftpb.Update{ud}, 1) }})
	}
	require.Eventually(t, func() bool { // until something was freed
		l.wakeReclaim()
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.segments[len(l.segments)-1].h.seq > uint64(len(l.segments))
	}, 120*time.Second, time.Millisecond)
	require.NoError(t, l.Close())
	g.keys = append(g.keys, slow)
	return fs, o, g, m
}

// places returns, for every kind of place of every segment, one offset.
func places(t testing.TB, fs *crashFS, name string, last bool) map[string]int64 {
	data := fs.names[name].data
	h, err := decodeSegmentHeader(data)
	require.NoError(t, err)
	s := newSegment(h, "/log")
	out := map[string]int64{"header magic": 1, "header version": 8, "header crc": 13, "header sequence": 17,
		"header host": 25, "header salt": 33, "header size": 41, "header padding": 2000}
	sc, err := scanSegment(s, data, nil)
	require.NoError(t, err)
	end := sc.end
	off := int64(pageBytes)
	for n := 0; off < end; n++ {
		b, ok := parseBatchHeader(data[off:], off, h.seq, s.seed)
		require.True(t, ok)
		next := alignUp(off+batchHeaderSize+int64(b.payload), batchAlign)
		if next >= end && last {
			break // the tail: what is damaged there looks torn
		}
		if n == 1 || n == 5 {
			for _, f := range []struct {
				name string
				at   int64
			}{{"crc", 0}, {"payload", 4}, {"sequence", 8}, {"number", 16}, {"records", 24}, {"offset", 28}} {
				out[fmt.Sprintf("batch %d %s", n, f.name)] = off + f.at
			}
		}
		for r := off + batchHeaderSize; r < off+batchHeaderSize+int64(b.payload); {
			rec, err := parseRecord(data[r:], s.seed, r)
			require.NoError(t, err)
			out[rec.typ.String()+" length"] = r
			out[rec.typ.String()+" crc"] = r + 5
			out[rec.typ.String()+" type"] = r + 8
			out[rec.typ.String()+" shard"] = r + 9
			out[rec.typ.String()+" body"] = r + int64(rec.size) - 1
			r += int64(rec.size)
		}
		off = next
	}
	if tr, err := decodeSegmentTrailer(data[h.size-pageBytes:], h); err == nil {
		out["trailer magic"] = int64(h.size) - pageBytes
		out["trailer crc"] = int64(h.size) - pageBytes + 12
		out["trailer end"] = int64(h.size) - pageBytes + 32
		out["footer first"] = int64(tr.footerOff)
		out["footer last"] = int64(tr.footerOff+tr.footerLen) - 1
	}
	return out
}

// A bit that is flipped at any kind of place is found by Verify, which names the file and a place in its
// batch, page or footer; and the log itself either refuses to open, or refuses to return what was damaged, or
// returns all of it as it was. It never returns something else.
func TestFlippedBitIsFoundAndNamed(t *testing.T) {
	t.Parallel()
	fs, o, g, m := sample(t)
	names := fs.segmentNames()
	require.Greater(t, len(names), 3)
	rep, err := verify("/log", fs)
	require.NoError(t, err)
	require.Empty(t, rep.Problems)
	active := names[len(names)-1]
	if rep.Segments[len(rep.Segments)-1].Batches == 0 {
		active = names[len(names)-2]
	}
	kinds := map[string]bool{}
	for _, name := range names {
		if name > active {
			continue
		}
		for kind, at := range places(t, fs, name, name == active) {
			if testing.Short() && kinds[kind] {
				continue
			}
			kinds[kind] = true
			what := fmt.Sprintf("%s of %s at %d", kind, name, at)
			bad := fs.copyOf()
			bad.flip(name, at, 0x10)

			rep, err := verify("/log", bad)
			require.NoError(t, err, what)
			if kind == "trailer magic" || kind == "trailer crc" || kind == "trailer end" || strings.HasPrefix(kind, "footer") {
				// A newest segment whose seal is damaged is one whose seal was cut short.
				if len(rep.Problems) == 0 && name == active {
					continue
				}
			}
			require.NotEmpty(t, rep.Problems, what)
			require.Equal(t, name, rep.Problems[0].Path, what)

			if err := reopened(bad, o, g.keys, m); err != nil && !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	for _, want := range []string{"entries body", "moved body", "runs body", "meta body", "snapshot body", "bootstrap body",
		"live-set body", "freed body", "trailer end", "footer first"} {
		require.True(t, kinds[want], "the sample has no %q", want)
	}
}

// reopened opens the log and compares all of it with the model.
func reopened(fs *crashFS, o Options, keys []replicaKey, m *memoryLog) error {
	l, err := openFS(o, fs)
	if err != nil {
		return err
	}
	return errors.Join(sameAs(l, m, keys, false), l.Close())
}

// A record that is damaged in a sealed segment is named with its replica when it is read.
func TestDamagedEntryNamesItsReplica(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	l, err := openFS(o, fs)
	require.NoError(t, err)
	for i := uint64(1); i <= 100; i++ {
		require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 9, ReplicaID: 4, State: raftpb.State{Term: 1, Commit: i},
			EntriesToSave: []raftpb.Entry{{Index: i, Term: 1, Cmd: bytes.Repeat([]byte{byte(i)}, 20000)}}}}, 1))
	}
	require.NoError(t, l.Close())
	name := fs.segmentNames()[0]
	at := bytes.Index(fs.names[name].data, bytes.Repeat([]byte{3}, 20000))
	require.Positive(t, at)
	fs.flip(name, int64(at)+100, 1)
	l, err = openFS(o, fs)
	require.NoError(t, err)
	_, _, err = l.IterateEntries(nil, 0, 9, 4, 3, 4, noLimit)
	var c *CorruptionError
	require.ErrorAs(t, err, &c)
	require.Equal(t, name, c.Path)
	require.Equal(t, uint64(9), c.ShardID)
	require.Equal(t, uint64(4), c.ReplicaID)
	require.InDelta(t, at, c.Offset, 200)
	ents, _, err := l.IterateEntries(nil, 0, 9, 4, 4, 101, noLimit)
	require.NoError(t, err)
	require.Len(t, ents, 97)
	require.NoError(t, l.Close())
}

// The newest segment: a bad batch with nothing behind it is a torn tail and is cut; with a valid one behind
// it, it is corruption.
func TestTornTailAgainstCorruption(t *testing.T) {
	build := func() (*crashFS, []int64) {
		fs := newCrashFS()
		l, err := openFS(testOptions(1<<20), fs)
		require.NoError(t, err)
		var offs []int64
		for i := uint64(1); i <= 5; i++ {
			offs = append(offs, l.active.off)
			require.NoError(t, l.SaveRaftState([]raftpb.Update{{ShardID: 1, ReplicaID: 1, State: raftpb.State{Term: 1, Commit: i - 1},
				EntriesToSave: []raftpb.Entry{{Index: i, Term: 1, Cmd: make([]byte, 9000)}}}}, 1))
		}
		require.NoError(t, l.Close())
		return fs, offs
	}
	last := func(fs *crashFS) (uint64, error) {
		l, err := openFS(testOptions(1<<20), fs)
		if err != nil {
			return 0, err
		}
		rs, err := l.ReadRaftState(1, 1, 0)
		require.NoError(t, err)
		require.NoError(t, l.Close())
		return rs.EntryCount, nil
	}
	fs, _ := build()
	n, err := last(fs)
	require.NoError(t, err)
	require.Equal(t, uint64(5), n)

	fs, offs := build()
	fs.flip(fs.segmentNames()[0], offs[4]+5000, 1)
	n, err = last(fs)
	require.NoError(t, err)
	require.Equal(t, uint64(4), n)

	for _, at := range []int64{0, 40, 5000} {
		fs, offs = build()
		fs.flip(fs.segmentNames()[0], offs[2]+at, 1)
		_, err = last(fs)
		var c *CorruptionError
		require.ErrorAs(t, err, &c)
		require.GreaterOrEqual(t, c.Offset, offs[2])
		require.Less(t, c.Offset, offs[3])
	}
}

func TestMissingSegmentIsRefused(t *testing.T) {
	fs, o, g, m := sample(t)
	names := fs.segmentNames()
	for i, name := range names {
		bad := fs.copyOf()
		delete(bad.names, name)
		err := reopened(bad, o, g.keys, m)
		if i == len(names)-1 && err == nil {
			continue // the empty one, made ahead
		}
		require.ErrorIs(t, err, ErrCorrupt, name)
	}
}

func TestForeignSegmentIsRefused(t *testing.T) {
	fs := newCrashFS()
	o := testOptions(1 << 20)
	o.HostID = 1
	l, err := openFS(o, fs)
	require.NoError(t, err)
	_, err = openFS(o, fs)
	require.ErrorContains(t, err, "locked")
	require.NoError(t, l.Close())
	o.HostID = 2
	_, err = openFS(o, fs)
	require.ErrorContains(t, err, "is of host 1, this is host 2")
}

func TestDumpAndStats(t *testing.T) {
	fs, _, _, m := sample(t)
	var b bytes.Buffer
	require.NoError(t, dump(&b, "/log", fs))
	for _, want := range []string{" entries shard", " runs shard", " meta shard", " snapshot shard", " bootstrap shard", "live-set", "freed"} {
		require.Contains(t, b.String(), want)
	}
	rep, err := stats("/log", fs)
	require.NoError(t, err)
	require.Len(t, rep.Replicas, 5)
	for _, r := range rep.Replicas {
		require.Equal(t, m.replicas[replicaKey{r.ShardID, r.ReplicaID}].last, r.Last)
	}
	b.Reset()
	require.NoError(t, rep.Print(&b))
	require.Contains(t, b.String(), "SNAPSHOT")
}

// While the index is rebuilt memory holds one segment's items at a time, and no span of what was compacted.
func TestOpenHoldsOneFooter(t *testing.T) {
	fs, _, _, _ := sample(t)
	b := indexBuilder{l: &Log{fs: fs}, replicas: map[replicaKey]*rebuilt{}}
	var segs []*recovered
	for _, name := range fs.segmentNames() {
		seq, ok := parseSegmentName(strings.TrimPrefix(name, "/log/"))
		require.True(t, ok)
		s, err := loadSegment(fs, "/log", seq, 0)
		require.NoError(t, err)
		require.Nil(t, s.scanned)
		items, err := s.items(fs)
		require.NoError(t, err)
		require.Equal(t, s.sealOK, len(items) > 0)
		for i := 1; i < len(items); i++ {
			require.LessOrEqual(t, items[i-1].off, items[i].off)
		}
		segs = append(segs, s)
	}
	require.NoError(t, b.each(segs, b.place))
	require.NoError(t, b.readMetas())
	require.NoError(t, b.each(segs, b.paint))
	for k, x := range b.replicas {
		for _, s := range x.r.spans {
			require.True(t, s.isRun() || s.last() > x.r.m.compactedTo, k)
		}
	}
}
