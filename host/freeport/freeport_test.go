package freeport

import (
	"net"
	"sync"
	"testing"
)

// A thousand callers get a thousand ports, each of which can be listened on.
func TestDistinct(t *testing.T) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	seen := map[string]bool{}
	for range 1000 {
		wg.Go(func() {
			addr := For(t)
			mu.Lock()
			defer mu.Unlock()
			if seen[addr] {
				t.Errorf("%s was given twice", addr)
			}
			seen[addr] = true
		})
	}
	wg.Wait()
	l, err := net.Listen("tcp", For(t))
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}
