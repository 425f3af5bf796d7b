package wal

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// promptSlice is the least slice that Linux gives, in nanoseconds.
const promptSlice = 100_000

// cannotPrompt is set when the kernel does not know slices (before 6.12), or a sandbox forbids them.
var cannotPrompt atomic.Bool

// syncPromptly is f.Sync, promptly if it waits for a disk.
func syncPromptly(f file) error {
	if _, disk := f.(osFile); !disk {
		return f.Sync()
	}
	return promptly(f.Sync)
}

// promptly runs f, which waits for the disk, so that its thread is soon running again once the disk is done. Among busy
// threads one that wakes waits for those before it, a few milliseconds each time, and an fdatasync
// wakes two or three times. With a short slice it goes first; its share of the processor stays the same, and a thread
// may ask for that without any privilege. Only the time is at stake: f runs in any case.
func promptly(f func() error) error {
	if cannotPrompt.Load() {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	usual, err := unix.SchedGetAttr(0, 0)
	if err != nil || usual.Runtime == 0 && usual.Policy == unix.SCHED_NORMAL {
		cannotPrompt.Store(true)
		return f()
	}
	if usual.Policy != unix.SCHED_NORMAL || usual.Runtime <= promptSlice {
		return f() // somebody decided otherwise for this thread
	}
	short := *usual
	short.Runtime = promptSlice
	if err := unix.SchedSetAttr(0, &short, 0); err != nil {
		cannotPrompt.Store(true)
		return f()
	}
	defer func() {
		if err := unix.SchedSetAttr(0, usual, 0); err != nil {
			cannotPrompt.Store(true)
		}
	}()
	return f()
}
