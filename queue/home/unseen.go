package home

import (
	"context"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Unseen notes that no handler has seen the messages of these leases: their consumer had fetched them ahead, and broke off.
// Nobody is to blame for them, so a lease that runs out counts nothing: its message comes again at once with the same attempt
// number. The leases last to their deadlines all the same, as the consumer may still be there; an extend is a sign of it, and
// the lease counts again. A home change forgets this. See Ack for errors.
func (k *Keeper) Unseen(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return k.settle(ctx, group, len(receipts), func(i int) string { return receipts[i] },
		func(l *Ledger, r Receipt, _ ref, at moment) (code.Code, error) { return l.unsee(r, at.now), nil })
}

func (l *Ledger) unsee(r Receipt, now time.Duration) code.Code {
	e, c := l.heldBy(r, now)
	if c != 0 {
		return c
	}
	e.unseen = true
	return code.OK
}

// lapse ends a lease that no handler has seen and whose time is over. The receipt of one without a record stays good for an
// ack until somebody has the message.
func (l *Ledger) lapse(e *entry, now time.Duration) {
	e.unseen = false
	if !l.unrecorded(e) {
		l.decide(e, queue.ExpireEntry{Kind: queue.ExpireRelease, Attempts: e.attempts}, now).own = true
		return
	}
	l.lift(e)
	l.unhold(e)
	l.requeue(e, 0)
}
