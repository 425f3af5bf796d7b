package host

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func TestLockDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	l, err := lockDir(dir)
	require.NoError(t, err)
	_, err = lockDir(dir)
	require.EqualError(t, err, "data directory "+dir+" is in use by another host of this process: stop that host, or use another data directory")
	require.NoError(t, os.WriteFile(filepath.Join(dir, lockFile), []byte("4242\n"), 0o640))
	_, err = lockDir(dir)
	require.ErrorContains(t, err, "process 4242")
	require.NoError(t, l.release())
	l, err = lockDir(dir)
	require.NoError(t, err)
	require.NoError(t, l.release())
}

func TestIdentity(t *testing.T) {
	dir := t.TempDir()
	spec := HostSpec{ID: 3, Role: catalog.HostFull}
	id, err := openIdentity(dir, spec)
	require.NoError(t, err)
	id.Fleet = catalog.FleetID{5}.String()
	id.setMembers([]catalog.Replica{{ID: 1, HostID: 3, Birth: catalog.BirthInitial}})
	require.NoError(t, writeIdentity(dir, id))
	again, err := openIdentity(dir, spec)
	require.NoError(t, err)
	require.Equal(t, id.members(), again.members())
	require.Equal(t, id.Fleet, again.Fleet)

	_, err = openIdentity(dir, HostSpec{ID: 4, Role: catalog.HostFull})
	require.ErrorContains(t, err, "belongs to host 3, but this is host 4")
	_, err = openIdentity(dir, HostSpec{ID: 3, Role: catalog.HostWitness})
	require.ErrorContains(t, err, "belongs to a full host, but host 3 is configured as witness")

	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, bad := range []string{"", "{}", string(b[:len(b)/2]), string(b[:20]) + "9" + string(b[21:])} {
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o640))
		_, err = openIdentity(dir, spec)
		require.ErrorContains(t, err, path)
	}
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Mkdir(filepath.Join(dir, walDir), 0o750))
	_, err = openIdentity(dir, spec)
	require.ErrorContains(t, err, "has data but no identity.json")
}

func TestJournal(t *testing.T) {
	dir := t.TempDir()
	a, b := replicaKey{7, 1}, replicaKey{8, 2}
	reopen := func(j *journal, panicked bool) *journal {
		t.Helper()
		if j != nil {
			require.NoError(t, j.close())
		}
		j, err := openJournal(dir, panicked)
		require.NoError(t, err)
		return j
	}
	record := func(j *journal, key replicaKey, steps ...step) {
		t.Helper()
		for _, s := range steps {
			require.NoError(t, j.record(key, s, 99))
		}
	}
	j := reopen(nil, false)
	record(j, a, stepBorn, stepStarting, stepStarted)
	record(j, b, stepBorn)
	j = reopen(j, true)
	require.Equal(t, replicaRecord{nonce: 99, begun: true}, j.get(a))
	require.Equal(t, replicaRecord{nonce: 99}, j.get(b))
	require.Zero(t, j.get(replicaKey{9, 9}))

	// Only a start that panics counts, and a good one takes it back.
	record(j, a, stepStarting)
	j = reopen(j, false)
	require.Zero(t, j.get(a).starts, "killed, not panicked")
	record(j, a, stepStarting)
	j = reopen(j, true)
	record(j, a, stepStarting)
	j = reopen(j, true)
	require.Equal(t, maxStarts, j.get(a).starts)
	j = reopen(j, false)
	require.Equal(t, maxStarts, j.get(a).starts, "it was not being started this time")
	record(j, a, stepStarting, stepUp)
	j = reopen(j, true)
	require.Zero(t, j.get(a).starts)

	record(j, a, stepRemoving, stepRemoved)
	record(j, b, stepLost)
	j = reopen(j, false)
	require.True(t, j.get(a).removing && j.get(a).removed)
	require.True(t, j.get(b).lost)

	// A torn tail is cut; a damaged record with a whole one behind it is corruption.
	require.NoError(t, j.close())
	path := filepath.Join(dir, journalFile)
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	for cut := 1; cut < journalRecordBytes; cut++ {
		require.NoError(t, os.WriteFile(path, whole[:len(whole)-cut], 0o640))
		j, err = openJournal(dir, false)
		require.NoError(t, err)
		require.NoError(t, j.close())
	}
	bad := append([]byte(nil), whole...)
	bad[len(journalMagic)+3] ^= 1
	require.NoError(t, os.WriteFile(path, bad, 0o640))
	_, err = openJournal(dir, false)
	require.ErrorContains(t, err, fmt.Sprintf("offset %d", len(journalMagic)))
	require.NoError(t, os.WriteFile(path, []byte("something else"), 0o640))
	_, err = openJournal(dir, false)
	require.ErrorContains(t, err, "is not a journal")
	require.EqualValues(t, 29, journalRecordBytes, "part of the format")
	require.EqualValues(t, 1, binary.BigEndian.Uint16(journalMagic[6:]), "version 1")
}

// fullDisk takes so many bytes more.
type fullDisk struct {
	appendFile
	room int
}

func (d *fullDisk) Write(b []byte) (int, error) {
	n, err := d.appendFile.Write(b[:min(len(b), d.room)])
	if d.room -= n; err == nil && n < len(b) {
		err = unix.ENOSPC
	}
	return n, err
}

// A record of which a full disk took a part does not make those behind it unreadable.
func TestJournalOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	j, err := openJournal(dir, false)
	require.NoError(t, err)
	a, b := replicaKey{1, 1}, replicaKey{2, 1}
	disk := &fullDisk{j.f, journalRecordBytes + 7}
	j.f = disk
	require.NoError(t, j.record(a, stepBorn, 5))
	require.ErrorIs(t, j.record(b, stepBorn, 6), unix.ENOSPC)
	require.Zero(t, j.get(b))
	disk.room = 1 << 20
	require.NoError(t, j.record(a, stepStarted, 0))
	require.NoError(t, j.record(b, stepBorn, 7))
	require.NoError(t, j.close())
	j, err = openJournal(dir, false)
	require.NoError(t, err)
	require.Equal(t, replicaRecord{nonce: 5, begun: true}, j.get(a))
	require.Equal(t, replicaRecord{nonce: 7}, j.get(b))
	require.NoError(t, j.close())
}

// testClock is a host's clocks, in the test's hands.
type testClock struct {
	wall, boot atomic.Int64 // ms
	offsets    []time.Duration
}

func (c *testClock) clock() *Clock {
	return newClock(
		func() time.Time { return time.UnixMilli(c.wall.Load()) },
		func() time.Duration { return time.Duration(c.boot.Load()) * time.Millisecond },
		func() []time.Duration { return c.offsets },
	)
}

func (c *testClock) advance(d time.Duration) {
	c.wall.Add(d.Milliseconds())
	c.boot.Add(d.Milliseconds())
}

func TestClock(t *testing.T) {
	c := &testClock{}
	c.wall.Store(1_000_000)
	clock := c.clock()
	wall := func() queue.Stamp {
		t.Helper()
		s, err := clock.Wall()
		require.NoError(t, err)
		return s
	}
	skewed := func() {
		t.Helper()
		_, err := clock.Wall()
		got, _ := codeOf(t, err)
		require.Equal(t, code.ClockSkew, got)
		require.True(t, clock.Skewed())
	}
	c.advance(time.Second)
	require.EqualValues(t, 1_001_000, wall())
	c.wall.Add(5000)
	require.EqualValues(t, 1_001_000, wall(), "a step is looked at every 10 s")
	c.advance(wallInterval)
	require.EqualValues(t, 1_016_000, wall(), "a small one is taken up when nobody can be asked")
	c.wall.Add(2 * time.Hour.Milliseconds())
	c.advance(wallInterval)
	skewed()
	clock.Accept()
	require.EqualValues(t, c.wall.Load(), wall())

	// With others, their median decides, this host included.
	c.offsets = []time.Duration{100 * time.Millisecond, 9 * time.Hour}
	c.advance(wallInterval)
	wall()
	c.offsets = []time.Duration{-2 * time.Second, -3 * time.Second}
	c.advance(wallInterval)
	skewed()
	c.wall.Add(-2500)
	c.offsets = []time.Duration{500 * time.Millisecond, -500 * time.Millisecond}
	c.advance(wallInterval)
	require.EqualValues(t, c.wall.Load(), wall())
	c.offsets = []time.Duration{3 * time.Second}
	c.advance(wallInterval)
	wall() // of two, neither is the median's other side: this host's own stands

	testClockJumps(t)

	var s shardClock
	require.Zero(t, s.now(0))
	s.observe(500, 10*time.Second)
	s.observe(400, 11*time.Second)
	require.EqualValues(t, 2500, s.now(12*time.Second), "the shard's clock goes on with boot time")
}

// testClockJumps: a clock that jumps is not taken up, whoever is reachable, until it is right again or an operator says so.
func testClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{3 * time.Hour, -3 * time.Hour, 2 * time.Second, -2 * time.Second} {
		for others := 1; others <= 4; others++ {
			c := &testClock{}
			c.wall.Store(1_000_000_000)
			c.offsets = make([]time.Duration, others)
			clock := c.clock()
			set := func(ahead time.Duration) {
				c.wall.Add(ahead.Milliseconds())
				for i := range c.offsets {
					c.offsets[i] -= ahead
				}
			}
			before, err := clock.Wall()
			require.NoError(t, err)
			set(jump)
			c.advance(wallInterval)
			_, err = clock.Wall()
			got, _ := codeOf(t, err)
			require.Equal(t, code.ClockSkew, got, "%v with %d others", jump, others)
			r := clock.Reading()
			require.True(t, r.Refused)
			require.Equal(t, before+queue.Stamp(wallInterval.Milliseconds()), r.GoesBy, "what it would go by has not jumped")
			require.Equal(t, others, r.Asked)

			set(-jump)
			c.advance(skewedReads)
			now, err := clock.Wall()
			require.NoError(t, err, "it is right again")
			require.EqualValues(t, c.wall.Load(), now)

			set(jump)
			c.advance(wallInterval)
			require.True(t, clock.Skewed())
			clock.Accept()
			for range 3 {
				now, err = clock.Wall()
				require.NoError(t, err, "an operator has accepted it")
				require.EqualValues(t, c.wall.Load(), now)
				c.advance(wallInterval)
			}
			set(jump)
			c.advance(wallInterval)
			require.True(t, clock.Skewed(), "another step was not accepted")
		}
	}
	// A process that starts with a wrong clock finds out as soon as it hears the others.
	c := &testClock{}
	c.wall.Store(1_000_000_000)
	clock := c.clock()
	require.False(t, clock.Skewed())
	c.offsets = []time.Duration{time.Hour, time.Hour}
	c.advance(firstReads)
	require.True(t, clock.Skewed())
}

func TestConfigValidate(t *testing.T) {
	good := func() Config {
		c := Config{HostID: 1, DataDir: "d"}
		for i := range uint64(3) {
			c.Hosts = append(c.Hosts, HostSpec{ID: i + 1, Role: catalog.HostFull, RaftAddr: fmt.Sprintf("h%d:1", i), PeerAddr: fmt.Sprintf("h%d:2", i)})
		}
		c.EnsureDefaults()
		return c
	}
	c := good()
	require.NoError(t, c.Validate())
	for want, spoil := range map[string]func(*Config){
		"the data directory is not set":             func(c *Config) { c.DataDir = "" },
		"host 9 is not in the list of hosts":        func(c *Config) { c.HostID = 9 },
		"host 2 is in the list of hosts twice":      func(c *Config) { c.Hosts[2].ID = 2 },
		"neither full nor witness":                  func(c *Config) { c.Hosts[1].Role = 0 },
		"is given to host 1 and to host 2":          func(c *Config) { c.Hosts[1].RaftAddr = c.Hosts[0].PeerAddr },
		`the Raft address "x" is not host:port`:     func(c *Config) { c.Hosts[1].RaftAddr = "x" },
		`the port of the peer address "h:0"`:        func(c *Config) { c.Hosts[1].PeerAddr = "h:0" },
		"the engine's tick 2s":                      func(c *Config) { c.RTT = 2 * time.Second },
		"not at least 5 heartbeats":                 func(c *Config) { c.ElectionTicks = 4 },
		"a fleet needs at least 2 full hosts, the ": func(c *Config) { c.Hosts[1].Role, c.Hosts[2].Role = catalog.HostWitness, catalog.HostWitness },
	} {
		c := good()
		spoil(&c)
		require.ErrorContains(t, c.Validate(), want)
	}
}

func TestCatalogMembers(t *testing.T) {
	for _, c := range []struct {
		roles string // in the order of the list, which is not that of the ids
		want  []uint64
	}{
		{"ffw", []uint64{2, 3, 1}}, {"fffw", []uint64{2, 3, 4}}, {"ffff", []uint64{1, 2, 3}}, {"fffff", []uint64{1, 2, 3, 4, 5}}, {"ffffffw", []uint64{2, 3, 4, 5, 6}}, {"ff", []uint64{1, 2}},
	} {
		cfg := Config{}
		for i, r := range c.roles {
			spec := HostSpec{ID: uint64(len(c.roles) - i), Role: catalog.HostFull}
			if r == 'w' {
				spec.Role = catalog.HostWitness
			}
			cfg.Hosts = append(cfg.Hosts, spec)
		}
		var got []uint64
		for i, m := range cfg.catalogMembers() {
			require.EqualValues(t, i+1, m.ID)
			got = append(got, m.HostID)
		}
		require.Equal(t, c.want, got, c.roles)
	}
}

// TestCrashFile: the next start knows whether the process panicked.
func TestCrashFile(t *testing.T) {
	dir := t.TempDir()
	h := &RaftHost{cfg: Config{DataDir: dir}, log: zap.NewNop()}
	panicked, err := h.openCrashFile()
	require.NoError(t, err)
	require.False(t, panicked)
	h.closeCrashFile()
	require.NoError(t, os.WriteFile(filepath.Join(dir, crashFile), []byte("panic: "), 0o640))
	panicked, err = h.openCrashFile()
	require.NoError(t, err)
	require.True(t, panicked)
	h.closeCrashFile()
	require.FileExists(t, filepath.Join(dir, lastCrashFile))
	panicked, err = h.openCrashFile()
	require.NoError(t, err)
	require.False(t, panicked)
	h.closeCrashFile()
}

func TestAddressBook(t *testing.T) {
	r := NewRegistry()
	b := newAddressBook(r, []HostSpec{{ID: 1, RaftAddr: "a:1", PeerAddr: "a:2"}, {ID: 2, RaftAddr: "b:1", PeerAddr: "b:2"}})
	at := func(id uint64, raft, peer string) {
		t.Helper()
		got, _ := r.Address(id)
		require.Equal(t, raft, got)
		got, _ = b.peer(id)
		require.Equal(t, peer, got)
	}
	at(2, "b:1", "b:2")
	s := catalog.NewState()
	s.Apply(1, &catalog.InitFleet{FleetID: catalog.FleetID{1}, Members: []catalog.Replica{{ID: 1, HostID: 1, Birth: catalog.BirthInitial}}})
	s.Apply(2, &catalog.RegisterHost{Host: catalog.Host{ID: 2, Role: catalog.HostFull, RaftAddr: "c:1", PeerAddr: "c:2"}})
	s.Apply(3, &catalog.RegisterHost{Host: catalog.Host{ID: 3, Role: catalog.HostFull, RaftAddr: "d:1", PeerAddr: "d:2"}})
	b.update(s.Seal())
	at(2, "c:1", "c:2")
	at(3, "d:1", "d:2")
	b.flip(2)
	at(2, "b:1", "b:2")
	b.update(s.Seal())
	at(2, "b:1", "b:2")
	b.flip(2)
	at(2, "c:1", "c:2")
	b.flip(3)
	at(3, "d:1", "d:2")
	require.Equal(t, []uint64{2, 3}, b.others(1))
}
