package witness

import (
	"errors"
	"io"

	"github.com/lni/dragonboat/v4/statemachine"
)

// ErrNoState is returned to whoever asks a witness for data.
var ErrNoState = errors.New("a witness holds no state: ask a full replica of the shard")

// NewStateMachine returns the state machine of a witness; it is dragonboat's CreateStateMachineFunc. It must
// be a regular one, as the snapshots that a witness is given have no on-disk index, and it must not be nil:
// the engine closes it.
//
// It is never updated, since a witness's entries have no payload, and it stores nothing.
func NewStateMachine(shardID, replicaID uint64) statemachine.IStateMachine { return stub{} }

type stub struct{}

// Update panics: that a witness was given a payload means that this replica was started, or added, in another
// role.
func (stub) Update(statemachine.Entry) (statemachine.Result, error) {
	panic("BUG: a payload was applied to a witness")
}

// Lookup fails with ErrNoState.
func (stub) Lookup(any) (any, error) { return nil, ErrNoState }

// SaveSnapshot refuses, in the way that leaves the process alive. The engine does not ask a witness.
func (stub) SaveSnapshot(io.Writer, statemachine.ISnapshotFileCollection, <-chan struct{}) error {
	return statemachine.ErrSnapshotAborted
}

// RecoverFromSnapshot accepts and drops the state. The engine recovers a witness from metadata alone, without
// calling it.
func (stub) RecoverFromSnapshot(io.Reader, []statemachine.SnapshotFile, <-chan struct{}) error {
	return nil
}

// Close does nothing.
func (stub) Close() error { return nil }
