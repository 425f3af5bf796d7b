package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"go.uber.org/zap"
)

const (
	// firstSegmentBytes is the size of a new log's first segment. Segments grow with what is live in the
	// log and with how fast they fill, up to Options.SegmentBytes, so that a small log stays small.
	firstSegmentBytes = 256 << 10
	// maxSegmentBytes keeps offsets within 32 bits, and a segment within what recovery reads at once.
	maxSegmentBytes = 2 << 30
	// busyBytesPerSecond is the rate of writing above which new files are not filled with zeros: the log's own fsyncs would wait
	// behind them more than they gain.
	busyBytesPerSecond = 4 << 20
	// quickFill is a segment's life below which the next one is twice as large; four times, below a fifth of it.
	quickFill = 500 * time.Millisecond
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
	rate float64 // bytes a second at which the last segment was filled; 0 if not known
	busy bool    // the log is written so fast that the disk has no time for zeros
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
	l.prepare <- prepareOrder{seq: l.active.h.seq + 1, size: size, rate: l.rate, busy: l.rate > busyBytesPerSecond}
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
			if err != nil && !errors.Is(err, errStopped) {
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
	if err := extend(f, o.size, o.busy, l.pacer(o.rate)); err != nil {
		return nil, "", 0, errors.Join(fmt.Errorf("wal: extend %s: %w", path, err), f.Close(), l.fs.Remove(path))
	}
	return f, path, o.size, nil
}

const (
	// fillLead is how much faster than the log a new file is filled, so that it is ready in time.
	fillLead = 4
	// minRate is the least rate that is reckoned with: a log that was idle may be busy the next moment.
	minRate = 8 << 20
)

// pacer returns a function that waits between the chunks of a new file, so that zeros do not come in one rush
// between the log's own writes. Nothing waits any more once the leader does. It returns errStopped when the
// log is closed.
func (l *Log) pacer(rate float64) func(bytes int64) error {
	return func(bytes int64) error {
		wait := time.Duration(0)
		if rate > 0 {
			wait = time.Duration(float64(bytes) / (fillLead * max(rate, minRate)) * float64(time.Second))
		}
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-l.stopMake:
			return errStopped
		case <-l.hurry:
			rate = 0
		case <-t.C:
		}
		return nil
	}
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
	l.rate = float64(l.segments[len(l.segments)-2].h.size) / max(time.Since(l.rotatedAt).Seconds(), 1e-6)
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

// awaitPrepared waits for the answer to the last order, and has it hurry.
func (l *Log) awaitPrepared() preparedSegment {
	select {
	case p := <-l.prepared:
		return p
	default:
	}
	select {
	case l.hurry <- struct{}{}:
	default:
	}
	p := <-l.prepared
	select {
	case <-l.hurry: // nobody took it
	default:
	}
	return p
}

// takePrepared waits for the next segment. If it is too small, or could not be made, it is made here.
func (l *Log) takePrepared(need int64) (*segment, error) {
	p := l.awaitPrepared()
	if p.err == nil && int64(p.seg.h.size) >= need {
		return p.seg, nil
	}
	need = alignUp(need, pageBytes)
	size := max(l.o.SegmentBytes, need)
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
	o := prepareOrder{seq: l.active.h.seq + 1, size: size, busy: true} // somebody waits
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
