package raftnet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
)

// conn sends frames to one host. The engine uses it from one goroutine at a time.
type conn struct {
	t      *Transport
	target string
	buf    []byte
	stale  atomic.Bool // the certificate files have changed
	link   *link
}

// link is one TLS connection, and the goroutine that waits for its end.
type link struct {
	c    *tls.Conn
	lost chan struct{} // closed when nothing more can be sent
	why  error         // valid once lost is closed
}

// GetConnection implements raftio.ITransport.
func (t *Transport) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	return t.connect(ctx, target)
}

// GetSnapshotConnection implements raftio.ITransport.
func (t *Transport) GetSnapshotConnection(ctx context.Context, target string) (raftio.ISnapshotConnection, error) {
	c, err := t.connect(ctx, target)
	if err != nil {
		return nil, err
	}
	return &chunkConn{c}, nil
}

func (t *Transport) connect(ctx context.Context, target string) (*conn, error) {
	c := &conn{t: t, target: target}
	t.mu.Lock()
	t.outbound[c] = struct{}{}
	t.mu.Unlock()
	var err error
	if c.link, err = t.dial(ctx, target); err != nil {
		t.forget(c)
		return nil, err
	}
	return c, nil
}

func (t *Transport) forget(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.outbound, c)
}

func (t *Transport) dial(ctx context.Context, target string) (*link, error) {
	d := &net.Dialer{Timeout: dialTimeout, KeepAliveConfig: keepAlive}
	tc, err := t.opts.TLS.Dial(ctx, d, target, protocol)
	if err != nil {
		return nil, err
	}
	if tc.ConnectionState().NegotiatedProtocol != protocol {
		_ = tc.Close()
		return nil, fmt.Errorf("%s does not speak %s", target, protocol)
	}
	if t.opts.CheckTarget != nil {
		if err := t.opts.CheckTarget(tc.ConnectionState().PeerCertificates[0], target); err != nil {
			_ = tc.Close()
			return nil, fmt.Errorf("%s is refused: %w", target, err)
		}
	}
	setUserTimeout(tc.NetConn())
	l := &link{c: tc, lost: make(chan struct{})}
	go l.wait()
	return l, nil
}

// wait reads what comes back: the answer to kindEnd, or nothing until the end.
func (l *link) wait() {
	defer close(l.lost)
	k, _, err := readFrame(l.c, nil, func(bool) error { return nil })
	switch {
	case err == nil && k != kindEnded:
		l.why = fmt.Errorf("%w: kind %d as an answer", ErrBadFrame, k)
	case err == nil:
		l.why = io.EOF // in order: everything was taken
	case err == io.EOF:
		l.why = errors.New("the other host closed the connection")
	default:
		l.why = err
	}
	_ = l.c.NetConn().Close() // a write that waits fails
}

// close ends the connection and waits for its goroutine.
func (l *link) close() {
	_ = l.c.SetWriteDeadline(time.Now().Add(time.Second)) // of TLS's goodbye
	_ = l.c.Close()
	<-l.lost
}

// send writes one frame, on a new connection if the certificate files have changed.
func (c *conn) send(ctx context.Context, frame []byte) error {
	if c.stale.Swap(false) {
		c.link.close()
		l, err := c.t.dial(ctx, c.target)
		if err != nil {
			c.stale.Store(true)
			return err
		}
		c.link = l
	}
	select {
	case <-c.link.lost:
		return fmt.Errorf("the connection to %s is lost: %w", c.target, c.link.why)
	default:
	}
	return write(c.link.c, frame)
}

// write writes b with a deadline for each piece. After an error nothing more can be sent.
func write(c net.Conn, b []byte) error {
	for len(b) > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(frameTimeout)); err != nil {
			return err
		}
		n, err := c.Write(b[:min(len(b), pieceBytes)])
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// sendMessage encodes and sends, and keeps the buffer unless it is large.
func (c *conn) sendMessage(k kind, m raftpb.Marshaler, sizeLimit int) error {
	frame, err := encode(c.buf, k, m, sizeLimit)
	if err != nil {
		return err
	}
	if c.buf = frame; cap(frame) > keepBytes {
		c.buf = nil
	}
	return c.send(c.t.in.ctx, frame)
}

// SendMessageBatch implements raftio.IConnection.
func (c *conn) SendMessageBatch(b raftpb.MessageBatch) error {
	return c.sendMessage(kindBatch, &b, b.SizeUpperLimit())
}

// Close implements raftio.IConnection.
func (c *conn) Close() {
	c.t.forget(c)
	c.link.close()
}

// chunkConn sends the chunks of one snapshot. Its connection is not made anew: chunks are of one stream.
type chunkConn struct{ c *conn }

// SendChunk implements raftio.ISnapshotConnection.
func (s *chunkConn) SendChunk(chunk raftpb.Chunk) error {
	s.c.stale.Store(false)
	return s.c.sendMessage(kindChunk, &chunk, chunk.Size())
}

// Close implements raftio.ISnapshotConnection. It tells the receiver that this was all, and waits until it has taken what came
// before, endTimeout at most.
func (s *chunkConn) Close() {
	defer s.c.Close()
	s.c.stale.Store(false)
	var end [headerBytes]byte
	putHeader(end[:], kindEnd, nil)
	if s.c.send(s.c.t.in.ctx, end[:]) != nil {
		return
	}
	select {
	case <-s.c.link.lost:
	case <-time.After(endTimeout):
	case <-s.c.t.in.ctx.Done():
	}
}

// orderly is nil for the end of a connection between two frames.
func orderly(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
