package client

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A queue never has fewer partitions than before: a host that says so has not heard yet. Another queue of the name may.
func TestKnowPartitions(t *testing.T) {
	l := &placer{grown: make(chan struct{})}
	told := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	grown := l.grown
	require.EqualValues(t, 2, l.know(located{queueID: 7, partitions: 2}))
	require.True(t, told(grown))
	grown = l.grown
	require.EqualValues(t, 2, l.know(located{queueID: 7, partitions: 1}))
	require.EqualValues(t, 2, l.know(located{queueID: 7, partitions: 2}))
	require.False(t, told(grown))
	require.EqualValues(t, 4, l.know(located{queueID: 7, partitions: 4}))
	require.True(t, told(grown))
	require.EqualValues(t, 1, l.know(located{queueID: 8, partitions: 1}))
	require.EqualValues(t, 1, l.partitions.Load())
	l.partitions.Store(0) // it was forgotten
	l.hear(9)             // and is asked for by whoever needs it
	require.False(t, l.hearing.Load())
}
