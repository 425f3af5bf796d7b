package queue

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/store"
)

// TestPurgedDeadLetterByLevel: what the removal of a dead letter counts as follows from the level in the state, never
// from the binary: replicas of a shard that was made before level 3 keep counting it as acked.
func TestPurgedDeadLetterByLevel(t *testing.T) {
	for level, want := range map[uint32]GroupCounters{
		2: {Assigned: 1, Acked: 1, DeadTotal: 1},
		3: {Assigned: 1, Purged: 1, DeadTotal: 1},
	} {
		st, err := store.Open("queue", store.Options{FS: vfs.NewMem()})
		require.NoError(t, err)
		h, err := st.Shard(1)
		require.NoError(t, err)
		s, err := Open(h, Options{})
		require.NoError(t, err)
		s.meta.FormatLevel = level
		for i, c := range []Command{
			&Group{Op: GroupCreate, OperationID: 1, Name: "g", Config: defaultConfig(), FirstHome: 1},
			&Enqueue{Publishes: []Publish{{Messages: []Message{{Body: []byte("a")}}}}},
			&Expire{Group: 1, Epoch: 1, Entries: []ExpireEntry{{Kind: ExpireDead, Address: 1, Attempts: 1}}},
			&Ack{Group: 1, Epoch: 1, Ranges: []AddressRange{{1, 1}}},
		} {
			b, err := EncodeCommand(nil, c)
			require.NoError(t, err)
			_, err = s.Apply(Index(i+1), b)
			require.NoError(t, err)
		}
		g, ok := s.Group(1)
		require.True(t, ok)
		require.Equal(t, want, g.Counters, "level %d", level)
		require.NoError(t, s.Check())
		require.NoError(t, st.Close())
	}
}
