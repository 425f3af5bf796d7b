package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
)

// The runtime writes to crashFile what it says when the process panics, so that the next start knows whether the last one ended so. What
// it said is kept as lastCrashFile.
const (
	crashFile     = "crash.log"
	lastCrashFile = "crash.last.log"
)

// The runtime has one file for the process. The host that was opened last has it.
var (
	crashMu    sync.Mutex
	crashOwner *RaftHost
)

// openCrashFile returns whether the last process that ran this host ended by a panic, and takes the file for this one.
func (h *RaftHost) openCrashFile() (panicked bool, err error) {
	path := filepath.Join(h.cfg.DataDir, crashFile)
	info, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("look for the last crash: %w", err)
	}
	if panicked = err == nil && info.Size() > 0; panicked {
		last := filepath.Join(h.cfg.DataDir, lastCrashFile)
		if err := os.Rename(path, last); err != nil {
			return true, fmt.Errorf("keep the last crash: %w", err)
		}
		h.log.Error("the last process of this host ended by a panic", event.Is("crashed"), zap.String("file", last))
	}
	if h.crash, err = os.Create(path); err != nil {
		return panicked, fmt.Errorf("open the crash file: %w", err)
	}
	crashMu.Lock()
	defer crashMu.Unlock()
	if err := debug.SetCrashOutput(h.crash, debug.CrashOptions{}); err != nil {
		return panicked, fmt.Errorf("open the crash file: %w", err)
	}
	crashOwner = h
	return panicked, nil
}

// closeCrashFile gives the file back.
func (h *RaftHost) closeCrashFile() {
	if h.crash == nil {
		return
	}
	crashMu.Lock()
	defer crashMu.Unlock()
	if crashOwner == h {
		crashOwner = nil
		if err := debug.SetCrashOutput(nil, debug.CrashOptions{}); err != nil {
			h.log.Warn("the crash file is not released", zap.Error(err))
		}
	}
	if err := h.crash.Close(); err != nil {
		h.log.Warn("the crash file is not closed", zap.Error(err))
	}
}
