package host

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue/code"
)

// The bounds of a join token's life.
const (
	DefaultJoinTokenTTL = time.Hour
	MaxJoinTokenTTL     = 7 * 24 * time.Hour
)

func (h *RaftHost) incarnation() uint64 {
	h.identityMu.Lock()
	defer h.identityMu.Unlock()
	return h.identity.Incarnation
}

// refusedForGood says whether the catalog's answer to a host stays the same.
func refusedForGood(err error) bool {
	var e *code.Error
	return errors.As(err, &e) && slices.Contains([]code.Code{code.HostRefused, code.AuthFailed, code.NotAuthenticated}, e.Code)
}

// CreateJoinToken makes a token with which one host can join the fleet, once, within ttl. The fleet keeps only its hash.
func (h *RaftHost) CreateJoinToken(ctx context.Context, ttl time.Duration) (token string, expires time.Time, err error) {
	if ttl <= 0 || ttl > MaxJoinTokenTTL {
		return "", time.Time{}, code.New(code.InvalidArgument, "ttl: %v, use up to %v", ttl, MaxJoinTokenTTL)
	}
	now, err := h.clock.Wall()
	if err != nil {
		return "", time.Time{}, err
	}
	t, text := catalog.NewJoinToken(uint64(now) + uint64(ttl.Milliseconds()))
	r, err := h.ProposeCatalog(ctx, &catalog.CreateJoinToken{Token: t, NowMs: uint64(now)})
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		return "", time.Time{}, err
	}
	return text, time.UnixMilli(int64(t.ExpiresMs)), nil
}

// admitNewcomer decides, at a host that proposes for another one, whether a host that the catalog does not know may ask to be taken in: this
// host's own list names it, or it brings a token, which counts by this host's clock. It returns the command to propose.
func (h *RaftHost) admitNewcomer(ctx context.Context, c catalog.Command, command []byte) ([]byte, error) {
	var newcomer uint64
	join, isJoin := c.(*catalog.JoinHost)
	switch c := c.(type) {
	case *catalog.JoinHost:
		newcomer = c.Host.ID
	case *catalog.RegisterHost:
		newcomer = c.Host.ID
	default:
		return command, nil
	}
	if _, known := h.Catalog().Host(newcomer); known || h.Catalog().RemovedHost(newcomer) {
		return command, nil // the catalog answers
	}
	if isJoin && join.TokenID != 0 {
		now, err := h.clock.Wall()
		if err != nil {
			return nil, err
		}
		join.NowMs = uint64(now)
		return catalog.Encode(join), nil
	}
	if _, listed := h.cfg.host(newcomer); !listed {
		// It may have joined a moment ago, at another host.
		v, err := h.ReadCatalog(ctx)
		if err != nil {
			return nil, err
		}
		if _, known := v.Host(newcomer); known || v.RemovedHost(newcomer) {
			return command, nil
		}
		return nil, code.New(code.NotAuthenticated, "host %d is neither in the fleet nor in the list of the host that was asked: let it join with a token (`tierq host token`, `tierq host join`)", newcomer)
	}
	return command, nil
}

// Join takes a new host into a running fleet that at least one host of its list belongs to, and returns it as the catalog has it. Its data
// directory must be empty, or that of an earlier attempt. The host does not run yet: open it and start it after that.
func Join(ctx context.Context, cfg Config, token string) (_ catalog.Host, err error) {
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return catalog.Host{}, err
	}
	id, hash, err := catalog.ParseJoinToken(token)
	if err != nil {
		return catalog.Host{}, code.New(code.AuthFailed, "%v", err)
	}
	h := newRaftHost(cfg)
	defer func() { err = errors.Join(err, h.release()) }()
	if err := h.openData(); err != nil {
		return catalog.Host{}, err
	}
	if err := h.openPeers(); err != nil {
		return catalog.Host{}, err
	}
	if err := h.meetFleet(ctx); err != nil {
		return catalog.Host{}, err
	}
	return h.join(ctx, id, hash)
}

// meetFleet learns which fleet the hosts of the list belong to; it never forms one.
func (h *RaftHost) meetFleet(ctx context.Context) error {
	if h.fleetName() != "" {
		return h.checkFleet()
	}
	found, err := h.askFleet(ctx, nil)
	if err != nil {
		return code.New(code.Unavailable, "%v: check the list of hosts, and that they run", err)
	}
	return h.updateIdentity(found)
}

// join asks each host of the list in turn; one that holds no catalog refuses.
func (h *RaftHost) join(ctx context.Context, tokenID uint64, hash [sha256.Size]byte) (catalog.Host, error) {
	c := &catalog.JoinHost{Host: h.ownHost(), Incarnation: h.incarnation(), TokenID: tokenID, TokenHash: hash}
	var last error = code.New(code.Unavailable, "no host of the list was reached: check the list, and that they run")
	for ctx.Err() == nil {
		for _, hostID := range h.book.others(h.cfg.HostID) {
			r, err := h.proposeCatalogAt(ctx, hostID, catalog.Encode(c))
			if err == nil {
				return r.Host, r.Err()
			}
			var e *code.Error
			if !errors.As(err, &e) || !worthRepeating(e) {
				return catalog.Host{}, err
			}
			if e.Code != code.NotReplica { // that is no news
				last = err
			}
		}
		pause(ctx, joinPause)
	}
	return catalog.Host{}, last
}

// ownHost is this host as its list has it.
func (h *RaftHost) ownHost() catalog.Host {
	spec, _ := h.cfg.self()
	return catalog.Host{
		ID: spec.ID, Role: spec.Role, RaftAddr: spec.RaftAddr, PeerAddr: spec.PeerAddr, ClientAddr: spec.ClientAddr, Domain: spec.Domain,
	}
}
