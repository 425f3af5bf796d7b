package node

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// quorumNames are the states in the log's words.
var quorumNames = [...]string{quorumHealthy: "healthy", quorumSoft: "soft", quorumReadOnly: "read-only", quorumElecting: "electing"}

// quorumAt is the state of a shard whose leader is taken to be on a host. Only that one knows it; but a leader that is silent leads
// no more, also while those that are left cannot elect another one.
func (n *Node) quorumAt(shard, leaderHost uint64) uint32 {
	switch {
	case leaderHost == n.id:
		return n.quorumState(shard)
	case !n.Alive(leaderHost):
		return quorumElecting
	}
	return quorumHealthy
}

// quorumState is the state of a shard that this host leads, as tierq_quorum_state has it.
func (n *Node) quorumState(shard uint64) uint32 {
	n.mu.RLock()
	d := n.desks[shard]
	n.mu.RUnlock()
	if d == nil {
		return quorumHealthy
	}
	return d.quorumState()
}

// quorumState is what this host, as the leader's, says of the quorum. It writes a line when that changes, and sees to the barrier
// that ends a read-only time.
func (d *desk) quorumState() uint32 {
	now, copies := d.boot(), d.raft.InSync()
	strict := d.reader.Meta().Options.Durability == queue.DurabilityStrict
	state := uint32(quorumHealthy)
	soft := d.level.soft(copies < 2 || d.lags(), now)
	switch {
	case d.level.isReadOnly(now):
		state = quorumReadOnly
		d.probe()
	case strict && copies < 2:
		state = quorumReadOnly
	case soft:
		state = quorumSoft
	}
	if was := d.quorum.Swap(state); was != state {
		d.log.Info("the quorum state has changed", event.Is("quorum"), zap.String("from", quorumNames[was]), zap.String("to", quorumNames[state]),
			zap.Int("dataCopies", copies), zap.Bool("strict", strict))
	}
	return state
}

// warning is what rides beside an OK: FOLLOWER_LAG at level 1.
func (d *desk) warning(copies int) code.Code {
	if copies < 2 || d.quorum.Load() == quorumSoft {
		return code.FollowerLag
	}
	return 0
}

// probe reads by the quorum, and proposes a barrier: a command that changes nothing but the shard's clock. One at a time.
func (d *desk) probe() {
	if !d.probing.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer d.probing.Store(false)
		ctx, cancel := context.WithTimeout(d.leadership.current(), quorumAckTimeout)
		defer cancel()
		var read sync.WaitGroup
		defer read.Wait()
		read.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, barrierWithin)
			defer cancel()
			d.level.read(d.raft.ReadIndex(ctx) == nil)
		})
		mark, began := d.level.mark(), d.boot()
		if _, err := d.propose(ctx, &queue.Retention{Stamp: d.raft.Stamp()}); err == nil {
			d.level.barrier(mark, d.boot()-began)
		}
	}()
}

// mayCommit refuses what a home would decide that reaches no quorum: it changes nothing, and the messages stay leased. A home that does reach one
// goes on while publishes are refused.
func (d *desk) mayCommit() error {
	now := d.boot()
	if d.level.isReadOnly(now) {
		d.probe()
	}
	if !d.level.isCutOff(now) {
		return nil
	}
	return &code.Error{Code: code.ReadOnlyDegraded, Effect: code.EffectNone, RetryAfterMs: readOnlyRetry,
		Text: "this host reaches no quorum of the partition" + d.silentHosts() + ": nothing has changed, and what is leased stays so; repeat after a pause"}
}

// readOnlyRetry is when a caller should repeat what was refused because there is no quorum in time.
const readOnlyRetry = 250

// silentHosts names the hosts of other full replicas that are not heard of; empty when all are.
func (d *desk) silentHosts() string {
	var silent []string
	for _, r := range d.fleet.FullReplicas(d.shard) {
		if r.Host != d.host && !d.fleet.Alive(r.Host) {
			silent = append(silent, itoa(r.Host))
		}
	}
	if len(silent) == 0 {
		return ""
	}
	return " (silent: host " + strings.Join(silent, ", ") + ")"
}

// reportsAge is how old what a host has told of its log may be: the interval of the reports, and their way.
const reportsAge = 400 * time.Millisecond

// lags says whether another full replica of a shard that this host leads is silent or behind the soft gap.
func (n *Node) lags(shard uint64, level *quorumLevel) bool {
	now := n.raft.Clock().Boot()
	for _, r := range n.FullReplicas(shard) {
		if r.Host == n.id {
			continue
		}
		if !n.Alive(r.Host) {
			return true
		}
		report, ok := n.raft.Peers().Reported(r.Host, shard)
		if ok && report.Replica == uint64(r.Replica) && level.behind(queue.Index(report.LastIndex), reportsAge, now) {
			return true
		}
	}
	return false
}
