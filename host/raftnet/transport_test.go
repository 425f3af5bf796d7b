package raftnet

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/certs/certstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 60 * time.Second

// side is one host's transport, and what arrives there.
type side struct {
	*Transport
	t       *testing.T
	address string
	dir     string
	batches chan raftpb.MessageBatch
	chunks  chan raftpb.Chunk
	refuse  atomic.Bool   // chunks are not taken
	stop    chan struct{} // ends handlers that wait
}

func newSide(t *testing.T, ca *certstest.CA) *side {
	t.Helper()
	s := &side{t: t, address: freeport.For(t), dir: t.TempDir(), batches: make(chan raftpb.MessageBatch, 16), chunks: make(chan raftpb.Chunk, 16), stop: make(chan struct{})}
	cert, key, roots := ca.Files(s.dir, time.Hour, "127.0.0.1")
	store, err := certs.Open(certs.Options{Files: certs.Files{Cert: cert, Key: key, CA: roots}, Mutual: true})
	require.NoError(t, err)
	s.Transport = New(Options{Listen: s.address, TLS: store, Logger: zaptest.NewLogger(t)}, func(b raftpb.MessageBatch) {
		select {
		case s.batches <- b:
		case <-s.stop:
		}
	}, func(c raftpb.Chunk) bool {
		if s.refuse.Load() {
			return false
		}
		s.chunks <- c
		return true
	})
	require.NoError(t, s.Start())
	t.Cleanup(func() { close(s.stop); require.NoError(t, s.Transport.Close()) })
	return s
}

func batch(n uint64, size int) raftpb.MessageBatch {
	return raftpb.MessageBatch{SourceAddress: "a", Requests: []raftpb.Message{{
		Type: raftpb.Replicate, To: 2, From: 1, ShardID: 7, LogIndex: n, Entries: []raftpb.Entry{{Index: n + 1, Cmd: make([]byte, size)}},
	}}}
}

// arrives waits for the batch of a number.
func (s *side) arrives(n uint64) raftpb.MessageBatch {
	s.t.Helper()
	select {
	case b := <-s.batches:
		require.Equal(s.t, n, b.Requests[0].LogIndex)
		return b
	case <-time.After(patience):
		require.FailNow(s.t, "nothing arrived")
		panic("unreachable")
	}
}

func TestBatches(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a, b := newSide(t, ca), newSide(t, ca)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	for i, size := range []int{0, 1, pieceBytes, 3*pieceBytes + 7, keepBytes + 1, 10} {
		require.NoError(t, c.SendMessageBatch(batch(uint64(i), size)))
		require.Len(t, b.arrives(uint64(i)).Requests[0].Entries[0].Cmd, size)
	}
}

func TestChunks(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a, b := newSide(t, ca), newSide(t, ca)
	carriesChunks(t, a, b.address, b.chunks, &b.refuse)
}

// carriesChunks sends streams of chunks to an address where they are taken, and then one that is not.
func carriesChunks(t *testing.T, from raftio.ITransport, address string, taken <-chan raftpb.Chunk, refuse *atomic.Bool) {
	t.Helper()
	c, err := from.GetSnapshotConnection(t.Context(), address)
	require.NoError(t, err)
	for i := range uint64(3) {
		require.NoError(t, c.SendChunk(raftpb.Chunk{ShardID: 7, ChunkId: i, ChunkCount: 3, Data: make([]byte, 2<<20)}))
	}
	c.Close()
	require.Len(t, taken, 3, "Close returns when all were taken")

	// A chunk that the engine does not take ends the stream.
	refuse.Store(true)
	c, err = from.GetSnapshotConnection(t.Context(), address)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return c.SendChunk(raftpb.Chunk{ShardID: 7, Data: []byte("x")}) != nil }, patience, time.Millisecond)
	c.Close()
}

// TestCertificatesAreOfHosts: who sends, or answers, with the certificate of another host is refused, and nothing of it is taken.
func TestCertificatesAreOfHosts(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a, b := newSide(t, ca), newSide(t, ca)
	var sources sync.Map
	b.opts.CheckSource = func(cert *x509.Certificate, source string) error {
		require.NotNil(t, cert)
		sources.Store(source, true)
		if source == "a" {
			return nil
		}
		return errors.New("not that host")
	}
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SendMessageBatch(batch(1, 1)))
	b.arrives(1)
	other := batch(2, 1)
	other.SourceAddress = "b"
	require.Eventually(t, func() bool { return c.SendMessageBatch(other) != nil }, patience, time.Millisecond)
	require.Empty(t, b.batches)
	chunks, err := a.GetSnapshotConnection(t.Context(), b.address)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return chunks.SendChunk(raftpb.Chunk{ShardID: 7, Data: []byte("x")}) != nil }, patience, time.Millisecond)
	chunks.Close()
	require.Empty(t, b.chunks)
	for _, source := range []string{"a", "b", ""} {
		_, ok := sources.Load(source)
		require.True(t, ok, source)
	}
	a.opts.CheckTarget = func(_ *x509.Certificate, target string) error { return errors.New("not " + target) }
	_, err = a.GetConnection(t.Context(), b.address)
	require.ErrorContains(t, err, b.address+" is refused: not "+b.address)
}

// TestLossIsSeen: when the other host goes away the next send fails, without one that is lost in between.
func TestLossIsSeen(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a, b := newSide(t, ca), newSide(t, ca)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SendMessageBatch(batch(1, 1)))
	b.arrives(1)
	require.NoError(t, b.Transport.Close())
	select {
	case <-c.(*conn).link.lost:
	case <-time.After(patience):
		require.FailNow(t, "the loss was not seen")
	}
	require.Error(t, c.SendMessageBatch(batch(2, 1)))
	_, err = a.GetConnection(t.Context(), b.address)
	require.Error(t, err)
}

// TestBackPressure: a receiver that does not take what arrives makes its sender wait, and fail by its deadline.
func TestBackPressure(t *testing.T) {
	if testing.Short() {
		t.Skip("-short waits for no deadline")
	}
	t.Parallel()
	ca := certstest.NewCA(t, "a")
	a, b := newSide(t, ca), newSide(t, ca)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	for i := uint64(0); err == nil; i++ {
		err = c.SendMessageBatch(batch(i, pieceBytes))
		require.Less(t, i, uint64(200), "memory is not bounded")
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	c.Close()
}

func (s *side) write(file string, content []byte) {
	certstest.Write(s.t, filepath.Join(s.dir, file), content)
}

func (s *side) reload() {
	s.t.Helper()
	changed, err := s.opts.TLS.Reload()
	require.NoError(s.t, err)
	require.True(s.t, changed)
}

// TestRotation: a changed certificate loses no batch, and a root that is taken away closes who still shows its certificates.
func TestRotation(t *testing.T) {
	old, next := certstest.NewCA(t, "old"), certstest.NewCA(t, "next")
	a, b, late := newSide(t, old), newSide(t, old), newSide(t, old)
	c, err := a.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer c.Close()
	forgotten, err := late.GetConnection(t.Context(), b.address)
	require.NoError(t, err)
	defer forgotten.Close()
	n := uint64(0)
	send := func() {
		t.Helper()
		n++
		require.NoError(t, c.SendMessageBatch(batch(n, 1)))
		b.arrives(n)
	}
	send()
	both := append(append([]byte{}, old.PEM...), next.PEM...)
	for _, s := range []*side{a, b} {
		s.write("ca.pem", both)
		s.reload()
		send()
	}
	for _, s := range []*side{a, b} {
		cert, key := next.Issue(time.Hour, "127.0.0.1")
		s.write("cert.pem", cert)
		s.write("key.pem", key)
		s.reload()
		send()
	}
	select {
	case <-forgotten.(*conn).link.lost:
		require.FailNow(t, "it was closed too early")
	default:
	}
	for _, s := range []*side{a, b} {
		s.write("ca.pem", next.PEM)
		s.reload()
		send()
	}
	select {
	case <-forgotten.(*conn).link.lost:
	case <-time.After(patience):
		require.FailNow(t, "who shows a certificate of the removed root stayed connected")
	}
	require.Error(t, forgotten.SendMessageBatch(batch(0, 1)))
}

// TestStrangers: another root, no certificate, another protocol, plain text and noise reach no handler, and end.
func TestStrangers(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	b, stranger := newSide(t, ca), newSide(t, certstest.NewCA(t, "b"))
	_, err := stranger.GetConnection(t.Context(), b.address)
	require.Error(t, err)
	ended := func(c net.Conn) {
		t.Helper()
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		_, err := io.Copy(io.Discard, c)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		_ = c.Close()
	}
	frame, err := encode(nil, kindBatch, &raftpb.MessageBatch{SourceAddress: "a"}, 100)
	require.NoError(t, err)
	plain, err := net.Dial("tcp", b.address)
	require.NoError(t, err)
	_, err = plain.Write(frame)
	require.NoError(t, err)
	ended(plain)
	for name, c := range map[string]*tls.Config{
		"no certificate": {InsecureSkipVerify: true, NextProtos: []string{protocol}},
		"other protocol": b.opts.TLS.Client("127.0.0.1", "h3"),
		"no protocol":    b.opts.TLS.Client("127.0.0.1"),
	} {
		conn, err := tls.Dial("tcp", b.address, c)
		if err == nil {
			_, _ = conn.Write(frame)
			ended(conn)
		}
		t.Log(name, err)
	}
	noise, err := b.opts.TLS.Dial(context.Background(), &net.Dialer{}, b.address, protocol)
	require.NoError(t, err)
	_, _ = noise.Write(make([]byte, 4096)) // it may end within
	ended(noise)
	require.Empty(t, b.batches)
}
