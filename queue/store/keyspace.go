package store

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// prefixLen is the length of shard | incarnation.
const prefixLen = 16

// recordOwn is the key, after shard | 0, of the shard's pointer (and, under shard 0, of the store's format version).
const recordOwn = 0x01

// pointer names a shard's incarnations. Stored as format byte 1 and three u64, big-endian; absent means {1, 0, 1}.
type pointer struct {
	live       uint64
	installing uint64 // 0: none
	last       uint64 // the greatest incarnation ever begun
}

const (
	pointerFormat = 1
	pointerLen    = 1 + 3*8
)

func (p pointer) encode() []byte {
	b := make([]byte, 0, pointerLen)
	b = append(b, pointerFormat)
	b = binary.BigEndian.AppendUint64(b, p.live)
	b = binary.BigEndian.AppendUint64(b, p.installing)
	return binary.BigEndian.AppendUint64(b, p.last)
}

func decodePointer(b []byte) (pointer, error) {
	if len(b) != pointerLen || b[0] != pointerFormat {
		return pointer{}, fmt.Errorf("incarnation pointer % x: want format %d and %d bytes", b, pointerFormat, pointerLen)
	}
	p := pointer{
		live:       binary.BigEndian.Uint64(b[1:]),
		installing: binary.BigEndian.Uint64(b[9:]),
		last:       binary.BigEndian.Uint64(b[17:]),
	}
	if p.live == 0 || p.live > p.last || p.installing > p.last || p.installing == p.live {
		return pointer{}, fmt.Errorf("incarnation pointer % x: live %d, installing %d, last %d do not fit", b, p.live, p.installing, p.last)
	}
	return p, nil
}

func (s *Store) readPointer(id uint64) (pointer, error) {
	v, closer, err := s.db.Get(pointerKey(id))
	if errors.Is(err, pebble.ErrNotFound) {
		return pointer{live: 1, last: 1}, nil
	}
	if err != nil {
		return pointer{}, err
	}
	defer closer.Close()
	return decodePointer(v)
}

func pointerKey(id uint64) []byte { return append(appendPrefix(nil, id, 0), recordOwn) }

func appendPrefix(dst []byte, shard, incarnation uint64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, shard)
	return binary.BigEndian.AppendUint64(dst, incarnation)
}

// incarnationEnd is the first key above an incarnation.
func incarnationEnd(shard, incarnation uint64) []byte {
	return successor(appendPrefix(nil, shard, incarnation))
}

// shardEnd is the first key above a shard.
func shardEnd(shard uint64) []byte { return successor(binary.BigEndian.AppendUint64(nil, shard)) }

// successor is the least key above all keys that begin with prefix. The prefix must not be all 0xff; shard
// 2^64-1 gets an end that no key of ours reaches.
func successor(prefix []byte) []byte {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			end := append([]byte(nil), prefix[:i+1]...)
			end[i]++
			return end
		}
	}
	return append(append([]byte(nil), prefix...), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)
}

// dropLeftovers removes every incarnation of a shard but the live one, and the installing mark.
func (s *Store) dropLeftovers(id uint64) error {
	p, err := s.readPointer(id)
	if err != nil {
		return err
	}
	below := [2][]byte{appendPrefix(nil, id, 1), appendPrefix(nil, id, p.live)}
	above := [2][]byte{incarnationEnd(id, p.live), shardEnd(id)}
	b := s.db.NewBatch()
	for _, r := range [][2][]byte{below, above} {
		some, err := s.anyKey(r[0], r[1])
		if err == nil && some {
			err = b.DeleteRange(r[0], r[1], nil)
		}
		if err != nil {
			return errors.Join(err, b.Close())
		}
	}
	if p.installing != 0 {
		p.installing = 0
		if err := b.Set(pointerKey(id), p.encode(), nil); err != nil {
			return errors.Join(err, b.Close())
		}
	}
	if b.Empty() {
		return b.Close()
	}
	return s.commit(b)
}

func (s *Store) anyKey(lower, upper []byte) (bool, error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return false, err
	}
	found := it.First()
	return found, errors.Join(it.Error(), it.Close())
}
