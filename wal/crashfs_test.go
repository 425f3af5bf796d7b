package wal

import (
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
)

// crashFS is a file system in memory that knows what would survive a power loss: the sectors that were
// written before a Sync of their file, and the names before a SyncDir. Every mutating call is counted,
// and from a chosen one on every call fails, as if the power had gone.
type crashFS struct {
	mu      sync.Mutex
	names   map[string]*crashNode
	durable map[string]*crashNode // names that survive
	pending []func(map[string]*crashNode)
	locks   map[string]bool

	ops     int
	offAt   int  // the call at which the power goes; 0 never
	forget  bool // if that call is a Sync, the cache takes what the disk did not get for written
	fail    func(op, name string) error
	free    uint64
	syncs   int
	written int64
}

var errPowerOff = errors.New("power off")

const sectorBytes = 512

// crashDir is the only directory: a SyncDir of another one says nothing about names in it.
const crashDir = "/log"

type crashNode struct {
	data    []byte
	durable []byte
	dirty   map[int64]struct{} // sectors
}

func newCrashFS() *crashFS {
	return &crashFS{names: map[string]*crashNode{}, durable: map[string]*crashNode{}, locks: map[string]bool{}, free: 1 << 40}
}

// step counts a mutating call; done is false if it must not happen.
func (fs *crashFS) step(op, name string) error {
	fs.ops++
	if fs.offAt > 0 && fs.ops > fs.offAt {
		return errPowerOff
	}
	if fs.fail != nil {
		return fs.fail(op, name)
	}
	return nil
}

// after is what comes behind the last step that took effect: at the very call at which the power goes the
// change reaches the cache, and the caller does not learn of it.
func (fs *crashFS) after() error {
	if fs.offAt > 0 && fs.ops == fs.offAt {
		return errPowerOff
	}
	return nil
}

func (fs *crashFS) change(f func(map[string]*crashNode)) {
	f(fs.names)
	fs.pending = append(fs.pending, f)
}

func (fs *crashFS) MkdirAll(string) error { return nil }

func (fs *crashFS) List(dir string) ([]string, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	var names []string
	for n := range fs.names {
		if filepath.Dir(n) == dir {
			names = append(names, filepath.Base(n))
		}
	}
	sort.Strings(names)
	return names, nil
}

func (fs *crashFS) Create(name string) (file, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if err := fs.step("create", name); err != nil {
		return nil, err
	}
	if fs.names[name] != nil {
		return nil, os.ErrExist
	}
	n := &crashNode{dirty: map[int64]struct{}{}}
	fs.change(func(m map[string]*crashNode) { m[name] = n })
	if err := fs.after(); err != nil {
		return nil, err
	}
	return &crashFile{fs, n, name}, nil
}

func (fs *crashFS) Open(name string) (file, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	n := fs.names[name]
	if n == nil {
		return nil, fmt.Errorf("open %s: %w", name, os.ErrNotExist)
	}
	return &crashFile{fs, n, name}, nil
}

func (fs *crashFS) Rename(oldName, newName string) error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if err := fs.step("rename", newName); err != nil {
		return err
	}
	n := fs.names[oldName]
	if n == nil {
		return os.ErrNotExist
	}
	fs.change(func(m map[string]*crashNode) { delete(m, oldName); m[newName] = n })
	return fs.after()
}

func (fs *crashFS) Remove(name string) error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if err := fs.step("remove", name); err != nil {
		return err
	}
	if fs.names[name] == nil {
		return os.ErrNotExist
	}
	fs.change(func(m map[string]*crashNode) { delete(m, name) })
	return fs.after()
}

func (fs *crashFS) SyncDir(dir string) error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if err := fs.step("syncdir", dir); err != nil {
		return err
	}
	if dir != crashDir {
		return fs.after()
	}
	for _, f := range fs.pending {
		f(fs.durable)
	}
	fs.pending = nil
	return fs.after()
}

func (fs *crashFS) FreeBytes(string) (uint64, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.free, nil
}

func (fs *crashFS) Lock(name string) (func() error, error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.locks[name] {
		return nil, errors.New("locked")
	}
	fs.locks[name] = true
	return func() error {
		fs.mu.Lock()
		defer fs.mu.Unlock()
		delete(fs.locks, name)
		return nil
	}, nil
}

type crashFile struct {
	fs   *crashFS
	n    *crashNode
	name string
}

func (f *crashFile) ReadAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if off >= int64(len(f.n.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.n.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *crashFile) WriteAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.fs.step("write", f.name); err != nil {
		return 0, err
	}
	f.fs.written += int64(len(p))
	if need := off + int64(len(p)); need > int64(len(f.n.data)) {
		f.n.data = append(f.n.data, make([]byte, need-int64(len(f.n.data)))...)
	}
	copy(f.n.data[off:], p)
	for s := off / sectorBytes; s*sectorBytes < off+int64(len(p)); s++ {
		f.n.dirty[s] = struct{}{}
	}
	return len(p), f.fs.after()
}

func (f *crashFile) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.fs.step("sync", f.name); err != nil {
		return err
	}
	if f.fs.offAt > 0 && f.fs.ops == f.fs.offAt {
		if f.fs.forget {
			f.n.dirty = map[int64]struct{}{} // as after an I/O error: later syncs find nothing to write
		}
		return errPowerOff // the sectors stay in doubt
	}
	f.fs.syncs++
	f.n.persist(func(int64) bool { return true })
	f.n.durable = append(f.n.durable, make([]byte, len(f.n.data)-len(f.n.durable))...)
	return nil
}

func (f *crashFile) Allocate(size int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.fs.step("allocate", f.name); err != nil {
		return err
	}
	if n := size - int64(len(f.n.data)); n > 0 {
		f.n.data = append(f.n.data, make([]byte, n)...)
	}
	return f.fs.after()
}

func (n *crashNode) persist(keep func(sector int64) bool) {
	for s := range n.dirty {
		if !keep(s) {
			continue
		}
		end := min((s+1)*sectorBytes, int64(len(n.data)))
		if end > int64(len(n.durable)) {
			n.durable = append(n.durable, make([]byte, end-int64(len(n.durable)))...)
		}
		copy(n.durable[s*sectorBytes:end], n.data[s*sectorBytes:end])
	}
	n.dirty = map[int64]struct{}{}
}

func (f *crashFile) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return int64(len(f.n.data)), nil
}

func (f *crashFile) Close() error { return nil }

// crash returns the file system as the next boot finds it: of what was not synced, some sectors, and
// the first so many changes of names.
func (fs *crashFS) crash(rng *rand.Rand) *crashFS {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for i, n := 0, rng.Intn(len(fs.pending)+1); i < n; i++ {
		fs.pending[i](fs.durable)
	}
	share := []float64{0, 0.1, 0.5, 0.9, 1}[rng.Intn(5)]
	next := newCrashFS()
	seen := map[*crashNode]*crashNode{}
	for name, n := range fs.durable {
		m := seen[n]
		if m == nil {
			sectors := make([]int64, 0, len(n.dirty))
			for s := range n.dirty {
				sectors = append(sectors, s)
			}
			sort.Slice(sectors, func(i, j int) bool { return sectors[i] < sectors[j] })
			keep := map[int64]bool{}
			for _, s := range sectors {
				keep[s] = rng.Float64() < share
			}
			n.persist(func(s int64) bool { return keep[s] })
			m = &crashNode{data: append([]byte(nil), n.durable...), durable: append([]byte(nil), n.durable...), dirty: map[int64]struct{}{}}
			seen[n] = m
		}
		next.names[name], next.durable[name] = m, m
	}
	return next
}

// kill returns the file system as the next process finds it when only the last one died: everything that was
// written can be read, and what was not synced is still in doubt. The power goes off at its call offAt. The old
// file system must not be used any more.
func (fs *crashFS) kill(offAt int) *crashFS {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	next := newCrashFS()
	next.names, next.durable, next.pending, next.offAt = fs.names, fs.durable, fs.pending, offAt
	return next
}

// powerOff makes every later call fail.
func (fs *crashFS) powerOff() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.offAt == 0 || fs.ops < fs.offAt {
		fs.offAt = max(fs.ops, 1)
	}
}

// segmentNames lists the segments.
func (fs *crashFS) segmentNames() []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	var names []string
	for n := range fs.names {
		if strings.HasSuffix(n, segmentSuffix) {
			names = append(names, n)
		}
	}
	sort.Strings(names)
	return names
}
