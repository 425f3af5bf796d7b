package fault

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
)

// idleTime is how long an idle fleet is watched.
const idleTime = 5 * time.Second

// TestFaultIdle: a fleet that nobody uses writes nothing: no applied index moves. Its use of CPU and the growth of its data
// directories are printed.
func TestFaultIdle(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{RefreshEvery: -1})
	const queues = 3
	for i := range queues {
		name := fmt.Sprintf("idle-%d", i+1)
		f.createQueue(c, name, nil)
		_, err := c.Publish(context.Background(), name, client.Message{Body: []byte("x")})
		require.NoError(t, err)
		ds, err := c.Receive(context.Background(), name, "", client.ReceiveOptions{})
		require.NoError(t, err)
		require.Len(t, ds, 1)
		_, err = c.Ack(context.Background(), name, "", ds[0].Receipt)
		require.NoError(t, err)
	}
	indexes := func() map[string]uint64 {
		out := map[string]uint64{}
		for i := range queues {
			name := fmt.Sprintf("idle-%d", i+1)
			for _, h := range f.full() {
				a, err := h.applied(name)
				require.NoError(t, err)
				out[fmt.Sprintf("%s at host %d", name, h.id)] = a
			}
		}
		return out
	}
	for i := range queues {
		f.awaitConverged(fmt.Sprintf("idle-%d", i+1))
	}
	before := f.awaitQuiet(indexes)
	var cpu, bytes []int64
	for _, h := range f.hosts {
		cpu, bytes = append(cpu, h.cpuTicks()), append(bytes, dirBytes(h.dir))
	}
	began := time.Now()
	<-time.After(idleTime) // what is asserted is that nothing happens
	took := time.Since(began)
	require.Equal(t, before, indexes(), "an idle fleet applies nothing")
	for i, h := range f.hosts {
		used := float64(h.cpuTicks()-cpu[i]) / ticksPerSecond / took.Seconds()
		t.Logf("host %d (%s): %.1f %% of a core, data grew by %d bytes in %v", h.id, h.role, 100*used, dirBytes(h.dir)-bytes[i], took.Round(time.Millisecond))
	}
	s := totals{sent: queues, acknowledged: queues, deliveries: queues}
	for i := range queues {
		s.lost += f.lost(fmt.Sprintf("idle-%d", i+1), "$default", 1)
	}
	noteAccount(t, "", s)
	require.Zero(t, s.lost)
}

// quietTime is how long nothing must be applied for a fleet to be idle: what was acked last is cleared away first.
const quietTime = 2 * time.Second

// awaitQuiet waits until no index has moved for quietTime.
func (f *fleet) awaitQuiet(indexes func() map[string]uint64) map[string]uint64 {
	f.t.Helper()
	last, since := indexes(), time.Now()
	eventually(f.t, readyWithin, "nothing is applied any more", func() error {
		if now := indexes(); !maps.Equal(now, last) {
			last, since = now, time.Now()
		}
		if time.Since(since) < quietTime {
			return errNotYet
		}
		return nil
	})
	return last
}

// ticksPerSecond is USER_HZ, which is 100 on every Linux that Go runs on.
const ticksPerSecond = 100

// cpuTicks is the CPU time of h's process so far.
func (h *host) cpuTicks() int64 {
	h.f.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", h.pid()))
	require.NoError(h.f.t, err)
	_, after, _ := bytes.Cut(raw, []byte(") ")) // the name may hold spaces
	fields := bytes.Fields(after)
	var sum int64
	for _, i := range []int{11, 12} { // utime and stime, the 14th and 15th of all fields
		n, err := strconv.ParseInt(string(fields[i]), 10, 64)
		require.NoError(h.f.t, err)
		sum += n
	}
	return sum
}

// dirBytes is the size of all files under dir.
func dirBytes(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // files come and go under a running host
		}
		if info, err := d.Info(); err == nil {
			sum += info.Size()
		}
		return nil
	})
	return sum
}
