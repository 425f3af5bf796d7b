package node

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/node/outbox"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// raft is what a desk needs of the host for one shard; hostRaft implements it over host.RaftHost.
type raft interface {
	Propose(ctx context.Context, cmd []byte) (queue.Result, error)
	// ProposeAsync is a proposeFunc.
	ProposeAsync(cmd []byte, timeout time.Duration, done func(res queue.Result, copies int, err error))
	// InSync counts the full replicas that are in sync, this host's included.
	InSync() int
	// AwaitInSync is InSync after the first second of a new shard, or as soon as there are two.
	AwaitInSync(ctx context.Context) int
	// LowSpace names a host of the shard whose disk is nearly full, 0: none.
	LowSpace() uint64
	ReadIndex(ctx context.Context) error
	// Leader names the replica and host that lead now, as far as this host knows.
	Leader() (replica queue.ReplicaID, host uint64, term uint64, ok bool)
	Stamp() queue.Stamp
}

// fleet is what a desk needs to know of the other hosts.
type fleet interface {
	// Options are the queue's options as the catalog has them; false when the shard's queue is gone.
	Options(shard uint64) (queue.QueueOptions, bool)
	// Refresh brings what Options says to the catalog's state of now.
	Refresh(ctx context.Context) error
	// FullReplicas lists a shard's started full replicas with their hosts, by replica id.
	FullReplicas(shard uint64) []replicaHost
	// Alive says whether a host was heard of lately; this host is alive.
	Alive(host uint64) bool
	// Serves says whether a host is alive and runs a replica of a shard.
	Serves(host, shard uint64) bool
	// Gone lists those groups of a shard that exist no more, and never will; none when that cannot be told here now.
	Gone(ctx context.Context, shard uint64, groups []queue.GroupID) []queue.GroupID
}

type replicaHost struct {
	Replica queue.ReplicaID
	Host    uint64
}

// proposeTimeout bounds one proposal: after it the outcome is unknown.
const proposeTimeout = 5 * time.Second

// desk serves one full replica on this host: a batcher for publishes, a keeper for the groups whose home is here, and
// a housekeeper that acts while this host leads the shard. Safe for concurrent use.
type desk struct {
	shard   uint64
	self    queue.ReplicaID
	host    uint64
	reader  queue.Reader
	raft    raft
	fleet   fleet
	keeper  *home.Keeper
	receipt *home.Receipts
	batcher *batcher
	outbox  *outbox.Outbox // nil: the state has no exports
	boot    func() time.Duration
	metrics *metrics
	log     *zap.Logger

	hold       time.Duration // leaderHold, but in tests
	held       atomic.Int64  // bytes of publishes that wait for a leader
	leaderless atomic.Int64  // by boot, ns: when a publish first found no leader since one was heard of; 0: there is one
	leadership leadership
	level      *quorumLevel
	lags       func() bool   // a full replica is behind; never nil
	probing    atomic.Bool   // a barrier is on its way
	quorum     atomic.Uint32 // as it was last told in the log
	configured atomic.Bool   // the shard's options are the catalog's
	wake       chan struct{}
	groups     atomic.Bool   // groups changed since the housekeeper looked
	moved      atomic.Bool   // something was applied since the housekeeper looked
	tick       time.Duration // how often the housekeeper looks; 0: housekeepTick
	purging    chan struct{} // one place: purges that count run one after the other
	stop       context.CancelFunc
	done       sync.WaitGroup
}

type deskOptions struct {
	Shard      uint64
	Self       queue.ReplicaID
	Host       uint64
	Reader     queue.Reader
	Raft       raft
	Fleet      fleet
	Targets    outbox.Targets
	Level      *quorumLevel
	Lags       func() bool
	ReceiptKey []byte
	Boot       func() time.Duration
	Tick       time.Duration
	Metrics    *metrics
	Logger     *zap.Logger
}

func openDesk(o deskOptions) (*desk, error) {
	d := &desk{
		shard: o.Shard, self: o.Self, host: o.Host, reader: o.Reader, raft: o.Raft, fleet: o.Fleet, metrics: o.Metrics,
		boot: o.Boot, hold: leaderHold, tick: o.Tick, log: o.Logger.With(zap.Uint64("shard", o.Shard)), wake: make(chan struct{}, 1), purging: make(chan struct{}, 1),
	}
	d.level, d.lags = o.Level, o.Lags
	if d.level == nil {
		d.level = newQuorumLevel()
	}
	if d.lags == nil {
		d.lags = func() bool { return false }
	}
	k, err := home.NewKeeper(home.Options{
		Shard: o.Shard, Self: o.Self, Reader: o.Reader, Propose: d.proposeForHome, ReadIndex: o.Raft.ReadIndex, Stamp: o.Raft.Stamp,
		Boot: o.Boot, ReceiptKey: o.ReceiptKey, ProposeTimeout: proposeTimeout, Logger: d.log,
	})
	if err != nil {
		return nil, err
	}
	d.keeper, d.receipt = k, home.NewReceipts(o.ReceiptKey)
	d.batcher = newBatcher(o.Raft.ProposeAsync, o.Raft.Stamp, proposeTimeout, o.Metrics)
	if state, ok := o.Reader.(outbox.State); ok && o.Targets != nil {
		d.outbox = outbox.New(outbox.Options{
			Shard: o.Shard, Self: o.Self, State: state, Targets: o.Targets, Propose: d.proposeForHome, ReadIndex: o.Raft.ReadIndex, Stamp: o.Raft.Stamp,
			Now: o.Boot, Exported: o.Metrics.countExports, Logger: d.log,
		})
	}
	d.groups.Store(true)
	d.moved.Store(true)
	ctx, cancel := context.WithCancel(context.Background())
	d.stop = cancel
	d.done.Add(1)
	go func() {
		defer d.done.Done()
		d.housekeep(ctx)
	}()
	return d, nil
}

// Close stops the desk; homes that have not been released before are left to be replaced.
func (d *desk) Close(ctx context.Context) error {
	d.stop()
	d.batcher.Close()
	if d.outbox != nil {
		d.outbox.Close()
	}
	err := d.keeper.Close(ctx)
	d.done.Wait()
	return err
}

// propose encodes and commits one command.
func (d *desk) propose(ctx context.Context, cmd queue.Command) (queue.Result, error) {
	raw, err := queue.EncodeCommand(nil, cmd)
	if err != nil {
		return queue.Result{}, code.New(code.Internal, "%v", err)
	}
	return d.raft.Propose(ctx, raw)
}

// proposeForHome is propose for a home, which proposes what it has decided again until apply answers: it does not wait for a
// leader that is no more.
func (d *desk) proposeForHome(ctx context.Context, cmd queue.Command) (queue.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.leadership.current(), cancel)()
	return d.propose(ctx, cmd)
}

// proposed turns a result's refusal into an error.
func (d *desk) proposed(ctx context.Context, cmd queue.Command) (queue.Result, error) {
	if err := queue.Validate(cmd); err != nil {
		return queue.Result{}, err
	}
	res, err := d.propose(ctx, cmd)
	if err != nil {
		return res, err
	}
	return res, refusal(res)
}

func refusal(res queue.Result) error {
	switch res.Code {
	case code.OK:
		return nil
	case code.Unknown:
		return code.Maybe(code.QuorumLost, nil, "the outcome is unknown: look, then repeat")
	}
	return &code.Error{Code: res.Code, Effect: code.EffectNone}
}

// applied is called in the apply goroutine: it must not block.
func (d *desk) applied(a queue.Applied) {
	d.keeper.Applied(a)
	if d.outbox != nil {
		d.outbox.Applied(a)
	}
	if len(a.Groups) > 0 {
		d.groups.Store(true)
	}
	d.moved.Store(true)
}

// nudge wakes the housekeeper, and what waits for other queues: a leader or the catalog has changed.
func (d *desk) nudge() {
	if d.outbox != nil {
		d.outbox.Nudge()
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// leads says whether this host leads the shard now, as far as it knows.
func (d *desk) leads() bool {
	r, _, _, ok := d.raft.Leader()
	return ok && r == d.self
}

// publish sends a publish through the batcher, after the shard has its options.
func (d *desk) publish(ctx context.Context, p queue.Publish, delays, ttls []time.Duration, queued func()) publishOutcome {
	if !d.configured.Load() {
		if err := d.configure(ctx); err != nil {
			return publishOutcome{err: err}
		}
	}
	// Checked alone: in a batch, one bad publish would fail those of others.
	if err := queue.Validate(&queue.Enqueue{Stamp: 1, Publishes: []queue.Publish{p}}); err != nil {
		return publishOutcome{err: err}
	}
	if err := d.hint(&p, delays); err != nil {
		return publishOutcome{err: err}
	}
	if low := d.raft.LowSpace(); low != 0 {
		return publishOutcome{err: &code.Error{
			Code: code.StorageHighWatermark, Effect: code.EffectNone, RetryAfterMs: 1000,
			Text: fmt.Sprintf("the disk of host %d is nearly full: publishes are refused and consumers go on; consume, purge, or add space", low),
		}}
	}
	strict := d.reader.Meta().Options.Durability == queue.DurabilityStrict
	if strict && d.raft.AwaitInSync(ctx) < 2 {
		return publishOutcome{err: &code.Error{Code: code.InSyncNotEnough, Effect: code.EffectNone, RetryAfterMs: 500}}
	}
	if d.quorumState() == quorumReadOnly {
		return publishOutcome{err: &code.Error{Code: code.ReadOnlyDegraded, Effect: code.EffectNone, RetryAfterMs: readOnlyRetry,
			Text: "the partition has no quorum for writes in time" + d.silentHosts() + ", nothing was stored: repeat after a pause"}}
	}
	out := d.batcher.Publish(ctx, p, delays, ttls, queued)
	if out.err == nil && strict && out.copies < 2 {
		// It is stored, but not as the queue demands: only a repeat can tell when it is.
		out.err = code.Maybe(code.QuorumLost, nil, "stored on one disk only, and the queue is strict: repeat with the same producer id and seq")
	}
	return out
}

// hint refuses early what apply would refuse, and what apply cannot know.
func (d *desk) hint(p *queue.Publish, delays []time.Duration) error {
	meta := d.reader.Meta()
	if meta.Retired {
		return code.New(code.QueueRetired, "")
	}
	for i := range p.Messages {
		if n := len(p.Messages[i].Body); n > int(meta.Options.MaxBodyBytes) {
			return code.New(code.TooLarge, "messages[%d].body: %d bytes, this queue allows %d: send less, or raise the queue's max body bytes", i, n, meta.Options.MaxBodyBytes)
		}
	}
	for i, delay := range delays {
		if limit := meta.Options.MaxDelayMs; uint64(delay.Milliseconds()) > limit {
			return code.New(code.DelayTooLong, "messages[%d].delay_ms: %d, this queue allows %d", i, delay.Milliseconds(), limit)
		}
	}
	return nil
}

// configure brings the shard's options to the catalog's. Proposing them twice does no harm: a change names the version
// that it was decided on.
func (d *desk) configure(ctx context.Context) error {
	want, ok := d.fleet.Options(d.shard)
	fresh := false
	for range 4 {
		if !ok {
			return code.New(code.UnknownQueue, "")
		}
		have := d.reader.Meta().Options
		if have.Version > 0 && sameOptions(have, want) {
			d.configured.Store(true)
			return nil
		}
		if !fresh {
			// The local view may be older than what the shard has: only the catalog itself may change it.
			if err := d.fleet.Refresh(ctx); err != nil {
				return err
			}
			fresh = true
			want, ok = d.fleet.Options(d.shard)
			continue
		}
		next := want
		next.Version = have.Version
		_, err := d.proposed(ctx, &queue.Retention{Stamp: d.raft.Stamp(), Options: &next})
		if err != nil && !isCode(err, code.MutationFenced) {
			return err
		}
	}
	return code.New(code.Unavailable, "the queue's options are being changed: repeat after a pause")
}

// sameOptions compares what both sides decide; versions count separately.
func sameOptions(a, b queue.QueueOptions) bool {
	a.Version, b.Version = 0, 0
	return a == b
}

func isCode(err error, c code.Code) bool {
	e, ok := err.(*code.Error)
	return ok && e.Code == c
}

// createGroup makes a group; FirstHome 0 chooses one of the alive full replicas by a hash of shard and name.
func (d *desk) createGroup(ctx context.Context, name string, cfg queue.GroupConfig, start queue.Start, first queue.ReplicaID, op uint64) (queue.GroupInfo, error) {
	if first == 0 {
		first = d.spread(name)
	}
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return queue.GroupInfo{}, code.New(code.InvalidArgument, "%v", err)
	}
	res, err := d.proposed(ctx, &queue.Group{
		Stamp: d.raft.Stamp(), Op: queue.GroupCreate, OperationID: op, Name: name, Start: start, Config: cfg, FirstHome: first,
	})
	if err != nil {
		return queue.GroupInfo{}, err
	}
	g, ok := d.reader.Group(res.Group)
	if !ok {
		return g, code.New(code.UnknownGroup, "group %q was deleted at once", name)
	}
	return g, nil
}

// group finds a group by name, after a read barrier if it is not known here yet.
func (d *desk) group(ctx context.Context, name string) (queue.GroupInfo, error) {
	if g, ok := d.reader.GroupByName(name); ok {
		return g, nil
	}
	if err := d.raft.ReadIndex(ctx); err != nil {
		return queue.GroupInfo{}, err
	}
	if g, ok := d.reader.GroupByName(name); ok {
		return g, nil
	}
	return queue.GroupInfo{}, code.New(code.UnknownGroup, "group %q does not exist: create it with `tierq group create QUEUE %s`", name, name)
}
