// Package freeport finds loopback ports for fleets of one machine: the development fleet and tests.
//
// The ports lie below the range from which the kernel picks ports of outgoing connections: a port of that range may be
// some connection's own by the time that a stopped host wants it back.
package freeport

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

var ports struct {
	mu    sync.Mutex
	taken map[int]bool
	locks *os.File // nil: none can be had
}

const first = 10_000

// Get returns a loopback port that nobody listened on a moment ago. No other call in this process returns it again, nor
// does one in another process of this machine before this process ends: a host that is stopped and started finds its
// port free. It may be called by many goroutines at once.
func Get() (int, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.taken == nil {
		ports.taken = map[int]bool{}
		ports.locks = openLocks()
	}
	limit := firstEphemeral()
	for range 1000 {
		p := first + rand.IntN(limit-first)
		if ports.taken[p] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			continue
		}
		_ = l.Close()
		ports.taken[p] = true // also one that another process has
		if reserve(p) {
			return p, nil
		}
	}
	return 0, errors.New("no free loopback port found")
}

// openLocks opens the file on which the processes of a machine reserve ports: byte N stands for port N. It stays empty, and is never
// closed, since that would drop what is reserved.
func openLocks() *os.File {
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "tierq-ports"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o666)
	if err != nil {
		return nil // another user's: what is left is that few processes pick one of so many ports at once
	}
	return f
}

// reserve says whether a port is this process's until it ends.
func reserve(port int) bool {
	if ports.locks == nil {
		return true
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: int64(port), Len: 1}
	err := unix.FcntlFlock(ports.locks.Fd(), unix.F_SETLK, &lock)
	return err == nil || !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES)
}

// For is Get for a test, as an address: it ends the test if there is no free port.
func For(t interface {
	Helper()
	Fatal(args ...any)
}) string {
	t.Helper()
	p, err := Get()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", p)
}

// firstEphemeral is where the kernel's own range begins.
func firstEphemeral() int {
	begin := 0
	raw, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(raw), &begin)
	}
	if err != nil || begin <= first+1000 {
		return 32_768
	}
	return begin
}
