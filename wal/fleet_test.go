package wal

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	sm "github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
)

const (
	fleetEnv    = "TIERQ_WAL_FLEET" // a fleetSpec, for a child process
	fleetShards = 3
)

// fleetSpec is one child's part in the fleet.
type fleetSpec struct {
	Dir   string
	Host  int
	Addrs []string
}

// idSM keeps the ids that were proposed to it.
type idSM struct {
	mu  sync.Mutex
	ids map[uint64]bool
}

func (s *idSM) Update(e sm.Entry) (sm.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids[binary.LittleEndian.Uint64(e.Cmd)] = true
	return sm.Result{Value: 1}, nil
}

// Lookup returns the ids, in order.
func (s *idSM) Lookup(interface{}) (interface{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]uint64, 0, len(s.ids))
	for id := range s.ids {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids, nil
}

func (s *idSM) SaveSnapshot(w io.Writer, _ sm.ISnapshotFileCollection, _ <-chan struct{}) error {
	ids, _ := s.Lookup(nil)
	return json.NewEncoder(w).Encode(ids)
}

func (s *idSM) RecoverFromSnapshot(r io.Reader, _ []sm.SnapshotFile, _ <-chan struct{}) error {
	var ids []uint64
	if err := json.NewDecoder(r).Decode(&ids); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids = make(map[uint64]bool, len(ids))
	for _, id := range ids {
		s.ids[id] = true
	}
	return nil
}
func (s *idSM) Close() error { return nil }

// fleetChild is one host: it proposes ids to every shard and prints each that was applied, until it is
// killed; a line on standard input makes it stop proposing and say so, another one print what every shard holds.
func fleetChild(spec fleetSpec) error {
	nhc := config.NodeHostConfig{NodeHostDir: filepath.Join(spec.Dir, "nh"), RTTMillisecond: 20, RaftAddress: spec.Addrs[spec.Host]}
	if err := Configure(&nhc, Options{Dir: filepath.Join(spec.Dir, "wal"), HostID: uint64(spec.Host + 1), SegmentBytes: 1 << 20}); err != nil {
		return err
	}
	nhc.Expert.Engine.ApplyShards, nhc.Expert.Engine.SnapshotShards = 4, 8
	nh, err := dragonboat.NewNodeHost(nhc)
	if err != nil {
		return err
	}
	members := map[uint64]dragonboat.Target{}
	for i, a := range spec.Addrs {
		members[uint64(i+1)] = a
	}
	for s := uint64(1); s <= fleetShards; s++ {
		cfg := config.Config{ShardID: s, ReplicaID: uint64(spec.Host + 1), ElectionRTT: 10, HeartbeatRTT: 1, CheckQuorum: true,
			PreVote: true, SnapshotEntries: 200, CompactionOverhead: 50}
		create := func(uint64, uint64) sm.IStateMachine { return &idSM{ids: map[uint64]bool{}} }
		if err := nh.StartReplica(members, false, create, cfg); err != nil {
			return err
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for s := uint64(1); s <= fleetShards; s++ {
		for w := uint64(0); w < 2; w++ {
			wg.Add(1)
			go func() {
				defer wg.Done()
				fleetPropose(nh, s, stop)
			}()
		}
	}
	fmt.Println("started")
	in := bufio.NewReader(os.Stdin)
	_, _ = in.ReadString('\n')
	close(stop)
	wg.Wait()
	fmt.Println("stopped")
	_, _ = in.ReadString('\n') // nobody proposes any more
	for s := uint64(1); s <= fleetShards; s++ {
		if err := fleetDump(nh, s); err != nil {
			return err
		}
	}
	_, _ = in.ReadString('\n') // the others need this one to read, too
	nh.Close()
	return nil
}

// fleetPropose proposes fresh random ids to the shard and prints those that were applied.
func fleetPropose(nh *dragonboat.NodeHost, shard uint64, stop chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		id := rand.Uint64()
		cmd := binary.LittleEndian.AppendUint64(make([]byte, 0, 300), id)
		cmd = append(cmd, make([]byte, rand.Intn(290))...)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		if _, err := nh.SyncPropose(ctx, nh.GetNoOPSession(shard), cmd); err == nil {
			fmt.Printf("ok %d %d\n", shard, id)
		}
		cancel()
	}
}

func fleetDump(nh *dragonboat.NodeHost, shard uint64) error {
	retry := time.NewTicker(50 * time.Millisecond)
	defer retry.Stop()
	for end := time.Now().Add(60 * time.Second); ; <-retry.C {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		v, err := nh.SyncRead(ctx, shard, nil)
		cancel()
		if err == nil {
			fmt.Printf("has %d %s\n", shard, strings.Trim(fmt.Sprint(v), "[]"))
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("shard %d cannot be read: %w", shard, err)
		}
	}
}

// fleetHost is a child as the parent sees it.
type fleetHost struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	stderr  *strings.Builder // after done
	done    chan struct{}
	started chan struct{}
	stopped chan struct{} // it proposes no more, and every answer was read

	mu  sync.Mutex
	has map[uint64]map[uint64]bool
}

// fleet is the parent's side.
type fleet struct {
	t     *testing.T
	specs []fleetSpec
	hosts []*fleetHost

	mu    sync.Mutex
	acked map[uint64]map[uint64]bool // shard → ids
	n     int
}

func (f *fleet) start(i int) {
	spec, err := json.Marshal(f.specs[i])
	require.NoError(f.t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fleetEnv+"="+string(spec))
	stderr := &strings.Builder{}
	cmd.Stderr = stderr
	h := &fleetHost{cmd: cmd, stderr: stderr, done: make(chan struct{}), started: make(chan struct{}),
		stopped: make(chan struct{}), has: map[uint64]map[uint64]bool{}}
	h.stdin, err = cmd.StdinPipe()
	require.NoError(f.t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(f.t, err)
	require.NoError(f.t, cmd.Start())
	f.hosts[i] = h
	go func() {
		defer close(h.done)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 64<<20)
		for lines.Scan() {
			f.line(h, strings.Fields(lines.Text()))
		}
	}()
	select {
	case <-h.started:
	case <-h.done:
		_ = cmd.Wait()
		require.Fail(f.t, "host did not start", "host %d: %s", i, stderr.String())
	case <-time.After(60 * time.Second):
		require.Fail(f.t, "host does not start", "host %d", i)
	}
}

func (f *fleet) line(h *fleetHost, w []string) {
	num := func(s string) uint64 {
		n, _ := strconv.ParseUint(s, 10, 64)
		return n
	}
	switch {
	case len(w) == 1 && w[0] == "started":
		close(h.started)
	case len(w) == 1 && w[0] == "stopped":
		close(h.stopped)
	case len(w) == 3 && w[0] == "ok":
		f.mu.Lock()
		f.acked[num(w[1])][num(w[2])] = true
		f.n++
		f.mu.Unlock()
	case len(w) >= 2 && w[0] == "has":
		ids := map[uint64]bool{}
		for _, s := range w[2:] {
			ids[num(s)] = true
		}
		h.mu.Lock()
		h.has[num(w[1])] = ids
		h.mu.Unlock()
	}
}

// allRun fails with what a host said if it is gone.
func (f *fleet) allRun() {
	f.t.Helper()
	for i, h := range f.hosts {
		select {
		case <-h.done:
			_ = h.cmd.Wait()
			require.Fail(f.t, "a host stopped by itself", "host %d: %s", i, h.stderr)
		default:
		}
	}
}

func (f *fleet) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

func (f *fleet) kill(i int) {
	h := f.hosts[i]
	require.NoError(f.t, h.cmd.Process.Kill())
	<-h.done
	_ = h.cmd.Wait() // says that it was killed
}

// TestKillFleet kills hosts of a fleet of three processes under load, one at a time or all at once, and
// starts them again: every restart is clean, and every proposal that was answered is in every replica.
// WAL_KILL_ROUNDS sets the number of rounds.
func TestKillFleet(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	rounds := 12
	if s := os.Getenv("WAL_KILL_ROUNDS"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		rounds = n
	}
	const seed = 3
	rng := rand.New(rand.NewSource(seed))
	f := &fleet{t: t, hosts: make([]*fleetHost, 3), acked: map[uint64]map[uint64]bool{}}
	dir := t.TempDir()
	addrs := []string{freeport.For(t), freeport.For(t), freeport.For(t)}
	for i := range addrs {
		f.specs = append(f.specs, fleetSpec{Dir: filepath.Join(dir, fmt.Sprint(i)), Host: i, Addrs: addrs})
	}
	for s := uint64(1); s <= fleetShards; s++ {
		f.acked[s] = map[uint64]bool{}
	}
	for i := range f.hosts {
		f.start(i)
	}
	for round := 0; round < rounds; round++ {
		want := f.count() + 20 + rng.Intn(400)
		require.Eventually(t, func() bool { return f.count() >= want }, 90*time.Second, 5*time.Millisecond, "seed %d round %d", seed, round)
		victims := []int{rng.Intn(3)}
		if rng.Intn(4) == 0 {
			victims = rng.Perm(3)
		}
		for _, i := range victims {
			f.kill(i)
		}
		for _, i := range victims {
			f.start(i)
		}
	}
	f.allRun()
	next := func() {
		for _, h := range f.hosts {
			_, err := io.WriteString(h.stdin, "\n")
			require.NoError(t, err)
		}
	}
	next()
	for i, h := range f.hosts { // what one of them still proposes is not in what another one has read before
		select {
		case <-h.stopped:
		case <-h.done:
			f.allRun()
		case <-time.After(60 * time.Second):
			require.Fail(t, "a host goes on", "host %d", i)
		}
	}
	next()
	var missing []int
	require.Eventually(t, func() bool {
		missing = missing[:0]
		for i, h := range f.hosts {
			h.mu.Lock()
			n := len(h.has)
			h.mu.Unlock()
			if n < fleetShards {
				missing = append(missing, i)
			}
		}
		f.allRun()
		return len(missing) == 0
	}, 120*time.Second, 10*time.Millisecond, "seed %d: no answer of hosts %v", seed, missing)
	for i, h := range f.hosts {
		for s, ids := range f.acked {
			for id := range ids {
				require.True(t, h.has[s][id], "seed %d: host %d lost id %d of shard %d", seed, i, id, s)
			}
		}
	}
	for _, h := range f.hosts {
		require.NoError(t, h.stdin.Close())
		_ = h.cmd.Process.Kill()
		<-h.done
		_ = h.cmd.Wait()
	}
	t.Logf("%d rounds, %d proposals answered, none lost", rounds, f.count())
}
