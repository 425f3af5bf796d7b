package queue

import (
	"bytes"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// NewShardFormatLevel is the format level that a new shard starts at.
const NewShardFormatLevel = 4

// maxFormatLevel is the highest level that this version can apply.
const maxFormatLevel = 4

// levelPurgedDead is the format level from which on the removal of a dead letter counts as purged.
const levelPurgedDead = 3

// levelLeaseBegun is the format level from which on a recorded lease keeps when it was handed out.
const levelLeaseBegun = 4

// LevelForget is the format level from which on a Retention may carry outboxes to forget.
const LevelForget = 3

// initialOptions are those of a shard until its first options command. They are part of the format, unlike defaults.
var initialOptions = QueueOptions{MaxBodyBytes: 1 << 20, MaxBytes: 16 << 30, MaxDelayMs: 30 * 24 * 3600 * 1000,
	DedupMs: 5 * 60 * 1000, Partitions: 1}

// Options of a QueueStateMachine are per process; they change nothing of what is stored.
type Options struct {
	// ProducerCache bounds the producers kept decoded in memory.
	//
	// Defaults to 1,024.
	ProducerCache int
}

// QueueStateMachine applies the six commands to one shard's key space, deterministically: what it stores and answers
// follows from the keys and the command alone. It has no clock, goroutine, random number or network.
//
// Apply is called by one goroutine, in order of index. The methods of Reader may be called by any, beside it: they
// see whole commands only. Nothing is durable before a Sync of the shard's store handle.
//
// Each command is one batch, which carries the applied index, so the store always holds the state of one index.
//
// Invariants, checked by Check: (1) the counters of meta are the sums over messages, parked messages, delayed
// entries and producers; (2) published = stored + reclaimed + purged + dropped + expired + cancelled; (3) a count
// record is the sum of its bucket; (4) no message in place lies at or below the line; (5) for each group, assigned =
// unfinished + acked + dead + exported + expired + purged + cancelled, and each of unfinished, dead, retrying and
// leased is what its keys say; (6) each lane's W is the address before its next unfinished position, or the last
// address, and not below W_floor, when the group last changed; (7) what a group has not finished exists; (8) dedup,
// operation and producer records and their mirrors by age agree; (9) the index by export number holds each group's numbered
// dead letters.
type QueueStateMachine struct {
	shard *store.Shard
	opts  Options

	// mu is held for writing while a command becomes visible, and guards what stands between it and the next blank.
	mu     sync.RWMutex
	meta   metaValue
	groups map[GroupID]*group // what it points to never changes
	ids    []GroupID          // keys of groups, sorted; replaced, not changed
	names  map[string]GroupID
	gone   *rangeSet    // what it points to never changes
	imp    *importValue // the import that is under way, nil for none; what it points to never changes

	// expiry is a hint for Chores; it decides nothing in apply.
	expiry expiryHint

	// The rest belongs to the goroutine that applies.

	producers map[Producer]*producerValue
	tail      bucketCount // a count record that is up to date, if known: that of the newest messages, mostly
	// Lower bounds of the least expiry of dedup ids and operations, and of the oldest use of a producer.
	dedupFrom, opFrom, useFrom Stamp
	// last is the applied event of the last command.
	last   Applied
	broken error
	// scratch is where values are encoded.
	scratch []byte
}

// State is the state machine of a shard.
type State = QueueStateMachine

// PoisonError says that a committed entry cannot be applied by this version: it does not decode, the state below it
// is corrupt, or our code panicked. Nothing of the entry was applied. The replica must stop; others may go on.
type PoisonError struct {
	Index   Index
	Command []byte // the entry, a copy
	Cause   error
	Stack   []byte // nil unless our code panicked
}

func (e *PoisonError) Error() string { return fmt.Sprintf("poison entry %s: %v", e.Index, e.Cause) }

// Unwrap returns the cause.
func (e *PoisonError) Unwrap() error { return e.Cause }

// fault carries an error of the store up to Apply or a read.
type fault struct{ err error }

// check panics with a fault unless err is nil.
func check(err error) {
	if err != nil {
		panic(fault{err})
	}
}

// recoverFault turns a fault into an error.
func recoverFault(err *error) {
	switch r := recover().(type) {
	case nil:
	case fault:
		*err = r.err
	default:
		panic(r)
	}
}

func openIter(r store.Reader, lower, upper []byte) *store.Iter {
	it, err := r.NewIter(lower, upper)
	check(err)
	return it
}

// Open reads a shard's state, or begins an empty one with default options. Errors are of the store, or ErrCorrupt.
func Open(shard *store.Shard, opts Options) (s *QueueStateMachine, err error) {
	if opts.ProducerCache == 0 {
		opts.ProducerCache = 1024
	}
	s = &QueueStateMachine{shard: shard, opts: opts, scratch: make([]byte, 0, 4096)}
	if err := s.Reload(); err != nil {
		return nil, err
	}
	return s, nil
}

// Reload reads everything again from the keys, as Open does.
func (s *QueueStateMachine) Reload() error { return s.ReloadAfter(func() error { return nil }) }

// ReloadAfter lets change replace the keys (the switch to an installed incarnation) and reads everything again from
// them. No read sees the one without the other. Call it in place of Apply. After an error the machine is unusable.
func (s *QueueStateMachine) ReloadAfter(change func() error) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("open state of shard %d: %w", s.shard.ID(), err)
		}
		s.broken = err
	}()
	defer recoverFault(&err)
	check(change())
	s.meta = loadMeta(s.shard)
	s.deriveLocked()
	return nil
}

func loadMeta(r store.Reader) metaValue {
	var m metaValue
	found, err := r.View(metaKey, m.decode)
	check(err)
	if !found {
		m.FormatLevel, m.nextGroup = NewShardFormatLevel, 1
		m.Options = initialOptions
	}
	return m
}

// AppliedIn reports whether key holds a shard's own state, and the applied index that value says then. It is for a copy of
// a shard's keys, before it is opened. An error is ErrCorrupt.
func AppliedIn(key, value []byte) (index Index, ok bool, err error) {
	if !bytes.Equal(key, metaKey) {
		return 0, false, nil
	}
	var m metaValue
	if err := m.decode(value); err != nil {
		return 0, true, err
	}
	return m.Applied, true, nil
}

func loadGroups(r store.Reader) (map[GroupID]*group, []GroupID, map[string]GroupID) {
	groups, names := make(map[GroupID]*group), make(map[string]GroupID)
	var ids []GroupID
	it := openIter(r, []byte{kindGroup}, []byte{kindGroup + 1})
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		check(err)
		g := loadGroup(r, GroupID(lastU64(it.Key())), v)
		groups[g.id], names[g.name] = g, g.id
		ids = append(ids, g.id)
	}
	check(it.Err())
	return groups, ids, names
}

// Apply applies one committed entry.
//
// An index at or below the applied one changes nothing and gives code.Unknown. A refusal is a result. Errors: a
// *PoisonError, or a failure of the store; after either nothing was applied, and every later call fails too.
// The command is not kept.
func (s *QueueStateMachine) Apply(index Index, cmd []byte) (result Result, err error) {
	s.last = Applied{}
	if index <= s.meta.Applied {
		return Result{Code: code.Unknown, Index: index, Clock: s.meta.Clock}, nil
	}
	if s.broken != nil {
		return Result{}, s.broken
	}
	defer func() {
		if r := recover(); r != nil {
			err = applyFailure(r, index, cmd)
		}
		if err != nil {
			s.broken = err
		}
	}()
	c, err := DecodeCommand(cmd)
	if err != nil {
		return Result{}, poison(index, cmd, err, nil)
	}
	return s.apply(index, c), nil
}

func applyFailure(r any, index Index, cmd []byte) error {
	f, isFault := r.(fault)
	switch {
	case !isFault:
		return poison(index, cmd, fmt.Errorf("panic: %v", r), debug.Stack())
	case errors.Is(f.err, ErrCorrupt), store.IsDamaged(f.err):
		return poison(index, cmd, f.err, nil)
	}
	return fmt.Errorf("apply %s: %w", index, f.err)
}

func poison(index Index, cmd []byte, cause error, stack []byte) error {
	return &PoisonError{Index: index, Command: append([]byte(nil), cmd...), Cause: cause, Stack: stack}
}

// LastApplied tells what the last Apply changed. Call it in the applying goroutine.
func (s *QueueStateMachine) LastApplied() Applied { return s.last }

// Shard returns the store handle.
func (s *QueueStateMachine) Shard() *store.Shard { return s.shard }

func (s *QueueStateMachine) apply(index Index, c Command) Result {
	t := s.newTx(index, c)
	defer t.close()
	result := Result{Code: code.OK}
	if err := validate(c); err != nil {
		result.Code = err.Code
	} else {
		t.dispatch(c, &result)
	}
	if t.imp == nil {
		t.forget()
	}
	t.commit()
	result.Index, result.Clock = index, t.meta.Clock
	return result
}

func (t *tx) dispatch(c Command, r *Result) {
	if !t.imp.mayApply(c) {
		r.Code = code.Unavailable
		return
	}
	switch c := c.(type) {
	case *Enqueue:
		t.enqueue(c, r)
	case *Ack:
		t.ack(c, r)
	case *Group:
		t.once(c.OperationID, groupFingerprint(c), r, func() { t.groupCommand(c, r) })
	case *Expire:
		t.expire(c, r)
	case *Home:
		t.homeCommand(c, r)
	case *Retention:
		t.once(c.OperationID, retentionFingerprint(c), r, func() { t.retention(c, r) })
	}
}

// tx is one command being applied: its batch, and copies of what it changes.
type tx struct {
	s     *QueueStateMachine
	b     *store.Batch
	r     store.Reader // what is committed and, when the batch is indexed, its own writes
	index Index
	stamp Stamp
	// clamped: the clock could not follow the stamp, so nothing is forgotten by age.
	clamped bool
	meta    metaValue

	edited  []*group
	deleted GroupID // the group that this command deletes
	gone    *rangeSet
	counts  []bucketCount
	tail    bucketCount

	producers []*producer           // used by this command
	dedups    map[dedupHash]Address // taken by this command

	goneCursor *rangeCursor
	cursors    []groupCursor
	event      Applied
	expiring   uint64 // messages appended with a time to live

	imp    *importValue // nil for none
	reload bool         // what is derived from the keys is to be read again

	key [64]byte
	val []byte
}

// newTx starts a command: it moves the clock.
func (s *QueueStateMachine) newTx(index Index, c Command) *tx {
	t := &tx{s: s, index: index, stamp: c.CommandStamp(), meta: s.meta, tail: s.tail, imp: s.imp}
	t.val = s.scratch[:0]
	if e, ok := c.(*Enqueue); ok && !s.mayDrop(e) {
		t.b = s.shard.NewBatch()
		t.r = s.shard
	} else {
		t.b = s.shard.NewIndexedBatch()
		t.r = t.b
	}
	t.meta.Applied = index
	t.meta.Clock, t.clamped = advance(s.meta.Clock, t.stamp)
	t.event = Applied{Index: index}
	return t
}

// maxClockStep is how far one command may move the shard's clock, in ms.
const maxClockStep Stamp = 3600 * 1000

// advance moves a shard's clock to a command's stamp, never back, and by at most maxClockStep except from 0.
func advance(clock, stamp Stamp) (now Stamp, clamped bool) {
	switch {
	case stamp <= clock:
		return clock, false
	case clock == 0 || stamp-clock <= maxClockStep:
		return stamp, false
	}
	return clock + maxClockStep, true
}

func (t *tx) close() {
	if t.goneCursor != nil {
		t.goneCursor.Close()
	}
	for _, c := range t.cursors {
		c.c.Close()
	}
	_ = t.b.Close()
}

// commit writes what is still in memory, and makes the command visible.
func (t *tx) commit() {
	for _, g := range t.edited {
		t.settle(g)
	}
	if t.gone != nil {
		t.flushRanges(t.gone)
	}
	t.writeCounts()
	t.b.Set(metaKey, t.meta.encode(t.val[:0]))
	s := t.s
	s.mu.Lock()
	defer s.mu.Unlock()
	check(s.shard.Commit(t.b))
	s.expiry.appended.Add(t.expiring) // after the commit: see Chores
	s.meta, s.tail, s.imp = t.meta, t.tail, t.imp
	if t.gone != nil {
		s.gone = t.gone
	}
	t.publishGroups()
	if t.reload {
		s.deriveLocked()
		t.event.Groups = append(t.event.Groups, s.ids...)
	}
	t.event.Last = t.meta.Last
	s.last = t.event
}

// publishGroups replaces what this command changed. Needs s.mu.
func (t *tx) publishGroups() {
	s := t.s
	for _, g := range t.edited {
		if s.groups[g.id] == nil {
			s.ids = append(slices.Clone(s.ids), g.id) // ids rise
			s.names[g.name] = g.id
		}
		s.groups[g.id] = g
	}
	if t.deleted != 0 {
		delete(s.names, s.groups[t.deleted].name)
		delete(s.groups, t.deleted)
		s.ids = slices.DeleteFunc(slices.Clone(s.ids), func(id GroupID) bool { return id == t.deleted })
	}
}

// bucketCount is a count record that the command changes.
type bucketCount struct {
	bucket uint64
	v      countValue
	known  bool
}

// count returns the record of an address's bucket, to be changed; valid until the next call.
func (t *tx) count(a Address) *countValue {
	b := bucketOf(a)
	for i := len(t.counts) - 1; i >= 0; i-- {
		if t.counts[i].bucket == b {
			return &t.counts[i].v
		}
	}
	c := bucketCount{bucket: b}
	if t.tail.known && t.tail.bucket == b {
		c.v = t.tail.v
	} else {
		_, err := t.r.View(appendKey1(t.key[:0], kindCount, b), c.v.decode)
		check(err)
	}
	t.counts = append(t.counts, c)
	return &t.counts[len(t.counts)-1].v
}

func (t *tx) writeCounts() {
	for i := range t.counts {
		c := &t.counts[i]
		key := appendKey1(t.key[:0], kindCount, c.bucket)
		if c.v.empty() {
			t.b.Delete(key)
		} else {
			t.b.Set(key, c.v.encode(t.val[:0]))
		}
		if c.bucket >= t.tail.bucket {
			t.tail = bucketCount{bucket: c.bucket, v: c.v, known: true}
		}
	}
	t.counts = nil
}
