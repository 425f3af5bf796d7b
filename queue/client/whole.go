package client

import (
	"encoding/binary"
	"io"
	"net/http"

	"connectrpc.com/connect"
)

// wholeMessages makes each message of a stream one piece. connect hands the length of a message and the message to the transport one after the
// other, which makes a frame of each and writes it: the host's connection, stream and handler would wake for both.
type wholeMessages struct{ connect.HTTPClient }

// Do implements connect.HTTPClient.
func (w wholeMessages) Do(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.ContentLength < 0 {
		r.Body = &wholeBody{ReadCloser: r.Body}
	}
	return w.HTTPClient.Do(r)
}

// envelopeBytes is what stands before a message: flags, and the length in four bytes.
const envelopeBytes = 5

// wholeBody reads what connect writes, and behind a length at once what must follow. It changes nothing of the bytes.
type wholeBody struct {
	io.ReadCloser
	head [envelopeBytes]byte
	have int   // of head
	left int   // of the message
	err  error // comes behind what was read
}

// Read implements io.Reader.
func (b *wholeBody) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	if err != nil || !b.follow(p[:n]) || n == len(p) {
		return n, err
	}
	more, err := b.ReadCloser.Read(p[n:])
	b.follow(p[n : n+more])
	b.err = err
	return n + more, nil
}

// follow notes what was read, and says whether it ends between a length and its message.
func (b *wholeBody) follow(p []byte) (between bool) {
	for len(p) > 0 {
		if b.left > 0 {
			n := min(b.left, len(p))
			b.left, p, between = b.left-n, p[n:], false
			continue
		}
		n := copy(b.head[b.have:], p)
		b.have, p = b.have+n, p[n:]
		if b.have == envelopeBytes {
			b.have, b.left = 0, int(binary.BigEndian.Uint32(b.head[1:]))
			between = b.left > 0
		}
	}
	return between
}
