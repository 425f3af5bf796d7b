package host

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// newbornTries is when the replica of a new shard that is to lead it begins the first election, after its start. The others start at
// about the same time. What is too early for them is lost, and the election timeout decides, as ever; what is too early for the replica
// itself, which must have applied the bootstrap entries, is not done, and tried again.
var newbornTries = []time.Duration{50 * time.Millisecond, 150 * time.Millisecond}

// bootstrapTerm is the term of a shard that had no election yet.
const bootstrapTerm = 1

// firstLeader is the replica that begins a new shard's first election: the one whose turn it is to lead, as node's balance has it for queues
// of several partitions; single ones are spread by shard.
func firstLeader(p catalog.Placement, partitions int) (first queue.ReplicaID, other queue.ReplicaID) {
	members := slices.DeleteFunc(slices.Clone(p.Replicas), func(r catalog.Replica) bool { return r.Birth != catalog.BirthInitial })
	if len(members) < 2 {
		return 0, 0
	}
	slices.SortFunc(members, func(a, b catalog.Replica) int { return cmp.Compare(a.HostID, b.HostID) })
	turn := p.Shard
	if partitions > 1 {
		turn = uint64(p.Partition)
	}
	at := int(turn % uint64(len(members)))
	return members[at].ID, members[(at+1)%len(members)].ID
}

// leadNewborn begins the first election of a shard that this host has just made its replica of, if it is the one to lead: a new queue
// need not wait for an election timeout. By the message of a handover, as for a leader that has ended (docs/adr/0059); it counts only in
// the term before the first election.
func (h *RaftHost) leadNewborn(p catalog.Placement, run *running) {
	if p.QueueID == 0 || run.witness {
		return
	}
	partitions := 1
	if q, ok := h.Catalog().QueueOfShard(p.Shard); ok {
		partitions = len(q.Shards)
	}
	h.copies.expect(p.Shard, len(p.Initial())-1)
	first, other := firstLeader(p, partitions)
	if first != run.id {
		return
	}
	h.goTask(func(ctx context.Context) {
		began := time.Now()
		for _, at := range newbornTries {
			pause(ctx, at-time.Since(began))
			if leader, _ := h.ownLeader(p.Shard); leader != 0 || ctx.Err() != nil {
				return
			}
			if _, err := h.clock.Wall(); err != nil {
				return // nothing is published where the clock is refused
			}
			h.endings.campaign(lostShard{shard: p.Shard, run: run, dead: other}, bootstrapTerm)
		}
	})
}
