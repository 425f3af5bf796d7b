package queue

// Command is one of the six commands: *Enqueue, *Ack, *Group, *Expire, *Home, *Retention. There is no seventh.
//
// Encoded form: version byte, tag byte, stamp, fields (docs/format/command.md; golden bytes per command and version).
// Decode never panics, never allocates more than its input justifies, and refuses trailing bytes.
type Command interface {
	// CommandStamp is the proposer's time.
	CommandStamp() Stamp
	isCommand()
}

// Enqueue appends publishes in list order.
type Enqueue struct {
	Stamp     Stamp
	Publishes []Publish
}

// Publish is one client call: its messages get consecutive results, and one producer.
type Publish struct {
	Producer      Producer
	ProducerEpoch uint64
	Low           Seq // the producer's lowest unanswered seq; 0: unknown, then last-1,023 is assumed
	Contiguous    bool
	Atomic        bool // all messages or none
	CheckLast     bool // refuse (expected-last-address) unless the partition's last address is ExpectedLast
	ExpectedLast  Address
	Messages      []Message
}

// Message is what a producer gives. VisibleAt and ExpiresAt are absolute, computed by the proposer from
// its stamp and the client's durations; 0 means none.
type Message struct {
	Seq       Seq // with a producer: > 0
	DedupID   []byte
	Key       []byte
	VisibleAt Stamp
	ExpiresAt Stamp
	Priority  uint8 // reserved: must be 0
	Headers   []Header
	Body      []byte
}

// Ack finishes messages of a group: apply refuses the command unless Epoch equals the group's.
type Ack struct {
	Stamp  Stamp
	Group  GroupID
	Epoch  Epoch
	Ranges []AddressRange // at most MaxHousekeeping addresses in all
}

// GroupOp is what a Group command does. Part of the format; do not renumber.
type GroupOp uint8

const (
	GroupCreate    GroupOp = 1
	GroupDelete    GroupOp = 2
	GroupReset     GroupOp = 3
	GroupConfigure GroupOp = 4
)

// Group creates, deletes, resets or configures a consumer group.
// Create: Name, OperationID, Start, Config, FirstHome; the same create again gives the same answer, another
// config under the name is refused. Delete, Reset: ID and ExpectedEpoch. Configure: ID, ExpectedVersion, Config.
type Group struct {
	Stamp           Stamp
	Op              GroupOp
	OperationID     uint64 // random, kept 24 h of the shard's clock
	Name            string
	ID              GroupID
	ExpectedEpoch   Epoch
	ExpectedVersion uint64
	Start           Start
	Config          GroupConfig
	FirstHome       ReplicaID
}

// ExpireKind is what one entry of an Expire command does. Part of the format; do not renumber.
type ExpireKind uint8

const (
	// ExpireUpdate records a failure: Attempts (final value), NotBefore, Reason.
	ExpireUpdate ExpireKind = 1
	// ExpireDead makes the message a dead letter: Attempts, Reason. ExportNumber is assigned in apply when the
	// group has a dead-letter queue.
	ExpireDead ExpireKind = 2
	// ExpireLease records a lease: Lease, Deadline, Consumer (attempts as data).
	ExpireLease ExpireKind = 3
	// ExpireRelease gives back without counting.
	ExpireRelease ExpireKind = 4
	// ExpireClaim takes over: attempts + 1, claim generation + 1, no epoch change.
	ExpireClaim ExpireKind = 5
	// ExpireRedrive makes a dead letter deliverable: attempts 0, round + 1.
	ExpireRedrive ExpireKind = 6
	// ExpireExport moves a dead letter along its export: ExportState and Target.
	ExpireExport ExpireKind = 7
)

// ExpireEntry is decided on one message at one change number; anything else stored means "skipped".
type ExpireEntry struct {
	Kind        ExpireKind
	Address     Address
	Change      Change
	Attempts    uint32
	NotBefore   Stamp  // of a lease: when it was handed out, 0 if that is not known
	Reason      string // at most 255 bytes
	Lease       LeaseName
	Deadline    Stamp
	Consumer    string
	ExportState ExportState
	Target      uint64
}

// ExportState is how far a dead letter's export is. Part of the format; do not renumber.
type ExportState uint8

const (
	ExportNone      ExportState = 0
	ExportPending   ExportState = 1
	ExportExporting ExportState = 2
	ExportDone      ExportState = 3
)

// Expire carries what a group's home decided about unfinished or dead messages.
type Expire struct {
	Stamp   Stamp
	Group   GroupID
	Epoch   Epoch
	Entries []ExpireEntry // at most MaxHousekeeping
}

// Home gives a group to a replica: epoch + 1. Refused unless the group's home and epoch are the expected ones.
type Home struct {
	Stamp         Stamp
	Group         GroupID
	ExpectedHome  ReplicaID
	ExpectedEpoch Epoch
	NewHome       ReplicaID
	Released      bool // set only by the old home itself, after it stopped (DESIGN: home lease)
}

// DelayedChange cancels (NewVisibleAt 0) or reschedules a delayed message whose visible-at is Expected.
type DelayedChange struct {
	Address      Address
	Expected     Stamp
	NewVisibleAt Stamp
}

// Retention is housekeeping of the shard. Each field is optional; fields apply in declaration order.
type Retention struct {
	Stamp        Stamp
	OperationID  uint64
	ReclaimLine  Address         // reclaim everything at or below; never passes an unfinished message
	Reclaim      []Address       // explicit addresses that every group has finished, or whose expires-at has come
	DropTo       Address         // drop (policy says so): finished for every group, then reclaimed
	PurgeTo      Address         // finished for every group, also leased, delayed and dead ones, then reclaimed
	Park         []Address       // stragglers to park
	Delayed      []DelayedChange // cancel or reschedule
	Options      *QueueOptions   // Version names the version it was decided on
	Retire       bool            // the queue is being deleted: publishes are refused from here
	FormatLevel  uint32          // raise the format level
	CheckpointID uint64          // marks an index for anti-entropy
	Forget       []Producer      // outboxes (ProducerOutbox) whose source exists no more: what they have published is forgotten
	Import       *Import         // a chunk of a saved state, for a fresh shard; it stands alone
	Recover      *Recovery       // a new life of the shard; it stands alone
}

func (c *Enqueue) CommandStamp() Stamp   { return c.Stamp }
func (c *Ack) CommandStamp() Stamp       { return c.Stamp }
func (c *Group) CommandStamp() Stamp     { return c.Stamp }
func (c *Expire) CommandStamp() Stamp    { return c.Stamp }
func (c *Home) CommandStamp() Stamp      { return c.Stamp }
func (c *Retention) CommandStamp() Stamp { return c.Stamp }

func (*Enqueue) isCommand()   {}
func (*Ack) isCommand()       {}
func (*Group) isCommand()     {}
func (*Expire) isCommand()    {}
func (*Home) isCommand()      {}
func (*Retention) isCommand() {}
