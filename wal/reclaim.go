package wal

import (
	"errors"
	"fmt"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
)

// wakeReclaim has the reclaimer look for segments that can go.
func (l *Log) wakeReclaim() {
	select {
	case l.reclaim <- struct{}{}:
	default:
	}
}

func (l *Log) reclaimLoop() {
	defer l.workers.Done()
	c := coalescer{l: l}
	for {
		select {
		case <-l.stop:
			return
		case <-l.reclaim:
		}
		for again := true; again; {
			var err error
			if again, err = l.reclaimOnce(); err == nil && !again {
				again, err = c.once()
			}
			if err != nil {
				if !errors.Is(err, errStopped) {
					// What cannot be read cannot be moved: the log would keep the segment, and all that it
					// frees depends on, for ever. It is told like a read that dragonboat makes.
					_ = l.fail(fmt.Errorf("wal: reclaim: %w", err))
				}
				return
			}
		}
	}
}

var errStopped = errors.New("stopped")

// reclaimOnce frees the segments that nobody needs, or else makes one that is mostly garbage so. It
// reports whether there may be more to do.
func (l *Log) reclaimOnce() (again bool, err error) {
	idle, victim, urgent := l.pickVictims()
	if victim == nil && len(idle) == 0 {
		return false, nil
	}
	if len(idle) == 0 {
		if err := l.rewrite(victim, urgent); err != nil {
			return false, err
		}
		idle = []*segment{victim}
	}
	freed, err := l.freeSegments(idle)
	return freed > 0, err
}

// cheapShare is the share of live bytes, one in so many, below which a segment is rewritten at once: it
// costs next to nothing, and small things, such as the tombstones of removed replicas, do not stay.
const cheapShare = 16

// pickVictims returns the sealed segments without anything live. If there are none, it returns the segment
// with the least live in it, if that is next to nothing or garbage outweighs what is live, and whether
// garbage is so much that it must not be rewritten slowly.
func (l *Log) pickVictims() (idle []*segment, victim *segment, urgent bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var total, live int64
	for _, s := range l.segments {
		if !s.sealed || s.freed {
			continue
		}
		if s.pins == 0 {
			idle = append(idle, s)
			continue
		}
		total += int64(s.h.size)
		live += s.live
		if victim == nil || s.live*int64(victim.h.size) < victim.live*int64(s.h.size) {
			victim = s
		}
	}
	garbage, allowed := total-live, max(2*int64(l.active.h.size), live)
	if victim == nil || victim.live*10 > int64(victim.h.size)*9 ||
		garbage <= allowed && victim.live*cheapShare > int64(victim.h.size) {
		victim = nil
	}
	return idle, victim, garbage > 3*allowed
}

// rewrite copies what is live in victim to the log's end.
func (l *Log) rewrite(victim *segment, urgent bool) error {
	p := pace{l: l, urgent: urgent}
	for _, k := range l.markSmall(victim) {
		for {
			spans := l.spansIn(victim, k)
			if len(spans) == 0 {
				break
			}
			n, err := l.moveSpans(victim, k, spans)
			if err != nil {
				return err
			}
			if err := p.spend(n); err != nil {
				return err
			}
		}
	}
	return l.flushDirty()
}

// pace holds the rewriting to Options.RewriteBytesPerSecond.
type pace struct {
	l      *Log
	urgent bool
}

func (p *pace) spend(bytes int) error {
	wait := time.Duration(0)
	if !p.urgent {
		wait = time.Duration(float64(bytes) / float64(p.l.o.RewriteBytesPerSecond) * float64(time.Second))
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-p.l.stop:
		return errStopped
	case <-t.C:
		return nil
	}
}

// markSmall marks everything but entries that replicas need of victim for rewriting, and returns the
// replicas with entries in it. Tombstones that no other segment makes necessary are dropped. It looks at every replica,
// but at no entries.
func (l *Log) markSmall(victim *segment) []replicaKey {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.oldestWithoutLocked(victim)
	var keys []replicaKey
	for k, r := range l.replicas {
		if r.m.removed && r.m.floor.seq < oldest && r.metaAt.seg == victim {
			r.metaAt.move(nil, 0)
			r.setLastAt(nil)
			delete(l.replicas, k)
			continue
		}
		if r.rewriteSmall(victim) {
			l.markDirtyLocked(r)
		}
	}
	for r := range victim.spans {
		keys = append(keys, r.key)
	}
	return keys
}

// oldestWithoutLocked is the sequence of the oldest segment beside victim.
func (l *Log) oldestWithoutLocked(victim *segment) uint64 {
	for _, s := range l.segments {
		if s != victim && !s.freed {
			return s.h.seq
		}
	}
	return victim.h.seq
}

// spansIn returns consecutive spans of k in victim, worth about one record.
func (l *Log) spansIn(victim *segment, k replicaKey) []span {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.replicas[k]
	if r == nil {
		return nil
	}
	var spans []span
	bytes := 0
	for i := range r.spans {
		s := &r.spans[i]
		if s.seg != victim || bytes >= maxRecordBytes {
			if len(spans) > 0 {
				break
			}
			continue
		}
		spans = append(spans, *s)
		bytes += int(s.size)
	}
	return spans
}

// moveSpans writes the entries of spans again and returns how many bytes that were.
func (l *Log) moveSpans(victim *segment, k replicaKey, spans []span) (int, error) {
	var ents []raftpb.Entry
	bytes := 0
	for i := range spans {
		s := &spans[i]
		body, err := l.recordBody(s, nil, k)
		if err != nil {
			return 0, err
		}
		err = decodeEntries(body, func(e *raftpb.Entry) bool {
			if e.Index >= s.first && e.Index <= s.last() {
				ents = append(ents, *e)
				bytes += entrySizeLimit(e)
			}
			return e.Index < s.last()
		})
		if err != nil {
			return 0, s.seg.corrupt(int64(s.off), k, err.Error())
		}
	}
	err := l.submit(&request{bytes: recordOverhead + bytes, records: 1, encode: func(b *batch) error {
		b.encodeMove(victim, k, ents)
		return nil
	}})
	l.metrics.rewritten.Add(float64(bytes))
	return bytes, err
}

// encodeMove writes those of ents that are still in victim, and puts the new place into the index.
// Compaction and truncation may have taken some from either end meanwhile, but nothing can have been
// put into victim, which is sealed.
func (b *batch) encodeMove(victim *segment, k replicaKey, ents []raftpb.Entry) {
	r := b.l.replicas[k]
	if r == nil || len(ents) == 0 {
		return
	}
	first, last := ents[0].Index, ents[len(ents)-1].Index
	lo := r.find(max(first, r.m.compactedTo+1))
	hi := lo
	for hi < len(r.spans) && r.spans[hi].seg == victim && r.spans[hi].first >= first && r.spans[hi].last() <= last {
		hi++
	}
	if hi == lo {
		return
	}
	from, to := r.spans[lo].first, r.spans[hi-1].last()
	b.encodeSpan(r, recMoved, ents[from-first:to-first+1], func(s span) {
		for i := lo; i < hi; i++ {
			r.unpinSpan(&r.spans[i])
		}
		tail := append([]span{s}, r.spans[hi:]...)
		r.spans = append(r.spans[:lo:lo], tail...)
	})
}

// errDirty means that something is not written yet that the request depends on.
var errDirty = errors.New("dirty")

// freeSegments notes in the log that the segments are not needed, and gives up their files. It skips
// those that something needs after all, and returns how many went.
func (l *Log) freeSegments(segs []*segment) (int, error) {
	var freed []*segment
	for {
		err := l.submit(&request{late: true, bytes: recordOverhead + 10*len(segs), records: 1,
			encode: func(b *batch) error {
				if len(l.dirty) > 0 {
					return errDirty
				}
				freed = b.encodeFreed(segs)
				return nil
			}})
		if err == nil {
			break
		}
		if !errors.Is(err, errDirty) {
			return 0, err
		}
	}
	for _, s := range freed {
		if err := l.discard(s); err != nil {
			return 0, l.fail(err)
		}
	}
	return len(freed), nil
}

// encodeFreed appends the record that the segments without pins are freed.
func (b *batch) encodeFreed(segs []*segment) []*segment {
	var freed []*segment
	var seqs []uint64
	for _, s := range segs {
		if s.pins == 0 && !s.freed {
			s.freed = true
			freed = append(freed, s)
			seqs = append(seqs, s.h.seq)
		}
	}
	if len(freed) > 0 {
		b.begin(recFreed, replicaKey{})
		b.buf = appendSeqs(b.buf, seqs)
		b.end(footerItem{})
	}
	return freed
}

// discard gives up a freed segment's file: it becomes a spare if it may be one, or is removed. What the
// log says makes it garbage already; a crash here leaves a file that the next open clears away.
func (l *Log) discard(s *segment) error {
	idle := s.retire()
	l.mu.Lock()
	for i := range l.segments {
		if l.segments[i] == s {
			l.segments = append(l.segments[:i:i], l.segments[i+1:]...)
			break
		}
	}
	keep := idle && len(l.spares) < l.o.RecycleSegments && fitsOrder(int64(s.h.size), l.wantedSize())
	l.mu.Unlock()
	l.metrics.reclaimed.Add(float64(s.h.size))
	if idle {
		if err := s.closeIdle(); err != nil {
			return fmt.Errorf("wal: close %s: %w", s.path, err)
		}
	}
	if !keep {
		if err := l.fs.Remove(s.path); err != nil {
			return fmt.Errorf("wal: remove segment: %w", err)
		}
		return nil
	}
	path := pathIn(l.o.Dir, fmt.Sprintf("%016x%s", s.h.seq, spareSuffix))
	if err := l.fs.Rename(s.path, path); err != nil {
		return fmt.Errorf("wal: recycle segment: %w", err)
	}
	// The old name must be gone for good before the file is written over: a segment whose header says
	// something else than its name is corruption.
	if err := l.fs.SyncDir(l.o.Dir); err != nil {
		return fmt.Errorf("wal: recycle segment: %w", err)
	}
	l.mu.Lock()
	l.spares = append(l.spares, spare{path: path, size: int64(s.h.size)})
	l.mu.Unlock()
	return nil
}

// wantedSize is the size at which a freed segment is worth keeping. Log.mu is held.
func (l *Log) wantedSize() int64 {
	if l.nextBytes != 0 {
		return l.nextBytes
	}
	return int64(l.active.h.size)
}
