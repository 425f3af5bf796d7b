package raftnet

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"io"
	"testing"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

func anyTime(bool) error { return nil }

func goldenBatch() *raftpb.MessageBatch {
	return &raftpb.MessageBatch{DeploymentId: 1, SourceAddress: "h", BinVer: 2, Requests: []raftpb.Message{{
		Type: raftpb.Replicate, To: 2, From: 1, ShardID: 7, Term: 3, LogTerm: 3, LogIndex: 9,
		Entries: []raftpb.Entry{{Term: 3, Index: 10, Cmd: []byte("hello")}},
	}}}
}

// The bytes on the wire; hosts of different versions meet, so they stay as they are.
const (
	goldenBatchFrame = "5471523101000000000000474d9f360e72b4e18f0a3e080c1002180120072803300338094000480050005a0c0003010a070568656c6c6f7f6218120018002000280032020800480050005800600068007000680010011a01682002"
	goldenEndFrame   = "54715231030000000000000000000000462826bc"
)

func TestGoldenFrames(t *testing.T) {
	b := goldenBatch()
	frame, err := encode(nil, kindBatch, b, b.SizeUpperLimit())
	require.NoError(t, err)
	require.Equal(t, goldenBatchFrame, hex.EncodeToString(frame))
	var end [headerBytes]byte
	putHeader(end[:], kindEnd, nil)
	require.Equal(t, goldenEndFrame, hex.EncodeToString(end[:]))

	stream := bytes.NewReader(append(append([]byte{}, frame...), end[:]...))
	k, payload, err := readFrame(stream, nil, anyTime)
	require.NoError(t, err)
	require.Equal(t, kindBatch, k)
	var got raftpb.MessageBatch
	require.NoError(t, decode(&got, payload))
	require.Equal(t, "hello", string(got.Requests[0].Entries[0].Cmd))
	k, payload, err = readFrame(stream, payload, anyTime)
	require.NoError(t, err)
	require.Equal(t, kindEnd, k)
	require.Empty(t, payload)
	_, _, err = readFrame(stream, nil, anyTime)
	require.Equal(t, io.EOF, err)
}

// TestDamagedFrames: no single changed bit passes, and no cut one.
func TestDamagedFrames(t *testing.T) {
	b := goldenBatch()
	frame, err := encode(nil, kindBatch, b, b.SizeUpperLimit())
	require.NoError(t, err)
	for bit := range len(frame) * 8 {
		bad := bytes.Clone(frame)
		bad[bit/8] ^= 1 << (bit % 8)
		_, _, err := readFrame(bytes.NewReader(bad), nil, anyTime)
		require.ErrorIs(t, err, ErrBadFrame, "bit %d", bit)
	}
	for n := 1; n < len(frame); n++ {
		_, _, err := readFrame(bytes.NewReader(frame[:n]), nil, anyTime)
		require.Equal(t, io.ErrUnexpectedEOF, err, "%d bytes", n)
	}
}

// header is a header with correct sums, whatever it says.
func header(k byte, reserved byte, length uint32) []byte {
	b := make([]byte, headerBytes)
	binary.BigEndian.PutUint32(b, magic)
	b[4], b[6] = k, reserved
	binary.BigEndian.PutUint32(b[8:], length)
	binary.BigEndian.PutUint32(b[16:], crc32.Checksum(b[:16], castagnoli))
	return b
}

func TestBoundedFrames(t *testing.T) {
	for name, h := range map[string][]byte{
		"too long": header(1, 0, maxPayloadBytes+1), "kind 0": header(0, 0, 1), "kind 5": header(5, 0, 1),
		"empty batch": header(1, 0, 0), "full end": header(3, 0, 1), "reserved": header(1, 1, 1),
	} {
		_, _, err := readFrame(bytes.NewReader(h), nil, anyTime)
		require.ErrorIs(t, err, ErrBadFrame, name)
	}
	// A header that lies costs no more memory than a piece.
	_, payload, err := readFrame(bytes.NewReader(header(1, 0, maxPayloadBytes)), make([]byte, 0, 8), anyTime)
	require.Equal(t, io.ErrUnexpectedEOF, err)
	require.Nil(t, payload)
	_, err = encode(nil, kindBatch, nil, maxPayloadBytes+1)
	require.Error(t, err)
}

// FuzzFrame: whatever arrives is a frame that encodes to the same bytes, or an error.
func FuzzFrame(f *testing.F) {
	b := goldenBatch()
	frame, err := encode(nil, kindBatch, b, b.SizeUpperLimit())
	require.NoError(f, err)
	f.Add(frame)
	f.Add(header(1, 0, maxPayloadBytes))
	f.Add(header(3, 0, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		k, payload, err := readFrame(r, nil, anyTime)
		if err != nil {
			require.True(t, errors.Is(err, ErrBadFrame) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
			require.LessOrEqual(t, cap(payload), 2*len(data)+2*pieceBytes)
			return
		}
		again := make([]byte, headerBytes)
		putHeader(again, k, payload)
		require.Equal(t, data[:len(data)-r.Len()], append(again, payload...))
		switch k {
		case kindBatch:
			_ = decode(&raftpb.MessageBatch{}, payload)
		case kindChunk:
			_ = decode(&raftpb.Chunk{}, payload)
		}
	})
}
