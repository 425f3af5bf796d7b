package queue

import "strconv"

// Address is a message's id in its partition: assigned in apply order from 1, never reused, below 2^48.
// 0 means "no address".
type Address uint64

// MaxAddress is the greatest address that a partition can assign (part of the format: lanes store u48).
const MaxAddress Address = 1<<48 - 1

// Seq is a producer's own number of a publish. 0 means "no seq"; a producer starts at 1.
type Seq uint64

// Epoch fences one consumer group: +1 at every Home and reset. It is never a Raft term.
type Epoch uint64

// GroupID names a consumer group inside a shard for ever; it comes from a shard counter from 1 and is never reused.
type GroupID uint64

// Index is a position in a shard's Raft log.
type Index uint64

// ReplicaID names a member of a shard; never reused within it. 0 means "none".
type ReplicaID uint64

// Stamp is unix milliseconds as a proposer put them into a command, or the shard's clock derived from them.
// 0 means "none".
type Stamp uint64

// Change counts the applied Expire entries of one message in one group. An Expire entry applies only if it
// names the stored change number.
type Change uint64

func (a Address) String() string { return "@" + strconv.FormatUint(uint64(a), 10) }
func (e Epoch) String() string   { return "e" + strconv.FormatUint(uint64(e), 10) }
func (i Index) String() string   { return "#" + strconv.FormatUint(uint64(i), 10) }

// ProducerKind separates clients' producers from the reserved ones. Part of the format; do not renumber.
type ProducerKind uint8

const (
	// ProducerNone publishes without idempotence.
	ProducerNone ProducerKind = 0
	// ProducerClient is a client's producer; Producer.ID is its random number and Producer.Sub is 0.
	ProducerClient ProducerKind = 1
	// ProducerOutbox is a dead-letter outbox: ID is the source shard, Sub the source group id. Exempt from
	// contiguity, and not forgotten by age.
	ProducerOutbox ProducerKind = 2
)

// Producer names who publishes. The zero value is "no producer": its publishes are never deduplicated by seq.
type Producer struct {
	Kind ProducerKind
	ID   uint64
	Sub  uint64
}

// LeaseName names a lease for ever: the epoch of its home when it was issued and a number of that ledger.
type LeaseName struct {
	Epoch  Epoch
	Number uint64
}

// Header is one name-value pair of a message. Names may repeat; order is kept.
type Header struct {
	Name  string
	Value []byte
}

// AddressRange is First..Last, both included.
type AddressRange struct{ First, Last Address }

// Limits that hold for every command. Checked before proposing; apply checks them again and refuses.
const (
	// MaxCommandMessageBytes bounds the message bytes of a command, unless it carries exactly one larger message.
	MaxCommandMessageBytes = 1 << 20
	// MaxBodyBytesHard is the greatest body that any queue may allow: 16 MiB - 1 KiB.
	MaxBodyBytesHard = 16<<20 - 1<<10
	// MaxBatchMessages bounds the messages of one publish.
	MaxBatchMessages = 10_000
	// MaxHousekeeping bounds the explicit addresses of one Ack, Expire or Retention command.
	MaxHousekeeping = 1024
	// MaxNameBytes bounds queue, group and consumer names.
	MaxNameBytes = 80
	// MaxKeyBytes bounds an ordering key and a dedup id.
	MaxKeyBytes = 255
	// MaxHeaders and MaxHeaderBytes bound the headers of one message (names and values together).
	MaxHeaders     = 64
	MaxHeaderBytes = 64 << 10
	// ProducerWindow is how far above low a producer's seq may run ahead.
	ProducerWindow = 8192
	// MaxProducers bounds the producers that a shard remembers.
	MaxProducers = 100_000
)

// Ordering is a queue's delivery order. Part of the format; do not renumber.
type Ordering uint8

const (
	OrderNone Ordering = 0
	// OrderKey hands out one message of a key at a time, in address order (G6).
	OrderKey Ordering = 1
)

// Overflow says what a full queue does. Part of the format; do not renumber.
type Overflow uint8

const (
	OverflowReject     Overflow = 0
	OverflowDropOldest Overflow = 1
)

// Durability is a queue's answer to a missing second copy (G1). Part of the format; do not renumber.
type Durability uint8

const (
	DurabilityAvailable Durability = 0
	DurabilityStrict    Durability = 1
)

// Mode is what retention is for. Part of the format; do not renumber.
type Mode uint8

const (
	// ModeWork reclaims a message when every group has finished it.
	ModeWork Mode = 0
	// ModeLog keeps messages by age, bytes or count, for replay.
	ModeLog Mode = 1
)

// QueueOptions are a queue's replicated options; a change is a Retention command, not a restart.
// EnsureDefaults fills zero values, Validate joins every problem.
type QueueOptions struct {
	Version        uint64 // config version, +1 per change; a change names the version it was decided on
	Ordering       Ordering
	StrictSequence bool // require contiguous seqs of every producer (always so with OrderKey)
	Overflow       Overflow
	Durability     Durability
	Mode           Mode
	Paused         bool
	MaxBodyBytes   uint32 // default 1 MiB, at most MaxBodyBytesHard
	MaxBytes       uint64 // stored bytes; default 16 GiB
	MaxMessages    uint64 // 0: no limit
	TTLMs          uint64 // default time to live of a message; 0: none
	MaxDelayMs     uint64 // default 30 days
	RetainMs       uint64 // ModeLog; 0: none
	RetainBytes    uint64 // ModeLog; 0: none
	RetainMessages uint64 // ModeLog; 0: none
	DedupMs        uint64 // dedup ids are remembered so long by the shard's clock; default 5 min
	Partition      uint32 // this shard's partition number, from 0
	Partitions     uint32 // default 1
}

// GroupConfig is a consumer group's policy as replicated data.
// EnsureDefaults fills zero values, Validate joins every problem.
type GroupConfig struct {
	LeaseMs                uint64   // default 30,000; at most 12 h
	MaxAttempts            uint32   // failures before a dead letter; default 5
	BackoffBaseMs          uint64   // default 1,000
	BackoffFactorPermille  uint32   // default 2,000 (×2)
	BackoffCapMs           uint64   // default 30,000
	JitterPermille         uint32   // default 100: up to 10 % on top
	DelaysMs               []uint64 // if not empty, the delay after attempt n is DelaysMs[min(n, len)-1]
	MaxInFlight            uint32   // default 20,000
	MaxInFlightPerConsumer uint32   // 0: no limit of its own
	RecordAfterMs          uint64   // default 1,000
	SingleActiveConsumer   bool
	Paused                 bool
	DeadLetterQueue        string // "": dead letters stay in the shard
}

// StartKind says where a new or reset group starts. Part of the format; do not renumber.
type StartKind uint8

const (
	StartEarliest StartKind = 0
	StartLatest   StartKind = 1
	StartAddress  StartKind = 2
	StartTime     StartKind = 3
)

// Start is where a group starts: At is an address or a stamp, as Kind says.
type Start struct {
	Kind StartKind
	At   uint64
}
