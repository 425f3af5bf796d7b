package api

import (
	"context"
	"net/http"
)

// tenantHeader names the tenant for which a forwarded call is made, and for which an operator makes one.
const tenantHeader = "Tierq-Tenant"

type tenantKey struct{}

// WithTenant makes ctx's calls a tenant's; "" is the default one.
func WithTenant(ctx context.Context, tenant string) context.Context {
	return context.WithValue(ctx, tenantKey{}, tenant)
}

// TenantOf is the tenant whose call this is; "" is the default one.
func TenantOf(ctx context.Context) string {
	t, _ := ctx.Value(tenantKey{}).(string)
	return t
}

// ForwardTenant makes a Forward whose calls name their tenant.
func ForwardTenant(f Forward) Forward {
	return func(host uint64) (*http.Client, string) {
		c, base := f(host)
		named := *c
		named.Transport = tenantTransport{c.Transport}
		return &named, base
	}
}

type tenantTransport struct{ next http.RoundTripper }

func (t tenantTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if tenant := TenantOf(r.Context()); tenant != "" {
		r = r.Clone(r.Context())
		r.Header.Set(tenantHeader, tenant)
	}
	next := t.next
	if next == nil {
		next = http.DefaultTransport
	}
	return next.RoundTrip(r)
}

// Forwarded registers handlers on next that take the tenant from the host that forwards: it has checked who calls.
func Forwarded(next Mux) Mux { return forwardedMux{next} }

type forwardedMux struct{ next Mux }

func (m forwardedMux) Handle(pattern string, h http.Handler) {
	m.next.Handle(pattern, NamedTenant(h))
}

// NamedTenant makes a call the tenant's that its header names. Only for callers that may act for any tenant: hosts, and everybody
// where no tokens are wanted.
func NamedTenant(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if tenant := r.Header.Get(tenantHeader); tenant != "" {
			r = r.WithContext(WithTenant(r.Context(), tenant))
		}
		h.ServeHTTP(w, r)
	})
}
