package clienttest

import (
	"context"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// hostsView is the service of one host for those who change the fleet: it answers as the test has said.
type hostsView struct{ f *Fleet }

func (v hostsView) ListHosts(_ context.Context, r *connect.Request[tierqv1.ListHostsRequest]) (*connect.Response[tierqv1.ListHostsResponse], error) {
	return answer[tierqv1.ListHostsRequest, tierqv1.ListHostsResponse](v.f, r)
}

func (v hostsView) CreateJoinToken(_ context.Context, r *connect.Request[tierqv1.CreateJoinTokenRequest]) (*connect.Response[tierqv1.CreateJoinTokenResponse], error) {
	return answer[tierqv1.CreateJoinTokenRequest, tierqv1.CreateJoinTokenResponse](v.f, r)
}

func (v hostsView) DrainHost(_ context.Context, r *connect.Request[tierqv1.DrainHostRequest]) (*connect.Response[tierqv1.DrainHostResponse], error) {
	return answer[tierqv1.DrainHostRequest, tierqv1.DrainHostResponse](v.f, r)
}

func (v hostsView) RemoveHost(_ context.Context, r *connect.Request[tierqv1.RemoveHostRequest]) (*connect.Response[tierqv1.RemoveHostResponse], error) {
	return answer[tierqv1.RemoveHostRequest, tierqv1.RemoveHostResponse](v.f, r)
}

func (v hostsView) Rebalance(_ context.Context, r *connect.Request[tierqv1.RebalanceRequest]) (*connect.Response[tierqv1.RebalanceResponse], error) {
	return answer[tierqv1.RebalanceRequest, tierqv1.RebalanceResponse](v.f, r)
}

func (v hostsView) MoveLeader(_ context.Context, r *connect.Request[tierqv1.MoveLeaderRequest]) (*connect.Response[tierqv1.MoveLeaderResponse], error) {
	return answer[tierqv1.MoveLeaderRequest, tierqv1.MoveLeaderResponse](v.f, r)
}

func (v hostsView) RebuildReplica(_ context.Context, r *connect.Request[tierqv1.RebuildReplicaRequest]) (*connect.Response[tierqv1.RebuildReplicaResponse], error) {
	return answer[tierqv1.RebuildReplicaRequest, tierqv1.RebuildReplicaResponse](v.f, r)
}

func (v hostsView) AcceptClock(_ context.Context, r *connect.Request[tierqv1.AcceptClockRequest]) (*connect.Response[tierqv1.AcceptClockResponse], error) {
	return answer[tierqv1.AcceptClockRequest, tierqv1.AcceptClockResponse](v.f, r)
}

func (v hostsView) ListEvents(_ context.Context, r *connect.Request[tierqv1.ListEventsRequest]) (*connect.Response[tierqv1.ListEventsResponse], error) {
	return answer[tierqv1.ListEventsRequest, tierqv1.ListEventsResponse](v.f, r)
}
