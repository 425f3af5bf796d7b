package queue

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// An import brings the saved state of a shard into a fresh one, through the log, so that every replica takes the same
// pairs at the same indexes whenever it joins. It rides in Retention commands (docs/adr/0048):
//
//	chunk 0, 1, …   pairs as in a stream, in order of key, without the saved meta record
//	the last one    carries the saved meta record and what all chunks hold together; the shard's state is the saved one
//	a Recovery      ends the import (recovery.go)
//
// From the first chunk on until the Recovery the shard has an import record, and refuses every other command but a change of
// its options. Until the last chunk its keys mean nothing: no read shows them.

const (
	// MaxImportBytes bounds the pairs of one chunk, unless it is a single larger one.
	MaxImportBytes = 1 << 20
	// MaxImportPairs bounds the pairs of one chunk.
	MaxImportPairs = 16_384
	// maxImportValue bounds a value: the greatest message and what stands around it.
	maxImportValue = 20 << 20
	maxImportKey   = 1 << 10
	maxImportChunk = maxImportValue + maxImportKey + 16
	importFormat   = 1
)

var importKey = []byte{kindImport}

// Import is one chunk of an import.
type Import struct {
	ID    uint64 // names the import; a shard takes one
	Chunk uint64 // from 0; the same again changes nothing
	// Pairs are key length, key, value length, value, …, in order of key, lengths as varints.
	Pairs []byte
	// Meta, in the last chunk, is the saved meta record, and Keys and Bytes are what all chunks hold.
	Meta        []byte
	Keys, Bytes uint64
}

// importValue is how far an import is.
type importValue struct {
	id          uint64
	next        uint64 // the chunk that is due
	keys, bytes uint64
	loaded      bool   // the last chunk has come
	last        []byte // the greatest key
}

func (v *importValue) encode(dst []byte) []byte {
	dst = putUint(append(dst, importFormat), v.id)
	dst = putUint(putUint(putUint(dst, v.next), v.keys), v.bytes)
	return putBytes(putBool(dst, v.loaded), v.last)
}

func (v *importValue) decode(b []byte) error {
	r, err := readValue("import", importFormat, b)
	if err != nil {
		return err
	}
	v.id, v.next, v.keys, v.bytes, v.loaded = r.uint(), r.uint(), r.uint(), r.uint(), r.bool()
	v.last = bytes.Clone(r.bytes())
	return r.done("import")
}

func loadImport(r store.Reader) *importValue {
	var v importValue
	found, err := r.View(importKey, v.decode)
	check(err)
	if !found {
		return nil
	}
	return &v
}

// ImportProgress is how far a shard's import is.
type ImportProgress struct {
	ID     uint64
	Next   uint64 // the chunk that is due
	Loaded bool   // all chunks are there, and a Recovery is due
}

// Importing returns the import that is under way, false for none.
func (s *QueueStateMachine) Importing() (ImportProgress, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.imp == nil {
		return ImportProgress{}, false
	}
	return ImportProgress{ID: s.imp.id, Next: s.imp.next, Loaded: s.imp.loaded}, true
}

// mayApply says whether a command may change a shard during an import.
func (i *importValue) mayApply(c Command) bool {
	r, ok := c.(*Retention)
	if i == nil || !ok {
		return i == nil
	}
	if r.Import != nil || r.Recover != nil {
		return true
	}
	plain := Retention{Stamp: r.Stamp, Options: r.Options}
	return r.Options != nil && bytes.Equal(appendCommand(nil, r), appendCommand(nil, &plain))
}

// importChunk takes one chunk. Result.Version is the chunk that is due.
//
// Refused, with nothing changed: MutationFenced for a shard that is not fresh, for another import than the one that is under
// way, for a chunk that is not due yet or does not follow the ones before, and for totals that are not those of the
// chunks; LimitReached for a state of a format level that this version does not know.
func (t *tx) importChunk(c *Import, r *Result) {
	v := importValue{id: c.ID}
	switch {
	case t.imp != nil:
		v = *t.imp
	case !t.fresh():
		r.Code = code.MutationFenced
		return
	}
	r.Version = v.next
	switch {
	case v.id != c.ID || c.Chunk > v.next:
		r.Code = code.MutationFenced
		return
	case c.Chunk < v.next:
		return // it came before
	}
	first, last, n, size := spanOf(c.Pairs)
	if n > 0 && v.last != nil && bytes.Compare(first, v.last) <= 0 {
		r.Code = code.MutationFenced
		return
	}
	v.next, v.keys, v.bytes = v.next+1, v.keys+n, v.bytes+size
	if n > 0 {
		v.last = bytes.Clone(last)
	}
	if c.Meta != nil {
		if r.Code = t.load(c, &v); r.Code != code.OK {
			return
		}
	}
	mustEachPair(c.Pairs, func(key, value []byte) { t.b.Set(key, adopted(key, value)) })
	t.b.Set(importKey, v.encode(nil))
	t.imp, r.Version = &v, v.next
}

// adopted is what a saved value becomes in another shard. A dead letter that was on its way to a target waits again: the target is
// named by its shard, and in another fleet that is another queue's.
func adopted(key, value []byte) []byte {
	if key[0] != kindDead {
		return value
	}
	d, err := readDead(Address(lastU64(key)), value)
	check(err) // Validate has looked
	if d.ExportState != ExportExporting {
		return value
	}
	d.ExportState, d.Target = ExportPending, 0
	return putDead(nil, &d)
}

// fresh says whether nothing but options was ever stored here.
func (t *tx) fresh() bool {
	m := &t.meta
	return m.Last == 0 && m.Counters == Counters{} && m.RecoveryNumber == 0 && m.nextGroup == 1 && len(t.s.ids) == 0 && !m.Retired
}

// load makes the saved meta record the shard's. The shard's own options stay, if it has been given any: they are the catalog's.
func (t *tx) load(c *Import, v *importValue) code.Code {
	var m metaValue
	if err := m.decode(c.Meta); err != nil {
		return code.Malformed // Validate has looked
	}
	switch {
	case v.keys != c.Keys || v.bytes != c.Bytes:
		return code.MutationFenced
	case m.FormatLevel > maxFormatLevel:
		return code.LimitReached
	}
	own := t.meta
	m.Applied, m.Clock, m.FormatLevel = own.Applied, max(m.Clock, own.Clock), max(m.FormatLevel, own.FormatLevel)
	m.Retired = false
	if own.Options.Version > 0 {
		m.Options = own.Options
	}
	t.meta, v.loaded, t.reload = m, true, true
	return code.OK
}

// derive reads everything again that is derived from the keys; of a shard whose import is under way there is nothing. Needs mu.
func (s *QueueStateMachine) deriveLocked() {
	s.imp = loadImport(s.shard)
	if s.imp != nil && !s.imp.loaded {
		s.groups, s.ids, s.names = map[GroupID]*group{}, nil, map[string]GroupID{}
		s.gone = &rangeSet{id: goneSet}
	} else {
		s.groups, s.ids, s.names = loadGroups(s.shard)
		s.gone = loadRangeSet(s.shard, goneSet)
	}
	s.producers = make(map[Producer]*producerValue)
	s.dedupFrom, s.opFrom, s.useFrom = 0, 0, 0
	s.tail = bucketCount{}
	s.expiry.reset()
}

// eachPair walks the pairs of a chunk.
func eachPair(b []byte, f func(key, value []byte) error) error {
	for len(b) > 0 {
		var key, value []byte
		var ok bool
		if key, b, ok = pairField(b, maxImportKey); ok {
			value, b, ok = pairField(b, maxImportValue)
		}
		if !ok || len(key) == 0 {
			return fmt.Errorf("%w: the pairs of a chunk do not parse", ErrCorrupt)
		}
		if err := f(key, value); err != nil {
			return err
		}
	}
	return nil
}

func pairField(b []byte, most uint64) (f, rest []byte, ok bool) {
	n, used := binary.Uvarint(b)
	if used <= 0 || n > most || n > uint64(len(b)-used) || used != uintLen(n) {
		return nil, nil, false
	}
	end := used + int(n)
	return b[used:end:end], b[end:], true
}

func mustEachPair(b []byte, f func(key, value []byte)) {
	check(eachPair(b, func(key, value []byte) error { f(key, value); return nil }))
}

// spanOf needs pairs that parse.
func spanOf(pairs []byte) (first, last []byte, n, size uint64) {
	mustEachPair(pairs, func(key, value []byte) {
		if n == 0 {
			first = key
		}
		last = key
		n++
		size += uint64(len(key) + len(value))
	})
	return first, last, n, size
}

// AppendPair appends a pair as Import.Pairs has it.
func AppendPair(dst, key, value []byte) []byte {
	return putBytes(putBytes(dst, key), value)
}

// IsOwnRecord says whether a key is of the shard's own record, which an import carries apart from the others.
func IsOwnRecord(key []byte) bool { return bytes.Equal(key, metaKey) }

func (c *Import) validate() *code.Error {
	if c.ID == 0 {
		return invalid("Import.ID is 0")
	}
	if c.Meta == nil && (c.Keys != 0 || c.Bytes != 0) {
		return invalid("Import: totals come with the last chunk")
	}
	if c.Meta != nil {
		if err := VerifyPair(metaKey, c.Meta); err != nil {
			return invalid("Import.Meta: %v", err)
		}
	}
	return c.validatePairs()
}

func (c *Import) validatePairs() *code.Error {
	var last []byte
	n := 0
	err := eachPair(c.Pairs, func(key, value []byte) error {
		n++
		switch {
		case last != nil && bytes.Compare(key, last) <= 0:
			return fmt.Errorf("key % x does not follow % x", key, last)
		case key[0] == kindMeta || key[0] == kindImport:
			return fmt.Errorf("key % x is not one that a chunk carries", key)
		}
		last = key
		return VerifyPair(key, value)
	})
	switch {
	case err != nil:
		return invalid("Import.Pairs: %v", err)
	case n > 1 && len(c.Pairs) > MaxImportBytes || n > MaxImportPairs:
		return invalid("Import.Pairs: %d bytes in %d pairs: a chunk has at most %d in %d, or one larger pair", len(c.Pairs), n, MaxImportBytes, MaxImportPairs)
	}
	return nil
}
