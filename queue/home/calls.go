package home

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// callTimeout bounds a call whose ctx has no deadline.
const callTimeout = 30 * time.Second

// Ack finishes messages by receipt. Code OK is given only after apply. Every item has its own result (ItemResult); an
// error is about the whole call, and then nothing was tried: UnknownGroup, NotOwner, BatchEmpty, BatchTooLarge,
// ShuttingDown.
//
// The call returns by the deadline of ctx, or after 30 s if it has none. Items whose command apply has not answered
// by then are QuorumLost, Effect Maybe, and the home goes on until it is answered: until then the message gets no
// new lease. The same ack may be sent again; it learns the outcome.
func (k *Keeper) Ack(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return k.ack(ctx, group, receipts, false)
}

// AckPatiently is Ack for callers of whom nobody waits for the answer: it may come up to ackPause later, with those of other acks.
func (k *Keeper) AckPatiently(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return k.ack(ctx, group, receipts, true)
}

func (k *Keeper) ack(ctx context.Context, group string, receipts []string, patient bool) ([]ItemResult, error) {
	return k.settle(ctx, group, len(receipts), func(i int) string { return receipts[i] },
		func(l *Ledger, r Receipt, by ref, at moment) (code.Code, error) { return l.ack(r, patient, by, at.now) })
}

// Nack gives messages back as failed: each comes again after the group's backoff or the item's delay, or is a dead
// letter if this was its last attempt. OK is given after apply. See Ack for errors and unknown outcomes.
func (k *Keeper) Nack(ctx context.Context, group string, items []NackItem) ([]ItemResult, error) {
	return k.settle(ctx, group, len(items), func(i int) string { return items[i].Receipt },
		func(l *Ledger, r Receipt, by ref, at moment) (code.Code, error) {
			n := items[by.i]
			if n.HasDelay && (n.Delay < 0 || n.Delay > MaxLease) {
				return code.InvalidArgument, nil
			}
			return l.nack(r, n, by, at.now, at.stamp), nil
		})
}

// Release gives messages back at once and without counting a failure. See Ack for errors and unknown outcomes.
func (k *Keeper) Release(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return k.settle(ctx, group, len(receipts), func(i int) string { return receipts[i] },
		func(l *Ledger, r Receipt, by ref, at moment) (code.Code, error) { return l.release(r, by, at.now), nil })
}

// Reject makes messages dead letters now, whatever attempts are left. OK is given after apply. See Ack for errors and
// unknown outcomes.
func (k *Keeper) Reject(ctx context.Context, group string, items []RejectItem) ([]ItemResult, error) {
	return k.settle(ctx, group, len(items), func(i int) string { return items[i].Receipt },
		func(l *Ledger, r Receipt, by ref, at moment) (code.Code, error) {
			return l.reject(r, items[by.i].Reason, by, at.now), nil
		})
}

// Extend sets the deadlines of leases; 0 lets a lease run out now, which counts. OK is given once apply has recorded it,
// so it holds at every later home too. InvalidArgument says that the lease would last longer than MaxLease from its
// hand-out, as far as this home knows that. See Ack for errors and unknown outcomes.
func (k *Keeper) Extend(ctx context.Context, group string, items []ExtendItem) ([]ItemResult, error) {
	return k.settle(ctx, group, len(items), func(i int) string { return items[i].Receipt },
		func(l *Ledger, r Receipt, by ref, at moment) (code.Code, error) {
			d := items[by.i].Lease
			if d < 0 || d > MaxLease {
				return code.InvalidArgument, nil
			}
			return l.extend(r, d, by, at.now, at.stamp), nil
		})
}

// moment is both clocks at one call.
type moment struct {
	now   time.Duration
	stamp queue.Stamp
}

// settle runs one call about leases: each item's receipt is checked, then do decides it in the ledger.
func (k *Keeper) settle(ctx context.Context, name string, n int, receipt func(int) string,
	do func(*Ledger, Receipt, ref, moment) (code.Code, error)) ([]ItemResult, error) {
	if err := checkItems(ctx, n); err != nil {
		return nil, err
	}
	g, err := k.group(name)
	if err != nil {
		return nil, err
	}
	read := make([]Receipt, n)
	for i := range read {
		read[i], _ = k.receipts.Decode(receipt(i)) // a bad one stays zero: no group has id 0
	}
	c := newCall(n)
	g.mu.Lock()
	if err := g.arrive(ctx, read); err != nil {
		g.mu.Unlock()
		return nil, err
	}
	at := moment{now: k.o.Boot(), stamp: k.o.Stamp()}
	for i, r := range read {
		by := ref{c, i}
		res := g.foreign(r)
		if res == 0 {
			var err error
			if res, err = do(g.led, r, by, at); err != nil {
				g.fault(err)
				by.resolve(ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe})
				continue
			}
		}
		if res != 0 {
			by.resolve(plain(res))
		}
	}
	g.pump()
	g.mu.Unlock()
	return g.orElsewhere(g.finish(ctx, c))
}

// arrive brings a group up to what a call needs that names leases. A call that comes while the group is being moved
// waits for the outcome. One that names a recorded lease waits for the ledger, which then knows it: for this process's
// first read of the log if its state may be old, and for the epoch.
func (g *group) arrive(ctx context.Context, rs []Receipt) error {
	if g.moving {
		if err := g.awaitOr(ctx, false, func() (bool, error) { return !g.moving, nil }); err != nil {
			return err
		}
	}
	if err := g.enter(); err != nil || g.led != nil {
		return err
	}
	rs = slices.DeleteFunc(slices.Clone(rs), func(r Receipt) bool {
		return r.Shard != g.k.o.Shard || r.Group != g.id || r.Recovery != g.recovery
	})
	if len(rs) == 0 {
		return nil
	}
	if !g.k.baseKnown() {
		g.asking++
		err := g.awaitOr(ctx, false, func() (bool, error) { return g.k.baseKnown(), g.enter() })
		g.asking--
		if err != nil {
			return err
		}
	}
	// What is of a later epoch than this replica knows of is good elsewhere, if at all.
	rs = slices.DeleteFunc(rs, func(r Receipt) bool { return r.Lease.Epoch > g.info.Epoch })
	if known, err := g.recorded(rs); err != nil || !known {
		return err
	}
	return g.awaitOr(ctx, true, func() (bool, error) { return g.led != nil, g.enter() })
}

// recorded says whether apply has a record of one of these leases.
func (g *group) recorded(rs []Receipt) (bool, error) {
	if g.info.Counters.Leased == 0 {
		if info, ok := g.k.o.Reader.Group(g.id); !ok || info.Counters.Leased == 0 {
			return false, nil
		}
	}
	for _, r := range rs {
		_, lease, found, err := g.k.o.Reader.RetryOf(g.id, r.Address)
		if err != nil {
			g.fault(err)
			return false, code.New(code.Internal, "reading the leases of group %q", g.info.Name)
		}
		if found && lease.Name == r.Lease && r.Lease.Number != 0 {
			return true, nil
		}
	}
	return false, nil
}

// orElsewhere turns answers that all say that the home has moved into the refusal of the whole call: the same receipts
// are good there.
func (g *group) orElsewhere(items []ItemResult) ([]ItemResult, error) {
	for _, i := range items {
		if i.Code != code.NotOwner {
			return items, nil
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.enter(); err != nil {
		return nil, err
	}
	return items, nil
}

func checkItems(ctx context.Context, n int) error {
	switch {
	case n == 0:
		return code.New(code.BatchEmpty, "")
	case n > MaxSettle:
		return code.New(code.BatchTooLarge, "%d items: at most %d in one call", n, MaxSettle)
	case ctx.Err() != nil:
		return ended(ctx)
	}
	return nil
}

// foreign refuses receipts that this group's ledger cannot know: 0 leaves it to the ledger.
func (g *group) foreign(r Receipt) code.Code {
	switch {
	case r.Group == 0 || r.Shard != g.k.o.Shard:
		return code.InvalidReceipt
	case r.Group != g.id:
		if _, exists := g.k.o.Reader.Group(r.Group); exists || r.Group > g.id {
			return code.InvalidReceipt
		}
		return code.StaleOwner // of a group that was deleted, perhaps this name's
	case r.Recovery != g.recovery:
		return code.StaleOwner // before a recovery
	case g.led == nil && r.Lease.Epoch > g.info.Epoch:
		return code.NotOwner // of a home that this replica does not know of yet
	case g.led == nil:
		return code.StaleOwner // before this process had the epoch
	}
	return 0
}

// finish waits for a call's items, or for its deadline.
func (g *group) finish(ctx context.Context, c *call) []ItemResult {
	select {
	case <-c.done:
		return c.results
	default:
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	select {
	case <-c.done:
		return c.results
	case <-ctx.Done():
	case <-g.k.ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.left > 0 {
		untried := plain(codeOf(g.failure, code.DeadlineExceeded))
		unknown := ItemResult{Code: code.QuorumLost, Effect: code.EffectMaybe}
		if g.led == nil {
			c.abandon(unknown)
		} else {
			g.led.leave(c, g.k.o.Boot(), unknown, untried)
			g.pump()
		}
	}
	return c.results
}

// abandon answers what is left of a call.
func (c *call) abandon(res ItemResult) {
	for i := range c.results {
		ref{c, i}.resolve(res)
	}
}

// Redrive makes dead letters deliverable again, with attempts from 0: the named ones, or the first limit in address
// order. The group's home must be here; a call waits for the home's epoch. OK is given after apply; UnknownMessage
// says that the address is no dead letter, DeadExporting that it is on its way to the dead-letter queue. Nothing is begun, and Backpressure
// told, while redriveAhead messages wait for consumers: the ledger knows each of them. Behind a purge of unknown outcome that met an export
// the home takes a new epoch first, as a planned move to itself.
func (k *Keeper) Redrive(ctx context.Context, group string, addresses []queue.Address, limit int) ([]DeadResult, error) {
	return k.deadLetters(ctx, group, addresses, limit, true)
}

// PurgeDead removes dead letters for good: the named ones, or the first limit in address order. See Redrive.
func (k *Keeper) PurgeDead(ctx context.Context, group string, addresses []queue.Address, limit int) ([]DeadResult, error) {
	return k.deadLetters(ctx, group, addresses, limit, false)
}

func (k *Keeper) deadLetters(ctx context.Context, name string, addresses []queue.Address, limit int, redrive bool) ([]DeadResult, error) {
	n := len(addresses)
	if n == 0 {
		n = limit
	}
	if err := checkItems(ctx, n); err != nil {
		return nil, err
	}
	g, err := k.group(name)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	c, named, err := g.beginDead(ctx, addresses, n, redrive)
	g.mu.Unlock()
	if err != nil || len(named) == 0 {
		return nil, err
	}
	out := make([]DeadResult, len(named))
	for i, res := range g.finish(ctx, c) {
		out[i] = DeadResult{Address: named[i], ItemResult: res}
	}
	return out, nil
}

// beginDead waits for the epoch, reads the dead letters and begins a command for each.
func (g *group) beginDead(ctx context.Context, addresses []queue.Address, n int, redrive bool) (*call, []queue.Address, error) {
	err := g.awaitOr(ctx, true, func() (bool, error) {
		if err := g.enter(); err != nil {
			return false, err
		}
		return g.led != nil && !g.moving, nil
	})
	if err != nil {
		return nil, nil, err
	}
	if redrive && g.led.doubtful {
		if err := g.handOver(ctx, g.k.o.Self); err != nil { // whatever became of it, nothing was redriven
			return nil, nil, &code.Error{Code: codeOf(err, code.Unavailable), Effect: code.EffectNone, Cause: err}
		}
		return g.beginDead(ctx, addresses, n, redrive)
	}
	if waiting := len(g.led.tracked) - g.led.leased; redrive && waiting+n > redriveAhead {
		return nil, nil, &code.Error{Code: code.Backpressure, Effect: code.EffectNone, RetryAfterMs: 1000,
			Text: fmt.Sprintf("%d messages of group %q wait for consumers, redriven ones among them: redrive more when they have taken some", waiting, g.info.Name)}
	}
	found, err := g.findDead(addresses, n)
	if err != nil {
		g.fault(err)
		return nil, nil, code.New(code.Internal, "reading the dead letters of group %q", g.info.Name)
	}
	c := newCall(len(found))
	named := make([]queue.Address, len(found))
	now := g.k.o.Boot()
	for i := range found {
		d := &found[i]
		named[i] = d.Address
		by := ref{c, i}
		switch {
		case d.DeadAt == 0:
			by.resolve(plain(code.UnknownMessage))
		case d.ExportState == queue.ExportExporting || d.ExportState == queue.ExportDone:
			by.resolve(plain(code.DeadExporting))
		case !g.led.deadOp(d, redrive, by, now):
			by.resolve(plain(code.Skipped))
		}
	}
	g.pump()
	return c, named, nil
}

// findDead reads the named dead letters, or the first n. One that is none has DeadAt 0.
func (g *group) findDead(addresses []queue.Address, n int) ([]queue.DeadLetter, error) {
	if len(addresses) == 0 {
		page, _, err := g.k.o.Reader.DeadLetters(g.id, 0, n, false)
		return page, err
	}
	out := make([]queue.DeadLetter, 0, len(addresses))
	for _, a := range addresses {
		page, _, err := g.k.o.Reader.DeadLetters(g.id, a, 1, false)
		if err != nil {
			return nil, err
		}
		if len(page) == 0 || page[0].Address != a {
			out = append(out, queue.DeadLetter{Address: a})
			continue
		}
		out = append(out, page[0])
	}
	return out, nil
}
