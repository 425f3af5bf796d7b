package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// itemTimeout bounds what one shard may cost the reconcile loop.
const itemTimeout = 10 * time.Second

// Reasons for which a replica is not run. Each is logged once.
var (
	errLeftOut = errors.New("the process ended twice while this replica was being started, so it is left out: see the log of the former runs, and report it")
	errLost    = errors.New("the data of this replica are gone, so it is not started: it waits to be replaced")
)

// poke wakes the reconcile loop. It never blocks.
func (h *RaftHost) poke() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// signalApplied wakes whoever follows the catalog of this host's own replica. It never blocks.
func (h *RaftHost) signalApplied() {
	select {
	case h.applied <- struct{}{}:
	default:
	}
}

// itemsAtOnce bounds the shards that are worked on at the same time: a shard may wait for its leader, or for the catalog, and
// the others must not wait with it.
const itemsAtOnce = 16

// reconciler keeps what the loop knows of the shards between its rounds.
type reconciler struct {
	h     *RaftHost
	slots chan struct{}

	mu    sync.Mutex
	items map[uint64]*item
}

// item is one shard.
type item struct {
	busy  bool // a goroutine works on it
	again bool // and must do so once more

	failures int  // rounds in a row that failed for what passes by itself
	waiting  bool // a goroutine waits to visit it again

	// What it complains of, since when, and whether that was logged.
	text  string
	since time.Time
	said  bool
}

// reconcileLoop makes this host run what the catalog says, on every change and every few seconds.
func (h *RaftHost) reconcileLoop(ctx context.Context) {
	c := &reconciler{h: h, slots: make(chan struct{}, itemsAtOnce), items: make(map[uint64]*item)}
	for {
		for _, p := range h.ownPlacements() {
			if !c.rests(p) {
				c.visit(ctx, p.Shard)
			}
		}
		wait := h.cfg.ReconcileInterval
		wait += time.Duration((rand.Float64() - 0.5) * 0.2 * float64(wait))
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-h.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// rests says whether there is nothing to do for a shard, nor to say of it: what most shards of a round are.
func (c *reconciler) rests(p catalog.Placement) bool {
	c.mu.Lock()
	it := c.items[p.Shard]
	quiet := it != nil && !it.busy && it.text == "" && it.failures == 0
	c.mu.Unlock()
	return quiet && c.h.rests(p)
}

// visit has a shard worked on, by a goroutine of its own.
func (c *reconciler) visit(ctx context.Context, shard uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	it, ok := c.items[shard]
	if !ok {
		it = &item{}
		c.items[shard] = it
	}
	if it.busy {
		it.again = true
		return
	}
	it.busy = true
	c.h.goTask(func(context.Context) { c.work(ctx, shard) })
}

// work reconciles a shard until nobody asks for it again.
func (c *reconciler) work(ctx context.Context, shard uint64) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return
	}
	for again := true; again && ctx.Err() == nil; {
		err := c.once(ctx, shard)
		if errors.Is(err, errBusyReplica) {
			pause(ctx, 10*time.Millisecond)
		}
		again = c.finish(ctx, shard, err)
	}
}

// retryFirst is the pause before a shard is visited again whose round failed for what passes by itself; it doubles up to the
// interval. A new leader, for one, refuses reads until it has committed something: without this its members would be added
// only at the next interval, and until then a queue of two full replicas survives no crash.
const retryFirst = 50 * time.Millisecond

// retrySoonLocked has a shard visited again after a pause.
func (c *reconciler) retrySoonLocked(ctx context.Context, shard uint64, it *item) {
	wait := c.h.cfg.ReconcileInterval
	if d := retryFirst << min(it.failures, 10); d < wait {
		wait = d
	}
	it.failures++
	if it.waiting {
		return
	}
	it.waiting = true
	c.h.goTask(func(context.Context) {
		pause(ctx, wait)
		c.mu.Lock()
		it.waiting = false
		c.mu.Unlock()
		c.visit(ctx, shard)
	})
}

// once reconciles a shard as the catalog has it now.
func (c *reconciler) once(ctx context.Context, shard uint64) error {
	p, ok := c.h.placement(shard)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, itemTimeout)
	defer cancel()
	return c.h.reconcileShard(ctx, p)
}

// finish takes up what a round said, and returns whether there must be another one.
func (c *reconciler) finish(ctx context.Context, shard uint64, err error) (again bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	it := c.items[shard]
	if ctx.Err() == nil {
		c.complain(shard, it, err)
	}
	switch {
	case ctx.Err() == nil && passes(err):
		c.retrySoonLocked(ctx, shard, it)
	case err == nil:
		it.failures = 0
	}
	again = it.again || errors.Is(err, errBusyReplica)
	it.busy, it.again = again, false
	return again
}

// findHosts looks for hosts that do not answer at their other addresses, again and again. Whether they are heard does
// not count: a host may have found this one, and not been found by it. A host gets the time to answer before it is
// looked for elsewhere; at the start, when none has, the list's addresses are tried first.
func (h *RaftHost) findHosts(ctx context.Context) {
	flipped := make(map[uint64]time.Time)
	ticker := time.NewTicker(h.cfg.Silence)
	defer ticker.Stop()
	for {
		for _, hostID := range h.book.others(h.cfg.HostID) {
			if !h.peers.Answers(hostID) && time.Since(flipped[hostID]) >= 3*h.cfg.Silence {
				flipped[hostID] = time.Now()
				h.book.flip(hostID)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// complainAfter is how long something that passes, like an election, may last before it is a warning.
const complainAfter = 10 * time.Second

// complain logs what a round said of a shard: once, and what may pass by itself only when it does not.
func (c *reconciler) complain(shard uint64, it *item, err error) {
	if err == nil {
		if it.said {
			c.h.log.Info("shard is as the catalog has it", zap.Uint64("shard", shard))
		}
		it.text, it.said = "", false
		return
	}
	if it.text != err.Error() {
		it.text, it.since, it.said = err.Error(), time.Now(), false
	}
	passing := errors.Is(err, errBusyReplica) || passes(err)
	if it.said || passing && time.Since(it.since) < complainAfter {
		return
	}
	it.said = true
	c.h.log.Warn("shard is not as the catalog has it", zap.Uint64("shard", shard), zap.Error(err))
}

// passes says whether err is of those that pass by themselves, like an election.
func passes(err error) bool {
	var coded *code.Error
	return errors.Is(err, errMoveWaits) || errors.As(err, &coded) && coded.Code.Info().Class == code.ClassTransient
}

// ownPlacements returns the shards that have, or had, a replica here; before there is a catalog, the catalog itself.
func (h *RaftHost) ownPlacements() []catalog.Placement {
	v := h.Catalog()
	var ps []catalog.Placement
	if _, ok := v.Placement(catalog.ShardID); !ok {
		if p, ok := h.placement(catalog.ShardID); ok {
			if _, here := p.OnHost(h.cfg.HostID); here {
				ps = append(ps, p)
			}
		}
	}
	for _, shard := range v.ShardsOf(h.cfg.HostID) {
		p, _ := v.Placement(shard)
		ps = append(ps, p)
	}
	return ps
}

// reconcileShard makes this host's replica of a shard be what the catalog says, and if it leads, the shard's membership and options.
func (h *RaftHost) reconcileShard(ctx context.Context, p catalog.Placement) error {
	r, ok := p.OnHost(h.cfg.HostID)
	if !ok {
		return nil
	}
	if p.Deleted || r.State == catalog.ReplicaRetired || r.State == catalog.ReplicaRemoved {
		return h.removeReplica(ctx, p, r)
	}
	if _, ok := h.SelfReplica(p.Shard); !ok {
		if err := h.admitReplica(ctx, p, r); err != nil {
			return err
		}
		if err := h.startReplica(p, r); err != nil {
			return err
		}
	}
	if err := errors.Join(h.claimLate(ctx, p, r), h.leave(ctx, p, r)); err != nil {
		return err
	}
	switch leader, _ := h.ownLeader(p.Shard); {
	case r.Birth == catalog.BirthWitness:
		return nil
	case leader != r.ID && h.leaders.get(p.Shard).replica == r.ID:
		return noLeader(p.Shard, nil) // the engine tells of an election before its replica knows of it
	case leader != r.ID:
		return nil
	}
	err := errors.Join(h.addMembers(ctx, p), h.advanceMove(ctx, p), h.applyOptions(ctx, p))
	if p.Shard == catalog.ShardID && h.Catalog().Version() > 0 {
		err = errors.Join(err, h.planMoves(ctx))
	}
	return err
}

// rests says whether reconcileShard would find nothing to do. It asks nobody. What it does not know of does not rest.
func (h *RaftHost) rests(p catalog.Placement) bool {
	v := h.Catalog()
	r, here := p.OnHost(h.cfg.HostID)
	_, runs := h.SelfReplica(p.Shard)
	_, moves := v.Move(p.Shard)
	switch {
	case p.Shard == catalog.ShardID:
		return false
	case here && r.State == catalog.ReplicaRemoved:
		return true
	case !here || !runs || moves || p.Deleted || r.State != catalog.ReplicaStarted:
		return false
	case r.Birth == catalog.BirthWitness:
		return true
	}
	if leader, _ := h.ownLeader(p.Shard); leader != r.ID {
		return h.leaders.get(p.Shard).replica != r.ID
	}
	for _, r := range p.Replicas {
		if r.Birth == catalog.BirthWitness && !r.Member && !r.State.Gone() {
			return false
		}
	}
	return h.hasOptions(v, p.Shard)
}

// admitReplica decides whether a replica that does not run here may be started, and records that it will be. The first start takes a
// claim, which the catalog grants once for ever; after that, its data must be here.
func (h *RaftHost) admitReplica(ctx context.Context, p catalog.Placement, r catalog.Replica) error {
	key := replicaKey{p.Shard, uint64(r.ID)}
	rec := h.journal.get(key)
	if err := h.resting(p.Shard); err != nil {
		return err
	}
	switch {
	case r.State.Gone():
		return errLost
	case rec.lost:
		return h.reportLost(ctx, key)
	case rec.removing:
		return errors.New("the data of this replica were removed, and the catalog does not say why")
	case rec.starts >= maxStarts:
		return errLeftOut
	case rec.begun && !h.nodeHost.HasNodeInfo(key.shard, key.replica):
		return h.reportLost(ctx, key)
	case rec.begun:
		return nil
	}
	return h.claim(ctx, key, rec)
}

// claim asks the catalog for the first start of a replica. The members of a catalog that is being formed have nobody to ask; they
// claim later.
func (h *RaftHost) claim(ctx context.Context, key replicaKey, rec replicaRecord) error {
	nonce := rec.nonce
	if nonce == 0 {
		nonce = rand.Uint64() | 1
		if err := h.journal.record(key, stepBorn, nonce); err != nil {
			return err
		}
	}
	if key.shard == catalog.ShardID && h.fleetName() == "" {
		return nil
	}
	return h.sendClaim(ctx, key, nonce)
}

func (h *RaftHost) sendClaim(ctx context.Context, key replicaKey, nonce uint64) error {
	r, err := h.ProposeCatalog(ctx, &catalog.ReplicaReport{
		Shard: key.shard, Replica: queue.ReplicaID(key.replica), Kind: catalog.ReportStarted, Nonce: nonce,
	})
	if err != nil {
		return err
	}
	if r.Code == code.MutationFenced {
		return h.reportLost(ctx, key)
	}
	return r.Err()
}

// claimLate claims the start of a catalog's member that started before there was a catalog.
func (h *RaftHost) claimLate(ctx context.Context, p catalog.Placement, r catalog.Replica) error {
	key := replicaKey{p.Shard, uint64(r.ID)}
	if r.State != catalog.ReplicaPlanned || h.fleetName() == "" || h.Catalog().Version() == 0 {
		return nil
	}
	rec := h.journal.get(key)
	return h.sendClaim(ctx, key, rec.nonce)
}

// reportLost records and reports that a replica cannot be started any more. It returns errLost once that is done.
func (h *RaftHost) reportLost(ctx context.Context, key replicaKey) error {
	if !h.journal.get(key).lost {
		if err := h.journal.record(key, stepLost, 0); err != nil {
			return err
		}
	}
	r, err := h.ProposeCatalog(ctx, &catalog.ReplicaReport{Shard: key.shard, Replica: queue.ReplicaID(key.replica), Kind: catalog.ReportLost})
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		return fmt.Errorf("%w, and the catalog does not know yet: %w", errLost, err)
	}
	return errLost
}

// removeReplica removes what this host has of a replica of a deleted shard, or of one that is out of its shard. It takes a linearizable read, so that a copy of a
// catalog that is not the fleet's removes nothing, and a record on disk.
func (h *RaftHost) removeReplica(ctx context.Context, p catalog.Placement, r catalog.Replica) error {
	key := replicaKey{p.Shard, uint64(r.ID)}
	if r.State == catalog.ReplicaRemoved {
		return nil
	}
	if rec := h.journal.get(key); !rec.removed {
		if err := h.removeHere(ctx, key, r.Birth, rec); err != nil {
			return err
		}
	}
	if h.beforeRemovedReport != nil {
		if err := h.beforeRemovedReport(p.Shard, r.ID); err != nil {
			return err
		}
	}
	result, err := h.ProposeCatalog(ctx, &catalog.ReplicaReport{Shard: p.Shard, Replica: r.ID, Kind: catalog.ReportRemoved})
	if err != nil {
		return err
	}
	return result.Err()
}

func (h *RaftHost) removeHere(ctx context.Context, key replicaKey, birth catalog.Birth, rec replicaRecord) error {
	v, err := h.ReadCatalog(ctx)
	if err != nil {
		return err
	}
	p, _ := v.Placement(key.shard)
	if r, _ := p.Replica(queue.ReplicaID(key.replica)); !p.Deleted && r.State != catalog.ReplicaRetired {
		return fmt.Errorf("the catalog says that shard %d is not deleted, and replica %d not out of it", key.shard, key.replica)
	}
	if !rec.removing {
		if err := h.journal.record(key, stepRemoving, 0); err != nil {
			return err
		}
	}
	h.stopReplica(key.shard)
	if rec.nonce != 0 || rec.begun {
		if err := h.removeData(ctx, key, birth); err != nil {
			return err
		}
	}
	h.forgetTrouble(key.shard)
	h.log.Info("data of a replica removed", event.Is("replica-data-removed"), zap.Uint64("shard", key.shard), zap.Uint64("replica", key.replica))
	return h.journal.record(key, stepRemoved, 0)
}

// addMembers adds the witnesses that a new shard which this host leads was placed with.
func (h *RaftHost) addMembers(ctx context.Context, p catalog.Placement) error {
	var errs []error
	m, _ := h.Catalog().Move(p.Shard)
	for _, r := range p.Replicas {
		if r.Birth == catalog.BirthWitness && !r.Member && !r.State.Gone() && r.ID != m.To {
			errs = append(errs, h.addWitness(ctx, p.Shard, r))
		}
	}
	return errors.Join(errs...)
}

func (h *RaftHost) addWitness(ctx context.Context, shard uint64, r catalog.Replica) error {
	attempt, cancel := context.WithTimeout(ctx, engineAttempt)
	defer cancel()
	m, err := h.Membership(attempt, shard)
	if err != nil {
		return err
	}
	if _, ok := m.Witnesses[r.ID]; !ok {
		if err := h.nodeHost.SyncRequestAddWitness(attempt, shard, uint64(r.ID), Target(r.HostID), m.ChangeID); err != nil {
			return fmt.Errorf("add witness %d at host %d: %w", r.ID, r.HostID, err)
		}
		h.log.Info("witness added", event.Is("replica-added"), zap.Uint64("shard", shard), zap.Uint64("replica", uint64(r.ID)), zap.Uint64("on", r.HostID))
	}
	if h.Catalog().Version() == 0 {
		return nil // the catalog is being formed: the next round reports it
	}
	result, err := h.ProposeCatalog(ctx, &catalog.ReplicaReport{Shard: shard, Replica: r.ID, Kind: catalog.ReportMember})
	if err != nil {
		return err
	}
	return result.Err()
}
