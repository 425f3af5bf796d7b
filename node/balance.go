package node

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
)

// The partitions of a queue share its hosts: each has a full replica whose turn it is to lead, by partition number. Elections
// know nothing of that, so a leader hands over once things are calm. Queues of one partition are handed over from a host that leads at least two
// shards more than another one that could.
const (
	// balanceAfter is how long a host leads before it hands over: a fleet that has just lost a host, or got it back, is left alone.
	balanceAfter = 3 * time.Second
	// balanceEvery bounds how often one shard tries. Every failure doubles it, up to balanceRest: publishes are refused while a
	// leader hands over, so that a target that cannot take over must not be asked for ever.
	balanceEvery = 30 * time.Second
	balanceRest  = 10 * time.Minute
	// levelFor is how long the target must have been seen to be level, looked at every levelLook: it has at most balanceLag
	// entries less than this host.
	levelFor   = 3 * time.Second
	levelLook  = time.Second
	balanceLag = 1024
)

// balance is what a leader remembers about handing over.
type balance struct {
	since  time.Time // when it was first seen to lead
	next   time.Time
	pause  time.Duration // after the last failure; 0: none
	level  time.Time     // since when to is seen to be level; zero: it is not
	to     queue.ReplicaID
	result chan error // of the attempt that is under way; nil: none is
}

// leaderMover is the part of the Raft host that hands leadership over; hostRaft is one.
type leaderMover interface {
	HandOver(ctx context.Context, to queue.ReplicaID) error
	// Voter returns the last entry and the applied index that a full replica's host has reported of it last; false if it has
	// not started, has no vote, or was not reported.
	Voter(to queue.ReplicaID) (last, applied queue.Index, ok bool)
}

// handOver hands the shard's leadership to the replica whose turn it is. It does not wait for that.
func (k *housekeeper) handOver(ctx context.Context, now time.Time) {
	b := &k.balance
	if b.since.IsZero() {
		b.since = now
	}
	if b.result != nil {
		k.handedOver(now)
		return
	}
	mover, ok := k.raft.(leaderMover)
	if !ok || now.Sub(b.since) < balanceAfter || now.Before(b.next) {
		return
	}
	switch to := k.turn(); {
	case to == 0 || to == k.self || k.raft.InSync() < 2:
		b.level, b.next = time.Time{}, now.Add(balanceEvery)
	case !k.level(mover, to):
		b.level, b.next = time.Time{}, now.Add(levelLook)
	case b.level.IsZero() || b.to != to:
		b.level, b.to, b.next = now, to, now.Add(levelLook)
	case now.Sub(b.level) < levelFor:
		b.next = now.Add(levelLook)
	default:
		k.beginHandOver(ctx, mover)
	}
}

// follow forgets what is only true of a leader.
func (k *housekeeper) follow(now time.Time) {
	if k.balance.result != nil {
		k.handedOver(now)
	}
	k.balance = balance{to: k.balance.to, result: k.balance.result, pause: k.balance.pause}
}

// level says whether a replica would lead at once: it votes, and has nearly all that this one has.
func (k *housekeeper) level(mover leaderMover, to queue.ReplicaID) bool {
	last, applied, ok := mover.Voter(to)
	return ok && min(last, applied)+balanceLag >= k.reader.Meta().Applied
}

// beginHandOver asks for the transfer beside the housekeeper, which has homes to replace. ctx ends with the desk.
func (k *housekeeper) beginHandOver(ctx context.Context, mover leaderMover) {
	to, result := k.balance.to, make(chan error, 1)
	k.balance.result = result
	k.done.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, proposeTimeout)
		defer cancel()
		result <- mover.HandOver(ctx, to)
	})
}

// handedOver takes the outcome of an attempt when it is there.
func (k *housekeeper) handedOver(now time.Time) {
	b := &k.balance
	select {
	case err := <-b.result:
		b.result, b.level = nil, time.Time{}
		if err != nil {
			b.pause = min(max(2*b.pause, balanceEvery), balanceRest)
			b.next = now.Add(b.pause)
			k.log.Info("leadership not handed over: this host leads on", zap.Uint64("to", uint64(b.to)), zap.Duration("again_in", b.pause), zap.Error(err))
			return
		}
		b.pause, b.next = 0, now.Add(balanceEvery)
		k.log.Info("leadership handed to the host whose turn it is", event.Is("leader-moved"), zap.Uint64("to", uint64(b.to)))
	default:
	}
}

// turn is the replica that should lead this partition; 0 when that is not there, or whoever leads may go on.
func (k *housekeeper) turn() queue.ReplicaID {
	o := k.reader.Meta().Options
	replicas := slices.Clone(k.fleet.FullReplicas(k.shard))
	replicas = slices.DeleteFunc(replicas, func(r replicaHost) bool { return !k.settled(r.Replica) })
	if !k.fleet.Serves(k.host, k.shard) { // its clock is refused, so nothing is published here: any other one is better
		for _, r := range replicas {
			if r.Host != k.host && k.fleet.Serves(r.Host, k.shard) {
				return r.Replica
			}
		}
		return 0
	}
	if o.Partitions < 2 {
		if s, ok := k.fleet.(leaderSpreader); ok {
			return s.LeaderFor(k.shard)
		}
		return 0
	}
	if len(replicas) == 0 {
		return 0
	}
	slices.SortFunc(replicas, func(a, b replicaHost) int { return cmp.Compare(a.Host, b.Host) })
	r := replicas[int(o.Partition)%len(replicas)]
	if !k.fleet.Serves(r.Host, k.shard) {
		return 0
	}
	return r.Replica
}
