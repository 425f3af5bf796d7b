package node

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// fakeFleet is three full replicas on hosts of the same numbers.
type fakeFleet struct {
	dead, down map[uint64]bool
	gone       map[queue.Producer]bool
}

func (f *fakeFleet) Options(uint64) (queue.QueueOptions, bool) { return queue.QueueOptions{}, true }
func (f *fakeFleet) Refresh(context.Context) error             { return nil }
func (f *fakeFleet) FullReplicas(uint64) []replicaHost {
	return []replicaHost{{1, 1}, {2, 2}, {3, 3}}
}
func (f *fakeFleet) Gone(_ context.Context, shard uint64, groups []queue.GroupID) (gone []queue.GroupID) {
	for _, id := range groups {
		if f.gone[queue.Producer{Kind: queue.ProducerOutbox, ID: shard, Sub: uint64(id)}] {
			gone = append(gone, id)
		}
	}
	return gone
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

// fakeRaft applies to a state in memory.
type fakeRaft struct {
	raft
	m      *queuetest.Machine
	leader queue.ReplicaID
}

func (r fakeRaft) Leader() (queue.ReplicaID, uint64, uint64, bool) {
	return r.leader, uint64(r.leader), 1, r.leader != 0
}

func (r fakeRaft) Stamp() queue.Stamp { return 1 }
func (r fakeRaft) Propose(_ context.Context, cmd []byte) (queue.Result, error) {
	return r.m.Raw(cmd), nil
}

// TestForgetsOutboxesWhoseSourceIsGone: at the second look, and no other.
func TestForgetsOutboxesWhoseSourceIsGone(t *testing.T) {
	m := queuetest.New(t)
	outbox := func(shard, group uint64) queue.Producer {
		return queue.Producer{Kind: queue.ProducerOutbox, ID: shard, Sub: group}
	}
	for _, p := range []queue.Producer{outbox(7, 1), outbox(7, 2), outbox(9, 1)} {
		m.Do(&queue.Enqueue{Stamp: 1, Publishes: []queue.Publish{{Producer: p, Low: 1, Messages: []queue.Message{{Seq: 1}}}}})
	}
	left := func() []queue.Producer {
		list, err := m.Outboxes(queue.Producer{}, 10)
		require.NoError(t, err)
		return list
	}
	f := newFakeFleet()
	f.gone = map[queue.Producer]bool{outbox(7, 2): true, outbox(9, 1): true}
	k := keeperOf(f)
	k.reader, k.raft, k.log = m, fakeRaft{m: m}, zap.NewNop()
	k.forget(t.Context())
	require.Len(t, left(), 3)
	k.forget(t.Context())
	require.Len(t, left(), 3, "it is not time yet")
	delete(f.gone, outbox(9, 1))
	k.nextForget = time.Time{}
	k.forget(t.Context())
	require.Equal(t, []queue.Producer{outbox(7, 1), outbox(9, 1)}, left())
	applied := m.Meta().Applied
	k.nextForget = time.Time{}
	k.forget(t.Context())
	require.Equal(t, applied, m.Meta().Applied, "nothing is proposed for nothing")
	m.RequireSame()
}

func TestDeskHostPrefersTheLeaders(t *testing.T) {
	replicas := []replicaHost{{1, 1}, {2, 2}, {3, 3}}
	alive := func(dead ...uint64) func(uint64) bool {
		return func(host uint64) bool { return !slices.Contains(dead, host) }
	}
	require.EqualValues(t, 3, deskHost(replicas, 3, 9, alive()))
	require.EqualValues(t, 1, deskHost(replicas, 0, 9, alive()), "nobody is known to lead")
	require.EqualValues(t, 2, deskHost(replicas, 3, 9, alive(1, 3)))
	require.EqualValues(t, 2, deskHost(replicas, 1, 1, alive()), "this host has no desk yet")
	require.Zero(t, deskHost(replicas, 1, 9, alive(1, 2, 3)))
}

// deadlineRaft has no leader: it notes until when a read barrier would have waited.
type deadlineRaft struct {
	raft
	until time.Time
}

func (r *deadlineRaft) ReadIndex(ctx context.Context) error {
	r.until, _ = ctx.Deadline()
	return code.New(code.NoLeader, "")
}

func TestFreshenLeavesTimeForTheAnswer(t *testing.T) {
	for left, want := range map[time.Duration]time.Duration{time.Hour: freshenTimeout, time.Second: time.Second / 2} {
		r := &deadlineRaft{}
		now := time.Now()
		ctx, cancel := context.WithDeadline(t.Context(), now.Add(left))
		(&desk{raft: r}).freshen(ctx)
		cancel()
		require.WithinDuration(t, now.Add(want), r.until, 250*time.Millisecond)
	}
}

// TestEmptyLongPollWithoutLeader: a home that may be cut off sends its consumers elsewhere.
func TestEmptyLongPollWithoutLeader(t *testing.T) {
	d := &desk{raft: fakeRaft{}}
	paused, gone := code.New(code.GroupPaused, ""), code.New(code.UnknownGroup, "")
	err := d.emptyHanded(0, time.Second, nil)
	require.True(t, isCode(err, code.NoLeader))
	require.Equal(t, code.EffectNone, err.(*code.Error).Effect)
	require.True(t, isCode(d.emptyHanded(0, time.Second, paused), code.NoLeader))
	require.Equal(t, gone, d.emptyHanded(0, time.Second, gone))
	require.NoError(t, d.emptyHanded(1, time.Second, nil))
	require.NoError(t, d.emptyHanded(0, 0, nil), "it has only looked")
	d.raft = fakeRaft{leader: 2}
	require.NoError(t, d.emptyHanded(0, time.Second, nil))
	require.Equal(t, paused, d.emptyHanded(0, time.Second, paused))
}
