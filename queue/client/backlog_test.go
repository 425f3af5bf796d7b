package client

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBacklogIsBounded: a backlog in which messages always wait keeps their order, and takes no more room than they need.
func TestBacklogIsBounded(t *testing.T) {
	b := newBacklog()
	var waiting []*job
	for range 10 {
		j := &job{}
		b.push(j)
		waiting = append(waiting, j)
	}
	for range 100_000 {
		require.Same(t, waiting[0], b.pop())
		j := &job{}
		waiting = append(waiting[1:], j)
		require.False(t, b.push(j))
	}
	require.Less(t, cap(b.jobs), 100)
	require.Equal(t, waiting, b.rest())
}
