package home

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"go.uber.org/zap"
)

// group is one consumer group in this process: its part of the home lease, its ledger under the present epoch, and
// the receives that wait for it. Everything happens under mu; pump brings all of it up to date and starts what is
// due. A group that nobody uses costs nothing.
type group struct {
	k     *Keeper
	id    queue.GroupID
	waits atomic.Bool   // there are waiters, or someone awaits the epoch
	seen  atomic.Uint64 // the keeper's version that info was read at or after; 0: never

	mu         sync.Mutex
	deleted    bool
	info       queue.GroupInfo
	recovery   uint64
	generation uint64 // the lease's, of led
	term       Term
	led        *Ledger // nil until somebody waits under an epoch that is ours
	waiters    waiters
	why        hindrance     // why the first waiter got nothing, unless it has a reason of its own
	wanted     int           // calls that need the epoch, beside waiters
	opening    int           // those of them that need the home lease, too
	asking     int           // calls that need the process's first read only
	moving     bool          // a Move is under way: no new epoch is obtained
	obtaining  bool          // a Home(self -> self) is under way
	hold       time.Duration // no new attempt before it
	pause      time.Duration
	failure    error // why the last command was not queued; nil: it was
	timer      *time.Timer
	timerAt    time.Duration
	changed    chan struct{} // closed at the next pump; nil: nobody waits for it
}

func newGroup(k *Keeper, id queue.GroupID) *group {
	return &group{k: k, id: id, term: Term{Self: k.o.Self}, timerAt: never}
}

// pump takes up what was applied, records leases that ran out, serves the waiters, proposes what is due, and sets
// the timer for the next thing that will be. Call it after every change.
func (g *group) pump() {
	g.refresh()
	if g.deleted {
		g.announce()
		return
	}
	if g.led != nil {
		g.led.unread = false // unless this round's picks say so again
	}
	again := g.serve()
	g.dismissShort()
	now, stamp := g.k.o.Boot(), g.k.o.Stamp()
	if l := g.led; l != nil {
		looked, err := l.tidy(now, stamp)
		if err != nil {
			g.fault(err)
		}
		if looked && g.waiters.n > 0 {
			again = now // the waiters were served before it
		}
		l.runOut(now, stamp)
		l.recordDue(now, stamp)
		g.flush(l, now, stamp)
		again = min(again, l.nextEvent(now, stamp, g.waiters.n > 0))
	}
	g.arm(again, now)
	g.announce()
}

// announce wakes the calls that wait for a change.
func (g *group) announce() {
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// refresh takes up the group as applied, if anything about groups has changed since it was read. A ledger whose
// epoch is over ends here, and waiters that must go elsewhere are answered.
func (g *group) refresh() {
	version := g.k.version.Load()
	if g.deleted || g.seen.Load() == version {
		return
	}
	info, ok := g.k.o.Reader.Group(g.id)
	if !ok {
		g.remove()
		return
	}
	meta := g.k.o.Reader.Meta()
	g.k.mu.Lock()
	now := g.k.o.Boot() // after the read: a new home waits from its apply, which is not later than this
	g.term.Observe(g.k.lease, info, now)
	generation := g.k.lease.generation
	g.k.mu.Unlock()
	g.seen.Store(version)
	if l := g.led; l != nil {
		switch {
		case info.Epoch != l.epoch || info.Home != g.k.o.Self:
			g.endLedger(code.StaleOwner, true)
		case generation != g.generation:
			g.endLedger(code.StaleOwner, false)
		default:
			l.configure(info)
		}
	}
	g.info, g.recovery, g.generation = info, meta.RecoveryNumber, generation
	if info.Home != g.k.o.Self {
		g.waiters.failAll(g.notOwner())
		g.note()
	}
}

// remove answers everybody: the group is deleted.
func (g *group) remove() {
	g.deleted = true
	g.endLedger(code.UnknownGroup, true)
	g.waiters.failAll(g.unknown())
	g.note()
	g.disarm()
	g.announce() // nobody pumps it any more
	g.k.forget(g)
}

func (g *group) endLedger(refusal code.Code, decisive bool) {
	if g.led != nil {
		g.led.end(refusal, decisive)
		g.led = nil
	}
}

// shut answers everybody: the keeper closes.
func (g *group) shut() {
	g.endLedger(code.ShuttingDown, false)
	g.waiters.failAll(code.New(code.ShuttingDown, ""))
	g.note()
	g.disarm()
	g.announce()
}

func (g *group) notOwner() *code.Error {
	e := code.New(code.NotOwner, "group %q: its home is replica %d, not this host's replica %d", g.info.Name, g.info.Home, g.k.o.Self)
	e.Epoch = uint64(g.info.Epoch)
	return e
}

func (g *group) unknown() *code.Error {
	return code.New(code.UnknownGroup, "group %q was deleted", g.info.Name)
}

// enter brings the group up to date for a call and refuses calls that belong elsewhere.
func (g *group) enter() error {
	g.refresh()
	switch {
	case g.deleted:
		return g.unknown()
	case g.info.Home != g.k.o.Self:
		return g.notOwner()
	}
	return nil
}

// grant takes a completed ReadIndex, after looking at the group as it is applied now.
func (g *group) grant(r Read) {
	g.seen.Store(0)
	g.refresh()
	g.k.mu.Lock()
	g.term.Grant(g.k.lease, r)
	g.k.mu.Unlock()
}

// serve hands out what is ready to the waiters, first come first served, and returns when to look again, if only
// time has to pass.
func (g *group) serve() (again time.Duration) {
	defer g.note()
	if g.waiters.n == 0 && g.wanted == 0 {
		if g.asking > 0 && !g.k.baseKnown() {
			return g.k.wantRead()
		}
		return never
	}
	again, ok := g.prepare()
	if !ok {
		return again
	}
	again = g.handOut()
	if g.opening > 0 && g.k.gate(&g.term, g.k.o.Boot()) != GateOpen {
		again = min(again, g.k.wantRead())
	}
	return again
}

// prepare sees to it that this process may act for the group: it has the epoch, the wait is over, and the ledger is
// there. False: not yet.
func (g *group) prepare() (again time.Duration, ok bool) {
	gate := g.k.gate(&g.term, g.k.o.Boot())
	g.why = gated
	switch gate {
	case GateNotHome:
		return never, false
	case GateBase:
		return g.k.wantRead(), false
	case GateEpoch, GateStopped:
		return g.obtain(), false
	}
	if g.led == nil {
		stamp := g.k.o.Stamp()
		if stamp == 0 {
			return g.k.o.Boot() + time.Second, false // recorded deadlines cannot be told from those that are over
		}
		if err := g.build(stamp); err != nil {
			g.fault(err)
			return g.k.o.Boot() + firstHold, false
		}
	}
	if gate == GateWaiting { // leases that the old home has recorded are served meanwhile
		g.why = nothing
		return g.term.waitUntil, false
	}
	return never, true
}

// build makes the ledger of the present epoch from the state, which includes its Home, at a stamp that is not 0.
func (g *group) build(stamp queue.Stamp) error {
	l, err := newLedger(g.k.o.Reader, &g.k.marks, g.info, g.k.o.Reader.Meta().Options, g.k.o.Rand, g.k.o.Boot(), stamp)
	if err != nil {
		return err
	}
	g.led = l
	g.k.log.Debug("serves a group", zap.String("group", g.info.Name), zap.Stringer("epoch", g.info.Epoch))
	return nil
}

// handOut goes through the waiters. It stops at the first that gets nothing, unless that is so for its consumer only.
func (g *group) handOut() (again time.Duration) {
	if g.isPaused() {
		g.why = paused
		return g.k.o.Boot() + time.Second // a queue's pause ends without a word to groups
	}
	g.touchActive()
	g.why, again = nothing, never
	for w := g.waiters.first; w != nil; {
		next := w.next
		served, at := g.handTo(w)
		again = min(again, at)
		switch {
		case served:
			g.waiters.remove(w)
		case w.why != ownLimit && w.why != standby:
			g.why, w.why = w.why, nothing
			return again
		}
		w = next
	}
	return again
}

// touchActive keeps the place of a single active consumer that waits here.
func (g *group) touchActive() {
	if g.led.active == nil {
		return
	}
	for w := g.waiters.first; w != nil; w = w.next {
		if w.take.consumer == g.led.active.name {
			g.led.touch(w.take.consumer, g.k.o.Boot())
			return
		}
	}
}

func (g *group) isPaused() bool {
	return g.info.Config.Paused || g.k.o.Reader.Meta().Options.Paused
}

// handTo hands out to one waiter. The messages are leased in the ledger first; then the home lease is looked at, and
// whether the waiter is still there: the delivery starts at that moment, or not at all.
func (g *group) handTo(w *waiter) (served bool, again time.Duration) {
	now, stamp := g.k.o.Boot(), g.k.o.Stamp()
	if g.k.gate(&g.term, now) != GateOpen {
		ready, err := g.led.ready(now, stamp)
		if err != nil {
			g.fault(err)
			return false, now + firstHold
		}
		if w.why = nothing; !ready {
			return false, never
		}
		w.why = gated
		return false, g.k.wantRead()
	}
	t := w.take
	if !w.leaseSet {
		t.lease = ms(g.led.cfg.LeaseMs)
	}
	ds, why, err := g.led.take(t, now, stamp, nil)
	w.why = why
	if err != nil {
		g.fault(err)
	}
	if len(ds) == 0 {
		if err != nil {
			return false, now + firstHold
		}
		return false, never
	}
	return g.start(w, ds)
}

// start is the moment at which a delivery starts.
func (g *group) start(w *waiter, ds []Delivery) (served bool, again time.Duration) {
	g.k.mu.Lock()
	now := g.k.o.Boot()
	open := g.term.Gate(g.k.lease, now) == GateOpen
	renew := g.term.renewDue(g.k.lease, now)
	g.k.mu.Unlock()
	if w.ctx.Err() != nil {
		g.led.undo(ds, now)
		w.finish(nil, nil)
		return true, never
	}
	if !open {
		g.led.undo(ds, now)
		w.why = gated
		return false, g.k.wantRead()
	}
	if renew {
		g.k.wantRead()
	}
	w.led, w.epoch, w.recovery = g.led, g.led.epoch, g.recovery
	w.finish(ds, nil)
	return true, never
}

// obtain asks for a new epoch of our own: Home(self -> self), whoever was home before.
func (g *group) obtain() (again time.Duration) {
	now := g.k.o.Boot()
	switch {
	case g.obtaining || g.moving:
		return never
	case now < g.hold:
		return g.hold
	}
	cmd := &queue.Home{
		Stamp: g.k.o.Stamp(), Group: g.id, ExpectedHome: g.k.o.Self, ExpectedEpoch: g.info.Epoch, NewHome: g.k.o.Self,
	}
	g.obtaining = g.k.spawn(func() {
		res, err := g.k.propose(g.k.ctx, cmd)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.obtaining = false
		g.tried(err)
		g.seen.Store(0)
		if err != nil || res.Code != code.OK {
			g.pause = min(max(2*g.pause, firstHold), maxHold)
			g.hold = g.k.o.Boot() + g.pause
		} else {
			g.hold, g.pause = 0, 0
		}
		g.pump()
	})
	return never
}

// tried remembers why a command was not queued.
func (g *group) tried(err error) {
	g.failure = nil
	if err != nil && effectOf(err) == code.EffectNone {
		g.failure = err
	}
}

// flush proposes what is due.
func (g *group) flush(l *Ledger, now time.Duration, stamp queue.Stamp) {
	for b := l.next(now, stamp); b != nil; b = l.next(now, stamp) {
		if !g.k.spawn(func() { g.carry(l, b) }) {
			return // closing: shut answers
		}
	}
}

// carry proposes one command, the same bytes again and again while its outcome is unknown, until apply answers or
// the epoch ends.
func (g *group) carry(l *Ledger, b *batch) {
	pause := firstHold
	for {
		res, err := g.k.propose(g.k.ctx, b.command)
		if g.carried(l, b, res, err) {
			return
		}
		select {
		case <-g.k.ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxHold)
	}
}

// carried takes the outcome of one attempt; true when the batch needs no further one.
func (g *group) carried(l *Ledger, b *batch, res queue.Result, err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l.gone {
		return true
	}
	now := g.k.o.Boot()
	g.tried(err)
	switch {
	case err != nil && effectOf(err) == code.EffectNone && !b.maybe:
		l.unqueued(b, now)
	case err != nil:
		b.maybe = true
		return false
	case res.Code == code.OK:
		if err := l.answered(b, &res, now, g.k.o.Stamp()); err != nil {
			g.fault(err)
		}
	default:
		g.refusedBatch(l, b, res.Code, now)
	}
	g.pump()
	return true
}

// refusedBatch takes a refusal of a whole command. One that is about the epoch ends the ledger; since this replica
// has applied the entry, the state says so.
func (g *group) refusedBatch(l *Ledger, b *batch, c code.Code, now time.Duration) {
	g.seen.Store(0)
	g.refresh()
	if l.gone {
		return
	}
	res := plain(c)
	if b.maybe {
		res = ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
	}
	l.refused(b, res, now)
	g.k.log.Warn("a command was refused", zap.String("group", g.info.Name), zap.Stringer("code", c))
}

// fault logs a failed read of the state. What needed it is tried again.
func (g *group) fault(err error) {
	g.failure = err
	g.k.log.Error("read of a group's state", zap.String("group", g.info.Name), zap.Error(err))
}

// arm sets the group's timer.
func (g *group) arm(at, now time.Duration) {
	if at == never {
		g.disarm()
		return
	}
	if g.timer != nil && g.timerAt == at {
		return
	}
	g.timerAt = at
	wait := max(at-now, 0)
	if g.timer == nil {
		g.timer = time.AfterFunc(wait, g.tick)
		return
	}
	g.timer.Reset(wait)
}

func (g *group) disarm() {
	if g.timer != nil {
		g.timer.Stop()
	}
	g.timerAt = never
}

func (g *group) tick() {
	if !g.k.begin() {
		return
	}
	defer g.k.wg.Done()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.timerAt = never
	g.pump()
}

// await waits until cond holds, under mu, or ctx is done; want says that the epoch is needed for it. cond is looked
// at after every pump.
func (g *group) await(ctx context.Context, want bool, cond func() (bool, error)) error {
	if want {
		g.wanted++
		defer func() { g.wanted--; g.note() }()
	}
	g.pump()
	for {
		if ok, err := cond(); ok || err != nil {
			return err
		}
		if g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-ctx.Done():
			err = ctx.Err()
		case <-g.k.ctx.Done():
			err = code.New(code.ShuttingDown, "")
		}
		g.mu.Lock()
		if err != nil {
			return err
		}
	}
}

// awaitOr is await for a call: it is told why its time has run out.
func (g *group) awaitOr(ctx context.Context, want bool, cond func() (bool, error)) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	err := g.await(ctx, want, cond)
	if err != nil && ctx.Err() != nil {
		if why := g.gateReason(); why != nil {
			return why
		}
		return ended(ctx)
	}
	return err
}

// note tells the follower whether anybody waits.
func (g *group) note() { g.waits.Store(g.waiters.n > 0 || g.wanted > 0 || g.asking > 0) }

// stats describes the group.
func (g *group) stats() GroupStats {
	now := g.k.o.Boot()
	s := GroupStats{
		Group: g.id, Name: g.info.Name, Home: g.info.Home, Epoch: g.info.Epoch, State: g.k.gate(&g.term, now),
		LeaseFor: max(g.term.until-now, 0), Paused: g.isPaused(), Waiters: g.waiters.n,
	}
	if g.led != nil {
		g.led.describe(&s, g.k.o.Stamp())
	}
	return s
}

// describe adds what a ledger knows.
func (l *Ledger) describe(s *GroupStats, stamp queue.Stamp) {
	s.More = l.scan <= queue.Address(l.marks.last.Load()) || !l.keyed && stamp >= l.dueAt
	s.Leased, s.Blocked = l.leased, l.blocked
	s.Handed, s.Acked, s.Failed, s.Dead = l.counters.handed, l.counters.acked, l.counters.failed, l.counters.dead
	for _, e := range l.tracked {
		switch {
		case e.place == placeFresh, e.place == placeTimed && e.notBefore <= stamp:
			s.Ready++
		case e.place == placeTimed:
			s.Retrying++
		}
		if !e.resolved() {
			s.Unresolved++
		}
	}
	for _, c := range l.chains {
		if c.head != c.tail {
			s.BlockedKeys++
		}
	}
	for _, c := range l.holders {
		if c.name != "" {
			s.Consumers = append(s.Consumers, ConsumerStats{Name: c.name, Leased: c.held, Active: c == l.active})
		}
	}
	slices.SortFunc(s.Consumers, func(a, b ConsumerStats) int { return strings.Compare(a.Name, b.Name) })
}
