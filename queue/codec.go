package queue

import (
	"github.com/tierq/tierq/queue/code"
)

// The encoding of commands (docs/format/command.md): version byte, tag byte, stamp, fields in the order of the
// struct. Numbers are unsigned LEB128 in their shortest form, byte strings and lists have their length before them,
// so every command has exactly one encoding. Part of the format; golden bytes pin every variant.
const (
	commandVersion = 1
	resultVersion  = 1
	configVersion  = 1
	optionsVersion = 1
)

// Tags of the commands. Part of the format; do not renumber.
const (
	tagEnqueue   = 1
	tagAck       = 2
	tagGroup     = 3
	tagExpire    = 4
	tagHome      = 5
	tagRetention = 6
)

const (
	flagContiguous = 1 << iota
	flagAtomic
	flagCheckLast
	publishFlags = flagContiguous | flagAtomic | flagCheckLast
)

// Flags of a Retention. Part of the format; do not renumber.
const (
	flagRetire     = 1 << iota
	flagForget     // a list of outboxes to forget follows the fields
	flagImport     // a chunk of an import follows that
	flagRecover    // a recovery ends the command
	retentionFlags = flagRetire | flagForget | flagImport | flagRecover
)

// Bounds of the decoder where Validate's are not structural.
const (
	maxConfigBytes = 1 << 10
	minPublish     = 8 // the bytes of an empty publish
	minMessage     = 8 // the bytes of an empty message
	minExpireEntry = 12
	minDelayed     = 3
)

// EncodeCommand appends the encoding of a command to dst. A command that Validate refuses is refused, with its
// *code.Error, and dst is returned as it was: what is proposed can be decoded and applied everywhere.
func EncodeCommand(dst []byte, c Command) ([]byte, error) {
	if err := Validate(c); err != nil {
		return dst, err
	}
	return appendCommand(dst, c), nil
}

func appendCommand(dst []byte, c Command) []byte {
	switch c := c.(type) {
	case *Enqueue:
		return c.append(appendHead(dst, tagEnqueue, c.Stamp))
	case *Ack:
		return c.append(appendHead(dst, tagAck, c.Stamp))
	case *Group:
		return c.append(appendHead(dst, tagGroup, c.Stamp))
	case *Expire:
		return c.append(appendHead(dst, tagExpire, c.Stamp))
	case *Home:
		return c.append(appendHead(dst, tagHome, c.Stamp))
	case *Retention:
		return c.append(appendHead(dst, tagRetention, c.Stamp))
	}
	panic("BUG: a command that Validate let pass has no encoding")
}

func appendHead(dst []byte, tag byte, s Stamp) []byte {
	return appendUint(append(dst, commandVersion, tag), s)
}

// DecodeCommand reads one command. Bodies, keys, dedup ids and header values alias b; nothing is allocated beyond
// what b's length can hold. It refuses, with ErrFormat, an unknown version or tag, a number out of its field's range,
// more entries than a command may have, and trailing bytes. It does not replace Validate, which apply calls and whose
// refusals are results.
func DecodeCommand(b []byte) (Command, error) {
	d := decoder{b: b}
	if v := d.byte(); d.err == nil && v != commandVersion {
		return nil, formatErrorf("command version %d: this binary reads version %d", v, commandVersion)
	}
	tag := d.byte()
	stamp := Stamp(d.uint("stamp", uint64(MaxStamp)))
	var c Command
	switch tag {
	case tagEnqueue:
		c = d.enqueue(stamp)
	case tagAck:
		c = d.ack(stamp)
	case tagGroup:
		c = d.group(stamp)
	case tagExpire:
		c = d.expire(stamp)
	case tagHome:
		c = d.home(stamp)
	case tagRetention:
		c = d.retention(stamp)
	default:
		d.failf("command tag %d is unknown", tag)
	}
	if err := d.finish(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Enqueue) append(dst []byte) []byte {
	dst = appendUint(dst, uint64(len(c.Publishes)))
	for i := range c.Publishes {
		dst = c.Publishes[i].append(dst)
	}
	return dst
}

func (d *decoder) enqueue(s Stamp) *Enqueue {
	c := &Enqueue{Stamp: s}
	left := MaxCommandMessages
	if n := d.count("publishes", MaxCommandMessages, minPublish); n > 0 {
		c.Publishes = make([]Publish, n)
	}
	for i := range c.Publishes {
		d.publish(&c.Publishes[i], left)
		left -= len(c.Publishes[i].Messages)
	}
	return c
}

func (p *Publish) append(dst []byte) []byte {
	flags := byte(0)
	if p.Contiguous {
		flags |= flagContiguous
	}
	if p.Atomic {
		flags |= flagAtomic
	}
	if p.CheckLast {
		flags |= flagCheckLast
	}
	dst = append(dst, byte(p.Producer.Kind))
	dst = appendUint(dst, p.Producer.ID)
	dst = appendUint(dst, p.Producer.Sub)
	dst = appendUint(dst, p.ProducerEpoch)
	dst = appendUint(dst, p.Low)
	dst = append(dst, flags)
	dst = appendUint(dst, p.ExpectedLast)
	dst = appendUint(dst, uint64(len(p.Messages)))
	for i := range p.Messages {
		dst = p.Messages[i].append(dst)
	}
	return dst
}

func (d *decoder) publish(p *Publish, maxMessages int) {
	p.Producer.Kind = ProducerKind(d.enum("producer kind", uint8(ProducerOutbox)))
	p.Producer.ID = d.uint64("producer id")
	p.Producer.Sub = d.uint64("producer sub")
	p.ProducerEpoch = d.uint64("producer epoch")
	p.Low = Seq(d.uint64("low"))
	flags := d.enum("publish flags", publishFlags)
	p.Contiguous, p.Atomic, p.CheckLast = flags&flagContiguous != 0, flags&flagAtomic != 0, flags&flagCheckLast != 0
	p.ExpectedLast = d.address("expected last")
	if n := d.count("messages", maxMessages, minMessage); n > 0 {
		p.Messages = d.takeMessages(n)
	}
	for i := range p.Messages {
		d.message(&p.Messages[i])
	}
}

// takeMessages cuts n messages from a slab: most publishes carry one, and an allocation for each would be half of
// the work of decoding. The slab is never larger than what the rest of the input can hold.
func (d *decoder) takeMessages(n int) []Message {
	const slab = 64
	if n > len(d.slab) {
		d.slab = make([]Message, max(n, min(slab, d.remaining()/minMessage)))
	}
	taken := d.slab[:n:n]
	d.slab = d.slab[n:]
	return taken
}

func (m *Message) append(dst []byte) []byte {
	dst = appendUint(dst, m.Seq)
	dst = appendBytes(dst, m.DedupID)
	dst = appendBytes(dst, m.Key)
	dst = appendUint(dst, m.VisibleAt)
	dst = appendUint(dst, m.ExpiresAt)
	dst = append(dst, m.Priority)
	dst = appendHeaders(dst, m.Headers)
	return appendBytes(dst, m.Body)
}

func (d *decoder) message(m *Message) {
	m.Seq = Seq(d.uint64("seq"))
	m.DedupID = d.bytes("dedup id", MaxKeyBytes)
	m.Key = d.bytes("key", MaxKeyBytes)
	m.VisibleAt = d.stamp("visible at")
	m.ExpiresAt = d.stamp("expires at")
	m.Priority = d.byte()
	m.Headers = d.headers()
	m.Body = d.bytes("body", MaxBodyBytesHard)
}

func appendHeaders(dst []byte, headers []Header) []byte {
	dst = appendUint(dst, uint64(len(headers)))
	for i := range headers {
		dst = appendBytes(dst, headers[i].Name)
		dst = appendBytes(dst, headers[i].Value)
	}
	return dst
}

func (d *decoder) headers() []Header {
	n := d.count("headers", MaxHeaders, 2)
	if n == 0 {
		return nil
	}
	headers := make([]Header, n)
	for i := range headers {
		headers[i].Name = d.string("header name", MaxHeaderBytes)
		headers[i].Value = d.bytes("header value", MaxHeaderBytes)
	}
	return headers
}

func (c *Ack) append(dst []byte) []byte {
	dst = appendUint(dst, c.Group)
	dst = appendUint(dst, c.Epoch)
	dst = appendUint(dst, uint64(len(c.Ranges)))
	for _, r := range c.Ranges {
		dst = appendUint(dst, r.First)
		dst = appendUint(dst, r.Last)
	}
	return dst
}

func (d *decoder) ack(s Stamp) *Ack {
	c := &Ack{Stamp: s, Group: GroupID(d.uint64("group")), Epoch: Epoch(d.uint64("epoch"))}
	if n := d.count("ranges", MaxHousekeeping, 2); n > 0 {
		c.Ranges = make([]AddressRange, n)
	}
	for i := range c.Ranges {
		c.Ranges[i] = AddressRange{First: d.address("first"), Last: d.address("last")}
	}
	return c
}

func (c *Group) append(dst []byte) []byte {
	dst = append(dst, byte(c.Op))
	dst = appendUint(dst, c.OperationID)
	dst = appendBytes(dst, c.Name)
	dst = appendUint(dst, c.ID)
	dst = appendUint(dst, c.ExpectedEpoch)
	dst = appendUint(dst, c.ExpectedVersion)
	dst = append(dst, byte(c.Start.Kind))
	dst = appendUint(dst, c.Start.At)
	dst = appendBytes(dst, AppendGroupConfig(nil, c.Config))
	return appendUint(dst, c.FirstHome)
}

func (d *decoder) group(s Stamp) *Group {
	return &Group{
		Stamp:           s,
		Op:              GroupOp(d.enumFrom("group op", uint8(GroupCreate), uint8(GroupConfigure))),
		OperationID:     d.uint64("operation id"),
		Name:            d.string("name", MaxNameBytes),
		ID:              GroupID(d.uint64("group id")),
		ExpectedEpoch:   Epoch(d.uint64("expected epoch")),
		ExpectedVersion: d.uint64("expected version"),
		Start:           Start{Kind: StartKind(d.enum("start kind", uint8(StartTime))), At: d.uint64("start")},
		Config:          nested(d, "group config", DecodeGroupConfig),
		FirstHome:       ReplicaID(d.uint64("first home")),
	}
}

func (c *Expire) append(dst []byte) []byte {
	dst = appendUint(dst, c.Group)
	dst = appendUint(dst, c.Epoch)
	dst = appendUint(dst, uint64(len(c.Entries)))
	for i := range c.Entries {
		dst = c.Entries[i].append(dst)
	}
	return dst
}

func (d *decoder) expire(s Stamp) *Expire {
	c := &Expire{Stamp: s, Group: GroupID(d.uint64("group")), Epoch: Epoch(d.uint64("epoch"))}
	if n := d.count("entries", MaxHousekeeping, minExpireEntry); n > 0 {
		c.Entries = make([]ExpireEntry, n)
	}
	for i := range c.Entries {
		d.expireEntry(&c.Entries[i])
	}
	return c
}

func (e *ExpireEntry) append(dst []byte) []byte {
	dst = append(dst, byte(e.Kind))
	dst = appendUint(dst, e.Address)
	dst = appendUint(dst, e.Change)
	dst = appendUint(dst, e.Attempts)
	dst = appendUint(dst, e.NotBefore)
	dst = appendBytes(dst, e.Reason)
	dst = appendUint(dst, e.Lease.Epoch)
	dst = appendUint(dst, e.Lease.Number)
	dst = appendUint(dst, e.Deadline)
	dst = appendBytes(dst, e.Consumer)
	dst = append(dst, byte(e.ExportState))
	return appendUint(dst, e.Target)
}

func (d *decoder) expireEntry(e *ExpireEntry) {
	e.Kind = ExpireKind(d.enumFrom("expire kind", uint8(ExpireUpdate), uint8(ExpireExport)))
	e.Address = d.address("address")
	e.Change = Change(d.uint64("change"))
	e.Attempts = d.uint32("attempts")
	e.NotBefore = d.stamp("not before")
	e.Reason = d.string("reason", MaxReasonBytes)
	e.Lease.Epoch = Epoch(d.uint64("lease epoch"))
	e.Lease.Number = d.uint64("lease number")
	e.Deadline = d.stamp("deadline")
	e.Consumer = d.string("consumer", MaxNameBytes)
	e.ExportState = ExportState(d.enum("export state", uint8(ExportDone)))
	e.Target = d.uint64("target")
}

func (c *Home) append(dst []byte) []byte {
	dst = appendUint(dst, c.Group)
	dst = appendUint(dst, c.ExpectedHome)
	dst = appendUint(dst, c.ExpectedEpoch)
	dst = appendUint(dst, c.NewHome)
	return appendBool(dst, c.Released)
}

func (d *decoder) home(s Stamp) *Home {
	return &Home{
		Stamp:         s,
		Group:         GroupID(d.uint64("group")),
		ExpectedHome:  ReplicaID(d.uint64("expected home")),
		ExpectedEpoch: Epoch(d.uint64("expected epoch")),
		NewHome:       ReplicaID(d.uint64("new home")),
		Released:      d.bool("released"),
	}
}

func (c *Retention) append(dst []byte) []byte {
	dst = appendUint(dst, c.OperationID)
	dst = appendUint(dst, c.ReclaimLine)
	dst = appendAddresses(dst, c.Reclaim)
	dst = appendUint(dst, c.DropTo)
	dst = appendUint(dst, c.PurgeTo)
	dst = appendAddresses(dst, c.Park)
	dst = appendUint(dst, uint64(len(c.Delayed)))
	for _, x := range c.Delayed {
		dst = appendUint(dst, x.Address)
		dst = appendUint(dst, x.Expected)
		dst = appendUint(dst, x.NewVisibleAt)
	}
	dst = appendBool(dst, c.Options != nil)
	if c.Options != nil {
		dst = appendBytes(dst, AppendQueueOptions(nil, *c.Options))
	}
	flags := byte(0)
	if c.Retire {
		flags |= flagRetire
	}
	if len(c.Forget) > 0 {
		flags |= flagForget
	}
	if c.Import != nil {
		flags |= flagImport
	}
	if c.Recover != nil {
		flags |= flagRecover
	}
	dst = append(dst, flags)
	dst = appendUint(dst, c.FormatLevel)
	dst = appendUint(dst, c.CheckpointID)
	if len(c.Forget) > 0 {
		dst = appendUint(dst, uint64(len(c.Forget)))
	}
	for _, p := range c.Forget {
		dst = appendUint(dst, p.ID)
		dst = appendUint(dst, p.Sub)
	}
	if c.Import != nil {
		dst = c.Import.append(dst)
	}
	if c.Recover != nil {
		dst = appendUint(dst, c.Recover.Expected)
	}
	return dst
}

func (c *Import) append(dst []byte) []byte {
	dst = appendUint(dst, c.ID)
	dst = appendUint(dst, c.Chunk)
	dst = appendBytes(dst, c.Pairs)
	dst = appendBool(dst, c.Meta != nil)
	if c.Meta == nil {
		return dst
	}
	dst = appendBytes(dst, c.Meta)
	dst = appendUint(dst, c.Keys)
	return appendUint(dst, c.Bytes)
}

func (d *decoder) imported() *Import {
	c := &Import{ID: d.uint64("import id"), Chunk: d.uint64("chunk"), Pairs: d.bytes("pairs", maxImportChunk)}
	if d.bool("meta") {
		if c.Meta = d.bytes("meta", maxImportKey); c.Meta == nil {
			d.failf("meta: an empty one is left out")
		}
		c.Keys, c.Bytes = d.uint64("keys"), d.uint64("bytes")
	}
	return c
}

func (d *decoder) retention(s Stamp) *Retention {
	c := &Retention{
		Stamp:       s,
		OperationID: d.uint64("operation id"),
		ReclaimLine: d.address("reclaim line"),
		Reclaim:     d.addresses("reclaim"),
		DropTo:      d.address("drop to"),
		PurgeTo:     d.address("purge to"),
		Park:        d.addresses("park"),
	}
	if n := d.count("delayed", MaxHousekeeping, minDelayed); n > 0 {
		c.Delayed = make([]DelayedChange, n)
	}
	for i := range c.Delayed {
		c.Delayed[i] = DelayedChange{Address: d.address("address"), Expected: d.stamp("expected"), NewVisibleAt: d.stamp("new visible at")}
	}
	if d.bool("options") {
		o := nested(d, "queue options", DecodeQueueOptions)
		c.Options = &o
	}
	flags := d.enum("retention flags", retentionFlags)
	c.Retire = flags&flagRetire != 0
	c.FormatLevel = d.uint32("format level")
	c.CheckpointID = d.uint64("checkpoint id")
	if flags&flagForget != 0 {
		c.Forget = d.outboxes()
	}
	if flags&flagImport != 0 {
		c.Import = d.imported()
	}
	if flags&flagRecover != 0 {
		c.Recover = &Recovery{Expected: d.uint64("expected recovery number")}
	}
	return c
}

// outboxes reads a list that is not empty.
func (d *decoder) outboxes() []Producer {
	n := d.count("forget", MaxHousekeeping, 2)
	if n == 0 {
		d.failf("forget: an empty list is left out")
		return nil
	}
	list := make([]Producer, n)
	for i := range list {
		list[i] = Producer{Kind: ProducerOutbox, ID: d.uint64("forget shard"), Sub: d.uint64("forget group")}
	}
	return list
}

func appendAddresses(dst []byte, list []Address) []byte {
	dst = appendUint(dst, uint64(len(list)))
	for _, a := range list {
		dst = appendUint(dst, a)
	}
	return dst
}

func (d *decoder) addresses(field string) []Address {
	n := d.count(field, MaxHousekeeping, 1)
	if n == 0 {
		return nil
	}
	list := make([]Address, n)
	for i := range list {
		list[i] = d.address(field)
	}
	return list
}

func (d *decoder) address(field string) Address { return Address(d.uint(field, uint64(MaxAddress))) }

func (d *decoder) stamp(field string) Stamp { return Stamp(d.uint(field, uint64(MaxStamp))) }

func (d *decoder) enum(field string, max uint8) uint8 { return d.enumFrom(field, 0, max) }

func (d *decoder) enumFrom(field string, min, max uint8) uint8 {
	v := d.byte()
	if d.err == nil && (v < min || v > max) {
		d.failf("%s %d is unknown", field, v)
	}
	return v
}

// nested reads a length and decodes what follows by another decoder.
func nested[T any](d *decoder, field string, decode func([]byte) (T, error)) T {
	b := d.bytes(field, maxConfigBytes)
	var zero T
	if d.err != nil {
		return zero
	}
	v, err := decode(b)
	if err != nil {
		d.failf("%s: %v", field, err)
		return zero
	}
	return v
}

// AppendGroupConfig appends a configuration: format byte, fields. It is the same inside commands and values.
func AppendGroupConfig(dst []byte, c GroupConfig) []byte {
	dst = append(dst, configVersion)
	dst = appendUint(dst, c.LeaseMs)
	dst = appendUint(dst, c.MaxAttempts)
	dst = appendUint(dst, c.BackoffBaseMs)
	dst = appendUint(dst, c.BackoffFactorPermille)
	dst = appendUint(dst, c.BackoffCapMs)
	dst = appendUint(dst, c.JitterPermille)
	dst = appendUint(dst, uint64(len(c.DelaysMs)))
	for _, v := range c.DelaysMs {
		dst = appendUint(dst, v)
	}
	dst = appendUint(dst, c.MaxInFlight)
	dst = appendUint(dst, c.MaxInFlightPerConsumer)
	dst = appendUint(dst, c.RecordAfterMs)
	dst = appendBool(dst, c.SingleActiveConsumer)
	dst = appendBool(dst, c.Paused)
	return appendBytes(dst, c.DeadLetterQueue)
}

// DecodeGroupConfig reads a configuration and nothing after it. It does not Validate it.
func DecodeGroupConfig(b []byte) (GroupConfig, error) {
	d := decoder{b: b}
	if v := d.byte(); d.err == nil && v != configVersion {
		return GroupConfig{}, formatErrorf("group config version %d: this binary reads version %d", v, configVersion)
	}
	c := GroupConfig{
		LeaseMs:               d.uint64("lease"),
		MaxAttempts:           d.uint32("max attempts"),
		BackoffBaseMs:         d.uint64("backoff base"),
		BackoffFactorPermille: d.uint32("backoff factor"),
		BackoffCapMs:          d.uint64("backoff cap"),
		JitterPermille:        d.uint32("jitter"),
	}
	if n := d.count("delays", MaxDelays, 1); n > 0 {
		c.DelaysMs = make([]uint64, n)
	}
	for i := range c.DelaysMs {
		c.DelaysMs[i] = d.uint64("delay")
	}
	c.MaxInFlight = d.uint32("max in flight")
	c.MaxInFlightPerConsumer = d.uint32("max in flight per consumer")
	c.RecordAfterMs = d.uint64("record after")
	c.SingleActiveConsumer = d.bool("single active consumer")
	c.Paused = d.bool("paused")
	c.DeadLetterQueue = d.string("dead-letter queue", MaxNameBytes)
	if err := d.finish(); err != nil {
		return GroupConfig{}, err
	}
	return c, nil
}

// AppendQueueOptions appends options: format byte, fields. It is the same inside commands and values.
func AppendQueueOptions(dst []byte, o QueueOptions) []byte {
	dst = append(dst, optionsVersion)
	dst = appendUint(dst, o.Version)
	dst = append(dst, byte(o.Ordering))
	dst = appendBool(dst, o.StrictSequence)
	dst = append(dst, byte(o.Overflow), byte(o.Durability), byte(o.Mode))
	dst = appendBool(dst, o.Paused)
	dst = appendUint(dst, o.MaxBodyBytes)
	dst = appendUint(dst, o.MaxBytes)
	dst = appendUint(dst, o.MaxMessages)
	dst = appendUint(dst, o.TTLMs)
	dst = appendUint(dst, o.MaxDelayMs)
	dst = appendUint(dst, o.RetainMs)
	dst = appendUint(dst, o.RetainBytes)
	dst = appendUint(dst, o.RetainMessages)
	dst = appendUint(dst, o.DedupMs)
	dst = appendUint(dst, o.Partition)
	return appendUint(dst, o.Partitions)
}

// DecodeQueueOptions reads options and nothing after them. It does not Validate them.
func DecodeQueueOptions(b []byte) (QueueOptions, error) {
	d := decoder{b: b}
	if v := d.byte(); d.err == nil && v != optionsVersion {
		return QueueOptions{}, formatErrorf("queue options version %d: this binary reads version %d", v, optionsVersion)
	}
	o := QueueOptions{
		Version:        d.uint64("version"),
		Ordering:       Ordering(d.enum("ordering", uint8(OrderKey))),
		StrictSequence: d.bool("strict sequence"),
		Overflow:       Overflow(d.enum("overflow", uint8(OverflowDropOldest))),
		Durability:     Durability(d.enum("durability", uint8(DurabilityStrict))),
		Mode:           Mode(d.enum("mode", uint8(ModeLog))),
		Paused:         d.bool("paused"),
		MaxBodyBytes:   d.uint32("max body bytes"),
		MaxBytes:       d.uint64("max bytes"),
		MaxMessages:    d.uint64("max messages"),
		TTLMs:          d.uint64("ttl"),
		MaxDelayMs:     d.uint64("max delay"),
		RetainMs:       d.uint64("retain time"),
		RetainBytes:    d.uint64("retain bytes"),
		RetainMessages: d.uint64("retain messages"),
		DedupMs:        d.uint64("dedup time"),
		Partition:      d.uint32("partition"),
		Partitions:     d.uint32("partitions"),
	}
	if err := d.finish(); err != nil {
		return QueueOptions{}, err
	}
	return o, nil
}

// EncodeResult appends the encoding of a result to dst.
func EncodeResult(dst []byte, r *Result) []byte {
	dst = append(dst, resultVersion)
	dst = appendCode(dst, r.Code)
	dst = appendUint(dst, r.Index)
	dst = appendUint(dst, r.Clock)
	dst = appendUint(dst, uint64(len(r.Publishes)))
	for i := range r.Publishes {
		dst = r.Publishes[i].append(dst)
	}
	dst = appendUint(dst, uint64(len(r.Acks)))
	for _, a := range r.Acks {
		dst = append(dst, byte(a))
	}
	dst = appendUint(dst, uint64(len(r.Expires)))
	for i := range r.Expires {
		dst = r.Expires[i].append(dst)
	}
	dst = appendUint(dst, uint64(len(r.Delayed)))
	for _, c := range r.Delayed {
		dst = appendCode(dst, c)
	}
	dst = appendUint(dst, r.Group)
	dst = appendUint(dst, r.Epoch)
	dst = appendUint(dst, r.Home)
	return appendUint(dst, r.Version)
}

// DecodeResult reads one result and nothing after it; it refuses with ErrFormat what no encoder wrote. Code numbers
// that this binary does not know are let pass: a newer host may have answered.
func DecodeResult(b []byte) (Result, error) {
	d := decoder{b: b}
	if v := d.byte(); d.err == nil && v != resultVersion {
		return Result{}, formatErrorf("result version %d: this binary reads version %d", v, resultVersion)
	}
	r := Result{Code: d.code(), Index: Index(d.uint64("index")), Clock: d.stamp("clock")}
	left := MaxCommandMessages
	if n := d.count("publishes", MaxCommandMessages, 4); n > 0 {
		r.Publishes = make([]PublishResult, n)
	}
	for i := range r.Publishes {
		d.publishResult(&r.Publishes[i], left)
		left -= len(r.Publishes[i].Messages)
	}
	if n := d.count("acks", MaxHousekeeping, 1); n > 0 {
		r.Acks = make([]AckState, n)
	}
	for i := range r.Acks {
		r.Acks[i] = AckState(d.enum("ack state", uint8(AckDead)))
	}
	if n := d.count("expires", MaxHousekeeping, 4); n > 0 {
		r.Expires = make([]ExpireResult, n)
	}
	for i := range r.Expires {
		d.expireResult(&r.Expires[i])
	}
	if n := d.count("delayed", MaxHousekeeping, 2); n > 0 {
		r.Delayed = make([]code.Code, n)
	}
	for i := range r.Delayed {
		r.Delayed[i] = d.code()
	}
	r.Group = GroupID(d.uint64("group"))
	r.Epoch = Epoch(d.uint64("epoch"))
	r.Home = ReplicaID(d.uint64("home"))
	r.Version = d.uint64("version")
	if err := d.finish(); err != nil {
		return Result{}, err
	}
	return r, nil
}

func appendCode(dst []byte, c code.Code) []byte { return append(dst, byte(c>>8), byte(c)) }

func (d *decoder) code() code.Code { return code.Code(d.byte())<<8 | code.Code(d.byte()) }

func (p *PublishResult) append(dst []byte) []byte {
	dst = appendCode(dst, p.Code)
	dst = appendUint(dst, p.Last)
	dst = appendUint(dst, uint64(len(p.Messages)))
	for i := range p.Messages {
		m := &p.Messages[i]
		dst = appendCode(dst, m.Code)
		dst = appendUint(dst, m.Address)
		dst = appendBool(dst, m.Duplicate)
	}
	return dst
}

func (d *decoder) publishResult(p *PublishResult, maxMessages int) {
	p.Code = d.code()
	p.Last = d.address("last")
	if n := d.count("messages", maxMessages, 4); n > 0 {
		p.Messages = make([]MessageResult, n)
	}
	for i := range p.Messages {
		p.Messages[i] = MessageResult{Code: d.code(), Address: d.address("address"), Duplicate: d.bool("duplicate")}
	}
}

const (
	expireApplied = 1 << iota
	expireFinished
	expireDead
)

func (e *ExpireResult) append(dst []byte) []byte {
	flags := byte(0)
	if e.Applied {
		flags |= expireApplied
	}
	if e.Finished {
		flags |= expireFinished
	}
	if e.Dead {
		flags |= expireDead
	}
	dst = append(dst, flags)
	dst = appendUint(dst, e.Change)
	dst = appendUint(dst, e.Round)
	return appendUint(dst, e.Attempts)
}

func (d *decoder) expireResult(e *ExpireResult) {
	flags := d.enum("expire flags", expireApplied|expireFinished|expireDead)
	e.Applied, e.Finished, e.Dead = flags&expireApplied != 0, flags&expireFinished != 0, flags&expireDead != 0
	e.Change = Change(d.uint64("change"))
	e.Round = d.uint32("round")
	e.Attempts = d.uint32("attempts")
}
