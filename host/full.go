package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/lni/dragonboat/v4/statemachine"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/store"
)

// states is what a full host has beside the log: the store, and the state machines over it.
type states struct {
	h     *RaftHost
	store *store.Store
	fresh bool // the store was made at this start
}

// openStates opens the store of a full host.
func openStates(dir string, h *RaftHost) (*states, error) {
	found, err := exists(dir)
	if err != nil {
		return nil, fmt.Errorf("look for the store: %w", err)
	}
	s, err := store.Open(dir, store.Options{
		Logger:            h.log.Named("store").Sugar(),
		OnBackgroundError: func(err error) { h.log.Error("the store has a fault", zap.Error(err)) },
	})
	if err != nil {
		return nil, fmt.Errorf("open the store %s: %w", dir, err)
	}
	return &states{h: h, store: s, fresh: !found}, nil
}

// machine is a state machine in the making.
type machine struct {
	create statemachine.CreateOnDiskStateMachineFunc
	reader func() queue.Reader // after the engine has opened it
}

// machine returns the state machine of a full replica.
func (s *states) machine(run *running) (*machine, error) {
	if s.h.cfg.newMachine != nil {
		return s.h.cfg.newMachine(s, run)
	}
	return nil, errors.New("this build has no state machine of queues yet")
}

// remove removes a shard's state, durably. The replica must be stopped.
func (s *states) remove(shard uint64) error {
	if err := s.store.DeleteShard(shard); err != nil {
		return err
	}
	s.store.Sync()
	return nil
}

func (s *states) close() error { return s.store.Close() }

// applyOptions brings a shard that this host leads to the options that the catalog has for its queue.
func (h *RaftHost) applyOptions(ctx context.Context, p catalog.Placement) error {
	q, ok := h.Catalog().QueueOfShard(p.Shard)
	reader, has := h.Reader(p.Shard)
	if !ok || !has {
		return nil
	}
	stored := reader.Meta().Options
	want := q.Options
	want.Partition, want.Version = p.Partition, stored.Version
	if want == stored {
		return nil
	}
	stamp, err := h.Stamp(p.Shard)
	if err != nil {
		return err
	}
	cmd, err := queue.EncodeCommand(nil, &queue.Retention{Stamp: stamp, Options: &want})
	if err != nil {
		return fmt.Errorf("the options of queue %s: %w", q.Name, err)
	}
	_, err = h.Propose(ctx, p.Shard, cmd)
	return err
}
