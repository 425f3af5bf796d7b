package wal

import (
	"fmt"
	"sort"

	"github.com/lni/dragonboat/v4/raftpb"
)

// replicaKey names one replica of one shard.
type replicaKey struct{ shardID, replicaID uint64 }

// span is a stretch of consecutive entries of a replica: all in one record of one segment, or, if seg
// is nil, a run of metadata entries, which memory holds whole. A live entry costs no memory of its
// own; a record with live entries costs one span, 40 bytes.
type span struct {
	first uint64
	count uint32
	off   uint32   // of the record in seg
	size  uint32   // of the record
	seg   *segment // nil for a run
	aux   uint64   // id of the cached batch; the term, for a run
}

// maxSpanCount keeps count within its type.
const maxSpanCount = 1<<32 - 1

func (s *span) last() uint64 { return s.first + uint64(s.count) - 1 }
func (s *span) isRun() bool  { return s.seg == nil }

// place is where a replica's newest record of a kind lies. A nil segment means nowhere.
type place struct {
	seg  *segment
	size uint32
}

// replica is what the log knows of one replica of one shard. Guarded by Log.mu.
//
// Invariants, checked by Check:
//  1. spans are ascending and without a gap; they cover exactly (m.compactedTo, m.last], or nothing if
//     m.last ≤ m.compactedTo;
//  2. a removed replica has no spans, snapshot, or bootstrap record.
type replica struct {
	key  replicaKey
	m    meta
	snap []byte // marshalled raftpb.Snapshot, nil if none
	boot []byte // marshalled raftpb.Bootstrap, nil if none

	snapIndex uint64
	spans     []span
	spanBytes int64 // of the records of the spans that are pinned

	metaAt place    // newest meta record
	lastAt *segment // segment of the record that says m.last, if newer than the meta record
	snapAt place
	bootAt place
	runsAt map[*segment]struct{} // segments with run records that memory relies on at the next open

	// What memory knows and the log does not yet say. It rides along with the next batch.
	dirty     bool
	metaDirty bool
	snapDirty bool
	bootDirty bool
	runsDirty bool

	// made says that snap was made at open and that no record holds it yet; without it the log is compacted to
	// madeFrom. Until it is written no meta record may say more, as the membership would be lost.
	made     bool
	madeFrom uint64
}

// Check verifies the invariants.
func (r *replica) Check() error {
	if r.m.removed && (len(r.spans) > 0 || r.snap != nil || r.boot != nil) {
		return fmt.Errorf("shard %d replica %d is removed but not empty", r.key.shardID, r.key.replicaID)
	}
	if r.m.last <= r.m.compactedTo {
		if len(r.spans) > 0 {
			return fmt.Errorf("shard %d replica %d has entries from %d, but its last is %d and it is compacted to %d",
				r.key.shardID, r.key.replicaID, r.spans[0].first, r.m.last, r.m.compactedTo)
		}
		return nil
	}
	next := r.m.compactedTo + 1
	for i := range r.spans {
		if r.spans[i].first != next {
			return fmt.Errorf("shard %d replica %d misses entries %d to %d",
				r.key.shardID, r.key.replicaID, next, r.spans[i].first-1)
		}
		next = r.spans[i].last() + 1
	}
	if next != r.m.last+1 {
		return fmt.Errorf("shard %d replica %d misses entries %d to %d",
			r.key.shardID, r.key.replicaID, next, r.m.last)
	}
	return nil
}

// find returns the position in spans of the one that holds index, or of the first behind it.
func (r *replica) find(index uint64) int {
	return sort.Search(len(r.spans), func(i int) bool { return r.spans[i].last() >= index })
}

// truncateFrom drops the entries at and above index.
func (r *replica) truncateFrom(index uint64) {
	for n := len(r.spans); n > 0; n-- {
		s := &r.spans[n-1]
		if s.first < index {
			if s.last() >= index {
				s.count = uint32(index - s.first)
			}
			return
		}
		r.unpinSpan(s)
		r.spans = r.spans[:n-1]
	}
}

// compactTo drops the entries at and below index. It reports whether anything changed.
func (r *replica) compactTo(index uint64) bool {
	if index > r.m.last {
		index = r.m.last
	}
	if index <= r.m.compactedTo {
		return false
	}
	r.m.compactedTo = index
	n := 0
	for n < len(r.spans) && r.spans[n].last() <= index {
		r.unpinSpan(&r.spans[n])
		n++
	}
	r.spans = r.spans[n:]
	if len(r.spans) == 0 {
		r.spans = nil
	} else if s := &r.spans[0]; s.first <= index {
		s.count -= uint32(index + 1 - s.first)
		s.first = index + 1
	}
	return true
}

// push adds s behind the last span and takes over its pin. A run that continues the one before it
// is joined to it.
func (r *replica) push(s span) {
	if n := len(r.spans); n > 0 && s.isRun() {
		p := &r.spans[n-1]
		if p.isRun() && p.aux == s.aux && p.last()+1 == s.first && uint64(p.count)+uint64(s.count) <= maxSpanCount {
			p.count += s.count
			return
		}
	}
	r.spans = append(r.spans, s)
}

// paint puts s over whatever the spans say about its indexes. It is for recovery, which sees records
// in the order of the log: the later one wins.
func (r *replica) paint(s span) {
	if n := len(r.spans); n == 0 || r.spans[n-1].last() < s.first {
		r.push(s)
		return
	}
	lo := r.find(s.first)
	hi := lo
	for hi < len(r.spans) && r.spans[hi].first <= s.last() {
		hi++
	}
	var repl []span
	if lo < len(r.spans) && r.spans[lo].first < s.first {
		left := r.spans[lo]
		left.count = uint32(s.first - left.first)
		repl = append(repl, left)
	}
	repl = append(repl, s)
	if hi > lo && r.spans[hi-1].last() > s.last() {
		right := r.spans[hi-1]
		right.count = uint32(right.last() - s.last())
		right.first = s.last() + 1
		repl = append(repl, right)
	}
	tail := append([]span(nil), r.spans[hi:]...)
	r.spans = append(append(r.spans[:lo:lo], repl...), tail...)
}

// runs lists the run spans.
func (r *replica) runs() []run {
	var rs []run
	for i := range r.spans {
		if s := &r.spans[i]; s.isRun() {
			rs = append(rs, run{s.first, uint64(s.count), s.aux})
		}
	}
	return rs
}

// isWitness reports whether the replica's log holds runs, which only a witness's does.
func (r *replica) isWitness() bool {
	for i := range r.spans {
		if r.spans[i].isRun() {
			return true
		}
	}
	return false
}

func (r *replica) snapshot() (raftpb.Snapshot, error) {
	var ss raftpb.Snapshot
	if r.snap == nil {
		return ss, nil
	}
	if err := ss.Unmarshal(r.snap); err != nil {
		return raftpb.Snapshot{}, fmt.Errorf("wal: snapshot record of shard %d replica %d: %w",
			r.key.shardID, r.key.replicaID, err)
	}
	return ss, nil
}

// pin counts that something needs n bytes in s; unpin takes it back. Log.mu is held.
func pin(s *segment, n uint32) {
	if s != nil {
		s.pins++
		s.live += int64(n)
	}
}

func unpin(s *segment, n uint32) {
	if s != nil {
		s.pins--
		s.live -= int64(n)
	}
}

// pinSpan and unpinSpan count a span of the replica.
func (r *replica) pinSpan(s *span) {
	if s.isRun() {
		return
	}
	pin(s.seg, s.size)
	r.spanBytes += int64(s.size)
	if s.seg.spans == nil {
		s.seg.spans = make(map[*replica]int)
	}
	s.seg.spans[r]++
}

func (r *replica) unpinSpan(s *span) {
	if s.isRun() {
		return
	}
	unpin(s.seg, s.size)
	r.spanBytes -= int64(s.size)
	if n := s.seg.spans[r]; n > 1 {
		s.seg.spans[r] = n - 1
	} else {
		delete(s.seg.spans, r)
	}
}

// move makes p the place of a record of n bytes in seg; a nil seg means nowhere.
func (p *place) move(seg *segment, n uint32) {
	unpin(p.seg, p.size)
	*p = place{seg, n}
	pin(seg, n)
}

// setLastAt makes seg the segment of the record that says m.last; nil if the meta record does.
func (r *replica) setLastAt(seg *segment) {
	unpin(r.lastAt, 0)
	r.lastAt = seg
	pin(seg, 0)
}

// addRunsAt notes that seg holds run records of the replica.
func (r *replica) addRunsAt(seg *segment) {
	if _, ok := r.runsAt[seg]; ok {
		return
	}
	if r.runsAt == nil {
		r.runsAt = make(map[*segment]struct{})
	}
	r.runsAt[seg] = struct{}{}
	pin(seg, 0)
}

// clearRunsAt forgets the segments of run records.
func (r *replica) clearRunsAt() {
	for seg := range r.runsAt {
		unpin(seg, 0)
	}
	r.runsAt = nil
}

// dropEntries forgets every entry.
func (r *replica) dropEntries() {
	for i := range r.spans {
		r.unpinSpan(&r.spans[i])
	}
	r.spans = nil
	r.clearRunsAt()
}

// rewriteSmall marks what the replica needs of seg, beside entries, for rewriting, and reports whether anything
// of it is marked.
func (r *replica) rewriteSmall(seg *segment) bool {
	if r.metaAt.seg == seg || r.lastAt == seg {
		r.metaDirty = true
	}
	if r.snapAt.seg == seg {
		r.snapDirty = true
	}
	if r.bootAt.seg == seg {
		r.bootDirty = true
	}
	if _, ok := r.runsAt[seg]; ok {
		r.runsDirty = true
	}
	return r.metaDirty || r.snapDirty || r.bootDirty || r.runsDirty
}
