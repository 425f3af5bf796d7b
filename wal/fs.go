package wal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"
)

// fileSystem is all that the log asks of a disk. It is a seam for tests that lose power or fail
// writes; the one implementation outside tests is osFS.
type fileSystem interface {
	// MkdirAll makes dir and what is missing above it, and makes the names that it made durable.
	MkdirAll(dir string) error
	// List returns the names in dir, sorted.
	List(dir string) ([]string, error)
	// Create makes a new file for reading and writing; it fails if name exists.
	Create(name string) (file, error)
	// Open opens an existing file for reading and writing.
	Open(name string) (file, error)
	// Rename replaces newName if it exists. It is durable after SyncDir.
	Rename(oldName, newName string) error
	Remove(name string) error
	// SyncDir makes the creations, renames and removals in dir durable.
	SyncDir(dir string) error
	// FreeBytes returns the space that this process may still use on dir's file system.
	FreeBytes(dir string) (uint64, error)
	// Lock takes name, creating it, for this process alone, until the returned function is called.
	Lock(name string) (unlock func() error, err error)
}

// file is one open file. ReadAt may run at the same time as anything else.
type file interface {
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	// Sync makes what was written durable, and the size, as fdatasync does.
	Sync() error
	// Allocate makes the file size bytes long, in zeros, with its space reserved. It returns errNoAllocate
	// if the file system cannot.
	Allocate(size int64) error
	Size() (int64, error)
	Close() error
}

type osFS struct{}

func (fs osFS) MkdirAll(dir string) error {
	_, err := os.Stat(dir)
	if !errors.Is(err, os.ErrNotExist) {
		return errors.Join(err, os.MkdirAll(dir, 0o700)) // an error if it is no directory
	}
	parent := filepath.Dir(filepath.Clean(dir))
	if err := fs.MkdirAll(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return fs.SyncDir(parent)
}

func (osFS) List(dir string) ([]string, error) {
	ents, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(ents))
	for _, e := range ents {
		names = append(names, e.Name())
	}
	sort.Strings(names)
	return names, nil
}

func (osFS) Create(name string) (file, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Open(name string) (file, error) {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Rename(oldName, newName string) error { return os.Rename(oldName, newName) }
func (osFS) Remove(name string) error             { return os.Remove(name) }

func (osFS) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (osFS) FreeBytes(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// Lock uses flock, which, unlike fcntl's locks, also excludes a second opener in this process.
func (osFS) Lock(name string) (func() error, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("wal: %s is in use by another process: %w",
			filepath.Dir(name), err), f.Close())
	}
	return f.Close, nil
}

// readOnlyFS is osFS for the offline tools: it opens files for reading alone.
type readOnlyFS struct{ osFS }

func (readOnlyFS) Open(name string) (file, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

type osFile struct{ *os.File }

func (f osFile) Sync() error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if err != unix.EINTR {
			return err
		}
	}
}

var errNoAllocate = errors.New("wal: the file system cannot reserve space")

func (f osFile) Allocate(size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS):
			return errNoAllocate
		case !errors.Is(err, unix.EINTR):
			return &os.PathError{Op: "fallocate", Path: f.Name(), Err: err}
		}
	}
}

func (f osFile) Size() (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
