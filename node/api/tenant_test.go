package api

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// A caller who may act for any tenant acts for the one that the call names: what is meant for one never goes to the default one.
func TestNamedTenant(t *testing.T) {
	for _, tenant := range []string{"", "acme"} {
		got := "none"
		h := NamedTenant(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = TenantOf(r.Context()) }))
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		if tenant != "" {
			r.Header.Set(tenantHeader, tenant)
		}
		h.ServeHTTP(httptest.NewRecorder(), r)
		require.Equal(t, tenant, got)
	}
}
