package catalog

import (
	"fmt"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// MaxMoves bounds the moves that are under way in a fleet: each costs a copy of a whole state.
const MaxMoves = 4

// MoveStep is what a move waits for. It only moves forward, in the order that Move shows. Part of the format; do not renumber.
type MoveStep uint8

const (
	// MoveAdd: the leader is to add the new replica, without a vote if it is a full one.
	MoveAdd MoveStep = 1
	// MoveCatchUp: the new replica is to catch up; the leader then gives it a vote.
	MoveCatchUp MoveStep = 2
	// MoveLeave: the old replica's host is to hand its homes over. A host that is dead need not.
	MoveLeave MoveStep = 3
	// MoveRemove: the leader, which by then is another one, is to remove the old replica.
	MoveRemove MoveStep = 4

	// The steps of a replica that leaves first (Reseat). A rebuild goes on at MoveAdd behind them.

	// MoveYield: as MoveLeave, of a replica that is not lost.
	MoveYield MoveStep = 5
	// MoveClear: the leader, which is another one, is to remove the old replica.
	MoveClear MoveStep = 6
	// MoveWipe: the old replica's host is to remove its data. The new replica is in the placement when it has.
	MoveWipe MoveStep = 7
)

// String returns what the step waits for.
func (s MoveStep) String() string {
	switch s {
	case MoveAdd:
		return "add"
	case MoveCatchUp:
		return "catch-up"
	case MoveLeave:
		return "leave"
	case MoveRemove:
		return "remove"
	case MoveYield:
		return "yield"
	case MoveClear:
		return "clear"
	case MoveWipe:
		return "wipe"
	}
	return fmt.Sprintf("MoveStep(%d)", uint8(s))
}

// Move replaces one replica of a shard by another one, on another host or on the same, or changes the number of the catalog's voters. A
// shard has at most one.
//
//	add ─► catch-up ─► leave ─► remove ─► done: From is retired          a full replica
//	add ──────────────────────► remove ─► done                           a witness
//	  └────────┴─────────┴─ abort ─► (undo) ─► done: To is retired
//	yield ─► clear ─► wipe ─► add ─► catch-up ─► done                    one that is rebuilt on its host; a witness: add ─► done
//	add ─► catch-up ─► done                                              a voter more: From is 0
//	yield ─► clear ─► done                                               a voter less: To is From
//
// To is given out at the beginning; in a rebuild its replica is in the placement from add on. Yield is left out for a replica that is lost.
type Move struct {
	Shard    uint64
	From, To queue.ReplicaID
	Step     MoveStep
	// Undo says that the leader is to remove To in place of going on.
	Undo bool
}

// MoveEvent is what has been done for a move. Part of the format; do not renumber.
type MoveEvent uint8

const (
	// MoveAdded: the shard's membership has the new replica.
	MoveAdded MoveEvent = 1
	// MovePromoted: the new replica votes.
	MovePromoted MoveEvent = 2
	// MoveLeft: no home is left at the old replica, or its host is dead.
	MoveLeft MoveEvent = 3
	// MoveDone: the shard's membership has lost the old replica, or with Undo the new one.
	MoveDone MoveEvent = 4
	// MoveAborted: the new replica is not to be waited for any more.
	MoveAborted MoveEvent = 5
	// MoveCleared: the shard's membership has lost the old replica of a move in which that leaves first.
	MoveCleared MoveEvent = 6
)

// StartMove begins a move. From is the replica that leaves; the new one gets the next replica id, and the birth role that it keeps for ever:
// non-voting for a full replica, else witness. A shard that is being moved, or a fleet with MaxMoves under way, refuses it.
type StartMove struct {
	Shard  uint64
	From   queue.ReplicaID
	ToHost uint64
}

// MoveReport takes a move forward. The same again, also after the move has ended, is OK and changes nothing.
type MoveReport struct {
	Shard uint64
	To    queue.ReplicaID
	Event MoveEvent
}

func (*StartMove) tag() uint8  { return tagStartMove }
func (*MoveReport) tag() uint8 { return tagMoveReport }

func (c *StartMove) encode(e *encoder) {
	e.u64(c.Shard)
	e.u64(uint64(c.From))
	e.u64(c.ToHost)
}

func (c *MoveReport) encode(e *encoder) {
	e.u64(c.Shard)
	e.u64(uint64(c.To))
	e.u8(uint8(c.Event))
}

func (e *encoder) move(m Move) {
	e.u64(m.Shard)
	e.u64(uint64(m.From))
	e.u64(uint64(m.To))
	e.u8(uint8(m.Step))
	e.bool(m.Undo)
}

const moveBytes = 8 + 8 + 8 + 1 + 1

func (d *decoder) move() Move {
	return Move{Shard: d.u64(), From: queue.ReplicaID(d.u64()), To: queue.ReplicaID(d.u64()), Step: MoveStep(d.u8()), Undo: d.bool()}
}

func (s *State) startMove(c *StartMove) (bool, *refusal) {
	p, ok := s.d.placements[c.Shard]
	if !ok || p.Deleted {
		return false, refuse(code.UnknownPartition, "shard %d is not in the catalog, or deleted", c.Shard)
	}
	if m, ok := s.d.moves[c.Shard]; ok {
		if to, _ := p.Replica(m.To); m.From == c.From && to.HostID == c.ToHost && !m.Undo {
			return false, nil
		}
		return false, refuse(code.MutationFenced, "replica %d of shard %d is being replaced: one move at a time", m.From, c.Shard)
	}
	if len(s.d.moves) >= MaxMoves {
		return false, refuse(code.LimitReached, "%d moves are under way in the fleet: wait until one has ended", MaxMoves)
	}
	from, ok := p.Replica(c.From)
	if !ok || from.State == ReplicaRetired || from.State == ReplicaRemoved {
		return false, refuse(code.NotReplica, "shard %d has no replica %d", c.Shard, c.From)
	}
	if refused := s.d.mayTake(s.d.load(), p, from, c.ToHost); refused != nil {
		return false, refused
	}
	birth := BirthNonVoting
	if from.Birth == BirthWitness {
		birth = BirthWitness
	}
	to := Replica{ID: queue.ReplicaID(len(p.Replicas) + 1), HostID: c.ToHost, Birth: birth}
	p.Replicas = append(slices.Clone(p.Replicas), to)
	s.d.placements[p.Shard] = p
	s.d.moves[p.Shard] = Move{Shard: p.Shard, From: from.ID, To: to.ID, Step: MoveAdd}
	return true, nil
}

// mayTake says whether a host can take the place of a replica: it has the role, is active, has room, has nothing of the shard, and shares no
// failure domain with a replica that stays. load is what each host has.
func (d *data) mayTake(load map[uint64]int, p Placement, from Replica, hostID uint64) *refusal {
	h, ok := d.hosts[hostID]
	if !ok {
		return unknownHost(hostID)
	}
	if h.Role != roleOf(from.Birth) {
		return refuse(code.InvalidArgument, "host %d is a %v host, which cannot take the place of replica %d of shard %d", hostID, h.Role, from.ID, p.Shard)
	}
	if state := d.hostStates[hostID]; state != HostActive {
		return refuse(code.NoPlacement, "host %d is %v", hostID, state)
	}
	for _, r := range p.Replicas {
		switch other, known := d.hosts[r.HostID]; {
		case r.State == ReplicaRemoved:
		case r.HostID == hostID:
			return refuse(code.NoPlacement, "host %d has, or had, a replica of shard %d whose data are not removed yet", hostID, p.Shard)
		case r.State == ReplicaRetired || r.ID == from.ID || !known:
		case other.failureDomain() == h.failureDomain():
			return refuse(code.NoPlacement, "host %d is in one failure domain with host %d, which has a replica of shard %d", hostID, r.HostID, p.Shard)
		}
	}
	if load[hostID] >= MaxReplicasPerHost {
		return refuse(code.NoPlacement, "host %d has %d replicas", hostID, MaxReplicasPerHost)
	}
	return nil
}

// roleOf returns the role of the hosts on which a replica of a birth lives.
func roleOf(b Birth) HostRole {
	if b == BirthWitness {
		return HostWitness
	}
	return HostFull
}

func (s *State) reportMove(c *MoveReport) (bool, *refusal) {
	m, ok := s.d.moves[c.Shard]
	if !ok || m.To != c.To {
		return s.reportEnded(c)
	}
	if c.Event < MoveAdded || c.Event > MoveCleared {
		return false, refuse(code.Malformed, "unknown report of a move")
	}
	if m.clears() {
		return s.reportClearing(m, c.Event), nil
	}
	p := s.d.placements[c.Shard]
	next, seated := m, m.Widens() || p.Rebuilds(m) // seated: when To votes, nothing is left to be done
	switch c.Event {
	case MoveAdded:
		next.Step = max(m.Step, MoveCatchUp)
		if to, _ := p.Replica(m.To); to.Birth == BirthWitness {
			s.setMember(c.Shard, m.To)
			next.Step = MoveRemove
		}
	case MovePromoted:
		s.setMember(c.Shard, m.To)
		next.Step = max(m.Step, MoveLeave)
	case MoveCleared: // a late copy, of a rebuild
	case MoveLeft:
		if m.Step < MoveLeave {
			return false, refuse(code.MutationFenced, "the move of shard %d is at %v", c.Shard, m.Step)
		}
		next.Step = MoveRemove
	case MoveAborted:
		if m.Step >= MoveRemove { // the old one may be out already
			return false, refuse(code.MutationFenced, "the move of shard %d is at %v", c.Shard, m.Step)
		}
		if p.Rebuilds(m) {
			if to, _ := p.Replica(m.To); to.State != ReplicaLost {
				return false, refuse(code.MutationFenced, "replica %d of shard %d is not lost, and the one before it is gone", m.To, c.Shard)
			}
			s.forfeit(m)
			return true, nil
		}
		next.Undo = true
	case MoveDone:
		if !m.Undo && m.Step < MoveRemove {
			return false, refuse(code.MutationFenced, "the move of shard %d is at %v", c.Shard, m.Step)
		}
		s.endMove(m)
		return true, nil
	}
	if seated && next.Step >= MoveLeave && !m.Undo {
		delete(s.d.moves, c.Shard)
		return true, nil
	}
	if next == m {
		return false, nil
	}
	s.d.moves[c.Shard] = next
	return true, nil
}

// reportEnded answers a report of a move that is not under way: the repetition of one that has ended changes nothing.
func (s *State) reportEnded(c *MoveReport) (bool, *refusal) {
	p := s.d.placements[c.Shard]
	if _, ok := p.Replica(c.To); ok && c.To > 0 {
		return false, nil
	}
	return false, refuse(code.NotReplica, "shard %d has no move to replica %d", c.Shard, c.To)
}

func (s *State) setMember(shard uint64, id queue.ReplicaID) {
	p := s.d.placements[shard]
	i := slices.IndexFunc(p.Replicas, func(r Replica) bool { return r.ID == id })
	r := p.Replicas[i]
	r.Member = true
	s.setReplica(shard, i, r)
}

// endMove retires the replica that left.
func (s *State) endMove(m Move) {
	gone := m.From
	if m.Undo {
		gone = m.To
	}
	s.retire(m.Shard, gone)
	delete(s.d.moves, m.Shard)
}

// checkMoves checks invariant 5.
func (s *State) checkMoves() error {
	if len(s.d.moves) > MaxMoves {
		return fmt.Errorf("invariant 5: %d moves", len(s.d.moves))
	}
	for shard, m := range s.d.moves {
		p, ok := s.d.placements[shard]
		if ok && !p.Deleted && m.Shard == shard && (m.Widens() || m.Narrows() || p.Rebuilds(m)) {
			if err := checkReseat(p, m); err != nil {
				return err
			}
			continue
		}
		from, hasFrom := p.Replica(m.From)
		to, hasTo := p.Replica(m.To)
		if !ok || p.Deleted || m.Shard != shard || !hasFrom || !hasTo || from.ID == to.ID || to.Birth == BirthInitial ||
			from.State > ReplicaLost || to.State > ReplicaLost || m.Step < MoveAdd || m.Step > MoveRemove {
			return fmt.Errorf("invariant 5: shard %d moves as %+v among %+v", shard, m, p.Replicas)
		}
	}
	return nil
}
