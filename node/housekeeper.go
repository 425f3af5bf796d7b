package node

import (
	"cmp"
	"context"
	"hash/fnv"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
)

const (
	// housekeepTick is how often a housekeeper looks; an idle shard then costs two atomic loads.
	housekeepTick = 250 * time.Millisecond
	// housekeepTickMany is the same in the profile many-shards.
	housekeepTickMany = time.Second
	// followTicks is how many of them pass between two looks at a shard that another host leads; news of a leader wakes it.
	followTicks = 4
	// choreEvery is how often a shard that moves is asked for chores, choreRest one that does not.
	choreEvery = 500 * time.Millisecond
	choreRest  = 30 * time.Second
	// replaceEvery bounds how often one group's home is proposed to be replaced.
	replaceEvery = time.Second
	// missingFor is how long an alive host may be without the home's replica: reports come every 300 ms, and a
	// replica that starts again takes a moment.
	missingFor = 3 * time.Second
)

// housekeep runs while the replica runs and acts only while this host leads the shard: it brings the shard's options to
// the catalog's, replaces homes whose host is silent, and proposes the state's chores. An idle shard writes nothing.
func (d *desk) housekeep(ctx context.Context) {
	tick := cmp.Or(d.tick, housekeepTick)
	timer := time.NewTimer(tick)
	defer timer.Stop()
	k := &housekeeper{desk: d, replaced: map[queue.GroupID]time.Time{}, missing: map[queue.GroupID]time.Time{}, state: noChores{}}
	if r, ok := d.reader.(choreReader); ok {
		k.state = r
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-d.wake:
			d.configured.Store(false)
		}
		if d.leads() {
			d.quorumState()
			k.round(ctx)
			timer.Reset(tick)
		} else {
			next := followTicks * tick
			if d.level.isReadOnly(d.boot()) {
				d.probe()
				next = tick
			}
			k.follow(time.Now())
			timer.Reset(next)
		}
	}
}

type housekeeper struct {
	*desk
	known      []queue.GroupInfo
	replaced   map[queue.GroupID]time.Time
	missing    map[queue.GroupID]time.Time // since when the home's replica is not there
	state      choreReader
	from       queue.Address // where the look for expired messages goes on; 0: from the beginning
	nextChores time.Time
	nextRest   time.Time
	nextForget time.Time
	gone       map[queue.Producer]bool // outboxes whose source was gone at the last look
	balance    balance
}

// choreReader is the part of the state that knows what there is to do; *queue.QueueStateMachine is one.
type choreReader interface {
	Chores(now queue.Stamp, from queue.Address) (queue.Chores, error)
}

// noChores stands in for a reader that knows none.
type noChores struct{}

func (noChores) Chores(queue.Stamp, queue.Address) (queue.Chores, error) { return queue.Chores{}, nil }

func (k *housekeeper) round(ctx context.Context) {
	k.handOver(ctx, time.Now())
	ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
	defer cancel()
	if !k.configured.Load() {
		if err := k.configure(ctx); err != nil {
			k.log.Debug("options not brought to the catalog's yet", zap.Error(err))
		}
	}
	if k.groups.Swap(false) || k.known == nil {
		k.known = k.reader.Groups()
	}
	k.replaceHomes(ctx)
	k.chores(ctx)
	k.forget(ctx)
}

// replaceHomes proposes a new home for every group whose home's host is silent or gone.
func (k *housekeeper) replaceHomes(ctx context.Context) {
	now := time.Now()
	for _, g := range k.known {
		if !k.absent(g, now) || now.Sub(k.replaced[g.ID]) < replaceEvery {
			continue
		}
		next := k.spread(g.Name)
		if next == 0 || next == g.Home {
			continue
		}
		k.replaced[g.ID] = time.Now()
		k.metrics.homesReplaced.Inc()
		k.log.Info("home is silent: proposing another one", event.Is("home-silent"), zap.String("group", g.Name), zap.Uint64("home", uint64(g.Home)),
			zap.Uint64("next", uint64(next)), zap.Uint64("epoch", uint64(g.Epoch)))
		res, err := k.propose(ctx, &queue.Home{
			Stamp: k.raft.Stamp(), Group: g.ID, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: next,
		})
		if err == nil {
			err = refusal(res)
		}
		if err != nil {
			k.log.Info("home not replaced", zap.String("group", g.Name), zap.Error(err))
		}
		k.groups.Store(true)
	}
}

// absent says whether a group's home cannot serve: at once when its host is silent or gone from the shard, and after
// missingFor when the host is there but its replica is not (stopped, or it does not open).
func (k *housekeeper) absent(g queue.GroupInfo, now time.Time) bool {
	host, ok := k.hostOf(g.Home)
	if !ok || !k.fleet.Alive(host) {
		return true
	}
	if k.fleet.Serves(host, k.shard) {
		delete(k.missing, g.ID)
		return false
	}
	since, ok := k.missing[g.ID]
	if !ok {
		k.missing[g.ID] = now
		return false
	}
	return now.Sub(since) >= missingFor
}

func (d *desk) hostOf(r queue.ReplicaID) (uint64, bool) {
	for _, f := range d.fleet.FullReplicas(d.shard) {
		if f.Replica == r {
			return f.Host, true
		}
	}
	return 0, false
}

// spread chooses the home of a group by name: one of the alive full replicas, by hash; 0 when none is alive.
func (d *desk) spread(name string) queue.ReplicaID {
	var alive []queue.ReplicaID
	for _, f := range d.fleet.FullReplicas(d.shard) {
		if d.fleet.Serves(f.Host, d.shard) && d.settled(f.Replica) {
			alive = append(alive, f.Replica)
		}
	}
	if len(alive) == 0 {
		return 0
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return alive[(uint64(h.Sum32())+d.shard)%uint64(len(alive))]
}

// chores proposes what the state says is to be done: moving the line, parking stragglers, finishing what has expired,
// and dropping what a log-mode queue need not keep. The state is asked once a choreEvery while something moves, and
// once a choreRest when nothing does, for what runs out by time.
func (k *housekeeper) chores(ctx context.Context) {
	now := time.Now()
	if !k.due(now) {
		return
	}
	k.moved.Store(false)
	c, err := k.state.Chores(k.raft.Stamp(), k.from)
	if err != nil {
		k.log.Error("the state cannot be read for housekeeping", zap.Error(err))
		k.nextChores = now.Add(choreRest)
		return
	}
	k.from = c.Next
	k.nextChores = now.Add(choreEvery)
	if c.Next == 0 {
		k.nextRest = now.Add(choreRest)
	}
	if c.Empty() {
		return
	}
	k.metrics.chores.Inc()
	if _, err := k.propose(ctx, c.Retention(k.raft.Stamp())); err != nil {
		k.moved.Store(true)
		k.log.Debug("housekeeping not proposed", zap.Error(err))
	}
}

// due says whether the state is to be asked now.
func (k *housekeeper) due(now time.Time) bool {
	if now.Before(k.nextChores) {
		return false
	}
	return k.moved.Load() || k.from != 0 || !now.Before(k.nextRest)
}
