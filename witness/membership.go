package witness

import (
	"fmt"
	"maps"
	"strings"

	"github.com/lni/dragonboat/v4/raftpb"
)

// Apply returns the membership after a committed config change, by the rules of the engine's state machine. A
// config change that is committed may still be refused when it is applied, on every replica alike; then m
// itself is returned, unchanged, and accepted is false. m is never written to; an accepted change returns a
// membership that shares no map with it.
//
// index is the change's position in the log, which becomes the membership's ConfigChangeId. ordered is the
// shard's OrderedConfigChange setting.
//
// A change is refused if any of these holds, whatever the order of looking at them:
//
//  1. ordered, and the change was decided against another ConfigChangeId (initial members are exempt)
//  2. it adds a replica id that was removed before: ids are used once
//  3. it adds a replica in the role that it has already
//  4. it adds, in any role, a replica at an address that a member has, other than promoting the one that has it
//  5. it makes a full replica non-voting
//  6. it makes a full replica a witness
//  7. it makes a witness a full replica
//  8. it makes a witness non-voting
//  9. it makes a non-voting replica a witness
//  10. it promotes a non-voting replica and names another address than its own
//  11. it removes the only full replica
//  12. it is of no known type (the engine panics; Replay reports it)
//
// Removing a replica id that was never a member is accepted, and burns the id.
func Apply(m raftpb.Membership, cc raftpb.ConfigChange, index uint64, ordered bool) (next raftpb.Membership, accepted bool) {
	if ordered && !cc.Initialize && cc.ConfigChangeId != m.ConfigChangeId {
		return m, false
	}
	if !allowed(m, cc) {
		return m, false
	}
	next = clone(m)
	next.ConfigChangeId = index
	switch cc.Type {
	case raftpb.AddNode:
		delete(next.NonVotings, cc.ReplicaID)
		next.Addresses[cc.ReplicaID] = cc.Address
	case raftpb.AddNonVoting:
		next.NonVotings[cc.ReplicaID] = cc.Address
	case raftpb.AddWitness:
		next.Witnesses[cc.ReplicaID] = cc.Address
	case raftpb.RemoveNode:
		delete(next.Addresses, cc.ReplicaID)
		delete(next.NonVotings, cc.ReplicaID)
		delete(next.Witnesses, cc.ReplicaID)
		next.Removed[cc.ReplicaID] = true
	}
	return next, true
}

// allowed says whether the change fits the members, its order aside.
func allowed(m raftpb.Membership, cc raftpb.ConfigChange) bool {
	current := RoleOf(m, cc.ReplicaID)
	if cc.Type == raftpb.RemoveNode {
		return current != Full || len(m.Addresses) > 1
	}
	if _, removed := m.Removed[cc.ReplicaID]; removed {
		return false
	}
	switch cc.Type {
	case raftpb.AddNode:
		if current == NonVoting {
			return sameAddress(m.NonVotings[cc.ReplicaID], cc.Address)
		}
	case raftpb.AddNonVoting, raftpb.AddWitness:
	default:
		return false
	}
	// What is left is a newcomer's business: promotion is the one change of role that there is.
	return current == None && !addressInUse(m, cc.Address)
}

// addressInUse says whether a member, of whatever role, has the address.
func addressInUse(m raftpb.Membership, address string) bool {
	for _, members := range []map[uint64]string{m.Addresses, m.NonVotings, m.Witnesses} {
		for _, a := range members {
			if sameAddress(a, address) {
				return true
			}
		}
	}
	return false
}

// sameAddress compares as the engine does: case and outer space do not matter.
func sameAddress(a, b string) bool {
	return strings.EqualFold(strings.TrimSpace(a), strings.TrimSpace(b))
}

// clone copies m; in the copy no map is nil.
func clone(m raftpb.Membership) raftpb.Membership {
	c := raftpb.Membership{
		ConfigChangeId: m.ConfigChangeId,
		Addresses:      make(map[uint64]string, len(m.Addresses)+1),
		Removed:        make(map[uint64]bool, len(m.Removed)+1),
		NonVotings:     make(map[uint64]string, len(m.NonVotings)+1),
		Witnesses:      make(map[uint64]string, len(m.Witnesses)+1),
	}
	maps.Copy(c.Addresses, m.Addresses)
	maps.Copy(c.Removed, m.Removed)
	maps.Copy(c.NonVotings, m.NonVotings)
	maps.Copy(c.Witnesses, m.Witnesses)
	return c
}

// Replay returns the membership of a shard after the config changes among entries, which must be committed
// and in the order of the log. Entries of other types are passed over. base is the membership that the first
// of them met: the zero value at the beginning of a log, whose first entries then add the initial members;
// else the membership of a snapshot, and entries are those above the snapshot's index. Neither is changed,
// and the result shares nothing with them.
//
// It returns an error, and no membership, if an entry is not above the one before it, or not above base's
// last change; if one cannot be decoded or is of no known type; or if the result has no full replica or no
// ConfigChangeId, with which the engine would panic. Each means that the log is not what the caller thinks: a
// witness must then not be given a synthesized snapshot.
func Replay(base raftpb.Membership, entries []raftpb.Entry, ordered bool) (raftpb.Membership, error) {
	m := clone(base)
	last := base.ConfigChangeId
	for i := range entries {
		e := &entries[i]
		if e.Index <= last {
			return raftpb.Membership{}, fmt.Errorf("replay config changes: index %d follows %d", e.Index, last)
		}
		last = e.Index
		if e.Type != raftpb.ConfigChangeEntry {
			continue
		}
		cc, err := decode(e)
		if err != nil {
			return raftpb.Membership{}, err
		}
		m, _ = Apply(m, cc, e.Index, ordered)
	}
	if len(m.Addresses) == 0 || m.ConfigChangeId == 0 {
		return raftpb.Membership{}, fmt.Errorf("replay config changes: %d entries up to index %d leave no full replica", len(entries), last)
	}
	return m, nil
}

func decode(e *raftpb.Entry) (raftpb.ConfigChange, error) {
	var cc raftpb.ConfigChange
	if err := cc.Unmarshal(e.Cmd); err != nil {
		return cc, fmt.Errorf("replay config changes: decode the one at index %d: %w", e.Index, err)
	}
	switch cc.Type {
	case raftpb.AddNode, raftpb.AddNonVoting, raftpb.AddWitness, raftpb.RemoveNode:
		return cc, nil
	default:
		return cc, fmt.Errorf("replay config changes: the one at index %d is of unknown type %d", e.Index, int32(cc.Type))
	}
}

// Membership is Replay for the shards of a fleet, all of which order their config changes. It has the form
// that a host's log asks for.
func Membership(base raftpb.Membership, committed []raftpb.Entry) (raftpb.Membership, error) {
	return Replay(base, committed, true)
}
