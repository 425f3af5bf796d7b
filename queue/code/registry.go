package code

import "fmt"

// Class is what a client does about a code.
type Class uint8

const (
	ClassOK          Class = iota // success
	ClassFatal                    // fix or upgrade the client
	ClassRenegotiate              // ask again who serves, or register again
	ClassTransient                // repeat after a pause
	ClassPermanent                // this request can never succeed as it is
	ClassNoop                     // nothing to do
	ClassOperator                 // a person must look
	ClassWarning                  // beside an OK
)

// Info is what the registry knows about a code.
type Info struct {
	Code  Code
	Name  string
	Class Class
	Text  string // a sentence that names the fix
}

// The codes. 0x0001–0x0fff protocol and messages, 0x2000 metadata, 0x4000 flow, 0x6000 replication, 0x7000 local outcomes.
// Numbers that the systems before this one gave away are reserved (docs/reference/errors.md).
const (
	OK      Code = 0x7000 // took effect
	Unknown Code = 0x7001 // a skipped command: its outcome cannot be told

	Malformed           Code = 0x0003
	NotAuthenticated    Code = 0x0005
	AuthFailed          Code = 0x0006
	UnknownQueue        Code = 0x0008
	UnknownPartition    Code = 0x0009
	Internal            Code = 0x000a
	InvalidName         Code = 0x000b
	InvalidArgument     Code = 0x000c
	TooLarge            Code = 0x000d
	BatchEmpty          Code = 0x000e
	BatchTooLarge       Code = 0x000f
	SeqGap              Code = 0x0010
	SeqExpired          Code = 0x0011
	ProducerEpochStale  Code = 0x0012
	ProducerSeqInvalid  Code = 0x0013
	ExpectedLastAddress Code = 0x0014
	AtomicRefused       Code = 0x0015 // another message of the atomic publish was refused
	InvalidReceipt      Code = 0x0016
	DelayTooLong        Code = 0x0017
	WrongPartition      Code = 0x0018 // the key belongs to another partition
	NotPermitted        Code = 0x001a // the token's roles do not allow the call
	AtomicPartitions    Code = 0x0019 // an atomic publish over several partitions
	StaleGeneration     Code = 0x0020
	NotOwner            Code = 0x0021 // NotGroupHome: go to the named home
	StaleOwner          Code = 0x0022 // epoch not equal to the group's
	UnknownDelivery     Code = 0x0023 // lease unknown or run out
	UnknownMessage      Code = 0x0028
	Skipped             Code = 0x0029 // decided on another change number; nothing changed
	ConsumerLimit       Code = 0x002a
	MaxWaitingPulls     Code = 0x0027
	DeadTargetDown      Code = 0x0031
	DeadExporting       Code = 0x0032

	QueueExistsMismatch Code = 0x2001
	GroupExistsMismatch Code = 0x2002
	MetadataReadOnly    Code = 0x2003
	MetadataQuarantined Code = 0x2004
	UnknownGroup        Code = 0x2005
	MutationFenced      Code = 0x2006 // decided on another version, epoch, or operation
	QueueRetired        Code = 0x2007
	UnknownHost         Code = 0x2008
	NoPlacement         Code = 0x2009
	GroupPaused         Code = 0x200a
	LimitReached        Code = 0x200b
	HostRefused         Code = 0x200c // removed from the fleet, or back without its data
	ReplicaNeeded       Code = 0x200d // the others could not go on without it

	Backpressure         Code = 0x4001
	QuotaExceeded        Code = 0x4002
	RateLimited          Code = 0x4003
	StorageHighWatermark Code = 0x4004
	MessageExceedsCredit Code = 0x4005
	QueueFull            Code = 0x4008

	QuorumLost       Code = 0x6001 // maybe applied: the outcome is unknown
	ReadOnlyDegraded Code = 0x6002
	InSyncNotEnough  Code = 0x6003
	FollowerLag      Code = 0x6004
	StaleLeader      Code = 0x6005
	LeaseExpired     Code = 0x6006
	Divergent        Code = 0x6009
	NoLeader         Code = 0x600c
	ShuttingDown     Code = 0x600d
	ClockSkew        Code = 0x600e
	NotReplica       Code = 0x600f // this host holds no replica of the shard
	Unavailable      Code = 0x6010
	DeadlineExceeded Code = 0x6011 // ran out before anything was tried
	WrongFleet       Code = 0x6012
)

func (c Code) String() string {
	if i, ok := byCode[c]; ok {
		return i.Name
	}
	return fmt.Sprintf("UNKNOWN(0x%04x)", uint16(c))
}

// Info returns what the registry knows; for an unassigned number a generic permanent entry.
func (c Code) Info() Info {
	if i, ok := byCode[c]; ok {
		return i
	}
	return Info{Code: c, Name: c.String(), Class: ClassPermanent, Text: "a newer host answered with a code that this version does not know: upgrade"}
}
