// Package replica adapts a shard's queue.QueueStateMachine to dragonboat's IOnDiskStateMachine.
//
// It holds the rules that keep one shard's trouble out of the rest of the host, since dragonboat panics the process on
// most errors of a state machine:
//
//   - Update returns an error only for a failure of the store. A refusal is a result. On a poison entry it writes the
//     evidence, tells the host, and waits until the host stops the replica; nothing of the entry is applied.
//   - Open does the same when the state does not open.
//   - Sync fails on a poison entry alone, and only so that no snapshot is recorded: dragonboat counts the entry as applied,
//     and a record of it beside a store that has not applied it would panic every later start. PrepareSnapshot never
//     fails, and a snapshot prepared on a poison entry is not streamed. SaveSnapshot turns every error of its own into
//     ErrSnapshotAborted, which dragonboat tries again.
//   - RecoverFromSnapshot returns success, or ErrSnapshotStopped after the replica was stopped. A stream can be read
//     once, so after a failure it waits for the host to stop and start the replica; dragonboat then gives the same
//     snapshot again.
//
// The package does not know what a snapshot looks like: it takes an Installer.
package replica

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"

	sm "github.com/lni/dragonboat/v4/statemachine"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// Installer streams a shard's key space at one index.
type Installer interface {
	// Save writes the stream. each calls its argument with every key and value in order of key; they are valid during
	// the call only. Save returns the first error of w, of each, or its own, and io.EOF never; it ends early when stop is
	// closed.
	Save(w io.Writer, shard, index uint64, formatLevel uint32, each func(func(key, value []byte) error) error, stop <-chan struct{}) error
	// Load reads a stream of the shard to its end, verifies it, and calls set with every key and value. It returns the
	// index.
	Load(r io.Reader, shard uint64, set func(key, value []byte) error, stop <-chan struct{}) (index uint64, err error)
}

// Options of a replica. The hooks are called from dragonboat's goroutines: they must not block, nor call back into
// the replica's NodeHost from the same goroutine. All but Store and Installer may be nil.
type Options struct {
	Store     *store.Store
	Machine   queue.Options
	Installer Installer
	// EvidenceDir is where a poison entry is written, made when needed; "" writes nothing.
	EvidenceDir string
	// OnOpen gives the live state machine, for reads, before the first entry is applied.
	OnOpen func(shard, replica uint64, reader *queue.QueueStateMachine)
	// OnApplied tells what one Update changed, after it is visible.
	OnApplied func(shard, replica uint64, applied queue.Applied)
	// OnInstalled tells that a snapshot was installed and is durable.
	OnInstalled func(shard, replica uint64, index queue.Index)
	// OnCheckpoint gets a snapshot taken exactly after a checkpoint entry, and closes it.
	OnCheckpoint func(shard, replica, id uint64, index queue.Index, snapshot *store.Snapshot)
	// OnStuck tells that the replica waits to be stopped, from another goroutine, by NodeHost.StopReplica: its state
	// does not open, an entry is poison (err holds a *queue.PoisonError, and evidence is the file, if it was written),
	// or an install failed (then start it again).
	OnStuck func(shard, replica uint64, err error, evidence string)
	// MaySave refuses to stream a snapshot for now by an error.
	MaySave func(shard, replica uint64) error
	// OnSaveFailed hears why a snapshot was not streamed. It will be asked for again.
	OnSaveFailed func(shard, replica uint64, err error)
}

// Replica is one replica's state machine. Use it for one StartReplica only.
type Replica struct {
	opts           Options
	shard, replica uint64
	stopc          <-chan struct{} // of Open
	machine        atomic.Pointer[queue.QueueStateMachine]
	stuck          atomic.Bool // on a poison entry, which dragonboat counts as applied and the store does not
}

var _ sm.IOnDiskStateMachine = (*Replica)(nil)

// New makes the state machine that dragonboat asks for.
func New(shard, replica uint64, opts Options) *Replica {
	return &Replica{opts: opts, shard: shard, replica: replica}
}

// Create returns New as dragonboat wants it.
func Create(opts Options) sm.CreateOnDiskStateMachineFunc {
	return func(shard, replica uint64) sm.IOnDiskStateMachine { return New(shard, replica, opts) }
}

// Reader returns the live state for reads, nil before Open.
func (r *Replica) Reader() queue.Reader {
	if m := r.machine.Load(); m != nil {
		return m
	}
	return nil
}

// Machine returns the live state, nil before Open.
func (r *Replica) Machine() *queue.QueueStateMachine { return r.machine.Load() }

// Open implements IOnDiskStateMachine: it returns the applied index that the store holds.
func (r *Replica) Open(stopc <-chan struct{}) (uint64, error) {
	r.stopc = stopc
	m, err := r.open()
	if err != nil {
		r.waitStuck(err, "", stopc)
		return 0, sm.ErrOpenStopped
	}
	r.machine.Store(m)
	if r.opts.OnOpen != nil {
		r.opts.OnOpen(r.shard, r.replica, m)
	}
	return uint64(m.Meta().Applied), nil
}

func (r *Replica) open() (*queue.QueueStateMachine, error) {
	h, err := r.opts.Store.Shard(r.shard)
	if err != nil {
		return nil, err
	}
	return queue.Open(h, r.opts.Machine)
}

// waitStuck tells the host, and waits to be stopped.
func (r *Replica) waitStuck(err error, evidence string, stopc <-chan struct{}) {
	if r.opts.OnStuck != nil {
		r.opts.OnStuck(r.shard, r.replica, err, evidence)
	}
	<-stopc
}

// Update implements IOnDiskStateMachine. An entry's result has the code as its value and the encoded queue.Result as
// its data; both are zero for an entry that was not applied because the replica was stopped.
func (r *Replica) Update(entries []sm.Entry) ([]sm.Entry, error) {
	if r.stuck.Load() {
		<-r.stopc
		return entries, nil
	}
	var applied queue.Applied
	for i := range entries {
		e := &entries[i]
		result, err := r.apply(e)
		if err != nil {
			return entries, r.failed(err)
		}
		e.Result = sm.Result{Value: uint64(result.Code), Data: queue.EncodeResult(nil, &result)}
		merge(&applied, r.machine.Load().LastApplied())
	}
	if applied.Index != 0 && r.opts.OnApplied != nil {
		r.opts.OnApplied(r.shard, r.replica, applied)
	}
	return entries, nil
}

func (r *Replica) apply(e *sm.Entry) (queue.Result, error) {
	m := r.machine.Load()
	before := m.Checkpoint()
	result, err := m.Apply(queue.Index(e.Index), e.Cmd)
	if err != nil {
		return queue.Result{}, err
	}
	if id := m.Checkpoint(); id != before && r.opts.OnCheckpoint != nil {
		r.opts.OnCheckpoint(r.shard, r.replica, id, queue.Index(e.Index), m.Shard().Snapshot())
	}
	if result.Code == 0 {
		return queue.Result{}, fmt.Errorf("BUG: apply %d: the result has no code", e.Index)
	}
	return result, nil
}

// failed waits out a poison entry, and returns any other error.
func (r *Replica) failed(err error) error {
	var poison *queue.PoisonError
	if !errors.As(err, &poison) {
		return fmt.Errorf("update shard %d replica %d: %w", r.shard, r.replica, err)
	}
	r.stuck.Store(true)
	evidence, werr := r.writeEvidence(poison)
	r.waitStuck(errors.Join(err, werr), evidence, r.stopc)
	return nil
}

// merge adds what one entry changed to what an Update did.
func merge(all *queue.Applied, one queue.Applied) {
	if one.Index == 0 {
		return // skipped
	}
	all.Index, all.Last = one.Index, one.Last
	all.Appended = all.Appended || one.Appended
	all.Delayed = all.Delayed || one.Delayed
	all.Redrive = all.Redrive || one.Redrive
	all.Groups = join(all.Groups, one.Groups)
	all.Exports = join(all.Exports, one.Exports)
}

// join adds the ids that are not there.
func join(all, more []queue.GroupID) []queue.GroupID {
	for _, g := range more {
		if !slices.Contains(all, g) {
			all = append(all, g)
		}
	}
	return all
}

// Lookup implements IOnDiskStateMachine. The query is a func(queue.Reader) any, whose value is returned. An error of
// it is a value too.
func (r *Replica) Lookup(query any) (any, error) {
	f, ok := query.(func(queue.Reader) any)
	if !ok {
		return nil, fmt.Errorf("lookup in shard %d: %T is not a func(queue.Reader) any", r.shard, query)
	}
	m := r.machine.Load()
	if m == nil {
		return nil, code.New(code.Unavailable, "shard %d is not open", r.shard)
	}
	return f(m), nil
}

// Sync implements IOnDiskStateMachine: it waits until all that was applied is durable. A store that cannot flush tells
// its own OnFatal. On a poison entry it returns the error on which dragonboat records no snapshot and goes on.
func (r *Replica) Sync() error {
	if r.stuck.Load() {
		return errNoSnapshot()
	}
	r.machine.Load().Shard().Sync()
	return nil
}

// Close implements IOnDiskStateMachine. Reads go on: the store outlives the replica.
func (r *Replica) Close() error { return nil }
