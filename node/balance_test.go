package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
)

// fakeMover is the Raft host of a leader; every attempt to hand over ends with the next error of errs.
type fakeMover struct {
	fakeRaft
	last  queue.Index
	voter bool
	tried int
	errs  chan error
}

func (f *fakeMover) InSync() int { return 2 }
func (f *fakeMover) HandOver(context.Context, queue.ReplicaID) error {
	f.tried++
	return <-f.errs
}
func (f *fakeMover) Voter(queue.ReplicaID) (last, applied queue.Index, ok bool) {
	return f.last, f.last, f.voter
}

// partOf is a reader of partition 1 of two, which has applied something.
type partOf struct {
	*queuetest.Machine
	applied queue.Index
}

func (p partOf) Meta() queue.Meta {
	m := p.Machine.Meta()
	m.Options.Partitions, m.Options.Partition, m.Applied = 2, 1, p.applied
	return m
}

// balancing steps a leader's housekeeper over time.
type balancing struct {
	*testing.T
	k   *housekeeper
	f   *fakeMover
	now time.Time
}

func newBalancing(t *testing.T) *balancing {
	b := &balancing{T: t, k: keeperOf(newFakeFleet()), f: &fakeMover{last: 9_000, voter: true, errs: make(chan error)}, now: time.Now()}
	b.k.raft, b.k.reader, b.k.log = b.f, partOf{queuetest.New(t), 10_000}, zap.NewNop()
	return b
}

// pass lets time pass, and returns whether an attempt is under way.
func (b *balancing) pass(d time.Duration) bool {
	for end := b.now.Add(d); b.now.Before(end); {
		b.now = b.now.Add(housekeepTick)
		b.k.handOver(b.Context(), b.now)
	}
	return b.k.balance.result != nil
}

// end ends the attempt that is under way.
func (b *balancing) end(err error) {
	b.Helper()
	b.f.errs <- err
	b.k.done.Wait()
	b.pass(housekeepTick)
	require.Nil(b, b.k.balance.result)
}

func TestHandOverBacksOff(t *testing.T) {
	b := newBalancing(t)
	require.False(t, b.pass(balanceAfter+levelFor-levelLook), "it has not been level for long")
	require.True(t, b.pass(3*levelLook))
	require.True(t, b.pass(time.Minute), "one attempt at a time, and no round waits for it")
	for pause := balanceEvery; pause < 2*balanceRest; pause *= 2 {
		b.end(errors.New("not taken over"))
		require.False(t, b.pass(min(pause, balanceRest)-time.Second))
		require.True(t, b.pass(levelFor+3*levelLook))
	}
	b.end(nil)
	b.k.follow(b.now)
	require.Zero(t, b.k.balance.pause)
	require.Zero(t, b.k.balance.since)
}

// TestHandOverFromWhoseClockIsRefused: a leader whose own host serves nobody hands over to a replica that serves, whoever's turn it is, and nobody else.
func TestHandOverFromWhoseClockIsRefused(t *testing.T) {
	b := newBalancing(t)
	fleet := b.k.fleet.(*fakeFleet)
	fleet.down[1], fleet.down[2] = true, true // the host whose turn it is serves nobody either
	require.True(t, b.pass(balanceAfter+levelFor+3*levelLook))
	require.Equal(t, queue.ReplicaID(3), b.k.balance.to)
	b.end(nil)

	b = newBalancing(t)
	fleet = b.k.fleet.(*fakeFleet)
	fleet.down[1], fleet.down[2], fleet.down[3] = true, true, true
	require.False(t, b.pass(5*time.Minute), "nobody is better")
}

func TestHandOverOnlyToWhoIsLevel(t *testing.T) {
	for name, spoil := range map[string]func(*balancing){
		"behind":        func(b *balancing) { b.f.last = 10_000 - balanceLag - 1 },
		"no voter":      func(b *balancing) { b.f.voter = false },
		"not served":    func(b *balancing) { b.k.fleet.(*fakeFleet).down[2] = true },
		"its turn here": func(b *balancing) { b.k.self = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBalancing(t)
			spoil(b)
			require.False(t, b.pass(5*time.Minute))
			b = newBalancing(t)
			require.False(t, b.pass(balanceAfter+levelLook))
			spoil(b)
			require.False(t, b.pass(5*time.Minute), "it was level for a moment only")
			require.Zero(t, b.f.tried)
		})
	}
}
