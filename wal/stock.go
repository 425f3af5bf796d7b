package wal

import (
	_ "unsafe" // for go:linkname

	_ "github.com/lni/dragonboat/v4" // links its internal packages
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
)

// newStockPebble is dragonboat's constructor of its default log. It is in an internal package; the
// comparison with it must run through the same door as our own log, so it is linked by name. A
// version of dragonboat without it does not link, which is the check.
//
//go:linkname newStockPebble github.com/lni/dragonboat/v4/internal/logdb.NewDefaultLogDB
func newStockPebble(cfg config.NodeHostConfig, cb config.LogDBCallback,
	dirs, lowLatencyDirs []string) (raftio.ILogDB, error)
