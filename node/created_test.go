package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
)

// TestCreatedIsServed: who has created a queue, at a host that has a replica, is told of its replicas and its leader.
func TestCreatedIsServed(t *testing.T) {
	onOneFleet(t, 90*time.Second, map[string]func(*adminFleet){"created": func(f *adminFleet) {
		for i := range 5 {
			for _, n := range f.d.Nodes[:2] {
				q, created, err := n.CreateQueue(f.ctx, api.CreateQueue{Name: fmt.Sprintf("created-%d-%d", i, n.id)})
				require.NoError(t, err)
				require.True(t, created)
				require.Len(t, q.Partitions, 1)
				require.Len(t, q.Partitions[0].Replicas, 3, "queue %d at host %d", i, n.id)
				require.NotZero(t, q.Partitions[0].LeaderHost)
			}
		}
	}})
}
