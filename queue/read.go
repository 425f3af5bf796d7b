package queue

// What a home, an API listener and doctor read. All reads see applied state only and are safe beside apply.
// Slices returned belong to the caller.

// Meta is a shard's own state at one applied index.
type Meta struct {
	Applied        Index
	Clock          Stamp
	Last           Address // the greatest address assigned
	Line           Address // the reclaim line: everything at or below is reclaimed or parked
	FormatLevel    uint32
	RecoveryNumber uint64
	Retired        bool
	Options        QueueOptions
	Counters       Counters
}

// Counters are exact, replicated sums of a shard.
type Counters struct {
	Messages       uint64 // stored above the line and parked
	Bytes          uint64 // their bytes (body, headers, key)
	Parked         uint64
	Delayed        uint64 // entries of the delayed index
	Published      uint64 // messages ever appended
	PublishedBytes uint64
	Duplicates     uint64 // publishes answered by an earlier address
	NonIdempotent  uint64 // messages published without a producer
	Refused        uint64 // publishes refused in apply
	Reclaimed      uint64
	Purged         uint64
	Dropped        uint64
	Expired        uint64 // by TTL
	Cancelled      uint64 // delayed messages cancelled
	Producers      uint64
}

// GroupInfo is one consumer group as stored.
type GroupInfo struct {
	ID              GroupID
	Name            string
	Config          GroupConfig
	ConfigVersion   uint64
	Home            ReplicaID
	HomeIndex       Index // the index of the last Home, or of the creation; a reset moves the epoch and not this
	Released        bool  // that Home was released, or it is the creation: no wait is due
	Epoch           Epoch
	ClaimGeneration uint64
	Start           Address // the group owns the addresses above it
	Floor           Address // least W of the lanes
	WatermarkBytes  int     // 19 or 1,216
	Exports         uint64  // dead letters with an export number: on their way to the dead-letter queue, or waiting for it
	Counters        GroupCounters
}

// GroupCounters: Assigned = Unfinished + Acked + Dead + Exported + Expired + Purged + Cancelled, for the
// messages above Start (a drop counts as Expired).
type GroupCounters struct {
	Assigned   uint64
	Unfinished uint64 // neither finished nor dead
	Acked      uint64
	Dead       uint64 // dead letters now
	Exported   uint64
	Expired    uint64
	Purged     uint64
	Cancelled  uint64
	Retries    uint64 // Expire updates ever applied
	Redriven   uint64
	DeadTotal  uint64
	Retrying   uint64 // retry entries of unfinished messages now
	Leased     uint64 // recorded leases now
}

// StoredMessage is a message at rest.
type StoredMessage struct {
	Address   Address
	Stamp     Stamp // the shard's clock at its apply
	VisibleAt Stamp
	ExpiresAt Stamp
	Producer  Producer
	Seq       Seq
	Parked    bool
	Key       []byte
	Headers   []Header
	Body      []byte
}

// RetryState is what failures left behind for one message of a group. The zero value: never failed.
type RetryState struct {
	Change    Change
	Round     uint32
	Attempts  uint32
	NotBefore Stamp
	Reason    string
}

// RecordedLease is a lease that apply knows.
type RecordedLease struct {
	Name     LeaseName
	Begun    Stamp // when it was handed out, by the clock of the home that did; 0: not known
	Deadline Stamp
	Attempts uint32
	Consumer string
}

// Deliverable is one unfinished, not dead message of a group, without its body.
type Deliverable struct {
	Address   Address
	VisibleAt Stamp
	ExpiresAt Stamp
	Parked    bool
	Key       []byte // nil in queues without key order
	Size      int    // bytes of body, headers and key
	Retry     RetryState
	HasRetry  bool // a retry entry is stored (Change > 0)
	Lease     RecordedLease
	HasLease  bool
}

// DeadLetter is one dead message of a group, with the message when asked for.
type DeadLetter struct {
	Address      Address
	Change       Change
	Round        uint32
	Attempts     uint32
	Reason       string
	FirstFailure Stamp
	DeadAt       Stamp
	ExportNumber uint64
	ExportState  ExportState
	Target       uint64
	Message      StoredMessage
}

// MessageReader reads messages as Reader.Message does. What a call returns may be as old as the reader. Addresses that rise are read
// fastest: one after the other from where they lie. Errors are those of Message. It holds on to files of the store until Close. Not
// safe for concurrent use.
type MessageReader interface {
	Message(a Address) (StoredMessage, bool, error)
	Close()
}

// Reader is the read side of a shard's state; *QueueStateMachine implements it. Errors are I/O or corruption only.
type Reader interface {
	Meta() Meta
	// ReadStats reads meta and every group at one applied index.
	ReadStats() (Meta, []GroupInfo)
	Groups() []GroupInfo
	Group(id GroupID) (GroupInfo, bool)
	GroupByName(name string) (GroupInfo, bool)
	// Message reads one message with its body; false when it does not exist (any more).
	Message(a Address) (StoredMessage, bool, error)
	// Messages reads several, one after the other; close it.
	Messages() MessageReader
	// Finished says whether a group has finished an address (false above Last; true at or below its start).
	Finished(id GroupID, a Address) (bool, error)
	// Deliverables lists unfinished, not dead messages of a group with from <= address in address order,
	// at most limit, and the address to go on from (0: the end was reached). Parked messages are included
	// (delayed ones too: VisibleAt tells) only when withParked; a home of a queue without key order takes
	// delayed messages from Due and stragglers once from ParkedStragglers.
	Deliverables(id GroupID, from Address, limit int, withParked bool) ([]Deliverable, Address, error)
	// ParkedStragglers lists parked, not delayed-in-the-index, unfinished messages of a group from an address on.
	ParkedStragglers(id GroupID, from Address, limit int) ([]Deliverable, Address, error)
	// Retrying lists unfinished messages of a group that have a retry or lease entry, in address order.
	Retrying(id GroupID, from Address, limit int) ([]Deliverable, Address, error)
	// Due lists entries of the delayed index with visible-at in (after, upTo], in (visible-at, address) order,
	// at most limit; entries stay in the index until the message is finished by all groups or cancelled.
	Due(after DelayedKey, upTo Stamp, limit int) ([]DelayedKey, error)
	// NextDue is the least visible-at in the delayed index after a key; false when there is none.
	NextDue(after DelayedKey) (Stamp, bool, error)
	// DeadLetters lists a group's dead letters from an address on, at most limit.
	DeadLetters(id GroupID, from Address, limit int, withBody bool) ([]DeadLetter, Address, error)
	// RetryOf reads a message's retry state and recorded lease in a group.
	RetryOf(id GroupID, a Address) (RetryState, RecordedLease, bool, error)
	// Digest is the hash of the whole key space at the applied index it returns (incarnation-free; G7).
	Digest() (Index, [32]byte, error)
}

// DelayedKey is one entry of the delayed index.
type DelayedKey struct {
	VisibleAt Stamp
	Address   Address
}

// Applied tells a replica's host what one Update changed; called after it is visible to reads, in the apply
// goroutine: it must not block or call back into Raft.
type Applied struct {
	Index    Index
	Last     Address   // the partition's last address
	Appended bool      // messages were appended
	Delayed  bool      // the delayed index got a new entry or a change
	Exports  []GroupID // groups of which a dead letter got an export number, or moved along its export
	Redrive  bool      // some messages became deliverable out of order (redrive, purge, reset)
	Groups   []GroupID // groups created, deleted, reset, configured, or given a home
}
