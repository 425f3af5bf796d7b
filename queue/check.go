package queue

import (
	"fmt"
	"slices"
	"sort"

	"github.com/tierq/tierq/queue/store"
)

// Check verifies the numbered invariants of QueueStateMachine by walking everything: for tests and doctor. It costs
// as much as reading the whole state.
func (s *QueueStateMachine) Check() (err error) {
	defer recoverFault(&err)
	all := s.everything()
	defer all.close()
	c := &checker{view: all.view, stored: make(map[Address]bool), buckets: make(map[uint64]*countValue)}
	if err := c.messages(); err != nil {
		return err
	}
	if err := c.counters(); err != nil {
		return err
	}
	for _, g := range all.groups {
		if err := c.groupOf(g); err != nil {
			return fmt.Errorf("group %d: %w", g.id, err)
		}
	}
	if err := c.vanished(); err != nil {
		return err
	}
	return c.mirrors()
}

func (c *checker) vanished() (err error) {
	defer recoverFault(&err)
	c.nearOf(c.gone)
	return nil
}

type checker struct {
	*view
	stored  map[Address]bool // true: parked
	delayed map[DelayedKey]bool
	buckets map[uint64]*countValue
	sum     Counters
}

func (c *checker) each(kind byte, f func(key, value []byte)) {
	eachKey(c.snap, []byte{kind}, []byte{kind + 1}, f)
}

func eachKey(r store.Reader, lower, upper []byte, f func(key, value []byte)) {
	it := openIter(r, lower, upper)
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		check(err)
		f(it.Key(), v)
	}
	check(it.Err())
}

func invariant(n int, ok bool, format string, args ...any) {
	if !ok {
		check(fmt.Errorf("invariant %d: "+format, append([]any{n}, args...)...))
	}
}

func (c *checker) messages() (err error) {
	defer recoverFault(&err)
	c.delayed = make(map[DelayedKey]bool)
	for _, kind := range [...]byte{kindMessage, kindParked} {
		c.each(kind, func(key, value []byte) { c.message(Address(lastU64(key)), kind == kindParked, value) })
	}
	stale := 0
	c.each(kindDelayed, func(key, _ []byte) {
		k := delayedKeyOf(key)
		if c.meta.sweeping && k.Address <= c.meta.purgedTo {
			stale++
			return
		}
		invariant(1, c.delayed[k], "delayed entry %v has no message", k)
		delete(c.delayed, k)
	})
	invariant(1, len(c.delayed) == 0, "%d delayed messages have no entry", len(c.delayed))
	c.each(kindProducer, func([]byte, []byte) { c.sum.Producers++ })
	return nil
}

func (c *checker) message(a Address, parked bool, value []byte) {
	h, err := readHead(value)
	check(err)
	m, err := readMessage(a, parked, value)
	check(err)
	size := len(m.Body) + len(m.Key)
	for _, x := range m.Headers {
		size += len(x.Name) + len(x.Value)
	}
	invariant(1, uint64(size) == h.size, "message %s of %d bytes says %d", a, size, h.size)
	invariant(1, a >= 1 && a <= c.meta.Last, "message %s above the last address %s", a, c.meta.Last)
	_, twice := c.stored[a]
	invariant(4, !twice, "message %s is in place and parked", a)
	invariant(4, parked || a > c.meta.Line, "message %s in place below the line %s", a, c.meta.Line)
	c.stored[a] = parked
	b := c.buckets[bucketOf(a)]
	if b == nil {
		b = &countValue{}
		c.buckets[bucketOf(a)] = b
	}
	c.sum.Messages++
	c.sum.Bytes += h.size
	if !parked {
		b.messages++
		b.bytes += h.size
		return
	}
	b.parked++
	b.parkedBytes += h.size
	c.sum.Parked++
	if h.flags&messageDelayed != 0 {
		b.delayed++
		c.sum.Delayed++
		c.delayed[DelayedKey{h.visibleAt, a}] = true
	}
}

func (c *checker) counters() (err error) {
	defer recoverFault(&err)
	m, s := &c.meta.Counters, &c.sum
	invariant(1, m.Messages == s.Messages && m.Bytes == s.Bytes && m.Parked == s.Parked && m.Delayed == s.Delayed && m.Producers == s.Producers,
		"counters %+v, walked %+v", *m, *s)
	invariant(2, m.Published == m.Messages+m.Reclaimed+m.Purged+m.Dropped+m.Expired+m.Cancelled, "published %+v", *m)
	c.each(kindCount, func(key, value []byte) {
		var v countValue
		check(v.decode(value))
		b := c.buckets[lastU64(key)]
		invariant(3, b != nil && *b == v, "bucket %d says %+v, walked %+v", lastU64(key), v, b)
		delete(c.buckets, lastU64(key))
	})
	invariant(3, len(c.buckets) == 0, "%d buckets have no count record", len(c.buckets))
	return nil
}

// groupOf checks a group against what its keys say.
func (c *checker) groupOf(g *group) (err error) {
	defer recoverFault(&err)
	var kept GroupCounters
	dead, numbered := make(map[Address]bool), make(map[uint64]Address)
	perGroup := func(kind byte, f func(a Address, value []byte)) {
		eachKey(c.snap, appendKey1(nil, kind, uint64(g.id)), appendKey1(nil, kind, uint64(g.id)+1), func(key, value []byte) { f(Address(lastU64(key)), value) })
	}
	finished := c.finishedBy(g)
	perGroup(kindDead, func(a Address, value []byte) {
		d, err := readDead(a, value)
		check(err)
		dead[a] = true
		if d.ExportNumber != 0 {
			numbered[d.ExportNumber] = a
		}
		invariant(9, (d.ExportNumber != 0) == (d.ExportState != ExportNone) && d.ExportNumber <= g.exported, "dead letter %s is %d with export number %d of %d", a, d.ExportState, d.ExportNumber, g.exported)
		kept.Dead++
		invariant(5, g.owns(a, c.meta.Last) && !finished(a), "dead letter %s is finished", a)
	})
	perGroup(kindRetry, func(a Address, _ []byte) {
		kept.Retrying++
		invariant(5, g.owns(a, c.meta.Last) && !finished(a) && !dead[a], "retry state of %s, which is finished or dead", a)
	})
	perGroup(kindLease, func(a Address, _ []byte) {
		kept.Leased++
		invariant(5, g.owns(a, c.meta.Last) && !finished(a) && !dead[a], "lease of %s, which is finished or dead", a)
	})
	open := uint64(0)
	for a := g.start + 1; a <= c.meta.Last; a++ {
		if finished(a) {
			continue
		}
		parked, ok := c.stored[a]
		invariant(7, ok, "%s is not finished and does not exist", a)
		invariant(7, parked || a > g.hold, "%s is not finished, in place, and below hold %s", a, g.hold)
		if !dead[a] {
			open++
		}
	}
	invariant(5, g.c.Dead == kept.Dead && g.c.Retrying == kept.Retrying && g.c.Leased == kept.Leased && g.unfinished(&c.meta) == open,
		"counters %+v with %d unfinished, walked %+v with %d", g.c, g.unfinished(&c.meta), kept, open)
	c.exportsOf(g, numbered)
	c.lanesOf(g, finished)
	c.nearOf(g.done)
	return nil
}

// nearOf checks what a set has in memory against what it has stored.
func (c *checker) nearOf(s *rangeSet) {
	var stored [lanes][]laneRange
	eachKey(c.snap, appendKey1(nil, kindDone, uint64(s.id)), appendKey1(nil, kindDone, uint64(s.id)+1), func(key, value []byte) {
		last, err := decodeDone(value)
		check(err)
		stored[key[9]] = append(stored[key[9]], laneRange{Address(lastU64(key)), last})
	})
	for l := range lanes {
		var top laneRange
		rest := stored[l]
		if n := len(rest); n > 0 {
			rest, top = rest[:n-1], rest[n-1]
		}
		invariant(6, s.top[l] == top, "lane %d: the greatest range is %v, stored is %v", l, s.top[l], top)
		n := &s.near[l]
		for len(rest) > 0 && rest[0].first < n.from && len(rest) > len(n.list) {
			rest = rest[1:]
		}
		invariant(6, slices.Equal(n.list, rest), "lane %d: near ranges from %s are %v, stored are %v", l, n.from, n.list, rest)
		invariant(6, len(stored[l]) == 0 || stored[l][0].first >= s.low[l], "lane %d: range %v lies below %s", l, stored[l], s.low[l])
	}
}

// exportsOf checks the index by export number against the numbered dead letters.
func (c *checker) exportsOf(g *group, numbered map[uint64]Address) {
	invariant(9, uint64(len(numbered)) == g.exports, "%d numbered dead letters, %d counted", len(numbered), g.exports)
	eachKey(c.snap, appendKey1(nil, kindExport, uint64(g.id)), appendKey1(nil, kindExport, uint64(g.id)+1), func(key, value []byte) {
		a, err := decodeExport(value)
		check(err)
		invariant(9, numbered[lastU64(key)] == a, "export number %d stands for %s, the dead letter says %s", lastU64(key), a, numbered[lastU64(key)])
		delete(numbered, lastU64(key))
	})
	invariant(9, len(numbered) == 0, "%d numbered dead letters are not in the index", len(numbered))
}

// finishedBy reads all ranges of a group and of what is gone.
func (c *checker) finishedBy(g *group) func(Address) bool {
	own, gone := c.rangesOf(g.id), c.rangesOf(goneSet)
	for l, list := range own {
		for _, r := range list {
			invariant(6, r.first > g.wm.W(l), "range of %s at or below W", r.first)
		}
	}
	return func(a Address) bool {
		l := laneOf(a)
		return a <= g.start || a <= g.wm.W(l) || covered(own[l], a) || covered(gone[l], a)
	}
}

// rangesOf reads the ranges of a set by lane, in order.
func (c *checker) rangesOf(id GroupID) (lists [lanes][]laneRange) {
	eachKey(c.snap, appendKey1(nil, kindDone, uint64(id)), appendKey1(nil, kindDone, uint64(id)+1), func(key, value []byte) {
		last, err := decodeDone(value)
		check(err)
		r, l := laneRange{Address(lastU64(key)), last}, int(key[9])
		invariant(6, laneOf(r.first) == l && laneOf(last) == l && r.first <= last, "range %s..%s in lane %d", r.first, last, l)
		if n := len(lists[l]); n > 0 {
			invariant(6, lists[l][n-1].last < r.first, "%s lies in two ranges", r.first)
		}
		lists[l] = append(lists[l], r)
	})
	return lists
}

// covered says whether one of a lane's ranges, which are in order, holds a.
func covered(list []laneRange, a Address) bool {
	i := sort.Search(len(list), func(i int) bool { return list[i].last >= a })
	return i < len(list) && list[i].first <= a
}

func (c *checker) lanesOf(g *group, finished func(Address) bool) {
	check(g.wm.Check())
	for l := range lanes {
		next := firstInLane(l, g.wm.W(l))
		invariant(6, next == g.next[l], "lane %d: next %s, W says %s", l, g.next[l], next)
		invariant(6, next > c.meta.Last || !finished(next), "lane %d: W %s, but %s is finished", l, g.wm.W(l), next)
	}
	invariant(6, g.wm.Floor() >= g.start, "floor %s below start %s", g.wm.Floor(), g.start)
}

// mirrors checks the records by age.
func (c *checker) mirrors() (err error) {
	defer recoverFault(&err)
	c.mirror("dedup", kindDedup, kindDedupAge, func(key, value []byte) []byte {
		var d dedupValue
		check(d.decode(value))
		return appendDedupAgeKey(nil, d.expiresAt, dedupHash(key[1:]))
	})
	c.mirror("operation", kindOp, kindOpAge, func(key, value []byte) []byte {
		var o opValue
		check(o.decode(value))
		return appendKey2(nil, kindOpAge, uint64(o.expiresAt), lastU64(key))
	})
	c.mirror("producer", kindProducer, kindProducerUse, func(key, value []byte) []byte {
		var p producerValue
		check(p.decode(value))
		if ProducerKind(key[1]) == ProducerOutbox {
			return nil
		}
		return appendProducerUseKey(nil, p.use, Producer{ProducerKind(key[1]), be.Uint64(key[2:]), be.Uint64(key[10:])})
	})
	return nil
}

func (c *checker) mirror(what string, kind, age byte, want func(key, value []byte) []byte) {
	expected := make(map[string]bool)
	c.each(kind, func(key, value []byte) {
		if k := want(key, value); k != nil {
			expected[string(k)] = true
		}
	})
	c.each(age, func(key, _ []byte) {
		invariant(8, expected[string(key)], "%s by age % x has no record", what, key)
		delete(expected, string(key))
	})
	invariant(8, len(expected) == 0, "%d %s records are not mirrored by age", len(expected), what)
}
