package tierqv1

// MaxPartitions is the greatest number of partitions of a queue.
const MaxPartitions = 64

// PartitionOfKey returns the partition, below n, of a message with this ordering key in a queue of n partitions; n is at
// least 1. It is part of the format (docs/format/partition.md): clients and hosts of all versions choose alike, or a key
// would lose its order.
func PartitionOfKey(key []byte, n uint32) uint32 {
	// FNV-1a, and a finalizer: the low bits of FNV-1a alone depend on the low bits of the key's bytes only.
	h := uint64(14695981039346656037)
	for _, b := range key {
		h ^= uint64(b)
		h *= 1099511628211
	}
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return uint32(h % uint64(n))
}

// PartitionOf returns the partition of a message that its publisher does not place itself: by key, else by dedup id, so
// that a second copy meets the first one. ok is false for a message with neither: it goes where its batch goes.
func (m *OutMessage) PartitionOf(n uint32) (partition uint32, ok bool) {
	switch {
	case len(m.GetKey()) > 0:
		return PartitionOfKey(m.GetKey(), n), true
	case len(m.GetDedupId()) > 0:
		return PartitionOfKey(m.GetDedupId(), n), true
	}
	return 0, false
}
