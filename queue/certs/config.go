package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"time"
)

// HandshakeTimeout bounds a TLS handshake.
const HandshakeTimeout = 5 * time.Second

// Server returns the configuration of a listener, which offers the protocols. With roots, a client must show a certificate
// that they trust. Each handshake uses what the files say then. It needs a certificate.
func (s *Store) Server(protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := s.fresh().server
			if len(protocols) > 0 {
				c = c.Clone()
				c.NextProtos = protocols
			}
			return c, nil
		},
	}
}

func (s *Store) serverConfig(m *material) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13, Time: s.opts.Now, SessionTicketsDisabled: true} // a ticket would outlive a change of the files
	if m.cert != nil {
		c.Certificates = []tls.Certificate{*m.cert}
	}
	if m.roots != nil {
		c.ClientCAs, c.ClientAuth = m.roots, tls.RequireAndVerifyClientCert
	}
	return c
}

// Client returns the configuration for one connection to a host, as the files are now. The host's certificate must be for
// its name or IP address, or for Options.ServerName.
func (s *Store) Client(host string, protocols ...string) *tls.Config {
	m := s.fresh()
	c := &tls.Config{MinVersion: tls.VersionTLS13, Time: s.opts.Now, RootCAs: m.roots, ServerName: host, NextProtos: protocols}
	if s.opts.ServerName != "" {
		c.ServerName = s.opts.ServerName
	}
	if m.cert != nil {
		c.Certificates = []tls.Certificate{*m.cert}
	}
	return c
}

// Dial connects by TCP and TLS; ctx bounds both, and HandshakeTimeout the latter.
func (s *Store) Dial(ctx context.Context, d *net.Dialer, address string, protocols ...string) (*tls.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	raw, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, s.Client(host, protocols...))
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		// Nothing of the request was sent, as when there is no connection at all.
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: raw.RemoteAddr(), Err: err}
	}
	return conn, nil
}

// Trusts says whether the roots still trust the other side of a connection, and its certificate has not ended. A connection
// that a changed root no longer trusts should be closed.
func (s *Store) Trusts(conn *tls.Conn) bool {
	chain := conn.ConnectionState().PeerCertificates
	m := s.current.Load()
	if len(chain) == 0 || m.roots == nil {
		return true
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: m.roots, Intermediates: between, CurrentTime: s.opts.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}

// Refused says whether the other side ended the connection by a TLS alert: it refused the certificate that it was shown, or
// that it was shown none, and has read nothing else.
func Refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// Explain says in words why a handshake failed, and what to do; empty if err does not come from one.
func Explain(err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &unknown):
		return "its certificate is not of a CA that is trusted here: name the CA's file"
	case errors.As(err, &name):
		return "its certificate is for another name: call it by a name that the certificate has, or say the server name"
	case errors.As(err, &invalid):
		return "its certificate is not valid: " + invalid.Error()
	case Refused(err):
		return "it refused the TLS handshake (" + err.Error() + "): show a client certificate of the CA that it trusts"
	case errors.As(err, &record):
		return "it does not speak TLS: leave the certificate options out"
	}
	return ""
}
