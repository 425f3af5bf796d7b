package host

import (
	"context"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/host/freeport"
)

func TestTargetRoundTrip(t *testing.T) {
	require.Equal(t, "74696572-7100-8000-8000-000000000007", Target(7))
	require.Equal(t, "74696572-7100-800f-8fff-ffffffffffff", Target(1<<64-1))
	valid := (&config.NodeHostConfig{Expert: config.ExpertConfig{NodeRegistryFactory: NewRegistry().Factory()}}).GetTargetValidator()
	rapid.Check(t, func(t *rapid.T) {
		hostID := rapid.Uint64Min(1).Draw(t, "host")
		got, err := ParseTarget(Target(hostID))
		require.NoError(t, err)
		require.Equal(t, hostID, got)
		require.True(t, valid(Target(hostID)), "the engine must take it for a UUID")
	})
}

func TestParseTargetRefusesOthers(t *testing.T) {
	for _, s := range []string{
		"", "host-7", "127.0.0.1:7189", Target(0), Target(7) + "0", Target(7)[:35],
		"{" + Target(7) + "}", "urn:uuid:" + Target(7),
		"74696572-7100-8000-8000-00000000000A", // upper case: the engine compares targets as strings
		"74696572-7100-8000-9000-000000000007", "74696572-7100-8000-8000x000000000007",
		"123e4567-e89b-12d3-a456-426614174000",
	} {
		_, err := ParseTarget(s)
		require.Error(t, err, s)
	}
}

func TestRegistryResolves(t *testing.T) {
	r := NewRegistry()
	_, _, err := r.Resolve(1, 2)
	require.ErrorIs(t, err, ErrUnknownReplica)
	r.Add(1, 2, Target(9))
	_, _, err = r.Resolve(1, 2)
	require.ErrorIs(t, err, ErrUnknownHost)

	r.SetHost(9, "10.0.0.1:7189")
	_, err = r.Factory().Create(Target(8), 4, nil)
	require.NoError(t, err)
	require.NoError(t, r.Check())
	address, connection, err := r.Resolve(1, 2)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.1:7189", address)
	r.Add(5, 1, Target(9))
	_, same, err := r.Resolve(5, 1)
	require.NoError(t, err)
	require.Equal(t, connection, same, "shards 1 and 5 share one of the four connections")
	r.Add(2, 1, Target(9))
	_, other, err := r.Resolve(2, 1)
	require.NoError(t, err)
	require.NotEqual(t, connection, other)

	r.SetHost(9, "10.0.0.2:7189")
	address, moved, err := r.Resolve(1, 2)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.2:7189", address)
	require.NotEqual(t, connection, moved, "a queue for the former address must not be used")

	r.Remove(1, 2)
	_, _, err = r.Resolve(1, 2)
	require.ErrorIs(t, err, ErrUnknownReplica)
	r.RemoveShard(5)
	_, ok := r.HostOf(5, 1)
	require.False(t, ok)
	r.SetHost(9, "")
	_, _, err = r.Resolve(2, 1)
	require.ErrorIs(t, err, ErrUnknownHost)
	require.NoError(t, r.Close())
	require.NoError(t, r.Check())
}

func TestRegistryKeepsTheFirstClaim(t *testing.T) {
	r := NewRegistry()
	var conflicts [][4]uint64
	r.OnConflict = func(shard, replica, host, claimed uint64) {
		conflicts = append(conflicts, [4]uint64{shard, replica, host, claimed})
	}
	r.Add(1, 2, "127.0.0.1:7189")
	_, ok := r.HostOf(1, 2)
	require.False(t, ok, "not a host's target")
	r.Add(1, 2, Target(9))
	r.Add(1, 2, Target(9))
	require.Empty(t, conflicts)
	r.Add(1, 2, Target(10))
	require.Equal(t, [][4]uint64{{1, 2, 9, 10}}, conflicts)
	host, ok := r.HostOf(1, 2)
	require.True(t, ok)
	require.EqualValues(t, 9, host)
}

func TestRegistryRefusesAForeignNodeHostID(t *testing.T) {
	_, err := NewRegistry().Factory().Create("123e4567-e89b-12d3-a456-426614174000", 4, nil)
	require.ErrorContains(t, err, "host.Target(id)")
}

// TestRegistryFollowsAHostToAnotherPort: three real hosts; one comes back on another port, and the shard
// commits through it alone, with nothing but SetHost on the others.
func TestRegistryFollowsAHostToAnotherPort(t *testing.T) {
	if testing.Short() {
		t.Skip("starts three NodeHosts")
	}
	const shardID = 7
	// Host ids are not replica ids, so that a mix-up fails.
	members := map[uint64]string{1: Target(11), 2: Target(12), 3: Target(13)}
	fleet := map[uint64]*engineHost{}
	for replicaID, hostID := range map[uint64]uint64{1: 11, 2: 12, 3: 13} {
		fleet[replicaID] = &engineHost{hostID: hostID, replicaID: replicaID, dir: t.TempDir(), registry: NewRegistry(), address: freeport.For(t)}
	}
	for _, h := range fleet {
		for _, peer := range fleet {
			h.registry.SetHost(peer.hostID, peer.address)
		}
		h.start(t, shardID, members)
	}
	require.EqualValues(t, 1, fleet[1].increment(t, shardID))

	moved := fleet[3]
	moved.stop()
	moved.address = freeport.For(t)
	for _, h := range fleet {
		h.registry.SetHost(moved.hostID, moved.address)
	}
	moved.start(t, shardID, members)
	fleet[2].stop()
	require.EqualValues(t, 2, fleet[1].increment(t, shardID), "hosts 1 and 3 are a quorum only if they reach one another")
	require.EqualValues(t, 2, moved.read(t, shardID))
	hostID, ok := moved.registry.HostOf(shardID, 1)
	require.True(t, ok)
	require.EqualValues(t, 11, hostID)
	for _, h := range fleet {
		require.NoError(t, h.registry.Check())
	}
}

// engineHost is a bare NodeHost with a registry and one counter shard.
type engineHost struct {
	hostID, replicaID uint64
	dir, address      string
	registry          *Registry
	nodeHost          *dragonboat.NodeHost
}

func (h *engineHost) start(t *testing.T, shardID uint64, members map[uint64]string) {
	t.Helper()
	_, err := ApplySoftSettings(false)
	require.NoError(t, err)
	logDB := config.GetTinyMemLogDBConfig()
	logDB.Shards = 1
	nodeHost, err := dragonboat.NewNodeHost(config.NodeHostConfig{
		NodeHostID:     Target(h.hostID),
		NodeHostDir:    h.dir,
		RaftAddress:    h.address,
		RTTMillisecond: 20,
		Expert: config.ExpertConfig{
			NodeRegistryFactory: h.registry.Factory(),
			LogDB:               logDB,
			Engine:              config.EngineConfig{ExecShards: 1, CommitShards: 1, ApplyShards: 1, SnapshotShards: 1, CloseShards: 1},
		},
	})
	require.NoError(t, err)
	require.NotNil(t, nodeHost)
	h.nodeHost = nodeHost
	t.Cleanup(h.stop)
	require.NoError(t, nodeHost.StartReplica(members, false, newCounter, config.Config{
		ShardID: shardID, ReplicaID: h.replicaID, ElectionRTT: 10, HeartbeatRTT: 1,
		CheckQuorum: true, PreVote: true, OrderedConfigChange: true, WaitReady: true,
	}))
}

// stop closes the NodeHost, once.
func (h *engineHost) stop() {
	if h.nodeHost != nil {
		h.nodeHost.Close()
		h.nodeHost = nil
	}
}

// increment commits the counter's next number and returns it. It tries again while there is no leader, which
// is harmless: the number is chosen once.
func (h *engineHost) increment(t *testing.T, shardID uint64) (count uint64) {
	t.Helper()
	before := h.read(t, shardID)
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		result, err := h.nodeHost.SyncPropose(ctx, h.nodeHost.GetNoOPSession(shardID), binary.BigEndian.AppendUint64(nil, before+1))
		count = result.Value
		return err == nil
	}, 60*time.Second, 10*time.Millisecond)
	return count
}

func (h *engineHost) read(t *testing.T, shardID uint64) (count uint64) {
	t.Helper()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		value, err := h.nodeHost.SyncRead(ctx, shardID, nil)
		if err == nil {
			count = value.(uint64)
		}
		return err == nil
	}, 60*time.Second, 10*time.Millisecond)
	return count
}

// counter is a state machine that is set to the number proposed, so that the same proposal twice does no harm.
type counter struct{ n uint64 }

func newCounter(shardID, replicaID uint64) statemachine.IStateMachine { return &counter{} }

func (c *counter) Update(e statemachine.Entry) (statemachine.Result, error) {
	c.n = binary.BigEndian.Uint64(e.Cmd)
	return statemachine.Result{Value: c.n}, nil
}

func (c *counter) Lookup(any) (any, error) { return c.n, nil }

func (c *counter) SaveSnapshot(w io.Writer, _ statemachine.ISnapshotFileCollection, _ <-chan struct{}) error {
	return binary.Write(w, binary.BigEndian, c.n)
}

func (c *counter) RecoverFromSnapshot(r io.Reader, _ []statemachine.SnapshotFile, _ <-chan struct{}) error {
	return binary.Read(r, binary.BigEndian, &c.n)
}

func (c *counter) Close() error { return nil }

// BenchmarkParseTarget is what each message that arrives costs.
func BenchmarkParseTarget(b *testing.B) {
	target := Target(7)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseTarget(target); err != nil {
			b.Fatal(err)
		}
	}
}
