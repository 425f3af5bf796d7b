package clienttest

import (
	"testing"
	"time"
)

// Patience bounds what a test waits for. It takes milliseconds: the time is for a machine that is busy with something else.
const Patience = 90 * time.Second

// Ends fails the test unless f returns. What f must not wait for has to take far longer than Patience, or for ever.
func Ends(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(Patience):
		t.Fatalf("%s: hangs", what)
	}
}
