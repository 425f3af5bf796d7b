package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

const operatorToken = "tierq-00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

// openGuarded is a fleet that wants tokens.
func openGuarded(t *testing.T) *Dev {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "operator")
	require.NoError(t, os.WriteFile(file, []byte(operatorToken+"\n"), 0o600))
	return openDevWith(t, dir, func(_ HostConfig, c *Config) { c.Auth = &AuthConfig{Required: true, OperatorTokenFile: file} })
}

// A fleet that wants tokens: what each may do, over every host, and that tenants neither see nor disturb each other (G10).
func TestTokensAndTenants(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	d := openGuarded(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	at := func(token string, nodes ...*Node) *client.Client {
		t.Helper()
		o := client.Options{Token: token, CallTimeout: 10 * time.Second, FailFast: true}
		for _, n := range nodes {
			o.Addrs = append(o.Addrs, n.APIAddr().String())
		}
		c, err := client.New(o)
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	both := d.Nodes[:2]
	refused := func(err error, want code.Code, what string) {
		t.Helper()
		var e *code.Error
		require.ErrorAs(t, err, &e, what)
		require.Equal(t, want, e.Code, "%s: %v", what, err)
		require.NotContains(t, err.Error(), operatorToken[6:])
	}

	_, err := at("", both...).ListQueues(ctx, "")
	refused(err, code.NotAuthenticated, "no token")
	_, err = at(operatorToken[:len(operatorToken)-1]+"0", both...).ListQueues(ctx, "")
	refused(err, code.AuthFailed, "another token")

	op := at(operatorToken, both...)
	for _, tenant := range []*tierqv1.Tenant{{Name: "acme", MaxQueues: 1}, {Name: "zeta", PublishRate: 5}} {
		require.NoError(t, op.PutTenant(ctx, tenant))
	}
	token := func(tenant string, roles ...string) (string, uint64) {
		t.Helper()
		res, err := op.CreateToken(ctx, &tierqv1.Token{Tenant: tenant, Roles: roles, Name: tenant})
		require.NoError(t, err)
		hash := res.Token
		for _, n := range both {
			require.Eventually(t, func() bool { _, ok := n.bearer(hash); return ok }, 30*time.Second, 5*time.Millisecond)
		}
		return res.Token, res.Id
	}
	adminA, _ := token("acme", "admin")
	produceA, _ := token("acme", "produce")
	consumeA, idA := token("acme", "consume")
	adminZ, _ := token("zeta", "admin")

	// Two tenants, one name.
	a, z := at(adminA, both...), at(adminZ, both...)
	for _, c := range []*client.Client{a, z} {
		_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "orders"})
		require.NoError(t, err)
	}
	_, err = a.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "second"})
	refused(err, code.LimitReached, "a queue too many")

	// Each host serves the tenant, also by forwarding.
	for i, n := range both {
		_, err := at(produceA, n).Publish(ctx, "orders", client.Message{Body: []byte{byte('a' + i)}})
		require.NoError(t, err)
	}
	_, err = z.Publish(ctx, "orders", client.Message{Body: []byte("z")})
	require.NoError(t, err)
	for _, n := range both {
		q, err := at(consumeA, n).DescribeQueue(ctx, "orders")
		require.NoError(t, err)
		require.EqualValues(t, 2, q.LastAddress, "acme's queue holds acme's messages")
	}
	_, err = at(produceA, both...).Receive(ctx, "orders", "", client.ReceiveOptions{Max: 1})
	refused(err, code.NotPermitted, "a producer receives")
	_, err = at(consumeA, both...).Publish(ctx, "orders", client.Message{Body: []byte("x")})
	refused(err, code.NotPermitted, "a consumer publishes")
	refused(a.PutTenant(ctx, &tierqv1.Tenant{Name: "acme"}), code.NotPermitted, "an admin raises its quota")

	testStoredBytes(ctx, t, d, op, z)

	// A receipt is good in its own tenant only.
	got, err := at(consumeA, both...).Receive(ctx, "orders", "", client.ReceiveOptions{Max: 1, Wait: 5 * time.Second})
	require.NoError(t, err)
	require.Len(t, got, 1)
	_, err = z.Receive(ctx, "orders", "", client.ReceiveOptions{Max: 1, Wait: 5 * time.Second})
	require.NoError(t, err)
	settled, err := z.Ack(ctx, "orders", "", got[0].Receipt)
	require.True(t, err != nil || settled[0].Err != nil, "another tenant's receipt was taken")
	settled, err = at(consumeA, both...).Ack(ctx, "orders", "", got[0].Receipt)
	require.NoError(t, err)
	require.Nil(t, settled[0].Err)

	// What another tenant has does not exist.
	require.NoError(t, z.DeleteQueue(ctx, "orders"))
	_, err = z.DescribeQueue(ctx, "orders")
	refused(err, code.UnknownQueue, "after its deletion")
	_, err = a.DescribeQueue(ctx, "orders")
	require.NoError(t, err)
	qs, err := z.ListQueues(ctx, "")
	require.NoError(t, err)
	require.Empty(t, qs)

	// The rate is a tenant's own.
	_, err = z.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: "fast"})
	require.NoError(t, err)
	slow := code.OK
	for range 50 {
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		rs, _ := z.Publish(short, "fast", client.Message{Body: []byte("x")}, client.Message{Body: []byte("y")})
		cancel()
		for _, r := range rs {
			if r.Err != nil {
				slow = r.Err.Code
			}
		}
		if slow != code.OK {
			break
		}
	}
	require.NotEqual(t, code.OK, slow, "a tenant published beyond its rate")
	_, err = at(produceA, both...).Publish(ctx, "orders", client.Message{Body: []byte("x")})
	require.NoError(t, err, "another tenant is slowed down")

	// Revoked is revoked, at every host.
	require.NoError(t, op.RevokeToken(ctx, idA))
	for _, n := range both {
		require.Eventually(t, func() bool { _, ok := n.bearer(consumeA); return !ok }, 30*time.Second, 5*time.Millisecond)
		_, err := at(consumeA, n).ListQueues(ctx, "")
		refused(err, code.AuthFailed, "revoked")
	}
	tokens, err := op.ListTokens(ctx)
	require.NoError(t, err)
	require.Len(t, tokens, 3)
}

// testStoredBytes: zeta, who has one message of one byte, gets a quota of bytes; acme goes on.
func testStoredBytes(ctx context.Context, t *testing.T, d *Dev, op, z *client.Client) {
	t.Helper()
	quota := func(bytes uint64) {
		t.Helper()
		require.NoError(t, op.PutTenant(ctx, &tierqv1.Tenant{Name: "zeta", PublishRate: 1000, MaxBytes: bytes}))
		for _, n := range d.Nodes[:2] {
			require.Eventually(t, func() bool { tn, _ := n.view().Tenant("zeta"); return tn.MaxBytes == bytes }, 30*time.Second, 5*time.Millisecond)
		}
	}
	quota(100)
	_, err := z.Publish(ctx, "orders", client.Message{Body: make([]byte, 200)})
	require.NoError(t, err, "there was room")
	over := func(want bool) {
		t.Helper()
		for _, n := range d.Nodes[:2] {
			require.Eventually(t, func() bool {
				err := n.admit(api.WithTenant(ctx, "zeta"), 0)
				var e *code.Error
				return want == (errors.As(err, &e) && e.Code == code.QuotaExceeded && e.Effect == code.EffectNone)
			}, 90*time.Second, 5*time.Millisecond, "host %d", n.id)
			require.NoError(t, n.admit(api.WithTenant(ctx, "acme"), 0))
		}
	}
	over(true)
	short, cancel := context.WithTimeout(ctx, time.Second)
	_, err = z.Publish(short, "orders", client.Message{Body: []byte("z")}) // the client tries again and again
	cancel()
	require.Error(t, err, "a byte too many")
	ts, err := op.ListTenants(ctx)
	require.NoError(t, err)
	for _, one := range ts {
		if one.Name == "zeta" {
			require.EqualValues(t, 201, one.StoredBytes)
			require.EqualValues(t, 100, one.MaxBytes)
		}
	}
	quota(1000)
	over(false)
	_, err = z.Publish(ctx, "orders", client.Message{Body: []byte("z")})
	require.NoError(t, err)
	require.NoError(t, op.PutTenant(ctx, &tierqv1.Tenant{Name: "zeta", PublishRate: 5}))
}
