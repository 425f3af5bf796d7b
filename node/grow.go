package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// A growth (catalog.Growth, docs/adr/0057) is driven by the host that leads the catalog: once the new shards are served it makes the queue's
// groups in them until a look at all of them finds nothing to do, has the catalog open the partitions, looks at the groups once more, and
// ends the growth. It remembers nothing but what the catalog has: another host goes on where it was, or does the same beside it.

const (
	// growEvery is how often growths are looked at that wait for something.
	growEvery = 200 * time.Millisecond
	// growRound bounds one look at one growth.
	growRound = 10 * time.Second
	// growReminder is how often the log says what a growth waits for.
	growReminder = 30 * time.Second
	// groupCatalogTimeout bounds the read of the catalog by a call about groups, which then takes the partitions that this host knows.
	groupCatalogTimeout = time.Second
)

// driver advances the growths of all queues while this host leads the catalog.
type driver struct {
	n      *Node
	server *api.Server // its calls go where they are served

	mu    sync.Mutex
	waits map[uint64]growthWait // by growth
}

// growthWait is why a growth did not go on when it was looked at last.
type growthWait struct {
	err  error
	told time.Time // when the log was
}

// driveGrowths runs the driver until the returned function is called, which waits for it.
func (n *Node) driveGrowths(server *api.Server) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	d := &driver{n: n, server: server, waits: map[uint64]growthWait{}}
	n.driver = d
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

func (d *driver) run(ctx context.Context) {
	for ctx.Err() == nil {
		changed := d.n.changed()
		var again <-chan time.Time
		if growths := d.n.view().Growths(); len(growths) > 0 {
			again = time.After(growEvery)
			if d.n.leadsCatalog() {
				d.round(ctx, growths)
			}
		} else {
			d.forget()
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again:
		}
	}
}

func (n *Node) leadsCatalog() bool {
	_, host, _, ok := n.raft.Leader(catalog.ShardID)
	return ok && host == n.id
}

// round advances every growth: one that waits does not hold up the others.
func (d *driver) round(ctx context.Context, growths []catalog.Growth) {
	var wg sync.WaitGroup
	for _, g := range growths {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, growRound)
			defer cancel()
			d.tell(g, d.advance(ctx, g.QueueID))
		})
	}
	wg.Wait()
}

// advance takes a queue's growth as far as it goes now.
func (d *driver) advance(ctx context.Context, queueID uint64) error {
	for d.n.leadsCatalog() { // two hosts that make groups at once could undo what a caller has just done
		v, err := d.n.raft.ReadCatalog(ctx)
		if err != nil {
			return err
		}
		q, ok := v.QueueByID(queueID)
		g, growing := v.Growth(queueID)
		if !ok || !growing {
			return nil
		}
		ctx := api.WithTenant(ctx, q.Tenant)
		d.at(ctx, growthBegun, g)
		if err := d.n.servesAll(g.Shards); err != nil {
			return err
		}
		all := len(v.AllShards(q))
		level, err := d.server.MatchGroups(ctx, q.Name, all-len(g.Shards), all, !g.Opened)
		if err != nil {
			return err
		}
		if !level {
			continue
		}
		event, step := catalog.GrowthOpened, growthOpening
		if g.Opened {
			event, step = catalog.GrowthFinished, growthFinishing
		}
		d.at(ctx, step, g)
		r, err := d.n.raft.ProposeCatalog(ctx, &catalog.GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: event})
		if err == nil {
			err = r.Err()
		}
		if err != nil {
			return err
		}
		d.n.log.Info("queue grows", zap.String("queue", q.Name), zap.Int("partitions", all), zap.Bool("finished", g.Opened))
	}
	return nil
}

// growthStep is a step of a growth's driver, between which a host may end.
type growthStep string

const (
	growthBegun     growthStep = "begun"     // the catalog has its shards
	growthOpening   growthStep = "opening"   // the groups are in them: the catalog is to open them
	growthFinishing growthStep = "finishing" // they are open, and the groups were looked at again: the catalog is to forget the growth
)

func (d *driver) at(ctx context.Context, s growthStep, g catalog.Growth) {
	if at := d.n.cfg.growthAt; at != nil {
		at(ctx, d.n.id, s, g)
	}
}

// unserved is a shard that a growth waits for.
type unserved struct {
	shard uint64
	lacks string
}

func (u *unserved) Error() string { return fmt.Sprintf("shard %d %s", u.shard, u.lacks) }

// servesAll returns nil once every shard has a leader and all its voters, else an *unserved.
func (n *Node) servesAll(shards []uint64) error {
	for _, s := range shards {
		lacks := ""
		if _, _, _, ok := n.raft.Leader(s); !ok {
			lacks = "has no leader yet"
		} else if !n.complete(s) {
			lacks = "does not have its witness yet"
		} else {
			continue
		}
		if silent := n.silentHosts(s); silent != "" {
			lacks += ", and of its hosts these are silent: " + silent
		}
		return &unserved{s, lacks}
	}
	return nil
}

// silentHosts are those of a shard's hosts of which this one does not hear.
func (n *Node) silentHosts(shard uint64) string {
	p, _ := n.view().Placement(shard)
	var silent []string
	for _, r := range p.Replicas {
		if r.State <= catalog.ReplicaStarted && r.HostID != n.id && !n.Alive(r.HostID) {
			silent = append(silent, itoa(r.HostID))
		}
	}
	return strings.Join(silent, ", ")
}

// Growths implements api.Backend. Without a leader of the catalog this host says what it knows.
func (n *Node) Growths(ctx context.Context, name string) ([]api.Growth, error) {
	_, leads, _, ok := n.raft.Leader(catalog.ShardID)
	if ok && leads != n.id {
		return nil, n.elsewhere(leads, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, RetryAfterMs: 50, Text: "another host leads the catalog"})
	}
	v := n.view()
	if ok {
		var err error
		if v, err = n.raft.ReadCatalog(ctx); err != nil {
			return nil, err
		}
	}
	tenant := api.TenantOf(ctx)
	if tenant == "" {
		tenant = catalog.DefaultTenant
	}
	return n.growths(v, tenant, name), nil
}

// growths are those of a tenant's queue, or of all ("").
func (n *Node) growths(v *catalog.View, tenant, name string) []api.Growth {
	leads := n.leadsCatalog()
	var out []api.Growth
	for _, g := range v.Growths() {
		q, ok := v.QueueByID(g.QueueID)
		if !ok || tenant != "" && q.Tenant != tenant || name != "" && q.Name != name {
			continue
		}
		one := api.Growth{Queue: q.Name, To: len(v.AllShards(q)), Phase: "groups"}
		one.From = one.To - len(g.Shards)
		if tenant == "" {
			one.Queue = statsName(q)
		}
		if g.BegunMs != 0 {
			one.Begun = time.UnixMilli(int64(g.BegunMs))
			one.For = max(0, time.Since(one.Begun))
		}
		var lacks *unserved
		switch err := n.servesAll(g.Shards); {
		case !leads:
			one.Waits = "the catalog has no leader"
		case errors.As(err, &lacks):
			one.Waits, one.Shard = lacks.Error(), lacks.shard
		default:
			one.Waits = n.driver.waitsFor(g)
		}
		if leads {
			one.Host = n.id
		}
		switch p, ok := v.Placement(one.Shard); {
		case g.Opened:
			one.Phase = "last-look"
		case ok:
			one.Phase, one.Partition = "shards", p.Partition
		}
		out = append(out, one)
	}
	return out
}

// forget forgets what growths that are over waited for.
func (d *driver) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.waits)
}

// waitsFor is why a growth did not go on when it was looked at last; empty: it did.
func (d *driver) waitsFor(g catalog.Growth) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.waits[g.ID()]; w.err != nil {
		return w.err.Error()
	}
	return ""
}

// tell writes into the log what a growth waits for, now and then.
func (d *driver) tell(g catalog.Growth, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		delete(d.waits, g.ID())
		return
	}
	w, waits := d.waits[g.ID()]
	if w.err = err; !waits {
		w.told = time.Now() // it may have come by the next look
		d.waits[g.ID()] = w
		d.n.log.Debug("queue grows", zap.Uint64("queue", g.QueueID), zap.Error(err))
		return
	}
	if time.Since(w.told) >= growReminder {
		w.told = time.Now()
		d.n.log.Warn("a queue is growing and does not get on: `tierq queue grow QUEUE --cancel` takes back what is not open", zap.Uint64("queue", g.QueueID), zap.Error(err))
	}
	d.waits[g.ID()] = w
}

// GrowQueue implements api.Backend.
func (n *Node) GrowQueue(ctx context.Context, name string, partitions uint32) (api.QueueInfo, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return api.QueueInfo{}, err
	}
	res, err := n.raft.ProposeCatalog(ctx, &catalog.GrowQueue{Tenant: q.Tenant, Name: q.Name, ExpectedID: q.ID, Partitions: partitions, NowMs: n.nowMs()})
	if err == nil {
		err = res.Err()
	}
	if err != nil {
		return api.QueueInfo{}, err
	}
	return n.infoAt(ctx, res), nil
}

// nowMs is the time by this host's clock, 0 while that is refused.
func (n *Node) nowMs() uint64 {
	now, err := n.raft.Clock().Wall()
	if err != nil {
		return 0
	}
	return uint64(now)
}

// CancelGrowth implements api.Backend.
func (n *Node) CancelGrowth(ctx context.Context, name string) (api.QueueInfo, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return api.QueueInfo{}, err
	}
	q, ok := v.Queue(api.TenantOf(ctx), name)
	if !ok {
		return api.QueueInfo{}, code.New(code.UnknownQueue, "queue %q does not exist", name)
	}
	g, growing := v.Growth(q.ID)
	if !growing {
		return n.queueInfo(q), nil
	}
	res, err := n.raft.ProposeCatalog(ctx, &catalog.GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: catalog.GrowthCancelled})
	if err == nil {
		err = res.Err()
	}
	if err != nil {
		return api.QueueInfo{}, err
	}
	return n.infoAt(ctx, res), nil
}

// PartitionCount implements api.Backend.
func (n *Node) PartitionCount(ctx context.Context, name string) (uint32, <-chan struct{}) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	q, _ := n.catalog.Queue(api.TenantOf(ctx), name)
	return uint32(len(q.Shards)), n.news
}

// infoAt describes a queue once this host knows what a command has done to it, or as it is if that does not come.
func (n *Node) infoAt(ctx context.Context, res catalog.Result) api.QueueInfo {
	ctx, cancel := context.WithTimeout(ctx, catalogTimeout)
	defer cancel()
	_ = n.raft.AwaitCatalog(ctx, res.Version)
	return n.queueInfo(res.Queue)
}

// GroupPartitions implements api.Backend. Without the catalog nobody opens a partition either, unless only this host cannot reach it: its
// own view has to do then.
func (n *Node) GroupPartitions(ctx context.Context, name string) (api.Partitions, error) {
	read, cancel := context.WithTimeout(ctx, groupCatalogTimeout)
	v, err := n.raft.ReadCatalog(read)
	cancel()
	if err != nil {
		v = n.view()
	}
	q, ok := v.Queue(api.TenantOf(ctx), name)
	switch {
	case ok:
		return api.Partitions{Shards: v.AllShards(q), Open: len(q.Shards)}, nil
	case err != nil:
		return api.Partitions{}, err
	}
	return api.Partitions{}, code.New(code.UnknownQueue, "queue %q does not exist: create it with `tierq queue create %s`", name, name)
}

// groupDesk is deskOf for calls about groups: partitions that are not open yet have them too.
func (n *Node) groupDesk(ctx context.Context, name string, p api.Partition) (catalog.Queue, *desk, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil || p == nil || int(*p) < len(q.Shards) {
		return n.deskOf(ctx, name, p)
	}
	v := n.view()
	if int(*p) >= len(v.AllShards(q)) {
		if v, err = n.raft.ReadCatalog(ctx); err != nil {
			return q, nil, err
		}
	}
	q, _ = v.Queue(api.TenantOf(ctx), name)
	all := v.AllShards(q)
	if int(*p) >= len(all) {
		return q, nil, code.New(code.UnknownPartition, "partition: %d, queue %q has %d, numbered from 0", *p, q.Name, len(q.Shards))
	}
	d, err := n.desk(all[*p])
	return q, d, err
}

// closedGroup refuses another group than that of an id, and any in a partition that is open by now.
func (n *Node) closedGroup(ctx context.Context, name string, p api.Partition, g queue.GroupInfo, id queue.GroupID) error {
	if g.ID != id {
		return code.New(code.UnknownGroup, "group %q has id %d, not %d", g.Name, g.ID, id)
	}
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return err
	}
	q, ok := v.Queue(api.TenantOf(ctx), name)
	if !ok || p == nil || int(*p) < len(q.Shards) {
		return code.New(code.MutationFenced, "the partition of group %q is open", g.Name)
	}
	return nil
}
