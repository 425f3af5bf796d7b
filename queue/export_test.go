package queue

import "testing"

// LowerMaxNear bounds the done ranges in memory, for a test that does not run beside others.
func LowerMaxNear(t *testing.T, n int) {
	before := maxNear
	t.Cleanup(func() { maxNear = before })
	maxNear = n
}
