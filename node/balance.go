package node

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue"
)

// The partitions of a queue share its hosts: each has a full replica whose turn it is to lead, by partition number. Elections
// know nothing of that, so a leader hands over once things are calm. A queue of one partition is led by whoever was elected.
const (
	// balanceAfter is how long a host leads before it hands over: a fleet that has just lost a host, or got it back, is left alone.
	balanceAfter = 3 * time.Second
	// balanceEvery bounds how often one shard tries.
	balanceEvery = 30 * time.Second
)

// balance is what a leader remembers about handing over.
type balance struct {
	since time.Time // when it was first seen to lead
	next  time.Time
}

// leaderMover is the part of the Raft host that hands leadership over; hostRaft is one.
type leaderMover interface {
	HandOver(ctx context.Context, to queue.ReplicaID) error
}

// handOver hands the shard's leadership to the replica whose turn it is.
func (k *housekeeper) handOver(ctx context.Context) {
	now := time.Now()
	if k.balance.since.IsZero() {
		k.balance.since = now
	}
	mover, ok := k.raft.(leaderMover)
	if !ok || now.Sub(k.balance.since) < balanceAfter || now.Before(k.balance.next) {
		return
	}
	k.balance.next = now.Add(balanceEvery)
	to := k.turn()
	if to == 0 || to == k.self || k.raft.InSync() < 2 {
		return
	}
	if err := mover.HandOver(ctx, to); err != nil {
		k.log.Info("leadership not handed over: this host leads on", zap.Uint64("to", uint64(to)), zap.Error(err))
		return
	}
	k.log.Info("leadership handed to the host whose turn it is", zap.Uint64("to", uint64(to)))
}

// turn is the replica that should lead this partition; 0 when that is not there, or the queue has only one.
func (k *housekeeper) turn() queue.ReplicaID {
	o := k.reader.Meta().Options
	replicas := slices.Clone(k.fleet.FullReplicas(k.shard))
	if o.Partitions < 2 || len(replicas) == 0 {
		return 0
	}
	slices.SortFunc(replicas, func(a, b replicaHost) int { return cmp.Compare(a.Host, b.Host) })
	r := replicas[int(o.Partition)%len(replicas)]
	if !k.fleet.Serves(r.Host, k.shard) {
		return 0
	}
	return r.Replica
}
