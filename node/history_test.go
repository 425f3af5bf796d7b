package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/faultnet"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

var (
	historyFor  = flag.Duration("history", 3*time.Second, "how long TestHistories breaks the network")
	historySeed = flag.Uint64("history-seed", 20261130, "seed of TestHistories; 0: a fresh one")
)

// outcome is what a call says of its effect.
type outcome uint8

const (
	done outcome = iota
	none
	unknown // it may take effect at any time, or never
)

func outcomeOf(err error) outcome {
	var e *code.Error
	switch {
	case err == nil:
		return done
	case errors.As(err, &e) && e.Effect == code.EffectNone:
		return none
	}
	return unknown
}

// publishCall is one call for one message, by what makes it that message: its producer and seq, or its dedup id.
type publishCall struct {
	message string
	lookup  bool // asks where it is, and publishes nothing
}

type publishAnswer struct {
	outcome   outcome
	address   queue.Address // of a lookup, 0: it is not stored
	duplicate bool
}

// The state of a message: 0 is not stored, anAddress stored where nobody was told yet, else its address.
const anAddress = ^queue.Address(0)

// publishModel is a register that is written once: the first publish that takes effect gives the message its address, and every later one
// is told that one. A publish whose outcome is unknown may have been the first.
var publishModel = porcupine.NondeterministicModel{
	Partition: byKey(func(in any) any { return in.(publishCall).message }),
	Init:      func() []any { return []any{queue.Address(0)} },
	Step: func(state, in, out any) []any {
		return publishStep(state.(queue.Address), in.(publishCall), out.(publishAnswer))
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %+v", in, out) },
}

func publishStep(at queue.Address, in publishCall, a publishAnswer) []any {
	told := func() []any { // the call was told the address of a message that is stored
		if at == a.address || at == anAddress {
			return []any{a.address}
		}
		return nil
	}
	switch {
	case a.outcome == none || in.lookup && a.outcome == unknown:
		return []any{at}
	case a.outcome == unknown && at == 0:
		return []any{at, anAddress}
	case a.outcome == unknown:
		return []any{at}
	case in.lookup && a.address == 0 || !in.lookup && !a.duplicate:
		if at != 0 {
			return nil
		}
		return []any{a.address}
	}
	return told()
}

// ackCall is an ack of a message, or its hand-out.
type ackCall struct {
	address queue.Address
	ack     bool
}

// ackModel: a message is handed out until it is acked, and never after.
var ackModel = porcupine.NondeterministicModel{
	Partition: byKey(func(in any) any { return in.(ackCall).address }),
	Init:      func() []any { return []any{false} },
	Step: func(state, in, out any) []any {
		return ackStep(state.(bool), in.(ackCall), out.(outcome))
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %v", in, out) },
}

func ackStep(acked bool, in ackCall, o outcome) []any {
	switch {
	case !in.ack && acked:
		return nil
	case !in.ack || o == none:
		return []any{acked}
	case o == unknown && !acked:
		return []any{false, true}
	}
	return []any{true}
}

// byKey checks the calls of each key alone.
func byKey(key func(in any) any) func([]porcupine.Operation) [][]porcupine.Operation {
	return func(ops []porcupine.Operation) (parts [][]porcupine.Operation) {
		at := map[any]int{}
		for _, op := range ops {
			k := key(op.Input)
			i, ok := at[k]
			if !ok {
				i = len(parts)
				at[k], parts = i, append(parts, nil)
			}
			parts[i] = append(parts[i], op)
		}
		return parts
	}
}

// TestHistoryModels: the models refuse what they are there to find.
func TestHistoryModels(t *testing.T) {
	type op = porcupine.Operation
	at := func(i int64, in, out any) op { return op{Input: in, Output: out, Call: 10 * i, Return: 10*i + 5} }
	m, ask := publishCall{message: "m"}, publishCall{message: "m", lookup: true}
	never := func(o op) op { o.Return = 1 << 60; return o }
	for name, c := range map[string]struct {
		model porcupine.NondeterministicModel
		ops   []op
		ok    bool
	}{
		"repeat":                  {publishModel, []op{at(0, m, publishAnswer{address: 7}), at(1, m, publishAnswer{address: 7, duplicate: true})}, true},
		"stored twice":            {publishModel, []op{at(0, m, publishAnswer{address: 7}), at(1, m, publishAnswer{address: 8})}, false},
		"another address":         {publishModel, []op{at(0, m, publishAnswer{address: 7}), at(1, m, publishAnswer{address: 8, duplicate: true})}, false},
		"a duplicate of nothing":  {publishModel, []op{at(0, m, publishAnswer{outcome: none}), at(1, m, publishAnswer{address: 8, duplicate: true})}, false},
		"the unknown one was it":  {publishModel, []op{never(at(0, m, publishAnswer{outcome: unknown})), at(1, m, publishAnswer{address: 8, duplicate: true})}, true},
		"it came later":           {publishModel, []op{never(at(0, m, publishAnswer{outcome: unknown})), at(1, ask, publishAnswer{}), at(2, ask, publishAnswer{address: 8})}, true},
		"lost":                    {publishModel, []op{at(0, m, publishAnswer{address: 7}), at(1, ask, publishAnswer{})}, false},
		"again before the ack":    {ackModel, []op{at(0, ackCall{1, false}, done), at(1, ackCall{1, false}, done), at(2, ackCall{1, true}, done)}, true},
		"again after the ack":     {ackModel, []op{at(0, ackCall{1, true}, done), at(1, ackCall{1, false}, done)}, false},
		"again after a refused":   {ackModel, []op{at(0, ackCall{1, true}, none), at(1, ackCall{1, false}, done)}, true},
		"again after an unknown":  {ackModel, []op{never(at(0, ackCall{1, true}, unknown)), at(1, ackCall{1, false}, done)}, true},
		"an unknown one, and not": {ackModel, []op{never(at(0, ackCall{1, true}, unknown)), at(1, ackCall{1, true}, done), at(2, ackCall{1, false}, done)}, false},
	} {
		require.Equal(t, c.ok, porcupine.CheckOperations(c.model.ToModel(), c.ops), name)
	}
}

// TestHistories publishes, repeats, looks up, receives and acks at all hosts at once, while cuts, delays and losses come and go, and
// checks that what was answered has an order in which it is right, and that the account is whole.
func TestHistories(t *testing.T) {
	t.Parallel()
	seed := *historySeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (-history-seed)", seed)
	f := openFaultFleet(t, layoutOf{full: 3}, *historyFor+90*time.Second)
	f.group("g", f.nodes[0])
	h := &history{f: f, begun: time.Now(), acked: map[string]queue.Address{}}
	for i := range f.full() {
		h.callers = append(h.callers, tierqv1connect.NewQueueServiceClient(http.DefaultClient, "http://"+f.nodes[i].APIAddr().String()))
	}
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	var working sync.WaitGroup
	for i := range uint64(6) {
		working.Go(func() { h.produce(ctx, i+1, rand.New(rand.NewPCG(seed, i))) })
	}
	for i := range f.full() {
		working.Go(func() { h.consume(ctx, i) })
	}
	f.breakFor(*historyFor, rand.New(rand.NewPCG(seed, 99)))
	f.awaitHealthy()
	h.stopped.Store(true)
	h.drain()
	cancel()
	working.Wait()
	h.check(t)
	f.sameState()
}

// breakFor breaks the network in one way after the other, and leaves it whole.
func (f *faultFleet) breakFor(d time.Duration, random *rand.Rand) {
	ctx, cancel := context.WithTimeout(f.ctx, d)
	defer cancel()
	for ctx.Err() == nil {
		a := f.configs[random.IntN(len(f.configs))].Host
		others := f.others(a)
		b := others[random.IntN(len(others))]
		bad := faultnet.Rule{Delay: 2 * time.Millisecond, Jitter: time.Duration(random.IntN(60)) * time.Millisecond, Loss: 0.05, Reorder: 0.1}
		switch random.IntN(7) {
		case 0:
			f.net.Set(a, b, faultnet.Rule{Cut: true})
		case 1:
			f.net.Both(a, b, faultnet.Rule{Cut: true})
		case 2:
			f.deaf(a, faultnet.Rule{Cut: true})
		case 3:
			f.mute(a, faultnet.Rule{Cut: true})
		case 4:
			f.deaf(a, faultnet.Rule{Refuse: true})
			f.mute(a, faultnet.Rule{Refuse: true})
		case 5:
			f.everywhere(bad)
		case 6:
			f.everywhere(bad)
			f.deaf(a, faultnet.Rule{Cut: true})
		}
		pause(ctx, time.Duration(200+random.IntN(700))*time.Millisecond)
		if random.IntN(2) == 0 {
			f.net.Heal()
			pause(ctx, time.Duration(random.IntN(500))*time.Millisecond)
		}
	}
	f.net.Heal()
}

// history is what the clients of one run saw.
type history struct {
	f       *faultFleet
	begun   time.Time
	callers []tierqv1connect.QueueServiceClient // by host
	stopped atomic.Bool

	mu        sync.Mutex
	publishes []porcupine.Operation
	acks      []porcupine.Operation
	acked     map[string]queue.Address // acknowledged publishes
	outcomes  [2][3]int                // of publishes and acks
	again     int                      // told that it is a duplicate
}

// note adds one call, which began at a time and has just returned, unless its outcome is unknown.
func (h *history) note(to *[]porcupine.Operation, begun time.Time, in, out any, o outcome) {
	end := time.Since(h.begun).Nanoseconds()
	if o == unknown {
		end = 1 << 60
	}
	*to = append(*to, porcupine.Operation{Input: in, Output: out, Call: begun.Sub(h.begun).Nanoseconds(), Return: end})
}

// callTime is how long a call may take.
const callTime = 400 * time.Millisecond

// produce publishes messages under a producer's seqs, or dedup ids, each several times, at two hosts at once, and asks for them.
func (h *history) produce(ctx context.Context, producer uint64, random *rand.Rand) {
	for seq := uint64(1); !h.stopped.Load() && ctx.Err() == nil; seq++ {
		m := &tierqv1.PublishRequest{Queue: "q", Messages: []*tierqv1.OutMessage{{Body: fmt.Appendf(nil, "%d/%d", producer, seq)}}}
		dedup := producer%2 == 0
		if dedup {
			m.Messages[0].DedupId = m.Messages[0].Body
		} else {
			m.ProducerId, m.Messages[0].Seq, m.Low = producer, seq, seq
		}
		var twice sync.WaitGroup
		for range 2 {
			at, then := random.IntN(3), random.IntN(3)
			twice.Go(func() {
				h.publish(ctx, at, m)
				h.publish(ctx, then, m)
			})
		}
		twice.Wait()
		if !dedup {
			h.lookup(ctx, random.IntN(3), string(m.Messages[0].Body), m.ProducerId, seq)
		}
		pause(ctx, 5*time.Millisecond)
	}
}

// publish calls a host's API, which forwards to the leader's host.
func (h *history) publish(ctx context.Context, at int, m *tierqv1.PublishRequest) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	begun := time.Now()
	resp, err := h.callers[at].Publish(ctx, connect.NewRequest(m))
	var a publishAnswer
	switch {
	case err != nil:
		a.outcome = wireOutcome(err)
	case resp.Msg.Results[0].Code != 0:
		a.outcome = none
	default:
		a.address, a.duplicate = queue.Address(resp.Msg.Results[0].Address), resp.Msg.Results[0].Duplicate
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	message := string(m.Messages[0].Body)
	h.outcomes[0][a.outcome]++
	if a.duplicate {
		h.again++
	}
	h.note(&h.publishes, begun, publishCall{message: message}, a, a.outcome)
	if a.outcome == done {
		h.acked[message] = a.address
	}
}

// wireOutcome reads the effect from an error of the API; one without a detail says nothing.
func wireOutcome(err error) outcome {
	var ce *connect.Error
	if errors.As(err, &ce) {
		for _, d := range ce.Details() {
			v, err := d.Value()
			if e, ok := v.(*tierqv1.ErrorDetail); err == nil && ok && e.Effect == tierqv1.Effect_EFFECT_NONE {
				return none
			}
		}
	}
	return unknown
}

func (h *history) lookup(ctx context.Context, at int, message string, producer, seq uint64) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	begun := time.Now()
	found, _, err := h.f.nodes[at].LookupPublish(ctx, api.LookupPublish{
		Queue: "q", Producer: queue.Producer{Kind: queue.ProducerClient, ID: producer}, Seq: queue.Seq(seq),
	})
	a := publishAnswer{address: found.Address}
	if err != nil || found.Address == 0 && found.Low > queue.Seq(seq) {
		a.outcome = none
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.note(&h.publishes, begun, publishCall{message, true}, a, a.outcome)
}

// consume receives at a host and acks most of what it gets there; the rest comes again.
func (h *history) consume(ctx context.Context, at int) {
	n := h.f.nodes[at]
	lease := time.Second
	for round := 0; ctx.Err() == nil; round++ {
		call, cancel := context.WithTimeout(ctx, callTime)
		begun := time.Now()
		ds, _, err := n.Receive(call, api.Receive{Queue: "q", Group: "g", Max: 8, MaxBytes: 1 << 20, Wait: 100 * time.Millisecond, Lease: &lease})
		cancel()
		if err != nil || len(ds) == 0 {
			pause(ctx, 10*time.Millisecond)
			continue
		}
		h.mu.Lock()
		for _, d := range ds {
			h.note(&h.acks, begun, ackCall{d.Message.Address, false}, done, done)
		}
		h.mu.Unlock()
		if round%5 != 4 || h.stopped.Load() {
			h.ack(ctx, n, ds)
		}
	}
}

func (h *history) ack(ctx context.Context, n *Node, ds []api.Delivery) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	s := api.Settle{Kind: api.SettleAck, Queue: "q", Group: "g"}
	for _, d := range ds {
		s.Receipts = append(s.Receipts, d.Receipt)
	}
	begun := time.Now()
	res, err := n.Settle(ctx, s)
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, d := range ds {
		o := outcomeOf(err)
		if err == nil {
			o = outcomeOf(res[i].Err)
		}
		h.outcomes[1][o]++
		h.note(&h.acks, begun, ackCall{d.Message.Address, true}, o, o)
	}
}

// drain waits until nothing is left to deliver anywhere.
func (h *history) drain() {
	h.f.Helper()
	h.f.eventually("everything is finished", func() bool {
		for _, n := range h.f.full() {
			d, err := n.desk(h.f.shard)
			if err != nil {
				return false
			}
			if g, ok := d.reader.GroupByName("g"); !ok || g.Counters.Unfinished > 0 {
				return false
			}
		}
		return true
	})
}

// check is the account, and the order of what was answered.
func (h *history) check(t *testing.T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delivered := map[queue.Address]bool{}
	for _, op := range h.acks {
		if in := op.Input.(ackCall); !in.ack {
			delivered[in.address] = true
		}
	}
	d, err := h.f.full()[0].desk(h.f.shard)
	require.NoError(t, err)
	g, _ := d.reader.GroupByName("g")
	finished := map[queue.Address]string{}
	lost := 0
	for message, at := range h.acked {
		require.Empty(t, finished[at], "%s and another message have address %d", message, at)
		finished[at] = message
		if !delivered[at] && g.Counters.Dead == 0 {
			lost++
		}
	}
	t.Logf("account: acknowledged %d, assigned %d, delivered %d, acked %d, dead %d, lost %d; calls done, refused, unknown: publish %v (%d again), ack %v; lost on the network %d",
		len(h.acked), g.Counters.Assigned, len(delivered), g.Counters.Acked, g.Counters.Dead, lost, h.outcomes[0], h.again, h.outcomes[1], h.f.net.Lost())
	require.Zero(t, lost)
	require.Equal(t, g.Counters.Assigned, g.Counters.Acked+g.Counters.Dead, "%+v", g.Counters)
	for name, c := range map[string]struct {
		model porcupine.NondeterministicModel
		ops   []porcupine.Operation
	}{"publishes": {publishModel, h.publishes}, "acks": {ackModel, h.acks}} {
		for _, part := range c.model.Partition(c.ops) {
			if r := porcupine.CheckOperationsTimeout(c.model.ToModel(), part, 20*time.Second); r != porcupine.Ok {
				slices.SortFunc(part, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
				for _, op := range part {
					t.Logf("%10.3f .. %10.3f ms  %s", float64(op.Call)/1e6, float64(op.Return)/1e6, c.model.DescribeOperation(op.Input, op.Output))
				}
				t.Fatalf("%s: %v: no order of these calls is right", name, r)
			}
		}
	}
}
