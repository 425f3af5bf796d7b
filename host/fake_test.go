package host

import (
	"encoding/binary"
	"errors"
	"io"
	"sync/atomic"

	"github.com/lni/dragonboat/v4/statemachine"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// fakeMachine stores the applied index and options, and counts Enqueue commands.
type fakeMachine struct {
	queue.Reader
	h       *RaftHost
	run     *running
	shard   *store.Shard
	meta    atomic.Pointer[queue.Meta]
	stopped <-chan struct{}
}

func newFakeMachine(s *states, run *running) (*machine, error) {
	shard, err := s.store.Shard(run.shard)
	if err != nil {
		return nil, err
	}
	f := &fakeMachine{h: s.h, run: run, shard: shard}
	f.meta.Store(&queue.Meta{})
	return &machine{
		create: func(uint64, uint64) statemachine.IOnDiskStateMachine { return f },
		reader: func() queue.Reader { return f },
	}, nil
}

func (f *fakeMachine) Meta() queue.Meta { return *f.meta.Load() }

func (f *fakeMachine) Open(stopc <-chan struct{}) (uint64, error) {
	f.stopped = stopc
	b, ok, err := f.shard.Get([]byte{1})
	if err != nil || !ok {
		return 0, err
	}
	m := queue.Meta{Applied: queue.Index(binary.BigEndian.Uint64(b)), Last: queue.Address(binary.BigEndian.Uint64(b[8:]))}
	if m.Options, err = queue.DecodeQueueOptions(b[16:]); err != nil {
		return 0, err
	}
	f.meta.Store(&m)
	return uint64(m.Applied), nil
}

func (f *fakeMachine) Update(entries []statemachine.Entry) ([]statemachine.Entry, error) {
	m := f.Meta()
	for i := range entries {
		c, err := queue.DecodeCommand(entries[i].Cmd)
		if err != nil {
			f.h.poisoned(f.run.shard, err)
			<-f.stopped
			return entries, nil
		}
		switch c := c.(type) {
		case *queue.Enqueue:
			m.Last++
		case *queue.Retention:
			m.Options = *c.Options
			m.Options.Version++
		}
		m.Applied, m.Clock = queue.Index(entries[i].Index), max(m.Clock, c.CommandStamp())
		r := &queue.Result{Code: code.OK, Index: m.Applied, Clock: m.Clock}
		entries[i].Result = statemachine.Result{Value: uint64(code.OK), Data: queue.EncodeResult(nil, r)}
	}
	b := f.shard.NewBatch()
	v := binary.BigEndian.AppendUint64(nil, uint64(m.Applied))
	v = binary.BigEndian.AppendUint64(v, uint64(m.Last))
	b.Set([]byte{1}, queue.AppendQueueOptions(v, m.Options))
	if err := f.shard.Commit(b); err != nil {
		return nil, err
	}
	f.meta.Store(&m)
	f.h.appliedUpdate(f.run, f, queue.Applied{Index: m.Applied, Last: m.Last})
	return entries, nil
}

func (f *fakeMachine) Lookup(any) (any, error)       { return nil, errors.New("unused") }
func (f *fakeMachine) Sync() error                   { f.shard.Sync(); return nil }
func (f *fakeMachine) PrepareSnapshot() (any, error) { return nil, nil }
func (f *fakeMachine) Close() error                  { return nil }

func (f *fakeMachine) SaveSnapshot(any, io.Writer, <-chan struct{}) error {
	return statemachine.ErrSnapshotAborted
}

func (f *fakeMachine) RecoverFromSnapshot(io.Reader, <-chan struct{}) error { panic("unused") }
