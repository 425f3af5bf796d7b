package api

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Hosts is the part of a Backend with which operators change the fleet. Its rules are the Backend's.
type Hosts interface {
	ListHosts(ctx context.Context) (HostList, error)
	CreateJoinToken(ctx context.Context, ttl time.Duration) (token string, expires time.Time, err error)
	DrainHost(ctx context.Context, host uint64, cancel bool) error
	// RemoveHost says whether the host is gone; with lost it may go later.
	RemoveHost(ctx context.Context, host uint64, lost bool) (removed bool, err error)
	Rebalance(ctx context.Context, dryRun bool) (Rebalanced, error)
	// MoveLeader is answered by the leader's host.
	MoveLeader(ctx context.Context, shard, toHost uint64) error
	// RebuildReplica begins to make a host's replica of a shard anew on that host.
	RebuildReplica(ctx context.Context, shard, host uint64) error
	// AcceptClock is answered by the host itself. It reads its clock and, unless it is a dry run, takes it up.
	AcceptClock(ctx context.Context, host uint64, dryRun bool) (ClockState, error)
	// ListEvents is answered by the host itself: at most limit of the newest after one, oldest first, and the newest that there is.
	ListEvents(ctx context.Context, r ListEvents) (events []HostEvent, newest uint64, err error)
}

// ListEvents asks a host what has happened on it. Queue and Event may be empty: all.
type ListEvents struct {
	Host, After  uint64
	Limit        int
	Queue, Event string
}

// HostEvent is one event, and the queue that its shard belongs to.
type HostEvent struct {
	event.Event
	Tenant, Queue string
	Partition     uint32
}

// ClockState is a host's clock; Offset is how far the others' median is ahead of Wall, of Asked others.
type ClockState struct {
	Wall, GoesBy queue.Stamp
	Offset       time.Duration
	Asked        int
	Refused      bool
}

// HostList is the fleet's hosts, and the replicas that are, or should be, on their way.
type HostList struct {
	Hosts []HostDetail
	Moves []ReplicaMove
}

// HostDetail is one host.
type HostDetail struct {
	HostInfo
	State    string
	Raft     string
	Replicas int
	Leaders  int
	// Clock is ahead of the answering host's, if ClockKnown; with ClockRefused the host itself does not take it up.
	Clock                    time.Duration
	ClockKnown, ClockRefused bool
}

// ReplicaMove is a replica that is being replaced, is to be, or cannot be. Queue is empty for the catalog.
type ReplicaMove struct {
	Shard     uint64
	Queue     string
	Partition uint32
	Replica   uint64
	From, To  uint64
	Step      string
	Why       string
	Reason    string
}

// Rebalanced is what is left to make even, and what was begun.
type Rebalanced struct {
	Moves    []ReplicaMove
	Started  int
	UnderWay int
	Leaders  []LeaderMove
}

// LeaderMove is a leader that should be on another host.
type LeaderMove struct {
	Shard     uint64
	Queue     string
	Partition uint32
	From, To  uint64
}

// defaultJoinTokenTTL is how long a join token can be used when its maker does not say.
const defaultJoinTokenTTL = time.Hour

// fleetService implements tierq.v1.FleetService.
type fleetService struct{ *Server }

func (s fleetService) ListHosts(ctx context.Context, _ *connect.Request[tierqv1.ListHostsRequest]) (*connect.Response[tierqv1.ListHostsResponse], error) {
	l, err := s.backend.ListHosts(ctx)
	if err != nil {
		return nil, err
	}
	out := &tierqv1.ListHostsResponse{Moves: protoMoves(l.Moves)}
	for _, h := range l.Hosts {
		out.Hosts = append(out.Hosts, &tierqv1.FleetHost{
			Id: h.ID, Role: h.Role, State: h.State, Alive: h.Alive, Replicas: uint32(h.Replicas), Leaders: uint32(h.Leaders),
			Domain: h.Domain, Api: h.API, Peer: h.Peer, Raft: h.Raft,
			ClockOffsetMs: h.Clock.Milliseconds(), ClockKnown: h.ClockKnown, ClockRefused: h.ClockRefused,
		})
	}
	return connect.NewResponse(out), nil
}

func protoMoves(moves []ReplicaMove) []*tierqv1.ReplicaMove {
	var out []*tierqv1.ReplicaMove
	for _, m := range moves {
		out = append(out, &tierqv1.ReplicaMove{
			Shard: m.Shard, Queue: m.Queue, Partition: m.Partition, Replica: m.Replica, FromHost: m.From, ToHost: m.To,
			Step: m.Step, Why: m.Why, Reason: m.Reason,
		})
	}
	return out
}

func (s fleetService) CreateJoinToken(ctx context.Context, req *connect.Request[tierqv1.CreateJoinTokenRequest]) (*connect.Response[tierqv1.CreateJoinTokenResponse], error) {
	ttl := time.Duration(min(req.Msg.GetTtlMs(), uint64(1<<40))) * time.Millisecond
	if ttl == 0 {
		ttl = defaultJoinTokenTTL
	}
	token, expires, err := s.backend.CreateJoinToken(ctx, ttl)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.CreateJoinTokenResponse{Token: token, ExpiresMs: uint64(expires.UnixMilli())}), nil
}

func (s fleetService) DrainHost(ctx context.Context, req *connect.Request[tierqv1.DrainHostRequest]) (*connect.Response[tierqv1.DrainHostResponse], error) {
	if err := s.backend.DrainHost(ctx, req.Msg.GetHost(), req.Msg.GetCancel()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.DrainHostResponse{}), nil
}

func (s fleetService) RemoveHost(ctx context.Context, req *connect.Request[tierqv1.RemoveHostRequest]) (*connect.Response[tierqv1.RemoveHostResponse], error) {
	removed, err := s.backend.RemoveHost(ctx, req.Msg.GetHost(), req.Msg.GetLost())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.RemoveHostResponse{Removed: removed}), nil
}

func (s fleetService) Rebalance(ctx context.Context, req *connect.Request[tierqv1.RebalanceRequest]) (*connect.Response[tierqv1.RebalanceResponse], error) {
	r, err := s.backend.Rebalance(ctx, req.Msg.GetDryRun())
	if err != nil {
		return nil, err
	}
	out := &tierqv1.RebalanceResponse{Moves: protoMoves(r.Moves), Started: uint32(r.Started), UnderWay: uint32(r.UnderWay)}
	for _, m := range r.Leaders {
		out.Leaders = append(out.Leaders, &tierqv1.LeaderMove{Shard: m.Shard, Queue: m.Queue, Partition: m.Partition, FromHost: m.From, ToHost: m.To})
	}
	return connect.NewResponse(out), nil
}

func (s fleetService) MoveLeader(ctx context.Context, req *connect.Request[tierqv1.MoveLeaderRequest]) (*connect.Response[tierqv1.MoveLeaderResponse], error) {
	m := req.Msg
	if m.GetShard() == 0 || m.GetToHost() == 0 {
		return nil, code.New(code.InvalidArgument, "shard, to_host: name both")
	}
	if err := s.backend.MoveLeader(ctx, m.GetShard(), m.GetToHost()); err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.MoveLeaderRequest]) (*connect.Response[tierqv1.MoveLeaderResponse], error) {
			httpClient, base := s.forward(host)
			return tierqv1connect.NewFleetServiceClient(httpClient, base, connect.WithGRPC()).MoveLeader(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.MoveLeaderResponse{}), nil
}

func (s fleetService) RebuildReplica(ctx context.Context, req *connect.Request[tierqv1.RebuildReplicaRequest]) (*connect.Response[tierqv1.RebuildReplicaResponse], error) {
	m := req.Msg
	if m.GetShard() == 0 || m.GetHost() == 0 {
		return nil, code.New(code.InvalidArgument, "shard, host: name both")
	}
	if err := s.backend.RebuildReplica(ctx, m.GetShard(), m.GetHost()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.RebuildReplicaResponse{}), nil
}

func (s fleetService) AcceptClock(ctx context.Context, req *connect.Request[tierqv1.AcceptClockRequest]) (*connect.Response[tierqv1.AcceptClockResponse], error) {
	m := req.Msg
	if m.GetHost() == 0 {
		return nil, code.New(code.InvalidArgument, "host: name one")
	}
	c, err := s.backend.AcceptClock(ctx, m.GetHost(), m.GetDryRun())
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.AcceptClockRequest]) (*connect.Response[tierqv1.AcceptClockResponse], error) {
			httpClient, base := s.forward(host)
			return tierqv1connect.NewFleetServiceClient(httpClient, base, connect.WithGRPC()).AcceptClock(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.AcceptClockResponse{
		Host: m.GetHost(), WallUnixMs: uint64(c.Wall), GoesByUnixMs: uint64(c.GoesBy), OffsetMs: c.Offset.Milliseconds(), Asked: uint32(c.Asked),
		Refused: c.Refused, Accepted: !m.GetDryRun(),
	}), nil
}

// maxEvents is how many events one call returns; defaultEvents how many when it does not say.
const (
	maxEvents     = 2000
	defaultEvents = 100
)

func (s fleetService) ListEvents(ctx context.Context, req *connect.Request[tierqv1.ListEventsRequest]) (*connect.Response[tierqv1.ListEventsResponse], error) {
	m := req.Msg
	r := ListEvents{Host: m.GetHost(), After: m.GetAfter(), Limit: int(m.GetLimit()), Queue: m.GetQueue(), Event: m.GetEvent()}
	switch {
	case r.Host == 0:
		return nil, code.New(code.InvalidArgument, "host: name one")
	case m.GetLimit() > maxEvents:
		return nil, code.New(code.InvalidArgument, "limit: %d is too large: at most %d", m.GetLimit(), maxEvents)
	case r.Limit == 0:
		r.Limit = defaultEvents
	}
	events, newest, err := s.backend.ListEvents(ctx, r)
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ListEventsRequest]) (*connect.Response[tierqv1.ListEventsResponse], error) {
			httpClient, base := s.forward(host)
			return tierqv1connect.NewFleetServiceClient(httpClient, base, connect.WithGRPC()).ListEvents(ctx, r)
		})
	}
	out := &tierqv1.ListEventsResponse{Host: r.Host, Newest: newest}
	for _, e := range events {
		out.Events = append(out.Events, &tierqv1.FleetEvent{
			Seq: e.Seq, TimeUnixMs: uint64(e.Time.UnixMilli()), Event: e.Name, Text: e.Text, Shard: e.Shard,
			Tenant: e.Tenant, Queue: e.Queue, Partition: e.Partition, Details: e.Details,
		})
	}
	return connect.NewResponse(out), nil
}
