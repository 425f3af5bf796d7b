package catalog

import (
	"fmt"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// CommandLevel is the set of commands that this version understands; a host tells the others. 1: Reseat. A command of a level that a host does
// not know stops its replica of the catalog, so none is proposed unasked before all hosts know it.
const CommandLevel = 1

// MaxCatalogVoters bounds the voters of the catalog while one is being replaced.
const MaxCatalogVoters = 6

// Reseat begins a move that is no exchange of two replicas on different hosts:
//
//	From ≠ 0, ToHost is its host   the replica is rebuilt there: its host can have only one replica of a shard, so the old one leaves
//	                               before the new one comes
//	From = 0                       the catalog gets a voter more, on ToHost
//	ToHost = 0                     the catalog loses the voter From
//
// It is refused with ReplicaNeeded if the replicas that stay, and are not lost, would be no majority, or none of them a full one. The
// same again is OK.
type Reseat struct {
	Shard  uint64
	From   queue.ReplicaID
	ToHost uint64
}

func (*Reseat) tag() uint8 { return tagReseat }

func (c *Reseat) encode(e *encoder) {
	e.u64(c.Shard)
	e.u64(uint64(c.From))
	e.u64(c.ToHost)
}

// Narrows says that a move takes a replica out and puts none in its place.
func (m Move) Narrows() bool { return m.From == m.To }

// Widens says that a move puts a replica in and takes none out.
func (m Move) Widens() bool { return m.From == 0 }

// clears says that a move first takes the old replica out.
func (m Move) clears() bool { return m.Step >= MoveYield }

// Rebuilds says that a move replaces a replica on its own host.
func (p *Placement) Rebuilds(m Move) bool {
	from, _ := p.Replica(m.From)
	return !m.Narrows() && (m.clears() || from.State == ReplicaRemoved)
}

func (s *State) reseat(c *Reseat) (bool, *refusal) {
	p, ok := s.d.placements[c.Shard]
	if !ok || p.Deleted {
		return false, refuse(code.UnknownPartition, "shard %d is not in the catalog, or deleted", c.Shard)
	}
	if m, ok := s.d.moves[c.Shard]; ok {
		if c.begins(p, m) {
			return false, nil
		}
		return false, refuse(code.MutationFenced, "a replica of shard %d is being replaced: one move at a time", c.Shard)
	}
	if len(s.d.moves) >= MaxMoves {
		return false, refuse(code.LimitReached, "%d moves are under way in the fleet: wait until one has ended", MaxMoves)
	}
	next, refused := s.d.reseated(p, c)
	if refused != nil {
		return false, refused
	}
	s.d.moves[p.Shard] = next
	if next.Widens() {
		s.seat(next, c.ToHost, birthOn(s.d.hosts[c.ToHost].Role))
	}
	return true, nil
}

// begins says whether a move that is under way is the one that a command asks for.
func (c *Reseat) begins(p Placement, m Move) bool {
	from, _ := p.Replica(m.From)
	to, _ := p.Replica(m.To)
	switch {
	case c.From != m.From || m.Undo:
		return false
	case m.Widens():
		return c.ToHost == to.HostID
	case m.Narrows():
		return c.ToHost == 0
	}
	return p.Rebuilds(m) && c.ToHost == from.HostID
}

// birthOn returns the birth of replicas that are added on hosts of a role.
func birthOn(role HostRole) Birth {
	if role == HostWitness {
		return BirthWitness
	}
	return BirthNonVoting
}

// reseated returns the move that a command asks for, or why it must not be made.
func (d *data) reseated(p Placement, c *Reseat) (Move, *refusal) {
	m := Move{Shard: p.Shard, From: c.From, To: queue.ReplicaID(len(p.Replicas) + 1), Step: MoveAdd}
	if c.From == 0 {
		return m, d.mayWiden(p, c.ToHost)
	}
	from, ok := p.Replica(c.From)
	if !ok || from.State == ReplicaRetired || from.State == ReplicaRemoved {
		return m, refuse(code.NotReplica, "shard %d has no replica %d", p.Shard, c.From)
	}
	m.Step = MoveYield
	if from.State == ReplicaLost {
		m.Step = MoveClear
	}
	switch state, known := d.hostStates[c.ToHost]; {
	case c.ToHost == 0 && p.Shard != ShardID:
		return m, refuse(code.InvalidArgument, "only the catalog has more or fewer voters than it was made with")
	case c.ToHost == 0:
		m.To = from.ID
	case c.ToHost != from.HostID:
		return m, refuse(code.InvalidArgument, "replica %d of shard %d is on host %d, not %d", from.ID, p.Shard, from.HostID, c.ToHost)
	case known:
		return m, refuse(code.NoPlacement, "host %d is %v: its replicas are replaced on other hosts", c.ToHost, state)
	}
	return m, p.without(from)
}

// mayWiden says whether the catalog may get a voter on a host.
func (d *data) mayWiden(p Placement, hostID uint64) *refusal {
	h, ok := d.hosts[hostID]
	switch {
	case p.Shard != ShardID:
		return refuse(code.InvalidArgument, "only the catalog has more or fewer voters than it was made with")
	case !ok:
		return unknownHost(hostID)
	case d.hostStates[hostID] != HostActive:
		return refuse(code.NoPlacement, "host %d is %v", hostID, d.hostStates[hostID])
	}
	if seats := p.Seats(); len(seats) >= MaxCatalogVoters {
		return refuse(code.LimitReached, "the catalog has %d voters", len(seats))
	}
	if slices.ContainsFunc(p.Replicas, func(r Replica) bool { return r.HostID == hostID && r.State != ReplicaRemoved }) {
		return refuse(code.NoPlacement, "host %d has, or had, a replica of the catalog whose data are not removed yet", hostID)
	}
	if h.Role == HostWitness && slices.ContainsFunc(p.Seats(), func(r Replica) bool { return r.Birth == BirthWitness && !r.State.Gone() }) {
		return refuse(code.NoPlacement, "the catalog has a witness already")
	}
	return nil
}

// Seats returns the replicas that are in a shard, or are to be, or are lost and not out of it yet.
func (p *Placement) Seats() []Replica {
	var seats []Replica
	for _, r := range p.Replicas {
		if r.State != ReplicaRetired && r.State != ReplicaRemoved {
			seats = append(seats, r)
		}
	}
	return seats
}

// without refuses to take a replica out whose shard would have no majority of replicas that are not lost, or no full one.
func (p *Placement) without(gone Replica) *refusal {
	voters, sound, full := 0, 0, 0
	for _, r := range p.Seats() {
		if r.ID == gone.ID || r.Birth != BirthInitial && !r.Member {
			continue
		}
		voters++
		if r.State == ReplicaStarted {
			sound++
			if r.Birth != BirthWitness {
				full++
			}
		}
	}
	switch {
	case full == 0:
		return refuse(code.ReplicaNeeded, "no other full replica of shard %d is sound: replica %d on host %d may be the last one with its messages", p.Shard, gone.ID, gone.HostID)
	case voters < 2 || sound < voters/2+1:
		return refuse(code.ReplicaNeeded, "%d of the %d other voters of shard %d are sound, and it takes %d to go on without replica %d on host %d", sound, voters, p.Shard, max(voters/2+1, 2), gone.ID, gone.HostID)
	}
	return nil
}

// reportClearing takes a move forward whose old replica leaves first.
func (s *State) reportClearing(m Move, e MoveEvent) bool {
	switch {
	case e == MoveLeft && m.Step == MoveYield:
		m.Step = MoveClear
	case e == MoveAborted && m.Step == MoveYield:
		delete(s.d.moves, m.Shard)
		return true
	case e == MoveCleared && m.Step < MoveWipe:
		p := s.d.placements[m.Shard]
		from, _ := p.Replica(m.From)
		s.retire(m.Shard, m.From)
		if m.Narrows() {
			delete(s.d.moves, m.Shard)
			return true
		}
		m.Step = MoveWipe
		if s.d.hostStates[from.HostID] == HostLost {
			s.d.moves[m.Shard] = m
			s.forfeit(m)
			return true
		}
	default:
		return false
	}
	s.d.moves[m.Shard] = m
	return true
}

// seat adds the new replica of a move to the placement.
func (s *State) seat(m Move, hostID uint64, birth Birth) {
	p := s.d.placements[m.Shard]
	p.Replicas = append(slices.Clone(p.Replicas), Replica{ID: m.To, HostID: hostID, Birth: birth})
	s.d.placements[m.Shard] = p
}

// wiped goes on with a rebuild whose old replica's data have been removed.
func (s *State) wiped(m Move) {
	p := s.d.placements[m.Shard]
	from, _ := p.Replica(m.From)
	s.seat(m, from.HostID, birthOn(roleOf(from.Birth)))
	m.Step = MoveAdd
	s.d.moves[m.Shard] = m
}

// forfeit ends a rebuild whose host is lost. The seat stays, as a replica that is lost: another host takes it.
func (s *State) forfeit(m Move) {
	switch m.Step {
	case MoveYield, MoveClear:
	case MoveWipe:
		s.setState(m.Shard, m.From, ReplicaRemoved) // with its host
		s.wiped(m)
		s.setState(m.Shard, m.To, ReplicaLost)
	default:
		s.setState(m.Shard, m.To, ReplicaLost)
	}
	delete(s.d.moves, m.Shard)
}

// forfeitAll ends the rebuilds on a host that is lost.
func (s *State) forfeitAll(hostID uint64) {
	for _, m := range s.d.moves {
		p := s.d.placements[m.Shard]
		if from, _ := p.Replica(m.From); from.HostID == hostID && p.Rebuilds(m) {
			s.forfeit(m)
		}
	}
}

func (s *State) retire(shard uint64, id queue.ReplicaID) { s.setState(shard, id, ReplicaRetired) }

func (s *State) setState(shard uint64, id queue.ReplicaID, state ReplicaState) {
	p := s.d.placements[shard]
	i := slices.IndexFunc(p.Replicas, func(r Replica) bool { return r.ID == id })
	r := p.Replicas[i]
	r.State = state
	s.setReplica(shard, i, r)
}

// checkReseat checks invariant 5 for a move that Reseat began.
func checkReseat(p Placement, m Move) error {
	from, hasFrom := p.Replica(m.From)
	to, hasTo := p.Replica(m.To)
	ok := false
	switch {
	case m.Widens():
		ok = p.Shard == ShardID && hasTo && to.Birth != BirthInitial && to.State <= ReplicaLost && m.Step <= MoveCatchUp
	case m.Narrows():
		ok = p.Shard == ShardID && hasFrom && from.State <= ReplicaLost && (m.Step == MoveYield || m.Step == MoveClear) && !m.Undo
	case m.Step == MoveYield || m.Step == MoveClear:
		ok = hasFrom && !hasTo && from.State <= ReplicaLost && !m.Undo
	case m.Step == MoveWipe:
		ok = hasFrom && !hasTo && from.State == ReplicaRetired && !m.Undo
	default:
		ok = hasFrom && hasTo && from.HostID == to.HostID && to.Birth != BirthInitial && to.State <= ReplicaLost && m.Step <= MoveCatchUp && !m.Undo
	}
	if !ok || !hasTo && m.To != queue.ReplicaID(len(p.Replicas)+1) {
		return fmt.Errorf("invariant 5: shard %d moves as %+v among %+v", p.Shard, m, p.Replicas)
	}
	return nil
}
