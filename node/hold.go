package node

import (
	"context"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// leaderHold is for how long publishes are held once one has found its partition without a leader: an election takes a second at most where a
// quorum is. A caller with less time waits for half of it, so that it still hears why.
const leaderHold = 1500 * time.Millisecond

// leaderlessAgain is when publishes are held anew: nobody says that a leader was silent for a while and is back.
const leaderlessAgain = time.Minute

// awaitLeader returns the replica that leads a desk's shard, and its host. While none is known, or only one whose host is silent, it waits for
// another one, and then fails with NO_LEADER: a client that repeats meanwhile would learn later of it. Once leaderHold is over nothing is held
// until there is a leader again: who asks a host that is cut off should ask another one at once. What is held is bounded as what waits for its
// turn is; size is what the caller's publish adds to it.
func (n *Node) awaitLeader(ctx context.Context, d *desk, size int) (leader queue.ReplicaID, host uint64, err error) {
	for first := true; ; first = false {
		changed := n.changed()
		leader, host, _, ok := d.raft.Leader()
		if ok && (leader == d.self || n.Alive(host)) {
			d.heardOfLeader()
			return leader, host, nil
		}
		if first {
			held := d.held.Add(int64(size))
			defer d.held.Add(-int64(size))
			wait := d.mayHold()
			if held > queuedBytes || wait <= 0 {
				return 0, 0, noLeaderYet()
			}
			if end, ok := ctx.Deadline(); ok {
				wait = min(wait, time.Until(end)/2)
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, wait)
			defer cancel()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, 0, noLeaderYet()
		}
	}
}

// mayHold is how much longer publishes are held that find no leader, as this one does.
func (d *desk) mayHold() time.Duration {
	now := int64(d.boot())
	since := d.leaderless.Load()
	if since == 0 || time.Duration(now-since) > leaderlessAgain {
		d.leaderless.CompareAndSwap(since, max(now, 1))
		return d.hold
	}
	return d.hold - time.Duration(now-since)
}

func (d *desk) heardOfLeader() {
	if d.leaderless.Load() != 0 {
		d.leaderless.Store(0)
	}
}

func noLeaderYet() error {
	return &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 100}
}
