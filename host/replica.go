package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
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
	h.replicaMu.Lock()
	defer h.replicaMu.Unlock()
	key := replicaKey{p.Shard, uint64(r.ID)}
	begun := h.journal.get(key).begun
	if err := h.journal.record(key, stepStarting, 0); err != nil {
		return err
	}
	run := &running{
		shard:   p.Shard,
		id:      r.ID,
		witness: r.Birth == catalog.BirthWitness,
		session: h.nodeHost.GetNoOPSession(p.Shard),
	}
	h.replicas.Store(p.Shard, run)
	err := h.callEngine(p, r, run)
	if err != nil {
		h.replicas.Delete(p.Shard)
		return errors.Join(err, h.journal.record(key, stepUp, 0))
	}
	returned := stepStarted
	if begun {
		returned = stepUp
	}
	if err := h.journal.record(key, returned, 0); err != nil {
		return err
	}
	h.log.Info("replica started", zap.Uint64("shard", p.Shard), zap.Uint64("replica", uint64(r.ID)), zap.Stringer("birth", r.Birth))
	h.signalApplied()
	return nil
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
		SnapshotEntries:     snapshotEntries,
		CompactionOverhead:  compactionOverhead,
		MaxInMemLogSize:     maxInMemLogBytes,
	}
}

// startFull starts a full replica of a queue's shard.
func (h *RaftHost) startFull(members map[uint64]string, join bool, run *running, cfg config.Config) error {
	m, err := h.states.machine(run)
	if err != nil {
		return err
	}
	if err := h.nodeHost.StartOnDiskReplica(members, join, m.create, cfg); err != nil {
		return err
	}
	if run.reader = m.reader(); run.reader != nil && h.cfg.OnReplicaStarted != nil {
		h.cfg.OnReplicaStarted(run.shard, run.id, run.reader)
	}
	return nil
}

// stopReplica stops this host's replica of a shard, if it runs. It does not wait for the engine to let go of it.
func (h *RaftHost) stopReplica(shard uint64) {
	h.replicaMu.Lock()
	defer h.replicaMu.Unlock()
	v, ok := h.replicas.LoadAndDelete(shard)
	if !ok {
		return
	}
	run := v.(*running)
	if err := h.nodeHost.StopReplica(shard, uint64(run.id)); err != nil && !errors.Is(err, dragonboat.ErrShardNotFound) {
		h.log.Warn("replica not stopped", zap.Uint64("shard", shard), zap.Error(err))
	}
	h.leaders.forget(shard)
	h.log.Info("replica stopped", zap.Uint64("shard", shard), zap.Uint64("replica", uint64(run.id)))
	if run.reader != nil && h.cfg.OnReplicaStopped != nil {
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

// poisoned takes out a replica that cannot apply a committed entry. It is called in the apply goroutine, which waits until the
// replica is stopped.
func (h *RaftHost) poisoned(shard uint64, err error) {
	h.poisonMu.Lock()
	h.poison[shard] = err
	h.poisonMu.Unlock()
	select {
	case h.poisonWake <- struct{}{}:
	default:
	}
}

// isPoisoned says whether a replica was taken out since this host's start.
func (h *RaftHost) isPoisoned(shard uint64) bool {
	h.poisonMu.Lock()
	defer h.poisonMu.Unlock()
	return h.poison[shard] != nil
}

// stopPoisoned stops the replicas that report themselves poisoned.
func (h *RaftHost) stopPoisoned(ctx context.Context) {
	handled := make(map[uint64]bool)
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.poisonWake:
		}
		h.poisonMu.Lock()
		found := make(map[uint64]error)
		for shard, err := range h.poison {
			if !handled[shard] {
				found[shard], handled[shard] = err, true
			}
		}
		h.poisonMu.Unlock()
		for shard, err := range found {
			h.log.Error("this replica cannot apply a committed entry: it is stopped until this host starts again, with a version that can",
				zap.Uint64("shard", shard), zap.Error(err))
			h.stopReplica(shard)
			if shard == catalog.ShardID {
				h.catalog.Release()
			}
			if h.cfg.OnPoisoned != nil {
				h.cfg.OnPoisoned(shard, err)
			}
		}
	}
}

// appliedUpdate is called by the state machine of a full replica after each Update.
func (h *RaftHost) appliedUpdate(run *running, reader queue.Reader, a queue.Applied) {
	run.clock.observe(reader.Meta().Clock, h.clock.Boot())
	if h.cfg.OnApplied != nil {
		h.cfg.OnApplied(run.shard, a)
	}
}

// lastEntry is called by the log after each durable save.
func (h *RaftHost) lastEntry(shard, replica, index, term uint64) {
	if v, ok := h.replicas.Load(shard); ok {
		v.(*running).saved(index, term)
	}
	if h.cfg.OnLastEntry != nil {
		h.cfg.OnLastEntry(shard, queue.ReplicaID(replica), queue.Index(index), term)
	}
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
		if run.reader != nil {
			report.Applied = uint64(run.reader.Meta().Applied)
		}
		run.lastMu.Lock()
		report.LastIndex, report.LastTerm = run.lastIndex, run.lastTerm
		run.lastMu.Unlock()
		out = append(out, report)
		return true
	})
	return out
}
