package store

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestPowerLossLeavesEachShardAPrefix: many shards write and sync at once, installs switch, and the power goes at a
// random moment with a random share of unsynced data kept. Then each shard is exactly what its stored applied index
// says, and at or above what Sync had promised.
func TestPowerLossLeavesEachShardAPrefix(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 24
	if testing.Short() {
		rounds = 6
	}
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) { powerLoss(t, seed+uint64(round)) })
	}
}

func powerLoss(t *testing.T, seed uint64) {
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	fs := vfs.NewCrashableMem()
	o := testOptions(fs)
	o.MaxUnflushedBytes = 256 << 10
	s, err := Open("state", o)
	require.NoError(t, err)

	const shards = 8
	crashAfter := rng.IntN(shards * 150)
	keep := rng.IntN(101)
	crashed := make(chan *vfs.MemFS, 1)
	promised := make([]uint64, shards+1) // what Sync had promised when the power went
	var mu sync.Mutex
	done, synced := 0, make([]uint64, shards+1)
	step := func() {
		mu.Lock()
		defer mu.Unlock()
		if done == crashAfter {
			copy(promised, synced)
			crashed <- fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: keep, RNG: rand.New(rand.NewPCG(seed, 2))})
		}
		done++
	}
	var wg sync.WaitGroup
	for id := uint64(1); id <= shards; id++ {
		h := shard(t, s, id)
		rng := rand.New(rand.NewPCG(seed, 100+id))
		wg.Go(func() {
			for applied := uint64(1); applied <= 150; applied++ {
				crashStep(t, h, applied, rng)
				if rng.IntN(20) == 0 {
					h.Sync()
					mu.Lock()
					synced[id] = applied
					mu.Unlock()
				}
				step()
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.Close())

	o.FS = <-crashed
	s, err = Open("state", o)
	require.NoError(t, err)
	require.False(t, s.Fresh(), "what was opened once does not look as if it had been lost")
	for id := uint64(1); id <= shards; id++ {
		h := shard(t, s, id)
		applied := readApplied(t, h)
		require.GreaterOrEqual(t, applied, promised[id], "shard %d", id)
		require.Equal(t, expected(applied), dump(t, h), "shard %d at %d", id, applied)
	}
	require.NoError(t, s.Close())
}

// crashStep applies one index: a deterministic batch, and now and then an install of the state of this very index.
func crashStep(t *testing.T, h *Shard, applied uint64, rng *rand.Rand) {
	if applied%50 == 0 {
		in, err := h.BeginInstall()
		require.NoError(t, err)
		it, err := h.NewIter(nil, nil)
		require.NoError(t, err)
		for ok := it.First(); ok; ok = it.Next() {
			v, err := it.Value()
			require.NoError(t, err)
			require.NoError(t, in.Set(it.Key(), v))
		}
		require.NoError(t, it.Close())
		if rng.IntN(3) == 0 {
			require.NoError(t, in.Abort())
		} else {
			require.NoError(t, in.Finish())
		}
	}
	b := h.NewBatch()
	apply(b.Set, b.DeleteRange, applied)
	require.NoError(t, h.Commit(b))
}

// apply is the state machine of this test: entry n writes key n mod 40 and clears a range at every 23rd.
func apply(set func(k, v []byte), clearRange func(lo, up []byte), n uint64) {
	if n%23 == 0 {
		clearRange([]byte("k10"), []byte("k30"))
	}
	size := 10 + n%7*3000
	if n%67 == 0 {
		size = 400 << 10 // larger than a memtable
	}
	set(fmt.Appendf(nil, "k%02d", n%40), append(fmt.Appendf(nil, "%d:", n), make([]byte, size)...))
	set([]byte("applied"), binary.BigEndian.AppendUint64(nil, n))
}

func readApplied(t *testing.T, h *Shard) uint64 {
	v, found, err := h.Get([]byte("applied"))
	require.NoError(t, err)
	if !found {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

func expected(applied uint64) string {
	state := map[string]string{}
	for n := uint64(1); n <= applied; n++ {
		apply(func(k, v []byte) { state[string(k)] = string(v) }, func(lo, up []byte) {
			for k := range state {
				if k >= string(lo) && k < string(up) {
					delete(state, k)
				}
			}
		}, n)
	}
	out := ""
	if v, ok := state["applied"]; ok {
		out = fmt.Sprintf("applied=%s ", v)
	}
	for n := range 40 {
		k := fmt.Sprintf("k%02d", n)
		if v, ok := state[k]; ok {
			out += fmt.Sprintf("%s=%s ", k, v)
		}
	}
	return out
}
