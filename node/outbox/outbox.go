// Package outbox carries dead letters from a shard to the queue that their group names for them, at the home of the group.
//
// A dead letter of such a group has an export number; numbers rise in the order in which letters died. It goes through
//
//	pending ── target stored ──► exporting ── published, marked ──► gone, exported
//
// and every arrow is an Expire entry of the source shard, decided on the letter's change number and the group's epoch.
// The copy is published under a reserved producer (source shard, group id) with the export number as its seq, and only to
// the target that the applied state has stored. So whoever is home after a crash at any point repeats the same publish,
// which the target answers with the first address: there is exactly one copy. Two homes at once do no harm either.
//
// A letter that no target could take (it has come through too many dead-letter queues, or has no room for the headers) is
// given up: it loses its number and stays in the shard. Everything else that fails parks: nothing is dropped, the reason
// is told by Status, and the publish is tried again after a pause.
//
// The package knows neither Raft, the catalog nor other hosts: State and Targets stand for them.
package outbox

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
)

// MaxUnresolved bounds the dead letters of a group that are exporting: published, or about to be, and not marked yet.
const MaxUnresolved = 256

// State is what an outbox reads of its shard; *queue.QueueStateMachine is one.
type State interface {
	Group(id queue.GroupID) (queue.GroupInfo, bool)
	Groups() []queue.GroupInfo
	Exports(id queue.GroupID, from uint64, limit, maxBytes int, withBody bool) ([]queue.DeadLetter, error)
}

// Target is where a dead letter is to go.
type Target struct {
	Shard        uint64
	MaxBodyBytes int
}

// Targets are the queues of the fleet. Errors are *code.Error; every method returns by the deadline of ctx.
type Targets interface {
	// Source names the queue and partition of the outbox's shard; false while it is not known here.
	Source() (name string, partition uint32, ok bool)
	// Route finds the shard of a queue that takes a letter.
	Route(ctx context.Context, queue string, d *queue.DeadLetter) (Target, error)
	// Gone says whether a shard exists no more. It is sure of a yes: shards never come back.
	Gone(ctx context.Context, shard uint64) (bool, error)
	// Publish publishes at the leader of a shard.
	Publish(ctx context.Context, shard uint64, p queue.Publish) (queue.PublishResult, error)
}

// Options of an outbox; all are required but After, Exported and Logger.
type Options struct {
	Shard     uint64
	Self      queue.ReplicaID
	State     State
	Targets   Targets
	Propose   func(ctx context.Context, cmd queue.Command) (queue.Result, error)
	ReadIndex func(ctx context.Context) error
	Stamp     func() queue.Stamp
	// Now is a time that only rises.
	Now func() time.Duration
	// After is time.After; tests replace it.
	After func(d time.Duration) <-chan time.Time
	// Exported counts letters that were marked as exported, and those that were given up.
	Exported func(exported, givenUp int)
	Logger   *zap.Logger
}

// Outbox carries the dead letters of one shard, for the groups whose home is here. It has one goroutine for each group
// that has something to carry, and none otherwise. Safe for concurrent use.
type Outbox struct {
	o      Options
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	workers map[queue.GroupID]*worker
	nudged  chan struct{} // closed and replaced by Nudge
}

// New starts an outbox, which goes on with what the state says is under way.
func New(o Options) *Outbox {
	if o.After == nil {
		o.After = time.After
	}
	if o.Exported == nil {
		o.Exported = func(int, int) {}
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	b := &Outbox{o: o, workers: map[queue.GroupID]*worker{}, nudged: make(chan struct{})}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.Installed()
	return b
}

// Applied takes what an applied command changed. It does not block.
func (b *Outbox) Applied(a queue.Applied) {
	for _, id := range a.Exports {
		b.look(id, false)
	}
	for _, id := range a.Groups {
		b.look(id, true)
	}
}

// Installed says that the state was replaced.
func (b *Outbox) Installed() {
	for _, g := range b.o.State.Groups() {
		b.look(g.ID, true)
	}
}

// Nudge makes what is parked try again at once: something has changed in the fleet. It does not block.
func (b *Outbox) Nudge() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.nudgeLocked()
}

func (b *Outbox) nudgeLocked() {
	close(b.nudged)
	b.nudged = make(chan struct{})
}

// look starts the worker of a group that has something to carry here, or tells the one that runs to look again.
func (b *Outbox) look(id queue.GroupID, nudge bool) {
	g, ok := b.o.State.Group(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	if w := b.workers[id]; w != nil {
		w.again = true
		if nudge {
			b.nudgeLocked()
		}
		return
	}
	if !ok || g.Exports == 0 || g.Home != b.o.Self || b.closed {
		return
	}
	w := newWorker(b, id)
	b.workers[id] = w
	b.tasks.Add(1)
	go w.run()
}

// ends takes a worker that found nothing to do off the list; false when there was news meanwhile.
func (b *Outbox) ends(w *worker) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.again && b.ctx.Err() == nil {
		w.again = false
		return false
	}
	delete(b.workers, w.id)
	return true
}

// Close stops everything and waits for it. It may be called more than once.
func (b *Outbox) Close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel()
	b.tasks.Wait()
}

// Parked is why a group's dead letters do not go on.
type Parked struct {
	Err    error // a *code.Error
	Since  time.Duration
	Number uint64        // the export number of the letter that waits
	At     queue.Address // its address
	Target uint64        // the shard that it is to go to; 0: none is chosen yet
	Queue  string        // the queue that the group names
}

// Parked tells why a group's dead letters do not go on; false while they do, or there are none, or the home is elsewhere.
func (b *Outbox) Parked(id queue.GroupID) (Parked, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.workers[id]
	if w == nil || w.parked == nil {
		return Parked{}, false
	}
	return *w.parked, true
}
