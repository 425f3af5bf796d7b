package store

import (
	"errors"
	"io"

	"github.com/cockroachdb/pebble/v2"
)

// Batch collects writes to one incarnation of one shard. Keys are relative; keys and values are copied.
//
// Its methods do not return errors: a batch in memory fails only by being too large (4 GiB), which is a bug.
type Batch struct {
	shard *Shard
	space *space
	b     *pebble.Batch
}

func newBatch(h *Shard, b *pebble.Batch) *Batch { return &Batch{shard: h, space: h.space.Load(), b: b} }

// Set writes a value.
func (b *Batch) Set(key, value []byte) {
	op := b.b.SetDeferred(prefixLen+len(key), len(value))
	b.space.put(op.Key, key)
	copy(op.Value, value)
	must(op.Finish())
}

// SetFunc writes a value of n bytes that fill puts into place; all n must be set. It saves the copy of a large value.
func (b *Batch) SetFunc(key []byte, n int, fill func(dst []byte)) {
	op := b.b.SetDeferred(prefixLen+len(key), n)
	b.space.put(op.Key, key)
	fill(op.Value)
	must(op.Finish())
}

// Delete removes a key; it need not exist.
func (b *Batch) Delete(key []byte) {
	op := b.b.DeleteDeferred(prefixLen + len(key))
	b.space.put(op.Key, key)
	must(op.Finish())
}

// DeleteRange removes lower <= key < upper; nil bounds are those of the whole shard. Each costs every later read of
// the memtable a little: remove a few known keys one by one, and many by range.
func (b *Batch) DeleteRange(lower, upper []byte) {
	lo, up := b.space.bounds(lower, upper)
	must(b.b.DeleteRange(lo, up, nil))
}

// Get implements Reader on an indexed batch.
func (b *Batch) Get(key []byte) ([]byte, bool, error) { return get(b.b, b.space, key) }

// View implements Reader on an indexed batch; f must not write to the batch.
func (b *Batch) View(key []byte, f func([]byte) error) (bool, error) {
	return view(b.b, b.space, key, f)
}

// NewIter implements Reader on an indexed batch. It does not see writes that come after it was made.
func (b *Batch) NewIter(lower, upper []byte) (*Iter, error) {
	return newIter(b.b, b.space, lower, upper)
}

// Empty says whether nothing was written.
func (b *Batch) Empty() bool { return b.b.Empty() }

// Bytes is the size of what was written.
func (b *Batch) Bytes() int { return b.b.Len() }

// Close drops the batch; it may be called after Commit and twice.
func (b *Batch) Close() error {
	if b.b == nil {
		return nil
	}
	return b.take().Close()
}

// take gives the Pebble batch away.
func (b *Batch) take() *pebble.Batch {
	p := b.b
	b.b = nil
	return p
}

func must(err error) {
	if err != nil {
		panic("BUG: store: batch: " + err.Error())
	}
}

// Iter walks keys of one incarnation in order. It begins before the first one.
type Iter struct {
	it    *pebble.Iterator
	space *space
	buf   []byte
}

// First, Last, Next and Prev move, and say whether there is a key.
func (i *Iter) First() bool { return i.it.First() }

// Last moves to the last key.
func (i *Iter) Last() bool { return i.it.Last() }

// Next moves on.
func (i *Iter) Next() bool { return i.it.Next() }

// Prev moves back.
func (i *Iter) Prev() bool { return i.it.Prev() }

// SeekGE moves to the first key at or above key.
func (i *Iter) SeekGE(key []byte) bool {
	i.buf = i.space.absolute(i.buf[:0], key)
	return i.it.SeekGE(i.buf)
}

// SeekLT moves to the last key below key.
func (i *Iter) SeekLT(key []byte) bool {
	i.buf = i.space.absolute(i.buf[:0], key)
	return i.it.SeekLT(i.buf)
}

// SeekGEBelow is SeekGE, but keys at or above below do not count: it need not walk over those that were deleted.
func (i *Iter) SeekGEBelow(key, below []byte) bool {
	i.buf = i.space.absolute(i.buf[:0], key)
	n := len(i.buf)
	i.buf = i.space.absolute(i.buf, below)
	return i.it.SeekGEWithLimit(i.buf[:n:n], i.buf[n:]) == pebble.IterValid
}

// SeekLTFrom is SeekLT, but keys below from do not count: it need not find that out by walking over those that were deleted.
func (i *Iter) SeekLTFrom(key, from []byte) bool {
	i.buf = i.space.absolute(i.buf[:0], key)
	n := len(i.buf)
	i.buf = i.space.absolute(i.buf, from)
	return i.it.SeekLTWithLimit(i.buf[:n:n], i.buf[n:]) == pebble.IterValid
}

// Valid says whether it stands on a key.
func (i *Iter) Valid() bool { return i.it.Valid() }

// Key is the relative key, valid until the next move.
func (i *Iter) Key() []byte { return i.it.Key()[prefixLen:] }

// Value is the value, valid until the next move.
func (i *Iter) Value() ([]byte, error) { return i.it.ValueAndErr() }

// Err is the error that ended the walk, if one did.
func (i *Iter) Err() error { return i.it.Error() }

// Close releases the iterator and returns Err.
func (i *Iter) Close() error { return i.it.Close() }

// pebbleReader is what a Pebble store, snapshot and batch share.
type pebbleReader interface {
	Get(key []byte) (value []byte, closer io.Closer, err error)
	NewIter(o *pebble.IterOptions) (*pebble.Iterator, error)
}

func get(r pebbleReader, sp *space, key []byte) ([]byte, bool, error) {
	var out []byte
	found, err := view(r, sp, key, func(v []byte) error {
		out = append(make([]byte, 0, len(v)), v...)
		return nil
	})
	return out, found, err
}

func view(r pebbleReader, sp *space, key []byte, f func([]byte) error) (bool, error) {
	v, closer, err := lookup(r, sp, key)
	if closer == nil {
		return false, err
	}
	err = f(v)
	return true, errors.Join(err, closer.Close())
}

// lookup returns a nil closer for a key that does not exist, and with every error.
func lookup(r pebbleReader, sp *space, key []byte) ([]byte, io.Closer, error) {
	var buf [96]byte
	v, closer, err := r.Get(sp.absolute(buf[:0], key))
	switch {
	case errors.Is(err, pebble.ErrNotFound):
		return nil, nil, nil
	case err != nil:
		return nil, nil, err
	}
	return v, closer, nil
}

func newIter(r pebbleReader, sp *space, lower, upper []byte) (*Iter, error) {
	lo, up := sp.bounds(lower, upper)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lo, UpperBound: up})
	if err != nil {
		return nil, err
	}
	return &Iter{it: it, space: sp}, nil
}

func (sp *space) absolute(dst, key []byte) []byte { return append(append(dst, sp.prefix...), key...) }

func (sp *space) put(dst, key []byte) { copy(dst[copy(dst, sp.prefix):], key) }

func (sp *space) bounds(lower, upper []byte) (lo, up []byte) {
	lo, up = sp.prefix, sp.end
	if lower != nil {
		lo = sp.absolute(nil, lower)
	}
	if upper != nil {
		up = sp.absolute(nil, upper)
	}
	return lo, up
}
