package backup

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"

	"github.com/tierq/tierq/queue"
)

// Target is the fleet that is restored into; *client.Client is one.
type Target interface {
	LocateQueue(ctx context.Context, name string) (*tierqv1.LocateQueueResponse, error)
	BeginRestore(ctx context.Context, r *tierqv1.BeginRestoreRequest) (*tierqv1.BeginRestoreResponse, error)
	RestoreStatus(ctx context.Context, r *tierqv1.RestoreStatusRequest) (*tierqv1.RestoreStatusResponse, error)
	ImportChunk(ctx context.Context, r *tierqv1.ImportChunkRequest) (*tierqv1.ImportChunkResponse, error)
	RecoverPartition(ctx context.Context, r *tierqv1.RecoverPartitionRequest) (*tierqv1.RecoverPartitionResponse, error)
	FinishRestore(ctx context.Context, r *tierqv1.FinishRestoreRequest) (*tierqv1.FinishRestoreResponse, error)
}

// RestoreOptions say what to restore.
type RestoreOptions struct {
	// Queue is the only one to restore; empty: all.
	Queue string
	// As is the name of the restored queue, where it is only one; empty: its own.
	As string
	// Replace is the id of the queue that has the name now and is deleted when the restored one takes it; 0: the name must be free.
	Replace uint64
	// Replicas and Witnesses are the layout of the restored queues; 0: as they were.
	Replicas, Witnesses uint32
	Progress            Progress
}

// Restored is one queue that Restore has restored. Before says that it was complete when Restore began.
type Restored struct {
	Name       string
	QueueID    uint64
	Partitions int
	Messages   uint64
	Before     bool
}

// Restore brings queues of a backup into a fleet. It verifies all that it will restore before anything is created, and refuses
// a name that is taken. It may be repeated after any failure: it goes on with what is there.
func Restore(ctx context.Context, to Target, dir string, o RestoreOptions) ([]Restored, error) {
	m, err := Open(dir)
	if err != nil {
		return nil, err
	}
	list, err := m.selected(o)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, q := range list {
		for n := range q.Partitions {
			errs = append(errs, q.Partitions[n].verify(dir, nil, queue.VerifyPair))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	var jobs []*job
	for _, q := range list {
		jobs = append(jobs, &job{to: to, dir: dir, q: q, o: o, id: &tierqv1.Restore{BackupId: m.BackupID(), Name: nameOf(q, o)}})
	}
	return run(ctx, jobs)
}

func nameOf(q *Queue, o RestoreOptions) string {
	if o.As != "" {
		return o.As
	}
	return q.Name
}

// NameOf returns the name that the only queue of a restore gets.
func NameOf(dir string, o RestoreOptions) (string, error) {
	m, err := Open(dir)
	if err != nil {
		return "", err
	}
	list, err := m.selected(o)
	if err == nil && len(list) > 1 {
		err = fmt.Errorf("the backup holds %d queues: name one", len(list))
	}
	if err != nil {
		return "", err
	}
	return nameOf(list[0], o), nil
}

// Aborter removes what a restore has made; *client.Client is one.
type Aborter interface {
	AbortRestore(ctx context.Context, r *tierqv1.AbortRestoreRequest) error
}

// Abort removes what an unfinished restore has made.
func Abort(ctx context.Context, to Aborter, dir string, o RestoreOptions) error {
	m, err := Open(dir)
	if err != nil {
		return err
	}
	list, err := m.selected(o)
	for _, q := range list {
		err = errors.Join(err, to.AbortRestore(ctx, &tierqv1.AbortRestoreRequest{Restore: &tierqv1.Restore{BackupId: m.BackupID(), Name: nameOf(q, o)}}))
	}
	return err
}

// selected returns the queues to restore.
func (m *Manifest) selected(o RestoreOptions) (list []*Queue, err error) {
	for i := range m.Queues {
		if o.Queue == "" || m.Queues[i].Name == o.Queue {
			list = append(list, &m.Queues[i])
		}
	}
	switch {
	case len(list) == 0:
		return nil, fmt.Errorf("the backup holds no queue %s", o.Queue)
	case len(list) > 1 && (o.As != "" || o.Replace != 0):
		return nil, fmt.Errorf("the backup holds %d queues: name the one that is to get another name", len(list))
	}
	return list, nil
}

// run begins all jobs, those first whose name is taken: they are either done or refused, and then nothing has been created.
func run(ctx context.Context, jobs []*job) (done []Restored, err error) {
	for _, taken := range [...]bool{true, false} {
		for _, j := range jobs {
			if taken {
				j.taken, err = j.exists(ctx)
			}
			if err == nil && j.taken == taken {
				err = j.begin(ctx)
			}
			if err != nil {
				return nil, fmt.Errorf("queue %s: %w", j.id.Name, err)
			}
		}
	}
	for _, j := range jobs {
		r, err := j.run(ctx)
		if err != nil {
			return done, fmt.Errorf("queue %s: %w", j.id.Name, err)
		}
		done = append(done, r)
	}
	return done, nil
}

// job restores one queue.
type job struct {
	to       Target
	dir      string
	q        *Queue
	o        RestoreOptions
	id       *tierqv1.Restore
	taken    bool
	finished bool
}

func (j *job) exists(ctx context.Context) (bool, error) {
	_, err := j.to.LocateQueue(ctx, j.id.Name)
	var e *code.Error
	if errors.As(err, &e) && e.Code == code.UnknownQueue {
		return false, nil
	}
	return err == nil, err
}

func (j *job) begin(ctx context.Context) error {
	options, err := hex.DecodeString(j.q.Options)
	if err != nil {
		return err
	}
	req := &tierqv1.BeginRestoreRequest{Restore: j.id, Options: options, Replicas: j.q.Replicas, Witnesses: j.q.Witnesses, ReplaceQueueId: j.o.Replace}
	if j.o.Replicas != 0 {
		req.Replicas, req.Witnesses = j.o.Replicas, j.o.Witnesses
	}
	r, err := j.to.BeginRestore(ctx, req)
	if err != nil {
		return err
	}
	j.finished = r.Finished
	if int(r.Partitions) != len(j.q.Partitions) {
		return fmt.Errorf("the fleet has made %d partitions of %d", r.Partitions, len(j.q.Partitions))
	}
	return nil
}

func (j *job) run(ctx context.Context) (Restored, error) {
	out := Restored{Name: j.id.Name, Partitions: len(j.q.Partitions), Before: j.finished}
	if !j.finished {
		for n := range j.q.Partitions {
			if err := j.partition(ctx, n); err != nil {
				return out, fmt.Errorf("partition %d: %w", n, err)
			}
		}
	}
	r, err := j.to.FinishRestore(ctx, &tierqv1.FinishRestoreRequest{Restore: j.id, ReplaceQueueId: j.o.Replace})
	if err != nil {
		return out, err
	}
	out.QueueID = r.QueueId
	return out, nil
}

// partition sends what is missing of one partition, and begins its new life.
func (j *job) partition(ctx context.Context, n int) error {
	st, err := j.to.RestoreStatus(ctx, &tierqv1.RestoreStatusRequest{Restore: j.id, Partition: uint32(n)})
	if err != nil {
		return err
	}
	if !st.Loaded && !st.Recovered {
		c := &chunks{job: j, ctx: ctx, partition: n, next: st.NextChunk}
		if err := c.send(); err != nil {
			return err
		}
	}
	_, err = j.to.RecoverPartition(ctx, &tierqv1.RecoverPartitionRequest{Restore: j.id, Partition: uint32(n)})
	return err
}

// chunks cuts a stream into chunks, always the same ones, and sends those that the fleet has not got.
type chunks struct {
	job         *job
	ctx         context.Context
	partition   int
	next        uint64 // the chunk that is due
	number      uint64 // the chunk that is being filled
	pairs       []byte
	count       int
	meta        []byte
	keys, bytes uint64
	failed      error // of the fleet, not of the stream
}

func (c *chunks) send() error {
	p := &c.job.q.Partitions[c.partition]
	// The file is verified once more as it is read; the last chunk, without which nothing counts, goes only then.
	err := p.verify(c.job.dir, meterOf(c.job.o.Progress, c.job.id.Name, c.partition, p.Bytes), func(key, value []byte) error {
		c.failed = c.take(key, value)
		return c.failed
	})
	if err = cmp.Or(c.failed, err); err != nil {
		return err
	}
	if c.meta == nil {
		return fmt.Errorf("%w: %s has no record of the shard itself", ErrCorrupt, p.File)
	}
	return c.flush(true)
}

func (c *chunks) take(key, value []byte) error {
	if queue.IsOwnRecord(key) {
		c.meta = bytes.Clone(value)
		return nil
	}
	if c.count > 0 && (len(c.pairs)+len(key)+len(value)+16 > queue.MaxImportBytes || c.count == queue.MaxImportPairs) {
		if err := c.flush(false); err != nil {
			return err
		}
	}
	c.pairs = queue.AppendPair(c.pairs, key, value)
	c.count++
	c.keys++
	c.bytes += uint64(len(key) + len(value))
	return nil
}

func (c *chunks) flush(last bool) error {
	if c.number >= c.next {
		req := &tierqv1.ImportChunkRequest{Restore: c.job.id, Partition: uint32(c.partition), Chunk: c.number, Pairs: c.pairs}
		if last {
			req.Meta, req.Keys, req.Bytes = c.meta, c.keys, c.bytes
		}
		r, err := c.job.to.ImportChunk(c.ctx, req)
		if err != nil {
			return err
		}
		c.next = max(c.next, r.NextChunk)
	}
	c.number++
	c.pairs, c.count = c.pairs[:0], 0
	return nil
}
