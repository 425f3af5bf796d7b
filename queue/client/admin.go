package client

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// The administrative calls take and return the API's own messages, whose fields tierq.proto documents. Creates carry an
// operation id, so that one of unknown outcome can be repeated; deletes, moves and resets of unknown outcome are not
// repeated, and are answered with EffectMaybe: look, and decide.

func read(to route) how { return how{to: to, idempotent: true} }

func write(repeat bool) how { return how{mutates: true, idempotent: repeat} }

// CreateQueue creates a queue, or returns the one that exists with the same options (Created is false then). A zero
// operation id is replaced by a random one.
func (c *Client) CreateQueue(ctx context.Context, req *tierqv1.CreateQueueRequest) (*tierqv1.CreateQueueResponse, error) {
	orOperation(&req.OperationId)
	return call(ctx, c, write(true), createQueue, req)
}

// orOperation names an operation that its caller did not name.
func orOperation(id *uint64) {
	for *id == 0 {
		*id = rand.Uint64()
	}
}

// ListQueues lists the queues whose names begin with prefix.
func (c *Client) ListQueues(ctx context.Context, prefix string) ([]*tierqv1.Queue, error) {
	res, err := call(ctx, c, read(route{}), listQueues, &tierqv1.ListQueuesRequest{Prefix: prefix})
	if err != nil {
		return nil, err
	}
	return res.Queues, nil
}

// DescribeQueue returns a queue with its partitions, counters and groups.
func (c *Client) DescribeQueue(ctx context.Context, name string) (*tierqv1.Queue, error) {
	res, err := call(ctx, c, read(route{kind: toLeader, queue: name}), describeQueue, &tierqv1.DescribeQueueRequest{Name: name})
	if err != nil {
		return nil, err
	}
	return res.Queue, nil
}

// LocateQueue returns a queue's partitions and who leads them, as one host knows it now.
func (c *Client) LocateQueue(ctx context.Context, name string) (*tierqv1.LocateQueueResponse, error) {
	return call(ctx, c, read(route{}), locateQueue, &tierqv1.LocateQueueRequest{Name: name})
}

// DeleteQueue deletes a queue with all its messages and groups.
func (c *Client) DeleteQueue(ctx context.Context, name string) error {
	_, err := call(ctx, c, write(false), deleteQueue, &tierqv1.DeleteQueueRequest{Name: name})
	return err
}

// CreateGroup creates a group, or returns the one that exists with the same configuration.
func (c *Client) CreateGroup(ctx context.Context, req *tierqv1.CreateGroupRequest) (*tierqv1.Group, error) {
	orOperation(&req.OperationId)
	res, err := call(ctx, c, write(true), createGroup, req)
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// ListGroups lists a queue's groups.
func (c *Client) ListGroups(ctx context.Context, queue string) ([]*tierqv1.Group, error) {
	res, err := call(ctx, c, read(route{}), listGroups, &tierqv1.ListGroupsRequest{Queue: queue})
	if err != nil {
		return nil, err
	}
	return res.Groups, nil
}

// DeleteGroup deletes a group and what it knows; the queue's messages stay.
func (c *Client) DeleteGroup(ctx context.Context, queue, name string) error {
	_, err := call(ctx, c, write(false), deleteGroup, &tierqv1.DeleteGroupRequest{Queue: queue, Name: name})
	return err
}

// ResetGroup moves a group's start, in one partition if in names it; every receipt from before is refused afterwards.
func (c *Client) ResetGroup(ctx context.Context, queue, name string, start *tierqv1.Start, in ...uint32) (*tierqv1.Group, error) {
	res, err := call(ctx, c, write(false), resetGroup, &tierqv1.ResetGroupRequest{Queue: queue, Name: name, Start: start, Partition: one(in)})
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// MoveGroup hands a group to another host, in one partition if in names it; the client's next calls follow.
func (c *Client) MoveGroup(ctx context.Context, queue, name string, toHost uint64, in ...uint32) (*tierqv1.Group, error) {
	res, err := call(ctx, c, write(false), moveGroup, &tierqv1.MoveGroupRequest{Queue: queue, Name: name, ToHost: toHost, Partition: one(in)})
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// ListDeadLetters lists a group's dead letters from an address on; limit 0 means 100. next is 0 at the end.
func (c *Client) ListDeadLetters(ctx context.Context, queue, group string, from uint64, limit uint32) (dead []*tierqv1.DeadLetter, next uint64, err error) {
	res, err := call(ctx, c, read(homeOf(queue, group)), listDead,
		&tierqv1.ListDeadLettersRequest{Queue: queue, Group: group, FromAddress: from, Limit: limit})
	if err != nil {
		return nil, 0, err
	}
	return res.DeadLetters, res.NextAddress, nil
}

// RedriveDeadLetters makes dead letters deliverable again; without addresses, all. A host ends a long call before its
// deadline; this goes on until all is done or ctx ends, and then returns the error beside what was done.
func (c *Client) RedriveDeadLetters(ctx context.Context, queue, group string, addresses ...uint64) (redriven, skipped uint64, err error) {
	req := &tierqv1.RedriveDeadLettersRequest{Queue: queue, Group: group, Addresses: addresses}
	for {
		res, err := c.RedriveSelected(ctx, req)
		if err != nil {
			return redriven, skipped, err
		}
		redriven, skipped = redriven+res.Redriven, skipped+res.Skipped
		if res.NextAddress == 0 {
			return redriven, skipped, nil
		}
		req.Addresses, req.FromAddress = goOn(addresses, res.NextAddress)
		req.FromPartition = res.NextPartition
	}
}

// PurgeDeadLetters removes dead letters for good; without addresses, all. See RedriveDeadLetters.
func (c *Client) PurgeDeadLetters(ctx context.Context, queue, group string, addresses ...uint64) (purged uint64, err error) {
	req := &tierqv1.PurgeDeadLettersRequest{Queue: queue, Group: group, Addresses: addresses}
	for {
		res, err := c.PurgeSelected(ctx, req)
		if err != nil {
			return purged, err
		}
		if purged += res.Purged; res.NextAddress == 0 {
			return purged, nil
		}
		req.Addresses, req.FromAddress = goOn(addresses, res.NextAddress)
		req.FromPartition = res.NextPartition
	}
}

// goOn is what is left of named addresses from one on; without names it is where to go on.
func goOn(named []uint64, next uint64) (addresses []uint64, from uint64) {
	if len(named) == 0 {
		return nil, next
	}
	if i := slices.Index(named, next); i >= 0 {
		return named[i:], 0
	}
	return named, 0
}

// FleetStatus asks one host about itself and its fleet.
func (c *Client) FleetStatus(ctx context.Context) (*tierqv1.FleetStatusResponse, error) {
	return call(ctx, c, read(route{}), fleetStatus, &tierqv1.FleetStatusRequest{})
}

// digestWait is how long a host may take to read and digest a large state.
const digestWait = 2 * time.Minute

// ShardDigest asks every full replica of a partition for the digest of its state. Without a deadline on ctx it may take
// minutes: replicas read all that they hold.
func (c *Client) ShardDigest(ctx context.Context, queue string, partition uint32) (*tierqv1.ShardDigestResponse, error) {
	h := read(route{})
	h.wait = digestWait
	return call(ctx, c, h, shardDigest, &tierqv1.ShardDigestRequest{Queue: queue, Partition: partition})
}

// BenchPropose runs a bare propose loop at the leader of a scratch queue, for as long as req says.
func (c *Client) BenchPropose(ctx context.Context, req *tierqv1.BenchProposeRequest) (*tierqv1.BenchProposeResponse, error) {
	h := how{to: route{kind: toLeader, queue: req.Queue}, mutates: true, idempotent: true, wait: time.Duration(req.DurationMs) * time.Millisecond}
	return call(ctx, c, h, benchPropose, req)
}
