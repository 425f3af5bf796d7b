package home

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"pgregory.net/rapid"
)

// homeWorld is one group and several processes with nothing but the home lease: the log holds only Homes that took
// effect, so entry i is epoch i. Time is a number.
type homeWorld struct {
	now   time.Duration
	log   []queue.GroupInfo // log[i] is the group as of entry i+1
	procs []*homeProc
	// delivered names the process instance that delivered under an epoch.
	delivered map[queue.Epoch]string
	asked     map[string]bool // released Homes on their way: "epoch target"
}

type homeProc struct {
	name    string
	id      queue.ReplicaID
	boots   int
	up      bool
	lease   *Lease
	term    Term
	applied int
	read    *Read
	readAt  int // the index that the leader confirmed
}

const testLease = time.Second

func newHomeWorld(n int) *homeWorld {
	w := &homeWorld{
		log:       []queue.GroupInfo{{ID: 1, Epoch: 1, Home: 1, HomeIndex: 1, Released: true}},
		delivered: map[queue.Epoch]string{}, asked: map[string]bool{},
	}
	for i := range n {
		p := &homeProc{name: string(rune('A' + i)), id: queue.ReplicaID(i + 1), up: true, lease: NewLease(testLease)}
		p.term.Self = p.id
		// Started before the group was created: the first read is older than it.
		p.lease.End(p.lease.Begin(0), 0)
		p.applied = 1
		p.term.Observe(p.lease, w.log[0], 0)
		w.procs = append(w.procs, p)
	}
	return w
}

// commit appends a Home if it names the present epoch.
func (w *homeWorld) commit(expected queue.Epoch, to *homeProc, released bool) {
	if last := w.log[len(w.log)-1]; last.Epoch != expected {
		return
	}
	n := len(w.log) + 1
	w.log = append(w.log, queue.GroupInfo{ID: 1, Epoch: expected + 1, Home: to.id, HomeIndex: queue.Index(n), Released: released})
}

func (w *homeWorld) epoch() queue.Epoch { return w.log[len(w.log)-1].Epoch }

func (w *homeWorld) apply(p *homeProc) {
	p.term.Observe(p.lease, w.log[p.applied], w.now)
	p.applied++
}

func (w *homeWorld) begin(p *homeProc) {
	r := p.lease.Begin(w.now)
	p.read, p.readAt = &r, len(w.log)
}

// complete returns what a completed read grants: the end of the lease.
func (w *homeWorld) complete(p *homeProc) {
	if p.applied < p.readAt {
		panic("a read completes only when its index is applied")
	}
	if p.lease.End(*p.read, queue.Index(p.applied)) {
		p.term.Grant(p.lease, *p.read)
	}
	p.read = nil
}

// kill and start: what was applied after flushed is applied again.
func (w *homeWorld) restart(p *homeProc, flushed int) {
	p.boots++
	p.lease, p.term, p.read = NewLease(testLease), Term{Self: p.id}, nil
	p.applied = flushed
	p.term.Observe(p.lease, w.log[flushed-1], w.now)
}

func (w *homeWorld) install(p *homeProc) {
	p.lease.Restart()
	p.applied = len(w.log)
	p.term.Observe(p.lease, w.log[p.applied-1], w.now)
}

func (w *homeWorld) open(p *homeProc) bool { return p.up && p.term.Gate(p.lease, w.now) == GateOpen }

// deliver starts a delivery if the home lease lets it, and says whether it did.
func (w *homeWorld) deliver(t require.TestingT, p *homeProc) bool {
	if !w.open(p) {
		return false
	}
	name := fmt.Sprint(p.name, p.boots)
	if by, ok := w.delivered[p.term.epoch]; ok {
		require.Equal(t, by, name, "two process instances delivered under epoch %d", p.term.epoch)
	}
	w.delivered[p.term.epoch] = name
	return true
}

// check is G4: at most one process may start deliveries now.
func (w *homeWorld) check(t require.TestingT) {
	open := ""
	for _, p := range w.procs {
		if w.open(p) {
			open += p.name
		}
	}
	require.LessOrEqual(t, len(open), 1, "G4: %s may start deliveries at %v", open, w.now)
}

// Minimal traces of earlier readings of the protocol, found by its model: each led to two homes.

func TestTraceLeaseFromTheAnswer(t *testing.T) {
	w := newHomeWorld(2)
	a, b := w.procs[0], w.procs[1]
	w.begin(a) // the leader confirms it at epoch 1
	w.commit(1, b, false)
	w.apply(b)
	w.now += testLease + testLease/10
	w.complete(a) // the lease is counted from the begin: nothing is left of it
	w.begin(b)
	w.complete(b)
	w.check(t)
	require.Equal(t, GateLease, a.term.Gate(a.lease, w.now))
	require.True(t, w.open(b))
}

func TestTraceNoWait(t *testing.T) {
	w := newHomeWorld(2)
	a, b := w.procs[0], w.procs[1]
	w.begin(a)
	w.commit(1, b, false)
	w.complete(a)
	w.apply(b)
	w.begin(b)
	w.complete(b)
	w.check(t)
	require.True(t, w.open(a), "the old home has its lease and has not heard of the new one")
	require.Equal(t, GateWaiting, b.term.Gate(b.lease, w.now))
	w.now += testLease
	require.False(t, w.open(a))
	require.False(t, w.open(b), "a tenth more, for clocks of unequal speed")
}

func TestTraceReleasedByAnother(t *testing.T) {
	// Only the old home itself says `released`, and by that it has stopped.
	w := newHomeWorld(2)
	a, b := w.procs[0], w.procs[1]
	w.begin(a)
	w.complete(a)
	require.True(t, w.open(a))
	require.True(t, a.term.Stop(a.lease, w.now))
	require.False(t, w.open(a), "stopped before it proposes")
	w.commit(1, b, true)
	w.apply(b)
	w.begin(b)
	w.complete(b)
	w.check(t)
	require.True(t, w.open(b), "released: no wait")
	w.apply(a)
	require.False(t, b.term.Stop(b.lease, w.now) && a.term.Stop(a.lease, w.now), "a replica that is not home cannot release")
}

func TestTraceReleaseInsideTheOwnWait(t *testing.T) {
	w := newHomeWorld(2)
	a, b := w.procs[0], w.procs[1]
	w.begin(a)
	w.commit(1, b, false)
	w.complete(a)
	w.apply(b)
	w.begin(b)
	w.complete(b)
	require.False(t, b.term.Stop(b.lease, w.now), "its own wait is not over: it hands over without `released`")
	w.commit(2, b, false)
	w.apply(b)
	w.check(t)
	require.True(t, w.open(a))
	require.Equal(t, GateWaiting, b.term.Gate(b.lease, w.now))
}

func TestTraceReplayedEpochCountsAsObtained(t *testing.T) {
	w := newHomeWorld(1)
	a := w.procs[0]
	w.begin(a)
	w.complete(a)
	a.term.Stop(a.lease, w.now)
	w.commit(1, a, true)
	w.apply(a)
	require.True(t, w.deliver(t, a))
	w.restart(a, 1)
	w.apply(a) // replayed, not seen
	w.begin(a)
	w.complete(a)
	require.False(t, w.deliver(t, a), "another instance delivered under this epoch")
	require.Equal(t, GateEpoch, a.term.Gate(a.lease, w.now))
	w.commit(2, a, false)
	w.apply(a)
	require.Equal(t, GateWaiting, a.term.Gate(a.lease, w.now))
	w.now += testLease + testLease/10
	w.begin(a)
	w.complete(a)
	require.True(t, w.deliver(t, a))
}

func TestInstallForgetsEpochs(t *testing.T) {
	w := newHomeWorld(1)
	a := w.procs[0]
	w.begin(a)
	w.install(a)
	require.Equal(t, GateBase, a.term.Gate(a.lease, w.now))
	w.complete(a) // begun before the install: grants nothing
	require.Equal(t, GateBase, a.term.Gate(a.lease, w.now))
	w.begin(a)
	w.complete(a)
	require.Equal(t, GateEpoch, a.term.Gate(a.lease, w.now))
}

func TestResetKeepsARunningWait(t *testing.T) {
	w := newHomeWorld(2)
	b := w.procs[1]
	w.commit(1, b, false)
	w.apply(b)
	reset := w.log[1]
	reset.Epoch++
	w.now += testLease / 2
	b.term.Observe(b.lease, reset, w.now)
	w.begin(b)
	w.complete(b)
	require.Equal(t, GateWaiting, b.term.Gate(b.lease, w.now))
	w.now += testLease
	require.NotEqual(t, GateWaiting, b.term.Gate(b.lease, w.now))
}

// The home lease under any interleaving of applies, reads, Homes, restarts, installs and pauses.
func TestOneHomeAtATime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newHomeWorld(rapid.IntRange(2, 3).Draw(t, "processes"))
		pick := func(t *rapid.T) *homeProc { return rapid.SampledFrom(w.procs).Draw(t, "process") }
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { w.check(t) },
			"time": func(t *rapid.T) {
				w.now += testLease * time.Duration(rapid.IntRange(1, 12).Draw(t, "tenths")) / 10
			},
			"apply": func(t *rapid.T) {
				if p := pick(t); p.applied < len(w.log) {
					w.apply(p)
				}
			},
			"begin": func(t *rapid.T) { w.begin(pick(t)) },
			"complete": func(t *rapid.T) {
				if p := pick(t); p.read != nil && p.applied >= p.readAt {
					w.complete(p)
				}
			},
			"home by the leader": func(t *rapid.T) { w.commit(w.epoch(), pick(t), false) },
			"hand over": func(t *rapid.T) {
				p, to := pick(t), pick(t)
				if p.term.home == p.id && p.term.Stop(p.lease, w.now) {
					w.asked[fmt.Sprint(p.term.epoch, " ", to.name)] = true
				}
			},
			"a hand-over commits": func(t *rapid.T) {
				to := pick(t)
				if w.asked[fmt.Sprint(w.epoch(), " ", to.name)] {
					w.commit(w.epoch(), to, true)
				}
			},
			"deliver": func(t *rapid.T) { w.deliver(t, pick(t)) },
			"restart": func(t *rapid.T) {
				p := pick(t)
				w.restart(p, rapid.IntRange(1, p.applied).Draw(t, "flushed"))
			},
			"install": func(t *rapid.T) {
				if p := pick(t); p.applied < len(w.log) {
					w.install(p)
				}
			},
		})
	})
}
