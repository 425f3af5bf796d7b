package wal

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
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
	pending []nameChange
	locks   map[string]bool

	ops     int
	offAt   int  // the call at which the power goes; 0 never
	forget  bool // if that call is a Sync, the cache takes what the disk did not get for written
	fail    func(op, name string) error
	free    uint64
	syncs   int
	written int64
	read    int64
}

var errPowerOff = errors.New("power off")

const sectorBytes = 512

// crashDir is the only directory: a SyncDir of another one says nothing about names in it.
const crashDir = "/log"

// nameChange takes a name away, unless it is empty, and then gives one, unless there is no node.
type nameChange struct {
	gone, name string
	node       *crashNode
}

func (c nameChange) apply(names map[string]*crashNode) {
	delete(names, c.gone)
	if c.node != nil {
		names[c.name] = c.node
	}
}

// crashNode is a file. Its contents may be another node's, too, until it writes.
type crashNode struct {
	data, durable             []byte
	dirty                     []bool // by sector; those behind its end are clean
	dataShared, durableShared bool
}

// share returns a node with the same contents. Whichever of the two writes first copies them.
func (n *crashNode) share() *crashNode {
	n.dataShared, n.durableShared = true, true
	return &crashNode{data: n.data, durable: n.durable, dirty: slices.Clone(n.dirty), dataShared: true, durableShared: true}
}

// ownData returns the node's data for writing, at least size bytes of it.
func (n *crashNode) ownData(size int64) []byte {
	n.data, n.dataShared = grown(n.data, size, n.dataShared), false
	return n.data
}

// grown returns b with zeros behind it up to size, in memory of its own if b is shared.
func grown(b []byte, size int64, shared bool) []byte {
	more := int(max(size-int64(len(b)), 0))
	switch {
	case shared:
		return append(make([]byte, 0, len(b)+more), b...)[:len(b)+more]
	case more == 0:
		return b
	case len(b) == 0:
		return make([]byte, more)
	}
	return append(b, make([]byte, more)...)
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

func (fs *crashFS) change(c nameChange) {
	c.apply(fs.names)
	fs.pending = append(fs.pending, c)
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
	n := &crashNode{}
	fs.change(nameChange{name: name, node: n})
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
	fs.change(nameChange{gone: oldName, name: newName, node: n})
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
	fs.change(nameChange{gone: name})
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
	for _, c := range fs.pending {
		c.apply(fs.durable)
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
	f.fs.read += int64(n)
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
	f.n.write(p, off)
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
			clear(f.n.dirty) // as after an I/O error: later syncs find nothing to write
		}
		return errPowerOff // the sectors stay in doubt
	}
	f.fs.syncs++
	f.n.persist()
	return nil
}

func (f *crashFile) Allocate(size int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.fs.step("allocate", f.name); err != nil {
		return err
	}
	f.n.ownData(size)
	return f.fs.after()
}

func (n *crashNode) write(p []byte, off int64) {
	end := off + int64(len(p))
	copy(n.ownData(end)[off:], p)
	sectors := (end + sectorBytes - 1) / sectorBytes
	if more := int(sectors) - len(n.dirty); more > 0 {
		n.dirty = append(n.dirty, make([]bool, more)...)
	}
	for s := off / sectorBytes; s < sectors; s++ {
		n.dirty[s] = true
	}
}

// persist makes the dirty sectors durable, and the size.
func (n *crashNode) persist() {
	n.durable, n.durableShared = grown(n.durable, int64(len(n.data)), n.durableShared), false
	for s := 0; s < len(n.dirty); s++ {
		from := s
		for s < len(n.dirty) && n.dirty[s] {
			s++
		}
		if from < s {
			copy(n.durable[from*sectorBytes:], n.data[from*sectorBytes:min(s*sectorBytes, len(n.data))])
		}
	}
	clear(n.dirty)
}

// lose makes some of the dirty sectors durable, and no more of the size than they need.
func (n *crashNode) lose(rng *rand.Rand, share float64) {
	for s, dirty := range n.dirty {
		if dirty && rng.Float64() < share {
			from, end := s*sectorBytes, min((s+1)*sectorBytes, len(n.data))
			n.durable, n.durableShared = grown(n.durable, int64(end), n.durableShared), false
			copy(n.durable[from:], n.data[from:end])
		}
	}
	clear(n.dirty)
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
		fs.pending[i].apply(fs.durable)
	}
	share := []float64{0, 0.1, 0.5, 0.9, 1}[rng.Intn(5)]
	next := newCrashFS()
	seen := map[*crashNode]*crashNode{}
	for _, name := range slices.Sorted(maps.Keys(fs.durable)) {
		n := fs.durable[name]
		if seen[n] == nil {
			n.lose(rng, share)
			seen[n] = &crashNode{data: n.durable, durable: n.durable, dataShared: true, durableShared: true}
			n.durableShared = true
		}
		next.names[name], next.durable[name] = seen[n], seen[n]
	}
	return next
}

// copyOf copies the file system with what is in doubt: what happens to the copy leaves the original alone. Its calls are
// counted anew, and none fails.
func (fs *crashFS) copyOf() *crashFS {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	c := newCrashFS()
	nodes := map[*crashNode]*crashNode{}
	node := func(n *crashNode) *crashNode {
		if n != nil && nodes[n] == nil {
			nodes[n] = n.share()
		}
		return nodes[n]
	}
	for name, n := range fs.names {
		c.names[name] = node(n)
	}
	for name, n := range fs.durable {
		c.durable[name] = node(n)
	}
	for _, p := range fs.pending {
		c.pending = append(c.pending, nameChange{p.gone, p.name, node(p.node)})
	}
	return c
}

// flip damages the file behind the log's back.
func (fs *crashFS) flip(name string, at int64, bits byte) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.names[name].ownData(0)[at] ^= bits
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

// isOff says that every call fails from now on.
func (fs *crashFS) isOff() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.offAt > 0 && fs.ops >= fs.offAt
}

// size is what all files take.
func (fs *crashFS) size() (bytes int64) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, n := range fs.names {
		bytes += int64(len(n.data))
	}
	return bytes
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
