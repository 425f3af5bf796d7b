package node

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// leaderMove is a leader that should be on another host.
type leaderMove struct{ shard, from, to uint64 }

// planLeaders evens out how many shards each host leads: from the one with the most to one with at least two fewer. Only the movable shards
// are moved, in order; candidates are the other hosts that can lead one. Every host that knows the same plans the same.
func planLeaders(leads map[uint64]uint64, movable []uint64, candidates func(shard uint64) []uint64) []leaderMove {
	count := map[uint64]int{}
	for _, hostID := range leads {
		count[hostID]++
	}
	var out []leaderMove
	at := maps.Clone(leads)
	for moved := true; moved; {
		moved = false
		for _, shard := range movable {
			from, to := at[shard], uint64(0)
			for _, c := range candidates(shard) {
				if from != 0 && c != from && count[from]-count[c] >= 2 && (to == 0 || cmp.Or(cmp.Compare(count[c], count[to]), cmp.Compare(c, to)) < 0) {
					to = c
				}
			}
			if to == 0 || slices.ContainsFunc(out, func(m leaderMove) bool { return m.shard == shard }) {
				continue
			}
			count[from]--
			count[to]++
			at[shard] = to
			out = append(out, leaderMove{shard, from, to})
			moved = true
		}
	}
	return out
}

// leaderPlan plans for the queues of one partition; the partitions of the others have an order of their own.
func (n *Node) leaderPlan(v *catalog.View) []leaderMove {
	leads := n.leaders(v)
	delete(leads, catalog.ShardID)
	partitions := map[uint64]int{} // by queue id
	for shard := range leads {
		p, _ := v.Placement(shard)
		partitions[p.QueueID] = max(partitions[p.QueueID], int(p.Partition)+1)
	}
	var movable []uint64
	for _, shard := range slices.Sorted(maps.Keys(leads)) {
		p, _ := v.Placement(shard)
		if _, moves := v.Move(shard); !moves && partitions[p.QueueID] == 1 {
			movable = append(movable, shard)
		}
	}
	return planLeaders(leads, movable, func(shard uint64) []uint64 {
		p, _ := v.Placement(shard)
		var hosts []uint64
		for _, r := range p.Replicas {
			if r.Birth != catalog.BirthWitness && r.State == catalog.ReplicaStarted && r.Votes() && v.HostState(r.HostID) == catalog.HostActive && n.Serves(r.HostID, shard) {
				hosts = append(hosts, r.HostID)
			}
		}
		return hosts
	})
}

// leaderSpreader is the part of a fleet that spreads the leaders of queues of one partition; Node is one.
type leaderSpreader interface {
	// LeaderFor returns the replica that should lead a shard; 0: whoever does.
	LeaderFor(shard uint64) queue.ReplicaID
}

// planFor is how long a plan is used: every shard that this host leads asks for it.
const planFor = 5 * time.Second

// recentPlan is leaderPlan as of a moment ago.
func (n *Node) recentPlan(v *catalog.View) []leaderMove {
	n.planMu.Lock()
	defer n.planMu.Unlock()
	if time.Since(n.planned) > planFor {
		n.plan, n.planned = n.leaderPlan(v), time.Now()
	}
	return n.plan
}

// LeaderFor implements leaderSpreader. A host hands over one shard at a time, the first of its own in the plan, so that the counts that the
// others see follow.
func (n *Node) LeaderFor(shard uint64) queue.ReplicaID {
	v := n.view()
	for _, m := range n.recentPlan(v) {
		if m.from != n.id {
			continue
		}
		if m.shard != shard {
			return 0
		}
		p, _ := v.Placement(shard)
		r, _ := p.OnHost(m.to)
		return r.ID
	}
	return 0
}
