package node

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/host/peer/peerv1/peerv1connect"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/node/outbox"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// exports is the fleet as the outbox of one shard sees it.
type exports struct {
	n     *Node
	shard uint64
}

var _ outbox.Targets = exports{}

// Source implements outbox.Targets.
func (e exports) Source() (string, uint32, bool) {
	v := e.n.view()
	q, ok := v.QueueOfShard(e.shard)
	p, _ := v.Placement(e.shard)
	return q.Name, p.Partition, ok
}

// Route implements outbox.Targets: a keyed letter goes to its key's partition, the others take turns.
func (e exports) Route(ctx context.Context, name string, d *queue.DeadLetter) (outbox.Target, error) {
	if own, ok := e.n.view().QueueOfShard(e.shard); ok {
		ctx = api.WithTenant(ctx, own.Tenant)
	}
	q, err := e.n.queueByName(ctx, name)
	if err != nil {
		return outbox.Target{}, err
	}
	if source, _, _ := e.Source(); source == name {
		return outbox.Target{}, loopRefused(source, []string{name})
	}
	return outbox.Target{Shard: q.Shards[exportPartition(d, len(q.Shards))], MaxBodyBytes: int(q.Options.MaxBodyBytes)}, nil
}

// exportPartition chooses the partition of a letter, below n.
func exportPartition(d *queue.DeadLetter, n int) uint64 {
	if n > 1 && len(d.Message.Key) > 0 {
		return uint64(tierqv1.PartitionOfKey(d.Message.Key, uint32(n)))
	}
	return d.ExportNumber % uint64(n)
}

// Gone implements outbox.Targets. A view that says so is never too old: a deleted shard stays deleted.
func (e exports) Gone(_ context.Context, shard uint64) (bool, error) {
	p, ok := e.n.view().Placement(shard)
	return ok && p.Deleted, nil
}

// exportHops bounds how many hosts are asked to take a publish: whoever holds a replica, the leader, and its successor.
const exportHops = 3

// Publish implements outbox.Targets.
func (e exports) Publish(ctx context.Context, shard uint64, p queue.Publish) (queue.PublishResult, error) {
	if gone, _ := e.Gone(ctx, shard); gone {
		return queue.PublishResult{}, code.New(code.UnknownQueue, "the queue of shard %d was deleted", shard)
	}
	res, err := e.n.publishExport(ctx, shard, p)
	for range exportHops {
		host := hostOfRefusal(err)
		if host == 0 || host == e.n.id {
			break
		}
		res, err = e.n.publishExportAt(ctx, host, shard, p)
	}
	var where *api.ElsewhereError
	if errors.As(err, &where) {
		err = where.Cause
	}
	return res, err
}

// hostOfRefusal is the host that a refusal without effect sends the caller to; 0: none.
func hostOfRefusal(err error) uint64 {
	var e *code.Error
	if !errors.As(err, &e) || e.Effect != code.EffectNone || e.Code != code.StaleLeader && e.Code != code.NotReplica {
		return 0
	}
	return e.LeaderHost
}

// publishExport publishes here, or says which host to ask.
func (n *Node) publishExport(ctx context.Context, shard uint64, p queue.Publish) (queue.PublishResult, error) {
	d, err := n.desk(shard)
	if err != nil {
		return queue.PublishResult{}, err
	}
	leader, host, _, ok := d.raft.Leader()
	switch {
	case !ok:
		return queue.PublishResult{}, &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 200}
	case leader != d.self:
		return queue.PublishResult{}, n.elsewhere(host, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, RetryAfterMs: 50})
	}
	out := d.publish(ctx, p, nil, nil, nil)
	return out.result, out.err
}

// publishExportAt publishes at another host.
func (n *Node) publishExportAt(ctx context.Context, host, shard uint64, p queue.Publish) (queue.PublishResult, error) {
	raw, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: 1, Publishes: []queue.Publish{p}})
	if err != nil {
		return queue.PublishResult{}, err
	}
	c, base := n.raft.Peers().Client(host)
	resp, err := peerv1connect.NewOutboxServiceClient(c, base).Publish(ctx, connect.NewRequest(&peerv1.OutboxPublishRequest{Shard: shard, Command: raw}))
	if err != nil {
		return queue.PublishResult{}, peer.FromConnect(err)
	}
	res, err := queue.DecodeResult(resp.Msg.GetResult())
	if err != nil || len(res.Publishes) != 1 {
		return queue.PublishResult{}, code.Maybe(code.Internal, err, "the answer of host %d cannot be read", host)
	}
	return res.Publishes[0], nil
}

// exportService takes what the outboxes of other hosts carry.
type exportService struct{ n *Node }

var _ peerv1connect.OutboxServiceHandler = exportService{}

// Publish implements peerv1connect.OutboxServiceHandler.
func (s exportService) Publish(ctx context.Context, r *connect.Request[peerv1.OutboxPublishRequest]) (*connect.Response[peerv1.OutboxPublishResponse], error) {
	p, err := exportOf(r.Msg.GetCommand())
	if err != nil {
		return nil, peer.ToConnect(err)
	}
	res, err := s.n.publishExport(ctx, r.Msg.GetShard(), p)
	var where *api.ElsewhereError
	if errors.As(err, &where) {
		err = where.Cause
	}
	if err != nil {
		return nil, peer.ToConnect(err)
	}
	out := queue.Result{Code: code.OK, Publishes: []queue.PublishResult{res}}
	return connect.NewResponse(&peerv1.OutboxPublishResponse{Result: queue.EncodeResult(nil, &out)}), nil
}

// exportOf reads the publish of an outbox.
func exportOf(raw []byte) (queue.Publish, error) {
	c, err := queue.DecodeCommand(raw)
	if err != nil {
		return queue.Publish{}, code.New(code.Malformed, "%v", err)
	}
	e, ok := c.(*queue.Enqueue)
	if !ok || len(e.Publishes) != 1 || e.Publishes[0].Producer.Kind != queue.ProducerOutbox {
		return queue.Publish{}, code.New(code.InvalidArgument, "command: it is to be one publish of a dead-letter outbox")
	}
	return e.Publishes[0], nil
}

// mayNameDeadLetterQueue refuses a dead-letter queue that does not exist, or from which dead letters come back to the queue
// itself. Two changes at once may get past it: a count of hops then ends the loop.
func (n *Node) mayNameDeadLetterQueue(ctx context.Context, shard uint64, name string) error {
	if name == "" {
		return nil
	}
	source, _, ok := exports{n, shard}.Source()
	if !ok {
		return code.New(code.UnknownQueue, "")
	}
	if err := queue.ValidateName(name); err != nil {
		return code.New(code.InvalidName, "config.dead_letter_queue: %v", err)
	}
	ways := [][]string{{name}}
	seen := map[string]bool{}
	for len(ways) > 0 {
		way := ways[0]
		ways = ways[1:]
		last := way[len(way)-1]
		switch {
		case last == source:
			return loopRefused(source, way)
		case len(way) > outbox.MaxHops:
			return code.New(code.InvalidArgument, "config.dead_letter_queue: %s leads through more than %d dead-letter queues: shorten the chain",
				strings.Join(way, " -> "), outbox.MaxHops)
		case seen[last]:
			continue
		}
		seen[last] = true
		q, err := n.queueByName(ctx, last)
		if isCode(err, code.UnknownQueue) && len(way) > 1 {
			continue // it is missing: nothing comes through it
		}
		if err != nil {
			return err
		}
		next, err := n.deadLetterQueuesOf(ctx, q)
		if err != nil {
			return fmt.Errorf("whether dead letters would come back cannot be told: %w", err)
		}
		for _, to := range next {
			ways = append(ways, append(append([]string(nil), way...), to))
		}
	}
	return nil
}

func loopRefused(source string, way []string) error {
	return code.New(code.InvalidArgument, "config.dead_letter_queue: dead letters of queue %s would come back to it (%s -> %s): name a queue that does not lead there",
		source, source, strings.Join(way, " -> "))
}

// deadLetterQueuesOf lists the queues that the groups of a queue name for their dead letters.
func (n *Node) deadLetterQueuesOf(ctx context.Context, q catalog.Queue) (names []string, err error) {
	d, err := n.desk(q.Shards[0])
	if err == nil {
		if err := d.raft.ReadIndex(ctx); err != nil {
			return nil, err
		}
		for _, g := range d.reader.Groups() {
			if to := g.Config.DeadLetterQueue; to != "" {
				names = append(names, to)
			}
		}
		return names, nil
	}
	var where *api.ElsewhereError
	if !errors.As(err, &where) {
		return nil, err
	}
	c, base := api.ForwardTenant(n.raft.Peers().Client)(where.Host)
	ctx = api.WithTenant(ctx, q.Tenant)
	resp, err := tierqv1connect.NewGroupServiceClient(c, base, connect.WithGRPC()).ListGroups(ctx, connect.NewRequest(&tierqv1.ListGroupsRequest{Queue: q.Name, Partition: new(uint32)}))
	if err != nil {
		return nil, peer.FromConnect(err)
	}
	for _, g := range resp.Msg.GetGroups() {
		if to := g.GetConfig().GetDeadLetterQueue(); to != "" {
			names = append(names, to)
		}
	}
	return names, nil
}

// parkedExport is why the dead letters of a group do not go on, as its home knows.
func (d *desk) parkedExport(id queue.GroupID) *api.ParkedExport {
	if d.outbox == nil {
		return nil
	}
	p, ok := d.outbox.Parked(id)
	if !ok {
		return nil
	}
	e := &code.Error{Code: code.Internal, Text: code.Internal.Info().Text}
	errors.As(p.Err, &e)
	return &api.ParkedExport{Code: e.Code, Text: e.Text, For: d.boot() - p.Since, Address: p.At, Queue: p.Queue}
}
