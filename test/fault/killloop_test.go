package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// loadRate is the pace of the publisher in TestFaultKillLoop, in messages a second.
const loadRate = 1500

// TestFaultKillLoop kills random hosts at random moments under load, -rounds times, with consumers that also nack and
// reject. In the end everything that was acknowledged is acked or a dead letter, every restart was clean, and the replicas
// are equal.
func TestFaultKillLoop(t *testing.T) {
	needsProcesses(t)
	for _, layout := range []struct{ full, witnesses int }{{2, 1}, {3, 0}} {
		t.Run(fmt.Sprintf("%d full and %d witnesses", layout.full, layout.witnesses), func(t *testing.T) {
			killLoop(t, newFleet(t, layout.full, layout.witnesses))
		})
	}
	t.Run("mutual TLS", func(t *testing.T) {
		if !*drillsFlag {
			t.Skip("takes a minute: run with -drills, as make fault-quick and CI do")
		}
		f := layFleet(t, 2, 1)
		f.secure(time.Hour)
		f.startAll()
		killLoop(t, f)
	})
}

func killLoop(t *testing.T, f *fleet) {
	r := newRand(t)
	c := f.client(client.Options{PublishTimeout: 60 * time.Second})
	f.createQueue(c, "loop", nil)
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "loop", Name: "workers", Config: &tierqv1.GroupConfig{
		MaxAttempts: 3, DelaysMs: []uint64{50, 100}, LeaseMs: 10_000,
	}})
	a := newAccount()
	stopConsumers := consume(f, a, "loop", "workers", 2, fickle(*seedFlag))
	stopPublisher := publishSteadily(t, c, a, "loop")
	awaitProgress(t, a, 500)
	for round := range *roundsFlag {
		f.faultRound(r, a, round, "loop")
	}
	stopPublisher()
	g := f.awaitFinished("loop", "workers", 2*readyWithin)
	stopConsumers()
	noteDeadLetters(t, c, a, "loop", "workers")
	f.awaitConverged("loop")
	s := a.verify(t)
	t.Logf("longest time between two acknowledgements %v", a.longestGap.Round(time.Millisecond))
	require.Zero(t, s.refused+s.unknown)
	require.EqualValues(t, s.acknowledged, g.Counters.Assigned)
	require.EqualValues(t, s.dead, g.Counters.Dead)
	require.EqualValues(t, s.acknowledged-s.dead, g.Counters.Acked)
}

// faultRound does one thing to the fleet, waits until it is whole again, and for some more messages.
func (f *fleet) faultRound(r *rand.Rand, a *account, round int, queue string) {
	f.t.Helper()
	awaitAcks(f.t, a, 100)
	awaitProgress(f.t, a, 50+r.IntN(1000))
	victim := f.hosts[r.IntN(len(f.hosts))]
	n := r.IntN(10)
	if round == 0 { // however few rounds there are, one kills a full host
		victim, n = f.full()[r.IntN(len(f.full()))], 0
	}
	switch {
	case n < 7:
		f.t.Logf("round %d: kill -9 of host %d (%s) at %v", round+1, victim.id, victim.role, progress(a))
		victim.kill()
		awaitProgress(f.t, a, 50+r.IntN(500))
		victim.restart()
	case n < 9:
		f.t.Logf("round %d: kill -9 of every host at %v", round+1, progress(a))
		for _, h := range f.hosts {
			h.kill()
		}
		for _, h := range f.hosts {
			h.start()
		}
		f.awaitReady()
	default:
		f.t.Logf("round %d: freeze of host %d (%s) at %v", round+1, victim.id, victim.role, progress(a))
		victim.pause()
		awaitProgress(f.t, a, 50+r.IntN(500))
		victim.resume()
	}
	for _, h := range f.full() {
		f.awaitCaughtUp(h, queue)
	}
	f.awaitTwoCopies(queue)
}

// fickle nacks one message of 20 and rejects one of 200, by a random number of its own.
func fickle(seed uint64) func(*client.Delivery) (ending, error) {
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(seed, 2))
	return func(*client.Delivery) (ending, error) {
		mu.Lock()
		n := r.IntN(200)
		mu.Unlock()
		switch {
		case n == 0:
			return rejected, &client.Reject{Reason: "the test rejects one of 200"}
		case n <= 10:
			return nacked, errors.New("the test nacks one of 20")
		}
		return acked, nil
	}
}

// publishSteadily publishes at loadRate until the returned function is called, which waits for every answer.
func publishSteadily(t *testing.T, c *client.Client, a *account, queue string) (stop func()) {
	return publishAt(t, c, a, queue, loadRate)
}

// publishAt publishes so many messages a second, evenly, until the returned function is called, which waits for every answer.
func publishAt(t *testing.T, c *client.Client, a *account, queue string, rate int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		var answers sync.WaitGroup
		began := time.Now()
		for id := uint64(1); ; {
			select {
			case <-ctx.Done():
				answers.Wait()
				return
			case <-tick.C:
			}
			for due := uint64(time.Since(began).Seconds() * float64(rate)); id <= due; id++ {
				publishOne(c, a, queue, id, fmt.Appendf(nil, "load %d", id), &answers)
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(stop)
	return stop
}

func noteDeadLetters(t *testing.T, c *client.Client, a *account, queue, group string) {
	t.Helper()
	for from := uint64(0); ; {
		dead, next, err := c.ListDeadLetters(context.Background(), queue, group, from, 1000)
		require.NoError(t, err)
		for _, d := range dead {
			a.deadLetter(d.Body)
		}
		if next == 0 {
			return
		}
		from = next
	}
}
