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
	"sync"
)

var ports struct {
	mu    sync.Mutex
	taken map[int]bool
}

const first = 10_000

// Get returns a loopback port that nobody listened on a moment ago, and that no other call in this process returned. Two
// processes may be given the same one if both ask within that moment: they pick at random among some 20,000. It may be
// called by many goroutines at once.
func Get() (int, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.taken == nil {
		ports.taken = map[int]bool{}
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
		ports.taken[p] = true
		return p, nil
	}
	return 0, errors.New("no free loopback port found")
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
