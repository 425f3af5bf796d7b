package node

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/host/faultnet"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// TestCutsInOneDirection breaks one direction after the other of a fleet of three full hosts, under traffic: a leader that hears
// nobody, a home that hears nobody, a home that nobody hears, and entries that nobody acknowledges in time.
func TestCutsInOneDirection(t *testing.T) {
	t.Parallel()
	f := openFaultFleet(t, layoutOf{full: 3}, 90*time.Second)
	f.awaitHealthy()
	f.group("g", f.nodes[0])
	w := startTraffic(f, "g")
	w.goesOn()
	f.deafLeader(w)
	f.cutHome(w, "hears nobody", f.deaf, f.refusesAcks)
	f.cutHome(w, "is heard by nobody", f.mute, func(*Node, string) {})
	f.hungCommits(w)
	w.end()
	f.sameState()
}

// deafLeader: a leader that can send and hears nobody steps down (CheckQuorum), others go on, and the level comes back to 2.
func (f *faultFleet) deafLeader(w *traffic) {
	f.Helper()
	old := f.awaitLeader(nil)
	began := time.Now()
	f.deaf(old.id, faultnet.Rule{Cut: true})
	f.eventually("the old leader is read-only, or knows that it leads no more", func() bool { return f.level(old) >= quorumReadOnly })
	next := f.awaitLeader(old)
	f.Logf("the leader hears nobody: host %d leads in place of host %d after %v", next.id, old.id, time.Since(began))
	f.eventually("the old leader has stepped down", func() bool {
		_, at, _, ok := old.raft.Leader(f.shard)
		return !ok || at != old.id
	})
	w.goesOn()
	f.eventually("the new leader misses a full replica", func() bool { return f.level(next) == quorumSoft })
	f.net.Heal()
	f.awaitHealthy()
	w.goesOn()
}

// cutHome: a home that is cut off in one direction is replaced, and meanwhile delivers nothing beside its successor.
func (f *faultFleet) cutHome(w *traffic, what string, cut func(uint64, faultnet.Rule), meanwhile func(at *Node, held string)) {
	f.Helper()
	leads := f.awaitLeader(nil)
	at := f.follower()
	f.eventually("the home is on a host that does not lead", func() bool {
		for _, n := range f.full() {
			if f.home(n, "g") != at.id {
				_, _ = n.MoveGroup(f.ctx, "q", nil, "g", at.id)
			}
		}
		return f.home(at, "g") == at.id && f.home(leads, "g") == at.id
	})
	w.goesOn()
	held := f.hold(at)
	began := time.Now()
	cut(at.id, faultnet.Rule{Cut: true})
	f.eventually("another home", func() bool {
		leads := f.leader()
		return leads != nil && leads != at && f.home(leads, "g") != at.id
	})
	f.Logf("the home %s: replaced after %v", what, time.Since(began))
	f.staysOut(at)
	w.goesOn()
	meanwhile(at, held)
	ctx, cancel := context.WithTimeout(f.ctx, 500*time.Millisecond)
	defer cancel()
	res, err := at.Settle(ctx, api.Settle{Kind: api.SettleAck, Queue: "q", Group: "g", Receipts: []string{held}})
	if err == nil {
		require.Error(f, res[0].Err, "an ack at the old home, under its old epoch")
	}
	f.net.Heal()
	f.awaitHealthy()
	w.goesOn()
}

// refusesAcks: a home that reaches no quorum refuses acks at once, and changes nothing.
func (f *faultFleet) refusesAcks(at *Node, held string) {
	f.Helper()
	f.eventually("acks are refused", func() bool {
		ctx, cancel := context.WithTimeout(f.ctx, time.Second)
		defer cancel()
		_, err := at.Settle(ctx, api.Settle{Kind: api.SettleAck, Queue: "q", Group: "g", Receipts: []string{held}})
		var e *code.Error
		return errors.As(err, &e) && e.Code == code.ReadOnlyDegraded && e.Effect == code.EffectNone && ctx.Err() == nil
	})
}

// staysOut: a host that is cut off in one direction is given nothing to do, also when half of its reports come through.
func (f *faultFleet) staysOut(out *Node) {
	f.Helper()
	within, cancel := context.WithTimeout(f.ctx, 1500*time.Millisecond)
	defer cancel()
	for within.Err() == nil {
		pause(within, 5*time.Millisecond)
		if leads := f.leader(); leads != nil && leads.Serves(out.id, f.shard) {
			f.Fatalf("host %d takes host %d, which does not hear it, for one that serves", leads.id, out.id)
		}
	}
}

// hold receives one message at a home, and returns its receipt.
func (f *faultFleet) hold(at *Node) (receipt string) {
	f.Helper()
	lease := time.Second
	f.eventually("a message is held", func() bool {
		ds, _, err := at.Receive(f.ctx, api.Receive{Queue: "q", Group: "g", Max: 1, MaxBytes: 1 << 20, Wait: 100 * time.Millisecond, Lease: &lease})
		if err == nil && len(ds) == 1 {
			receipt = ds[0].Receipt
		}
		return receipt != ""
	})
	return receipt
}

// hungCommits: while commits take longer than the quorum's timeout, publishes are refused at once and deliveries go on; it ends by
// itself.
func (f *faultFleet) hungCommits(w *traffic) {
	f.Helper()
	w.mu.Lock()
	w.took = 0
	before := w.refused[code.ReadOnlyDegraded]
	w.mu.Unlock()
	leads := f.awaitLeader(nil)
	f.everywhere(faultnet.Rule{Delay: quorumAckTimeout, Only: faultnet.Entries})
	f.eventually("publishes are refused", func() bool { return w.refusals(code.ReadOnlyDegraded) > before+20 })
	require.Equal(f, uint32(quorumReadOnly), f.level(f.awaitLeader(nil)))
	h := w.handed()
	f.eventually("deliveries go on", func() bool { return w.handed() > h })
	f.net.Heal()
	f.awaitHealthy()
	w.goesOn()
	w.mu.Lock()
	defer w.mu.Unlock()
	f.Logf("commits hung: %d publishes refused, the slowest refusal took %v; host %d led", w.refused[code.ReadOnlyDegraded]-before, w.took, leads.id)
}

// TestCutsBesideAWitness runs two full hosts and a witness over TLS: the full hosts do not hear each other and both hear the
// witness; then one misses so much that it needs the whole state, gets it over a bad network, and starts again there.
func TestCutsBesideAWitness(t *testing.T) {
	t.Parallel()
	var installed atomic.Int32
	f := openFaultFleet(t, layoutOf{full: 2, witnesses: 1, tls: true, adjust: func(c *host.Config) {
		c.SnapshotEntries = 100
		was := c.OnInstalled
		c.OnInstalled = func(shard uint64) {
			installed.Add(1)
			was(shard)
		}
	}}, 90*time.Second)
	f.awaitHealthy()
	f.group("g", f.follower())
	w := startTraffic(f, "g")
	w.goesOn()
	f.fullHostsApart(w)
	f.installOverABadNetwork(w, &installed)
	w.end()
	f.sameState()
}

// fullHostsApart: with the witness, one full host goes on, at level 1; the other, which could win no election, says that there is
// no leader, and delivers nothing.
func (f *faultFleet) fullHostsApart(w *traffic) {
	f.Helper()
	before := f.awaitLeader(nil)
	f.net.Both(f.configs[0].Host, f.configs[1].Host, faultnet.Rule{Cut: true})
	f.eventually("one leads alone, at level 1", func() bool {
		leads := f.leader()
		return leads != nil && f.level(leads) == quorumSoft && leads.raft.InSync(f.shard) == 1
	})
	w.goesOn()
	f.eventually("the time with one copy is among the events of the leader's host", func() bool {
		leads := f.leader()
		if leads == nil {
			return false
		}
		events, _, err := leads.ListEvents(f.Context(), api.ListEvents{Host: leads.id, Limit: keptEvents, Event: "quorum"})
		return err == nil && slices.ContainsFunc(events, func(e api.HostEvent) bool {
			return e.Shard == f.shard && e.Queue != "" && e.Details["to"] == "soft" && e.Details["dataCopies"] == "1"
		})
	})
	f.eventually("the home is at the leader, and the other host knows no leader", func() bool {
		leads := f.leader()
		if leads == nil {
			return false
		}
		for _, n := range f.full() {
			if n != leads && f.level(n) != quorumElecting {
				return false
			}
		}
		return f.home(leads, "g") == leads.id
	})
	w.goesOn()
	f.Logf("the full hosts apart: host %d leads, before it host %d did", f.awaitLeader(nil).id, before.id)
	f.net.Heal()
	f.awaitHealthy()
	w.goesOn()
}

// installOverABadNetwork: a full host that was away for longer than the log reaches gets the whole state, with messages delayed,
// lost and reordered, and catches up again after a restart. It is the host that the traffic asks first.
func (f *faultFleet) installOverABadNetwork(w *traffic, installed *atomic.Int32) {
	f.Helper()
	const away = 0
	f.eventually("the other full host leads", func() bool {
		if f.leader() != f.nodes[away] {
			return f.leader() != nil
		}
		for _, r := range f.nodes[away].FullReplicas(f.shard) {
			if r.Host != f.configs[away].Host {
				_ = f.nodes[away].raft.HandOver(f.ctx, f.shard, r.Replica)
			}
		}
		return false
	})
	id := f.configs[away].Host
	for _, o := range f.others(id) {
		f.net.Both(id, o, faultnet.Rule{Refuse: true})
	}
	leads := f.awaitLeader(f.nodes[away])
	f.eventually("its connection is missed", func() bool { return leads.raft.InSync(f.shard) == 1 })
	p := w.published()
	f.eventually("the log is cut", func() bool { return w.published() > p+400 })
	f.everywhere(faultnet.Rule{Delay: time.Millisecond, Jitter: 8 * time.Millisecond, Loss: 0.02, Reorder: 0.1})
	f.eventually("the whole state is installed", func() bool { return installed.Load() > 0 })
	f.catchesUp(w, away)
	f.stop(away)
	w.goesOn()
	f.start(away)
	f.catchesUp(w, away)
	f.Logf("installed over a bad network: %d messages lost so far", f.net.Lost())
	require.Positive(f, f.net.Lost())
	f.net.Heal()
	f.awaitHealthy()
}

// catchesUp waits until a host has applied what the fleet has now.
func (f *faultFleet) catchesUp(w *traffic, i int) {
	f.Helper()
	p := w.published()
	f.eventually("the host catches up", func() bool {
		d, err := f.nodes[i].desk(f.shard)
		return err == nil && d.reader.Meta().Last >= queue.Address(p)
	})
}

// sameState: all full replicas have equal state once nothing moves (G7).
func (f *faultFleet) sameState() {
	f.Helper()
	f.eventually("equal state at an equal index", func() bool {
		var first api.ReplicaDigest
		for i, n := range f.full() {
			d, err := n.Digest(f.ctx, "q", 0)
			if err != nil {
				return false
			}
			if i == 0 {
				first = d
			}
			if d.Applied != first.Applied {
				return false
			}
			require.Equal(f, first.Digest, d.Digest, "at index %d", d.Applied)
		}
		return true
	})
}
