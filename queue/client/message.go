package client

import (
	"time"
	"unicode/utf8"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// Limits of a message that hold in every queue; a queue's own limits may be tighter.
const (
	MaxBodyBytes = 16<<20 - 1<<10
	MaxKeyBytes  = 255
)

// Message is one message to publish. The client reads its slices until the publish is answered: do not change them
// before.
type Message struct {
	Body    []byte
	Headers []Header
	// Key is the ordering key, at most 255 bytes; none by default.
	Key []byte
	// Delay hides the message for so long; TTL drops it unread after so long. Milliseconds count; 0 means none.
	Delay time.Duration
	TTL   time.Duration
	// DedupID makes the queue drop a second message of the same id within five minutes; at most 255 bytes.
	DedupID []byte
}

// Header is one name-value pair. Names may repeat; order is kept.
type Header struct {
	Name  string
	Value []byte
}

// Published is the answer to one message.
type Published struct {
	// Address is the message's id in its partition; 0 if Err is set.
	Address   uint64
	Partition uint32
	// Seq is the number that this client's producer gave it; 0 if it was never sent.
	Seq uint64
	// Duplicate says that it had been stored before, by an earlier try or under the same dedup id: Address is the first one.
	Duplicate bool
	// Shard and Index name the log entry: a receive with MinIndex = Index sees the message.
	Shard uint64
	Index uint64
	// DataCopies is the number of disks that held the body when it was answered; 0: not measured.
	DataCopies uint32
	// Warning rides beside success, for example FOLLOWER_LAG; 0: none.
	Warning code.Code
	// Elapsed is the time from the message's entry into the buffer to its answer.
	Elapsed time.Duration
	// Err is why the message was not stored (EffectNone) or may have been (EffectMaybe).
	Err *code.Error
}

// Delivery is one message handed to a consumer, leased to it until the lease ends.
type Delivery struct {
	// Address is the message's id in its partition.
	Address   uint64
	Partition uint32
	Receipt   string
	Body      []byte
	Headers   []Header
	Key       []byte
	Attempt   uint32
	Published time.Time
	Lease     time.Duration
	Producer  uint64
	Seq       uint64
	// FirstDelivered is when the message was first handed out, as far as its home has seen; LastFailure is why it came
	// back, "" if it did not; Round counts its redrives.
	FirstDelivered time.Time
	LastFailure    string
	Round          uint32
}

func (m *Message) check() *code.Error {
	switch {
	case len(m.Body) > MaxBodyBytes:
		return code.New(code.TooLarge, "the body has %d bytes, at most %d are possible: send less, or a reference to it", len(m.Body), MaxBodyBytes)
	case len(m.Key) > MaxKeyBytes:
		return code.New(code.InvalidArgument, "the key has %d bytes: at most %d", len(m.Key), MaxKeyBytes)
	case len(m.DedupID) > MaxKeyBytes:
		return code.New(code.InvalidArgument, "the dedup id has %d bytes: at most %d", len(m.DedupID), MaxKeyBytes)
	case m.Delay < 0 || m.TTL < 0:
		return code.New(code.InvalidArgument, "a delay or time to live below zero: use 0 for none")
	}
	for i := range m.Headers {
		if e := checkText("a header's name", m.Headers[i].Name); e != nil {
			return e
		}
	}
	return nil
}

// checkText refuses what cannot be sent as text: the request would never leave, and what is behind it would wait for its answer.
func checkText(what string, texts ...string) *code.Error {
	for _, s := range texts {
		if !utf8.ValidString(s) {
			return code.New(code.InvalidArgument, "%q is no UTF-8: %s must be", s, what)
		}
	}
	return nil
}

func (m *Message) wire(out *tierqv1.OutMessage) {
	out.Body, out.Headers, out.Key, out.DedupId = m.Body, wireHeaders(m.Headers), m.Key, m.DedupID
	out.DelayMs, out.TtlMs = wireMillis(m.Delay), wireMillis(m.TTL)
}

// wireMillis rounds up, so that a delay is never shorter than asked.
func wireMillis(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64((d + time.Millisecond - 1) / time.Millisecond)
}

// size is what the message counts for in buffers and batches: its bytes and a guess of their wrapping.
func (m *Message) size() int {
	n := len(m.Body) + len(m.Key) + len(m.DedupID) + 32
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value) + 8
	}
	return n
}

func wireHeaders(hs []Header) []*tierqv1.Header {
	if len(hs) == 0 {
		return nil
	}
	out := make([]*tierqv1.Header, len(hs))
	for i, h := range hs {
		out[i] = &tierqv1.Header{Name: h.Name, Value: h.Value}
	}
	return out
}

func headersOf(hs []*tierqv1.Header) []Header {
	if len(hs) == 0 {
		return nil
	}
	out := make([]Header, len(hs))
	for i, h := range hs {
		out[i] = Header{Name: h.Name, Value: h.Value}
	}
	return out
}

func deliveryOf(m *tierqv1.Message) *Delivery {
	d := &Delivery{
		Address: m.Address, Partition: m.Partition, Receipt: m.Receipt, Body: m.Body, Headers: headersOf(m.Headers), Key: m.Key,
		Attempt: m.Attempt, Published: time.UnixMilli(int64(m.PublishedUnixMs)),
		Lease: time.Duration(m.LeaseMs) * time.Millisecond, Producer: m.ProducerId, Seq: m.Seq, LastFailure: m.LastFailure, Round: m.Round,
	}
	if m.FirstDeliveredUnixMs != 0 {
		d.FirstDelivered = time.UnixMilli(int64(m.FirstDeliveredUnixMs))
	}
	return d
}
