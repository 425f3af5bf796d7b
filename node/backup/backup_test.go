package backup

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
	"github.com/tierq/tierq/swarm"
)

var rewrite = flag.Bool("rewrite-golden", false, "write testdata anew; then read the diff: it is a format change")

// fleet is a fleet of one replica in memory: it streams a machine, and takes a restore into others.
type fleet struct {
	t        *testing.T
	source   *queuetest.Machine
	options  queue.QueueOptions
	cut      int // bytes after which the first address's stream ends
	queues   map[string]uint64
	restored map[string]*queuetest.Machine
	fail     int // imports before the connection breaks; 0: never
}

var errBroken = errors.New("the connection broke")

func newFleet(t *testing.T) *fleet {
	m := queuetest.New(t)
	o := m.Meta().Options
	o.MaxBodyBytes = 1 << 21
	require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: 1000, Options: &o}).Code)
	var cfg queue.GroupConfig
	cfg.EnsureDefaults()
	m.Do(&queue.Group{Stamp: 1000, Op: queue.GroupCreate, OperationID: 1, Name: "g", Config: cfg, FirstHome: 1})
	for i := range 12 {
		m.Do(&queue.Enqueue{Stamp: 1000, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: bytes.Repeat([]byte{byte(i)}, 300_000)}}}}})
	}
	return &fleet{t: t, source: m, options: m.Meta().Options, queues: map[string]uint64{"orders": 4}, restored: map[string]*queuetest.Machine{}}
}

func (f *fleet) SnapshotQueue(_ context.Context, name string) (*tierqv1.SnapshotQueueResponse, error) {
	if f.queues[name] == 0 {
		return nil, code.New(code.UnknownQueue, "no queue %s", name)
	}
	return &tierqv1.SnapshotQueueResponse{FleetId: "00ff", QueueId: f.queues[name], Options: queue.AppendQueueOptions(nil, f.options), Replicas: 2, Witnesses: 1,
		Partitions: []*tierqv1.SnapshotPartition{{Shard: 1, Apis: []string{"one", "two"}}}}, nil
}

func (f *fleet) SaveShard(_ context.Context, addr, _ string, _ uint32, w io.Writer) error {
	if addr == "one" && f.cut > 0 {
		w = &cutter{w, f.cut}
	}
	z := f.source.Freeze()
	defer z.Close()
	err := new(swarm.Installer).Save(w, 1, uint64(z.Meta.Applied), z.Meta.FormatLevel, z.Each, nil)
	if errors.Is(err, io.ErrShortWrite) {
		return nil // the connection ended as if all were well
	}
	return err
}

type cutter struct {
	w    io.Writer
	left int
}

func (c *cutter) Write(b []byte) (int, error) {
	if len(b) > c.left {
		n, _ := c.w.Write(b[:c.left])
		c.left = 0
		return n, io.ErrShortWrite
	}
	c.left -= len(b)
	return c.w.Write(b)
}

func (f *fleet) LocateQueue(_ context.Context, name string) (*tierqv1.LocateQueueResponse, error) {
	if f.queues[name] == 0 {
		return nil, code.New(code.UnknownQueue, "no queue %s", name)
	}
	return &tierqv1.LocateQueueResponse{}, nil
}

func (f *fleet) BeginRestore(_ context.Context, r *tierqv1.BeginRestoreRequest) (*tierqv1.BeginRestoreResponse, error) {
	if f.queues[r.Restore.Name] != 0 && f.queues[r.Restore.Name] != r.ReplaceQueueId {
		return nil, code.New(code.QueueExistsMismatch, "queue %s exists", r.Restore.Name)
	}
	if f.restored[r.Restore.Name] == nil {
		f.restored[r.Restore.Name] = queuetest.New(f.t)
	}
	return &tierqv1.BeginRestoreResponse{Partitions: 1}, nil
}

func (f *fleet) RestoreStatus(_ context.Context, r *tierqv1.RestoreStatusRequest) (*tierqv1.RestoreStatusResponse, error) {
	p, ok := f.restored[r.Restore.Name].Importing()
	return &tierqv1.RestoreStatusResponse{NextChunk: p.Next, Loaded: ok && p.Loaded}, nil
}

func (f *fleet) ImportChunk(_ context.Context, r *tierqv1.ImportChunkRequest) (*tierqv1.ImportChunkResponse, error) {
	if f.fail > 0 {
		if f.fail--; f.fail == 0 {
			return nil, errBroken
		}
	}
	res := f.restored[r.Restore.Name].Do(&queue.Retention{Stamp: 2000, Import: &queue.Import{ID: r.Restore.BackupId, Chunk: r.Chunk, Pairs: bytes.Clone(r.Pairs), Meta: r.Meta, Keys: r.Keys, Bytes: r.Bytes}})
	require.Equal(f.t, code.OK, res.Code)
	return &tierqv1.ImportChunkResponse{NextChunk: res.Version}, nil
}

func (f *fleet) RecoverPartition(_ context.Context, r *tierqv1.RecoverPartitionRequest) (*tierqv1.RecoverPartitionResponse, error) {
	res := f.restored[r.Restore.Name].Do(&queue.Retention{Stamp: 2000, Recover: &queue.Recovery{}})
	require.Equal(f.t, code.OK, res.Code)
	return &tierqv1.RecoverPartitionResponse{RecoveryNumber: res.Version}, nil
}

func (f *fleet) FinishRestore(_ context.Context, r *tierqv1.FinishRestoreRequest) (*tierqv1.FinishRestoreResponse, error) {
	f.queues[r.Restore.Name] = 9
	return &tierqv1.FinishRestoreResponse{QueueId: 9}, nil
}

func save(t *testing.T, f *fleet) (dir string, m *Manifest) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "b")
	m, err := Save(t.Context(), f, []string{"orders"}, dir, nil)
	require.NoError(t, err)
	return dir, m
}

func TestSaveTakesTheNextHostAfterACutStream(t *testing.T) {
	f := newFleet(t)
	for _, cut := range []int{1, 36, 700_000} {
		f.cut = cut
		dir, m := save(t, f)
		again, err := Verify(dir, nil)
		require.NoError(t, err)
		require.Equal(t, m.Queues, again.Queues)
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, 2, "no temporary file stays")
	}
}

func TestSaveRefusesOtherDirectories(t *testing.T) {
	f := newFleet(t)
	dir, _ := save(t, f)
	_, err := Save(t.Context(), f, []string{"orders"}, dir, nil)
	require.ErrorContains(t, err, "holds a backup already")
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "thesis.txt"), nil, 0o600))
	_, err = Save(t.Context(), f, []string{"orders"}, other, nil)
	require.ErrorContains(t, err, "thesis.txt")
	// What a save that was interrupted left is taken over; without a manifest it is no backup.
	left := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(left, "orders.0.stream.tmp"), []byte("half"), 0o600))
	_, err = Open(left)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Save(t.Context(), f, []string{"orders"}, left, nil)
	require.NoError(t, err)
	_, err = Verify(left, nil)
	require.NoError(t, err)
}

// TestDamageIsRefused flips bytes of each class: of the manifest, and of a stream's header, frames, keys, values and footer. Each
// is found, with file and offset, and nothing is created.
func TestDamageIsRefused(t *testing.T) {
	f := newFleet(t)
	dir, m := save(t, f)
	size := int(m.Queues[0].Partitions[0].Bytes)
	positions := []int{0, 8, 10, 12, 16, 24, 32, 36, 37, 41, 45, 49, 50, 60, 200, 100_000, size / 2, size - 53, size - 52, size - 36, size - 4, size - 1}
	for _, name := range []string{"orders.0.stream", ManifestFile} {
		path := filepath.Join(dir, name)
		whole, err := os.ReadFile(path)
		require.NoError(t, err)
		try := func(what string, b []byte) {
			require.NoError(t, os.WriteFile(path, b, 0o600))
			_, err := Verify(dir, nil)
			require.True(t, IsCorrupt(err), "%s: %v", what, err)
			require.ErrorContains(t, err, name)
			require.ErrorContains(t, err, "offset", what)
			if len(positions) > 3 && what[0] == '!' {
				_, err = Restore(t.Context(), f, dir, RestoreOptions{As: "copy"})
				require.True(t, IsCorrupt(err), "%v", err)
				require.Empty(t, f.restored, "nothing may be created")
			}
		}
		at := positions
		if name == ManifestFile {
			at = nil
			for i := range whole {
				at = append(at, i)
			}
		}
		for n, i := range at {
			bad := bytes.Clone(whole)
			bad[i] ^= 0x01
			mark := "flipped"
			if n%7 == 0 {
				mark = "!flipped"
			}
			try(mark, bad)
		}
		try("!cut", whole[:len(whole)-1])
		try("!longer", append(bytes.Clone(whole), ' '))
		require.NoError(t, os.WriteFile(path, whole, 0o600))
	}
	// A stream of another save that is whole by itself.
	f.source.Do(&queue.Enqueue{Stamp: 1000, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("more")}}}}})
	later, _ := save(t, f)
	require.NoError(t, os.Rename(filepath.Join(later, "orders.0.stream"), filepath.Join(dir, "orders.0.stream")))
	_, err := Verify(dir, nil)
	require.ErrorContains(t, err, "another stream than the manifest's")
	require.NoError(t, os.Remove(filepath.Join(dir, "orders.0.stream")))
	_, err = Verify(dir, nil)
	require.True(t, IsCorrupt(err), "%v", err)
}

// TestRestoreGoesOn breaks off at each chunk and goes on.
func TestRestoreGoesOn(t *testing.T) {
	f := newFleet(t)
	dir, _ := save(t, f)
	_, err := Restore(t.Context(), f, dir, RestoreOptions{})
	var e *code.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, code.QueueExistsMismatch, e.Code)
	require.Empty(t, f.restored)
	for i := range 2 {
		f.fail = 2 + i%2
		_, err = Restore(t.Context(), f, dir, RestoreOptions{As: "copy"})
		require.ErrorIs(t, err, errBroken)
		require.Zero(t, f.queues["copy"])
	}
	done, err := Restore(t.Context(), f, dir, RestoreOptions{As: "copy"})
	require.NoError(t, err)
	require.Equal(t, []Restored{{Name: "copy", QueueID: 9, Partitions: 1}}, done)
	m := f.restored["copy"]
	require.NoError(t, m.Check())
	require.Equal(t, f.source.Meta().Counters, m.Meta().Counters)
	require.EqualValues(t, 1, m.Meta().RecoveryNumber)
	list, err := List(filepath.Dir(dir))
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.NoError(t, list[0].Err)
	_, err = Restore(t.Context(), f, dir, RestoreOptions{Queue: "other"})
	require.ErrorContains(t, err, "no queue other")
}

func goldenManifest() *Manifest {
	o := queue.QueueOptions{}
	o.EnsureDefaults()
	o.Version = 1
	hash := strings.Repeat("0123456789abcdef", 4)
	return &Manifest{Format: manifestFormat, Version: 1, ID: "00000000feedf00d", CreatedMs: 1_764_457_200_123, Fleet: strings.Repeat("ab", 16), Queues: []Queue{{
		Name: "orders", ID: 4, Options: hexOf(queue.AppendQueueOptions(nil, o)), Replicas: 2, Witnesses: 1,
		Partitions: []Partition{{Shard: 5, Index: 1000, Level: 3, File: "orders.0.stream", Bytes: 12345, SHA256: hash, Keys: 7, StateBytes: 11000, Root: hash,
			Salvaged: &Salvaged{Host: 2, Replica: 2, Term: 9, AppliedIndex: 900, CommitIndex: 990, LastIndex: 1000, LastEntryTerm: 8}}},
	}}}
}

func hexOf(b []byte) string {
	const digits = "0123456789abcdef"
	out := make([]byte, 0, 2*len(b))
	for _, x := range b {
		out = append(out, digits[x>>4], digits[x&15])
	}
	return string(out)
}

func TestManifestGolden(t *testing.T) {
	b, err := goldenManifest().Encode()
	require.NoError(t, err)
	path := filepath.Join("testdata", "manifest.v1.json")
	if *rewrite {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, b, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(b), "the format has changed: old backups cannot be read any more")
	m, err := DecodeManifest(want)
	require.NoError(t, err)
	m.Checksum = ""
	require.Equal(t, goldenManifest(), m)
}

// TestManifestRefuses: fields that no save writes, under a right checksum.
func TestManifestRefuses(t *testing.T) {
	for what, change := range map[string]func(*Manifest){
		"format":          func(m *Manifest) { m.Format = "other" },
		"version":         func(m *Manifest) { m.Version = 2 },
		"id":              func(m *Manifest) { m.ID = "0000000000000000" },
		"no queues":       func(m *Manifest) { m.Queues = nil },
		"twice":           func(m *Manifest) { m.Queues = append(m.Queues, m.Queues[0]) },
		"name":            func(m *Manifest) { m.Queues[0].Name = "../orders" },
		"options":         func(m *Manifest) { m.Queues[0].Options = "ff" },
		"partitions":      func(m *Manifest) { m.Queues[0].Partitions = nil },
		"layout":          func(m *Manifest) { m.Queues[0].Replicas = 0 },
		"path":            func(m *Manifest) { m.Queues[0].Partitions[0].File = "../orders.0.stream" },
		"absolute path":   func(m *Manifest) { m.Queues[0].Partitions[0].File = "/etc/orders.0.stream" },
		"other file":      func(m *Manifest) { m.Queues[0].Partitions[0].File = "manifest.json" },
		"hash":            func(m *Manifest) { m.Queues[0].Partitions[0].SHA256 = "00" },
		"no state at all": func(m *Manifest) { m.Queues[0].Partitions[0].Keys = 0 },
	} {
		m := goldenManifest()
		change(m)
		b, err := m.Encode()
		require.NoError(t, err)
		_, err = DecodeManifest(b)
		require.ErrorIs(t, err, ErrCorrupt, what)
	}
}

func FuzzDecodeManifest(f *testing.F) {
	b, err := goldenManifest().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("an error that does not wrap ErrCorrupt: %v", err)
			}
			return
		}
		again, err := m.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("two encodings of one manifest: %v", err)
		}
		for _, q := range m.Queues {
			for _, p := range q.Partitions {
				if filepath.Base(p.File) != p.File {
					t.Fatalf("a path: %q", p.File)
				}
			}
		}
	})
}

func TestMayBeLost(t *testing.T) {
	here := host.SalvageShard{Replica: 2, Applied: 90, Commit: 95, Last: 100, LastTerm: 3}
	for _, c := range []struct {
		known, term, want uint64
		told              bool
	}{
		{0, 0, 0, false},
		{100, 3, 0, true},
		{98, 3, 0, true},
		{130, 3, 30, true},
		{130, 4, 35, true}, // what lies above the commit index may have been replaced
		{100, 4, 5, true},
	} {
		s := PlanShard{SalvageShard: here, Known: c.known, KnownTerm: c.term}
		n, told := s.MayBeLost()
		require.Equal(t, c.want, n, "%+v", c)
		require.Equal(t, c.told, told)
	}
}
