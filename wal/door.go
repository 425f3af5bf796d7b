package wal

import (
	"errors"
	"fmt"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/plugin/tan"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Kind names an implementation of raftio.ILogDB. dragonboat records the name of a host's log at
// its first start and refuses another one later, so a host never changes its kind.
type Kind string

const (
	// KindOwn is the log of this package, and the only one that a host may run in production.
	KindOwn Kind = "own"
	// KindPebble is dragonboat's own log on Pebble, in one partition. For comparison in tests: after
	// a flipped byte it drops the acknowledged entries behind it without a word.
	KindPebble Kind = "stock-pebble"
	// KindTan is dragonboat's other log. For comparison in tests: it panics the process on a torn page.
	KindTan Kind = "tan"
	// KindMemory keeps nothing on disk. For measurements: it shows what the disk costs.
	KindMemory Kind = "memory"
)

// stockWriteBufferBytes keeps the stock Pebble log from reporting itself busy, which with one
// partition and the small default it does at 60 MB/s.
const stockWriteBufferBytes = 64 << 20

// tanBufferBytes is what tan allocates sixteen times at start.
const tanBufferBytes = 4 << 20

// Options says how a host's log is opened. Every field is per process and may change at a restart,
// but Kind, which dragonboat freezes.
type Options struct {
	// Dir is where KindOwn keeps its segments; it is created if absent. It must be on the same disk
	// as nothing that may fill it unseen: LowSpaceBytes watches its file system. The stock logs
	// ignore it and live in dragonboat's directory.
	Dir string

	// Kind selects the implementation. Defaults to KindOwn.
	Kind Kind

	// HostID is written into every segment's header; a segment of another host is refused, so that
	// two hosts' directories are never mixed. Zero accepts, and writes, zero.
	HostID uint64

	// OnLastEntry is called once per replica and SaveRaftState, after the save is durable, with the
	// index and term of the replica's last saved entry, or of the snapshot that replaced its log.
	// It runs in dragonboat's step worker: it must not block and must not call into the log.
	// Saves without entries or snapshot are not reported. May be nil.
	OnLastEntry func(shardID, replicaID, index, term uint64)

	// OnFailure is called at most once, before the error of a failed write or fsync is returned to
	// dragonboat, which then panics the process: what was written is unknown from there on, so no
	// later save may succeed. A record that reclaiming cannot read, which wraps ErrCorrupt if it is damaged, is such
	// a failure too. It runs on the goroutine that failed. May be nil.
	OnFailure func(error)

	// OnSpace is called when the free space of Dir's file system crosses LowSpaceBytes, in either
	// direction, and once at open if it is already below. It must not block. May be nil.
	OnSpace func(SpaceReport)

	// OnOpen is called with the log of KindOwn each time that dragonboat has opened it, so that the host can ask it
	// what raftio.ILogDB has no method for. May be nil.
	OnOpen func(*Log)

	// LowSpaceBytes is the line below which OnSpace reports low space, so that the host refuses
	// publishes while acknowledgements, which are small and free space, still pass.
	//
	// Defaults to 1 GiB.
	LowSpaceBytes uint64

	// WitnessMembership returns the membership that results from applying the committed config
	// changes to base, in order, by dragonboat's own accept and reject rules. With it the log
	// presents a snapshot at open for a replica that holds only metadata entries, see witness.go;
	// nil leaves witnesses to replay their whole log at every start.
	WitnessMembership func(base raftpb.Membership, changes []raftpb.Entry) (raftpb.Membership, error)

	// ExecWorkers is the number of dragonboat's step workers. dragonboat freezes it at first start.
	//
	// Defaults to 1.
	ExecWorkers uint64

	// SegmentBytes is the size of one segment file. Must be in [1 MiB, 1 GiB].
	//
	// Defaults to 64 MiB.
	SegmentBytes int64

	// RecycleSegments is how many free pre-written segments are kept ready for the next one.
	//
	// Defaults to 2.
	RecycleSegments int

	// CacheBytes bounds the recent entries kept in memory over all replicas.
	//
	// Defaults to 64 MiB.
	CacheBytes int64

	// IndexBytes is what the places of entries may take in memory, over all replicas, before small records are copied
	// together into large ones, of which one takes 40 bytes.
	//
	// Defaults to 40 MiB: a million records.
	IndexBytes int64

	// RewriteBytesPerSecond limits how fast live records of old segments are copied forward so that
	// their segments can be freed.
	//
	// Defaults to 32 MiB/s.
	RewriteBytesPerSecond int64

	// Logger defaults to a no-op logger.
	Logger *zap.Logger

	// Registerer receives the tierq_wal_* metrics; nil registers none.
	Registerer prometheus.Registerer
}

// SpaceReport is the state of the file system that holds the log.
type SpaceReport struct {
	Low       bool   // FreeBytes is below Options.LowSpaceBytes
	FreeBytes uint64 // available to this process
}

// EnsureDefaults fills in the fields that have a default and are zero.
func (o *Options) EnsureDefaults() {
	if o.Kind == "" {
		o.Kind = KindOwn
	}
	if o.LowSpaceBytes == 0 {
		o.LowSpaceBytes = 1 << 30
	}
	if o.ExecWorkers == 0 {
		o.ExecWorkers = 1
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 64 << 20
	}
	if o.RecycleSegments == 0 {
		o.RecycleSegments = 2
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 64 << 20
	}
	if o.IndexBytes == 0 {
		o.IndexBytes = 40 << 20
	}
	if o.RewriteBytesPerSecond == 0 {
		o.RewriteBytesPerSecond = 32 << 20
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
}

// Validate reports everything that is wrong with o, joined into one error.
func (o *Options) Validate() error {
	var errs []error
	switch o.Kind {
	case KindOwn:
		if o.Dir == "" {
			errs = append(errs, errors.New("wal: Dir is empty"))
		}
	case KindPebble, KindTan, KindMemory:
	default:
		errs = append(errs, fmt.Errorf("wal: unknown Kind %q", o.Kind))
	}
	if o.SegmentBytes < 1<<20 || o.SegmentBytes > 1<<30 {
		errs = append(errs, fmt.Errorf("wal: SegmentBytes %d is not in [1 MiB, 1 GiB]", o.SegmentBytes))
	}
	if o.ExecWorkers > 64 {
		errs = append(errs, fmt.Errorf("wal: ExecWorkers %d is above 64", o.ExecWorkers))
	}
	if o.RecycleSegments < 0 || o.CacheBytes < 0 || o.IndexBytes < 0 || o.RewriteBytesPerSecond < 0 {
		errs = append(errs, errors.New("wal: RecycleSegments, CacheBytes, IndexBytes and RewriteBytesPerSecond must not be negative"))
	}
	return errors.Join(errs...)
}

// Configure puts the log that o describes into nhc: the log factory, the log's own settings, and the
// engine's worker counts, each only where it is zero but for ExecShards and LogDB.Shards, which
// belong to the log. It is the one way for a host to get a log.
func Configure(nhc *config.NodeHostConfig, o Options) error {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return err
	}
	nhc.Expert.LogDBFactory = factory{o}
	nhc.Expert.LogDB = LogDBConfig(o.Kind)
	engineDefaults(&nhc.Expert.Engine)
	nhc.Expert.Engine.ExecShards = o.ExecWorkers
	return nil
}

// LogDBConfig returns dragonboat's settings for a log of kind k. Shards is 1 for every kind: the
// shards of a host share one log and so its fsyncs.
func LogDBConfig(k Kind) config.LogDBConfig {
	c := config.GetDefaultLogDBConfig()
	c.Shards = 1
	c.KVWriteBufferSize = stockWriteBufferBytes
	if k == KindTan {
		c.KVWriteBufferSize = tanBufferBytes
	}
	return c
}

// engineDefaults fills the worker counts that are zero. Openings and local snapshots of all shards
// share the snapshot workers, and an install blocks one of them, hence their number.
func engineDefaults(c *config.EngineConfig) {
	def := func(p *uint64, n uint64) {
		if *p == 0 {
			*p = n
		}
	}
	def(&c.CommitShards, 1)
	def(&c.ApplyShards, 16)
	def(&c.SnapshotShards, 64)
	def(&c.CloseShards, 8)
}

// factory is what dragonboat calls when a NodeHost starts.
type factory struct{ o Options }

// Name is recorded in dragonboat's directory at first start and compared at every later one.
func (f factory) Name() string {
	switch f.o.Kind {
	case KindPebble:
		return "sharded-pebble"
	case KindTan:
		return tan.Factory.Name()
	case KindMemory:
		return "tierq-memory"
	default:
		return logDBName
	}
}

// Create opens the log. dirs and lowLatencyDirs are dragonboat's own, used by the stock logs alone.
func (f factory) Create(nhc config.NodeHostConfig, cb config.LogDBCallback,
	dirs, lowLatencyDirs []string) (raftio.ILogDB, error) {
	switch f.o.Kind {
	case KindPebble:
		return f.stock(newStockPebble(nhc, cb, dirs, lowLatencyDirs))
	case KindTan:
		return f.stock(tan.Factory.Create(nhc, cb, dirs, lowLatencyDirs))
	case KindMemory:
		return f.stock(newMemoryLog(), nil)
	default:
		l, err := Open(f.o)
		if err != nil {
			return nil, err
		}
		if f.o.OnOpen != nil {
			f.o.OnOpen(l)
		}
		return l, nil
	}
}

// stock makes a log that is not ours report its last entries.
func (f factory) stock(l raftio.ILogDB, err error) (raftio.ILogDB, error) {
	if err != nil || f.o.OnLastEntry == nil {
		return l, err
	}
	return &reportingLog{ILogDB: l, onLastEntry: f.o.OnLastEntry}, nil
}

// reportingLog calls onLastEntry after each save of the log that it wraps.
type reportingLog struct {
	raftio.ILogDB
	onLastEntry func(shardID, replicaID, index, term uint64)
}

func (r *reportingLog) SaveRaftState(updates []raftpb.Update, worker uint64) error {
	if err := r.ILogDB.SaveRaftState(updates, worker); err != nil {
		return err
	}
	reportLast(updates, r.onLastEntry)
	return nil
}

// reportLast calls f for each update that saved an entry or a snapshot.
func reportLast(updates []raftpb.Update, f func(shardID, replicaID, index, term uint64)) {
	if f == nil {
		return
	}
	for i := range updates {
		ud := &updates[i]
		if n := len(ud.EntriesToSave); n > 0 {
			e := &ud.EntriesToSave[n-1]
			f(ud.ShardID, ud.ReplicaID, e.Index, e.Term)
		} else if !raftpb.IsEmptySnapshot(ud.Snapshot) {
			f(ud.ShardID, ud.ReplicaID, ud.Snapshot.Index, ud.Snapshot.Term)
		}
	}
}
