package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
)

// TestKeepTenants: nothing is remembered of tenants that are no more.
func TestKeepTenants(t *testing.T) {
	a, err := openAccess(nil)
	require.NoError(t, err)
	for _, name := range []string{catalog.DefaultTenant, "gone"} {
		a.limiter(name, 10)
		a.bytes[name] = new(byteQuota)
	}
	a.keepTenants(catalog.NewState().Seal())
	require.Len(t, a.rates, 1)
	require.Len(t, a.bytes, 1)
	require.Contains(t, a.bytes, catalog.DefaultTenant)
}

func TestByteQuota(t *testing.T) {
	q, now, stored, sums := new(byteQuota), time.Now(), uint64(0), 0
	look := func(limit uint64) bool {
		over, _ := q.look(limit, now, func() uint64 { sums++; return stored })
		return over
	}
	require.False(t, look(1000))
	stored = 1000
	require.False(t, look(1000), "not added up again yet")
	require.Equal(t, 1, sums)
	for _, step := range []struct {
		stored, limit uint64
		over          bool
	}{{999, 1000, false}, {1000, 1000, true}, {951, 1000, true}, {949, 1000, false}, {960, 1000, false}, {2000, 1000, true}} {
		now, stored = now.Add(quotaLook), step.stored
		require.Equal(t, step.over, look(step.limit), "%+v", step)
	}
	require.False(t, look(3000), "another quota counts at once")
	stored = 1 << 63
	now = now.Add(quotaLook)
	require.True(t, look(1<<63))
}
