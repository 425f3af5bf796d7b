package home

import (
	"fmt"

	"github.com/tierq/tierq/queue"
)

// Check verifies the invariants that are written at Ledger, and that every entry is where it says it is. It costs a
// walk over everything tracked.
func (l *Ledger) Check() error {
	live, blocked := 0, 0
	held := map[*consumer]int{}
	for a, e := range l.tracked {
		if err := l.checkEntry(a, e); err != nil {
			return err
		}
		if e.live {
			live++
			held[e.consumer]++
		}
		if e.place == placeBlocked {
			blocked++
		}
	}
	if live != l.leased || blocked != l.blocked {
		return fmt.Errorf("%d live leases and %d blocked are counted as %d and %d", live, blocked, l.leased, l.blocked)
	}
	for name, c := range l.holders {
		if c.held != held[c] || c.name != name {
			return fmt.Errorf("consumer %q holds %d, counted as %d", name, held[c], c.held)
		}
	}
	return l.checkChains()
}

func (l *Ledger) checkEntry(a queue.Address, e *entry) error {
	fail := func(what string) error { return fmt.Errorf("%s (place %d): %s", a, e.place, what) }
	switch {
	case e.address != a || e.place == placeGone:
		return fail("tracked under another address, or gone")
	case e.exp != nil && (e.ack != nil || e.rec != nil):
		return fail("an Expire entry that ends the lease is unresolved beside an ack or a record")
	case e.then != nil && e.rec == nil && e.ack == nil:
		return fail("something waits for nothing")
	case l.ages.holds(e) != (e.place == placeLeased && !e.kept):
		return fail("leased without a record, and not among the ages, or among them and not")
	case e.newer != nil && e.newer.handed < e.handed:
		return fail("among the ages before a lease that was handed out earlier")
	case e.kept && (!e.recorded || e.lease.Number == 0):
		return fail("recorded without a proposal, or without a name")
	case !e.resolved() != (e.place == placeBusy):
		return fail("busy without an unresolved command, or not busy with one")
	case e.place == placeLeased != (e.live && e.resolved()):
		return fail("leased, and not in the heap of deadlines, or in it and not leased")
	case e.live && (e.lease.Number == 0 || e.consumer == nil || l.holders[e.consumer.name] != e.consumer):
		return fail("leased without a name or a known consumer")
	case e.place == placeTimed && (int(e.slot) >= len(l.timed.items) || l.timed.items[e.slot] != e):
		return fail("not in the heap by not-before")
	case e.place == placeLeased && (int(e.slot) >= len(l.leases.items) || l.leases.items[e.slot] != e):
		return fail("not in the heap of deadlines")
	case e.chain != nil && e.place != placeBlocked && e.chain.head != e:
		return fail("active, and not the head of its key")
	case e.place == placeBlocked && (e.chain == nil || e.chain.head == e):
		return fail("blocked by nothing")
	}
	return nil
}

func (l *Ledger) checkChains() error {
	for key, c := range l.chains {
		if c.head == nil {
			return fmt.Errorf("key %q has an empty chain", key)
		}
		for e := c.head; e != nil; e = e.next {
			if e.chain != c || l.tracked[e.address] != e || e.next == nil && c.tail != e {
				return fmt.Errorf("key %q: %s is in the wrong chain or not tracked", key, e.address)
			}
		}
	}
	return nil
}
