package host

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/faultnet"
	"github.com/tierq/tierq/queue"
)

// TestSuccessorIsNotDeaf: leadership is never handed to a host that is heard of and hears nothing, nor to a witness.
func TestSuccessorIsNotDeaf(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	net := faultnet.New(1)
	f.tune = func(c *Config) { c.Faults = net }
	f.startAll()
	shard := f.create(1, "q", 2, 1).Shards[0]
	f.settled(shard)
	leader := f.leader(shard)
	run, err := leader.running(shard)
	require.NoError(t, err)
	var other *RaftHost
	for _, h := range f.full(shard) {
		if h != leader {
			other = h
		}
	}
	id, _ := other.SelfReplica(shard)
	eventually(t, "the other full replica may follow", func() bool { return leader.successor(run) == id })

	net.Set(leader.HostID(), other.HostID(), faultnet.Rule{Cut: true})
	deaf := 0
	eventually(t, "it is deaf, and looked at often", func() bool {
		alive, _ := leader.Alive(other.HostID())
		if !alive || leader.peers.Answers(other.HostID()) {
			return false
		}
		if to := leader.successor(run); to != 0 && !leader.peers.Answers(other.HostID()) {
			require.Equal(t, queue.ReplicaID(0), to)
		}
		deaf++
		return deaf >= 50
	})
	net.Heal()
	eventually(t, "it hears again", func() bool { return leader.successor(run) == id })
}
