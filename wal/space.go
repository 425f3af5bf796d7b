package wal

import (
	"time"

	"go.uber.org/zap"
)

// spaceInterval is how often the free space and the open files are looked at.
const spaceInterval = time.Second

// spaceLoop reports when the free space crosses the line.
func (l *Log) spaceLoop() {
	defer l.workers.Done()
	t := time.NewTicker(spaceInterval)
	defer t.Stop()
	low := l.checkSpace(false)
	for {
		select {
		case <-l.stop:
			return
		case <-t.C:
			low = l.checkSpace(low)
			l.trimFiles()
		}
	}
}

// maxIdleFiles is how many sealed segments stay open after a cold read.
const maxIdleFiles = 64

// trimFiles closes the files of sealed segments that nobody reads, if there are many.
func (l *Log) trimFiles() {
	l.mu.Lock()
	segs := append([]*segment(nil), l.segments...)
	l.mu.Unlock()
	open := 0
	for _, s := range segs {
		if !s.isOpen() {
			continue
		}
		if open++; open <= maxIdleFiles {
			continue
		}
		if err := s.closeIdle(); err != nil {
			l.logger.Warn("cannot close a segment", zap.String("path", s.path), zap.Error(err))
		}
	}
}

// checkSpace looks at the free space, reports a crossing from wasLow, and returns which side it is on.
func (l *Log) checkSpace(wasLow bool) bool {
	free, err := l.fs.FreeBytes(l.o.Dir)
	if err != nil {
		l.logger.Warn("cannot tell the free space of the Raft log's disk", zap.Error(err))
		return wasLow
	}
	l.metrics.freeBytes.Set(float64(free))
	low := free < l.o.LowSpaceBytes
	if low == wasLow {
		return low
	}
	l.logger.Warn("free space of the Raft log's disk crossed the line", zap.Bool("low", low),
		zap.Uint64("free_bytes", free), zap.Uint64("line_bytes", l.o.LowSpaceBytes))
	if l.o.OnSpace != nil {
		l.o.OnSpace(SpaceReport{Low: low, FreeBytes: free})
	}
	return low
}
