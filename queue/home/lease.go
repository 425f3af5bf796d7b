package home

import (
	"time"

	"github.com/tierq/tierq/queue"
)

// Lease is the part of the home lease (G4) that all groups of one shard share in this process: the reads that were
// begun, and the base index. It asks no clock: times are boot-clock readings of the caller. Not safe for concurrent
// use.
//
// A read begun at s that completes with this replica still home of a group lets it start deliveries of that group
// until s + length. An epoch counts as obtained only if its Home, or the group's creation, lies above base: the
// applied index at which the first read that was begun after the process started, or after the last snapshot
// install, completed. Entries replayed from the log, and state that came with an install, never count.
type Lease struct {
	length     time.Duration
	generation uint64 // +1 at every install
	base       queue.Index
	known      bool
}

// Read is one ReadIndex on its way.
type Read struct {
	begun      time.Duration
	generation uint64
}

// NewLease returns the lease state of a process that has just started.
func NewLease(length time.Duration) *Lease { return &Lease{length: length, generation: 1} }

// Begin notes that a ReadIndex is about to be asked. Call it before the ReadIndex.
func (l *Lease) Begin(now time.Duration) Read { return Read{begun: now, generation: l.generation} }

// End takes a completed ReadIndex: applied is the local applied index, read after it completed. It returns false
// for a read that was begun before an install; such a read grants nothing.
func (l *Lease) End(r Read, applied queue.Index) bool {
	if r.generation != l.generation {
		return false
	}
	if !l.known {
		l.known, l.base = true, applied
	}
	return true
}

// Restart forgets everything: a snapshot was installed, so what is applied now was not seen being applied.
func (l *Lease) Restart() {
	l.generation++
	l.known, l.base = false, 0
}

// BaseKnown says whether the first read has completed.
func (l *Lease) BaseKnown() bool { return l.known }

// obtained says whether an epoch whose Home lies at an index was obtained by this process.
func (l *Lease) obtained(at queue.Index) bool { return l.known && at > l.base }

// wait is how long a new home waits: the old one's lease and a tenth for clocks that run at different speeds.
func (l *Lease) wait() time.Duration { return l.length + l.length/10 }

// third is the renewal period.
func (l *Lease) third() time.Duration { return l.length / 3 }

// Gate says whether deliveries of a group may start, and if not what is missing.
type Gate uint8

const (
	// GateOpen: deliveries may start now.
	GateOpen Gate = iota
	// GateNotHome: another replica is home, or nobody.
	GateNotHome
	// GateBase: the first ReadIndex of this process has not completed.
	GateBase
	// GateEpoch: the epoch was not obtained by this process: Home(self -> self) is due.
	GateEpoch
	// GateStopped: this process gave the epoch away; it never delivers under it again.
	GateStopped
	// GateWaiting: the wait of a new home is not over.
	GateWaiting
	// GateLease: no read is fresh enough.
	GateLease
)

func (g Gate) String() string {
	return [...]string{"open", "not home", "starting", "no epoch", "handed over", "waiting", "no lease"}[g]
}

// Term is one group's part of the home lease in this process: which Home is in force as applied here, and until when
// deliveries may start. The zero value, with Self set, has seen nothing. Not safe for concurrent use.
type Term struct {
	Self queue.ReplicaID

	seen       bool
	home       queue.ReplicaID
	epoch      queue.Epoch
	homeIndex  queue.Index
	waitUntil  time.Duration
	until      time.Duration // deliveries may start before it
	generation uint64        // the lease's generation of until
	stopped    queue.Epoch   // given away: nothing starts under it
}

// Observe takes the group as applied, read at or after the boot time now. Each Home that makes this replica home
// without `released` starts its wait here, which is never before its apply. A reset changes the epoch and leaves a
// running wait running.
func (t *Term) Observe(l *Lease, g queue.GroupInfo, now time.Duration) {
	if !t.seen || g.HomeIndex != t.homeIndex || g.Home != t.home {
		t.waitUntil = 0
		if g.Home == t.Self && !g.Released {
			t.waitUntil = now + l.wait()
		}
	}
	t.seen, t.home, t.epoch, t.homeIndex = true, g.Home, g.Epoch, g.HomeIndex
	if t.stopped < t.epoch {
		t.stopped = 0
	}
}

// Grant takes a completed read for which Lease.End returned true. The group must have been observed after the read
// completed: a replica that is no longer home gets nothing.
func (t *Term) Grant(l *Lease, r Read) {
	if t.generation != l.generation {
		t.generation, t.until = l.generation, 0
	}
	if r.generation == l.generation && t.home == t.Self {
		t.until = max(t.until, r.begun+l.length)
	}
}

// Gate looks at everything that must hold at the moment of a hand-out.
func (t *Term) Gate(l *Lease, now time.Duration) Gate {
	switch {
	case !t.seen || t.home != t.Self:
		return GateNotHome
	case !l.known:
		return GateBase
	case t.stopped == t.epoch:
		return GateStopped
	case !l.obtained(t.homeIndex):
		return GateEpoch
	case now < t.waitUntil:
		return GateWaiting
	case t.generation != l.generation || now >= t.until:
		return GateLease
	}
	return GateOpen
}

// Stop ends deliveries under the present epoch for good, and says whether a Home that hands the group over may be
// marked `released`: only by a home that obtained the epoch and whose own wait is over.
func (t *Term) Stop(l *Lease, now time.Duration) (released bool) {
	mine := t.home == t.Self && l.obtained(t.homeIndex)
	t.stopped = t.epoch
	return mine && now >= t.waitUntil
}

// renewDue says whether a third of the lease is over.
func (t *Term) renewDue(l *Lease, now time.Duration) bool {
	return now >= t.until-l.length+l.third()
}
