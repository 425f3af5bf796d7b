package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const lockFile = "LOCK"

// dirLock is this process's exclusive right to a data directory.
type dirLock struct{ f *os.File }

// lockDir takes the lock of a data directory, which it creates if absent. A second holder, in this process or another, is
// refused at once. The lock ends with the process, however that ends.
func lockDir(dir string) (*dirLock, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("create the data directory: %w", err)
	}
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	// flock, unlike fcntl's locks, belongs to the open file: it excludes this process too.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := readHolder(f)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("data directory %s is in use by %s: stop that host, or use another data directory", dir, holder)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	l := &dirLock{f: f}
	if err := l.writeHolder(); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), l.release())
	}
	return l, nil
}

// writeHolder leaves the process id for whoever is refused.
func (l *dirLock) writeHolder() error {
	if err := l.f.Truncate(0); err != nil {
		return err
	}
	_, err := l.f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

func readHolder(f *os.File) string {
	b := make([]byte, 32)
	n, _ := f.ReadAt(b, 0)
	pid := strings.TrimSpace(string(b[:n]))
	if pid == "" {
		return "another process"
	}
	if pid == strconv.Itoa(os.Getpid()) {
		return "another host of this process"
	}
	return "process " + pid
}

func (l *dirLock) release() error { return l.f.Close() }
