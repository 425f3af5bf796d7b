package catalog

import (
	"encoding/hex"
	"fmt"

	"github.com/tierq/tierq/queue"
)

// ShardID is the catalog's own shard. Shards of queues count up from FirstQueueShard.
const (
	ShardID         uint64 = 1
	FirstQueueShard uint64 = 2
)

// Bounds of the catalog; part of its behaviour, so a change needs a format level.
const (
	// MaxHosts bounds the hosts of a fleet.
	MaxHosts = 1024
	// MaxReplicasPerHost is the number of replicas from which a host gets no further ones.
	MaxReplicasPerHost = 2000
	// MaxPartitions bounds the partitions of one queue.
	MaxPartitions = 64
	// MaxAddressBytes bounds each address of a host, and MaxDomainBytes the name of its failure domain.
	MaxAddressBytes = 256
	MaxDomainBytes  = 80
)

// DefaultTenant owns the queues of callers that name no tenant.
const DefaultTenant = "default"

// FleetID is a fleet's random name, made once with its catalog. The zero value means "no fleet yet".
type FleetID [16]byte

// String returns 32 hexadecimal digits, "" for the zero value.
func (f FleetID) String() string {
	if f == (FleetID{}) {
		return ""
	}
	return hex.EncodeToString(f[:])
}

// ParseFleetID reads what String returned.
func ParseFleetID(s string) (FleetID, error) {
	var f FleetID
	if s == "" {
		return f, nil
	}
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(f) {
		return f, fmt.Errorf("%q is not a fleet id", s)
	}
	copy(f[:], b)
	return f, nil
}

// HostRole is what a host is for. Part of the format; do not renumber.
type HostRole uint8

const (
	// HostFull holds replicas of queues and serves them.
	HostFull HostRole = 1
	// HostWitness only votes.
	HostWitness HostRole = 2
)

// String returns the role's name as configurations have it.
func (r HostRole) String() string {
	switch r {
	case HostFull:
		return "full"
	case HostWitness:
		return "witness"
	}
	return fmt.Sprintf("HostRole(%d)", uint8(r))
}

// ParseHostRole reads what String returned.
func ParseHostRole(s string) (HostRole, error) {
	switch s {
	case "full":
		return HostFull, nil
	case "witness":
		return HostWitness, nil
	}
	return 0, fmt.Errorf("role %q is neither full nor witness", s)
}

// Host is one host of the fleet. Addresses are "host:port" as the other hosts reach it; ClientAddr is as clients do, and
// empty for a witness host. Domain names what fails together with the host; empty, it is the host alone.
type Host struct {
	ID         uint64
	Role       HostRole
	RaftAddr   string
	PeerAddr   string
	ClientAddr string
	Domain     string
	Version    uint64 // +1 per change
}

// failureDomain is the host's domain for placement; a host without one is a domain of its own, which no name can equal.
func (h Host) failureDomain() string {
	if h.Domain != "" {
		return h.Domain
	}
	return fmt.Sprintf("\x00%d", h.ID)
}

// Birth is the role a replica was born in. It is always started in that role. Part of the format; do not renumber.
type Birth uint8

const (
	// BirthInitial is a full replica that is in the shard's initial member map.
	BirthInitial Birth = 1
	// BirthNonVoting is a full replica that was added without a vote, and promoted later or not.
	BirthNonVoting Birth = 2
	// BirthWitness is a witness.
	BirthWitness Birth = 3
)

// String returns the birth's name.
func (b Birth) String() string {
	switch b {
	case BirthInitial:
		return "initial"
	case BirthNonVoting:
		return "non-voting"
	case BirthWitness:
		return "witness"
	}
	return fmt.Sprintf("Birth(%d)", uint8(b))
}

// ReplicaState is how far a replica's life is. It only moves forward. Part of the format; do not renumber.
type ReplicaState uint8

const (
	// ReplicaPlanned has never been started. Only such a replica may be started without data.
	ReplicaPlanned ReplicaState = 0
	// ReplicaStarted was started once, by the host that named Nonce.
	ReplicaStarted ReplicaState = 1
	// ReplicaLost was started, and its data are gone. It must not be started again: it has forgotten its votes.
	ReplicaLost ReplicaState = 2
	// ReplicaRemoved is out of its shard, and its host has removed its data.
	ReplicaRemoved ReplicaState = 3
	// ReplicaRetired is out of its shard, and its host is to remove its data. It comes before ReplicaRemoved.
	ReplicaRetired ReplicaState = 4
)

// Gone says that a replica is never started again.
func (s ReplicaState) Gone() bool { return s >= ReplicaLost }

// String returns the state's name.
func (s ReplicaState) String() string {
	switch s {
	case ReplicaPlanned:
		return "planned"
	case ReplicaStarted:
		return "started"
	case ReplicaLost:
		return "lost"
	case ReplicaRemoved:
		return "removed"
	case ReplicaRetired:
		return "retired"
	}
	return fmt.Sprintf("ReplicaState(%d)", uint8(s))
}

// Replica is one member of a shard.
type Replica struct {
	ID     queue.ReplicaID
	HostID uint64
	Birth  Birth
	State  ReplicaState
	// Member says that a replica that was not born initial votes: a witness was added, one born non-voting was promoted.
	Member bool
	// Nonce is the random number under which the replica's host claimed its one first start.
	Nonce uint64
}

// Votes says whether a replica is, as far as the catalog knows, among the voters of its shard.
func (r Replica) Votes() bool { return (r.Birth == BirthInitial || r.Member) && !r.State.Gone() }

// Placement is where a shard's replicas live. It is kept for ever; of a deleted one only what a returning host needs is true.
type Placement struct {
	Shard     uint64
	QueueID   uint64 // 0: the catalog's own shard
	Partition uint32
	Replicas  []Replica // by id, ascending; includes removed ones
	Deleted   bool
}

// Replica returns the replica with an id.
func (p *Placement) Replica(id queue.ReplicaID) (Replica, bool) {
	for _, r := range p.Replicas {
		if r.ID == id {
			return r, true
		}
	}
	return Replica{}, false
}

// OnHost returns the replica that a host is to run, or whose data it is to remove: the one with the greatest id, as a host
// that has left and joined again has had several.
func (p *Placement) OnHost(hostID uint64) (Replica, bool) {
	for i := len(p.Replicas) - 1; i >= 0; i-- {
		if p.Replicas[i].HostID == hostID {
			return p.Replicas[i], true
		}
	}
	return Replica{}, false
}

// Initial returns the shard's initial members as (replica id, host id); it is the same for ever.
func (p *Placement) Initial() map[queue.ReplicaID]uint64 {
	members := make(map[queue.ReplicaID]uint64)
	for _, r := range p.Replicas {
		if r.Birth == BirthInitial {
			members[r.ID] = r.HostID
		}
	}
	return members
}

// Queue is one named queue.
type Queue struct {
	ID          uint64
	Tenant      string
	Name        string
	Options     queue.QueueOptions // as configured; Partition is 0, each shard has its own
	Replicas    uint32
	Witnesses   uint32
	Shards      []uint64 // by partition
	OperationID uint64   // of its creation
}

// QueueKey is a queue's name with its tenant.
type QueueKey struct{ Tenant, Name string }

// Key returns the queue's key.
func (q *Queue) Key() QueueKey { return QueueKey{q.Tenant, q.Name} }
