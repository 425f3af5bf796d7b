package wal

import (
	"sort"
	"sync"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
)

// memoryLog is the smallest raftio.ILogDB that dragonboat runs on: maps under one lock. It forgets
// everything with the process. It is the upper bound in measurements and the model in tests.
type memoryLog struct {
	mu       sync.Mutex
	replicas map[replicaKey]*memoryReplica
}

// memoryReplica is what a log must know about one replica.
type memoryReplica struct {
	bootstrap *raftpb.Bootstrap
	state     raftpb.State
	snapshot  raftpb.Snapshot
	entries   []raftpb.Entry // contiguous
	last      uint64         // index of the last entry or of the snapshot that replaced it; 0 if none
}

func newMemoryLog() *memoryLog {
	return &memoryLog{replicas: make(map[replicaKey]*memoryReplica)}
}

func (m *memoryLog) Name() string         { return "tierq-memory" }
func (m *memoryLog) Close() error         { return nil }
func (m *memoryLog) BinaryFormat() uint32 { return raftio.PlainLogDBBinVersion }

func (m *memoryLog) replicaLocked(shardID, replicaID uint64) *memoryReplica {
	k := replicaKey{shardID, replicaID}
	r := m.replicas[k]
	if r == nil {
		r = &memoryReplica{}
		m.replicas[k] = r
	}
	return r
}

func (m *memoryLog) ListNodeInfo() ([]raftio.NodeInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var infos []raftio.NodeInfo
	for k, r := range m.replicas {
		if r.bootstrap != nil {
			infos = append(infos, raftio.GetNodeInfo(k.shardID, k.replicaID))
		}
	}
	sortNodeInfo(infos)
	return infos, nil
}

// sortNodeInfo orders infos by shard, then replica.
func sortNodeInfo(infos []raftio.NodeInfo) {
	sort.Slice(infos, func(i, j int) bool {
		a, b := infos[i], infos[j]
		return a.ShardID < b.ShardID || a.ShardID == b.ShardID && a.ReplicaID < b.ReplicaID
	})
}

func (m *memoryLog) SaveBootstrapInfo(shardID, replicaID uint64, b raftpb.Bootstrap) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.replicaLocked(shardID, replicaID).bootstrap = &b
	return nil
}

func (m *memoryLog) GetBootstrapInfo(shardID, replicaID uint64) (raftpb.Bootstrap, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.replicaLocked(shardID, replicaID).bootstrap; b != nil {
		return *b, nil
	}
	return raftpb.Bootstrap{}, raftio.ErrNoBootstrapInfo
}

func (m *memoryLog) SaveRaftState(updates []raftpb.Update, _ uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range updates {
		m.saveLocked(&updates[i])
	}
	return nil
}

func (m *memoryLog) saveLocked(ud *raftpb.Update) {
	r := m.replicaLocked(ud.ShardID, ud.ReplicaID)
	if !raftpb.IsEmptyState(ud.State) {
		r.state = ud.State
	}
	if ud.Snapshot.Index > r.snapshot.Index {
		r.snapshot = ud.Snapshot
		r.entries, r.last = nil, ud.Snapshot.Index
	}
	r.append(ud.EntriesToSave)
}

// append adds ents, replacing what was saved from their first index on.
func (r *memoryReplica) append(ents []raftpb.Entry) {
	if len(ents) == 0 {
		return
	}
	first := ents[0].Index
	if len(r.entries) > 0 {
		have := r.entries[0].Index
		switch {
		case first <= have:
			r.entries = nil
		case first-have < uint64(len(r.entries)):
			r.entries = r.entries[: first-have : first-have]
		}
	}
	r.entries = append(r.entries, ents...)
	r.last = ents[len(ents)-1].Index
}

func (m *memoryLog) IterateEntries(ents []raftpb.Entry, size uint64, shardID, replicaID,
	low, high, maxSize uint64) ([]raftpb.Entry, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.replicaLocked(shardID, replicaID)
	for i := low; i < high; i++ {
		if len(r.entries) == 0 || i < r.entries[0].Index || i > r.last {
			break
		}
		e := r.entries[i-r.entries[0].Index]
		ents = append(ents, e)
		size += uint64(e.SizeUpperLimit())
		if size > maxSize {
			break
		}
	}
	return ents, size, nil
}

func (m *memoryLog) ReadRaftState(shardID, replicaID, snapshotIndex uint64) (raftio.RaftState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.replicaLocked(shardID, replicaID)
	if raftpb.IsEmptyState(r.state) {
		return raftio.RaftState{}, raftio.ErrNoSavedLog
	}
	rs := raftio.RaftState{State: r.state, FirstIndex: snapshotIndex}
	if n := len(r.entries); n > 0 && r.last > snapshotIndex {
		rs.FirstIndex = max(snapshotIndex, r.entries[0].Index)
		rs.EntryCount = r.last - rs.FirstIndex + 1
	}
	return rs, nil
}

func (m *memoryLog) RemoveEntriesTo(shardID, replicaID, index uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.replicaLocked(shardID, replicaID)
	n := 0
	for n < len(r.entries) && r.entries[n].Index <= index {
		n++
	}
	r.entries = append([]raftpb.Entry(nil), r.entries[n:]...)
	return nil
}

func (m *memoryLog) CompactEntriesTo(uint64, uint64, uint64) (<-chan struct{}, error) {
	done := make(chan struct{})
	close(done)
	return done, nil
}

func (m *memoryLog) SaveSnapshots(updates []raftpb.Update) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range updates {
		ud := &updates[i]
		r := m.replicaLocked(ud.ShardID, ud.ReplicaID)
		if ud.Snapshot.Index > r.snapshot.Index {
			r.snapshot = ud.Snapshot
		}
	}
	return nil
}

func (m *memoryLog) GetSnapshot(shardID, replicaID uint64) (raftpb.Snapshot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.replicaLocked(shardID, replicaID).snapshot, nil
}

func (m *memoryLog) RemoveNodeData(shardID, replicaID uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.replicas, replicaKey{shardID, replicaID})
	return nil
}

func (m *memoryLog) ImportSnapshot(ss raftpb.Snapshot, replicaID uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.replicas[replicaKey{ss.ShardID, replicaID}] = &memoryReplica{
		bootstrap: &raftpb.Bootstrap{Join: true, Type: ss.Type},
		state:     raftpb.State{Term: ss.Term, Commit: ss.Index},
		snapshot:  ss,
		last:      ss.Index,
	}
	return nil
}
