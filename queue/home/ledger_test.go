package home

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
	"pgregory.net/rapid"
)

// ledgerWorld runs one ledger against a naive state, a network that loses, delays and repeats commands, and a naive
// idea of who holds what.
type ledgerWorld struct {
	t     *rapid.T
	state worldState
	marks marks
	led   *Ledger
	now   time.Duration
	cfg   queue.GroupConfig
	index queue.Index

	net     []*batch        // in flight
	history []queue.Command // everything ever committed: may come again
	given   []Delivery      // every lease ever handed out
	holder  map[queue.Address]*Delivery
	acked   map[queue.Address]bool // answered OK
	calls   []*pending
	redrove map[string]bool                   // keys that have had a redriven message: their order is free
	unseen  map[queue.LeaseName]time.Duration // leases that no handler has seen: their deadlines
	moving  map[queue.LeaseName]bool          // leases that an extend, when it is applied, may end earlier
}

// worldState is a shard's state that applies commands.
type worldState interface {
	queue.Reader
	apply(queue.Index, queue.Command) (queue.Result, queue.Applied)
}

// pending is one item that waits for its answer.
type pending struct {
	c        *call
	d        Delivery
	kind     string
	op       *op // of a claim
	answered bool
}

const worldGroup = queue.GroupID(1)

func newLedgerWorld(t *rapid.T, open func(queue.QueueOptions) worldState) *ledgerWorld {
	w := &ledgerWorld{t: t, holder: map[queue.Address]*Delivery{}, acked: map[queue.Address]bool{}, redrove: map[string]bool{},
		unseen: map[queue.LeaseName]time.Duration{}, moving: map[queue.LeaseName]bool{}}
	o := queue.QueueOptions{}
	if rapid.Bool().Draw(t, "keyed") {
		o.Ordering = queue.OrderKey
	}
	w.state = open(o)
	w.index = w.state.Meta().Applied
	inFlight := rapid.IntRange(1, 8).Draw(t, "in flight")
	w.cfg = queue.GroupConfig{
		LeaseMs: 2000, MaxInFlight: uint32(inFlight), MaxInFlightPerConsumer: uint32(rapid.IntRange(0, min(inFlight, 3)).Draw(t, "per consumer")),
	}
	w.cfg.EnsureDefaults()
	w.cfg.JitterPermille = 0
	w.commit(&queue.Group{Stamp: w.stamp(), Op: queue.GroupCreate, OperationID: 1, Name: "g", FirstHome: 1, Config: w.cfg})
	w.build()
	return w
}

func (w *ledgerWorld) stamp() queue.Stamp { return stampZero + queue.Stamp(w.now/time.Millisecond) }

func (w *ledgerWorld) build() {
	info, _ := w.state.Group(worldGroup)
	l, err := newLedger(w.state, &w.marks, info, w.state.Meta().Options, func() uint64 { return 0 }, w.now, w.stamp())
	require.NoError(w.t, err)
	w.led = l
}

func (w *ledgerWorld) commit(cmd queue.Command) queue.Result {
	w.index++
	res, a := w.state.apply(w.index, cmd)
	w.history = append(w.history, cmd)
	w.marks.noteLast(a.Last)
	if a.Delayed {
		w.marks.delayed.Add(1)
	}
	if a.Redrive {
		w.marks.disorder.Add(1)
	}
	return res
}

// pump is what a keeper does after every change.
func (w *ledgerWorld) pump() {
	_, err := w.led.tidy(w.now, w.stamp())
	require.NoError(w.t, err)
	w.led.runOut(w.now, w.stamp())
	w.led.recordDue(w.now, w.stamp())
	for b := w.led.next(w.now, w.stamp()); b != nil; b = w.led.next(w.now, w.stamp()) {
		w.net = append(w.net, b)
	}
	for _, p := range w.calls {
		w.look(p)
	}
	w.calls = slices.DeleteFunc(w.calls, func(p *pending) bool { return p.answered })
}

// look takes an answer that has come.
func (w *ledgerWorld) look(p *pending) {
	res := p.c.results[0]
	if res.Code == 0 {
		return
	}
	p.answered = true
	a := p.d.Message.Address
	done, _ := w.state.Finished(worldGroup, a)
	switch {
	case p.kind == "claim" && res.Code == code.OK && !res.Dead:
		w.checkDelivery(&p.op.claim.got)
	case p.kind == "claim":
		if res.Dead {
			delete(w.holder, a)
		}
	case p.kind == "ack" && res.Code == code.OK:
		require.True(w.t, done, "%s: an ack was answered OK and the message is not finished", a)
		w.acked[a] = true
		delete(w.holder, a)
	case res.Code == code.OK && p.kind != "extend" && p.kind != "unseen", p.kind == "release" && res.Effect == code.EffectMaybe:
		w.letGo(p.d)
	}
}

// letGo: the lease is over, answered.
func (w *ledgerWorld) letGo(d Delivery) {
	if h := w.holder[d.Message.Address]; h != nil && h.lease == d.lease {
		delete(w.holder, d.Message.Address)
	}
}

// receive takes, and checks every rule of a hand-out.
func (w *ledgerWorld) receive(consumer string, n int, lease time.Duration) []Delivery {
	ds, _, err := w.led.take(take{max: n, maxBytes: 1 << 20, lease: lease, consumer: consumer}, w.now, w.stamp(), nil)
	require.NoError(w.t, err)
	require.LessOrEqual(w.t, len(ds), n)
	require.LessOrEqual(w.t, w.led.leased, int(w.cfg.MaxInFlight))
	if c := w.led.holders[consumer]; c != nil && consumer != "" && w.cfg.MaxInFlightPerConsumer > 0 {
		require.LessOrEqual(w.t, c.held, int(w.cfg.MaxInFlightPerConsumer))
	}
	for i := range ds {
		w.checkDelivery(&ds[i])
	}
	return ds
}

func (w *ledgerWorld) checkDelivery(d *Delivery) {
	a := d.Message.Address
	require.False(w.t, w.acked[a], "%s: delivered after an ack that was answered OK", a)
	done, _ := w.state.Finished(worldGroup, a)
	require.False(w.t, done, "%s: delivered, and finished", a)
	st, _, _, _ := w.state.RetryOf(worldGroup, a)
	require.Equal(w.t, st.Attempts+1, d.Attempt, "%s: attempt", a)
	require.Equal(w.t, st.Round, d.Round)
	require.LessOrEqual(w.t, st.NotBefore, w.stamp(), "%s: before its time", a)
	require.LessOrEqual(w.t, d.Message.VisibleAt, w.stamp(), "%s: before it is due", a)
	if h := w.holder[a]; h != nil && !w.lapsed(h.lease) {
		require.True(w.t, h.Attempt < d.Attempt || h.Round < d.Round, "%s: two live leases", a)
	}
	for _, old := range w.given {
		require.NotEqual(w.t, old.lease, d.lease, "a lease's name is used again")
	}
	w.checkOrder(d)
	w.given = append(w.given, *d)
	w.holder[a] = d
}

// lapsed says whether a lease is over that no handler had seen.
func (w *ledgerWorld) lapsed(n queue.LeaseName) bool {
	end, unseen := w.unseen[n]
	return unseen && w.now >= end
}

// checkOrder: of a key, the first unfinished, not dead message.
func (w *ledgerWorld) checkOrder(d *Delivery) {
	if !w.led.keyed || len(d.Message.Key) == 0 || w.redrove[string(d.Message.Key)] {
		return
	}
	all, _, _ := w.state.Deliverables(worldGroup, 0, 1000, true)
	for _, x := range all {
		if string(x.Key) == string(d.Message.Key) {
			require.Equal(w.t, x.Address, d.Message.Address, "key %q: out of order", d.Message.Key)
			return
		}
	}
}

// settleOne begins an ack or the like with any lease ever handed out.
func (w *ledgerWorld) settleOne(kind string, do func(Receipt, ref) code.Code) {
	if len(w.given) == 0 {
		return
	}
	d := rapid.SampledFrom(w.given).Draw(w.t, "lease")
	p := &pending{c: newCall(1), d: d, kind: kind}
	by := ref{p.c, 0}
	c := do(Receipt{Group: worldGroup, Lease: d.lease, Address: d.Message.Address}, by)
	if h := w.holder[d.Message.Address]; c == 0 && h != nil {
		require.Equal(w.t, h.lease, d.lease, "%s: a %s with the lease of somebody else", d.Message.Address, kind)
	}
	if c != 0 {
		by.resolve(plain(c))
	}
	w.calls = append(w.calls, p)
}

// claim takes over a lease that is idle.
func (w *ledgerWorld) claim(consumer string, minIdle time.Duration) {
	idle, err := w.led.idleLeases(take{max: 1, maxBytes: 1 << 20, consumer: consumer}, minIdle, w.now)
	require.NoError(w.t, err)
	for _, e := range idle {
		require.GreaterOrEqual(w.t, w.now-e.touched, minIdle)
		o := w.led.claim(e, take{lease: time.Second, consumer: consumer}, w.now)
		p := &pending{c: newCall(1), kind: "claim", op: o}
		p.d.Message.Address = e.address
		o.join(ref{p.c, 0})
		w.calls = append(w.calls, p)
	}
}

// answer lets the network do something with one command in flight.
func (w *ledgerWorld) answer(outcome string) {
	if len(w.net) == 0 {
		return
	}
	i := rapid.IntRange(0, len(w.net)-1).Draw(w.t, "command")
	b := w.net[i]
	switch {
	case outcome == "lost":
		b.maybe = true
		return
	case outcome == "silent":
		w.commit(b.command)
		b.maybe = true
		return
	case outcome == "refused" && b.maybe:
		return
	}
	w.net = slices.Delete(w.net, i, i+1)
	if outcome == "refused" {
		w.led.unqueued(b, w.now)
		return
	}
	res := w.commit(b.command)
	require.Equal(w.t, code.OK, res.Code)
	require.NoError(w.t, w.led.answered(b, &res, w.now, w.stamp()))
}

func (w *ledgerWorld) enqueue(n int) {
	p := queue.Publish{}
	for range n {
		m := queue.Message{Body: []byte("x")}
		if rapid.Bool().Draw(w.t, "key") {
			m.Key = []byte{byte('a' + rapid.IntRange(0, 2).Draw(w.t, "which"))}
		}
		if rapid.IntRange(0, 3).Draw(w.t, "delayed") == 0 {
			m.VisibleAt = w.stamp() + queue.Stamp(rapid.IntRange(1, 5000).Draw(w.t, "by"))
		}
		p.Messages = append(p.Messages, m)
	}
	// Committed some time after it was stamped.
	cmd := &queue.Enqueue{Stamp: w.stamp(), Publishes: []queue.Publish{p}}
	w.pass(rapid.IntRange(0, 50).Draw(w.t, "late"))
	if rapid.Bool().Draw(w.t, "looked meanwhile") {
		w.receive("", 1, time.Second)
	}
	w.commit(cmd)
}

func (w *ledgerWorld) pass(ms int) { w.now += time.Duration(ms) * time.Millisecond }

func (w *ledgerWorld) actions() map[string]func(*rapid.T) {
	step := func(f func()) func(*rapid.T) {
		return func(t *rapid.T) {
			w.t = t
			f()
			w.pump()
		}
	}
	draw := func(from, to int, what string) int { return rapid.IntRange(from, to).Draw(w.t, what) }
	acts := map[string]func(*rapid.T){
		"":        func(t *rapid.T) { w.t = t; require.NoError(t, w.led.Check()) },
		"enqueue": step(func() { w.enqueue(draw(1, 4, "messages")) }),
		"time":    step(func() { w.pass(draw(1, 3000, "ms")) }),
		"receive": step(func() {
			w.receive([]string{"", "x", "y"}[draw(0, 2, "consumer")], draw(1, 5, "max"), time.Duration(draw(0, 4000, "lease"))*time.Millisecond)
		}),
		"receive and hang up": step(func() {
			ds := w.receive("x", draw(1, 5, "max"), time.Second)
			w.led.undo(ds, w.now)
			for _, d := range ds {
				w.letGo(d)
			}
		}),
		"claim": step(func() {
			w.claim([]string{"", "x", "y"}[draw(0, 2, "consumer")], time.Duration(draw(0, 3000, "idle"))*time.Millisecond)
		}),
		"nack": step(func() {
			n := NackItem{HasDelay: rapid.Bool().Draw(w.t, "delay"), Delay: time.Duration(draw(0, 3000, "delay ms")) * time.Millisecond}
			w.settleOne("nack", func(r Receipt, by ref) code.Code { return w.led.nack(r, n, by, w.now, w.stamp()) })
		}),
		"release": step(func() {
			w.settleOne("release", func(r Receipt, by ref) code.Code { return w.led.release(r, by, w.now) })
		}),
		"reject": step(func() {
			w.settleOne("reject", func(r Receipt, by ref) code.Code { return w.led.reject(r, "no", by, w.now) })
		}),
		"extend": step(func() {
			d := time.Duration(draw(0, 5000, "ms")) * time.Millisecond
			w.settleOne("extend", func(r Receipt, by ref) code.Code {
				c := w.led.extend(r, d, by, w.now, w.stamp())
				if c == 0 {
					delete(w.unseen, r.Lease)
					w.moving[r.Lease] = true
				}
				return c
			})
		}),
		"unseen": step(func() {
			w.settleOne("unseen", func(r Receipt, _ ref) code.Code {
				c := w.led.unsee(r, w.now)
				if c == code.OK {
					w.unseen[r.Lease] = w.led.tracked[r.Address].deadline
				}
				if c == code.OK && w.moving[r.Lease] {
					w.unseen[r.Lease] = w.now
				}
				return c
			})
		}),
		"give up": step(func() {
			for _, p := range w.calls {
				w.led.leave(p.c, w.now, ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}, plain(code.DeadlineExceeded))
			}
		}),
		"late copy": step(w.lateCopy),
		"purge":     step(func() { w.commit(&queue.Retention{Stamp: w.stamp(), PurgeTo: w.state.Meta().Last / 2}) }),
		"park":      step(w.park),
		"redrive":   step(w.redrive),
		"restart":   step(func() { w.restart() }),
		"move":      step(func() { w.move() }),
	}
	for range 3 { // often
		for i := range 3 {
			acts[fmt.Sprint("ack ", i)] = step(func() {
				w.settleOne("ack", func(r Receipt, by ref) code.Code {
					c, err := w.led.ack(r, i > 0, by, w.now)
					require.NoError(w.t, err)
					return c
				})
			})
			acts[fmt.Sprint("commit ", i)] = step(func() { w.answer("commit") })
		}
	}
	for _, o := range []string{"lost", "silent", "refused"} {
		acts[o] = step(func() { w.answer(o) })
	}
	return acts
}

// lateCopy applies a command again that was applied before.
func (w *ledgerWorld) lateCopy() {
	old := slices.DeleteFunc(slices.Clone(w.history), func(c queue.Command) bool { return !harmless(c) })
	if len(old) > 0 {
		w.index++
		w.state.apply(w.index, rapid.SampledFrom(old).Draw(w.t, "command"))
	}
}

// harmless: publishes are made once by their producer's seq, which the naive state does not know.
func harmless(c queue.Command) bool {
	switch c.(type) {
	case *queue.Ack, *queue.Expire, *queue.Home:
		return true
	}
	return false
}

// park moves what is unfinished out of the line's way, as housekeeping does with stragglers.
func (w *ledgerWorld) park() {
	all, _, _ := w.state.Deliverables(worldGroup, 0, 3, false)
	var list []queue.Address
	for _, d := range all {
		list = append(list, d.Address)
	}
	if len(list) == 0 {
		return
	}
	w.commit(&queue.Retention{Stamp: w.stamp(), Park: list})
}

func (w *ledgerWorld) redrive() {
	dead, _, _ := w.state.DeadLetters(worldGroup, 0, 1, false)
	for i := range dead {
		m, _, _ := w.state.Message(dead[i].Address)
		w.redrove[string(m.Key)] = true
		w.led.deadOp(&dead[i], true, ref{newCall(1), 0}, w.now)
	}
}

// move is a planned move: what is open is recorded first, so that no lease is lost.
func (w *ledgerWorld) move() {
	w.led.leaving = true
	for w.pump(); !w.led.idle(); w.pump() {
		if len(w.net) == 0 {
			w.pass(100) // a command that could not be queued rests
			continue
		}
		w.answer("commit")
	}
	held := maps.Clone(w.holder)
	live := map[queue.Address]bool{}
	for a, e := range w.led.tracked {
		live[a] = e.live
	}
	w.restart()
	for a, d := range held {
		if done, _ := w.state.Finished(worldGroup, a); live[a] && !done { // a purge is not told to the ledger
			require.NotNil(w.t, w.holder[a], "%s: its lease was lost by a planned move", a)
			require.Equal(w.t, d.lease, w.led.tracked[a].lease)
		}
	}
}

// restart is a new home: a new epoch, a new ledger, and of the old one's leases those that were recorded.
func (w *ledgerWorld) restart() {
	info, _ := w.state.Group(worldGroup)
	w.commit(&queue.Home{Stamp: w.stamp(), Group: worldGroup, ExpectedHome: info.Home, ExpectedEpoch: info.Epoch, NewHome: 1})
	w.led.end(code.StaleOwner, true)
	for _, p := range w.calls {
		require.NotZero(w.t, p.c.results[0].Code, "a %s was left unanswered", p.kind)
		w.look(p)
	}
	w.calls, w.net = nil, nil
	maps.DeleteFunc(w.holder, func(a queue.Address, d *Delivery) bool {
		_, lease, _, _ := w.state.RetryOf(worldGroup, a)
		return lease.Name != d.lease
	})
	w.build()
	for a, d := range w.holder {
		require.Equal(w.t, d.lease, w.led.tracked[a].lease, "%s: a recorded lease was forgotten", a)
	}
}

// drain consumes everything: nothing is stuck.
func (w *ledgerWorld) drain() {
	for range 200 {
		w.pass(1000)
		w.pump()
		for len(w.net) > 0 {
			w.answer("commit")
			w.pump()
		}
		for _, d := range w.receive("", 100, time.Minute) {
			p := &pending{c: newCall(1), d: d, kind: "ack"}
			c, err := w.led.ack(Receipt{Group: worldGroup, Lease: d.lease, Address: d.Message.Address}, false, ref{p.c, 0}, w.now)
			require.NoError(w.t, err)
			require.Zero(w.t, c)
			w.calls = append(w.calls, p)
		}
		require.NoError(w.t, w.led.Check())
	}
	w.pump()
	left, _, _ := w.state.Deliverables(worldGroup, 0, 10, true)
	require.Empty(w.t, left, "stuck, tracked: %v", slices.Collect(maps.Keys(w.led.tracked)))
	require.Empty(w.t, w.calls, "calls were left unanswered")
	dead, _, _ := w.state.DeadLetters(worldGroup, 0, 1000, false)
	for _, d := range dead {
		require.True(w.t, d.Attempts == 5 || d.Reason == "no", "%s: dead after %d attempts", d.Address, d.Attempts)
	}
}

func TestLedgerAgainstNaiveModel(t *testing.T) {
	walkLedger(t, func(o queue.QueueOptions) worldState { return newFakeState(o) })
}

// machineState is the real state machine, on a store in memory.
type machineState struct {
	*queuetest.Machine
	t testing.TB
}

func (m machineState) apply(i queue.Index, c queue.Command) (queue.Result, queue.Applied) {
	raw, err := queue.EncodeCommand(nil, c)
	require.NoError(m.t, err)
	res, err := m.Apply(i, raw)
	require.NoError(m.t, err)
	require.NotEqual(m.t, code.InvalidArgument, res.Code, "%T", c)
	return res, m.LastApplied()
}

func TestLedgerOnTheStateMachine(t *testing.T) {
	st := queuetest.OpenStore(t)
	shard := uint64(0)
	walkLedger(t, func(o queue.QueueOptions) worldState {
		shard++
		m := machineState{queuetest.Open(t, st, shard), t}
		o.EnsureDefaults()
		res, _ := m.apply(1, &queue.Retention{Stamp: stampZero, Options: &o})
		require.Equal(t, code.OK, res.Code)
		return m
	})
}

func walkLedger(t *testing.T, open func(queue.QueueOptions) worldState) {
	rapid.Check(t, func(t *rapid.T) {
		w := newLedgerWorld(t, open)
		for range 3 {
			t.Repeat(w.actions())
		}
		w.t = t
		w.drain()
	})
}
