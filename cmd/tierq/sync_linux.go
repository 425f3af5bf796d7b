package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// syncData makes f's data durable, as the log does.
func syncData(f *os.File) error { return unix.Fdatasync(int(f.Fd())) }
