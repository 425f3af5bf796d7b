package queue

import "encoding/binary"

// The key space of a shard. A key is kind | …, integers big-endian; queue/store puts shard | incarnation before it
// (docs/format/keys.md). Part of the format; do not renumber.
const (
	kindMeta        = 0x01 // –
	kindMessage     = 0x02 // address
	kindParked      = 0x03 // address
	kindDelayed     = 0x04 // visible-at, address
	kindProducer    = 0x05 // producer kind, id, sub
	kindProducerUse = 0x06 // last use, producer kind, id, sub: the order of forgetting
	kindDedup       = 0x07 // hash of the dedup id
	kindDedupAge    = 0x08 // expires-at, hash
	kindGroup       = 0x09 // group id
	kindGroupName   = 0x0a // name
	kindDone        = 0x0b // group id (0: addresses that exist for nobody any more), lane, first position
	kindRetry       = 0x0c // group id, address
	kindLease       = 0x0d // group id, address
	kindDead        = 0x0e // group id, address
	kindOp          = 0x0f // operation id
	kindOpAge       = 0x10 // expires-at, operation id
	kindCount       = 0x11 // bucket of bucketSize addresses
	kindExport      = 0x12 // group id, export number
	kindImport      = 0x13 // –: an import that is under way
	kindEnd         = 0x14 // above all keys
)

const (
	// lanes is how many lanes an address space is dealt to: lane = address mod lanes. Part of the format.
	lanes = 64
	// bucketSize is how many addresses share a count record. Part of the format.
	bucketSize = 4096
	// dedupHashBytes is how much of SHA-256 of a dedup id names it. Part of the format.
	dedupHashBytes = 16
	// goneSet is the group id under which done ranges say that an address above the least floor of the groups exists no more.
	goneSet GroupID = 0
)

type dedupHash [dedupHashBytes]byte

var (
	metaKey = []byte{kindMeta}
	be      = binary.BigEndian
)

func appendKey1(dst []byte, kind byte, a uint64) []byte {
	return be.AppendUint64(append(dst, kind), a)
}

func appendKey2(dst []byte, kind byte, a, b uint64) []byte {
	return be.AppendUint64(be.AppendUint64(append(dst, kind), a), b)
}

func appendMessageKey(dst []byte, a Address) []byte { return appendKey1(dst, kindMessage, uint64(a)) }

func appendDelayedKey(dst []byte, k DelayedKey) []byte {
	return appendKey2(dst, kindDelayed, uint64(k.VisibleAt), uint64(k.Address))
}

func appendProducerKey(dst []byte, p Producer) []byte {
	return appendProducer(append(dst, kindProducer), p)
}

func appendProducerUseKey(dst []byte, use Stamp, p Producer) []byte {
	return appendProducer(appendKey1(dst, kindProducerUse, uint64(use)), p)
}

func appendProducer(dst []byte, p Producer) []byte {
	return be.AppendUint64(be.AppendUint64(append(dst, byte(p.Kind)), p.ID), p.Sub)
}

func appendGroupNameKey(dst []byte, name string) []byte {
	return append(append(dst, kindGroupName), name...)
}

func appendDoneKey(dst []byte, set GroupID, lane int, first Address) []byte {
	dst = append(appendKey1(dst, kindDone, uint64(set)), byte(lane))
	return be.AppendUint64(dst, uint64(first))
}

func appendGroupAddressKey(dst []byte, kind byte, id GroupID, a Address) []byte {
	return appendKey2(dst, kind, uint64(id), uint64(a))
}

func appendDedupKey(dst []byte, h dedupHash) []byte { return append(append(dst, kindDedup), h[:]...) }

func appendDedupAgeKey(dst []byte, at Stamp, h dedupHash) []byte {
	return append(appendKey1(dst, kindDedupAge, uint64(at)), h[:]...)
}

// lastU64 reads the integer at the end of a key.
func lastU64(key []byte) uint64 { return be.Uint64(key[len(key)-8:]) }

func delayedKeyOf(key []byte) DelayedKey {
	return DelayedKey{VisibleAt: Stamp(be.Uint64(key[1:])), Address: Address(be.Uint64(key[9:]))}
}

func producerOfUseKey(key []byte) (Stamp, Producer) {
	return Stamp(be.Uint64(key[1:])), Producer{Kind: ProducerKind(key[9]), ID: be.Uint64(key[10:]), Sub: be.Uint64(key[18:])}
}

func laneOf(a Address) int { return int(a % lanes) }

// firstInLane is the least address of a lane above a.
func firstInLane(lane int, a Address) Address {
	next := a + 1
	return next + Address((lane-int(next%lanes)+lanes)%lanes)
}

func bucketOf(a Address) uint64 { return uint64(a) / bucketSize }

func bucketFirst(b uint64) Address { return Address(b * bucketSize) }

func bucketLast(b uint64) Address { return Address(b*bucketSize + bucketSize - 1) }
