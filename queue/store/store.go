// Package store keeps the state of all of a host's shards in one Pebble store, without a write-ahead log: the Raft
// log of the host is the log, and what a power loss takes away, Raft applies again.
//
// # Layout
//
//	shard u64 | incarnation u64 | key …      integers big-endian; what follows the 16 bytes belongs to the caller
//	shard u64 | 0               | 0x01       the shard's pointer: which incarnation is live, which is being installed
//	0         | 0               | 0x01       the store's format version
//
// Shard 0 is reserved. Callers name keys relative to a shard's live incarnation, so an incarnation reaches no digest,
// stream, receipt or result.
//
// # Durability
//
// Nothing but batches writes keys: an ingested table would be durable before older batches. Pebble makes batches
// durable in the order of their commits, so after a power loss the store holds a prefix of the commits, and each shard
// exactly the prefix at the applied index that it stored in the same batches. Store.Sync and Shard.Sync wait until all
// earlier commits are durable.
//
// # Concurrency
//
// A Store and a Shard are safe for concurrent use. A Batch and an Iter belong to one goroutine. Each shard has one
// writer at a time: its apply, or its install.
package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
)

// formatVersion is the version of this package's own keys. Part of the format.
const formatVersion = 1

// ErrClosed is returned for work that came after Close.
var ErrClosed = errors.New("store: closed")

// ErrSuperseded is returned by Commit for a batch of an incarnation that is not live any more (an install switched,
// or the shard was deleted); nothing was written.
var ErrSuperseded = errors.New("store: the batch belongs to an incarnation that is not live")

// Store is a host's Pebble store.
type Store struct {
	db    *pebble.DB
	dir   string
	opts  Options
	fresh bool // Open made it
	flush flusher

	// commits counts finished commits; a commit's number is taken after it returned.
	commits atomic.Uint64

	mu     sync.Mutex
	closed bool
	shards map[uint64]*Shard
}

// Open opens or creates the store in dir and drops what an unfinished install left behind. A directory that another
// process has open, that is of a newer version, or whose files are damaged is refused.
func Open(dir string, opts Options) (*Store, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	s := &Store{dir: dir, opts: opts, shards: make(map[uint64]*Shard)}
	popts := s.pebbleOptions()
	db, err := pebble.Open(dir, popts)
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	s.db = db
	s.flush.init(s)
	if err := s.prepare(); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", dir, err), db.Close())
	}
	return s, nil
}

// prepare checks or writes the format version and drops leftovers of unfinished installs. Damage that it meets is the trouble of the
// shards that it is in: what is left over there is dropped when the shard is used.
func (s *Store) prepare() error {
	if err := s.checkFormat(); err != nil {
		return err
	}
	ids, err := s.Shards()
	if IsDamaged(err) {
		s.backgroundError(fmt.Errorf("look for unfinished installs: %w", err))
	} else if err != nil {
		return err
	}
	for _, id := range ids {
		if err := s.dropLeftovers(id); IsDamaged(err) {
			s.backgroundError(fmt.Errorf("shard %d: drop what an unfinished install left: %w", id, err))
		} else if err != nil {
			return fmt.Errorf("shard %d: %w", id, err)
		}
	}
	return nil
}

// IsDamaged says whether an error of this package means that a file does not hold what was written to it.
func IsDamaged(err error) bool { return err != nil && pebble.IsCorruptionError(err) }

// Fresh says whether Open found nothing in the directory, and made the store. A store that was opened once is never fresh again, however
// the process ended, unless its files were lost.
func (s *Store) Fresh() bool { return s.fresh }

func (s *Store) checkFormat() error {
	key := append(appendPrefix(nil, 0, 0), recordOwn)
	v, closer, err := s.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		s.fresh = true
		b := s.db.NewBatch()
		if err := b.Set(key, []byte{formatVersion}, nil); err != nil {
			return errors.Join(err, b.Close())
		}
		if err := s.commit(b); err != nil {
			return err
		}
		// On disk before anything is in the store: else a process that is killed soon would leave one that looks as if its files had been lost.
		return s.db.Flush()
	}
	if err != nil {
		return err
	}
	defer closer.Close()
	if len(v) != 1 || v[0] != formatVersion {
		return fmt.Errorf("format version % x: this binary reads version %d: start the newer one", v, formatVersion)
	}
	return nil
}

// Shard returns the handle of a shard, the same one for the same id. It reads the shard's pointer on first use, and writes only where
// damage has kept Open from dropping an unfinished install: a shard exists once something was committed to it. It panics for id 0, which
// is reserved.
func (s *Store) Shard(id uint64) (*Shard, error) {
	if id == 0 {
		panic("BUG: shard 0 is reserved")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	if h, ok := s.shards[id]; ok {
		return h, nil
	}
	p, err := s.readPointer(id)
	if err == nil && p.installing != 0 {
		if err = s.dropLeftovers(id); err == nil {
			p, err = s.readPointer(id)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("shard %d: %w", id, err)
	}
	h := &Shard{store: s, id: id}
	h.adoptLocked(p)
	s.shards[id] = h
	return h, nil
}

// Shards lists the shards that have anything stored, in order of id.
func (s *Store) Shards() ([]uint64, error) {
	it, err := s.db.NewIter(nil)
	if err != nil {
		return nil, err
	}
	defer it.Close()
	var ids []uint64
	for ok := it.SeekGE(appendPrefix(nil, 1, 0)); ok; {
		key := it.Key()
		if len(key) < prefixLen {
			return nil, fmt.Errorf("store %s: key % x is shorter than its prefix", s.dir, key)
		}
		id := binary.BigEndian.Uint64(key)
		ids = append(ids, id)
		end := shardEnd(id)
		ok = it.SeekGE(end)
	}
	return ids, it.Error()
}

// DeleteShard removes everything of a shard in one batch; its handle is dead from then on: commits through it return
// ErrSuperseded, and Shard returns a new one. Deleting a shard that does not exist does nothing. It takes one that is damaged, too.
func (s *Store) DeleteShard(id uint64) error {
	h, err := s.Shard(id)
	if IsDamaged(err) { // it has no handle, so nobody uses it
		return s.deleteRange(id)
	}
	if err != nil {
		return err
	}
	return s.delete(h)
}

func (s *Store) deleteRange(id uint64) error {
	b := s.db.NewBatch()
	if err := b.DeleteRange(appendPrefix(nil, id, 0), shardEnd(id), nil); err != nil {
		return errors.Join(err, b.Close())
	}
	if err := s.commit(b); err != nil {
		return fmt.Errorf("delete shard %d: %w", id, err)
	}
	return nil
}

func (s *Store) delete(h *Shard) error {
	id := h.id
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		// Somebody deleted it first, and what a newer handle has written since is not ours to delete. Or the store is closed.
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			return ErrClosed
		}
		return nil
	}
	if h.pointer.installing != 0 {
		return fmt.Errorf("delete shard %d: an install is under way", id)
	}
	if err := s.deleteRange(id); err != nil {
		return err
	}
	h.dead = true
	s.mu.Lock()
	delete(s.shards, id)
	s.mu.Unlock()
	return nil
}

// DiskUsage returns the bytes of the store's files on disk.
func (s *Store) DiskUsage() uint64 { return s.db.Metrics().DiskSpaceUsage() }

// Metrics returns Pebble's own metrics.
func (s *Store) Metrics() *pebble.Metrics { return s.db.Metrics() }

// Sync returns when everything committed before the call is durable.
func (s *Store) Sync() { s.flush.wait(s.commits.Load()) }

// commit applies a Pebble batch, closes it, and counts it. The number that it returns is at or above the commit's.
func (s *Store) commit(b *pebble.Batch) error {
	n := b.Len()
	if err := b.Commit(pebble.NoSync); err != nil {
		return errors.Join(err, b.Close())
	}
	s.commits.Add(1)
	s.flush.wrote(n)
	return b.Close()
}

// Close makes everything durable and closes the store. Snapshots and iterators must be closed before. It may be
// called twice. After a background failure of a flush it does not flush again.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	handles := s.shards
	s.shards = nil
	s.mu.Unlock()
	for _, h := range handles {
		h.mu.Lock()
		h.dead = true
		h.mu.Unlock()
	}
	s.flush.close()
	if err := s.db.Close(); err != nil {
		return fmt.Errorf("close store %s: %w", s.dir, err)
	}
	return nil
}
