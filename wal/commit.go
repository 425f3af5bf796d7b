package wal

import (
	"fmt"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
)

const (
	// maxRecordBytes is where the entries of one save are split into records: a reader that wants
	// one entry reads and checks a whole record.
	maxRecordBytes = 256 << 10
	// maxGroupBytes bounds what one fsync carries when more is waiting; one save is never split.
	maxGroupBytes = 8 << 20
	// recordOverhead is the most that a record has around its payload: head, shard, replica, and the
	// integers in front of entries.
	recordOverhead = recordHeadSize + 4*10
	// metaLimit is the most that a meta record takes.
	metaLimit = recordOverhead + 1 + 8*10
)

// request is one caller that waits for its records to be durable.
//
// encode appends the records to the batch and applies them to the index, with Log.mu held, in the
// order in which they will lie in the log. An error is the caller's alone and must leave both as they were.
type request struct {
	encode  func(b *batch) error
	bytes   int  // upper bound of what encode appends
	records int  // upper bound of how many records
	late    bool // encode after everything that is dirty, and see whether all of it went in
	wake    chan wakeup
}

// wakeup tells a waiting request that it is done, or that it is to lead the next batch.
type wakeup struct {
	lead bool
	err  error
}

// submit returns when r's records are durable. The first caller to come leads: it writes and syncs
// what waits at that moment, and everything that comes meanwhile goes into the next batch, so one
// fsync serves all who wait and one who is alone waits for nobody.
func (l *Log) submit(r *request) error {
	r.wake = make(chan wakeup, 1)
	l.queueMu.Lock()
	l.queue = append(l.queue, r)
	if l.leading {
		l.queueMu.Unlock()
		if w := <-r.wake; !w.lead {
			return w.err
		}
		l.queueMu.Lock()
	}
	l.leading = true
	group := l.takeGroupLocked()
	l.queueMu.Unlock()

	errs := l.writeGroup(group)

	l.queueMu.Lock()
	if len(l.queue) > 0 {
		l.queue[0].wake <- wakeup{lead: true}
	} else {
		l.leading = false
	}
	l.queueMu.Unlock()
	var own error
	for i, g := range group {
		if g == r {
			own = errs[i]
		} else {
			g.wake <- wakeup{err: errs[i]}
		}
	}
	return own
}

// takeGroupLocked takes the requests that go out together: all that wait, up to maxGroupBytes.
func (l *Log) takeGroupLocked() []*request {
	n, bytes := 0, 0
	for n < len(l.queue) && (n == 0 || bytes+l.queue[n].bytes <= maxGroupBytes) {
		bytes += l.queue[n].bytes
		n++
	}
	group := l.queue[:n:n]
	l.queue = append([]*request(nil), l.queue[n:]...)
	return group
}

// writeGroup makes one batch of the group and returns an error for each request. Only one goroutine,
// the leader, is in it at a time.
func (l *Log) writeGroup(group []*request) []error {
	errs := make([]error, len(group))
	failAll := func(err error) []error {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = err
			}
		}
		return errs
	}
	l.mu.Lock()
	if err := l.failed; err != nil {
		l.mu.Unlock()
		return failAll(err)
	}
	bytes, records := l.dirtyLimitLocked()
	lateBytes, lateRecords := 0, 0
	for _, r := range group {
		bytes += r.bytes
		records += r.records
		if r.late {
			lateBytes += r.bytes
			lateRecords += r.records
		}
	}
	l.mu.Unlock()
	if err := l.makeRoom(bytes, records); err != nil {
		return failAll(l.fail(err))
	}

	l.mu.Lock()
	b := l.beginBatchLocked()
	b.encodeGroup(group, errs, false)
	l.encodeDirtyLocked(b, lateBytes, lateRecords)
	b.encodeGroup(group, errs, true)
	if b.records == 0 {
		l.mu.Unlock()
		return errs
	}
	f, err := l.finishBatchLocked(b)
	l.mu.Unlock()
	if err == nil {
		err = l.writeBatch(f, b, len(group))
	}
	if err != nil {
		return failAll(l.fail(err))
	}
	l.mu.Lock()
	l.flight = flight{}
	l.mu.Unlock()
	return errs
}

// encodeGroup encodes the requests of the group that are late, or those that are not.
func (b *batch) encodeGroup(group []*request, errs []error, late bool) {
	for i, r := range group {
		if r.late == late {
			errs[i] = r.encode(b)
		}
	}
}

// batch is one atomic batch while it is encoded, at offset off of the active segment. buf is the
// leader's scratch buffer.
type batch struct {
	l       *Log
	seg     *segment
	off     int64
	buf     []byte
	records uint32
	cacheID uint64
	entries bool // holds entries that readers may want back

	start int // of the open record in buf
}

// begin opens a record and returns where its body is to be appended.
func (b *batch) begin(typ recordType, k replicaKey) {
	b.start = len(b.buf)
	b.buf = beginRecord(b.buf, typ, k.shardID, k.replicaID)
}

// end closes the open record, and adds it to the segment's footer as it.
func (b *batch) end(it footerItem) (off, size uint32) {
	off, size = uint32(b.off)+uint32(b.start), uint32(len(b.buf)-b.start)
	endRecord(b.buf, b.start, b.seg.seed, int64(off))
	it.typ, it.off, it.length = recordType(b.buf[b.start+8]), off, size
	b.seg.footer.add(it)
	b.records++
	return off, size
}

// nextPosition is where the next record of the batch will lie.
func (b *batch) nextPosition() position {
	return b.seg.position(uint32(b.off) + uint32(len(b.buf)))
}

func (l *Log) beginBatchLocked() *batch {
	b := &batch{l: l, seg: l.active, off: l.active.off, cacheID: l.cache.nextID(), buf: l.scratch[:0]}
	b.buf = append(b.buf, make([]byte, batchHeaderSize)...)
	if l.active.off == pageBytes {
		l.encodeLiveSetLocked(b)
	}
	return b
}

// encodeLiveSetLocked writes down which older segments exist. It opens every segment, so that recovery
// knows which files must be there.
func (l *Log) encodeLiveSetLocked(b *batch) {
	var seqs []uint64
	for _, s := range l.segments {
		if s != l.active && !s.freed {
			seqs = append(seqs, s.h.seq)
		}
	}
	b.begin(recLiveSet, replicaKey{})
	b.buf = appendSeqs(b.buf, seqs)
	b.end(footerItem{})
}

// finishBatchLocked closes the batch's header and moves the segment's end behind it. It returns the
// active segment's file.
func (l *Log) finishBatchLocked(b *batch) (file, error) {
	l.batchNumber++
	batchHeader{payload: uint32(len(b.buf) - batchHeaderSize), seq: b.seg.h.seq, number: l.batchNumber,
		records: b.records, offset: uint32(b.off)}.put(b.buf, b.seg.seed)
	if b.entries {
		l.cache.add(b.off, b.buf)
	}
	l.flight = flight{seg: b.seg, off: uint32(b.off), buf: b.buf}
	b.seg.off = alignUp(b.off+int64(len(b.buf)), batchAlign)
	l.scratch = b.buf[:0]
	if end := b.off + int64(len(b.buf)); end > int64(b.seg.h.size)-pageBytes {
		return nil, fmt.Errorf("BUG: batch ends at %d of segment %s, which is %d bytes long", end, b.seg.path, b.seg.h.size)
	}
	return l.activeFile, nil
}

// flight is the batch that is being written. The index points into it already, and entries that are moved may
// be read at any time.
type flight struct {
	seg *segment
	off uint32
	buf []byte
}

// get returns a copy of the record that s lies in, or nil if it is not in the batch.
func (f *flight) get(s *span) []byte {
	if s.seg != f.seg || s.off < f.off || uint64(s.off)+uint64(s.size) > uint64(f.off)+uint64(len(f.buf)) {
		return nil
	}
	return append([]byte(nil), f.buf[s.off-f.off:][:s.size]...)
}

// writeBatch writes the batch and makes it durable. The write goes on to the end of its last page, in
// zeros: a page's first write is then always whole, so the kernel never reads it first, and what
// an earlier use left there is gone.
func (l *Log) writeBatch(f file, b *batch, waiters int) error {
	n := len(b.buf)
	padded := int(alignUp(b.off+int64(n), pageBytes) - b.off)
	for len(b.buf) < padded {
		b.buf = append(b.buf, zeroPage[:min(padded-len(b.buf), pageBytes)]...)
	}
	l.scratch = b.buf[:0]
	start := time.Now()
	if _, err := f.WriteAt(b.buf[:padded], b.off); err != nil {
		return fmt.Errorf("wal: write %s at %d: %w", b.seg.path, b.off, err)
	}
	written := time.Now()
	if err := syncPromptly(f); err != nil {
		return fmt.Errorf("wal: sync %s: %w", b.seg.path, err)
	}
	l.metrics.batchWritten(n, waiters, written.Sub(start), time.Since(written))
	if cap(l.scratch) > 2*maxGroupBytes {
		l.scratch = nil // a rare large save does not keep its memory
	}
	return nil
}

var zeroPage [pageBytes]byte

// encodeUpdate appends what ud changes: a snapshot record, entries, and the replica's meta record if
// the entries do not say all of it. Log.mu is held.
func (b *batch) encodeUpdate(ud *raftpb.Update) error {
	r := b.l.replicaLocked(replicaKey{ud.ShardID, ud.ReplicaID})
	if err := checkUpdate(r, ud); err != nil {
		return err
	}
	metaChanged := false
	if !raftpb.IsEmptyState(ud.State) && (!r.m.hasState || ud.State != r.m.state) {
		r.m.state, r.m.hasState, metaChanged = ud.State, true, true
	}
	if r.m.removed && (len(ud.EntriesToSave) > 0 || metaChanged) {
		r.m.removed, metaChanged = false, true
	}
	if ud.Snapshot.Index > r.snapIndex {
		if err := b.replaceBySnapshot(r, ud.Snapshot); err != nil {
			return err
		}
		metaChanged = true
	}
	if len(ud.EntriesToSave) > 0 {
		metaChanged = b.encodeEntries(r, ud.EntriesToSave) || metaChanged
	}
	if metaChanged {
		b.encodeMeta(r)
	}
	return nil
}

// checkUpdate refuses what would leave a gap in a replica's log.
func checkUpdate(r *replica, ud *raftpb.Update) error {
	if len(ud.EntriesToSave) == 0 {
		return nil
	}
	first, n := ud.EntriesToSave[0].Index, uint64(len(ud.EntriesToSave))
	if first == 0 || ud.EntriesToSave[n-1].Index != first+n-1 {
		return fmt.Errorf("BUG: wal: shard %d replica %d saves %d entries from %d to %d",
			ud.ShardID, ud.ReplicaID, n, first, ud.EntriesToSave[n-1].Index)
	}
	last := r.m.last
	if ud.Snapshot.Index > r.snapIndex {
		last = ud.Snapshot.Index
	}
	if last != 0 && first > last+1 {
		return fmt.Errorf("BUG: wal: shard %d replica %d saves entries from %d, its last is %d",
			ud.ShardID, ud.ReplicaID, first, last)
	}
	return nil
}

// replaceBySnapshot drops the replica's entries: a snapshot that came from the leader stands for them.
func (b *batch) replaceBySnapshot(r *replica, ss raftpb.Snapshot) error {
	if err := b.encodeSnapshot(r, ss); err != nil {
		return err
	}
	r.dropEntries()
	r.m.compactedTo, r.m.last = ss.Index, ss.Index
	if r.m.hasState && r.m.state.Commit < ss.Index {
		r.m.state.Commit = ss.Index
	}
	return nil
}

// encodeSnapshot writes ss down as the replica's newest snapshot record.
func (b *batch) encodeSnapshot(r *replica, ss raftpb.Snapshot) error {
	raw, err := ss.Marshal()
	if err != nil {
		return fmt.Errorf("wal: marshal snapshot record: %w", err)
	}
	r.snap, r.snapIndex = raw, ss.Index
	b.encodeRaw(r, recSnapshot, r.snap, &r.snapAt)
	r.snapDirty, r.made = false, false
	return nil
}

// encodeRaw appends a snapshot or bootstrap record with body raw.
func (b *batch) encodeRaw(r *replica, typ recordType, raw []byte, at *place) {
	b.begin(typ, r.key)
	b.buf = append(b.buf, raw...)
	_, size := b.end(footerItem{shardID: r.key.shardID, replicaID: r.key.replicaID})
	at.move(b.seg, size)
}

func (b *batch) encodeMeta(r *replica) {
	b.begin(recMeta, r.key)
	m := r.m
	if r.made {
		m.compactedTo = min(m.compactedTo, r.madeFrom)
	}
	b.buf = m.append(b.buf)
	_, size := b.end(footerItem{shardID: r.key.shardID, replicaID: r.key.replicaID})
	r.metaAt.move(b.seg, size)
	r.setLastAt(nil)
	r.metaDirty = r.made // its record comes with a whole one
}

// encodeEntries appends ents, which replace what the replica has from their first index on. It reports
// whether the meta record must be written because ents do not say all that changed.
func (b *batch) encodeEntries(r *replica, ents []raftpb.Entry) (metaChanged bool) {
	first, last := ents[0].Index, ents[len(ents)-1].Index
	if r.m.last <= r.m.compactedTo && first > r.m.last+1 || r.m.last == 0 {
		r.m.compactedTo, metaChanged = first-1, first > 1
	}
	if first <= r.m.compactedTo {
		r.dropEntries()
		r.m.compactedTo, metaChanged = first-1, true
	} else if first <= r.m.last {
		r.truncateFrom(first)
	}
	for len(ents) > 0 {
		n := b.encodeSome(r, ents)
		ents = ents[n:]
	}
	r.m.last = last
	r.setLastAt(b.seg)
	return metaChanged
}

// encodeSome appends one record with the first entries of ents and returns how many those are.
func (b *batch) encodeSome(r *replica, ents []raftpb.Entry) int {
	if ents[0].Type == raftpb.MetadataEntry && len(ents[0].Cmd) == 0 {
		return b.encodeRun(r, ents)
	}
	n, size := 0, 0
	for n < len(ents) && (n == 0 || size < maxRecordBytes && !isBareMetadata(&ents[n])) {
		size += entrySizeLimit(&ents[n])
		n++
	}
	b.encodeSpan(r, recEntries, ents[:n], r.push)
	return n
}

func isBareMetadata(e *raftpb.Entry) bool {
	return e.Type == raftpb.MetadataEntry && len(e.Cmd) == 0
}

// encodeSpan appends an entries record and gives its span to add.
func (b *batch) encodeSpan(r *replica, typ recordType, ents []raftpb.Entry, add func(span)) {
	b.begin(typ, r.key)
	b.buf = appendEntries(b.buf, ents)
	off, size := b.end(footerItem{shardID: r.key.shardID, replicaID: r.key.replicaID,
		first: ents[0].Index, count: uint64(len(ents))})
	b.entries = true
	s := span{first: ents[0].Index, count: uint32(len(ents)), off: off, size: size, seg: b.seg, aux: b.cacheID}
	r.pinSpan(&s)
	add(s)
}

// encodeRun appends the metadata entries of one term at the front of ents as one run.
func (b *batch) encodeRun(r *replica, ents []raftpb.Entry) int {
	n := 1
	for n < len(ents) && ents[n].Term == ents[0].Term && isBareMetadata(&ents[n]) {
		n++
	}
	b.encodeRunRecord(r, recRuns, []run{{ents[0].Index, uint64(n), ents[0].Term}})
	r.push(span{first: ents[0].Index, count: uint32(n), aux: ents[0].Term})
	return n
}

// encodeRunRecord appends runs, which have one item each in the footer.
func (b *batch) encodeRunRecord(r *replica, typ recordType, runs []run) {
	b.begin(typ, r.key)
	b.buf = appendRuns(b.buf, runs)
	it := footerItem{shardID: r.key.shardID, replicaID: r.key.replicaID}
	it.first, it.count, it.term = runs[0].first, runs[0].count, runs[0].term
	off, size := b.end(it)
	for _, x := range runs[1:] {
		b.seg.footer.add(footerItem{typ: typ, shardID: it.shardID, replicaID: it.replicaID,
			off: off, length: size, first: x.first, count: x.count, term: x.term})
	}
	r.addRunsAt(b.seg)
}

// markDirtyLocked has what is marked in r written with the next batch.
func (l *Log) markDirtyLocked(r *replica) {
	if !r.dirty {
		r.dirty = true
		l.dirty = append(l.dirty, r)
	}
}

// dirtyLimit bounds what encodeDirtyLocked appends for the replica.
func (r *replica) dirtyLimit() (bytes, records int) {
	add := func(dirty bool, n, items int) {
		if dirty {
			bytes += n
			records += items
		}
	}
	add(r.metaDirty, metaLimit, 1)
	add(r.snapDirty, recordOverhead+len(r.snap), 1)
	add(r.bootDirty, recordOverhead+len(r.boot), 1)
	add(r.runsDirty, recordOverhead+3*10*len(r.spans), 1+len(r.spans))
	return bytes, records
}

// dirtyLimitLocked bounds what encodeDirtyLocked appends, and takes no more than a group's worth.
func (l *Log) dirtyLimitLocked() (bytes, records int) {
	for _, r := range l.dirty {
		b, n := r.dirtyLimit()
		if records > 0 && bytes+b > maxGroupBytes {
			break
		}
		bytes, records = bytes+b, records+n
	}
	return bytes, records
}

// fits reports whether the batch can take so much more.
func (b *batch) fits(bytes, records int) bool {
	return b.off+int64(len(b.buf)+bytes)+batchAlign+int64(b.seg.footer.sizeLimit()+records*footerItemLimit) <=
		int64(b.seg.h.size)-pageBytes
}

// encodeDirtyLocked appends what the log does not yet say of the dirty replicas, and leaves room for the late
// requests. What does not fit, because it came up after room was made, stays dirty.
func (l *Log) encodeDirtyLocked(b *batch, lateBytes, lateRecords int) {
	for n, r := range l.dirty {
		bytes, records := r.dirtyLimit()
		if !b.fits(bytes+lateBytes, records+lateRecords) {
			l.dirty = append([]*replica(nil), l.dirty[n:]...)
			return
		}
		r.dirty = false
		if l.replicas[r.key] != r {
			continue
		}
		if r.snapDirty && r.snap != nil {
			b.encodeRaw(r, recSnapshot, r.snap, &r.snapAt)
			r.made = false
		}
		if r.bootDirty && r.boot != nil {
			b.encodeRaw(r, recBootstrap, r.boot, &r.bootAt)
		}
		if r.runsDirty {
			b.rewriteRuns(r)
		}
		if r.metaDirty {
			b.encodeMeta(r)
		}
		r.snapDirty, r.bootDirty, r.runsDirty = false, false, false
	}
	l.dirty = l.dirty[:0]
}

// rewriteRuns writes all of a witness's runs down as one record, so that the older ones are not needed.
func (b *batch) rewriteRuns(r *replica) {
	r.clearRunsAt()
	if runs := r.runs(); len(runs) > 0 {
		b.encodeRunRecord(r, recRunsMoved, runs)
	}
}
