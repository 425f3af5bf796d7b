package fault

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/code"
)

// mountDisk makes dir a file system of its own, in a file, that stall can freeze, until the test ends.
func mountDisk(t *testing.T, dir string, size int64) {
	t.Helper()
	for _, tool := range []string{"mkfs.ext4", "mount", "fsfreeze"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs a file system that can be frozen: %v: install e2fsprogs and util-linux", err)
		}
	}
	image := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, size))
	require.NoError(t, os.MkdirAll(dir, 0o700))
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		t.Skipf("needs the right to mount a small file system, and a loop device: %v: %s", err, strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "lost+found"))) // a host wants an empty directory, or its own
}

// freezer freezes a file system and thaws it, again and again. It is a process of its own that ends with the test's, however that ends: what
// waits for a frozen file system cannot be killed.
const freezer = `
trap 'fsfreeze -u "$2" 2>/dev/null; exit 0' TERM
while kill -0 "$1" 2>/dev/null; do
	fsfreeze -f "$2" && sleep "$3"
	fsfreeze -u "$2"
	sleep "$4"
done`

// stall makes the disk under dir, of mountDisk, stand still for so long, again and again with pauses in between, until the returned function is called.
func stall(t *testing.T, dir string, still, between time.Duration) (end func()) {
	t.Helper()
	seconds := func(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 3, 64) }
	cmd := exec.Command("sh", "-c", freezer, "sh", strconv.Itoa(os.Getpid()), dir, seconds(still), seconds(between))
	require.NoError(t, cmd.Start())
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		}
	}
	t.Cleanup(end)
	return end
}

// slowSyncs counts the writes and the fsyncs of a host's Raft log that took more than 100 ms: what TierQSlowDisk is about. A disk that stands still holds
// up the one or the other.
func slowSyncs(h *host) (slow float64, err error) {
	page, err := h.get("/metrics")
	if err != nil {
		return 0, err
	}
	for _, name := range []string{"tierq_wal_write_seconds", "tierq_wal_fsync_seconds"} {
		bound, fast, all := -1.0, 0.0, 0.0
		for line := range strings.Lines(string(page)) {
			var le, n float64
			if _, err := fmt.Sscanf(line, name+`_bucket{le="%g"} %g`, &le, &n); err == nil && le <= 0.11 && le > bound {
				bound, fast = le, n
			}
			_, _ = fmt.Sscanf(line, name+"_count %g", &all)
		}
		slow += all - fast
	}
	return slow, nil
}

// awaitSlowDisk waits until a host has measured some slow writes or fsyncs.
func (d *drilling) awaitSlowDisk(h *host) {
	d.t.Helper()
	was, err := slowSyncs(h)
	require.NoError(d.t, err)
	var slow float64
	eventually(d.t, readyWithin, fmt.Sprintf("host %d measures slow fsyncs", h.id), func() error {
		if slow, err = slowSyncs(h); err == nil && slow < was+10 {
			err = fmt.Errorf("%g of them", slow-was)
		}
		return err
	})
	d.say("host %d shows %g writes and fsyncs of more than 100 ms in tierq_wal_write_seconds and tierq_wal_fsync_seconds", h.id, slow-was)
}

// drillSlowDisk is RB-12: the disk of the leader's host stands still for 150 ms, again and again.
func drillSlowDisk(d *drilling) {
	f := layFleet(d.t, 2, 1)
	for _, h := range f.full() {
		mountDisk(d.t, h.dir, 256<<20)
		f.prepend(h, "low_space_bytes: 1048576\n")
	}
	f.startAll()
	d.use(f)
	l := d.load("rb-12", nil)
	slow := f.leaderHost("rb-12")
	d.at(slow)
	end := stall(d.t, slow.dir, 150*time.Millisecond, 20*time.Millisecond)
	d.awaitSlowDisk(slow)
	d.do("look")
	l.goesOn()
	end()
	d.say("the disk of host %d is as fast as before", slow.id)
	d.do("over")
	l.finish()
}

// drillReadOnly is RB-1 where no publish finds a quorum in time, though there is a leader: the other hosts stand still for longer than a publish may have
// no outcome, and for less than an election takes.
func drillReadOnly(d *drilling) {
	f := layFleet(d.t, 2, 1)
	for _, h := range f.hosts {
		f.prepend(h, "profile: many-shards\n") // elections take 2 to 4 s
	}
	f.startAll()
	d.use(f)
	l := d.load("rb-1", nil)
	eventually(d.t, readyWithin, "publishes are refused with 0x6002", func() error {
		leader := f.leaderHost("rb-1")
		d.at(f.other(leader))
		was := refusals(leader, code.ReadOnlyDegraded)
		for _, h := range f.hosts {
			if h != leader {
				h.pause()
				defer h.resume()
			}
		}
		if err := poll(1500*time.Millisecond, func() error {
			if refusals(leader, code.ReadOnlyDegraded) == was {
				return errNotYet
			}
			return nil
		}); err != nil {
			return err
		}
		d.say("the hosts beside %d, which leads, do not move: publishes are refused with 0x6002", leader.id)
		return nil
	})
	d.do("look")
	d.do("over")
	d.awaitState(f.leaderHost("rb-1"), 0)
	l.finish()
}

// refusals is how many calls a host has refused with a code; 0 too if it does not say.
func refusals(h *host, c code.Code) (n float64) {
	page, _ := h.get("/metrics")
	for line := range strings.Lines(string(page)) {
		if rest, ok := strings.CutPrefix(line, fmt.Sprintf("tierq_refusals_total{code=%q} ", c)); ok {
			n, _ = strconv.ParseFloat(strings.TrimSpace(rest), 64)
		}
	}
	return n
}
