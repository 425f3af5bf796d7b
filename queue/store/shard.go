package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// Reader reads keys, relative to one incarnation of one shard, at one moment or as it goes on: a *Shard reads what is
// committed now, a *Snapshot what was committed when it was taken, an indexed *Batch its own writes over that.
type Reader interface {
	// Get returns a copy of a value, and false when the key does not exist.
	Get(key []byte) ([]byte, bool, error)
	// View calls f with a value that is valid only during the call; false when the key does not exist.
	View(key []byte, f func(value []byte) error) (bool, error)
	// NewIter iterates over lower <= key < upper; nil bounds are those of the whole shard. It sees one moment.
	NewIter(lower, upper []byte) (*Iter, error)
}

// Shard is the handle of one shard's live incarnation.
type Shard struct {
	store *Store
	id    uint64
	space atomic.Pointer[space]
	// dirty is the number that Sync must wait for: at or above that of the shard's last commit.
	dirty atomic.Uint64

	// mu is held for reading by Commit, for writing by what changes the incarnation.
	mu      sync.RWMutex
	pointer pointer
	dead    bool
}

// space is an incarnation's key range.
type space struct {
	incarnation uint64
	prefix, end []byte
}

func newSpace(shard, incarnation uint64) *space {
	return &space{incarnation: incarnation, prefix: appendPrefix(nil, shard, incarnation), end: incarnationEnd(shard, incarnation)}
}

func (h *Shard) adoptLocked(p pointer) {
	h.pointer = p
	h.space.Store(newSpace(h.id, p.live))
}

// ID returns the shard's id.
func (h *Shard) ID() uint64 { return h.id }

// Incarnation returns the number of the live incarnation. It is local to this host.
func (h *Shard) Incarnation() uint64 { return h.space.Load().incarnation }

// Prefix returns the 16 bytes that stand before the live incarnation's keys. The caller must not change them.
func (h *Shard) Prefix() []byte { return h.space.Load().prefix }

// NewBatch starts a batch of the live incarnation. Close it, or give it to Commit.
func (h *Shard) NewBatch() *Batch { return newBatch(h, h.store.db.NewBatch()) }

// NewIndexedBatch starts a batch that can also be read: it sees its own writes over what is committed. It costs about
// twice as much to write.
func (h *Shard) NewIndexedBatch() *Batch { return newBatch(h, h.store.db.NewIndexedBatch()) }

// Commit makes a batch's writes visible at once and together, and closes the batch. They are durable after a Sync.
// ErrSuperseded: an install or deletion came between; nothing was written. Any other error is a fault of the host.
func (h *Shard) Commit(b *Batch) error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.dead || b.space.incarnation != h.pointer.live || b.shard != h {
		_ = b.Close()
		return fmt.Errorf("commit to shard %d: %w", h.id, ErrSuperseded)
	}
	if b.Empty() {
		return b.Close()
	}
	if err := h.commitLocked(b.take()); err != nil {
		return fmt.Errorf("commit to shard %d: %w", h.id, err)
	}
	return nil
}

// commitLocked commits and notes that the shard has something to flush. Needs mu, for reading at least.
func (h *Shard) commitLocked(b *pebble.Batch) error {
	if err := h.store.commit(b); err != nil {
		return err
	}
	n := h.store.commits.Load()
	for old := h.dirty.Load(); old < n && !h.dirty.CompareAndSwap(old, n); old = h.dirty.Load() {
	}
	return nil
}

// Sync returns when everything that was committed to the shard before the call is durable; at once when it already
// is. One flush serves all shards that wait. It never fails: a flush that does is told to Options.OnFatal.
func (h *Shard) Sync() { h.store.flush.wait(h.dirty.Load()) }

// Get implements Reader on what is committed now.
func (h *Shard) Get(key []byte) ([]byte, bool, error) {
	var out []byte
	found, err := h.View(key, func(v []byte) error {
		out = append(make([]byte, 0, len(v)), v...)
		return nil
	})
	return out, found, err
}

// View implements Reader on what is committed now.
func (h *Shard) View(key []byte, f func([]byte) error) (bool, error) {
	for {
		sp := h.space.Load()
		v, closer, err := lookup(h.store.db, sp, key)
		if h.space.Load() != sp { // an install switched meanwhile: what was read may be the emptied incarnation
			if closer != nil {
				_ = closer.Close()
			}
			continue
		}
		if closer == nil {
			return false, err
		}
		err = f(v)
		return true, errors.Join(err, closer.Close())
	}
}

// NewIter implements Reader on what is committed now.
func (h *Shard) NewIter(lower, upper []byte) (*Iter, error) {
	for {
		sp := h.space.Load()
		it, err := newIter(h.store.db, sp, lower, upper)
		if err != nil || h.space.Load() == sp {
			return it, err
		}
		_ = it.Close()
	}
}

// Snapshot is a view of one incarnation of a shard as it was when the snapshot was taken; close it.
//
// Taken by Shard.Snapshot it is eventually file-only: once the memtables of its moment are flushed it pins files of the shard's range and no
// longer the deleted versions of every shard's keys. So it may be held for as long as a receiver needs.
type Snapshot struct {
	es    pebbleSnapshot
	space *space
}

// pebbleSnapshot is what both forms of Pebble's snapshots can do.
type pebbleSnapshot interface {
	pebbleReader
	Close() error
}

// Snapshot takes a snapshot of the live incarnation. It is exactly what is committed: call it from the writer.
func (h *Shard) Snapshot() *Snapshot {
	return h.snapshot(func(sp *space) pebbleSnapshot {
		return h.store.db.NewEventuallyFileOnlySnapshot([]pebble.KeyRange{{Start: sp.prefix, End: sp.end}})
	})
}

// ReadSnapshot is a Snapshot for one short read. It is much cheaper to take, but as long as it is open no deleted
// version of any shard's keys that it can see is removed: close it before anything that waits.
func (h *Shard) ReadSnapshot() *Snapshot {
	return h.snapshot(func(*space) pebbleSnapshot { return h.store.db.NewSnapshot() })
}

// snapshot takes one that shows the incarnation which was live at its moment, also beside an install that switches.
func (h *Shard) snapshot(take func(*space) pebbleSnapshot) *Snapshot {
	for {
		sp := h.space.Load()
		es := take(sp)
		if h.space.Load() == sp {
			return &Snapshot{es: es, space: sp}
		}
		_ = es.Close()
	}
}

// Incarnation returns the incarnation that the snapshot shows.
func (s *Snapshot) Incarnation() uint64 { return s.space.incarnation }

// Get implements Reader.
func (s *Snapshot) Get(key []byte) ([]byte, bool, error) { return get(s.es, s.space, key) }

// View implements Reader.
func (s *Snapshot) View(key []byte, f func([]byte) error) (bool, error) {
	return view(s.es, s.space, key, f)
}

// NewIter implements Reader. Close the iterator before the snapshot.
func (s *Snapshot) NewIter(lower, upper []byte) (*Iter, error) {
	return newIter(s.es, s.space, lower, upper)
}

// Each calls f with every key and value in order of key, valid during the call only. It returns the first error.
func (s *Snapshot) Each(f func(key, value []byte) error) error {
	it, err := s.NewIter(nil, nil)
	if err != nil {
		return err
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		if err == nil {
			err = f(it.Key(), v)
		}
		if err != nil {
			return errors.Join(err, it.Close())
		}
	}
	return errors.Join(it.Err(), it.Close())
}

// Close releases the snapshot.
func (s *Snapshot) Close() error { return s.es.Close() }

// DiskUsage estimates the bytes on disk of the live incarnation; what is not flushed is not counted.
func (h *Shard) DiskUsage() (uint64, error) {
	sp := h.space.Load()
	return h.store.db.EstimateDiskUsage(sp.prefix, sp.end)
}
