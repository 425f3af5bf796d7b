package outbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// Points at which a world may fail, in the order in which an export comes to them.
const (
	beforePropose = "before the proposal"
	afterPropose  = "after the proposal was applied"
	beforePublish = "before the publish"
	afterPublish  = "after the publish was applied"
)

const (
	sourceShard = 11
	stamp0      = queue.Stamp(1_700_000_000_000)
)

// world is a source shard and the shards of the queues that its groups name, all in memory: real states, and instead of a
// fleet the test decides what fails.
type world struct {
	t   *testing.T
	mu  sync.Mutex
	st  map[uint64]*queuetest.Machine
	now queue.Stamp
	// queues says which shard a name stands for; down which shards do not answer.
	queues map[string]uint64
	// route replaces queues, if set.
	route func(d *queue.DeadLetter) uint64
	down  map[uint64]error
	// at is asked at every point; an error fails the call there.
	at func(point string, entries []queue.ExpireEntry) error
	// timers are the pauses that were begun; a test ends them.
	timers chan chan time.Time
	boxes  []*Outbox
	pubs   int
}

func newWorld(t *testing.T, config queue.GroupConfig) *world {
	w := &world{t: t, now: stamp0, st: map[uint64]*queuetest.Machine{}, queues: map[string]uint64{}, down: map[uint64]error{},
		at: func(string, []queue.ExpireEntry) error { return nil }, timers: make(chan chan time.Time, 1000)}
	w.shard("source", sourceShard)
	config.EnsureDefaults()
	w.do(sourceShard, &queue.Group{Stamp: stamp0, Op: queue.GroupCreate, OperationID: 1, Name: "g", Config: config, FirstHome: 1})
	t.Cleanup(func() {
		for _, b := range w.boxes {
			b.Close()
		}
	})
	return w
}

func deadLetterQueue(name string) queue.GroupConfig { return queue.GroupConfig{DeadLetterQueue: name} }

func (w *world) shard(name string, shard uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queues[name] = shard
	w.st[shard] = queuetest.Open(w.t, queuetest.OpenStore(w.t), shard)
}

func (w *world) do(shard uint64, c queue.Command) queue.Result {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.doLocked(shard, c)
}

func (w *world) doLocked(shard uint64, c queue.Command) queue.Result {
	r := w.st[shard].Do(c)
	if shard == sourceShard {
		for _, b := range w.boxes {
			b.Applied(w.st[shard].LastApplied())
		}
	}
	return r
}

func (w *world) group() queue.GroupInfo {
	g, ok := w.st[sourceShard].Group(1)
	require.True(w.t, ok)
	return g
}

// die publishes messages to the source and makes dead letters of them.
func (w *world) die(bodies ...string) {
	w.t.Helper()
	e := &queue.Enqueue{Stamp: w.now, Publishes: []queue.Publish{{}}}
	for _, b := range bodies {
		e.Publishes[0].Messages = append(e.Publishes[0].Messages, queue.Message{Body: []byte(b), Key: []byte("k" + b), Headers: []queue.Header{{Name: "own", Value: []byte(b)}}})
	}
	w.dieOf(e)
}

func (w *world) dieOf(e *queue.Enqueue) {
	w.t.Helper()
	r := w.do(sourceShard, e)
	x := &queue.Expire{Stamp: w.now, Group: 1, Epoch: w.group().Epoch}
	for _, m := range r.Publishes[0].Messages {
		require.Equal(w.t, code.OK, m.Code)
		x.Entries = append(x.Entries, queue.ExpireEntry{Kind: queue.ExpireDead, Address: m.Address, Attempts: 5, Reason: "broken"})
	}
	for _, r := range w.do(sourceShard, x).Expires {
		require.True(w.t, r.Applied)
	}
}

// move makes another replica the home.
func (w *world) move(to queue.ReplicaID) {
	g := w.group()
	r := w.do(sourceShard, &queue.Home{Stamp: w.now, Group: 1, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: to})
	require.Equal(w.t, code.OK, r.Code)
}

// open starts the outbox of a replica.
func (w *world) open(self queue.ReplicaID) *Outbox {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := New(Options{
		Shard: sourceShard, Self: self, State: w.st[sourceShard], Targets: w, Propose: w.propose,
		ReadIndex: func(context.Context) error { return nil }, Stamp: func() queue.Stamp { return w.now },
		Now: func() time.Duration { return 0 }, Logger: zap.NewNop(),
		After: func(time.Duration) <-chan time.Time {
			c := make(chan time.Time, 1)
			w.timers <- c
			return c
		},
	})
	w.boxes = append(w.boxes, b)
	return b
}

func (w *world) propose(_ context.Context, cmd queue.Command) (queue.Result, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := cmd.(*queue.Expire)
	if err := w.at(beforePropose, x.Entries); err != nil {
		return queue.Result{}, err
	}
	r := w.doLocked(sourceShard, cmd)
	return r, w.at(afterPropose, x.Entries)
}

func (w *world) Source() (string, uint32, bool) { return "source", 0, true }

func (w *world) Route(_ context.Context, name string, d *queue.DeadLetter) (Target, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	shard, ok := w.queues[name]
	if w.route != nil {
		shard, ok = w.route(d), true
	}
	if !ok {
		return Target{}, code.New(code.UnknownQueue, "queue %q does not exist", name)
	}
	return Target{Shard: shard, MaxBodyBytes: int(w.st[shard].Meta().Options.MaxBodyBytes)}, nil
}

func (w *world) Gone(_ context.Context, shard uint64) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.st[shard] == nil, nil
}

func (w *world) Publish(_ context.Context, shard uint64, p queue.Publish) (queue.PublishResult, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.at(beforePublish, nil); err != nil {
		return queue.PublishResult{}, err
	}
	w.pubs++
	m := w.st[shard]
	if m == nil {
		return queue.PublishResult{}, code.New(code.UnknownQueue, "shard %d is not there", shard)
	}
	if err := w.down[shard]; err != nil {
		return queue.PublishResult{}, err
	}
	e := &queue.Enqueue{Stamp: w.now, Publishes: []queue.Publish{p}}
	if err := queue.Validate(e); err != nil {
		return queue.PublishResult{}, err
	}
	r := m.Do(e)
	if r.Code != code.OK {
		return queue.PublishResult{}, &code.Error{Code: r.Code, Effect: code.EffectNone}
	}
	return r.Publishes[0], w.at(afterPublish, nil)
}

// tick ends the next pause, which it waits for.
func (w *world) tick() {
	w.t.Helper()
	select {
	case c := <-w.timers:
		c <- time.Time{}
	case <-time.After(90 * time.Second):
		w.t.Fatal("nobody pauses")
	}
}

// paused waits for the next pause, and lets it last.
func (w *world) paused() {
	w.t.Helper()
	select {
	case <-w.timers:
	case <-time.After(90 * time.Second):
		w.t.Fatal("nobody pauses")
	}
}

// bodies are the messages of a shard, in order of address.
func (w *world) bodies(shard uint64) (out []string) {
	w.t.Helper()
	for _, m := range w.messages(shard) {
		out = append(out, string(m.Body))
	}
	return out
}

func (w *world) messages(shard uint64) []queue.StoredMessage {
	w.t.Helper()
	var all []queue.StoredMessage
	for from := queue.Address(0); ; {
		list, next, err := w.st[shard].Browse(from, 1000, 1<<30)
		require.NoError(w.t, err)
		if all = append(all, list...); next == 0 {
			return all
		}
		from = next
	}
}

// done waits until nothing is left to export.
func (w *world) done() {
	w.t.Helper()
	require.Eventually(w.t, func() bool { return w.group().Exports == 0 }, 90*time.Second, time.Millisecond)
}

// idle waits until no goroutine of an outbox is left.
func (w *world) idle(b *Outbox) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.workers) == 0
	}, 90*time.Second, time.Millisecond)
}

// same demands that replays of all logs give equal states.
func (w *world) same() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.st {
		if m != nil {
			m.RequireSame()
		}
	}
}

func names(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("%03d", i))
	}
	return out
}

func header(m queue.StoredMessage, name string) string {
	for _, h := range m.Headers {
		if h.Name == name {
			return string(h.Value)
		}
	}
	return ""
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }

var errCrash = errors.New("crash")
