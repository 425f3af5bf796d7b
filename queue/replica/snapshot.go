package replica

import (
	"errors"
	"fmt"
	"io"

	sm "github.com/lni/dragonboat/v4/statemachine"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/store"
)

// prepared is a state at one index, to be streamed.
type prepared struct {
	index       queue.Index
	formatLevel uint32
	snapshot    *store.Snapshot
	poisoned    bool // dragonboat takes it for a state behind a poison entry, which it is not
}

// PrepareSnapshot implements IOnDiskStateMachine. No Update runs meanwhile, so index and snapshot belong together. It
// never fails: a failed one would leave the follower without a second try.
func (r *Replica) PrepareSnapshot() (any, error) {
	m := r.machine.Load()
	meta := m.Meta()
	return &prepared{index: meta.Applied, formatLevel: meta.FormatLevel, snapshot: m.Shard().Snapshot(),
		poisoned: r.stuck.Load()}, nil
}

// SaveSnapshot implements IOnDiskStateMachine. It returns an error of w as it is, ErrSnapshotStopped when stopped, and
// ErrSnapshotAborted in place of any other.
func (r *Replica) SaveSnapshot(ctx any, w io.Writer, stopc <-chan struct{}) error {
	p := ctx.(*prepared)
	defer func() { _ = p.snapshot.Close() }()
	if p.poisoned {
		return sm.ErrSnapshotStopped
	}
	out := &errWriter{w: w}
	err := r.save(p, out, stopc)
	switch {
	case err == nil:
		return nil
	case out.err != nil:
		return out.err
	case stopped(stopc):
		return sm.ErrSnapshotStopped
	}
	if r.opts.OnSaveFailed != nil {
		r.opts.OnSaveFailed(r.shard, r.replica, err)
	}
	return sm.ErrSnapshotAborted
}

func (r *Replica) save(p *prepared, w io.Writer, stopc <-chan struct{}) (err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("panic while a snapshot is saved: %v", x)
		}
	}()
	if r.opts.MaySave != nil {
		if err := r.opts.MaySave(r.shard, r.replica); err != nil {
			return err
		}
	}
	return r.opts.Installer.Save(w, r.shard, uint64(p.index), p.formatLevel, p.snapshot.Each, stopc)
}

// errWriter remembers the writer's own error.
type errWriter struct {
	w   io.Writer
	err error
}

func (w *errWriter) Write(b []byte) (int, error) {
	n, err := w.w.Write(b)
	if err != nil && w.err == nil {
		w.err = err
	}
	return n, err
}

func stopped(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// RecoverFromSnapshot implements IOnDiskStateMachine: it streams the state into a new incarnation, switches to it in
// one batch, and waits until it is durable. The old state is whole, and read from, until then. A stream that is not
// newer than the state changes nothing.
func (r *Replica) RecoverFromSnapshot(from io.Reader, done <-chan struct{}) error {
	index, err := r.install(from, done)
	if err != nil {
		r.waitStuck(fmt.Errorf("install a snapshot of shard %d: %w", r.shard, err), "", done)
		return sm.ErrSnapshotStopped
	}
	r.stuck.Store(false) // the snapshot's index is behind every entry that dragonboat gave to Update
	if r.opts.OnInstalled != nil {
		r.opts.OnInstalled(r.shard, r.replica, index)
	}
	return nil
}

func (r *Replica) install(from io.Reader, done <-chan struct{}) (index queue.Index, err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("panic: %v", x)
		}
	}()
	m := r.machine.Load()
	into, err := m.Shard().BeginInstall()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, into.Abort()) }()
	var said queue.Index
	at, err := r.opts.Installer.Load(from, r.shard, func(key, value []byte) error {
		index, ok, err := queue.AppliedIn(key, value)
		if err != nil {
			return err
		}
		if ok {
			said = index
		}
		return into.Set(key, value)
	}, done)
	if err != nil {
		return 0, err
	}
	if queue.Index(at) > m.Meta().Applied {
		if said != queue.Index(at) {
			return 0, fmt.Errorf("the stream says index %d, its keys say %s", at, said)
		}
		if err := m.ReloadAfter(into.Finish); err != nil {
			return 0, err
		}
	}
	m.Shard().Sync()
	return m.Meta().Applied, nil
}
