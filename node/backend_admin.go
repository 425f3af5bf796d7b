package node

import (
	"context"
	"strings"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// adminReader is the part of the state that administrators ask; *queue.QueueStateMachine is one.
type adminReader interface {
	LookupPublish(p queue.Producer, seq queue.Seq) (queue.PublishLookup, error)
	Browse(from queue.Address, limit, maxBytes int) ([]queue.StoredMessage, queue.Address, error)
	Oldest(id queue.GroupID, now queue.Stamp) (queue.Address, queue.Stamp, bool, error)
	Head(a queue.Address) (queue.MessageHead, bool, error)
	OfKey(id queue.GroupID, key []byte, from queue.Address, limit int) ([]queue.Deliverable, queue.Address, error)
}

var _ adminReader = (*queue.QueueStateMachine)(nil)

func (d *desk) admin() (adminReader, error) {
	if r, ok := d.reader.(adminReader); ok {
		return r, nil
	}
	return nil, code.New(code.Internal, "the state of shard %d cannot be asked this", d.shard)
}

// partition finds a partition's desk, after a barrier: what is read then has everything that was acknowledged before.
func (n *Node) partition(ctx context.Context, name string, p api.Partition) (*desk, error) {
	_, d, err := n.deskOf(ctx, name, p)
	if err != nil {
		return nil, err
	}
	return d, d.raft.ReadIndex(ctx)
}

// barrier is the desk and group of a call, after a barrier.
func (n *Node) barrier(ctx context.Context, name string, p api.Partition, group string) (*desk, queue.GroupInfo, error) {
	_, d, err := n.groupDesk(ctx, name, p)
	if err == nil {
		err = d.raft.ReadIndex(ctx)
	}
	if err != nil {
		return nil, queue.GroupInfo{}, err
	}
	g, err := d.group(ctx, group)
	return d, g, err
}

// atHome is barrier at the group's home, or says which host that is.
func (n *Node) atHome(ctx context.Context, name string, p api.Partition, group string) (*desk, queue.GroupInfo, error) {
	d, g, err := n.barrier(ctx, name, p, group)
	if err != nil {
		return nil, g, err
	}
	if host, ok := d.hostOf(g.Home); g.Home != d.self && ok {
		return nil, g, n.elsewhere(host, &code.Error{Code: code.NotOwner, Effect: code.EffectNone, Epoch: uint64(g.Epoch)})
	}
	return d, g, nil
}

// readFault hides a failed read of the state from the caller; it is in the log of whoever met it.
func (d *desk) readFault(err error) error {
	if err == nil {
		return nil
	}
	return &code.Error{Code: code.Internal, Effect: code.EffectNone, Cause: err, Text: "the state cannot be read: see the host's log"}
}

// statsOf is what this host knows as the home of a group; zero if nobody has used the group here.
func (d *desk) statsOf(id queue.GroupID) home.GroupStats {
	for _, s := range d.keeper.Stats() {
		if s.Group == id {
			return s
		}
	}
	return home.GroupStats{}
}

// oldestTime bounds how long one list of groups looks for oldest messages.
const oldestTime = 2 * time.Second

// addOldest adds how long a group's oldest message has waited. A failed read leaves it out: it is seen elsewhere.
func (n *Node) addOldest(info *api.GroupInfo, d *desk) {
	r, err := d.admin()
	if err != nil {
		return
	}
	now := d.raft.Stamp()
	a, since, found, err := r.Oldest(info.ID, now)
	if err != nil || !found {
		return
	}
	info.Oldest = a
	if now > since {
		info.OldestAge = time.Duration(now-since) * time.Millisecond
	}
}

// PurgeQueue implements api.Backend at the leader's host, one purge of a shard at a time, so that it can tell how many
// messages went.
func (n *Node) PurgeQueue(ctx context.Context, r api.PurgeQueue) (api.PurgeReply, error) {
	q, err := n.queueByName(ctx, r.Queue)
	if err != nil {
		return api.PurgeReply{}, err
	}
	shard, err := n.shardOf(q, r.Partition)
	if err != nil {
		return api.PurgeReply{}, err
	}
	switch _, host, _, ok := n.raft.Leader(shard); {
	case !ok:
		return api.PurgeReply{}, &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 200}
	case host != n.id:
		return api.PurgeReply{}, n.elsewhere(host, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, RetryAfterMs: 50})
	}
	d, err := n.desk(shard)
	if err != nil {
		return api.PurgeReply{}, err
	}
	if err := d.raft.ReadIndex(ctx); err != nil {
		return api.PurgeReply{}, err
	}
	select {
	case d.purging <- struct{}{}:
		defer func() { <-d.purging }()
	case <-ctx.Done():
		return api.PurgeReply{}, &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: ctx.Err()}
	}
	before := d.reader.Meta()
	to := min(r.To, before.Last)
	if r.All {
		to = before.Last
	}
	if to == 0 {
		return api.PurgeReply{}, nil
	}
	_, err = d.proposed(ctx, &queue.Retention{Stamp: d.raft.Stamp(), OperationID: operation(r.OperationID), PurgeTo: to})
	if isCode(err, code.MutationFenced) && r.All && r.OperationID != 0 {
		return api.PurgeReply{Repeated: true}, nil // done under this id, when another message was the last one
	}
	if err != nil {
		return api.PurgeReply{}, err
	}
	return api.PurgeReply{Purged: d.reader.Meta().Counters.Purged - before.Counters.Purged, To: to}, nil
}

// ConfigureQueue implements api.Backend: the catalog decides, then the shards follow.
func (n *Node) ConfigureQueue(ctx context.Context, name string, o queue.QueueOptions) (api.QueueInfo, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return api.QueueInfo{}, err
	}
	if o.Ordering != q.Options.Ordering {
		return api.QueueInfo{}, code.New(code.InvalidArgument, "options.ordering: the order of a queue cannot change: create another queue and move the consumers over")
	}
	return n.setOptions(ctx, q, o)
}

// setOptions proposes options and waits until this host's replicas have them.
func (n *Node) setOptions(ctx context.Context, q catalog.Queue, o queue.QueueOptions) (api.QueueInfo, error) {
	o.Partition, o.Partitions = q.Options.Partition, q.Options.Partitions
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return api.QueueInfo{}, code.New(code.InvalidArgument, "options: %v", err)
	}
	res, err := n.raft.ProposeCatalog(ctx, &catalog.ConfigureQueue{Tenant: q.Tenant, Name: q.Name, ExpectedID: q.ID, Options: o})
	if err == nil {
		err = res.Err()
	}
	if err != nil {
		return api.QueueInfo{}, err
	}
	n.awaitOptions(ctx, res.Queue)
	return n.queueInfo(res.Queue), nil
}

// awaitOptions waits until the replicas here have applied a queue's options. It is a courtesy: their leaders bring the
// shards to the catalog's options in any case.
func (n *Node) awaitOptions(ctx context.Context, q catalog.Queue) {
	ctx, cancel := context.WithTimeout(ctx, catalogTimeout)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for _, shard := range q.Shards {
		n.mu.RLock()
		d := n.desks[shard]
		n.mu.RUnlock()
		for d != nil && !sameOptions(withPartition(d.reader.Meta().Options, 0), withPartition(q.Options, 0)) {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}
}

func withPartition(o queue.QueueOptions, number uint32) queue.QueueOptions {
	o.Partition = number
	return o
}

// fencedTries is how often a change that only flips one option is tried on what somebody else has just changed.
const fencedTries = 5

// PauseQueue implements api.Backend.
func (n *Node) PauseQueue(ctx context.Context, name string, paused bool) (api.QueueInfo, error) {
	for try := 1; ; try++ {
		v, err := n.raft.ReadCatalog(ctx)
		if err != nil {
			return api.QueueInfo{}, err
		}
		q, ok := v.Queue(api.TenantOf(ctx), name)
		if !ok {
			return api.QueueInfo{}, code.New(code.UnknownQueue, "queue %q does not exist: create it with `tierq queue create %s`", name, name)
		}
		o := q.Options
		o.Paused = paused
		info, err := n.setOptions(ctx, q, o)
		if isCode(err, code.MutationFenced) && try < fencedTries {
			continue
		}
		return info, err
	}
}

// ConfigureGroup implements api.Backend; what clients cannot set stays.
func (n *Node) ConfigureGroup(ctx context.Context, name string, p api.Partition, group string, cfg queue.GroupConfig, version uint64) (api.GroupInfo, error) {
	d, g, err := n.barrier(ctx, name, p, group)
	if err != nil {
		return api.GroupInfo{}, err
	}
	if cfg.DeadLetterQueue != g.Config.DeadLetterQueue {
		if err := n.mayNameDeadLetterQueue(ctx, d.shard, cfg.DeadLetterQueue); err != nil {
			return api.GroupInfo{}, err
		}
	}
	if g, err = d.configureGroup(ctx, g.ID, cfg, version); err != nil {
		return api.GroupInfo{}, err
	}
	return n.groupInfo(name, d, g), nil
}

// PauseGroup implements api.Backend.
func (n *Node) PauseGroup(ctx context.Context, name string, p api.Partition, group string, paused bool) (api.GroupInfo, error) {
	for try := 1; ; try++ {
		d, g, err := n.barrier(ctx, name, p, group)
		if err != nil {
			return api.GroupInfo{}, err
		}
		if g.Config.Paused != paused {
			cfg := g.Config
			cfg.Paused = paused
			g, err = d.configureGroup(ctx, g.ID, cfg, g.ConfigVersion)
		}
		if isCode(err, code.MutationFenced) && try < fencedTries {
			continue
		}
		if err != nil {
			return api.GroupInfo{}, err
		}
		return n.groupInfo(name, d, g), nil
	}
}

func (d *desk) configureGroup(ctx context.Context, id queue.GroupID, cfg queue.GroupConfig, version uint64) (queue.GroupInfo, error) {
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return queue.GroupInfo{}, code.New(code.InvalidArgument, "config: %v", err)
	}
	_, err := d.proposed(ctx, &queue.Group{Stamp: d.raft.Stamp(), Op: queue.GroupConfigure, OperationID: operation(0), ID: id, ExpectedVersion: version, Config: cfg})
	if err != nil {
		return queue.GroupInfo{}, err
	}
	g, ok := d.reader.Group(id)
	if !ok {
		return g, code.New(code.UnknownGroup, "the group was deleted meanwhile")
	}
	return g, nil
}

// Consumers implements api.Backend at the group's home.
func (n *Node) Consumers(ctx context.Context, name string, p api.Partition, group string, withMessages bool) (api.Consumers, error) {
	d, g, err := n.atHome(ctx, name, p, group)
	if err != nil {
		return api.Consumers{}, err
	}
	info := n.groupInfo(name, d, g)
	s := d.statsOf(g.ID)
	out := api.Consumers{InFlight: s.Leased, Waiting: s.Waiters, Max: g.Config.MaxInFlight, HomeHost: info.HomeHost, HomeAPI: info.HomeAPI, Epoch: g.Epoch}
	unnamed := s.Leased
	for _, c := range s.Consumers {
		out.Consumers = append(out.Consumers, api.Consumer{Name: c.Name, InFlight: c.Leased, Active: c.Active})
		unnamed -= c.Leased
	}
	if unnamed > 0 {
		out.Consumers = append(out.Consumers, api.Consumer{InFlight: unnamed})
	}
	if withMessages {
		return out, n.withHome(d, group, d.addHeld(group, out.Consumers))
	}
	return out, nil
}

// maxHeld bounds the held messages of one answer.
const maxHeld = 1000

func (d *desk) addHeld(group string, consumers []api.Consumer) error {
	held, err := d.keeper.Held(group, maxHeld)
	for _, h := range held {
		for i := range consumers {
			if c := &consumers[i]; c.Name == h.Consumer {
				c.Held = append(c.Held, api.Held{Address: h.Address, Attempt: h.Attempt, For: h.HeldFor, Left: h.Left})
			}
		}
	}
	return err
}

// ListDelayed implements api.Backend on any replica.
func (n *Node) ListDelayed(ctx context.Context, r api.ListDelayed) (api.DelayedPage, error) {
	d, err := n.partition(ctx, r.Queue, r.Partition)
	if err != nil {
		return api.DelayedPage{}, err
	}
	// What is due is for consumers: the list begins with what cannot be delivered yet.
	after := r.After
	if now := d.raft.Stamp(); after.VisibleAt < now {
		after = queue.DelayedKey{VisibleAt: now, Address: queue.MaxAddress}
	}
	page := api.DelayedPage{Total: d.reader.Meta().Counters.Delayed}
	keys, err := d.reader.Due(after, queue.MaxStamp, r.Limit+1)
	if err != nil {
		return page, d.readFault(err)
	}
	if len(keys) > r.Limit {
		keys, page.More = keys[:r.Limit], true
	}
	size := 0
	for i, k := range keys {
		m, ok, err := d.delayed(k, r.Bodies)
		if err != nil {
			return page, d.readFault(err)
		}
		page.Next = k
		if !ok {
			continue
		}
		page.Messages = append(page.Messages, m)
		if size += len(m.Message.Body); size > maxAnswerBytes && i < len(keys)-1 {
			page.More = true
			break
		}
	}
	return page, nil
}

// delayed reads a message of the delayed index; false when it has changed since the index was read.
func (d *desk) delayed(k queue.DelayedKey, body bool) (m api.DelayedMessage, ok bool, err error) {
	r, err := d.admin()
	if err != nil {
		return m, false, err
	}
	if m.MessageHead, ok, err = r.Head(k.Address); err != nil || !ok || m.VisibleAt != k.VisibleAt {
		return m, false, err
	}
	if body {
		m.Message, ok, err = d.reader.Message(k.Address)
	}
	return m, ok, err
}

// maxAnswerBytes bounds the bodies of one answer, but for the last one.
const maxAnswerBytes = 4 << 20

// ChangeDelayed implements api.Backend on any replica: apply decides whether the message is still what was seen.
func (n *Node) ChangeDelayed(ctx context.Context, r api.ChangeDelayed) (queue.Stamp, error) {
	d, err := n.partition(ctx, r.Queue, r.Partition)
	if err != nil {
		return 0, err
	}
	m, ok, err := d.reader.Message(r.Address)
	now := d.raft.Stamp()
	switch {
	case err != nil:
		return 0, d.readFault(err)
	case !ok:
		return 0, code.New(code.UnknownMessage, "message %d does not exist: it was finished, purged, cancelled, or never published", uint64(r.Address))
	case m.VisibleAt <= now:
		return 0, code.New(code.Skipped, "message %d is not delayed, or has become due: nothing was changed", uint64(r.Address))
	}
	change := queue.DelayedChange{Address: r.Address, Expected: r.Expected}
	if change.Expected == 0 {
		change.Expected = m.VisibleAt
	}
	if !r.Cancel {
		if limit := d.reader.Meta().Options.MaxDelayMs; uint64(r.Delay.Milliseconds()) > limit {
			return 0, code.New(code.DelayTooLong, "delay_ms: %d, this queue allows %d: shorten it, or raise the queue's max delay", r.Delay.Milliseconds(), limit)
		}
		change.NewVisibleAt = now + queue.Stamp(r.Delay.Milliseconds())
	}
	res, err := d.proposed(ctx, &queue.Retention{Stamp: now, Delayed: []queue.DelayedChange{change}})
	switch {
	case err != nil:
		return 0, err
	case len(res.Delayed) != 1:
		return 0, code.Maybe(code.Internal, nil, "the answer to a change of message %d cannot be read", uint64(r.Address))
	case res.Delayed[0] == code.Skipped:
		return 0, code.New(code.Skipped, "message %d is not due at the expected time any more: list the delayed messages and decide again", uint64(r.Address))
	case res.Delayed[0] != code.OK:
		return 0, &code.Error{Code: res.Delayed[0], Effect: code.EffectNone}
	}
	return change.NewVisibleAt, nil
}

// Browse implements api.Backend on any replica.
func (n *Node) Browse(ctx context.Context, r api.Browse) ([]queue.StoredMessage, queue.Address, error) {
	d, err := n.partition(ctx, r.Queue, r.Partition)
	if err != nil {
		return nil, 0, err
	}
	s, err := d.admin()
	if err != nil {
		return nil, 0, err
	}
	// A call of the state may come to its bound of reads before it has met a message: go on while there is time.
	for from := r.From; ; {
		list, next, err := s.Browse(from, r.Limit, r.MaxBytes)
		if err != nil || len(list) > 0 || next == 0 || ctx.Err() != nil {
			return list, next, d.readFault(err)
		}
		from = next
	}
}

// LookupPublish implements api.Backend on any replica.
func (n *Node) LookupPublish(ctx context.Context, r api.LookupPublish) (queue.PublishLookup, bool, error) {
	d, err := n.partition(ctx, r.Queue, r.Partition)
	if err != nil {
		return queue.PublishLookup{}, false, err
	}
	s, err := d.admin()
	if err != nil {
		return queue.PublishLookup{}, false, err
	}
	found, err := s.LookupPublish(r.Producer, r.Seq)
	if err != nil || found.Address == 0 {
		return found, false, d.readFault(err)
	}
	_, exists, err := d.reader.Message(found.Address)
	return found, exists, d.readFault(err)
}

// ListDead implements api.Backend on any replica.
func (n *Node) ListDead(ctx context.Context, r api.Dead) ([]queue.DeadLetter, queue.Address, error) {
	d, g, err := n.barrier(ctx, r.Queue, r.Partition, r.Group)
	if err != nil {
		return nil, 0, err
	}
	if r.ReasonPrefix == "" && r.OlderThan == 0 {
		list, next, err := d.reader.DeadLetters(g.ID, r.From, r.Limit, true)
		return list, next, d.readFault(err)
	}
	var out []queue.DeadLetter
	size := 0
	w := d.deadWalk(g.ID, r)
	for len(out) < r.Limit && size < maxAnswerBytes && w.next(ctx) {
		full, _, err := d.reader.DeadLetters(g.ID, w.at.Address, 1, true)
		if err != nil {
			return nil, 0, d.readFault(err)
		}
		if len(full) == 1 && full[0].Address == w.at.Address {
			out = append(out, full[0])
			size += len(full[0].Message.Body)
		}
	}
	return out, w.from, d.readFault(w.err)
}

// deadWalk goes through the dead letters that a selection lets through, without bodies.
type deadWalk struct {
	d      *desk
	group  queue.GroupID
	sel    api.Dead
	before queue.Stamp // dead at or before it; 0: whenever
	page   []queue.DeadLetter
	more   queue.Address // behind the page; 0: nothing
	at     queue.DeadLetter
	from   queue.Address // where to go on behind at; 0: the end
	begun  bool
	err    error
}

func (d *desk) deadWalk(id queue.GroupID, sel api.Dead) *deadWalk {
	w := &deadWalk{d: d, group: id, sel: sel, more: max(sel.From, 1)}
	if sel.OlderThan > 0 {
		if now, age := d.raft.Stamp(), queue.Stamp(sel.OlderThan.Milliseconds()); now > age {
			w.before = now - age
		}
		w.before = max(w.before, 1)
	}
	return w
}

// next moves to the next one; false at the end, at an error, and shortly before the deadline of ctx.
func (w *deadWalk) next(ctx context.Context) bool {
	for {
		for len(w.page) == 0 {
			if w.from = w.more; w.more == 0 || w.begun && short(ctx) {
				return false
			}
			w.begun = true
			if w.page, w.more, w.err = w.d.reader.DeadLetters(w.group, w.more, deadBatch, false); w.err != nil {
				return false
			}
		}
		w.at, w.page = w.page[0], w.page[1:]
		w.from = w.at.Address + 1
		if len(w.page) == 0 {
			w.from = w.more
		}
		if strings.HasPrefix(w.at.Reason, w.sel.ReasonPrefix) && (w.before == 0 || w.at.DeadAt <= w.before) {
			return true
		}
	}
}

// endMargin is how long before its deadline a long call ends with what it has done.
const endMargin = 2 * time.Second

// short says whether the deadline of ctx is too near to begin another step.
func short(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && time.Until(end) < endMargin
}

// RedriveDead implements api.Backend at the group's home; it is forwarded there.
func (n *Node) RedriveDead(ctx context.Context, r api.Dead) (api.DeadReply, error) {
	return n.dead(ctx, r, (*home.Keeper).Redrive)
}

// PurgeDead implements api.Backend at the group's home; it is forwarded there.
func (n *Node) PurgeDead(ctx context.Context, r api.Dead) (api.DeadReply, error) {
	return n.dead(ctx, r, (*home.Keeper).PurgeDead)
}

// deadBatch is how many dead letters one command treats.
const deadBatch = 512

type deadCall func(k *home.Keeper, ctx context.Context, group string, addresses []queue.Address, limit int) ([]home.DeadResult, error)

// dead treats the named dead letters, or those that the selection lets through.
func (n *Node) dead(ctx context.Context, r api.Dead, call deadCall) (api.DeadReply, error) {
	d, g, err := n.atHome(ctx, r.Queue, r.Partition, r.Group)
	if err != nil {
		return api.DeadReply{}, err
	}
	t := &deadTask{d: d, group: r.Group, call: call, dry: r.DryRun, pace: newPace(r.Rate), left: r.Limit}
	if r.Limit == 0 {
		t.left = int(^uint(0) >> 1)
	}
	if len(r.Addresses) > 0 {
		err = t.named(ctx, g.ID, r.Addresses)
	} else {
		err = t.walk(ctx, d.deadWalk(g.ID, r))
	}
	if err != nil && t.reply.Done > 0 && t.reply.Next != 0 {
		// Part of it is done, which an error would deny: the caller goes on from Next, and meets the error there.
		return t.reply, nil
	}
	return t.reply, n.withHome(d, r.Group, err)
}

// deadTask is one call about dead letters.
type deadTask struct {
	d     *desk
	group string
	call  deadCall
	dry   bool
	pace  *pace
	left  int
	reply api.DeadReply
}

func (t *deadTask) named(ctx context.Context, id queue.GroupID, addresses []queue.Address) error {
	for len(addresses) > 0 && t.left > 0 {
		part := addresses[:min(len(addresses), deadBatch, t.left, t.pace.batch())]
		if t.dry {
			if err := t.count(id, part); err != nil {
				return err
			}
		} else if !t.mayGoOn(ctx, len(part)) {
			t.reply.Next = part[0]
			return nil
		} else if err := t.do(ctx, part); err != nil {
			t.reply.Next = part[0]
			return err
		}
		addresses = addresses[len(part):]
		t.left -= len(part)
	}
	if len(addresses) > 0 {
		t.reply.Next = addresses[0]
	}
	return nil
}

func (t *deadTask) count(id queue.GroupID, addresses []queue.Address) error {
	for _, a := range addresses {
		list, _, err := t.d.reader.DeadLetters(id, a, 1, false)
		if err != nil {
			return t.d.readFault(err)
		}
		if len(list) == 1 && list[0].Address == a {
			t.reply.Matched++
		}
	}
	return nil
}

func (t *deadTask) walk(ctx context.Context, w *deadWalk) error {
	for t.left > 0 {
		var part []queue.Address
		start := w.from
		for len(part) < min(deadBatch, t.left, t.pace.batch()) && w.next(ctx) {
			if len(part) == 0 {
				start = w.at.Address
			}
			part = append(part, w.at.Address)
		}
		t.reply.Next = w.from
		switch {
		case w.err != nil:
			return t.d.readFault(w.err)
		case len(part) == 0:
			return nil
		case t.dry:
			t.reply.Matched += len(part)
		case !t.mayGoOn(ctx, len(part)):
			t.reply.Next = start
			return nil
		default:
			if err := t.do(ctx, part); err != nil {
				t.reply.Next = start
				return err
			}
		}
		t.left -= len(part)
	}
	return nil
}

// mayGoOn waits for the time of a step; false when there is not enough left. The first step is always made.
func (t *deadTask) mayGoOn(ctx context.Context, n int) bool {
	if t.reply.Done+t.reply.Skipped > 0 && short(ctx) {
		return false
	}
	return t.pace.wait(ctx, n)
}

// do treats some dead letters. Those about which nothing was decided, or it is not known what, are an error: the home moved, or its quorum is gone.
func (t *deadTask) do(ctx context.Context, addresses []queue.Address) error {
	results, err := t.call(t.d.keeper, ctx, t.group, addresses, len(addresses))
	for _, r := range results {
		switch r.Code {
		case code.OK:
			t.reply.Done++
		case code.Skipped, code.UnknownMessage, code.DeadExporting:
			t.reply.Skipped++
		default:
			if err == nil || r.Effect == code.EffectMaybe {
				err = &code.Error{Code: r.Code, Effect: r.Effect}
			}
		}
	}
	return err
}

// pace spreads work over time: rate items a second, in ten steps a second. A nil pace does not.
type pace struct {
	rate int
	next time.Time
}

func newPace(rate int) *pace {
	if rate <= 0 {
		return nil
	}
	return &pace{rate: rate, next: time.Now()}
}

// batch is how many items one step may have.
func (p *pace) batch() int {
	if p == nil {
		return deadBatch
	}
	return max(p.rate/10, 1)
}

// wait waits for the time of a step of n items; false when the deadline of ctx is too near for it.
func (p *pace) wait(ctx context.Context, n int) bool {
	if p == nil {
		return true
	}
	now := time.Now()
	p.next = later(p.next, now)
	if end, ok := ctx.Deadline(); ok && p.next.After(now) && end.Sub(p.next) < endMargin {
		return false
	}
	pause := time.NewTimer(p.next.Sub(now))
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
		return false
	}
	p.next = p.next.Add(time.Duration(n) * time.Second / time.Duration(p.rate))
	return true
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
