package catalog

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tierq/tierq/queue/code"
)

// Roles are what the bearer of a token may do; a set of bits. Part of the format; do not renumber.
type Roles uint8

const (
	// RoleProduce publishes, and looks up what it published.
	RoleProduce Roles = 1
	// RoleConsume receives and settles, and reads a tenant's queues and groups.
	RoleConsume Roles = 2
	// RoleAdmin does everything inside a tenant.
	RoleAdmin Roles = 4
	// RoleOperator does everything, also to the fleet: its hosts, tenants, tokens, backups.
	RoleOperator Roles = 8

	allRoles = RoleProduce | RoleConsume | RoleAdmin | RoleOperator
)

var roleNames = [...]string{"produce", "consume", "admin", "operator"}

// Names returns the names of the roles in r.
func (r Roles) Names() []string {
	var out []string
	for i, name := range roleNames {
		if r&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	return out
}

// ParseRoles reads names of roles; none is an error.
func ParseRoles(names []string) (Roles, error) {
	var r Roles
	for _, name := range names {
		i := slices.Index(roleNames[:], strings.TrimSpace(name))
		if i < 0 {
			return 0, fmt.Errorf("role %q: it is one of %s", clip(name), strings.Join(roleNames[:], ", "))
		}
		r |= 1 << i
	}
	if r == 0 {
		return 0, fmt.Errorf("a token needs a role: one of %s", strings.Join(roleNames[:], ", "))
	}
	return r, nil
}

// Bounds of the records below; part of the catalog's behaviour.
const (
	MaxTenants      = 1024
	MaxAccessTokens = 8192
)

// Tenant is one owner of queues. DefaultTenant exists without a record.
type Tenant struct {
	ID   uint64
	Name string
	// MaxQueues bounds the tenant's queues; 0: no bound.
	MaxQueues uint32
	// PublishRate bounds the messages that the tenant publishes through one host in a second; 0: no bound.
	PublishRate uint32
	// MaxBytes bounds what the tenant's queues store, as the hosts see to it (the catalog does not know); 0: no bound.
	MaxBytes uint64
	Version  uint64 // +1 per change
}

// AccessToken lets its bearer act for a tenant in some roles. The secret itself is not kept: Hash is SHA-256 of its 32 random bytes.
type AccessToken struct {
	ID     uint64
	Hash   [sha256.Size]byte
	Tenant string
	Roles  Roles
	Name   string // what it is for, to its owner
}

// PutTenant makes a tenant, or changes its quotas. Tenant.Version is the version that the change was decided on, 0 for a new one;
// the same again is OK. The default tenant gets a record by it, too.
type PutTenant struct{ Tenant Tenant }

// DeleteTenant removes a tenant without queues, and its tokens.
type DeleteTenant struct{ Name string }

// CreateAccessToken stores a token.
type CreateAccessToken struct{ Token AccessToken }

// RevokeAccessToken removes a token; one that does not exist is OK.
type RevokeAccessToken struct{ ID uint64 }

func (*PutTenant) tag() uint8         { return tagPutTenant }
func (*DeleteTenant) tag() uint8      { return tagDeleteTenant }
func (*CreateAccessToken) tag() uint8 { return tagCreateAccessToken }
func (*RevokeAccessToken) tag() uint8 { return tagRevokeAccessToken }

func (c *PutTenant) encode(e *encoder) {
	e.tenant(c.Tenant)
	if c.Tenant.MaxBytes > 0 { // left out where there is none: what was written before there were any stays as it is
		e.u64(c.Tenant.MaxBytes)
	}
}

func (d *decoder) putTenant() *PutTenant {
	c := &PutTenant{Tenant: d.tenant()}
	if d.err == nil && len(d.b) > 0 {
		if c.Tenant.MaxBytes = d.u64(); c.Tenant.MaxBytes == 0 {
			d.err = errMalformed
		}
	}
	return c
}

func (c *DeleteTenant) encode(e *encoder)      { e.str(c.Name) }
func (c *CreateAccessToken) encode(e *encoder) { e.accessToken(c.Token) }
func (c *RevokeAccessToken) encode(e *encoder) { e.u64(c.ID) }

func (e *encoder) tenant(t Tenant) {
	e.u64(t.ID)
	e.str(t.Name)
	e.u32(t.MaxQueues)
	e.u32(t.PublishRate)
	e.u64(t.Version)
}

const tenantBytes = 8 + 4 + 4 + 4 + 8

func (d *decoder) tenant() Tenant {
	return Tenant{ID: d.u64(), Name: d.str(), MaxQueues: d.u32(), PublishRate: d.u32(), Version: d.u64()}
}

func (e *encoder) accessToken(t AccessToken) {
	e.u64(t.ID)
	e.b = append(e.b, t.Hash[:]...)
	e.str(t.Tenant)
	e.u8(uint8(t.Roles))
	e.str(t.Name)
}

const accessTokenBytes = 8 + sha256.Size + 4 + 1 + 4

func (d *decoder) accessToken() AccessToken {
	t := AccessToken{ID: d.u64()}
	copy(t.Hash[:], d.take(len(t.Hash)))
	t.Tenant, t.Roles, t.Name = d.str(), Roles(d.u8()), d.str()
	return t
}

// tenant finds a tenant by name.
func (d *data) tenant(name string) (Tenant, bool) {
	for _, t := range d.tenants {
		if t.Name == name {
			return t, true
		}
	}
	return Tenant{Name: name}, name == DefaultTenant || name == StagingTenant
}

func (s *State) putTenant(c *PutTenant) (bool, *refusal) {
	want := c.Tenant
	if !validName(want.Name) || want.Name == StagingTenant {
		return false, refuse(code.InvalidName, "%q is not a tenant's name: %s", clip(want.Name), code.InvalidName.Info().Text)
	}
	have, ok := s.d.tenant(want.Name)
	want.ID = have.ID
	if ok && have.ID != 0 && have.MaxQueues == want.MaxQueues && have.PublishRate == want.PublishRate && have.MaxBytes == want.MaxBytes {
		return false, nil
	}
	if have.Version != want.Version {
		return false, refuse(code.MutationFenced, "tenant %s is at version %d, this was decided on %d", want.Name, have.Version, want.Version)
	}
	if want.ID == 0 {
		if len(s.d.tenants) >= MaxTenants {
			return false, refuse(code.LimitReached, "there are %d tenants, which is the limit: delete some", MaxTenants)
		}
		want.ID = 1
		for id := range s.d.tenants {
			want.ID = max(want.ID, id+1)
		}
	}
	want.Version = have.Version + 1
	s.d.tenants[want.ID] = want
	return true, nil
}

func (s *State) deleteTenant(c *DeleteTenant) (bool, *refusal) {
	t, ok := s.d.tenant(c.Name)
	if !ok || t.ID == 0 {
		return false, nil
	}
	if n := s.d.queuesOf(t.Name); n > 0 && t.Name != DefaultTenant {
		return false, refuse(code.LimitReached, "tenant %s has %d queues: delete them first", t.Name, n)
	}
	delete(s.d.tenants, t.ID)
	if t.Name != DefaultTenant {
		maps.DeleteFunc(s.d.accessTokens, func(_ uint64, a AccessToken) bool { return a.Tenant == t.Name })
	}
	return true, nil
}

func (d *data) queuesOf(tenant string) (n uint32) {
	for key := range d.queues {
		if key.Tenant == tenant {
			n++
		}
	}
	return n
}

// mayOwnMore says whether a tenant may have one more queue.
func (d *data) mayOwnMore(tenant string) *refusal {
	t, ok := d.tenant(tenant)
	switch {
	case !ok:
		return refuse(code.NotPermitted, "there is no tenant %q: make it with `tierq tenant put`", clip(tenant))
	case t.MaxQueues != 0 && d.queuesOf(tenant) >= t.MaxQueues:
		return refuse(code.LimitReached, "tenant %s may have %d queues: delete one, or raise the quota with `tierq tenant put`", tenant, t.MaxQueues)
	}
	return nil
}

func (s *State) createAccessToken(c *CreateAccessToken) (bool, *refusal) {
	t := c.Token
	_, known := s.d.tenant(t.Tenant)
	switch have, ok := s.d.accessTokens[t.ID]; {
	case ok && have == t:
		return false, nil
	case ok:
		return false, refuse(code.MutationFenced, "the token's id was given out")
	case t.ID == 0 || t.Roles == 0 || t.Roles&^allRoles != 0 || len(t.Name) > MaxDomainBytes:
		return false, refuse(code.InvalidArgument, "a token needs an id, roles, and a name of at most %d bytes", MaxDomainBytes)
	case !known || t.Tenant == StagingTenant:
		return false, refuse(code.InvalidArgument, "there is no tenant %q: make it with `tierq tenant put`", clip(t.Tenant))
	case len(s.d.accessTokens) >= MaxAccessTokens:
		return false, refuse(code.LimitReached, "there are %d tokens, which is the limit: revoke some", MaxAccessTokens)
	}
	for _, have := range s.d.accessTokens {
		if have.Hash == t.Hash {
			return false, refuse(code.MutationFenced, "the token was given out")
		}
	}
	s.d.accessTokens[t.ID] = t
	return true, nil
}

func (s *State) revokeAccessToken(c *RevokeAccessToken) (bool, *refusal) {
	if _, ok := s.d.accessTokens[c.ID]; !ok {
		return false, nil
	}
	delete(s.d.accessTokens, c.ID)
	return true, nil
}

// Tenants returns the tenants that have a record, by name.
func (v *View) Tenants() []Tenant {
	return slices.SortedFunc(maps.Values(v.d.tenants), func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
}

// Tenant returns a tenant; the default one exists without a record.
func (v *View) Tenant(name string) (Tenant, bool) { return v.d.tenant(name) }

// AccessTokens returns the tokens by id.
func (v *View) AccessTokens() []AccessToken {
	return slices.SortedFunc(maps.Values(v.d.accessTokens), func(a, b AccessToken) int { return cmp.Compare(a.ID, b.ID) })
}

// TokenOf returns the token with a hash. What is compared is a hash of 256 random bits, so the time that a lookup takes tells nothing.
func (v *View) TokenOf(hash [sha256.Size]byte) (AccessToken, bool) {
	id, ok := v.byToken[hash]
	return v.d.accessTokens[id], ok
}

// tenantBytes are the quotas of stored bytes by the tenants' ids.
func (d *data) tenantBytes() map[uint64]uint64 {
	out := map[uint64]uint64{}
	for id, t := range d.tenants {
		if t.MaxBytes > 0 {
			out[id] = t.MaxBytes
		}
	}
	return out
}

// setTenantBytes is the inverse; false if one is of no tenant, or none.
func (d *data) setTenantBytes(limits map[uint64]uint64) bool {
	for id, limit := range limits {
		t, ok := d.tenants[id]
		if !ok || limit == 0 {
			return false
		}
		t.MaxBytes = limit
		d.tenants[id] = t
	}
	return true
}
