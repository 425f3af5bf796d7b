package fault

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

var failoverFlag = flag.Int("failover", 0, "rounds of kills and of planned moves in TestFaultFailover, which does not run without it; 20 is the usual")

// configuredElection is what docs/adr/0046 sets: a follower waits for so long, chosen at random, before it campaigns.
const configuredElection = "500 ms to 1 s"

// failoverRate is the pace of the publisher in TestFaultFailover, in messages a second.
const failoverRate = 200

// TestFaultFailover measures what a steady publisher and a consumer see of it when the host is killed that leads their queue and
// is home of their group, and when leadership and home move as planned. A planned move fails no publish and delivers nothing twice.
func TestFaultFailover(t *testing.T) {
	needsProcesses(t)
	if *failoverFlag <= 0 {
		t.Skip("takes minutes: ask for it with -failover=20")
	}
	for _, layout := range []struct{ full, witnesses int }{{3, 0}, {2, 1}} {
		t.Run(fmt.Sprintf("%d full and %d witnesses", layout.full, layout.witnesses), func(t *testing.T) {
			newRand(t)
			f := newFleet(t, layout.full, layout.witnesses)
			t.Run("kill -9", func(t *testing.T) { failoverKills(t, f) })
			t.Run("SIGTERM", func(t *testing.T) { failoverStops(t, f) })
			t.Run("group move", func(t *testing.T) { failoverMoves(t, f) })
		})
	}
}

// failoverLoad is a queue with a steady publisher and a consumer.
type failoverLoad struct {
	f      *fleet
	t      *testing.T
	a      *account
	c      *client.Client
	queue  string
	finish func() totals
}

const failoverGroup = "workers"

func startFailoverLoad(t *testing.T, f *fleet, queue string) *failoverLoad {
	t.Helper()
	l := &failoverLoad{f: f, t: t, a: newAccount(), c: f.client(client.Options{}), queue: queue}
	f.createQueue(l.c, queue, nil)
	f.createGroup(l.c, &tierqv1.CreateGroupRequest{Queue: queue, Name: failoverGroup, HomeHost: f.leaderHost(queue).id})
	stopConsumers := consume(f, l.a, queue, failoverGroup, 1, nil)
	stopPublisher := publishAt(t, l.c, l.a, queue, failoverRate)
	l.finish = func() totals {
		stopPublisher()
		f.awaitFinished(queue, failoverGroup, readyWithin)
		stopConsumers()
		f.awaitConverged(queue)
		return l.a.verify(t)
	}
	return l
}

// settle waits until the fleet is whole and the load flows, with the group at home where the leader is.
func (l *failoverLoad) settle() *host {
	l.t.Helper()
	for _, h := range l.f.full() {
		l.f.awaitCaughtUp(h, l.queue)
	}
	l.f.awaitTwoCopies(l.queue)
	leader := l.f.leaderHost(l.queue)
	if l.f.homeHost(l.queue, failoverGroup) != leader {
		eventually(l.t, readyWithin, "the group moves to the leader's host", func() error {
			_, err := l.c.MoveGroup(context.Background(), l.queue, failoverGroup, leader.id)
			return err
		})
	}
	awaitAcks(l.t, l.a, 2*failoverRate)
	return leader
}

// gaps watches for how long publishes and deliveries stand still from now until both have gone on for a second.
func (l *failoverLoad) gaps(disturb func()) (publish, deliver time.Duration) {
	l.t.Helper()
	l.a.resetGaps()
	disturb()
	awaitProgress(l.t, l.a, failoverRate)
	awaitAcks(l.t, l.a, failoverRate)
	return l.a.gaps()
}

func failoverKills(t *testing.T, f *fleet) {
	l := startFailoverLoad(t, f, "kill")
	var publish, deliver durations
	for round := range *failoverFlag {
		victim := l.settle()
		p, d := l.gaps(victim.kill)
		t.Logf("kill %d, of host %d: publishes stood still for %v, deliveries for %v", round+1, victim.id, p.Round(time.Millisecond), d.Round(time.Millisecond))
		publish, deliver = append(publish, p), append(deliver, d)
		victim.restart()
	}
	s := l.finish()
	require.Zero(t, s.refused+s.unknown, "the client repeats what a kill interrupts")
	what := fmt.Sprintf("%s: %d times kill -9 of leader and home, election %s", f.layout(), *failoverFlag, configuredElection)
	measured(t, "%s: last confirmed publish to the next: %v", what, publish)
	measured(t, "%s: last delivery to the next: %v", what, deliver)
}

// failoverStops stops the leader's host as an upgrade does.
func failoverStops(t *testing.T, f *fleet) {
	l := startFailoverLoad(t, f, "stop")
	var publish, deliver, stop durations
	for range *failoverFlag {
		victim := l.settle()
		var took time.Duration
		p, d := l.gaps(func() {
			began := time.Now()
			victim.stop()
			took = time.Since(began)
		})
		t.Logf("stop of host %d: publishes stood still for %v, deliveries for %v; it took %v", victim.id, p.Round(time.Millisecond), d.Round(time.Millisecond), took.Round(time.Millisecond))
		publish, deliver, stop = append(publish, p), append(deliver, d), append(stop, took)
		victim.restart()
	}
	l.planned(fmt.Sprintf("%d times SIGTERM of leader and home", *failoverFlag), publish, deliver)
	measured(t, "%s: from SIGTERM to the end of the process: %v", f.layout(), stop)
}

// failoverMoves moves the group from full host to full host.
func failoverMoves(t *testing.T, f *fleet) {
	l := startFailoverLoad(t, f, "move")
	var publish, deliver durations
	for round := range *failoverFlag {
		awaitAcks(t, l.a, failoverRate)
		to := f.full()[round%len(f.full())]
		p, d := l.gaps(func() {
			_, err := l.c.MoveGroup(context.Background(), l.queue, failoverGroup, to.id)
			require.NoError(t, err)
		})
		publish, deliver = append(publish, p), append(deliver, d)
	}
	l.planned(fmt.Sprintf("%d moves of the group", *failoverFlag), publish, deliver)
}

// planned ends the load of planned moves, prints what they cost, and checks that they cost no more than time.
func (l *failoverLoad) planned(what string, publish, deliver durations) {
	l.t.Helper()
	s := l.finish()
	measured(l.t, "%s: %s: publishes stood still for %v; deliveries for %v; failed publishes %d, redeliveries %d",
		l.f.layout(), what, publish, deliver, s.refused+s.unknown, s.duplicates)
	require.Zero(l.t, s.refused+s.unknown, "a planned move fails no publish")
	require.Zero(l.t, s.duplicates, "a planned move delivers nothing twice")
}

// layout is "3 full" or "2 full and 1 witness".
func (f *fleet) layout() string {
	full := len(f.full())
	if witnesses := len(f.hosts) - full; witnesses > 0 {
		return fmt.Sprintf("%d full and %d witness", full, witnesses)
	}
	return fmt.Sprintf("%d full", full)
}

// durations print as their distribution.
type durations []time.Duration

func (ds durations) String() string {
	if len(ds) == 0 {
		return "nothing"
	}
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	at := func(percent int) time.Duration {
		return sorted[min(len(sorted)-1, len(sorted)*percent/100)].Round(time.Millisecond)
	}
	return fmt.Sprintf("P50 %v, P95 %v, max %v", at(50), at(95), sorted[len(sorted)-1].Round(time.Millisecond))
}
