package host

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

const journalFile = "replicas.journal"

// step is how far this host's dealings with a replica are. Part of the format; do not renumber.
type step uint8

const (
	// stepBorn: this host is about to claim the replica's first start, under a nonce. Durable before the claim.
	stepBorn step = 1
	// stepStarting: StartReplica is about to be called. It survives the process, not a power loss: what it is for, a start
	// that panics the process, leaves the machine up.
	stepStarting step = 2
	// stepStarted: StartReplica returned; the replica has data here from now on. Durable.
	stepStarted step = 3
	// stepRemoving: the data are about to be removed and the replica never starts again. Durable.
	stepRemoving step = 4
	// stepRemoved: the data are removed. Durable.
	stepRemoved step = 5
	// stepLost: the replica had been started and its data are not here. Durable.
	stepLost step = 6
	// stepUp: a start that was not the first returned. It takes back stepStarting, and is as durable.
	stepUp step = 7
	// stepPanicked: a start ended the process by a panic. Written when the next one opens the journal.
	stepPanicked step = 8
)

// replicaKey names a replica.
type replicaKey struct{ shard, replica uint64 }

// replicaRecord is what the journal says of a replica.
type replicaRecord struct {
	nonce    uint64 // of its claim
	begun    bool   // it has been started at least once
	starts   int    // starts that ended the process by a panic, in a row
	starting bool   // one is under way
	removing bool
	removed  bool
	lost     bool
}

// A record in the file, big-endian: kind u8, shard u64, replica u64, nonce u64, CRC-32C of these u32.
const journalRecordBytes = 1 + 8 + 8 + 8 + 4

var journalMagic = []byte("TQREPL\x00\x01")

// journal records, on this host's disk, what the catalog cannot know in time: which replicas have been started here, and
// which start is under way. Its methods may be called from any goroutine.
type journal struct {
	mu       sync.Mutex
	f        appendFile
	size     int64 // of its whole records
	torn     error // the file ends in a part of a record that could not be taken away
	replicas map[replicaKey]replicaRecord
}

// appendFile is what the journal needs of its file, which is opened for appending.
type appendFile interface {
	io.WriteCloser
	Sync() error
	Truncate(size int64) error
}

// openJournal reads the journal of a data directory, cuts a torn tail, and rewrites it in its shortest form. Starts that were under way
// when the last process ended count against the replica only if that process panicked: a kill proves nothing.
func openJournal(dir string, panicked bool) (*journal, error) {
	path := filepath.Join(dir, journalFile)
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the journal of replicas: %w", err)
	}
	j := &journal{replicas: make(map[replicaKey]replicaRecord)}
	if err := j.load(path, b); err != nil {
		return nil, err
	}
	j.judgeStarts(panicked)
	whole := j.encode()
	if err := replaceFile(path, whole); err != nil {
		return nil, fmt.Errorf("write the journal of replicas: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, fmt.Errorf("open the journal of replicas: %w", err)
	}
	j.f, j.size = f, int64(len(whole))
	return j, nil
}

// load applies the records of b. What follows the last whole record is a write that a crash cut short; a bad record with a whole
// one behind it is corruption.
func (j *journal) load(path string, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if !bytes.HasPrefix(b, journalMagic) {
		return fmt.Errorf("%s is not a journal that this binary knows", path)
	}
	for at := len(journalMagic); at+journalRecordBytes <= len(b); at += journalRecordBytes {
		r := b[at : at+journalRecordBytes]
		if crc32.Checksum(r[:25], crcTable) != binary.BigEndian.Uint32(r[25:]) {
			if at+2*journalRecordBytes <= len(b) {
				return fmt.Errorf("%s: the record at offset %d does not match its checksum: restore the file, or replace this host with a fresh one", path, at)
			}
			return nil
		}
		key := replicaKey{binary.BigEndian.Uint64(r[1:]), binary.BigEndian.Uint64(r[9:])}
		j.step(key, step(r[0]), binary.BigEndian.Uint64(r[17:]))
	}
	return nil
}

// step applies one record to the replica's state.
func (j *journal) step(key replicaKey, s step, nonce uint64) {
	r := j.replicas[key]
	switch s {
	case stepBorn:
		r.nonce = nonce
	case stepStarting:
		r.starting = true
	case stepPanicked:
		r.starts++
	case stepStarted:
		r.begun, r.starts, r.starting = true, 0, false
	case stepUp:
		r.starts, r.starting = 0, false
	case stepRemoving:
		r.removing = true
	case stepRemoved:
		r.removed = true
	case stepLost:
		r.lost = true
	}
	j.replicas[key] = r
}

// judgeStarts turns the starts that were under way into panics, or into nothing.
func (j *journal) judgeStarts(panicked bool) {
	for key, r := range j.replicas {
		if r.starting && panicked {
			r.starts++
		}
		r.starting = false
		j.replicas[key] = r
	}
}

// encode returns the shortest journal with the same meaning.
func (j *journal) encode() []byte {
	b := bytes.Clone(journalMagic)
	for key, r := range j.replicas {
		add := func(s step) { b = appendJournalRecord(b, key, s, r.nonce) }
		if r.nonce != 0 {
			add(stepBorn)
		}
		if r.begun {
			add(stepStarted)
		}
		for range r.starts {
			add(stepPanicked)
		}
		if r.removing {
			add(stepRemoving)
		}
		if r.removed {
			add(stepRemoved)
		}
		if r.lost {
			add(stepLost)
		}
	}
	return b
}

func appendJournalRecord(b []byte, key replicaKey, s step, nonce uint64) []byte {
	at := len(b)
	b = append(b, byte(s))
	b = binary.BigEndian.AppendUint64(b, key.shard)
	b = binary.BigEndian.AppendUint64(b, key.replica)
	b = binary.BigEndian.AppendUint64(b, nonce)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b[at:], crcTable))
}

// append writes one record whole, or nothing: a full disk may take a part of it, behind which every later record would be unreadable.
func (j *journal) append(record []byte) error {
	if j.torn != nil {
		return j.torn
	}
	n, err := j.f.Write(record)
	if err == nil {
		j.size += int64(len(record))
		return nil
	}
	if n > 0 {
		if terr := j.f.Truncate(j.size); terr != nil {
			j.torn = errors.Join(err, terr)
		}
	}
	return err
}

// record writes a step. It is durable when record returns, but for stepStarting and stepUp.
func (j *journal) record(key replicaKey, s step, nonce uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.append(appendJournalRecord(nil, key, s, nonce)); err != nil {
		return fmt.Errorf("write the journal of replicas: %w", err)
	}
	if s != stepStarting && s != stepUp {
		if err := j.f.Sync(); err != nil {
			// What is on disk is unknown from here on.
			panic(fmt.Sprintf("FATAL: sync the journal of replicas: %v", err))
		}
	}
	j.step(key, s, nonce)
	return nil
}

// begun returns the replicas that were started here, and are neither lost nor removed.
func (j *journal) begun() []replicaKey {
	j.mu.Lock()
	defer j.mu.Unlock()
	var keys []replicaKey
	for key, r := range j.replicas {
		if r.begun && !r.lost && !r.removing {
			keys = append(keys, key)
		}
	}
	return keys
}

// get returns what the journal says of a replica; the zero value: nothing.
func (j *journal) get(key replicaKey) replicaRecord {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.replicas[key]
}

func (j *journal) close() error { return j.f.Close() }
