package client

import (
	"context"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// What administrators do beyond creating and deleting. Calls of unknown outcome are repeated where that is harmless: a purge
// carries an operation id, pausing and resuming say what shall be.

func (c *Client) leaderOf(queue string, p *uint32) route {
	to := route{kind: toLeader, queue: queue}
	if p != nil {
		to.partition = *p
	}
	return to
}

// one is the partition that a caller has named; none means all, or the only one.
func one(in []uint32) *uint32 {
	if len(in) == 0 {
		return nil
	}
	return &in[0]
}

func writeTo(to route, repeat bool) how {
	h := write(repeat)
	h.to = to
	return h
}

// PurgeQueue removes every message up to an address, or all, whatever groups do with them. A zero operation id is
// replaced by a random one.
func (c *Client) PurgeQueue(ctx context.Context, req *tierqv1.PurgeQueueRequest) (*tierqv1.PurgeQueueResponse, error) {
	orOperation(&req.OperationId)
	return call(ctx, c, writeTo(c.leaderOf(req.Queue, req.Partition), true), func(a *apis) method[tierqv1.PurgeQueueRequest, tierqv1.PurgeQueueResponse] {
		return a.admin().PurgeQueue
	}, req)
}

// ConfigureQueue replaces a queue's options; options.Version is the one that DescribeQueue told.
func (c *Client) ConfigureQueue(ctx context.Context, queue string, options *tierqv1.QueueOptions) (*tierqv1.Queue, error) {
	res, err := call(ctx, c, writeTo(c.leaderOf(queue, nil), false), func(a *apis) method[tierqv1.ConfigureQueueRequest, tierqv1.ConfigureQueueResponse] {
		return a.admin().ConfigureQueue
	}, &tierqv1.ConfigureQueueRequest{Queue: queue, Options: options})
	if err != nil {
		return nil, err
	}
	return res.Queue, nil
}

// GrowQueue begins to give a queue without key order more partitions, so many in all. The fleet goes on by itself: they are open when
// DescribeQueue lists them. The same again is the same growth.
func (c *Client) GrowQueue(ctx context.Context, queue string, partitions uint32) (*tierqv1.Queue, error) {
	return c.growQueue(ctx, &tierqv1.GrowQueueRequest{Queue: queue, Partitions: partitions})
}

// CancelGrowth takes back partitions that are not open yet.
func (c *Client) CancelGrowth(ctx context.Context, queue string) (*tierqv1.Queue, error) {
	return c.growQueue(ctx, &tierqv1.GrowQueueRequest{Queue: queue, Cancel: true})
}

// Growths tells of queues that grow, of one or of all (""), how far they are, and what they wait for.
func (c *Client) Growths(ctx context.Context, queue string) ([]*tierqv1.Growth, error) {
	res, err := call(ctx, c, read(route{}), func(a *apis) method[tierqv1.ListGrowthsRequest, tierqv1.ListGrowthsResponse] {
		return a.admin().ListGrowths
	},
		&tierqv1.ListGrowthsRequest{Queue: queue})
	if err != nil {
		return nil, err
	}
	return res.Growths, nil
}

func (c *Client) growQueue(ctx context.Context, req *tierqv1.GrowQueueRequest) (*tierqv1.Queue, error) {
	res, err := call(ctx, c, writeTo(c.leaderOf(req.Queue, nil), true), func(a *apis) method[tierqv1.GrowQueueRequest, tierqv1.GrowQueueResponse] { return a.admin().GrowQueue }, req)
	if err != nil {
		return nil, err
	}
	return res.Queue, nil
}

// PauseQueue stops deliveries of all groups of a queue; publishing, acks and leases go on.
func (c *Client) PauseQueue(ctx context.Context, queue string) (*tierqv1.Queue, error) {
	res, err := call(ctx, c, writeTo(c.leaderOf(queue, nil), true), func(a *apis) method[tierqv1.PauseQueueRequest, tierqv1.PauseQueueResponse] {
		return a.admin().PauseQueue
	},
		&tierqv1.PauseQueueRequest{Queue: queue})
	if err != nil {
		return nil, err
	}
	return res.Queue, nil
}

// ResumeQueue ends a pause.
func (c *Client) ResumeQueue(ctx context.Context, queue string) (*tierqv1.Queue, error) {
	res, err := call(ctx, c, writeTo(c.leaderOf(queue, nil), true), func(a *apis) method[tierqv1.ResumeQueueRequest, tierqv1.ResumeQueueResponse] {
		return a.admin().ResumeQueue
	}, &tierqv1.ResumeQueueRequest{Queue: queue})
	if err != nil {
		return nil, err
	}
	return res.Queue, nil
}

// ConfigureGroup replaces a group's policy; version is the config version that ListGroups told.
func (c *Client) ConfigureGroup(ctx context.Context, queue, name string, config *tierqv1.GroupConfig, version uint64) (*tierqv1.Group, error) {
	res, err := call(ctx, c, writeTo(homeOf(queue, name), false), func(a *apis) method[tierqv1.ConfigureGroupRequest, tierqv1.ConfigureGroupResponse] {
		return a.admin().ConfigureGroup
	}, &tierqv1.ConfigureGroupRequest{Queue: queue, Name: name, Config: config, ExpectedVersion: version})
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// PauseGroup stops deliveries of a group; acks and leases go on.
func (c *Client) PauseGroup(ctx context.Context, queue, name string) (*tierqv1.Group, error) {
	res, err := call(ctx, c, writeTo(homeOf(queue, name), true), func(a *apis) method[tierqv1.PauseGroupRequest, tierqv1.PauseGroupResponse] {
		return a.admin().PauseGroup
	},
		&tierqv1.PauseGroupRequest{Queue: queue, Name: name})
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// ResumeGroup ends a pause.
func (c *Client) ResumeGroup(ctx context.Context, queue, name string) (*tierqv1.Group, error) {
	res, err := call(ctx, c, writeTo(homeOf(queue, name), true), func(a *apis) method[tierqv1.ResumeGroupRequest, tierqv1.ResumeGroupResponse] {
		return a.admin().ResumeGroup
	}, &tierqv1.ResumeGroupRequest{Queue: queue, Name: name})
	if err != nil {
		return nil, err
	}
	return res.Group, nil
}

// ListConsumers tells who holds what of a group; in names one partition.
func (c *Client) ListConsumers(ctx context.Context, queue, group string, withMessages bool, in ...uint32) (*tierqv1.ListConsumersResponse, error) {
	return call(ctx, c, read(homeOf(queue, group)), func(a *apis) method[tierqv1.ListConsumersRequest, tierqv1.ListConsumersResponse] {
		return a.admin().ListConsumers
	}, &tierqv1.ListConsumersRequest{Queue: queue, Group: group, WithMessages: withMessages, Partition: one(in)})
}

// ExplainGroup tells why a message, a key, or a whole group is not delivered.
func (c *Client) ExplainGroup(ctx context.Context, req *tierqv1.ExplainGroupRequest) (*tierqv1.ExplainGroupResponse, error) {
	return call(ctx, c, read(homeOf(req.Queue, req.Group)), func(a *apis) method[tierqv1.ExplainGroupRequest, tierqv1.ExplainGroupResponse] {
		return a.admin().ExplainGroup
	}, req)
}

// ListDelayed lists delayed messages in the order in which they become due.
func (c *Client) ListDelayed(ctx context.Context, req *tierqv1.ListDelayedRequest) (*tierqv1.ListDelayedResponse, error) {
	return call(ctx, c, read(c.leaderOf(req.Queue, req.Partition)), func(a *apis) method[tierqv1.ListDelayedRequest, tierqv1.ListDelayedResponse] {
		return a.admin().ListDelayed
	}, req)
}

// CancelDelayed removes a delayed message that is not due yet.
func (c *Client) CancelDelayed(ctx context.Context, req *tierqv1.CancelDelayedRequest) error {
	_, err := call(ctx, c, writeTo(c.leaderOf(req.Queue, req.Partition), false), func(a *apis) method[tierqv1.CancelDelayedRequest, tierqv1.ChangeDelayedResponse] {
		return a.admin().CancelDelayed
	}, req)
	return err
}

// RescheduleDelayed makes a delayed message due at another time, which it returns.
func (c *Client) RescheduleDelayed(ctx context.Context, req *tierqv1.RescheduleDelayedRequest) (*tierqv1.ChangeDelayedResponse, error) {
	return call(ctx, c, writeTo(c.leaderOf(req.Queue, req.Partition), false), func(a *apis) method[tierqv1.RescheduleDelayedRequest, tierqv1.ChangeDelayedResponse] {
		return a.admin().RescheduleDelayed
	}, req)
}

// Browse reads stored messages and changes nothing.
func (c *Client) Browse(ctx context.Context, req *tierqv1.BrowseRequest) (*tierqv1.BrowseResponse, error) {
	return call(ctx, c, read(c.leaderOf(req.Queue, req.Partition)), func(a *apis) method[tierqv1.BrowseRequest, tierqv1.BrowseResponse] { return a.admin().Browse }, req)
}

// LookupPublish tells whether and where a producer's seq was stored: what to ask after a publish of unknown outcome
// whose producer is gone. In a queue of several partitions it must be named.
func (c *Client) LookupPublish(ctx context.Context, queue string, producer, seq uint64, in ...uint32) (*tierqv1.LookupPublishResponse, error) {
	return call(ctx, c, read(c.leaderOf(queue, nil)), func(a *apis) method[tierqv1.LookupPublishRequest, tierqv1.LookupPublishResponse] {
		return a.admin().LookupPublish
	}, &tierqv1.LookupPublishRequest{Queue: queue, ProducerId: producer, Seq: seq, Partition: one(in)})
}

// FindDeadLetters lists the dead letters that a request selects.
func (c *Client) FindDeadLetters(ctx context.Context, req *tierqv1.ListDeadLettersRequest) (*tierqv1.ListDeadLettersResponse, error) {
	return call(ctx, c, read(homeOf(req.Queue, req.Group)), listDead, req)
}

// RedriveSelected makes the dead letters that a request selects deliverable again. It may end before all are done: go
// on from NextAddress unless that is 0.
func (c *Client) RedriveSelected(ctx context.Context, req *tierqv1.RedriveDeadLettersRequest) (*tierqv1.RedriveDeadLettersResponse, error) {
	return call(ctx, c, writeTo(homeOf(req.Queue, req.Group), false), redriveDead, req)
}

// PurgeSelected removes the dead letters that a request selects for good. It may end before all are done: go on from
// NextAddress unless that is 0.
func (c *Client) PurgeSelected(ctx context.Context, req *tierqv1.PurgeDeadLettersRequest) (*tierqv1.PurgeDeadLettersResponse, error) {
	return call(ctx, c, writeTo(homeOf(req.Queue, req.Group), true), purgeDead, req)
}
