package fault

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// TestFaultRollingRestart stops and starts every host in turn, as an upgrade does, under load: each stops by itself with
// status 0, no publish fails, nothing is lost, and neither publishers nor consumers stand still for as long as after a kill.
func TestFaultRollingRestart(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "rolling", nil)
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "rolling", Name: "workers"})
	a := newAccount()
	stopConsumers := consume(f, a, "rolling", "workers", 2, nil)
	stopPublisher := publishSteadily(t, c, a, "rolling")
	for _, h := range f.hosts {
		awaitAcks(t, a, 500)
		began := time.Now()
		h.stop()
		t.Logf("host %d (%s) stopped within %v at %v", h.id, h.role, time.Since(began).Round(time.Millisecond), progress(a))
		awaitAcks(t, a, 500)
		h.restart()
		for _, full := range f.full() {
			f.awaitCaughtUp(full, "rolling")
		}
	}
	stopPublisher()
	f.awaitFinished("rolling", "workers", readyWithin)
	stopConsumers()
	f.awaitConverged("rolling")
	s := a.verify(t)
	t.Logf("longest time between two acknowledgements %v, between two acks %v", a.longestGap.Round(time.Millisecond), a.longestAck.Round(time.Millisecond))
	require.Zero(t, s.refused+s.unknown)
}
