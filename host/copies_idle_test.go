package host

import (
	"testing"
)

// TestIdleShardIsWholeAgain: a replica that comes back to a shard in which nothing is written has on disk what it had, and its leader
// hears so. Else a strict queue would refuse the publish that would tell it.
func TestIdleShardIsWholeAgain(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	shard := f.create(3, "q", 2, 1).Shards[0]
	f.settled(shard)
	f.enqueue(f.leader(shard), shard)
	for range 2 { // each replica is that of a leader that hands over
		back := f.leader(shard).HostID()
		eventually(t, "two copies before", func() bool { return f.leader(shard).InSync(shard) == 2 })
		leader := f.hosts[3-back]
		eventually(t, "nothing is led here", func() bool { return f.hosts[back].Drain(within(t, patience)) == 0 })
		eventually(t, "two copies under the other one", func() bool { return f.leader(shard) == leader && leader.InSync(shard) == 2 })
		f.stop(back)
		eventually(t, "one copy", func() bool { return leader.InSync(shard) == 1 })
		f.start(back)
		eventually(t, "two copies again", func() bool { return leader.InSync(shard) == 2 })
	}
}
