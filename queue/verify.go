package queue

import "fmt"

// VerifyPair checks one key and value of a shard's key space by themselves: that the key has the shape of its kind and the value
// decodes, with its own checksum where it has one. An error wraps ErrCorrupt. It does not know the other keys.
func VerifyPair(key, value []byte) error {
	if len(key) == 0 {
		return corruptf("an empty key")
	}
	want, ok := keyShapes[key[0]]
	if !ok {
		return corruptf("key % x is of an unknown kind", clipBytes(key))
	}
	if len(key) < want.least || len(key) > want.most {
		return corruptf("key % x: keys of its kind have %d to %d bytes", clipBytes(key), want.least, want.most)
	}
	if err := verifyValue(key, value); err != nil {
		return fmt.Errorf("key % x: %w", clipBytes(key), err)
	}
	return nil
}

func clipBytes(b []byte) []byte { return b[:min(len(b), 32)] }

// keyShapes are the lengths of keys by kind.
var keyShapes = map[byte]struct{ least, most int }{
	kindMeta: {1, 1}, kindMessage: {9, 9}, kindParked: {9, 9}, kindDelayed: {17, 17},
	kindProducer: {18, 18}, kindProducerUse: {26, 26}, kindDedup: {1 + dedupHashBytes, 1 + dedupHashBytes},
	kindDedupAge: {9 + dedupHashBytes, 9 + dedupHashBytes}, kindGroup: {9, 9}, kindGroupName: {2, 1 + MaxNameBytes},
	kindDone: {18, 18}, kindRetry: {17, 17}, kindLease: {17, 17}, kindDead: {17, 17}, kindOp: {9, 9}, kindOpAge: {17, 17},
	kindCount: {9, 9}, kindExport: {17, 17}, kindImport: {1, 1},
}

func verifyValue(key, value []byte) error {
	switch key[0] {
	case kindMeta:
		return new(metaValue).decode(value)
	case kindMessage, kindParked:
		_, err := readMessage(Address(lastU64(key)), key[0] == kindParked, value)
		return err
	case kindProducer:
		return new(producerValue).decode(value)
	case kindDedup:
		return new(dedupValue).decode(value)
	case kindGroup:
		return new(group).decode(value)
	case kindGroupName:
		if len(value) != 8 {
			return corruptf("group by name: value % x", value)
		}
		return nil
	case kindDone:
		return verifyDone(key, value)
	case kindRetry:
		return new(retryValue).decode(value)
	case kindLease:
		_, err := readLease(value)
		return err
	case kindDead:
		_, err := readDead(0, value)
		return err
	case kindOp:
		return new(opValue).decode(value)
	case kindCount:
		return new(countValue).decode(value)
	case kindExport:
		_, err := decodeExport(value)
		return err
	case kindImport:
		return new(importValue).decode(value)
	}
	if len(value) != 0 { // the kinds that are an order only
		return corruptf("a value where there is none: % x", clipBytes(value))
	}
	return nil
}

func verifyDone(key, value []byte) error {
	last, err := decodeDone(value)
	first := Address(lastU64(key))
	if err == nil && (int(key[9]) >= lanes || laneOf(first) != int(key[9]) || laneOf(last) != int(key[9]) || last < first) {
		return corruptf("range %s..%s in lane %d", first, last, key[9])
	}
	return err
}
