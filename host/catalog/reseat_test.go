package catalog

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func everywhere(uint64) bool { return true }
func nowhere(uint64) bool    { return false }

// TestRebuildOnTheSameHost: the lost replica leaves the shard, its host removes what it has, and only then is there a new one.
func TestRebuildOnTheSameHost(t *testing.T) {
	s, shard := placed(t)
	rebuild := &Reseat{Shard: shard, From: 2, ToHost: 5}
	apply(t, s, &Reseat{Shard: 99, From: 2, ToHost: 5}, code.UnknownPartition)
	apply(t, s, &Reseat{Shard: shard, From: 9, ToHost: 5}, code.NotReplica)
	apply(t, s, &Reseat{Shard: shard, From: 2, ToHost: 1}, code.InvalidArgument)
	apply(t, s, &Reseat{Shard: shard, From: 2}, code.InvalidArgument)
	apply(t, s, &Reseat{Shard: shard, ToHost: 1}, code.InvalidArgument)
	apply(t, s, &DrainHost{HostID: 5}, code.OK)
	apply(t, s, rebuild, code.NoPlacement)
	apply(t, s, &DrainHost{HostID: 5, Cancel: true}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportLost}, code.OK)

	// Hosts 1 and 2 could take it: they are preferred, as nothing has to leave before. Without them it is rebuilt.
	plans := s.Seal().Evacuation(everywhere)
	require.Equal(t, []Planned{{Shard: shard, From: 2, FromHost: 5, ToHost: 1, Why: "lost"}}, plans)
	here := func(id uint64) bool { return id != 1 && id != 2 }
	plans = s.Seal().Evacuation(here)
	require.Equal(t, []Planned{{Shard: shard, From: 2, FromHost: 5, ToHost: 5, Why: "lost", Rebuild: true}}, plans)
	require.Equal(t, rebuild, plans[0].Command())
	require.Zero(t, s.Seal().Evacuation(func(id uint64) bool { return id == 3 })[0].ToHost, "its host is not heard of")

	apply(t, s, rebuild, code.OK)
	apply(t, s, rebuild, code.OK) // the same again
	apply(t, s, &Reseat{Shard: shard, From: 1, ToHost: 3}, code.MutationFenced)
	apply(t, s, &StartMove{Shard: shard, From: 2, ToHost: 1}, code.MutationFenced)
	require.Empty(t, s.Seal().Evacuation(here))
	at := func() Move { m, _ := s.Seal().Move(shard); return m }
	report := func(e MoveEvent, want code.Code) {
		t.Helper()
		apply(t, s, &MoveReport{Shard: shard, To: 4, Event: e}, want)
		require.NoError(t, s.Check())
	}
	require.Equal(t, Move{Shard: shard, From: 2, To: 4, Step: MoveClear}, at(), "a lost one has no homes to hand over")
	require.True(t, s.Seal().Leaves(shard, 2))
	for _, e := range []MoveEvent{MoveAdded, MovePromoted, MoveLeft, MoveDone, MoveAborted} {
		report(e, code.OK) // of no meaning here
	}
	report(77, code.Malformed)
	require.Equal(t, MoveClear, at().Step)
	report(MoveCleared, code.OK)
	report(MoveCleared, code.OK)
	require.Equal(t, MoveWipe, at().Step)
	p, _ := s.Seal().Placement(shard)
	require.Equal(t, ReplicaRetired, p.Replicas[1].State)
	require.Len(t, p.Replicas, 3, "the host has one replica of the shard at a time")
	apply(t, s, rebuild, code.OK) // the same again
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportRemoved}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportRemoved}, code.OK)
	p, _ = s.Seal().Placement(shard)
	require.Equal(t, Replica{ID: 4, HostID: 5, Birth: BirthNonVoting}, p.Replicas[3])
	require.Equal(t, Move{Shard: shard, From: 2, To: 4, Step: MoveAdd}, at())
	require.NoError(t, s.Check())
	report(MoveCleared, code.OK) // a late copy
	report(MoveAborted, code.MutationFenced)
	report(MoveAdded, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 4, Kind: ReportStarted, Nonce: 9}, code.OK)
	require.False(t, s.Seal().Leaves(shard, 4))
	report(MovePromoted, code.OK)
	require.Empty(t, s.Seal().Moves())
	report(MovePromoted, code.OK) // a late copy
	p, _ = s.Seal().Placement(shard)
	require.True(t, p.Replicas[3].Votes())
	require.Equal(t, ReplicaRemoved, p.Replicas[1].State)

	// One that runs hands its homes over first; and it may be done again.
	apply(t, s, &Reseat{Shard: shard, From: 4, ToHost: 5}, code.OK)
	require.Equal(t, Move{Shard: shard, From: 4, To: 5, Step: MoveYield}, at())
	apply(t, s, &MoveReport{Shard: shard, To: 5, Event: MoveLeft}, code.OK)
	require.Equal(t, MoveClear, at().Step)
}

// TestRebuildNeedsTheOthers: a replica whose shard could not go on without it, or that may be the last with its messages, stays.
func TestRebuildNeedsTheOthers(t *testing.T) {
	s, shard := placed(t)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 1, Kind: ReportLost}, code.OK)
	apply(t, s, &Reseat{Shard: shard, From: 2, ToHost: 5}, code.ReplicaNeeded)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 3, Kind: ReportLost}, code.OK)
	require.Zero(t, s.Seal().Evacuation(nowhere)[0].ToHost)
	apply(t, s, &Reseat{Shard: shard, From: 1, ToHost: 3}, code.ReplicaNeeded) // one voter is not two
}

// TestRebuiltWitness: a witness is a member from the moment that it is added.
func TestRebuiltWitness(t *testing.T) {
	s, shard := placed(t)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 3, Kind: ReportLost}, code.OK)
	plans := s.Seal().Evacuation(everywhere)
	require.Equal(t, []Planned{{Shard: shard, From: 3, FromHost: 4, ToHost: 4, Why: "lost", Rebuild: true}}, plans)
	apply(t, s, plans[0].Command(), code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveCleared}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 3, Kind: ReportRemoved}, code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveAdded}, code.OK)
	require.Empty(t, s.Seal().Moves())
	p, _ := s.Seal().Placement(shard)
	require.Equal(t, Replica{ID: 4, HostID: 4, Birth: BirthWitness, Member: true}, p.Replicas[3])
	require.NoError(t, s.Check())
}

// TestRebuildOnALostHost: whatever step a rebuild is at, when its host is lost another one takes the seat.
func TestRebuildOnALostHost(t *testing.T) {
	for steps := range 5 {
		t.Run(fmt.Sprint(steps), func(t *testing.T) {
			s, shard := placed(t)
			apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportLost}, code.OK)
			apply(t, s, &Reseat{Shard: shard, From: 2, ToHost: 5}, code.OK)
			for _, c := range []Command{
				&MoveReport{Shard: shard, To: 4, Event: MoveCleared},
				&ReplicaReport{Shard: shard, Replica: 2, Kind: ReportRemoved},
				&ReplicaReport{Shard: shard, Replica: 4, Kind: ReportStarted, Nonce: 8},
				&MoveReport{Shard: shard, To: 4, Event: MoveAdded},
			}[:steps] {
				apply(t, s, c, code.OK)
			}
			apply(t, s, &RemoveHost{HostID: 5, Lost: true}, code.OK)
			require.NoError(t, s.Check())
			require.Empty(t, s.Seal().Moves())
			plans := s.Seal().Evacuation(everywhere)
			require.Len(t, plans, 1)
			require.EqualValues(t, 1, plans[0].ToHost)
			require.False(t, plans[0].Rebuild)
			apply(t, s, plans[0].Command(), code.OK)
			to := s.Seal().Moves()[0].To
			for _, e := range []MoveEvent{MoveAdded, MovePromoted, MoveLeft, MoveDone} {
				apply(t, s, &MoveReport{Shard: shard, To: to, Event: e}, code.OK)
			}
			apply(t, s, &RemoveHost{HostID: 5}, code.OK)
		})
	}
	// The new replica is lost as well, while its host is there: it is rebuilt again.
	s, shard := placed(t)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportLost}, code.OK)
	apply(t, s, &Reseat{Shard: shard, From: 2, ToHost: 5}, code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveCleared}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportRemoved}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 4, Kind: ReportStarted, Nonce: 8}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 4, Kind: ReportLost}, code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveAborted}, code.OK)
	require.Empty(t, s.Seal().Moves())
	require.True(t, s.Seal().Evacuation(func(id uint64) bool { return id > 2 })[0].Rebuild)
}

// council is a fleet whose catalog is driven by the steps that are planned for it.
type council struct {
	t      *testing.T
	s      *State
	dead   map[uint64]bool
	silent map[uint64]bool
}

// newCouncil makes a fleet of hosts with these roles, the first three of which form the catalog.
func newCouncil(t *testing.T, roles ...HostRole) *council {
	c := &council{t: t, s: NewState(), dead: map[uint64]bool{}, silent: map[uint64]bool{}}
	init := &InitFleet{FleetID: FleetID{1}}
	for i, role := range roles[:min(3, len(roles))] {
		birth := BirthInitial
		if role == HostWitness {
			birth = BirthWitness
		}
		init.Members = append(init.Members, Replica{ID: queue.ReplicaID(i + 1), HostID: uint64(i + 1), Birth: birth})
	}
	c.must(init)
	for i, role := range roles {
		c.must(&RegisterHost{host(uint64(i+1), role)})
	}
	for _, r := range init.Members {
		c.must(&ReplicaReport{Shard: ShardID, Replica: r.ID, Kind: ReportStarted, Nonce: 7})
		if r.Birth == BirthWitness {
			c.must(&ReplicaReport{Shard: ShardID, Replica: r.ID, Kind: ReportMember})
		}
	}
	return c
}

func (c *council) must(cmd Command) {
	c.t.Helper()
	apply(c.t, c.s, cmd, code.OK)
	require.NoError(c.t, c.s.Check())
}

func (c *council) alive(id uint64) bool { return !c.dead[id] && !c.silent[id] }

func (c *council) step() (Planned, bool) {
	return c.s.Seal().CatalogStep(c.alive, func(id uint64) bool { return c.silent[id] })
}

// settle makes every step that is planned, to its end, and checks that a majority of the voters is alive at each moment.
func (c *council) settle() {
	c.t.Helper()
	for range 20 {
		m, ok := c.step()
		if !ok || !m.Possible() {
			return
		}
		c.must(m.Command())
		c.finish()
	}
	c.t.Fatal("the catalog's voters do not settle")
}

// finish takes the move that is under way to its end.
func (c *council) finish() {
	c.t.Helper()
	for range 10 {
		m, ok := c.s.Seal().Move(ShardID)
		if !ok {
			break
		}
		p, _ := c.s.Seal().Placement(ShardID)
		switch m.Step {
		case MoveAdd:
			c.must(&ReplicaReport{Shard: ShardID, Replica: m.To, Kind: ReportStarted, Nonce: uint64(m.To)})
			c.must(&MoveReport{Shard: ShardID, To: m.To, Event: MoveAdded})
		case MoveCatchUp:
			c.must(&MoveReport{Shard: ShardID, To: m.To, Event: MovePromoted})
		case MoveLeave, MoveYield:
			c.must(&MoveReport{Shard: ShardID, To: m.To, Event: MoveLeft})
		case MoveRemove:
			c.must(&MoveReport{Shard: ShardID, To: m.To, Event: MoveDone})
		case MoveClear:
			c.must(&MoveReport{Shard: ShardID, To: m.To, Event: MoveCleared})
		case MoveWipe:
			c.must(&ReplicaReport{Shard: ShardID, Replica: m.From, Kind: ReportRemoved})
		}
		alive, voters := 0, 0
		p, _ = c.s.Seal().Placement(ShardID)
		for _, r := range p.Seats() {
			if r.Birth == BirthInitial || r.Member {
				voters++
				if c.alive(r.HostID) && r.State == ReplicaStarted {
					alive++
				}
			}
		}
		require.Greater(c.t, alive, voters/2, "%+v", p.Replicas)
	}
	// Hosts that are there remove what has left the catalog.
	p, _ := c.s.Seal().Placement(ShardID)
	for _, r := range p.Replicas {
		if r.State == ReplicaRetired && c.alive(r.HostID) {
			c.must(&ReplicaReport{Shard: ShardID, Replica: r.ID, Kind: ReportRemoved})
		}
	}
}

// votes returns the hosts that vote, witnesses as negative numbers.
func (c *council) votes() []int {
	p, _ := c.s.Seal().Placement(ShardID)
	var out []int
	for _, r := range p.Replicas {
		switch {
		case !r.Votes():
		case r.Birth == BirthWitness:
			out = append(out, -int(r.HostID))
		default:
			out = append(out, int(r.HostID))
		}
	}
	return out
}

const (
	fu = HostFull
	wi = HostWitness
)

// TestCatalogFollowsTheFleet: three voters, five from five full hosts on, a witness only beside two.
func TestCatalogFollowsTheFleet(t *testing.T) {
	c := newCouncil(t, fu, fu, wi)
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -3}, c.votes())
	c.must(&RegisterHost{host(4, fu)})
	c.dead[2] = true
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -3}, c.votes(), "what is not urgent waits until all voters are alive")
	c.dead[2] = false
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4}, c.votes())
	c.must(&RegisterHost{host(5, fu)})
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4}, c.votes(), "four are no better than three")
	c.must(&RegisterHost{host(6, fu)})
	m, ok := c.step()
	require.True(t, ok)
	c.must(m.Command())
	c.finish()
	c.dead[5], c.dead[6] = true, true
	_, ok = c.step()
	require.False(t, ok, "four wait for the fifth, which is away for a moment")
	c.dead[5], c.dead[6] = false, false
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4, 5, 6}, c.votes())
	_, ok = c.step()
	require.False(t, ok)

	// A short silence changes nothing, a long one neither while there is no sixth host.
	c.dead[5] = true
	c.settle()
	c.dead[5], c.silent[5] = false, true
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4, 5, 6}, c.votes())
	c.must(&RegisterHost{host(7, fu)})
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4, 6, 7}, c.votes())
	c.silent[5] = false
	c.finish() // it is back, and removes what it had
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 4, 6, 7}, c.votes())

	// Hosts leave: five, then three, then two and the witness.
	c.must(&DrainHost{HostID: 1})
	c.settle()
	require.ElementsMatch(t, []int{2, 4, 5, 6, 7}, c.votes())
	c.must(&DrainHost{HostID: 2})
	c.settle()
	require.Len(t, c.votes(), 3)
	require.Subset(t, []int{4, 5, 6, 7}, c.votes())
	c.must(&DrainHost{HostID: 4})
	c.settle()
	require.ElementsMatch(t, []int{5, 6, 7}, c.votes())
	c.must(&RemoveHost{HostID: 5, Lost: true})
	c.settle()
	require.ElementsMatch(t, []int{6, 7, -3}, c.votes())
	c.must(&DrainHost{HostID: 6})
	m, ok = c.step()
	require.True(t, ok)
	require.False(t, m.Possible())
	require.Contains(t, m.Reason, "let another full host join")
}

// TestLongSilentVoter: of three full hosts one is silent for long; the witness votes until it is back.
func TestLongSilentVoter(t *testing.T) {
	c := newCouncil(t, fu, fu, fu, wi)
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 3}, c.votes())
	c.silent[2] = true
	c.settle()
	require.ElementsMatch(t, []int{1, 3, -4}, c.votes())
	c.silent[2] = false
	c.finish()
	c.settle()
	require.ElementsMatch(t, []int{1, 2, 3}, c.votes())
}

// TestCatalogAndDomains: no domain gets a majority of the voters.
func TestCatalogAndDomains(t *testing.T) {
	c := newCouncil(t, fu, fu, wi)
	in := func(id uint64, domain string) Host {
		h := host(id, HostFull)
		h.Domain = domain
		return h
	}
	first, _ := c.s.Seal().Host(1)
	c.must(&RegisterHost{in(4, first.Domain)})
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -3}, c.votes(), "a witness is better than two full hosts in one domain")
	for id := uint64(5); id <= 7; id++ {
		c.must(&RegisterHost{in(id, "another")})
	}
	c.settle()
	require.Len(t, c.votes(), 5, "two, one and two of the domains")
	inDomain := map[string]int{}
	for _, id := range c.votes() {
		h, _ := c.s.Seal().Host(uint64(id))
		inDomain[h.Domain]++
	}
	for domain, n := range inDomain {
		require.Less(t, n, 3, domain)
	}
}

// TestLostVoters: a voter that is lost is replaced, on its own host if there is no other.
func TestLostVoters(t *testing.T) {
	c := newCouncil(t, fu, fu, wi)
	c.must(&ReplicaReport{Shard: ShardID, Replica: 2, Kind: ReportLost})
	m, ok := c.step()
	require.True(t, ok)
	require.True(t, m.Rebuild)
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -3}, c.votes())
	c.must(&ReplicaReport{Shard: ShardID, Replica: 3, Kind: ReportLost})
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -3}, c.votes())
	c.must(&RegisterHost{host(4, wi)})
	c.must(&DrainHost{HostID: 3})
	c.settle()
	require.ElementsMatch(t, []int{1, 2, -4}, c.votes())
	c.must(&RegisterHost{host(5, fu)})
	c.must(&RemoveHost{HostID: 2, Lost: true})
	c.settle()
	require.ElementsMatch(t, []int{1, 5, -4}, c.votes())
	require.Equal(t, 0, c.s.Seal().Left(2))
}
