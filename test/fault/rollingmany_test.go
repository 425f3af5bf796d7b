package fault

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

var rollingFlag = flag.Int("rolling", 0, "shards in TestFaultRollingMany, which does not run without it; 200 is the usual")

// busyOfMany is how many of the queues of TestFaultRollingMany have a publisher and a consumer, rateOfMany what each gets a second.
const (
	busyOfMany = 10
	rateOfMany = 20
)

// TestFaultRollingMany stops and starts every host of a fleet of many shards in turn, as an upgrade does, while messages flow through
// some of them: no publish fails, nothing is lost, and every host leaves and comes back in time.
func TestFaultRollingMany(t *testing.T) {
	needsProcesses(t)
	if *rollingFlag <= 0 {
		t.Skip("takes minutes: ask for it with -rolling=200")
	}
	newRand(t)
	f := newFleet(t, 3, 0)
	c := f.client(client.Options{PublishTimeout: time.Minute})
	names := make([]string, *rollingFlag)
	for i := range names {
		names[i] = fmt.Sprintf("rolling-%03d", i+1)
	}
	took := f.createQueues(c, names)
	measured(t, "%d queues x 3 replicas created in %v", len(names), took.Round(time.Millisecond))
	busy := names[:min(busyOfMany, len(names))]
	books, stops := map[string]*account{}, map[string][]func(){}
	for _, name := range busy {
		f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: name, Name: "workers"})
		a := newAccount()
		books[name] = a
		stops[name] = []func(){publishAt(t, c, a, name, rateOfMany), consume(f, a, name, "workers", 1, nil)}
	}
	flow := func() {
		t.Helper()
		awaitAcksOfAll(t, books, 3*rateOfMany)
	}
	// still is how long each busy queue stood still since it was last asked.
	still := func() string {
		var publish, ack durations
		for _, a := range books {
			p, k := a.stood()
			publish, ack = append(publish, p), append(ack, k)
		}
		return fmt.Sprintf("longest time between two acknowledgements %v; between two acks %v", publish, ack)
	}
	for _, h := range f.hosts {
		flow()
		t.Logf("before: %s", still())
		began := time.Now()
		h.stop()
		stopped := time.Since(began)
		flow()
		measured(t, "host %d of %d shards stopped within %v: over %d busy queues, %s", h.id, len(names), stopped.Round(time.Millisecond), len(busy), still())
		began = time.Now()
		h.restart()
		ready := time.Since(began)
		f.awaitServed(h, names)
		served := time.Since(began)
		flow()
		measured(t, "host %d ready after %v, all replicas there after %v: %s", h.id, ready.Round(time.Millisecond), served.Round(time.Millisecond), still())
	}
	for _, name := range busy {
		stops[name][0]()
		f.awaitFinished(name, "workers", readyWithin)
		stops[name][1]()
		s := books[name].verifyPart(t, name)
		require.Zero(t, s.refused+s.unknown, "no publish fails")
	}
	for _, name := range names {
		f.awaitConverged(name)
	}
}

// awaitAcksOfAll waits until so many more messages of each account are acked, at the same time.
func awaitAcksOfAll(t *testing.T, books map[string]*account, more int) {
	t.Helper()
	before := map[string]int{}
	for name, a := range books {
		_, before[name] = a.counts()
	}
	eventually(t, 60*time.Second, fmt.Sprintf("%d more messages of each queue are acked", more), func() error {
		for name, a := range books {
			if _, got := a.counts(); got < before[name]+more {
				return fmt.Errorf("%s: %d are", name, got-before[name])
			}
		}
		return nil
	})
}

// awaitServed waits until a host has its replica of each queue.
func (f *fleet) awaitServed(h *host, names []string) {
	f.t.Helper()
	eventually(f.t, 5*readyWithin, fmt.Sprintf("host %d has all replicas", h.id), func() error {
		n, err := h.replicas()
		if err == nil && n < len(names) {
			err = fmt.Errorf("%d", n)
		}
		return err
	})
}
