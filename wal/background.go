package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

const (
	// firstSegmentBytes is the size of a new log's first segment. Segments grow with what is live in the
	// log and with how fast they fill, up to Options.SegmentBytes, so that a small log stays small.
	firstSegmentBytes = 256 << 10
	// maxSegmentBytes keeps offsets within 32 bits, and a segment within what recovery reads at once.
	maxSegmentBytes = 2 << 30
	// quickFill is a segment's life below which the next one is twice as large; four times, below a fifth of it.
	quickFill = 500 * time.Millisecond
	// spaceInterval is how often the free space is looked at.
	spaceInterval = time.Second
)

// spare is a file whose content does not count, to be written over.
type spare struct {
	path string
	size int64 // 0 if not known
}

// prepareOrder asks for the segment seq, of at least size bytes.
type prepareOrder struct {
	seq  uint64
	size int64
}

// preparedSegment is the answer: an empty durable segment under its name.
type preparedSegment struct {
	seg *segment
	err error
}

// createFirst begins a new log.
func (l *Log) createFirst() error {
	s, err := l.prepareSegment(prepareOrder{seq: 1, size: min(firstSegmentBytes, l.o.SegmentBytes)})
	if err != nil {
		return err
	}
	l.segments = []*segment{s}
	l.active = s
	if err := l.openActive(false); err != nil {
		return err
	}
	l.orderNext()
	return nil
}

// orderNext has the segment after the active one made ready.
func (l *Log) orderNext() {
	size := l.nextBytes
	if size == 0 {
		size = max(firstSegmentBytes, min(int64(l.active.h.size), l.o.SegmentBytes))
		size = min(size, l.o.SegmentBytes)
	}
	l.prepare <- prepareOrder{seq: l.active.h.seq + 1, size: size}
}

// prepareLoop makes segments ready ahead of need, so that the leader never waits for zeros to be written.
func (l *Log) prepareLoop() {
	defer l.maker.Done()
	for {
		select {
		case <-l.stopMake:
			return
		case o := <-l.prepare:
			s, err := l.prepareSegment(o)
			if err != nil {
				l.logger.Warn("cannot prepare the next segment of the Raft log", zap.Error(err))
			}
			l.prepared <- preparedSegment{s, err}
		}
	}
}

// prepareSegment makes an empty segment, from a spare if one fits, and makes it durable under its name.
func (l *Log) prepareSegment(o prepareOrder) (*segment, error) {
	var salt [8]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return nil, fmt.Errorf("wal: salt: %w", err)
	}
	h := segmentHeader{seq: o.seq, hostID: l.o.HostID, salt: binary.LittleEndian.Uint64(salt[:])}
	f, path, size, err := l.takeSpare(o)
	if err != nil {
		return nil, err
	}
	h.size = uint64(size)
	s := newSegment(h, l.o.Dir)
	if err := l.install(f, path, s); err != nil {
		return nil, errors.Join(fmt.Errorf("wal: prepare segment %d: %w", o.seq, err), f.Close())
	}
	s.handle.f = f
	return s, nil
}

// install turns the pre-written file at path into the segment s.
func (l *Log) install(f file, path string, s *segment) error {
	if _, err := f.WriteAt(s.h.encode(), 0); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := l.fs.Rename(path, s.path); err != nil {
		return err
	}
	return l.fs.SyncDir(l.o.Dir)
}

// fitsOrder reports whether a file of so many bytes will do where want are asked for. Twice as many do, so
// that sizes near a boundary do not have files thrown away and written anew.
func fitsOrder(size, want int64) bool { return size >= want && size <= 2*want }

// takeSpare returns a pre-written file for the order: a spare, or a new one.
func (l *Log) takeSpare(o prepareOrder) (file, string, int64, error) {
	for {
		sp, ok := l.popSpare()
		if !ok {
			break
		}
		f, err := l.fs.Open(sp.path)
		if err != nil {
			return nil, "", 0, fmt.Errorf("wal: open spare: %w", err)
		}
		if size, err := f.Size(); err == nil && size%pageBytes == 0 && fitsOrder(size, o.size) {
			return f, sp.path, size, nil
		}
		if err := errors.Join(f.Close(), l.fs.Remove(sp.path)); err != nil {
			return nil, "", 0, fmt.Errorf("wal: remove spare: %w", err)
		}
	}
	path := pathIn(l.o.Dir, fmt.Sprintf("%016x%s", o.seq, spareSuffix))
	f, err := l.fs.Create(path)
	if err != nil {
		return nil, "", 0, fmt.Errorf("wal: create spare: %w", err)
	}
	if err := fillZeros(f, o.size); err != nil {
		return nil, "", 0, errors.Join(fmt.Errorf("wal: fill %s: %w", path, err), f.Close(), l.fs.Remove(path))
	}
	return f, path, o.size, nil
}

// popSpare takes the newest spare.
func (l *Log) popSpare() (spare, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.spares)
	if n == 0 {
		return spare{}, false
	}
	sp := l.spares[n-1]
	l.spares = l.spares[:n-1]
	return sp, true
}

// makeRoom sees to it that the active segment can take so much. Only the leader calls it.
func (l *Log) makeRoom(bytes, records int) error {
	l.mu.Lock()
	need := int64(batchHeaderSize+batchAlign+bytes+recordOverhead+10*len(l.segments)) + int64(records*footerItemLimit)
	fits := need <= l.active.room()
	l.mu.Unlock()
	if fits {
		return nil
	}
	return l.rotate(need)
}

// rotate seals the active segment and goes on in the next one. The next one is durable before the seal,
// and the seal before the first batch of the next one: recovery counts on both.
func (l *Log) rotate(need int64) error {
	next, err := l.takePrepared(need + 3*pageBytes)
	if err != nil {
		return err
	}
	l.mu.Lock()
	empty := l.active.off == pageBytes
	l.mu.Unlock()
	if empty {
		if err := l.writeLiveSet(); err != nil {
			return err
		}
	}
	start := time.Now()
	if err := l.active.seal(l.activeFile); err != nil {
		return err
	}
	l.metrics.rotated(time.Since(start))
	f, _, err := next.acquire(l.fs)
	if err != nil {
		return err
	}
	l.active.release()
	l.mu.Lock()
	l.active.sealed = true
	l.active.footer = footerBuilder{}
	l.segments = append(l.segments, next)
	l.active = next
	l.nextBytes = l.nextSizeLocked()
	l.mu.Unlock()
	l.activeFile = f
	l.rotatedAt = time.Now()
	l.orderNext()
	l.wakeReclaim()
	return nil
}

// writeLiveSet writes the first record of an empty segment that is to be sealed at once.
func (l *Log) writeLiveSet() error {
	l.mu.Lock()
	b := l.beginBatchLocked()
	f, err := l.finishBatchLocked(b)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	err = l.writeBatch(f, b, 0)
	l.mu.Lock()
	l.flight = flight{}
	l.mu.Unlock()
	return err
}

// takePrepared waits for the next segment. If it is too small, or could not be made, it is made here.
func (l *Log) takePrepared(need int64) (*segment, error) {
	p := <-l.prepared
	if p.err == nil && int64(p.seg.h.size) >= need {
		return p.seg, nil
	}
	size := l.o.SegmentBytes
	if p.err == nil {
		size = max(int64(p.seg.h.size), 1<<bits.Len64(uint64(need-1)))
		if err := errors.Join(p.seg.closeIdle(), l.fs.Remove(p.seg.path)); err != nil {
			return nil, fmt.Errorf("wal: replace a segment that is too small: %w", err)
		}
	} else if l.nextBytes != 0 {
		size = max(l.nextBytes, need)
	}
	if size > maxSegmentBytes {
		return nil, fmt.Errorf("wal: one save of %d bytes does not fit into a segment", need)
	}
	o := prepareOrder{seq: l.active.h.seq + 1, size: size}
	s, err := l.prepareSegment(o)
	if o.size = max(firstSegmentBytes, need); err != nil && o.size < size {
		return l.prepareSegment(o) // a full disk may have room for a small one
	}
	return s, err
}

// nextSizeLocked is the size for the segment after the one just begun.
func (l *Log) nextSizeLocked() int64 {
	live := int64(0)
	for _, s := range l.segments {
		live += s.live
	}
	size := int64(firstSegmentBytes)
	for size < l.o.SegmentBytes && size < live {
		size *= 2
	}
	last := int64(l.segments[len(l.segments)-2].h.size)
	switch life := time.Since(l.rotatedAt); {
	case life < quickFill/5:
		size = max(size, 4*last)
	case life < quickFill:
		size = max(size, 2*last)
	case fitsOrder(last, size):
		size = last
	}
	return min(size, l.o.SegmentBytes)
}

// spaceLoop reports when the free space crosses the line.
func (l *Log) spaceLoop() {
	defer l.workers.Done()
	t := time.NewTicker(spaceInterval)
	defer t.Stop()
	low := l.checkSpace(false)
	for {
		select {
		case <-l.stop:
			return
		case <-t.C:
			low = l.checkSpace(low)
			l.trimFiles()
		}
	}
}

// maxIdleFiles is how many sealed segments stay open after a cold read.
const maxIdleFiles = 64

// trimFiles closes the files of sealed segments that nobody reads, if there are many.
func (l *Log) trimFiles() {
	l.mu.Lock()
	segs := append([]*segment(nil), l.segments...)
	l.mu.Unlock()
	open := 0
	for _, s := range segs {
		if !s.isOpen() {
			continue
		}
		if open++; open <= maxIdleFiles {
			continue
		}
		if err := s.closeIdle(); err != nil {
			l.logger.Warn("cannot close a segment", zap.String("path", s.path), zap.Error(err))
		}
	}
}

// checkSpace looks at the free space, reports a crossing from wasLow, and returns which side it is on.
func (l *Log) checkSpace(wasLow bool) bool {
	free, err := l.fs.FreeBytes(l.o.Dir)
	if err != nil {
		l.logger.Warn("cannot tell the free space of the Raft log's disk", zap.Error(err))
		return wasLow
	}
	l.metrics.freeBytes.Set(float64(free))
	low := free < l.o.LowSpaceBytes
	if low == wasLow {
		return low
	}
	l.logger.Warn("free space of the Raft log's disk crossed the line", zap.Bool("low", low),
		zap.Uint64("free_bytes", free), zap.Uint64("line_bytes", l.o.LowSpaceBytes))
	if l.o.OnSpace != nil {
		l.o.OnSpace(SpaceReport{Low: low, FreeBytes: free})
	}
	return low
}

// wakeReclaim has the reclaimer look for segments that can go.
func (l *Log) wakeReclaim() {
	select {
	case l.reclaim <- struct{}{}:
	default:
	}
}

func (l *Log) reclaimLoop() {
	defer l.workers.Done()
	for {
		select {
		case <-l.stop:
			return
		case <-l.reclaim:
		}
		for again := true; again; {
			var err error
			if again, err = l.reclaimOnce(); err != nil {
				if !errors.Is(err, errStopped) {
					l.logger.Error("reclaiming space in the Raft log failed", zap.Error(err))
				}
				break
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
// replicas with entries in it. Tombstones that no other segment makes necessary are dropped.
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
		for i := range r.spans {
			if r.spans[i].seg == victim {
				keys = append(keys, k)
				break
			}
		}
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
			unpinSpan(&r.spans[i])
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
