package client

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// Backup and restore. All of these calls may be repeated.

func snapshotQueue(a *apis) method[tierqv1.SnapshotQueueRequest, tierqv1.SnapshotQueueResponse] {
	return a.snapshot().SnapshotQueue
}
func beginRestore(a *apis) method[tierqv1.BeginRestoreRequest, tierqv1.BeginRestoreResponse] {
	return a.snapshot().BeginRestore
}
func restoreStatus(a *apis) method[tierqv1.RestoreStatusRequest, tierqv1.RestoreStatusResponse] {
	return a.snapshot().RestoreStatus
}
func importChunk(a *apis) method[tierqv1.ImportChunkRequest, tierqv1.ImportChunkResponse] {
	return a.snapshot().ImportChunk
}
func recoverPartition(a *apis) method[tierqv1.RecoverPartitionRequest, tierqv1.RecoverPartitionResponse] {
	return a.snapshot().RecoverPartition
}
func finishRestore(a *apis) method[tierqv1.FinishRestoreRequest, tierqv1.FinishRestoreResponse] {
	return a.snapshot().FinishRestore
}
func abortRestore(a *apis) method[tierqv1.AbortRestoreRequest, tierqv1.AbortRestoreResponse] {
	return a.snapshot().AbortRestore
}

// restoreCallTimeout bounds one call of a restore, which repeats what fails for a moment, like an election.
const restoreCallTimeout = 30 * time.Second

func restoreCall() how {
	h := write(true)
	h.timeout = restoreCallTimeout
	return h
}

// SnapshotQueue returns what a backup needs of a queue beside its state.
func (c *Client) SnapshotQueue(ctx context.Context, name string) (*tierqv1.SnapshotQueueResponse, error) {
	return call(ctx, c, read(route{}), snapshotQueue, &tierqv1.SnapshotQueueRequest{Name: name})
}

// BeginRestore makes the queue that a restore fills, or finds it.
func (c *Client) BeginRestore(ctx context.Context, req *tierqv1.BeginRestoreRequest) (*tierqv1.BeginRestoreResponse, error) {
	return call(ctx, c, restoreCall(), beginRestore, req)
}

// RestoreStatus says how far a partition of a restore is.
func (c *Client) RestoreStatus(ctx context.Context, req *tierqv1.RestoreStatusRequest) (*tierqv1.RestoreStatusResponse, error) {
	return call(ctx, c, restoreCall(), restoreStatus, req)
}

// ImportChunk stores a chunk of a restore.
func (c *Client) ImportChunk(ctx context.Context, req *tierqv1.ImportChunkRequest) (*tierqv1.ImportChunkResponse, error) {
	return call(ctx, c, restoreCall(), importChunk, req)
}

// RecoverPartition begins the new life of a partition of a restore.
func (c *Client) RecoverPartition(ctx context.Context, req *tierqv1.RecoverPartitionRequest) (*tierqv1.RecoverPartitionResponse, error) {
	return call(ctx, c, restoreCall(), recoverPartition, req)
}

// FinishRestore gives a restored queue its name.
func (c *Client) FinishRestore(ctx context.Context, req *tierqv1.FinishRestoreRequest) (*tierqv1.FinishRestoreResponse, error) {
	return call(ctx, c, restoreCall(), finishRestore, req)
}

// AbortRestore removes what a restore that is not finished has made.
func (c *Client) AbortRestore(ctx context.Context, req *tierqv1.AbortRestoreRequest) error {
	_, err := call(ctx, c, restoreCall(), abortRestore, req)
	return err
}

// SaveShard writes a partition's state to w as one host streams it, and returns when the host has ended the stream. It makes one
// attempt at one address; what w got after an error is of no use.
func (c *Client) SaveShard(ctx context.Context, addr, queue string, partition uint32, w io.Writer) error {
	stream, err := c.apisOf(normalAddr(addr)).snapshot().SaveShard(ctx, connect.NewRequest(&tierqv1.SaveShardRequest{Queue: queue, Partition: partition}))
	if err != nil {
		return saveFailed(err, addr)
	}
	var failed error
	for failed == nil && stream.Receive() {
		_, failed = w.Write(stream.Msg().Data)
	}
	if failed != nil {
		return errors.Join(failed, stream.Close())
	}
	if err := stream.Err(); err != nil {
		_ = stream.Close()
		return saveFailed(err, addr)
	}
	return stream.Close()
}

func saveFailed(err error, addr string) *code.Error {
	e, _ := asError(err, addr, true, false)
	return e
}
