package main

import (
	"os"

	"github.com/spf13/pflag"

	"github.com/tierq/tierq/queue/certs"
)

// tlsFlags are how a client reaches API ports that have TLS. Any of them turns it on.
type tlsFlags struct {
	on                        bool
	ca, cert, key, serverName string
}

func (f *tlsFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.on, "tls", false, "speak TLS and trust the system's CAs; --ca, --cert and --server-name turn it on too")
	fs.StringVar(&f.ca, "ca", os.Getenv("TIERQ_CA"), "PEM file of the CA that the fleet's certificates are checked against (env TIERQ_CA)")
	fs.StringVar(&f.cert, "cert", os.Getenv("TIERQ_CERT"), "PEM file of the client certificate, where the fleet asks for one (env TIERQ_CERT)")
	fs.StringVar(&f.key, "cert-key", os.Getenv("TIERQ_CERT_KEY"), "PEM file of its private key (env TIERQ_CERT_KEY)")
	fs.StringVar(&f.serverName, "server-name", os.Getenv("TIERQ_SERVER_NAME"), "name that the fleet's certificates must be for, in place of the address (env TIERQ_SERVER_NAME)")
}

// store is nil without TLS.
func (f *tlsFlags) store() (*certs.Store, error) {
	if !f.on && f.ca == "" && f.cert == "" && f.key == "" && f.serverName == "" {
		return nil, nil
	}
	s, err := certs.Open(certs.Options{
		Files: certs.Files{Cert: f.cert, Key: f.key, CA: f.ca}, ServerName: f.serverName,
		Names: certs.Files{Cert: "--cert", Key: "--cert-key", CA: "--ca"},
	})
	if err != nil {
		return nil, usagef("%v", err)
	}
	return s, nil
}
