package witness

import (
	"errors"
	"fmt"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftpb"
)

// Role is what a replica is in its shard.
type Role uint8

const (
	// None is the role of a replica that is not, or no longer, a member.
	None Role = iota
	// Full holds state, votes and may lead.
	Full
	// NonVoting holds state and does not vote.
	NonVoting
	// Witness votes on metadata and holds no state.
	Witness
)

// String returns the role's name as operators see it.
func (r Role) String() string {
	switch r {
	case None:
		return "none"
	case Full:
		return "full"
	case NonVoting:
		return "non-voting"
	case Witness:
		return "witness"
	}
	return fmt.Sprintf("Role(%d)", uint8(r))
}

// Votes says whether the role counts in elections and commit quorums.
func (r Role) Votes() bool { return r == Full || r == Witness }

// HoldsState says whether the role stores bodies: whether it counts as a copy of the data and can be read from.
func (r Role) HoldsState() bool { return r == Full || r == NonVoting }

// MayLead says whether the role may campaign and lead, and so whether leadership may be transferred to it.
func (r Role) MayLead() bool { return r == Full }

// MayBeInitial says whether a shard may begin with it. The engine panics on an initial member that is a
// witness or non-voting; these are added when the shard has a leader.
func (r Role) MayBeInitial() bool { return r == Full }

// Refusals of this package, each wrapped with the replica that it is about.
var (
	ErrInitialMember = errors.New("only a full replica can be an initial member: start the shard, then add it")
	ErrRoleChange    = errors.New("a replica changes its role only from non-voting to full: remove it and add one with a new id")
	ErrTransfer      = errors.New("leadership goes only to a full replica")
	ErrSameDomain    = errors.New("the voters of a shard must be in distinct failure domains")
)

// RoleOf returns the role of a replica in m.
func RoleOf(m raftpb.Membership, replicaID uint64) Role {
	if _, ok := m.Addresses[replicaID]; ok {
		return Full
	}
	if _, ok := m.NonVotings[replicaID]; ok {
		return NonVoting
	}
	if _, ok := m.Witnesses[replicaID]; ok {
		return Witness
	}
	return None
}

// CheckInitial returns an error that wraps ErrInitialMember unless a shard may begin with a replica of the
// role. It must be asked before StartReplica is given initial members: the engine panics the process instead
// of refusing.
func CheckInitial(replicaID uint64, r Role) error {
	if !r.MayBeInitial() {
		return fmt.Errorf("replica %d is %v: %w", replicaID, r, ErrInitialMember)
	}
	return nil
}

// CheckRoleChange returns an error that wraps ErrRoleChange unless a replica of role from may become to. A
// newcomer may be added in any role; leaving is always a change to None.
func CheckRoleChange(replicaID uint64, from, to Role) error {
	if from == None || to == None || from == to || from == NonVoting && to == Full {
		return nil
	}
	return fmt.Errorf("replica %d from %v to %v: %w", replicaID, from, to, ErrRoleChange)
}

// CheckTransfer returns an error that wraps ErrTransfer unless leadership may be transferred to the replica.
// The engine ignores such a request without an error.
func CheckTransfer(m raftpb.Membership, replicaID uint64) error {
	if r := RoleOf(m, replicaID); !r.MayLead() {
		return fmt.Errorf("replica %d is %v: %w", replicaID, r, ErrTransfer)
	}
	return nil
}

// Config returns cfg as a replica must be started that was born in the given role. The role of birth decides
// for ever: a promoted replica is started as the non-voting one that it was and becomes a voter while it
// replays; started as a voter it panics the process. A witness takes no snapshots, so the settings for them
// are zeroed.
func Config(cfg config.Config, birth Role) config.Config {
	cfg.IsWitness = birth == Witness
	cfg.IsNonVoting = birth == NonVoting
	if cfg.IsWitness {
		cfg.SnapshotEntries, cfg.CompactionOverhead = 0, 0
	}
	return cfg
}

// Place is where a replica lives, for the purpose of what can fail together. Domain names what fails together
// with the host, a rack or a zone; empty, it is the host alone.
type Place struct {
	HostID uint64
	Domain string
}

// CheckPlacement returns an error that wraps ErrSameDomain if a voter at candidate would share a host or a
// domain with one of voters, the shard's other full replicas and witnesses. A witness beside a full replica
// is lost together with it, and then the other full replica has no quorum, which the witness was to prevent.
func CheckPlacement(candidate Place, voters []Place) error {
	for _, v := range voters {
		if v.HostID == candidate.HostID {
			return fmt.Errorf("host %d has a voter of the shard already: %w", v.HostID, ErrSameDomain)
		}
		if v.Domain != "" && v.Domain == candidate.Domain {
			return fmt.Errorf("hosts %d and %d are both in domain %q: %w", candidate.HostID, v.HostID, v.Domain, ErrSameDomain)
		}
	}
	return nil
}
