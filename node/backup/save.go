package backup

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/swarm"
)

// Source is the fleet that is saved; *client.Client is one.
type Source interface {
	SnapshotQueue(ctx context.Context, name string) (*tierqv1.SnapshotQueueResponse, error)
	SaveShard(ctx context.Context, addr, queue string, partition uint32, w io.Writer) error
}

// Progress hears what is done, now and then; it may be nil. Total is 0 while it is not known.
type Progress func(queue string, partition int, done, total uint64)

// saveRounds is how often every host of a partition is asked for its stream, savePause the time between: an election passes.
const (
	saveRounds = 3
	savePause  = time.Second
)

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Save writes a backup of queues to a directory, which it makes, or which a save that did not end has left. The manifest comes
// last, when all else is durable: without it the directory is no backup. Each partition is whole, at one index of its own.
func Save(ctx context.Context, from Source, queues []string, dir string, progress Progress) (*Manifest, error) {
	m, err := newManifest()
	if err != nil {
		return nil, err
	}
	if err := prepare(dir); err != nil {
		return nil, err
	}
	for _, name := range queues {
		q, fleet, err := saveQueue(ctx, from, name, dir, progress)
		if err != nil {
			return nil, fmt.Errorf("queue %s: %w", name, err)
		}
		m.Queues = append(m.Queues, q)
		m.Fleet = fleet
	}
	return m, m.write(dir)
}

func newManifest() (*Manifest, error) {
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, err
	}
	id[7] |= 1
	return &Manifest{Format: manifestFormat, Version: manifestVersion, ID: hex.EncodeToString(id[:]), CreatedMs: time.Now().UnixMilli()}, nil
}

// prepare makes the directory, and refuses one that holds a backup or anything that a save does not leave behind.
func prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == ManifestFile:
			return fmt.Errorf("%s holds a backup already: name another directory", dir)
		case validFile(name), filepath.Ext(name) == tempSuffix:
		default:
			return fmt.Errorf("%s holds %s, which is not of a backup: name an empty or a new directory", dir, name)
		}
	}
	return nil
}

// tempSuffix ends the names of files that are being written.
const tempSuffix = ".tmp"

// write makes the manifest durable, and with it the backup.
func (m *Manifest) write(dir string) error {
	b, err := m.Encode()
	if err != nil {
		return err
	}
	if err := m.check(); err != nil {
		return fmt.Errorf("BUG: a manifest that cannot be read: %w", err)
	}
	f, err := create(dir, ManifestFile)
	if err != nil {
		return err
	}
	if _, err := f.Write(b); err != nil {
		return errors.Join(err, f.abandon())
	}
	return f.commit()
}

// file is one that appears under its name only when it is whole and durable.
type file struct {
	*os.File
	dir, name string
}

func create(dir, name string) (*file, error) {
	f, err := os.OpenFile(filepath.Join(dir, name+tempSuffix), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o640)
	if err != nil {
		return nil, err
	}
	return &file{File: f, dir: dir, name: name}, nil
}

func (f *file) commit() error {
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.abandon())
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(f.dir, f.name)); err != nil {
		return err
	}
	return syncDir(f.dir)
}

func (f *file) abandon() error {
	err := errors.Join(f.Close(), os.Remove(f.Name()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func saveQueue(ctx context.Context, from Source, name, dir string, progress Progress) (Queue, string, error) {
	r, err := from.SnapshotQueue(ctx, name)
	if err != nil {
		return Queue{}, "", err
	}
	q := Queue{Name: name, ID: r.QueueId, Options: hex.EncodeToString(r.Options), Replicas: r.Replicas, Witnesses: r.Witnesses}
	for i, p := range r.Partitions {
		saved, err := savePartition(ctx, from, name, i, p, dir, progress)
		if err != nil {
			return q, "", fmt.Errorf("partition %d: %w", i, err)
		}
		q.Partitions = append(q.Partitions, saved)
	}
	return q, r.FleetId, nil
}

// savePartition takes the stream of the first host that delivers it whole.
func savePartition(ctx context.Context, from Source, name string, number int, p *tierqv1.SnapshotPartition, dir string, progress Progress) (out Partition, err error) {
	if len(p.Apis) == 0 {
		return out, code.New(code.Unavailable, "no host with a full replica answers")
	}
	for round := range saveRounds {
		if round > 0 {
			pause(ctx, savePause)
		}
		for _, addr := range p.Apis {
			out, err = writeStream(dir, fileOf(name, number), meterOf(progress, name, number, 0), func(w io.Writer) error {
				return from.SaveShard(ctx, addr, name, uint32(number), w)
			})
			if err == nil && out.Shard != p.Shard {
				err = fmt.Errorf("%w: %s sent shard %d, not %d", ErrCorrupt, addr, out.Shard, p.Shard)
			}
			if err == nil || ctx.Err() != nil {
				return out, err
			}
		}
	}
	return out, err
}

// writeStream writes one stream to a file and checks it on its way, so that one that is cut is found before it counts.
func writeStream(dir, name string, meter func(uint64), source func(io.Writer) error) (Partition, error) {
	f, err := create(dir, name)
	if err != nil {
		return Partition{}, err
	}
	t := newTee(f, meter)
	sourceErr := source(t)
	out, err := t.end(sourceErr)
	if err != nil {
		return out, errors.Join(err, f.abandon())
	}
	out.File = name
	return out, f.commit()
}

// tee hashes, counts and verifies what goes to a file.
type tee struct {
	to    io.Writer
	hash  hash.Hash
	meter func(uint64)
	bytes uint64
	pipe  *io.PipeWriter
	found chan verified
}

type verified struct {
	header  swarm.Header
	summary swarm.Summary
	err     error
}

func newTee(to io.Writer, meter func(uint64)) *tee {
	r, w := io.Pipe()
	t := &tee{to: to, hash: sha256.New(), meter: meter, pipe: w, found: make(chan verified, 1)}
	go func() {
		h, s, err := swarm.Verify(r, queue.VerifyPair)
		_ = r.CloseWithError(err)
		t.found <- verified{h, s, err}
	}()
	return t
}

func (t *tee) Write(b []byte) (int, error) {
	if _, err := t.to.Write(b); err != nil {
		return 0, err
	}
	t.hash.Write(b)
	t.bytes += uint64(len(b))
	if t.meter != nil {
		t.meter(t.bytes)
	}
	return t.pipe.Write(b)
}

// end returns what was written, if it is a whole stream.
func (t *tee) end(sourceErr error) (Partition, error) {
	_ = t.pipe.CloseWithError(sourceErr)
	v := <-t.found
	if sourceErr != nil {
		return Partition{}, sourceErr
	}
	if v.err != nil {
		return Partition{}, v.err
	}
	return describe(v, t.bytes, t.hash), nil
}

func describe(v verified, size uint64, h hash.Hash) Partition {
	return Partition{
		Shard: v.header.Shard, Index: v.header.Index, Level: v.header.FormatLevel, Bytes: size, SHA256: hex.EncodeToString(h.Sum(nil)),
		Keys: v.summary.Keys, StateBytes: v.summary.Bytes, Root: hex.EncodeToString(v.summary.Root[:]),
	}
}

// meterOf tells progress at most every so many bytes.
func meterOf(progress Progress, name string, number int, total uint64) func(uint64) {
	if progress == nil {
		return nil
	}
	next := uint64(0)
	return func(done uint64) {
		if done >= next {
			next = done + progressBytes
			progress(name, number, done, total)
		}
	}
}

const progressBytes = 4 << 20
