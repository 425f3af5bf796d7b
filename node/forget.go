package node

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
)

const (
	// forgetEvery is how often a housekeeper looks for outboxes to forget. One is forgotten at the second look that finds its
	// source gone: what that had on its way has come by then.
	forgetEvery = 10 * time.Minute
	// forgetBatch bounds how many outboxes one look treats.
	forgetBatch = queue.MaxHousekeeping
	// goneTimeout bounds the look at one source: one without a quorum must not use up the round of a shard that has one.
	goneTimeout = 400 * time.Millisecond
)

// outboxReader is the part of the state that knows the dead-letter outboxes; *queue.QueueStateMachine is one.
type outboxReader interface {
	Outboxes(after queue.Producer, limit int) ([]queue.Producer, error)
}

// forget makes the shard forget what the dead-letter outboxes of deleted groups and queues have published. No time makes it
// forget those of others: their repeats must find the first copy.
func (k *housekeeper) forget(ctx context.Context) {
	now := time.Now()
	state, ok := k.reader.(outboxReader)
	if !ok || now.Before(k.nextForget) || k.reader.Meta().FormatLevel < queue.LevelForget {
		return
	}
	k.nextForget = now.Add(forgetEvery)
	var forget []queue.Producer
	gone := map[queue.Producer]bool{}
	var after queue.Producer
	for ctx.Err() == nil && len(gone) < forgetBatch {
		list, err := state.Outboxes(after, forgetBatch)
		if err != nil {
			k.log.Error("the outboxes cannot be read", zap.Error(err))
			return
		}
		if len(list) == 0 {
			break
		}
		after = list[len(list)-1]
		for _, p := range k.goneOf(ctx, list) {
			if gone[p] = true; k.gone[p] && len(forget) < forgetBatch {
				forget = append(forget, p)
			}
		}
	}
	k.gone = gone
	if len(forget) == 0 {
		return
	}
	if _, err := k.propose(ctx, &queue.Retention{Stamp: k.raft.Stamp(), Forget: forget}); err != nil {
		k.log.Debug("outboxes not forgotten", zap.Error(err))
	}
}

// goneOf picks the outboxes whose source exists no more. The list is in order of shard.
func (k *housekeeper) goneOf(ctx context.Context, list []queue.Producer) (gone []queue.Producer) {
	for len(list) > 0 {
		n := slices.IndexFunc(list, func(p queue.Producer) bool { return p.ID != list[0].ID })
		if n < 0 {
			n = len(list)
		}
		groups := make([]queue.GroupID, n)
		for i, p := range list[:n] {
			groups[i] = queue.GroupID(p.Sub)
		}
		for _, id := range k.fleet.Gone(ctx, list[0].ID, groups) {
			gone = append(gone, queue.Producer{Kind: queue.ProducerOutbox, ID: list[0].ID, Sub: uint64(id)})
		}
		list = list[n:]
	}
	return gone
}

// Gone implements fleet: a deleted shard has no groups, and a group that a shard has had and has no more was deleted.
func (n *Node) Gone(ctx context.Context, shard uint64, groups []queue.GroupID) []queue.GroupID {
	if p, ok := n.view().Placement(shard); ok && p.Deleted {
		return groups
	}
	n.mu.RLock()
	d := n.desks[shard]
	n.mu.RUnlock()
	if d == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, goneTimeout)
	defer cancel()
	if d.raft.ReadIndex(ctx) != nil {
		return nil // that cannot be told now: the next look asks again
	}
	return slices.DeleteFunc(slices.Clone(groups), func(id queue.GroupID) bool {
		_, ok := d.reader.Group(id)
		return ok
	})
}
