package host

import (
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/wal"
)

// onSpace is called by the log when the free space crosses the line.
func (h *RaftHost) onSpace(r wal.SpaceReport) {
	if was := h.lowSpace.Swap(r.Low); was != r.Low {
		text := "the disk has room again"
		if r.Low {
			text = "the disk is nearly full: publishes into the queues of this host are refused"
		}
		h.log.Warn(text, event.Is("disk"), zap.Bool("low", r.Low), zap.Uint64("free_bytes", r.FreeBytes))
	}
}

// LowSpace names a host of a shard's full replicas whose disk is nearly full; 0 if there is none that is heard of. What
// adds to a shard must wait then, what takes away from it may go on (G9). A witness keeps no bodies and does not count.
func (h *RaftHost) LowSpace(shard uint64) (hostID uint64) {
	p, ok := h.placement(shard)
	if !ok {
		return 0
	}
	for _, r := range p.Replicas {
		if r.Birth == catalog.BirthWitness || r.State >= catalog.ReplicaLost {
			continue
		}
		if r.HostID == h.cfg.HostID && h.lowSpace.Load() || r.HostID != h.cfg.HostID && h.peers.LowSpace(r.HostID) {
			return r.HostID
		}
	}
	return 0
}

// SpaceIsLow says whether this host's disk is nearly full.
func (h *RaftHost) SpaceIsLow() bool { return h.lowSpace.Load() }
