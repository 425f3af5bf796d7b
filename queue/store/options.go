package store

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Logger takes the store's own remarks.
type Logger interface {
	Infof(format string, args ...any)
	Errorf(format string, args ...any)
}

// Options are per process; none is stored.
type Options struct {
	// FS is where the files live. Defaults to the operating system's.
	FS vfs.FS
	// Logger may be nil: silence.
	Logger Logger
	// CacheBytes bounds the block cache of the whole store.
	//
	// Defaults to 64 MiB. Must be at least 1 MiB.
	CacheBytes int64
	// MemTableBytes is the size at which a memtable is flushed; up to four may exist.
	//
	// Defaults to 64 MiB. Must be in [256 KiB, 1 GiB].
	MemTableBytes uint64
	// MaxUnflushedBytes is how much may be committed since the last flush before one is forced in the background.
	// It bounds what a restart applies again from the Raft log.
	//
	// Defaults to 64 MiB. Must be at least 64 KiB.
	MaxUnflushedBytes int64
	// MaxOpenFiles bounds the table files held open.
	//
	// Defaults to 1,000.
	MaxOpenFiles int
	// OnBackgroundError hears of failures of compactions and of damaged blocks. It must not block and must not call
	// the store. May be nil.
	OnBackgroundError func(error)
	// OnFatal hears that the store cannot make data durable (a failed flush or manifest write): a fault of the host.
	// It must end the process, or at least all use of the store; it must not call the store. The default panics.
	OnFatal func(error)
}

// EnsureDefaults fills zero values.
func (o *Options) EnsureDefaults() {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 64 << 20
	}
	if o.MemTableBytes == 0 {
		o.MemTableBytes = 64 << 20
	}
	if o.MaxUnflushedBytes == 0 {
		o.MaxUnflushedBytes = 64 << 20
	}
	if o.MaxOpenFiles == 0 {
		o.MaxOpenFiles = 1000
	}
	if o.OnFatal == nil {
		o.OnFatal = func(err error) { panic(fmt.Sprintf("FATAL: store: %v", err)) }
	}
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var problems []error
	if o.CacheBytes < 1<<20 {
		problems = append(problems, fmt.Errorf("CacheBytes %d is below 1 MiB", o.CacheBytes))
	}
	if o.MemTableBytes < 256<<10 || o.MemTableBytes > 1<<30 {
		problems = append(problems, fmt.Errorf("MemTableBytes %d is not in [256 KiB, 1 GiB]", o.MemTableBytes))
	}
	if o.MaxUnflushedBytes < 64<<10 {
		problems = append(problems, fmt.Errorf("MaxUnflushedBytes %d is below 64 KiB", o.MaxUnflushedBytes))
	}
	if o.MaxOpenFiles < 64 {
		problems = append(problems, fmt.Errorf("MaxOpenFiles %d is below 64", o.MaxOpenFiles))
	}
	return errors.Join(problems...)
}

// pebbleFormat is pinned: a newer binary must not raise it by being started.
const pebbleFormat = pebble.FormatValueSeparation

func (s *Store) pebbleOptions() *pebble.Options {
	o := &pebble.Options{
		FS:                          s.opts.FS,
		Logger:                      pebbleLogger{s},
		CacheSize:                   s.opts.CacheBytes,
		DisableWAL:                  true,
		FormatMajorVersion:          pebbleFormat,
		MemTableSize:                s.opts.MemTableBytes,
		MemTableStopWritesThreshold: 4,
		// Many small flushes are normal here: let L0 grow before it is compacted, and stop writes late. 12 is 6 sublevels: most
		// messages are finished and deleted before they would be moved down, and moving them costs as much as two flushes. With
		// 4 (2 sublevels) a publisher with 1,024 messages in flight was a sixth slower.
		L0CompactionThreshold:     12,
		L0CompactionFileThreshold: 200,
		L0StopWritesThreshold:     64,
		LBaseMaxBytes:             64 << 20,
		MaxOpenFiles:              s.opts.MaxOpenFiles,
		EventListener:             s.events(),
	}
	o.TargetFileSizes[0] = 4 << 20
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
		o.Levels[i].FilterType = pebble.TableFilter
	}
	o.EnsureDefaults()
	return o
}

// events: the default listener would end the process on a damaged block, which is one shard's trouble. Pebble tells
// the end of a flush with an error also when there was nothing to write; it repeats only real ones as background
// errors. Both calls come one after the other under Pebble's own lock.
func (s *Store) events() *pebble.EventListener {
	var mu sync.Mutex
	var flushErr error
	return &pebble.EventListener{
		FlushEnd: func(i pebble.FlushInfo) {
			mu.Lock()
			defer mu.Unlock()
			flushErr = i.Err
		},
		BackgroundError: func(err error) {
			mu.Lock()
			failed := err == flushErr
			mu.Unlock()
			if failed {
				s.fatal(fmt.Errorf("flush: %w", err))
				return
			}
			s.backgroundError(err)
		},
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			s.backgroundError(fmt.Errorf("damaged file %s: %w", i.Path, i.Details))
		},
	}
}

func (s *Store) backgroundError(err error) {
	s.logErrorf("store: %v", err)
	if f := s.opts.OnBackgroundError; f != nil {
		f(err)
	}
}

func (s *Store) fatal(err error) {
	s.flush.failed.Store(true)
	s.logErrorf("store: fatal: %v", err)
	s.opts.OnFatal(err)
}

func (s *Store) logErrorf(format string, args ...any) {
	if l := s.opts.Logger; l != nil {
		l.Errorf(format, args...)
	}
}

// pebbleLogger drops Pebble's chatter and turns its fatal errors into ours.
type pebbleLogger struct{ s *Store }

func (pebbleLogger) Infof(string, ...any) {}

func (l pebbleLogger) Errorf(format string, args ...any) { l.s.logErrorf(format, args...) }

// Fatalf must not return to Pebble: what follows a fatal error in it is undefined.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	l.s.fatal(err)
	panic(fmt.Sprintf("FATAL: store: %v", err))
}
