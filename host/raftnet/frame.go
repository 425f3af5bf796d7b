package raftnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"github.com/lni/dragonboat/v4/raftpb"
)

// A frame is a header of headerBytes and a payload; integers are big endian, sums are CRC-32C.
//
//	0   "TqR1"
//	4   kind
//	5   0, 0, 0
//	8   length of the payload in bytes
//	12  sum of the payload
//	16  sum of the 16 bytes before
//
// Hosts of different versions meet, so what is here does not change; another layout gets another first word.
const (
	headerBytes = 20
	magic       = 0x54715231
)

// kind says what a frame carries.
type kind uint8

const (
	kindBatch kind = iota + 1 // a raftpb.MessageBatch
	kindChunk                 // a raftpb.Chunk
	kindEnd                   // nothing: the sender of chunks has sent the last one
	kindEnded                 // nothing: the answer to kindEnd, when all chunks were taken
)

// maxPayloadBytes bounds a payload. The engine fills a batch up to 64 MiB and may then exceed it by one message, which is
// bounded by what a replica keeps in memory; a chunk is about 2 MiB.
const maxPayloadBytes = 256 << 20

// pieceBytes is what is read and written under one deadline, and how far memory grows ahead of what was received.
const pieceBytes = 1 << 20

// keepBytes bounds the memory that a connection keeps between frames.
const keepBytes = 4 << 20

// ErrBadFrame is wrapped by errors of bytes that are no frame. Nothing that follows can be read.
var ErrBadFrame = errors.New("no frame of the Raft transport")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// putHeader writes the header of a payload.
func putHeader(b []byte, k kind, payload []byte) {
	binary.BigEndian.PutUint32(b, magic)
	b[4], b[5], b[6], b[7] = byte(k), 0, 0, 0
	binary.BigEndian.PutUint32(b[8:], uint32(len(payload)))
	binary.BigEndian.PutUint32(b[12:], crc32.Checksum(payload, castagnoli))
	binary.BigEndian.PutUint32(b[16:], crc32.Checksum(b[:16], castagnoli))
}

// encode makes a frame in buf, or in a new one if it is too small. A payload beyond the bound is an error.
func encode(buf []byte, k kind, m raftpb.Marshaler, sizeLimit int) ([]byte, error) {
	if sizeLimit > maxPayloadBytes {
		return nil, fmt.Errorf("a message of up to %d bytes is larger than a frame may be, %d", sizeLimit, maxPayloadBytes)
	}
	buf = slices.Grow(buf[:0], headerBytes+sizeLimit)[:headerBytes+sizeLimit]
	n := 0
	if m != nil {
		var err error
		if n, err = m.MarshalTo(buf[headerBytes:]); err != nil {
			return nil, err
		}
	}
	buf = buf[:headerBytes+n]
	putHeader(buf, k, buf[headerBytes:])
	return buf, nil
}

// parseHeader returns what a header announces.
func parseHeader(b []byte) (k kind, length int, sum uint32, err error) {
	if binary.BigEndian.Uint32(b) != magic {
		return 0, 0, 0, fmt.Errorf("%w: it begins with %x", ErrBadFrame, b[:4])
	}
	if crc32.Checksum(b[:16], castagnoli) != binary.BigEndian.Uint32(b[16:]) {
		return 0, 0, 0, fmt.Errorf("%w: the header's sum is wrong", ErrBadFrame)
	}
	k = kind(b[4])
	n := binary.BigEndian.Uint32(b[8:])
	carries := k == kindBatch || k == kindChunk
	switch {
	case k < kindBatch || k > kindEnded, b[5]|b[6]|b[7] != 0:
		return 0, 0, 0, fmt.Errorf("%w: unknown kind %x", ErrBadFrame, b[4:8])
	case n > maxPayloadBytes, carries != (n > 0):
		return 0, 0, 0, fmt.Errorf("%w: kind %d with %d bytes", ErrBadFrame, k, n)
	}
	return k, int(n), binary.BigEndian.Uint32(b[12:]), nil
}

// readFrame reads one frame. The payload is in buf where it fits, and valid until buf is used again. before is called before each
// read of up to pieceBytes, to set a deadline; begun is false for the first byte, which may be long in coming.
func readFrame(r io.Reader, buf []byte, before func(begun bool) error) (k kind, payload []byte, err error) {
	var header [headerBytes]byte
	if err := before(false); err != nil {
		return 0, nil, err
	}
	if _, err := io.ReadFull(r, header[:1]); err != nil {
		return 0, nil, err
	}
	if err := before(true); err != nil {
		return 0, nil, err
	}
	if _, err := io.ReadFull(r, header[1:]); err != nil {
		return 0, nil, cut(err)
	}
	k, length, sum, err := parseHeader(header[:])
	if err != nil {
		return 0, nil, err
	}
	payload = buf[:0]
	for len(payload) < length {
		if err := before(true); err != nil {
			return 0, nil, err
		}
		n := len(payload)
		piece := min(length-n, pieceBytes)
		payload = slices.Grow(payload, piece)[:n+piece]
		if _, err := io.ReadFull(r, payload[n:]); err != nil {
			return 0, nil, cut(err)
		}
	}
	if crc32.Checksum(payload, castagnoli) != sum {
		return 0, nil, fmt.Errorf("%w: the payload's sum is wrong", ErrBadFrame)
	}
	return k, payload, nil
}

// cut makes the end within a frame an unexpected one.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
