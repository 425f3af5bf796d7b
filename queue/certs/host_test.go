package certs

import (
	"crypto/x509"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckHost(t *testing.T) {
	const fleet = "00112233445566778899aabbccddeeff"
	for name, tc := range map[string]struct {
		uris   []string
		host   uint64
		strict bool
		want   string
	}{
		"none":                  {nil, 2, false, ""},
		"none, strict":          {nil, 2, true, "the certificate names no host"},
		"another scheme":        {[]string{"spiffe://x/3"}, 2, true, "the certificate names no host"},
		"the host":              {[]string{"tierq:///2"}, 2, true, ""},
		"of the fleet":          {[]string{"tierq://" + fleet + "/2"}, 2, true, ""},
		"of another fleet":      {[]string{"tierq://ff/2"}, 2, false, "the certificate is for tierq://ff/2, not for host 2"},
		"another host":          {[]string{"tierq:///3"}, 2, false, "not for host 2"},
		"one of several":        {[]string{"tierq:///3", "tierq:///2"}, 2, true, ""},
		"any host":              {[]string{"tierq:///3"}, 0, true, ""},
		"any, of another fleet": {[]string{"tierq://ff/3"}, 0, true, "not for a host of this fleet"},
		"no number":             {[]string{"tierq:///two"}, 2, false, "not for host 2"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &x509.Certificate{}
			for _, s := range tc.uris {
				u, err := url.Parse(s)
				require.NoError(t, err)
				c.URIs = append(c.URIs, u)
			}
			err := CheckHost(c, fleet, tc.host, tc.strict)
			if tc.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tc.want)
		})
	}
}
