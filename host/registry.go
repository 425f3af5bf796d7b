package host

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
)

// A target is how the engine names a host, in memberships, bootstrap records and the source field of every
// message, for ever. When any node registry is in use the engine accepts nothing but UUIDs there, and
// compares them as strings, so a host id is written as one: RFC 9562 version 8 (free form), "tierq\0", and
// the 64 bits of the id around the version and variant digits.
//
//	74696572-7100-800H-8HHH-HHHHHHHHHHHH
//	  t i e r  q      ^ the highest four bits
//
// Host 7 is 74696572-7100-8000-8000-000000000007. Part of the format; do not change.
const targetPrefix = "74696572-7100-800"

// targetDigits is the length of what follows the prefix, H-8HHH-HHHHHHHHHHHH.
const targetDigits = 19

// Target returns the target of a host. Host ids begin at 1; the target of 0 is not one that ParseTarget
// accepts.
func Target(hostID uint64) string {
	var b [len(targetPrefix) + targetDigits]byte
	n := copy(b[:], targetPrefix)
	for i, at := 0, n; at < len(b); at++ {
		switch at - n {
		case 1, 6:
			b[at] = '-'
		case 2:
			b[at] = '8'
		default:
			b[at] = "0123456789abcdef"[hostID>>(60-4*i)&0xf]
			i++
		}
	}
	return string(b[:])
}

// ParseTarget returns the host that a target names. It accepts exactly what Target returns for ids from 1.
func ParseTarget(target string) (hostID uint64, err error) {
	digits, ok := strings.CutPrefix(target, targetPrefix)
	if !ok || len(digits) != targetDigits {
		return 0, fmt.Errorf("%q is not the target of a host", target)
	}
	for at := range len(digits) {
		c := digits[at]
		switch {
		case at == 1 || at == 6:
			ok = ok && c == '-'
		case at == 2:
			ok = ok && c == '8'
		case c >= '0' && c <= '9':
			hostID = hostID<<4 | uint64(c-'0')
		case c >= 'a' && c <= 'f':
			hostID = hostID<<4 | uint64(c-'a'+10)
		default:
			ok = false
		}
	}
	if !ok || hostID == 0 {
		return 0, fmt.Errorf("%q is not the target of a host", target)
	}
	return hostID, nil
}

// Errors of Resolve. The engine drops the message, as it does when a host is down; Raft sends again.
var (
	ErrUnknownReplica = errors.New("host of the replica is unknown")
	ErrUnknownHost    = errors.New("address of the host is unknown")
)

// Registry tells one NodeHost where the others are. A replica lives on a host, for ever; a host has an
// address, which may change at any time. The engine supplies the first relation, from memberships and from
// the messages that arrive; SetHost the second, from the catalog and from the configuration's seeds.
//
// # What NodeHostConfig must hold
//
//	NodeHostID:                 host.Target(ownHostID), from the first start on. The engine puts it into every
//	                            message as the source, and records it in NODEHOST.ID: another one is refused later.
//	                            (Its comment says that it is used in gossip mode only; it is used always.)
//	Expert.NodeRegistryFactory: registry.Factory()
//	DefaultNodeRegistryEnabled: false, and Gossip empty. Both together are refused.
//	RaftAddress:                host:port, this host's own address as SetHost on the others has it: an IPv4 address
//	                            or a host name, port 1 to 65535 (the engine accepts neither IPv6 nor port 0). Not
//	                            identity any more: it may differ at each start.
//	ListenAddress:              optional, same form, if it is not RaftAddress.
//
// Initial members of StartReplica, and the target of every membership change, are then Target(hostID): the
// engine refuses anything that is not a UUID (ErrInvalidTarget, ErrInvalidAddress). A registry cannot be
// introduced into, or taken out of, a fleet that has data. tools.ImportSnapshot does not work with one.
//
// With MutualTLS the engine's client verifies the host part of the address given to SetHost, so certificates
// need it as a subject alternative name.
//
// # Use
//
// One Registry belongs to one NodeHost at a time; several NodeHosts in one process have one each. It may be
// given to the next NodeHost after the former was closed, and keeps its hosts. All methods may be called from
// any goroutine and none blocks.
//
// Invariants, checked by Check:
//  1. every replica's host id is ≥ 1;
//  2. every known host has a non-empty address, and one connection key per stream.
type Registry struct {
	// OnConflict, if not nil, is told when something claims that a replica lives on another host than the one
	// first learned: a copied data directory, or two hosts configured with one id. The first claim stands.
	// Set it before the NodeHost is made. It is called for every message of such a sender, on the receiving
	// goroutine: it must return fast and must not call the Registry.
	OnConflict func(shardID, replicaID, hostID, claimedHostID uint64)

	mu       sync.RWMutex
	streams  uint64
	hosts    map[uint64]hostAddress
	replicas map[raftio.NodeInfo]uint64
}

// hostAddress is a host's Raft address, and the names of the connections to it. The engine has one send
// queue, and one TCP connection, per name, so a name contains the address: a changed address gets new ones,
// and the old ones end by failing or by being idle.
type hostAddress struct {
	address string
	keys    []string
}

var _ raftio.INodeRegistry = (*Registry)(nil)

// NewRegistry returns a Registry that knows no host.
func NewRegistry() *Registry {
	return &Registry{
		streams:  1,
		hosts:    make(map[uint64]hostAddress),
		replicas: make(map[raftio.NodeInfo]uint64),
	}
}

// SetHost sets the address, "host:port", at which the Raft transport of a host is reached; "" is RemoveHost.
// The next message to any of its replicas goes there. Messages queued for the former address are lost, which
// Raft bears.
func (r *Registry) SetHost(hostID uint64, raftAddress string) {
	if raftAddress == "" {
		r.RemoveHost(hostID)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hosts[hostID].address != raftAddress {
		r.hosts[hostID] = newHostAddress(raftAddress, r.streams)
	}
}

// RemoveHost forgets a host's address. Its replicas stay known and get no messages.
func (r *Registry) RemoveHost(hostID uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.hosts, hostID)
}

// Address returns the address last set for a host.
func (r *Registry) Address(hostID uint64) (raftAddress string, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h, ok := r.hosts[hostID]
	return h.address, ok
}

// HostOf returns the host on which a replica lives, if the engine has told: it does for the replicas of
// shards that run, or ran, on this host.
func (r *Registry) HostOf(shardID, replicaID uint64) (hostID uint64, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	hostID, ok = r.replicas[raftio.GetNodeInfo(shardID, replicaID)]
	return hostID, ok
}

// Add is called by the engine: the replica lives on the host that target names. What is not a host's target
// is ignored; that the engine never lets into a membership. A second, different claim is reported to
// OnConflict and ignored too.
func (r *Registry) Add(shardID, replicaID uint64, target string) {
	claimed, err := ParseTarget(target)
	if err != nil {
		return
	}
	replica := raftio.GetNodeInfo(shardID, replicaID)
	// It is called for every message received, so the known case takes no write lock.
	if hostID, ok := r.HostOf(shardID, replicaID); ok {
		r.checkClaim(replica, hostID, claimed)
		return
	}
	r.mu.Lock()
	hostID, ok := r.replicas[replica]
	if !ok {
		hostID = claimed
		r.replicas[replica] = claimed
	}
	r.mu.Unlock()
	r.checkClaim(replica, hostID, claimed)
}

func (r *Registry) checkClaim(replica raftio.NodeInfo, hostID, claimed uint64) {
	if hostID != claimed && r.OnConflict != nil {
		r.OnConflict(replica.ShardID, replica.ReplicaID, hostID, claimed)
	}
}

// Remove is called by the engine when a replica has left its shard.
func (r *Registry) Remove(shardID, replicaID uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.replicas, raftio.GetNodeInfo(shardID, replicaID))
}

// RemoveShard is called by the engine when this host's own replica has left the shard.
func (r *Registry) RemoveShard(shardID uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for replica := range r.replicas {
		if replica.ShardID == shardID {
			delete(r.replicas, replica)
		}
	}
}

// Resolve is called by the engine for every message: where to connect for a replica, and the name of the
// connection.
func (r *Registry) Resolve(shardID, replicaID uint64) (address, connection string, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	hostID, ok := r.replicas[raftio.GetNodeInfo(shardID, replicaID)]
	if !ok {
		return "", "", ErrUnknownReplica
	}
	h, ok := r.hosts[hostID]
	if !ok {
		return "", "", ErrUnknownHost
	}
	return h.address, h.keys[shardID%uint64(len(h.keys))], nil
}

// Close is called by the engine while its NodeHost closes. It forgets the replicas and keeps the hosts.
func (r *Registry) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.replicas)
	return nil
}

// Check returns an error that names the first invariant that does not hold.
func (r *Registry) Check() error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for replica, hostID := range r.replicas {
		if hostID == 0 {
			return fmt.Errorf("invariant 1: shard %d replica %d is on host 0", replica.ShardID, replica.ReplicaID)
		}
	}
	for hostID, h := range r.hosts {
		if h.address == "" || uint64(len(h.keys)) != r.streams {
			return fmt.Errorf("invariant 2: host %d has address %q and %d connection keys, not %d", hostID, h.address, len(h.keys), r.streams)
		}
	}
	return nil
}

// Factory returns what NodeHostConfig.Expert.NodeRegistryFactory must be set to, for one NodeHost to use r.
func (r *Registry) Factory() config.NodeRegistryFactory { return registryFactory{r} }

type registryFactory struct{ registry *Registry }

// Create is called by NewNodeHost. It fails if NodeHostID was not set to the target of a host: messages would
// go out with a source that no other host can resolve.
func (f registryFactory) Create(nodeHostID string, streams uint64, _ config.TargetValidator) (raftio.INodeRegistry, error) {
	if _, err := ParseTarget(nodeHostID); err != nil {
		return nil, fmt.Errorf("NodeHostConfig.NodeHostID must be host.Target(id): %w", err)
	}
	f.registry.setStreams(max(streams, 1))
	return f.registry, nil
}

// setStreams sets how many connections the engine wants to each host.
func (r *Registry) setStreams(streams uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.streams = streams
	for hostID, h := range r.hosts {
		r.hosts[hostID] = newHostAddress(h.address, streams)
	}
}

func newHostAddress(address string, streams uint64) hostAddress {
	keys := make([]string, streams)
	for i := range keys {
		keys[i] = address + "-" + strconv.Itoa(i)
	}
	return hostAddress{address: address, keys: keys}
}
