package node

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// fakeLog takes proposals and lets the test decide when and how each is answered.
type fakeLog struct {
	mu        sync.Mutex
	cond      *sync.Cond
	proposals []*fakeProposal
}

type fakeProposal struct {
	cmd  *queue.Enqueue
	done func(queue.Result, int, error)
}

func newFakeLog() *fakeLog {
	f := &fakeLog{}
	f.cond = sync.NewCond(&f.mu)
	return f
}

func (f *fakeLog) propose(raw []byte, _ time.Duration, done func(queue.Result, int, error)) {
	c, err := queue.DecodeCommand(append([]byte(nil), raw...))
	if err != nil {
		panic(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.proposals = append(f.proposals, &fakeProposal{c.(*queue.Enqueue), done})
	f.cond.Broadcast()
}

// wait returns the nth proposal once it is there.
func (f *fakeLog) wait(n int) *fakeProposal {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.proposals) < n {
		f.cond.Wait()
	}
	return f.proposals[n-1]
}

func (p *fakeProposal) answer(first queue.Address) {
	res := queue.Result{Code: code.OK, Index: 7}
	for _, pub := range p.cmd.Publishes {
		pr := queue.PublishResult{Code: code.OK}
		for range pub.Messages {
			pr.Messages = append(pr.Messages, queue.MessageResult{Code: code.OK, Address: first})
			first++
		}
		res.Publishes = append(res.Publishes, pr)
	}
	p.done(res, 2, nil)
}

func publishOf(body string) queue.Publish {
	return queue.Publish{Messages: []queue.Message{{Body: []byte(body)}}}
}

func newTestBatcher(f *fakeLog) *batcher {
	return newBatcher(f.propose, func() queue.Stamp { return 1000 }, time.Second, newMetrics(prometheus.NewRegistry()))
}

func TestBatcherFillsWhileInFlight(t *testing.T) {
	f := newFakeLog()
	b := newTestBatcher(f)
	var wg sync.WaitGroup
	got := make([]queue.Address, 3)
	send := func(i int) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			out := b.Publish(context.Background(), publishOf("m"), nil, nil, nil)
			require.NoError(t, out.err)
			require.Equal(t, 2, out.copies)
			got[i] = out.result.Messages[0].Address
		}()
	}
	send(0)
	first := f.wait(1)
	send(1)
	send(2)
	require.Eventually(t, func() bool { b.mu.Lock(); defer b.mu.Unlock(); return len(b.waiting) == 2 }, 30*time.Second, time.Millisecond)
	first.answer(10)
	second := f.wait(2)
	require.Len(t, second.cmd.Publishes, 2, "what came while the first was in flight shares the next proposal")
	second.answer(20)
	wg.Wait()
	require.Equal(t, queue.Address(10), got[0])
	require.ElementsMatch(t, []queue.Address{20, 21}, got[1:])
}

func TestBatcherDeadlines(t *testing.T) {
	f := newFakeLog()
	b := newTestBatcher(f)
	ctx, cancel := context.WithCancel(context.Background())
	errs := make(chan error, 2)
	go func() { errs <- b.Publish(ctx, publishOf("proposed"), nil, nil, nil).err }()
	p := f.wait(1)
	go func() { errs <- b.Publish(ctx, publishOf("waiting"), nil, nil, nil).err }()
	require.Eventually(t, func() bool { b.mu.Lock(); defer b.mu.Unlock(); return len(b.waiting) == 1 }, 30*time.Second, time.Millisecond)
	cancel()
	var effects []code.Effect
	for range 2 {
		err := <-errs
		effects = append(effects, err.(*code.Error).Effect)
	}
	require.ElementsMatch(t, []code.Effect{code.EffectMaybe, code.EffectNone}, effects, "the proposed one is unknown, the waiting one had no effect")
	p.answer(1)
	b.mu.Lock()
	defer b.mu.Unlock()
	require.Zero(t, b.bytes)
	require.Zero(t, b.messages)
}

func TestBatcherDelaysAreFromTheStamp(t *testing.T) {
	f := newFakeLog()
	b := newTestBatcher(f)
	go func() {
		_ = b.Publish(context.Background(), publishOf("m"), []time.Duration{5 * time.Second}, []time.Duration{time.Second}, nil)
	}()
	p := f.wait(1)
	m := p.cmd.Publishes[0].Messages[0]
	require.Equal(t, queue.Stamp(6000), m.VisibleAt)
	require.Equal(t, queue.Stamp(7000), m.ExpiresAt)
	p.answer(1)
}

func TestBatcherFailures(t *testing.T) {
	f := newFakeLog()
	b := newTestBatcher(f)
	errs := make(chan error, 1)
	publish := func() { errs <- b.Publish(context.Background(), publishOf("m"), nil, nil, nil).err }
	go publish()
	f.wait(1).done(queue.Result{}, 0, code.Maybe(code.QuorumLost, nil, "timeout"))
	require.Equal(t, code.EffectMaybe, (<-errs).(*code.Error).Effect)
	go publish()
	f.wait(2).done(queue.Result{Code: code.Unknown}, 2, nil)
	require.Equal(t, code.EffectMaybe, (<-errs).(*code.Error).Effect)
	go publish()
	f.wait(3).done(queue.Result{Code: code.QueueRetired}, 2, nil)
	require.Equal(t, code.QueueRetired, (<-errs).(*code.Error).Code)
	b.Close()
	publish()
	require.Equal(t, code.NoLeader, (<-errs).(*code.Error).Code)
}

// TestBatcherRefusesWithoutAClock: with a refused clock a time to live would end in 1970.
func TestBatcherRefusesWithoutAClock(t *testing.T) {
	f := newFakeLog()
	stamp := queue.Stamp(0)
	b := newBatcher(f.propose, func() queue.Stamp { return stamp }, time.Second, newMetrics(prometheus.NewRegistry()))
	out := b.Publish(context.Background(), publishOf("m"), nil, []time.Duration{time.Second}, nil)
	require.Equal(t, code.ClockSkew, out.err.(*code.Error).Code)
	require.Equal(t, code.EffectNone, out.err.(*code.Error).Effect)
	stamp = 1000
	done := make(chan publishOutcome, 1)
	go func() { done <- b.Publish(context.Background(), publishOf("m"), nil, nil, nil) }()
	f.wait(1).answer(5)
	require.Equal(t, queue.Address(5), (<-done).result.Messages[0].Address)
}
