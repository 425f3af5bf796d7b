package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"

	"github.com/lni/dragonboat/v4/config"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/replica"
	"github.com/tierq/tierq/queue/store"
)

// states is what a full host has beside the log: the store, and the state machines over it.
type states struct {
	h     *RaftHost
	store *store.Store
}

// openStates opens the store of a full host.
func openStates(dir string, h *RaftHost) (*states, error) {
	s, err := h.openStore(dir, func() (*store.Store, error) {
		return store.Open(dir, store.Options{
			Logger:            h.log.Named("store").Sugar(),
			OnBackgroundError: func(err error) { h.log.Error("the store has a fault", zap.Error(err)) },
		})
	})
	if err != nil {
		return nil, fmt.Errorf("open the store %s: %w", dir, err)
	}
	return &states{h: h, store: s}, nil
}

// options says what a replica's state machine tells the host.
func (s *states) options(run *running) replica.Options {
	h := s.h
	return replica.Options{
		Store:       s.store,
		Installer:   h.cfg.Installer,
		EvidenceDir: filepath.Join(h.cfg.DataDir, evidenceDir),
		OnOpen:      func(_, _ uint64, m *queue.QueueStateMachine) { h.opened(run, m) },
		OnApplied:   func(_, _ uint64, a queue.Applied) { h.appliedUpdate(run, a) },
		OnInstalled: func(_, _ uint64, _ queue.Index) { h.installed(run) },
		OnStuck: func(shard, _ uint64, err error, evidence string) {
			var poison *queue.PoisonError
			bad := isDamage(err)
			h.stuck(shard, &trouble{err: err, evidence: evidence, forGood: bad || errors.As(err, &poison), damaged: bad})
		},
		OnSaveFailed: func(shard, id uint64, err error) {
			if isDamage(err) {
				h.noteDamage(shard, queue.ReplicaID(id), err)
			}
			h.log.Warn("a snapshot was not streamed, and will be asked for again", zap.Uint64("shard", shard), zap.Error(err))
		},
	}
}

// remove removes a shard's state, durably. The replica must be stopped.
func (s *states) remove(shard uint64) error {
	if err := s.store.DeleteShard(shard); err != nil {
		return err
	}
	s.store.Sync()
	return nil
}

func (s *states) close() error { return s.store.Close() }

// noInstaller stands in where a host was given none: it can neither send nor take a whole state.
type noInstaller struct{}

var errNoInstaller = errors.New("this host was opened without an installer")

func (noInstaller) Save(io.Writer, uint64, uint64, uint32, func(func(key, value []byte) error) error, <-chan struct{}) error {
	return errNoInstaller
}

func (noInstaller) Load(io.Reader, uint64, func(key, value []byte) error, <-chan struct{}) (uint64, error) {
	return 0, errNoInstaller
}

// liveState is the state of a full replica while it runs.
type liveState struct {
	mu      sync.RWMutex // held for reading by callbacks
	stopped bool
	reader  queue.Reader
}

// call runs a callback unless the replica was stopped.
func (l *liveState) call(f func(queue.Reader)) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if !l.stopped {
		f(l.reader)
	}
}

// stop waits for callbacks and keeps later ones out. It returns whether the state had been opened.
func (l *liveState) stop() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	return l.reader != nil
}

func (l *liveState) open(r queue.Reader) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reader = r
}

// get returns the reader of a replica that is open and runs.
func (l *liveState) get() (queue.Reader, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.reader, l.reader != nil && !l.stopped
}

// startFull starts a full replica of a queue's shard. The engine opens its state in another goroutine.
func (h *RaftHost) startFull(members map[uint64]string, join bool, run *running, cfg config.Config) error {
	create := replica.Create(h.states.options(run))
	if err := h.nodeHost.StartOnDiskReplica(members, join, create, cfg); err != nil {
		return err
	}
	if _, ok := run.state.get(); !ok {
		return errors.New("its state did not open: the log says why")
	}
	return nil
}

// opened is called by the engine before the first Update.
func (h *RaftHost) opened(run *running, m *queue.QueueStateMachine) {
	meta := m.Meta()
	run.clock.observe(meta.Clock, h.clock.Boot())
	run.applied.Store(uint64(meta.Applied))
	run.state.open(m)
	if h.cfg.OnReplicaStarted != nil {
		run.state.call(func(r queue.Reader) { h.cfg.OnReplicaStarted(run.shard, run.id, r) })
	}
}

// appliedUpdate is called by the state machine after each Update.
func (h *RaftHost) appliedUpdate(run *running, a queue.Applied) {
	run.applied.Store(uint64(a.Index))
	h.tellCopy(run)
	run.state.call(func(r queue.Reader) {
		run.clock.observe(r.Meta().Clock, h.clock.Boot())
		if h.cfg.OnApplied != nil {
			h.cfg.OnApplied(run.shard, a)
		}
	})
}

func (h *RaftHost) installed(run *running) {
	run.state.call(func(r queue.Reader) {
		run.applied.Store(uint64(r.Meta().Applied))
		h.tellCopy(run)
		run.clock.observe(r.Meta().Clock, h.clock.Boot())
		if h.cfg.OnInstalled != nil {
			h.cfg.OnInstalled(run.shard)
		}
	})
}

// hasOptions says whether this host's replica of a shard has the options that v has for it, or there are none to have.
func (h *RaftHost) hasOptions(v *catalog.View, shard uint64) bool {
	want, ok := v.OptionsOf(shard)
	reader, has := h.Reader(shard)
	if !ok || !has {
		return true
	}
	stored := reader.Meta().Options
	want.Version = stored.Version
	return want == stored && stored.Version > 0
}

// applyOptions brings a shard that this host leads to the options that the catalog has for its queue.
func (h *RaftHost) applyOptions(ctx context.Context, p catalog.Placement) error {
	reader, has := h.Reader(p.Shard)
	if !has || h.hasOptions(h.Catalog(), p.Shard) {
		return nil
	}
	stored := reader.Meta().Options
	// This host's view may be older than what the shard has: only the catalog itself may change it.
	v, err := h.ReadCatalog(ctx)
	if err != nil {
		return err
	}
	if h.hasOptions(v, p.Shard) {
		return nil
	}
	want, _ := v.OptionsOf(p.Shard)
	want.Version = stored.Version
	stamp, err := h.Stamp(p.Shard)
	if err != nil {
		return err
	}
	cmd, err := queue.EncodeCommand(nil, &queue.Retention{Stamp: stamp, Options: &want})
	if err != nil {
		return fmt.Errorf("the options of shard %d: %w", p.Shard, err)
	}
	_, err = h.Propose(ctx, p.Shard, cmd)
	return err
}
