package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
)

// ports hands out loopback ports below the range from which the kernel picks ports of outgoing connections: a port of that
// range may be some connection's own by the time that a killed host wants it back.
var ports struct {
	mu    sync.Mutex
	taken map[int]bool
}

const firstPort = 10_000

// freePort returns a loopback port that nobody listens on, and that no other call of this process returned.
func freePort() (int, error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.taken == nil {
		ports.taken = map[int]bool{}
	}
	limit := firstEphemeral()
	for range 1000 {
		p := firstPort + rand.IntN(limit-firstPort)
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

// firstEphemeral is where the kernel's own range begins.
func firstEphemeral() int {
	first := 0
	raw, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(raw), &first)
	}
	if err != nil || first <= firstPort+1000 {
		return 32_768
	}
	return first
}

func freeAddr(t *testing.T) string {
	t.Helper()
	p, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", p)
}
