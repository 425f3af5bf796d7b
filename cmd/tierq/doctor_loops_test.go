package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A way of dead letters that comes back is told, also when only one of its queues is asked about.
func TestDoctorFindsDeadLetterLoops(t *testing.T) {
	s := newShell(t, 2)
	for _, q := range []string{"a", "b", "c", "plain", "chain"} {
		s.ok("queue", "create", q)
	}
	require.NotContains(t, s.ok("doctor"), "dead-letter-loop")
	s.ok("group", "create", "chain", "g", "--dead-letter-queue", "a")
	s.ok("group", "create", "a", "g", "--dead-letter-queue", "b")
	s.ok("group", "create", "b", "g", "--dead-letter-queue", "c")
	s.ok("group", "create", "b", "h", "--dead-letter-queue", "gone")
	require.Regexp(t, `(?m)^dead-letter-loop +ok +3`, s.ok("doctor"))
	s.ok("group", "create", "c", "g", "--dead-letter-queue", "a")
	out := s.ok("doctor")
	require.Regexp(t, `(?m)^dead-letter-loop +ok +1`, out, "the one that only leads into it")
	require.Regexp(t, `(?m)^dead-letter-loop +warn +a .*a -> b -> c -> a`, out)
	require.Regexp(t, `(?m)^dead-letter-loop +warn +c .*c -> a -> b -> c`, out)
	require.Regexp(t, `(?m)^dead-letter-loop +warn +b .*b -> c -> a -> b`, s.ok("doctor", "b"))
}
