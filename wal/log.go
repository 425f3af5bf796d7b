package wal

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

// logDBName is recorded by dragonboat at a host's first start.
const logDBName = "tierq-wal"

// binaryFormat is recorded by dragonboat at a host's first start. It changes only when this package
// can no longer read its own older logs; within one value, segment headers carry their own version.
const binaryFormat = 7188

// ErrClosed is returned by every method after Close.
var ErrClosed = errors.New("wal: closed")

// Log is the Raft log of a whole host. All methods may be called from any goroutine; dragonboat
// calls SaveRaftState from one goroutine per step worker.
//
// Lock order: queueMu is never held together with another lock; mu before a segment's handle.mu.
type Log struct {
	o       Options
	fs      fileSystem
	logger  *zap.Logger
	metrics *metrics
	unlock  func() error

	queueMu sync.Mutex
	queue   []*request
	leading bool

	// The leader's own: used by one goroutine at a time, see writeGroup.
	activeFile  file
	batchNumber uint64
	scratch     []byte
	rotatedAt   time.Time
	nextBytes   int64   // size that the next segment is to have
	rate        float64 // bytes a second at which the last segment was filled

	mu       sync.Mutex // guards what follows, and every replica and segment
	replicas map[replicaKey]*replica
	dirty    []*replica
	segments []*segment // ascending; the last is active
	active   *segment
	cache    batchCache
	flight   flight
	spares   []spare
	failed   error
	closed   bool

	prepare  chan prepareOrder
	prepared chan preparedSegment
	hurry    chan struct{} // the leader waits for prepared
	reclaim  chan struct{}
	stop     chan struct{}  // ends workers
	workers  sync.WaitGroup // reclaimer and space watch
	stopMake chan struct{}  // ends maker, which workers need
	maker    sync.WaitGroup
}

var _ raftio.ILogDB = (*Log)(nil)

// Open opens the log in o.Dir, creating it if there is none. A torn tail is cut, see recover.go;
// any other damage is an error that wraps ErrCorrupt and leaves the files as they are. It holds the
// directory until Close.
func Open(o Options) (*Log, error) { return openFS(o, osFS{}) }

func openFS(o Options, fs fileSystem) (*Log, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, err
	}
	l := &Log{
		o: o, fs: fs, logger: o.Logger, metrics: m,
		replicas: make(map[replicaKey]*replica),
		cache:    batchCache{limit: o.CacheBytes, low: 1},
		prepare:  make(chan prepareOrder, 1),
		prepared: make(chan preparedSegment, 1),
		hurry:    make(chan struct{}, 1),
		reclaim:  make(chan struct{}, 1),
		stop:     make(chan struct{}),
		stopMake: make(chan struct{}),
	}
	if err := l.start(); err != nil {
		m.unregister()
		if l.unlock != nil {
			err = errors.Join(err, l.closeFiles(), l.unlock())
		}
		return nil, err
	}
	return l, nil
}

func (l *Log) start() error {
	if err := l.fs.MkdirAll(l.o.Dir); err != nil {
		return fmt.Errorf("wal: create directory: %w", err)
	}
	unlock, err := l.fs.Lock(pathIn(l.o.Dir, lockName))
	if err != nil {
		return err
	}
	l.unlock = unlock
	if err := l.recover(); err != nil {
		return err
	}
	if err := l.metrics.registerSegments(l); err != nil {
		return err
	}
	l.maker.Add(1)
	go l.prepareLoop()
	l.workers.Add(2)
	go l.reclaimLoop()
	go l.spaceLoop()
	l.wakeReclaim()
	return nil
}

// Name implements raftio.ILogDB.
func (l *Log) Name() string { return logDBName }

// BinaryFormat implements raftio.ILogDB.
func (l *Log) BinaryFormat() uint32 { return binaryFormat }

// Close writes down the commit indexes that were not yet worth an fsync, and closes the files. It may
// be called twice. It must not run at the same time as another method.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	failed := l.failed
	l.mu.Unlock()
	close(l.stop)
	l.workers.Wait()
	var err error
	if failed == nil {
		err = l.flushDirty()
	}
	close(l.stopMake)
	l.maker.Wait()
	l.mu.Lock()
	if l.failed == nil {
		l.failed = ErrClosed
	}
	l.mu.Unlock()
	l.metrics.unregister()
	return errors.Join(err, l.closeFiles(), l.unlock())
}

// flushDirty makes everything that memory knows durable.
func (l *Log) flushDirty() error {
	for {
		l.mu.Lock()
		n := len(l.dirty)
		l.mu.Unlock()
		if n == 0 {
			return nil
		}
		if err := l.submit(&request{encode: func(*batch) error { return nil }}); err != nil {
			return err
		}
	}
}

func (l *Log) closeFiles() error {
	var errs []error
	if l.activeFile != nil {
		l.active.release()
		l.activeFile = nil
	}
	for _, s := range l.segments {
		errs = append(errs, s.closeIdle())
	}
	select {
	case p := <-l.prepared:
		if p.seg != nil {
			errs = append(errs, p.seg.closeIdle())
		}
	default:
	}
	return errors.Join(errs...)
}

// fail makes err the answer to every later call, and tells the host before dragonboat, which panics
// the process when it sees it: after a failed write or fsync nobody knows what the disk holds, and a record that
// cannot be read must not become a gap.
func (l *Log) fail(err error) error {
	l.mu.Lock()
	if l.failed != nil {
		err = l.failed
		l.mu.Unlock()
		return err
	}
	l.failed = err
	l.mu.Unlock()
	l.logger.Error("the Raft log failed; the host must stop", zap.Error(err))
	if l.o.OnFailure != nil {
		l.o.OnFailure(err)
	}
	return err
}

// replicaLocked returns the replica of k, making it if there is none. Nothing that an earlier replica of the same
// name left in the log counts for a new one.
func (l *Log) replicaLocked(k replicaKey) *replica {
	r := l.replicas[k]
	if r == nil {
		r = &replica{key: k, m: meta{floor: l.active.position(uint32(l.active.off))}}
		l.replicas[k] = r
	}
	return r
}

// ListNodeInfo implements raftio.ILogDB: the replicas that have a bootstrap record, in order.
func (l *Log) ListNodeInfo() ([]raftio.NodeInfo, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var infos []raftio.NodeInfo
	for k, r := range l.replicas {
		if r.boot != nil {
			infos = append(infos, raftio.GetNodeInfo(k.shardID, k.replicaID))
		}
	}
	sortNodeInfo(infos)
	return infos, nil
}

// SaveBootstrapInfo implements raftio.ILogDB. Durable on return.
func (l *Log) SaveBootstrapInfo(shardID, replicaID uint64, bootstrap raftpb.Bootstrap) error {
	raw, err := bootstrap.Marshal()
	if err != nil {
		return fmt.Errorf("wal: marshal bootstrap record: %w", err)
	}
	k := replicaKey{shardID, replicaID}
	return l.submit(&request{
		bytes:   recordOverhead + len(raw) + metaLimit,
		records: 2,
		encode: func(b *batch) error {
			r := l.replicaLocked(k)
			r.boot = raw
			b.encodeRaw(r, recBootstrap, raw, &r.bootAt)
			if r.m.removed {
				r.m.removed = false
				b.encodeMeta(r)
			}
			return nil
		},
	})
}

// GetBootstrapInfo implements raftio.ILogDB.
func (l *Log) GetBootstrapInfo(shardID, replicaID uint64) (raftpb.Bootstrap, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b raftpb.Bootstrap
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r == nil || r.boot == nil {
		return b, raftio.ErrNoBootstrapInfo
	}
	if err := b.Unmarshal(r.boot); err != nil {
		return raftpb.Bootstrap{}, fmt.Errorf("wal: bootstrap record of shard %d replica %d: %w", shardID, replicaID, err)
	}
	return b, nil
}

// SaveRaftState implements raftio.ILogDB. It is durable on return if any update holds entries or a
// newer snapshot, or changes a term or a vote. A commit index alone is not synced: it is in memory
// at once, and goes into the log with the next batch.
func (l *Log) SaveRaftState(updates []raftpb.Update, _ uint64) error {
	ok, err := l.saveCommitsOnly(updates)
	if ok || err != nil {
		return err
	}
	bytes, records := 0, 0
	for i := range updates {
		b, n := updateLimit(&updates[i])
		bytes, records = bytes+b, records+n
	}
	err = l.submit(&request{bytes: bytes, records: records, encode: func(b *batch) error {
		for i := range updates {
			if err := checkUpdate(l.replicaLocked(replicaKey{updates[i].ShardID, updates[i].ReplicaID}), &updates[i]); err != nil {
				return err
			}
		}
		for i := range updates {
			if err := b.encodeUpdate(&updates[i]); err != nil {
				return err
			}
		}
		return nil
	}})
	if err != nil {
		return err
	}
	reportLast(updates, l.o.OnLastEntry)
	return nil
}

// updateLimit bounds what encodeUpdate appends for ud.
func updateLimit(ud *raftpb.Update) (bytes, records int) {
	bytes, records = metaLimit, 2
	if !raftpb.IsEmptySnapshot(ud.Snapshot) {
		bytes += recordOverhead + ud.Snapshot.Size()
		records++
	}
	size := 0
	for i := range ud.EntriesToSave {
		e := &ud.EntriesToSave[i]
		size += entrySizeLimit(e)
		// A record begins where a run begins or ends; elsewhere the records are large.
		if i > 0 && (isBareMetadata(e) != isBareMetadata(&ud.EntriesToSave[i-1]) ||
			e.Term != ud.EntriesToSave[i-1].Term) {
			records++
		}
	}
	records += size/maxRecordBytes + 1
	return bytes + size + records*recordOverhead, records
}

// saveCommitsOnly takes the updates over if none of them needs the disk, and reports whether it did.
func (l *Log) saveCommitsOnly(updates []raftpb.Update) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return false, l.failed
	}
	for i := range updates {
		if l.needsDiskLocked(&updates[i]) {
			return false, nil
		}
	}
	for i := range updates {
		ud := &updates[i]
		if raftpb.IsEmptyState(ud.State) {
			continue
		}
		r := l.replicas[replicaKey{ud.ShardID, ud.ReplicaID}]
		if r.m.state.Commit != ud.Commit {
			r.m.state.Commit = ud.Commit
			r.metaDirty = true
			l.markDirtyLocked(r)
		}
	}
	return true, nil
}

// needsDiskLocked reports whether ud must be durable before SaveRaftState returns.
func (l *Log) needsDiskLocked(ud *raftpb.Update) bool {
	if len(ud.EntriesToSave) > 0 {
		return true
	}
	r := l.replicas[replicaKey{ud.ShardID, ud.ReplicaID}]
	if !raftpb.IsEmptySnapshot(ud.Snapshot) && (r == nil || ud.Snapshot.Index > r.snapIndex) {
		return true
	}
	if raftpb.IsEmptyState(ud.State) {
		return false
	}
	return r == nil || !r.m.hasState || r.m.state.Term != ud.Term || r.m.state.Vote != ud.Vote
}

// errMoved means that the segments of what was looked up were given up meanwhile.
var errMoved = errors.New("moved")

// IterateEntries implements raftio.ILogDB: it appends the entries from low up to high to ents until
// their SizeUpperLimits, and size, exceed maxSize; the entry that exceeds it is included. It returns
// fewer if the log ends before high, and none if low is compacted. The entries must not be modified;
// their commands may share memory with the log's cache.
func (l *Log) IterateEntries(ents []raftpb.Entry, size uint64, shardID, replicaID,
	low, high, maxSize uint64) ([]raftpb.Entry, uint64, error) {
	k := replicaKey{shardID, replicaID}
	it := iteration{l: l, key: k, ents: ents, size: size, next: low, high: high, maxSize: maxSize}
	for {
		spans, bufs, err := l.lookup(k, it.next, high, maxSize-min(maxSize, it.size))
		if err != nil {
			return nil, 0, err
		}
		n := len(it.ents)
		err = it.take(spans, bufs)
		if err != nil && !errors.Is(err, errMoved) {
			return nil, 0, err
		}
		if it.done || err == nil && len(it.ents) == n {
			return it.ents, it.size, nil
		}
	}
}

// lookup returns the spans from index low that hold about maxSize bytes, and for each the record's
// bytes if they are cached.
func (l *Log) lookup(k replicaKey, low, high, maxSize uint64) ([]span, [][]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return nil, nil, l.failed
	}
	r := l.replicas[k]
	if r == nil || low <= r.m.compactedTo || low > r.m.last || low >= high {
		return nil, nil, nil
	}
	i := r.find(low)
	n, bytes := i, uint64(0)
	for n < len(r.spans) && r.spans[n].first < high && (n == i || bytes <= maxSize) {
		bytes += uint64(r.spans[n].size)
		n++
	}
	spans := append([]span(nil), r.spans[i:n]...)
	bufs := make([][]byte, len(spans))
	for i := range spans {
		if s := &spans[i]; !s.isRun() {
			if bufs[i] = l.cache.get(s.aux, s.off, s.size); bufs[i] == nil {
				bufs[i] = l.flight.get(s)
			}
		}
	}
	return spans, bufs, nil
}

// iteration is one IterateEntries on its way.
type iteration struct {
	l       *Log
	key     replicaKey
	ents    []raftpb.Entry
	size    uint64
	next    uint64
	high    uint64
	maxSize uint64
	done    bool
}

// add takes e and reports whether more are wanted.
func (it *iteration) add(e raftpb.Entry) bool {
	it.ents = append(it.ents, e)
	it.size += uint64(e.SizeUpperLimit())
	it.next++
	it.done = it.next >= it.high || it.size > it.maxSize
	return !it.done
}

func (it *iteration) take(spans []span, bufs [][]byte) error {
	for i := range spans {
		s := &spans[i]
		if it.next < s.first || it.next > s.last() {
			return fmt.Errorf("BUG: wal: shard %d replica %d: entry %d is not in the span from %d to %d",
				it.key.shardID, it.key.replicaID, it.next, s.first, s.last())
		}
		if s.isRun() {
			it.takeRun(s)
		} else if err := it.takeRecord(s, bufs[i]); err != nil {
			return err
		}
		if it.done {
			return nil
		}
	}
	return nil
}

func (it *iteration) takeRun(s *span) {
	for it.next <= s.last() && it.add(raftpb.Entry{Type: raftpb.MetadataEntry, Term: s.aux, Index: it.next}) {
	}
}

func (it *iteration) takeRecord(s *span, buf []byte) error {
	body, err := it.l.recordBody(s, buf, it.key)
	if err != nil {
		return err
	}
	err = decodeEntries(body, func(e *raftpb.Entry) bool {
		return e.Index < it.next || e.Index <= s.last() && it.add(*e) && e.Index < s.last()
	})
	if err == nil && !it.done && it.next <= s.last() {
		err = fmt.Errorf("record ends before entry %d", it.next)
	}
	if err != nil {
		return s.seg.corrupt(int64(s.off), it.key, err.Error())
	}
	return nil
}

// recordBody returns the body of the entries record that s lies in, from buf if that is not nil.
func (l *Log) recordBody(s *span, buf []byte, k replicaKey) ([]byte, error) {
	if buf != nil {
		l.metrics.cacheHits.Inc()
		r, err := splitRecord(buf)
		return r.body, err
	}
	l.metrics.cacheMisses.Inc()
	r, ok, err := s.seg.readRecord(l.fs, s.off, s.size, k)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errMoved
	}
	if r.typ != recEntries && r.typ != recMoved {
		return nil, s.seg.corrupt(int64(s.off), k, "a "+r.typ.String()+" record where entries should be")
	}
	return r.body, nil
}

// ReadRaftState implements raftio.ILogDB. It returns raftio.ErrNoSavedLog if no state was ever saved.
// FirstIndex is snapshotIndex, and EntryCount 0, if no entry lies behind the snapshot.
func (l *Log) ReadRaftState(shardID, replicaID, snapshotIndex uint64) (raftio.RaftState, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return raftio.RaftState{}, l.failed
	}
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r == nil || !r.m.hasState {
		return raftio.RaftState{}, raftio.ErrNoSavedLog
	}
	rs := raftio.RaftState{State: r.m.state, FirstIndex: snapshotIndex}
	if snapshotIndex < r.m.last && r.m.last > r.m.compactedTo {
		rs.FirstIndex = max(snapshotIndex, r.m.compactedTo+1)
		rs.EntryCount = r.m.last - rs.FirstIndex + 1
	}
	return rs, nil
}

// RemoveEntriesTo implements raftio.ILogDB: it drops the entries at and below index. It runs in the
// step worker, so it touches memory alone; the log says so with the next batch. After a crash before
// that the entries are back, which harms nobody.
func (l *Log) RemoveEntriesTo(shardID, replicaID, index uint64) error {
	l.mu.Lock()
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r != nil && r.compactTo(index) {
		r.metaDirty = true
		l.markDirtyLocked(r)
	}
	l.mu.Unlock()
	l.wakeReclaim()
	return nil
}

// CompactEntriesTo implements raftio.ILogDB. Space is reclaimed in the background for all replicas
// together, so there is nothing to do for one, and the channel is closed already.
func (l *Log) CompactEntriesTo(uint64, uint64, uint64) (<-chan struct{}, error) {
	l.wakeReclaim()
	return closedChan, nil
}

var closedChan = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// EntryBytes is how many bytes of the log a replica's entries take, so that its host can ask for a snapshot in
// time.
func (l *Log) EntryBytes(shardID, replicaID uint64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r == nil {
		return 0
	}
	return r.spanBytes
}

// Marks are how far a replica's log is.
type Marks struct{ Commit, Last, SnapshotIndex uint64 }

// Marks returns those of a replica, at one moment; false if the log holds nothing of it. It looks at none of its entries.
func (l *Log) Marks(shardID, replicaID uint64) (Marks, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r == nil || r.m.removed {
		return Marks{}, false
	}
	return Marks{Commit: r.m.state.Commit, Last: r.m.last, SnapshotIndex: r.snapIndex}, true
}

// Replica returns what the log knows of a replica, at one moment; false if it holds nothing of it.
func (l *Log) Replica(shardID, replicaID uint64) (ReplicaReport, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.replicas[replicaKey{shardID, replicaID}]
	if r == nil || r.m.removed {
		return ReplicaReport{}, false
	}
	return r.report(), true
}

// LastEntry returns the index and term of a replica's last entry, or of its snapshot when no entry follows that; 0 if the log holds
// neither.
func (l *Log) LastEntry(shardID, replicaID uint64) (index, term uint64, err error) {
	r, ok := l.Marks(shardID, replicaID)
	switch {
	case !ok:
		return 0, 0, nil
	case r.Last > r.SnapshotIndex:
		ents, _, err := l.IterateEntries(nil, 0, shardID, replicaID, r.Last, r.Last+1, 1)
		if err != nil || len(ents) == 0 { // removed since
			return 0, 0, err
		}
		return ents[0].Index, ents[0].Term, nil
	}
	s, err := l.GetSnapshot(shardID, replicaID)
	return s.Index, s.Term, err
}

// SaveSnapshots implements raftio.ILogDB: it makes newer snapshot records durable, together with the
// commit indexes that dragonboat will compare them with. It drops no entries.
func (l *Log) SaveSnapshots(updates []raftpb.Update) error {
	bytes := 0
	for i := range updates {
		bytes += recordOverhead + updates[i].Snapshot.Size() + metaLimit
	}
	return l.submit(&request{bytes: bytes, records: 2 * len(updates), encode: func(b *batch) error {
		for i := range updates {
			if err := b.encodeLocalSnapshot(&updates[i]); err != nil {
				return err
			}
		}
		return nil
	}})
}

// encodeLocalSnapshot writes down the record of a snapshot that this host made. dragonboat panics at a
// start at which the commit index is below the snapshot's, so the commit index goes with it.
func (b *batch) encodeLocalSnapshot(ud *raftpb.Update) error {
	r := b.l.replicaLocked(replicaKey{ud.ShardID, ud.ReplicaID})
	if ud.Snapshot.Index <= r.snapIndex {
		return nil
	}
	if err := b.encodeSnapshot(r, ud.Snapshot); err != nil {
		return err
	}
	if r.metaDirty || r.m.removed {
		r.m.removed = false
		b.encodeMeta(r)
	}
	return nil
}

// GetSnapshot implements raftio.ILogDB: the newest snapshot record, or an empty one. The result is
// the caller's own.
func (l *Log) GetSnapshot(shardID, replicaID uint64) (raftpb.Snapshot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return raftpb.Snapshot{}, l.failed
	}
	if r := l.replicas[replicaKey{shardID, replicaID}]; r != nil {
		return r.snapshot()
	}
	return raftpb.Snapshot{}, nil
}

// RemoveNodeData implements raftio.ILogDB: nothing of the replica is left. Durable on return.
func (l *Log) RemoveNodeData(shardID, replicaID uint64) error {
	k := replicaKey{shardID, replicaID}
	err := l.submit(&request{bytes: metaLimit, records: 1, encode: func(b *batch) error {
		if l.replicas[k] != nil {
			b.encodeRemoval(l.replicas[k])
		}
		return nil
	}})
	l.wakeReclaim()
	return err
}

// encodeRemoval voids every record of the replica up to here. The replica stays, as a tombstone, until
// no segment is left that may hold such records.
func (b *batch) encodeRemoval(r *replica) {
	r.dropEntries()
	r.snap, r.boot, r.snapIndex = nil, nil, 0
	r.snapAt.move(nil, 0)
	r.bootAt.move(nil, 0)
	r.snapDirty, r.bootDirty, r.runsDirty, r.made = false, false, false, false
	r.m = meta{removed: true, floor: b.nextPosition()}
	b.encodeMeta(r)
}

// ImportSnapshot implements raftio.ILogDB: the replica begins anew from ss, as if it had joined with it.
// Durable on return.
func (l *Log) ImportSnapshot(ss raftpb.Snapshot, replicaID uint64) error {
	if ss.Type == raftpb.UnknownStateMachine {
		return errors.New("wal: import: the snapshot's state machine type is unknown")
	}
	raw, err := (&raftpb.Bootstrap{Join: true, Type: ss.Type}).Marshal()
	if err != nil {
		return fmt.Errorf("wal: marshal bootstrap record: %w", err)
	}
	k := replicaKey{ss.ShardID, replicaID}
	return l.submit(&request{
		bytes:   2*metaLimit + 2*recordOverhead + len(raw) + ss.Size(),
		records: 4,
		encode: func(b *batch) error {
			r := l.replicaLocked(k)
			b.encodeRemoval(r)
			if err := b.encodeSnapshot(r, ss); err != nil {
				return err
			}
			r.boot = raw
			b.encodeRaw(r, recBootstrap, raw, &r.bootAt)
			r.m.removed, r.m.hasState = false, true
			r.m.state = raftpb.State{Term: ss.Term, Commit: ss.Index}
			r.m.compactedTo, r.m.last = ss.Index, ss.Index
			b.encodeMeta(r)
			return nil
		},
	})
}

// Check verifies the invariants of the index. It is for tests and for tierq's doctor; it blocks the log.
func (l *Log) Check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	pins := make(map[*segment]int)
	live := make(map[*segment]int64)
	for _, r := range l.replicas {
		if err := r.Check(); err != nil {
			return err
		}
		r.countPins(pins, live)
		if err := r.checkSpanCounts(l.segments); err != nil {
			return err
		}
	}
	for _, s := range l.segments {
		if s.pins != pins[s] || s.live != live[s] {
			return fmt.Errorf("BUG: wal: segment %d is counted with %d pins and %d live bytes, has %d and %d",
				s.h.seq, s.pins, s.live, pins[s], live[s])
		}
		if s.freed && s.pins > 0 {
			return fmt.Errorf("BUG: wal: segment %d is freed and has %d pins", s.h.seq, s.pins)
		}
	}
	return nil
}

// checkSpanCounts verifies what the segments know of the replica's spans.
func (r *replica) checkSpanCounts(segs []*segment) error {
	n := make(map[*segment]int)
	bytes := int64(0)
	for i := range r.spans {
		n[r.spans[i].seg]++
		bytes += int64(r.spans[i].size)
	}
	if bytes != r.spanBytes {
		return fmt.Errorf("BUG: wal: the entries of shard %d replica %d are counted with %d bytes, have %d", r.key.shardID, r.key.replicaID, r.spanBytes, bytes)
	}
	for _, s := range segs {
		if s.spans[r] != n[s] {
			return fmt.Errorf("BUG: wal: segment %d is counted with %d spans of shard %d replica %d, has %d",
				s.h.seq, s.spans[r], r.key.shardID, r.key.replicaID, n[s])
		}
	}
	return nil
}

// countPins adds up what the replica needs of each segment.
func (r *replica) countPins(pins map[*segment]int, live map[*segment]int64) {
	count := func(s *segment, n uint32) {
		if s != nil {
			pins[s]++
			live[s] += int64(n)
		}
	}
	for i := range r.spans {
		count(r.spans[i].seg, r.spans[i].size)
	}
	for _, p := range [...]place{r.metaAt, r.snapAt, r.bootAt, {seg: r.lastAt}} {
		count(p.seg, p.size)
	}
	for s := range r.runsAt {
		count(s, 0)
	}
}

// noLimit is an IterateEntries size that is never exceeded.
const noLimit = math.MaxUint64
