package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Join takes the host of a configuration into a running fleet with a token of `tierq host token`. It does not run it: Open does, after that.
func Join(ctx context.Context, cfg Config, token string, log *zap.Logger) error {
	cfg.EnsureDefaults()
	if err := cfg.Validate(); err != nil {
		return err
	}
	n := &Node{cfg: cfg, log: log}
	_, err := host.Join(ctx, n.hostConfig(Listeners{}), token)
	return err
}

// fleetView is the catalog as it is now, or if it has no quorum, as this host last saw it.
func (n *Node) fleetView(ctx context.Context) *catalog.View {
	brief, cancel := briefly(ctx)
	defer cancel()
	if v, err := n.raft.ReadCatalog(brief); err == nil {
		return v
	}
	return n.raft.Catalog()
}

// ListHosts implements api.Hosts.
func (n *Node) ListHosts(ctx context.Context) (api.HostList, error) {
	v := n.fleetView(ctx)
	leads := map[uint64]int{}
	for _, hostID := range n.leaders(v) {
		leads[hostID]++
	}
	var out api.HostList
	for _, h := range v.Hosts() {
		alive, silent := n.heard(h.ID)
		offset, refused, known := n.clockOf(h.ID)
		out.Hosts = append(out.Hosts, api.HostDetail{
			Clock: offset, ClockKnown: known, ClockRefused: refused,
			HostInfo: api.HostInfo{ID: h.ID, Role: h.Role.String(), API: h.ClientAddr, Peer: h.PeerAddr, Domain: h.Domain, Alive: alive, Silent: silent},
			State:    v.HostState(h.ID).String(), Raft: h.RaftAddr, Replicas: v.Left(h.ID), Leaders: leads[h.ID],
		})
	}
	for _, m := range v.Moves() {
		out.Moves = append(out.Moves, n.moveUnderWay(v, m))
	}
	for _, planned := range n.raft.Planned() {
		out.Moves = append(out.Moves, n.plannedMove(v, planned))
	}
	return out, nil
}

// clockOf says how far a host's wall clock is ahead of this one's, and whether the host takes it up.
func (n *Node) clockOf(id uint64) (offset time.Duration, refused, known bool) {
	if id == n.id {
		return 0, n.raft.Clock().Skewed(), true
	}
	return n.raft.Peers().ClockOffset(id)
}

// AcceptClock implements api.Hosts.
func (n *Node) AcceptClock(_ context.Context, hostID uint64, dryRun bool) (api.ClockState, error) {
	if hostID != n.id {
		h, ok := n.view().Host(hostID)
		switch {
		case !ok:
			return api.ClockState{}, code.New(code.UnknownHost, "host %d is not in the fleet", hostID)
		case h.Role != catalog.HostFull:
			return api.ClockState{}, code.New(code.InvalidArgument, "host %d is a witness: nothing goes by its clock", hostID)
		}
		return api.ClockState{}, n.elsewhere(hostID, code.New(code.Unavailable, "host %d must answer itself", hostID))
	}
	clock := n.raft.Clock()
	r := clock.Reading()
	if !dryRun {
		n.log.Warn("the clock is taken up as it is, as an operator said", event.Is("clock-accepted"), zap.Duration("offset", r.Offset), zap.Int("asked", r.Asked), zap.Bool("refused", r.Refused))
		clock.Accept()
	}
	return api.ClockState{Wall: r.Wall, GoesBy: r.GoesBy, Offset: r.Offset, Asked: r.Asked, Refused: r.Refused}, nil
}

// leaders are the hosts that lead the shards, as far as known.
func (n *Node) leaders(v *catalog.View) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for _, shard := range v.Shards() {
		if _, hostID, _, ok := n.raft.Leader(shard); ok {
			out[shard] = hostID
		}
	}
	return out
}

func (n *Node) moveUnderWay(v *catalog.View, m catalog.Move) api.ReplicaMove {
	p, _ := v.Placement(m.Shard)
	from, _ := p.Replica(m.From)
	to, _ := p.Replica(m.To)
	out := api.ReplicaMove{Shard: m.Shard, Partition: p.Partition, Replica: uint64(m.From), From: from.HostID, To: to.HostID, Step: m.Step.String(), Why: "balance"}
	switch {
	case m.Widens():
		out.Why, out.Replica = "voters", uint64(m.To)
	case m.Narrows():
		out.Why, out.To = "voters", 0
	case from.State == catalog.ReplicaLost:
		out.Why = "lost"
	case p.Rebuilds(m):
		out.Why = "rebuild"
	case v.HostState(from.HostID) == catalog.HostDraining:
		out.Why = "draining"
	}
	if p.Rebuilds(m) {
		out.To = from.HostID
	}
	if m.Undo {
		out.Step, out.Reason = "undo", "the new replica did not come: it is taken back"
	}
	out.Queue = queueName(v, m.Shard)
	return out
}

func (n *Node) plannedMove(v *catalog.View, m catalog.Planned) api.ReplicaMove {
	p, _ := v.Placement(m.Shard)
	out := api.ReplicaMove{
		Shard: m.Shard, Queue: queueName(v, m.Shard), Partition: p.Partition, Replica: uint64(m.From), From: m.FromHost, To: m.ToHost,
		Step: "planned", Why: m.Why, Reason: m.Reason,
	}
	if !m.Possible() {
		out.Step = "blocked"
	}
	return out
}

func queueName(v *catalog.View, shard uint64) string {
	q, _ := v.QueueOfShard(shard)
	return q.Name
}

// CreateJoinToken implements api.Hosts.
func (n *Node) CreateJoinToken(ctx context.Context, ttl time.Duration) (string, time.Time, error) {
	return n.raft.CreateJoinToken(ctx, ttl)
}

// DrainHost implements api.Hosts.
func (n *Node) DrainHost(ctx context.Context, hostID uint64, cancel bool) error {
	return n.changeCatalog(ctx, &catalog.DrainHost{HostID: hostID, Cancel: cancel})
}

// RemoveHost implements api.Hosts.
func (n *Node) RemoveHost(ctx context.Context, hostID uint64, lost bool) (bool, error) {
	if err := n.changeCatalog(ctx, &catalog.RemoveHost{HostID: hostID, Lost: lost}); err != nil {
		return false, err
	}
	return n.raft.Catalog().RemovedHost(hostID), nil
}

func (n *Node) changeCatalog(ctx context.Context, c catalog.Command) error {
	r, err := n.raft.ProposeCatalog(ctx, c)
	if err != nil {
		return err
	}
	return r.Err()
}

// Rebalance implements api.Hosts.
func (n *Node) Rebalance(ctx context.Context, dryRun bool) (api.Rebalanced, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return api.Rebalanced{}, err
	}
	out := api.Rebalanced{UnderWay: len(v.Moves())}
	for _, planned := range v.Rebalance(n.Alive) {
		out.Moves = append(out.Moves, n.plannedMove(v, planned))
		if dryRun || out.UnderWay >= catalog.MaxMoves {
			continue
		}
		if err := n.changeCatalog(ctx, planned.Command()); err != nil {
			var refused *code.Error
			if errors.As(err, &refused) && (refused.Code == code.LimitReached || refused.Code == code.MutationFenced) {
				continue // the fleet has begun others meanwhile
			}
			return out, err
		}
		out.Started++
		out.UnderWay++
	}
	for _, m := range n.leaderPlan(v) {
		p, _ := v.Placement(m.shard)
		out.Leaders = append(out.Leaders, api.LeaderMove{Shard: m.shard, Queue: queueName(v, m.shard), Partition: p.Partition, From: m.from, To: m.to})
	}
	return out, nil
}

// RebuildReplica implements api.Hosts.
func (n *Node) RebuildReplica(ctx context.Context, shard, hostID uint64) error {
	return n.raft.Rebuild(ctx, shard, hostID)
}

// MoveLeader implements api.Hosts.
func (n *Node) MoveLeader(ctx context.Context, shard, toHost uint64) error {
	p, ok := n.view().Placement(shard)
	if !ok || p.Deleted {
		return code.New(code.UnknownPartition, "shard %d is not in the catalog", shard)
	}
	to, ok := p.OnHost(toHost)
	if !ok || to.Birth == catalog.BirthWitness || !n.Settled(shard, to.ID) {
		return code.New(code.InvalidArgument, "host %d has no full replica of shard %d that can lead", toHost, shard)
	}
	_, hostID, _, known := n.raft.Leader(shard)
	switch {
	case !known:
		return &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 200}
	case hostID == toHost:
		return nil
	case hostID != n.id:
		return n.elsewhere(hostID, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone})
	}
	return n.raft.HandOver(ctx, shard, to.ID)
}

// Settled says whether a replica votes and stays: only such a one is given homes and leadership.
func (n *Node) Settled(shard uint64, id queue.ReplicaID) bool {
	v := n.view()
	p, _ := v.Placement(shard)
	r, ok := p.Replica(id)
	return ok && r.Votes() && !v.Leaves(shard, id)
}

// settler is the part of a fleet that knows which replicas come and go; Node is one.
type settler interface {
	Settled(shard uint64, id queue.ReplicaID) bool
}

// settled is Settled where the fleet knows.
func (d *desk) settled(id queue.ReplicaID) bool {
	s, ok := d.fleet.(settler)
	return !ok || s.Settled(d.shard, id)
}

// onLeave hands the homes of a replica that leaves its shard over.
func (n *Node) onLeave(ctx context.Context, shard uint64) error {
	n.mu.RLock()
	d := n.desks[shard]
	n.mu.RUnlock()
	if d == nil {
		return nil
	}
	if err := d.keeper.ReleaseAll(ctx, d.spread); err != nil {
		return err
	}
	left := 0
	for _, g := range d.reader.Groups() {
		if g.Home == d.self {
			left++
		}
	}
	if left > 0 {
		return fmt.Errorf("%d groups have their home here", left)
	}
	return nil
}
