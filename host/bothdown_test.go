package host

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/faultnet"
)

// TestCatalogAfterBothFullHosts: both full hosts of a fleet with one witness are lost at the same moment, while the catalog changes. Whichever
// returns, the witness and it have the catalog: the witness is told of entries only when the other full host has them.
func TestCatalogAfterBothFullHosts(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	net := faultnet.New(1)
	f.tune = func(c *Config) { c.Faults = net }
	f.startAll()
	f.settled(catalog.ShardID)
	for round := range 3 {
		back := uint64(round%2 + 1)
		eventually(t, "both have the catalog", func() bool { return f.leader(catalog.ShardID).InSync(catalog.ShardID) == 2 })
		net.Both(1, 2, faultnet.Rule{Delay: 20 * time.Millisecond}) // the witness is nearer than they are to one another
		writing, stop := context.WithCancel(t.Context())
		var writer sync.WaitGroup
		taken := 0
		one, two := f.hosts[1], f.hosts[2]
		writer.Go(func() {
			for cancelled := false; writing.Err() == nil; cancelled = !cancelled {
				ctx, end := context.WithTimeout(writing, time.Second)
				if r, err := one.ProposeCatalog(ctx, &catalog.DrainHost{HostID: 3, Cancel: cancelled}); err == nil && r.Err() == nil {
					taken++
				}
				end()
			}
		})
		require.Eventually(t, func() bool { return one.Catalog().Version() > uint64(20*(round+1)) }, patience, 5*time.Millisecond)
		version := max(one.Catalog().Version(), two.Catalog().Version())
		eventually(t, "both have the catalog, and are lost at that moment", func() bool {
			if f.leader(catalog.ShardID).InSync(catalog.ShardID) < 2 { // a busy machine
				return false
			}
			net.Change(func(set func(from, to uint64, r faultnet.Rule)) {
				for from := uint64(1); from <= 3; from++ {
					for to := uint64(1); to <= 3; to++ {
						if from != to {
							set(from, to, faultnet.Rule{Cut: true})
						}
					}
				}
			})
			return true
		})
		var closing sync.WaitGroup
		for _, h := range []*RaftHost{one, two} {
			closing.Go(func() { require.NoError(t, h.Close()) })
		}
		closing.Wait()
		stop()
		writer.Wait()
		delete(f.hosts, 1)
		delete(f.hosts, 2)

		net.Heal()
		f.start(back)
		began := time.Now()
		require.NoError(t, f.hosts[back].AwaitReady(within(t, patience)), "host %d with the witness, round %d", back, round)
		v, err := f.hosts[back].ReadCatalog(within(t, patience))
		require.NoError(t, err)
		require.GreaterOrEqual(t, v.Version(), version, "what was answered is there")
		t.Logf("round %d: host %d ready after %v, at version %d", round, back, time.Since(began), v.Version())
		f.start(3 - back)
		f.ready()
	}
	// One is lost, the others go on, and then the other one is lost, too: the one that was lost last has it.
	eventually(t, "both have the catalog", func() bool { return f.leader(catalog.ShardID).InSync(catalog.ShardID) == 2 })
	f.stop(1)
	f.change(&catalog.DrainHost{HostID: 3})
	f.stop(2)
	f.start(2)
	f.ready()
	require.Equal(t, catalog.HostDraining, f.hosts[2].Catalog().HostState(3))
}
