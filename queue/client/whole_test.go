package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
)

// enveloped writes a message as connect does.
func enveloped(t *testing.T, w io.Writer, message []byte) {
	t.Helper()
	var head [envelopeBytes]byte
	binary.BigEndian.PutUint32(head[1:], uint32(len(message)))
	_, err := w.Write(head[:])
	require.NoError(t, err)
	_, err = w.Write(message)
	require.NoError(t, err)
}

// TestWholeBody: a read brings a message with its length, whatever its size, and never waits for what need not come.
func TestWholeBody(t *testing.T) {
	r, w := io.Pipe()
	b := &wholeBody{ReadCloser: r}
	messages := [][]byte{[]byte("one"), {}, bytes.Repeat([]byte("x"), 300), []byte("last")}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, m := range messages {
			enveloped(t, w, m)
		}
		_, err := w.Write([]byte{0, 0, 0}) // a length that is cut off
		require.NoError(t, err)
		require.NoError(t, w.Close())
	}()
	buf := make([]byte, 100)
	var sizes []int
	var all []byte
	for {
		n, err := b.Read(buf)
		sizes, all = append(sizes, n), append(all, buf[:n]...)
		if err != nil {
			require.ErrorIs(t, err, io.EOF)
			break
		}
	}
	<-done
	require.Equal(t, []int{8, 5, 0, 100, 100, 100, 5, 9, 3, 0}, sizes)
	var want bytes.Buffer
	for _, m := range messages {
		enveloped(t, &want, m)
	}
	require.Equal(t, append(want.Bytes(), 0, 0, 0), all)
}

// TestWholeBodyCut: a stream that is cut behind a length ends with what came.
func TestWholeBodyCut(t *testing.T) {
	r, w := io.Pipe()
	b := &wholeBody{ReadCloser: r}
	go func() {
		_, _ = w.Write([]byte{0, 0, 0, 0, 9})
		_ = w.CloseWithError(io.ErrUnexpectedEOF)
	}()
	buf := make([]byte, 100)
	n, err := b.Read(buf)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	_, err = b.Read(buf)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.NoError(t, b.Close())
}

// quickHost answers each publish of a stream at once.
type quickHost struct {
	tierqv1connect.UnimplementedStreamServiceHandler
}

func (quickHost) PublishStream(_ context.Context, s *connect.BidiStream[tierqv1.PublishRequest, tierqv1.PublishStreamResponse]) error {
	for {
		r, err := s.Receive()
		if err != nil {
			return nil
		}
		out := &tierqv1.PublishResponse{Results: make([]*tierqv1.PublishResult, len(r.GetMessages()))}
		for i := range out.Results {
			out.Results[i] = &tierqv1.PublishResult{Address: uint64(i) + 1}
		}
		if err := s.Send(&tierqv1.PublishStreamResponse{Outcome: &tierqv1.PublishStreamResponse_Published{Published: out}}); err != nil {
			return err
		}
	}
}

// BenchmarkWholeMessages sends one message of 256 bytes at a time by a stream: in two pieces, as connect does, and whole. cpu-ns/op is
// of both ends.
func BenchmarkWholeMessages(b *testing.B) {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	mux := http.NewServeMux()
	mux.Handle(tierqv1connect.NewStreamServiceHandler(quickHost{}))
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = p
	srv.Start()
	defer srv.Close()
	tr := &http.Transport{Protocols: p}
	defer tr.CloseIdleConnections()
	hc := &http.Client{Transport: tr}
	for _, way := range []struct {
		name string
		hc   connect.HTTPClient
	}{{"pieces", hc}, {"whole", wholeMessages{hc}}} {
		b.Run(way.name, func(b *testing.B) {
			s := tierqv1connect.NewStreamServiceClient(way.hc, srv.URL, connect.WithAcceptCompression("gzip", nil, nil)).PublishStream(b.Context())
			req := &tierqv1.PublishRequest{Queue: "q", Messages: []*tierqv1.OutMessage{{Body: make([]byte, 256)}}}
			began := cpuTime(b)
			for b.Loop() {
				require.NoError(b, s.Send(req))
				_, err := s.Receive()
				require.NoError(b, err)
			}
			b.ReportMetric(float64((cpuTime(b)-began).Nanoseconds())/float64(b.N), "cpu-ns/op")
			require.NoError(b, s.CloseRequest())
			require.NoError(b, s.CloseResponse())
		})
	}
}

// cpuTime is what this process has taken of processors.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
