package store

// finished is the number of flushes that ended.
func (f *flusher) finished() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rounds
}

// waitIdle returns when no flush runs.
func (f *flusher) waitIdle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.running {
		f.idle.Wait()
	}
}
