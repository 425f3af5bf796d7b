package node

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLeadershipEndsWithALaterTerm(t *testing.T) {
	var l leadership
	first := l.current()
	require.NoError(t, first.Err())
	l.elected(3)
	require.Error(t, first.Err())
	second := l.current()
	require.NoError(t, second.Err())
	l.elected(3)
	l.elected(2)
	require.NoError(t, second.Err(), "the same leader, told again, and an older one that was told late")
	l.elected(4)
	require.Error(t, second.Err())
	l.elected(5) // nobody asked meanwhile
	require.NoError(t, l.current().Err())
}
