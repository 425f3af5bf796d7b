package node

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
)

// fakeFleet is three full replicas on hosts of the same numbers.
type fakeFleet struct{ dead, down map[uint64]bool }

func (f *fakeFleet) Options(uint64) (queue.QueueOptions, bool) { return queue.QueueOptions{}, true }
func (f *fakeFleet) Refresh(context.Context) error             { return nil }
func (f *fakeFleet) FullReplicas(uint64) []replicaHost {
	return []replicaHost{{1, 1}, {2, 2}, {3, 3}}
}
func (f *fakeFleet) Alive(host uint64) bool     { return !f.dead[host] }
func (f *fakeFleet) Serves(host, _ uint64) bool { return !f.dead[host] && !f.down[host] }
func newFakeFleet() *fakeFleet                  { return &fakeFleet{dead: map[uint64]bool{}, down: map[uint64]bool{}} }
func homeOn(replica queue.ReplicaID) queue.GroupInfo {
	return queue.GroupInfo{ID: 1, Name: "g", Home: replica}
}
func keeperOf(f fleet) *housekeeper {
	return &housekeeper{desk: &desk{shard: 4, host: 1, self: 1, fleet: f}, missing: map[queue.GroupID]time.Time{}}
}

func TestAbsentHomes(t *testing.T) {
	f := newFakeFleet()
	k := keeperOf(f)
	now := time.Now()
	require.False(t, k.absent(homeOn(2), now))
	require.True(t, k.absent(homeOn(9), now), "a replica that is in no placement")
	f.dead[2] = true
	require.True(t, k.absent(homeOn(2), now), "a silent host is replaced at once: silence was waited for")
	f.dead[2] = false

	f.down[2] = true
	require.False(t, k.absent(homeOn(2), now), "its replica may be starting")
	require.False(t, k.absent(homeOn(2), now.Add(missingFor-time.Millisecond)))
	require.True(t, k.absent(homeOn(2), now.Add(missingFor)), "the host is alive and serves nobody")
	f.down[2] = false
	require.False(t, k.absent(homeOn(2), now.Add(missingFor)))
	f.down[2] = true
	require.False(t, k.absent(homeOn(2), now.Add(missingFor)), "the time counts from anew")
}

func TestSpreadLeavesOutWhoServesNobody(t *testing.T) {
	f := newFakeFleet()
	k := keeperOf(f)
	seen := map[queue.ReplicaID]bool{}
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		seen[k.spread(name)] = true
		require.Equal(t, k.spread(name), k.spread(name))
	}
	require.Len(t, seen, 3, "homes are spread over the full replicas")
	f.dead[1], f.down[2] = true, true
	for _, name := range []string{"a", "b", "c"} {
		require.Equal(t, queue.ReplicaID(3), k.spread(name))
	}
	f.dead[3] = true
	require.Zero(t, k.spread("a"))
}
