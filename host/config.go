package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/replica"
	"github.com/tierq/tierq/wal"
)

// HostSpec is one host of the static list. Addresses are "host:port" as the other hosts reach it.
type HostSpec struct {
	ID         uint64
	Role       catalog.HostRole
	RaftAddr   string
	PeerAddr   string
	ClientAddr string // as clients reach it; empty for a witness host
	Domain     string // what fails together with it; empty: the host alone
}

// Config says how a host is opened. Every field is per process and may change at a restart, but HostID, the host's role, and
// LogKind and ExecWorkers, which are fixed in stored data.
type Config struct {
	// HostID is this host's id in Hosts. It is recorded in the data directory at first start.
	HostID uint64

	// Hosts lists the fleet. It decides the catalog's members when the fleet is formed; later it is only where to look
	// for the others, except this host's own addresses and domain, which it tells the catalog.
	Hosts []HostSpec

	// DataDir holds everything of this host; it is created if absent.
	DataDir string

	// RaftListen and PeerListen are what to bind, "host:port", where that differs from this host's addresses in Hosts.
	RaftListen string
	PeerListen string

	// PeerListener, if not nil, is used for the peer API in place of PeerListen, and closed by the host.
	PeerListener net.Listener

	// TLS, if not nil, protects the Raft port and the peer API: every host shows a certificate that the others' roots trust,
	// for the names or addresses in Hosts. The caller keeps it current (Store.Watch). All hosts have it, or none.
	TLS *certs.Store

	// RequireHostIDs refuses certificates that name no host (certs.CheckHost); one that names another host is refused anyhow.
	RequireHostIDs bool

	// Faults, if not nil, stands in the way of what this host sends to the others. Tests only: no configuration leads here.
	Faults Faults

	// Installer streams the state of a full replica to one that is behind its leader's log. Without one, a host can
	// neither send nor take a whole state.
	Installer replica.Installer

	// Logger should name the host, where a process has several. Defaults to a no-op logger.
	Logger *zap.Logger

	// Registerer receives the metrics; nil registers none.
	Registerer prometheus.Registerer

	// LogKind is the Raft log. Defaults to the default of wal.
	LogKind wal.Kind

	// ExecWorkers is the number of the engine's step workers; it is fixed in stored data.
	//
	// Defaults to 1.
	ExecWorkers uint64

	// RTT is the engine's tick. An election timeout is ElectionTicks of them, to twice that at random, and a
	// heartbeat is sent every HeartbeatTicks.
	//
	// Default to 50 ms, 10 and 2 (docs/adr/0046), with ManyShards to 400 ms, 5 and 1. RTT must be in [5 ms, 1 s].
	RTT            time.Duration
	ElectionTicks  uint64
	HeartbeatTicks uint64

	// ManyShards lets idle replicas cost less memory and CPU, and elections take longer (docs/adr/0055). It is the same for all hosts of a
	// process.
	ManyShards bool

	// SnapshotEntries is after how many entries a replica's log is cut; a quarter of them stay, for replicas that are behind
	// by less.
	//
	// Defaults to 20,000.
	SnapshotEntries uint64

	// ProposeTimeout is the deadline of a proposal, read or catalog command whose context has none.
	//
	// Defaults to 5 s.
	ProposeTimeout time.Duration

	// ReconcileInterval is how often this host compares what it runs with the catalog when nothing has changed.
	//
	// Defaults to 5 s, ± 10 %.
	ReconcileInterval time.Duration

	// ReportInterval is how often hosts report to one another, and Silence after which time without a report a host is
	// taken for dead.
	//
	// Default to 300 ms and 1 s.
	ReportInterval time.Duration
	Silence        time.Duration

	// CatalogPatience is after which silence another host takes a host's vote in the catalog, if there is one that can.
	//
	// Defaults to 5 min.
	CatalogPatience time.Duration

	// LowSpaceBytes is the free space of the data directory below which LowSpace says so. Defaults to 1 GiB.
	LowSpaceBytes uint64

	// WallClock and BootClock default to the machine's; tests inject theirs.
	WallClock func() time.Time
	BootClock func() time.Duration

	// The callbacks tell what happens. They come from the engine's goroutines: none may block, nor call a method of
	// RaftHost that takes a context. Each may be nil. They are called from Start until Close returns.

	// OnApplied is called after an Update of a full replica is visible to reads.
	OnApplied func(shard uint64, a queue.Applied)
	// OnInstalled is called after a snapshot replaced a full replica's state.
	OnInstalled func(shard uint64)
	// OnReplicaStarted is called before a full replica's first OnApplied, when its state can be read.
	OnReplicaStarted func(shard uint64, replica queue.ReplicaID, r queue.Reader)
	// OnReplicaStopped is called after the last OnApplied of a full replica that was started.
	OnReplicaStopped func(shard uint64)
	// OnLeave is called before this host's full replica of a queue leaves its shard: it hands the homes that are here over, and returns
	// an error while some are left, to be called again. It may block until ctx ends.
	OnLeave func(ctx context.Context, shard uint64) error
	// OnLeader is called when a replica of this host learns of a leader, 0 for none. It may be late: a dead leader stays until
	// an election.
	OnLeader func(shard uint64, leader queue.ReplicaID, term uint64)
	// OnEnded is called when a host is found to have ended: it is silent from now on.
	OnEnded func(hostID uint64)
	// OnCatalog is called with each newer view, in order of versions; versions may be skipped.
	OnCatalog func(*catalog.View)
	// OnLastEntry is called after a replica's last saved entry is durable on this host.
	OnLastEntry func(shard uint64, replica queue.ReplicaID, index queue.Index, term uint64)
	// OnPoisoned is called when a replica of this host was stopped because it cannot apply a committed entry. It stays so
	// until the host starts again.
	OnPoisoned func(shard uint64, err error)
}

// Faults is a broken network, as package faultnet has it.
type Faults interface {
	// Raft stands before a transport. hostAt says whose a Raft address is.
	Raft(from uint64, under raftio.ITransport, hostAt func(address string) (hostID uint64, ok bool)) raftio.ITransport
	// Peer stands before what calls the peer API of another host.
	Peer(from, to uint64, under http.RoundTripper) http.RoundTripper
}

// EnsureDefaults fills in the fields that have a default and are zero.
func (c *Config) EnsureDefaults() {
	setDefault(&c.ExecWorkers, 1)
	if c.ManyShards {
		setDefault(&c.RTT, 400*time.Millisecond)
		setDefault(&c.ElectionTicks, 5)
		setDefault(&c.HeartbeatTicks, 1)
	}
	setDefault(&c.RTT, 50*time.Millisecond)
	setDefault(&c.ElectionTicks, 10)
	setDefault(&c.HeartbeatTicks, 2)
	setDefault(&c.SnapshotEntries, 20_000)
	setDefault(&c.ProposeTimeout, 5*time.Second)
	setDefault(&c.ReconcileInterval, 5*time.Second)
	setDefault(&c.ReportInterval, 300*time.Millisecond)
	setDefault(&c.Silence, time.Second)
	setDefault(&c.CatalogPatience, 5*time.Minute)
	setDefault(&c.LowSpaceBytes, 1<<30)
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.Installer == nil {
		c.Installer = noInstaller{}
	}
	if c.WallClock == nil {
		c.WallClock = time.Now
	}
	if c.BootClock == nil {
		c.BootClock = bootTime
	}
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate reports everything that is wrong with c, joined into one error.
func (c *Config) Validate() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.DataDir == "" {
		fail("the data directory is not set")
	}
	if c.RTT < 5*time.Millisecond || c.RTT > time.Second {
		fail("the engine's tick %v is not in [5ms, 1s]", c.RTT)
	}
	if c.HeartbeatTicks < 1 || c.ElectionTicks < 5*c.HeartbeatTicks {
		fail("an election timeout of %d ticks is not at least 5 heartbeats of %d", c.ElectionTicks, c.HeartbeatTicks)
	}
	if self, ok := c.self(); !ok {
		fail("host %d is not in the list of hosts", c.HostID)
	} else if self.Role == catalog.HostFull && c.fullHosts() < 2 {
		fail("a fleet needs at least 2 full hosts, the list of hosts has %d", c.fullHosts())
	}
	seen := make(map[string]uint64)
	for i, h := range c.Hosts {
		errs = append(errs, h.validate())
		if slices.ContainsFunc(c.Hosts[:i], func(o HostSpec) bool { return o.ID == h.ID }) {
			fail("host %d is in the list of hosts twice", h.ID)
		}
		for _, address := range []string{h.RaftAddr, h.PeerAddr} {
			if other, ok := seen[address]; ok && address != "" {
				fail("address %s is given to host %d and to host %d", address, other, h.ID)
			}
			seen[address] = h.ID
		}
	}
	return errors.Join(errs...)
}

func (h *HostSpec) validate() error {
	if h.ID == 0 {
		return errors.New("host ids begin at 1")
	}
	if h.Role != catalog.HostFull && h.Role != catalog.HostWitness {
		return fmt.Errorf("host %d: the role is neither full nor witness", h.ID)
	}
	if len(h.Domain) > catalog.MaxDomainBytes {
		return fmt.Errorf("host %d: the domain is longer than %d bytes", h.ID, catalog.MaxDomainBytes)
	}
	return errors.Join(checkAddress(h.ID, "Raft", h.RaftAddr), checkAddress(h.ID, "peer", h.PeerAddr))
}

// checkAddress accepts host:port with a port from 1.
func checkAddress(hostID uint64, what, address string) error {
	name, port, err := net.SplitHostPort(address)
	if err != nil || name == "" {
		return fmt.Errorf("host %d: the %s address %q is not host:port", hostID, what, address)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("host %d: the port of the %s address %q is not in 1 to 65535", hostID, what, address)
	}
	return nil
}

func (c *Config) self() (HostSpec, bool) { return c.host(c.HostID) }

func (c *Config) host(id uint64) (HostSpec, bool) {
	i := slices.IndexFunc(c.Hosts, func(h HostSpec) bool { return h.ID == id })
	if i < 0 {
		return HostSpec{}, false
	}
	return c.Hosts[i], true
}

func (c *Config) fullHosts() (n int) {
	for _, h := range c.Hosts {
		if h.Role == catalog.HostFull {
			n++
		}
	}
	return n
}

// catalogMembers returns the members of the catalog of a fleet that is formed from the list: by id, the first 5 full hosts if
// there are so many, else the first 3, or all; with 2, the first witness host too. A replica's id is its rank.
func (c *Config) catalogMembers() []catalog.Replica {
	hosts := slices.SortedFunc(slices.Values(c.Hosts), func(a, b HostSpec) int { return cmp.Compare(a.ID, b.ID) })
	want := 3
	if c.fullHosts() >= 5 {
		want = 5
	}
	var members []catalog.Replica
	add := func(h HostSpec, birth catalog.Birth) {
		members = append(members, catalog.Replica{ID: queue.ReplicaID(len(members) + 1), HostID: h.ID, Birth: birth})
	}
	for _, h := range hosts {
		if h.Role == catalog.HostFull && len(members) < want {
			add(h, catalog.BirthInitial)
		}
	}
	if len(members) == 2 {
		if i := slices.IndexFunc(hosts, func(h HostSpec) bool { return h.Role == catalog.HostWitness }); i >= 0 {
			add(hosts[i], catalog.BirthWitness)
		}
	}
	return members
}
