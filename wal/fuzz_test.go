package wal

import (
	"errors"
	"math"
	"testing"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// appendFuzzRecord appends a record to the input of FuzzRecovery.
func appendFuzzRecord(in []byte, typ recordType, shard, replica byte, body []byte) []byte {
	in = append(in, byte(typ), shard, replica, byte(len(body)), byte(len(body)>>8))
	return append(in, body...)
}

// segmentOf makes a segment of the records that in describes, one batch each, with every checksum right.
func segmentOf(in []byte) []byte {
	h := segmentHeader{seq: 1, salt: 5, size: 64 << 10}
	seed := h.seed()
	data := make([]byte, h.size)
	copy(data, h.encode())
	off := int64(pageBytes)
	for n := uint64(1); len(in) >= 5; n++ {
		size := min(int(in[3])|int(in[4])<<8, len(in)-5)
		b := beginRecord(make([]byte, batchHeaderSize), recordType(in[0]), uint64(in[1]), uint64(in[2]))
		b = append(b, in[5:5+size]...)
		in = in[5+size:]
		if off+int64(len(b)) > int64(h.size)-pageBytes {
			break
		}
		endRecord(b, batchHeaderSize, seed, off+batchHeaderSize)
		batchHeader{payload: uint32(len(b) - batchHeaderSize), seq: 1, number: n, records: 1, offset: uint32(off)}.put(b, seed)
		copy(data[off:], b)
		off = alignUp(off+int64(len(b)), batchAlign)
	}
	return data
}

// FuzzRecovery has the index built from any records whose checksums are right: that must end in an index that is sound and
// can be read, or in an error, never in a panic or in entries that do not follow one another.
func FuzzRecovery(f *testing.F) {
	ents := func(first uint64, n int) []byte {
		var es []raftpb.Entry
		for i := range n {
			es = append(es, raftpb.Entry{Index: first + uint64(i), Term: 2, Cmd: []byte("x")})
		}
		return appendEntries(nil, es)
	}
	state := func(m meta) []byte {
		m.hasState, m.state = true, raftpb.State{Term: 2, Vote: 1, Commit: 2}
		return m.append(nil)
	}
	snap, err := (&raftpb.Snapshot{Index: 5, Term: 2, ShardID: 1, Membership: raftpb.Membership{ConfigChangeId: 1,
		Addresses: map[uint64]string{1: "a"}}}).Marshal()
	require.NoError(f, err)
	live := appendFuzzRecord(nil, recLiveSet, 0, 0, appendSeqs(nil, nil))
	one := appendFuzzRecord(append([]byte(nil), live...), recMeta, 1, 1, state(meta{}))
	one = appendFuzzRecord(one, recEntries, 1, 1, ents(1, 5))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recEntries, 1, 1, ents(3, 1)))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recMoved, 1, 1, ents(2, 2)))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recMeta, 1, 1, state(meta{compactedTo: 3, last: 5})))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recMeta, 1, 1, meta{removed: true, floor: position{1, 5000}}.append(nil)))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recSnapshot, 1, 1, snap))
	f.Add(appendFuzzRecord(append([]byte(nil), one...), recFreed, 0, 0, appendSeqs(nil, []uint64{1})))
	witness := appendFuzzRecord(append([]byte(nil), live...), recRuns, 2, 1, appendRuns(nil, []run{{1, 100, 1}, {101, 3, 2}}))
	f.Add(appendFuzzRecord(witness, recRunsMoved, 2, 1, appendRuns(nil, []run{{50, 10, 1}})))
	f.Fuzz(func(t *testing.T, in []byte) {
		fs := newCrashFS()
		name := crashDir + "/" + segmentName(1)
		fs.names[name] = &crashNode{data: segmentOf(in)}
		l := toolLog(crashDir, fs)
		segs, err := l.inspect()
		if err != nil {
			return
		}
		for _, s := range segs {
			l.segments = append(l.segments, s.segment)
		}
		require.NoError(t, l.Check())
		for k := range l.replicas {
			readWhole(t, l, k)
		}
	})
}

// readWhole reads what the log says that the replica has.
func readWhole(t *testing.T, l *Log, k replicaKey) {
	rs, err := l.ReadRaftState(k.shardID, k.replicaID, 0)
	if err != nil {
		require.ErrorIs(t, err, raftio.ErrNoSavedLog)
		return
	}
	if rs.EntryCount == 0 {
		return
	}
	require.LessOrEqual(t, rs.FirstIndex, uint64(math.MaxUint64)-rs.EntryCount)
	const most = 1 << 20 // bytes by dragonboat's count
	got, _, err := l.IterateEntries(nil, 0, k.shardID, k.replicaID, rs.FirstIndex, rs.FirstIndex+rs.EntryCount, most)
	if err != nil {
		require.True(t, errors.Is(err, ErrCorrupt), err)
		return
	}
	require.NotEmpty(t, got)
	for i := range got {
		require.Equal(t, rs.FirstIndex+uint64(i), got[i].Index)
	}
}
