package api

import (
	"context"
	"io"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Snapshots is the part of a Backend that backups and restores use. Its rules are the Backend's.
type Snapshots interface {
	// SnapshotQueue names, per partition, the hosts that can stream it, those that do not lead it first.
	SnapshotQueue(ctx context.Context, name string) (SavedQueue, error)
	// SaveShard streams a partition's state, as it was at some moment after the call began.
	SaveShard(ctx context.Context, name string, partition uint32, w io.Writer) error
	// BeginRestore makes the queue that a restore fills. finished: it was given its name before.
	BeginRestore(ctx context.Context, r BeginRestore) (partitions int, finished bool, err error)
	RestoreStatus(ctx context.Context, r Restore, partition uint32) (RestoreStatus, error)
	ImportChunk(ctx context.Context, r Restore, partition uint32, c queue.Import) (next uint64, err error)
	RecoverPartition(ctx context.Context, r Restore, partition uint32) (number uint64, err error)
	FinishRestore(ctx context.Context, r Restore, replace uint64) (queueID uint64, err error)
	AbortRestore(ctx context.Context, r Restore) error
}

// SavedQueue is what a backup needs of a queue beside its state.
type SavedQueue struct {
	Fleet      string
	ID         uint64
	Options    queue.QueueOptions
	Replicas   uint32
	Witnesses  uint32
	Partitions []SavedPartition
}

// SavedPartition is one partition and where it can be streamed from.
type SavedPartition struct {
	Shard uint64
	APIs  []string
}

// Restore names a restore.
type Restore struct {
	Tenant   string // "": the default one
	BackupID uint64
	Name     string
}

// BeginRestore asks for the queue that a restore fills.
type BeginRestore struct {
	Restore
	Options   queue.QueueOptions
	Replicas  uint32
	Witnesses uint32
	Replace   uint64
}

// RestoreStatus is how far one partition of a restore is.
type RestoreStatus struct {
	Shard     uint64
	Next      uint64
	Loaded    bool
	Recovered bool
}

// snapshotService implements tierq.v1.SnapshotService.
type snapshotService struct{ *Server }

func (s snapshotService) client(host uint64) tierqv1connect.SnapshotServiceClient {
	httpClient, base := s.forward(host)
	return tierqv1connect.NewSnapshotServiceClient(httpClient, base, connect.WithGRPC())
}

func (s snapshotService) SnapshotQueue(ctx context.Context, req *connect.Request[tierqv1.SnapshotQueueRequest]) (*connect.Response[tierqv1.SnapshotQueueResponse], error) {
	if err := validName("name", req.Msg.GetName()); err != nil {
		return nil, err
	}
	q, err := s.backend.SnapshotQueue(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	out := &tierqv1.SnapshotQueueResponse{
		FleetId: q.Fleet, QueueId: q.ID, Options: queue.AppendQueueOptions(nil, q.Options), Replicas: q.Replicas, Witnesses: q.Witnesses,
	}
	for i, p := range q.Partitions {
		out.Partitions = append(out.Partitions, &tierqv1.SnapshotPartition{Number: uint32(i), Shard: p.Shard, Apis: p.APIs})
	}
	return connect.NewResponse(out), nil
}

// SaveShard is not forwarded: a refusal names the host to ask.
func (s snapshotService) SaveShard(ctx context.Context, req *connect.Request[tierqv1.SaveShardRequest], stream *connect.ServerStream[tierqv1.SaveShardResponse]) error {
	if err := validName("queue", req.Msg.GetQueue()); err != nil {
		return toConnect(err)
	}
	w := &pieces{send: func(b []byte) error { return stream.Send(&tierqv1.SaveShardResponse{Data: b}) }}
	err := s.backend.SaveShard(ctx, req.Msg.GetQueue(), req.Msg.GetPartition(), w)
	if err == nil {
		err = w.flush()
	}
	if e, ok := err.(*ElsewhereError); ok {
		err = e.Cause
	}
	if err != nil {
		s.onRefusal(asCode(err).Code)
	}
	return toConnect(err)
}

// pieceBytes is about what one message of a stream carries.
const pieceBytes = 256 << 10

// pieces collects what is written into pieces and sends them. Memory is bounded by a piece and the greatest write.
type pieces struct {
	send func([]byte) error
	buf  []byte
}

func (p *pieces) Write(b []byte) (int, error) {
	p.buf = append(p.buf, b...)
	if len(p.buf) < pieceBytes {
		return len(b), nil
	}
	return len(b), p.flush()
}

func (p *pieces) flush() error {
	if len(p.buf) == 0 {
		return nil
	}
	err := p.send(p.buf)
	p.buf = p.buf[:0]
	return err
}

func restore(ctx context.Context, r *tierqv1.Restore) (Restore, error) {
	out := Restore{Tenant: TenantOf(ctx), BackupID: r.GetBackupId(), Name: r.GetName()}
	if out.BackupID == 0 {
		return out, code.New(code.InvalidArgument, "restore.backup_id is not set")
	}
	return out, validName("restore.name", out.Name)
}

func (s snapshotService) BeginRestore(ctx context.Context, req *connect.Request[tierqv1.BeginRestoreRequest]) (*connect.Response[tierqv1.BeginRestoreResponse], error) {
	m := req.Msg
	r, err := restore(ctx, m.GetRestore())
	if err != nil {
		return nil, err
	}
	opts, err := queue.DecodeQueueOptions(m.GetOptions())
	if err != nil {
		return nil, code.New(code.InvalidArgument, "options: %v", err)
	}
	n, finished, err := s.backend.BeginRestore(ctx, BeginRestore{Restore: r, Options: opts, Replicas: m.GetReplicas(), Witnesses: m.GetWitnesses(), Replace: m.GetReplaceQueueId()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.BeginRestoreResponse{Partitions: uint32(n), Finished: finished}), nil
}

func (s snapshotService) RestoreStatus(ctx context.Context, req *connect.Request[tierqv1.RestoreStatusRequest]) (*connect.Response[tierqv1.RestoreStatusResponse], error) {
	r, err := restore(ctx, req.Msg.GetRestore())
	if err != nil {
		return nil, err
	}
	st, err := s.backend.RestoreStatus(ctx, r, req.Msg.GetPartition())
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.RestoreStatusRequest]) (*connect.Response[tierqv1.RestoreStatusResponse], error) {
			return s.client(host).RestoreStatus(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.RestoreStatusResponse{NextChunk: st.Next, Loaded: st.Loaded, Recovered: st.Recovered, Shard: st.Shard}), nil
}

func (s snapshotService) ImportChunk(ctx context.Context, req *connect.Request[tierqv1.ImportChunkRequest]) (*connect.Response[tierqv1.ImportChunkResponse], error) {
	m := req.Msg
	r, err := restore(ctx, m.GetRestore())
	if err != nil {
		return nil, err
	}
	c := queue.Import{ID: r.BackupID, Chunk: m.GetChunk(), Pairs: m.GetPairs(), Keys: m.GetKeys(), Bytes: m.GetBytes()}
	if len(m.GetMeta()) > 0 {
		c.Meta = m.GetMeta()
	}
	next, err := s.backend.ImportChunk(ctx, r, m.GetPartition(), c)
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ImportChunkRequest]) (*connect.Response[tierqv1.ImportChunkResponse], error) {
			return s.client(host).ImportChunk(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.ImportChunkResponse{NextChunk: next}), nil
}

func (s snapshotService) RecoverPartition(ctx context.Context, req *connect.Request[tierqv1.RecoverPartitionRequest]) (*connect.Response[tierqv1.RecoverPartitionResponse], error) {
	r, err := restore(ctx, req.Msg.GetRestore())
	if err != nil {
		return nil, err
	}
	n, err := s.backend.RecoverPartition(ctx, r, req.Msg.GetPartition())
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.RecoverPartitionRequest]) (*connect.Response[tierqv1.RecoverPartitionResponse], error) {
			return s.client(host).RecoverPartition(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.RecoverPartitionResponse{RecoveryNumber: n}), nil
}

func (s snapshotService) FinishRestore(ctx context.Context, req *connect.Request[tierqv1.FinishRestoreRequest]) (*connect.Response[tierqv1.FinishRestoreResponse], error) {
	r, err := restore(ctx, req.Msg.GetRestore())
	if err != nil {
		return nil, err
	}
	id, err := s.backend.FinishRestore(ctx, r, req.Msg.GetReplaceQueueId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.FinishRestoreResponse{QueueId: id}), nil
}

func (s snapshotService) AbortRestore(ctx context.Context, req *connect.Request[tierqv1.AbortRestoreRequest]) (*connect.Response[tierqv1.AbortRestoreResponse], error) {
	r, err := restore(ctx, req.Msg.GetRestore())
	if err == nil {
		err = s.backend.AbortRestore(ctx, r)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.AbortRestoreResponse{}), nil
}
