package catalog

import "github.com/tierq/tierq/queue/code"

// StagingTenant owns the queues that a restore is filling: no client names it, so nobody sees them before they are complete.
const StagingTenant = "_restore"

// MoveQueue gives a queue another name, under which clients find it: it ends a restore. The target name must be free, or that of
// the queue ReplaceID, which is deleted in the same command. The same again is OK.
type MoveQueue struct {
	ExpectedID           uint64
	FromTenant, FromName string
	ToTenant, ToName     string
	ReplaceID            uint64 // 0: none
}

func (*MoveQueue) tag() uint8 { return tagMoveQueue }

func (c *MoveQueue) encode(e *encoder) {
	e.u64(c.ExpectedID)
	e.str(c.FromTenant)
	e.str(c.FromName)
	e.str(c.ToTenant)
	e.str(c.ToName)
	e.u64(c.ReplaceID)
}

func (d *decoder) moveQueue() *MoveQueue {
	return &MoveQueue{ExpectedID: d.u64(), FromTenant: d.str(), FromName: d.str(), ToTenant: d.str(), ToName: d.str(), ReplaceID: d.u64()}
}

func (s *State) moveQueue(c *MoveQueue, r *Result) (bool, *refusal) {
	to := QueueKey{c.ToTenant, c.ToName}
	if to.Tenant == "" {
		to.Tenant = DefaultTenant
	}
	if !validName(to.Name) || !validName(to.Tenant) {
		return false, refuse(code.InvalidName, "%q is not a queue's name: %s", clip(to.Name), code.InvalidName.Info().Text)
	}
	there, taken := s.d.queues[to]
	if taken && there.ID == c.ExpectedID && c.ExpectedID != 0 {
		r.Queue = there
		return false, nil
	}
	q, refused := s.find(c.FromTenant, c.FromName, c.ExpectedID)
	if refused != nil {
		return false, refused
	}
	r.Queue = q
	switch {
	case c.ExpectedID == 0:
		return false, refuse(code.InvalidArgument, "a move needs the queue's id")
	case taken && there.ID != c.ReplaceID:
		return false, refuse(code.QueueExistsMismatch, "queue %s exists, as queue %d", to.Name, there.ID)
	case !taken && c.ReplaceID != 0:
		return false, refuse(code.MutationFenced, "queue %s, which was to be replaced, does not exist any more", to.Name)
	}
	if taken {
		s.drop(there)
	}
	delete(s.d.queues, q.Key())
	q.Tenant, q.Name = to.Tenant, to.Name
	s.d.queues[q.Key()] = q
	r.Queue = q
	return true, nil
}

// drop deletes a queue, with what it was growing by; its hosts remove its replicas.
func (s *State) drop(q Queue) {
	s.deleteShards(q.Shards)
	s.deleteShards(s.d.growths[q.ID].Shards)
	delete(s.d.growths, q.ID)
	delete(s.d.queues, q.Key())
}

func (s *State) deleteShards(shards []uint64) {
	for _, shard := range shards {
		p := s.d.placements[shard]
		p.Deleted = true
		s.d.placements[shard] = p
		delete(s.d.moves, shard)
	}
}
