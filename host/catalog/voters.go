package catalog

import (
	"cmp"
	"fmt"
	"slices"
)

// voters is what is known of the catalog's seats when its next step is planned.
type voters struct {
	v      *View
	p      Placement
	load   map[uint64]int
	alive  func(uint64) bool
	silent func(uint64) bool

	bad                 []Replica // on their way out, or lost, the most urgent first
	full, witnesses     []Replica // the others
	fullHosts, fullLive int       // that may hold the catalog; and are not silent
	target              int       // full voters that there should be
	incomplete, missing bool      // one of the others does not vote yet; or is not alive
}

// CatalogStep plans the one thing that is to be done next so that the catalog's voters follow the fleet: 5 full hosts if there are so many,
// else 3; with two full hosts a witness is the third. As with the fleet's first catalog, a witness votes only then. No failure domain gets
// a majority of them. silent says which hosts have been so for so long that they are replaced; it may name none.
//
// Voters that are lost, on hosts that leave, or silent are replaced first, new ones before old ones go. What is not urgent waits until all
// voters are alive. A plan without ToHost and without Narrows cannot be made now, and has a Reason.
func (v *View) CatalogStep(alive, silent func(hostID uint64) bool) (Planned, bool) {
	p, ok := v.d.placements[ShardID]
	if _, moves := v.d.moves[ShardID]; !ok || moves {
		return Planned{}, false
	}
	s := &voters{v: v, p: p, load: v.settledLoad(), alive: alive, silent: silent}
	s.sort()
	switch {
	case len(s.bad) > 0:
		m := s.replace(s.bad[0])
		return m, m.Possible() || m.Why != "silent" // one that is silent may come back
	case s.incomplete || s.missing:
		return Planned{}, false
	}
	return s.shape()
}

// sort looks at every seat.
func (s *voters) sort() {
	urgency := map[string]int{"lost": 0, "silent": 1, "draining": 2}
	why := func(r Replica) string { return s.why(r) }
	for _, r := range s.p.Seats() {
		switch {
		case why(r) != "":
			s.bad = append(s.bad, r)
			continue
		case r.Birth == BirthWitness:
			s.witnesses = append(s.witnesses, r)
		default:
			s.full = append(s.full, r)
		}
		s.incomplete = s.incomplete || r.State != ReplicaStarted || !r.Votes()
		s.missing = s.missing || !s.alive(r.HostID)
	}
	slices.SortStableFunc(s.bad, func(a, b Replica) int { return cmp.Compare(urgency[why(a)], urgency[why(b)]) })
	for _, h := range s.v.Hosts() {
		if h.Role == HostFull && s.v.d.hostStates[h.ID] == HostActive {
			s.fullHosts++
			if !s.silent(h.ID) {
				s.fullLive++
			}
		}
	}
	s.target = 3
	if s.fullHosts >= 5 && (s.reach(5) == 5 || len(s.full)+len(s.bad) >= 5) {
		s.target = 5
	}
}

// why says why a voter is to be replaced, "" if it is not.
func (s *voters) why(r Replica) string {
	if w := s.v.whyLeave(r); w != "" || !s.silent(r.HostID) {
		return w
	}
	return "silent"
}

// reach returns how many full voters there can be, up to want: a host that is away for a moment counts.
func (s *voters) reach(want int) int {
	seats := slices.Clone(s.full)
	for len(seats) < want {
		h := s.best(seats, HostFull, want, func(id uint64) bool { return !s.silent(id) })
		if h == 0 {
			break
		}
		seats = append(seats, Replica{HostID: h})
	}
	return len(seats)
}

// candidate is best of the hosts that are alive.
func (s *voters) candidate(seats []Replica, role HostRole, want int) uint64 {
	return s.best(seats, role, want, s.alive)
}

// best returns the best host of a role to vote beside seats, of which there are to be want, 0 if there is none: one in a domain that no
// seat is in, then the least loaded. No domain gets a majority.
func (s *voters) best(seats []Replica, role HostRole, want int, there func(uint64) bool) uint64 {
	inDomain := make(map[string]int)
	taken := make(map[uint64]bool)
	for _, r := range seats {
		taken[r.HostID] = true
		if h, ok := s.v.Host(r.HostID); ok {
			inDomain[h.failureDomain()]++
		}
	}
	for _, r := range s.p.Replicas {
		taken[r.HostID] = taken[r.HostID] || r.State != ReplicaRemoved
	}
	var best Host
	for _, h := range s.v.Hosts() {
		n := inDomain[h.failureDomain()]
		if h.Role != role || s.v.d.hostStates[h.ID] != HostActive || !there(h.ID) || taken[h.ID] || n+1 > want/2 || s.load[h.ID] >= MaxReplicasPerHost {
			continue
		}
		if best.ID == 0 || cmp.Or(cmp.Compare(n, inDomain[best.failureDomain()]), cmp.Compare(s.load[h.ID], s.load[best.ID])) < 0 {
			best = h
		}
	}
	return best.ID
}

// others are the seats that stay.
func (s *voters) others() []Replica { return slices.Concat(s.full, s.witnesses) }

// replace plans what is to be done about a seat that must go.
func (s *voters) replace(b Replica) Planned {
	out := Planned{Shard: ShardID, From: b.ID, FromHost: b.HostID, Why: s.why(b)}
	enough := len(s.full) >= s.target || len(s.full) == 2 && len(s.witnesses) > 0 && s.fullLive < 3
	switch {
	case enough && s.p.without(b) == nil:
		out.Narrows = true
		return out
	case enough:
		out.Reason = "too few of the other voters are sound"
		return out
	}
	if h := s.candidate(s.others(), HostFull, s.target); h != 0 {
		return Planned{Shard: ShardID, ToHost: h, Why: out.Why}
	}
	if h := s.candidate(s.others(), HostWitness, s.target); h != 0 && len(s.witnesses) == 0 && (s.fullLive < 3 || b.Birth == BirthWitness) {
		if b.Birth == BirthWitness && !b.State.Gone() {
			out.ToHost = h // the catalog has one witness at most: this one is exchanged
			return out
		}
		return Planned{Shard: ShardID, ToHost: h, Why: out.Why}
	}
	if s.v.mayRebuild(s.p, b, s.alive) {
		out.Rebuild, out.ToHost = true, b.HostID
		return out
	}
	out.Reason = fmt.Sprintf("no other host can vote in its place: each is drained, not heard of, holds the catalog, or is in a failure domain that holds too much of it: let another %v host join", roleOf(b.Birth))
	return out
}

// mayRebuild says whether a lost replica can be made anew on its own host, as far as the catalog knows.
func (v *View) mayRebuild(p Placement, r Replica, alive func(uint64) bool) bool {
	return r.State == ReplicaLost && v.d.hostStates[r.HostID] == HostActive && alive(r.HostID) && p.without(r) == nil
}

// shape plans what is to be done when every voter is well.
func (s *voters) shape() (Planned, bool) {
	const why = "voters"
	add := func(h uint64) (Planned, bool) { return Planned{Shard: ShardID, ToHost: h, Why: why}, h != 0 }
	switch {
	case len(s.full) < s.target:
		if h := s.candidate(s.full, HostFull, s.target); h != 0 {
			return add(h)
		}
		if len(s.full) == 2 && len(s.witnesses) == 0 {
			if h := s.candidate(s.full, HostWitness, s.target); h != 0 {
				return add(h)
			}
			return add(s.candidate(s.full, HostFull, 4)) // two in one domain are better than two in all
		}
	case len(s.witnesses) > 0 && len(s.full) >= 3:
		return s.remove(s.witnesses[0], why)
	case len(s.full) > s.target:
		return s.remove(s.spare(), why)
	}
	return Planned{}, false
}

func (s *voters) remove(r Replica, why string) (Planned, bool) {
	return Planned{Shard: ShardID, From: r.ID, FromHost: r.HostID, Why: why, Narrows: true}, s.p.without(r) == nil
}

// spare returns the full voter that is missed least: of those that share a domain with another one, or of all, the newest.
func (s *voters) spare() Replica {
	inDomain := make(map[string]int)
	domain := func(r Replica) string { h, _ := s.v.Host(r.HostID); return h.failureDomain() }
	for _, r := range s.full {
		inDomain[domain(r)]++
	}
	return slices.MaxFunc(s.full, func(a, b Replica) int {
		return cmp.Or(cmp.Compare(inDomain[domain(a)], inDomain[domain(b)]), cmp.Compare(a.ID, b.ID))
	})
}
