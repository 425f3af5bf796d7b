package home

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// claimant is who gets one claimed message, and what it got.
type claimant struct {
	take
	got Delivery
}

// claimReason is the reason of the failure by which a claim of the last attempt makes a dead letter.
const claimReason = "taken from an idle consumer"

// ClaimRequest asks for messages that other consumers hold and do nothing with.
type ClaimRequest struct {
	// Consumer gets them: its name counts as in a receive.
	Consumer string
	// MinIdle is how long ago a lease was handed out, extended, or taken over from another home: 0 to MaxLease.
	MinIdle time.Duration
	// Max bounds the messages: 0 means 1, at most MaxReceive. MaxBytes bounds their bytes: 0 means
	// DefaultReceiveBytes, and the first is taken whatever its size.
	Max, MaxBytes int
	// Lease overrides the group's lease when HasLease is set: 0 to MaxLease.
	Lease    time.Duration
	HasLease bool
}

// Claimed is what a claim brought.
type Claimed struct {
	// Deliveries are the messages that the claimer holds now, those first that were idle longest. Each has counted an
	// attempt.
	Deliveries []Delivery
	// Dead counts the messages that had no attempt left: they are dead letters.
	Dead int
	// Skipped counts those that were settled or purged in the same moment, for which the claimer had no room any more, or
	// whose group was being moved: these are ready at its new home, and have counted an attempt.
	Skipped int
}

// ClaimIdle takes over leases that have been idle for a while: each counts an attempt as if it had run out, the
// receipt of its former holder is refused from then on, and the claimer has a new one. Nothing is claimed whose
// settling is under way. OK is given after apply. Refusals are those of Receive; a claim waits for the home's epoch
// and lease. In a group with a single active consumer another one gets nothing, unless all leases of the active one
// are claimed: then it takes its place.
//
// After DeadlineExceeded and QuorumLost, Effect Maybe, messages may have been claimed and given back at once, or be
// claimed later: they are then ready for everybody.
func (k *Keeper) ClaimIdle(ctx context.Context, group string, req ClaimRequest) (Claimed, error) {
	if err := req.check(); err != nil {
		return Claimed{}, err
	}
	if ctx.Err() != nil {
		return Claimed{}, ended(ctx)
	}
	g, err := k.group(group)
	if err != nil {
		return Claimed{}, err
	}
	g.mu.Lock()
	c, ops, led, err := g.beginClaim(ctx, &req)
	g.mu.Unlock()
	if err != nil || len(ops) == 0 {
		return Claimed{}, err
	}
	results := g.finish(ctx, c)
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.claimed(ctx, led, ops, results)
}

func (r *ClaimRequest) check() error {
	switch {
	case r.MinIdle < 0 || r.MinIdle > MaxLease:
		return code.New(code.InvalidArgument, "min idle is %v: allow 0 to %v", r.MinIdle, MaxLease)
	default:
		receive := ReceiveRequest{Max: r.Max, MaxBytes: r.MaxBytes, Lease: r.Lease, HasLease: r.HasLease, Consumer: r.Consumer}
		return receive.check()
	}
}

// beginClaim waits until deliveries may start and begins an Expire entry for each lease that is idle.
func (g *group) beginClaim(ctx context.Context, req *ClaimRequest) (*call, []*op, *Ledger, error) {
	g.opening++
	defer func() { g.opening-- }()
	err := g.awaitOr(ctx, true, func() (bool, error) {
		if err := g.enter(); err != nil {
			return false, err
		}
		return g.led != nil && g.k.gate(&g.term, g.k.o.Boot()) == GateOpen, nil
	})
	switch {
	case err != nil:
		return nil, nil, nil, err
	case g.isPaused():
		return nil, nil, nil, code.New(code.GroupPaused, "group %q or its queue is paused: resume it", g.info.Name)
	case g.info.Config.SingleActiveConsumer && req.Consumer == "":
		return nil, nil, nil, code.New(code.InvalidArgument, "group %q has a single active consumer: name the consumer", g.info.Name)
	}
	l, now, stamp := g.led, g.k.o.Boot(), g.k.o.Stamp()
	t := take{max: max(req.Max, 1), maxBytes: req.MaxBytes, lease: ms(l.cfg.LeaseMs), consumer: req.Consumer}
	if req.HasLease {
		t.lease = req.Lease
	}
	if t.maxBytes == 0 {
		t.maxBytes = DefaultReceiveBytes
	}
	if stamp == 0 {
		return nil, nil, nil, code.New(code.ClockSkew, "")
	}
	idle, err := l.idleLeases(t, req.MinIdle, now)
	if err != nil {
		g.fault(err)
		return nil, nil, nil, code.New(code.Internal, "reading the messages of group %q", g.info.Name)
	}
	c := newCall(len(idle))
	ops := make([]*op, len(idle))
	for i, e := range idle {
		ops[i] = l.claim(e, t, now)
		ops[i].join(ref{c, i})
	}
	g.pump()
	return c, ops, l, nil
}

// claimed collects what a claim brought. It is the moment at which the deliveries start: if the home may not start any,
// or the caller is gone, they are given back.
func (g *group) claimed(ctx context.Context, led *Ledger, ops []*op, results []ItemResult) (Claimed, error) {
	var out Claimed
	var failed *ItemResult
	for i, res := range results {
		switch {
		case res.Dead:
			out.Dead++
		case res.Code == code.OK:
			out.Deliveries = append(out.Deliveries, ops[i].claim.got)
		case res.Code == code.Skipped || res.Code == code.UnknownMessage || res.Code == code.ConsumerLimit:
			out.Skipped++
		default:
			failed = &results[i]
		}
	}
	if err := g.startClaimed(ctx, led, out.Deliveries); err != nil {
		return Claimed{}, err
	}
	if failed != nil && len(out.Deliveries)+out.Dead == 0 {
		if failed.Code == code.NotOwner || failed.Code == code.StaleOwner {
			return Claimed{}, g.notOwner()
		}
		return Claimed{}, &code.Error{Code: failed.Code, Effect: failed.Effect}
	}
	return out, nil
}

func (g *group) startClaimed(ctx context.Context, led *Ledger, ds []Delivery) error {
	if len(ds) == 0 {
		return nil
	}
	now := g.k.o.Boot()
	open := g.led == led && g.k.gate(&g.term, now) == GateOpen
	if !open || ctx.Err() != nil {
		if g.led == led {
			led.undo(ds, now)
			g.pump()
		}
		if ctx.Err() != nil {
			return ended(ctx)
		}
		return &code.Error{Code: code.Unavailable, Effect: code.EffectMaybe,
			Text: "the home of group " + g.info.Name + " may not hand out any more: what was claimed is ready for everybody"}
	}
	r := Receipt{Shard: g.k.o.Shard, Recovery: g.recovery, Group: g.id}
	for i := range ds {
		r.Lease, r.Address = ds[i].lease, ds[i].Message.Address
		ds[i].Receipt = g.k.receipts.Encode(r)
	}
	return nil
}

// idleLeases finds the leases that a consumer may claim, those first that were idle longest.
func (l *Ledger) idleLeases(t take, minIdle, now time.Duration) ([]*entry, error) {
	var idle []*entry
	for _, e := range l.leases.items {
		if now-e.touched >= minIdle && e.deadline > now {
			idle = append(idle, e)
		}
	}
	slices.SortFunc(idle, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.touched, b.touched), cmp.Compare(a.address, b.address))
	})
	if !l.mayReplace(t, idle) {
		return nil, nil
	}
	room := l.claimRoom(t.consumer)
	bytes, n := 0, 0
	for _, e := range idle {
		if e.consumer.name != t.consumer {
			if room == 0 {
				continue
			}
			room--
		}
		page, _, err := l.reader.Deliverables(l.id, e.address, 1, true)
		if err != nil {
			return nil, err
		}
		if len(page) > 0 && page[0].Address == e.address {
			if bytes += page[0].Size; n > 0 && bytes > t.maxBytes {
				break
			}
		}
		idle[n] = e
		if n++; n == t.max {
			break
		}
	}
	if !l.mayReplace(t, idle[:n]) { // another's leases, or the bytes, have left too little room
		return nil, nil
	}
	return idle[:n], nil
}

// claimRoom is how many messages of others a consumer may take over: the group's limit is not touched by that.
func (l *Ledger) claimRoom(name string) int {
	own := int(l.cfg.MaxInFlightPerConsumer)
	if own == 0 || name == "" {
		return int(l.cfg.MaxInFlight)
	}
	if c := l.holders[name]; c != nil {
		own -= c.held
	}
	return max(own, 0)
}

// mayReplace says whether a consumer may claim at all: with a single active consumer it is the active one, or takes
// over everything that the active one holds, one claim at a time.
func (l *Ledger) mayReplace(t take, idle []*entry) bool {
	a := l.active
	switch {
	case !l.cfg.SingleActiveConsumer:
		return true
	case l.replacing():
		return false
	case a == nil || a.name == t.consumer:
		return true
	case len(idle) < a.held || t.max < a.held || l.claimRoom(t.consumer) < a.held:
		return false
	}
	held := 0
	for _, e := range idle {
		if e.consumer == a {
			held++
		}
	}
	return held == a.held
}

// claim begins to take a message from its holder. Without an attempt left it becomes a dead letter.
func (l *Ledger) claim(e *entry, t take, now time.Duration) *op {
	from := e.consumer.name
	var o *op
	if attempts := e.attempts + 1; attempts >= l.cfg.MaxAttempts {
		o = l.decide(e, queue.ExpireEntry{Kind: queue.ExpireDead, Attempts: attempts, Reason: claimReason}, now)
	} else {
		o = l.decide(e, queue.ExpireEntry{Kind: queue.ExpireClaim}, now)
		o.claim = &claimant{take: t}
	}
	if l.cfg.SingleActiveConsumer && from != t.consumer {
		l.claims = append(l.claims, o)
	}
	return o
}

// replacing says whether a claim that makes another consumer the single active one is unanswered.
func (l *Ledger) replacing() bool {
	l.claims = slices.DeleteFunc(l.claims, func(o *op) bool { return o.e.exp != o })
	return len(l.claims) > 0
}

// claimed takes an applied claim: the old lease is over, and the claimer gets a new one, if it is still there.
func (l *Ledger) claimed(o *op, r queue.ExpireResult, now time.Duration, stamp queue.Stamp) error {
	e := o.e
	e.attempts = r.Attempts
	l.counters.failed++
	l.unhold(e)
	e.forget()
	if len(o.refs) == 0 || l.leaving { // while the group is being moved no delivery starts
		l.requeue(e, 0)
		resolveAll(o.refs, plain(code.Skipped))
		return nil
	}
	if l.claimRoom(o.claim.consumer) == 0 { // it has received meanwhile
		l.requeue(e, 0)
		resolveAll(o.refs, plain(code.ConsumerLimit))
		return nil
	}
	m, ok, err := l.load(l.reader, e, stamp)
	if err != nil {
		l.requeue(e, 0)
	}
	if err != nil || !ok {
		resolveAll(o.refs, plain(code.UnknownMessage))
		return err
	}
	if l.cfg.SingleActiveConsumer {
		l.retire()
	}
	o.claim.got = l.lend(e, m, o.claim.take, now, stamp)
	if l.cfg.SingleActiveConsumer {
		l.active = e.consumer
	}
	resolveAll(o.refs, plain(code.OK))
	return nil
}
