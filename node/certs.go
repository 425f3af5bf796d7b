package node

import (
	"context"
	"crypto/x509"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/certs"
)

// openCerts reads the files of the TLS that is configured.
func (n *Node) openCerts() (err error) {
	own := func(c *x509.Certificate) error { return certs.CheckHost(c, "", n.cfg.Host, n.cfg.TLSRequireHostIDs) }
	open := func(section string, f *TLSFiles, mutual bool, check func(*x509.Certificate) error) *certs.Store {
		if f == nil {
			return nil
		}
		s, serr := certs.Open(certs.Options{
			Files: certs.Files(*f), Names: certs.Files{Cert: section + ".cert", Key: section + ".key", CA: section + ".ca"},
			Mutual: mutual, Check: check, Logger: n.log.With(zap.String("section", section)),
		})
		err = errors.Join(err, serr)
		return s
	}
	n.peerCerts, n.apiCerts = open("tls", n.cfg.TLS, true, own), open("api_tls", n.cfg.APITLS, false, nil)
	return err
}

// watchCerts follows the files until close.
func (n *Node) watchCerts() {
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	n.watching = func() { cancel(); tasks.Wait() }
	for _, s := range []*certs.Store{n.peerCerts, n.apiCerts} {
		if s != nil {
			tasks.Go(func() { s.Watch(ctx) })
		}
	}
}

// certEnds says, for each use, when the certificate ends.
func (n *Node) certEnds() map[string]time.Time {
	out := map[string]time.Time{}
	if n.peerCerts != nil {
		out["peer"] = n.peerCerts.Ends()
	}
	if n.apiCerts != nil {
		out["api"] = n.apiCerts.Ends()
	}
	return out
}
