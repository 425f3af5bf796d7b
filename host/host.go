package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/client"
	"github.com/lni/dragonboat/v4/config"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/wal"
	"github.com/tierq/tierq/witness"
)

// The directories and files of a data directory, beside LOCK, identity.json and replicas.journal.
const (
	raftDir     = "raft"         // the engine's own: snapshots, and a stock log
	walDir      = "wal"          // the Raft log
	stateDir    = "state"        // the store of the full replicas
	evidenceDir = "evidence"     // entries that could not be applied
	catalogFile = "catalog.copy" // the catalog as this host last saw it
)

// maxInMemLogBytes is how much of a replica's log may wait in memory; more proposals are refused with BACKPRESSURE.
const maxInMemLogBytes = 64 << 20

// RaftHost runs the replicas of one host: many shards on one NodeHost. Its methods may be called from any goroutine, and
// fail with SHUTTING_DOWN after Close.
//
// Open takes the data directory, the ports and the NodeHost; nothing runs before Start, so that whoever opened it can keep
// it where the callbacks find it, and register its services on Peers.
type RaftHost struct {
	cfg      Config
	log      *zap.Logger
	lock     *dirLock
	crash    *os.File // what the process says when it panics
	journal  *journal
	nodeHost *dragonboat.NodeHost
	registry *Registry
	peers    *peer.Peers
	clock    *Clock
	states   *states
	catalog  *catalog.Machine
	leaders  *leaderBoard
	copies   *copies
	book     *addressBook
	gate     *gate
	holds    holds
	endings  *endings
	lowSpace atomic.Bool // this host's disk is nearly full
	raftLog  atomic.Pointer[wal.Log]

	viewMu  sync.Mutex                   // orders changes of view
	view    atomic.Pointer[catalog.View] // never nil
	changed *broadcast                   // a newer view
	copied  uint64                       // version of the copy on disk; of followCatalog
	turn    atomic.Uint64                // which host of the catalog is asked next
	wake    chan struct{}                // the reconcile loop has something to do
	applied chan struct{}                // this host's replica of the catalog has changed, or begun
	formed  chan struct{}                // closed when the fleet id is known
	ready   chan struct{}                // closed when this host is registered in the catalog

	identityMu sync.Mutex
	identity   identity

	// Lock order: startMu, then one of shardMu.
	startMu  sync.RWMutex   // held for writing by a start that must be alone
	shardMu  [64]sync.Mutex // serialize starts and stops of a shard
	replicas sync.Map       // shard → *running

	troubleMu   sync.Mutex
	troubles    map[uint64]*trouble // of shards whose replica had to be stopped
	damages     map[uint64]damage   // by shard
	troubleWake chan struct{}
	conflictAt  atomic.Int64 // unix seconds of the last report

	begun   time.Time
	leaving sync.Map // replicaKey → since when its homes are being handed over, where this host leads
	// beforeMoveReport, if not nil, may keep a move's report from the catalog: a test's crash.
	beforeMoveReport func(catalog.Move, catalog.MoveEvent) error
	// beforeRemovedReport, if not nil, may do the same when the data of a replica are removed.
	beforeRemovedReport func(shard uint64, id queue.ReplicaID) error

	refused   chan struct{} // closed when the fleet does not take this host
	refusal   error
	refuseOne sync.Once

	// Background work, all of which ends with ctx.
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	startOnce sync.Once
	closeOnce sync.Once
	closeErr  error
}

// running is a replica of this host that the engine has.
type running struct {
	shard   uint64
	id      queue.ReplicaID
	witness bool
	session *client.Session
	clock   shardClock
	state   liveState // full replicas of queues

	hasWitness atomic.Bool   // the shard has one: copies are reported (G1)
	applied    atomic.Uint64 // as the state machine last told
	received   atomic.Uint64 // index of the newest snapshot of which something was received
	marked     atomic.Uint64 // the replica whose messages say that it reads marks (marks.go), as leader

	lastMu              sync.Mutex
	lastIndex, lastTerm uint64 // of the last durable entry
}

// Open opens the data directory of a host. Its errors are one line each and say what to do; then nothing is left open.
func Open(cfg Config) (_ *RaftHost, err error) {
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	h := newRaftHost(cfg)
	defer func() {
		if err != nil {
			err = errors.Join(err, h.release())
		}
	}()
	if err := h.openData(); err != nil {
		return nil, err
	}
	if err := h.openPeers(); err != nil {
		return nil, err
	}
	if err := errors.Join(h.checkFleet(), h.checkAlone()); err != nil {
		return nil, err
	}
	return h, h.openEngine()
}

func newRaftHost(cfg Config) *RaftHost {
	h := &RaftHost{
		cfg:         cfg,
		log:         cfg.Logger,
		leaders:     newLeaderBoard(),
		copies:      newCopies(),
		changed:     newBroadcast(),
		wake:        make(chan struct{}, 1),
		applied:     make(chan struct{}, 1),
		gate:        newGate(),
		formed:      make(chan struct{}),
		ready:       make(chan struct{}),
		troubles:    make(map[uint64]*trouble),
		troubleWake: make(chan struct{}, 1),
		begun:       time.Now(),
		refused:     make(chan struct{}),
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.endings = newEndings(h)
	h.view.Store(catalog.NewState().Seal())
	h.catalog = &catalog.Machine{OnChange: h.signalApplied, OnPoison: func(err error) { h.stuck(catalog.ShardID, &trouble{err: err, forGood: true}) }}
	h.registry = NewRegistry()
	h.registry.OnConflict = h.conflict
	h.book = newAddressBook(h.registry, cfg.Hosts)
	return h
}

// openData takes the directory and what is in it but the engine.
func (h *RaftHost) openData() (err error) {
	if h.lock, err = lockDir(h.cfg.DataDir); err != nil {
		return err
	}
	self, _ := h.cfg.self()
	if h.identity, err = openIdentity(h.cfg.DataDir, self); err != nil {
		return err
	}
	panicked, err := h.openCrashFile()
	if err != nil {
		return err
	}
	if h.journal, err = openJournal(h.cfg.DataDir, panicked); err != nil {
		return err
	}
	if err := h.loadCatalogCopy(); err != nil {
		return err
	}
	if self.Role == catalog.HostFull {
		h.states, err = openStates(filepath.Join(h.cfg.DataDir, stateDir), h)
	}
	return err
}

// openPeers binds the peer API.
func (h *RaftHost) openPeers() (err error) {
	self, _ := h.cfg.self()
	listener := h.cfg.PeerListener
	if listener == nil {
		address := h.cfg.PeerListen
		if address == "" {
			address = self.PeerAddr
		}
		if listener, err = net.Listen("tcp", address); err != nil {
			return inUse("peer", address, err)
		}
	}
	var through func(uint64, http.RoundTripper) http.RoundTripper
	if h.cfg.Faults != nil {
		through = func(to uint64, rt http.RoundTripper) http.RoundTripper {
			return h.cfg.Faults.Peer(h.cfg.HostID, to, rt)
		}
	}
	h.peers = peer.New(peer.Config{
		HostID:       h.cfg.HostID,
		Listener:     listener,
		Fleet:        h.fleetName,
		Address:      h.book.peer,
		Wall:         h.cfg.WallClock,
		Boot:         h.cfg.BootClock,
		Backend:      &peerBackend{h},
		Interval:     h.cfg.ReportInterval,
		Silence:      h.cfg.Silence,
		CommandLevel: catalog.CommandLevel,
		Logger:       h.log,
		TLS:          h.cfg.TLS,
		Cert:         h.checkCert,
		Through:      through,
	})
	h.endings.losses = h.peers
	h.clock = newClock(h.cfg.WallClock, h.cfg.BootClock, h.peers.ClockOffsets)
	h.clock.onSkew = h.tellSkew
	return nil
}

func inUse(what, address string, err error) error {
	return fmt.Errorf("the %s address %s cannot be bound: %w: stop what uses it, or configure another one", what, address, err)
}

// openEngine makes the NodeHost.
func (h *RaftHost) openEngine() error {
	if err := CheckStraySettings("."); err != nil {
		return err
	}
	if err := routeEngineLog(h.cfg.Logger); err != nil {
		return err
	}
	settings, err := ApplySoftSettings(h.cfg.ManyShards)
	if err != nil {
		return err
	}
	h.log.Debug("engine settings", zap.Any("settings", settings))
	dir := filepath.Join(h.cfg.DataDir, raftDir)
	if former, err := AdoptHostname(dir); err != nil {
		return err
	} else if former != "" {
		h.log.Info("the machine has another hostname, its data were adopted", zap.String("former", former))
	}
	nhc, err := h.nodeHostConfig(dir)
	if err != nil {
		return err
	}
	if err := checkListen(nhc.GetListenAddress()); err != nil {
		return err
	}
	h.nodeHost, err = newNodeHost(nhc)
	return err
}

func (h *RaftHost) nodeHostConfig(dir string) (config.NodeHostConfig, error) {
	self, _ := h.cfg.self()
	nhc := config.NodeHostConfig{
		NodeHostID:          Target(h.cfg.HostID),
		NodeHostDir:         dir,
		RTTMillisecond:      uint64(h.cfg.RTT.Milliseconds()),
		RaftAddress:         self.RaftAddr,
		ListenAddress:       h.cfg.RaftListen,
		EnableMetrics:       true,
		RaftEventListener:   &raftEvents{h},
		SystemEventListener: &systemEvents{h},
		MaxSendQueueSize:    64 << 20,
		MaxReceiveQueueSize: 64 << 20,
		Expert:              config.ExpertConfig{NodeRegistryFactory: h.registry.Factory(), TransportFactory: &transports{h}},
	}
	err := wal.Configure(&nhc, wal.Options{
		Dir:           filepath.Join(h.cfg.DataDir, walDir),
		Kind:          h.cfg.LogKind,
		HostID:        h.cfg.HostID,
		ExecWorkers:   h.cfg.ExecWorkers,
		LowSpaceBytes: h.cfg.LowSpaceBytes,
		OnLastEntry:   h.lastEntry,
		OnOpen:        func(l *wal.Log) { h.raftLog.Store(l) },
		OnSpace:       h.onSpace,
		OnFailure: func(err error) {
			h.log.Error("the Raft log failed, this host stops", event.Is("log-failed"), zap.Error(err))
		},
		WitnessMembership: witness.Membership,
		Logger:            h.log.Named("wal"),
		Registerer:        h.cfg.Registerer,
	})
	return nhc, err
}

// newNodeHost turns what the engine does in place of an error into one: a panic, or no host and no error.
func newNodeHost(nhc config.NodeHostConfig) (nh *dragonboat.NodeHost, err error) {
	defer func() {
		if r := recover(); r != nil {
			nh, err = nil, fmt.Errorf("the Raft engine does not start on %s: %v", nhc.NodeHostDir, r)
		}
	}()
	nh, err = dragonboat.NewNodeHost(nhc)
	if err != nil {
		return nil, fmt.Errorf("the Raft engine does not start on %s: %w", nhc.NodeHostDir, err)
	}
	if nh == nil {
		return nil, fmt.Errorf("the Raft engine does not start on %s, and does not say why: see the log above", nhc.NodeHostDir)
	}
	return nh, nil
}

// checkListen binds an address for a moment: the engine panics, or says less, when it cannot.
func checkListen(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return inUse("Raft", address, err)
	}
	return l.Close()
}

// Start begins the host's work: it serves the peer API, forms or joins the fleet, and runs what the catalog says. It returns at
// once; AwaitReady waits.
func (h *RaftHost) Start() {
	h.startOnce.Do(func() {
		h.peers.Start()
		h.goTask(h.joinFleet)
		h.goTask(h.followCatalog)
		h.goTask(h.stopStuck)
		h.goTask(h.reconcileLoop)
		h.goTask(h.findHosts)
		h.goTask(h.endings.run)
	})
}

// goTask runs f until it returns; it must when h.ctx ends.
func (h *RaftHost) goTask(f func(context.Context)) {
	h.tasks.Add(1)
	go func() {
		defer h.tasks.Done()
		f(h.ctx)
	}()
}

// Close stops the host's replicas and releases everything. It may be called more than once, and before Start.
func (h *RaftHost) Close() error {
	h.closeOnce.Do(func() { h.closeErr = h.release() })
	return h.closeErr
}

// release closes what is open, in the order in which it is used. Background work ends before the engine: it calls it.
func (h *RaftHost) release() error {
	h.cancel()
	h.catalog.Release()
	var errs []error
	if h.peers != nil {
		errs = append(errs, h.peers.Close())
	}
	h.endTasks()
	if h.nodeHost != nil {
		h.stopAll()
		h.gate.close()
		h.nodeHost.Close()
	}
	if h.states != nil {
		errs = append(errs, h.states.close())
	}
	if h.journal != nil {
		errs = append(errs, h.journal.close())
	}
	h.closeCrashFile()
	if h.lock != nil {
		errs = append(errs, h.lock.release())
	}
	return errors.Join(errs...)
}

// endTasks waits for the background work. A start that waits for a state which does not open ends when its replica is stopped.
func (h *RaftHost) endTasks() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.tasks.Wait()
	}()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
		}
		h.replicas.Range(func(shard, v any) bool {
			// One that is not there, or not yet, is looked at again.
			_ = h.nodeHost.StopReplica(shard.(uint64), uint64(v.(*running).id))
			return true
		})
	}
}

// HostID returns this host's id.
func (h *RaftHost) HostID() uint64 { return h.cfg.HostID }

// Clock returns this host's time.
func (h *RaftHost) Clock() *Clock { return h.clock }

// Peers returns the host's side of the peer API, on which other packages register their services before Start.
func (h *RaftHost) Peers() *peer.Peers { return h.peers }

// Alive says whether a host has reported to this one, or answered it, within Config.Silence, and how long ago that was; this host
// itself is alive. A host that was never heard of is not alive since this host's start.
func (h *RaftHost) Alive(hostID uint64) (alive bool, since time.Duration) {
	if hostID == h.cfg.HostID {
		return true, 0
	}
	return h.peers.Alive(hostID)
}

// AwaitReady returns nil once the fleet is formed and this host is registered in its catalog, or a *code.Error when ctx ends or the fleet does
// not take this host.
func (h *RaftHost) AwaitReady(ctx context.Context) error {
	select {
	case <-h.ready: // also where ctx has ended: who only asks must not be told either answer by chance
		return nil
	default:
	}
	select {
	case <-h.ready:
		return nil
	case <-h.refused:
		return h.refusal
	case <-ctx.Done():
		return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Text: h.notReady(), Cause: ctx.Err()}
	case <-h.ctx.Done():
		return shuttingDown()
	}
}

// Refused is closed when the fleet does not take this host, for good: it was removed, or its data directory is not the one that the
// fleet knows. Refusal then says why and what to do; the host should be closed.
func (h *RaftHost) Refused() <-chan struct{} { return h.refused }

// Refusal is valid once Refused is closed.
func (h *RaftHost) Refusal() error { return h.refusal }

func (h *RaftHost) refuse(err error) {
	h.refuseOne.Do(func() {
		h.refusal = err
		h.log.Error("the fleet does not take this host", zap.Error(err))
		close(h.refused)
	})
}

// notReady says what the host waits for.
func (h *RaftHost) notReady() string {
	select {
	case <-h.formed:
		return "the host is not registered in the catalog yet: a majority of the catalog's hosts must be reachable"
	default:
		return "the fleet is not formed yet: all of the catalog's first full hosts must be reachable once"
	}
}

func shuttingDown() *code.Error {
	return code.New(code.ShuttingDown, "%s", code.ShuttingDown.Info().Text)
}

// running returns this host's replica of a shard.
func (h *RaftHost) running(shard uint64) (*running, error) {
	if h.ctx.Err() != nil {
		return nil, shuttingDown()
	}
	r, ok := h.replicas.Load(shard)
	if !ok || r.(*running).witness {
		return nil, notReplica(shard)
	}
	return r.(*running), nil
}

// Reader returns the read side of this host's full replica of a queue's shard.
func (h *RaftHost) Reader(shard uint64) (queue.Reader, bool) {
	r, ok := h.replicas.Load(shard)
	if !ok {
		return nil, false
	}
	return r.(*running).state.get()
}

// SelfReplica returns the id of this host's replica of a shard, full or witness, while it runs.
func (h *RaftHost) SelfReplica(shard uint64) (queue.ReplicaID, bool) {
	r, ok := h.replicas.Load(shard)
	if !ok {
		return 0, false
	}
	return r.(*running).id, true
}

// LogMarks says how far the Raft log of a replica is on this host's disk. Commit is the commit index that this host knows; it may be
// in memory only.
type LogMarks struct{ Commit, Last, Snapshot uint64 }

// LogMarks returns those of this host's replica of a shard, at one moment; false if it has none, or the log is not wal's own kind.
func (h *RaftHost) LogMarks(shard uint64) (LogMarks, bool) {
	l := h.raftLog.Load()
	id, ok := h.SelfReplica(shard)
	if l == nil || !ok {
		return LogMarks{}, false
	}
	r, ok := l.Marks(shard, uint64(id))
	return LogMarks{Commit: r.Commit, Last: r.Last, Snapshot: r.SnapshotIndex}, ok
}

// Stamp returns the time to put into a command for a shard: the greater of the accepted wall clock, and the shard's clock as
// this host last applied it plus the boot time since. It fails with CLOCK_SKEW while this host's clock differs from the fleet's.
func (h *RaftHost) Stamp(shard uint64) (queue.Stamp, error) {
	wall, err := h.clock.Wall()
	if err != nil {
		return 0, err
	}
	if r, ok := h.replicas.Load(shard); ok {
		return max(wall, r.(*running).clock.now(h.clock.Boot())), nil
	}
	return wall, nil
}

// conflict is told when a message claims that a replica lives elsewhere: a copied data directory, or an id given twice. It is
// called for every such message, so it says so once in a while.
func (h *RaftHost) conflict(shard, replica, hostID, claimed uint64) {
	now := time.Now().Unix()
	if last := h.conflictAt.Load(); now-last < 10 || !h.conflictAt.CompareAndSwap(last, now) {
		return
	}
	h.log.Error("two hosts say that they hold the same replica: a data directory was copied, or an id was given to two hosts", event.Is("replica-held-twice"),
		zap.Uint64("shard", shard), zap.Uint64("replica", replica), zap.Uint64("at", hostID), zap.Uint64("claimedBy", claimed))
}
