package catalog

import (
	"maps"
	"slices"
)

// A view of the second layout has sections behind the first: a tag, and content that only the tag's reader understands, by tag. One without
// content is left out. The tags are part of the format; do not renumber.
const (
	sectionIncarnations = 1
	sectionHostStates   = 2
	sectionRemoved      = 3
	sectionMoves        = 4
	sectionJoinTokens   = 5
	sectionTenants      = 16
	sectionAccessTokens = 17
	sectionTenantBytes  = 18
	sectionGrowths      = 24
	sectionGrowthsBegun = 25
)

// section is one of them, encoded.
type section struct {
	tag  uint16
	body []byte
}

// sections returns those that have content.
func (d *data) sections() []section {
	all := []section{
		{sectionIncarnations, list(d.incarnations, func(e *encoder, id, v uint64) { e.u64(id); e.u64(v) })},
		{sectionHostStates, list(d.hostStates, func(e *encoder, id uint64, v HostState) { e.u64(id); e.u8(uint8(v)) })},
		{sectionRemoved, list(d.removed, func(e *encoder, id uint64, _ bool) { e.u64(id) })},
		{sectionMoves, list(d.moves, func(e *encoder, _ uint64, m Move) { e.move(m) })},
		{sectionJoinTokens, list(d.joinTokens, func(e *encoder, _ uint64, t JoinToken) { e.joinToken(t) })},
		{sectionTenants, list(d.tenants, func(e *encoder, _ uint64, t Tenant) { e.tenant(t) })},
		{sectionAccessTokens, list(d.accessTokens, func(e *encoder, _ uint64, t AccessToken) { e.accessToken(t) })},
		{sectionTenantBytes, list(d.tenantBytes(), func(e *encoder, id, v uint64) { e.u64(id); e.u64(v) })},
		{sectionGrowths, list(d.growths, func(e *encoder, _ uint64, g Growth) { e.growth(g) })},
		{sectionGrowthsBegun, list(d.growthsBegun(), func(e *encoder, id, v uint64) { e.u64(id); e.u64(v) })},
	}
	return slices.DeleteFunc(all, func(s section) bool { return s.body == nil })
}

// list encodes a map by key, nil if it is empty.
func list[V any](m map[uint64]V, record func(*encoder, uint64, V)) []byte {
	if len(m) == 0 {
		return nil
	}
	e := &encoder{}
	e.u32(uint32(len(m)))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		record(e, k, m[k])
	}
	return e.b
}

func (e *encoder) sections(all []section) {
	e.u32(uint32(len(all)))
	for _, s := range all {
		e.u16(s.tag)
		e.str(string(s.body))
	}
}

// sections reads them into out. They ascend, and none is empty, so that equal views have equal bytes.
func (d *decoder) sections(out *data) {
	n, last := d.count(6), uint16(0)
	if n == 0 {
		d.err = errMalformed
	}
	for range n {
		tag, body := d.u16(), d.str()
		if d.err != nil {
			return
		}
		if tag <= last {
			d.err = errMalformed
			return
		}
		last = tag
		in := &decoder{b: []byte(body)}
		in.section(tag, out)
		if err := in.end(); err != nil {
			d.err = err
			return
		}
	}
}

func (d *decoder) section(tag uint16, out *data) {
	switch tag {
	case sectionIncarnations:
		unlist(d, 16, out.incarnations, func() (uint64, uint64) { return d.u64(), d.u64() })
	case sectionHostStates:
		unlist(d, 9, out.hostStates, func() (uint64, HostState) { return d.u64(), HostState(d.u8()) })
	case sectionRemoved:
		unlist(d, 8, out.removed, func() (uint64, bool) { return d.u64(), true })
	case sectionMoves:
		unlist(d, moveBytes, out.moves, func() (uint64, Move) { m := d.move(); return m.Shard, m })
	case sectionJoinTokens:
		unlist(d, 48, out.joinTokens, func() (uint64, JoinToken) { t := d.joinToken(); return t.ID, t })
	case sectionTenants:
		unlist(d, tenantBytes, out.tenants, func() (uint64, Tenant) { t := d.tenant(); return t.ID, t })
	case sectionAccessTokens:
		unlist(d, accessTokenBytes, out.accessTokens, func() (uint64, AccessToken) { t := d.accessToken(); return t.ID, t })
	case sectionTenantBytes:
		limits := map[uint64]uint64{}
		unlist(d, 16, limits, func() (uint64, uint64) { return d.u64(), d.u64() })
		if d.err == nil && !out.setTenantBytes(limits) {
			d.err = errMalformed
		}
	case sectionGrowths:
		unlist(d, growthBytes, out.growths, func() (uint64, Growth) { g := d.growth(); return g.QueueID, g })
	case sectionGrowthsBegun:
		times := map[uint64]uint64{}
		unlist(d, 16, times, func() (uint64, uint64) { return d.u64(), d.u64() })
		if d.err == nil && !out.setGrowthsBegun(times) {
			d.err = errMalformed
		}
	default:
		d.err = errMalformed
	}
}

// unlist reads what list wrote; keys must ascend.
func unlist[V any](d *decoder, size int, m map[uint64]V, record func() (uint64, V)) {
	n := d.count(size)
	if n == 0 {
		d.err = errMalformed
	}
	var last uint64
	for i := range n {
		k, v := record()
		if d.err != nil || i > 0 && k <= last {
			d.err = errMalformed
			return
		}
		last = k
		m[k] = v
	}
}
