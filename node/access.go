package node

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"maps"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue/code"
)

// access is who may call this host, and how fast.
type access struct {
	required bool
	operator *[sha256.Size]byte // hash of the operator's token of the configuration; nil: none

	mu    sync.Mutex
	rates map[string]*rate.Limiter // by tenant
	bytes map[string]*byteQuota    // by tenant
}

// openAccess reads what the configuration says about tokens.
func openAccess(c *AuthConfig) (*access, error) {
	a := &access{rates: map[string]*rate.Limiter{}, bytes: map[string]*byteQuota{}}
	if c == nil {
		return a, nil
	}
	a.required = c.Required
	if c.OperatorTokenFile == "" {
		return a, nil
	}
	raw, err := os.ReadFile(c.OperatorTokenFile)
	if err != nil {
		return nil, fmt.Errorf("auth.operator_token_file: %w", err)
	}
	hash, ok := catalog.HashAccessToken(string(raw))
	if !ok {
		return nil, fmt.Errorf("auth.operator_token_file: %s holds no token: write one there with `tierq token generate`", c.OperatorTokenFile)
	}
	a.operator = &hash
	return a, nil
}

// NewOperatorToken returns the text of a token for AuthConfig.OperatorTokenFile.
func NewOperatorToken() string {
	_, text := catalog.NewAccessToken(catalog.DefaultTenant, catalog.RoleOperator, "")
	return text
}

// bearer finds who bears a token. A token of the fleet is good as long as this host's copy of the catalog has it.
func (n *Node) bearer(text string) (api.Caller, bool) {
	hash, ok := catalog.HashAccessToken(text)
	if !ok {
		return api.Caller{}, false
	}
	if o := n.access.operator; o != nil && subtle.ConstantTimeCompare(hash[:], o[:]) == 1 {
		return api.Caller{Tenant: catalog.DefaultTenant, Roles: api.RoleOperator}, true
	}
	t, ok := n.view().TokenOf(hash)
	return api.Caller{Tenant: t.Tenant, Roles: api.Role(t.Roles)}, ok
}

// guard wraps the API's handler. Where no tokens are wanted every caller is an operator, and may name a tenant.
func (n *Node) guard(next http.Handler, onRefusal func(code.Code)) http.Handler {
	if !n.access.required {
		return api.NamedTenant(next)
	}
	return api.Authorize(n.bearer, onRefusal, next)
}

// admit takes messages from the rate of ctx's tenant. A batch that is larger than a second's worth passes when a second's worth is there.
func (n *Node) admit(ctx context.Context, messages int) error {
	tenant := api.TenantOf(ctx)
	if tenant == "" {
		tenant = catalog.DefaultTenant
	}
	t, _ := n.view().Tenant(tenant)
	if err := n.admitBytes(t); err != nil || t.PublishRate == 0 {
		return err
	}
	r := n.access.limiter(tenant, t.PublishRate).ReserveN(time.Now(), min(messages, int(t.PublishRate)))
	wait := r.Delay()
	if wait == 0 {
		return nil
	}
	r.Cancel()
	return &code.Error{Code: code.RateLimited, Effect: code.EffectNone, RetryAfterMs: uint32(min(wait.Milliseconds()+1, 60_000)),
		Text: fmt.Sprintf("the tenant may publish %d messages a second through each host: slow down, or raise the quota with `tierq tenant put`", t.PublishRate)}
}

func (a *access) limiter(tenant string, perSecond uint32) *rate.Limiter {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := a.rates[tenant]
	if l == nil || l.Burst() != int(perSecond) {
		l = rate.NewLimiter(rate.Limit(perSecond), int(perSecond))
		a.rates[tenant] = l
	}
	return l
}

// keepTenants forgets what was counted of tenants that are no more.
func (a *access) keepTenants(v *catalog.View) {
	a.mu.Lock()
	defer a.mu.Unlock()
	gone := func(name string) bool { _, ok := v.Tenant(name); return !ok && name != catalog.DefaultTenant }
	maps.DeleteFunc(a.rates, func(name string, _ *rate.Limiter) bool { return gone(name) })
	maps.DeleteFunc(a.bytes, func(name string, _ *byteQuota) bool { return gone(name) })
}

// change proposes a change of the catalog, and returns its refusal.
func (n *Node) change(ctx context.Context, c catalog.Command) error {
	res, err := n.raft.ProposeCatalog(ctx, c)
	if err != nil {
		return err
	}
	return res.Err()
}

// ListTenants implements api.Access.
func (n *Node) ListTenants(ctx context.Context) ([]api.TenantInfo, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return nil, err
	}
	info := func(t catalog.Tenant) api.TenantInfo {
		return api.TenantInfo{Name: t.Name, MaxQueues: t.MaxQueues, PublishRate: t.PublishRate, Queues: uint32(len(v.Queues(t.Name))), MaxBytes: t.MaxBytes, StoredBytes: n.tenantBytes(v, t.Name)}
	}
	var out []api.TenantInfo
	if t, _ := v.Tenant(catalog.DefaultTenant); t.ID == 0 {
		out = append(out, info(t))
	}
	for _, t := range v.Tenants() {
		out = append(out, info(t))
	}
	return out, nil
}

// PutTenant implements api.Access.
func (n *Node) PutTenant(ctx context.Context, t api.TenantInfo) error {
	for try := 1; ; try++ {
		v, err := n.raft.ReadCatalog(ctx)
		if err != nil {
			return err
		}
		have, _ := v.Tenant(t.Name)
		err = n.change(ctx, &catalog.PutTenant{Tenant: catalog.Tenant{Name: t.Name, MaxQueues: t.MaxQueues, PublishRate: t.PublishRate, MaxBytes: t.MaxBytes, Version: have.Version}})
		if !isCode(err, code.MutationFenced) || try == fencedTries {
			return err
		}
	}
}

// DeleteTenant implements api.Access.
func (n *Node) DeleteTenant(ctx context.Context, name string) error {
	return n.change(ctx, &catalog.DeleteTenant{Name: name})
}

// ListTokens implements api.Access.
func (n *Node) ListTokens(ctx context.Context) ([]api.TokenInfo, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return nil, err
	}
	var out []api.TokenInfo
	for _, t := range v.AccessTokens() {
		out = append(out, api.TokenInfo{ID: t.ID, Tenant: t.Tenant, Roles: t.Roles.Names(), Name: t.Name})
	}
	return out, nil
}

// CreateToken implements api.Access.
func (n *Node) CreateToken(ctx context.Context, t api.TokenInfo) (uint64, string, error) {
	roles, err := catalog.ParseRoles(t.Roles)
	if err != nil {
		return 0, "", code.New(code.InvalidArgument, "roles: %v", err)
	}
	if t.Tenant == "" {
		t.Tenant = catalog.DefaultTenant
	}
	token, text := catalog.NewAccessToken(t.Tenant, roles, t.Name)
	return token.ID, text, n.change(ctx, &catalog.CreateAccessToken{Token: token})
}

// RevokeToken implements api.Access.
func (n *Node) RevokeToken(ctx context.Context, id uint64) error {
	return n.change(ctx, &catalog.RevokeAccessToken{ID: id})
}
