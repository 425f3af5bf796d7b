package wal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand"
	"slices"
	"testing"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// The bytes of format version 1. If this test fails, every log out there is unreadable: make a new version.
func TestGoldenBytes(t *testing.T) {
	h := segmentHeader{seq: 7, hostID: 3, salt: 0x1122334455667788, size: 1 << 20}
	tr := segmentTrailer{dataEnd: 5000, footerOff: 8192, footerLen: 77, footerCRC: 0xdeadbeef}
	batch := make([]byte, batchHeaderSize)
	batchHeader{payload: 100, seq: 7, number: 42, records: 2, offset: 4096}.put(batch, h.seed())
	var footer footerBuilder
	footer.add(footerItem{typ: recEntries, shardID: 9, replicaID: 300, off: 4128, length: 80, first: 300, count: 3})
	footer.add(footerItem{typ: recMeta, shardID: 9, replicaID: 300, off: 4208, length: 30})
	m := meta{state: raftpb.State{Term: 3, Vote: 2, Commit: 300}, hasState: true, compactedTo: 5, last: 301, floor: position{1, 4128}}
	ss, err := (&raftpb.Snapshot{Index: 5, Term: 1, ShardID: 9, Membership: raftpb.Membership{ConfigChangeId: 1,
		Addresses: map[uint64]string{1: "a"}}}).Marshal()
	require.NoError(t, err)
	bs, err := (&raftpb.Bootstrap{Addresses: map[uint64]string{1: "a"}, Type: raftpb.OnDiskStateMachine}).Marshal()
	require.NoError(t, err)
	rec := func(typ recordType, body []byte) []byte { return goldenRecord(t, h, typ, body) }
	for _, g := range []struct {
		name string
		got  []byte
		want string
	}{
		{"segment header", h.encode()[:56], "545157414c53454701000000ee2c630807000000000000000300000000000000887766554433221100001000000000000000000000000000"},
		{"trailer", tr.encode(h)[:64], "545157414c454e4400000000b9aff4e107000000000000008877665544332211881300000000000000200000000000004d00000000000000efbeadde00000000"},
		{"batch header", batch, "a1b891846400000007000000000000002a000000000000000200000000100000"},
		{"footer", footer.encode(), "020109ac02a02050ac02030509ac02f0201e"},
		{"entries", rec(recEntries, appendEntries(nil, goldenEntries())), "2e000000886d76f50109ac02ac02031f03010000000000000002000000000000000300000000000000040568656c6c6f400100300400"},
		{"runs", rec(recRuns, appendRuns(nil, []run{{5, 1000, 3}, {1005, 1, 4}})), "0d00000009e5778a0309ac020205e80703ed070104"},
		{"meta", rec(recMeta, m.append(nil)), "0f0000009706ce4c0509ac02010302ac0205ad0201a020"},
		{"snapshot", rec(recSnapshot, ss), "23000000f8e0125b0609ac0212001800200528013209080112050801120161480050095800600068007000"},
		{"bootstrap", rec(recBootstrap, bs), "0f00000064b20ed10709ac020a05080112016110001803"},
		{"live set", rec(recLiveSet, appendSeqs(nil, []uint64{1, 2, 300})), "090000000cb956b90809ac02030101aa02"},
		{"freed", rec(recFreed, appendSeqs(nil, []uint64{4})), "060000004f2156d00909ac020104"},
	} {
		if got := hex.EncodeToString(g.got); got != g.want {
			t.Errorf("%s:\n got %s\nwant %s", g.name, got, g.want)
		}
	}
}

// goldenRecord makes a record at offset 4128 and checks that it reads back there and nowhere else.
func goldenRecord(t *testing.T, h segmentHeader, typ recordType, body []byte) []byte {
	b := append(beginRecord(nil, typ, 9, 300), body...)
	endRecord(b, 0, h.seed(), 4128)
	r, err := parseRecord(b, h.seed(), 4128)
	require.NoError(t, err)
	require.Equal(t, record{typ: typ, shardID: 9, replicaID: 300, body: r.body, size: len(b)}, r)
	require.Equal(t, body, r.body)
	_, err = parseRecord(b, h.seed(), 4136)
	require.Error(t, err, "%s at another offset", typ)
	_, err = parseRecord(b, segmentHeader{seq: 8, salt: h.salt}.seed(), 4128)
	require.Error(t, err, "%s in another segment", typ)
	return b
}

func goldenEntries() []raftpb.Entry {
	return []raftpb.Entry{
		{Index: 300, Term: 3, Key: 1, ClientID: 2, SeriesID: 3, RespondedTo: 4, Cmd: []byte("hello")},
		{Index: 301, Term: 3, Type: raftpb.EncodedEntry, Cmd: []byte{0}},
		{Index: 302, Term: 4, Type: raftpb.ConfigChangeEntry},
	}
}

func TestEntriesRoundTrip(t *testing.T) {
	var got []raftpb.Entry
	require.NoError(t, decodeEntries(appendEntries(nil, goldenEntries()), func(e *raftpb.Entry) bool {
		got = append(got, *e)
		return true
	}))
	require.Equal(t, fmt.Sprint(goldenEntries()), fmt.Sprint(got))
}

// FuzzRecord feeds arbitrary bytes to every decoder: none may panic, run away, or take what does not encode
// to the same bytes again.
func FuzzRecord(f *testing.F) {
	f.Add(byte(recEntries), appendEntries(nil, goldenEntries()))
	f.Add(byte(recRuns), appendRuns(nil, []run{{5, 1000, 3}}))
	f.Add(byte(recMeta), meta{hasState: true, last: 5}.append(nil))
	f.Add(byte(recLiveSet), appendSeqs(nil, []uint64{1, 5}))
	f.Add(byte(0), []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, typ byte, body []byte) {
		decodeAnything(t, typ, body)
	})
}

// decodeAnything feeds body to every decoder.
func decodeAnything(t *testing.T, typ byte, body []byte) {
	r := record{typ: recordType(typ), body: body, size: len(body)}
	_ = describe(&r)
	_, _ = recordItems(&r, 0)
	if items, err := decodeFooter(body); err == nil {
		again := binary.AppendUvarint(nil, uint64(len(items)))
		for _, it := range items {
			again = it.append(again)
		}
		back, err := decodeFooter(again)
		require.NoError(t, err)
		require.Equal(t, items, back)
	}
	if seqs, err := decodeSeqs(body); err == nil {
		again, err := decodeSeqs(appendSeqs(nil, seqs))
		require.NoError(t, err)
		require.Equal(t, seqs, again)
		require.True(t, slices.IsSorted(seqs))
	}
	_, _ = decodeSegmentTrailer(body, segmentHeader{seq: 7})
	_, _ = decodeSegmentHeader(body)
	_, _ = parseRecord(body, 1, 2)
	var ents []raftpb.Entry
	if decodeEntries(body, func(e *raftpb.Entry) bool { ents = append(ents, *e); return true }) == nil {
		var again []raftpb.Entry
		require.NoError(t, decodeEntries(appendEntries(nil, ents), func(e *raftpb.Entry) bool { again = append(again, *e); return true }))
		require.Equal(t, len(ents), len(again))
		for i := range ents {
			require.True(t, equalEntry(&ents[i], &again[i]))
		}
	}
	if m, err := decodeMeta(body); err == nil {
		again, err := decodeMeta(m.append(nil))
		require.NoError(t, err)
		require.Equal(t, m, again)
	}
	if runs, err := decodeRuns(body); err == nil {
		again, err := decodeRuns(appendRuns(nil, runs))
		require.NoError(t, err)
		require.Equal(t, runs, again)
	}
}

// The same as FuzzRecord, with a fixed seed, for every run of the tests.
func TestDecodersSurviveDamage(t *testing.T) {
	const seed = 11
	rng := rand.New(rand.NewSource(seed))
	bodies := [][]byte{nil, appendEntries(nil, goldenEntries()), appendRuns(nil, []run{{5, 1000, 3}, {1005, 1, 4}}),
		meta{hasState: true, last: 5}.append(nil), appendSeqs(nil, []uint64{1, 5})}
	for i := 0; i < 50_000; i++ {
		b := append([]byte(nil), bodies[rng.Intn(len(bodies))]...)
		for n := rng.Intn(4); n > 0 && len(b) > 0; n-- {
			switch at := rng.Intn(len(b)); rng.Intn(3) {
			case 0:
				b[at] = byte(rng.Intn(256))
			case 1:
				b = b[:at]
			default:
				b = append(b[:at:at], append([]byte{0xff, byte(rng.Intn(256))}, b[at:]...)...)
			}
		}
		decodeAnything(t, byte(rng.Intn(12)), b)
	}
}

// FuzzSegment damages a whole segment: the scan must not panic, and what it takes for whole must be a
// prefix of what was written.
func FuzzSegment(f *testing.F) {
	h := segmentHeader{seq: 1, salt: 5, size: 64 << 10}
	s := newSegment(h, "/log")
	data := make([]byte, h.size)
	copy(data, h.encode())
	off := int64(pageBytes)
	for n := uint64(1); n <= 20; n++ {
		b := make([]byte, batchHeaderSize)
		start := len(b)
		b = beginRecord(b, recEntries, 1, 1)
		b = appendEntries(b, []raftpb.Entry{{Index: n, Term: 1, Cmd: bytes.Repeat([]byte{byte(n)}, int(n*50))}})
		endRecord(b, start, s.seed, off+int64(start))
		batchHeader{payload: uint32(len(b) - batchHeaderSize), seq: 1, number: n, records: 1, offset: uint32(off)}.put(b, s.seed)
		copy(data[off:], b)
		off = alignUp(off+int64(len(b)), batchAlign)
	}
	f.Add(uint16(5000), []byte{1})
	f.Add(uint16(4096), []byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, at uint16, patch []byte) {
		bad := append([]byte(nil), data...)
		copy(bad[min(int(at), len(bad)):], patch)
		next := uint64(1)
		sc, err := scanSegment(s, bad, func(_ int64, r record) error {
			return decodeEntries(r.body, func(e *raftpb.Entry) bool {
				require.Equal(t, next, e.Index)
				require.Equal(t, bytes.Repeat([]byte{byte(next)}, int(next*50)), e.Cmd)
				next++
				return true
			})
		})
		if err == nil && sc.batches < 20 && !bytes.Equal(bad[:off], data[:off]) {
			require.GreaterOrEqual(t, int64(at)+int64(len(patch)), sc.end)
		}
	})
}
