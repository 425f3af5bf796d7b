package client

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

// deafHost accepts every stream and reads nothing of it, so that flow control holds its senders up.
func deafHost(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	srv := &http.Server{Protocols: p, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(ln)
	}()
	t.Cleanup(func() { _ = srv.Close(); <-served })
	return ln.Addr().String()
}

// A host that takes nothing more holds a publish up no longer than its deadline, and its client's close not at all.
func TestDeafHostHoldsNoPublishUp(t *testing.T) {
	c, err := New(Options{Addrs: []string{deafHost(t)}, RefreshEvery: -1})
	require.NoError(t, err)
	msgs := make([]Message, 16)
	for i := range msgs {
		msgs[i].Body = make([]byte, 1<<20)
	}
	first := uint32(0)
	clienttest.Ends(t, "a publish to a deaf host", func() {
		for range 2 {
			ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
			_, err := c.PublishWith(ctx, "q", PublishOptions{Partition: &first}, msgs...)
			cancel()
			var e *code.Error
			require.ErrorAs(t, err, &e)
		}
	})
	clienttest.Ends(t, "the close of a client of a deaf host", func() { require.NoError(t, c.Close(context.Background())) })
}

// Nor does it hold up a settle, or what would be sent behind it.
func TestDeafHostHoldsNoSettleUp(t *testing.T) {
	addr := deafHost(t)
	c, err := New(Options{Addrs: []string{addr}, RefreshEvery: -1})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close(context.Background())) }()
	sctx, end := context.WithCancelCause(c.base)
	n := newLane(&consumer{c: c, queue: "q", group: "g"}, 0, 1, 1)
	s := &session{n: n, link: newLink(addr), end: end, pending: map[uint64]chan []*tierqv1.SettleResult{}, ended: make(chan struct{})}
	s.bidi = c.apisOf(addr).stream().Consume(sctx)
	context.AfterFunc(sctx, s.cut)
	go s.read(&tierqv1.ConsumeResponse{})

	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	clienttest.Ends(t, "a settle at a deaf host", func() {
		results, sent := s.settle(ctx, &settling{kind: "reject", reason: strings.Repeat("x", 16<<20)}, []string{"r"})
		require.Nil(t, results)
		require.True(t, sent)
		n.grow(s)
		<-s.ended
	})
}
