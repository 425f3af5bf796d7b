package catalog

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Growth is a queue on its way to more partitions. Until it is opened nobody publishes into the new ones or receives from them: their
// shards run, so that the queue's groups can be made in them before the first message. Once opened they are partitions like the others,
// and the growth stays until the groups have been looked at once more.
type Growth struct {
	QueueID uint64
	Opened  bool
	BegunMs uint64   // Unix time, by the clock of the host that asked for it; 0: not known
	Shards  []uint64 // of the new partitions, which follow the others, in their order
}

// ID returns what tells a growth from others of its queue: its first shard, as no shard id is used twice.
func (g Growth) ID() uint64 { return g.Shards[0] }

// growthBytes is the least size of an encoded growth.
const growthBytes = 8 + 1 + 4 + 8

// GrowQueue begins a growth: it places the shards of a queue's partitions up to Partitions. The queue keeps its number of partitions until
// the growth is opened. A number that the queue has, or grows to already, is OK and changes nothing; another one is refused with
// MutationFenced while a growth is not finished. A queue that orders by key is refused: its keys would go to other partitions.
type GrowQueue struct {
	Tenant, Name string
	ExpectedID   uint64 // never 0: a late copy must not grow another queue of the name
	Partitions   uint32
	NowMs        uint64 // Unix time; 0: not known
}

// GrowthEvent is what has come of a growth. Part of the format; do not renumber.
type GrowthEvent uint8

const (
	// GrowthOpened gives the queue its new partitions: every group is in each of them.
	GrowthOpened GrowthEvent = 1
	// GrowthFinished ends a growth that is open: the groups have been looked at once more.
	GrowthFinished GrowthEvent = 2
	// GrowthCancelled takes the new partitions away, as long as they are not open.
	GrowthCancelled GrowthEvent = 3
)

// GrowthReport moves a growth forward. What was done before is OK and changes nothing; what can no longer be done is refused with
// MutationFenced.
type GrowthReport struct {
	QueueID uint64
	Growth  uint64 // Growth.ID
	Event   GrowthEvent
}

func (*GrowQueue) tag() uint8    { return tagGrowQueue }
func (*GrowthReport) tag() uint8 { return tagGrowthReport }

func (c *GrowQueue) encode(e *encoder) {
	e.str(c.Tenant)
	e.str(c.Name)
	e.u64(c.ExpectedID)
	e.u32(c.Partitions)
	if c.NowMs != 0 { // left out, it is the encoding of before there was one
		e.u64(c.NowMs)
	}
}

func (d *decoder) growQueue() *GrowQueue {
	c := &GrowQueue{Tenant: d.str(), Name: d.str(), ExpectedID: d.u64(), Partitions: d.u32()}
	if d.err == nil && len(d.b) > 0 {
		if c.NowMs = d.u64(); c.NowMs == 0 {
			d.err = errMalformed
		}
	}
	return c
}

// growthsBegun are the times of the growths that have one, by queue id.
func (d *data) growthsBegun() map[uint64]uint64 {
	out := map[uint64]uint64{}
	for id, g := range d.growths {
		if g.BegunMs != 0 {
			out[id] = g.BegunMs
		}
	}
	return out
}

// setGrowthsBegun is the inverse; false if one is of no growth, or none.
func (d *data) setGrowthsBegun(times map[uint64]uint64) bool {
	for id, ms := range times {
		g, ok := d.growths[id]
		if !ok || ms == 0 {
			return false
		}
		g.BegunMs = ms
		d.growths[id] = g
	}
	return true
}

func (c *GrowthReport) encode(e *encoder) {
	e.u64(c.QueueID)
	e.u64(c.Growth)
	e.u8(uint8(c.Event))
}

func (e *encoder) growth(g Growth) {
	e.u64(g.QueueID)
	e.bool(g.Opened)
	e.u32(uint32(len(g.Shards)))
	for _, s := range g.Shards {
		e.u64(s)
	}
}

// growth reads what the encoder wrote; one without shards is malformed.
func (d *decoder) growth() Growth {
	g := Growth{QueueID: d.u64(), Opened: d.bool()}
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
	g, growing := s.d.growths[q.ID]
	target := have
	if growing && !g.Opened {
		target += uint32(len(g.Shards))
	}
	switch {
	case c.ExpectedID == 0:
		return false, refuse(code.InvalidArgument, "a growth needs the queue's id")
	case c.Partitions == target:
		return false, nil
	case growing:
		return false, refuse(code.MutationFenced, "queue %s is growing to %d partitions: wait until it has them, or cancel that (`tierq queue grow %s --cancel`)", q.Name, target, q.Name)
	case q.Options.Ordering == queue.OrderKey:
		return false, refuse(code.InvalidArgument,
			"queue %s orders by key: with more partitions most keys would go to another one and lose their order: create another queue with %d, and delete this one when its consumers have finished it",
			q.Name, c.Partitions)
	case c.Partitions < have:
		return false, refuse(code.InvalidArgument, "queue %s has %d partitions: it can only get more, not %d", q.Name, have, c.Partitions)
	case c.Partitions > MaxPartitions:
		return false, refuse(code.InvalidArgument, "a queue has at most %d partitions, not %d", MaxPartitions, c.Partitions)
	}
	more := q
	more.Options.Partitions = c.Partitions - have
	placed, refused := s.place(more)
	if refused != nil {
		return false, refused
	}
	g = Growth{QueueID: q.ID, BegunMs: c.NowMs}
	for i, members := range placed {
		p := Placement{Shard: s.d.nextShard, QueueID: q.ID, Partition: have + uint32(i), Replicas: members}
		s.d.nextShard++
		s.d.placements[p.Shard] = p
		g.Shards = append(g.Shards, p.Shard)
	}
	s.d.growths[q.ID] = g
	return true, nil
}

func (s *State) reportGrowth(c *GrowthReport, r *Result) (bool, *refusal) {
	q, ok := s.d.queueByID(c.QueueID)
	if !ok {
		return false, refuse(code.UnknownQueue, "queue %d does not exist", c.QueueID)
	}
	r.Queue = q
	g, growing := s.d.growths[q.ID]
	growing = growing && g.ID() == c.Growth
	has := slices.Contains(q.Shards, c.Growth)
	switch c.Event {
	case GrowthOpened:
		if has {
			return false, nil
		}
		if !growing {
			return false, refuse(code.MutationFenced, "the growth of queue %s was cancelled", q.Name)
		}
		r.Queue = s.open(q, g)
	case GrowthFinished:
		if !has {
			return false, refuse(code.MutationFenced, "the new partitions of queue %s are not open", q.Name)
		}
		if !growing {
			return false, nil
		}
		delete(s.d.growths, q.ID)
	case GrowthCancelled:
		if has {
			return false, refuse(code.MutationFenced, "queue %s has %d partitions already: they are open and cannot go", q.Name, len(q.Shards))
		}
		if !growing {
			return false, nil
		}
		s.deleteShards(g.Shards)
		delete(s.d.growths, q.ID)
	default:
		return false, refuse(code.Malformed, "unknown report of a growth")
	}
	return true, nil
}

// open gives a queue the partitions of its growth.
func (s *State) open(q Queue, g Growth) Queue {
	q.Shards = slices.Concat(q.Shards, g.Shards)
	q.Options.Partitions = uint32(len(q.Shards))
	q.Options.Version++
	s.d.queues[q.Key()] = q
	g.Opened = true
	s.d.growths[q.ID] = g
	return q
}

func (d *data) queueByID(id uint64) (Queue, bool) {
	for _, q := range d.queues {
		if q.ID == id {
			return q, true
		}
	}
	return Queue{}, false
}

// checkGrowths checks invariant 6.
func (s *State) checkGrowths() error {
	for id, g := range s.d.growths {
		q, ok := s.d.queueByID(id)
		if !ok || g.QueueID != id || len(g.Shards) == 0 {
			return fmt.Errorf("invariant 6: growth %+v of queue %d", g, id)
		}
		first := len(q.Shards)
		if g.Opened {
			first -= len(g.Shards)
		}
		for i, shard := range g.Shards {
			p, ok := s.d.placements[shard]
			if !ok || p.Deleted || p.QueueID != id || int(p.Partition) != first+i || slices.Contains(q.Shards, shard) != g.Opened {
				return fmt.Errorf("invariant 6: growth %+v: shard %d is %+v", g, shard, p)
			}
		}
	}
	return nil
}

// Growth returns a queue's growth that is not finished.
func (v *View) Growth(queueID uint64) (Growth, bool) {
	g, ok := v.d.growths[queueID]
	return g, ok
}

// Growths returns those that are not finished, by queue id.
func (v *View) Growths() []Growth {
	out := make([]Growth, 0, len(v.d.growths))
	for _, g := range v.d.growths {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b Growth) int { return cmp.Compare(a.QueueID, b.QueueID) })
	return out
}

// QueueByID returns a queue.
func (v *View) QueueByID(id uint64) (Queue, bool) {
	q, ok := v.byQueue[id]
	return q, ok
}

// AllShards returns a queue's shards by partition, with those that are not open yet behind.
func (v *View) AllShards(q Queue) []uint64 {
	g, ok := v.d.growths[q.ID]
	if !ok || g.Opened {
		return q.Shards
	}
	return slices.Concat(q.Shards, g.Shards)
}

// OptionsOf returns the options that a shard is to have: its queue's, with its own partition. A partition that is not open yet has the
// number of partitions that there will be. False for the catalog's own shard and for deleted ones.
func (v *View) OptionsOf(shard uint64) (queue.QueueOptions, bool) {
	q, ok := v.QueueOfShard(shard)
	if !ok {
		return queue.QueueOptions{}, false
	}
	o := q.Options
	o.Partition = v.d.placements[shard].Partition
	if int(o.Partition) >= len(q.Shards) {
		o.Partitions = uint32(len(v.AllShards(q)))
	}
	return o, true
}
