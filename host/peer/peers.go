package peer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/host/peer/peerv1/peerv1connect"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/code"
)

// The handshake, in every request and answer.
const (
	fleetHeader = "Tierq-Fleet"
	hostHeader  = "Tierq-Host"
)

// Identity is who a host says it is.
type Identity struct {
	HostID  uint64
	Fleet   string // "": of none yet
	Members []Member
}

// Member is a member of the catalog as the fleet was formed, or as it follows from a host's list of hosts.
type Member struct {
	Replica, HostID uint64
	Birth           uint8
}

// ShardReport is what a host tells of one of its replicas.
type ShardReport struct {
	Shard, Replica uint64
	Applied        uint64 // index
	LastIndex      uint64 // of the last durable entry
	LastTerm       uint64
	Leader         uint64 // replica id, 0: unknown
	Term           uint64
	StoredBytes    uint64 // of a full replica's partition, at Applied
}

// DamagedReplica is one whose state on its host's disk is damaged.
type DamagedReplica struct{ Shard, Replica uint64 }

// Backend is what Peers tells and asks of its host. Its methods are called by any goroutine. Their errors are *code.Error.
type Backend interface {
	Identity() Identity
	// Hosts are the other hosts of the fleet.
	Hosts() []uint64
	// CatalogAfter waits for a catalog newer than version until ctx ends, and then returns nil.
	CatalogAfter(ctx context.Context, version uint64) (newer uint64, view []byte)
	// ReadCatalog reads the catalog linearizably.
	ReadCatalog(ctx context.Context) (version uint64, view []byte, err error)
	// ProposeCatalog proposes a catalog command at this host's own replica.
	ProposeCatalog(ctx context.Context, command []byte) (result []byte, err error)
	// Reports are this host's replicas, and the version of its catalog.
	Reports() (shards []ShardReport, catalogVersion uint64)
	// LowSpace says whether this host's disk is nearly full.
	LowSpace() bool
	// ClockRefused says whether this host does not take up its wall clock.
	ClockRefused() bool
	// Damaged are this host's replicas whose state on its disk is damaged.
	Damaged() []DamagedReplica
	// Refused is told that another host does not take this process for the host that it says it is; it must not block.
	Refused(err error)
	// CopiesReported takes what another host's full replicas have on disk; it must not block. CopiesEnded says that
	// nothing more comes from that host.
	CopiesReported(hostID uint64, reports []CopyReport)
	// CopiesFor is everything that a host is to know of this host's replicas: of the shards that it leads.
	CopiesFor(hostID uint64) []CopyReport
	CopiesEnded(hostID uint64)
	// ConnectionLost is told that the last connection that a host had made to this one has ended; it must not block.
	ConnectionLost(hostID uint64)
}

// Config says how Peers is made; all fields but the last two are required.
type Config struct {
	HostID   uint64
	Listener net.Listener // closed by Close
	Fleet    func() string
	Address  func(hostID uint64) (string, bool)
	Backend  Backend
	Interval time.Duration // between two reports to a host
	Silence  time.Duration // without a report after which a host is not alive
	// CommandLevel says which commands of the catalog this host understands.
	CommandLevel uint32
	Wall         func() time.Time
	Boot         func() time.Duration // the time since boot
	Logger       *zap.Logger
	TLS          *certs.Store // nil: plain text. Else mutual, with one CA for all hosts
	// Cert says whether a certificate is that of a host; nil takes any.
	Cert func(cert *x509.Certificate, hostID uint64) error

	// Through, if not nil, is what calls to a host go through before they are sent: a test's broken network.
	Through func(hostID uint64, under http.RoundTripper) http.RoundTripper
}

// Peers is one host's side of the peer API. Its methods may be called from any goroutine.
type Peers struct {
	cfg       Config
	log       *zap.Logger
	processID uint64
	begun     time.Time
	mux       *http.ServeMux
	server    *http.Server
	transport *http.Transport

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu      sync.Mutex
	clients map[uint64]*http.Client
	others  map[uint64]*other
	copies  map[uint64]*copySender
	streams map[uint64]uint64 // streams of reports that each host has opened
	conns   map[uint64]int    // connections that each host has made to this one
	closed  bool

	inbound sync.Map // net.Conn → *inbound
	dialled dialled
}

// New returns the peer side of a host. It serves nothing before Start.
func New(cfg Config) *Peers {
	p := &Peers{
		cfg:       cfg,
		log:       cfg.Logger.Named("peer"),
		processID: rand.Uint64() | 1,
		begun:     time.Now(),
		mux:       http.NewServeMux(),
		clients:   make(map[uint64]*http.Client),
		others:    make(map[uint64]*other),
		copies:    make(map[uint64]*copySender),
		streams:   make(map[uint64]uint64),
		conns:     make(map[uint64]int),
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	var both, h2 http.Protocols
	both.SetHTTP1(true)
	if cfg.TLS != nil {
		both.SetHTTP2(true)
		h2.SetHTTP2(true)
	} else {
		both.SetUnencryptedHTTP2(true)
		h2.SetUnencryptedHTTP2(true)
	}
	p.transport = &http.Transport{
		Protocols: &h2,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			p.dialled.add(address, c)
			return c, nil
		},
		// A connection to a host that vanished is given up in the time of a few reports.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 2 * time.Second, PingTimeout: time.Second},
	}
	if cfg.TLS != nil {
		p.transport.DialTLSContext = func(ctx context.Context, _, address string) (net.Conn, error) {
			c, err := cfg.TLS.Dial(ctx, &net.Dialer{Timeout: time.Second}, address, "h2")
			if err != nil {
				return nil, err
			}
			p.dialled.add(address, c.NetConn())
			return c, nil
		}
	}
	p.server = &http.Server{
		Handler:           p.handshake(p.mux),
		Protocols:         &both,
		ReadHeaderTimeout: 5 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return p.ctx },
		ErrorLog:          zap.NewStdLog(p.log.WithOptions(zap.IncreaseLevel(zap.WarnLevel))),
	}
	p.watchConns(p.server)
	p.Handle(peerv1connect.NewPeerServiceHandler(&service{p: p}, connect.WithCompressMinBytes(compressFrom)))
	return p
}

// compressFrom is the size in bytes from which answers are compressed. Reports are small and come several times a second from
// every host, and each gzip takes more time than all else that is done for one.
const compressFrom = 16 << 10

// Handle registers a service, as a generated New...Handler returns it. Requests reach it after the handshake.
func (p *Peers) Handle(pattern string, handler http.Handler) { p.mux.Handle(pattern, handler) }

// Addr returns the address that the peer API listens on.
func (p *Peers) Addr() net.Addr { return p.cfg.Listener.Addr() }

// Start serves, and begins to report to the other hosts.
func (p *Peers) Start() {
	p.tasks.Add(2)
	go func() {
		defer p.tasks.Done()
		if err := p.serve(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("the peer API stopped", zap.Error(err))
		}
	}()
	go func() {
		defer p.tasks.Done()
		p.reportLoop()
	}()
}

func (p *Peers) serve() error {
	if p.cfg.TLS == nil {
		return p.server.Serve(p.cfg.Listener)
	}
	p.server.TLSConfig = p.cfg.TLS.Server("h2", "http/1.1")
	return p.server.ServeTLS(p.cfg.Listener, "", "")
}

// Close ends the listener, the connections and the reports, and waits for them. Running handlers see their context end.
func (p *Peers) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		return nil
	}
	p.cancel()
	err := p.server.Close()
	// Serve closes the listener; before Start nobody does.
	if lerr := p.cfg.Listener.Close(); lerr != nil && !errors.Is(lerr, net.ErrClosed) {
		err = errors.Join(err, lerr)
	}
	p.tasks.Wait()
	p.transport.CloseIdleConnections()
	p.dialled.close() // one whose last request has just ended does not count as idle yet
	return err
}

// Client returns what a generated client of another host's services is made of. It stays valid when the host's address changes, and
// makes no connection before the first call. Pass errors of calls through FromConnect.
func (p *Peers) Client(hostID uint64) (httpClient *http.Client, baseURL string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.clients[hostID]
	if !ok {
		c = &http.Client{Transport: p.dialer(hostID, "")}
		p.clients[hostID] = c
	}
	return c, "http://host-" + strconv.FormatUint(hostID, 10)
}

// Service returns a client of another host's PeerService.
func (p *Peers) Service(hostID uint64) peerv1connect.PeerServiceClient {
	c, url := p.Client(hostID)
	return peerv1connect.NewPeerServiceClient(c, url)
}

// HelloAt asks who answers at an address; it must be the host. Its errors are *code.Error.
func (p *Peers) HelloAt(ctx context.Context, hostID uint64, address string) (*peerv1.HelloResponse, error) {
	c := &http.Client{Transport: p.dialer(hostID, address)}
	resp, err := peerv1connect.NewPeerServiceClient(c, "http://"+address).Hello(ctx, connect.NewRequest(&peerv1.HelloRequest{HostId: p.cfg.HostID, ProcessId: p.processID}))
	if err != nil {
		return nil, FromConnect(err)
	}
	return resp.Msg, nil
}

// dialer sends a request to where a host is now, with the handshake, and checks that it is the host.
type dialer struct {
	p       *Peers
	hostID  uint64
	address string // "": where Config.Address says
	under   http.RoundTripper
}

func (p *Peers) dialer(hostID uint64, address string) *dialer {
	d := &dialer{p: p, hostID: hostID, address: address, under: p.transport}
	if p.cfg.Through != nil {
		d.under = p.cfg.Through(hostID, p.transport)
	}
	return d
}

func (d *dialer) locate() (string, bool) {
	if d.address != "" {
		return d.address, true
	}
	return d.p.cfg.Address(d.hostID)
}

func (d *dialer) RoundTrip(r *http.Request) (*http.Response, error) {
	address, ok := d.locate()
	if !ok {
		return nil, code.New(code.UnknownHost, "the address of host %d is not known", d.hostID)
	}
	out := r.Clone(r.Context())
	out.URL.Host, out.Host = address, address
	if d.p.cfg.TLS != nil {
		out.URL.Scheme = "https"
	}
	d.p.sign(out.Header)
	resp, err := d.under.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(d.p.checkCert(resp.TLS, d.hostID), d.check(address, r.URL.Path, resp.Header)); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// check refuses an answer that is not from the host, or not from this fleet; Hello asks for the fleet, so its answer may be.
func (d *dialer) check(address, path string, header http.Header) error {
	if got := header.Get(hostHeader); got != strconv.FormatUint(d.hostID, 10) {
		return code.New(code.WrongFleet, "%s answers as host %q, not as host %d: check the addresses", address, got, d.hostID)
	}
	own, theirs := d.p.cfg.Fleet(), header.Get(fleetHeader)
	if path != peerv1connect.PeerServiceHelloProcedure && own != "" && theirs != "" && own != theirs {
		return wrongFleet(fmt.Sprintf("host %d at %s", d.hostID, address), own, theirs)
	}
	return nil
}

func wrongFleet(who, own, theirs string) *code.Error {
	return code.New(code.WrongFleet, "%s belongs to fleet %s, this host to fleet %s: check the addresses and the data directories", who, theirs, own)
}

func (p *Peers) sign(header http.Header) {
	header.Set(hostHeader, strconv.FormatUint(p.cfg.HostID, 10))
	if fleet := p.cfg.Fleet(); fleet != "" {
		header.Set(fleetHeader, fleet)
	}
}

// handshake refuses requests from outside the fleet, but for Hello. Close waits for those that it lets through.
func (p *Peers) handshake(next http.Handler) http.Handler {
	refusals := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !p.enter() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		defer p.tasks.Done()
		p.sign(w.Header())
		who, _ := strconv.ParseUint(r.Header.Get(hostHeader), 10, 64)
		if err := p.checkCert(r.TLS, who); err != nil {
			p.tellRefused(r, err)
			_ = refusals.Write(w, r, ToConnect(err))
			return
		}
		if r.URL.Path != peerv1connect.PeerServiceHelloProcedure {
			if err := p.admit(r.Header); err != nil {
				p.tellRefused(r, err)
				if werr := refusals.Write(w, r, ToConnect(err)); werr != nil {
					p.log.Debug("a refusal was not delivered", zap.Error(werr))
				}
				return
			}
			p.connOf(r.Context(), who)
		}
		next.ServeHTTP(w, r)
	})
}

// checkCert refuses the other side of a connection whose certificate is not that of the host that it says it is.
func (p *Peers) checkCert(state *tls.ConnectionState, hostID uint64) error {
	if p.cfg.TLS == nil || p.cfg.Cert == nil {
		return nil
	}
	if state == nil || len(state.PeerCertificates) == 0 {
		return code.New(code.WrongFleet, "host %d shows no certificate", hostID)
	}
	if err := p.cfg.Cert(state.PeerCertificates[0], hostID); err != nil {
		return code.New(code.WrongFleet, "%v", err)
	}
	return nil
}

// tellRefused logs that a host was refused, once in a while for each id.
func (p *Peers) tellRefused(r *http.Request, err error) {
	e := refusal(nil, err)
	who, perr := strconv.ParseUint(r.Header.Get(hostHeader), 10, 64)
	if e == nil || perr != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.others) < maxStrangers || p.others[who] != nil {
		p.tellLocked(p.otherLocked(who), "a host is refused that calls from "+r.RemoteAddr, who, e)
	}
}

// maxStrangers bounds the hosts of which anything is remembered.
const maxStrangers = 1024

// enter counts a request in; false after Close.
func (p *Peers) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.tasks.Add(1)
	return true
}

func (p *Peers) admit(header http.Header) error {
	who, err := strconv.ParseUint(header.Get(hostHeader), 10, 64)
	if err != nil || who == 0 {
		return code.New(code.WrongFleet, "this is the API between the hosts of a fleet: clients use the API address")
	}
	if who == p.cfg.HostID {
		return code.New(code.WrongFleet, "the caller says that it is host %d, as this host does: give it another id", who)
	}
	own, theirs := p.cfg.Fleet(), header.Get(fleetHeader)
	switch {
	case own == theirs && own != "":
		return nil
	case own == "" || theirs == "":
		return &code.Error{Code: code.Unavailable, Effect: code.EffectNone, RetryAfterMs: 200, Text: "the fleet is not formed yet: repeat after a pause"}
	}
	return wrongFleet(fmt.Sprintf("host %d", who), own, theirs)
}

// service serves PeerService from the backend.
type service struct{ p *Peers }

var _ peerv1connect.PeerServiceHandler = (*service)(nil)

func (s *service) Hello(_ context.Context, r *connect.Request[peerv1.HelloRequest]) (*connect.Response[peerv1.HelloResponse], error) {
	id := s.p.cfg.Backend.Identity()
	resp := &peerv1.HelloResponse{HostId: id.HostID, FleetId: id.Fleet}
	resp.OtherProcessId, resp.OtherProcessFrom = s.p.otherProcess(r.Msg.HostId, r.Msg.ProcessId)
	for _, m := range id.Members {
		resp.Members = append(resp.Members, &peerv1.CatalogMember{ReplicaId: m.Replica, HostId: m.HostID, Birth: uint32(m.Birth)})
	}
	return connect.NewResponse(resp), nil
}

// maxWatch bounds a watch, so that no request lasts for ever.
const maxWatch = 30 * time.Second

func (s *service) WatchCatalog(ctx context.Context, r *connect.Request[peerv1.WatchCatalogRequest]) (*connect.Response[peerv1.WatchCatalogResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, min(time.Duration(r.Msg.WaitMs)*time.Millisecond, maxWatch))
	defer cancel()
	version, view := s.p.cfg.Backend.CatalogAfter(ctx, r.Msg.AfterVersion)
	return connect.NewResponse(&peerv1.WatchCatalogResponse{Version: version, View: view}), nil
}

func (s *service) ReadCatalog(ctx context.Context, _ *connect.Request[peerv1.ReadCatalogRequest]) (*connect.Response[peerv1.WatchCatalogResponse], error) {
	version, view, err := s.p.cfg.Backend.ReadCatalog(ctx)
	if err != nil {
		return nil, ToConnect(err)
	}
	return connect.NewResponse(&peerv1.WatchCatalogResponse{Version: version, View: view}), nil
}

func (s *service) ProposeCatalog(ctx context.Context, r *connect.Request[peerv1.ProposeCatalogRequest]) (*connect.Response[peerv1.ProposeCatalogResponse], error) {
	result, err := s.p.cfg.Backend.ProposeCatalog(ctx, r.Msg.Command)
	if err != nil {
		return nil, ToConnect(err)
	}
	return connect.NewResponse(&peerv1.ProposeCatalogResponse{Result: result}), nil
}

func (s *service) Report(ctx context.Context, r *connect.Request[peerv1.ReportRequest]) (*connect.Response[peerv1.ReportResponse], error) {
	at := time.Now()
	// The handshake has checked who calls, by its certificate too: a host speaks for itself only.
	if caller := r.Header().Get(hostHeader); caller != strconv.FormatUint(r.Msg.HostId, 10) {
		return nil, ToConnect(code.New(code.WrongFleet, "host %s reports as host %d", caller, r.Msg.HostId))
	}
	if s.p.connHasEnded(ctx) { // its host may have ended since it sent this
		return nil, connect.NewError(connect.CodeUnavailable, net.ErrClosed)
	}
	needFull, err := s.p.takeReport(r.Msg, r.Peer().Addr, at)
	if err != nil {
		return nil, ToConnect(err)
	}
	return connect.NewResponse(&peerv1.ReportResponse{WallMs: s.p.cfg.Wall().UnixMilli(), NeedFull: needFull}), nil
}
