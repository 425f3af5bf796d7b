package catalog

import (
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// goldenAccess is a view with tenants and tokens.
func goldenAccess(v *View) *View {
	d := v.d
	d.tenants = map[uint64]Tenant{2: {ID: 2, Name: "acme", MaxQueues: 3, PublishRate: 4, Version: 5}}
	d.accessTokens = map[uint64]AccessToken{6: {ID: 6, Hash: [32]byte{7}, Tenant: "acme", Roles: RoleProduce | RoleConsume, Name: "web"}}
	return newView(d)
}

// goldenTenantBytes is a view with a tenant that has a quota of bytes, and one that has none.
func goldenTenantBytes(v *View) *View {
	d := v.d
	d.tenants = map[uint64]Tenant{2: {ID: 2, Name: "acme", MaxBytes: 6, Version: 5}, 3: {ID: 3, Name: "zeta", Version: 1}}
	return newView(d)
}

func TestTenantBytes(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	put := Tenant{Name: "acme", MaxBytes: 7}
	c, err := Decode(Encode(&PutTenant{put}))
	require.NoError(t, err)
	require.Equal(t, &PutTenant{put}, c)
	require.Equal(t, code.OK, s.Apply(1, c).Code)
	require.Equal(t, code.OK, s.Apply(2, &PutTenant{put}).Code, "the same again")
	put.MaxBytes = 8
	require.Equal(t, code.MutationFenced, s.Apply(3, &PutTenant{put}).Code)
	put.Version, put.MaxBytes = 1, 0
	require.Equal(t, code.OK, s.Apply(4, &PutTenant{put}).Code)
	got, ok := s.Seal().Tenant("acme")
	require.True(t, ok)
	require.Zero(t, got.MaxBytes)
	_, err = Decode(append(Encode(&PutTenant{Tenant{Name: "acme"}}), make([]byte, 8)...))
	require.Error(t, err, "no quota is written as none")
}

func TestTenants(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	apply := func(c Command) Result {
		t.Helper()
		r := s.Apply(1, c)
		require.NoError(t, s.Check())
		return r
	}
	create := func(op uint64, tenant, name string) code.Code {
		return apply(&CreateQueue{OperationID: op, Tenant: tenant, Name: name, Options: queue.QueueOptions{}, Replicas: 3}).Code
	}
	require.Equal(t, code.NotPermitted, create(1, "acme", "orders"), "no such tenant")
	require.Equal(t, code.OK, apply(&PutTenant{Tenant{Name: "acme", MaxQueues: 1}}).Code)
	require.Equal(t, code.OK, apply(&PutTenant{Tenant{Name: "acme", MaxQueues: 1}}).Code, "the same again")
	require.Equal(t, code.MutationFenced, apply(&PutTenant{Tenant{Name: "acme", MaxQueues: 2}}).Code, "decided on no tenant")
	require.Equal(t, code.InvalidName, apply(&PutTenant{Tenant{Name: StagingTenant}}).Code)
	require.Equal(t, code.OK, create(1, "acme", "orders"))
	require.Equal(t, code.OK, create(2, "", "orders"), "names are a tenant's own")
	require.Equal(t, code.LimitReached, create(3, "acme", "more"))
	require.Equal(t, code.OK, create(1, "acme", "orders"), "the same again is no further queue")
	require.Equal(t, code.OK, apply(&PutTenant{Tenant{Name: "acme", MaxQueues: 2, Version: 1}}).Code)
	require.Equal(t, code.OK, create(3, "acme", "more"))

	hash := sha256.Sum256([]byte("secret"))
	token := AccessToken{ID: 9, Hash: hash, Tenant: "acme", Roles: RoleConsume, Name: "web"}
	require.Equal(t, code.OK, apply(&CreateAccessToken{token}).Code)
	require.Equal(t, code.OK, apply(&CreateAccessToken{token}).Code, "the same again")
	for name, bad := range map[string]AccessToken{
		"another tenant": {ID: 10, Hash: [32]byte{1}, Tenant: "nobody", Roles: RoleConsume},
		"no role":        {ID: 10, Hash: [32]byte{1}, Tenant: "acme"},
		"unknown role":   {ID: 10, Hash: [32]byte{1}, Tenant: "acme", Roles: 16},
		"the id twice":   {ID: 9, Hash: [32]byte{1}, Tenant: "acme", Roles: RoleConsume},
		"the hash twice": {ID: 10, Hash: hash, Tenant: "acme", Roles: RoleConsume},
	} {
		require.NotEqual(t, code.OK, apply(&CreateAccessToken{bad}).Code, name)
	}
	got, ok := s.Seal().TokenOf(hash)
	require.True(t, ok)
	require.Equal(t, token, got)
	decoded, err := DecodeView(EncodeView(s.Seal()))
	require.NoError(t, err)
	got, ok = decoded.TokenOf(hash)
	require.True(t, ok)
	require.Equal(t, token, got)

	require.Equal(t, code.LimitReached, apply(&DeleteTenant{Name: "acme"}).Code, "it has queues")
	for _, name := range []string{"orders", "more"} {
		require.Equal(t, code.OK, apply(&DeleteQueue{Tenant: "acme", Name: name}).Code)
	}
	require.Equal(t, code.OK, apply(&DeleteTenant{Name: "acme"}).Code)
	_, ok = s.Seal().TokenOf(hash)
	require.False(t, ok, "a deleted tenant's token is good for nothing")
	require.Equal(t, code.OK, apply(&RevokeAccessToken{ID: 9}).Code, "there is none")
}

func TestAccessTokenText(t *testing.T) {
	token, text := NewAccessToken("acme", RoleProduce, "ours")
	require.Equal(t, AccessToken{ID: token.ID, Hash: token.Hash, Tenant: "acme", Roles: RoleProduce, Name: "ours"}, token)
	require.Less(t, token.ID, uint64(1)<<48)
	require.NotZero(t, token.ID)
	hash, ok := HashAccessToken(text + "\n")
	require.True(t, ok)
	require.Equal(t, token.Hash, hash)
	hash, ok = HashAccessToken("tierq-" + strings.Repeat("00", 32)) // those that are out there stay good
	require.True(t, ok)
	require.Equal(t, sha256.Sum256(make([]byte, 32)), hash)
	_, join := NewJoinToken(1)
	for _, bad := range []string{"", "tierq-", "tierq-00", text[6:], text + "00", "tierq-join-1-00", join} {
		_, ok := HashAccessToken(bad)
		require.False(t, ok, bad)
	}
	r, err := ParseRoles([]string{"produce", "consume"})
	require.NoError(t, err)
	require.Equal(t, []string{"produce", "consume"}, r.Names())
	for _, bad := range [][]string{nil, {"root"}} {
		_, err := ParseRoles(bad)
		require.Error(t, err)
	}
}
