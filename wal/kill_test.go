package wal

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

const killDirEnv = "TIERQ_WAL_KILL_DIR"

// TestMain runs a child of TestKill or TestKillFleet instead of the tests if it is asked to.
func TestMain(m *testing.M) {
	var err error
	if dir := os.Getenv(killDirEnv); dir != "" {
		err = killVictim(dir)
	} else if raw := os.Getenv(fleetEnv); raw != "" {
		var spec fleetSpec
		if err = json.Unmarshal([]byte(raw), &spec); err == nil {
			err = fleetChild(spec)
		}
	} else {
		debug.SetGCPercent(400) // segments of a megabyte come and go, and little stays
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const killShards = 5

// killVictim goes on with the log in dir and prints a line for every save that returned, until it is killed.
func killVictim(dir string) error {
	l, err := Open(Options{Dir: dir, SegmentBytes: 1 << 20})
	if err != nil {
		return err
	}
	for s := uint64(1); s <= killShards; s++ {
		if s > 1 {
			go func() { _ = killWriter(l, s) }()
		}
	}
	return killWriter(l, 1)
}

func killWriter(l *Log, shard uint64) error {
	rng := rand.New(rand.NewSource(time.Now().UnixNano()))
	next := uint64(1)
	if rs, err := l.ReadRaftState(shard, 1, 0); err == nil {
		next = rs.FirstIndex + rs.EntryCount
	}
	for {
		n := uint64(1 + rng.Intn(5))
		ents := make([]raftpb.Entry, n)
		for i := range ents {
			ents[i] = raftpb.Entry{Index: next + uint64(i), Term: 1, Cmd: killBody(shard, next+uint64(i))}
		}
		next += n
		err := l.SaveRaftState([]raftpb.Update{{ShardID: shard, ReplicaID: 1, State: raftpb.State{Term: 1, Commit: next - 1}, EntriesToSave: ents}}, shard)
		if err != nil {
			return err
		}
		fmt.Printf("%d %d\n", shard, next-1)
		if next > 200 && rng.Intn(20) == 0 {
			if err := l.RemoveEntriesTo(shard, 1, next-200); err != nil {
				return err
			}
		}
	}
}

// killBody is what the victim puts into an entry.
func killBody(shard, index uint64) []byte {
	rng := rand.New(rand.NewSource(int64(shard<<32 | index)))
	b := make([]byte, rng.Intn(3000))
	rng.Read(b)
	return b
}

// TestKill kills a process that writes a log, again and again: every save that it said had returned is there.
func TestKill(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	rounds := 25
	if s := os.Getenv("WAL_KILL_ROUNDS"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		rounds = n
	}
	const seed = 5
	rng := rand.New(rand.NewSource(seed))
	dir := t.TempDir()
	acked := map[uint64]uint64{}
	for round := 0; round < rounds; round++ {
		killRound(t, dir, 1+rng.Intn(400), acked)
		l, err := Open(Options{Dir: dir, SegmentBytes: 1 << 20})
		require.NoError(t, err, "seed %d, round %d", seed, round)
		require.NoError(t, l.Check())
		for s, last := range acked {
			rs, err := l.ReadRaftState(s, 1, 0)
			require.NoError(t, err)
			require.GreaterOrEqual(t, rs.FirstIndex+rs.EntryCount-1, last, "seed %d, round %d, shard %d", seed, round, s)
			low := max(rs.FirstIndex, 1)
			ents, _, err := l.IterateEntries(nil, 0, s, 1, low, rs.FirstIndex+rs.EntryCount, noLimit)
			require.NoError(t, err)
			for i := range ents {
				require.Equal(t, len(killBody(s, ents[i].Index)), len(ents[i].Cmd))
			}
			acked[s] = rs.FirstIndex + rs.EntryCount - 1
		}
		require.NoError(t, l.Close())
	}
	t.Logf("%d rounds, last entries %v", rounds, acked)
}

// killRound runs the victim until it has acknowledged so many saves, and kills it.
func killRound(t *testing.T, dir string, saves int, acked map[uint64]uint64) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), killDirEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		var shard, last uint64
		if k, _ := fmt.Sscanf(lines.Text(), "%d %d", &shard, &last); k == 2 {
			acked[shard] = max(acked[shard], last)
		}
		if n == saves {
			require.NoError(t, cmd.Process.Kill())
		}
	}
	require.Error(t, cmd.Wait(), "it was killed")
}
