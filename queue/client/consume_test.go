package client_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

// Two consumers work a queue off while the home moves and answers get lost: every message is handled, all are acked.
func TestConsumeFollowsTheHome(t *testing.T) {
	f := fleetWithQueue(t, 3)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	const n = 600
	_, err := c.Publish(ctx, "q", bodies(n)...)
	require.NoError(t, err)
	var lost atomic.Int64
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		return clienttest.Fate{LoseAnswer: c.Procedure == "Ack" && lost.Add(1)%7 == 0}
	})
	var mu sync.Mutex
	seen := map[string]int{}
	var handled atomic.Int64
	var consumers sync.WaitGroup
	for range 2 {
		consumers.Add(1)
		go func() {
			defer consumers.Done()
			err := c.Consume(ctx, "q", "g", func(_ context.Context, d *client.Delivery) error {
				mu.Lock()
				seen[string(d.Body)]++
				mu.Unlock()
				if k := handled.Add(1); k%200 == 0 {
					f.SetHome(uint64(k/200)%3 + 1)
				}
				return nil
			}, client.ConsumeOptions{Concurrency: 4, MaxInFlight: 16, Wait: time.Second})
			if err != nil {
				t.Errorf("consume: %v", err)
			}
		}()
	}
	require.Eventually(t, func() bool { _, acked := f.Outstanding("q", "g"); return acked == n }, 25*time.Second, 5*time.Millisecond)
	stop()
	consumers.Wait()
	require.Len(t, seen, n)
	leased, _ := f.Outstanding("q", "g")
	require.Zero(t, leased)
}

// What a handler returns decides what becomes of the message.
func TestHandlerOutcomes(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	for _, b := range []string{"ack", "nack", "later", "release", "reject"} {
		_, err := c.Publish(ctx, "q", client.Message{Body: []byte(b)})
		require.NoError(t, err)
	}
	var mu sync.Mutex
	attempts := map[string][]uint32{}
	var settled atomic.Int64
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			b := string(d.Body)
			attempts[b] = append(attempts[b], d.Attempt)
			if len(attempts[b]) > 1 {
				return nil
			}
			switch b {
			case "nack":
				return errors.New("no")
			case "later":
				return &client.NackAfter{Delay: time.Second, Err: errors.New("busy")}
			case "release":
				return client.ErrRelease
			case "reject":
				return &client.Reject{Reason: "bad"}
			}
			return nil
		}, client.ConsumeOptions{OnSettled: func(_ *client.Delivery, s client.Settled) {
			if s.Err == nil {
				settled.Add(1)
			}
		}})
	}()
	require.Eventually(t, func() bool { return settled.Load() == 8 }, 30*time.Second, time.Millisecond)
	stop()
	require.NoError(t, <-done)
	require.Equal(t, map[string][]uint32{"ack": {1}, "nack": {1, 2}, "later": {1, 2}, "release": {1, 1}, "reject": {1}}, attempts)
	dead, _, err := c.ListDeadLetters(within(t, clienttest.Patience), "q", "g", 0, 0)
	require.NoError(t, err)
	require.Len(t, dead, 1)
	require.Equal(t, "bad", dead[0].Reason)
}

// Stopping lets the running handler finish and be acked, and gives back what no handler has seen.
func TestConsumeStopsClean(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	_, err := c.Publish(ctx, "q", bodies(5)...)
	require.NoError(t, err)
	started, finish := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(hctx context.Context, d *client.Delivery) error {
			close(started)
			<-finish
			return hctx.Err()
		}, client.ConsumeOptions{MaxInFlight: 5})
	}()
	<-started
	require.Eventually(t, func() bool { leased, _ := f.Outstanding("q", "g"); return leased == 5 }, 30*time.Second, time.Millisecond)
	stop()
	require.Eventually(t, func() bool { leased, _ := f.Outstanding("q", "g"); return leased == 1 }, 30*time.Second, time.Millisecond, "they do not wait for the handler")
	close(finish)
	require.NoError(t, <-done)
	leased, acked := f.Outstanding("q", "g")
	require.Equal(t, []int{0, 1}, []int{leased, acked})
	require.Equal(t, 1, f.Calls("Release"), "four in one call")
	require.Zero(t, f.Waiting("q", "g"))
}

// A lease is lengthened under a slow handler; when it is lost all the same, the handler's context ends.
func TestLeaseUnderHandler(t *testing.T) {
	f := fleetWithQueue(t, 1)
	o := quick(f.Addrs()...)
	clock := newSteppedClock()
	o.Clock = clock
	c := open(t, o)
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	_, err := c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)
	ended := make(chan struct{})
	var once sync.Once
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(hctx context.Context, d *client.Delivery) error {
			<-hctx.Done()
			once.Do(func() { close(ended) }) // the message comes again until the consumer stops
			return hctx.Err()
		}, client.ConsumeOptions{})
	}()
	clock.fire()
	require.Eventually(t, func() bool { return f.Calls("Extend") == 1 }, 30*time.Second, time.Millisecond)
	f.SetHome(1) // a new epoch: the lease is gone
	clock.fire()
	<-ended
	stop()
	require.NoError(t, <-done)
}

// Consume ends with the reason when there is nothing to go on with, and at its client's close.
func TestConsumeEnds(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	h := func(context.Context, *client.Delivery) error { return nil }
	requireCode(t, c.Consume(within(t, clienttest.Patience), "nosuch", "g", h, client.ConsumeOptions{}), code.UnknownQueue, code.EffectNone)
	done := make(chan error, 1)
	go func() { done <- c.Consume(context.Background(), "q", "g", h, client.ConsumeOptions{}) }()
	require.Eventually(t, func() bool { return f.Waiting("q", "g") == 1 }, 30*time.Second, time.Millisecond)
	require.NoError(t, c.Close(context.Background()))
	requireCode(t, <-done, code.ShuttingDown, code.EffectNone)
	require.Eventually(t, func() bool { return f.Waiting("q", "g") == 0 }, 30*time.Second, time.Millisecond)
}

// steppedClock fires the pauses of about one length when told, all others in their time.
type steppedClock struct {
	steps chan time.Time
	step  time.Duration
}

func newSteppedClock() *steppedClock {
	return &steppedClock{steps: make(chan time.Time), step: 15 * time.Second}
}

func (c *steppedClock) Now() time.Time { return time.Now() }

func (c *steppedClock) After(d time.Duration) <-chan time.Time {
	if d <= c.step && d > c.step-5*time.Second {
		return c.steps
	}
	return time.After(d)
}

func (c *steppedClock) fire() { c.steps <- time.Now() }

// A settle that the stream answered with an unknown outcome stays unknown when the call that follows is refused.
func TestUnknownSettleStaysUnknown(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	_, err := c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		switch {
		case c.Procedure == "Ack" && c.N == 1:
			return clienttest.Fate{Err: code.Maybe(code.QuorumLost, nil, "")}
		case c.Procedure == "Ack":
			return clienttest.Fate{Err: code.New(code.StaleOwner, "")}
		}
		return clienttest.Fate{}
	})
	settled := make(chan client.Settled, 1)
	require.NoError(t, c.Consume(ctx, "q", "g", func(context.Context, *client.Delivery) error { return nil }, client.ConsumeOptions{
		OnSettled: func(_ *client.Delivery, s client.Settled) { settled <- s; stop() },
	}))
	s := <-settled
	requireCode(t, s.Err, code.QuorumLost, code.EffectMaybe)
	require.ErrorContains(t, s.Err, code.StaleOwner.String())
}

// A home that refuses and knows no other is not the one to ask next: it may be cut off from those that know.
func TestRefusingHomeIsLeft(t *testing.T) {
	f := fleetWithQueue(t, 2)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	defer stop()
	_, err := c.Publish(ctx, "q", bodies(1)...)
	require.NoError(t, err)
	ds, err := c.Receive(ctx, "q", "g", client.ReceiveOptions{})
	require.NoError(t, err)
	var mu sync.Mutex
	asked := map[string][]uint64{}
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		mu.Lock()
		defer mu.Unlock()
		asked[c.Procedure] = append(asked[c.Procedure], c.Host)
		if c.Procedure == "Ack" && c.N == 1 {
			return clienttest.Fate{Err: code.Maybe(code.QuorumLost, nil, "")}
		}
		return clienttest.Fate{}
	})
	_, err = c.Ack(ctx, "q", "g", ds[0].Receipt)
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 2, 1}, asked["Ack"])

	consumer := open(t, quick(f.Addrs()...))
	done := make(chan error, 1)
	go func() {
		done <- consumer.Consume(ctx, "q", "g", func(context.Context, *client.Delivery) error { return nil }, client.ConsumeOptions{})
	}()
	require.Eventually(t, func() bool { return f.Waiting("q", "g") == 1 }, 30*time.Second, time.Millisecond)
	f.SetHome(0) // nobody knows
	require.Eventually(t, func() bool { return f.Calls("Consume") > 1 }, 30*time.Second, time.Millisecond)
	stop()
	require.NoError(t, <-done)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []uint64{1, 2}, asked["Consume"][:2])
}

// A stop does not wait long for a fleet that takes no release: all that is queued shares one DrainTimeout.
func TestConsumeStopsWithoutFleet(t *testing.T) {
	f := fleetWithQueue(t, 1)
	c := open(t, quick(f.Addrs()...))
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	defer stop()
	const queued = 500 // one after the other, they would take minutes
	_, err := c.Publish(ctx, "q", bodies(queued)...)
	require.NoError(t, err)
	started, finish := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(context.Context, *client.Delivery) error {
			close(started)
			<-finish
			return nil
		}, client.ConsumeOptions{MaxInFlight: queued, DrainTimeout: 300 * time.Millisecond, AckTimeout: 300 * time.Millisecond})
	}()
	<-started
	require.Eventually(t, func() bool { leased, _ := f.Outstanding("q", "g"); return leased == queued }, 30*time.Second, time.Millisecond)
	f.Stop(1)
	stop()
	close(finish)
	clienttest.Ends(t, "each release waits for a time of its own", func() { require.NoError(t, <-done) })
}

// An extend that is not answered does not hold up those of other homes.
func TestExtendsDoNotWaitForEachOther(t *testing.T) {
	f := partitioned(t, 2)
	o := quick(f.Addrs()...)
	clock := newSteppedClock()
	o.Clock = clock
	c := open(t, o)
	ctx, stop := context.WithCancel(within(t, clienttest.Patience))
	defer stop()
	for p := range uint32(2) {
		_, err := c.PublishWith(ctx, "q", client.PublishOptions{Partition: &p}, bodies(1)...)
		require.NoError(t, err)
	}
	started, gate := make(chan struct{}), make(chan struct{})
	f.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "Extend" && c.Host == 2 {
			return clienttest.Fate{Hold: gate}
		}
		return clienttest.Fate{}
	})
	done := make(chan error, 1)
	go func() {
		done <- c.Consume(ctx, "q", "g", func(context.Context, *client.Delivery) error {
			started <- struct{}{}
			<-gate
			return nil
		}, client.ConsumeOptions{Concurrency: 2})
	}()
	<-started
	<-started
	clock.fire()
	require.Eventually(t, func() bool { return f.Calls("Extend") == 2 }, 30*time.Second, time.Millisecond)
	clock.fire()
	require.Eventually(t, func() bool { return f.Calls("Extend") == 3 }, 30*time.Second, time.Millisecond)
	close(gate)
	stop()
	require.NoError(t, <-done)
}
