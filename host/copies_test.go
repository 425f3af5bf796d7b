package host

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/peer"
)

const copyShard = 7

func look(c *copies, term, index uint64) (have, may int) {
	have, may, _ = c.look(copyShard, term, index, false)
	return have, may
}

// TestCopiesNeedTheLeadersTerm is the model's trace "durable index without its term": a follower whose last entry is another
// leader's may hold something else at the index.
func TestCopiesNeedTheLeadersTerm(t *testing.T) {
	c := newCopies()
	c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: 1, Term: 1, Applied: 1}, 1, 1)
	have, may := look(c, 2, 1)
	require.Equal(t, 1, have, "what is applied is committed, whatever the term")
	require.Zero(t, may)
	c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: 5, Term: 1, Applied: 1}, 1, 1)
	have, may = look(c, 2, 3)
	require.Zero(t, have, "durable in an older term is no copy")
	require.Equal(t, 1, may)
	c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: 3, Term: 2, Applied: 1}, 1, 1)
	have, _ = look(c, 2, 3)
	require.Equal(t, 1, have)
	have, _ = look(c, 2, 4)
	require.Zero(t, have)
}

// TestCopiesOfANewShard: for a second, the other full replicas of a new shard may have an entry though they have told nothing yet; entries are not
// kept from the witness for that.
func TestCopiesOfANewShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCopies()
		c.expect(copyShard, 1)
		have, may := look(c, 2, 3)
		require.Equal(t, []int{0, 1}, []int{have, may})
		_, may, _ = c.look(copyShard, 2, 3, true)
		require.Zero(t, may)
		require.True(t, c.mayTell(copyShard, 2, 3))
		c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: 3, Term: 2, Applied: 1}, 2, 1)
		have, may = look(c, 2, 3)
		require.Equal(t, []int{1, 0}, []int{have, may}, "it has told")
		have, may = look(c, 2, 4)
		require.Equal(t, []int{0, 1}, []int{have, may})
		young, _ := c.newborn(copyShard)
		require.True(t, young)
		c.ended(2)
		c.ended(2)
		_, may = look(c, 2, 4)
		require.Zero(t, may, "it is away")

		c.expect(copyShard+1, 1)
		_, may, _ = c.look(copyShard+1, 2, 4, false)
		require.Equal(t, 1, may)
		<-time.After(newborn)
		_, may, _ = c.look(copyShard+1, 2, 4, false)
		require.Zero(t, may, "a second is over")
		young, _ = c.newborn(copyShard + 1)
		require.False(t, young)
		c.forget(copyShard)
		young, _ = c.newborn(copyShard)
		require.False(t, young)
		require.Len(t, c.shards, 1, "a question makes no entry")
	})
}

// TestCopiesLeaveAndReturn: a broken connection or a stalled replica is out of sync at once, and back when it has applied what
// was committed when it came back.
func TestCopiesLeaveAndReturn(t *testing.T) {
	c := newCopies()
	report := func(durable, applied, leaderApplied uint64) {
		c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: durable, Term: 1, Applied: applied}, 1, leaderApplied)
	}
	report(10, 9, 10)
	require.Zero(t, c.inSync(copyShard), "it has not applied what was committed when it was first heard of")
	report(11, 10, 20)
	require.Equal(t, 1, c.inSync(copyShard), "the mark is the one of the first report")

	c.ended(2)
	require.Zero(t, c.inSync(copyShard))
	have, may := look(c, 1, 5)
	require.Zero(t, have, "a host that cannot be asked does not count, whatever it once said")
	require.Zero(t, may)
	report(30, 25, 30)
	require.Zero(t, c.inSync(copyShard))
	report(31, 30, 40)
	require.Equal(t, 1, c.inSync(copyShard))

	c.late(copyShard, 1, 32, time.Now().Add(-time.Hour))
	require.Equal(t, 1, c.inSync(copyShard), "it has just made progress")
	c.mu.Lock()
	c.shards[copyShard].replicas[2].at = time.Now().Add(-2 * copyTimeout)
	c.mu.Unlock()
	c.late(copyShard, 1, 31, time.Now().Add(-time.Hour))
	require.Equal(t, 1, c.inSync(copyShard), "nothing waits for it")
	c.late(copyShard, 1, 32, time.Now().Add(-time.Hour))
	require.Zero(t, c.inSync(copyShard), "no progress for copyTimeout on an entry that waits")
}

func TestCopiesOfOtherHostsAreTheirOwn(t *testing.T) {
	c := newCopies()
	c.report(2, peer.CopyReport{Shard: copyShard, Replica: 2, Durable: 3, Term: 1, Applied: 3}, 1, 1)
	c.report(3, peer.CopyReport{Shard: copyShard, Replica: 3, Durable: 1, Term: 1, Applied: 1}, 1, 1)
	c.ended(3)
	have, may := look(c, 1, 3)
	require.Equal(t, 1, have)
	require.Zero(t, may)
	c.forget(copyShard)
	have, _ = look(c, 1, 1)
	require.Zero(t, have)
}

func TestNeedsReports(t *testing.T) {
	three := catalog.Placement{Replicas: []catalog.Replica{{ID: 1, Birth: catalog.BirthInitial}, {ID: 2, Birth: catalog.BirthInitial}, {ID: 3, Birth: catalog.BirthInitial}}}
	require.False(t, needsReports(three), "every quorum of three full replicas holds two bodies")
	three.Replicas[2].Birth = catalog.BirthWitness
	require.True(t, needsReports(three))
	three.Replicas[2].State = catalog.ReplicaRemoved
	require.False(t, needsReports(three))
}
