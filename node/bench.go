package node

import (
	"context"
	"slices"
	"time"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

func nowSince(n *Node) float64 { return time.Since(n.started).Seconds() }

// BenchPropose implements api.Backend: a bare loop of Enqueue commands at the leader's host, without the API and the
// batcher, for `tierq bench` to set its figures against. It stores real messages in the queue.
func (n *Node) BenchPropose(ctx context.Context, r api.BenchPropose) (api.BenchResult, error) {
	_, d, err := n.deskOf(ctx, r.Queue, nil)
	if err != nil {
		return api.BenchResult{}, err
	}
	if leader, host, _, ok := d.raft.Leader(); ok && leader != d.self {
		return api.BenchResult{}, n.elsewhere(host, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone})
	}
	if err := d.configure(ctx); err != nil {
		return api.BenchResult{}, err
	}
	p := queue.Publish{Messages: make([]queue.Message, r.Batch)}
	body := make([]byte, r.MessageBytes)
	for i := range p.Messages {
		p.Messages[i].Body = body
	}
	raw, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: d.raft.Stamp(), Publishes: []queue.Publish{p}})
	if err != nil {
		return api.BenchResult{}, err
	}
	return benchLoop(ctx, d, raw, r)
}

// benchLoop keeps InFlight commands on their way for Duration.
func benchLoop(ctx context.Context, d *desk, raw []byte, r api.BenchPropose) (api.BenchResult, error) {
	type outcome struct {
		took time.Duration
		err  error
	}
	outcomes := make(chan outcome, r.InFlight)
	send := func() {
		began := time.Now()
		d.raft.ProposeAsync(raw, proposeTimeout, func(_ queue.Result, _ int, err error) { outcomes <- outcome{time.Since(began), err} })
	}
	began := time.Now()
	var took []time.Duration
	var failed error
	inFlight := 0
	for ; inFlight < r.InFlight; inFlight++ {
		send()
	}
	for inFlight > 0 {
		o := <-outcomes
		inFlight--
		if o.err != nil {
			failed = o.err
			continue
		}
		took = append(took, o.took)
		if failed == nil && ctx.Err() == nil && time.Since(began) < r.Duration {
			send()
			inFlight++
		}
	}
	if failed != nil {
		return api.BenchResult{}, failed
	}
	elapsed := time.Since(began)
	slices.Sort(took)
	return api.BenchResult{
		Commands: len(took), Messages: len(took) * r.Batch, Elapsed: elapsed, P50: took[len(took)/2], P99: took[len(took)*99/100],
	}, nil
}
