package home

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"go.uber.org/zap"
)

// drainTime bounds how long a planned move waits for the records of open leases and for what else is under way.
const drainTime = 5 * time.Second

// moveWorkers bounds the groups that ReleaseAll hands over at a time.
const moveWorkers = 16

// Move hands a group over to another replica of the shard, which the caller has found to be a full one: deliveries
// stop, open leases are recorded and what is under way is waited for, then Home is proposed, `released` if this home
// may say so, which spares the new one its wait. Nothing comes again because of it: the new home honours the leases
// and their receipts. Calls that settle wait for the outcome; they are then told to go to the new home. Where no quorum
// answers within 5 s, or half of what ctx leaves, the move goes on without the rest, which then comes again, uncounted.
//
// After a call that failed the group may or may not have moved. Here it is then served under a new epoch only, after
// the wait of a new home. NotOwner says that the home was elsewhere, MutationFenced that it changed meanwhile.
func (k *Keeper) Move(ctx context.Context, group string, to queue.ReplicaID) error {
	if to == 0 {
		return code.New(code.InvalidArgument, "name the replica that the group moves to")
	}
	g, err := k.group(group)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.enter(); err != nil {
		return err
	}
	switch {
	case to == k.o.Self:
		return nil
	case g.moving:
		return code.New(code.MutationFenced, "group %q is being moved already", g.info.Name)
	}
	return g.handOver(ctx, to)
}

// handOver moves the group, to this replica too: it then has a new epoch, and is served at once. Called, and returns, with mu held.
func (g *group) handOver(ctx context.Context, to queue.ReplicaID) error {
	g.moving = true
	err := g.move(ctx, to)
	g.moving = false
	g.pump()
	return err
}

// move stops, drains, and proposes. Called, and returns, with mu held.
func (g *group) move(ctx context.Context, to queue.ReplicaID) error {
	g.k.mu.Lock()
	released := g.term.Stop(g.k.lease, g.k.o.Boot())
	g.k.mu.Unlock()
	epoch := g.info.Epoch
	g.drain(ctx)
	cmd := &queue.Home{
		Stamp: g.k.o.Stamp(), Group: g.id, ExpectedHome: g.k.o.Self, ExpectedEpoch: epoch, NewHome: to, Released: released,
	}
	g.mu.Unlock()
	res, err := g.carryHome(ctx, cmd)
	g.mu.Lock()
	g.seen.Store(0)
	if err != nil {
		return err
	}
	g.refresh()
	if res.Code == code.OK || !g.deleted && g.info.Home == to && g.info.Epoch == epoch+1 {
		g.k.log.Info("handed a group over", zap.String("group", g.info.Name), zap.Uint64("to", uint64(to)), zap.Bool("released", released))
		return nil
	}
	if g.deleted {
		return g.unknown()
	}
	return code.New(code.MutationFenced, "group %q changed while it was being moved: its home is replica %d at epoch %d",
		g.info.Name, g.info.Home, g.info.Epoch)
}

// drain records every open lease and waits for that and for what else is under way. No call adds anything meanwhile.
func (g *group) drain(ctx context.Context) {
	if g.led == nil {
		return
	}
	wait := drainTime
	if end, bounded := ctx.Deadline(); bounded {
		wait = min(wait, time.Until(end)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	g.led.leaving = true
	// Whatever ends the wait, the move goes on: an unresolved command is fenced by the new epoch.
	_ = g.await(ctx, false, func() (bool, error) { return g.led == nil || g.led.idle(), nil })
}

// idle says whether no command of the ledger is waiting or in flight, and every lease is recorded.
func (l *Ledger) idle() bool {
	return l.acks.inFlight+l.expires.inFlight+len(l.acks.waiting)+len(l.expires.waiting) == 0 && l.ages.oldest == nil
}

// carryHome proposes a Home until its outcome is known or ctx ends. Home names what it expects, so a late copy is
// harmless.
func (g *group) carryHome(ctx context.Context, cmd *queue.Home) (queue.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	unknown := false
	for pause := firstHold; ; pause = min(2*pause, maxHold) {
		res, err := g.k.propose(ctx, cmd)
		if err == nil {
			return res, nil
		}
		unknown = unknown || effectOf(err) != code.EffectNone
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		case <-g.k.ctx.Done():
		}
		if unknown {
			return res, code.Maybe(code.QuorumLost, err, "the move of the group may still happen: ask for its home")
		}
		return res, &code.Error{Code: codeOf(err, code.Unavailable), Effect: code.EffectNone, Cause: err}
	}
}

// ReleaseAll hands over every group whose home is here, before this host stops: to names each group's new home, 0
// keeps it. Errors are joined, each with its group's name; the other groups are handed over all the same.
func (k *Keeper) ReleaseAll(ctx context.Context, to func(group string) queue.ReplicaID) error {
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
		slot = make(chan struct{}, moveWorkers)
	)
	for _, info := range k.o.Reader.Groups() {
		target := to(info.Name)
		if info.Home != k.o.Self || target == 0 {
			continue
		}
		slot <- struct{}{}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() { <-slot }()
			if err := k.Move(ctx, info.Name, target); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("group %s: %w", info.Name, err))
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}
