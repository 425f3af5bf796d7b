// Package faultnet is a broken network for tests: between the hosts of one process, and by direction, it cuts, delays, loses
// and reorders what the Raft transport and the peer API carry. Rules may change at any time; what is random follows a seed.
//
// It stands above TCP, so that one direction can be cut while the other works, which no TCP connection survives for long. What
// a cut of packets does to real connections is for network namespaces to show.
//
// No host has one but in tests: host.Config.Faults.
package faultnet

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/lni/dragonboat/v4/raftpb"
)

// giveUp is how long something waits behind a cut before its connection breaks, as one does whose data are not acknowledged.
const giveUp = 3 * time.Second

var (
	// ErrRefused is a connection that was reset, or not taken.
	ErrRefused = errors.New("faultnet: the connection is refused")
	// ErrCut is a connection that broke after waiting behind a cut.
	ErrCut = errors.New("faultnet: nothing comes through")
	// ErrLost is a chunk, request or answer that was lost.
	ErrLost = errors.New("faultnet: lost")

	errClosed = errors.New("faultnet: closed")
)

// Rule is what happens to what goes one way between two hosts. The zero Rule leaves it alone.
type Rule struct {
	// Cut lets nothing arrive. Raft messages vanish; the rest waits for the end of the cut. After giveUp a
	// connection breaks.
	Cut bool
	// Refuse breaks connections at once, and lets none be made.
	Refuse bool
	// Delay, and up to Jitter more, is how much later everything arrives. Raft messages and chunks stay in order; requests run
	// at the same time anyway.
	Delay, Jitter time.Duration
	// Loss is the probability that a Raft message, a request or an answer is lost, or that a stream of chunks breaks at a chunk.
	Loss float64
	// Reorder is the probability that a Raft message arrives later than its turn. It needs a Delay or Jitter.
	Reorder float64
	// Only, if not nil, makes the rule one for Raft messages of these types, and for nothing else.
	Only func(raftpb.MessageType) bool
}

func (r *Rule) none() bool {
	return !r.Cut && !r.Refuse && r.Delay == 0 && r.Jitter == 0 && r.Loss == 0 && r.Reorder == 0
}

// Entries are the types that carry log entries and their acknowledgement: with a delay of them commits hang, while heartbeats
// keep the leader and reads are confirmed.
func Entries(t raftpb.MessageType) bool { return t == raftpb.Replicate || t == raftpb.ReplicateResp }

// direction is from one host to another.
type direction struct{ from, to uint64 }

// Net is the network of one fleet. Safe for concurrent use.
type Net struct {
	mu      sync.Mutex
	random  *rand.Rand
	rules   map[direction]Rule
	changed chan struct{} // closed and replaced when a rule changes
	lost    int
}

// New returns a network without faults.
func New(seed uint64) *Net {
	return &Net{random: rand.New(rand.NewPCG(seed, 0x6661756c74)), rules: make(map[direction]Rule), changed: make(chan struct{})}
}

// Set replaces the rule of one direction, from now on: what it still holds back comes under a cut too.
func (n *Net) Set(from, to uint64, r Rule) {
	n.Change(func(set func(from, to uint64, r Rule)) { set(from, to, r) })
}

// Both replaces the rules of both directions.
func (n *Net) Both(a, b uint64, r Rule) {
	n.Change(func(set func(from, to uint64, r Rule)) {
		set(a, b, r)
		set(b, a, r)
	})
}

// Heal removes all rules.
func (n *Net) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.rules)
	n.signalLocked()
}

// Change replaces several rules at once.
func (n *Net) Change(f func(set func(from, to uint64, r Rule))) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(func(from, to uint64, r Rule) { n.rules[direction{from, to}] = r })
	n.signalLocked()
}

func (n *Net) signalLocked() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// Lost is how many messages, chunks, requests and answers were lost by chance or to a cut.
func (n *Net) Lost() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost
}

// rule returns a direction's rule, and what is closed when any changes.
func (n *Net) rule(d direction) (Rule, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.rules[d], n.changed
}

// fate decides about one thing under a rule.
func (n *Net) fate(r *Rule) (lost, late bool, delay time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if lost = r.Cut || r.Loss > 0 && n.random.Float64() < r.Loss; lost {
		n.lost++
		return lost, false, 0
	}
	delay = r.Delay
	if r.Jitter > 0 {
		delay += time.Duration(n.random.Int64N(int64(r.Jitter)))
	}
	if late = r.Reorder > 0 && n.random.Float64() < r.Reorder; late {
		delay += time.Duration(n.random.Int64N(int64(r.Delay+r.Jitter) + 1))
	}
	return false, late, delay
}

// carry waits as long as something takes in a direction, and fails if it does not arrive. ctx ends the wait.
func (n *Net) carry(ctx context.Context, d direction, mayLose bool) error {
	r, _ := n.rule(d)
	switch {
	case r.Only != nil:
		return nil
	case r.Refuse:
		return ErrRefused
	case r.Cut:
		return n.passable(ctx, d)
	case r.none():
		return nil
	}
	if !mayLose {
		r.Loss = 0
	}
	lost, _, delay := n.fate(&r)
	if lost {
		return errors.Join(ErrLost, pause(ctx, giveUp))
	}
	if err := pause(ctx, delay); err != nil {
		return err
	}
	return n.passable(ctx, d)
}

// passable waits for the end of a cut, giveUp at most.
func (n *Net) passable(ctx context.Context, d direction) error {
	timer := time.NewTimer(giveUp)
	defer timer.Stop()
	for {
		r, changed := n.rule(d)
		switch {
		case r.Only != nil || !r.Cut && !r.Refuse:
			return nil
		case r.Refuse:
			return ErrRefused
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return ErrCut
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
