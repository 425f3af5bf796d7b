// Package raftnet carries the Raft engine's messages and snapshot chunks between hosts, over TCP with mutual TLS, or plain
// (plain.go). It takes the place of the engine's own transport, which reads its certificates once, and ends the process when a
// connection cannot be accepted. What follows is of TLS.
//
// A connection carries frames one way, from who made it; the answer to the end of a stream of chunks is the only thing that comes
// back. So an end of the connection is seen at once, by a read that waits for it, and the next send fails. Each write and
// each read within a frame has a deadline, and data that the other host does not acknowledge end the connection, so
// nothing waits for a host that is gone. A slow receiver slows its sender down; what the engine then has too much it drops, and
// Raft sends again.
//
// When the certificate files change, a connection is made anew before its next batch, and one that came from elsewhere is
// closed if the roots no longer trust it.
package raftnet

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/certs"
)

// protocol is what both sides say they speak, in the TLS handshake (ALPN).
const protocol = "tierq-raft/1"

const (
	dialTimeout  = 2 * time.Second
	frameTimeout = 5 * time.Second        // for pieceBytes, once a frame has begun
	endTimeout   = 10 * time.Second       // for the answer to the end of a stream of chunks
	acceptPause  = 100 * time.Millisecond // after a failed accept, as when files run out
	maxInbound   = 1024                   // connections from elsewhere
)

// keepAlive finds a host that is gone and to which nothing is sent; unacknowledged data are found by setUserTimeout.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

// Options say how a Transport is made. All fields but the checks are required.
type Options struct {
	Listen string // host:port to bind
	TLS    *certs.Store
	Logger *zap.Logger
	// CheckSource, if not nil, may refuse the certificate of who sends batches from a source, "" for chunks of a snapshot; CheckTarget that of
	// who answers at an address.
	CheckSource func(cert *x509.Certificate, source string) error
	CheckTarget func(cert *x509.Certificate, target string) error
}

// Transport implements raftio.ITransport.
type Transport struct {
	opts     Options
	in       *acceptor
	messages raftio.MessageHandler
	chunks   raftio.ChunkHandler
	unwatch  func()

	mu       sync.Mutex
	greeted  map[*tls.Conn]struct{} // from elsewhere, whose handshake is done
	outbound map[*conn]struct{}
}

var _ raftio.ITransport = (*Transport)(nil)

// New returns a transport that hands what arrives to messages and chunks. It binds nothing before Start.
func New(o Options, messages raftio.MessageHandler, chunks raftio.ChunkHandler) *Transport {
	t := &Transport{
		opts: o, in: newAcceptor(o.Listen, o.Logger.Named("raftnet")), messages: messages, chunks: chunks,
		greeted: make(map[*tls.Conn]struct{}), outbound: make(map[*conn]struct{}),
	}
	t.in.serve = t.serve
	t.unwatch = o.TLS.OnChange(t.certsChanged)
	return t
}

// Name implements raftio.ITransport.
func (t *Transport) Name() string { return "tierq-raftnet" }

// Start implements raftio.ITransport: it binds and accepts.
func (t *Transport) Start() error { return t.in.start() }

// Close implements raftio.ITransport: it ends the listener and all connections, and waits for their goroutines.
func (t *Transport) Close() error {
	t.unwatch()
	t.in.close()
	return nil
}

// serve takes frames until the connection ends, and returns why; nil at its orderly end.
func (t *Transport) serve(raw net.Conn) error {
	c := tls.Server(raw, t.opts.TLS.Server(protocol))
	defer func() {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second)) // of TLS's goodbye
		_ = c.Close()
		t.mu.Lock()
		delete(t.greeted, c)
		t.mu.Unlock()
	}()
	ctx, cancel := context.WithTimeout(t.in.ctx, certs.HandshakeTimeout)
	err := c.HandshakeContext(ctx)
	cancel()
	if err != nil {
		return fmt.Errorf("TLS handshake: %w", err)
	}
	if c.ConnectionState().NegotiatedProtocol != protocol {
		return errors.New("the caller does not speak " + protocol)
	}
	t.mu.Lock()
	t.greeted[c] = struct{}{}
	t.mu.Unlock()
	if !t.opts.TLS.Trusts(c) { // the files changed in between
		return errors.New("the roots no longer trust its certificate")
	}
	before := func(begun bool) error {
		if !begun {
			return c.SetReadDeadline(time.Time{})
		}
		return c.SetReadDeadline(time.Now().Add(frameTimeout))
	}
	var buf []byte
	in := &inbound{c: c}
	for {
		k, payload, err := readFrame(c, buf, before)
		if err != nil {
			return orderly(err)
		}
		if buf = payload; cap(buf) > keepBytes {
			buf = nil
		}
		more, err := t.take(in, k, payload)
		if err != nil || !more {
			return err
		}
	}
}

// inbound is a connection from elsewhere, with the source that its certificate was last checked for.
type inbound struct {
	c       *tls.Conn
	checked bool
	source  string
}

func (t *Transport) checkSource(in *inbound, source string) error {
	if t.opts.CheckSource == nil || in.checked && in.source == source {
		return nil
	}
	if err := t.opts.CheckSource(in.c.ConnectionState().PeerCertificates[0], source); err != nil {
		return fmt.Errorf("the caller is refused: %w", err)
	}
	in.checked, in.source = true, source
	return nil
}

// take hands one frame over. It returns false when nothing is to follow.
func (t *Transport) take(in *inbound, k kind, payload []byte) (more bool, err error) {
	switch k {
	case kindBatch:
		var b raftpb.MessageBatch
		if err := decode(&b, payload); err != nil {
			return false, err
		}
		if err := t.checkSource(in, b.SourceAddress); err != nil {
			return false, err
		}
		t.messages(b)
	case kindChunk:
		var chunk raftpb.Chunk
		if err := decode(&chunk, payload); err != nil {
			return false, err
		}
		if err := t.checkSource(in, ""); err != nil {
			return false, err
		}
		if !t.chunks(chunk) {
			return false, errors.New("the engine did not take a chunk of a snapshot")
		}
	case kindEnd:
		var answer [headerBytes]byte
		putHeader(answer[:], kindEnded, nil)
		return false, write(in.c, answer[:])
	default:
		return false, fmt.Errorf("%w: kind %d comes from this side only", ErrBadFrame, k)
	}
	return true, nil
}

// decode turns a panic of the engine's decoder into an error.
func decode(m raftpb.Unmarshaler, payload []byte) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", ErrBadFrame, r)
		}
	}()
	if err := m.Unmarshal(payload); err != nil {
		return fmt.Errorf("%w: %w", ErrBadFrame, err)
	}
	return nil
}

// certsChanged closes what the roots no longer trust, and has this host's own connections made anew.
func (t *Transport) certsChanged() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.greeted {
		if !t.opts.TLS.Trusts(c) {
			t.in.log.Info("a connection is closed: the roots no longer trust its certificate", zap.Stringer("from", c.RemoteAddr()))
			_ = c.NetConn().Close() // without TLS's goodbye, for which a write might have to end
		}
	}
	for c := range t.outbound {
		c.stale.Store(true)
	}
}
