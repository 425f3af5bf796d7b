package backup

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/swarm"
)

// Open reads the manifest of a backup.
func Open(dir string) (*Manifest, error) {
	path := filepath.Join(dir, ManifestFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s holds no backup: it has no %s: %w", dir, ManifestFile, err)
	}
	if err != nil {
		return nil, err
	}
	m, err := DecodeManifest(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// Entry is a backup that List has found; Err is set, in place of the manifest, for one that cannot be read.
type Entry struct {
	Dir      string
	Manifest *Manifest
	Err      error
}

// List finds the backup in a directory, or those in the directories below it, by time.
func List(dir string) ([]Entry, error) {
	candidates := []string{dir}
	if _, err := os.Stat(filepath.Join(dir, ManifestFile)); err != nil {
		below, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		candidates = nil
		for _, e := range below {
			if e.IsDir() {
				candidates = append(candidates, filepath.Join(dir, e.Name()))
			}
		}
	}
	var list []Entry
	for _, d := range candidates {
		m, err := Open(d)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		list = append(list, Entry{d, m, err})
	}
	slices.SortStableFunc(list, func(a, b Entry) int { return int(min(1, max(-1, created(a)-created(b)))) })
	return list, nil
}

func created(e Entry) int64 {
	if e.Manifest == nil {
		return 0
	}
	return e.Manifest.CreatedMs
}

// Verify reads a whole backup and checks every checksum and record. It goes on after a damaged file and returns all that is wrong,
// joined; each error names the file and the offset.
func Verify(dir string, progress Progress) (*Manifest, error) {
	m, err := Open(dir)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i := range m.Queues {
		q := &m.Queues[i]
		for n := range q.Partitions {
			p := &q.Partitions[n]
			errs = append(errs, p.verify(dir, meterOf(progress, q.Name, n, p.Bytes), queue.VerifyPair))
		}
	}
	return m, errors.Join(errs...)
}

// verify reads a partition's stream and compares it with the manifest. take gets every pair.
func (p *Partition) verify(dir string, meter func(uint64), take func(key, value []byte) error) error {
	path := filepath.Join(dir, p.File)
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: at offset 0: %w", ErrCorrupt, err)
	}
	defer f.Close()
	in := &counted{r: f, meter: meter}
	sum := sha256.New()
	h, s, err := swarm.Verify(io.TeeReader(in, sum), take)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	got := describe(verified{header: h, summary: s}, in.n, sum)
	got.File, got.Salvaged = p.File, p.Salvaged
	if got != *p {
		return fmt.Errorf("%s: %w: at offset 0: it is another stream than the manifest's: %s", path, ErrCorrupt, p.difference(&got))
	}
	return nil
}

func (p *Partition) difference(got *Partition) string {
	switch {
	case p.Bytes != got.Bytes:
		return fmt.Sprintf("%d bytes, not %d", got.Bytes, p.Bytes)
	case p.Shard != got.Shard || p.Index != got.Index:
		return fmt.Sprintf("shard %d at index %d, not shard %d at index %d", got.Shard, got.Index, p.Shard, p.Index)
	}
	return "hash " + got.SHA256 + ", not " + p.SHA256
}

type counted struct {
	r     io.Reader
	n     uint64
	meter func(uint64)
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += uint64(n)
	if c.meter != nil {
		c.meter(c.n)
	}
	return n, err
}
