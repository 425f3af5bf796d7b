package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// A move (catalog.Move) replaces one replica of a shard by another one. Who does what:
//
//	the catalog's leader       begins moves, for replicas that are lost or on hosts that are drained, and gives up those
//	                           whose new replica will not come (planMoves)
//	the new replica's host     starts it, as it starts any planned replica: under a claim, in the role of its birth
//	the shard's leader         adds it, once it runs, without a vote, promotes it when it has caught up, and removes the old one; a
//	                           leader that is the old one hands over first (advanceMove)
//	the old replica's host     hands its homes over before the removal, and removes its data after it (leave, removeReplica)
//
// In a rebuild (catalog.Reseat) the same are done in another order: the old replica leaves, its host removes its data, and the new one comes. The
// leader removes it only while the others can do without (clearMember).
//
// Each of these looks at the catalog and at the shard's membership, does one thing, and reports it to the catalog. A crash in
// between has it done again: adding what is a member, and removing what is none, is left out, and reports may be repeated.

const (
	// moveLag is how many entries a new replica may have less than the leader when it is given a vote.
	moveLag = 64
	// engineAttempt bounds one request to the engine: around a change of leaders it may never be answered.
	engineAttempt = 2 * time.Second
	// leaveTimeout is how long a shard's leader waits for the old replica's homes to be handed over. After it they are replaced as those of
	// a dead host are.
	leaveTimeout = 30 * time.Second
	// abandonAfter is for how many silences a new replica's host may be silent before the move is given up.
	abandonAfter = 30
	// upgradeWait is for how many silences a host may be silent before it is not asked any more whether it knows a command: it may be down
	// for good, and what it votes on may have to be replaced.
	upgradeWait = 10
)

// errMoveWaits says that a move waits for something that comes by itself; it is looked at again soon.
var errMoveWaits = errors.New("a replica is being replaced")

func moveWaits(m catalog.Move, format string, args ...any) error {
	return fmt.Errorf("%w: the move from replica %d to %d waits: %s", errMoveWaits, m.From, m.To, fmt.Sprintf(format, args...))
}

// advanceMove takes the move of a shard that this host leads one step forward, if there is one.
func (h *RaftHost) advanceMove(ctx context.Context, p catalog.Placement) error {
	m, ok := h.Catalog().Move(p.Shard)
	if !ok {
		return nil
	}
	attempt, cancel := context.WithTimeout(ctx, engineAttempt)
	members, err := h.Membership(attempt, p.Shard)
	cancel()
	if err != nil {
		return err
	}
	to, _ := p.Replica(m.To)
	from, _ := p.Replica(m.From)
	switch {
	case m.Undo:
		return h.removeMember(ctx, m, members, to)
	case m.Step == catalog.MoveAdd:
		return h.addMember(ctx, m, members, to)
	case m.Step == catalog.MoveCatchUp:
		return h.promote(ctx, m, members, to)
	case m.Step == catalog.MoveLeave, m.Step == catalog.MoveYield:
		return h.awaitLeave(ctx, m, from)
	case m.Step == catalog.MoveRemove:
		return h.removeMember(ctx, m, members, from)
	case m.Step == catalog.MoveClear:
		return h.clearMember(ctx, m, members, from)
	case m.Step == catalog.MoveWipe:
		return moveWaits(m, "host %d removes what replica %d has", from.HostID, from.ID)
	}
	return nil
}

// clearMember removes a replica that leaves before the one that comes in its place. It asks more than the catalog does, which cannot know
// who runs: those that stay must have a quorum now, and this host, which leads them, has all that was committed.
func (h *RaftHost) clearMember(ctx context.Context, m catalog.Move, members Membership, gone catalog.Replica) error {
	if members.has(gone.ID) && gone.HostID != h.cfg.HostID {
		voters, run := 0, 0
		for _, role := range []map[queue.ReplicaID]uint64{members.Full, members.Witnesses} {
			for id, hostID := range role {
				if id == gone.ID {
					continue
				}
				voters++
				if h.runs(m.Shard, id, hostID) {
					run++
				}
			}
		}
		if need := max(voters/2+1, 2); run < need {
			return moveWaits(m, "%d of the %d other voters run, and it takes %d to go on without replica %d", run, voters, need, gone.ID)
		}
	}
	return h.removeMember(ctx, m, members, gone)
}

// runs says whether a host that is alive runs a replica.
func (h *RaftHost) runs(shard uint64, id queue.ReplicaID, hostID uint64) bool {
	if hostID == h.cfg.HostID {
		own, ok := h.SelfReplica(shard)
		return ok && own == id
	}
	report, ok := h.peers.Reported(hostID, shard)
	alive, _ := h.Alive(hostID)
	return ok && alive && report.Replica == uint64(id)
}

// change asks the engine for one change of a membership. One whose outcome is unknown is looked for in the membership, soon.
func change(ctx context.Context, m catalog.Move, what string, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, engineAttempt)
	defer cancel()
	if err := ask(ctx); err != nil {
		return moveWaits(m, "it is not %s yet: %v", what, err)
	}
	return nil
}

// has says whether a replica is a member, voting or not.
func (m Membership) has(id queue.ReplicaID) bool {
	for _, role := range []map[queue.ReplicaID]uint64{m.Full, m.NonVoting, m.Witnesses} {
		if _, ok := role[id]; ok {
			return true
		}
	}
	return false
}

// addMember adds a replica that runs: with a member dead, the shard may need the new one's vote from the moment that it is added, and the catalog
// could not even note that its start is claimed.
func (h *RaftHost) addMember(ctx context.Context, m catalog.Move, members Membership, to catalog.Replica) error {
	if !members.has(to.ID) {
		if _, err := h.reported(m, to); err != nil {
			return err
		}
		add := h.nodeHost.SyncRequestAddNonVoting
		if to.Birth == catalog.BirthWitness {
			add = h.nodeHost.SyncRequestAddWitness
		}
		err := change(ctx, m, "added", func(ctx context.Context) error {
			return add(ctx, m.Shard, uint64(to.ID), Target(to.HostID), members.ChangeID)
		})
		if err != nil {
			return err
		}
		h.log.Info("replica added", event.Is("replica-added"), zap.Uint64("shard", m.Shard), zap.Uint64("replica", uint64(to.ID)), zap.Stringer("birth", to.Birth), zap.Uint64("on", to.HostID))
	}
	return h.reportMove(ctx, m, catalog.MoveAdded)
}

func (h *RaftHost) promote(ctx context.Context, m catalog.Move, members Membership, to catalog.Replica) error {
	if _, votes := members.Full[to.ID]; !votes {
		if err := h.caughtUp(m, to); err != nil {
			return err
		}
		err := change(ctx, m, "promoted", func(ctx context.Context) error {
			return h.nodeHost.SyncRequestAddReplica(ctx, m.Shard, uint64(to.ID), Target(to.HostID), members.ChangeID)
		})
		if err != nil {
			return err
		}
		h.log.Info("replica promoted", event.Is("replica-promoted"), zap.Uint64("shard", m.Shard), zap.Uint64("replica", uint64(to.ID)), zap.Uint64("on", to.HostID))
	}
	return h.reportMove(ctx, m, catalog.MovePromoted)
}

// reported returns what a new replica's host tells of it, or an error while that does not run it.
func (h *RaftHost) reported(m catalog.Move, to catalog.Replica) (peer.ShardReport, error) {
	report, ok := h.peers.Reported(to.HostID, m.Shard)
	if alive, _ := h.Alive(to.HostID); !alive || !ok || report.Replica != uint64(to.ID) {
		return report, moveWaits(m, "host %d does not run replica %d yet", to.HostID, to.ID)
	}
	return report, nil
}

// caughtUp returns nil once a new replica has reported nearly all that this host, which leads, has.
func (h *RaftHost) caughtUp(m catalog.Move, to catalog.Replica) error {
	report, err := h.reported(m, to)
	if err != nil {
		return err
	}
	run, err := h.running(m.Shard)
	if err != nil {
		return err
	}
	run.lastMu.Lock()
	last, term := run.lastIndex, run.lastTerm
	run.lastMu.Unlock()
	if report.LastTerm != term || report.LastIndex+moveLag < last || report.Applied+moveLag < run.applied.Load() {
		return moveWaits(m, "host %d has entry %d, applied %d, of %d", to.HostID, report.LastIndex, report.Applied, last)
	}
	return nil
}

// awaitLeave goes on when the old replica's host cannot hand homes over: the catalog hears from that host itself when it has.
func (h *RaftHost) awaitLeave(ctx context.Context, m catalog.Move, from catalog.Replica) error {
	since, _ := h.leaving.LoadOrStore(replicaKey{m.Shard, uint64(m.From)}, time.Now())
	_, runs := h.peers.Reported(from.HostID, m.Shard)
	alive, _ := h.Alive(from.HostID)
	self := from.HostID == h.cfg.HostID
	if time.Since(since.(time.Time)) < leaveTimeout && from.State != catalog.ReplicaLost && (self || alive && runs) {
		return moveWaits(m, "host %d hands homes over", from.HostID)
	}
	h.leaving.Delete(replicaKey{m.Shard, uint64(m.From)})
	return h.reportMove(ctx, m, catalog.MoveLeft)
}

// leave hands the homes of this host's replica over, when it is about to leave its shard.
func (h *RaftHost) leave(ctx context.Context, p catalog.Placement, r catalog.Replica) error {
	m, ok := h.Catalog().Move(p.Shard)
	if !ok || m.Undo || m.From != r.ID || m.Step != catalog.MoveLeave && m.Step != catalog.MoveYield {
		return nil
	}
	if h.cfg.OnLeave != nil && r.Birth != catalog.BirthWitness && p.Shard != catalog.ShardID {
		if err := h.cfg.OnLeave(ctx, p.Shard); err != nil {
			return moveWaits(m, "%v", err)
		}
	}
	return h.reportMove(ctx, m, catalog.MoveLeft)
}

// removeMember removes the replica that a move, or its undoing, takes out of a shard that this host leads. If that is this host's own it
// hands over instead, and the next leader goes on.
func (h *RaftHost) removeMember(ctx context.Context, m catalog.Move, members Membership, gone catalog.Replica) error {
	if members.has(gone.ID) {
		if gone.HostID == h.cfg.HostID {
			return h.stepDown(ctx, m)
		}
		err := change(ctx, m, "removed", func(ctx context.Context) error {
			return h.nodeHost.SyncRequestDeleteReplica(ctx, m.Shard, uint64(gone.ID), members.ChangeID)
		})
		if err != nil {
			return err
		}
		h.log.Info("replica removed", event.Is("replica-removed"), zap.Uint64("shard", m.Shard), zap.Uint64("replica", uint64(gone.ID)), zap.Uint64("from", gone.HostID))
	}
	h.copies.drop(m.Shard, uint64(gone.ID))
	done := catalog.MoveDone
	if m.Step == catalog.MoveClear {
		done = catalog.MoveCleared
	}
	return h.reportMove(ctx, m, done)
}

// stepDown hands the leadership of a shard to another voter, as this host's replica leaves it.
func (h *RaftHost) stepDown(ctx context.Context, m catalog.Move) error {
	run, err := h.running(m.Shard)
	if err != nil {
		return err
	}
	to := h.successor(run)
	if to == 0 {
		return moveWaits(m, "this host leads and nobody can take over")
	}
	if err := h.handOver(ctx, run, to, handOvers); err != nil {
		return moveWaits(m, "replica %d did not take over: %v", to, err)
	}
	h.log.Info("leadership handed over by a replica that leaves", zap.Uint64("shard", m.Shard), zap.Uint64("to", uint64(to)))
	return nil
}

// drop forgets what a replica that is out of its shard reported.
func (c *copies) drop(shard, replica uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.shards[shard]; ok {
		delete(s.replicas, replica)
		s.signalLocked()
	}
}

// reportMove tells the catalog what was done. A test may stop here, as a crash would.
func (h *RaftHost) reportMove(ctx context.Context, m catalog.Move, e catalog.MoveEvent) error {
	if h.beforeMoveReport != nil {
		if err := h.beforeMoveReport(m, e); err != nil {
			return err
		}
	}
	r, err := h.ProposeCatalog(ctx, &catalog.MoveReport{Shard: m.Shard, To: m.To, Event: e})
	if err == nil {
		err = r.Err()
	}
	if err == nil {
		h.log.Info("move goes on", zap.Uint64("shard", m.Shard), zap.Uint64("from", uint64(m.From)), zap.Uint64("to", uint64(m.To)), zap.Uint8("done", uint8(e)))
	}
	return err
}

// planMoves is done by the host that leads the catalog: it gives up moves that cannot end, begins those that must be made, and lets lost
// hosts go that have nothing left. Every command is checked again where it is applied.
func (h *RaftHost) planMoves(ctx context.Context) error {
	v := h.Catalog()
	var errs []error
	propose := func(c catalog.Command) {
		r, err := h.ProposeCatalog(ctx, c)
		if err == nil {
			err = r.Err()
		}
		// A refusal means that the catalog has changed since: the next round looks at it.
		var refused *code.Error
		if errors.As(err, &refused) && refused.Effect == code.EffectNone && !passes(err) {
			h.log.Debug("the catalog did not take a plan", zap.Error(err))
			return
		}
		errs = append(errs, err)
	}
	for _, m := range v.Moves() {
		if why := h.hopeless(v, m); why != "" {
			h.log.Info("move given up", event.Is("move-given-up"), zap.Uint64("shard", m.Shard), zap.Uint64("to", uint64(m.To)), zap.String("because", why))
			propose(&catalog.MoveReport{Shard: m.Shard, To: m.To, Event: catalog.MoveAborted})
		}
	}
	for _, host := range v.Hosts() {
		if v.HostState(host.ID) == catalog.HostLost && v.Left(host.ID) == 0 {
			propose(&catalog.RemoveHost{HostID: host.ID})
		}
	}
	free := catalog.MaxMoves - len(v.Moves())
	for _, planned := range h.Planned() {
		c := planned.Command()
		if free <= 0 || !planned.Possible() {
			continue
		}
		if _, ok := c.(*catalog.Reseat); ok && h.notYet(v) != nil {
			continue
		}
		free--
		propose(c)
	}
	return errors.Join(errs...)
}

// Planned are the moves that should be made and are not under way, the most urgent first: of the catalog, of replicas that are damaged, and
// of those that are lost or on hosts that leave.
func (h *RaftHost) Planned() []catalog.Planned {
	v := h.Catalog()
	var out []catalog.Planned
	alive := func(hostID uint64) bool { alive, _ := h.Alive(hostID); return alive }
	if step, ok := v.CatalogStep(alive, h.longSilent); ok {
		out = append(out, step)
	}
	planned := make(map[uint64]bool)
	for _, d := range h.damaged(v) {
		if p, ok := v.PlanRebuild(d.shard, queue.ReplicaID(d.replica), "damaged", h.mayReceive); ok && !planned[d.shard] {
			planned[d.shard] = true
			out = append(out, p)
		}
	}
	for _, p := range v.Evacuation(h.mayReceive) {
		if !planned[p.Shard] {
			out = append(out, p)
		}
	}
	return out
}

// longSilent says whether a host that votes in the catalog has been silent for so long that another one takes its place.
func (h *RaftHost) longSilent(hostID uint64) bool {
	alive, since := h.Alive(hostID)
	return !alive && since > h.cfg.CatalogPatience && time.Since(h.begun) > h.cfg.CatalogPatience
}

// notYet says which host does not understand catalog.Reseat, nil if all do that are heard of. A host of an older version would stop its
// replica of the catalog at such a command.
func (h *RaftHost) notYet(v *catalog.View) error {
	for _, host := range v.Hosts() {
		alive, since := h.Alive(host.ID)
		if host.ID == h.cfg.HostID || h.peers.CommandLevel(host.ID) >= catalog.CommandLevel {
			continue
		}
		if alive || since < upgradeWait*h.cfg.Silence || time.Since(h.begun) < upgradeWait*h.cfg.Silence {
			return code.New(code.MutationFenced, "host %d has not said that its version knows this command: start it, or upgrade it, first", host.ID)
		}
	}
	return nil
}

// Rebuild begins to make a replica anew on its own host. The error is REPLICA_NEEDED if the others could not go on meanwhile.
func (h *RaftHost) Rebuild(ctx context.Context, shard, hostID uint64) error {
	v, err := h.ReadCatalog(ctx)
	if err != nil {
		return err
	}
	p, ok := v.Placement(shard)
	if !ok || p.Deleted {
		return code.New(code.UnknownPartition, "shard %d is not in the catalog", shard)
	}
	r, ok := p.OnHost(hostID)
	if m, moves := v.Move(shard); moves && p.Rebuilds(m) {
		if from, _ := p.Replica(m.From); from.HostID == hostID {
			return nil
		}
	}
	if !ok || r.State == catalog.ReplicaRetired || r.State == catalog.ReplicaRemoved {
		return code.New(code.NotReplica, "host %d has no replica of shard %d", hostID, shard)
	}
	if err := errors.Join(h.notYet(v), h.dispensable(p, r)); err != nil {
		return err
	}
	result, err := h.ProposeCatalog(ctx, &catalog.Reseat{Shard: shard, From: r.ID, ToHost: hostID})
	if err != nil {
		return err
	}
	return result.Err()
}

// dispensable refuses to begin what the shard's leader would wait with: the others must run, and one of them lead or be able to.
func (h *RaftHost) dispensable(p catalog.Placement, r catalog.Replica) error {
	voters, run, full := 0, 0, 0
	for _, o := range p.Seats() {
		if o.ID == r.ID || !o.Votes() && o.State != catalog.ReplicaLost {
			continue
		}
		voters++
		if h.runs(p.Shard, o.ID, o.HostID) {
			run++
			if o.Birth != catalog.BirthWitness {
				full++
			}
		}
	}
	switch {
	case full == 0:
		return code.New(code.ReplicaNeeded, "no other full replica of shard %d runs: the one on host %d may be the last with its messages", p.Shard, r.HostID)
	case run < max(voters/2+1, 2):
		return code.New(code.ReplicaNeeded, "%d of the %d other voters of shard %d run, and it takes %d to go on without the replica on host %d", run, voters, p.Shard, max(voters/2+1, 2), r.HostID)
	}
	return nil
}

// mayReceive says whether a host can be given a replica now.
func (h *RaftHost) mayReceive(hostID uint64) bool {
	alive, _ := h.Alive(hostID)
	return alive && !h.peers.LowSpace(hostID)
}

// hopeless says why a move's new replica will not come, "" if it may.
func (h *RaftHost) hopeless(v *catalog.View, m catalog.Move) string {
	p, _ := v.Placement(m.Shard)
	to, _ := p.Replica(m.To)
	alive, since := h.Alive(to.HostID)
	switch {
	case m.Undo || m.Step >= catalog.MoveRemove:
		return ""
	case to.State == catalog.ReplicaLost:
		return "its new replica is lost"
	case p.Rebuilds(m):
		return "" // the old one is gone already
	case v.HostState(to.HostID) != catalog.HostActive:
		return fmt.Sprintf("host %d is %v", to.HostID, v.HostState(to.HostID))
	case !alive && m.Step < catalog.MoveLeave && since > abandonAfter*h.cfg.Silence && time.Since(h.begun) > abandonAfter*h.cfg.Silence:
		return fmt.Sprintf("host %d is silent", to.HostID)
	}
	return ""
}
