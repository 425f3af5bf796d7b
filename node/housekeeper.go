package node

import (
	"context"
	"hash/fnv"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
)

const (
	// housekeepTick is how often a housekeeper looks; an idle shard then costs two atomic loads.
	housekeepTick = 250 * time.Millisecond
	// reclaimMessages is how many reclaimable messages make the line move at once; fewer wait for a tick of reclaimEvery.
	reclaimMessages = 4096
	reclaimEvery    = time.Second
	// replaceEvery bounds how often one group's home is proposed to be replaced.
	replaceEvery = time.Second
)

// housekeep runs while the replica runs and acts only while this host leads the shard: it brings the shard's options to
// the catalog's, replaces homes whose host is silent, and moves the reclaim line. An idle shard writes nothing.
func (d *desk) housekeep(ctx context.Context) {
	ticker := time.NewTicker(housekeepTick)
	defer ticker.Stop()
	k := &housekeeper{desk: d, replaced: map[queue.GroupID]time.Time{}}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-d.wake:
			d.configured.Store(false)
		}
		if d.leads() {
			k.round(ctx)
		}
	}
}

type housekeeper struct {
	*desk
	known       []queue.GroupInfo
	replaced    map[queue.GroupID]time.Time
	lastReclaim time.Time
}

func (k *housekeeper) round(ctx context.Context) {
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
	k.reclaim(ctx)
}

// replaceHomes proposes a new home for every group whose home's host is silent or gone.
func (k *housekeeper) replaceHomes(ctx context.Context) {
	for _, g := range k.known {
		host, ok := k.hostOf(g.Home)
		if ok && k.fleet.Alive(host) || time.Since(k.replaced[g.ID]) < replaceEvery {
			continue
		}
		next := k.spread(g.Name)
		if next == 0 || next == g.Home {
			continue
		}
		k.replaced[g.ID] = time.Now()
		k.metrics.homesReplaced.Inc()
		k.log.Info("home is silent: proposing another one", zap.String("group", g.Name), zap.Uint64("home", uint64(g.Home)),
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
		if f.Host == d.host || d.fleet.Alive(f.Host) {
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

// reclaim moves the line to the least floor of the groups, if that frees something. A queue without groups keeps
// everything.
func (k *housekeeper) reclaim(ctx context.Context) {
	if !k.moved.Load() || time.Since(k.lastReclaim) < housekeepTick {
		return
	}
	meta, groups := k.reader.ReadStats()
	if len(groups) == 0 || meta.Options.Mode == queue.ModeLog {
		k.moved.Store(false)
		return
	}
	target := groups[0].Floor
	for _, g := range groups[1:] {
		target = min(target, g.Floor)
	}
	if target <= meta.Line {
		k.moved.Store(false)
		return
	}
	if target-meta.Line < reclaimMessages && time.Since(k.lastReclaim) < reclaimEvery {
		return
	}
	k.moved.Store(false)
	k.lastReclaim = time.Now()
	k.metrics.reclaimed.Inc()
	if _, err := k.propose(ctx, &queue.Retention{Stamp: k.raft.Stamp(), ReclaimLine: target}); err != nil {
		k.moved.Store(true)
		k.log.Debug("line not moved", zap.Error(err))
	}
}
