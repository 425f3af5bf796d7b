package certs

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/tierq/tierq/queue/certs/certstest"
)

// clock is a wall clock that a test moves.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }
func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

type bench struct {
	*Store
	files Files
	clock *clock
	logs  *observer.ObservedLogs
	ca    *certstest.CA
}

func open(t *testing.T, ca *certstest.CA, mutual bool) *bench {
	t.Helper()
	b := &bench{clock: &clock{now: time.Now()}, ca: ca}
	b.files.Cert, b.files.Key, b.files.CA = ca.Files(t.TempDir(), time.Hour, "127.0.0.1")
	core, logs := observer.New(zapcore.DebugLevel)
	b.logs = logs
	s, err := Open(Options{Files: b.files, Mutual: mutual, Now: b.clock.Now, Logger: zap.New(core)})
	require.NoError(t, err)
	b.Store = s
	return b
}

func (b *bench) refusals() int {
	return b.logs.FilterMessageSnippet("cannot be used").Len()
}

// TestRefusedAtOpen names the field and the fix.
func TestRefusedAtOpen(t *testing.T) {
	ca, other := certstest.NewCA(t, "a"), certstest.NewCA(t, "b")
	cert, key, roots := ca.Files(t.TempDir(), time.Hour, "h")
	ended, endedKey, _ := ca.Files(t.TempDir(), -time.Minute, "h")
	_, otherKey, otherRoots := other.Files(t.TempDir(), time.Hour, "h")
	cut := t.TempDir() + "/cut.pem"
	certstest.Write(t, cut, append(append([]byte{}, ca.PEM...), ca.PEM[:len(ca.PEM)/2]...))
	for name, tc := range map[string]struct {
		files Files
		want  string
	}{
		"no cert":     {Files{Key: key, CA: roots}, "tls.cert: no file is named"},
		"no key":      {Files{Cert: cert, CA: roots}, "tls.key: no file is named"},
		"no ca":       {Files{Cert: cert, Key: key}, "tls.ca: no file is named"},
		"absent":      {Files{Cert: cert + "x", Key: key, CA: roots}, "tls.cert: stat "},
		"directory":   {Files{Cert: cert, Key: t.TempDir(), CA: roots}, "tls.key: "},
		"not a pair":  {Files{Cert: cert, Key: otherKey, CA: roots}, "are not a pair"},
		"ended":       {Files{Cert: ended, Key: endedKey, CA: roots}, "ended at"},
		"other CA":    {Files{Cert: cert, Key: key, CA: otherRoots}, "is not trusted by"},
		"cut CA":      {Files{Cert: cert, Key: key, CA: cut}, "is cut or damaged"},
		"key as cert": {Files{Cert: key, Key: key, CA: roots}, `holds a "PRIVATE KEY"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Open(Options{Files: tc.files, Mutual: true, Names: Files{"tls.cert", "tls.key", "tls.ca"}})
			require.ErrorContains(t, err, tc.want)
		})
	}
}

// TestHalfWritten replaces the pair file by file: until both are there the former pair is used, and the refusal is told once.
func TestHalfWritten(t *testing.T) {
	b := open(t, certstest.NewCA(t, "a"), true)
	before := b.Ends()
	cert, key := b.ca.Issue(2*time.Hour, "127.0.0.1")
	for _, half := range [][]byte{{}, cert[:len(cert)/2], cert} {
		certstest.Write(t, b.files.Cert, half)
		for range 3 {
			changed, err := b.Reload()
			require.False(t, changed)
			require.Error(t, err)
		}
		require.Equal(t, before, b.Ends())
	}
	require.Equal(t, 3, b.refusals(), "each once")
	require.NoError(t, os.Remove(b.files.Key))
	_, err := b.Reload()
	require.ErrorIs(t, err, os.ErrNotExist)
	certstest.Write(t, b.files.Key, key)
	changed, err := b.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	require.WithinDuration(t, time.Now().Add(2*time.Hour), b.Ends(), time.Minute)
	changed, err = b.Reload()
	require.NoError(t, err)
	require.False(t, changed)
}

func TestEndedOrStrangerIsNoReplacement(t *testing.T) {
	b := open(t, certstest.NewCA(t, "a"), true)
	before := b.Ends()
	for _, ca := range []*certstest.CA{b.ca, certstest.NewCA(t, "b")} {
		life := time.Hour
		if ca == b.ca {
			life = -time.Minute
		}
		cert, key := ca.Issue(life, "127.0.0.1")
		certstest.Write(t, b.files.Cert, cert)
		certstest.Write(t, b.files.Key, key)
		_, err := b.Reload()
		require.Error(t, err)
		require.Equal(t, before, b.Ends())
	}
}

func TestWatch(t *testing.T) {
	b := open(t, certstest.NewCA(t, "a"), false)
	told := make(chan struct{}, 8)
	cancelTold := b.OnChange(func() { told <- struct{}{} })
	defer cancelTold()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); b.Watch(ctx) }()
	b.ca.Files(strings.TrimSuffix(b.files.Cert, "/cert.pem"), 2*time.Hour, "127.0.0.1")
	<-told
	cancel()
	<-done
}

// pair connects two stores and returns what each side says, after one byte each way.
func pair(t *testing.T, server, client *Store) (serverErr, clientErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	tl := tls.NewListener(l, server.Server("x"))
	defer func() { _ = tl.Close() }()
	done := make(chan error, 1)
	go func() {
		c, err := tl.Accept()
		if err == nil {
			b := make([]byte, 1)
			if _, err = io.ReadFull(c, b); err == nil {
				_, err = c.Write(b)
			}
			_ = c.Close()
		}
		done <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	conn, err := client.Dial(ctx, &net.Dialer{}, l.Addr().String(), "x")
	if err == nil {
		b := []byte{1}
		_, err = conn.Write(b)
		if err == nil {
			_, err = io.ReadFull(conn, b)
		}
		_ = conn.Close()
	}
	return <-done, err
}

// TestMutual: same root talks, another root is refused by both sides, and a change of the files changes who is trusted.
func TestMutual(t *testing.T) {
	ca, strange := certstest.NewCA(t, "a"), certstest.NewCA(t, "b")
	a, b, s := open(t, ca, true), open(t, ca, true), open(t, strange, true)
	_, err := pair(t, a.Store, b.Store)
	require.NoError(t, err)
	serr, err := pair(t, a.Store, s.Store)
	require.Error(t, serr)
	require.Contains(t, Explain(err), "not of a CA that is trusted")

	// The stranger trusts a, but a does not trust it: a refuses, and the stranger can tell.
	certstest.Write(t, s.files.CA, append(append([]byte{}, strange.PEM...), ca.PEM...))
	s.clock.add(Interval)
	serr, err = pair(t, a.Store, s.Store)
	require.Error(t, serr)
	require.True(t, Refused(err), "%v", err)

	certstest.Write(t, a.files.CA, append(append([]byte{}, strange.PEM...), ca.PEM...))
	a.clock.add(Interval)
	_, err = pair(t, a.Store, s.Store)
	require.NoError(t, err)
}

func TestOtherName(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a := open(t, ca, true)
	cert, key, roots := ca.Files(t.TempDir(), time.Hour, "elsewhere")
	named, err := Open(Options{Files: Files{cert, key, roots}})
	require.NoError(t, err)
	_, err = pair(t, named, a.Store)
	require.Contains(t, Explain(err), "for another name")
	other, err := Open(Options{Files: a.files, ServerName: "elsewhere"})
	require.NoError(t, err)
	_, err = pair(t, named, other)
	require.NoError(t, err)
}

func TestTrustEnds(t *testing.T) {
	ca := certstest.NewCA(t, "a")
	a, b := open(t, ca, false), open(t, ca, false)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	tl := tls.NewListener(l, a.Server())
	defer func() { _ = tl.Close() }()
	accepted := make(chan *tls.Conn, 1)
	go func() {
		if c, err := tl.Accept(); err == nil && c.(*tls.Conn).Handshake() == nil {
			accepted <- c.(*tls.Conn)
		}
		close(accepted)
	}()
	conn, err := b.Dial(t.Context(), &net.Dialer{}, l.Addr().String())
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	served := <-accepted
	require.NotNil(t, served)
	defer func() { _ = served.Close() }()
	require.True(t, a.Trusts(served))
	certstest.Write(t, a.files.CA, certstest.NewCA(t, "b").PEM)
	_, err = a.Reload()
	require.NoError(t, err)
	require.False(t, a.Trusts(served))
}

// TestExplainPlain: a host that speaks plain text is told from one that is not there.
func TestExplainPlain(t *testing.T) {
	b := open(t, certstest.NewCA(t, "a"), false)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	srv := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second}
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()
	_, err = b.Dial(t.Context(), &net.Dialer{}, l.Addr().String())
	require.Contains(t, Explain(err), "does not speak TLS")
	require.Empty(t, Explain(errors.New("anything")))
}
