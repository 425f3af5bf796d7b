package outbox

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCopiesAreWholeAndSayWhereTheyComeFrom(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	b := w.open(1)
	w.die("a", "b")
	w.done()
	w.idle(b)
	got := w.messages(20)
	require.Len(t, got, 2)
	m := got[1]
	require.Equal(t, "b", string(m.Body))
	require.Equal(t, "kb", string(m.Key))
	require.Equal(t, "b", header(m, "own"))
	for name, want := range map[string]string{
		HeaderQueue: "source", HeaderPartition: "0", HeaderGroup: "g", HeaderAddress: "2", HeaderAttempts: "5", HeaderReason: "broken",
		HeaderFirstFailure: number(uint64(stamp0)), HeaderLastFailure: number(uint64(stamp0)), HeaderHops: "1",
	} {
		require.Equal(t, want, header(m, name), name)
	}
	require.Equal(t, queue.Producer{Kind: queue.ProducerOutbox, ID: sourceShard, Sub: 1}, m.Producer)
	g := w.group()
	require.EqualValues(t, 2, g.Counters.Exported)
	require.Zero(t, g.Counters.Dead)
	require.Zero(t, w.st[sourceShard].Meta().Counters.Messages, "what was exported is stored there only")
	w.same()
}

// TestCrashAtEveryPoint: whoever is home after a crash goes on, and the target has one copy of each, in order. The new home
// is another replica, or the same one started again under the same epoch.
func TestCrashAtEveryPoint(t *testing.T) {
	isDone := func(x []queue.ExpireEntry) bool { return len(x) > 0 && x[0].ExportState == queue.ExportDone }
	isStore := func(x []queue.ExpireEntry) bool { return len(x) > 0 && x[0].ExportState == queue.ExportExporting }
	for name, crash := range map[string]func(point string, x []queue.ExpireEntry) bool{
		"before the target is stored":  func(p string, x []queue.ExpireEntry) bool { return p == beforePropose && isStore(x) },
		"after the target is stored":   func(p string, x []queue.ExpireEntry) bool { return p == afterPropose && isStore(x) },
		"before the publish":           func(p string, _ []queue.ExpireEntry) bool { return p == beforePublish },
		"after the publish":            func(p string, _ []queue.ExpireEntry) bool { return p == afterPublish },
		"before the mark":              func(p string, x []queue.ExpireEntry) bool { return p == beforePropose && isDone(x) },
		"after the mark, not answered": func(p string, x []queue.ExpireEntry) bool { return p == afterPropose && isDone(x) },
	} {
		for _, moves := range []bool{true, false} {
			t.Run(name+map[bool]string{true: ", another home", false: ", the same home"}[moves], func(t *testing.T) {
				w := newWorld(t, deadLetterQueue("dead"))
				w.shard("dead", 20)
				w.die(names(5)...)
				crashed := make(chan struct{})
				w.at = func(p string, x []queue.ExpireEntry) error {
					select {
					case <-crashed:
						return errCrash // the process is gone: nothing of it happens any more
					default:
					}
					if crash(p, x) {
						close(crashed)
						return errCrash
					}
					return nil
				}
				first := w.open(1)
				<-crashed
				first.Close()
				w.mu.Lock()
				w.at = func(string, []queue.ExpireEntry) error { return nil }
				w.mu.Unlock()
				self := queue.ReplicaID(1)
				if moves {
					self = 2
				}
				second := w.open(self)
				if moves {
					require.Positive(t, max(w.group().Exports, 1))
					w.move(2)
				}
				w.done()
				w.idle(second)
				require.Equal(t, names(5), w.bodies(20), "one copy of each, in order")
				require.EqualValues(t, 5, w.group().Counters.Exported)
				w.same()
			})
		}
	}
}

// TestTwoHomesAtOnce: the old home does not know yet that it is none, and publishes what its state says.
func TestTwoHomesAtOnce(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	inPublish, goOn := make(chan struct{}), make(chan struct{})
	first := true
	old := w.open(1)
	w.mu.Lock()
	w.at = func(p string, _ []queue.ExpireEntry) error {
		if p == beforePublish && first {
			first = false
			w.mu.Unlock()
			close(inPublish)
			<-goOn
			w.mu.Lock()
		}
		return nil
	}
	w.mu.Unlock()
	w.die(names(3)...)
	<-inPublish
	w.open(2)
	w.move(2)
	w.done()
	w.die("later") // raises the low of the producer above what the old home is about to publish
	w.done()
	close(goOn)
	w.tick() // its publish was refused; after a pause it sees that it is home no more
	w.idle(old)
	require.Equal(t, append(names(3), "later"), w.bodies(20))
	w.same()
}

// TestLateCommandsChangeNothing: every proposal of an outbox is committed once more when all is over.
func TestLateCommandsChangeNothing(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	b := w.open(1)
	w.die(names(40)...)
	w.done()
	w.idle(b)
	w.mu.Lock()
	for _, shard := range []uint64{sourceShard, 20} {
		before, groups := w.st[shard].ReadStats()
		for _, raw := range slices.Clone(w.st[shard].Log) {
			c, err := queue.DecodeCommand(raw)
			require.NoError(t, err)
			if e, ok := c.(*queue.Enqueue); ok && e.Publishes[0].Producer.Kind == queue.ProducerNone {
				continue // never proposed twice
			}
			w.st[shard].Raw(raw)
		}
		after, later := w.st[shard].ReadStats()
		require.Equal(t, groups, later)
		require.Equal(t, before.Last, after.Last)
	}
	w.mu.Unlock()
	require.Equal(t, names(40), w.bodies(20))
	w.same()
}

// TestRandomCrashes crashes outboxes at random points, moves the home, lets letters die meanwhile, and replays proposals.
func TestRandomCrashes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	want := names(300)
	left := want
	home := queue.ReplicaID(1)
	for len(left) > 0 {
		after := 1 + rnd.IntN(12)
		crashed := make(chan struct{})
		w.mu.Lock()
		w.at = func(string, []queue.ExpireEntry) error {
			if after--; after == 0 {
				close(crashed)
			}
			if after <= 0 {
				return errCrash
			}
			return nil
		}
		w.mu.Unlock()
		b := w.open(home)
		n := min(len(left), 1+rnd.IntN(30))
		w.die(left[:n]...)
		left = left[n:]
		w.idleOr(b, crashed)
		b.Close()
		w.mu.Lock()
		if log := w.st[sourceShard].Log; rnd.IntN(2) == 0 {
			if c, err := queue.DecodeCommand(log[len(log)-1]); err == nil {
				if _, ok := c.(*queue.Expire); ok {
					w.st[sourceShard].Raw(log[len(log)-1])
				}
			}
		}
		w.mu.Unlock()
		if rnd.IntN(2) == 0 {
			home = 3 - home
			w.move(home)
		}
	}
	w.mu.Lock()
	w.at = func(string, []queue.ExpireEntry) error { return nil }
	w.mu.Unlock()
	w.open(home)
	w.done()
	require.Equal(t, want, w.bodies(20))
	require.EqualValues(t, len(want), w.group().Counters.Exported)
	w.same()
}

// idleOr waits until an outbox has nothing more to do, or a crash.
func (w *world) idleOr(b *Outbox, crashed chan struct{}) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		select {
		case <-crashed:
			return true
		default:
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.workers) == 0
	}, 90*time.Second, time.Millisecond)
}

// TestFullTargetParks: what fits goes, the rest waits and is told about, nothing is dropped, and all goes on by itself.
func TestFullTargetParks(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	limit := func(n uint64) {
		o := w.st[20].Meta().Options
		o.MaxMessages = n
		require.Equal(t, code.OK, w.do(20, &queue.Retention{Stamp: w.now, Options: &o}).Code)
	}
	limit(7)
	b := w.open(1)
	w.die(names(30)...)
	w.paused()
	require.Equal(t, names(7), w.bodies(20), "what fits is there")
	p, ok := b.Parked(1)
	require.True(t, ok)
	require.Equal(t, code.QueueFull, codeOf(p.Err))
	require.EqualValues(t, 8, p.Number)
	require.EqualValues(t, 20, p.Target)
	list, err := w.st[sourceShard].Exports(1, 0, 100, 1<<20, false)
	require.NoError(t, err)
	require.Len(t, list, 23)
	exporting := 0
	for _, d := range list {
		if d.ExportState == queue.ExportExporting {
			exporting++
		}
	}
	require.LessOrEqual(t, exporting, firstWindow, "those behind can still be redriven")
	b.Nudge()
	w.paused()
	limit(0)
	b.Nudge()
	w.done()
	w.idle(b)
	_, ok = b.Parked(1)
	require.False(t, ok)
	require.Equal(t, names(30), w.bodies(20))
	w.same()
}

// TestDownTargetParks: the pauses grow to a bound, and the export goes on at the end of one.
func TestDownTargetParks(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	w.down[20] = code.Maybe(code.QuorumLost, nil, "no answer")
	b := w.open(1)
	w.die(names(3)...)
	for range 8 {
		w.tick()
	}
	w.paused()
	w.b(b, func(x *worker) { require.Equal(t, longestPause, x.pause) })
	require.Empty(t, w.bodies(20))
	require.EqualValues(t, 3, w.group().Exports)
	w.mu.Lock()
	delete(w.down, 20)
	w.mu.Unlock()
	b.Nudge()
	w.done()
	require.Equal(t, names(3), w.bodies(20))
	w.same()
}

func (w *world) b(b *Outbox, f func(*worker)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b.workers[1])
}

// TestMissingTargetParksBeforeItIsStored: letters can still be redriven and purged, and the rest goes on when the queue is
// there.
func TestMissingTargetParksBeforeItIsStored(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	b := w.open(1)
	w.die(names(3)...)
	w.paused()
	p, ok := b.Parked(1)
	require.True(t, ok)
	require.Equal(t, code.UnknownQueue, codeOf(p.Err))
	require.Equal(t, "dead", p.Queue)
	res := w.do(sourceShard, &queue.Ack{Stamp: w.now, Group: 1, Epoch: w.group().Epoch, Ranges: []queue.AddressRange{{First: 2, Last: 2}}})
	require.Equal(t, []queue.AckState{queue.AckDone}, res.Acks)
	require.EqualValues(t, 1, w.group().Counters.Purged)
	w.shard("dead", 20)
	b.Nudge()
	w.done()
	require.Equal(t, []string{"000", "002"}, w.bodies(20))
	w.same()
}

// TestDeletedTarget: the stored target is gone for good, with whatever it had: the letters go to the queue that has the name
// now, in their order.
func TestDeletedTarget(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	w.down[20] = code.New(code.NoLeader, "")
	b := w.open(1)
	w.die(names(40)...)
	w.paused()
	require.EqualValues(t, 40, w.group().Exports)
	res := w.do(sourceShard, &queue.Ack{Stamp: w.now, Group: 1, Epoch: w.group().Epoch, Ranges: []queue.AddressRange{{First: 1, Last: 1}}})
	require.Equal(t, []queue.AckState{queue.AckDead}, res.Acks, "it is exporting")
	w.mu.Lock()
	w.st[20] = nil
	delete(w.queues, "dead")
	w.mu.Unlock()
	b.Nudge()
	w.paused()
	list, err := w.st[sourceShard].Exports(1, 0, 100, 1<<20, false)
	require.NoError(t, err)
	require.Equal(t, queue.ExportPending, list[0].ExportState)
	w.shard("dead", 21)
	b.Nudge()
	w.done()
	require.Equal(t, names(40), w.bodies(21))
}

// TestHopsAreCountedAndBounded: when two queues name each other past the check, a message goes round a bounded number of
// times, and stays where it is then.
func TestHopsAreCountedAndBounded(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	b := w.open(1)
	e := &queue.Enqueue{Stamp: w.now, Publishes: []queue.Publish{{Messages: []queue.Message{
		{Body: []byte("first round"), Headers: []queue.Header{{Name: HeaderQueue, Value: []byte("older")}, {Name: HeaderHops, Value: []byte("1")}}},
		{Body: []byte("last round"), Headers: []queue.Header{{Name: HeaderHops, Value: []byte("8")}}},
		{Body: []byte("no number"), Headers: []queue.Header{{Name: HeaderHops, Value: []byte("x")}}},
	}}}}
	w.dieOf(e)
	w.done()
	w.idle(b)
	got := w.messages(20)
	require.Equal(t, []string{"first round", "no number"}, w.bodies(20))
	require.Equal(t, "2", header(got[0], HeaderHops))
	require.Equal(t, "source", header(got[0], HeaderQueue))
	require.Equal(t, "1", header(got[1], HeaderHops))
	dead, _, err := w.st[sourceShard].DeadLetters(1, 0, 10, true)
	require.NoError(t, err)
	require.Len(t, dead, 1, "it stays for a person")
	require.Equal(t, queue.ExportNone, dead[0].ExportState)
	require.Equal(t, "last round", string(dead[0].Message.Body))
	w.same()
}

func TestLettersWithoutRoomForHeadersStay(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	w.open(1)
	many := make([]queue.Header, queue.MaxHeaders)
	for i := range many {
		many[i].Name = "h"
	}
	w.dieOf(&queue.Enqueue{Stamp: w.now, Publishes: []queue.Publish{{Messages: []queue.Message{
		{Body: []byte("many"), Headers: many},
		{Body: []byte("large"), Headers: []queue.Header{{Name: "h", Value: make([]byte, queue.MaxHeaderBytes-1)}}},
		{Body: []byte("fits")},
	}}}})
	w.done()
	require.Equal(t, []string{"fits"}, w.bodies(20))
	require.EqualValues(t, 2, w.group().Counters.Dead)
}

// TestTooLargeForTheTarget: the letter is not given a target, so a person can redrive or purge it, and those behind it go on.
func TestTooLargeForTheTarget(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	o := w.st[20].Meta().Options
	o.MaxBodyBytes = 10
	w.do(20, &queue.Retention{Stamp: w.now, Options: &o})
	b := w.open(1)
	w.die("a", strings.Repeat("x", 11), "b")
	w.paused()
	require.Equal(t, []string{"a"}, w.bodies(20))
	p, _ := b.Parked(1)
	require.Equal(t, code.TooLarge, codeOf(p.Err))
	require.Contains(t, p.Err.Error(), "raise its max body bytes")
	list, err := w.st[sourceShard].Exports(1, 0, 1, 1, false)
	require.NoError(t, err)
	r := w.do(sourceShard, &queue.Expire{Stamp: w.now, Group: 1, Epoch: w.group().Epoch,
		Entries: []queue.ExpireEntry{{Kind: queue.ExpireRedrive, Address: 2, Change: list[0].Change}}})
	require.True(t, r.Expires[0].Applied)
	b.Nudge()
	w.done()
	require.Equal(t, []string{"a", "b"}, w.bodies(20))
	w.same()
}

// TestConfigurationChanges: without a dead-letter queue numbered letters stay; with another one they go there, but for those
// that were on their way.
func TestConfigurationChanges(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	configure := func(name string) {
		g := w.group()
		c := g.Config
		c.DeadLetterQueue = name
		require.Equal(t, code.OK, w.do(sourceShard, &queue.Group{Stamp: w.now, Op: queue.GroupConfigure, ID: 1, ExpectedVersion: g.ConfigVersion, Config: c}).Code)
	}
	b := w.open(1)
	w.shard("dead", 20)
	w.shard("other", 30)
	w.down[20] = code.New(code.NoLeader, "")
	w.die(names(20)...)
	w.paused() // 16 are on their way
	configure("")
	w.paused()
	w.mu.Lock()
	delete(w.down, 20)
	w.mu.Unlock()
	b.Nudge()
	w.idle(b)
	require.Equal(t, names(16), w.bodies(20))
	require.EqualValues(t, 4, w.group().Exports)
	w.die("unnumbered")
	require.EqualValues(t, 4, w.group().Exports)
	configure("other")
	w.done()
	require.Equal(t, names(20)[16:], w.bodies(30))
	require.EqualValues(t, 1, w.group().Counters.Dead, "it died while the group named no queue")
	w.same()
}

// TestIdleCostsNothing: no goroutine without letters, nor on a host that is not home. Only goroutines that were not there
// before count: those of an earlier test may still be ending.
func TestIdleCostsNothing(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	running := goleak.IgnoreCurrent()
	left := func() error { return goleak.Find(running) }
	one, two := w.open(1), w.open(2)
	require.NoError(t, left())
	w.die(names(3)...)
	w.done()
	w.idle(one)
	require.Empty(t, two.workers)
	require.Eventually(t, func() bool { return left() == nil }, 30*time.Second, time.Millisecond)
}

// TestManyLetters: a backlog goes in large steps.
func TestManyLetters(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("dead", 20)
	want := names(1000)
	for i := 0; i < len(want); i += 100 {
		w.die(want[i : i+100]...)
	}
	w.open(1)
	w.done()
	require.Equal(t, want, w.bodies(20))
	require.Less(t, w.pubs, 15)
	w.same()
}

// TestPartitionsOfATarget: the order of each partition is that of the letters. One that is down holds back what has no target
// yet, and nothing that was on its way to another.
func TestPartitionsOfATarget(t *testing.T) {
	w := newWorld(t, deadLetterQueue("dead"))
	w.shard("p0", 20)
	w.shard("p1", 21)
	w.route = func(d *queue.DeadLetter) uint64 { return 20 + d.ExportNumber%2 }
	w.down[21] = code.New(code.NoLeader, "")
	b := w.open(1)
	all := names(40)
	w.die(all...)
	w.paused()
	var even, odd []string
	for i, n := range all {
		if (i+1)%2 == 0 {
			even = append(even, n)
		} else {
			odd = append(odd, n)
		}
	}
	require.Equal(t, even[:firstWindow/2], w.bodies(20))
	p, ok := b.Parked(1)
	require.True(t, ok)
	require.EqualValues(t, 21, p.Target)
	w.mu.Lock()
	delete(w.down, 21)
	w.mu.Unlock()
	b.Nudge()
	w.done()
	require.Equal(t, even, w.bodies(20))
	require.Equal(t, odd, w.bodies(21))
	w.same()
}
