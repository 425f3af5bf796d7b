package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// gate keeps calls out of the engine once it closes: it frees what they use. Nobody ever waits to enter: a call may wait, inside, for
// the engine, whose own goroutines enter too.
type gate struct {
	inside atomic.Int64  // how many are inside, and gateClosed
	empty  chan struct{} // one token when the last one has left a closed gate
}

const gateClosed = 1 << 62

func newGate() *gate { return &gate{empty: make(chan struct{}, 1)} }

// enter must be followed by leave if it returned true.
func (g *gate) enter() bool {
	if g.inside.Add(1) < gateClosed {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	if g.inside.Add(-1) == gateClosed {
		select {
		case g.empty <- struct{}{}:
		default: // it knows
		}
	}
}

// close keeps the others out and waits for those inside. Call it once.
func (g *gate) close() {
	if g.inside.Add(gateClosed) == gateClosed {
		return
	}
	<-g.empty
}

// holds keeps proposals to single shards out, for as long as they are held.
type holds struct {
	mu     sync.RWMutex
	shards map[uint64]int // how often each is held
}

// hold keeps proposals to a shard out, until free. Those that were let in are in the engine when it returns.
func (s *holds) hold(shard uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shards == nil {
		s.shards = make(map[uint64]int)
	}
	s.shards[shard]++
}

func (s *holds) free(shard uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shards[shard]--; s.shards[shard] == 0 {
		delete(s.shards, shard)
	}
}

// propose calls f, which must not wait for anything, unless the shard is held.
func (s *holds) propose(shard uint64, f func()) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.shards[shard] != 0 {
		return false
	}
	f()
	return true
}

// Leader returns who leads a shard: its replica and that one's host. It knows from its own replica, or from what the hosts
// that have one report, and may be late: a leader that died stays until an election. ok is false when none is known.
func (h *RaftHost) Leader(shard uint64) (replica queue.ReplicaID, hostID, term uint64, ok bool) {
	replica, term = h.ownLeader(shard)
	if replica == 0 {
		replica, term = h.reportedLeader(shard)
	}
	if replica == 0 {
		return 0, 0, term, false
	}
	hostID, ok = h.hostOf(shard, replica)
	return replica, hostID, term, ok
}

// ownLeader asks this host's replica. What the engine has told of a leader it says itself only once that is on its disk: who is woken by
// the one must not be answered by the other.
func (h *RaftHost) ownLeader(shard uint64) (queue.ReplicaID, uint64) {
	if !h.gate.enter() {
		return 0, 0
	}
	defer h.gate.leave()
	leader, term, known, err := h.nodeHost.GetLeaderID(shard)
	if err != nil {
		return 0, term
	}
	if !known {
		leader = 0
	}
	if told := h.leaders.get(shard); told.term > term || told.term == term && leader == 0 {
		return told.replica, told.term
	}
	return queue.ReplicaID(leader), term
}

// reportedLeader asks what the hosts have reported that have a replica and are alive; the greatest term wins.
func (h *RaftHost) reportedLeader(shard uint64) (leader queue.ReplicaID, term uint64) {
	p, ok := h.placement(shard)
	if !ok {
		return 0, 0
	}
	for _, r := range p.Replicas {
		report, ok := h.peers.Reported(r.HostID, shard)
		if alive, _ := h.Alive(r.HostID); !ok || !alive || report.Leader == 0 || report.Term < term {
			continue
		}
		leader, term = queue.ReplicaID(report.Leader), report.Term
	}
	return leader, term
}

// hostOf returns the host of a replica.
func (h *RaftHost) hostOf(shard uint64, replica queue.ReplicaID) (uint64, bool) {
	if p, ok := h.placement(shard); ok {
		if r, ok := p.Replica(replica); ok {
			return r.HostID, true
		}
	}
	return h.registry.HostOf(shard, uint64(replica))
}

// placement returns where a shard's replicas live; that of the catalog is known before there is a catalog.
func (h *RaftHost) placement(shard uint64) (catalog.Placement, bool) {
	if p, ok := h.Catalog().Placement(shard); ok {
		return p, true
	}
	if members := h.catalogMembers(); shard == catalog.ShardID && len(members) > 0 {
		return catalog.Placement{Shard: catalog.ShardID, Replicas: members}, true
	}
	return catalog.Placement{}, false
}

// TransferLeader asks for another leader of a shard that this host's replica leads or follows, and returns nil when this host's
// replica knows it as leader. Proposals are refused meanwhile. The new leader must be a full replica. An error, when ctx
// ends, does not mean that the transfer does not happen.
func (h *RaftHost) TransferLeader(ctx context.Context, shard uint64, to queue.ReplicaID) error {
	p, _ := h.placement(shard)
	if r, ok := p.Replica(to); ok && r.Birth == catalog.BirthWitness {
		return code.New(code.InvalidArgument, "replica %d of shard %d is a witness: leadership goes only to a full replica", to, shard)
	}
	for {
		changed := h.leaders.changed.wait()
		if leader, _ := h.ownLeader(shard); leader == to {
			return nil
		}
		if err := h.requestTransfer(shard, to); err != nil {
			return err
		}
		if err := h.await(ctx, changed); err != nil {
			return err
		}
	}
}

func (h *RaftHost) requestTransfer(shard uint64, to queue.ReplicaID) error {
	if _, err := h.running(shard); err != nil {
		return err
	}
	if !h.gate.enter() {
		return shuttingDown()
	}
	defer h.gate.leave()
	err := h.nodeHost.RequestLeaderTransfer(shard, uint64(to))
	if err != nil && !errors.Is(err, dragonboat.ErrSystemBusy) {
		return notProposed(shard, err)
	}
	return nil
}

// await waits for c.
func (h *RaftHost) await(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone, Cause: ctx.Err()}
	case <-h.ctx.Done():
		return shuttingDown()
	}
}

// AwaitLeader returns nil once this host's replica of a shard knows a leader.
func (h *RaftHost) AwaitLeader(ctx context.Context, shard uint64) error {
	for {
		changed := h.leaders.changed.wait()
		if leader, _ := h.ownLeader(shard); leader != 0 {
			return nil
		}
		if err := h.await(ctx, changed); err != nil {
			return err
		}
	}
}

// Membership is who is in a shard, by replica id, with the host of each.
type Membership struct {
	ChangeID  uint64 // index of the last change
	Full      map[queue.ReplicaID]uint64
	NonVoting map[queue.ReplicaID]uint64
	Witnesses map[queue.ReplicaID]uint64
	Removed   []queue.ReplicaID
}

// Membership reads a shard's membership, linearizably, at this host's full replica.
func (h *RaftHost) Membership(ctx context.Context, shard uint64) (Membership, error) {
	if _, err := h.running(shard); err != nil {
		return Membership{}, err
	}
	ctx, cancel := h.deadline(ctx)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	if !h.gate.enter() {
		return Membership{}, shuttingDown()
	}
	defer h.gate.leave()
	m, err := h.nodeHost.SyncGetShardMembership(ctx, shard)
	if err != nil {
		return Membership{}, readFailed(shard, err)
	}
	out := Membership{
		ChangeID: m.ConfigChangeID, Full: hosts(m.Nodes), NonVoting: hosts(m.NonVotings), Witnesses: hosts(m.Witnesses),
	}
	for id := range m.Removed {
		out.Removed = append(out.Removed, queue.ReplicaID(id))
	}
	return out, nil
}

// readFailed sorts the errors of a read, none of which has an effect.
func readFailed(shard uint64, err error) *code.Error {
	e := notProposed(shard, err)
	if errors.Is(err, dragonboat.ErrTimeout) || errors.Is(err, dragonboat.ErrCanceled) {
		return noLeader(shard, err)
	}
	return e
}

// Drain hands the leadership of every shard that this host leads to another host that is alive, so that stopping this one does
// not interrupt them. It stops when ctx ends, and returns how many shards this host still leads.
func (h *RaftHost) Drain(ctx context.Context) (led int) {
	var failed atomic.Int64
	var tasks sync.WaitGroup
	slots := make(chan struct{}, drainsAtOnce)
	h.replicas.Range(func(_, v any) bool {
		run := v.(*running)
		leader, _ := h.ownLeader(run.shard)
		if leader != run.id || run.witness {
			return true
		}
		slots <- struct{}{}
		tasks.Go(func() {
			defer func() { <-slots }()
			if to := h.successor(run); to == 0 || h.handOver(ctx, run, to, handOvers) != nil {
				failed.Add(1)
			}
		})
		return true
	})
	tasks.Wait()
	return int(failed.Load())
}

// HandOver hands the leadership of a shard that this host leads to another full replica, with no proposals on the way: those that
// come meanwhile are refused for a moment, of one attempt. An error leaves this host, or nobody known, in the lead.
func (h *RaftHost) HandOver(ctx context.Context, shard uint64, to queue.ReplicaID) error {
	run, err := h.running(shard)
	if err != nil {
		return err
	}
	if leader, _ := h.ownLeader(shard); leader != run.id {
		return code.New(code.StaleLeader, "this host does not lead shard %d", shard)
	}
	return h.handOver(ctx, run, to, 1)
}

const (
	// drainsAtOnce bounds the shards that get another leader at the same time.
	drainsAtOnce = 64
	// handOvers is how often Drain asks for a transfer. The engine forgets one that did not happen after an election timeout.
	handOvers = 3
	// quietTimeout bounds how long Drain waits for what was proposed to a shard.
	quietTimeout = 500 * time.Millisecond
)

// handOver transfers one shard's leadership, with no proposals on the way. The engine's transfer is one message, and the replica
// that gets it ignores it while it has committed entries that it has not applied: under load, nearly always. The old leader
// would then refuse every proposal for a whole election timeout, and lead on.
func (h *RaftHost) handOver(ctx context.Context, run *running, to queue.ReplicaID, attempts int) error {
	h.holds.hold(run.shard)
	defer h.holds.free(run.shard)
	h.awaitQuiet(ctx, run)
	var err error
	for range attempts {
		attempt, cancel := context.WithTimeout(ctx, time.Duration(h.cfg.ElectionTicks+4)*h.cfg.RTT)
		err = h.TransferLeader(attempt, run.shard, to)
		cancel()
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

// awaitQuiet waits until this host has applied all of a shard's log, and for two heartbeats more, in which the followers
// learn what is committed and apply it.
func (h *RaftHost) awaitQuiet(ctx context.Context, run *running) {
	ctx, cancel := context.WithTimeout(ctx, quietTimeout)
	defer cancel()
	for run.shard != catalog.ShardID && ctx.Err() == nil && !run.quiet() {
		pause(ctx, 5*time.Millisecond)
	}
	pause(ctx, 2*time.Duration(h.cfg.HeartbeatTicks)*h.cfg.RTT)
}

// quiet says whether what is in the log has been applied.
func (r *running) quiet() bool {
	r.lastMu.Lock()
	defer r.lastMu.Unlock()
	return r.applied.Load() >= r.lastIndex
}

// successor returns another full replica of a shard on a host that is alive, 0 if there is none; the one that reports the most.
func (h *RaftHost) successor(run *running) (to queue.ReplicaID) {
	p, _ := h.placement(run.shard)
	var most uint64
	for _, r := range p.Replicas {
		if r.ID == run.id || r.Birth == catalog.BirthWitness || r.State != catalog.ReplicaStarted || !r.Votes() || h.Catalog().Leaves(run.shard, r.ID) {
			continue
		}
		report, ok := h.peers.Reported(r.HostID, run.shard)
		if alive, _ := h.Alive(r.HostID); ok && alive && h.peers.Answers(r.HostID) && (to == 0 || report.LastIndex > most) {
			to, most = r.ID, report.LastIndex
		}
	}
	return to
}

// hosts reads targets.
func hosts(targets map[uint64]string) map[queue.ReplicaID]uint64 {
	out := make(map[queue.ReplicaID]uint64, len(targets))
	for replica, target := range targets {
		id, err := ParseTarget(target)
		if err != nil {
			panic(fmt.Sprintf("BUG: replica %d is in a membership at %q", replica, target))
		}
		out[queue.ReplicaID(replica)] = id
	}
	return out
}

// deadline gives ctx the default deadline if it has none: the engine demands one.
func (h *RaftHost) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, h.cfg.ProposeTimeout)
}
