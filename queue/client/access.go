package client

import (
	"context"
	"net/http"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// tokenTransport sends a token, and for an operator the tenant, with every request.
type tokenTransport struct {
	next          http.RoundTripper
	token, tenant string
}

func (t tokenTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if t.token != "" {
		r.Header.Set("Authorization", "Bearer "+t.token)
	}
	if t.tenant != "" {
		r.Header.Set("Tierq-Tenant", t.tenant)
	}
	return t.next.RoundTrip(r)
}

// withToken is c, sending Token and Tenant.
func (o *Options) withToken(c *http.Client) *http.Client {
	if o.Token == "" && o.Tenant == "" {
		return c
	}
	named := *c
	next := c.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	named.Transport = tokenTransport{next, o.Token, o.Tenant}
	return &named
}

// ListTenants returns the tenants with their quotas.
func (c *Client) ListTenants(ctx context.Context) ([]*tierqv1.Tenant, error) {
	res, err := call(ctx, c, read(route{}), func(a *apis) method[tierqv1.ListTenantsRequest, tierqv1.ListTenantsResponse] {
		return a.access().ListTenants
	},
		&tierqv1.ListTenantsRequest{})
	return res.GetTenants(), err
}

// PutTenant makes a tenant, or replaces its quotas.
func (c *Client) PutTenant(ctx context.Context, t *tierqv1.Tenant) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.PutTenantRequest, tierqv1.PutTenantResponse] { return a.access().PutTenant },
		&tierqv1.PutTenantRequest{Tenant: t})
	return err
}

// DeleteTenant removes a tenant that has no queues, and its tokens.
func (c *Client) DeleteTenant(ctx context.Context, name string) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.DeleteTenantRequest, tierqv1.DeleteTenantResponse] {
		return a.access().DeleteTenant
	},
		&tierqv1.DeleteTenantRequest{Name: name})
	return err
}

// ListTokens returns the tokens without their secrets.
func (c *Client) ListTokens(ctx context.Context) ([]*tierqv1.Token, error) {
	res, err := call(ctx, c, read(route{}), func(a *apis) method[tierqv1.ListTokensRequest, tierqv1.ListTokensResponse] {
		return a.access().ListTokens
	},
		&tierqv1.ListTokensRequest{})
	return res.GetTokens(), err
}

// CreateToken makes a token. It is not tried again when its outcome is unknown: a token that nobody knows may be left, which ListTokens
// shows.
func (c *Client) CreateToken(ctx context.Context, t *tierqv1.Token) (*tierqv1.CreateTokenResponse, error) {
	return call(ctx, c, write(false), func(a *apis) method[tierqv1.CreateTokenRequest, tierqv1.CreateTokenResponse] {
		return a.access().CreateToken
	},
		&tierqv1.CreateTokenRequest{Token: t})
}

// RevokeToken ends a token.
func (c *Client) RevokeToken(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.RevokeTokenRequest, tierqv1.RevokeTokenResponse] {
		return a.access().RevokeToken
	},
		&tierqv1.RevokeTokenRequest{Id: id})
	return err
}
