package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/store"
)

// A replica whose state on this host's disk is damaged is this shard's trouble alone: it is stopped, unless only a reader has met the damage, and
// told of in the reports to the other hosts. The catalog's leader has it rebuilt, if the others can go on meanwhile. Nothing of it is
// kept: after a restart the replica is started as any other, and meets the damage again or not. Its data are removed when it is out of
// its shard, and not before.

// isDamage says whether an error means that what the disk gives is not what was written: a checksum of the store or of a record does not
// match. Other corruption may be a bug that every replica has, and is left to an operator.
func isDamage(err error) bool {
	return store.IsDamaged(err) || errors.Is(err, queue.ErrDamaged)
}

// noteDamage notes that a replica of this host is damaged.
func (h *RaftHost) noteDamage(shard uint64, id queue.ReplicaID, err error) {
	h.troubleMu.Lock()
	defer h.troubleMu.Unlock()
	if h.damages == nil {
		h.damages = make(map[uint64]damage)
	}
	if old, ok := h.damages[shard]; ok && old.replica == id {
		return
	}
	h.damages[shard] = damage{replica: id, err: err}
	h.log.Error("a replica is damaged on this host's disk", event.Is("replica-damaged"), zap.Uint64("shard", shard), zap.Uint64("replica", uint64(id)), zap.Error(err))
}

// ReadFailed is told of an error of a read of this host's replica of a shard; nil is none. A replica that is damaged runs on, and leaves when another
// one can lead.
func (h *RaftHost) ReadFailed(shard uint64, err error) {
	if id, ok := h.SelfReplica(shard); ok && isDamage(err) {
		h.noteDamage(shard, id, err)
	}
}

// damage is what is known of a damaged replica.
type damage struct {
	replica queue.ReplicaID
	err     error
}

// forgetTrouble is called when a replica's data are removed: the next one of the shard begins anew.
func (h *RaftHost) forgetTrouble(shard uint64) {
	h.troubleMu.Lock()
	defer h.troubleMu.Unlock()
	delete(h.damages, shard)
	delete(h.troubles, shard)
}

// Damaged returns this host's replicas whose state is damaged, by shard.
func (h *RaftHost) Damaged() []peer.DamagedReplica {
	h.troubleMu.Lock()
	defer h.troubleMu.Unlock()
	var out []peer.DamagedReplica
	for shard, d := range h.damages {
		out = append(out, peer.DamagedReplica{Shard: shard, Replica: uint64(d.replica)})
	}
	slices.SortFunc(out, func(a, b peer.DamagedReplica) int { return int(a.Shard) - int(b.Shard) })
	return out
}

// damaged returns the replicas of all hosts that are told to be damaged.
func (h *RaftHost) damaged(v *catalog.View) []replicaKey {
	var out []replicaKey
	for _, host := range v.Hosts() {
		told := h.peers.Damaged(host.ID)
		if host.ID == h.cfg.HostID {
			told = h.Damaged()
		}
		for _, d := range told {
			out = append(out, replicaKey{d.Shard, d.Replica})
		}
	}
	return out
}

// openStore opens the store of a full host. One that is not there, or is damaged as a whole, is made anew, and every replica that had its
// state in it is lost; the damaged one is kept beside it. What is lost is on disk before the new store is.
func (h *RaftHost) openStore(dir string, open func() (*store.Store, error)) (*store.Store, error) {
	found, err := exists(dir)
	if err != nil {
		return nil, fmt.Errorf("look for the store: %w", err)
	}
	if !found {
		if err := h.loseStates(); err != nil {
			return nil, err
		}
		return open()
	}
	s, err := open()
	switch {
	case err == nil && !s.Fresh():
		return s, nil
	case err == nil:
		return s, errors.Join(h.loseStates())
	case !store.IsDamaged(err) && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	aside := fmt.Sprintf("%s.damaged-%d", dir, time.Now().UnixNano())
	h.log.Error("the store is damaged as a whole: every replica in it is lost, and is made again from the others; the directory is kept",
		event.Is("store-damaged"), zap.String("as", aside), zap.Error(err))
	if err := h.loseStates(); err != nil {
		return nil, err
	}
	if err := os.Rename(dir, aside); err != nil {
		return nil, fmt.Errorf("put the damaged store aside: %w", err)
	}
	return open()
}

// loseStates records that every replica which had its state in the store is lost. The catalog's is not in it.
func (h *RaftHost) loseStates() error {
	for _, key := range h.journal.begun() {
		if key.shard == catalog.ShardID {
			continue
		}
		if err := h.journal.record(key, stepLost, 0); err != nil {
			return err
		}
	}
	return nil
}
