package store

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Install fills a new incarnation of a shard beside the live one, which stays whole and readable until Finish.
//
// The installing mark is committed before the first key and removed in Finish's batch. As commits become durable in
// order, a power loss leaves either the old incarnation (and leftovers, which Open drops), or the new one whole.
// One goroutine uses it, and ends it by Finish or Abort.
type Install struct {
	shard *Shard
	space *space
	b     *pebble.Batch
	over  bool
}

// installBatchBytes is how much is collected before it is committed.
const installBatchBytes = 1 << 20

// BeginInstall starts an install. It is refused while another one of the shard is under way.
func (h *Shard) BeginInstall() (*Install, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		return nil, fmt.Errorf("install of shard %d: %w", h.id, ErrSuperseded)
	}
	if h.pointer.installing != 0 {
		return nil, fmt.Errorf("install of shard %d: another one is under way", h.id)
	}
	p := h.pointer
	p.last++
	p.installing = p.last
	if err := h.setPointerLocked(p, nil); err != nil {
		return nil, fmt.Errorf("begin install of shard %d: %w", h.id, err)
	}
	h.pointer = p
	return &Install{shard: h, space: newSpace(h.id, p.installing), b: h.store.db.NewBatch()}, nil
}

// setPointerLocked commits a pointer and the removal of an incarnation, in one batch. Needs mu.
func (h *Shard) setPointerLocked(p pointer, drop *space) error {
	b := h.store.db.NewBatch()
	err := b.Set(pointerKey(h.id), p.encode(), nil)
	if err == nil && drop != nil {
		err = b.DeleteRange(drop.prefix, drop.end, nil)
	}
	if err != nil {
		return errors.Join(err, b.Close())
	}
	return h.commitLocked(b)
}

// Incarnation returns the number of the incarnation that is being filled.
func (i *Install) Incarnation() uint64 { return i.space.incarnation }

// Set writes a relative key of the new incarnation. Writes are committed by the MiB.
func (i *Install) Set(key, value []byte) error {
	if i.over {
		panic("BUG: store: Set after the install's end")
	}
	op := i.b.SetDeferred(prefixLen+len(key), len(value))
	i.space.put(op.Key, key)
	copy(op.Value, value)
	must(op.Finish())
	if i.b.Len() < installBatchBytes {
		return nil
	}
	return i.commit()
}

func (i *Install) commit() error {
	h := i.shard
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.dead {
		return fmt.Errorf("install of shard %d: %w", h.id, ErrSuperseded)
	}
	b := i.b
	i.b = h.store.db.NewBatch()
	if err := h.commitLocked(b); err != nil {
		return fmt.Errorf("install of shard %d: %w", h.id, err)
	}
	return nil
}

// Finish makes the new incarnation the live one and removes the old one, in one batch. It is durable after a Sync.
// After an error the old one is live and the install can only be aborted.
func (i *Install) Finish() error {
	if err := i.commit(); err != nil {
		return err
	}
	h := i.shard
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		return fmt.Errorf("install of shard %d: %w", h.id, ErrSuperseded)
	}
	old, before := h.space.Load(), h.pointer
	p := pointer{live: i.space.incarnation, last: before.last}
	// Readers look at the space before and after they read. So it changes before the old keys go; the new ones are
	// all there.
	h.adoptLocked(p)
	if err := h.setPointerLocked(p, old); err != nil {
		h.pointer = before
		h.space.Store(old)
		return fmt.Errorf("finish install of shard %d: %w", h.id, err)
	}
	return i.end()
}

// Abort removes what was written. It does nothing after Finish or Abort.
func (i *Install) Abort() error {
	if i.over {
		return nil
	}
	h := i.shard
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		return i.end()
	}
	p := h.pointer
	p.installing = 0
	if err := h.setPointerLocked(p, i.space); err != nil {
		return fmt.Errorf("abort install of shard %d: %w", h.id, err)
	}
	h.pointer = p
	return i.end()
}

func (i *Install) end() error {
	i.over = true
	return i.b.Close()
}
