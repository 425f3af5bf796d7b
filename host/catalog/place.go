package catalog

import (
	"cmp"
	"maps"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// checkLayout accepts 3 or 5 replicas, and 2 with one witness.
func checkLayout(replicas, witnesses uint32) *refusal {
	switch {
	case replicas == 3 && witnesses == 0, replicas == 5 && witnesses == 0, replicas == 2 && witnesses == 1:
		return nil
	case replicas == 1:
		return refuse(code.InvalidArgument, "replicas: 1 has no second copy of an acknowledged message: use replicas: 3, or replicas: 2 with witnesses: 1")
	}
	return refuse(code.InvalidArgument, "the layout of %d replicas and %d witnesses is not one of: replicas 3 or 5 without witness, replicas 2 with 1 witness", replicas, witnesses)
}

// place chooses hosts for each partition of a queue: distinct failure domains, least loaded first, ties by id. Each partition sees
// the load of the ones before it. Nothing is changed.
func (s *State) place(q Queue) ([][]Replica, *refusal) {
	load := s.d.load()
	placed := make([][]Replica, q.Options.Partitions)
	for i := range placed {
		hosts := s.choose(load, int(q.Replicas), int(q.Witnesses))
		if hosts == nil {
			return nil, s.noPlacement(q)
		}
		placed[i] = make([]Replica, len(hosts))
		for n, h := range hosts {
			birth := BirthInitial
			if n >= int(q.Replicas) {
				birth = BirthWitness
			}
			placed[i][n] = Replica{ID: queue.ReplicaID(n + 1), HostID: h.ID, Birth: birth}
			load[h.ID]++
		}
	}
	return placed, nil
}

// load counts the replicas that each host has, of shards that are not deleted.
func (d *data) load() map[uint64]int {
	load := make(map[uint64]int, len(d.hosts))
	for _, p := range d.placements {
		if p.Deleted {
			continue
		}
		for _, r := range p.Replicas {
			if r.State != ReplicaRemoved && r.State != ReplicaRetired {
				load[r.HostID]++
			}
		}
	}
	return load
}

// choose returns full hosts and then witness hosts, all in distinct failure domains, or nil. A witness is chosen first, as there are
// few hosts for it: taking full hosts first could use up its domain. The full hosts come in the order of their ids, turned so
// that the least loaded is first.
func (s *State) choose(load map[uint64]int, full, witnesses int) []Host {
	if witnesses == 0 {
		return s.distinct(load, HostFull, full, nil)
	}
	for _, w := range s.candidates(load, HostWitness) {
		used := map[string]bool{w.failureDomain(): true}
		if hosts := s.distinct(load, HostFull, full, used); hosts != nil {
			return append(hosts, w)
		}
	}
	return nil
}

// distinct returns the n best hosts of a role in distinct domains outside used, or nil if there are fewer.
func (s *State) distinct(load map[uint64]int, role HostRole, n int, used map[string]bool) []Host {
	used = maps.Clone(used)
	if used == nil {
		used = make(map[string]bool)
	}
	var hosts []Host
	for _, h := range s.candidates(load, role) {
		if domain := h.failureDomain(); !used[domain] && len(hosts) < n {
			used[domain] = true
			hosts = append(hosts, h)
		}
	}
	if len(hosts) < n {
		return nil
	}
	return hosts
}

// candidates returns the hosts of a role that can take another replica, best first.
func (s *State) candidates(load map[uint64]int, role HostRole) []Host {
	var hosts []Host
	for _, h := range s.d.hosts {
		if h.Role == role && s.d.hostStates[h.ID] == HostActive && load[h.ID] < MaxReplicasPerHost {
			hosts = append(hosts, h)
		}
	}
	slices.SortFunc(hosts, func(a, b Host) int {
		return cmp.Or(cmp.Compare(load[a.ID], load[b.ID]), cmp.Compare(a.ID, b.ID))
	})
	return hosts
}

// noPlacement says what the fleet has and the layout needs.
func (s *State) noPlacement(q Queue) *refusal {
	counts := make(map[HostRole]int)
	domains := make(map[string]bool)
	for _, h := range s.d.hosts {
		counts[h.Role]++
		domains[h.failureDomain()] = true
	}
	return refuse(code.NoPlacement,
		"%d replicas and %d witnesses need as many hosts, each in a failure domain of its own: the fleet has %d full and %d witness hosts in %d domains",
		q.Replicas, q.Witnesses, counts[HostFull], counts[HostWitness], len(domains))
}
