package wal

import (
	"fmt"
	"math/rand"
	"os"
	"testing"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawn makes a rand.Source of rapid's draws, so that a failing schedule shrinks.
type drawn struct{ t *rapid.T }

func (d drawn) Uint64() uint64 { return rapid.Uint64().Draw(d.t, "r") }
func (d drawn) Int63() int64   { return int64(d.Uint64() >> 1) }
func (d drawn) Seed(int64)     {}

func openStock(dir string) (raftio.ILogDB, error) {
	nhc := config.NodeHostConfig{NodeHostDir: dir}
	if err := Configure(&nhc, Options{Kind: KindPebble}); err != nil {
		return nil, err
	}
	if err := nhc.Prepare(); err != nil {
		return nil, err
	}
	return nhc.Expert.LogDBFactory.Create(nhc, nil, []string{dir}, []string{dir})
}

// TestSameAsStockLog makes the same random calls of this log and of dragonboat's, restarts both now and
// then, and compares everything that dragonboat can learn from them.
func TestSameAsStockLog(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("the stock log is slow to open")
	}
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		dir, err := os.MkdirTemp(t.TempDir(), "stock")
		require.NoError(rt, err)
		defer func() { require.NoError(rt, os.RemoveAll(dir)) }()
		stock, err := openStock(dir)
		require.NoError(rt, err)
		fs := newCrashFS()
		o := testOptions(1 << 20)
		own, err := openFS(o, fs)
		require.NoError(rt, err)
		defer func() { require.NoError(rt, own.Close()); require.NoError(rt, stock.Close()) }()

		rng := rand.New(drawn{rt})
		g := newGenerator(rng, 3, 30)
		for i, steps := 0, rapid.IntRange(1, 60).Draw(rt, "steps"); i < steps; i++ {
			x := g.next()
			require.NoError(rt, x.apply(stock), "%v", x)
			require.NoError(rt, x.apply(own), "%v", x)
			if rapid.IntRange(0, 9).Draw(rt, "restart") == 0 {
				require.NoError(rt, own.Close())
				own, err = openFS(o, fs)
				require.NoError(rt, err)
				require.NoError(rt, stock.Close())
				stock, err = openStock(dir)
				require.NoError(rt, err)
			}
			require.NoError(rt, sameLogs(stock, own, g, rng), "%v", x)
			require.NoError(rt, own.Check())
		}
	})
}

// sameLogs compares the two logs as dragonboat's reader would see them, and single reads with limits.
func sameLogs(stock, own raftio.ILogDB, g *generator, rng *rand.Rand) error {
	a, err := stock.ListNodeInfo()
	if err != nil {
		return err
	}
	b, err := own.ListNodeInfo()
	if err != nil {
		return err
	}
	if sortNodeInfo(a); fmt.Sprint(a) != fmt.Sprint(b) {
		return fmt.Errorf("nodes %v, stock %v", b, a)
	}
	for _, k := range g.keys {
		want, err := viewOf(stock, k)
		if err != nil {
			return fmt.Errorf("stock: %w", err)
		}
		got, err := viewOf(own, k)
		if err != nil {
			return err
		}
		if err := want.diff(got); err != nil {
			return fmt.Errorf("shard %d: %w", k.shardID, err)
		}
		if want.state.Commit != got.state.Commit {
			return fmt.Errorf("shard %d: commit %d, stock %d", k.shardID, got.state.Commit, want.state.Commit)
		}
		if n := uint64(len(want.entries)); n > 0 {
			low := want.first + uint64(rng.Int63n(int64(n)))
			high := low + 1 + uint64(rng.Int63n(int64(n)+3))
			limit := uint64(rng.Intn(2000))
			e1, s1, err1 := stock.IterateEntries(nil, 0, k.shardID, k.replicaID, low, high, limit)
			e2, s2, err2 := own.IterateEntries(nil, 0, k.shardID, k.replicaID, low, high, limit)
			if err1 != nil || err2 != nil || s1 != s2 || len(e1) != len(e2) {
				return fmt.Errorf("shard %d, entries [%d, %d) up to %d bytes: %d of %d bytes (%v), stock %d of %d bytes (%v)",
					k.shardID, low, high, limit, len(e2), s2, err2, len(e1), s1, err1)
			}
		}
	}
	return nil
}
