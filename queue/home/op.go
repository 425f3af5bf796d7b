package home

import (
	"math"
	"slices"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// never is a boot time that does not come.
const never = time.Duration(math.MaxInt64)

const (
	// batchDelay and batchCount are when what waits is proposed beside what is in flight, whichever comes first.
	batchDelay = 20 * time.Millisecond
	batchCount = 32
	// ackPause is how long patient acks wait after the last command of acks for others, beside one that is in flight batchDelay, unless
	// ackCount wait. A command costs a group of three hosts as much as hundreds of acks.
	ackPause = 10 * time.Millisecond
	ackCount = 512
	// maxPipeline bounds the commands of one kind that a group has in flight: behind a slow quorum the next ones
	// grow instead.
	maxPipeline = 16
	// firstHold and maxHold bound the pause before a command that could not be queued is tried again.
	firstHold = 20 * time.Millisecond
	maxHold   = time.Second
)

// op is one ack or Expire entry from its decision until apply has answered, or the epoch has ended. It waits
// (batch nil) or belongs to exactly one batch. A waiting op may be withdrawn, a proposed one may not.
type op struct {
	e        *entry
	address  queue.Address
	expire   queue.ExpireEntry // Kind 0: an ack
	runOut   bool              // decided by the ledger: the lease ran out
	own      bool              // decided by the ledger: nobody needs to wait for it
	patient  bool              // an ack that may wait for others, and goes on without its caller
	canceled bool
	extends  bool          // of a record: a consumer asked for it, at asked
	deadline time.Duration // of a record: the lease's
	asked    time.Duration
	claim    *claimant // of a claim
	batch    *batch
	refs     []ref  // who waits for it
	one      [1]ref // room for the first of refs
	late     []ref  // acks that came while the lease was being recorded as run out
}

// ref is one item of a call.
type ref struct {
	c *call
	i int
}

// call collects the results of one Ack, Nack, Release, Reject, Extend, ClaimIdle, Redrive or PurgeDead. Guarded by the
// group's lock.
type call struct {
	results []ItemResult
	ops     []*op // by item; nil: resolved
	left    int
	done    chan struct{} // closed when left becomes 0
}

func newCall(items int) *call {
	return &call{results: make([]ItemResult, items), ops: make([]*op, items), left: items, done: make(chan struct{})}
}

// resolve sets one item's result, once.
func (r ref) resolve(res ItemResult) {
	c := r.c
	if c.results[r.i].Code != 0 {
		return
	}
	c.results[r.i], c.ops[r.i] = res, nil
	if c.left--; c.left == 0 {
		close(c.done)
	}
}

func resolveAll(refs []ref, res ItemResult) {
	for _, r := range refs {
		r.resolve(res)
	}
}

// plain is an outcome about which there is nothing more to say.
func plain(c code.Code) ItemResult {
	if c == code.OK {
		return ItemResult{Code: c, Effect: code.EffectDone}
	}
	return ItemResult{Code: c, Effect: code.EffectNone}
}

// join adds a waiting item to an op.
func (o *op) join(r ref) {
	if o.refs == nil {
		o.refs = o.one[:0]
	}
	o.refs = append(o.refs, r)
	r.c.ops[r.i] = o
}

// leave removes a call's items from an op.
func (o *op) leave(c *call) {
	mine := func(r ref) bool { return r.c == c }
	o.refs = slices.DeleteFunc(o.refs, mine)
	o.late = slices.DeleteFunc(o.late, mine)
}

// batch is one proposed command and what it decides.
type batch struct {
	command queue.Command
	from    *batcher
	ops     []*op // in the order of the command's items
	maybe   bool  // an attempt ended with an unknown outcome: an earlier copy may have been applied
}

// batcher gathers the acks, or the Expire entries, of one group into commands: at once when nothing is in flight,
// else with the next, never later than batchDelay or batchCount. While all that waits is patient, not before ackPause or ackCount.
type batcher struct {
	waiting  []*op
	hurry    bool          // not all of waiting is patient
	taken    time.Duration // when the last command was made
	since    time.Duration // when the first of waiting came
	inFlight int
	hold     time.Duration // not before this: the last attempt could not be queued
	pause    time.Duration // how long the last hold was
}

func (b *batcher) add(o *op, now time.Duration) {
	if len(b.waiting) == 0 {
		b.since, b.hurry = now, false
	}
	b.hurry = b.hurry || !o.patient
	b.waiting = append(b.waiting, o)
}

// due is when the next command should be proposed; never if not before something else happens.
func (b *batcher) due() time.Duration {
	switch {
	case len(b.waiting) == 0 || b.inFlight >= maxPipeline:
		return never
	case b.inFlight == 0 && !b.hurry && len(b.waiting) < ackCount:
		return max(b.taken+ackPause, b.hold)
	case b.inFlight == 0:
		return b.hold
	case len(b.waiting) >= ackCount || b.hurry && len(b.waiting) >= batchCount:
		return max(b.since, b.hold)
	}
	return max(b.since+batchDelay, b.hold)
}

// take makes a batch of what waits, at most one command's worth; nil if all of it was withdrawn.
func (b *batcher) take(now time.Duration) *batch {
	n := &batch{from: b}
	used := 0
	for _, o := range b.waiting {
		if len(n.ops) == queue.MaxHousekeeping {
			break
		}
		used++
		if !o.canceled {
			o.batch = n
			n.ops = append(n.ops, o)
		}
	}
	b.waiting = append(b.waiting[:0], b.waiting[used:]...)
	b.since = now
	if len(n.ops) == 0 {
		return nil
	}
	b.inFlight++
	b.taken = now
	return n
}

// settled takes back a batch that apply has answered.
func (b *batcher) settled() {
	b.inFlight--
	b.hold, b.pause = 0, 0
}

// unqueued takes back a batch that was never queued: its ops wait again, after a pause that doubles.
func (b *batcher) unqueued(n *batch, now time.Duration) {
	b.inFlight--
	for _, o := range n.ops {
		o.batch = nil
	}
	b.waiting = append(n.ops, b.waiting...)
	b.since, b.hurry = now, true
	b.rest(now)
}

// rest pauses before the next command, twice as long as the last time.
func (b *batcher) rest(now time.Duration) {
	b.pause = min(max(2*b.pause, firstHold), maxHold)
	b.hold = now + b.pause
}

// ranges turns sorted, distinct addresses of ops into ranges.
func ranges(ops []*op) []queue.AddressRange {
	var out []queue.AddressRange
	for _, o := range ops {
		if n := len(out); n > 0 && out[n-1].Last+1 == o.address {
			out[n-1].Last = o.address
			continue
		}
		out = append(out, queue.AddressRange{First: o.address, Last: o.address})
	}
	return out
}
