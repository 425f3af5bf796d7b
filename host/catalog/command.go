package catalog

import (
	"fmt"

	"github.com/tierq/tierq/queue"
)

// Command is one change of the catalog: *InitFleet, *RegisterHost, *CreateQueue, *ConfigureQueue, *DeleteQueue, *ReplicaReport,
// *MoveQueue, *JoinHost, *CreateJoinToken, *DrainHost, *RemoveHost, *StartMove, *MoveReport, *Reseat, *PutTenant, *DeleteTenant,
// *CreateAccessToken, *RevokeAccessToken, *GrowQueue, *GrowthReport.
//
// Encoded form: version byte, tag byte, fields. Decode never panics, allocates in proportion to its input, and refuses
// trailing bytes and unknown versions and tags.
type Command interface {
	tag() uint8
	encode(*encoder)
}

// commandVersion is the layout of the commands below.
const commandVersion = 1

// The tags. Part of the format; do not renumber.
const (
	tagInitFleet       = 1
	tagRegisterHost    = 2
	tagCreateQueue     = 3
	tagConfigureQueue  = 4
	tagDeleteQueue     = 5
	tagReplicaReport   = 6
	tagJoinHost        = 7
	tagCreateJoinToken = 8
	tagDrainHost       = 9
	tagRemoveHost      = 10
	tagStartMove       = 11
	tagMoveReport      = 12
	tagReseat          = 13
	tagMoveQueue       = 16

	tagPutTenant         = 24
	tagDeleteTenant      = 25
	tagCreateAccessToken = 26
	tagRevokeAccessToken = 27

	tagGrowQueue    = 32
	tagGrowthReport = 33
)

// InitFleet gives the fleet its id, the key of its receipts, and the placement of the catalog itself. The first one wins; a
// later one is answered with the id that stands.
type InitFleet struct {
	FleetID FleetID
	MACKey  [32]byte
	Members []Replica // of shard 1: births initial, and at most one witness
}

// RegisterHost adds a host, or changes its addresses or domain. Host.Version is the version that the change was decided on, 0
// for a new host; another one is refused with MutationFenced, so that a late copy cannot bring back old addresses. A host
// never changes its role.
type RegisterHost struct{ Host Host }

// CreateQueue makes a queue and places its shards. Layouts are 3, 5 (replicas, no witness), and 2 with one witness. The same creation
// again is answered with the queue that exists; other options under the name are refused with QueueExistsMismatch. An
// operation id is random and names one creation for ever: a late copy cannot bring back a queue that was deleted since.
type CreateQueue struct {
	OperationID uint64
	Tenant      string // "": DefaultTenant
	Name        string
	// Options are complete: the proposer has filled in the defaults, which are its binary's, and checked them. Version and
	// Partition are ignored; 0 partitions are one.
	Options   queue.QueueOptions
	Replicas  uint32
	Witnesses uint32
}

// ConfigureQueue replaces a queue's options. Options.Version names the version that the change was decided on; the
// partitions change by GrowQueue only.
type ConfigureQueue struct {
	Tenant, Name string
	ExpectedID   uint64
	Options      queue.QueueOptions
}

// DeleteQueue removes a queue; the hosts then remove its replicas. The name is free at once. The same deletion again is OK.
type DeleteQueue struct {
	OperationID  uint64
	Tenant, Name string
	ExpectedID   uint64
}

// ReportKind is what a host reports of a replica. Part of the format; do not renumber.
type ReportKind uint8

const (
	// ReportStarted claims the one first start of a planned replica, before it is started. Another claim, by another
	// nonce, is refused with MutationFenced: it has been started before, by a process that left votes behind.
	ReportStarted ReportKind = 1
	// ReportMember says that the shard's membership contains a replica that was added to it.
	ReportMember ReportKind = 2
	// ReportLost says that the data of a replica that was started are gone.
	ReportLost ReportKind = 3
	// ReportRemoved says that the data of a replica that is out of its shard have been removed.
	ReportRemoved ReportKind = 4
)

// ReplicaReport moves a replica's state forward.
type ReplicaReport struct {
	Shard   uint64
	Replica queue.ReplicaID
	Kind    ReportKind
	Nonce   uint64 // ReportStarted only
}

func (*InitFleet) tag() uint8      { return tagInitFleet }
func (*RegisterHost) tag() uint8   { return tagRegisterHost }
func (*CreateQueue) tag() uint8    { return tagCreateQueue }
func (*ConfigureQueue) tag() uint8 { return tagConfigureQueue }
func (*DeleteQueue) tag() uint8    { return tagDeleteQueue }
func (*ReplicaReport) tag() uint8  { return tagReplicaReport }

func (c *InitFleet) encode(e *encoder) {
	e.b = append(e.b, c.FleetID[:]...)
	e.b = append(e.b, c.MACKey[:]...)
	e.replicas(c.Members)
}

func (c *RegisterHost) encode(e *encoder) { e.host(c.Host) }

func (c *CreateQueue) encode(e *encoder) {
	e.u64(c.OperationID)
	e.str(c.Tenant)
	e.str(c.Name)
	e.options(c.Options)
	e.u32(c.Replicas)
	e.u32(c.Witnesses)
}

func (c *ConfigureQueue) encode(e *encoder) {
	e.str(c.Tenant)
	e.str(c.Name)
	e.u64(c.ExpectedID)
	e.options(c.Options)
}

func (c *DeleteQueue) encode(e *encoder) {
	e.u64(c.OperationID)
	e.str(c.Tenant)
	e.str(c.Name)
	e.u64(c.ExpectedID)
}

func (c *ReplicaReport) encode(e *encoder) {
	e.u64(c.Shard)
	e.u64(uint64(c.Replica))
	e.u8(uint8(c.Kind))
	e.u64(c.Nonce)
}

// Encode returns the bytes of a command.
func Encode(c Command) []byte {
	e := &encoder{b: make([]byte, 0, 128)}
	e.u8(commandVersion)
	e.u8(c.tag())
	c.encode(e)
	return e.b
}

// Decode reads a command. The result shares no memory with b.
func Decode(b []byte) (Command, error) {
	d := &decoder{b: b}
	version, tag := d.u8(), d.u8()
	if d.err == nil && version != commandVersion {
		return nil, fmt.Errorf("catalog command version %d: %w", version, errMalformed)
	}
	c := d.command(tag)
	if err := d.end(); err != nil {
		return nil, fmt.Errorf("catalog command tag %d: %w", tag, err)
	}
	return c, nil
}

func (d *decoder) command(tag uint8) Command {
	switch tag {
	case tagInitFleet:
		c := &InitFleet{}
		copy(c.FleetID[:], d.take(len(c.FleetID)))
		copy(c.MACKey[:], d.take(len(c.MACKey)))
		c.Members = d.replicas()
		return c
	case tagRegisterHost:
		return &RegisterHost{Host: d.host()}
	case tagCreateQueue:
		return &CreateQueue{
			OperationID: d.u64(), Tenant: d.str(), Name: d.str(), Options: d.options(),
			Replicas: d.u32(), Witnesses: d.u32(),
		}
	case tagConfigureQueue:
		return &ConfigureQueue{Tenant: d.str(), Name: d.str(), ExpectedID: d.u64(), Options: d.options()}
	case tagDeleteQueue:
		return &DeleteQueue{OperationID: d.u64(), Tenant: d.str(), Name: d.str(), ExpectedID: d.u64()}
	case tagMoveQueue:
		return d.moveQueue()
	case tagReplicaReport:
		return &ReplicaReport{
			Shard: d.u64(), Replica: queue.ReplicaID(d.u64()), Kind: ReportKind(d.u8()), Nonce: d.u64(),
		}
	case tagJoinHost:
		return d.joinHost()
	case tagCreateJoinToken:
		return &CreateJoinToken{Token: d.joinToken(), NowMs: d.u64()}
	case tagDrainHost:
		return &DrainHost{HostID: d.u64(), Cancel: d.bool()}
	case tagRemoveHost:
		return &RemoveHost{HostID: d.u64(), Lost: d.bool()}
	case tagPutTenant:
		return d.putTenant()
	case tagDeleteTenant:
		return &DeleteTenant{Name: d.str()}
	case tagCreateAccessToken:
		return &CreateAccessToken{Token: d.accessToken()}
	case tagRevokeAccessToken:
		return &RevokeAccessToken{ID: d.u64()}
	case tagGrowQueue:
		return d.growQueue()
	case tagGrowthReport:
		return &GrowthReport{QueueID: d.u64(), Growth: d.u64(), Event: GrowthEvent(d.u8())}
	case tagStartMove:
		return &StartMove{Shard: d.u64(), From: queue.ReplicaID(d.u64()), ToHost: d.u64()}
	case tagReseat:
		return &Reseat{Shard: d.u64(), From: queue.ReplicaID(d.u64()), ToHost: d.u64()}
	case tagMoveReport:
		return &MoveReport{Shard: d.u64(), To: queue.ReplicaID(d.u64()), Event: MoveEvent(d.u8())}
	}
	d.err = errMalformed
	return nil
}
