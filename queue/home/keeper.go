package home

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"go.uber.org/zap"
)

// Keeper serves all groups of one shard whose home is this process's replica. All methods are safe for concurrent
// use. It owns its goroutines: one that follows what is applied, at most one ReadIndex, one per command in flight,
// and timers; Close stops them and waits.
//
// Locks: a group's mu, then the keeper's mu. Nothing is called, and nothing is read from the state, under the
// keeper's mu, so the apply goroutine never waits for more than a few instructions.
type Keeper struct {
	o        Options
	receipts *Receipts
	log      *zap.Logger
	marks    marks
	version  atomic.Uint64 // +1 when groups were created, deleted, configured, reset, or given a home
	wake     chan struct{} // something was applied
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	lease     *Lease
	reading   bool          // a ReadIndex is on its way
	readHold  time.Duration // no read before it: the last one failed
	readPause time.Duration
	readErr   error // why the last read failed; nil: it completed
	readBegun time.Duration
	readEnd   func()      // ends the read that is on its way
	readAnew  bool        // and it is to be asked again at once
	retry     *time.Timer // tries the first read again
	retryIn   time.Duration
	groups    map[queue.GroupID]*group
	names     map[string]*group
	namesAt   uint64 // the version of names
}

// NewKeeper starts the keeper of one shard replica. It begins a ReadIndex at once, whether or not there is anything
// to hand out: epochs obtained from then on count, so that a new group is served without a wait. It reads nothing
// else before it is called.
func NewKeeper(o Options) (*Keeper, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	k := &Keeper{
		o: o, receipts: NewReceipts(o.ReceiptKey), log: o.Logger.With(zap.Uint64("shard", o.Shard)),
		wake: make(chan struct{}, 1), lease: NewLease(o.HomeLease),
		groups: map[queue.GroupID]*group{}, names: map[string]*group{},
	}
	k.version.Store(1)
	k.ctx, k.cancel = context.WithCancel(context.Background())
	k.spawn(k.follow)
	k.wantRead()
	return k, nil
}

// Applied takes what one Update changed. It never blocks; call it in the apply goroutine, after the change is
// visible to reads and before the proposers of the commands are answered.
func (k *Keeper) Applied(a queue.Applied) {
	k.marks.noteLast(a.Last)
	if a.Delayed {
		k.marks.delayed.Add(1)
	}
	if a.Redrive {
		k.marks.disorder.Add(1)
	}
	if len(a.Groups) > 0 {
		k.version.Add(1)
	}
	if a.Appended || a.Delayed || a.Redrive || len(a.Groups) > 0 {
		k.nudge()
	}
}

// Installed says that a snapshot was installed, or that the shard's state was replaced in another way: no epoch
// counts as obtained any more, and every ledger ends. It does not block.
func (k *Keeper) Installed() {
	k.mu.Lock()
	k.lease.Restart()
	k.mu.Unlock()
	k.marks.delayed.Add(1)
	k.marks.disorder.Add(1)
	k.version.Add(1)
	k.nudge()
}

func (k *Keeper) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// follow passes on what was applied to the groups that it concerns.
func (k *Keeper) follow() {
	var list []*group
	for {
		select {
		case <-k.ctx.Done():
			return
		case <-k.wake:
		}
		k.marks.noteLast(k.o.Reader.Meta().Last) // an install tells no address
		if !k.baseKnown() {
			k.wantRead()
		}
		version := k.version.Load()
		list = k.list(list[:0])
		for _, g := range list {
			if g.waits.Load() || g.seen.Load() != version {
				g.mu.Lock()
				g.pump()
				g.mu.Unlock()
			}
		}
	}
}

func (k *Keeper) baseKnown() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lease.BaseKnown()
}

// list appends every group that this process has had to do with.
func (k *Keeper) list(to []*group) []*group {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, g := range k.groups {
		to = append(to, g)
	}
	return to
}

// spawn runs f in a goroutine that Close waits for; false when the keeper is closed.
func (k *Keeper) spawn(f func()) bool {
	if !k.begin() {
		return false
	}
	go func() {
		defer k.wg.Done()
		f()
	}()
	return true
}

// begin counts a goroutine of ours; false when the keeper is closed.
func (k *Keeper) begin() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return false
	}
	k.wg.Add(1)
	return true
}

// gate looks at a group's term and the shard's lease.
func (k *Keeper) gate(t *Term, now time.Duration) Gate {
	k.mu.Lock()
	defer k.mu.Unlock()
	return t.Gate(k.lease, now)
}

// wantRead begins a ReadIndex unless one is on its way or the last one has just failed. It returns when the next may
// begin, if it is to be asked again then.
func (k *Keeper) wantRead() (again time.Duration) {
	k.mu.Lock()
	now := k.o.Boot()
	switch {
	case k.closed || k.reading:
		k.mu.Unlock()
		return never
	case now < k.readHold:
		defer k.mu.Unlock()
		return k.readHold
	}
	k.reading = true
	k.wg.Add(1)
	r := k.lease.Begin(now)
	ctx, end := context.WithTimeout(k.ctx, k.lease.length) // a later answer grants nothing
	k.readBegun, k.readEnd = now, end
	k.mu.Unlock()
	go func() {
		defer k.wg.Done()
		defer end()
		k.read(ctx, r)
	}()
	return never
}

// read asks one ReadIndex and gives what it grants to the groups.
func (k *Keeper) read(ctx context.Context, r Read) {
	err := k.o.ReadIndex(ctx)
	granted, anew := false, false
	if err == nil {
		applied := k.o.Reader.Meta().Applied
		k.mu.Lock()
		k.reading, k.readErr, k.readHold, k.readPause = false, nil, 0, 0
		k.retryIn = 0
		granted = k.lease.End(r, applied)
	} else {
		k.mu.Lock()
		k.reading, k.readErr = false, err
		k.readPause = min(max(2*k.readPause, firstHold), k.lease.third())
		k.readHold = k.o.Boot() + k.readPause
		if anew = k.readAnew; anew {
			k.readHold, k.readPause = 0, 0
		}
	}
	k.readAnew = false
	k.retryBaseLocked()
	k.mu.Unlock()
	if anew {
		k.wantRead()
	}
	for _, g := range k.list(nil) {
		g.mu.Lock()
		if g.led != nil || g.waiters.n > 0 || g.wanted > 0 || g.asking > 0 {
			if granted {
				g.grant(r)
			}
			g.pump()
		}
		g.mu.Unlock()
	}
}

// readFailure is why no read is fresh, as far as that is known: the last one failed, or the one on its way takes long. nil: neither.
func (k *Keeper) readFailure() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.readErr == nil && k.reading && k.o.Boot()-k.readBegun >= k.lease.third() {
		return code.New(code.NoLeader, "no quorum has answered for %v", k.o.Boot()-k.readBegun)
	}
	return k.readErr
}

// LeaderKnown says that the shard has a leader as this replica knows it: if the first read has not completed, it is asked
// again at once. A new shard has no leader when its keeper starts, and a group made before the first read completes is served
// only after the wait of a new home. It does not block, and reads nothing if the first read is done.
func (k *Keeper) LeaderKnown() {
	k.mu.Lock()
	due := !k.closed && !k.lease.BaseKnown()
	if due {
		k.readHold, k.readPause, k.retryIn = 0, 0, 0
		if k.reading { // of a leader that is no more, or none
			k.readAnew = true
			k.readEnd()
		}
	}
	k.mu.Unlock()
	if due {
		k.wantRead()
	}
}

// maxRetry bounds the pause between two attempts at the first read that nobody waits for.
const maxRetry = 5 * time.Second

// retryBaseLocked arranges for the first read to be asked again until it completes, ever more slowly: a consumer that
// waits asks for it itself.
func (k *Keeper) retryBaseLocked() {
	if k.closed || k.lease.BaseKnown() {
		return
	}
	wait := max(k.readHold-k.o.Boot(), time.Millisecond)
	k.retryIn = min(max(2*k.retryIn, wait), maxRetry)
	if k.retry == nil {
		k.retry = time.AfterFunc(k.retryIn, func() { k.wantRead() })
		return
	}
	k.retry.Reset(k.retryIn)
}

// group finds a group by name in the applied state.
func (k *Keeper) group(name string) (*group, error) {
	version := k.version.Load()
	k.mu.Lock()
	if k.namesAt != version {
		clear(k.names)
		k.namesAt = version
	}
	g, closed := k.names[name], k.closed
	k.mu.Unlock()
	if closed {
		return nil, code.New(code.ShuttingDown, "")
	}
	if g != nil {
		return g, nil
	}
	info, ok := k.o.Reader.GroupByName(name)
	if !ok {
		return nil, code.New(code.UnknownGroup, "group %q does not exist: create it with `tierq group create QUEUE %s`", name, name)
	}
	return k.adopt(info, version), nil
}

// adopt finds or makes the group of an id.
func (k *Keeper) adopt(info queue.GroupInfo, version uint64) *group {
	k.mu.Lock()
	defer k.mu.Unlock()
	g := k.groups[info.ID]
	if g == nil {
		g = newGroup(k, info.ID)
		k.groups[info.ID] = g
	}
	if k.namesAt == version {
		k.names[info.Name] = g
	}
	return g
}

// forget drops a deleted group.
func (k *Keeper) forget(g *group) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.groups, g.id)
}

// propose makes one attempt to commit a command. A result that says nothing is an unknown outcome.
func (k *Keeper) propose(ctx context.Context, cmd queue.Command) (queue.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, k.o.ProposeTimeout)
	defer cancel()
	res, err := k.o.Propose(ctx, cmd)
	if err == nil && (res.Code == 0 || res.Code == code.Unknown) {
		err = code.Maybe(code.QuorumLost, nil, "")
	}
	return res, err
}

// HomeOf returns the home and epoch of a group by name, as applied here; false when there is no such group. Calls
// that are refused with NotOwner are to go to that replica's host.
func (k *Keeper) HomeOf(group string) (queue.ReplicaID, queue.Epoch, bool) {
	g, ok := k.o.Reader.GroupByName(group)
	return g.Home, g.Epoch, ok
}

// Stats lists what this process knows about the groups that it serves or has served. Groups that nobody has used
// here since the process started are not listed.
func (k *Keeper) Stats() []GroupStats {
	var out []GroupStats
	for _, g := range k.list(nil) {
		g.mu.Lock()
		g.refresh()
		if g.led != nil && g.led.outdated() {
			g.pump() // what was purged is not in flight
		}
		if !g.deleted {
			out = append(out, g.stats())
		}
		g.mu.Unlock()
	}
	return out
}

// Close stops everything and waits for it, or for ctx. Parked receives are answered ShuttingDown, unresolved acks
// with an unknown outcome. It hands nothing over: call ReleaseAll first. It may be called twice.
func (k *Keeper) Close(ctx context.Context) error {
	k.mu.Lock()
	k.closed = true
	if k.retry != nil {
		k.retry.Stop()
	}
	k.mu.Unlock()
	k.cancel()
	for _, g := range k.list(nil) {
		g.mu.Lock()
		g.shut()
		g.mu.Unlock()
	}
	done := make(chan struct{})
	go func() {
		k.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// effectOf is what a failed attempt did, as far as can be told: anything that is not a *code.Error is unknown.
func effectOf(err error) code.Effect {
	if e := new(code.Error); errors.As(err, &e) && e.Effect == code.EffectNone {
		return code.EffectNone
	}
	return code.EffectMaybe
}

// codeOf is an error's registry code, or another one.
func codeOf(err error, or code.Code) code.Code {
	if e := new(code.Error); errors.As(err, &e) && e.Code != 0 {
		return e.Code
	}
	return or
}
