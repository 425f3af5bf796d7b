package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const ms = time.Millisecond

// TestQuorumLevelReadOnly: a proposal without its commit makes a shard read-only, and only a barrier in time ends that.
func TestQuorumLevelReadOnly(t *testing.T) {
	l := newQuorumLevel()
	n := l.began(0)
	require.False(t, l.isReadOnly(quorumAckTimeout-1))
	require.True(t, l.isReadOnly(quorumAckTimeout))
	l.ended(n, 7, 10, 600*ms)
	require.True(t, l.isReadOnly(700*ms), "the late commit alone does not end it")
	l.barrier(l.mark(), barrierWithin+1)
	require.True(t, l.isReadOnly(800*ms), "nor a barrier that was slow")
	mark := l.mark()
	l.began(800 * ms)
	l.barrier(mark, barrierWithin)
	require.False(t, l.isReadOnly(900*ms))
	require.True(t, l.isReadOnly(1300*ms), "what was proposed behind the barrier is still watched")
}

// TestQuorumLevelLateOutcomeCounts: an outcome that comes after the timeout, with nobody asking meanwhile, still counts.
func TestQuorumLevelLateOutcomeCounts(t *testing.T) {
	l := newQuorumLevel()
	l.ended(l.began(0), 1, 1, quorumAckTimeout)
	require.True(t, l.isReadOnly(quorumAckTimeout))
	l.elected()
	require.False(t, l.isReadOnly(time.Hour), "another leader knows nothing of it")
}

// TestQuorumLevelDoesNotFlap: commits that alternate about the timeout change the level once.
func TestQuorumLevelDoesNotFlap(t *testing.T) {
	l, now, changes, was := newQuorumLevel(), time.Duration(0), 0, false
	for i := range 100 {
		n := l.began(now)
		took := 100 * ms
		if i%2 == 0 {
			took = 600 * ms
		}
		now += took
		l.ended(n, 1, 1, now)
		l.barrier(l.mark(), took) // 100 ms would end it, 600 ms not
		if i%2 == 1 {
			continue
		}
		if is := l.isReadOnly(now); is != was {
			was = is
			changes++
		}
	}
	require.Equal(t, 1, changes)
}

// TestQuorumLevelSoftHolds: a lag that comes and goes within softHold is one soft time.
func TestQuorumLevelSoftHolds(t *testing.T) {
	l := newQuorumLevel()
	require.False(t, l.soft(false, 0))
	for i := range time.Duration(10) {
		require.True(t, l.soft(i%2 == 0, i*300*ms), "%d", i)
	}
	require.True(t, l.soft(false, 2400*ms+softHold-1))
	require.False(t, l.soft(false, 2400*ms+softHold))

	l.elected()
	require.True(t, l.soft(true, 4000*ms), "nobody has told anything yet")
	require.False(t, l.soft(false, 4001*ms), "nothing to hold")
	require.True(t, l.soft(true, 4002*ms))
	require.True(t, l.soft(false, 4003*ms))
}

// TestQuorumLevelSoftGap: entries, bytes and time each make a replica lag.
func TestQuorumLevelSoftGap(t *testing.T) {
	l := newQuorumLevel()
	require.False(t, l.behind(0, 0, 0), "nothing is known yet")
	l.ended(l.began(0), 10, 100, 0)
	require.False(t, l.behind(10, 0, time.Hour))
	require.False(t, l.behind(9, 0, softGapTime-1))
	require.True(t, l.behind(9, 0, softGapTime))
	require.False(t, l.behind(9, 300*ms, softGapTime), "its word is old, it may have more")
	l.ended(l.began(0), 11, softGapBytes, 0)
	require.True(t, l.behind(10, 0, 0), "bytes")
	require.False(t, l.behind(11, 0, 0))
	l.ended(l.began(0), 11+softGapEntries, 1, 0)
	require.True(t, l.behind(11, 0, 0), "entries")
	require.False(t, l.behind(12, 0, 0))
}

// TestQuorumLevelSlowApply: a proposal that has its commit and waits for its apply does not make a shard read-only; one without its commit does,
// also while others commit.
func TestQuorumLevelSlowApply(t *testing.T) {
	const begin = time.Hour
	var commit, applied uint64
	level := func() *quorumLevel {
		l := newQuorumLevel()
		l.marks = func() (uint64, uint64) { return commit, applied }
		return l
	}
	commit, applied = 5000, 10
	l, now := level(), time.Duration(begin)
	n := l.began(now)
	for range 20 { // the apply is far behind, and the log grows
		now += 100 * ms
		commit += 100
		require.False(t, l.isReadOnly(now), "%v", now-begin)
	}
	applied = commit
	l.ended(n, 7000, 1, now+100*ms)
	require.False(t, l.isReadOnly(now+100*ms), "its outcome came late, its commit did not")

	applied, now = commit-100, now+time.Hour
	l.began(now)
	for range 4 {
		now += 100 * ms
		require.False(t, l.isReadOnly(now))
	}
	require.True(t, l.isReadOnly(now+100*ms), "the log does not grow: there is no commit")

	l, now = level(), begin
	l.began(now)
	for range 4 { // commits that take 600 ms, one begun every 100 ms
		now += 100 * ms
		commit += 10
		applied = commit
		require.False(t, l.isReadOnly(now))
	}
	require.True(t, l.isReadOnly(now+100*ms))
}

// TestQuorumLevelCutOff: acks are refused while nothing commits and the quorum cannot be read from, or no leader is known; not while commits are
// only slow.
func TestQuorumLevelCutOff(t *testing.T) {
	l := newQuorumLevel()
	require.False(t, l.isCutOff(0))
	l.read(false)
	require.False(t, l.isCutOff(0), "a read that is lost says nothing")
	l.began(0)
	require.False(t, l.isCutOff(quorumAckTimeout-1))
	require.True(t, l.isCutOff(quorumAckTimeout))
	l.read(true)
	require.False(t, l.isCutOff(600*ms), "slow, and there")
	require.True(t, l.isReadOnly(600*ms))
	l.read(false)
	require.True(t, l.isCutOff(700*ms))
	l.barrier(l.mark(), barrierWithin)
	require.False(t, l.isCutOff(800*ms))
	l.read(false)
	l.began(900 * ms)
	require.True(t, l.isCutOff(1400*ms))
	l.elected()
	require.False(t, l.isCutOff(1500*ms))

	l.leader(false, 2000*ms)
	l.leader(false, 2400*ms) // told again
	require.False(t, l.isCutOff(2499*ms))
	require.True(t, l.isCutOff(2500*ms))
	l.leader(true, 2600*ms)
	require.False(t, l.isCutOff(2600*ms))
	l.leader(false, 2700*ms)
	require.False(t, l.isCutOff(3199*ms), "another time without a leader")
	require.True(t, l.isCutOff(3200*ms))
}
