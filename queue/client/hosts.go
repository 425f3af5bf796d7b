package client

import (
	"context"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// ListHosts returns the fleet's hosts, what each has, and the replicas that are being replaced, or should be and cannot.
func (c *Client) ListHosts(ctx context.Context) (*tierqv1.ListHostsResponse, error) {
	return call(ctx, c, read(route{}), func(a *apis) method[tierqv1.ListHostsRequest, tierqv1.ListHostsResponse] { return a.fleet().ListHosts }, &tierqv1.ListHostsRequest{})
}

// CreateJoinToken makes a token with which one host can join the fleet; ttlMs 0 is an hour. One whose answer was lost expires unused.
func (c *Client) CreateJoinToken(ctx context.Context, ttlMs uint64) (*tierqv1.CreateJoinTokenResponse, error) {
	return call(ctx, c, write(true), func(a *apis) method[tierqv1.CreateJoinTokenRequest, tierqv1.CreateJoinTokenResponse] {
		return a.fleet().CreateJoinToken
	}, &tierqv1.CreateJoinTokenRequest{TtlMs: ttlMs})
}

// DrainHost begins to move everything away from a host, or ends that.
func (c *Client) DrainHost(ctx context.Context, host uint64, cancel bool) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.DrainHostRequest, tierqv1.DrainHostResponse] { return a.fleet().DrainHost },
		&tierqv1.DrainHostRequest{Host: host, Cancel: cancel})
	return err
}

// RemoveHost removes a host without replicas, or with lost one that is gone for good. It returns false when the host goes later, once its
// replicas are replaced.
func (c *Client) RemoveHost(ctx context.Context, host uint64, lost bool) (removed bool, err error) {
	res, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.RemoveHostRequest, tierqv1.RemoveHostResponse] {
		return a.fleet().RemoveHost
	},
		&tierqv1.RemoveHostRequest{Host: host, Lost: lost})
	return res.GetRemoved(), err
}

// Rebalance plans the moves that even the fleet out and, unless it is a dry run, begins as many as may go on at once.
func (c *Client) Rebalance(ctx context.Context, dryRun bool) (*tierqv1.RebalanceResponse, error) {
	return call(ctx, c, write(true), func(a *apis) method[tierqv1.RebalanceRequest, tierqv1.RebalanceResponse] { return a.fleet().Rebalance },
		&tierqv1.RebalanceRequest{DryRun: dryRun})
}

// MoveLeader hands a partition's leadership to a host that has a full replica of it.
func (c *Client) MoveLeader(ctx context.Context, shard, toHost uint64) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.MoveLeaderRequest, tierqv1.MoveLeaderResponse] {
		return a.fleet().MoveLeader
	},
		&tierqv1.MoveLeaderRequest{Shard: shard, ToHost: toHost})
	return err
}

// RebuildReplica begins to make a host's replica of a shard anew on that host.
func (c *Client) RebuildReplica(ctx context.Context, shard, host uint64) error {
	_, err := call(ctx, c, write(true), func(a *apis) method[tierqv1.RebuildReplicaRequest, tierqv1.RebuildReplicaResponse] {
		return a.fleet().RebuildReplica
	}, &tierqv1.RebuildReplicaRequest{Shard: shard, Host: host})
	return err
}

// AcceptClock reads a full host's clock and, unless it is a dry run, makes that host take it up although it differs from the others'.
func (c *Client) AcceptClock(ctx context.Context, host uint64, dryRun bool) (*tierqv1.AcceptClockResponse, error) {
	accept := func(a *apis) method[tierqv1.AcceptClockRequest, tierqv1.AcceptClockResponse] {
		return a.fleet().AcceptClock
	}
	return call(ctx, c, write(true), accept, &tierqv1.AcceptClockRequest{Host: host, DryRun: dryRun})
}

// ListEvents returns what has happened on a full host lately.
func (c *Client) ListEvents(ctx context.Context, req *tierqv1.ListEventsRequest) (*tierqv1.ListEventsResponse, error) {
	return call(ctx, c, read(route{}), func(a *apis) method[tierqv1.ListEventsRequest, tierqv1.ListEventsResponse] {
		return a.fleet().ListEvents
	}, req)
}
