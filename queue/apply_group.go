package queue

import (
	"reflect"

	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// MaxGroups bounds the consumer groups of a shard.
const MaxGroups = 1024

// Group creates, deletes, resets or configures a consumer group. With an operation id a repeated copy gets the first
// answer for 24 h of the shard's clock.
//
// Create: epoch 1. The same create again answers the group as it is; another configuration or start under the name
// is refused with GroupExistsMismatch; LimitReached beyond MaxGroups.
// Delete: range deletes, nothing is walked; UnknownGroup; MutationFenced unless the epoch is the expected one.
// Messages that only this group held back are reclaimed by Retention commands.
// Reset: the group starts anew at a point not below the line: finished ranges, retry state, recorded leases and dead
// letters go, epoch + 1. The home stays, and so do HomeIndex and Released: no Home has been committed.
// Configure: MutationFenced unless the config version is the expected one.
//
// Version 1: as above.
func (t *tx) groupCommand(c *Group, r *Result) {
	if c.Op == GroupCreate {
		t.createGroup(c, r)
		return
	}
	g := t.group(c.ID)
	switch {
	case g == nil:
		r.Code = code.UnknownGroup
		return
	case c.Op == GroupConfigure && g.configVersion != c.ExpectedVersion,
		c.Op != GroupConfigure && g.epoch != c.ExpectedEpoch:
		r.Code = code.MutationFenced
		r.describe(g)
		return
	}
	t.event.Groups = append(t.event.Groups, c.ID)
	switch c.Op {
	case GroupDelete:
		t.deleteGroup(g)
	case GroupReset:
		g = t.edit(c.ID)
		t.resetGroup(g, c.Start)
	case GroupConfigure:
		g = t.edit(c.ID)
		g.config = ownConfig(c.Config)
		g.configVersion++
	}
	r.describe(g)
}

// ownConfig shares no memory with a command. Defaults are filled in by the proposer: those of a binary are not state.
func ownConfig(c GroupConfig) GroupConfig {
	c.DelaysMs = append([]uint64(nil), c.DelaysMs...)
	return c
}

func (t *tx) createGroup(c *Group, r *Result) {
	config := ownConfig(c.Config)
	if id, ok := t.s.names[c.Name]; ok {
		g := t.group(id)
		if !reflect.DeepEqual(g.config, config) || g.created != c.Start {
			r.Code = code.GroupExistsMismatch
		}
		r.describe(g)
		return
	}
	if len(t.s.ids) >= MaxGroups {
		r.Code = code.LimitReached
		return
	}
	g := &group{id: t.meta.nextGroup, name: c.Name, config: config, configVersion: 1, created: c.Start,
		home: c.FirstHome, homeIndex: t.index, released: true, epoch: 1}
	g.done = &rangeSet{id: g.id}
	t.meta.nextGroup++
	t.begins(g, t.startOf(c.Start))
	t.edited = append(t.edited, g)
	t.b.Set(appendGroupNameKey(nil, g.name), be.AppendUint64(nil, uint64(g.id)))
	t.event.Groups = append(t.event.Groups, g.id)
	r.describe(g)
}

func (t *tx) deleteGroup(g *group) {
	t.deleted = g.id
	t.clearGroup(g.id)
	t.b.Delete(appendKey1(t.key[:0], kindGroup, uint64(g.id)))
	t.b.Delete(appendGroupNameKey(nil, g.name))
}

// clearGroup removes everything that a group keeps about messages.
func (t *tx) clearGroup(id GroupID) {
	for _, kind := range [...]byte{kindDone, kindRetry, kindLease, kindDead, kindExport} {
		t.b.DeleteRange(appendKey1(nil, kind, uint64(id)), appendKey1(nil, kind, uint64(id)+1))
	}
}

func (t *tx) resetGroup(g *group, at Start) {
	t.clearGroup(g.id)
	g.done = &rangeSet{id: g.id, writes: g.done.writes + 1}
	g.exports = 0
	g.c = GroupCounters{Retries: g.c.Retries, Redriven: g.c.Redriven, DeadTotal: g.c.DeadTotal}
	g.epoch++
	t.begins(g, t.startOf(at))
	t.event.Redrive = true
}

// startOf finds the address above which a group starts: not below the line, not above the last address.
func (t *tx) startOf(s Start) Address {
	at := t.meta.Line
	switch s.Kind {
	case StartLatest:
		at = t.meta.Last
	case StartAddress:
		if s.At > 0 {
			at = Address(s.At - 1)
		}
	case StartTime:
		at = min(firstSince(t.r, &t.meta, kindMessage, Stamp(s.At)), firstSince(t.r, &t.meta, kindParked, Stamp(s.At))) - 1
	}
	return min(max(at, t.meta.Line), t.meta.Last)
}

// firstSince finds the least address above the line of a kind of messages whose stamp is at or after a time; the next
// one to be assigned if there is none. Stamps rise with addresses, so it searches by halves.
func firstSince(r store.Reader, m *metaValue, kind byte, at Stamp) Address {
	it := openIter(r, []byte{kind}, []byte{kind + 1})
	defer it.Close()
	seek := func(a Address) (Address, bool) {
		if !it.SeekGE(appendKey1(nil, kind, uint64(a))) {
			check(it.Err())
			return m.Last + 1, false
		}
		return Address(lastU64(it.Key())), true
	}
	low, high := m.Line+1, m.Last+1
	for low < high {
		mid := low + (high-low)/2
		found, ok := seek(mid)
		if ok {
			v, err := it.Value()
			check(err)
			h, err := readHead(v)
			check(err)
			ok = h.stamp < at
		}
		if ok {
			low = found + 1
		} else {
			high = mid
		}
	}
	first, _ := seek(low)
	return first
}
