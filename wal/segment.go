package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"sync"
)

// Names of the files in a log's directory. Part of the format.
const (
	segmentSuffix = ".seg"   // 16 hex digits of sequence before it
	spareSuffix   = ".spare" // a pre-written file with nothing in it that counts
	lockName      = "LOCK"
)

func segmentName(seq uint64) string { return fmt.Sprintf("%016x%s", seq, segmentSuffix) }

// segment is one file of the log. Its header never changes while it is in use.
//
// The file handle has its own lock, so that reading never waits for the index.
type segment struct {
	h    segmentHeader
	seed uint32
	path string
	dir  string

	// Guarded by Log.mu.
	off    int64 // where the next batch begins; the data's end once sealed
	sealed bool
	freed  bool             // a freed record is in the log; the file is about to go
	pins   int              // how many spans, metas, snapshots, bootstraps and run lists need this segment
	live   int64            // bytes of the records that they need
	spans  map[*replica]int // how many spans of each replica lie here; none without any
	footer footerBuilder

	handle handle
}

// handle opens a segment's file on use and lets it be closed when nobody reads.
type handle struct {
	mu    sync.Mutex
	f     file
	users int
	gone  bool // the segment's file was removed or recycled
}

func newSegment(h segmentHeader, dir string) *segment {
	return &segment{h: h, seed: h.seed(), dir: dir, path: filepath.Join(dir, segmentName(h.seq)), off: pageBytes}
}

// room is how many bytes of batches the segment can still take, beside its footer and trailer.
func (s *segment) room() int64 {
	return int64(s.h.size) - 2*pageBytes - s.off - int64(s.footer.sizeLimit())
}

// position is where a record at offset off lies.
func (s *segment) position(off uint32) position { return position{s.h.seq, uint64(off)} }

// acquire returns the segment's file, open until release. ok is false if the file is gone.
func (s *segment) acquire(fs fileSystem) (f file, ok bool, err error) {
	s.handle.mu.Lock()
	defer s.handle.mu.Unlock()
	if s.handle.gone {
		return nil, false, nil
	}
	if s.handle.f == nil {
		if s.handle.f, err = fs.Open(s.path); err != nil {
			return nil, false, fmt.Errorf("wal: open segment: %w", err)
		}
	}
	s.handle.users++
	return s.handle.f, true, nil
}

// release gives the file back. The last reader of a file that is gone closes it; what was read is good,
// so an error of that is nobody's business.
func (s *segment) release() {
	s.handle.mu.Lock()
	s.handle.users--
	if s.handle.gone && s.handle.users == 0 && s.handle.f != nil {
		_ = s.handle.f.Close()
		s.handle.f = nil
	}
	s.handle.mu.Unlock()
}

// isOpen reports whether the segment's file is open.
func (s *segment) isOpen() bool {
	s.handle.mu.Lock()
	defer s.handle.mu.Unlock()
	return s.handle.f != nil
}

// closeIdle closes the file if nobody uses it.
func (s *segment) closeIdle() error {
	s.handle.mu.Lock()
	defer s.handle.mu.Unlock()
	if s.handle.f == nil || s.handle.users > 0 {
		return nil
	}
	f := s.handle.f
	s.handle.f = nil
	return f.Close()
}

// retire makes every later acquire fail and reports whether nobody was reading, in which case the
// file may be written over.
func (s *segment) retire() (idle bool) {
	s.handle.mu.Lock()
	s.handle.gone = true
	idle = s.handle.users == 0
	s.handle.mu.Unlock()
	return idle
}

// corrupt makes an error that names a place in the segment.
func (s *segment) corrupt(off int64, k replicaKey, reason string) error {
	return &CorruptionError{Path: s.path, Offset: off, ShardID: k.shardID, ReplicaID: k.replicaID, Reason: reason}
}

// readRecord reads and checks the record of length n at off. ok is false if the segment is gone.
func (s *segment) readRecord(fs fileSystem, off, n uint32, k replicaKey) (r record, ok bool, err error) {
	f, ok, err := s.acquire(fs)
	if err != nil || !ok {
		return record{}, ok, err
	}
	defer s.release()
	buf := make([]byte, n)
	if _, err := f.ReadAt(buf, int64(off)); err != nil {
		return record{}, true, fmt.Errorf("wal: read %s at %d: %w", s.path, off, err)
	}
	r, err = parseRecord(buf, s.seed, int64(off))
	if err == nil && (r.size != int(n) || r.shardID != k.shardID || r.replicaID != k.replicaID) {
		err = fmt.Errorf("record is of shard %d replica %d and %d bytes long, want %d bytes",
			r.shardID, r.replicaID, r.size, n)
	}
	if err != nil {
		return record{}, true, s.corrupt(int64(off), k, err.Error())
	}
	return r, true, nil
}

// footerBuilder collects a segment's footer while the segment is written.
type footerBuilder struct {
	entries []byte // encoded items of entries records
	n       int
	small   map[replicaKey]*smallItems
	smalls  int // items in small
}

// smallItems are the items of one replica that replace one another, or grow together.
type smallItems struct {
	meta, snapshot, bootstrap footerItem
	runs                      []footerItem
}

// footerItemLimit is the most that one item takes.
const footerItemLimit = 1 + 7*binary.MaxVarintLen64

// sizeLimit is an upper bound of the footer's encoded size.
func (b *footerBuilder) sizeLimit() int {
	return binary.MaxVarintLen64 + len(b.entries) + b.smalls*footerItemLimit
}

func (b *footerBuilder) add(it footerItem) {
	switch it.typ {
	case recEntries, recMoved:
		b.entries = it.append(b.entries)
		b.n++
	case recMeta, recSnapshot, recBootstrap, recRuns, recRunsMoved:
		b.addSmall(it)
	}
}

func (b *footerBuilder) addSmall(it footerItem) {
	k := replicaKey{it.shardID, it.replicaID}
	s := b.small[k]
	if s == nil {
		if b.small == nil {
			b.small = make(map[replicaKey]*smallItems)
		}
		s = &smallItems{}
		b.small[k] = s
	}
	slot := &s.meta
	switch it.typ {
	case recSnapshot:
		slot = &s.snapshot
	case recBootstrap:
		slot = &s.bootstrap
	case recRuns, recRunsMoved:
		b.addRun(s, it)
		return
	}
	if slot.typ == 0 {
		b.smalls++
	}
	*slot = it
}

// addRun joins neighbouring runs of one term. The joined item has the place of the later record,
// which is right because no other entries of the replica lie between the two.
func (b *footerBuilder) addRun(s *smallItems, it footerItem) {
	if n := len(s.runs); n > 0 {
		p := &s.runs[n-1]
		if p.typ == it.typ && p.term == it.term && p.first+p.count == it.first {
			p.count += it.count
			p.off, p.length = it.off, it.length
			return
		}
	}
	s.runs = append(s.runs, it)
	b.smalls++
}

// encode returns the footer. The order of items means nothing; their offsets do.
func (b *footerBuilder) encode() []byte {
	body := append([]byte(nil), b.entries...)
	n := b.n
	for _, s := range b.small {
		for _, it := range append([]footerItem{s.meta, s.snapshot, s.bootstrap}, s.runs...) {
			if it.typ != 0 {
				body = it.append(body)
				n++
			}
		}
	}
	return append(binary.AppendUvarint(nil, uint64(n)), body...)
}

// seal writes the footer and the trailer and makes them durable. No batch may follow.
func (s *segment) seal(f file) error {
	footer := s.footer.encode()
	t := segmentTrailer{dataEnd: uint64(s.off), footerOff: uint64(alignUp(s.off, pageBytes)),
		footerLen: uint64(len(footer)), footerCRC: crc32.Update(s.seed, castagnoli, footer)}
	if t.footerOff+t.footerLen > s.h.size-pageBytes {
		t.footerOff = s.h.size // does not fit: behind the trailer, and the file is not recycled
	}
	if err := s.writeSeal(f, t, footer); err != nil {
		return err
	}
	if err := syncPromptly(f); err != nil {
		return fmt.Errorf("wal: sync %s: %w", s.path, err)
	}
	return nil
}

// writeSeal writes the footer and the trailer, and does not sync them.
func (s *segment) writeSeal(f file, t segmentTrailer, footer []byte) error {
	if _, err := f.WriteAt(footer, int64(t.footerOff)); err != nil {
		return fmt.Errorf("wal: write footer of %s: %w", s.path, err)
	}
	if _, err := f.WriteAt(t.encode(s.h), int64(s.h.size)-pageBytes); err != nil {
		return fmt.Errorf("wal: write trailer of %s: %w", s.path, err)
	}
	return nil
}

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

// zeroChunk is what fillZeros writes and syncs at once, so that a log that is being written never waits
// behind much of it.
const zeroChunk = 1 << 20

// fillZeros writes size zeros and makes them durable. pause is called between chunks; its error ends it.
func fillZeros(f file, size int64, pause func(bytes int64) error) error {
	zeros := make([]byte, min(zeroChunk, size))
	for off := int64(0); off < size; off += zeroChunk {
		if off > 0 {
			if err := pause(zeroChunk); err != nil {
				return err
			}
		}
		if _, err := f.WriteAt(zeros[:min(zeroChunk, size-off)], off); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// extend makes f size bytes long. A file whose blocks were written before takes an fsync of half the time of one
// whose blocks are only reserved, so zeros are written, unless the log is so busy that this would
// take the disk from it; then the log's own first pass over the file does it for the uses that follow.
func extend(f file, size int64, busy bool, pause func(bytes int64) error) error {
	if busy {
		if err := f.Allocate(size); !errors.Is(err, errNoAllocate) {
			return err
		}
	}
	return fillZeros(f, size, pause)
}
