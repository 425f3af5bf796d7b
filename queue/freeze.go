package queue

import "github.com/tierq/tierq/queue/store"

// Frozen is a shard's whole state at one applied index, to be streamed while commands go on. Close it.
type Frozen struct {
	Meta Meta
	snap *store.Snapshot
}

// Freeze takes the state as it is now.
func (s *QueueStateMachine) Freeze() *Frozen {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return &Frozen{Meta: s.meta.Meta, snap: s.shard.Snapshot()}
}

// Each calls f with every key and value in order of key; they are valid during the call only. It returns the first error.
func (z *Frozen) Each(f func(key, value []byte) error) error { return z.snap.Each(f) }

// Close releases what the state pins.
func (z *Frozen) Close() error { return z.snap.Close() }
