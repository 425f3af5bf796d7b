// Package node assembles a host: the Raft host, a desk for every full replica (batcher, homes, housekeeper), and the
// listeners. It is the only package that knows them all.
//
// A full host is Open, Serve, Close; a witness host the same without desks and without an API listener.
package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer/peerv1/peerv1connect"
	"github.com/tierq/tierq/node/admin"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/swarm"
)

// drainTimeout bounds how long a stop waits for homes to be handed over and calls to end.
const drainTimeout = 5 * time.Second

// listenerGrace bounds how long a stop waits for calls to be answered, once homes and leaders are elsewhere. As long as it waits, the others
// may take the host for one that stays.
const listenerGrace = time.Second

// Node is one running host. Safe for concurrent use.
type Node struct {
	id       uint64
	cfg      Config
	log      *zap.Logger
	raft     *host.RaftHost
	metrics  *metrics
	registry *prometheus.Registry
	started  time.Time

	mu      sync.RWMutex
	desks   map[uint64]*desk
	closing bool
	notify  chan struct{} // closed and replaced at every change of leaders, replicas or the catalog
	catalog *catalog.View
	news    chan struct{} // closed and replaced at every change of the catalog
	events  *event.Ring

	planMu  sync.Mutex // guards the plan for the leaders
	plan    []leaderMove
	planned time.Time

	access *access

	peerCerts, apiCerts *certs.Store // nil: plain text
	watching            func()       // ends the watch of the files
	growing             func()       // ends the driving of growths; nil on a witness host
	driver              *driver      // of growths; nil on a witness host

	api, admin *http.Server
	apiAddr    net.Addr
	adminAddr  net.Addr
	closeOnce  sync.Once
	closeErr   error
}

// Listeners are sockets that the caller has bound already; nil ones are bound by Open to the configuration's
// addresses.
type Listeners struct {
	API, Peer, Admin net.Listener
}

// Open takes the data directory and the ports and starts the host. Its errors are one line each, say what to do, and
// leave nothing open. The returned Node serves until Close.
func Open(cfg Config, ls Listeners, log *zap.Logger) (*Node, error) { return open(cfg, ls, log, nil) }

// open is Open for a host whose Raft side adjust, if not nil, sets up otherwise than a configuration can.
func open(cfg Config, ls Listeners, log *zap.Logger, adjust func(*host.Config)) (_ *Node, err error) {
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	n := &Node{
		id: cfg.Host, cfg: cfg, log: log, events: event.NewRing(keptEvents), registry: prometheus.NewRegistry(), started: time.Now(),
		desks: map[uint64]*desk{}, notify: make(chan struct{}), news: make(chan struct{}),
	}
	n.log = n.events.Watch(log).With(zap.Uint64("host", cfg.Host))
	n.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	n.metrics = newMetrics(n.registry)
	if n.access, err = openAccess(cfg.Auth); err != nil {
		return nil, err
	}
	if n.access.required && cfg.TLS == nil {
		n.log.Warn("auth.required without tls: whoever reaches the peer port calls as any tenant: give the hosts certificates, or keep their ports on a network of their own")
	}
	if err := n.openCerts(); err != nil {
		return nil, err
	}
	if err := n.bind(&ls); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			closeListeners(ls)
		}
	}()
	raft := n.hostConfig(ls)
	if adjust != nil {
		adjust(&raft)
	}
	n.raft, err = host.Open(raft)
	if err != nil {
		return nil, err
	}
	n.catalog = n.raft.Catalog()
	n.registry.MustRegister(newCollector(n), movesCollector{n}, endedCollector{n}, buildInfo(cfg.Version))
	n.watchCerts()
	n.serve(ls)
	n.raft.Start()
	return n, nil
}

// bind opens the listeners that the caller did not give.
func (n *Node) bind(ls *Listeners) error {
	self := n.cfg.Self()
	listen := func(name, addr string, l *net.Listener) error {
		if *l != nil || addr == "" || addr == "off" {
			return nil
		}
		var err error
		if *l, err = net.Listen("tcp", addr); err != nil {
			return fmt.Errorf("the %s address %s cannot be bound: %w: stop what uses it, or configure another one", name, addr, err)
		}
		return nil
	}
	err := errors.Join(listen("API", self.API, &ls.API), listen("admin", n.cfg.Admin, &ls.Admin))
	if err != nil {
		closeListeners(*ls)
	}
	return err
}

func closeListeners(ls Listeners) {
	for _, l := range []net.Listener{ls.API, ls.Peer, ls.Admin} {
		if l != nil {
			_ = l.Close()
		}
	}
}

func (n *Node) hostConfig(ls Listeners) host.Config {
	c := host.Config{
		HostID: n.cfg.Host, DataDir: n.cfg.Data, Installer: &swarm.Installer{}, PeerListener: ls.Peer, Logger: n.log, Registerer: n.registry, LowSpaceBytes: n.cfg.LowSpaceBytes, TLS: n.peerCerts, RequireHostIDs: n.cfg.TLSRequireHostIDs, WallClock: n.cfg.wall,
		ManyShards:       n.cfg.Profile == ProfileManyShards,
		OnApplied:        n.onApplied,
		OnInstalled:      n.onInstalled,
		OnReplicaStarted: n.onStarted,
		OnReplicaStopped: n.onStopped,
		OnLeave:          n.onLeave,
		OnLeader:         n.onLeader,
		OnEnded:          n.onEnded,
		OnCatalog:        n.onCatalog,
	}
	for _, h := range n.cfg.Hosts {
		role := catalog.HostFull
		if h.Role == RoleWitness {
			role = catalog.HostWitness
		}
		c.Hosts = append(c.Hosts, host.HostSpec{ID: h.ID, Role: role, RaftAddr: h.Raft, PeerAddr: h.Peer, ClientAddr: h.API, Domain: h.Domain})
	}
	return c
}

// serve starts the listeners. The public services are also registered on the peer API, where they do not forward.
func (n *Node) serve(ls Listeners) {
	if ls.API != nil {
		count := func(c code.Code) { n.metrics.refused.WithLabelValues(c.String()).Inc() }
		local := api.NewServer(api.Options{Backend: n, Logger: n.log, OnRefusal: count})
		local.Mount(api.Forwarded(n.raft.Peers()))
		n.raft.Peers().Handle(peerv1connect.NewOutboxServiceHandler(exportService{n}))
		public := api.NewServer(api.Options{Backend: n, Logger: n.log, Forward: api.ForwardTenant(n.raft.Peers().Client), Admit: n.admit, OnForward: n.metrics.forwarded.Inc, OnRefusal: count})
		mux := http.NewServeMux()
		public.Mount(mux)
		n.growing = n.driveGrowths(public)
		n.apiAddr = ls.API.Addr()
		n.api = newServer(n.guard(mux, count))
		if n.apiCerts != nil {
			n.api.TLSConfig = n.apiCerts.Server("h2", "http/1.1")
		}
		go n.run("API", n.api, ls.API)
	}
	if ls.Admin != nil {
		n.adminAddr = ls.Admin.Addr()
		n.admin = newServer(admin.Handler(admin.Options{
			Gatherer: n.gatherer(), Healthy: n.healthy, Ready: n.ready, Stats: n.stats, AllStats: n.allStats,
		}))
		go n.run("admin", n.admin, ls.Admin)
	}
}

func (n *Node) run(name string, s *http.Server, l net.Listener) {
	serve := s.Serve
	if s.TLSConfig != nil {
		serve = func(l net.Listener) error { return s.ServeTLS(l, "", "") }
	}
	if err := serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		n.log.Error("listener ended", zap.String("listener", name), zap.Error(err))
	}
}

// newServer serves HTTP/1.1 and HTTP/2 on one port, without TLS until its TLSConfig is set.
func newServer(h http.Handler) *http.Server {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{Handler: h, Protocols: p, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 4096, MaxReceiveBufferPerConnection: 8 << 20, MaxReceiveBufferPerStream: 4 << 20}}
}

// APIAddr and AdminAddr are the bound addresses; nil without that listener.
func (n *Node) APIAddr() net.Addr   { return n.apiAddr }
func (n *Node) AdminAddr() net.Addr { return n.adminAddr }

// AwaitReady returns once the host is part of its fleet.
func (n *Node) AwaitReady(ctx context.Context) error { return n.raft.AwaitReady(ctx) }

// Close hands homes and leaders over where it can, ends the calls, and stops the host. It takes at most three times drainTimeout and
// may be called more than once.
func (n *Node) Close() error {
	n.closeOnce.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		n.releaseHomes(ctx)
		if led := n.raft.Drain(ctx); led > 0 {
			n.log.Info("not all leaders were handed over: elections will replace them", zap.Int("shards", led))
		}
		cancel()
		n.closeErr = n.close()
	})
	return n.closeErr
}

// stop is Close without handing over, for a fleet that stops as a whole.
func (n *Node) stop() error {
	n.closeOnce.Do(func() { n.closeErr = n.close() })
	return n.closeErr
}

func (n *Node) close() error {
	n.watching()
	if n.growing != nil {
		n.growing()
	}
	ctx, cancel := context.WithTimeout(context.Background(), listenerGrace)
	defer cancel()
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	var errs []error
	for _, s := range []*http.Server{n.api, n.admin} {
		if s == nil {
			continue
		}
		if err := s.Shutdown(ctx); err != nil {
			_ = s.Close()
		}
	}
	// The listeners may have used their time up waiting for streams, which clients keep open while they have nothing to say.
	ctx, cancelDesks := context.WithTimeout(context.Background(), drainTimeout)
	defer cancelDesks()
	for _, d := range n.takeDesks() {
		if err := d.Close(ctx); err != nil {
			n.log.Info("a replica's calls did not end in time", zap.Uint64("shard", d.shard), zap.Error(err))
		}
	}
	return errors.Join(append(errs, n.raft.Close())...)
}

func (n *Node) takeDesks() []*desk {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*desk
	for s, d := range n.desks {
		out = append(out, d)
		delete(n.desks, s)
	}
	return out
}

// releaseHomes hands every home on this host to another alive full replica, so that nobody has to wait for a lease.
func (n *Node) releaseHomes(ctx context.Context) {
	n.mu.RLock()
	desks := make([]*desk, 0, len(n.desks))
	for _, d := range n.desks {
		desks = append(desks, d)
	}
	n.mu.RUnlock()
	var wg sync.WaitGroup
	for _, d := range desks {
		wg.Add(1)
		go func() {
			defer wg.Done()
			other := d.otherReplica()
			if other == 0 {
				return
			}
			if err := d.keeper.ReleaseAll(ctx, func(string) queue.ReplicaID { return other }); err != nil {
				d.log.Info("homes not handed over: they will be replaced", zap.Error(err))
			}
		}()
	}
	wg.Wait()
}

// otherReplica is an alive full replica on another host, 0 if there is none.
func (d *desk) otherReplica() queue.ReplicaID {
	for _, f := range d.fleet.FullReplicas(d.shard) {
		if f.Host != d.host && d.fleet.Serves(f.Host, d.shard) && d.settled(f.Replica) {
			return f.Replica
		}
	}
	return 0
}

func (n *Node) view() *catalog.View {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.catalog
}

// changed returns a channel that is closed at the next change of leaders, replicas or the catalog.
func (n *Node) changed() <-chan struct{} {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.notify
}

func (n *Node) signalLocked() {
	close(n.notify)
	n.notify = make(chan struct{})
}

// The callbacks of the host; none blocks.

func (n *Node) onApplied(shard uint64, a queue.Applied) {
	n.mu.RLock()
	d := n.desks[shard]
	n.mu.RUnlock()
	if d != nil {
		d.applied(a)
	}
}

func (n *Node) onInstalled(shard uint64) {
	n.mu.RLock()
	d := n.desks[shard]
	n.mu.RUnlock()
	if d != nil {
		d.keeper.Installed()
		if d.outbox != nil {
			d.outbox.Installed()
		}
		d.groups.Store(true)
	}
}

func (n *Node) onStarted(shard uint64, replica queue.ReplicaID, r queue.Reader) {
	key := n.raft.Catalog().MACKey()
	level := newQuorumLevel()
	level.marks = func() (commit, applied uint64) {
		marks, _ := n.raft.LogMarks(shard)
		return marks.Commit, uint64(r.Meta().Applied)
	}
	var tick time.Duration
	if n.cfg.Profile == ProfileManyShards {
		tick = housekeepTickMany
	}
	d, err := openDesk(deskOptions{
		Shard: shard, Self: replica, Host: n.id, Reader: r, Raft: hostRaft{n.raft, shard, level}, Level: level, Lags: func() bool { return n.lags(shard, level) }, Fleet: n, Targets: exports{n, shard}, ReceiptKey: key[:],
		Boot: n.raft.Clock().Boot, Tick: tick, Metrics: n.metrics, Logger: n.log,
	})
	if err != nil {
		n.log.Error("replica is not served", zap.Uint64("shard", shard), zap.Error(err))
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.desks[shard] = d
	n.signalLocked()
}

func (n *Node) onStopped(shard uint64) {
	n.mu.Lock()
	d := n.desks[shard]
	delete(n.desks, shard)
	n.signalLocked()
	n.mu.Unlock()
	if d == nil {
		return
	}
	go func() { // the callback must not block, and closing waits for calls
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		defer cancel()
		_ = d.Close(ctx)
	}()
}

func (n *Node) onLeader(shard uint64, leader queue.ReplicaID, term uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if d := n.desks[shard]; d != nil {
		if leader != 0 {
			if d.leadership.elected(term) {
				d.level.elected()
				if leader == d.self {
					d.log.Info("this host leads", event.Is("leader"), zap.Uint64("term", term))
				}
			}
			d.heardOfLeader()
			d.keeper.LeaderKnown()
		}
		d.level.leader(leader != 0, d.boot())
		d.nudge()
	}
	n.signalLocked()
}

// onEnded wakes who waits for another leader, or replaces homes: a host is silent.
func (n *Node) onEnded(uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, d := range n.desks {
		d.nudge()
	}
	n.signalLocked()
}

func (n *Node) onCatalog(v *catalog.View) {
	n.mu.Lock()
	defer n.mu.Unlock()
	was := n.catalog
	n.catalog = v
	n.access.keepTenants(v)
	close(n.news)
	n.news = make(chan struct{})
	for shard, d := range n.desks {
		if concerns(was, v, shard) {
			d.nudge()
		} else if d.outbox != nil {
			d.outbox.Nudge() // a queue that it looks for may be there now
		}
	}
	n.signalLocked()
}

// concerns says whether a shard has other options or replicas in now than in was, which may be nil.
func concerns(was, now *catalog.View, shard uint64) bool {
	if was == nil {
		return true
	}
	had, hadAny := was.OptionsOf(shard)
	has, hasAny := now.OptionsOf(shard)
	before, _ := was.Placement(shard)
	after, _ := now.Placement(shard)
	return had != has || hadAny != hasAny || before.Deleted != after.Deleted || !slices.Equal(before.Replicas, after.Replicas)
}

// Node is also what its desks know of the fleet.

// Options implements fleet.
func (n *Node) Options(shard uint64) (queue.QueueOptions, bool) {
	return n.raft.Catalog().OptionsOf(shard)
}

// Refresh implements fleet.
func (n *Node) Refresh(ctx context.Context) error {
	_, err := n.raft.ReadCatalog(ctx)
	return err
}

// Serves implements fleet: an alive host whose replica was stopped, or never came up, or whose clock is refused, serves nobody. Nor
// does one that is heard of and does not answer: it does not hear this host, so it would know nothing of what it is given to do.
func (n *Node) Serves(id, shard uint64) bool {
	_, refused, _ := n.clockOf(id)
	if id == n.id {
		_, ok := n.raft.SelfReplica(shard)
		return ok && !refused
	}
	if refused || !n.Alive(id) {
		return false
	}
	_, ok := n.raft.Peers().Reported(id, shard)
	return ok && n.raft.Peers().Answers(id) || time.Since(n.started) < startGrace
}

// FullReplicas implements fleet.
func (n *Node) FullReplicas(shard uint64) []replicaHost {
	p, ok := n.view().Placement(shard)
	if !ok {
		return nil
	}
	var out []replicaHost
	for _, r := range p.Replicas {
		if r.Birth != catalog.BirthWitness && (r.State == catalog.ReplicaPlanned || r.State == catalog.ReplicaStarted) {
			out = append(out, replicaHost{r.ID, r.HostID})
		}
	}
	return out
}

// Alive implements fleet.
func (n *Node) Alive(id uint64) bool {
	alive, _ := n.heard(id)
	return alive
}

// heard is host.Alive, but a host gets the time to report for the first time after this one started.
func (n *Node) heard(id uint64) (bool, time.Duration) {
	alive, silent := n.raft.Alive(id)
	if !alive && time.Since(n.started) < startGrace {
		return true, 0
	}
	return alive, silent
}

// startGrace is how long after its own start a host takes the others for alive: it has not heard them yet.
const startGrace = 3 * time.Second

// hostRaft is one shard of the Raft host.
type hostRaft struct {
	h     *host.RaftHost
	shard uint64
	level *quorumLevel
}

func (r hostRaft) Propose(ctx context.Context, cmd []byte) (queue.Result, error) {
	if _, err := r.h.Stamp(r.shard); err != nil {
		return queue.Result{}, err
	}
	boot := r.h.Clock().Boot
	number := r.level.began(boot())
	res, err := r.h.Propose(ctx, r.shard, cmd)
	r.level.ended(number, res.Index, len(cmd), boot())
	return res, err
}

func (r hostRaft) ProposeAsync(cmd []byte, timeout time.Duration, done func(queue.Result, int, error)) {
	boot := r.h.Clock().Boot
	number, size := r.level.began(boot()), len(cmd)
	p, err := r.h.ProposeAsync(r.shard, cmd, timeout)
	go func() {
		if err != nil {
			r.level.ended(number, 0, 0, boot())
			done(queue.Result{}, 0, err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*timeout)
		defer cancel()
		res, err := p.Wait(ctx)
		r.level.ended(number, res.Index, size, boot())
		copies := 0
		if err == nil {
			copies = r.h.AwaitCopies(ctx, r.shard, res.Index)
		}
		done(res, copies, err)
	}()
}

// HandOver implements leaderMover.
func (r hostRaft) HandOver(ctx context.Context, to queue.ReplicaID) error {
	return r.h.HandOver(ctx, r.shard, to)
}

// Voter implements leaderMover.
func (r hostRaft) Voter(to queue.ReplicaID) (last, applied queue.Index, ok bool) {
	p, _ := r.h.Catalog().Placement(r.shard)
	c, ok := p.Replica(to)
	if !ok || !c.Votes() || c.Birth == catalog.BirthWitness || c.State != catalog.ReplicaStarted || r.h.Catalog().Leaves(r.shard, to) {
		return 0, 0, false
	}
	report, ok := r.h.Peers().Reported(c.HostID, r.shard)
	return queue.Index(report.LastIndex), queue.Index(report.Applied), ok && report.Replica == uint64(to)
}

func (r hostRaft) InSync() int { return r.h.InSync(r.shard) }

// AwaitInSync implements raft.
func (r hostRaft) AwaitInSync(ctx context.Context) int { return r.h.AwaitInSync(ctx, r.shard) }

func (r hostRaft) LowSpace() uint64 { return r.h.LowSpace(r.shard) }

func (r hostRaft) ReadIndex(ctx context.Context) error {
	if _, err := r.h.Stamp(r.shard); err != nil {
		return err
	}
	return r.h.ReadIndex(ctx, r.shard)
}

func (r hostRaft) Leader() (queue.ReplicaID, uint64, uint64, bool) { return r.h.Leader(r.shard) }

// Stamp is 0 while this host's clock is refused; Propose and ReadIndex then fail with CLOCK_SKEW, and a stamp of 0 moves
// no shard's clock.
func (r hostRaft) Stamp() queue.Stamp {
	s, err := r.h.Stamp(r.shard)
	if err != nil {
		return 0
	}
	return s
}

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }
