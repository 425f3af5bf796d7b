package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/lni/dragonboat/v4/raftpb"
)

// The on-disk format, version 1. docs/format/wal.md says the same in words. Every number in this
// file is part of the format; do not renumber.
const (
	formatVersion = 1

	pageBytes       = 4096 // a segment's header and trailer each own one page
	segmentMagic    = "TQWALSEG"
	trailerMagic    = "TQWALEND"
	batchHeaderSize = 32
	batchAlign      = 8
	recordHeadSize  = 9 // length u32, crc u32, type u8
)

// recordType says what a record holds. Part of the format; do not renumber.
type recordType uint8

const (
	recEntries   recordType = 1 // entries as Raft saved them; the last one is the replica's last index
	recMoved     recordType = 2 // entries copied forward; they change no last index
	recRuns      recordType = 3 // metadata entries of a witness as (first, count, term), saved by Raft
	recRunsMoved recordType = 4 // the same, copied forward
	recMeta      recordType = 5 // a replica's whole small state
	recSnapshot  recordType = 6 // a replica's newest snapshot record
	recBootstrap recordType = 7 // a replica's bootstrap record
	recLiveSet   recordType = 8 // the older segments that exist, first record of every segment
	recFreed     recordType = 9 // segments that are no longer needed
)

func (t recordType) String() string {
	names := [...]string{"", "entries", "moved", "runs", "runs-moved", "meta", "snapshot", "bootstrap", "live-set", "freed"}
	if int(t) < len(names) && t > 0 {
		return names[t]
	}
	return fmt.Sprintf("type-%d", uint8(t))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrCorrupt is wrapped by every error about bytes that are not what was written. Test with errors.Is.
var ErrCorrupt = errors.New("wal: corrupt")

// CorruptionError names the place of a corruption. It wraps ErrCorrupt.
type CorruptionError struct {
	Path      string
	Offset    int64
	ShardID   uint64 // 0 if the place belongs to no replica, or to one that cannot be told
	ReplicaID uint64
	Reason    string
}

func (e *CorruptionError) Error() string {
	if e.ShardID == 0 && e.ReplicaID == 0 {
		return fmt.Sprintf("wal: corrupt: %s at offset %d: %s", e.Path, e.Offset, e.Reason)
	}
	return fmt.Sprintf("wal: corrupt: %s at offset %d, shard %d replica %d: %s",
		e.Path, e.Offset, e.ShardID, e.ReplicaID, e.Reason)
}

func (e *CorruptionError) Unwrap() error { return ErrCorrupt }

// errShort is a decoder's answer to input that ends early or says an impossible size.
var errShort = errors.New("short or malformed")

// segmentHeader is the first page of a segment:
//
//	0 magic [8], 8 version u32, 12 crc u32 (of the page but these four bytes),
//	16 sequence u64, 24 host id u64, 32 salt u64, 40 size u64, zeros to the page's end.
//
// Sequence and salt seed every checksum of the segment, so that what an earlier use left in the
// file, or a message body that looks like a record, is never taken for one.
type segmentHeader struct {
	seq    uint64
	hostID uint64
	salt   uint64
	size   uint64 // of the whole file, bytes
}

func (h segmentHeader) encode() []byte {
	b := make([]byte, pageBytes)
	copy(b, segmentMagic)
	binary.LittleEndian.PutUint32(b[8:], formatVersion)
	binary.LittleEndian.PutUint64(b[16:], h.seq)
	binary.LittleEndian.PutUint64(b[24:], h.hostID)
	binary.LittleEndian.PutUint64(b[32:], h.salt)
	binary.LittleEndian.PutUint64(b[40:], h.size)
	binary.LittleEndian.PutUint32(b[12:], pageCRC(b))
	return b
}

// pageCRC is the checksum of a header or trailer page, without the four bytes that hold it.
func pageCRC(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:])
}

func decodeSegmentHeader(b []byte) (segmentHeader, error) {
	if len(b) < pageBytes || string(b[:8]) != segmentMagic {
		return segmentHeader{}, errors.New("not a segment: bad magic")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != formatVersion {
		return segmentHeader{}, fmt.Errorf("format version %d, this build reads %d", v, formatVersion)
	}
	if binary.LittleEndian.Uint32(b[12:]) != pageCRC(b[:pageBytes]) {
		return segmentHeader{}, errors.New("segment header checksum mismatch")
	}
	h := segmentHeader{
		seq:    binary.LittleEndian.Uint64(b[16:]),
		hostID: binary.LittleEndian.Uint64(b[24:]),
		salt:   binary.LittleEndian.Uint64(b[32:]),
		size:   binary.LittleEndian.Uint64(b[40:]),
	}
	if h.size < 2*pageBytes || h.size > 1<<32-1 {
		return segmentHeader{}, fmt.Errorf("segment header says a size of %d bytes", h.size)
	}
	return h, nil
}

// seed returns what every checksum of the segment starts from.
func (h segmentHeader) seed() uint32 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], h.salt)
	binary.LittleEndian.PutUint64(b[8:], h.seq)
	return crc32.Checksum(b[:], castagnoli)
}

// segmentTrailer is the last page of a sealed segment. It is written, with the footer, before
// the first batch of the next segment, so only the newest segment with batches may lack it:
//
//	0 magic [8], 8 zero u32, 12 crc u32, 16 sequence u64, 24 salt u64, 32 data end u64,
//	40 footer offset u64, 48 footer bytes u64, 56 footer crc u32, zeros.
type segmentTrailer struct {
	dataEnd   uint64 // offset behind the last batch
	footerOff uint64
	footerLen uint64
	footerCRC uint32
}

func (t segmentTrailer) encode(h segmentHeader) []byte {
	b := make([]byte, pageBytes)
	copy(b, trailerMagic)
	binary.LittleEndian.PutUint64(b[16:], h.seq)
	binary.LittleEndian.PutUint64(b[24:], h.salt)
	binary.LittleEndian.PutUint64(b[32:], t.dataEnd)
	binary.LittleEndian.PutUint64(b[40:], t.footerOff)
	binary.LittleEndian.PutUint64(b[48:], t.footerLen)
	binary.LittleEndian.PutUint32(b[56:], t.footerCRC)
	binary.LittleEndian.PutUint32(b[12:], pageCRC(b))
	return b
}

// errNoTrailer means that the page is not this segment's trailer: the segment was never sealed, or
// the seal was cut short.
var errNoTrailer = errors.New("no trailer")

func decodeSegmentTrailer(b []byte, h segmentHeader) (segmentTrailer, error) {
	if len(b) < pageBytes || string(b[:8]) != trailerMagic ||
		binary.LittleEndian.Uint32(b[12:]) != pageCRC(b[:pageBytes]) ||
		binary.LittleEndian.Uint64(b[16:]) != h.seq || binary.LittleEndian.Uint64(b[24:]) != h.salt {
		return segmentTrailer{}, errNoTrailer
	}
	return segmentTrailer{
		dataEnd:   binary.LittleEndian.Uint64(b[32:]),
		footerOff: binary.LittleEndian.Uint64(b[40:]),
		footerLen: binary.LittleEndian.Uint64(b[48:]),
		footerCRC: binary.LittleEndian.Uint32(b[56:]),
	}, nil
}

// batchHeader precedes the records of one atomic batch, which is one write and one fsync:
//
//	0 crc u32 (of the other 28 bytes, seeded by the segment), 4 payload bytes u32,
//	8 segment sequence u64, 16 batch number u64, 24 records u32, 28 own offset u32.
//
// Batches begin at multiples of 8. The batch number grows by one over the whole log.
type batchHeader struct {
	payload uint32
	seq     uint64
	number  uint64
	records uint32
	offset  uint32
}

func (h batchHeader) put(b []byte, seed uint32) {
	binary.LittleEndian.PutUint32(b[4:], h.payload)
	binary.LittleEndian.PutUint64(b[8:], h.seq)
	binary.LittleEndian.PutUint64(b[16:], h.number)
	binary.LittleEndian.PutUint32(b[24:], h.records)
	binary.LittleEndian.PutUint32(b[28:], h.offset)
	binary.LittleEndian.PutUint32(b, crc32.Update(seed, castagnoli, b[4:batchHeaderSize]))
}

// parseBatchHeader returns the header at offset off of a segment, and whether there is one.
func parseBatchHeader(b []byte, off int64, seq uint64, seed uint32) (batchHeader, bool) {
	if len(b) < batchHeaderSize ||
		binary.LittleEndian.Uint64(b[8:]) != seq ||
		binary.LittleEndian.Uint32(b[28:]) != uint32(off) ||
		binary.LittleEndian.Uint32(b) != crc32.Update(seed, castagnoli, b[4:batchHeaderSize]) {
		return batchHeader{}, false
	}
	return batchHeader{
		payload: binary.LittleEndian.Uint32(b[4:]),
		seq:     seq,
		number:  binary.LittleEndian.Uint64(b[16:]),
		records: binary.LittleEndian.Uint32(b[24:]),
		offset:  uint32(off),
	}, true
}

// recordSeed binds a record's checksum to its segment use and its offset.
func recordSeed(seed uint32, off int64) uint32 { return seed ^ uint32(off) }

// record is one decoded record; body aliases the buffer it was parsed from.
type record struct {
	typ       recordType
	shardID   uint64
	replicaID uint64
	body      []byte // what follows shard and replica
	size      int    // whole length on disk
}

// beginRecord appends a record's head, with the checksum still open, and its shard and replica.
func beginRecord(b []byte, typ recordType, shardID, replicaID uint64) []byte {
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, byte(typ))
	b = binary.AppendUvarint(b, shardID)
	return binary.AppendUvarint(b, replicaID)
}

// endRecord closes the record that begins at b[start:] and lies at segment offset off.
func endRecord(b []byte, start int, seed uint32, off int64) {
	r := b[start:]
	binary.LittleEndian.PutUint32(r, uint32(len(r)-8))
	c := crc32.Update(recordSeed(seed, off), castagnoli, r[:4])
	binary.LittleEndian.PutUint32(r[4:], crc32.Update(c, castagnoli, r[8:]))
}

// parseRecord decodes the record at the front of b, which lies at segment offset off, and checks
// its checksum.
func parseRecord(b []byte, seed uint32, off int64) (record, error) {
	if len(b) < recordHeadSize {
		return record{}, errShort
	}
	n := binary.LittleEndian.Uint32(b)
	if n < 1 || uint64(n)+8 > uint64(len(b)) {
		return record{}, errShort
	}
	end := int(n) + 8
	c := crc32.Update(recordSeed(seed, off), castagnoli, b[:4])
	if crc32.Update(c, castagnoli, b[8:end]) != binary.LittleEndian.Uint32(b[4:]) {
		return record{}, errors.New("record checksum mismatch")
	}
	return splitRecord(b[:end])
}

// splitRecord reads a record's type, shard and replica without looking at its checksum.
func splitRecord(b []byte) (record, error) {
	r := record{typ: recordType(b[8]), size: len(b)}
	d := decoder{b: b[recordHeadSize:]}
	r.shardID, r.replicaID = d.uvarint(), d.uvarint()
	r.body = d.b
	return r, d.err
}

// decoder reads integers and byte strings off the front of b. After the first malformed one every
// read returns zero and err is set.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail() {
	if d.err == nil {
		d.err = errShort
	}
	d.b = nil
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) u8() byte {
	if len(d.b) < 1 {
		d.fail()
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) u64() uint64 {
	if len(d.b) < 8 {
		d.fail()
		return 0
	}
	v := binary.LittleEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

// bytes returns the next n bytes; they alias d.b.
func (d *decoder) bytes(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.fail()
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// Flags of an encoded entry: which of its fields follow. Part of the format; do not renumber.
const (
	flagKey         = 1 << 0
	flagClientID    = 1 << 1
	flagSeriesID    = 1 << 2
	flagRespondedTo = 1 << 3
	flagTerm        = 1 << 4 // the term differs from the entry's before it
	flagTypeShift   = 5      // two bits of entry type, and one that must be zero
)

// Body of recEntries and recMoved: first index, count, then per entry: flags u8; term uvarint if
// flagTerm (always for the first); key u64, client id u64, series id u64 if non-zero; responded-to
// uvarint if non-zero; command length uvarint; command. Indexes follow one another.

// appendEntries appends the body of an entries record.
func appendEntries(b []byte, ents []raftpb.Entry) []byte {
	b = binary.AppendUvarint(b, ents[0].Index)
	b = binary.AppendUvarint(b, uint64(len(ents)))
	term := uint64(0)
	for i := range ents {
		b = appendEntry(b, &ents[i], term, i == 0)
		term = ents[i].Term
	}
	return b
}

func appendEntry(b []byte, e *raftpb.Entry, prevTerm uint64, first bool) []byte {
	at := len(b)
	flags := byte(e.Type) << flagTypeShift
	b = append(b, 0)
	if first || e.Term != prevTerm {
		flags |= flagTerm
		b = binary.AppendUvarint(b, e.Term)
	}
	if e.Key != 0 {
		flags |= flagKey
		b = binary.LittleEndian.AppendUint64(b, e.Key)
	}
	if e.ClientID != 0 {
		flags |= flagClientID
		b = binary.LittleEndian.AppendUint64(b, e.ClientID)
	}
	if e.SeriesID != 0 {
		flags |= flagSeriesID
		b = binary.LittleEndian.AppendUint64(b, e.SeriesID)
	}
	if e.RespondedTo != 0 {
		flags |= flagRespondedTo
		b = binary.AppendUvarint(b, e.RespondedTo)
	}
	b[at] = flags
	b = binary.AppendUvarint(b, uint64(len(e.Cmd)))
	return append(b, e.Cmd...)
}

// entrySizeLimit is the most that appendEntry needs for e.
func entrySizeLimit(e *raftpb.Entry) int {
	return 1 + binary.MaxVarintLen64 + 3*8 + binary.MaxVarintLen64 + binary.MaxVarintLen64 + len(e.Cmd)
}

// decodeEntries calls f for each entry of an entries record's body, in order, until f returns
// false. The entry's command aliases body.
func decodeEntries(body []byte, f func(e *raftpb.Entry) bool) error {
	d := decoder{b: body}
	index, count := d.uvarint(), d.uvarint()
	if d.err != nil || count == 0 || count > uint64(len(body)) || index+count < index {
		return errShort
	}
	var e raftpb.Entry
	for i := uint64(0); i < count; i++ {
		if !decodeEntry(&d, &e, i == 0) {
			return errShort
		}
		e.Index = index + i
		if !f(&e) {
			return nil
		}
	}
	if len(d.b) != 0 {
		return errors.New("bytes behind the last entry")
	}
	return nil
}

// decodeEntry reads one entry into e, which holds the entry before it, and reports whether it could.
func decodeEntry(d *decoder, e *raftpb.Entry, first bool) bool {
	flags := d.u8()
	if first && flags&flagTerm == 0 || flags&0x80 != 0 {
		return false
	}
	term := e.Term
	*e = raftpb.Entry{Type: raftpb.EntryType(flags >> flagTypeShift & 3)}
	if flags&flagTerm != 0 {
		term = d.uvarint()
	}
	e.Term = term
	if flags&flagKey != 0 {
		e.Key = d.u64()
	}
	if flags&flagClientID != 0 {
		e.ClientID = d.u64()
	}
	if flags&flagSeriesID != 0 {
		e.SeriesID = d.u64()
	}
	if flags&flagRespondedTo != 0 {
		e.RespondedTo = d.uvarint()
	}
	e.Cmd = d.bytes(d.uvarint())
	if len(e.Cmd) == 0 {
		e.Cmd = nil
	}
	return d.err == nil
}

// run is a stretch of a witness's metadata entries of one term.
type run struct{ first, count, term uint64 }

func (r run) last() uint64 { return r.first + r.count - 1 }

// Body of recRuns and recRunsMoved: count, then per run: first index, number of entries, term.

func appendRuns(b []byte, runs []run) []byte {
	b = binary.AppendUvarint(b, uint64(len(runs)))
	for _, r := range runs {
		b = binary.AppendUvarint(b, r.first)
		b = binary.AppendUvarint(b, r.count)
		b = binary.AppendUvarint(b, r.term)
	}
	return b
}

func decodeRuns(body []byte) ([]run, error) {
	d := decoder{b: body}
	n := d.uvarint()
	if n > uint64(len(body)) {
		return nil, errShort
	}
	runs := make([]run, 0, n)
	for i := uint64(0); i < n; i++ {
		r := run{d.uvarint(), d.uvarint(), d.uvarint()}
		if d.err == nil && (r.count == 0 || r.first+r.count < r.first) {
			return nil, errShort
		}
		runs = append(runs, r)
	}
	if d.err == nil && len(d.b) != 0 {
		return nil, errShort
	}
	return runs, d.err
}

// position is a place in the log: (segment sequence, offset), ordered as written.
type position struct{ seq, off uint64 }

func (p position) before(q position) bool {
	return p.seq < q.seq || p.seq == q.seq && p.off < q.off
}

// meta is the whole small state of a replica.
//
// Body of recMeta: flags u8 (1 has state, 2 removed), term, vote, commit, compacted-to, last index,
// floor segment, floor offset, all uvarint.
type meta struct {
	state       raftpb.State
	hasState    bool
	removed     bool     // the replica's data was removed; only floor means something
	compactedTo uint64   // entries at or below it are gone
	last        uint64   // index of the last entry, or of the snapshot that replaced it; 0 if none
	floor       position // records of the replica before it are void
}

func (m meta) append(b []byte) []byte {
	var flags byte
	if m.hasState {
		flags |= 1
	}
	if m.removed {
		flags |= 2
	}
	b = append(b, flags)
	for _, v := range [...]uint64{m.state.Term, m.state.Vote, m.state.Commit, m.compactedTo,
		m.last, m.floor.seq, m.floor.off} {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

func decodeMeta(body []byte) (meta, error) {
	d := decoder{b: body}
	flags := d.u8()
	m := meta{hasState: flags&1 != 0, removed: flags&2 != 0}
	for _, p := range [...]*uint64{&m.state.Term, &m.state.Vote, &m.state.Commit, &m.compactedTo,
		&m.last, &m.floor.seq, &m.floor.off} {
		*p = d.uvarint()
	}
	if d.err == nil && (len(d.b) != 0 || flags > 3) {
		return meta{}, errShort
	}
	return m, d.err
}

// Body of recLiveSet and recFreed: count, then segment sequences, each as the difference to the one
// before it, ascending.

func appendSeqs(b []byte, seqs []uint64) []byte {
	b = binary.AppendUvarint(b, uint64(len(seqs)))
	prev := uint64(0)
	for _, s := range seqs {
		b = binary.AppendUvarint(b, s-prev)
		prev = s
	}
	return b
}

func decodeSeqs(body []byte) ([]uint64, error) {
	d := decoder{b: body}
	n := d.uvarint()
	if n > uint64(len(body)) {
		return nil, errShort
	}
	seqs := make([]uint64, 0, n)
	prev := uint64(0)
	for i := uint64(0); i < n; i++ {
		prev += d.uvarint()
		seqs = append(seqs, prev)
	}
	if d.err == nil && len(d.b) != 0 {
		return nil, errShort
	}
	return seqs, d.err
}

// footerItem is what recovery needs to know of one record without reading it.
//
// A footer is a count and items: type u8, shard, replica, offset, length; for entries first index
// and count; for runs first, count and term of one run. Of a replica's metas, snapshots and bootstraps
// only the last of the segment is listed, and neighbouring runs of one term are one item.
type footerItem struct {
	typ       recordType
	shardID   uint64
	replicaID uint64
	off       uint32
	length    uint32
	first     uint64
	count     uint64
	term      uint64
}

func (it footerItem) append(b []byte) []byte {
	b = append(b, byte(it.typ))
	b = binary.AppendUvarint(b, it.shardID)
	b = binary.AppendUvarint(b, it.replicaID)
	b = binary.AppendUvarint(b, uint64(it.off))
	b = binary.AppendUvarint(b, uint64(it.length))
	switch it.typ {
	case recEntries, recMoved:
		b = binary.AppendUvarint(b, it.first)
		b = binary.AppendUvarint(b, it.count)
	case recRuns, recRunsMoved:
		b = binary.AppendUvarint(b, it.first)
		b = binary.AppendUvarint(b, it.count)
		b = binary.AppendUvarint(b, it.term)
	}
	return b
}

func decodeFooter(b []byte) ([]footerItem, error) {
	d := decoder{b: b}
	n := d.uvarint()
	if n > uint64(len(b)) {
		return nil, errShort
	}
	items := make([]footerItem, 0, n)
	for i := uint64(0); i < n && d.err == nil; i++ {
		items = append(items, decodeFooterItem(&d))
	}
	if d.err == nil && len(d.b) != 0 {
		return nil, errShort
	}
	return items, d.err
}

func decodeFooterItem(d *decoder) footerItem {
	it := footerItem{typ: recordType(d.u8()), shardID: d.uvarint(), replicaID: d.uvarint(),
		off: uint32(d.uvarint()), length: uint32(d.uvarint())}
	switch it.typ {
	case recEntries, recMoved:
		it.first, it.count = d.uvarint(), d.uvarint()
	case recRuns, recRunsMoved:
		it.first, it.count, it.term = d.uvarint(), d.uvarint(), d.uvarint()
	}
	return it
}
