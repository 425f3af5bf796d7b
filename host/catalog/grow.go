package catalog

import (
	"fmt"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Growth is a queue's further partitions while nobody publishes into them: their shards are placed, and run, so that groups can be made in
// them before the first message comes.
type Growth struct {
	QueueID uint64
	Shards  []uint64 // of the partitions that follow the queue's, in their order
}

const growthBytes = 8 + 4 + 8

// GrowQueue places the shards of a queue's partitions up to Partitions. They are not open: the queue keeps its number of partitions until
// OpenQueue. The same growth again is OK; another one is refused with MutationFenced while the first is not open. A queue that orders by key
// is refused: its keys would go to other partitions.
type GrowQueue struct {
	Tenant, Name string
	ExpectedID   uint64 // never 0: a late copy must not grow another queue of the name
	Partitions   uint32 // more than the queue has, at most MaxPartitions
}

// OpenQueue gives a queue the partitions that GrowQueue has placed. The same again is OK.
type OpenQueue struct {
	Tenant, Name string
	ExpectedID   uint64
	Partitions   uint32
}

func (*GrowQueue) tag() uint8 { return tagGrowQueue }
func (*OpenQueue) tag() uint8 { return tagOpenQueue }

func (c *GrowQueue) encode(e *encoder) {
	e.str(c.Tenant)
	e.str(c.Name)
	e.u64(c.ExpectedID)
	e.u32(c.Partitions)
}

func (c *OpenQueue) encode(e *encoder) { (*GrowQueue)(c).encode(e) }

func (d *decoder) growQueue() *GrowQueue {
	return &GrowQueue{Tenant: d.str(), Name: d.str(), ExpectedID: d.u64(), Partitions: d.u32()}
}

func (e *encoder) growth(g Growth) {
	e.u64(g.QueueID)
	e.u32(uint32(len(g.Shards)))
	for _, s := range g.Shards {
		e.u64(s)
	}
}

// growth reads what the encoder wrote; one without shards is none.
func (d *decoder) growth() Growth {
	g := Growth{QueueID: d.u64()}
	n := d.count(8)
	if n == 0 {
		d.err = errMalformed
		return g
	}
	g.Shards = make([]uint64, n)
	for i := range g.Shards {
		g.Shards[i] = d.u64()
	}
	return g
}

func (s *State) growQueue(c *GrowQueue, r *Result) (bool, *refusal) {
	q, refused := s.find(c.Tenant, c.Name, c.ExpectedID)
	if refused != nil {
		return false, refused
	}
	r.Queue = q
	have := uint32(len(q.Shards))
	switch {
	case c.ExpectedID == 0:
		return false, refuse(code.InvalidArgument, "a growth needs the queue's id")
	case q.Options.Ordering == queue.OrderKey:
		return false, refuse(code.InvalidArgument,
			"queue %s orders by key: with more partitions most keys would go to another one and lose their order: create another queue with %d, and delete this one when its consumers have finished it",
			q.Name, c.Partitions)
	case c.Partitions <= have:
		return false, refuse(code.InvalidArgument, "queue %s has %d partitions: it can only get more, not %d", q.Name, have, c.Partitions)
	case c.Partitions > MaxPartitions:
		return false, refuse(code.InvalidArgument, "a queue has at most %d partitions, not %d", MaxPartitions, c.Partitions)
	}
	if g, ok := s.d.growths[q.ID]; ok {
		if target := have + uint32(len(g.Shards)); target != c.Partitions {
			return false, refuse(code.MutationFenced, "queue %s is growing to %d partitions: finish that first", q.Name, target)
		}
		return false, nil
	}
	more := q
	more.Options.Partitions = c.Partitions - have
	placed, refused := s.place(more)
	if refused != nil {
		return false, refused
	}
	g := Growth{QueueID: q.ID}
	for i, members := range placed {
		p := Placement{Shard: s.d.nextShard, QueueID: q.ID, Partition: have + uint32(i), Replicas: members}
		s.d.nextShard++
		s.d.placements[p.Shard] = p
		g.Shards = append(g.Shards, p.Shard)
	}
	s.d.growths[q.ID] = g
	return true, nil
}

func (s *State) openQueue(c *OpenQueue, r *Result) (bool, *refusal) {
	q, refused := s.find(c.Tenant, c.Name, c.ExpectedID)
	if refused != nil {
		return false, refused
	}
	r.Queue = q
	g, growing := s.d.growths[q.ID]
	switch target := uint32(len(q.Shards) + len(g.Shards)); {
	case c.ExpectedID == 0:
		return false, refuse(code.InvalidArgument, "a growth needs the queue's id")
	case !growing && c.Partitions == target:
		return false, nil
	case !growing || c.Partitions != target:
		return false, refuse(code.MutationFenced, "queue %s is not growing to %d partitions", q.Name, c.Partitions)
	}
	q.Shards = slices.Concat(q.Shards, g.Shards)
	q.Options.Partitions = c.Partitions
	q.Options.Version++
	s.d.queues[q.Key()] = q
	delete(s.d.growths, q.ID)
	r.Queue = q
	return true, nil
}

// checkGrowths checks that growths are of queues that exist, and follow their partitions.
func (s *State) checkGrowths() error {
	sizes := make(map[uint64]int, len(s.d.queues))
	for _, q := range s.d.queues {
		sizes[q.ID] = len(q.Shards)
	}
	for id, g := range s.d.growths {
		n, ok := sizes[id]
		if !ok || g.QueueID != id || len(g.Shards) == 0 {
			return fmt.Errorf("invariant 6: growth %+v of queue %d", g, id)
		}
		for i, shard := range g.Shards {
			if p, ok := s.d.placements[shard]; !ok || p.Deleted || p.QueueID != id || p.Partition != uint32(n+i) {
				return fmt.Errorf("invariant 6: growth %+v: shard %d is %+v", g, shard, p)
			}
		}
	}
	return nil
}

// Growth returns a queue's partitions that are placed and not open yet.
func (v *View) Growth(queueID uint64) (Growth, bool) {
	g, ok := v.d.growths[queueID]
	return g, ok
}
