// Package api serves tierq.v1: it translates between the protobuf and the fleet that a Backend stands for, forwards
// what another host must answer, and turns refusals into error details. It knows neither Raft nor the disk.
package api

import (
	"context"
	"time"

	"github.com/tierq/tierq/queue"
)

// Backend is what the listeners need of a host. Every method returns by its context's deadline. A method that must be
// answered elsewhere returns *ElsewhereError and has had no effect; one that names no partition of a queue that has
// several returns *SeveralError, and has had none either. Refusals and failures are *code.Error.
type Backend interface {
	Admin
	Hosts
	Snapshots
	Access

	CreateQueue(ctx context.Context, r CreateQueue) (QueueInfo, bool, error)
	ListQueues(ctx context.Context, prefix string) ([]QueueInfo, error)
	// DescribeQueue reads a partition's state linearizably. Partitions lists all of them whichever is asked for.
	DescribeQueue(ctx context.Context, name string, p Partition) (QueueInfo, error)
	// LocateQueue is DescribeQueue without state: what this host knows of the partitions now.
	LocateQueue(ctx context.Context, name string) (QueueInfo, error)
	// PartitionCount is how many partitions a queue has, as this host knows now, 0 if it knows no such queue, and a channel that
	// is closed when that may have changed. It must be cheap.
	PartitionCount(ctx context.Context, name string) (n uint32, changed <-chan struct{})
	DeleteQueue(ctx context.Context, name string) error
	Publish(ctx context.Context, r Publish) (PublishReply, error)

	CreateGroup(ctx context.Context, r CreateGroup) (GroupInfo, error)
	ListGroups(ctx context.Context, queue string, p Partition) ([]GroupInfo, error)
	// DeleteGroup with an id deletes only the group of that id, and only from a partition that is not open; 0 is any.
	DeleteGroup(ctx context.Context, queue string, p Partition, group string, id queue.GroupID) error
	ResetGroup(ctx context.Context, queue string, p Partition, group string, start queue.Start) (GroupInfo, error)
	MoveGroup(ctx context.Context, queue string, p Partition, group string, toHost uint64) (GroupInfo, error)

	Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error)
	Settle(ctx context.Context, r Settle) ([]SettleResult, error)

	ListDead(ctx context.Context, r Dead) ([]queue.DeadLetter, queue.Address, error)
	// RedriveDead and PurgeDead go on until nothing is left, the limit is reached, or shortly before the deadline.
	RedriveDead(ctx context.Context, r Dead) (DeadReply, error)
	PurgeDead(ctx context.Context, r Dead) (DeadReply, error)

	Fleet() Fleet
	// Digest reads the digest of the local replica of a partition.
	Digest(ctx context.Context, queue string, partition uint32) (ReplicaDigest, error)
	BenchPropose(ctx context.Context, r BenchPropose) (BenchResult, error)
}

// ElsewhereError says that another host must answer a call.
type ElsewhereError struct {
	Host uint64
	// Cause is the refusal if the call may not be forwarded.
	Cause error
}

func (e *ElsewhereError) Error() string { return e.Cause.Error() }

// Unwrap returns the refusal.
func (e *ElsewhereError) Unwrap() error { return e.Cause }

// Partition names a partition of a queue; nil is the only one.
type Partition = *uint32

// SeveralError says that a call has named no partition of a queue that has several.
type SeveralError struct{ Queue QueueInfo }

func (e *SeveralError) Error() string { return needsPartition(&e.Queue).Error() }

// CreateQueue asks for a queue. Replicas 0 means what the fleet can hold, 0 partitions are 1.
type CreateQueue struct {
	Partitions  uint32
	Name        string
	Options     queue.QueueOptions
	Replicas    int
	Witnesses   int
	OperationID uint64
}

// QueueInfo is a queue as the catalog and, where known, its shards' states have it.
type QueueInfo struct {
	Name       string
	ID         uint64
	Options    queue.QueueOptions
	Partitions []PartitionInfo
	GrowingTo  uint32 // partitions that there will be; 0: it does not grow
	HasState   bool
	Messages   uint64
	Bytes      uint64
	Delayed    uint64
	Last       queue.Address
	Groups     []GroupInfo
}

// PartitionInfo is one partition: its shard, its members, and who leads it now (0: nobody known).
type PartitionInfo struct {
	Number      uint32
	Shard       uint64
	Replicas    []ReplicaInfo
	LeaderHost  uint64
	LeaderAPI   string
	Term        uint64
	QuorumState uint32
	DataCopies  uint32
}

// ReplicaInfo is one member of a shard.
type ReplicaInfo struct {
	Replica queue.ReplicaID
	Host    uint64
	Role    string
	API     string
}

// Publish is one publish to one partition; Delays and TTLs are per message, nil for none.
type Publish struct {
	Queue     string
	Partition Partition
	Publish   queue.Publish
	Delays    []time.Duration
	TTLs      []time.Duration
	// Queued, if not nil, is called once the publish has its place in the order, or at the latest when it is answered.
	Queued func()
}

// PublishReply is the outcome of an applied publish.
type PublishReply struct {
	Result     queue.PublishResult
	Shard      uint64
	Index      queue.Index
	DataCopies uint32
	LeaderHost uint64
	LeaderAPI  string
	Warning    uint32 // a code that rides beside success, FOLLOWER_LAG; 0: none
	Partitions uint32 // that the queue has
}

// CreateGroup asks for a consumer group. HomeHost 0 lets the fleet choose.
type CreateGroup struct {
	Queue       string
	Partition   Partition
	Name        string
	Config      queue.GroupConfig
	Start       queue.Start
	HomeHost    uint64
	OperationID uint64
}

// GroupInfo is a consumer group in one partition and, at its home, what is in flight.
type GroupInfo struct {
	queue.GroupInfo
	Queue     string
	Partition uint32
	HomeHost  uint64
	HomeAPI   string
	InFlight  int
	Waiting   int
	// Parked is why dead letters do not go on to their queue; nil: they do, or another host is the home.
	Parked *ParkedExport
	// Oldest is the message that has waited longest, for OldestAge; 0: none. Told by lists and descriptions.
	Oldest    queue.Address
	OldestAge time.Duration
}

// Receive asks a group's home for messages. Lease is nil for the group's own.
type Receive struct {
	Queue     string
	Partition Partition
	Group     string
	Max       int
	MaxBytes  int
	Wait      time.Duration
	Lease     *time.Duration
	Consumer  string
	MinIndex  queue.Index
}

// Delivery is one message handed out.
type Delivery struct {
	Message queue.StoredMessage
	Receipt string
	Attempt uint32
	Lease   time.Duration
	// FirstDelivered is the first hand-out that this home has seen, Reason the last failure, Round the redrives.
	FirstDelivered queue.Stamp
	Reason         string
	Round          uint32
}

// SettleKind is what a settle does with its leases.
type SettleKind int

const (
	SettleAck SettleKind = iota
	SettleNack
	SettleRelease
	SettleReject
	SettleExtend
	// SettleUnseen lets leases that no handler has seen run out without counting.
	SettleUnseen
)

func (k SettleKind) String() string {
	return [...]string{"ack", "nack", "release", "reject", "extend", "unseen"}[k]
}

// Settle settles leases by receipt, all of one partition. Delay is nil for the group's backoff.
type Settle struct {
	Kind      SettleKind
	Queue     string
	Partition Partition
	Group     string
	Receipts  []string
	Delay     *time.Duration
	Reason    string
	Lease     time.Duration
	Patient   bool // of an ack: it may wait for others
}

// SettleResult answers one receipt: Err nil means OK.
type SettleResult struct {
	Address queue.Address
	Already bool
	Err     error
}

// Dead selects dead letters of a group: the named ones, or those from From on that the filters let through.
type Dead struct {
	Queue     string
	Partition Partition
	Group     string
	Addresses []queue.Address
	From      queue.Address
	// Limit bounds them; 0: all, but for lists.
	Limit        int
	ReasonPrefix string
	OlderThan    time.Duration
	// Rate is how many are treated in a second at most; 0: no limit.
	Rate   int
	DryRun bool
}

// DeadReply counts what was done, or with a dry run what matched. Next is where to go on, 0 at the end.
type DeadReply struct {
	Done, Skipped, Matched int
	Next                   queue.Address
}

// Fleet is what a host knows of its fleet.
type Fleet struct {
	ID             string
	Self           uint64
	Version        string
	Uptime         time.Duration
	CatalogVersion uint64
	CatalogLeader  uint64
	CatalogTerm    uint64
	Hosts          []HostInfo
}

// HostInfo is one host of the fleet; Silent is how long nothing was heard of it.
type HostInfo struct {
	ID     uint64
	Role   string
	API    string
	Peer   string
	Domain string
	Alive  bool
	Silent time.Duration
}

// ReplicaDigest is a full replica's digest at an applied index.
type ReplicaDigest struct {
	Shard   uint64
	Replica queue.ReplicaID
	Host    uint64
	Applied queue.Index
	Digest  [32]byte
}

// BenchPropose asks for a bare batched propose loop on a queue's shard.
type BenchPropose struct {
	Queue        string
	MessageBytes int
	Batch        int
	InFlight     int
	Duration     time.Duration
}

// BenchResult is what it reached.
type BenchResult struct {
	Commands, Messages int
	Elapsed            time.Duration
	P50, P99           time.Duration
}
