package host

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/queue/code"
)

const (
	helloTimeout = time.Second
	joinPause    = 100 * time.Millisecond
	// joinReminder is how often a host that waits for others says so.
	joinReminder = 10 * time.Second
	// catalogAttempt bounds one attempt to propose a catalog command.
	catalogAttempt = 2 * time.Second
	// copyInterval bounds how often a host that follows the catalog writes its copy.
	copyInterval = time.Second
)

// Fleet returns the fleet's id, zero while this host knows none.
func (h *RaftHost) Fleet() catalog.FleetID {
	id, err := catalog.ParseFleetID(h.fleetName())
	if err != nil {
		panic("BUG: the host's identity has fleet " + err.Error())
	}
	return id
}

func (h *RaftHost) fleetName() string {
	h.identityMu.Lock()
	defer h.identityMu.Unlock()
	return h.identity.Fleet
}

// catalogMembers returns the members of shard 1 as this host's identity has them.
func (h *RaftHost) catalogMembers() []catalog.Replica {
	h.identityMu.Lock()
	defer h.identityMu.Unlock()
	return h.identity.members()
}

// updateIdentity changes the identity, durably.
func (h *RaftHost) updateIdentity(change func(*identity)) error {
	h.identityMu.Lock()
	defer h.identityMu.Unlock()
	next := h.identity
	change(&next)
	if err := writeIdentity(h.cfg.DataDir, next); err != nil {
		return err
	}
	h.identity = next
	return nil
}

// joinFleet brings a new host into a fleet, or forms one, and registers the host.
//
// A fleet is formed by its first full hosts, when each of them has been reached and said that it knows of none: a fleet
// that exists is known to at least one of them, even if another has lost its data. A member whose data are gone is thereby told
// of the fleet, and does not vote again.
func (h *RaftHost) joinFleet(ctx context.Context) {
	if h.fleetName() == "" && len(h.catalogMembers()) == 0 {
		if !h.findFleet(ctx) {
			return
		}
	}
	h.poke()
	if h.fleetName() == "" && !h.initFleet(ctx) {
		return
	}
	close(h.formed)
	h.poke()
	if h.register(ctx) {
		close(h.ready)
	}
}

// checkFleet refuses to start with the data of one fleet among the hosts of another: their replicas would mix. Hosts that do
// not answer cannot tell, and are asked again with every request.
func (h *RaftHost) checkFleet() error {
	own := h.fleetName()
	if own == "" {
		return nil
	}
	for id, a := range h.helloAll(h.ctx) {
		if a.FleetId != "" && a.FleetId != own {
			spec, _ := h.cfg.host(id)
			return fmt.Errorf("data directory %s belongs to fleet %s, but host %d at %s belongs to fleet %s: check the list of hosts and the data directory",
				h.cfg.DataDir, own, id, spec.PeerAddr, a.FleetId)
		}
	}
	return nil
}

// checkAlone refuses to start from a copy of the data directory of a host that runs: it would vote with what the copy remembers. A directory
// that is where it was at the last start is no copy, and this process holds its lock; one that was moved waits until no other process is
// heard of as this host.
func (h *RaftHost) checkAlone() error {
	here, err := placeOf(h.cfg.DataDir)
	if err != nil {
		return err
	}
	path := filepath.Join(h.cfg.DataDir, placeFile)
	if last, err := os.ReadFile(path); err == nil && string(last) == here {
		return nil
	}
	if h.fleetName() != "" {
		if err := h.awaitAlone(); err != nil {
			return err
		}
	}
	return replaceFile(path, []byte(here))
}

// awaitAlone asks the other hosts until the former process must have become silent.
func (h *RaftHost) awaitAlone() error {
	deadline := time.Now().Add(2*h.cfg.Silence + helloTimeout)
	for {
		heardBy, from := uint64(0), ""
		for id, a := range h.helloAll(h.ctx) {
			if a.OtherProcessId != 0 {
				heardBy, from = id, a.OtherProcessFrom
			}
		}
		switch {
		case heardBy == 0:
			return nil
		case time.Now().After(deadline):
			return code.New(code.HostRefused, "host %d runs already: host %d hears it from %s, and data directory %s was copied or moved since its last start: "+
				"stop the other process, or give this machine an id and an empty data directory of its own", h.cfg.HostID, heardBy, from, h.cfg.DataDir)
		}
		pause(h.ctx, joinPause)
	}
}

// findFleet asks the others until one names its fleet, or all of the catalog's first full hosts know of none and this is one
// of them. It returns false when ctx ends.
func (h *RaftHost) findFleet(ctx context.Context) bool {
	members := h.cfg.catalogMembers()
	said, reminded := "", time.Time{}
	for ctx.Err() == nil {
		found, err := h.askFleet(ctx, members)
		if err == nil {
			if err = h.updateIdentity(found); err == nil {
				return true
			}
		}
		if text := err.Error(); ctx.Err() == nil && (text != said || time.Since(reminded) > joinReminder) {
			said, reminded = text, time.Now()
			h.log.Info("waiting to join a fleet", zap.String("because", text))
		}
		pause(ctx, joinPause)
	}
	return false
}

// askFleet asks all hosts once. It returns what the identity becomes, or why it cannot be told yet.
func (h *RaftHost) askFleet(ctx context.Context, members []catalog.Replica) (func(*identity), error) {
	answers := h.helloAll(ctx)
	var known *peerv1.HelloResponse
	for _, a := range answers {
		if a.FleetId == "" {
			continue
		}
		if known != nil && known.FleetId != a.FleetId {
			return nil, fmt.Errorf("host %d belongs to fleet %s and host %d to fleet %s: check the list of hosts", known.HostId, known.FleetId, a.HostId, a.FleetId)
		}
		known = a
	}
	if known != nil {
		return func(id *identity) { id.Fleet = known.FleetId; id.setMembers(membersOf(known)) }, nil
	}
	if !slices.ContainsFunc(members, func(r catalog.Replica) bool { return r.HostID == h.cfg.HostID && r.Birth == catalog.BirthInitial }) {
		return nil, errors.New("no host that was reached knows a fleet")
	}
	var missing []string
	for _, r := range members {
		if r.HostID == h.cfg.HostID || r.Birth != catalog.BirthInitial {
			continue
		}
		a, ok := answers[r.HostID]
		if !ok {
			spec, _ := h.cfg.host(r.HostID)
			missing = append(missing, fmt.Sprintf("host %d at %s", r.HostID, spec.PeerAddr))
		} else if !slices.Equal(membersOf(a), members) {
			return nil, fmt.Errorf("host %d has another list of hosts, from which other members of the catalog follow: make the lists equal", r.HostID)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("a new fleet is formed when its first full hosts have reached one another, and there is no answer from %s", strings.Join(missing, ", "))
	}
	return func(id *identity) { id.setMembers(members) }, nil
}

// helloAll asks every other host of the list who it is, at the address that the list has.
func (h *RaftHost) helloAll(ctx context.Context) map[uint64]*peerv1.HelloResponse {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	answers := make(map[uint64]*peerv1.HelloResponse)
	for _, spec := range h.cfg.Hosts {
		if spec.ID == h.cfg.HostID {
			continue
		}
		asked.Go(func() {
			resp, err := h.peers.HelloAt(ctx, spec.ID, spec.PeerAddr)
			if err != nil {
				h.log.Debug("no answer", zap.Uint64("peer", spec.ID), zap.Error(err))
				return
			}
			mu.Lock()
			defer mu.Unlock()
			answers[spec.ID] = resp
		})
	}
	asked.Wait()
	return answers
}

func membersOf(a *peerv1.HelloResponse) []catalog.Replica {
	var id identity
	for _, m := range a.Members {
		id.Catalog = append(id.Catalog, identityMember{Replica: m.ReplicaId, HostID: m.HostId, Birth: uint8(m.Birth)})
	}
	return id.members()
}

// initFleet gives the fleet its id, through the catalog's replica on this host, which the reconcile loop starts. Every initial member
// proposes one, and the first wins.
func (h *RaftHost) initFleet(ctx context.Context) bool {
	c := &catalog.InitFleet{Members: h.catalogMembers()}
	if _, err := rand.Read(c.FleetID[:]); err != nil {
		panic("FATAL: random numbers: " + err.Error())
	}
	if _, err := rand.Read(c.MACKey[:]); err != nil {
		panic("FATAL: random numbers: " + err.Error())
	}
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, h.cfg.ProposeTimeout)
		r, err := h.proposeHere(attempt, catalog.Encode(c))
		cancel()
		if err == nil {
			err = r.Err()
		}
		if err == nil {
			if err = h.updateIdentity(func(id *identity) { id.Fleet = r.Fleet.String() }); err == nil {
				h.log.Info("the fleet is formed", event.Is("fleet-formed"), zap.Stringer("fleet", r.Fleet))
				return true
			}
		}
		h.log.Debug("the fleet has no id yet", zap.Error(err))
		pause(ctx, joinPause)
	}
	return false
}

// register tells the catalog this host's addresses and domain, until it has them.
func (h *RaftHost) register(ctx context.Context) bool {
	want := h.ownHost()
	said := ""
	for ctx.Err() == nil {
		r, err := h.ProposeCatalog(ctx, &catalog.JoinHost{Host: want, Incarnation: h.incarnation()})
		if err == nil {
			err = r.Err()
		}
		if refusedForGood(err) {
			h.refuse(err)
			return false
		}
		if err == nil {
			return h.AwaitCatalog(ctx, r.Version) == nil
		}
		want.Version = r.Host.Version
		if text := err.Error(); text != said && ctx.Err() == nil && r.Code != code.MutationFenced {
			said = text
			h.log.Warn("this host cannot register in the catalog yet", zap.Error(err))
		}
		pause(ctx, joinPause)
	}
	return false
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Catalog returns the newest catalog that this host has seen; never nil. Before the fleet is formed it is empty.
func (h *RaftHost) Catalog() *catalog.View { return h.view.Load() }

// AwaitCatalog returns nil once Catalog has at least a version.
func (h *RaftHost) AwaitCatalog(ctx context.Context, version uint64) error {
	for {
		changed := h.changed.wait()
		if h.Catalog().Version() >= version {
			return nil
		}
		if err := h.await(ctx, changed); err != nil {
			return err
		}
	}
}

// setView takes up a newer catalog and tells everybody. Views of another fleet are refused.
func (h *RaftHost) setView(v *catalog.View) {
	h.viewMu.Lock()
	defer h.viewMu.Unlock()
	if v == nil || v.Version() <= h.Catalog().Version() {
		return
	}
	if own := h.Fleet(); own != (catalog.FleetID{}) && v.Fleet() != own {
		h.log.Error("a catalog of another fleet is refused", event.Is("foreign-catalog"), zap.Stringer("own", own), zap.Stringer("other", v.Fleet()))
		return
	}
	if v.RemovedHost(h.cfg.HostID) {
		h.refuse(code.New(code.HostRefused, "host %d was removed from the fleet, and a removed id is never used again: stop it; this machine joins again under another id, with an empty data directory (`tierq host token`, `tierq host join`)", h.cfg.HostID))
	}
	h.view.Store(v)
	h.book.update(v)
	if h.cfg.OnCatalog != nil {
		h.cfg.OnCatalog(v)
	}
	h.changed.signal()
	h.poke()
}

// followCatalog keeps the view fresh: from this host's own replica of the catalog, else by watching a host that has one.
func (h *RaftHost) followCatalog(ctx context.Context) {
	var written time.Time
	for ctx.Err() == nil {
		if h.holdsCatalog() {
			h.setView(h.catalog.View())
			h.followOwn(ctx)
		} else if err := h.watchCatalog(ctx); err != nil {
			h.log.Debug("the catalog cannot be watched now", zap.Error(err))
			pause(ctx, joinPause)
		}
		if v := h.Catalog(); v.Version() > h.copied && time.Since(written) > copyInterval {
			h.copyCatalog(v)
			written = time.Now()
		}
	}
	if v := h.Catalog(); v.Version() > h.copied {
		h.copyCatalog(v)
	}
}

// followOwn waits for a change of this host's own replica of the catalog. One that was replaced while this host was away is told of nothing
// any more: when another host has a newer catalog, that is taken.
func (h *RaftHost) followOwn(ctx context.Context) {
	timer := time.NewTimer(ownCatalogWait)
	defer timer.Stop()
	select {
	case <-h.applied:
	case <-ctx.Done():
	case <-timer.C:
		if hostID, newer := h.newerCatalog(); newer {
			if err := h.watchCatalogAt(ctx, hostID); err != nil {
				h.log.Debug("a newer catalog cannot be read now", zap.Error(err))
			}
		}
	}
}

// ownCatalogWait is how long this host's replica of the catalog may be silent before the others are looked at.
const ownCatalogWait = time.Second

// newerCatalog returns the host that is alive and reports the newest catalog, if that is newer than this host's.
func (h *RaftHost) newerCatalog() (hostID uint64, ok bool) {
	most := h.Catalog().Version()
	for _, id := range h.book.others(h.cfg.HostID) {
		if alive, _ := h.Alive(id); alive && h.peers.CatalogVersion(id) > most {
			hostID, most = id, h.peers.CatalogVersion(id)
		}
	}
	return hostID, hostID != 0
}

// viewHost returns a host to ask for a newer catalog: any has one, those that hold it sooner.
func (h *RaftHost) viewHost() (uint64, error) {
	if hostID, ok := h.newerCatalog(); ok {
		return hostID, nil
	}
	others := h.book.others(h.cfg.HostID)
	if turn := h.turn.Add(1); len(others) > 0 && (h.Catalog().Version() == 0 || turn%4 == 0) {
		return others[turn%uint64(len(others))], nil
	}
	return h.catalogHost()
}

// holdsCatalog says whether a full replica of the catalog runs here that votes.
func (h *RaftHost) holdsCatalog() bool {
	v, ok := h.replicas.Load(catalog.ShardID)
	if !ok || v.(*running).witness {
		return false
	}
	p, known := h.Catalog().Placement(catalog.ShardID)
	r, _ := p.Replica(v.(*running).id)
	return !known || r.Votes()
}

// watchWait is how long a watch lasts without news. It is short enough that a host which becomes a member notices.
const watchWait = 5 * time.Second

// watchCatalog asks one host for a newer catalog. It returns nil without one when the wait ended.
func (h *RaftHost) watchCatalog(ctx context.Context) error {
	if h.fleetName() == "" {
		select {
		case <-h.formed:
		case <-h.applied: // this host's own replica has begun
		case <-ctx.Done():
		}
		return nil
	}
	hostID, err := h.viewHost()
	if err != nil {
		return err
	}
	return h.watchCatalogAt(ctx, hostID)
}

func (h *RaftHost) watchCatalogAt(ctx context.Context, hostID uint64) error {
	ctx, cancel := context.WithTimeout(ctx, watchWait+helloTimeout)
	defer cancel()
	resp, err := h.peers.Service(hostID).WatchCatalog(ctx, connect.NewRequest(&peerv1.WatchCatalogRequest{
		AfterVersion: h.Catalog().Version(), WaitMs: uint32(watchWait.Milliseconds()),
	}))
	if err != nil {
		return peer.FromConnect(err)
	}
	return h.takeCatalog(resp.Msg)
}

func (h *RaftHost) takeCatalog(m *peerv1.WatchCatalogResponse) error {
	if len(m.View) == 0 {
		return nil
	}
	v, err := catalog.DecodeView(m.View)
	if err != nil {
		return err
	}
	h.setView(v)
	return nil
}

// catalogHost returns another host with a full replica of the catalog, by turns, those first that are alive.
func (h *RaftHost) catalogHost() (uint64, error) {
	p, ok := h.placement(catalog.ShardID)
	if !ok {
		return 0, code.New(code.Unavailable, "this host does not know where the catalog is")
	}
	var alive, silent []uint64
	for _, r := range p.Replicas {
		if r.HostID == h.cfg.HostID || r.Birth == catalog.BirthWitness || !r.Votes() {
			continue
		}
		if ok, _ := h.Alive(r.HostID); ok {
			alive = append(alive, r.HostID)
		} else {
			silent = append(silent, r.HostID)
		}
	}
	from := alive
	if len(from) == 0 {
		from = silent
	}
	if len(from) == 0 {
		return 0, code.New(code.Unavailable, "no other host holds the catalog")
	}
	return from[h.turn.Add(1)%uint64(len(from))], nil
}

// copyCatalog writes this host's copy of the catalog, for its next start. A copy that cannot be written is tried again.
func (h *RaftHost) copyCatalog(v *catalog.View) {
	if err := replaceFile(filepath.Join(h.cfg.DataDir, catalogFile), catalog.EncodeView(v)); err != nil {
		h.log.Warn("the copy of the catalog cannot be written", zap.Error(err))
		return
	}
	h.copied = v.Version()
}

// loadCatalogCopy reads the copy; a damaged one is as good as none, since the fleet has the original.
func (h *RaftHost) loadCatalogCopy() error {
	path := filepath.Join(h.cfg.DataDir, catalogFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the copy of the catalog: %w", err)
	}
	v, err := catalog.DecodeView(b)
	if err != nil {
		h.log.Warn("the copy of the catalog is not used", zap.String("path", path), zap.Error(err))
		return nil
	}
	if fleet := v.Fleet().String(); fleet != h.identity.Fleet {
		return fmt.Errorf("data directory %s belongs to fleet %s, but its %s is of fleet %s: remove that file", h.cfg.DataDir, h.identity.Fleet, catalogFile, fleet)
	}
	h.copied = v.Version()
	h.view.Store(v)
	h.book.update(v)
	return nil
}

// ProposeCatalog proposes a catalog command, here or at a host that holds the catalog, and returns its result, which may be a
// refusal (Result.Err). It repeats the command until it is answered or ctx ends: every catalog command may be applied
// twice without harm. On success the change is in Catalog when it returns, unless ctx ends first.
func (h *RaftHost) ProposeCatalog(ctx context.Context, c catalog.Command) (catalog.Result, error) {
	ctx, cancel := h.deadline(ctx)
	defer cancel()
	if err := h.await(ctx, h.formed); err != nil {
		return catalog.Result{}, err
	}
	b := catalog.Encode(c)
	effect := code.EffectNone
	for here := h.holdsCatalog(); ; here = !here && h.holdsCatalog() {
		r, err := h.proposeCatalogOnce(ctx, b, here)
		if err == nil {
			h.AwaitCatalog(ctx, r.Version) //nolint:errcheck // the command was answered, which is what counts
			return r, nil
		}
		var e *code.Error
		if !errors.As(err, &e) {
			e = &code.Error{Code: code.Internal, Effect: code.EffectMaybe, Cause: err}
		}
		effect = max(effect, e.Effect)
		if ctx.Err() == nil && h.ctx.Err() == nil && worthRepeating(e) {
			pause(ctx, 20*time.Millisecond)
			continue
		}
		e.Effect = effect
		return catalog.Result{}, e
	}
}

// worthRepeating says whether another attempt may succeed: another host may answer, or the same a little later. NOT_REPLICA is
// what a host says that is starting.
func worthRepeating(e *code.Error) bool {
	return e.Effect == code.EffectMaybe || e.Code == code.NotReplica || e.Code.Info().Class == code.ClassTransient
}

// proposeCatalogOnce proposes here, or at another host: a member whose address has changed hears from nobody, and must ask
// another one to register it.
func (h *RaftHost) proposeCatalogOnce(ctx context.Context, command []byte, here bool) (catalog.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, catalogAttempt)
	defer cancel()
	if here {
		return h.proposeHere(ctx, command)
	}
	hostID, err := h.catalogHost()
	if err != nil {
		return catalog.Result{}, err
	}
	return h.proposeCatalogAt(ctx, hostID, command)
}

// proposeCatalogAt proposes at a host that holds the catalog.
func (h *RaftHost) proposeCatalogAt(ctx context.Context, hostID uint64, command []byte) (catalog.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, catalogAttempt)
	defer cancel()
	resp, err := h.peers.Service(hostID).ProposeCatalog(ctx, connect.NewRequest(&peerv1.ProposeCatalogRequest{Command: command}))
	if err != nil {
		return catalog.Result{}, peer.FromConnect(err)
	}
	r, err := catalog.DecodeResult(resp.Msg.Result)
	if err != nil {
		return r, code.Maybe(code.Internal, err, "the result cannot be decoded")
	}
	return r, nil
}

// proposeHere proposes at this host's replica of the catalog.
func (h *RaftHost) proposeHere(ctx context.Context, command []byte) (catalog.Result, error) {
	timeout, err := h.timeout(ctx)
	if err != nil {
		return catalog.Result{}, err
	}
	p, err := h.ProposeAsync(catalog.ShardID, command, timeout)
	if err != nil {
		return catalog.Result{}, err
	}
	raw, err := p.wait(ctx)
	if err != nil {
		return catalog.Result{}, err
	}
	r, err := catalog.DecodeResult(raw.Data)
	if err != nil {
		return r, code.Maybe(code.Internal, err, "the result cannot be decoded")
	}
	return r, nil
}

// ReadCatalog returns a catalog that contains every change that was acknowledged before the call.
func (h *RaftHost) ReadCatalog(ctx context.Context) (*catalog.View, error) {
	ctx, cancel := h.deadline(ctx)
	defer cancel()
	if h.holdsCatalog() {
		if err := h.ReadIndex(ctx, catalog.ShardID); err != nil {
			return nil, err
		}
		v := h.catalog.View()
		h.setView(v)
		return v, nil
	}
	hostID, err := h.catalogHost()
	if err != nil {
		return nil, err
	}
	resp, err := h.peers.Service(hostID).ReadCatalog(ctx, connect.NewRequest(&peerv1.ReadCatalogRequest{}))
	if err != nil {
		return nil, peer.FromConnect(err)
	}
	v, err := catalog.DecodeView(resp.Msg.View)
	if err != nil {
		return nil, &code.Error{Code: code.Internal, Effect: code.EffectNone, Cause: err}
	}
	h.setView(v)
	return v, nil
}

// registrationWait is how long a creation waits for hosts of the list that are not in the catalog yet.
const registrationWait = 5 * time.Second

// CreateQueue creates a queue, fills in its options' defaults, and returns it as the catalog has it. Refusals are *code.Error with
// EffectNone. The same creation again returns the same queue. While a fleet begins, a layout that its hosts cannot take waits
// for the listed ones to register.
func (h *RaftHost) CreateQueue(ctx context.Context, c catalog.CreateQueue) (catalog.Queue, error) {
	c.Options.EnsureDefaults()
	if err := c.Options.Validate(); err != nil {
		return catalog.Queue{}, code.New(code.InvalidArgument, "%v", err)
	}
	begin := time.Now()
	for {
		changed := h.changed.wait()
		waitable := h.unregistered() && time.Since(begin) < registrationWait
		r, err := h.ProposeCatalog(ctx, &c)
		if err == nil {
			err = r.Err()
		}
		if r.Code != code.NoPlacement || !waitable {
			return r.Queue, err
		}
		if !h.changedWithin(ctx, changed, registrationWait-time.Since(begin)) {
			return r.Queue, err
		}
	}
}

// changedWithin waits for c, at most so long; it returns whether it came.
func (h *RaftHost) changedWithin(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return h.await(ctx, c) == nil
}

// unregistered says whether the catalog lacks a host of the list.
func (h *RaftHost) unregistered() bool {
	v := h.Catalog()
	return slices.ContainsFunc(h.cfg.Hosts, func(s HostSpec) bool { _, ok := v.Host(s.ID); return !ok && !v.RemovedHost(s.ID) })
}

// DeleteQueue deletes a queue. Its replicas are removed by the hosts that have them, in their time.
func (h *RaftHost) DeleteQueue(ctx context.Context, c catalog.DeleteQueue) error {
	r, err := h.ProposeCatalog(ctx, &c)
	if err != nil {
		return err
	}
	return r.Err()
}

// peerBackend is what the peer API asks its host.
type peerBackend struct{ h *RaftHost }

var _ peer.Backend = (*peerBackend)(nil)

func (b *peerBackend) Identity() peer.Identity {
	h := b.h
	id := peer.Identity{HostID: h.cfg.HostID, Fleet: h.fleetName()}
	members := h.catalogMembers()
	if len(members) == 0 {
		members = h.cfg.catalogMembers()
	}
	for _, m := range members {
		id.Members = append(id.Members, peer.Member{Replica: uint64(m.ID), HostID: m.HostID, Birth: uint8(m.Birth)})
	}
	return id
}

// Hosts are those of the catalog and of the list.
func (b *peerBackend) Hosts() []uint64 { return b.h.book.others(b.h.cfg.HostID) }

func (b *peerBackend) CatalogAfter(ctx context.Context, version uint64) (uint64, []byte) {
	if err := b.h.AwaitCatalog(ctx, version+1); err != nil {
		return version, nil
	}
	v := b.h.Catalog()
	return v.Version(), catalog.EncodeView(v)
}

func (b *peerBackend) ReadCatalog(ctx context.Context) (uint64, []byte, error) {
	if !b.h.holdsCatalog() {
		return 0, nil, notReplica(catalog.ShardID)
	}
	v, err := b.h.ReadCatalog(ctx)
	if err != nil {
		return 0, nil, err
	}
	return v.Version(), catalog.EncodeView(v), nil
}

func (b *peerBackend) ProposeCatalog(ctx context.Context, command []byte) ([]byte, error) {
	c, err := catalog.Decode(command)
	if err != nil {
		return nil, code.New(code.Malformed, "%v", err)
	}
	if command, err = b.h.admitNewcomer(ctx, c, command); err != nil {
		return nil, err
	}
	r, err := b.h.proposeHere(ctx, command)
	if err != nil {
		return nil, err
	}
	return catalog.EncodeResult(r), nil
}

func (b *peerBackend) LowSpace() bool { return b.h.lowSpace.Load() }

// Damaged implements peer.Backend.
func (b *peerBackend) Damaged() []peer.DamagedReplica { return b.h.Damaged() }

// Refused implements peer.Backend.
func (b *peerBackend) Refused(err error) { b.h.refuse(err) }

// ClockRefused implements peer.Backend.
func (b *peerBackend) ClockRefused() bool { return b.h.clock.Skewed() }

func (b *peerBackend) Reports() ([]peer.ShardReport, uint64) {
	return b.h.reports(), b.h.Catalog().Version()
}
