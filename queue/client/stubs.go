package client

import (
	"context"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

type (
	fleetStatusRequest = tierqv1.FleetStatusRequest
	// method is a stub's method, bound to one address.
	method[Req, Res any] = func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error)
)

func fleetStatus(a *apis) method[tierqv1.FleetStatusRequest, tierqv1.FleetStatusResponse] {
	return a.status().FleetStatus
}
func shardDigest(a *apis) method[tierqv1.ShardDigestRequest, tierqv1.ShardDigestResponse] {
	return a.status().ShardDigest
}
func benchPropose(a *apis) method[tierqv1.BenchProposeRequest, tierqv1.BenchProposeResponse] {
	return a.status().BenchPropose
}

func createQueue(a *apis) method[tierqv1.CreateQueueRequest, tierqv1.CreateQueueResponse] {
	return a.queue().CreateQueue
}
func listQueues(a *apis) method[tierqv1.ListQueuesRequest, tierqv1.ListQueuesResponse] {
	return a.queue().ListQueues
}
func describeQueue(a *apis) method[tierqv1.DescribeQueueRequest, tierqv1.DescribeQueueResponse] {
	return a.queue().DescribeQueue
}
func deleteQueue(a *apis) method[tierqv1.DeleteQueueRequest, tierqv1.DeleteQueueResponse] {
	return a.queue().DeleteQueue
}

func createGroup(a *apis) method[tierqv1.CreateGroupRequest, tierqv1.CreateGroupResponse] {
	return a.group().CreateGroup
}
func listGroups(a *apis) method[tierqv1.ListGroupsRequest, tierqv1.ListGroupsResponse] {
	return a.group().ListGroups
}
func deleteGroup(a *apis) method[tierqv1.DeleteGroupRequest, tierqv1.DeleteGroupResponse] {
	return a.group().DeleteGroup
}
func resetGroup(a *apis) method[tierqv1.ResetGroupRequest, tierqv1.ResetGroupResponse] {
	return a.group().ResetGroup
}
func moveGroup(a *apis) method[tierqv1.MoveGroupRequest, tierqv1.MoveGroupResponse] {
	return a.group().MoveGroup
}

func receiveStub(a *apis) method[tierqv1.ReceiveRequest, tierqv1.ReceiveResponse] {
	return a.group().Receive
}
func ackStub(a *apis) method[tierqv1.AckRequest, tierqv1.SettleResponse]   { return a.group().Ack }
func nackStub(a *apis) method[tierqv1.NackRequest, tierqv1.SettleResponse] { return a.group().Nack }
func releaseStub(a *apis) method[tierqv1.ReleaseRequest, tierqv1.SettleResponse] {
	return a.group().Release
}
func rejectStub(a *apis) method[tierqv1.RejectRequest, tierqv1.SettleResponse] {
	return a.group().Reject
}
func extendStub(a *apis) method[tierqv1.ExtendRequest, tierqv1.SettleResponse] {
	return a.group().Extend
}

func listDead(a *apis) method[tierqv1.ListDeadLettersRequest, tierqv1.ListDeadLettersResponse] {
	return a.group().ListDeadLetters
}
func redriveDead(a *apis) method[tierqv1.RedriveDeadLettersRequest, tierqv1.RedriveDeadLettersResponse] {
	return a.group().RedriveDeadLetters
}
func purgeDead(a *apis) method[tierqv1.PurgeDeadLettersRequest, tierqv1.PurgeDeadLettersResponse] {
	return a.group().PurgeDeadLetters
}
