package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

// Recovery. The log is a sequence of segments; all but the last with batches are sealed, and their
// footers say what they hold. Only the newest segment with batches is read through.
//
// The index is rebuilt from records in the order of the log, by three rules:
//   - of a replica's meta, snapshot and bootstrap records the last one counts; nothing before the
//     meta record's floor counts at all;
//   - for each entry the last record that holds it counts, between the meta record's compacted-to and
//     the last index, which the last meta or entries record says, and which moved entries never say;
//   - between those two every entry must be there.
//
// So it does not matter which older segments were given up, as long as what they alone said was
// written again first.
//
// A batch that fails its checks is a torn tail only if it is in the newest segment with batches and no
// batch header of the same use of that file lies behind it; a batch is one write, and the next one
// begins after its sync. Everything else is corruption: the error names the place, and nothing is changed.
//
// What is read may be in the page cache alone: a process that was killed between a write and its sync, or whose
// sync failed, leaves it there. So before anything is done that relies on it, the one batch, seal and name that can be
// in doubt are written again, as they were read, and synced.

// scan is what reading a segment through has found.
type scan struct {
	items   []footerItem
	end     int64 // offset behind the last whole batch
	batches int
	records int
	lastNum uint64
	lastAt  int64    // offset of the last whole batch
	liveSet []uint64 // nil if there was none
	freed   []uint64
	tornAt  int64  // where a torn tail begins, 0 if the end is clean
	tornWhy string // what is wrong there
}

// scanSegment checks every batch in data, the whole of segment s. visit, if not nil, sees each record.
// An error wraps ErrCorrupt.
func scanSegment(s *segment, data []byte, visit func(off int64, r record) error) (scan, error) {
	sc := scan{end: pageBytes}
	limit := min(int64(len(data)), int64(s.h.size)-pageBytes)
	for sc.end+batchHeaderSize <= limit {
		h, ok := parseBatchHeader(data[sc.end:], sc.end, s.h.seq, s.seed)
		if !ok {
			break
		}
		if err := sc.batch(s, data[:limit], h, visit); err != nil {
			var bad *badBatch
			if !errors.As(err, &bad) {
				return sc, err
			}
			return sc, sc.tail(s, data[:limit], bad.at, bad.key, bad.why)
		}
	}
	if sc.garbageAtEnd(s, data[:limit]) {
		return sc, sc.tail(s, data[:limit], sc.end, replicaKey{}, "no valid batch header")
	}
	return sc, sc.tail(s, data[:limit], 0, replicaKey{}, "")
}

// garbageAtEnd reports whether what lies behind the last whole batch was begun in this use of the file:
// a batch's last page is filled up with zeros, and a fresh page either has our sequence in it or is
// what an earlier use left.
func (sc *scan) garbageAtEnd(s *segment, data []byte) bool {
	off := sc.end
	if off+batchHeaderSize > int64(len(data)) {
		return false
	}
	if off%pageBytes == 0 {
		return binary.LittleEndian.Uint64(data[off+8:]) == s.h.seq
	}
	return !allZero(data[off:alignUp(off, pageBytes)])
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// badBatch is the place of the first thing wrong in a batch.
type badBatch struct {
	at  int64
	key replicaKey
	why string
}

func (b *badBatch) Error() string { return b.why }

// batch checks one batch at sc.end and takes it in if it is whole.
func (sc *scan) batch(s *segment, data []byte, h batchHeader, visit func(int64, record) error) error {
	off := sc.end + batchHeaderSize
	end := off + int64(h.payload)
	if end > int64(len(data)) {
		return &badBatch{sc.end, replicaKey{}, "batch reaches beyond the segment"}
	}
	if sc.batches > 0 && h.number != sc.lastNum+1 {
		return s.corrupt(sc.end, replicaKey{}, fmt.Sprintf("batch %d follows batch %d", h.number, sc.lastNum))
	}
	recs := make([]record, 0, min(h.records, 1<<16))
	offs := make([]int64, 0, cap(recs))
	for off < end {
		r, err := parseRecord(data[off:end], s.seed, off)
		if err != nil {
			return &badBatch{off, suspect(data[off:end]), err.Error()}
		}
		recs, offs = append(recs, r), append(offs, off)
		off += int64(r.size)
	}
	if uint32(len(recs)) != h.records {
		return &badBatch{sc.end, replicaKey{}, fmt.Sprintf("batch has %d records, its header says %d", len(recs), h.records)}
	}
	for i := range recs {
		if err := sc.record(s, offs[i], &recs[i]); err != nil {
			return err
		}
		if visit != nil {
			if err := visit(offs[i], recs[i]); err != nil {
				return err
			}
		}
	}
	sc.batches++
	sc.records += len(recs)
	sc.lastNum = h.number
	sc.lastAt = sc.end
	sc.end = alignUp(end, batchAlign)
	return nil
}

// suspect names the replica that a record that failed its checks says to be of.
func suspect(b []byte) replicaKey {
	if len(b) < recordHeadSize {
		return replicaKey{}
	}
	r, err := splitRecord(b)
	if err != nil {
		return replicaKey{}
	}
	return replicaKey{r.shardID, r.replicaID}
}

// record adds a checked record to what the scan knows.
func (sc *scan) record(s *segment, off int64, r *record) error {
	items, err := recordItems(r, uint32(off))
	if err == nil {
		switch r.typ {
		case recLiveSet:
			sc.liveSet, err = decodeSeqs(r.body)
		case recFreed:
			var seqs []uint64
			seqs, err = decodeSeqs(r.body)
			sc.freed = append(sc.freed, seqs...)
		}
	}
	if err != nil {
		return s.corrupt(off, replicaKey{r.shardID, r.replicaID}, r.typ.String()+" record: "+err.Error())
	}
	sc.items = append(sc.items, items...)
	return nil
}

// recordItems returns what a footer says of the record.
func recordItems(r *record, off uint32) ([]footerItem, error) {
	it := footerItem{typ: r.typ, shardID: r.shardID, replicaID: r.replicaID, off: off, length: uint32(r.size)}
	switch r.typ {
	case recEntries, recMoved:
		d := decoder{b: r.body}
		it.first, it.count = d.uvarint(), d.uvarint()
		if d.err != nil || it.count == 0 || it.count > maxSpanCount {
			return nil, errShort
		}
	case recRuns, recRunsMoved:
		runs, err := decodeRuns(r.body)
		if err != nil {
			return nil, err
		}
		items := make([]footerItem, 0, len(runs))
		for _, x := range runs {
			it.first, it.count, it.term = x.first, x.count, x.term
			items = append(items, it)
		}
		return items, nil
	case recMeta, recSnapshot, recBootstrap:
	case recLiveSet, recFreed:
		return nil, nil
	default:
		return nil, fmt.Errorf("unknown record type %d", uint8(r.typ))
	}
	return []footerItem{it}, nil
}

// tail decides what the first bad place, at bad if that is not 0, is: a torn tail, or, if a batch
// header lies behind it, corruption.
func (sc *scan) tail(s *segment, data []byte, bad int64, k replicaKey, why string) error {
	for off := sc.end + batchAlign; off+batchHeaderSize <= int64(len(data)); off += batchAlign {
		if off%pageBytes == 0 && off+pageBytes <= int64(len(data)) && bytes.Equal(data[off:off+pageBytes], zeroPage[:]) {
			off += pageBytes - batchHeaderSize // no header is all zeros: its segment's sequence is not 0
			continue
		}
		if h, ok := parseBatchHeader(data[off:], off, s.h.seq, s.seed); ok {
			if bad == 0 {
				bad, why = sc.end, "no valid batch header"
			}
			return s.corrupt(bad, k, fmt.Sprintf("%s, and batch %d lies behind it at %d", why, h.number, off))
		}
	}
	sc.tornAt, sc.tornWhy = bad, why
	return nil
}

// recovered is one segment file at open.
type recovered struct {
	*segment
	sealOK  bool         // trailer and footer are whole
	sealWhy string       // what is wrong with them otherwise
	trailer bool         // the trailer page is whole, whatever the footer
	scanned []footerItem // what reading it through has found; nil for the others, whose footers say it
}

// items lists what the segment holds, in order. A footer is read each time, so that memory holds one at a time.
func (r *recovered) items(fs fileSystem) ([]footerItem, error) {
	items := r.scanned
	if r.sealOK {
		f, _, err := r.acquire(fs)
		if err != nil {
			return nil, err
		}
		defer r.release()
		sl, whole, why, err := r.readSeal(f)
		if err == nil && whole {
			items, err = decodeFooter(sl.footer)
		}
		if err != nil || !whole {
			return nil, errors.Join(err, r.corrupt(int64(r.h.size)-pageBytes, replicaKey{}, "footer: "+why))
		}
	}
	sort.SliceStable(items, func(i, j int) bool { return items[i].off < items[j].off })
	return items, nil
}

func pathIn(dir, name string) string { return filepath.Join(dir, name) }

// parseSegmentName returns the sequence in a segment's file name.
func parseSegmentName(name string) (seq uint64, ok bool) {
	hex, found := strings.CutSuffix(name, segmentSuffix)
	if !found || len(hex) != 16 {
		return 0, false
	}
	seq, err := strconv.ParseUint(hex, 16, 64)
	return seq, err == nil
}

// recover reads the directory and builds the index. It writes nothing before it has found everything
// in order.
func (l *Log) recover() error {
	started := time.Now()
	segs, err := l.loadSegments()
	if err == nil && len(segs) > 0 {
		err = l.recoverFrom(segs)
	}
	if err != nil {
		for _, s := range segs {
			err = errors.Join(err, s.closeIdle())
		}
		return err
	}
	if len(segs) == 0 {
		if err := l.syncParent(); err != nil {
			return err
		}
		return l.createFirst()
	}
	l.logger.Info("Raft log opened", zap.String("dir", l.o.Dir), zap.Int("segments", len(l.segments)),
		zap.Int("replicas", len(l.replicas)), zap.Duration("took", time.Since(started)))
	return nil
}

// syncParent makes the name of a new log's directory durable. A directory whose parent this process may not read was not
// made by it.
func (l *Log) syncParent() error {
	err := l.fs.SyncDir(filepath.Dir(filepath.Clean(l.o.Dir)))
	if err != nil && !errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("wal: sync the parent of %s: %w", l.o.Dir, err)
	}
	return nil
}

func (l *Log) recoverFrom(segs []*recovered) error {
	end, err := l.findEnd(segs)
	if err != nil {
		return err
	}
	live, garbage, err := end.splitGarbage(segs)
	if err != nil {
		return err
	}
	if err := l.buildIndex(live); err != nil {
		return err
	}
	return l.adopt(live, garbage, segs, &end)
}

// loadSegments opens every segment's header and footer, ascending by sequence.
func (l *Log) loadSegments() ([]*recovered, error) {
	names, err := l.fs.List(l.o.Dir)
	if err != nil {
		return nil, fmt.Errorf("wal: list %s: %w", l.o.Dir, err)
	}
	var segs []*recovered
	logged := time.Now()
	for i, name := range names {
		if strings.HasSuffix(name, spareSuffix) {
			l.spares = append(l.spares, spare{path: pathIn(l.o.Dir, name)})
			continue
		}
		seq, ok := parseSegmentName(name)
		if !ok {
			continue
		}
		s, err := loadSegment(l.fs, l.o.Dir, seq, l.o.HostID)
		if err != nil {
			return segs, err
		}
		segs = append(segs, s)
		if time.Since(logged) > time.Second {
			logged = time.Now()
			l.logger.Info("reading the Raft log", zap.Int("segment", i+1), zap.Int("of", len(names)))
		}
	}
	sort.Slice(segs, func(i, j int) bool { return segs[i].h.seq < segs[j].h.seq })
	if len(segs) == 0 && len(l.spares) > 0 && l.sparesWereUsed() {
		return nil, &CorruptionError{Path: l.o.Dir, Reason: "there are spare files of a log, but no segment"}
	}
	return segs, nil
}

// sparesWereUsed reports whether a spare was ever a segment, as opposed to one that a crash left behind
// while the first segment was made.
func (l *Log) sparesWereUsed() bool {
	for i := range l.spares {
		page := make([]byte, pageBytes)
		f, err := l.fs.Open(l.spares[i].path)
		if err != nil {
			return true
		}
		_, err = f.ReadAt(page, 0)
		if f.Close() != nil || err == nil && !allZero(page) {
			h, err := decodeSegmentHeader(page)
			return err != nil || h.seq > 1
		}
	}
	return false
}

// anyHost, as a host id, accepts segments of every host. It is for the tools.
const anyHost = 1<<64 - 1

// loadSegment reads a segment's header, trailer and footer.
func loadSegment(fs fileSystem, dir string, seq, hostID uint64) (*recovered, error) {
	path := pathIn(dir, segmentName(seq))
	f, err := fs.Open(path)
	if err != nil {
		return nil, fmt.Errorf("wal: open segment: %w", err)
	}
	bad := func(off int64, why string) error {
		return errors.Join(&CorruptionError{Path: path, Offset: off, Reason: why}, f.Close())
	}
	page := make([]byte, pageBytes)
	if _, err := f.ReadAt(page, 0); err != nil {
		return nil, bad(0, "segment header: "+err.Error())
	}
	h, err := decodeSegmentHeader(page)
	if err != nil {
		return nil, bad(0, err.Error())
	}
	if h.seq != seq {
		return nil, bad(0, fmt.Sprintf("the header says segment %d", h.seq))
	}
	if h.hostID != hostID && hostID != anyHost {
		return nil, bad(0, fmt.Sprintf("the segment is of host %d, this is host %d", h.hostID, hostID))
	}
	if size, err := f.Size(); err != nil || size < int64(h.size) {
		return nil, bad(0, fmt.Sprintf("the file has %d bytes, its header says %d", size, h.size))
	}
	r := &recovered{segment: newSegment(h, dir)}
	r.handle.f = f
	return r, r.loadFooter(f)
}

// seal is the trailer page and the footer of a sealed segment, as they were read.
type seal struct {
	page    []byte
	trailer segmentTrailer
	footer  []byte
}

// readSeal reads the trailer, and the footer that it tells of. whole says whether they pass their checks, and why what
// is wrong otherwise; without a trailer, sl.page is nil.
func (s *segment) readSeal(f file) (sl seal, whole bool, why string, err error) {
	page := make([]byte, pageBytes)
	if _, err := f.ReadAt(page, int64(s.h.size)-pageBytes); err != nil {
		return seal{}, false, "", fmt.Errorf("wal: read %s: %w", s.path, err)
	}
	t, err := decodeSegmentTrailer(page, s.h)
	if err != nil {
		return seal{}, false, err.Error(), nil
	}
	sl = seal{page: page, trailer: t}
	size, err := f.Size()
	if err != nil {
		return seal{}, false, "", fmt.Errorf("wal: size of %s: %w", s.path, err)
	}
	if t.footerOff > uint64(size) || t.footerLen > uint64(size)-t.footerOff {
		return sl, false, "footer reaches beyond the file", nil
	}
	sl.footer = make([]byte, t.footerLen)
	if _, err := f.ReadAt(sl.footer, int64(t.footerOff)); err != nil {
		return seal{}, false, "", fmt.Errorf("wal: read %s at %d: %w", s.path, t.footerOff, err)
	}
	if crc32.Update(s.seed, castagnoli, sl.footer) != t.footerCRC {
		return sl, false, fmt.Sprintf("footer at %d: checksum mismatch", t.footerOff), nil
	}
	return sl, true, "", nil
}

// loadFooter reads the trailer and the footer, if there are any.
func (r *recovered) loadFooter(f file) error {
	sl, whole, why, err := r.readSeal(f)
	r.trailer, r.sealWhy = sl.page != nil, why
	if err != nil || !whole {
		return err
	}
	if _, err := decodeFooter(sl.footer); err != nil {
		r.sealWhy = fmt.Sprintf("footer at %d: %v", sl.trailer.footerOff, err)
		return nil
	}
	r.sealOK, r.sealed, r.off = true, true, int64(sl.trailer.dataEnd)
	return nil
}

// readAll returns the whole segment.
func (s *segment) readAll(fs fileSystem) ([]byte, error) {
	f, ok, err := s.acquire(fs)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errMoved
	}
	defer s.release()
	data := make([]byte, s.h.size)
	if _, err := f.ReadAt(data, 0); err != nil {
		return nil, fmt.Errorf("wal: read %s: %w", s.path, err)
	}
	return data, nil
}

// ending is where the log ends.
type ending struct {
	active  int    // the segment that the log goes on in
	scanned int    // the newest segment with batches: active, or the one before it
	sc      scan   // of scanned
	last    []byte // its last whole batch, to the end of that page
}

// findEnd finds the newest segment with batches and reads it through. It fails if a segment before the
// active one was never sealed.
func (l *Log) findEnd(segs []*recovered) (ending, error) {
	i := len(segs) - 1
	var e ending
	for ; ; i-- {
		data, err := segs[i].readAll(l.fs)
		if err != nil {
			return ending{}, err
		}
		if e.sc, err = scanSegment(segs[i].segment, data, nil); err != nil {
			return ending{}, err
		}
		if e.sc.batches > 0 {
			e.last = append([]byte(nil), data[e.sc.lastAt:alignUp(e.sc.end, pageBytes)]...)
			clear(e.last[e.sc.end-e.sc.lastAt:])
		}
		if e.sc.batches > 0 || segs[i].sealOK || i == 0 {
			break
		}
	}
	e.active, e.scanned = i, i
	return e, e.check(segs)
}

// check settles which segment is active, and that the ones around it are as they must be.
func (e *ending) check(segs []*recovered) error {
	s := segs[e.scanned]
	switch {
	case e.sc.batches == 0 && s.h.seq > 1:
		return s.corrupt(pageBytes, replicaKey{}, "no batches, and the segments before it are missing")
	case s.sealOK && e.scanned == len(segs)-1:
		return s.corrupt(int64(s.h.size)-pageBytes, replicaKey{}, "the newest segment is sealed: the one after it is missing")
	case s.sealOK && s.off != e.sc.end:
		return s.corrupt(e.sc.end, replicaKey{}, fmt.Sprintf("batches end here, the trailer says at %d", s.off))
	case s.sealOK:
		e.active, e.sc.tornAt = e.scanned+1, 0
	default:
		s.off, s.scanned = e.sc.end, e.sc.items
		for _, it := range e.sc.items {
			s.footer.add(it)
		}
	}
	for i := e.scanned + 1; i < len(segs); i++ {
		if want := segs[i-1].h.seq + 1; segs[i].h.seq != want {
			return &CorruptionError{Path: pathIn(s.dir, segmentName(want)),
				Reason: fmt.Sprintf("segment %d is missing: segments %d and %d are there", want, want-1, segs[i].h.seq)}
		}
	}
	for _, older := range segs[:e.active] {
		if !older.sealOK {
			return older.corrupt(int64(older.h.size)-pageBytes, replicaKey{}, older.sealWhy+", though a newer segment has batches")
		}
	}
	if len(segs) > e.active+2 {
		return segs[e.active+1].corrupt(0, replicaKey{}, "more than one empty segment at the end")
	}
	return nil
}

// splitGarbage returns the segments that count and those that were freed before the crash. It fails if
// one that must be there is not.
func (e *ending) splitGarbage(segs []*recovered) (live, garbage []*recovered, err error) {
	newest := segs[e.scanned]
	need := make(map[uint64]bool)
	for _, q := range e.sc.liveSet {
		need[q] = true
	}
	for _, s := range segs[e.scanned : e.active+1] {
		need[s.h.seq] = true
	}
	for _, q := range e.sc.freed {
		delete(need, q)
	}
	for _, s := range segs[:e.active+1] {
		if need[s.h.seq] {
			live = append(live, s)
			delete(need, s.h.seq)
		} else {
			garbage = append(garbage, s)
		}
	}
	for q := range need {
		return nil, nil, &CorruptionError{Path: filepath.Join(newest.dir, segmentName(q)),
			Reason: fmt.Sprintf("segment %d is missing: segment %d needs it", q, newest.h.seq)}
	}
	return live, garbage, nil
}

// buildIndex fills l.replicas from the segments' items.
func (l *Log) buildIndex(segs []*recovered) error {
	b := indexBuilder{l: l, replicas: make(map[replicaKey]*rebuilt)}
	if err := b.each(segs, b.place); err != nil {
		return err
	}
	if err := b.readMetas(); err != nil {
		return err
	}
	if err := b.each(segs, b.paint); err != nil {
		return err
	}
	return b.finish()
}

// each calls f with every item, in the order of the log.
func (b *indexBuilder) each(segs []*recovered, f func(*segment, *footerItem)) error {
	for _, s := range segs {
		items, err := s.items(b.l.fs)
		if err != nil {
			return err
		}
		for i := range items {
			f(s.segment, &items[i])
		}
	}
	return nil
}

// indexBuilder rebuilds the replicas.
type indexBuilder struct {
	l        *Log
	replicas map[replicaKey]*rebuilt
}

// rebuilt is a replica on its way: the last item of each kind.
type rebuilt struct {
	r                     *replica
	meta, snapshot, boot  footerItem
	metaSeg, snapSeg, bts *segment
	last                  uint64 // said by the last entries record
	lastSeg               *segment
	lastPos               position
}

// place notes the last meta, snapshot and bootstrap of each replica.
func (b *indexBuilder) place(s *segment, it *footerItem) {
	k := replicaKey{it.shardID, it.replicaID}
	x := b.replicas[k]
	if x == nil {
		x = &rebuilt{r: &replica{key: k}}
		b.replicas[k] = x
	}
	switch it.typ {
	case recMeta:
		x.meta, x.metaSeg = *it, s
	case recSnapshot:
		x.snapshot, x.snapSeg = *it, s
	case recBootstrap:
		x.boot, x.bts = *it, s
	}
}

// readMetas reads each replica's last meta record.
func (b *indexBuilder) readMetas() error {
	for k, x := range b.replicas {
		if x.metaSeg == nil {
			continue
		}
		r, err := b.read(x.metaSeg, &x.meta, k)
		if err != nil {
			return err
		}
		if x.r.m, err = decodeMeta(r.body); err != nil {
			return x.metaSeg.corrupt(int64(x.meta.off), k, "meta record: "+err.Error())
		}
	}
	return nil
}

// read reads one of the records that must be whole.
func (b *indexBuilder) read(s *segment, it *footerItem, k replicaKey) (record, error) {
	r, _, err := s.readRecord(b.l.fs, it.off, it.length, k)
	if err == nil && r.typ != it.typ {
		err = s.corrupt(int64(it.off), k, "a "+r.typ.String()+" record where a "+it.typ.String()+" record should be")
	}
	return r, err
}

// paint puts an entries item over what older records say.
func (b *indexBuilder) paint(s *segment, it *footerItem) {
	x := b.replicas[replicaKey{it.shardID, it.replicaID}]
	if s.position(it.off).before(x.r.m.floor) {
		return
	}
	switch it.typ {
	case recEntries, recMoved:
		if it.first+it.count-1 > x.r.m.compactedTo { // what was compacted takes no memory meanwhile
			x.r.paint(span{first: it.first, count: uint32(it.count), off: it.off, size: it.length, seg: s})
		}
	case recRuns, recRunsMoved:
		for first, n := it.first, it.count; n > 0; {
			c := min(n, maxSpanCount)
			x.r.paint(span{first: first, count: uint32(c), aux: it.term})
			first, n = first+c, n-c
		}
		if x.r.runsAt == nil {
			x.r.runsAt = make(map[*segment]struct{})
		}
		x.r.runsAt[s] = struct{}{}
	default:
		return
	}
	if it.typ == recEntries || it.typ == recRuns {
		// The last run of a record is its last item, and items of one record are in order.
		x.last, x.lastSeg, x.lastPos = it.first+it.count-1, s, s.position(it.off)
	}
}

// finish clips the entries, counts what pins segments, and checks that nothing is missing.
func (b *indexBuilder) finish() error {
	for k, x := range b.replicas {
		if err := b.finishOne(k, x); err != nil {
			return err
		}
		b.l.replicas[k] = x.r
	}
	return nil
}

func (b *indexBuilder) finishOne(k replicaKey, x *rebuilt) error {
	r := x.r
	lastSeg := x.lastSeg
	if x.metaSeg != nil && x.lastPos.before(x.metaSeg.position(x.meta.off)) {
		lastSeg = nil
	}
	if lastSeg != nil {
		r.m.last = x.last
	}
	r.clip()
	if r.m.last > r.m.compactedTo || len(r.spans) > 0 {
		if err := r.Check(); err != nil {
			return &CorruptionError{Path: b.l.o.Dir, ShardID: k.shardID, ReplicaID: k.replicaID, Reason: err.Error()}
		}
	}
	b.pinAll(x, lastSeg)
	if err := b.readSmall(k, x); err != nil {
		return err
	}
	if r.m.hasState && r.m.state.Commit < r.snapIndex {
		r.m.state.Commit = r.snapIndex
	}
	if r.boot != nil || r.snap != nil {
		r.m.removed = false
	}
	return nil
}

// clip drops the spans outside (compactedTo, last]. Nothing is pinned yet.
func (r *replica) clip() {
	spans := r.spans[:0]
	for _, s := range r.spans {
		lo, hi := max(s.first, r.m.compactedTo+1), min(s.last(), r.m.last)
		if lo <= hi {
			s.first, s.count = lo, uint32(hi-lo+1)
			spans = append(spans, s)
		}
	}
	r.spans = append([]span(nil), spans...)
}

// pinAll counts what the replica needs of each segment.
func (b *indexBuilder) pinAll(x *rebuilt, lastSeg *segment) {
	r := x.r
	for i := range r.spans {
		r.pinSpan(&r.spans[i])
	}
	runs := r.runsAt
	r.runsAt = nil
	if r.isWitness() {
		for s := range runs {
			r.addRunsAt(s)
		}
	}
	r.metaAt.move(x.metaSeg, x.meta.length)
	r.setLastAt(lastSeg)
}

// readSmall reads the snapshot and bootstrap records.
func (b *indexBuilder) readSmall(k replicaKey, x *rebuilt) error {
	if s := x.snapSeg; s != nil && !s.position(x.snapshot.off).before(x.r.m.floor) {
		rec, err := b.read(s, &x.snapshot, k)
		if err != nil {
			return err
		}
		x.r.snap = rec.body
		ss, err := x.r.snapshot()
		if err != nil {
			return s.corrupt(int64(x.snapshot.off), k, err.Error())
		}
		x.r.snapIndex = ss.Index
		x.r.snapAt.move(s, x.snapshot.length)
	}
	if s := x.bts; s != nil && !s.position(x.boot.off).before(x.r.m.floor) {
		rec, err := b.read(s, &x.boot, k)
		if err != nil {
			return err
		}
		if err := new(raftpb.Bootstrap).Unmarshal(rec.body); err != nil {
			return s.corrupt(int64(x.boot.off), k, "bootstrap record: "+err.Error())
		}
		x.r.boot = rec.body
		x.r.bootAt.move(s, x.boot.length)
	}
	return nil
}

// adopt makes the recovered segments the log's own, makes what was read of them durable, and only then clears away
// what a crash left.
func (l *Log) adopt(live, garbage, all []*recovered, e *ending) error {
	for _, s := range live {
		l.segments = append(l.segments, s.segment)
	}
	l.active = l.segments[len(l.segments)-1]
	l.batchNumber = e.sc.lastNum
	if e.sc.tornAt != 0 {
		l.logger.Warn("cut a torn tail off the Raft log", zap.String("path", l.active.path),
			zap.Int64("offset", e.sc.tornAt), zap.String("reason", e.sc.tornWhy))
	}
	if err := l.synthesizeWitnesses(); err != nil {
		return err
	}
	if err := l.settle(all[e.scanned], e); err != nil {
		return err
	}
	if err := l.openActive(true); err != nil {
		return err
	}
	if err := l.fs.SyncDir(l.o.Dir); err != nil {
		return fmt.Errorf("wal: sync %s: %w", l.o.Dir, err)
	}
	for _, g := range garbage {
		if err := l.discard(g.segment); err != nil {
			return err
		}
	}
	if prepared := all[e.active+1:]; len(prepared) > 0 {
		l.prepared <- preparedSegment{seg: prepared[0].segment}
	} else {
		l.orderNext()
	}
	return nil
}

// settle makes durable what was read of s, the newest segment with batches, and may be in the page cache alone: its
// last batch, because each batch is synced before the next one, and its seal. A sync is not enough, as one that failed
// leaves pages that look clean: the same bytes are written again. Everything older was synced by a process that went on.
func (l *Log) settle(s *recovered, e *ending) error {
	f, _, err := s.acquire(l.fs)
	if err != nil {
		return err
	}
	defer s.release()
	if len(e.last) > 0 {
		if _, err := f.WriteAt(e.last, e.sc.lastAt); err != nil {
			return fmt.Errorf("wal: write %s at %d: %w", s.path, e.sc.lastAt, err)
		}
	}
	if s.sealOK {
		sl, whole, why, err := s.readSeal(f)
		if err != nil {
			return err
		}
		if !whole {
			return s.corrupt(int64(s.h.size)-pageBytes, replicaKey{}, why)
		}
		if err := s.writeSeal(f, sl.trailer, sl.footer); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("wal: sync %s: %w", s.path, err)
	}
	return nil
}

// openActive opens the active segment for writing. At a recovery its trailer page is wiped first: an unfinished seal may
// have left one, on the disk if not in what was read, and what is appended from now on would lie behind the end that it says.
func (l *Log) openActive(wipeTrailer bool) error {
	f, _, err := l.active.acquire(l.fs)
	if err != nil {
		return err
	}
	l.activeFile = f
	if wipeTrailer {
		if _, err := f.WriteAt(zeroPage[:], int64(l.active.h.size)-pageBytes); err != nil {
			return fmt.Errorf("wal: write %s: %w", l.active.path, err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("wal: sync %s: %w", l.active.path, err)
	}
	return nil
}
