package fault

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// TestFaultLowSpace fills the disk of one full host, the leader's and then the other's: publishes are refused at once with
// a code that names the host, consumers drain the queue, and with space again publishes go on (G9).
func TestFaultLowSpace(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	newRand(t)
	f := layFleet(t, 2, 1)
	for _, h := range f.full() {
		mountSmall(t, h.dir, 192<<20)
		raw, err := os.ReadFile(h.config)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(h.config, append([]byte("low_space_bytes: 67108864\n"), raw...), 0o600))
	}
	for _, h := range f.hosts {
		h.start()
	}
	f.awaitReady()
	c := f.client(client.Options{PublishTimeout: time.Second})
	f.createQueue(c, "space", nil)
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "space", Name: "g"})
	var s totals
	publish := func() error {
		s.sent++
		ps, err := c.Publish(context.Background(), "space", client.Message{Body: bytes.Repeat([]byte("x"), 1000)})
		if err == nil && ps[0].Err != nil {
			return ps[0].Err
		}
		if err == nil {
			s.acknowledged++
		}
		return err
	}
	leader := f.leaderHost("space")
	for _, full := range []*host{leader, f.other(leader)} {
		for range 20 {
			require.NoError(t, publish())
		}
		ballast := filepath.Join(full.dir, "ballast")
		fill(t, ballast, full.dir, 48<<20)
		var last error
		eventually(t, readyWithin, fmt.Sprintf("publishes are refused while the disk of host %d is full", full.id), func() error {
			if last = publish(); codeOf(last) == code.StorageHighWatermark {
				return nil
			}
			return fmt.Errorf("answered %v", last)
		})
		require.ErrorContains(t, last, fmt.Sprintf("host %d", full.id))
		t.Logf("refused: %v", last)
		// The refused ones of the wait may have been stored: drain whatever there is.
		home := f.homeHost("space", "g")
		for {
			m, err := home.receive("space", "g", 0)
			if err == errNotYet {
				break
			}
			require.NoError(t, err)
			s.deliveries++
			res, err := home.settle("ack", "space", "g", m.Receipt)
			require.NoError(t, err)
			require.Zero(t, res.Code, res.Text)
		}
		require.Equal(t, code.StorageHighWatermark, codeOf(publish()), "still full")
		require.NoError(t, os.Remove(ballast))
		eventually(t, readyWithin, "publishes go on", publish)
	}
	f.awaitConverged("space")
	f.noteGroups(t, "space", s, "g")
}

// mountSmall makes dir a file system of its own, of so many bytes in memory, until the test ends.
func mountSmall(t *testing.T, dir string, size int64) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o700))
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Skipf("needs the right to mount a small file system: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
}

// fill writes a file until only so many bytes are left.
func fill(t *testing.T, path, dir string, left uint64) {
	t.Helper()
	file, err := os.Create(path)
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	block := make([]byte, 1<<20)
	for {
		var s syscall.Statfs_t
		require.NoError(t, syscall.Statfs(dir, &s))
		if s.Bavail*uint64(s.Bsize) <= left {
			return
		}
		_, err := file.Write(block)
		require.NoError(t, err)
	}
}
