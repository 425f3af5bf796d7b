package raftnet

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/host/freeport"
)

// plainSide is one host's transport, and what arrives there.
type plainSide struct {
	*Plain
	address string
	batches chan raftpb.MessageBatch
	chunks  chan raftpb.Chunk
	refuse  atomic.Bool // chunks are not taken
}

func newPlainSide(t *testing.T) *plainSide {
	t.Helper()
	s := &plainSide{address: freeport.For(t), batches: make(chan raftpb.MessageBatch, 16), chunks: make(chan raftpb.Chunk, 16)}
	s.Plain = NewPlain(s.address, zaptest.NewLogger(t), func(b raftpb.MessageBatch) { s.batches <- b }, func(c raftpb.Chunk) bool {
		if !s.refuse.Load() {
			s.chunks <- c
		}
		return !s.refuse.Load()
	})
	require.NoError(t, s.Start())
	t.Cleanup(func() { require.NoError(t, s.Plain.Close()) })
	return s
}

func TestPlainBatches(t *testing.T) {
	a, b := newPlainSide(t), newPlainSide(t)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	for i, size := range []int{0, 1, readBytes, pieceBytes, 3*pieceBytes + 7, keepBytes + 1, 10} {
		require.NoError(t, c.SendMessageBatch(batch(uint64(i), size)))
		select {
		case got := <-b.batches:
			require.Equal(t, uint64(i), got.Requests[0].LogIndex)
			require.Len(t, got.Requests[0].Entries[0].Cmd, size)
		case <-time.After(patience):
			require.FailNow(t, "nothing arrived")
		}
	}
}

func TestPlainChunks(t *testing.T) {
	a, b := newPlainSide(t), newPlainSide(t)
	carriesChunks(t, a, b.address, b.chunks, &b.refuse)
}

// TestPlainClose: Close ends connections from elsewhere, and the one that sends hears of it.
func TestPlainClose(t *testing.T) {
	a, b := newPlainSide(t), newPlainSide(t)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SendMessageBatch(batch(1, 10)))
	<-b.batches
	require.NoError(t, b.Plain.Close())
	require.Eventually(t, func() bool { return c.SendMessageBatch(batch(2, 10)) != nil }, patience, time.Millisecond)
	_, err = a.GetConnection(t.Context(), b.address)
	require.Error(t, err)
}

// goldenPlain are the bytes on the wire, as the engine's own transport writes them.
const goldenPlain = "ae7d0064000000000000004722ef4dfaa9bb69b90a3e080c1002180120072803300338094000480050005a0c0003010a070568656c6c6f7f6218120018002000280032020800480050005800600068007000680010011a01682002"

func TestGoldenPlain(t *testing.T) {
	b := goldenBatch()
	raw, err := encodePlain(nil, plainBatch, b, b.SizeUpperLimit())
	require.NoError(t, err)
	require.Equal(t, goldenPlain, hex.EncodeToString(raw))
	what, payload, err := readAll(append(raw, 0, 0))
	require.NoError(t, err)
	require.EqualValues(t, plainBatch, what)
	var got raftpb.MessageBatch
	require.NoError(t, decode(&got, payload))
	require.Equal(t, "hello", string(got.Requests[0].Entries[0].Cmd))
}

// silent is a connection that brings nothing.
type silent struct{ net.Conn }

func (silent) SetReadDeadline(time.Time) error { return nil }

// readAll reads the first message of raw as a connection brings it.
func readAll(raw []byte) (uint16, []byte, error) {
	return readPlain(silent{}, bufio.NewReaderSize(bytes.NewReader(raw), readBytes), nil)
}

// TestDamagedPlain: no single changed bit passes, and no cut message.
func TestDamagedPlain(t *testing.T) {
	b := goldenBatch()
	raw, err := encodePlain(nil, plainBatch, b, b.SizeUpperLimit())
	require.NoError(t, err)
	for bit := range len(raw) * 8 {
		damaged := append([]byte(nil), raw...)
		damaged[bit/8] ^= 1 << (bit % 8)
		_, _, err := readAll(damaged)
		require.ErrorIs(t, err, ErrBadFrame, "bit %d", bit)
	}
	for n := range raw {
		_, _, err := readAll(raw[:n])
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		require.ErrorIs(t, err, want, "cut at %d", n)
	}
}

// FuzzPlain: whatever arrives is a message that encodes to the same bytes, the end of a stream, or an error; and one that lies about its length costs
// no more memory than a piece.
func FuzzPlain(f *testing.F) {
	b := goldenBatch()
	raw, err := encodePlain(nil, plainBatch, b, b.SizeUpperLimit())
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte{0, 0})
	f.Add(plainBytes(plainChunk, []byte("x")))
	f.Add(raw[:plainPrefix+plainHeader])
	f.Fuzz(func(t *testing.T, data []byte) {
		what, payload, err := readAll(data)
		if err != nil {
			require.True(t, errors.Is(err, ErrBadFrame) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
			require.LessOrEqual(t, cap(payload), 2*len(data)+2*pieceBytes)
			return
		}
		switch what {
		case plainEnd:
			require.Equal(t, []byte{0, 0}, data[:plainPrefix])
			return
		case plainBatch:
			_ = decode(&raftpb.MessageBatch{}, payload)
		case plainChunk:
			_ = decode(&raftpb.Chunk{}, payload)
		}
		require.Equal(t, data[:plainPrefix+plainHeader+len(payload)], plainBytes(what, payload))
	})
}

// plainBytes are a message with any payload.
func plainBytes(what uint16, payload []byte) []byte {
	b := make([]byte, plainPrefix+plainHeader, plainPrefix+plainHeader+len(payload))
	binary.BigEndian.PutUint16(b, plainOpen)
	h := b[plainPrefix:]
	binary.BigEndian.PutUint16(h, what)
	binary.BigEndian.PutUint64(h[2:], uint64(len(payload)))
	binary.BigEndian.PutUint32(h[14:], crc32.ChecksumIEEE(payload))
	binary.BigEndian.PutUint32(h[10:], crc32.ChecksumIEEE(h))
	return append(b, payload...)
}
