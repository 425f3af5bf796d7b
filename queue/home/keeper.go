package home

import (
	"context"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Keeper serves all groups of one shard whose home is this process's replica.
type Keeper struct{ o Options }

// NewKeeper starts the keeper of one shard replica.
func NewKeeper(o Options) (*Keeper, error) { return &Keeper{o: o}, nil }

var errEarly = code.New(code.Unavailable, "the keeper is not there yet")

// Applied takes what one Update changed. It never blocks; call it in the apply goroutine.
func (k *Keeper) Applied(queue.Applied) {}

// Installed says that a snapshot was installed: no epoch counts as obtained any more.
func (k *Keeper) Installed() {}

// HomeOf returns the home of a group by name as applied here.
func (k *Keeper) HomeOf(group string) (queue.ReplicaID, queue.Epoch, bool) { return 0, 0, false }

// Receive leases messages of a group.
func (k *Keeper) Receive(ctx context.Context, group string, req ReceiveRequest) ([]Delivery, error) {
	return nil, errEarly
}

// Ack finishes messages by receipt.
func (k *Keeper) Ack(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return nil, errEarly
}

// Nack gives messages back as failed.
func (k *Keeper) Nack(ctx context.Context, group string, items []NackItem) ([]ItemResult, error) {
	return nil, errEarly
}

// Release gives messages back without counting.
func (k *Keeper) Release(ctx context.Context, group string, receipts []string) ([]ItemResult, error) {
	return nil, errEarly
}

// Reject makes messages dead letters now.
func (k *Keeper) Reject(ctx context.Context, group string, items []RejectItem) ([]ItemResult, error) {
	return nil, errEarly
}

// Extend moves the deadlines of leases.
func (k *Keeper) Extend(ctx context.Context, group string, items []ExtendItem) ([]ItemResult, error) {
	return nil, errEarly
}

// Move hands a group over to another replica.
func (k *Keeper) Move(ctx context.Context, group string, to queue.ReplicaID) error { return errEarly }

// ReleaseAll hands over every group of this home; to names the new home of each, 0 keeps it.
func (k *Keeper) ReleaseAll(ctx context.Context, to func(group string) queue.ReplicaID) error {
	return errEarly
}

// Redrive makes dead letters deliverable: the named ones, or the first limit.
func (k *Keeper) Redrive(ctx context.Context, group string, addresses []queue.Address, limit int) ([]DeadResult, error) {
	return nil, errEarly
}

// PurgeDead removes dead letters: the named ones, or the first limit.
func (k *Keeper) PurgeDead(ctx context.Context, group string, addresses []queue.Address, limit int) ([]DeadResult, error) {
	return nil, errEarly
}

// Stats lists what this process knows about the groups it serves.
func (k *Keeper) Stats() []GroupStats { return nil }

// Close stops everything. It may be called twice.
func (k *Keeper) Close(ctx context.Context) error { return nil }

