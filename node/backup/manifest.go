package backup

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/bits"
	"strings"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/swarm"
)

const (
	// ManifestFile is the manifest's name. A directory without it is no backup.
	ManifestFile = "manifest.json"

	manifestFormat  = "tierq-backup"
	manifestVersion = 1
	// maxManifestBytes bounds a manifest that is read, maxQueues and maxPartitions what it lists.
	maxManifestBytes = 64 << 20
	maxQueues        = 100_000
	maxPartitions    = 4096
)

// ErrCorrupt is wrapped by every error about the bytes of a backup.
var ErrCorrupt = errors.New("corrupt backup")

// IsCorrupt says whether err tells of damaged bytes of a backup.
func IsCorrupt(err error) bool {
	return errors.Is(err, ErrCorrupt) || errors.Is(err, swarm.ErrCorrupt)
}

// Manifest says what a backup holds. It has one encoding, so that any change of its bytes is found.
type Manifest struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	// ID names the backup: 16 hexadecimal digits, not all 0.
	ID        string `json:"id"`
	CreatedMs int64  `json:"created_unix_ms"`
	// Fleet is the id of the fleet that it was taken from.
	Fleet  string  `json:"fleet"`
	Queues []Queue `json:"queues"`
	// Checksum is CRC-32C, 8 hexadecimal digits, of the encoding with it empty.
	Checksum string `json:"checksum"`
}

// Queue is one queue of a backup.
type Queue struct {
	Name string `json:"name"`
	ID   uint64 `json:"queue_id"`
	// Options are the queue's, encoded as in docs/format/command.md, in hexadecimal.
	Options    string      `json:"options"`
	Replicas   uint32      `json:"replicas"`
	Witnesses  uint32      `json:"witnesses"`
	Partitions []Partition `json:"partitions"` // by number, from 0
}

// Partition is one partition: the state of a shard after one entry of its log.
type Partition struct {
	Shard uint64 `json:"shard"`
	Index uint64 `json:"index"`
	Level uint32 `json:"format_level"`
	// File is the stream's name in the directory, Bytes its length and SHA256 its hash.
	File   string `json:"file"`
	Bytes  uint64 `json:"bytes"`
	SHA256 string `json:"sha256"`
	// Keys and StateBytes count the pairs and their bytes, and Root is their digest.
	Keys       uint64 `json:"keys"`
	StateBytes uint64 `json:"state_bytes"`
	Root       string `json:"root"`
	// Salvaged tells of a state that was taken from a stopped host, with what its log still had; nil: from a fleet that runs.
	Salvaged *Salvaged `json:"salvaged,omitempty"`
}

// Salvaged is what a forced recovery knew of a replica. What the shard committed above LastIndex, on hosts that are gone, is lost.
type Salvaged struct {
	Host          uint64 `json:"host"`
	Replica       uint64 `json:"replica"`
	Term          uint64 `json:"term"`
	AppliedIndex  uint64 `json:"applied_index"` // what the store held
	CommitIndex   uint64 `json:"commit_index"`  // what the replica knew to be committed
	LastIndex     uint64 `json:"last_index"`    // the last entry of its log, all of which was applied
	LastEntryTerm uint64 `json:"last_entry_term"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encode returns the bytes of a manifest, with its checksum.
func (m *Manifest) Encode() ([]byte, error) {
	c := *m
	c.Checksum = ""
	b, err := marshal(&c)
	if err != nil {
		return nil, err
	}
	c.Checksum = fmt.Sprintf("%08x", crc32.Checksum(b, castagnoli))
	return marshal(&c)
}

func marshal(m *Manifest) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(m)
	return b.Bytes(), err
}

// DecodeManifest reads what Encode wrote, and nothing else. Its errors wrap ErrCorrupt.
func DecodeManifest(b []byte) (*Manifest, error) {
	bad := func(format string, args ...any) (*Manifest, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
	}
	if len(b) > maxManifestBytes {
		return bad("a manifest of %d bytes", len(b))
	}
	var m Manifest
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return bad("at offset %d: %v", d.InputOffset(), err)
	}
	switch {
	case m.Format != manifestFormat:
		return bad("at offset 0: its format is %q, not %q", m.Format, manifestFormat)
	case m.Version != manifestVersion:
		return bad("at offset 0: version %d: this binary reads version %d", m.Version, manifestVersion)
	}
	again, err := m.Encode()
	if err != nil {
		return bad("%v", err)
	}
	if at := differ(b, again); at >= 0 {
		return bad("at offset %d: it is not as it was written: its checksum or its layout is another one", at)
	}
	if err := m.check(); err != nil {
		return bad("%v", err)
	}
	return &m, nil
}

// differ returns the offset of the first difference, -1 for none.
func differ(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	return -1
}

// BackupID returns the id as a number.
func (m *Manifest) BackupID() uint64 {
	id, _ := parseHex64(m.ID)
	return id
}

func parseHex64(s string) (id uint64, ok bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 8 || s != strings.ToLower(s) {
		return 0, false
	}
	for _, x := range b {
		id = id<<8 | uint64(x)
	}
	return id, id != 0
}

func (m *Manifest) check() error {
	if _, ok := parseHex64(m.ID); !ok {
		return fmt.Errorf("id %q", m.ID)
	}
	if len(m.Queues) == 0 || len(m.Queues) > maxQueues {
		return fmt.Errorf("%d queues", len(m.Queues))
	}
	names, files := map[string]bool{}, map[string]bool{}
	for i := range m.Queues {
		q := &m.Queues[i]
		if names[q.Name] {
			return fmt.Errorf("queue %s is there twice", q.Name)
		}
		names[q.Name] = true
		if err := q.check(files); err != nil {
			return fmt.Errorf("queue %q: %w", q.Name, err)
		}
	}
	return nil
}

func (q *Queue) check(files map[string]bool) error {
	if !validName(q.Name) {
		return errors.New("not a queue's name")
	}
	o, err := q.QueueOptions()
	if err != nil {
		return err
	}
	if n := len(q.Partitions); n == 0 || n > maxPartitions || n != int(max(o.Partitions, 1)) {
		return fmt.Errorf("%d partitions, its options say %d", n, o.Partitions)
	}
	if q.Replicas == 0 || bits.Len32(q.Replicas|q.Witnesses) > 8 {
		return fmt.Errorf("a layout of %d replicas and %d witnesses", q.Replicas, q.Witnesses)
	}
	for i := range q.Partitions {
		p := &q.Partitions[i]
		if files[p.File] || !validFile(p.File) || !isHash(p.SHA256) || !isHash(p.Root) || p.Shard == 0 || p.Index == 0 || p.Keys == 0 {
			return fmt.Errorf("partition %d: a field that no backup has", i)
		}
		files[p.File] = true
	}
	return nil
}

// QueueOptions decodes and checks the options.
func (q *Queue) QueueOptions() (queue.QueueOptions, error) {
	b, err := hex.DecodeString(q.Options)
	if err != nil {
		return queue.QueueOptions{}, fmt.Errorf("options: %w", err)
	}
	o, err := queue.DecodeQueueOptions(b)
	if err == nil {
		err = o.Validate()
	}
	if err != nil {
		return o, fmt.Errorf("options: %w", err)
	}
	return o, nil
}

func isHash(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 32 && s == strings.ToLower(s)
}

// validName accepts what a queue may be called.
func validName(s string) bool {
	if s == "" || len(s) > queue.MaxNameBytes || s[0] == '.' {
		return false
	}
	return strings.Trim(s, nameBytes) == "" && !strings.ContainsFunc(s, func(r rune) bool { return !strings.ContainsRune(nameBytes, r) })
}

const nameBytes = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"

// streamSuffix ends the name of a stream's file.
const streamSuffix = ".stream"

// validFile accepts the names that fileOf makes, and so no path.
func validFile(s string) bool {
	name, ok := strings.CutSuffix(s, streamSuffix)
	queueName, number, found := cutLast(name, ".")
	return ok && found && validName(queueName) && number != "" && strings.Trim(number, "0123456789") == ""
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// fileOf names the stream of a partition.
func fileOf(queueName string, partition int) string {
	return fmt.Sprintf("%s.%d%s", queueName, partition, streamSuffix)
}
