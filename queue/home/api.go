package home

import (
	"context"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"go.uber.org/zap"
)

// Bounds of the calls. They are checked before anything is looked up.
const (
	// MaxReceive bounds the messages of one Receive.
	MaxReceive = 1000
	// MaxSettle bounds the items of one Ack, Nack, Release, Reject or Extend.
	MaxSettle = 1024
	// MaxWait bounds a long poll.
	MaxWait = 20 * time.Second
	// MaxLease bounds a lease, from the hand-out to its last deadline.
	MaxLease = 12 * time.Hour
	// MaxReason bounds the reason of a failure, in bytes. A longer one is cut.
	MaxReason = 255
	// DefaultReceiveBytes bounds the bytes of one Receive that names no bound of its own.
	DefaultReceiveBytes = 4 << 20
	// DefaultHomeLease is how long one ReadIndex lets a home start deliveries.
	DefaultHomeLease = time.Second
)

// Options are what a Keeper needs. All of them are per process. EnsureDefaults fills zero values, Validate joins
// every problem.
type Options struct {
	// Shard is the shard whose groups are kept; it is in every receipt.
	Shard uint64
	// Self is this host's replica of the shard.
	Self queue.ReplicaID
	// Reader is the applied state of that replica.
	Reader queue.Reader
	// Propose commits a command and returns what apply answered, or a *code.Error: Effect None when the entry was
	// never queued, Maybe when it may yet commit. When it returns a result, this replica has applied the entry.
	// It returns by the deadline of ctx. Called from many goroutines.
	Propose func(ctx context.Context, cmd queue.Command) (queue.Result, error)
	// ReadIndex is a linearizable barrier: after it returned nil, this replica has applied everything that was
	// committed when it was called. An error means "no lease": a host that refuses its own clock returns one too.
	ReadIndex func(ctx context.Context) error
	// Stamp is the stamp that a proposer of this host would give now.
	Stamp func() queue.Stamp
	// Boot is the boot-time clock (CLOCK_BOOTTIME): it never steps and goes on while the machine sleeps.
	Boot func() time.Duration
	// ReceiptKey keys the MAC of receipts: the same on every host of the fleet. At least 16 bytes.
	ReceiptKey []byte
	// HomeLease is how long one ReadIndex lets this process start deliveries: the same on every host of the
	// fleet, since a new home waits 1.1 times as long. Defaults to 1 s.
	HomeLease time.Duration
	// ProposeTimeout bounds one attempt to commit a command. Defaults to 5 s.
	ProposeTimeout time.Duration
	// MaxWaiters bounds the parked receives of one group. Defaults to 10,000.
	MaxWaiters int
	// Logger gets state changes and faults. Defaults to none.
	Logger *zap.Logger
	// Rand gives the jitter of redeliveries. Safe for concurrent use. Defaults to math/rand/v2.
	Rand func() uint64
}

// ReceiveRequest asks for messages.
type ReceiveRequest struct {
	// Max bounds the messages: 0 means 1, at most MaxReceive.
	Max int
	// MaxBytes bounds their bytes (body, headers, key); the first message is handed out whatever its size.
	// 0 means DefaultReceiveBytes.
	MaxBytes int
	// Wait is how long to wait for the first message, at most MaxWait. 0 does not wait for a message to arrive; it
	// still waits for the home lease when one is ready.
	Wait time.Duration
	// Lease overrides the group's lease when HasLease is set: 0 to MaxLease.
	Lease    time.Duration
	HasLease bool
	// Consumer is the consumer's name: it is what limits per consumer, single active consumer, and `group
	// consumers` go by. "" is anonymous: only the group's limit holds, and a group with a single active consumer
	// refuses it.
	Consumer string
}

// Delivery is one message under one lease.
type Delivery struct {
	Receipt string
	Message queue.StoredMessage // its slices belong to the receiver
	// Attempt is 1 for the first delivery of a round and rises with every recorded failure.
	Attempt uint32
	// Round is 0, and one more after every redrive.
	Round uint32
	// Lease is how long the lease lasts from the hand-out; Deadline is its end as a stamp, for people.
	Lease    time.Duration
	Deadline queue.Stamp
	// FirstDelivered is when the message was first handed out, as far as this home has seen.
	FirstDelivered queue.Stamp
	// Reason is the last recorded failure, "" if none.
	Reason string

	lease queue.LeaseName
}

// NackItem gives one message back as failed.
type NackItem struct {
	Receipt string
	// Delay replaces the group's backoff when HasDelay is set: 0 to MaxLease.
	Delay    time.Duration
	HasDelay bool
	Reason   string
}

// RejectItem makes one message a dead letter now.
type RejectItem struct {
	Receipt string
	Reason  string
}

// ExtendItem sets a lease's deadline to Lease from now: 0 to MaxLease, and not beyond MaxLease from the hand-out.
type ExtendItem struct {
	Receipt string
	Lease   time.Duration
}

// ItemResult is the outcome of one item of a call. Code is code.OK when it took effect.
//
//	InvalidReceipt    not a receipt of this queue and group
//	StaleOwner        the receipt is of another epoch than this home's, and its lease is not recorded
//	NotOwner          the home has moved meanwhile, and the lease is recorded: go there with the same receipt
//	UnknownDelivery   the lease is unknown, was given back, or has run out (an ack of a lease that ran out is
//	                  honoured while nobody has had the message since and it is not dead)
//	Skipped           another outcome for the same message is under way
//	QuorumLost        Effect Maybe: the outcome is unknown; the home goes on until apply answers
//	DeadlineExceeded  Effect None: the time ran out before anything was proposed
type ItemResult struct {
	Code   code.Code
	Effect code.Effect
	// NotBefore is when a nacked message may be handed out again. Dead says that it became a dead letter.
	NotBefore queue.Stamp
	Dead      bool
}

// DeadResult is the outcome of Redrive or PurgeDead for one dead letter.
type DeadResult struct {
	Address queue.Address
	ItemResult
}

// GroupStats is what a home knows about one of its groups, at one moment.
type GroupStats struct {
	Group    queue.GroupID
	Name     string
	Home     queue.ReplicaID
	Epoch    queue.Epoch
	State    Gate          // why deliveries may start or not
	LeaseFor time.Duration // what is left of the home lease
	Paused   bool
	Waiters  int
	// Ready counts what is buffered for hand-out; More says that there is, or may be, more behind it.
	Ready       int
	More        bool
	Leased      int
	Retrying    int // waiting for their not-before, also delayed heads of a key
	BlockedKeys int // keys whose head is leased, retrying or delayed and that have messages behind it
	Blocked     int // messages behind such a head, within the look-ahead
	Unresolved  int // messages with an ack or Expire entry that apply has not answered
	Handed      uint64
	Acked       uint64
	Failed      uint64 // failures recorded
	Dead        uint64 // dead letters made
	Consumers   []ConsumerStats
}

// ConsumerStats is what one named consumer holds.
type ConsumerStats struct {
	Name   string
	Leased int
	Active bool // the single active consumer
}
