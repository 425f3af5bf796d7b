package node

import (
	"context"
	"fmt"
	"hash/fnv"
	"io"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/swarm"
)

// Backup and restore (docs/adr/0048). A backup is a partition's stream, read at one applied index from any full replica. A
// restore creates a queue of its own shards under a tenant that no client names, sends the saved state through their logs, and
// gives the queue its name when all of it is there.

// SnapshotQueue implements api.Snapshots.
func (n *Node) SnapshotQueue(ctx context.Context, name string) (api.SavedQueue, error) {
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return api.SavedQueue{}, err
	}
	v := n.view()
	out := api.SavedQueue{Fleet: v.Fleet().String(), ID: q.ID, Options: q.Options, Replicas: q.Replicas, Witnesses: q.Witnesses}
	for _, shard := range q.Shards {
		_, leader, _, _ := n.raft.Leader(shard)
		p := api.SavedPartition{Shard: shard}
		var last []string
		for _, r := range n.FullReplicas(shard) {
			h, ok := v.Host(r.Host)
			switch {
			case !ok || !n.Serves(r.Host, shard):
			case r.Host == leader:
				last = append(last, h.ClientAddr)
			default:
				p.APIs = append(p.APIs, h.ClientAddr)
			}
		}
		p.APIs = append(p.APIs, last...)
		out.Partitions = append(out.Partitions, p)
	}
	return out, nil
}

// freezer is the part of the state that backups read; *queue.QueueStateMachine is one.
type freezer interface{ Freeze() *queue.Frozen }

// SaveShard implements api.Snapshots.
func (n *Node) SaveShard(ctx context.Context, name string, partition uint32, w io.Writer) error {
	_, d, err := n.deskOf(ctx, name, &partition)
	if err != nil {
		return n.toClient(err)
	}
	barrier, cancel := context.WithTimeout(ctx, proposeTimeout)
	err = d.raft.ReadIndex(barrier)
	cancel()
	if err != nil {
		return err
	}
	state, ok := d.reader.(freezer)
	if !ok {
		return code.New(code.Internal, "the state of shard %d cannot be streamed", d.shard)
	}
	z := state.Freeze()
	defer func() { _ = z.Close() }()
	if z.Meta.Applied == 0 { // its leader is about to give it its options
		return &code.Error{Code: code.Unavailable, Effect: code.EffectNone, RetryAfterMs: 300}
	}
	err = new(swarm.Installer).Save(w, d.shard, uint64(z.Meta.Applied), z.Meta.FormatLevel, z.Each, ctx.Done())
	n.raft.ReadFailed(d.shard, err)
	return err
}

// stagingName is the name under which a restore fills its queue: another restore of the same backup under another name gets another
// one, and a repeated one finds what it has made.
func stagingName(r api.Restore) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(r.Tenant + "\x00" + r.Name))
	return fmt.Sprintf("%016x-%016x", r.BackupID, h.Sum64())
}

// restoreAttempts is how often one restore may be aborted, or its queue deleted, and begun again.
const restoreAttempts = 1 << 10

// restoreOperation is the first operation id of the creations of a restore's queue, of which each attempt takes the next one: an id
// names one creation for ever. So the queue is known as the restore's also under its own name.
func restoreOperation(r api.Restore) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(stagingName(r)))
	return (h.Sum64() | restoreAttempts) &^ (restoreAttempts - 1)
}

// restored says whether a queue is what a restore has made.
func restored(q catalog.Queue, r api.Restore) bool {
	return q.OperationID/restoreAttempts == restoreOperation(r)/restoreAttempts
}

// staged finds the queue that a restore fills.
func (n *Node) staged(ctx context.Context, r api.Restore) (catalog.Queue, error) {
	name := stagingName(r)
	if q, ok := n.view().Queue(catalog.StagingTenant, name); ok {
		return q, nil
	}
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return catalog.Queue{}, err
	}
	if q, ok := v.Queue(catalog.StagingTenant, name); ok {
		return q, nil
	}
	return catalog.Queue{}, code.New(code.UnknownQueue, "no restore of this backup as %s is under way: begin it anew", r.Name)
}

// BeginRestore implements api.Snapshots.
func (n *Node) BeginRestore(ctx context.Context, r api.BeginRestore) (int, bool, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return 0, false, err
	}
	have, taken := v.Queue(r.Tenant, r.Name)
	switch {
	case taken && restored(have, r.Restore):
		return len(have.Shards), true, nil
	case taken && have.ID != r.Replace:
		return 0, false, code.New(code.QueueExistsMismatch, "queue %s exists: restore as another name, or delete it", r.Name)
	case !taken && r.Replace != 0:
		return 0, false, code.New(code.MutationFenced, "queue %s, which was to be replaced, does not exist", r.Name)
	}
	if err := r.Options.Validate(); err != nil {
		return 0, false, code.New(code.InvalidArgument, "options: %v", err)
	}
	q, err := n.stage(ctx, r)
	if err != nil {
		return 0, false, err
	}
	n.awaitServed(ctx, q)
	return len(q.Shards), false, nil
}

// stage creates the queue that a restore fills, or finds it.
func (n *Node) stage(ctx context.Context, r api.BeginRestore) (q catalog.Queue, err error) {
	for attempt := range uint64(restoreAttempts) {
		q, err = n.raft.CreateQueue(ctx, catalog.CreateQueue{
			OperationID: restoreOperation(r.Restore) + attempt, Tenant: catalog.StagingTenant, Name: stagingName(r.Restore),
			Options: r.Options, Replicas: r.Replicas, Witnesses: r.Witnesses,
		})
		if !isCode(err, code.MutationFenced) {
			break
		}
	}
	return q, err
}

// leaderDesk returns the desk of a partition of a restore if this host leads it.
func (n *Node) leaderDesk(ctx context.Context, r api.Restore, partition uint32) (*desk, error) {
	q, err := n.staged(ctx, r)
	if err != nil {
		return nil, err
	}
	shard, err := n.shardOf(q, &partition)
	if err != nil {
		return nil, err
	}
	d, err := n.desk(shard)
	if err != nil {
		return nil, err
	}
	leader, host, _, ok := d.raft.Leader()
	switch {
	case !ok:
		return nil, &code.Error{Code: code.NoLeader, Effect: code.EffectNone, RetryAfterMs: 200}
	case leader != d.self:
		return nil, n.elsewhere(host, &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, RetryAfterMs: 50})
	}
	return d, nil
}

// importer is the part of the state that knows how far an import is; *queue.QueueStateMachine is one.
type importer interface {
	Importing() (queue.ImportProgress, bool)
}

// RestoreStatus implements api.Snapshots.
func (n *Node) RestoreStatus(ctx context.Context, r api.Restore, partition uint32) (api.RestoreStatus, error) {
	d, err := n.leaderDesk(ctx, r, partition)
	if err != nil {
		return api.RestoreStatus{}, err
	}
	if err := d.raft.ReadIndex(ctx); err != nil {
		return api.RestoreStatus{}, err
	}
	st := api.RestoreStatus{Shard: d.shard}
	if p, ok := d.importing(); ok {
		st.Next, st.Loaded = p.Next, p.Loaded
		return st, nil
	}
	st.Recovered = d.reader.Meta().RecoveryNumber > 0
	st.Loaded = st.Recovered
	return st, nil
}

func (d *desk) importing() (queue.ImportProgress, bool) {
	i, ok := d.reader.(importer)
	if !ok {
		return queue.ImportProgress{}, false
	}
	return i.Importing()
}

// ImportChunk implements api.Snapshots.
func (n *Node) ImportChunk(ctx context.Context, r api.Restore, partition uint32, c queue.Import) (uint64, error) {
	d, err := n.leaderDesk(ctx, r, partition)
	if err != nil {
		return 0, err
	}
	if low := d.raft.LowSpace(); low != 0 {
		return 0, &code.Error{Code: code.StorageHighWatermark, Effect: code.EffectNone, Text: fmt.Sprintf("the disk of host %d is nearly full: add space, and repeat the restore, which goes on", low)}
	}
	res, err := d.proposed(ctx, &queue.Retention{Stamp: d.raft.Stamp(), Import: &c})
	if isCode(err, code.MutationFenced) {
		return 0, code.New(code.MutationFenced, "partition %d is at chunk %d of its restore: repeat the restore, which goes on there", partition, res.Version)
	}
	return res.Version, err
}

// RecoverPartition implements api.Snapshots.
func (n *Node) RecoverPartition(ctx context.Context, r api.Restore, partition uint32) (uint64, error) {
	d, err := n.leaderDesk(ctx, r, partition)
	if err != nil {
		return 0, err
	}
	if err := d.raft.ReadIndex(ctx); err != nil {
		return 0, err
	}
	number := d.reader.Meta().RecoveryNumber
	p, importing := d.importing()
	switch {
	case !importing && number > 0:
		return number, nil // it came before
	case !importing || !p.Loaded:
		return 0, code.New(code.MutationFenced, "partition %d has not got all chunks: repeat the restore, which goes on", partition)
	}
	res, err := d.proposed(ctx, &queue.Retention{Stamp: d.raft.Stamp(), Recover: &queue.Recovery{Expected: number}})
	return res.Version, err
}

// FinishRestore implements api.Snapshots.
func (n *Node) FinishRestore(ctx context.Context, r api.Restore, replace uint64) (uint64, error) {
	v, err := n.raft.ReadCatalog(ctx)
	if err != nil {
		return 0, err
	}
	if q, ok := v.Queue(r.Tenant, r.Name); ok && restored(q, r) {
		return q.ID, nil
	}
	q, err := n.staged(ctx, r)
	if err != nil {
		return 0, err
	}
	res, err := n.raft.ProposeCatalog(ctx, &catalog.MoveQueue{
		ExpectedID: q.ID, FromTenant: q.Tenant, FromName: q.Name, ToTenant: r.Tenant, ToName: r.Name, ReplaceID: replace,
	})
	if err == nil {
		err = res.Err()
	}
	return q.ID, err
}

// AbortRestore implements api.Snapshots.
func (n *Node) AbortRestore(ctx context.Context, r api.Restore) error {
	q, err := n.staged(ctx, r)
	if err != nil {
		return err
	}
	return n.raft.DeleteQueue(ctx, catalog.DeleteQueue{OperationID: operation(0), Tenant: q.Tenant, Name: q.Name, ExpectedID: q.ID})
}
