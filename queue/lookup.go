package queue

import (
	"bytes"
	"cmp"
	"slices"
)

// What administrators ask. Every read here is of one applied index and bounded; slices returned belong to the caller.

// PublishLookup is what a shard knows about one seq of a producer.
type PublishLookup struct {
	Known   bool    // the producer is remembered
	Epoch   uint64  // its epoch
	Low     Seq     // seqs below are not remembered
	Last    Seq     // its greatest seq
	Address Address // where the seq was stored; 0: it was not, or it lies below Low
}

// LookupPublish finds the address of a producer's seq. Seqs below Low are forgotten: nobody can tell any more.
func (s *QueueStateMachine) LookupPublish(p Producer, seq Seq) (l PublishLookup, err error) {
	defer recoverFault(&err)
	v := s.view(0)
	defer v.close()
	var stored producerValue
	if l.Known, err = v.snap.View(appendProducerKey(nil, p), stored.decode); err != nil || !l.Known {
		return PublishLookup{}, err
	}
	l.Epoch, l.Low, l.Last = stored.epoch, stored.low, stored.last
	l.Address, _ = stored.lookup(seq)
	return l, nil
}

// everything is a view with all groups.
func (s *QueueStateMachine) everything() *housekeeper {
	s.mu.RLock()
	defer s.mu.RUnlock()
	k := &housekeeper{view: &view{meta: s.meta, gone: s.gone, snap: s.shard.Snapshot()}}
	for _, id := range s.ids {
		k.groups = append(k.groups, s.groups[id])
	}
	return k
}

// Browse reads stored messages in address order from an address on: at most limit, and little more than maxBytes of
// bodies. Messages that every group of a work-mode queue has finished are left out, though they may still be stored.
// next is where to go on, 0 at the end; a call may return fewer than limit, even none, and a next.
func (s *QueueStateMachine) Browse(from Address, limit, maxBytes int) (list []StoredMessage, next Address, err error) {
	defer recoverFault(&err)
	k := s.everything()
	defer k.close()
	w := k.wants()
	defer w.close()
	in := keyCursor{r: k.snap, prefix: []byte{kindMessage}, some: true}
	parked := keyCursor{r: k.snap, prefix: []byte{kindParked}, some: k.meta.Counters.Parked > 0}
	defer in.close()
	defer parked.close()
	all := k.meta.Options.Mode == ModeLog || len(k.groups) == 0
	a, size := max(from, 1), 0
	for steps := 0; ; steps++ {
		cur := &in
		if !in.has(a) {
			cur = &parked
			if !parked.has(a) {
				if a = nextKey(&in, &parked); a > MaxAddress {
					return list, 0, nil
				}
				continue
			}
		}
		if len(list) >= limit || size >= maxBytes || steps >= maxListSteps {
			return list, a, nil
		}
		if all || w.any(a) {
			m, err := readMessage(a, cur == &parked, cur.value())
			check(err)
			list = append(list, m)
			size += len(m.Body)
		}
		a++
	}
}

// Oldest finds the message of a group that has waited longest: the one, neither finished nor dead, that was
// deliverable first. since is when: its stamp, or the time until which it was delayed. Delayed messages that are not
// due by now do not count. False: there is none, or none within a bounded number of reads.
func (s *QueueStateMachine) Oldest(id GroupID, now Stamp) (a Address, since Stamp, found bool, err error) {
	defer recoverFault(&err)
	v := s.view(id)
	defer v.close()
	if v.group == nil {
		return 0, 0, false, nil
	}
	l := v.lister()
	defer l.close()
	offer := func(at Address, stamp Stamp) {
		if !found || stamp < since {
			a, since, found = at, stamp, true
		}
	}
	if at, ok := l.firstInPlace(); ok {
		h, err := readHead(l.inline.value())
		check(err)
		offer(at, max(h.stamp, h.visibleAt))
	}
	if v.meta.Counters.Parked > 0 {
		l.stragglersSince(offer)
		l.dueSince(now, offer)
	}
	return a, since, found, nil
}

// firstInPlace finds the first unfinished message of the group that is in place; dead ones never are.
func (l *lister) firstInPlace() (Address, bool) {
	a := l.group.start + 1
	for range maxListSteps {
		want, ok := l.walk.next(a)
		if !ok {
			return 0, false
		}
		if l.inline.has(want) {
			return want, true
		}
		if a = max(l.inline.at, want+1); a > MaxAddress {
			return 0, false
		}
	}
	return 0, false
}

// Bounds of what Oldest looks at beside the messages in place.
const (
	maxStragglersSeen = 4096
	maxDueSeen        = 256
)

// stragglersSince offers the oldest message that was parked because it held the line.
func (l *lister) stragglersSince(offer func(Address, Stamp)) {
	a := l.group.start + 1
	for range maxStragglersSeen {
		want, ok := l.walk.next(a)
		if !ok {
			return
		}
		if !l.parked.has(want) {
			if a = max(l.parked.at, want+1); a > MaxAddress {
				return
			}
			continue
		}
		h, err := readHead(l.parked.value())
		check(err)
		if h.flags&messageDelayed == 0 && !l.dead.has(want) {
			offer(want, max(h.stamp, h.visibleAt))
			return // stamps rise with addresses
		}
		a = want + 1
	}
}

// dueSince offers those delayed messages that became due first.
func (l *lister) dueSince(now Stamp, offer func(Address, Stamp)) {
	var due []DelayedKey
	it := openIter(l.snap, []byte{kindDelayed}, appendDelayedKey(nil, DelayedKey{VisibleAt: now + 1}))
	defer it.Close()
	for ok := it.First(); ok && len(due) < maxDueSeen; ok = it.Next() {
		if k := delayedKeyOf(it.Key()); !l.meta.sweeping || k.Address > l.meta.purgedTo {
			due = append(due, k)
		}
	}
	check(it.Err())
	slices.SortFunc(due, func(a, b DelayedKey) int { return cmp.Compare(a.Address, b.Address) })
	walk := newUnfinished(l.snap, l.group, l.gone, l.meta.Last) // a walk only goes up
	defer walk.close()
	for _, k := range due {
		if a, ok := walk.next(k.Address); ok && a == k.Address && !l.dead.has(a) {
			offer(a, k.VisibleAt)
		}
	}
}

// MessageHead is a message without its headers and body.
type MessageHead struct {
	Address   Address
	Stamp     Stamp
	VisibleAt Stamp
	ExpiresAt Stamp
	Key       []byte
	Bytes     int // of body, headers and key
}

// Head reads what is known of a message without copying its body; false when it does not exist (any more).
func (s *QueueStateMachine) Head(a Address) (m MessageHead, ok bool, err error) {
	for _, kind := range [...]byte{kindMessage, kindParked, kindMessage} { // it may be parked in between
		ok, err = s.shard.View(appendKey1(nil, kind, uint64(a)), func(v []byte) error {
			h, err := readHead(v)
			m = MessageHead{Address: a, Stamp: h.stamp, VisibleAt: h.visibleAt, ExpiresAt: h.expiresAt, Key: bytes.Clone(h.key), Bytes: int(h.size)}
			return err
		})
		if ok || err != nil {
			return m, ok, err
		}
	}
	return MessageHead{}, false, nil
}

// OfKey lists the unfinished, not dead messages of one key of a group in address order, from an address on: at most
// limit. It looks at a bounded number of messages, so it may return fewer, even none, and an address to go on from
// (0: the end). Only queues with key order keep keys apart.
func (s *QueueStateMachine) OfKey(id GroupID, key []byte, from Address, limit int) ([]Deliverable, Address, error) {
	return s.list(id, from, limit, func(l *lister, a Address) (Deliverable, bool) {
		d, ok := l.deliverable(a, true)
		return d, ok && bytes.Equal(d.Key, key)
	})
}

// Outboxes lists the dead-letter outboxes that have published to the shard and are not forgotten, in order of shard and
// group: at most limit, behind one of them.
func (s *QueueStateMachine) Outboxes(after Producer, limit int) (list []Producer, err error) {
	defer recoverFault(&err)
	v := s.view(0)
	defer v.close()
	from := []byte{kindProducer, byte(ProducerOutbox)}
	if after.Kind == ProducerOutbox {
		from = append(appendProducerKey(nil, after), 0)
	}
	it := openIter(v.snap, from, []byte{kindProducer, byte(ProducerOutbox) + 1})
	defer it.Close()
	for ok := it.First(); ok && len(list) < limit; ok = it.Next() {
		key := it.Key()
		list = append(list, Producer{Kind: ProducerOutbox, ID: be.Uint64(key[2:]), Sub: be.Uint64(key[10:])})
	}
	check(it.Err())
	return list, nil
}
