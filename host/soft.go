package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	_ "unsafe" // for go:linkname

	_ "github.com/lni/dragonboat/v4" // whose variables these are: without it they would read as zero
)

// dragonboat's soft settings have no API: each is a package variable that is copied, while its package is
// initialised, from a JSON file in the working directory. We name the variables themselves. A linkname to a
// variable that no longer exists compiles, and reads as zero, so ApplySoftSettings compares every one with the
// default of the pinned version before it writes to any.

//go:linkname engineProposalQueue github.com/lni/dragonboat/v4.incomingProposalsMaxLen
var engineProposalQueue uint64

//go:linkname engineReadIndexQueue github.com/lni/dragonboat/v4.incomingReadIndexMaxLen
var engineReadIndexQueue uint64

//go:linkname engineReceiveQueue github.com/lni/dragonboat/v4.receiveQueueLen
var engineReceiveQueue uint64

//go:linkname engineProposalShards github.com/lni/dragonboat/v4.pendingProposalShards
var engineProposalShards uint64

//go:linkname engineEntrySlice github.com/lni/dragonboat/v4/internal/raft.entrySliceSize
var engineEntrySlice uint64

//go:linkname engineMinEntrySlice github.com/lni/dragonboat/v4/internal/raft.minEntrySliceSize
var engineMinEntrySlice uint64

//go:linkname engineMaxEntrySize github.com/lni/dragonboat/v4/internal/raft.maxEntrySize
var engineMaxEntrySize uint64

//go:linkname engineMaxApplySize github.com/lni/dragonboat/v4/internal/raft.maxEntriesToApplySize
var engineMaxApplySize uint64

// SoftSetting is one tuned variable of the Raft engine: its name in dragonboat's settings, the value it has in
// the pinned version, and the value this process runs with. Sizes are in bytes, lengths in elements.
type SoftSetting struct {
	Name    string
	Default uint64
	Value   uint64
}

// softVariable binds a setting to the engine's variable, with its value for many shards if that is another one.
type softVariable struct {
	SoftSetting
	variable *uint64
	many     uint64
}

// softVariables lists what we change, and why. With the engine's defaults an idle replica holds 1.16 MB of queues
// before it has done anything; these bring it to 0.22 MB, and those for many shards to 0.08 MB.
func softVariables() []softVariable {
	return []softVariable{
		// Two arrays of 80-byte entries a replica. Publishes and acks arrive in batches, few at a time; a full
		// queue is the engine's ErrSystemBusy, which means "not applied".
		{SoftSetting{"IncomingProposalQueueLength", 2048, 128}, &engineProposalQueue, 64},
		// Two arrays of pointers.
		{SoftSetting{"IncomingReadIndexQueueLength", 4096, 256}, &engineReadIndexQueue, 64},
		// Two arrays of 304-byte messages: the greatest part. Not below 256, or a step worker that waits for an
		// fsync makes a busy replica drop heartbeats and lose its leader; with many shards four times as long passes
		// before it does.
		{SoftSetting{"ReceiveQueueLength", 1024, 256}, &engineReceiveQueue, 64},
		// Each shard of the pending proposals owns a map and a 5 KB random source.
		{SoftSetting{"PendingProposalShards", 16, 2}, &engineProposalShards, 1},
		{SoftSetting{"InMemEntrySliceSize", 512, 64}, &engineEntrySlice, 32},
		// Must stay below InMemEntrySliceSize, or the engine panics.
		{SoftSetting{"MinEntrySliceFreeSize", 96, 16}, &engineMinEntrySlice, 0},
		// The most that the step worker of all shards reads at once for one lagging follower. A larger single
		// entry still goes, alone.
		{SoftSetting{"MaxEntrySize", 64 << 20, 4 << 20}, &engineMaxEntrySize, 0},
		// The same for entries on their way to the state machine.
		{SoftSetting{"MaxApplyEntrySize", 64 << 20, 4 << 20}, &engineMaxApplySize, 0},
	}
}

var softMu sync.Mutex

// ApplySoftSettings sets the engine's soft settings of this process, for few shards or many, and returns them, for the log. It must be
// called before the first NodeHost is made; calls after the first change nothing and return the same, from any
// goroutine. All hosts of a process are for many shards, or none.
//
// If a variable holds neither its known default nor our value, nothing is changed and the error names it: the
// engine was upgraded, or a settings file was loaded. The host must then refuse to start.
func ApplySoftSettings(manyShards bool) ([]SoftSetting, error) {
	softMu.Lock()
	defer softMu.Unlock()
	variables := softVariables()
	for i := range variables {
		v := &variables[i]
		if v.many == 0 {
			continue
		}
		other := v.many
		if manyShards {
			v.Value, other = v.many, v.Value
		}
		if *v.variable == other {
			return nil, fmt.Errorf("another host of this process runs with %s %d: hosts of one process have the same profile", v.Name, other)
		}
	}
	return applySoftSettings(variables)
}

func applySoftSettings(variables []softVariable) ([]SoftSetting, error) {
	for _, v := range variables {
		if have := *v.variable; have != v.Default && have != v.Value {
			return nil, fmt.Errorf(
				"raft engine setting %s is %d, expected its default %d: the engine is not the pinned version, or a settings file was loaded; refusing to start",
				v.Name, have, v.Default)
		}
	}
	applied := make([]SoftSetting, 0, len(variables))
	for _, v := range variables {
		// A variable that is right is not written: a NodeHost may be reading it.
		if *v.variable != v.Value {
			*v.variable = v.Value
		}
		applied = append(applied, SoftSetting{Name: v.Name, Default: v.Default, Value: *v.variable})
	}
	return applied, nil
}

// strayNames are the files that the engine reads from the working directory while the process starts. The hard
// ones are part of a hash that is stored in every data directory.
var strayNames = [...]string{"dragonboat-soft-settings.json", "dragonboat-hard-settings.json"}

// CheckStraySettings returns an error if dir, the process's working directory at its start, holds one of the
// engine's settings files: such a file has been loaded by then, silently, and would change queue lengths or
// make the data directory unreadable for a process started elsewhere. The error says what to do.
func CheckStraySettings(dir string) error {
	for _, name := range strayNames {
		path := filepath.Join(dir, name)
		_, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for stray engine settings: %w", err)
		}
		return fmt.Errorf("%s would silently change the raft engine's settings: remove it, or start tierq from another directory", path)
	}
	return nil
}
