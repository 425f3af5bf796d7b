package host

import (
	"sync"
	"sync/atomic"

	"github.com/lni/dragonboat/v4/raftio"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
)

// broadcast tells any number of waiters that something has changed.
type broadcast struct{ c atomic.Pointer[chan struct{}] }

func newBroadcast() *broadcast {
	b := &broadcast{}
	c := make(chan struct{})
	b.c.Store(&c)
	return b
}

// wait returns a channel that is closed at the next signal. Take it before looking at what is waited for.
func (b *broadcast) wait() <-chan struct{} { return *b.c.Load() }

func (b *broadcast) signal() {
	c := make(chan struct{})
	close(*b.c.Swap(&c))
}

// leadership is who leads a shard, as a replica of this host last heard.
type leadership struct {
	replica queue.ReplicaID
	term    uint64
}

// leaderBoard keeps what the engine told about leaders.
type leaderBoard struct {
	mu      sync.Mutex
	shards  map[uint64]leadership
	changed *broadcast
}

func newLeaderBoard() *leaderBoard {
	return &leaderBoard{shards: make(map[uint64]leadership), changed: newBroadcast()}
}

func (b *leaderBoard) set(shard uint64, l leadership) {
	b.mu.Lock()
	b.shards[shard] = l
	b.mu.Unlock()
	b.changed.signal()
}

// get returns who leads a shard; replica 0: that is not known.
func (b *leaderBoard) get(shard uint64) leadership {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shards[shard]
}

func (b *leaderBoard) forget(shard uint64) {
	b.mu.Lock()
	delete(b.shards, shard)
	b.mu.Unlock()
	b.changed.signal()
}

// raftEvents is called by one goroutine of the engine.
type raftEvents struct{ h *RaftHost }

func (e *raftEvents) LeaderUpdated(info raftio.LeaderInfo) {
	h := e.h
	leader := queue.ReplicaID(info.LeaderID)
	h.leaders.set(info.ShardID, leadership{leader, info.Term})
	if info.LeaderID == info.ReplicaID {
		h.poke() // there may be members to add
	}
	if v, ok := h.replicas.Load(info.ShardID); ok {
		h.tellCopyTo(v.(*running), leader)
	}
	if h.cfg.OnLeader != nil {
		h.cfg.OnLeader(info.ShardID, leader, info.Term)
	}
}

// systemEvents is called by one goroutine of the engine, which waits for it: nothing here may block.
type systemEvents struct{ h *RaftHost }

func (e *systemEvents) MembershipChanged(info raftio.NodeInfo) { e.h.poke() }
func (e *systemEvents) NodeUnloaded(info raftio.NodeInfo)      { e.h.poke() }

func (e *systemEvents) ConnectionEstablished(info raftio.ConnectionInfo) {
	e.h.log.Debug("connected", zap.String("address", info.Address), zap.Bool("snapshot", info.SnapshotConnection))
}

func (e *systemEvents) ConnectionFailed(info raftio.ConnectionInfo) {
	e.h.log.Debug("connection failed", zap.String("address", info.Address), zap.Bool("snapshot", info.SnapshotConnection))
}

func (e *systemEvents) SnapshotReceived(info raftio.SnapshotInfo) {
	if v, ok := e.h.replicas.Load(info.ShardID); ok {
		v.(*running).noteReceived(info.Index)
	}
	e.h.log.Info("snapshot received", event.Is("snapshot-received"), zap.Uint64("shard", info.ShardID), zap.Uint64("from", info.From), zap.Uint64("index", info.Index))
}

func (e *systemEvents) SendSnapshotAborted(info raftio.SnapshotInfo) {
	e.h.log.Info("snapshot not delivered", zap.Uint64("shard", info.ShardID), zap.Uint64("to", info.ReplicaID), zap.Uint64("index", info.Index))
}

func (e *systemEvents) NodeHostShuttingDown()                     {}
func (e *systemEvents) NodeDeleted(raftio.NodeInfo)               {}
func (e *systemEvents) NodeReady(raftio.NodeInfo)                 {}
func (e *systemEvents) SendSnapshotStarted(raftio.SnapshotInfo)   {}
func (e *systemEvents) SendSnapshotCompleted(raftio.SnapshotInfo) {}
func (e *systemEvents) SnapshotRecovered(raftio.SnapshotInfo)     {}
func (e *systemEvents) SnapshotCreated(raftio.SnapshotInfo)       {}
func (e *systemEvents) SnapshotCompacted(raftio.SnapshotInfo)     {}
func (e *systemEvents) LogCompacted(raftio.EntryInfo)             {}
func (e *systemEvents) LogDBCompacted(raftio.EntryInfo)           {}
