package home

import (
	"time"

	"github.com/tierq/tierq/queue"
)

// place says which structure of the ledger holds an entry. An entry is in exactly one.
type place uint8

const (
	placeGone    place = iota // not tracked any more
	placeFresh                // read ahead, in the fresh or due buffer
	placeTimed                // in the heap by (not-before, address)
	placeLeased               // in the heap by deadline
	placeBlocked              // behind the head of its key
	placeBusy                 // an ack or Expire entry is unresolved: in no heap
)

// entry is one unfinished message that the ledger has to remember: read ahead, retrying, leased, behind the head of
// its key, or with an unresolved command.
type entry struct {
	address   queue.Address
	change    queue.Change
	notBefore queue.Stamp // 0: at once
	round     uint32
	attempts  uint32 // recorded failures
	slot      int32  // index in the heap that holds it
	place     place
	live      bool // leased: handed out, neither given back nor recorded as run out
	recorded  bool // a record of the lease was proposed, so apply has it or may yet have it
	kept      bool // apply has it
	unseen    bool // its consumer broke off before a handler had it: to run out counts nothing
	dead      bool // a dead letter that is only here for its unresolved command

	lease    queue.LeaseName // the present lease, or the last one if it ran out and nobody has had the message since
	deadline time.Duration
	handed   time.Duration
	touched  time.Duration // the hand-out, or the last extend
	first    queue.Stamp
	begun    queue.Stamp // of a lease: the hand-out, by the clock of the home that did it, once that was to be recorded
	reason   string
	consumer *consumer

	chain      *chain // nil: no key
	prev, next *entry

	older, newer *entry // among the leases without a record

	ack  *op // unresolved ack
	exp  *op // unresolved Expire entry that ends the lease, or that is about a dead letter
	rec  *op // unresolved Expire entry that records the lease
	then *op // decided while rec is unresolved: it begins when that, and an ack beside it, is answered
}

func (e *entry) resolved() bool { return e.ack == nil && e.exp == nil && e.rec == nil }

// chain is the tracked messages of one ordering key, in address order; redriven ones are behind. Only the head may
// be handed out.
type chain struct {
	key        string
	head, tail *entry
}

func (c *chain) add(e *entry) {
	e.chain, e.prev = c, c.tail
	if c.tail == nil {
		c.head = e
	} else {
		c.tail.next = e
	}
	c.tail = e
}

func (c *chain) remove(e *entry) {
	if e.prev == nil {
		c.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		c.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.chain, e.prev, e.next = nil, nil, nil
}

// ages is the leases that have no record yet and nothing unresolved, in order of hand-out.
type ages struct{ oldest, newest *entry }

func (a *ages) add(e *entry) {
	e.older, e.newer = a.newest, nil
	if a.newest == nil {
		a.oldest = e
	} else {
		a.newest.newer = e
	}
	a.newest = e
}

// putBack puts a lease that was taken out where it was: behind those that were handed out before it, mostly few.
func (a *ages) putBack(e *entry) {
	next := a.oldest
	for next != nil && next.handed < e.handed {
		next = next.newer
	}
	if next == nil {
		a.add(e)
		return
	}
	e.older, e.newer = next.older, next
	if next.older == nil {
		a.oldest = e
	} else {
		next.older.newer = e
	}
	next.older = e
}

func (a *ages) holds(e *entry) bool { return a.oldest == e || e.older != nil }

func (a *ages) remove(e *entry) {
	if e.older == nil {
		a.oldest = e.newer
	} else {
		e.older.newer = e.newer
	}
	if e.newer == nil {
		a.newest = e.older
	} else {
		e.newer.older = e.older
	}
	e.older, e.newer = nil, nil
}

// consumer is what one consumer name holds.
type consumer struct {
	name string
	held int
	seen time.Duration // its last call
}

// entryHeap is a binary heap that knows where each entry is.
type entryHeap struct {
	items []*entry
	less  func(a, b *entry) bool
	place place
}

func byNotBefore(a, b *entry) bool {
	return a.notBefore < b.notBefore || a.notBefore == b.notBefore && a.address < b.address
}

func byDeadline(a, b *entry) bool {
	return a.deadline < b.deadline || a.deadline == b.deadline && a.address < b.address
}

// peek returns the least entry, nil if there is none.
func (h *entryHeap) peek() *entry {
	if len(h.items) == 0 {
		return nil
	}
	return h.items[0]
}

func (h *entryHeap) push(e *entry) {
	e.place, e.slot = h.place, int32(len(h.items))
	h.items = append(h.items, e)
	h.up(len(h.items) - 1)
}

// remove takes an entry out; it is then in no structure.
func (h *entryHeap) remove(e *entry) {
	i, last := int(e.slot), len(h.items)-1
	h.swap(i, last)
	h.items[last] = nil
	h.items = h.items[:last]
	e.place = placeBusy
	if i < last {
		h.down(i)
		h.up(i)
	}
}

func (h *entryHeap) swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	h.items[i].slot, h.items[j].slot = int32(i), int32(j)
}

func (h *entryHeap) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(h.items[i], h.items[parent]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h *entryHeap) down(i int) {
	for {
		least := 2*i + 1
		if least >= len(h.items) {
			return
		}
		if right := least + 1; right < len(h.items) && h.less(h.items[right], h.items[least]) {
			least = right
		}
		if !h.less(h.items[least], h.items[i]) {
			return
		}
		h.swap(i, least)
		i = least
	}
}

// buffer is a queue of entries that were read ahead. Entries that were dropped meanwhile are skipped.
type buffer struct {
	items []*entry
	head  int
	size  int // entries that are still wanted
}

func (b *buffer) push(e *entry) {
	e.place = placeFresh
	b.items = append(b.items, e)
	b.size++
}

// pop returns the next entry, which is then in no structure; nil if there is none.
func (b *buffer) pop() *entry {
	for b.head < len(b.items) {
		e := b.items[b.head]
		b.items[b.head] = nil
		b.head++
		if e.place == placeFresh {
			b.size--
			e.place = placeBusy
			return e
		}
	}
	b.items, b.head = b.items[:0], 0
	return nil
}
