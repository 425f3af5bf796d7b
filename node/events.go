package node

import (
	"context"
	"slices"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue/code"
)

// keptEvents is how many events a host keeps: a few hundred bytes each.
const keptEvents = 2000

// ListEvents implements api.Hosts.
func (n *Node) ListEvents(ctx context.Context, r api.ListEvents) ([]api.HostEvent, uint64, error) {
	v := n.view()
	if r.Host != n.id {
		h, ok := v.Host(r.Host)
		switch {
		case !ok:
			return nil, 0, code.New(code.UnknownHost, "host %d is not in the fleet", r.Host)
		case h.Role != catalog.HostFull:
			return nil, 0, code.New(code.InvalidArgument, "host: %d is a witness, which has no API: its log has its events", r.Host)
		}
		return nil, 0, n.elsewhere(r.Host, code.New(code.Unavailable, "host %d must answer itself", r.Host))
	}
	var shards map[uint64]bool // nil: all
	if r.Queue != "" {
		q, err := n.queueByName(ctx, r.Queue)
		if err != nil {
			return nil, 0, err
		}
		shards = make(map[uint64]bool, len(q.Shards))
		for _, s := range q.Shards {
			shards[s] = true
		}
	}
	kept, newest := n.events.Since(r.After, r.Limit, func(e *event.Event) bool {
		return (r.Event == "" || e.Name == r.Event) && (shards == nil || shards[e.Shard])
	})
	events := make([]api.HostEvent, len(kept))
	for i, e := range kept {
		events[i] = api.HostEvent{Event: e}
		if q, ok := v.QueueOfShard(e.Shard); ok {
			events[i].Tenant, events[i].Queue, events[i].Partition = q.Tenant, q.Name, uint32(slices.Index(q.Shards, e.Shard))
		}
	}
	return events, newest, nil
}
