package certs

import (
	"crypto/x509"
	"fmt"
	"strconv"
	"strings"
)

// A certificate may say which host of which fleet it is for, by a URI among its subject alternative names: tierq://FLEET/HOST, or
// tierq:///HOST for that host of any fleet. Several name several.
const hostScheme = "tierq"

// CheckHost returns an error that says what to do unless a certificate is good for a host of a fleet: it names it, or it names no host
// at all and strict is not set. Host 0 stands for any host, and an empty fleet for any fleet.
func CheckHost(cert *x509.Certificate, fleet string, host uint64, strict bool) error {
	var names []string
	for _, u := range cert.URIs {
		if u.Scheme != hostScheme {
			continue
		}
		names = append(names, u.String())
		id, err := strconv.ParseUint(strings.TrimPrefix(u.Path, "/"), 10, 64)
		if err == nil && id != 0 && (host == 0 || id == host) && (u.Host == "" || fleet == "" || u.Host == fleet) {
			return nil
		}
	}
	who := fmt.Sprintf("host %d", host)
	if host == 0 {
		who = "a host of this fleet"
	}
	switch {
	case len(names) > 0:
		return fmt.Errorf("the certificate is for %s, not for %s: use the one that was issued for that host", strings.Join(names, ", "), who)
	case strict:
		return fmt.Errorf("the certificate names no host, and tls_require_host_ids wants one that names %s: issue it with the URI tierq:///%d", who, host)
	}
	return nil
}
