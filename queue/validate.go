package queue

import (
	"bytes"
	"fmt"

	"github.com/tierq/tierq/queue/code"
)

// More limits that hold for every command (see types.go).
const (
	// MaxCommandMessages bounds the messages of one Enqueue over all its publishes, and its publishes.
	MaxCommandMessages = MaxBatchMessages
	// MaxStamp is the greatest stamp: below 2^48 ms, the year 10889.
	MaxStamp Stamp = 1<<48 - 1
	// MaxSeq is the greatest seq of a producer.
	MaxSeq Seq = 1<<63 - 1
	// MaxReasonBytes bounds the reason of a failure.
	MaxReasonBytes = 255
)

// DefaultGroup is the group of receives that name none. It is the only stored name that begins with $.
const DefaultGroup = "$default"

// ValidateName refuses what is not 1 to 80 of A-Z a-z 0-9 . _ - or begins with . or $ (the latter cannot occur).
// The error is a *code.Error with code.InvalidName.
func ValidateName(name string) error {
	if name == "" {
		return code.New(code.InvalidName, "name is empty")
	}
	if len(name) > MaxNameBytes {
		return code.New(code.InvalidName, "name has %d bytes, at most %d are allowed", len(name), MaxNameBytes)
	}
	if name[0] == '.' {
		return code.New(code.InvalidName, "name %q begins with %q", name, name[0])
	}
	for i := range len(name) {
		if !nameByte(name[i]) {
			return code.New(code.InvalidName, "name %q has %q at byte %d: only A-Z a-z 0-9 . _ - are allowed", name, name[i], i)
		}
	}
	return nil
}

func nameByte(c byte) bool {
	return c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
}

// ValidateGroupName is ValidateName, and lets DefaultGroup pass.
func ValidateGroupName(name string) error {
	if name == DefaultGroup {
		return nil
	}
	return ValidateName(name)
}

// Bytes is what a message counts for in every limit and counter: body, key, and names and values of its headers.
func (m *Message) Bytes() int {
	n := len(m.Body) + len(m.Key)
	for i := range m.Headers {
		n += len(m.Headers[i].Name) + len(m.Headers[i].Value)
	}
	return n
}

// Validate refuses a command that breaks a limit that holds for every queue: before it is proposed (EncodeCommand
// calls it), and again in apply. It returns a *code.Error whose text names the field, nil when all is well.
func Validate(c Command) error {
	if err := validate(c); err != nil {
		return err // not a typed nil
	}
	return nil
}

func validate(c Command) *code.Error {
	switch c := c.(type) {
	case *Enqueue:
		return c.validate()
	case *Ack:
		return c.validate()
	case *Group:
		return c.validate()
	case *Expire:
		return c.validate()
	case *Home:
		return c.validate()
	case *Retention:
		return c.validate()
	}
	return code.New(code.InvalidArgument, "command %T is unknown", c)
}

func invalid(format string, args ...any) *code.Error {
	return code.New(code.InvalidArgument, format, args...)
}

// within puts the field before a refusal's text.
func within(err *code.Error, format string, args ...any) *code.Error {
	if err != nil {
		err.Text = fmt.Sprintf(format, args...) + ": " + err.Text
	}
	return err
}

func stampBound(field string, s Stamp) *code.Error {
	if s > MaxStamp {
		return invalid("%s %d is above %d", field, s, MaxStamp)
	}
	return nil
}

func addressBound(field string, a Address) *code.Error {
	if a > MaxAddress {
		return invalid("%s %d is above %d", field, uint64(a), uint64(MaxAddress))
	}
	return nil
}

func realAddress(field string, a Address) *code.Error {
	if a == 0 {
		return invalid("%s is 0: addresses begin at 1", field)
	}
	return addressBound(field, a)
}

func realGroup(id GroupID) *code.Error {
	if id == 0 {
		return invalid("Group is 0: group ids begin at 1")
	}
	return nil
}

// firstRefusal returns the first refusal, so nothing after it matters.
func firstRefusal(errs ...*code.Error) *code.Error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *Enqueue) validate() *code.Error {
	if err := stampBound("Stamp", c.Stamp); err != nil {
		return err
	}
	if len(c.Publishes) == 0 {
		return code.New(code.BatchEmpty, "Publishes is empty")
	}
	messages, bytes := 0, 0
	for i := range c.Publishes {
		p := &c.Publishes[i]
		if err := p.validate(); err != nil {
			return within(err, "Publishes[%d]", i)
		}
		messages += len(p.Messages)
		for j := range p.Messages {
			bytes += p.Messages[j].Bytes()
		}
	}
	if messages > MaxCommandMessages {
		return code.New(code.BatchTooLarge, "%d messages in one command, at most %d are allowed", messages, MaxCommandMessages)
	}
	if messages > 1 && bytes > MaxCommandMessageBytes {
		return code.New(code.BatchTooLarge, "%d message bytes in one command, at most %d are allowed for more than one message", bytes, MaxCommandMessageBytes)
	}
	return nil
}

func (p *Publish) validate() *code.Error {
	if len(p.Messages) == 0 {
		return code.New(code.BatchEmpty, "Messages is empty")
	}
	if len(p.Messages) > MaxBatchMessages {
		return code.New(code.BatchTooLarge, "%d messages in one publish, at most %d are allowed", len(p.Messages), MaxBatchMessages)
	}
	if !p.CheckLast && p.ExpectedLast != 0 {
		return invalid("ExpectedLast %d without CheckLast", uint64(p.ExpectedLast))
	}
	if err := firstRefusal(addressBound("ExpectedLast", p.ExpectedLast), p.validateProducer()); err != nil {
		return err
	}
	previous := Seq(0)
	for i := range p.Messages {
		m := &p.Messages[i]
		if p.Producer.Kind != ProducerNone && (m.Seq <= previous || m.Seq > MaxSeq) {
			return code.New(code.ProducerSeqInvalid, "Messages[%d]: Seq %d: the seqs of a producer begin at 1 and rise, up to %d", i, m.Seq, MaxSeq)
		}
		if p.Producer.Kind == ProducerNone && m.Seq != 0 {
			return code.New(code.ProducerSeqInvalid, "Messages[%d]: Seq %d without a producer", i, m.Seq)
		}
		previous = m.Seq
		if err := m.validate(); err != nil {
			return within(err, "Messages[%d]", i)
		}
	}
	return nil
}

func (p *Publish) validateProducer() *code.Error {
	switch p.Producer.Kind {
	case ProducerNone:
		if p.Producer.ID != 0 || p.Producer.Sub != 0 || p.ProducerEpoch != 0 || p.Low != 0 || p.Contiguous {
			return invalid("Producer.ID, Producer.Sub, ProducerEpoch, Low and Contiguous need a Producer.Kind")
		}
	case ProducerClient:
		if p.Producer.ID == 0 || p.Producer.Sub != 0 {
			return invalid("Producer: a client's ID is not 0 and its Sub is 0")
		}
	case ProducerOutbox:
		if p.Producer.ID == 0 || p.Producer.Sub == 0 {
			return invalid("Producer: an outbox's ID (shard) and Sub (group id) are not 0")
		}
	default:
		return invalid("Producer.Kind %d is unknown", p.Producer.Kind)
	}
	if p.Low > MaxSeq {
		return invalid("Low %d is above %d", p.Low, MaxSeq)
	}
	return nil
}

func (m *Message) validate() *code.Error {
	if len(m.Body) > MaxBodyBytesHard {
		return code.New(code.TooLarge, "Body has %d bytes, at most %d are allowed", len(m.Body), MaxBodyBytesHard)
	}
	if len(m.Key) > MaxKeyBytes {
		return invalid("Key has %d bytes, at most %d are allowed", len(m.Key), MaxKeyBytes)
	}
	if len(m.DedupID) > MaxKeyBytes {
		return invalid("DedupID has %d bytes, at most %d are allowed", len(m.DedupID), MaxKeyBytes)
	}
	if m.Priority != 0 {
		return invalid("Priority is reserved and must be 0, not %d", m.Priority)
	}
	if err := firstRefusal(stampBound("VisibleAt", m.VisibleAt), stampBound("ExpiresAt", m.ExpiresAt)); err != nil {
		return err
	}
	return validateHeaders(m.Headers)
}

func validateHeaders(headers []Header) *code.Error {
	if len(headers) > MaxHeaders {
		return invalid("%d Headers, at most %d are allowed", len(headers), MaxHeaders)
	}
	bytes := 0
	for i := range headers {
		if headers[i].Name == "" {
			return invalid("Headers[%d].Name is empty", i)
		}
		bytes += len(headers[i].Name) + len(headers[i].Value)
	}
	if bytes > MaxHeaderBytes {
		return invalid("Headers have %d bytes, at most %d are allowed", bytes, MaxHeaderBytes)
	}
	return nil
}

func (c *Ack) validate() *code.Error {
	if err := firstRefusal(stampBound("Stamp", c.Stamp), realGroup(c.Group)); err != nil {
		return err
	}
	if len(c.Ranges) == 0 {
		return code.New(code.BatchEmpty, "Ranges is empty")
	}
	total := uint64(0)
	for i, r := range c.Ranges {
		if err := firstRefusal(realAddress("First", r.First), addressBound("Last", r.Last)); err != nil {
			return within(err, "Ranges[%d]", i)
		}
		if r.First > r.Last {
			return invalid("Ranges[%d]: First %d is above Last %d", i, uint64(r.First), uint64(r.Last))
		}
		if total += uint64(r.Last-r.First) + 1; total > MaxHousekeeping {
			return tooMany(total, "Ranges")
		}
	}
	return nil
}

func tooMany(n uint64, field string) *code.Error {
	return code.New(code.BatchTooLarge, "%s: %d or more entries, at most %d are allowed in one command", field, n, MaxHousekeeping)
}

func (c *Group) validate() *code.Error {
	if err := stampBound("Stamp", c.Stamp); err != nil {
		return err
	}
	switch c.Op {
	case GroupCreate:
		if c.OperationID == 0 {
			return invalid("OperationID is 0")
		}
		if err := ValidateGroupName(c.Name); err != nil {
			return within(err.(*code.Error), "Name")
		}
		return firstRefusal(c.Start.validate(), c.validateConfig())
	case GroupDelete:
		return realGroup(c.ID)
	case GroupReset:
		return firstRefusal(realGroup(c.ID), c.Start.validate())
	case GroupConfigure:
		return firstRefusal(realGroup(c.ID), c.validateConfig())
	}
	return invalid("Op %d is unknown", c.Op)
}

func (c *Group) validateConfig() *code.Error {
	if err := c.Config.Validate(); err != nil {
		return invalid("Config: %v", err)
	}
	return nil
}

func (s Start) validate() *code.Error {
	switch s.Kind {
	case StartEarliest, StartLatest:
		if s.At != 0 {
			return invalid("Start.At %d without a Start.Kind that uses it", s.At)
		}
		return nil
	case StartAddress:
		return addressBound("Start.At", Address(s.At))
	case StartTime:
		return stampBound("Start.At", Stamp(s.At))
	}
	return invalid("Start.Kind %d is unknown", s.Kind)
}

func (c *Expire) validate() *code.Error {
	if err := firstRefusal(stampBound("Stamp", c.Stamp), realGroup(c.Group)); err != nil {
		return err
	}
	if len(c.Entries) == 0 {
		return code.New(code.BatchEmpty, "Entries is empty")
	}
	if len(c.Entries) > MaxHousekeeping {
		return tooMany(uint64(len(c.Entries)), "Entries")
	}
	for i := range c.Entries {
		if err := c.Entries[i].validate(); err != nil {
			return within(err, "Entries[%d]", i)
		}
	}
	return nil
}

func (e *ExpireEntry) validate() *code.Error {
	if e.Kind < ExpireUpdate || e.Kind > ExpireExport {
		return invalid("Kind %d is unknown", e.Kind)
	}
	if e.ExportState > ExportDone {
		return invalid("ExportState %d is unknown", e.ExportState)
	}
	if len(e.Reason) > MaxReasonBytes {
		return invalid("Reason has %d bytes, at most %d are allowed", len(e.Reason), MaxReasonBytes)
	}
	if len(e.Consumer) > MaxNameBytes {
		return invalid("Consumer has %d bytes, at most %d are allowed", len(e.Consumer), MaxNameBytes)
	}
	return firstRefusal(realAddress("Address", e.Address), stampBound("NotBefore", e.NotBefore), stampBound("Deadline", e.Deadline))
}

func (c *Home) validate() *code.Error {
	if c.NewHome == 0 {
		return invalid("NewHome is 0: replica ids begin at 1")
	}
	return firstRefusal(stampBound("Stamp", c.Stamp), realGroup(c.Group))
}

func (c *Retention) validate() *code.Error {
	if n := len(c.Reclaim) + len(c.Park) + len(c.Delayed) + len(c.Forget); n > MaxHousekeeping {
		return tooMany(uint64(n), "Reclaim, Park, Delayed and Forget")
	}
	err := firstRefusal(stampBound("Stamp", c.Stamp), addressBound("ReclaimLine", c.ReclaimLine),
		addressBound("DropTo", c.DropTo), addressBound("PurgeTo", c.PurgeTo),
		allReal("Reclaim", c.Reclaim), allReal("Park", c.Park))
	if err != nil {
		return err
	}
	for i, d := range c.Delayed {
		err := firstRefusal(realAddress("Address", d.Address), stampBound("Expected", d.Expected), stampBound("NewVisibleAt", d.NewVisibleAt))
		if err != nil {
			return within(err, "Delayed[%d]", i)
		}
	}
	for i, p := range c.Forget {
		if p.Kind != ProducerOutbox || p.ID == 0 || p.Sub == 0 {
			return invalid("Forget[%d]: only an outbox, with ID (shard) and Sub (group id), can be forgotten", i)
		}
	}
	if c.Options != nil {
		if err := c.Options.Validate(); err != nil {
			return invalid("Options: %v", err)
		}
	}
	return c.validateState()
}

// validateState checks the parts that replace or continue a state: they stand alone.
func (c *Retention) validateState() *code.Error {
	if c.Import == nil && c.Recover == nil {
		return nil
	}
	alone := Retention{Stamp: c.Stamp, Import: c.Import}
	if c.Import == nil {
		alone.Recover = c.Recover
	}
	if !bytes.Equal(appendCommand(nil, c), appendCommand(nil, &alone)) {
		return invalid("Import and Recover stand alone in their command")
	}
	if c.Import != nil {
		return c.Import.validate()
	}
	return nil
}

func allReal(field string, list []Address) *code.Error {
	for i, a := range list {
		if err := realAddress(field, a); err != nil {
			return within(err, "[%d]", i)
		}
	}
	return nil
}
