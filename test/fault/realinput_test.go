package fault

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// Bounds of TestFaultRealInput.
const (
	// pacedLines is how many lines a second are sent until both kills are over, so that they happen in the middle.
	pacedLines = 5_000
	// heldLines is the part of the lines, in percent, that is not sent before the second kill.
	heldLines = 25
)

// TestFaultRealInput sends real text into a fleet of two full hosts and a witness, with two consumers of one group, and
// meanwhile kills the home's host and then the leader's host. Every line that was acknowledged must be received byte by
// byte and acked, and nothing else; the replicas must be equal; the publisher must keep going (G1, G2, G4, G5, G7).
func TestFaultRealInput(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	newRand(t)
	lines := realLines(t, *linesFlag)
	f := newFleet(t, 2, 1)
	pub := f.client(client.Options{})
	f.createQueue(pub, "lines", nil)
	leader := f.leaderHost("lines")
	home := f.other(leader)
	f.createGroup(pub, &tierqv1.CreateGroupRequest{Queue: "lines", Name: "workers", HomeHost: home.id})

	a := newAccount()
	stopConsumers := consume(f, a, "lines", "workers", 2, nil)
	var free atomic.Bool // the kills are over
	published := make(chan struct{})
	go func() {
		defer close(published)
		publishPaced(t, pub, a, "lines", lines, &free)
	}()

	awaitAcknowledged(t, a, len(lines)/10)
	awaitAcks(t, a, len(lines)/40)
	t.Logf("kill -9 of host %d, the home, at %v", home.id, progress(a))
	home.kill()
	awaitRecovery(t, a, len(lines)/50)
	t.Logf("restart of host %d at %v", home.id, progress(a))
	home.restart()
	f.awaitCaughtUp(home, "lines")
	f.awaitTwoCopies("lines")

	leader = f.leaderHost("lines")
	t.Logf("kill -9 of host %d, the leader (and home: %v), at %v", leader.id, f.homeHost("lines", "workers") == leader, progress(a))
	leader.kill()
	free.Store(true)
	awaitRecovery(t, a, len(lines)/50)
	t.Logf("restart of host %d at %v", leader.id, progress(a))
	leader.restart()

	<-published
	require.NoError(t, pub.Flush(context.Background()))
	g := f.awaitFinished("lines", "workers", 60*time.Second)
	stopConsumers()
	digest := f.awaitConverged("lines")

	s := a.verify(t)
	t.Logf("longest time between two acknowledgements %v, between two acks %v; digest %.16s at applied index %d on %d replicas", a.longestGap.Round(time.Millisecond), a.longestAck.Round(time.Millisecond), digest.Digest, digest.AppliedIndex, len(f.full()))
	require.Zero(t, s.refused, "no publish may fail for want of one host of three")
	require.Zero(t, s.unknown, "no outcome may stay unknown while a quorum comes back")
	require.Equal(t, len(lines), s.acknowledged)
	require.Equal(t, len(lines), s.distinct)
	require.Equal(t, uint64(len(lines)), g.Counters.Acked, "the group's own count of acked messages")
}

func progress(a *account) string {
	published, done := a.counts()
	return fmt.Sprintf("%d acknowledged, %d acked", published, done)
}

// awaitAcknowledged waits until so many messages were acknowledged in all, awaitProgress until so many more were.
func awaitAcknowledged(t *testing.T, a *account, n int) {
	t.Helper()
	eventually(t, 60*time.Second, fmt.Sprintf("%d messages are acknowledged", n), func() error {
		if got, _ := a.counts(); got < n {
			return fmt.Errorf("%d are", got)
		}
		return nil
	})
}

func awaitProgress(t *testing.T, a *account, more int) {
	t.Helper()
	got, _ := a.counts()
	awaitAcknowledged(t, a, got+more)
}

// awaitRecovery waits, after a kill, until so many more messages were acknowledged and acked, and prints how long the first
// took: those that were on their way when it happened are not counted.
func awaitRecovery(t *testing.T, a *account, more int) {
	t.Helper()
	const onTheirWay = 64
	killed := time.Now()
	published, done := a.counts()
	var publishes, acks time.Duration
	eventually(t, 60*time.Second, "publishes and acks go on after the kill", func() error {
		p, d := a.counts()
		if publishes == 0 && p > published+onTheirWay {
			publishes = time.Since(killed)
		}
		if acks == 0 && d > done+onTheirWay {
			acks = time.Since(killed)
		}
		if p < published+more || d < done+more {
			return fmt.Errorf("%d acknowledged and %d acked since", p-published, d-done)
		}
		return nil
	})
	t.Logf("publishes went on after %v, acks after %v", publishes.Round(time.Millisecond), acks.Round(time.Millisecond))
}

// awaitAcks waits until so many more messages were acked.
func awaitAcks(t *testing.T, a *account, more int) {
	t.Helper()
	_, before := a.counts()
	eventually(t, 60*time.Second, fmt.Sprintf("%d more messages are acked", more), func() error {
		if _, got := a.counts(); got < before+more {
			return fmt.Errorf("%d are", got-before)
		}
		return nil
	})
}

// publishPaced sends every line asynchronously, at a bounded pace until free is set.
func publishPaced(t *testing.T, c *client.Client, a *account, queue string, lines [][]byte, free *atomic.Bool) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var answers sync.WaitGroup
	began := time.Now()
	for i := 0; i < len(lines); {
		limit := len(lines)
		if !free.Load() {
			<-tick.C
			limit = min(len(lines)*(100-heldLines)/100, int(time.Since(began).Seconds()*pacedLines))
		}
		for ; i < limit; i++ {
			publishOne(c, a, queue, uint64(i+1), lines[i], &answers)
		}
		if t.Failed() {
			break
		}
	}
	answers.Wait()
}

// publishNumbered sends lines with numbers from first on and waits until every one is answered.
func publishNumbered(c *client.Client, a *account, queue string, first uint64, lines [][]byte) {
	var answers sync.WaitGroup
	for i, text := range lines {
		publishOne(c, a, queue, first+uint64(i), text, &answers)
	}
	answers.Wait()
}

func publishOne(c *client.Client, a *account, queue string, id uint64, text []byte, answers *sync.WaitGroup) {
	body := bodyOf(id, text)
	a.sending(id, body)
	future := c.PublishAsync(context.Background(), queue, client.Message{Body: body})
	answers.Add(1)
	go func() {
		defer answers.Done()
		p, _ := future.Wait(context.Background())
		a.answered(id, p)
	}()
}

// consume runs n consumers of one group, each with a client of its own, until the returned function is called. decide, if
// not nil, says how a message ends; by default it is acked.
func consume(f *fleet, a *account, queue, group string, n int, decide func(*client.Delivery) (ending, error)) func() {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range n {
		c := f.client(client.Options{})
		running.Add(1)
		go func() {
			defer running.Done()
			l := &loop{a: a, decide: decide, as: map[string]settling{}}
			err := c.Consume(ctx, queue, group, l.handle, client.ConsumeOptions{
				Concurrency: 4, MaxInFlight: 256, Consumer: fmt.Sprintf("consumer-%d", i+1), OnSettled: l.settled, DrainTimeout: 5 * time.Second, AckTimeout: 10 * time.Second,
			})
			if err != nil {
				f.t.Errorf("consumer %d ended: %v", i+1, err)
			}
		}()
	}
	stop := sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	f.t.Cleanup(stop)
	return stop
}

// loop connects one consumer with the books.
type loop struct {
	a      *account
	decide func(*client.Delivery) (ending, error)

	mu sync.Mutex
	as map[string]settling // by receipt
}

type settling struct {
	turn turn
	want ending
}

func (l *loop) handle(_ context.Context, d *client.Delivery) error {
	n := l.a.received(d)
	var err error
	want := acked
	if l.decide != nil {
		want, err = l.decide(d)
	}
	l.a.settling(n)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.as[d.Receipt] = settling{n, want}
	return err
}

func (l *loop) settled(d *client.Delivery, s client.Settled) {
	l.mu.Lock()
	as, ok := l.as[d.Receipt]
	delete(l.as, d.Receipt)
	l.mu.Unlock()
	if ok {
		l.a.settled(as.turn, as.want, s.Err)
	}
}
