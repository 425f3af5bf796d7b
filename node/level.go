package node

import (
	"maps"
	"sync"
	"time"

	"github.com/tierq/tierq/queue"
)

// Values of tierq_quorum_state. It counts up as the quorum level counts down: level 2 is 0, level 1 is 1, level 0 is 2.
const (
	quorumHealthy  = 0
	quorumSoft     = 1 // level 1: a full replica is out of sync or behind the soft gap; publishes are OK with FOLLOWER_LAG
	quorumReadOnly = 2 // level 0: publishes are refused; deliveries and acks go on while a quorum can be reached
	quorumElecting = 3 // no leader is known
)

const (
	// quorumAckTimeout is how long a proposal may be without its commit before the shard is read-only. Waiting for a
	// second data copy does not count. A barrier write that commits in half of it ends that.
	quorumAckTimeout = 500 * time.Millisecond
	barrierWithin    = quorumAckTimeout / 2
	// slowProposal is the age of a proposal from which on it is asked whether it waits for its apply only.
	slowProposal = quorumAckTimeout / 5
	// softHold is how long nothing may lag before a soft shard is healthy again.
	softHold = time.Second
	// The soft gap: a full replica that is further behind is said to lag.
	softGapEntries = 1024
	softGapBytes   = 4 << 20
	softGapTime    = 200 * time.Millisecond
	// commitSamples bounds what is remembered of past commits to measure the gap in bytes and time.
	commitSamples = 128
)

// quorumLevel is what a host knows of a shard's quorum by what it proposes there, publishes and all other commands: as the leader's host for
// everybody, elsewhere for the homes that it has. Times are boot times. Safe for concurrent use.
//
// Invariants: (1) it becomes read-only only by a proposal older than quorumAckTimeout that does not wait for its apply only; (2) it leaves that only by
// a barrier that committed within barrierWithin, or with the leadership; (3) soft lasts until nothing has lagged for softHold, once it was healthy;
// (4) it is cut off only while it is read-only and the last read of the quorum has failed, or no leader has been known for quorumAckTimeout.
type quorumLevel struct {
	// marks reads how far the log is committed and applied here; nil: not known.
	marks func() (commit, applied uint64)

	mu       sync.Mutex
	next     uint64
	pending  map[uint64]time.Duration // when each was proposed
	readOnly bool
	laggedAt time.Duration
	lagged   bool
	settled  bool   // nothing lagged at some time of this leadership
	bytes    uint64 // proposed and committed in all
	samples  []commitSample

	askedAt    time.Duration // when marks was last asked
	commit     uint64        // as it told, since commitAt
	commitAt   time.Duration
	earlier    uint64 // the same at least slowProposal ago, as of earlierAt
	earlierAt  time.Duration
	late       bool // the apply was behind a log that grows, at lateAt
	lateAt     time.Duration
	unread     bool // the last read that was to show a quorum has failed
	leaderless bool // no leader has been known since leftAt
	leftAt     time.Duration
}

// commitSample is the last of some commits.
type commitSample struct {
	index queue.Index
	bytes uint64 // of all commits up to it
	at    time.Duration
}

func newQuorumLevel() *quorumLevel { return &quorumLevel{pending: map[uint64]time.Duration{}} }

// began notes a proposal and returns its number for ended.
func (l *quorumLevel) began(now time.Duration) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next++
	l.pending[l.next] = now
	return l.next
}

// ended notes that a proposal has its outcome; index is 0 unless it was committed.
func (l *quorumLevel) ended(n uint64, index queue.Index, size int, now time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.advanceLocked(now)
	delete(l.pending, n)
	if index == 0 {
		return
	}
	l.bytes += uint64(size)
	if k := len(l.samples); k == commitSamples {
		l.samples = append(l.samples[:0], l.samples[k/2:]...)
	}
	l.samples = append(l.samples, commitSample{index, l.bytes, now})
}

// isReadOnly says whether publishes are refused now.
func (l *quorumLevel) isReadOnly(now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.advanceLocked(now)
	return l.readOnly
}

func (l *quorumLevel) advanceLocked(now time.Duration) {
	var oldest time.Duration
	for _, at := range l.pending {
		oldest = max(oldest, now-at)
	}
	if oldest < slowProposal {
		return
	}
	if applies := l.appliesLateLocked(now); oldest >= quorumAckTimeout && !applies {
		l.readOnly = true
	}
}

// appliesLateLocked says whether what has no outcome may have its commit: lately the apply was behind, and the log's commit moved on.
func (l *quorumLevel) appliesLateLocked(now time.Duration) bool {
	if l.marks == nil {
		return false
	}
	commit, applied := l.marks()
	switch {
	case now-l.askedAt > 2*quorumAckTimeout: // nobody has asked for long: that it is greater does not say since when
		l.commit, l.commitAt, l.earlier, l.earlierAt = commit, now-quorumAckTimeout, 0, now-slowProposal
	case commit > l.commit:
		l.commit, l.commitAt = commit, now
	}
	l.askedAt = now
	if applied < l.earlier && now-l.commitAt < quorumAckTimeout {
		l.late, l.lateAt = true, now
	}
	if now-l.earlierAt >= slowProposal {
		l.earlier, l.earlierAt = commit, now
	}
	return l.late && now-l.lateAt < quorumAckTimeout
}

// read notes whether a read that was to show a quorum has done so.
func (l *quorumLevel) read(ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unread = !ok
}

// leader notes whether a leader is known.
func (l *quorumLevel) leader(known bool, now time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.leaderless && !known {
		return
	}
	l.leaderless, l.leftAt = !known, now
}

// isCutOff says whether this host reaches no quorum of the shard: what is decided here cannot be made to last.
func (l *quorumLevel) isCutOff(now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.advanceLocked(now)
	return l.readOnly && l.unread || l.leaderless && now-l.leftAt >= quorumAckTimeout
}

// mark is the number of the last proposal so far: what a barrier that begins now is behind.
func (l *quorumLevel) mark() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// barrier notes how long a barrier write that began at mark took to commit. One in time makes the shard writable: what was proposed
// before it and is still pending has been dropped, or is committed too.
func (l *quorumLevel) barrier(mark uint64, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if took <= barrierWithin {
		l.readOnly, l.unread = false, false
		maps.DeleteFunc(l.pending, func(n uint64, _ time.Duration) bool { return n <= mark })
	}
}

// elected forgets what was known under the former leader.
func (l *quorumLevel) elected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.pending)
	l.readOnly, l.lagged, l.settled, l.samples = false, false, false, nil
	l.late, l.unread = false, false
}

// soft notes whether a full replica lags now, and says whether the shard counts as soft. A leader that has just been elected, as that of a
// new queue, has not heard of the others yet: the first time that nothing lags makes it healthy at once.
func (l *quorumLevel) soft(lags bool, now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case lags:
		l.lagged, l.laggedAt = true, now
	case !l.settled || now-l.laggedAt >= softHold:
		l.lagged, l.settled = false, true
	}
	return l.lagged
}

// behind says whether a replica that had everything up to an index, as it told at most stale ago, is behind the soft gap.
func (l *quorumLevel) behind(has queue.Index, stale, now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.samples) == 0 {
		return false
	}
	last := l.samples[len(l.samples)-1]
	if has >= last.index {
		return false
	}
	var before commitSample // the last one that it has
	for i, s := range l.samples {
		if s.index > has {
			if now-s.at >= softGapTime+stale {
				return true
			}
			if i == 0 {
				return last.index-has >= softGapEntries
			}
			break
		}
		before = s
	}
	return last.index-has >= softGapEntries || last.bytes-before.bytes >= softGapBytes
}
