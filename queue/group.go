package queue

import (
	"fmt"
	"math/bits"

	"github.com/tierq/tierq/queue/store"
)

// group is a consumer group as stored, and what is derived from its keys. A tx changes a copy (tx.edit); the
// machine's own are immutable, so readers may use them without a lock.
//
// Which addresses the group has finished: those at or below start, those in done, and, for every group, those in the
// shard's gone set. next caches the consequence per lane.
//
// Invariants: (1) next[l] is the least position of lane l above start and W_floor that is neither in done nor gone;
// (2) no range of done lies below next; (3) W of lane l <= next[l]-1; (4) every unfinished address at or below hold
// is parked.
type group struct {
	id            GroupID
	name          string
	config        GroupConfig
	configVersion uint64
	created       Start // as asked for at creation
	home          ReplicaID
	homeIndex     Index
	released      bool
	epoch         Epoch
	claims        uint64
	start         Address
	hold          Address
	exported      uint64 // the greatest export number given
	exports       uint64 // entries of the index by export number; not stored
	// base is the shard's Published less the group's Assigned.
	base uint64
	c    GroupCounters // without Assigned and Unfinished, which follow from base

	wm Watermark

	next [lanes]Address
	done *rangeSet
}

// counterList names the stored counters in the order of the format.
func (g *group) counterList() [11]*uint64 {
	c := &g.c
	return [11]*uint64{&c.Acked, &c.Dead, &c.Exported, &c.Expired, &c.Purged, &c.Cancelled, &c.Retries, &c.Redriven,
		&c.DeadTotal, &c.Retrying, &c.Leased}
}

func (g *group) encode(dst []byte) []byte {
	dst = append(dst, groupFormat)
	dst = putString(dst, g.name)
	dst = putUint(dst, g.configVersion)
	dst = putBytes(dst, AppendGroupConfig(nil, g.config))
	dst = putUint(append(dst, byte(g.created.Kind)), g.created.At)
	dst = putUint(dst, uint64(g.home))
	dst = putUint(dst, uint64(g.homeIndex))
	dst = putBool(dst, g.released)
	dst = putUint(dst, uint64(g.epoch))
	dst = putUint(dst, g.claims)
	dst = putUint(dst, uint64(g.start))
	dst = putUint(dst, uint64(g.hold))
	dst = putUint(dst, g.exported)
	dst = putUint(dst, g.base)
	for _, c := range g.counterList() {
		dst = putUint(dst, *c)
	}
	dst = append(dst, watermarkLayoutV2)
	dst = putUint(dst, uint64(g.epoch)) // wm_epoch
	dst = putUint(dst, uint64(g.wm.EncodedBytes()))
	return g.wm.Append(dst)
}

func (g *group) decode(b []byte) error {
	r, err := readValue("group", groupFormat, b)
	if err != nil {
		return err
	}
	g.name = r.string()
	g.configVersion = r.uint()
	g.config, err = DecodeGroupConfig(r.bytes())
	if err != nil {
		return fmt.Errorf("%w: group: %w", ErrCorrupt, err)
	}
	g.created = Start{Kind: StartKind(r.byte()), At: r.uint()}
	g.home, g.homeIndex, g.released = ReplicaID(r.uint()), Index(r.uint()), r.bool()
	g.epoch, g.claims = Epoch(r.uint()), r.uint()
	g.start, g.hold = Address(r.uint()), Address(r.uint())
	g.exported, g.base = r.uint(), r.uint()
	for _, c := range g.counterList() {
		*c = r.uint()
	}
	if r.bad {
		return r.done("group")
	}
	g.wm, err = readWatermark(&r, g.epoch)
	return err
}

// Codes of the watermark's layout in a group record. Part of the format; do not renumber.
const (
	watermarkLayoutV1 = 1
	watermarkLayoutV2 = 2
)

func readWatermark(r *valueReader, epoch Epoch) (Watermark, error) {
	layout := LayoutPackedV2
	if c := r.byte(); c == watermarkLayoutV1 {
		layout = LayoutPackedV1
	} else if c != watermarkLayoutV2 {
		return Watermark{}, fmt.Errorf("%w: watermark layout %d", ErrCorrupt, c)
	}
	if e := Epoch(r.uint()); r.bad || e != epoch {
		return Watermark{}, fmt.Errorf("%w: watermark of epoch %d in a group of epoch %d", ErrCorrupt, e, epoch)
	}
	blob := r.bytes()
	if err := r.done("group"); err != nil {
		return Watermark{}, err
	}
	w, err := DecodeWatermark(layout, blob)
	if err != nil {
		return w, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return w, nil
}

// loadGroup decodes a group and derives the rest from its keys.
func loadGroup(r store.Reader, id GroupID, value []byte) *group {
	g := &group{id: id}
	check(g.decode(value))
	g.done = loadRangeSet(r, id)
	eachKey(r, appendKey1(nil, kindExport, uint64(id)), appendKey1(nil, kindExport, uint64(id)+1), func([]byte, []byte) { g.exports++ })
	for l := range lanes {
		g.setNext(l, firstInLane(l, g.wm.W(l)))
	}
	return g
}

// setNext moves next of a lane, below which done has no range (invariant 2).
func (g *group) setNext(l int, a Address) { g.next[l], g.done.low[l] = a, a }

func (g *group) clone() *group {
	c := *g
	c.done = g.done.clone()
	return &c
}

// assigned counts the messages above start, ever.
func (g *group) assigned(m *metaValue) uint64 { return m.Counters.Published - g.base }

// open counts the messages that are neither finished nor dead.
func (g *group) unfinished(m *metaValue) uint64 {
	c := &g.c
	return g.assigned(m) - c.Acked - c.Dead - c.Exported - c.Expired - c.Purged - c.Cancelled
}

// owns says whether an address is one of the group's, finished or not.
func (g *group) owns(a, last Address) bool { return a > g.start && a <= last }

func (g *group) info(m *metaValue) GroupInfo {
	i := GroupInfo{ID: g.id, Name: g.name, Config: g.config, ConfigVersion: g.configVersion, Home: g.home,
		HomeIndex: g.homeIndex, Released: g.released, Epoch: g.epoch, ClaimGeneration: g.claims, Start: g.start,
		Floor: g.wm.Floor(), WatermarkBytes: g.wm.EncodedBytes(), Exports: g.exports, Counters: g.c}
	i.Config.DelaysMs = append([]uint64(nil), g.config.DelaysMs...)
	i.Counters.Assigned, i.Counters.Unfinished = g.assigned(m), g.unfinished(m)
	return i
}

// edit returns the group's copy that this command changes, nil when there is no such group.
func (t *tx) edit(id GroupID) *group {
	for _, g := range t.edited {
		if g.id == id {
			return g
		}
	}
	g := t.s.groups[id]
	if g == nil || t.deleted == id {
		return nil
	}
	g = g.clone()
	t.edited = append(t.edited, g)
	return g
}

// group returns the group as this command sees it, not to be changed.
func (t *tx) group(id GroupID) *group {
	for _, g := range t.edited {
		if g.id == id {
			return g
		}
	}
	if t.deleted == id {
		return nil
	}
	return t.s.groups[id]
}

// groupIDs lists the groups in order of id.
func (t *tx) groupIDs() []GroupID { return t.s.ids }

// finish marks an owned, unfinished address as finished. Addresses in ascending order are the fast case.
func (t *tx) finish(g *group, a Address) {
	l := laneOf(a)
	if a != g.next[l] {
		t.addRange(g.done, laneRange{a, a})
		return
	}
	g.setNext(l, t.freeFrom(g, a+lanes))
}

// freeFrom moves from a position up to the least one that is neither done nor gone, and removes the done ranges
// that it passes.
func (t *tx) freeFrom(g *group, a Address) Address {
	for {
		if r, ok := t.takeRange(g.done, a); ok {
			a = r.last + lanes
			continue
		}
		r, ok := t.goneRange(a)
		if !ok {
			return a
		}
		a = t.takeRanges(g.done, a, r.last) + lanes
	}
}

// isFinished needs an owned address.
func (t *tx) isFinished(g *group, a Address) bool {
	l := laneOf(a)
	if a < g.next[l] {
		return true
	}
	if a <= g.done.top[l].last {
		if _, ok := g.done.covering(t.cursor(g), a); ok {
			return true
		}
	}
	_, ok := t.goneRange(a)
	return ok
}

func (t *tx) goneRange(a Address) (laneRange, bool) {
	s := t.goneSet()
	if a > s.top[laneOf(a)].last {
		return laneRange{}, false
	}
	if t.goneCursor == nil {
		t.goneCursor = &rangeCursor{r: t.r, seen: s.writes}
	}
	return s.covering(t.goneCursor, a)
}

func (t *tx) goneSet() *rangeSet {
	if t.gone != nil {
		return t.gone
	}
	return t.s.gone
}

// vanish records that an address above the line exists for nobody any more. Every group that owns it has finished it.
func (t *tx) vanish(a Address) {
	if a <= t.meta.Line {
		return
	}
	if t.gone == nil {
		t.gone = t.s.gone.clone()
	}
	t.addRange(t.gone, laneRange{a, a})
}

// settle recomputes all lanes of a group and writes it.
func (t *tx) settle(g *group) {
	for l := range lanes {
		g.wm.Set(l, min(g.next[l]-1, t.meta.Last))
	}
	t.flushRanges(g.done)
	t.b.Set(appendKey1(t.key[:0], kindGroup, uint64(g.id)), g.encode(t.val[:0]))
}

// raise finishes everything at or below a, without counting, and moves W_floor there.
func (t *tx) raise(g *group, a Address) {
	if a <= g.wm.Lane(0).Floor {
		return
	}
	g.wm.Raise(a)
	g.hold = max(g.hold, a)
	t.trimRanges(g.done, a)
	for l := range lanes {
		g.setNext(l, t.freeFrom(g, max(g.next[l], firstInLane(l, a))))
	}
}

// begins makes the group start above a.
func (t *tx) begins(g *group, a Address) {
	g.start, g.hold, g.wm = a, a, NewWatermark(a)
	for l := range lanes {
		g.setNext(l, t.freeFrom(g, firstInLane(l, a)))
	}
	g.base = t.meta.Counters.Published - t.storedAbove(a)
}

// finishedByAll says whether every group that owns a has finished it; also when no group owns it.
func (t *tx) finishedByAll(a Address) bool {
	for _, id := range t.groupIDs() {
		g := t.group(id)
		if g == nil || !g.owns(a, t.meta.Last) {
			continue
		}
		if !t.isFinished(g, a) {
			return false
		}
	}
	return true
}

// cursor returns the command's cursor over a group's done ranges.
func (t *tx) cursor(g *group) *rangeCursor {
	for i := range t.cursors {
		if t.cursors[i].set == g.id {
			return t.cursors[i].c
		}
	}
	c := &rangeCursor{r: t.r, seen: g.done.writes}
	t.cursors = append(t.cursors, groupCursor{g.id, c})
	return c
}

type groupCursor struct {
	set GroupID
	c   *rangeCursor
}

// laneCount counts the positions of a lane in (low, high].
func laneCount(l int, low, high Address) uint64 {
	first := firstInLane(l, low)
	if first > high {
		return 0
	}
	return uint64(high-first)/lanes + 1
}

// mask tells which lanes of a set hold anything.
func (s *rangeSet) mask() uint64 {
	var m uint64
	for l := range lanes {
		if s.top[l].last != 0 {
			m |= 1 << l
		}
	}
	return m
}

func (s *rangeSet) empty() bool { return bits.OnesCount64(s.mask()) == 0 }
