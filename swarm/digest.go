// Package swarm compares and moves key spaces: digests by bucket, and a checksummed stream of a whole key space at
// one index, by which a replica is brought to another one's state. It does not know what keys mean, beyond which of
// them end in an address, nor where they are stored: it works over the small interfaces that it declares.
//
// First form: the whole state in one stream (docs/format/stream.md). Exchange of blocks by content comes later, on
// the same bucket hashes.
package swarm

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
)

// BucketAddresses is how many addresses share a bucket. Part of the format.
const BucketAddresses = 4096

// Each calls yield with every key and value of a key space at one index, in strictly ascending order of key, and
// returns the first error of yield or its own. Key and value are valid during the call only.
type Each func(yield func(key, value []byte) error) error

// Bucket is a stretch of neighbouring keys: those of one kind and 4,096 addresses for kinds keyed by address, those
// of one kind otherwise.
type Bucket struct {
	Kind  byte
	First uint64 // the first address; 0 for kinds not keyed by address
	Keys  uint64
	Bytes uint64 // of keys and values
	Hash  [32]byte
}

// Summary is the digest of a key space: equal key spaces have equal roots, wherever they are stored.
type Summary struct {
	Keys  uint64
	Bytes uint64 // of keys and values
	Root  [32]byte
}

// Kinds of keys whose next eight bytes are an address: messages in place, and parked ones. Part of the format.
const (
	kindMessage = 0x02
	kindParked  = 0x03
)

// bucketOf names the bucket of a key.
func bucketOf(key []byte) (kind byte, first uint64) {
	kind = key[0]
	if (kind == kindMessage || kind == kindParked) && len(key) >= 9 {
		a := binary.BigEndian.Uint64(key[1:])
		return kind, a - a%BucketAddresses
	}
	return kind, 0
}

// Digester sums up a key space. Feed it keys in ascending order. The zero value is ready; memory does not grow.
type Digester struct {
	// OnBucket, if set, gets each bucket when it is complete, in order of key.
	OnBucket func(Bucket)

	open   bool
	bucket Bucket
	pairs  hash.Hash
	root   hash.Hash
	sum    Summary
	buf    []byte
}

// Add takes the next key, which must not be empty.
func (d *Digester) Add(key, value []byte) {
	kind, first := bucketOf(key)
	if !d.open || kind != d.bucket.Kind || first != d.bucket.First {
		d.closeBucket()
		d.openBucket(kind, first)
	}
	d.buf = binary.AppendUvarint(d.buf[:0], uint64(len(key)))
	d.buf = append(d.buf, key...)
	d.buf = binary.AppendUvarint(d.buf, uint64(len(value)))
	d.pairs.Write(d.buf)
	d.pairs.Write(value)
	d.bucket.Keys++
	d.bucket.Bytes += uint64(len(key) + len(value))
}

func (d *Digester) openBucket(kind byte, first uint64) {
	d.open = true
	d.bucket = Bucket{Kind: kind, First: first}
	if d.pairs == nil {
		d.pairs, d.root = sha256.New(), sha256.New()
	}
	d.pairs.Reset()
}

func (d *Digester) closeBucket() {
	if !d.open {
		return
	}
	d.open = false
	b := &d.bucket
	d.pairs.Sum(b.Hash[:0])
	d.sum.Keys += b.Keys
	d.sum.Bytes += b.Bytes
	d.buf = append(d.buf[:0], b.Kind)
	for _, v := range [...]uint64{b.First, b.Keys, b.Bytes} {
		d.buf = binary.BigEndian.AppendUint64(d.buf, v)
	}
	d.root.Write(append(d.buf, b.Hash[:]...))
	if d.OnBucket != nil {
		d.OnBucket(*b)
	}
}

// Sum completes the last bucket and returns the summary. The root is SHA-256 over, per bucket, kind u8, first u64,
// keys u64, bytes u64 and hash, big-endian; a bucket's hash is SHA-256 over its keys and values, each after its length
// as a varint. An empty key space has the root of no bytes.
func (d *Digester) Sum() Summary {
	d.closeBucket()
	if d.root == nil {
		d.root = sha256.New()
	}
	d.root.Sum(d.sum.Root[:0])
	return d.sum
}

// Digest sums up a key space and returns its buckets.
func Digest(each Each) (Summary, []Bucket, error) {
	var list []Bucket
	d := Digester{OnBucket: func(b Bucket) { list = append(list, b) }}
	err := each(func(key, value []byte) error {
		if err := checkPair(key, value); err != nil {
			return err
		}
		d.Add(key, value)
		return nil
	})
	if err != nil {
		return Summary{}, nil, err
	}
	return d.Sum(), list, nil
}
