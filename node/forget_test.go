package node

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// noQuorum is a shard that answers nothing.
type noQuorum struct{ raft }

func (noQuorum) ReadIndex(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestGoneWaitsLittleForAQuorum: a source without a quorum tells nothing, and leaves the round the time for the rest.
func TestGoneWaitsLittleForAQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{catalog: &catalog.View{}, desks: map[uint64]*desk{7: {raft: noQuorum{}}}}
		ctx, cancel := context.WithTimeout(t.Context(), proposeTimeout)
		defer cancel()
		begun := time.Now()
		require.Empty(t, n.Gone(ctx, 7, []queue.GroupID{1}))
		require.Equal(t, goneTimeout, time.Since(begun))
		require.NoError(t, ctx.Err())
	})
}
