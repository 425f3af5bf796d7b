package queue

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/store"
)

// TestLeaseBegunByLevel: when a lease was handed out is kept from level 4 on, so that replicas of a shard that was made before are equal,
// and it is in the state that is copied.
func TestLeaseBegunByLevel(t *testing.T) {
	for level, want := range map[uint32]Stamp{3: 0, 4: 77} {
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
			&Expire{Group: 1, Epoch: 1, Entries: []ExpireEntry{{Kind: ExpireLease, Address: 1, NotBefore: 77, Lease: LeaseName{Epoch: 1, Number: 1}, Deadline: 900}}},
			&Expire{Group: 1, Epoch: 1, Entries: []ExpireEntry{{Kind: ExpireLease, Address: 1, Change: 1, NotBefore: 77, Lease: LeaseName{Epoch: 1, Number: 1}, Deadline: 950}}},
		} {
			b, err := EncodeCommand(nil, c)
			require.NoError(t, err)
			_, err = s.Apply(Index(i+1), b)
			require.NoError(t, err)
		}
		retry, lease, _, err := s.RetryOf(1, 1)
		require.NoError(t, err)
		require.Equal(t, RecordedLease{Name: LeaseName{Epoch: 1, Number: 1}, Begun: want, Deadline: 950}, lease, "level %d", level)
		require.Zero(t, retry.NotBefore, "it is not the message's")
		require.NoError(t, s.Check())
		copied := 0
		z := s.Freeze()
		require.NoError(t, z.Each(func(key, value []byte) error {
			if key[0] == kindLease {
				l, err := readLease(value)
				require.NoError(t, err)
				require.Equal(t, lease, l)
				copied++
			}
			return nil
		}))
		require.Equal(t, 1, copied)
		require.NoError(t, z.Close())
		require.NoError(t, st.Close())
	}
}

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
