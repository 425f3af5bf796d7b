package faultnet

import (
	"context"
	"io"
	"net/http"
)

// Peer puts the network between a host and another one's peer API: requests go from the first to the second, answers back. A lost
// answer is one to a request that was served.
func (n *Net) Peer(from, to uint64, under http.RoundTripper) http.RoundTripper {
	return &roundTripper{net: n, out: direction{from, to}, back: direction{to, from}, under: under}
}

type roundTripper struct {
	net       *Net
	out, back direction
	under     http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	if err := t.net.carry(ctx, t.out, true); err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
	if r.Body != nil && r.Body != http.NoBody {
		r = r.Clone(ctx)
		r.Body, r.GetBody = newBody(ctx, t.net, t.out, r.Body), nil
	}
	resp, err := t.under.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if err := t.net.carry(ctx, t.back, true); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	resp.Body = newBody(ctx, t.net, t.back, resp.Body)
	return resp, nil
}

// body is a stream under a rule. Its first piece comes with the headers, which have waited already.
type body struct {
	io.ReadCloser
	net    *Net
	way    direction
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	begun  bool
}

func newBody(ctx context.Context, n *Net, way direction, under io.ReadCloser) *body {
	b := &body{ReadCloser: under, net: n, way: way}
	b.ctx, b.cancel = context.WithCancel(ctx)
	return b
}

// Read implements io.Reader: a piece is late, waits behind a cut, or breaks off, but none is missing.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.begun && n > 0 {
		if cerr := b.net.carry(b.ctx, b.way, false); cerr != nil {
			return 0, cerr
		}
	}
	b.begun = true
	return n, err
}

// Close implements io.Closer.
func (b *body) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}
