package host

import (
	"maps"
	"slices"
	"sync"

	"github.com/tierq/tierq/host/catalog"
)

// addressBook knows where the hosts are: from the catalog, and from this host's list. Either may be stale, the catalog when
// the whole fleet has moved, the list when one host has. The catalog's is used first; a host that does not answer is tried
// at the other.
type addressBook struct {
	registry *Registry

	mu     sync.Mutex
	listed map[uint64]HostSpec
	known  map[uint64]catalog.Host
	byList map[uint64]bool // use the list's
}

func newAddressBook(registry *Registry, listed []HostSpec) *addressBook {
	b := &addressBook{
		registry: registry,
		listed:   make(map[uint64]HostSpec),
		known:    make(map[uint64]catalog.Host),
		byList:   make(map[uint64]bool),
	}
	for _, h := range listed {
		b.listed[h.ID] = h
		registry.SetHost(h.ID, h.RaftAddr)
	}
	return b
}

// update takes up the hosts of a view, and forgets those that were removed. One whose addresses have changed is looked for at the new ones.
func (b *addressBook) update(v *catalog.View) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.known {
		if v.RemovedHost(id) {
			delete(b.known, id)
		}
	}
	for id := range b.listed {
		if v.RemovedHost(id) {
			delete(b.listed, id)
		}
	}
	for _, h := range v.Hosts() {
		if b.known[h.ID] == h {
			continue
		}
		b.known[h.ID] = h
		delete(b.byList, h.ID)
		b.applyLocked(h.ID)
	}
}

func (b *addressBook) applyLocked(hostID uint64) {
	raft, _, ok := b.addressesLocked(hostID)
	if ok {
		b.registry.SetHost(hostID, raft)
	}
}

func (b *addressBook) addressesLocked(hostID uint64) (raft, peer string, ok bool) {
	known, isKnown := b.known[hostID]
	listed, isListed := b.listed[hostID]
	switch {
	case isKnown && !(isListed && b.byList[hostID]):
		return known.RaftAddr, known.PeerAddr, true
	case isListed:
		return listed.RaftAddr, listed.PeerAddr, true
	}
	return "", "", false
}

// hostAt returns the host whose Raft address it is.
func (b *addressBook) hostAt(address string) (hostID uint64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.listed {
		if raft, _, ok := b.addressesLocked(id); ok && raft == address {
			return id, true
		}
	}
	for id, h := range b.known {
		if h.RaftAddr == address {
			return id, true
		}
	}
	return 0, false
}

// addresses returns where a host is looked for.
func (b *addressBook) addresses(hostID uint64) (raft, peer string, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.addressesLocked(hostID)
}

// peer returns the address of a host's peer API.
func (b *addressBook) peer(hostID uint64) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, peer, ok := b.addressesLocked(hostID)
	return peer, ok
}

// flip makes a host that does not answer be looked for at its other address, if it has two.
func (b *addressBook) flip(hostID uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	known, isKnown := b.known[hostID]
	listed, isListed := b.listed[hostID]
	if isKnown && isListed && (known.RaftAddr != listed.RaftAddr || known.PeerAddr != listed.PeerAddr) {
		b.byList[hostID] = !b.byList[hostID]
		b.applyLocked(hostID)
	}
}

// others returns all hosts but one, by id.
func (b *addressBook) others(but uint64) []uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make(map[uint64]bool)
	for id := range b.listed {
		all[id] = true
	}
	for id := range b.known {
		all[id] = true
	}
	delete(all, but)
	return slices.Sorted(maps.Keys(all))
}
