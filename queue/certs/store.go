// Package certs keeps a certificate, its key and a set of trusted roots as they are in PEM files, and follows the
// files: what was replaced is used for new connections within Interval, without a restart. It does not know what the
// connections are for.
//
// What cannot be used (half of a pair, a cut file, a certificate that has ended) is refused and told once, and the store
// goes on with what it has.
package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Interval is how often the files are looked at.
const Interval = time.Second

// maxFileBytes bounds a PEM file.
const maxFileBytes = 4 << 20

// Files names PEM files. An empty name means: none.
type Files struct {
	Cert string // the certificate, and after it the intermediate ones
	Key  string // its private key
	CA   string // the roots that the other side is checked against
}

// Options say what a store holds.
type Options struct {
	Files
	// Mutual demands all three files, and that the certificate is one that the roots trust, both for a server and for a
	// client: what it takes for processes with equal files to trust each other.
	Mutual bool
	// ServerName replaces the name that the other side's certificate must be for; empty: the host that is called.
	ServerName string
	// Names are what an error calls the files. Default to cert, key and ca.
	Names Files
	// Check, if not nil, may refuse a certificate that the files hold.
	Check func(*x509.Certificate) error
	// Logger defaults to none.
	Logger *zap.Logger
	// Now defaults to the wall clock.
	Now func() time.Time
}

// Store holds what the files said when they last were right. Its methods may be called from any goroutine.
//
// Invariant: what it holds is one consistent reading of all files.
type Store struct {
	opts    Options
	current atomic.Pointer[material]

	mu      sync.Mutex
	looked  time.Time // when the files were last read
	refused [3][]byte // the contents that were last refused, and told
	failed  string    // the error that was last told
	watches map[*func()]struct{}
}

// material is one reading of the files. It does not change.
type material struct {
	raw    [3][]byte
	cert   *tls.Certificate // nil: none
	roots  *x509.CertPool   // nil: the system's
	ends   time.Time        // of the certificate and its intermediates, the first; zero without a certificate
	server *tls.Config
}

// Open reads the files. Its errors name the file and say what to do.
func Open(o Options) (*Store, error) {
	orText(&o.Names.Cert, "cert")
	orText(&o.Names.Key, "key")
	orText(&o.Names.CA, "ca")
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	s := &Store{opts: o, looked: o.Now(), watches: make(map[*func()]struct{})}
	raw, err := s.read()
	if err != nil {
		return nil, err
	}
	m, err := s.parse(raw)
	if err != nil {
		return nil, err
	}
	s.current.Store(m)
	return s, nil
}

func orText(p *string, d string) {
	if *p == "" {
		*p = d
	}
}

func (o *Options) validate() error {
	var errs []error
	missing := func(have, name, why string) {
		if have == "" {
			errs = append(errs, fmt.Errorf("%s: no file is named: %s", name, why))
		}
	}
	if o.Mutual || o.Key != "" {
		missing(o.Cert, o.Names.Cert, "name the PEM file of the certificate")
	}
	if o.Mutual || o.Cert != "" {
		missing(o.Key, o.Names.Key, "name the PEM file of the certificate's private key")
	}
	if o.Mutual {
		missing(o.CA, o.Names.CA, "name the PEM file of the roots that the others' certificates are checked against")
	}
	return errors.Join(errs...)
}

func (s *Store) read() (raw [3][]byte, err error) {
	o := &s.opts
	for i, f := range []struct{ key, path string }{{o.Names.Cert, o.Cert}, {o.Names.Key, o.Key}, {o.Names.CA, o.CA}} {
		if f.path == "" {
			continue
		}
		info, err := os.Stat(f.path)
		if err == nil && (!info.Mode().IsRegular() || info.Size() > maxFileBytes) {
			return raw, fmt.Errorf("%s: %s is not a file of at most %d bytes: name a PEM file", f.key, f.path, maxFileBytes)
		}
		if err == nil {
			raw[i], err = os.ReadFile(f.path)
		}
		if err != nil {
			return raw, fmt.Errorf("%s: %w: name a PEM file that this process can read", f.key, err)
		}
	}
	return raw, nil
}

func (s *Store) parse(raw [3][]byte) (*material, error) {
	o := &s.opts
	m := &material{raw: raw}
	if o.CA != "" {
		roots, err := parseCerts(raw[2])
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", o.Names.CA, o.CA, err)
		}
		m.roots = x509.NewCertPool()
		for _, c := range roots {
			m.roots.AddCert(c)
		}
	}
	if o.Cert != "" {
		if err := s.parsePair(m); err != nil {
			return nil, err
		}
	}
	m.server = s.serverConfig(m)
	return m, nil
}

func (s *Store) parsePair(m *material) error {
	o := &s.opts
	chain, err := parseCerts(m.raw[0])
	if err != nil {
		return fmt.Errorf("%s: %s: %w", o.Names.Cert, o.Cert, err)
	}
	pair, err := tls.X509KeyPair(m.raw[0], m.raw[1])
	if err != nil {
		return fmt.Errorf("%s, %s: %s and %s are not a pair: %w: replace both", o.Names.Cert, o.Names.Key, o.Cert, o.Key, err)
	}
	m.cert, m.ends = &pair, chain[0].NotAfter
	for _, c := range chain[1:] {
		if c.NotAfter.Before(m.ends) {
			m.ends = c.NotAfter
		}
	}
	if o.Check != nil {
		if err := o.Check(chain[0]); err != nil {
			return fmt.Errorf("%s: %s: %w", o.Names.Cert, o.Cert, err)
		}
	}
	now := o.Now()
	if !now.Before(m.ends) {
		return fmt.Errorf("%s: %s ended at %s: issue a new one", o.Names.Cert, o.Cert, m.ends.UTC().Format(time.RFC3339))
	}
	if now.Before(chain[0].NotBefore) {
		return fmt.Errorf("%s: %s begins at %s: set this machine's clock, or issue a new one", o.Names.Cert, o.Cert, chain[0].NotBefore.UTC().Format(time.RFC3339))
	}
	if !o.Mutual {
		return nil
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if _, err := chain[0].Verify(x509.VerifyOptions{Roots: m.roots, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
			return fmt.Errorf("%s: %s is not trusted by %s, for servers and for clients: %w: issue it by that CA with both usages, or add its CA to %s", o.Names.Cert, o.Cert, o.CA, err, o.Names.CA)
		}
	}
	return nil
}

// parseCerts is strict: a file that was cut, or holds anything but certificates, is refused.
func parseCerts(raw []byte) (out []*x509.Certificate, err error) {
	for {
		block, rest := pem.Decode(raw)
		if block == nil {
			break
		}
		raw = rest
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("holds a %q, not only certificates: take it out", block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d cannot be read: %w: write the file again", len(out)+1, err)
		}
		out = append(out, c)
	}
	if bytes.Contains(raw, []byte("-----BEGIN")) {
		return nil, errors.New("is cut or damaged: write the file again")
	}
	if len(out) == 0 {
		return nil, errors.New("holds no certificate in PEM form")
	}
	return out, nil
}

// Reload reads the files now. It returns an error, and changes nothing, if they cannot be used; what is the same as before
// is no change.
func (s *Store) Reload() (changed bool, err error) {
	s.mu.Lock()
	changed, err = s.reloadLocked()
	var told []func()
	if changed {
		for f := range s.watches {
			told = append(told, *f)
		}
	}
	s.mu.Unlock()
	for _, f := range told {
		f()
	}
	return changed, err
}

func (s *Store) reloadLocked() (bool, error) {
	s.looked = s.opts.Now()
	old := s.current.Load()
	raw, err := s.read()
	if err == nil && equal(raw, old.raw) {
		s.failed = ""
		return false, nil
	}
	var m *material
	if err == nil {
		m, err = s.parse(raw)
	}
	if err != nil {
		if s.failed != err.Error() || !equal(s.refused, raw) {
			s.failed, s.refused = err.Error(), raw
			s.opts.Logger.Error("the certificate files changed and cannot be used: the former ones stay in use", zap.Error(err), zap.Time("ends", old.ends))
		}
		return false, err
	}
	s.failed, s.refused = "", [3][]byte{}
	s.current.Store(m)
	s.opts.Logger.Info("the certificate files changed and are in use for new connections", zap.String("cert", s.opts.Cert), zap.String("ca", s.opts.CA), zap.Time("ends", m.ends))
	return true, nil
}

func equal(a, b [3][]byte) bool {
	return bytes.Equal(a[0], b[0]) && bytes.Equal(a[1], b[1]) && bytes.Equal(a[2], b[2])
}

// OnChange calls f after each change, from the goroutine that found it, until cancel is called. f must not block.
func (s *Store) OnChange(f func()) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[&f] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watches, &f)
	}
}

// Watch looks at the files every Interval until ctx ends. Without it they are looked at when a connection is made.
func (s *Store) Watch(ctx context.Context) {
	ticker := time.NewTicker(Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			_, _ = s.Reload() // told by the log
		}
	}
}

// fresh is the current reading, of at most Interval ago.
func (s *Store) fresh() *material {
	s.mu.Lock()
	late := s.opts.Now().Sub(s.looked) >= Interval
	s.mu.Unlock()
	if late {
		_, _ = s.Reload()
	}
	return s.current.Load()
}

// Ends is when the certificate in use, or an intermediate one of its chain, ends; zero without a certificate.
func (s *Store) Ends() time.Time { return s.current.Load().ends }
