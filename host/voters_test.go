package host

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
)

// TestCatalogVotersFollowTheFleet: with the fifth full host the catalog gets five voters, one that is silent for long is replaced, and with the
// third that leaves it has three again. Whoever reports a step stops before the catalog hears of it, at every step.
func TestCatalogVotersFollowTheFleet(t *testing.T) {
	f := newTestFleet(t, 3, 0)
	f.tune = func(c *Config) { c.CatalogPatience = 4 * time.Second }
	var mu sync.Mutex
	crashed := map[catalog.MoveEvent]bool{}
	crash := make(chan uint64, 16)
	f.beforeStart = func(h *RaftHost) {
		h.beforeMoveReport = func(m catalog.Move, e catalog.MoveEvent) error {
			mu.Lock()
			defer mu.Unlock()
			if m.Shard != catalog.ShardID || crashed[e] {
				return nil
			}
			crashed[e] = true
			crash <- h.HostID()
			<-h.ctx.Done()
			return errors.New("the host crashes here")
		}
	}
	// until waits for a state, and starts the hosts again that crash meanwhile.
	until := func(what string, reached func() bool) {
		t.Helper()
		for deadline := time.Now().Add(patience); !reached(); {
			require.True(t, time.Now().Before(deadline), "%s: %v", what, f.any().Catalog().Moves())
			select {
			case id := <-crash:
				cfg := f.hosts[id].cfg
				f.stop(id)
				f.open(cfg)
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	votes := func(hosts ...uint64) {
		t.Helper()
		until(fmt.Sprintf("the catalog is on hosts %v", hosts), func() bool {
			_, moves := f.any().Catalog().Move(catalog.ShardID)
			return !moves && slices.Equal(f.on(catalog.ShardID), hosts)
		})
		f.agrees(catalog.ShardID)
	}
	f.startAll()
	f.settled(catalog.ShardID)
	f.join(4, catalog.HostFull)
	f.join(5, catalog.HostFull)
	votes(1, 2, 3, 4, 5)

	// One is silent for long, and replaced when there is a sixth host.
	f.stop(2)
	f.join(6, catalog.HostFull)
	votes(1, 3, 4, 5, 6)
	f.start(2)
	f.ready()
	until("the host that was silent removes what it had", func() bool {
		p, _ := f.hosts[2].Catalog().Placement(catalog.ShardID)
		r, _ := p.OnHost(2)
		_, runs := f.hosts[2].SelfReplica(catalog.ShardID)
		return r.State == catalog.ReplicaRemoved && !runs
	})

	// Hosts leave, among them the catalog's leader.
	_, leads, _, _ := f.hosts[3].Leader(catalog.ShardID)
	f.change(&catalog.DrainHost{HostID: leads})
	rest := slices.DeleteFunc([]uint64{1, 2, 3, 4, 5, 6}, func(id uint64) bool { return id == leads })
	votes(rest...)
	f.change(&catalog.DrainHost{HostID: rest[0]})
	until("three voters are left", func() bool { return len(f.on(catalog.ShardID)) == 3 && len(f.any().Catalog().Moves()) == 0 })
	f.agrees(catalog.ShardID)
	require.NotContains(t, f.on(catalog.ShardID), leads)
	require.NotContains(t, f.on(catalog.ShardID), rest[0])
	for _, e := range []catalog.MoveEvent{catalog.MoveAdded, catalog.MovePromoted, catalog.MoveLeft, catalog.MoveCleared} {
		mu.Lock()
		require.True(t, crashed[e], "event %d", e)
		mu.Unlock()
	}
}
