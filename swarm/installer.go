package swarm

import (
	"errors"
	"fmt"
	"io"
)

// Installer moves the whole state of a shard in one stream. A replica's adapter uses it to send and take snapshots;
// the zero value is ready.
type Installer struct {
	// Progress, if set, hears of each direction's pairs and bytes now and then. It must not block.
	Progress func(shard, index uint64, saving bool, keys, bytes uint64)
}

// progressEvery is how many keys lie between two calls of Progress.
const progressEvery = 4096

// Save streams a key space at one index. It returns the first error of w or each, or ErrStopped.
func (i *Installer) Save(w io.Writer, shard, index uint64, formatLevel uint32, each func(func(key, value []byte) error) error, stop <-chan struct{}) error {
	m := i.meter(shard, index, true, stop)
	_, err := Write(w, Header{Shard: shard, Index: index, FormatLevel: formatLevel}, func(yield func(key, value []byte) error) error {
		return each(func(key, value []byte) error {
			if err := m.step(key, value); err != nil {
				return err
			}
			return yield(key, value)
		})
	})
	return err
}

// Load reads a stream of the shard, and returns its index. After an error what set got is of no use.
func (i *Installer) Load(r io.Reader, shard uint64, set func(key, value []byte) error, stop <-chan struct{}) (index uint64, err error) {
	m := i.meter(shard, 0, false, stop)
	accept := func(h Header) error {
		if h.Shard != shard {
			return fmt.Errorf("%w: it is of shard %d, wanted is %d", ErrCorrupt, h.Shard, shard)
		}
		index, m.index = h.Index, h.Index
		return nil
	}
	_, err = Read(r, accept, func(key, value []byte) error {
		return errors.Join(m.step(key, value), set(key, value))
	})
	return index, err
}

func (i *Installer) meter(shard, index uint64, saving bool, stop <-chan struct{}) *meter {
	return &meter{installer: i, shard: shard, index: index, saving: saving, stop: stop}
}

// meter counts, and looks whether to stop.
type meter struct {
	installer    *Installer
	shard, index uint64
	saving       bool
	stop         <-chan struct{}
	keys, bytes  uint64
}

func (m *meter) step(key, value []byte) error {
	select {
	case <-m.stop:
		return ErrStopped
	default:
	}
	m.keys++
	m.bytes += uint64(len(key) + len(value))
	if m.installer.Progress != nil && m.keys%progressEvery == 0 {
		m.installer.Progress(m.shard, m.index, m.saving, m.keys, m.bytes)
	}
	return nil
}
