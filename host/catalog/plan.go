package catalog

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/tierq/tierq/queue"
)

// Planned is a move that is worth making, or with a Reason one that cannot be made now.
type Planned struct {
	Shard    uint64
	From     queue.ReplicaID
	FromHost uint64
	ToHost   uint64 // 0: nowhere
	Why      string // what the replica leaves for: "lost", "damaged", "draining", "balance"; of the catalog also "silent", "voters"
	Reason   string // why there is no host for it
	Rebuild  bool   // ToHost is FromHost
	Narrows  bool   // the replica leaves, and none comes
}

// Possible says whether the move can be made now.
func (p Planned) Possible() bool { return p.ToHost != 0 || p.Narrows }

// Command returns the catalog command that begins the move.
func (p Planned) Command() Command {
	if p.Rebuild || p.Narrows || p.From == 0 {
		return &Reseat{Shard: p.Shard, From: p.From, ToHost: p.ToHost}
	}
	return &StartMove{Shard: p.Shard, From: p.From, ToHost: p.ToHost}
}

// HostState returns what the fleet means to do with a host.
func (v *View) HostState(id uint64) HostState { return v.d.hostStates[id] }

// RemovedHost says whether a host was removed from the fleet.
func (v *View) RemovedHost(id uint64) bool { return v.d.removed[id] }

// Move returns the move of a shard that is under way.
func (v *View) Move(shard uint64) (Move, bool) {
	m, ok := v.d.moves[shard]
	return m, ok
}

// Moves returns those that are under way, by shard.
func (v *View) Moves() []Move {
	return slices.SortedFunc(maps.Values(v.d.moves), func(a, b Move) int { return cmp.Compare(a.Shard, b.Shard) })
}

// Load returns how many replicas each host has, of shards that are not deleted.
func (v *View) Load() map[uint64]int { return v.d.load() }

// settledLoad is Load as it will be when the moves that are under way have ended.
func (v *View) settledLoad() map[uint64]int {
	load := v.d.load()
	for shard, m := range v.d.moves {
		gone := m.From
		if m.Undo {
			gone = m.To
		}
		p := v.d.placements[shard]
		if r, ok := p.Replica(gone); ok && !p.Rebuilds(m) {
			load[r.HostID]--
		}
	}
	return load
}

// Left returns how many replicas keep a host in the fleet; RemoveHost is refused while there are some.
func (v *View) Left(hostID uint64) int {
	s := State{d: v.d}
	return s.left(hostID, v.d.hostStates[hostID] == HostLost)
}

// Leaves says whether a replica is on its way out of its shard: it gets no homes and no leadership.
func (v *View) Leaves(shard uint64, id queue.ReplicaID) bool {
	m, ok := v.d.moves[shard]
	return ok && (m.From == id && !m.Undo && m.Step >= MoveLeave || m.To == id && m.Undo)
}

// Evacuation plans the moves of queues' replicas that are lost, or on hosts that are drained or lost, as far as they are not under way: the
// lost ones first. alive says which hosts can take something now. Each plan sees the load of those before it. A lost replica that no
// other host can take is rebuilt on its own, if that is alive and the others can go on meanwhile. The catalog has CatalogStep.
func (v *View) Evacuation(alive func(hostID uint64) bool) []Planned {
	load := v.settledLoad()
	var lost, draining []Planned
	for _, shard := range v.Shards() {
		if _, moves := v.d.moves[shard]; moves || shard == ShardID {
			continue
		}
		p := v.d.placements[shard]
		var first *Planned
		for _, r := range p.Replicas {
			why := v.whyLeave(r)
			if why == "" || first != nil && (first.Why == "lost" || why != "lost") {
				continue
			}
			first = &Planned{Shard: shard, From: r.ID, FromHost: r.HostID, Why: why}
		}
		if first == nil {
			continue
		}
		v.choose(load, p, first, alive)
		if r, _ := p.Replica(first.From); first.ToHost == 0 && v.mayRebuild(p, r, alive) {
			first.ToHost, first.Reason, first.Rebuild = r.HostID, "", true
		}
		if first.Why == "lost" {
			lost = append(lost, *first)
		} else {
			draining = append(draining, *first)
		}
	}
	return append(lost, draining...)
}

// PlanRebuild plans to make a replica anew on its own host; false if that must not be, or a move of the shard is under way. A Reason says
// why it cannot be now.
func (v *View) PlanRebuild(shard uint64, id queue.ReplicaID, why string, alive func(hostID uint64) bool) (Planned, bool) {
	p := v.d.placements[shard]
	r, ok := p.Replica(id)
	if _, moves := v.d.moves[shard]; !ok || moves || p.Deleted || r.State != ReplicaStarted || v.d.hostStates[r.HostID] != HostActive {
		return Planned{}, false
	}
	m := Planned{Shard: shard, From: id, FromHost: r.HostID, ToHost: r.HostID, Why: why, Rebuild: true}
	if refused := p.without(r); refused != nil {
		m.ToHost, m.Reason = 0, refused.detail
	} else if !alive(r.HostID) {
		m.ToHost, m.Reason = 0, fmt.Sprintf("host %d is not heard of, or its disk is nearly full", r.HostID)
	}
	return m, true
}

func (v *View) whyLeave(r Replica) string {
	switch {
	case r.State == ReplicaRetired || r.State == ReplicaRemoved:
		return ""
	case r.State == ReplicaLost:
		return "lost"
	case v.d.hostStates[r.HostID] == HostDraining:
		return "draining"
	}
	return ""
}

// choose names the best host for a planned move, or why there is none, and counts it into load.
func (v *View) choose(load map[uint64]int, p Placement, m *Planned, alive func(uint64) bool) {
	from, _ := p.Replica(m.From)
	role := roleOf(from.Birth)
	best, seen := uint64(0), 0
	for _, h := range v.Hosts() {
		if h.Role != role || h.ID == m.FromHost {
			continue
		}
		seen++
		switch refused := v.d.mayTake(load, p, from, h.ID); {
		case refused != nil:
			m.Reason = refused.detail
		case !alive(h.ID):
			m.Reason = fmt.Sprintf("host %d is not heard of", h.ID)
		case best == 0 || load[h.ID] < load[best]:
			best = h.ID
		}
	}
	switch {
	case best != 0:
		m.ToHost, m.Reason = best, ""
		load[best]++
		load[m.FromHost]--
	case seen != 1:
		m.Reason = fmt.Sprintf("none of %d other %v hosts can take it: each is drained, not heard of, or holds or shares a failure domain with a replica of the shard: let another %v host join", seen, role, role)
	}
}

// Rebalance plans moves that even the load out among the hosts of each role, which are active and alive: from the one with the most to the
// one with the least, until they differ by at most one or no replica can move.
func (v *View) Rebalance(alive func(hostID uint64) bool) []Planned {
	load := v.settledLoad()
	moved := make(map[uint64]bool)
	for shard := range v.d.moves {
		moved[shard] = true
	}
	var out []Planned
	for _, role := range []HostRole{HostFull, HostWitness} {
		for {
			m, ok := v.evener(load, role, moved, alive)
			if !ok {
				break
			}
			moved[m.Shard] = true
			load[m.FromHost]--
			load[m.ToHost]++
			out = append(out, m)
		}
	}
	return out
}

// evener finds one move from a host with more to one with at least two fewer.
func (v *View) evener(load map[uint64]int, role HostRole, moved map[uint64]bool, alive func(uint64) bool) (Planned, bool) {
	var hosts []uint64
	for _, h := range v.Hosts() {
		if h.Role == role && v.d.hostStates[h.ID] == HostActive && alive(h.ID) {
			hosts = append(hosts, h.ID)
		}
	}
	slices.SortStableFunc(hosts, func(a, b uint64) int { return cmp.Compare(load[a], load[b]) })
	for _, from := range slices.Backward(hosts) {
		for _, to := range hosts {
			if load[from]-load[to] < 2 {
				break
			}
			if m, ok := v.movable(load, from, to, moved); ok {
				return m, true
			}
		}
	}
	return Planned{}, false
}

// movable finds a replica that can move from a host to another one. The catalog itself is not moved for balance.
func (v *View) movable(load map[uint64]int, from, to uint64, moved map[uint64]bool) (Planned, bool) {
	for _, shard := range v.byHost[from] {
		p := v.d.placements[shard]
		r, ok := p.OnHost(from)
		if !ok || p.Deleted || shard == ShardID || moved[shard] || r.State != ReplicaStarted || !r.Votes() || v.incomplete(p) {
			continue
		}
		if v.d.mayTake(load, p, r, to) == nil {
			return Planned{Shard: shard, From: r.ID, FromHost: from, ToHost: to, Why: "balance"}, true
		}
	}
	return Planned{}, false
}

// incomplete says whether a replica of a shard is lost or has not started: such a shard is not moved for balance.
func (v *View) incomplete(p Placement) bool {
	return slices.ContainsFunc(p.Replicas, func(r Replica) bool {
		return r.State == ReplicaLost || r.State == ReplicaPlanned || r.State == ReplicaStarted && !r.Votes()
	})
}
