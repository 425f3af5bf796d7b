package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/witness"
)

// maxStarts is how often a replica's start may end the process before the replica is left out.
const maxStarts = 2

// errBusyReplica says that the engine still works on what is to be started or removed; it is tried again.
var errBusyReplica = errors.New("the engine has not let go of the replica yet")

// startReplica starts this host's replica r of p in the role of its birth. The caller has recorded that it may.
func (h *RaftHost) startReplica(p catalog.Placement, r catalog.Replica) error {
	key := replicaKey{p.Shard, uint64(r.ID)}
	rec := h.journal.get(key)
	defer h.beginStart(rec.starts > 0)()
	mu := h.shardLock(p.Shard)
	mu.Lock()
	defer mu.Unlock()
	if err := h.journal.record(key, stepStarting, 0); err != nil {
		return err
	}
	run := &running{
		shard:   p.Shard,
		id:      r.ID,
		witness: r.Birth == catalog.BirthWitness,
		session: h.nodeHost.GetNoOPSession(p.Shard),
	}
	run.hasWitness.Store(needsReports(p))
	if err := h.recall(run); err != nil {
		return errors.Join(err, h.journal.record(key, stepUp, 0))
	}
	h.replicas.Store(p.Shard, run)
	err := h.callEngine(p, r, run)
	if err != nil {
		h.replicas.Delete(p.Shard)
		return errors.Join(err, h.journal.record(key, stepUp, 0))
	}
	returned := stepStarted
	if rec.begun {
		returned = stepUp
	}
	if err := h.journal.record(key, returned, 0); err != nil {
		return err
	}
	h.log.Info("replica started", event.Is("replica-started"), zap.Uint64("shard", p.Shard), zap.Uint64("replica", uint64(r.ID)), zap.Stringer("birth", r.Birth))
	h.signalApplied()
	if r.Birth == catalog.BirthInitial && !rec.begun {
		h.leadNewborn(p, run)
	}
	return nil
}

// beginStart lets replicas start side by side, but for one whose start has ended the process before: it starts alone, so that
// no other is blamed if it does so again. The caller must call what it returns.
func (h *RaftHost) beginStart(alone bool) (end func()) {
	if alone {
		h.startMu.Lock()
		return h.startMu.Unlock
	}
	h.startMu.RLock()
	return h.startMu.RUnlock
}

// shardLock serializes the starts and stops of one shard.
func (h *RaftHost) shardLock(shard uint64) *sync.Mutex {
	return &h.shardMu[shard%uint64(len(h.shardMu))]
}

// callEngine starts the replica in the engine, with the state machine that it needs. The initial members are the same at every
// start, for ever.
func (h *RaftHost) callEngine(p catalog.Placement, r catalog.Replica, run *running) error {
	var members map[uint64]string
	join := r.Birth != catalog.BirthInitial
	if !join {
		members = make(map[uint64]string)
		for id, hostID := range p.Initial() {
			members[uint64(id)] = Target(hostID)
		}
	}
	cfg := witness.Config(h.replicaConfig(p.Shard, r.ID), birthRole(r.Birth))
	var err error
	switch {
	case run.witness:
		err = h.nodeHost.StartReplica(members, join, witness.NewStateMachine, cfg)
	case p.Shard == catalog.ShardID:
		err = h.nodeHost.StartReplica(members, join, h.catalog.Create, cfg)
	default:
		err = h.startFull(members, join, run, cfg)
	}
	if errors.Is(err, dragonboat.ErrShardAlreadyExist) {
		return errBusyReplica
	}
	if err != nil {
		return fmt.Errorf("start replica %d of shard %d: %w", r.ID, p.Shard, err)
	}
	return nil
}

func birthRole(b catalog.Birth) witness.Role {
	switch b {
	case catalog.BirthWitness:
		return witness.Witness
	case catalog.BirthNonVoting:
		return witness.NonVoting
	}
	return witness.Full
}

// replicaConfig is the same for every replica of a fleet, but for the log's size.
func (h *RaftHost) replicaConfig(shard uint64, replica queue.ReplicaID) config.Config {
	return config.Config{
		ShardID:             shard,
		ReplicaID:           uint64(replica),
		ElectionRTT:         h.cfg.ElectionTicks,
		HeartbeatRTT:        h.cfg.HeartbeatTicks,
		CheckQuorum:         true,
		PreVote:             true,
		OrderedConfigChange: true,
		WaitReady:           true,
		SnapshotEntries:     h.cfg.SnapshotEntries,
		CompactionOverhead:  h.cfg.SnapshotEntries / 4,
		MaxInMemLogSize:     maxInMemLogBytes,
	}
}

// stopReplica stops this host's replica of a shard, if it runs. It does not wait for the engine to let go of it.
func (h *RaftHost) stopReplica(shard uint64) {
	mu := h.shardLock(shard)
	mu.Lock()
	defer mu.Unlock()
	v, ok := h.replicas.LoadAndDelete(shard)
	if !ok {
		return
	}
	run := v.(*running)
	if err := h.nodeHost.StopReplica(shard, uint64(run.id)); err != nil && !errors.Is(err, dragonboat.ErrShardNotFound) {
		h.log.Warn("replica not stopped", zap.Uint64("shard", shard), zap.Error(err))
	}
	h.leaders.forget(shard)
	h.copies.forget(shard)
	h.log.Info("replica stopped", event.Is("replica-stopped"), zap.Uint64("shard", shard), zap.Uint64("replica", uint64(run.id)))
	if run.state.stop() && h.cfg.OnReplicaStopped != nil {
		h.cfg.OnReplicaStopped(shard)
	}
}

// stopAll stops every replica, when the host closes.
func (h *RaftHost) stopAll() {
	h.replicas.Range(func(shard, _ any) bool {
		h.stopReplica(shard.(uint64))
		return true
	})
}

// removeTimeout bounds the wait for the engine to let go of a stopped replica.
const removeTimeout = 10 * time.Second

// removeData removes what this host has of a stopped replica, from the log and from the store.
func (h *RaftHost) removeData(ctx context.Context, key replicaKey, birth catalog.Birth) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	if err := h.nodeHost.SyncRemoveData(ctx, key.shard, key.replica); err != nil {
		return fmt.Errorf("%w: %w", errBusyReplica, err)
	}
	if birth == catalog.BirthWitness || key.shard == catalog.ShardID {
		return nil
	}
	return h.states.remove(key.shard)
}

// trouble is why a replica had to be stopped.
type trouble struct {
	err      error
	evidence string    // a file, if one was written
	forGood  bool      // until the host starts again
	until    time.Time // else it is started again then
	handled  bool
	damaged  bool // what is on this host's disk is at fault
}

// restartPause is how long a replica rests that was stopped because its state did not open or an install failed.
const restartPause = 5 * time.Second

// stuck is called in an engine's goroutine that waits until the replica is stopped.
func (h *RaftHost) stuck(shard uint64, t *trouble) {
	t.until = time.Now().Add(restartPause)
	if id, ok := h.SelfReplica(shard); ok && t.damaged {
		h.noteDamage(shard, id, t.err)
	}
	h.troubleMu.Lock()
	h.troubles[shard] = t
	h.troubleMu.Unlock()
	select {
	case h.troubleWake <- struct{}{}:
	default:
	}
}

// resting returns why a replica must not be started now, nil if it may.
func (h *RaftHost) resting(shard uint64) error {
	h.troubleMu.Lock()
	defer h.troubleMu.Unlock()
	if t := h.troubles[shard]; t != nil && (t.forGood || time.Now().Before(t.until)) {
		return fmt.Errorf("the replica was stopped: %w", t.err)
	}
	return nil
}

// stopStuck stops the replicas that wait for it.
func (h *RaftHost) stopStuck(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.troubleWake:
		}
		for shard, t := range h.newTroubles() {
			h.stopOne(shard, t)
		}
	}
}

func (h *RaftHost) newTroubles() map[uint64]*trouble {
	h.troubleMu.Lock()
	defer h.troubleMu.Unlock()
	found := make(map[uint64]*trouble)
	for shard, t := range h.troubles {
		if !t.handled {
			t.handled = true
			found[shard] = t
		}
	}
	return found
}

// stopOne stops a stuck replica. The engine is told first, without the lock of starts: a start may be what is stuck.
func (h *RaftHost) stopOne(shard uint64, t *trouble) {
	fields := []zap.Field{event.Is("replica-stuck"), zap.Uint64("shard", shard), zap.Error(t.err), zap.String("evidence", t.evidence)}
	switch {
	case t.damaged:
		h.log.Error("this replica's state is damaged: it is stopped until it is rebuilt, or this host starts again", fields...)
	case t.forGood:
		h.log.Error("this replica cannot apply a committed entry: it is stopped until this host starts again, with a version that can", fields...)
	default:
		h.log.Error("this replica is stopped, and started again later", fields...)
	}
	if id, ok := h.SelfReplica(shard); ok {
		if err := h.nodeHost.StopReplica(shard, uint64(id)); err != nil {
			h.log.Debug("replica not stopped", zap.Uint64("shard", shard), zap.Error(err))
		}
	}
	if shard == catalog.ShardID {
		h.catalog.Release()
	}
	h.stopReplica(shard)
	if t.forGood && h.cfg.OnPoisoned != nil {
		h.cfg.OnPoisoned(shard, t.err)
	}
}

// lastEntry is called by the log after each durable save.
func (h *RaftHost) lastEntry(shard, replica, index, term uint64) {
	if v, ok := h.replicas.Load(shard); ok {
		run := v.(*running)
		run.saved(index, term)
		h.tellCopy(run)
	}
	if h.cfg.OnLastEntry != nil {
		h.cfg.OnLastEntry(shard, queue.ReplicaID(replica), queue.Index(index), term)
	}
}

// recall takes up what a replica that starts again has on disk: in a shard in which nothing is written, no save will tell.
func (h *RaftHost) recall(run *running) error {
	l := h.raftLog.Load()
	if l == nil || run.witness { // not our own log, or nothing that counts as a copy
		return nil
	}
	index, term, err := l.LastEntry(run.shard, uint64(run.id))
	if err != nil {
		return fmt.Errorf("read the last entry of shard %d: %w", run.shard, err)
	}
	run.saved(index, term)
	return nil
}

func (r *running) saved(index, term uint64) {
	r.lastMu.Lock()
	r.lastIndex, r.lastTerm = index, term
	r.lastMu.Unlock()
}

// reports returns what this host tells the others of its replicas.
func (h *RaftHost) reports() []peer.ShardReport {
	var out []peer.ShardReport
	h.replicas.Range(func(shard, v any) bool {
		run := v.(*running)
		leader, term := h.ownLeader(run.shard)
		report := peer.ShardReport{Shard: run.shard, Replica: uint64(run.id), Leader: uint64(leader), Term: term}
		if reader, ok := run.state.get(); ok {
			m := reader.Meta()
			report.Applied, report.StoredBytes = uint64(m.Applied), m.Counters.Bytes
		}
		run.lastMu.Lock()
		report.LastIndex, report.LastTerm = run.lastIndex, run.lastTerm
		run.lastMu.Unlock()
		out = append(out, report)
		return true
	})
	return out
}
