//go:build !linux

package main

import "os"

// syncData makes f durable.
func syncData(f *os.File) error { return f.Sync() }
