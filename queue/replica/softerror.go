package replica

import (
	_ "unsafe" // for go:linkname

	_ "github.com/lni/dragonboat/v4" // whose variable this is: without it it would read as nil
	sm "github.com/lni/dragonboat/v4/statemachine"
)

// engineOutOfDate is the one error of a Sync that dragonboat takes for "no snapshot now" and goes on: no record is
// written, and who asked for the snapshot hears that it was not taken. On sm.ErrSnapshotStopped it removes the temporary
// directory of a snapshot that it has not begun, which panics, as any other error does. The
// variable is internal; one that no longer exists reads as nil.
//
//go:linkname engineOutOfDate github.com/lni/dragonboat/v4/internal/raft.ErrSnapshotOutOfDate
var engineOutOfDate error

// errNoSnapshot is what Sync returns to have no snapshot recorded.
func errNoSnapshot() error {
	if engineOutOfDate == nil {
		return sm.ErrSnapshotStopped // still better than a record
	}
	return engineOutOfDate
}
