package queue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Values begin with a format byte; integers are varints unless said otherwise (docs/format/keys.md). A value is
// canonical: one state has one encoding, since replicas compare bytes.
const (
	metaFormat     = 1
	messageFormat  = 1
	producerFormat = 1
	// producerFormat2 is that of a producer that has registered since the shard's first recovery.
	producerFormat2 = 2
	dedupFormat     = 1
	groupFormat     = 1
	retryFormat     = 1
	leaseFormat     = 1
	leaseFormat2    = 2 // with the time of the hand-out
	deadFormat      = 1
	opFormat        = 1
	countFormat     = 1
	doneFormat      = 1
	exportFormat    = 1
)

// ErrCorrupt is wrapped by every error that a damaged key or value of the store gives: the replica must stop.
var ErrCorrupt = errors.New("queue: corrupt state")

// ErrDamaged is wrapped, beside ErrCorrupt, by those that say that a record does not have the checksum with which it was written: that is this
// replica's trouble alone.
var ErrDamaged = errors.New("wrong checksum")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// field readers and writers of values

func putUint(dst []byte, v uint64) []byte { return binary.AppendUvarint(dst, v) }

func putBytes(dst, b []byte) []byte { return append(putUint(dst, uint64(len(b))), b...) }

func putString(dst []byte, s string) []byte { return append(putUint(dst, uint64(len(s))), s...) }

func putBool(dst []byte, b bool) []byte {
	if b {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// valueReader reads fields; after the first damage it reads zeros and remembers.
type valueReader struct {
	b   []byte
	bad bool
}

func readValue(what string, format byte, b []byte) (valueReader, error) {
	if len(b) == 0 || b[0] != format {
		return valueReader{}, fmt.Errorf("%w: %s value % .16x: want format %d", ErrCorrupt, what, b, format)
	}
	return valueReader{b: b[1:]}, nil
}

func (r *valueReader) fail() { r.b, r.bad = nil, true }

func (r *valueReader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *valueReader) byte() byte {
	if len(r.b) == 0 {
		r.fail()
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *valueReader) bool() bool {
	v := r.byte()
	if v > 1 {
		r.fail()
	}
	return v == 1
}

// bytes aliases the value.
func (r *valueReader) bytes() []byte {
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *valueReader) string() string { return string(r.bytes()) }

func (r *valueReader) done(what string) error {
	if r.bad || len(r.b) != 0 {
		return fmt.Errorf("%w: %s value does not parse", ErrCorrupt, what)
	}
	return nil
}

// metaValue is the shard's own record.
type metaValue struct {
	Meta
	nextGroup  GroupID
	checkpoint uint64 // the last checkpoint id
	// Entries of the delayed index whose address is at or below purgedTo are of messages that a purge or drop
	// removed; they count no more. While sweeping, Retention commands remove them, going on from sweepAt.
	purgedTo Address
	sweeping bool
	sweepAt  DelayedKey
}

func (m *metaValue) encode(dst []byte) []byte {
	dst = append(dst, metaFormat)
	dst = putUint(dst, uint64(m.Applied))
	dst = putUint(dst, uint64(m.Clock))
	dst = putUint(dst, uint64(m.Last))
	dst = putUint(dst, uint64(m.Line))
	dst = putUint(dst, uint64(m.nextGroup))
	dst = putUint(dst, uint64(m.FormatLevel))
	dst = putUint(dst, m.RecoveryNumber)
	dst = putBool(dst, m.Retired)
	dst = putUint(dst, m.checkpoint)
	dst = putUint(dst, uint64(m.purgedTo))
	dst = putBool(dst, m.sweeping)
	dst = putUint(dst, uint64(m.sweepAt.VisibleAt))
	dst = putUint(dst, uint64(m.sweepAt.Address))
	for _, c := range m.Counters.list() {
		dst = putUint(dst, *c)
	}
	return AppendQueueOptions(dst, m.Options)
}

func (m *metaValue) decode(b []byte) error {
	r, err := readValue("meta", metaFormat, b)
	if err != nil {
		return err
	}
	m.Applied = Index(r.uint())
	m.Clock = Stamp(r.uint())
	m.Last = Address(r.uint())
	m.Line = Address(r.uint())
	m.nextGroup = GroupID(r.uint())
	m.FormatLevel = uint32(r.uint())
	m.RecoveryNumber = r.uint()
	m.Retired = r.bool()
	m.checkpoint = r.uint()
	m.purgedTo = Address(r.uint())
	m.sweeping = r.bool()
	m.sweepAt.VisibleAt = Stamp(r.uint())
	m.sweepAt.Address = Address(r.uint())
	for _, c := range m.Counters.list() {
		*c = r.uint()
	}
	if r.bad {
		return r.done("meta")
	}
	m.Options, err = DecodeQueueOptions(r.b)
	if err != nil {
		return fmt.Errorf("%w: meta: %w", ErrCorrupt, err)
	}
	return nil
}

// list names the counters in the order of the format.
func (c *Counters) list() [15]*uint64 {
	return [15]*uint64{&c.Messages, &c.Bytes, &c.Parked, &c.Delayed, &c.Published, &c.PublishedBytes, &c.Duplicates,
		&c.NonIdempotent, &c.Refused, &c.Reclaimed, &c.Purged, &c.Dropped, &c.Expired, &c.Cancelled, &c.Producers}
}

// Flags of a message value.
const (
	messageDelayed   = 1 << 0 // it has an entry in the delayed index (parked ones only)
	messageStraggler = 1 << 1 // parked because it held the reclaim line
	messageDied      = 1 << 2 // parked because it became a dead letter
)

// messageHead is a message value without its headers and body.
type messageHead struct {
	flags     byte
	size      uint64 // bytes of body, headers and key
	stamp     Stamp
	visibleAt Stamp
	expiresAt Stamp
	producer  Producer
	seq       Seq
	key       []byte
}

func (h *messageHead) put(dst []byte, priority byte) []byte {
	dst = append(dst, messageFormat, h.flags, priority)
	dst = putUint(dst, h.size)
	dst = putUint(dst, uint64(h.stamp))
	dst = putUint(dst, uint64(h.visibleAt))
	dst = putUint(dst, uint64(h.expiresAt))
	dst = append(dst, byte(h.producer.Kind))
	if h.producer.Kind != ProducerNone {
		dst = be.AppendUint64(dst, h.producer.ID)
		dst = putUint(dst, h.producer.Sub)
		dst = putUint(dst, uint64(h.seq))
	}
	return putBytes(dst, h.key)
}

func (h *messageHead) read(b []byte) (valueReader, error) {
	r, err := readValue("message", messageFormat, b)
	if err != nil {
		return r, err
	}
	h.flags = r.byte()
	_ = r.byte() // priority
	h.size = r.uint()
	h.stamp, h.visibleAt, h.expiresAt = Stamp(r.uint()), Stamp(r.uint()), Stamp(r.uint())
	h.producer = Producer{Kind: ProducerKind(r.byte())}
	if h.producer.Kind != ProducerNone {
		if len(r.b) < 8 {
			r.fail()
			return r, r.done("message")
		}
		h.producer.ID = be.Uint64(r.b)
		r.b = r.b[8:]
		h.producer.Sub, h.seq = r.uint(), Seq(r.uint())
	}
	h.key = r.bytes()
	if r.bad {
		return r, r.done("message")
	}
	return r, nil
}

// readHead reads the head only; nothing is verified, so a list need not touch bodies.
func readHead(b []byte) (messageHead, error) {
	var h messageHead
	_, err := h.read(b)
	return h, err
}

func uintLen(v uint64) int {
	n := 1
	for ; v >= 0x80; v >>= 7 {
		n++
	}
	return n
}

// tailLen is the length of headers, body and checksum in a message value.
func tailLen(m *Message) int {
	n := uintLen(uint64(len(m.Headers)))
	for i := range m.Headers {
		h := &m.Headers[i]
		n += uintLen(uint64(len(h.Name))) + len(h.Name) + uintLen(uint64(len(h.Value))) + len(h.Value)
	}
	return n + uintLen(uint64(len(m.Body))) + len(m.Body) + 4
}

// fillMessage writes a whole value of len(head)+tailLen bytes into dst.
func fillMessage(dst, head []byte, m *Message) {
	out := append(dst[:0], head...)
	out = putUint(out, uint64(len(m.Headers)))
	for i := range m.Headers {
		out = putString(out, m.Headers[i].Name)
		out = putBytes(out, m.Headers[i].Value)
	}
	out = putBytes(out, m.Body)
	be.AppendUint32(out, crc32.Checksum(out, castagnoli))
}

// readMessage decodes and verifies a whole value; the result aliases nothing.
func readMessage(a Address, parked bool, value []byte) (StoredMessage, error) {
	if len(value) < 4 || crc32.Checksum(value[:len(value)-4], castagnoli) != be.Uint32(value[len(value)-4:]) {
		return StoredMessage{}, fmt.Errorf("%w: message %s: %w", ErrCorrupt, a, ErrDamaged)
	}
	b := append([]byte(nil), value[:len(value)-4]...)
	var h messageHead
	r, err := h.read(b)
	if err != nil {
		return StoredMessage{}, err
	}
	m := StoredMessage{Address: a, Stamp: h.stamp, VisibleAt: h.visibleAt, ExpiresAt: h.expiresAt,
		Producer: h.producer, Seq: h.seq, Parked: parked, Key: h.key}
	if len(m.Key) == 0 {
		m.Key = nil
	}
	n := r.uint()
	if n > MaxHeaders {
		r.fail()
		n = 0
	}
	if n > 0 {
		m.Headers = make([]Header, n)
	}
	for i := range m.Headers {
		m.Headers[i].Name = r.string()
		m.Headers[i].Value = r.bytes()
	}
	m.Body = r.bytes()
	return m, r.done("message")
}

// rewriteMessage makes a copy of a value with other flags and visible-at.
func rewriteMessage(value []byte, flags byte, visibleAt Stamp) ([]byte, error) {
	if len(value) < 4 || crc32.Checksum(value[:len(value)-4], castagnoli) != be.Uint32(value[len(value)-4:]) {
		return nil, fmt.Errorf("%w: message: %w", ErrCorrupt, ErrDamaged)
	}
	var h messageHead
	r, err := h.read(value[:len(value)-4])
	if err != nil {
		return nil, err
	}
	h.flags, h.visibleAt = flags, visibleAt
	out := make([]byte, 0, len(value)+10)
	out = append(h.put(out, value[2]), r.b...)
	return be.AppendUint32(out, crc32.Checksum(out, castagnoli)), nil
}

// run is a stretch of a producer's seqs whose messages lie at consecutive addresses.
type run struct {
	seq   Seq
	first Address
	n     uint64
}

// producerValue is what a shard remembers of a producer. Runs are in order of seq, disjoint, none wholly below low.
type producerValue struct {
	epoch uint64
	use   Stamp // last use, rounded down to useGrain
	low   Seq
	last  Seq // the greatest seq accepted
	runs  []run
	// recovery is the shard's recovery number under which it registered. While it is not the shard's, the producer must
	// come with a greater epoch.
	recovery uint64
}

func (p *producerValue) encode(dst []byte) []byte {
	if p.recovery == 0 {
		dst = append(dst, producerFormat)
	} else {
		dst = putUint(append(dst, producerFormat2), p.recovery)
	}
	dst = putUint(dst, p.epoch)
	dst = putUint(dst, uint64(p.use))
	dst = putUint(dst, uint64(p.low))
	dst = putUint(dst, uint64(p.last))
	dst = putUint(dst, uint64(len(p.runs)))
	var seq Seq
	for _, r := range p.runs {
		dst = putUint(dst, uint64(r.seq-seq))
		dst = putUint(dst, uint64(r.first))
		dst = putUint(dst, r.n)
		seq = r.seq + Seq(r.n)
	}
	return dst
}

func (p *producerValue) decode(b []byte) error {
	format := byte(producerFormat)
	if len(b) > 0 && b[0] == producerFormat2 {
		format = producerFormat2
	}
	r, err := readValue("producer", format, b)
	if err != nil {
		return err
	}
	if format == producerFormat2 {
		if p.recovery = r.uint(); p.recovery == 0 {
			r.fail()
		}
	}
	p.epoch, p.use = r.uint(), Stamp(r.uint())
	p.low, p.last = Seq(r.uint()), Seq(r.uint())
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.fail()
		n = 0
	}
	p.runs = make([]run, n)
	var seq Seq
	for i := range p.runs {
		x := run{seq: seq + Seq(r.uint()), first: Address(r.uint()), n: r.uint()}
		p.runs[i] = x
		seq = x.seq + Seq(x.n)
	}
	return r.done("producer")
}

type dedupValue struct {
	address   Address
	expiresAt Stamp
}

func (d dedupValue) encode(dst []byte) []byte {
	return putUint(putUint(append(dst, dedupFormat), uint64(d.address)), uint64(d.expiresAt))
}

func (d *dedupValue) decode(b []byte) error {
	r, err := readValue("dedup", dedupFormat, b)
	if err != nil {
		return err
	}
	d.address, d.expiresAt = Address(r.uint()), Stamp(r.uint())
	return r.done("dedup")
}

// retryValue is what Expire entries left of an unfinished, not dead message.
type retryValue struct {
	RetryState
	firstFailure Stamp
}

func (v *retryValue) encode(dst []byte) []byte {
	dst = append(dst, retryFormat)
	dst = putUint(dst, uint64(v.Change))
	dst = putUint(dst, uint64(v.Round))
	dst = putUint(dst, uint64(v.Attempts))
	dst = putUint(dst, uint64(v.NotBefore))
	dst = putUint(dst, uint64(v.firstFailure))
	return putString(dst, v.Reason)
}

func (v *retryValue) decode(b []byte) error {
	r, err := readValue("retry", retryFormat, b)
	if err != nil {
		return err
	}
	v.Change, v.Round, v.Attempts = Change(r.uint()), uint32(r.uint()), uint32(r.uint())
	v.NotBefore, v.firstFailure = Stamp(r.uint()), Stamp(r.uint())
	v.Reason = r.string()
	return r.done("retry")
}

func putLease(dst []byte, l *RecordedLease) []byte {
	if l.Begun == 0 { // as it was before there was one
		dst = append(dst, leaseFormat)
	} else {
		dst = putUint(append(dst, leaseFormat2), uint64(l.Begun))
	}
	dst = putUint(dst, uint64(l.Name.Epoch))
	dst = putUint(dst, l.Name.Number)
	dst = putUint(dst, uint64(l.Deadline))
	dst = putUint(dst, uint64(l.Attempts))
	return putString(dst, l.Consumer)
}

func readLease(b []byte) (RecordedLease, error) {
	format := byte(leaseFormat)
	if len(b) > 0 && b[0] == leaseFormat2 {
		format = leaseFormat2
	}
	r, err := readValue("lease", format, b)
	if err != nil {
		return RecordedLease{}, err
	}
	var l RecordedLease
	if format == leaseFormat2 {
		if l.Begun = Stamp(r.uint()); l.Begun == 0 {
			r.fail() // one value has one encoding
		}
	}
	l.Name.Epoch, l.Name.Number = Epoch(r.uint()), r.uint()
	l.Deadline, l.Attempts = Stamp(r.uint()), uint32(r.uint())
	l.Consumer = r.string()
	return l, r.done("lease")
}

// putDead encodes a dead letter; Address and Message are not part of it.
func putDead(dst []byte, d *DeadLetter) []byte {
	dst = append(dst, deadFormat)
	dst = putUint(dst, uint64(d.Change))
	dst = putUint(dst, uint64(d.Round))
	dst = putUint(dst, uint64(d.Attempts))
	dst = putUint(dst, uint64(d.FirstFailure))
	dst = putUint(dst, uint64(d.DeadAt))
	dst = putUint(dst, d.ExportNumber)
	dst = append(dst, byte(d.ExportState))
	dst = putUint(dst, d.Target)
	return putString(dst, d.Reason)
}

func readDead(a Address, b []byte) (DeadLetter, error) {
	r, err := readValue("dead", deadFormat, b)
	if err != nil {
		return DeadLetter{}, err
	}
	d := DeadLetter{Address: a, Change: Change(r.uint()), Round: uint32(r.uint()), Attempts: uint32(r.uint())}
	d.FirstFailure, d.DeadAt = Stamp(r.uint()), Stamp(r.uint())
	d.ExportNumber = r.uint()
	d.ExportState = ExportState(r.byte())
	d.Target = r.uint()
	d.Reason = r.string()
	return d, r.done("dead")
}

// opValue is the answer to an operation id. Fingerprint tells another command under the same id.
type opValue struct {
	expiresAt   Stamp
	fingerprint uint64
	result      []byte
}

func (o *opValue) encode(dst []byte) []byte {
	dst = putUint(append(dst, opFormat), uint64(o.expiresAt))
	return putBytes(be.AppendUint64(dst, o.fingerprint), o.result)
}

func (o *opValue) decode(b []byte) error {
	r, err := readValue("operation", opFormat, b)
	if err != nil {
		return err
	}
	o.expiresAt = Stamp(r.uint())
	if len(r.b) < 8 {
		r.fail()
		return r.done("operation")
	}
	o.fingerprint = be.Uint64(r.b)
	r.b = r.b[8:]
	o.result = append([]byte(nil), r.bytes()...)
	return r.done("operation")
}

// countValue is what a bucket of addresses stores. Messages and bytes are those in place; the parked ones are apart.
type countValue struct {
	messages, bytes              uint64
	parked, parkedBytes, delayed uint64
}

func (c *countValue) empty() bool { return *c == countValue{} }

func (c *countValue) encode(dst []byte) []byte {
	dst = putUint(putUint(append(dst, countFormat), c.messages), c.bytes)
	return putUint(putUint(putUint(dst, c.parked), c.parkedBytes), c.delayed)
}

func (c *countValue) decode(b []byte) error {
	r, err := readValue("count", countFormat, b)
	if err != nil {
		return err
	}
	c.messages, c.bytes = r.uint(), r.uint()
	c.parked, c.parkedBytes, c.delayed = r.uint(), r.uint(), r.uint()
	return r.done("count")
}

func encodeDone(dst []byte, last Address) []byte {
	return be.AppendUint64(append(dst, doneFormat), uint64(last))
}

func decodeDone(b []byte) (Address, error) {
	if len(b) != 9 || b[0] != doneFormat {
		return 0, fmt.Errorf("%w: done value % x", ErrCorrupt, b)
	}
	return Address(be.Uint64(b[1:])), nil
}

// encodeExport encodes the address that an export number stands for.
func encodeExport(dst []byte, a Address) []byte { return putUint(append(dst, exportFormat), uint64(a)) }

func decodeExport(b []byte) (Address, error) {
	r, err := readValue("export", exportFormat, b)
	if err != nil {
		return 0, err
	}
	a := Address(r.uint())
	return a, r.done("export")
}

func corruptf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}
