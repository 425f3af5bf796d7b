package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"

	"github.com/tierq/tierq/queue"
)

// View is an immutable copy of the catalog at one version. Records that it returns share memory with it: they must not be
// changed. The zero *View is not valid; an empty catalog's view has Version 0.
type View struct {
	d       data
	byHost  map[uint64][]uint64 // host → shards with a replica on it, ascending, deleted ones included
	byToken map[[32]byte]uint64 // hash of an access token → its id
	byQueue map[uint64]Queue    // by id
}

// Seal makes the view of the present version, if it is not made yet, and returns it. It must not run beside Apply.
func (s *State) Seal() *View {
	if v := s.view.Load(); v != nil {
		return v
	}
	v := newView(data{
		version:    s.d.version,
		fleet:      s.d.fleet,
		macKey:     s.d.macKey,
		nextShard:  s.d.nextShard,
		nextQueue:  s.d.nextQueue,
		hosts:      maps.Clone(s.d.hosts),
		queues:     maps.Clone(s.d.queues),
		placements: maps.Clone(s.d.placements),
		created:    maps.Clone(s.d.created),

		incarnations: maps.Clone(s.d.incarnations),
		hostStates:   maps.Clone(s.d.hostStates),
		removed:      maps.Clone(s.d.removed),
		moves:        maps.Clone(s.d.moves),
		joinTokens:   maps.Clone(s.d.joinTokens),
		tenants:      maps.Clone(s.d.tenants),
		accessTokens: maps.Clone(s.d.accessTokens),
		growths:      maps.Clone(s.d.growths),
	})
	s.view.Store(v)
	return v
}

func newView(d data) *View {
	v := &View{d: d, byHost: make(map[uint64][]uint64), byToken: make(map[[32]byte]uint64), byQueue: make(map[uint64]Queue, len(d.queues))}
	for _, q := range d.queues {
		v.byQueue[q.ID] = q
	}
	for id, t := range d.accessTokens {
		v.byToken[t.Hash] = id
	}
	for _, shard := range slices.Sorted(maps.Keys(d.placements)) {
		p := d.placements[shard]
		for i, r := range p.Replicas {
			if !slices.ContainsFunc(p.Replicas[:i], func(o Replica) bool { return o.HostID == r.HostID }) {
				v.byHost[r.HostID] = append(v.byHost[r.HostID], shard)
			}
		}
	}
	return v
}

// Version counts the changes of the catalog; greater is newer.
func (v *View) Version() uint64 { return v.d.version }

// Fleet returns the fleet's id, zero before the fleet is formed.
func (v *View) Fleet() FleetID { return v.d.fleet }

// MACKey returns the key of the fleet's receipts.
func (v *View) MACKey() [32]byte { return v.d.macKey }

// Host returns a host.
func (v *View) Host(id uint64) (Host, bool) {
	h, ok := v.d.hosts[id]
	return h, ok
}

// Hosts returns all hosts by id.
func (v *View) Hosts() []Host {
	return slices.SortedFunc(maps.Values(v.d.hosts), func(a, b Host) int { return cmp.Compare(a.ID, b.ID) })
}

// Queue returns a queue by name; tenant "" is DefaultTenant.
func (v *View) Queue(tenant, name string) (Queue, bool) {
	if tenant == "" {
		tenant = DefaultTenant
	}
	q, ok := v.d.queues[QueueKey{tenant, name}]
	return q, ok
}

// Queues returns a tenant's queues by name; tenant "" is DefaultTenant.
func (v *View) Queues(tenant string) []Queue {
	if tenant == "" {
		tenant = DefaultTenant
	}
	var qs []Queue
	for _, q := range v.d.queues {
		if q.Tenant == tenant {
			qs = append(qs, q)
		}
	}
	slices.SortFunc(qs, func(a, b Queue) int { return cmp.Compare(a.Name, b.Name) })
	return qs
}

// AllQueues returns the queues of all tenants by tenant and name, without those that a restore is filling.
func (v *View) AllQueues() []Queue {
	var qs []Queue
	for _, q := range v.d.queues {
		if q.Tenant != StagingTenant {
			qs = append(qs, q)
		}
	}
	slices.SortFunc(qs, func(a, b Queue) int { return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Name, b.Name)) })
	return qs
}

// QueueOfShard returns the queue that a shard belongs to; false for the catalog's own and for deleted ones.
func (v *View) QueueOfShard(shard uint64) (Queue, bool) {
	p, ok := v.d.placements[shard]
	if !ok || p.QueueID == 0 || p.Deleted {
		return Queue{}, false
	}
	return v.QueueByID(p.QueueID)
}

// Placement returns where a shard's replicas live; also of a deleted shard, which it says.
func (v *View) Placement(shard uint64) (Placement, bool) {
	p, ok := v.d.placements[shard]
	return p, ok
}

// Shards returns the shards that are not deleted, ascending.
func (v *View) Shards() []uint64 {
	var shards []uint64
	for shard, p := range v.d.placements {
		if !p.Deleted {
			shards = append(shards, shard)
		}
	}
	slices.Sort(shards)
	return shards
}

// ShardsOf returns the shards that have, or had, a replica on a host, ascending, deleted ones included.
func (v *View) ShardsOf(hostID uint64) []uint64 { return v.byHost[hostID] }

// HostOf returns the host of a shard's replica.
func (v *View) HostOf(shard uint64, replica queue.ReplicaID) (Host, bool) {
	p := v.d.placements[shard]
	r, ok := p.Replica(replica)
	if !ok {
		return Host{}, false
	}
	return v.Host(r.HostID)
}

// The encoded view: magic, version of the layout, body, CRC-32C of all before it. A snapshot of the catalog is the same.
const viewMagic = "TQCATALG"

// The layouts: the second is the first with sections behind it, and is written when there is one.
const (
	viewVersion         = 1
	viewVersionSections = 2
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// ErrCorrupt says that an encoded view does not match its checksum or its layout.
var ErrCorrupt = errors.New("catalog view is corrupt")

// EncodeView returns the bytes of a view; equal views have equal bytes.
func EncodeView(v *View) []byte {
	d := &v.d
	e := &encoder{b: []byte(viewMagic)}
	sections := d.sections()
	if len(sections) > 0 {
		e.u16(viewVersionSections)
	} else {
		e.u16(viewVersion)
	}
	e.u64(d.version)
	e.b = append(e.b, d.fleet[:]...)
	e.b = append(e.b, d.macKey[:]...)
	e.u64(d.nextShard)
	e.u64(d.nextQueue)
	e.u32(uint32(len(d.hosts)))
	for _, h := range v.Hosts() {
		e.host(h)
	}
	e.u32(uint32(len(d.queues)))
	for _, key := range slices.SortedFunc(maps.Keys(d.queues), compareKeys) {
		e.queue(d.queues[key])
	}
	e.u32(uint32(len(d.placements)))
	for _, shard := range slices.Sorted(maps.Keys(d.placements)) {
		e.placement(d.placements[shard])
	}
	e.u32(uint32(len(d.created)))
	for _, op := range slices.Sorted(maps.Keys(d.created)) {
		e.u64(op)
		e.u64(d.created[op])
	}
	if len(sections) > 0 {
		e.sections(sections)
	}
	e.u32(crc32.Checksum(e.b, crcTable))
	return e.b
}

func compareKeys(a, b QueueKey) int {
	return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Name, b.Name))
}

// DecodeView reads what EncodeView wrote. Its errors wrap ErrCorrupt.
func DecodeView(b []byte) (*View, error) {
	d, err := decodeData(b)
	if err != nil {
		return nil, err
	}
	return newView(d), nil
}

func decodeData(b []byte) (data, error) {
	if len(b) < len(viewMagic)+2+4 || string(b[:len(viewMagic)]) != viewMagic {
		return data{}, fmt.Errorf("%w: it does not begin like one", ErrCorrupt)
	}
	body, sum := b[:len(b)-4], &decoder{b: b[len(b)-4:]}
	if crc32.Checksum(body, crcTable) != sum.u32() {
		return data{}, fmt.Errorf("%w: its checksum does not match", ErrCorrupt)
	}
	d := &decoder{b: body[len(viewMagic):]}
	version := d.u16()
	if version != viewVersion && version != viewVersionSections {
		return data{}, fmt.Errorf("%w: layout version %d is not known to this binary", ErrCorrupt, version)
	}
	out := d.data()
	if version == viewVersionSections {
		d.sections(&out)
	}
	if err := d.end(); err != nil {
		return data{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return out, nil
}

func (d *decoder) data() data {
	out := NewState().d
	out.version = d.u64()
	copy(out.fleet[:], d.take(len(out.fleet)))
	copy(out.macKey[:], d.take(len(out.macKey)))
	out.nextShard = d.u64()
	out.nextQueue = d.u64()
	for range d.count(8) {
		h := d.host()
		out.hosts[h.ID] = h
	}
	for range d.count(8) {
		q := d.queue()
		out.queues[q.Key()] = q
	}
	for range d.count(8) {
		p := d.placement()
		out.placements[p.Shard] = p
	}
	for range d.count(16) {
		op := d.u64()
		out.created[op] = d.u64()
	}
	return out
}
