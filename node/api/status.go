package api

import (
	"context"
	"encoding/hex"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// statusService implements tierq.v1.StatusService.
type statusService struct{ *Server }

func (s statusService) client(host uint64) tierqv1connect.StatusServiceClient {
	httpClient, base := s.forward(host)
	return tierqv1connect.NewStatusServiceClient(httpClient, base, connect.WithGRPC())
}

func (s statusService) FleetStatus(context.Context, *connect.Request[tierqv1.FleetStatusRequest]) (*connect.Response[tierqv1.FleetStatusResponse], error) {
	f := s.backend.Fleet()
	out := &tierqv1.FleetStatusResponse{
		FleetId: f.ID, Host: f.Self, Version: f.Version, UptimeMs: uint64(f.Uptime.Milliseconds()), CatalogVersion: f.CatalogVersion,
		CatalogLeaderHost: f.CatalogLeader, CatalogLeaderEpoch: f.CatalogTerm,
	}
	for _, h := range f.Hosts {
		out.Hosts = append(out.Hosts, &tierqv1.Host{
			Id: h.ID, Role: h.Role, Api: h.API, Domain: h.Domain, Alive: h.Alive, Self: h.ID == f.Self, SilentMs: uint64(h.Silent.Milliseconds()),
		})
	}
	return connect.NewResponse(out), nil
}

// ShardDigest asks every full replica, this host's own included; one that does not answer gets an error in its row.
func (s statusService) ShardDigest(ctx context.Context, req *connect.Request[tierqv1.ShardDigestRequest]) (*connect.Response[tierqv1.ShardDigestResponse], error) {
	m := req.Msg
	if s.forward == nil { // asked by another host: only our own replica
		d, err := s.backend.Digest(ctx, m.GetQueue(), m.GetPartition())
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&tierqv1.ShardDigestResponse{Shard: d.Shard, Replicas: []*tierqv1.ReplicaDigest{protoDigest(d)}}), nil
	}
	info, err := s.backend.LocateQueue(ctx, m.GetQueue())
	if err != nil {
		return nil, err
	}
	if int(m.GetPartition()) >= len(info.Partitions) {
		return nil, code.New(code.UnknownPartition, "partition: %d, queue %q has %d", m.GetPartition(), m.GetQueue(), len(info.Partitions))
	}
	part := info.Partitions[m.GetPartition()]
	out := &tierqv1.ShardDigestResponse{Shard: part.Shard}
	for _, r := range part.Replicas {
		if r.Role != "witness" {
			out.Replicas = append(out.Replicas, s.digestOf(ctx, m, r))
		}
	}
	return connect.NewResponse(out), nil
}

func (s statusService) digestOf(ctx context.Context, m *tierqv1.ShardDigestRequest, r ReplicaInfo) *tierqv1.ReplicaDigest {
	fail := func(err error) *tierqv1.ReplicaDigest {
		return &tierqv1.ReplicaDigest{ReplicaId: uint64(r.Replica), Host: r.Host, Error: err.Error()}
	}
	if r.Host == s.backend.Fleet().Self {
		d, err := s.backend.Digest(ctx, m.GetQueue(), m.GetPartition())
		if err != nil {
			return fail(err)
		}
		return protoDigest(d)
	}
	resp, err := s.client(r.Host).ShardDigest(ctx, connect.NewRequest(m))
	if err != nil {
		return fail(err)
	}
	if len(resp.Msg.GetReplicas()) == 1 {
		return resp.Msg.GetReplicas()[0]
	}
	return fail(code.New(code.Unavailable, "host %d did not answer", r.Host))
}

func protoDigest(d ReplicaDigest) *tierqv1.ReplicaDigest {
	return &tierqv1.ReplicaDigest{ReplicaId: uint64(d.Replica), Host: d.Host, AppliedIndex: uint64(d.Applied), Digest: hex.EncodeToString(d.Digest[:])}
}

// Bounds of a bench run at the server.
const (
	maxBenchDuration = 30 * time.Second
	maxBenchInFlight = 100
)

func (s statusService) BenchPropose(ctx context.Context, req *connect.Request[tierqv1.BenchProposeRequest]) (*connect.Response[tierqv1.BenchProposeResponse], error) {
	m := req.Msg
	r := BenchPropose{Queue: m.GetQueue(), MessageBytes: int(m.GetMessageBytes()), Batch: int(m.GetBatch()), InFlight: int(m.GetInFlight()), Duration: time.Duration(m.GetDurationMs()) * time.Millisecond}
	switch {
	case r.Batch < 1 || r.Batch > 4096:
		return nil, code.New(code.InvalidArgument, "batch: %d, use 1 to 4096", r.Batch)
	case r.InFlight < 1 || r.InFlight > maxBenchInFlight:
		return nil, code.New(code.InvalidArgument, "in_flight: %d, use 1 to %d", r.InFlight, maxBenchInFlight)
	case r.Duration <= 0 || r.Duration > maxBenchDuration:
		return nil, code.New(code.InvalidArgument, "duration_ms: %d, use 1 to %d", m.GetDurationMs(), maxBenchDuration.Milliseconds())
	case r.MessageBytes > 1<<20:
		return nil, code.New(code.InvalidArgument, "message_bytes: %d, use 0 to 1048576", r.MessageBytes)
	}
	res, err := s.backend.BenchPropose(ctx, r)
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.BenchProposeRequest]) (*connect.Response[tierqv1.BenchProposeResponse], error) {
			return s.client(host).BenchPropose(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.BenchProposeResponse{
		Commands: uint64(res.Commands), Messages: uint64(res.Messages), ElapsedUs: uint64(res.Elapsed.Microseconds()),
		P50Us: uint64(res.P50.Microseconds()), P99Us: uint64(res.P99.Microseconds()),
	}), nil
}
