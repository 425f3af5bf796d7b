package home

import (
	"cmp"
	"slices"
	"time"

	"github.com/tierq/tierq/queue"
)

// Held is one message that a consumer holds.
type Held struct {
	Address  queue.Address
	Consumer string // "": one that has not named itself
	Attempt  uint32
	HeldFor  time.Duration // since the hand-out
	Left     time.Duration // of the lease; 0: it is over, and its outcome is being recorded
}

// Held lists what the consumers of a group hold, by address: at most limit. Errors are those of Ack.
func (k *Keeper) Held(group string, limit int) ([]Held, error) {
	g, err := k.group(group)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.enter(); err != nil {
		return nil, err
	}
	var out []Held
	if g.led == nil {
		return nil, nil
	}
	now := k.o.Boot()
	for _, e := range g.led.tracked {
		if e.live {
			out = append(out, e.held(now))
		}
	}
	slices.SortFunc(out, func(a, b Held) int { return cmp.Compare(a.Address, b.Address) })
	return out[:min(len(out), limit)], nil
}

func (e *entry) held(now time.Duration) Held {
	return Held{Address: e.address, Consumer: e.consumer.name, Attempt: e.attempts + 1, HeldFor: now - e.handed, Left: max(e.deadline-now, 0)}
}

// Seen is what the home of a group knows about one message beside the state.
type Seen struct {
	Serving    bool          // a ledger is there: the group is, or was lately, used here
	Tracked    bool          // it knows the message
	Leased     bool          // a consumer holds it: Held says who
	Held       Held          //
	Unresolved bool          // an ack, failure or release of it has not been answered by apply
	NotBefore  queue.Stamp   // it waits until then; 0: it does not
	Head       queue.Address // the message of its key that goes first; 0: none, or itself
	Ahead      bool          // not tracked, and the scan has not come to it
	Full       bool          // the look-ahead is used up by retrying, delayed and blocked messages
}

// Look tells what the ledger knows about one message of a group. Errors are those of Ack.
func (k *Keeper) Look(group string, a queue.Address) (Seen, error) {
	g, err := k.group(group)
	if err != nil {
		return Seen{}, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.enter(); err != nil || g.led == nil {
		return Seen{}, err
	}
	return g.led.look(a, k.o.Boot(), k.o.Stamp()), nil
}

// outdated says whether messages were finished or moved out of order since the ledger was last compared with the state.
func (l *Ledger) outdated() bool {
	return len(l.recheck) > 0 || l.disorderSeen != l.marks.disorder.Load()
}

func (l *Ledger) look(a queue.Address, now time.Duration, stamp queue.Stamp) Seen {
	s := Seen{Serving: true, Full: l.full()}
	e := l.tracked[a]
	if e == nil {
		s.Ahead = a >= l.scan
		return s
	}
	s.Tracked, s.Unresolved, s.Leased = true, !e.resolved(), e.live
	if e.live {
		s.Held = e.held(now)
	}
	if e.notBefore > stamp {
		s.NotBefore = e.notBefore
	}
	if e.chain != nil && e.chain.head != e {
		s.Head = e.chain.head.address
	}
	return s
}
