package node

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// Node implements api.Backend: it finds the shard, the desk, or the host that must answer.
var _ api.Backend = (*Node)(nil)

// catalogTimeout bounds the wait for the shards of a new queue to be served.
const catalogTimeout = 8 * time.Second

// queueByName finds a queue in the local view, and asks the catalog linearizably before it says that there is none.
func (n *Node) queueByName(ctx context.Context, name string) (catalog.Queue, error) {
	tenant := api.TenantOf(ctx)
	if q, ok := n.view().Queue(tenant, name); ok {
		return q, nil
	}
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return catalog.Queue{}, err
	}
	if q, ok := v.Queue(tenant, name); ok {
		return q, nil
	}
	return catalog.Queue{}, code.New(code.UnknownQueue, "queue %q does not exist: create it with `tierq queue create %s`", name, name)
}

// queueWith is queueByName, but asks the catalog linearizably too before it says that a partition does not exist: the queue may have grown.
func (n *Node) queueWith(ctx context.Context, name string, p api.Partition) (catalog.Queue, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil || p == nil || int(*p) < len(q.Shards) || *p >= catalog.MaxPartitions {
		return q, err
	}
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return q, err
	}
	if now, ok := v.Queue(api.TenantOf(ctx), name); ok {
		q = now
	}
	return q, nil
}

// shardOf finds a partition's shard; without a partition, the only one's.
func (n *Node) shardOf(q catalog.Queue, p api.Partition) (uint64, error) {
	switch {
	case p == nil && len(q.Shards) > 1:
		return 0, &api.SeveralError{Queue: n.queueInfo(q)}
	case p == nil:
		return q.Shards[0], nil
	case int(*p) >= len(q.Shards):
		return 0, code.New(code.UnknownPartition, "partition: %d, queue %q has %d, numbered from 0", *p, q.Name, len(q.Shards))
	}
	return q.Shards[*p], nil
}

// desk returns the desk of a shard on this host, or says which host to ask: its leader's as far as known, else an
// alive full replica's.
func (n *Node) desk(shard uint64) (*desk, error) {
	n.mu.RLock()
	d, closing := n.desks[shard], n.closing
	n.mu.RUnlock()
	if closing {
		return nil, code.New(code.ShuttingDown, "")
	}
	if d != nil {
		return d, nil
	}
	_, leader, _, _ := n.raft.Leader(shard)
	if host := deskHost(n.FullReplicas(shard), leader, n.id, n.Alive); host != 0 {
		return nil, n.elsewhere(host, &code.Error{Code: code.NotReplica, Effect: code.EffectNone})
	}
	return nil, &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 100,
		Text: "no host that holds the partition can be reached now: repeat after a pause"}
}

// deskHost chooses the host to ask about a shard: its leader's, else the first other one of its full replicas that is alive; 0
// when there is none.
func deskHost(replicas []replicaHost, leader, self uint64, alive func(host uint64) bool) (host uint64) {
	for _, r := range replicas {
		switch {
		case r.Host == self || !alive(r.Host):
		case r.Host == leader:
			return leader
		case host == 0:
			host = r.Host
		}
	}
	return host
}

// elsewhere names a host that can answer; the refusal carries its API address for clients that go there themselves.
func (n *Node) elsewhere(host uint64, cause *code.Error) error {
	h, ok := n.view().Host(host)
	if !ok {
		return cause
	}
	cause.LeaderHost, cause.LeaderAPI = host, h.ClientAddr
	return &api.ElsewhereError{Host: host, Cause: cause}
}

// operation returns a random operation id where the caller gave none.
func operation(id uint64) uint64 {
	for id == 0 {
		id = rand.Uint64()
	}
	return id
}

// CreateQueue implements api.Backend: it proposes the queue and waits until this fleet serves it.
func (n *Node) CreateQueue(ctx context.Context, r api.CreateQueue) (api.QueueInfo, bool, error) {
	opts := r.Options
	opts.Partitions = r.Partitions
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return api.QueueInfo{}, false, code.New(code.InvalidArgument, "%v", err)
	}
	replicas, witnesses := r.Replicas, r.Witnesses
	if replicas == 0 {
		v, err := n.raft.ReadCatalog(ctx) // this host may not have seen the last hosts register
		if err != nil {
			return api.QueueInfo{}, false, err
		}
		replicas, witnesses = layout(v)
	}
	tenant := api.TenantOf(ctx)
	_, existed := n.view().Queue(tenant, r.Name)
	q, err := n.raft.CreateQueue(ctx, catalog.CreateQueue{
		OperationID: operation(r.OperationID), Tenant: tenant, Name: r.Name, Options: opts, Replicas: uint32(replicas), Witnesses: uint32(witnesses),
	})
	if err != nil {
		return api.QueueInfo{}, false, err
	}
	n.awaitServed(ctx, q)
	return n.queueInfo(q), !existed, nil
}

// layout is what a fleet can hold: three full replicas, or two and a witness.
func layout(v *catalog.View) (replicas, witnesses int) {
	full := 0
	for _, h := range v.Hosts() {
		if h.Role == catalog.HostFull && v.HostState(h.ID) == catalog.HostActive {
			full++
		}
	}
	if full >= 3 {
		return 3, 0
	}
	return 2, 1
}

// awaitServed waits until each shard is known here, its leader too if this host has a replica, and its witnesses are members, so that a publish right after
// the creation works, and one host may be lost from then on: without its witness a queue of two full replicas has no quorum
// but both. It is a courtesy: the queue exists either way.
func (n *Node) awaitServed(ctx context.Context, q catalog.Queue) {
	ctx, cancel := context.WithTimeout(ctx, catalogTimeout)
	defer cancel()
	for {
		changed := n.changed()
		served := true
		for _, s := range q.Shards {
			_, known := n.view().Placement(s) // what the catalog has answered may not have come here yet
			if _, _, _, ok := n.raft.Leader(s); !known || !ok && n.holds(s) || !n.complete(s) {
				served = false
			}
		}
		if served {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// complete says whether the witnesses of a shard have been added to its members.
func (n *Node) complete(shard uint64) bool {
	p, _ := n.view().Placement(shard)
	return !slices.ContainsFunc(p.Replicas, func(r catalog.Replica) bool {
		return r.Birth == catalog.BirthWitness && !r.Member && r.State < catalog.ReplicaLost
	})
}

// holds says whether this host has, or will have, a full replica of a shard.
func (n *Node) holds(shard uint64) bool {
	return slices.ContainsFunc(n.FullReplicas(shard), func(r replicaHost) bool { return r.Host == n.id })
}

// ListQueues implements api.Backend.
func (n *Node) ListQueues(ctx context.Context, prefix string) ([]api.QueueInfo, error) {
	var out []api.QueueInfo
	for _, q := range n.fleetView(ctx).Queues(api.TenantOf(ctx)) {
		if strings.HasPrefix(q.Name, prefix) {
			out = append(out, n.queueInfo(q))
		}
	}
	return out, nil
}

// DescribeQueue implements api.Backend. A queue that was deleted before the call is unknown, whichever host deleted it.
func (n *Node) DescribeQueue(ctx context.Context, name string, p api.Partition) (api.QueueInfo, error) {
	n.fleetView(ctx)
	q, d, err := n.deskOf(ctx, name, p)
	if err != nil {
		return api.QueueInfo{}, err
	}
	// A partition without a leader is still described, as this host last saw it.
	d.freshen(ctx)
	info := n.queueInfo(q)
	meta, groups := d.reader.ReadStats()
	info.HasState = true
	info.Messages, info.Bytes, info.Delayed, info.Last = meta.Counters.Messages, meta.Counters.Bytes, meta.Counters.Delayed, meta.Last
	info.Groups = n.groupInfos(q.Name, d, groups)
	return info, nil
}

// freshenTimeout bounds a read barrier that the answer does not depend on.
const freshenTimeout = time.Second

// briefly bounds a read barrier by that, and by half of the time that is left for the answer: one partition without a leader must
// not cost the caller those of all.
func briefly(ctx context.Context) (context.Context, context.CancelFunc) {
	wait := freshenTimeout
	if end, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(end)/2)
	}
	return context.WithTimeout(ctx, wait)
}

// freshen is a read barrier if there is a leader to give one.
func (d *desk) freshen(ctx context.Context) {
	ctx, cancel := briefly(ctx)
	defer cancel()
	_ = d.raft.ReadIndex(ctx)
}

// LocateQueue implements api.Backend.
func (n *Node) LocateQueue(ctx context.Context, name string) (api.QueueInfo, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return api.QueueInfo{}, err
	}
	return n.queueInfo(q), nil
}

// DeleteQueue implements api.Backend.
func (n *Node) DeleteQueue(ctx context.Context, name string) error {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return err
	}
	return n.raft.DeleteQueue(ctx, catalog.DeleteQueue{OperationID: operation(0), Tenant: q.Tenant, Name: name, ExpectedID: q.ID})
}

func (n *Node) queueInfo(q catalog.Queue) api.QueueInfo {
	v := n.view()
	info := api.QueueInfo{Name: q.Name, ID: q.ID, Options: q.Options}
	if g, ok := v.Growth(q.ID); ok && !g.Opened {
		info.GrowingTo = uint32(len(v.AllShards(q)))
	}
	for i, shard := range q.Shards {
		part := api.PartitionInfo{Number: uint32(i), Shard: shard}
		if placement, ok := v.Placement(shard); ok {
			for _, r := range placement.Replicas {
				if r.State == catalog.ReplicaRemoved || r.State == catalog.ReplicaRetired {
					continue
				}
				h, _ := v.Host(r.HostID)
				part.Replicas = append(part.Replicas, api.ReplicaInfo{Replica: r.ID, Host: r.HostID, Role: roleName(r), API: h.ClientAddr})
			}
		}
		if _, host, term, ok := n.raft.Leader(shard); ok {
			part.LeaderHost, part.Term = host, term
			if host == n.id {
				part.DataCopies = uint32(n.raft.InSync(shard))
			}
			part.QuorumState = n.quorumAt(shard, host)
			if h, ok := v.Host(host); ok {
				part.LeaderAPI = h.ClientAddr
			}
		} else {
			part.QuorumState = quorumElecting
		}
		info.Partitions = append(info.Partitions, part)
	}
	return info
}

func roleName(r catalog.Replica) string {
	switch {
	case r.Birth == catalog.BirthWitness:
		return "witness"
	case r.Birth == catalog.BirthNonVoting && !r.Member:
		return "non-voting"
	}
	return "full"
}

// Publish implements api.Backend: at the leader's host it goes through the batcher, elsewhere it is forwarded there. One that finds no leader
// is held for a while.
func (n *Node) Publish(ctx context.Context, r api.Publish) (api.PublishReply, error) {
	q, err := n.queueWith(ctx, r.Queue, r.Partition)
	if err != nil {
		return api.PublishReply{}, err
	}
	shard, err := n.shardOf(q, r.Partition)
	if err != nil {
		return api.PublishReply{}, err
	}
	if err := checkKeys(q, r); err != nil {
		return api.PublishReply{}, err
	}
	d, err := n.desk(shard)
	if err != nil {
		return api.PublishReply{}, err
	}
	leader, host, err := n.awaitLeader(ctx, d, publishSize(&r.Publish))
	if err != nil {
		return api.PublishReply{}, err
	}
	if leader != d.self {
		return api.PublishReply{}, n.elsewhere(host, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, RetryAfterMs: 50,
			Text: "this host does not lead the partition: go to the leader that the details name"})
	}
	out := d.publish(ctx, r.Publish, r.Delays, r.TTLs, r.Queued)
	if out.err != nil {
		return api.PublishReply{}, out.err
	}
	res := out.result
	if res.Code != code.OK {
		return api.PublishReply{}, &code.Error{Code: res.Code, Effect: code.EffectNone, RetryAfterMs: retryAfter(res.Code)}
	}
	n.countPublish(&r.Publish, res)
	self, _ := n.view().Host(n.id)
	return api.PublishReply{Result: res, Shard: shard, Index: out.index, DataCopies: uint32(out.copies), LeaderHost: n.id, LeaderAPI: self.ClientAddr, Warning: uint32(d.warning(out.copies)), Partitions: uint32(len(q.Shards))}, nil
}

func retryAfter(c code.Code) uint32 {
	if c.Info().Class == code.ClassTransient {
		return 100
	}
	return 0
}

func (n *Node) countPublish(p *queue.Publish, res queue.PublishResult) {
	stored, bytes, dup := 0, 0, 0
	for i, m := range res.Messages {
		switch {
		case m.Code != code.OK:
			n.metrics.refused.WithLabelValues(m.Code.String()).Inc()
		case m.Duplicate:
			dup++
		default:
			stored++
			bytes += messageSize(&p.Messages[i]) - messageOverhead
		}
	}
	n.metrics.published.Add(float64(stored))
	n.metrics.publishedB.Add(float64(bytes))
	n.metrics.duplicates.Add(float64(dup))
}

// checkKeys refuses a message that its publisher has put into another partition than its key's, where keys have an order:
// a client that does not know how many partitions the queue has now.
func checkKeys(q catalog.Queue, r api.Publish) error {
	if len(q.Shards) == 1 || q.Options.Ordering != queue.OrderKey || r.Publish.Producer.Kind > queue.ProducerClient {
		return nil
	}
	for i := range r.Publish.Messages {
		key := r.Publish.Messages[i].Key
		if want := tierqv1.PartitionOfKey(key, uint32(len(q.Shards))); len(key) > 0 && want != *r.Partition {
			return code.New(code.WrongPartition, "messages[%d].key: its partition is %d of %d, not %d", i, want, len(q.Shards), *r.Partition)
		}
	}
	return nil
}

// deskOf returns a queue and the desk of one of its partitions.
func (n *Node) deskOf(ctx context.Context, name string, p api.Partition) (catalog.Queue, *desk, error) {
	q, err := n.queueWith(ctx, name, p)
	if err != nil {
		return q, nil, err
	}
	shard, err := n.shardOf(q, p)
	if err != nil {
		return q, nil, err
	}
	d, err := n.desk(shard)
	return q, d, err
}

// CreateGroup implements api.Backend.
func (n *Node) CreateGroup(ctx context.Context, r api.CreateGroup) (api.GroupInfo, error) {
	q, d, err := n.groupDesk(ctx, r.Queue, r.Partition)
	if err != nil {
		return api.GroupInfo{}, err
	}
	first := queue.ReplicaID(0)
	if r.HomeHost != 0 {
		if first, err = n.replicaOn(d.shard, r.HomeHost); err != nil {
			return api.GroupInfo{}, err
		}
	}
	// Of a group that exists only the same creation is answered.
	if have, ok := d.reader.GroupByName(r.Name); !ok || have.Config.DeadLetterQueue != r.Config.DeadLetterQueue {
		if err := n.mayNameDeadLetterQueue(ctx, d.shard, r.Config.DeadLetterQueue); err != nil {
			return api.GroupInfo{}, err
		}
	}
	g, err := d.createGroup(ctx, r.Name, r.Config, r.Start, first, operation(r.OperationID))
	if err != nil {
		return api.GroupInfo{}, err
	}
	return n.groupInfo(q.Name, d, g), nil
}

// replicaOn finds the full replica of a shard on a host.
func (n *Node) replicaOn(shard, host uint64) (queue.ReplicaID, error) {
	for _, r := range n.FullReplicas(shard) {
		if r.Host == host && !n.Settled(shard, r.Replica) {
			return 0, code.New(code.InvalidArgument, "the replica of host %d comes or leaves: `tierq host list` shows its move", host)
		}
		if r.Host == host {
			return r.Replica, nil
		}
	}
	if _, ok := n.view().Host(host); !ok {
		return 0, code.New(code.UnknownHost, "host %d is not in the fleet", host)
	}
	return 0, code.New(code.InvalidArgument, "host %d holds no full replica of the queue: `tierq queue describe` lists those that do", host)
}

// ListGroups implements api.Backend.
func (n *Node) ListGroups(ctx context.Context, name string, p api.Partition) ([]api.GroupInfo, error) {
	q, d, err := n.groupDesk(ctx, name, p)
	if err != nil {
		return nil, err
	}
	if err := d.raft.ReadIndex(ctx); err != nil {
		return nil, err
	}
	return n.groupInfos(q.Name, d, d.reader.Groups()), nil
}

// groupInfos describes groups, and how long the oldest message of each has waited.
func (n *Node) groupInfos(queueName string, d *desk, groups []queue.GroupInfo) []api.GroupInfo {
	stats := map[queue.GroupID]home.GroupStats{}
	for _, s := range d.keeper.Stats() {
		stats[s.Group] = s
	}
	out, begun := make([]api.GroupInfo, len(groups)), time.Now()
	for i, g := range groups {
		out[i] = n.groupInfoWith(queueName, d, g, stats[g.ID])
		if g.Counters.Unfinished > 0 && time.Since(begun) < oldestTime {
			n.addOldest(&out[i], d)
		}
	}
	return out
}

func (n *Node) groupInfo(queueName string, d *desk, g queue.GroupInfo) api.GroupInfo {
	return n.groupInfoWith(queueName, d, g, d.statsOf(g.ID))
}

func (n *Node) groupInfoWith(queueName string, d *desk, g queue.GroupInfo, s home.GroupStats) api.GroupInfo {
	info := api.GroupInfo{GroupInfo: g, Queue: queueName, InFlight: s.Leased, Waiting: s.Waiters}
	if h, ok := n.view().HostOf(d.shard, g.Home); ok {
		info.HomeHost, info.HomeAPI = h.ID, h.ClientAddr
	}
	if p, ok := n.view().Placement(d.shard); ok {
		info.Partition = p.Partition
	}
	info.Parked = d.parkedExport(g.ID)
	return info
}

// DeleteGroup implements api.Backend.
func (n *Node) DeleteGroup(ctx context.Context, name string, p api.Partition, group string, id queue.GroupID) error {
	d, g, err := n.barrier(ctx, name, p, group)
	if err != nil {
		return err
	}
	if id != 0 {
		if err := n.closedGroup(ctx, name, p, g, id); err != nil {
			return err
		}
	}
	_, err = d.proposed(ctx, &queue.Group{Stamp: d.raft.Stamp(), Op: queue.GroupDelete, OperationID: operation(0), ID: g.ID, ExpectedEpoch: g.Epoch})
	return err
}

// ResetGroup implements api.Backend.
func (n *Node) ResetGroup(ctx context.Context, name string, p api.Partition, group string, start queue.Start) (api.GroupInfo, error) {
	d, g, err := n.barrier(ctx, name, p, group)
	if err != nil {
		return api.GroupInfo{}, err
	}
	if _, err := d.proposed(ctx, &queue.Group{Stamp: d.raft.Stamp(), Op: queue.GroupReset, OperationID: operation(0), ID: g.ID, ExpectedEpoch: g.Epoch, Start: start}); err != nil {
		return api.GroupInfo{}, err
	}
	g, _ = d.reader.Group(g.ID)
	return n.groupInfo(name, d, g), nil
}

// MoveGroup implements api.Backend: the home hands over, released, so that nothing waits; a home whose host is silent is
// replaced as a dead one is.
func (n *Node) MoveGroup(ctx context.Context, name string, p api.Partition, group string, toHost uint64) (api.GroupInfo, error) {
	d, g, err := n.barrier(ctx, name, p, group)
	if err != nil {
		return api.GroupInfo{}, err
	}
	to, err := n.replicaOn(d.shard, toHost)
	if err != nil {
		return api.GroupInfo{}, err
	}
	switch host, ok := d.hostOf(g.Home); {
	case g.Home == to:
	case g.Home == d.self:
		err = d.keeper.Move(ctx, group, to)
	case ok && n.Alive(host):
		return api.GroupInfo{}, n.elsewhere(host, &code.Error{Code: code.NotOwner, Effect: code.EffectNone})
	default:
		_, err = d.proposed(ctx, &queue.Home{Stamp: d.raft.Stamp(), Group: g.ID, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: to})
	}
	if err != nil {
		return api.GroupInfo{}, err
	}
	g, _ = d.reader.Group(g.ID)
	return n.groupInfo(name, d, g), nil
}

// Receive implements api.Backend at the group's home; elsewhere it fails at once with the home's address.
func (n *Node) Receive(ctx context.Context, r api.Receive) ([]api.Delivery, queue.Epoch, error) {
	q, d, err := n.deskOf(ctx, r.Queue, r.Partition)
	if err != nil {
		return nil, 0, n.toClient(err)
	}
	if r.MinIndex > d.reader.Meta().Applied {
		if err := d.raft.ReadIndex(ctx); err != nil {
			return nil, 0, err
		}
	}
	name := r.Group
	g, err := d.group(ctx, name)
	if isCode(err, code.UnknownGroup) && name == api.DefaultGroup {
		home := d.self // of several partitions the homes are spread, or one host would serve them all
		if len(q.Shards) > 1 {
			home = 0
		}
		g, err = d.createGroup(ctx, name, queue.GroupConfig{}, queue.Start{}, home, operation(0))
		if isCode(err, code.GroupExistsMismatch) || isCode(err, code.MutationFenced) {
			g, err = d.group(ctx, name)
		}
	}
	if err != nil {
		return nil, 0, err
	}
	req := home.ReceiveRequest{Max: r.Max, MaxBytes: r.MaxBytes, Wait: r.Wait, Consumer: r.Consumer}
	if r.Lease != nil {
		req.Lease, req.HasLease = *r.Lease, true
	}
	got, err := d.keeper.Receive(ctx, name, req)
	if err := d.emptyHanded(len(got), r.Wait, err); err != nil {
		return nil, 0, n.withHome(d, name, err)
	}
	out := deliveries(got)
	n.metrics.delivered.Add(float64(len(out)))
	return out, g.Epoch, nil
}

// emptyHanded is what a receive is told that ended with err or nothing. At the end of a long poll that is NO_LEADER where none is
// known: this host may be cut off from a fleet that has made another host the home, and "nothing", or "paused", would keep the
// consumer here for ever.
func (d *desk) emptyHanded(got int, wait time.Duration, err error) error {
	if got > 0 || wait == 0 || err != nil && !isCode(err, code.ConsumerLimit) && !isCode(err, code.GroupPaused) {
		return err
	}
	if _, _, _, ok := d.raft.Leader(); ok {
		return err
	}
	return &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 200}
}

// toClient turns "elsewhere" into a refusal that names where to go: receive and settle calls are not forwarded.
func (n *Node) toClient(err error) error {
	var e *api.ElsewhereError
	if !errors.As(err, &e) {
		return err
	}
	var c *code.Error
	if errors.As(e.Cause, &c) {
		out := *c
		out.HomeHost, out.HomeAPI = out.LeaderHost, out.LeaderAPI
		return &out
	}
	return e.Cause
}

// withHome completes a NOT_OWNER refusal with the home's host and address.
func (n *Node) withHome(d *desk, group string, err error) error {
	var c *code.Error
	if !errors.As(err, &c) || c.Code != code.NotOwner {
		return err
	}
	replica, epoch, ok := d.keeper.HomeOf(group)
	if !ok {
		return err
	}
	out := *c
	out.Epoch = uint64(epoch)
	if h, ok := n.view().HostOf(d.shard, replica); ok {
		out.HomeHost, out.HomeAPI = h.ID, h.ClientAddr
		out.Text = "host " + itoa(h.ID) + " at " + h.ClientAddr + " is the home of group " + group + ": go there"
	}
	return &out
}

// Settle implements api.Backend at the group's home.
func (n *Node) Settle(ctx context.Context, r api.Settle) ([]api.SettleResult, error) {
	_, d, err := n.deskOf(ctx, r.Queue, r.Partition)
	if err != nil {
		return nil, n.toClient(err)
	}
	if _, err := d.group(ctx, r.Group); err != nil {
		return nil, err
	}
	if r.Kind != api.SettleRelease && r.Kind != api.SettleUnseen { // those need no command, but for recorded leases
		if err := d.mayCommit(); err != nil {
			return nil, err
		}
	}
	items, err := settle(ctx, d.keeper, r)
	if err != nil {
		return nil, n.withHome(d, r.Group, err)
	}
	out := make([]api.SettleResult, len(items))
	ok := 0
	for i, it := range items {
		if rc, err := d.receipt.Decode(r.Receipts[i]); err == nil {
			out[i].Address = rc.Address
		}
		if it.Code == code.OK {
			ok++
			continue
		}
		effect := it.Effect
		if effect == 0 {
			effect = code.EffectNone
		}
		out[i].Err = n.withHome(d, r.Group, &code.Error{Code: it.Code, Effect: effect})
	}
	n.metrics.settled.WithLabelValues(r.Kind.String()).Add(float64(ok))
	return out, nil
}

func settle(ctx context.Context, k *home.Keeper, r api.Settle) ([]home.ItemResult, error) {
	switch r.Kind {
	case api.SettleAck:
		if r.Patient {
			return k.AckPatiently(ctx, r.Group, r.Receipts)
		}
		return k.Ack(ctx, r.Group, r.Receipts)
	case api.SettleRelease:
		return k.Release(ctx, r.Group, r.Receipts)
	case api.SettleNack:
		items := make([]home.NackItem, len(r.Receipts))
		for i, rc := range r.Receipts {
			items[i] = home.NackItem{Receipt: rc, Reason: r.Reason}
			if r.Delay != nil {
				items[i].Delay, items[i].HasDelay = *r.Delay, true
			}
		}
		return k.Nack(ctx, r.Group, items)
	case api.SettleReject:
		items := make([]home.RejectItem, len(r.Receipts))
		for i, rc := range r.Receipts {
			items[i] = home.RejectItem{Receipt: rc, Reason: r.Reason}
		}
		return k.Reject(ctx, r.Group, items)
	case api.SettleUnseen:
		return k.Unseen(ctx, r.Group, r.Receipts)
	default:
		items := make([]home.ExtendItem, len(r.Receipts))
		for i, rc := range r.Receipts {
			items[i] = home.ExtendItem{Receipt: rc, Lease: r.Lease}
		}
		return k.Extend(ctx, r.Group, items)
	}
}

// Digest implements api.Backend.
func (n *Node) Digest(ctx context.Context, name string, partition uint32) (api.ReplicaDigest, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return api.ReplicaDigest{}, err
	}
	shard, err := n.shardOf(q, &partition)
	if err != nil {
		return api.ReplicaDigest{}, err
	}
	d, err := n.desk(shard)
	if err != nil {
		return api.ReplicaDigest{}, n.toClient(err)
	}
	// Best effort: without a quorum the digest at the local applied index is still of use.
	d.freshen(ctx)
	index, sum, err := d.reader.Digest()
	n.raft.ReadFailed(shard, err)
	if err != nil {
		return api.ReplicaDigest{}, code.New(code.Internal, "the digest cannot be read: see the host's log")
	}
	return api.ReplicaDigest{Shard: shard, Replica: d.self, Host: n.id, Applied: index, Digest: sum}, nil
}

// Fleet implements api.Backend.
func (n *Node) Fleet() api.Fleet {
	v := n.view()
	f := api.Fleet{ID: v.Fleet().String(), Self: n.id, Version: n.cfg.Version, Uptime: time.Since(n.started), CatalogVersion: v.Version()}
	if _, host, term, ok := n.raft.Leader(catalog.ShardID); ok {
		f.CatalogLeader, f.CatalogTerm = host, term
	}
	for _, h := range v.Hosts() {
		alive, silent := n.heard(h.ID)
		f.Hosts = append(f.Hosts, api.HostInfo{
			ID: h.ID, Role: h.Role.String(), API: h.ClientAddr, Peer: h.PeerAddr, Domain: h.Domain, Alive: alive, Silent: silent,
		})
	}
	return f
}
