package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/certs/certstest"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// tlsFleet is a fleet whose hosts have certificates of one CA between them, and of another one for clients, who must show one too.
type tlsFleet struct {
	*Dev
	t          *testing.T
	dir        string
	peer, apiC *certstest.CA
}

func (f *tlsFleet) hostDir(id uint64) string { return filepath.Join(f.dir, "certs-"+itoa(id)) }

func openTLS(t *testing.T) *tlsFleet {
	t.Helper()
	f := &tlsFleet{t: t, dir: t.TempDir(), peer: certstest.NewCA(t, "hosts"), apiC: certstest.NewCA(t, "clients")}
	f.Dev = openDevWith(t, f.dir, func(h HostConfig, c *Config) {
		c.TLS, c.TLSRequireHostIDs = &TLSFiles{}, true
		c.TLS.Cert, c.TLS.Key, c.TLS.CA = f.peer.Files(f.hostDir(h.ID), time.Hour, "127.0.0.1", "tierq:///"+itoa(h.ID))
		if h.Role == RoleFull {
			c.APITLS = &TLSFiles{}
			c.APITLS.Cert, c.APITLS.Key, c.APITLS.CA = f.apiC.Files(f.hostDir(h.ID)+"-api", time.Hour, "127.0.0.1")
		}
	})
	return f
}

// client calls the fleet with a certificate of a CA, trusting the fleet's; nil: with none.
func (f *tlsFleet) client(ca *certstest.CA, o client.Options) *client.Client {
	f.t.Helper()
	files := certs.Files{}
	dir := f.t.TempDir()
	if ca != nil {
		files.Cert, files.Key, _ = ca.Files(dir, time.Hour)
	}
	files.CA = filepath.Join(dir, "ca.pem")
	certstest.Write(f.t, files.CA, f.apiC.PEM)
	var err error
	o.TLS, err = certs.Open(certs.Options{Files: files})
	require.NoError(f.t, err)
	for _, n := range f.Nodes[:2] {
		o.Addrs = append(o.Addrs, n.APIAddr().String())
	}
	c, err := client.New(o)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// TestTLSFleet: a fleet with TLS on every port publishes and consumes, also by forwarding; changes its certificates and its CA
// under load without a lost message; and refuses whoever has no certificate of the right CA.
func TestTLSFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	f := openTLS(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	c := f.client(f.apiC, client.Options{})
	_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "orders"})
	require.NoError(t, err)

	t.Run("strangers", func(t *testing.T) { testTLSStrangers(ctx, t, f) })
	t.Run("rotation under load", func(t *testing.T) { testTLSRotation(ctx, t, f, c) })
}

func testTLSStrangers(ctx context.Context, t *testing.T, f *tlsFleet) {
	for name, ca := range map[string]*certstest.CA{"no certificate": nil, "the hosts' CA": f.peer} {
		c := f.client(ca, client.Options{FailFast: true, RefreshEvery: -1})
		_, err := c.Publish(ctx, "orders", client.Message{Body: []byte("x")})
		var e *code.Error
		require.ErrorAs(t, err, &e, name)
		require.Equal(t, code.Unavailable, e.Code, "%s: %v", name, err)
		require.Equal(t, code.EffectNone, e.Effect, "%s: %v", name, err)
		t.Logf("%s: %v", name, err)
	}
	plain, err := client.New(client.Options{Addrs: []string{f.Nodes[0].APIAddr().String()}, FailFast: true, RefreshEvery: -1})
	require.NoError(t, err)
	_, err = plain.ListQueues(ctx, "")
	require.Error(t, err)
	require.NoError(t, plain.Close(ctx))
	// A client's certificate opens no port between hosts.
	self := f.Nodes[0].cfg.Self()
	requireRefused(ctx, t, self.Peer, f.apiC, f.peer)
	requireRefused(ctx, t, self.Raft, f.apiC, f.peer, "tierq-raft/1")
	// Nor does a host's certificate where it says that it is another one.
	testOtherHostsCert(ctx, t, f, self.Peer)
	resp, err := http.Get("http://" + self.Peer + "/tierq.peer.v1.PeerService/Hello")
	if err == nil { // "client sent an HTTP request to an HTTPS server"
		require.Equal(t, http.StatusBadRequest, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	}
}

// testOtherHostsCert calls host 1 with the certificate of host 2, as host 2, as host 3, and with one that names nobody.
func testOtherHostsCert(ctx context.Context, t *testing.T, f *tlsFleet, address string) {
	call := func(dir, as string) (*http.Response, error) {
		files := certs.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
		s, err := certs.Open(certs.Options{Files: files})
		require.NoError(t, err)
		tr := &http.Transport{DialTLSContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return s.Dial(ctx, &net.Dialer{}, address)
		}}
		defer tr.CloseIdleConnections()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+"/tierq.peer.v1.PeerService/Hello", strings.NewReader("{}"))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Tierq-Host", as)
		return (&http.Client{Transport: tr}).Do(req)
	}
	nobody := t.TempDir()
	f.peer.Files(nobody, time.Hour, "127.0.0.1")
	for _, tc := range []struct {
		dir, as, want string
	}{
		{f.hostDir(2), "2", `"hostId":"1"`}, {f.hostDir(2), "3", "the certificate is for tierq:///2, not for host 3"}, {nobody, "2", "the certificate names no host"},
	} {
		resp, err := call(tc.dir, tc.as)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Contains(t, string(body), tc.want)
	}
}

// testTLSRotation replaces every file of every host while messages go through: new certificates, then a new CA by way of a
// bundle of both.
func testTLSRotation(ctx context.Context, t *testing.T, f *tlsFleet, c *client.Client) {
	published := make(chan int, 1)
	stop := make(chan struct{})
	go func() {
		n := 0
		defer func() { published <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := c.Publish(ctx, "orders", client.Message{Body: []byte(strconv.Itoa(n))}); err != nil {
				t.Errorf("publish %d: %v", n, err)
				return
			}
			n++
		}
	}()
	next := certstest.NewCA(t, "hosts 2")
	both := append(append([]byte{}, f.peer.PEM...), next.PEM...)
	for step, change := range []func(id uint64, dir string){
		func(_ uint64, dir string) { certstest.Write(t, filepath.Join(dir, "ca.pem"), both) },
		func(id uint64, dir string) { writePair(t, dir, next, 2*time.Hour, id) },
		func(_ uint64, dir string) { certstest.Write(t, filepath.Join(dir, "ca.pem"), next.PEM) },
	} {
		for _, n := range f.Nodes {
			change(n.id, f.hostDir(n.id))
		}
		for _, n := range f.Nodes {
			changed, err := n.peerCerts.Reload()
			require.NoError(t, err, "step %d, changed %v", step, changed)
		}
	}
	for _, n := range f.Nodes {
		require.WithinDuration(t, time.Now().Add(2*time.Hour), n.certEnds()["peer"], time.Minute)
		families, err := n.registry.Gather()
		require.NoError(t, err)
		found := false
		for _, m := range families {
			found = found || m.GetName() == "tierq_certificate_expiry_seconds" && m.Metric[0].GetGauge().GetValue() > 1000
		}
		require.True(t, found)
	}
	requireRefused(ctx, t, f.Nodes[0].cfg.Self().Peer, f.peer, next)

	got := make(map[string]bool)
	take, done := context.WithCancel(ctx)
	defer done()
	time.AfterFunc(500*time.Millisecond, func() { close(stop) })
	want := <-published
	require.NotZero(t, want)
	require.NoError(t, c.Consume(take, "orders", "", func(_ context.Context, d *client.Delivery) error {
		got[string(d.Body)] = true
		if len(got) == want {
			done()
		}
		return nil
	}, client.ConsumeOptions{}))
	require.Len(t, got, want)
	t.Logf("%d messages over 3 changes of the files", want)
}

// writePair replaces a certificate and its key: the former ones are used until both are there.
func writePair(t *testing.T, dir string, ca *certstest.CA, life time.Duration, id uint64) {
	t.Helper()
	cert, key := ca.Issue(life, "127.0.0.1", "tierq:///"+itoa(id))
	certstest.Write(t, filepath.Join(dir, "cert.pem"), cert)
	certstest.Write(t, filepath.Join(dir, "key.pem"), key)
}

// requireRefused dials with a certificate of one CA and the roots of another.
func requireRefused(ctx context.Context, t *testing.T, address string, own, trusted *certstest.CA, protocols ...string) {
	t.Helper()
	dir := t.TempDir()
	files := certs.Files{}
	files.Cert, files.Key, files.CA = own.Files(dir, time.Hour)
	certstest.Write(t, files.CA, trusted.PEM)
	s, err := certs.Open(certs.Options{Files: files})
	require.NoError(t, err)
	conn, err := s.Dial(ctx, &net.Dialer{}, address, protocols...)
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	require.True(t, certs.Refused(err), "%s: %v", address, err)
}

// TestTLSBadFiles: nothing starts, and the error names the key.
func TestTLSBadFiles(t *testing.T) {
	dir := t.TempDir()
	hosts, err := devHosts(DevConfig{Dir: dir, API: "127.0.0.1:1"})
	require.NoError(t, err)
	cfg := Config{Host: 1, Data: filepath.Join(dir, "data"), Hosts: hosts, Admin: "off", TLS: &TLSFiles{Cert: "nosuch.pem", Key: "nosuch.key", CA: "nosuch.ca"}}
	_, err = Open(cfg, Listeners{}, zap.NewNop())
	require.ErrorContains(t, err, "tls.cert: stat nosuch.pem")
	require.NoDirExists(t, cfg.Data)
	ca := certstest.NewCA(t, "hosts")
	cfg.TLS.Cert, cfg.TLS.Key, cfg.TLS.CA = ca.Files(dir, time.Hour, "127.0.0.1", "tierq:///7")
	_, err = Open(cfg, Listeners{}, zap.NewNop())
	require.ErrorContains(t, err, "the certificate is for tierq:///7, not for host 1")
	_, err = ParseConfig(fmt.Appendf(nil, "%stls: {cert: a}\napi_tls: {ca: b}\n", goodConfig))
	for _, want := range []string{"tls.key is missing", "tls.ca is missing", "api_tls.cert is missing", "api_tls.key is missing"} {
		require.ErrorContains(t, err, want)
	}
}
