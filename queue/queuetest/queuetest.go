// Package queuetest opens state machines on an in-memory file system, for tests of what is built on package queue.
package queuetest

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/store"
)

// Machine is a shard's state machine in memory that numbers its own entries.
type Machine struct {
	*queue.QueueStateMachine
	Store *store.Store
	// Log holds every command applied, entry i at index i+1.
	Log [][]byte
	t   testing.TB
}

// New opens an empty shard 1. It is closed with the test.
func New(t testing.TB) *Machine {
	t.Helper()
	st := OpenStore(t)
	return Open(t, st, 1)
}

// OpenStore opens an empty store in memory. It is closed with the test.
func OpenStore(t testing.TB) *store.Store {
	t.Helper()
	st, err := store.Open("queue", store.Options{FS: vfs.NewMem(), MemTableBytes: 4 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	return st
}

// Open opens a shard of a store.
func Open(t testing.TB, st *store.Store, shard uint64) *Machine {
	t.Helper()
	h, err := st.Shard(shard)
	require.NoError(t, err)
	m, err := queue.Open(h, queue.Options{})
	require.NoError(t, err)
	return &Machine{QueueStateMachine: m, Store: st, t: t}
}

// Do applies a command at the next index.
func (m *Machine) Do(c queue.Command) queue.Result {
	m.t.Helper()
	b, err := queue.EncodeCommand(nil, c)
	require.NoError(m.t, err)
	return m.Raw(b)
}

// Raw applies an encoded command at the next index.
func (m *Machine) Raw(cmd []byte) queue.Result {
	m.t.Helper()
	m.Log = append(m.Log, cmd)
	r, err := m.Apply(m.Meta().Applied+1, cmd)
	require.NoError(m.t, err)
	return r
}

// Replay applies the log to a fresh state and returns it: its digest must be equal (G7).
func (m *Machine) Replay() *Machine {
	m.t.Helper()
	other := New(m.t)
	for _, cmd := range m.Log {
		other.Raw(cmd)
	}
	return other
}

// RequireSame fails unless the state checks out, and a replay of the log and a reopened copy have its digest.
func (m *Machine) RequireSame() {
	m.t.Helper()
	require.NoError(m.t, m.Check())
	index, digest, err := m.Digest()
	require.NoError(m.t, err)
	other := m.Replay()
	i2, d2, err := other.Digest()
	require.NoError(m.t, err)
	require.Equal(m.t, index, i2)
	require.Equal(m.t, digest, d2, "a replay of the same log gives another state")
}
