package host

import (
	"context"
	"crypto/x509"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue/certs"
)

// The engine's messages name the host that they come from, and no fleet: those of another fleet, whose address this host has been given, would be
// taken for its own, as shard and replica ids begin at 1 in every fleet. So the fleet rides along: behind the source of a batch, and as the
// deployment of a chunk, in place of the number that the engine would write. What carries no fleet is taken: it comes from a host that has learned of
// none yet, or is from before this.

const sourceSeparator = "/"

// signSource adds the fleet to a batch's source.
func signSource(source, fleet string) string {
	if fleet == "" {
		return source
	}
	return source + sourceSeparator + fleet
}

// splitSource takes it off again; fleet is empty if there is none.
func splitSource(signed string) (source, fleet string) {
	source, fleet, _ = strings.Cut(signed, sourceSeparator)
	return source, fleet
}

// deploymentOf is the fleet as a chunk carries it; 0: none.
func deploymentOf(fleet string) uint64 {
	if len(fleet) < 16 {
		return 0
	}
	n, err := strconv.ParseUint(fleet[:16], 16, 64)
	if err != nil {
		return 0
	}
	return n | 1<<63 // never one that the engine uses
}

// signingTransport writes the fleet into what this host sends.
type signingTransport struct {
	raftio.ITransport
	fleet func() string
}

// GetConnection implements raftio.ITransport.
func (t *signingTransport) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	c, err := t.ITransport.GetConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	return &signingConn{c, t.fleet}, nil
}

// GetSnapshotConnection implements raftio.ITransport.
func (t *signingTransport) GetSnapshotConnection(ctx context.Context, target string) (raftio.ISnapshotConnection, error) {
	c, err := t.ITransport.GetSnapshotConnection(ctx, target)
	if err != nil {
		return nil, err
	}
	return &signingChunks{c, t.fleet}, nil
}

type signingConn struct {
	raftio.IConnection
	fleet func() string
}

// SendMessageBatch implements raftio.IConnection.
func (c *signingConn) SendMessageBatch(batch raftpb.MessageBatch) error {
	batch.SourceAddress = signSource(batch.SourceAddress, c.fleet())
	return c.IConnection.SendMessageBatch(batch)
}

type signingChunks struct {
	raftio.ISnapshotConnection
	fleet func() string
}

// SendChunk implements raftio.ISnapshotConnection.
func (c *signingChunks) SendChunk(chunk raftpb.Chunk) error {
	if n := deploymentOf(c.fleet()); n != 0 {
		chunk.DeploymentId = n
	}
	return c.ISnapshotConnection.SendChunk(chunk)
}

// strangerEvery is how often a stranger at the Raft port is told of.
const strangerEvery = 10 * time.Second

// gatekeeper drops what comes from another fleet before the engine sees it.
type gatekeeper struct {
	fleet      func() string
	deployment uint64 // the engine's own number
	log        *zap.Logger
	told       atomic.Int64 // unix ns
}

func (g *gatekeeper) stranger(from, fleet string) {
	now := time.Now().UnixNano()
	if last := g.told.Load(); now-last < int64(strangerEvery) || !g.told.CompareAndSwap(last, now) {
		return
	}
	g.log.Error("Raft messages of another fleet are refused: a host of that fleet has been given this host's address, or this one another fleet's data directory", event.Is("foreign-messages"),
		zap.String("from", from), zap.String("fleet", fleet), zap.String("own", g.fleet()))
}

func (g *gatekeeper) messages(next raftio.MessageHandler) raftio.MessageHandler {
	return func(batch raftpb.MessageBatch) {
		source, fleet := splitSource(batch.SourceAddress)
		if own := g.fleet(); fleet != "" && own != "" && fleet != own {
			g.stranger(source, fleet)
			return
		}
		batch.SourceAddress = source
		next(batch)
	}
}

func (g *gatekeeper) chunks(next raftio.ChunkHandler) raftio.ChunkHandler {
	return func(chunk raftpb.Chunk) bool {
		if chunk.DeploymentId != g.deployment {
			if own := deploymentOf(g.fleet()); own != 0 && chunk.DeploymentId != own {
				g.stranger("shard "+strconv.FormatUint(chunk.ShardID, 10)+" replica "+strconv.FormatUint(chunk.From, 10), strconv.FormatUint(chunk.DeploymentId, 16))
				return false
			}
			chunk.DeploymentId = g.deployment
		}
		return next(chunk)
	}
}

// checkCert says whether a certificate is that of a host, 0 for any of the fleet.
func (h *RaftHost) checkCert(cert *x509.Certificate, hostID uint64) error {
	return certs.CheckHost(cert, h.fleetName(), hostID, h.cfg.RequireHostIDs)
}

// checkSource checks the certificate of who sends Raft messages; an empty source is a stream of chunks, which name no host.
func (h *RaftHost) checkSource(cert *x509.Certificate, signed string) error {
	source, _ := splitSource(signed)
	if source == "" {
		return h.checkCert(cert, 0)
	}
	id, err := ParseTarget(source)
	if err != nil {
		return err
	}
	return h.checkCert(cert, id)
}

// checkTarget checks the certificate of who answers at a Raft address; one that is of no host any more is that of any.
func (h *RaftHost) checkTarget(cert *x509.Certificate, address string) error {
	id, _ := h.book.hostAt(address)
	return h.checkCert(cert, id)
}
