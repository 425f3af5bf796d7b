package raftnet

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"slices"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

// What travels over plain TCP is the format of the engine's own transport, so that hosts with either understand each other:
// two bytes that open a message, or end a stream of chunks, then a header of 18 bytes and the payload. Integers are big
// endian, sums are CRC-32 (IEEE).
//
//	0   what the payload is: 100 a raftpb.MessageBatch, 200 a raftpb.Chunk
//	2   length of the payload in bytes
//	10  sum of the header with these four bytes as zeros
//	14  sum of the payload
const (
	plainOpen   = 0xAE7D
	plainEnd    = 0x0000
	plainBatch  = 100
	plainChunk  = 200
	plainPrefix = 2
	plainHeader = 18
)

// readBytes is what a receiver takes from the system at once.
const readBytes = 64 << 10

// Plain implements raftio.ITransport over plain TCP. The engine's own transport writes a message in three pieces and reads it in
// three, each with a deadline, and the receiver may wake for each; Plain writes and reads it whole. And it does not end the
// process when a connection cannot be accepted.
type Plain struct {
	in       *acceptor
	messages raftio.MessageHandler
	chunks   raftio.ChunkHandler
}

var _ raftio.ITransport = (*Plain)(nil)

// NewPlain returns a transport that listens on a host:port and hands what arrives to messages and chunks. It binds nothing before Start.
func NewPlain(listen string, log *zap.Logger, messages raftio.MessageHandler, chunks raftio.ChunkHandler) *Plain {
	t := &Plain{in: newAcceptor(listen, log.Named("raftnet")), messages: messages, chunks: chunks}
	t.in.serve = t.serve
	return t
}

// Name implements raftio.ITransport.
func (t *Plain) Name() string { return "tierq-raftnet-plain" }

// Start implements raftio.ITransport: it binds and accepts.
func (t *Plain) Start() error { return t.in.start() }

// Close implements raftio.ITransport: it ends the listener and all connections from elsewhere, and waits for their goroutines.
func (t *Plain) Close() error {
	t.in.close()
	return nil
}

// serve takes messages until the connection ends, and returns why; nil at its orderly end.
func (t *Plain) serve(c net.Conn) error {
	r := bufio.NewReaderSize(c, readBytes)
	var buf []byte
	for {
		what, payload, err := readPlain(c, r, buf)
		if err != nil {
			return orderly(err)
		}
		if buf = payload; cap(buf) > keepBytes {
			buf = nil
		}
		switch what {
		case plainBatch:
			var b raftpb.MessageBatch
			if err := decode(&b, payload); err != nil {
				return err
			}
			t.messages(b)
		case plainChunk:
			var chunk raftpb.Chunk
			if err := decode(&chunk, payload); err != nil {
				return err
			}
			if !t.chunks(chunk) {
				return errors.New("the engine did not take a chunk of a snapshot")
			}
		case plainEnd:
			return write(c, []byte{0, 0})
		}
	}
}

// readPlain reads one message. The payload is in buf where it fits, and valid until buf is used again. Only what was begun has a deadline.
func readPlain(c net.Conn, r *bufio.Reader, buf []byte) (what uint16, payload []byte, err error) {
	var head [plainPrefix + plainHeader]byte
	timed := false
	// begun gives the next read a deadline, unless what it wants is here.
	begun := func(n int) error {
		if r.Buffered() >= n {
			return nil
		}
		timed = true
		return c.SetReadDeadline(time.Now().Add(frameTimeout))
	}
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return 0, nil, err
	}
	if err := begun(1); err != nil {
		return 0, nil, err
	}
	if _, err := io.ReadFull(r, head[1:plainPrefix]); err != nil {
		return 0, nil, cut(err)
	}
	switch binary.BigEndian.Uint16(head[:]) {
	case plainEnd:
		return plainEnd, buf, nil
	case plainOpen:
	default:
		return 0, nil, fmt.Errorf("%w: it begins with %x", ErrBadFrame, head[:plainPrefix])
	}
	if err := begun(plainHeader); err != nil {
		return 0, nil, err
	}
	if _, err := io.ReadFull(r, head[plainPrefix:]); err != nil {
		return 0, nil, cut(err)
	}
	what, length, sum, err := parsePlain(head[plainPrefix:])
	if err != nil {
		return 0, nil, err
	}
	payload = buf[:0]
	for len(payload) < length {
		n := len(payload)
		piece := min(length-n, pieceBytes)
		if err := begun(piece); err != nil {
			return 0, nil, err
		}
		payload = slices.Grow(payload, piece)[:n+piece]
		if _, err := io.ReadFull(r, payload[n:]); err != nil {
			return 0, nil, cut(err)
		}
	}
	if crc32.ChecksumIEEE(payload) != sum {
		return 0, nil, fmt.Errorf("%w: the payload's sum is wrong", ErrBadFrame)
	}
	if timed {
		err = c.SetReadDeadline(time.Time{})
	}
	return what, payload, err
}

// parsePlain returns what a header announces.
func parsePlain(b []byte) (what uint16, length int, sum uint32, err error) {
	var zeroed [plainHeader]byte
	copy(zeroed[:], b)
	clear(zeroed[10:14])
	if crc32.ChecksumIEEE(zeroed[:]) != binary.BigEndian.Uint32(b[10:]) {
		return 0, 0, 0, fmt.Errorf("%w: the header's sum is wrong", ErrBadFrame)
	}
	what = binary.BigEndian.Uint16(b)
	n := binary.BigEndian.Uint64(b[2:])
	if what != plainBatch && what != plainChunk || n == 0 || n > maxPayloadBytes {
		return 0, 0, 0, fmt.Errorf("%w: kind %d with %d bytes", ErrBadFrame, what, n)
	}
	return what, int(n), binary.BigEndian.Uint32(b[14:]), nil
}

// encodePlain makes a message in buf, or in a new one if it is too small. A payload beyond the bound is an error.
func encodePlain(buf []byte, what uint16, m raftpb.Marshaler, sizeLimit int) ([]byte, error) {
	if sizeLimit > maxPayloadBytes {
		return nil, fmt.Errorf("a message of up to %d bytes is larger than one may be, %d", sizeLimit, maxPayloadBytes)
	}
	const before = plainPrefix + plainHeader
	buf = slices.Grow(buf[:0], before+sizeLimit)[:before+sizeLimit]
	n, err := m.MarshalTo(buf[before:])
	if err != nil {
		return nil, err
	}
	buf = buf[:before+n]
	binary.BigEndian.PutUint16(buf, plainOpen)
	header := buf[plainPrefix:before]
	binary.BigEndian.PutUint16(header, what)
	binary.BigEndian.PutUint64(header[2:], uint64(n))
	clear(header[10:14])
	binary.BigEndian.PutUint32(header[14:], crc32.ChecksumIEEE(buf[before:]))
	binary.BigEndian.PutUint32(header[10:], crc32.ChecksumIEEE(header))
	return buf, nil
}

// GetConnection implements raftio.ITransport.
func (t *Plain) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	return t.dial(ctx, target)
}

// GetSnapshotConnection implements raftio.ITransport.
func (t *Plain) GetSnapshotConnection(ctx context.Context, target string) (raftio.ISnapshotConnection, error) {
	c, err := t.dial(ctx, target)
	if err != nil {
		return nil, err
	}
	return &plainChunks{c}, nil
}

func (t *Plain) dial(ctx context.Context, target string) (*plainConn, error) {
	d := &net.Dialer{Timeout: dialTimeout, KeepAliveConfig: keepAlive}
	c, err := d.DialContext(ctx, "tcp", target)
	if err != nil {
		return nil, err
	}
	setUserTimeout(c)
	return &plainConn{c: c}, nil
}

// plainConn sends messages to one host. The engine uses it from one goroutine at a time.
type plainConn struct {
	c   net.Conn
	buf []byte
}

// send encodes and sends, and keeps the buffer unless it is large.
func (c *plainConn) send(what uint16, m raftpb.Marshaler, sizeLimit int) error {
	b, err := encodePlain(c.buf, what, m, sizeLimit)
	if err != nil {
		return err
	}
	if c.buf = b; cap(b) > keepBytes {
		c.buf = nil
	}
	return write(c.c, b)
}

// SendMessageBatch implements raftio.IConnection.
func (c *plainConn) SendMessageBatch(b raftpb.MessageBatch) error {
	return c.send(plainBatch, &b, b.SizeUpperLimit())
}

// Close implements raftio.IConnection.
func (c *plainConn) Close() { _ = c.c.Close() }

// plainChunks sends the chunks of one snapshot.
type plainChunks struct{ c *plainConn }

// SendChunk implements raftio.ISnapshotConnection.
func (s *plainChunks) SendChunk(chunk raftpb.Chunk) error {
	return s.c.send(plainChunk, &chunk, chunk.Size())
}

// Close implements raftio.ISnapshotConnection. It tells the receiver that this was all, and waits until it has taken what came
// before, endTimeout at most.
func (s *plainChunks) Close() {
	defer s.c.Close()
	if write(s.c.c, []byte{0, 0}) != nil {
		return
	}
	if s.c.c.SetReadDeadline(time.Now().Add(endTimeout)) == nil {
		var answer [plainPrefix]byte
		_, _ = io.ReadFull(s.c.c, answer[:])
	}
}
