package wal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// TestPowerLoss turns the power off at every mutating call of a schedule, lets some of what was not synced
// survive, opens the log again and compares it with a model: every operation that returned is there, the
// one that was under way is there whole or not at all, and only commit indexes may be older.
func TestPowerLoss(t *testing.T) {
	t.Parallel()
	for _, seed := range crashSeeds(t) {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			t.Parallel()
			powerLoss(t, seed)
		})
	}
}

// crashOptions has every other seed copy small records together all the time.
func crashOptions(seed int64) Options {
	o := testOptions(1 << 20)
	if seed%2 == 0 {
		o.IndexBytes = 1
	}
	return o
}

func crashSeeds(t *testing.T) []int64 {
	seeds := []int64{1, 2}
	if s := os.Getenv("WAL_SEED"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		require.NoError(t, err)
		seeds = []int64{n}
	} else if !testing.Short() {
		for s := int64(3); s <= 20; s++ {
			seeds = append(seeds, s)
		}
	}
	return seeds
}

func powerLoss(t *testing.T, seed int64) {
	total := schedule(t, seed, 0, nil)
	step := max(1, total/30)
	if seed == 1 && !testing.Short() {
		step = 1 // every call, once
	}
	for at := 1 + int(seed)%step; at <= total; at += step {
		schedule(t, seed, at, rand.New(rand.NewSource(seed*1_000_003+int64(at))))
	}
}

// schedule runs the operations of the seed until the power goes at call offAt, and checks what is left,
// two boots on. It returns the number of mutating calls.
func schedule(t *testing.T, seed int64, offAt int, crash *rand.Rand) int {
	t.Helper()
	fail := func(err error, what string) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d, power off at call %d: %s: %v", seed, offAt, what, err)
		}
	}
	fs := newCrashFS()
	fs.offAt = offAt
	o := crashOptions(seed)
	g := newSeeded(seed)
	before, after := newMemoryLog(), newMemoryLog()
	l, err := openFS(o, fs)
	if err != nil && offAt == 0 {
		fail(err, "open")
	}
	for i := 0; err == nil && i < 250; i++ {
		x := g.next()
		fail(x.apply(after), "model")
		if err = x.apply(l); err == nil {
			fail(x.apply(before), "model")
		}
	}
	if offAt == 0 {
		fail(err, "schedule")
	}
	if l != nil {
		_ = l.Close() // fails if the power is off
	}
	if offAt == 0 {
		fail(sameAfterCrash(fs, o, g.keys, before, after), "clean restart")
		return fs.ops
	}
	next := fs.crash(crash)
	fail(sameAfterCrash(next, o, g.keys, before, after), "after the crash")
	return fs.ops
}

// sameAfterCrash opens the log and compares it with the two models; then once more, as opening must
// change nothing.
func sameAfterCrash(fs *crashFS, o Options, keys []replicaKey, before, after *memoryLog) error {
	for boot := 1; boot <= 2; boot++ {
		l, err := openFS(o, fs)
		if err != nil {
			return fmt.Errorf("boot %d: %w", boot, err)
		}
		err = errors.Join(l.Check(), nil)
		if err == nil {
			if err = sameAs(l, after, keys, true); err != nil {
				if err2 := sameAs(l, before, keys, true); err2 != nil {
					err = fmt.Errorf("boot %d: with the last operation: %w; without it: %v", boot, err, err2)
				} else {
					err = nil
				}
			}
		}
		if err := errors.Join(err, l.Close()); err != nil {
			return err
		}
	}
	return nil
}

// TestPowerLossAfterKill kills the process at a mutating call of a schedule, opens the log again, and turns the power
// off at a call of the open, right behind it, or later. What the second process found, it may have acted on without
// another sync, so that must be there for the third.
func TestPowerLossAfterKill(t *testing.T) {
	t.Parallel()
	for _, seed := range crashSeeds(t) {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			t.Parallel()
			total := schedule(t, seed, 0, nil)
			step := max(1, total/12)
			if !testing.Short() {
				step = max(1, total/40)
			}
			if seed == 1 && !testing.Short() {
				step = 1
			}
			for at := 1 + int(seed)%step; at <= total; at += step {
				k := runToKill(seed, at, at/step%3 == 0)
				for _, off := range []int{0, 1 + at%7, 8 + at%50} {
					require.NoError(t, k.run(off), "seed %d, killed at call %d, power off at call %d of the next process (0: when it is open), %t",
						seed, at, off, k.forget)
				}
			}
		})
	}
}

// killed is what a process leaves that was killed at a call of a schedule of TestPowerLossAfterKill.
type killed struct {
	seed   int64
	at     int  // the call
	forget bool // if the call is a Sync, it is one that failed

	fs            *crashFS
	g             *generator
	last          op         // was under way
	before, after *memoryLog // without last, and with it
}

// runToKill is the first process.
func runToKill(seed int64, at int, forget bool) *killed {
	k := &killed{seed: seed, at: at, forget: forget, fs: newCrashFS(), g: newSeeded(seed), before: newMemoryLog(), after: newMemoryLog()}
	k.fs.offAt, k.fs.forget = at, forget
	l, err := openFS(crashOptions(seed), k.fs)
	k.last = op{what: "none", apply: func(raftio.ILogDB) error { return nil }}
	for i := 0; err == nil && i < 250; i++ {
		k.last = k.g.next()
		err = k.last.both(l, k.before, k.after)
	}
	if l != nil {
		_ = l.Close() // fails: it is dead
	}
	return k
}

// run is the second process, at whose call offAt the power goes off, or, if that is 0, when it is open; and what the third
// one finds. It leaves k as it is.
func (k *killed) run(offAt int) error {
	o := crashOptions(k.seed)
	fs, g, before, after := k.fs.copyOf().kill(offAt), k.g.clone(), k.before.clone(), k.after.clone()
	l, err := openFS(o, fs)
	if err == nil {
		err = k.second(l, fs, g, before, after, offAt)
		fs.powerOff()
		_ = l.Close() // fails: the power is off
	}
	if err != nil && !errors.Is(err, errPowerOff) {
		return fmt.Errorf("the second process: %w", err)
	}
	next := fs.crash(rand.New(newSource(k.seed*1_000_003 + int64(k.at)*64 + int64(offAt))))
	return sameAfterCrash(next, o, g.keys, before, after)
}

// second finds k.last whole or not at all, makes it again, and goes on.
func (k *killed) second(l *Log, fs *crashFS, g *generator, before, after *memoryLog, offAt int) error {
	if err := sameAs(l, after, g.keys, true); err == nil {
		before.replicas = after.clone().replicas
	} else if err2 := sameAs(l, before, g.keys, true); err2 != nil {
		return fmt.Errorf("with the last operation: %w; without it: %w", err, err2)
	}
	if offAt == 0 {
		fs.powerOff()
	}
	if err := k.last.apply(l); err != nil {
		return err
	}
	before.replicas = after.clone().replicas
	for i := 0; i < 250; i++ {
		if err := g.next().both(l, before, after); err != nil {
			return err
		}
	}
	return nil
}

// both makes the operation in the models and the log; in before only if the log took it.
func (x op) both(l raftio.ILogDB, before, after *memoryLog) error {
	if err := x.apply(after); err != nil {
		return fmt.Errorf("model: %v", err)
	}
	if err := x.apply(l); err != nil {
		return err
	}
	if err := x.apply(before); err != nil {
		return fmt.Errorf("model: %v", err)
	}
	return nil
}

// shortened says that small records of a shard with so many were joined.
func shortened(l *Log, shard, saves uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.replicas[replicaKey{shard, 1}].spans)+minStretch < int(saves)
}

// TestPowerLossWhileRecordsAreJoined turns the power off while small records are copied together: no entry of a save
// that returned is missing or changed, and after a kill in front of it neither.
func TestPowerLossWhileRecordsAreJoined(t *testing.T) {
	t.Parallel()
	step := 3
	if testing.Short() {
		step = 29
	}
	body := func(shard, index uint64) []byte { return bytes.Repeat([]byte{byte(shard<<7 | index)}, 4000) }
	joined := 0
	for run, at := 0, 300; at <= 700; run, at = run+1, at+step {
		fs := newCrashFS()
		fs.offAt = at
		o := testOptions(1 << 20)
		o.IndexBytes = 1
		l, err := openFS(o, fs)
		require.NoError(t, err)
		acked := map[uint64]uint64{}
		for i := uint64(2); err == nil; i++ {
			shard, index := i%2, i/2
			err = l.SaveRaftState([]raftpb.Update{{ShardID: shard, ReplicaID: 1, State: raftpb.State{Term: 1},
				EntriesToSave: []raftpb.Entry{{Index: index, Term: 1, Cmd: body(shard, index)}}}}, 1)
			if err == nil {
				acked[shard] = index
			}
			if run%4 < 2 && err == nil && index == 40 { // in half of the runs some are joined for certain
				require.Eventually(t, func() bool { return fs.isOff() || shortened(l, shard, index) }, time.Minute, 100*time.Microsecond)
			}
		}
		require.ErrorIs(t, err, errPowerOff)
		_ = l.Close()
		if at%2 == 0 {
			fs = fs.kill(0)
			l, err = openFS(o, fs)
			require.NoError(t, err)
			fs.powerOff()
			_ = l.Close()
		}
		l, err = openFS(o, fs.crash(rand.New(rand.NewSource(int64(at)))))
		require.NoError(t, err, "power off at call %d", at)
		require.NoError(t, l.Check())
		for shard, last := range acked {
			ents, _, err := l.IterateEntries(nil, 0, shard, 1, 1, last+1, noLimit)
			require.NoError(t, err)
			require.Len(t, ents, int(last), "power off at call %d", at)
			for i := range ents {
				require.Equal(t, body(shard, uint64(i+1)), ents[i].Cmd)
			}
			if shortened(l, shard, last) {
				joined++
			}
		}
		require.NoError(t, l.Close())
	}
	require.NotZero(t, joined)
	t.Logf("%d logs with joined records", joined)
}
