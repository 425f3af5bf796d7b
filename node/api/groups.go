package api

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// groupService implements tierq.v1.GroupService.
type groupService struct{ *Server }

func (s groupService) client(host uint64) tierqv1connect.GroupServiceClient {
	httpClient, base := s.forward(host)
	return tierqv1connect.NewGroupServiceClient(httpClient, base, connect.WithGRPC())
}

// maxLease bounds a lease.
const maxLease = 12 * time.Hour

func (s groupService) CreateGroup(ctx context.Context, req *connect.Request[tierqv1.CreateGroupRequest]) (*connect.Response[tierqv1.CreateGroupResponse], error) {
	m := req.Msg
	if err := validGroup("name", m.GetName()); err != nil {
		return nil, err
	}
	start, err := startOf(m.GetStart())
	if err != nil {
		return nil, err
	}
	if m.Partition == nil {
		return s.createEverywhere(ctx, m)
	}
	g, err := s.backend.CreateGroup(ctx, CreateGroup{
		Queue: m.GetQueue(), Partition: m.Partition, Name: m.GetName(), Config: groupConfig(m.GetConfig()), Start: start, HomeHost: m.GetHomeHost(), OperationID: m.GetOperationId(),
	})
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.CreateGroupRequest]) (*connect.Response[tierqv1.CreateGroupResponse], error) {
			return s.client(host).CreateGroup(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.CreateGroupResponse{Group: protoGroup(g)}), nil
}

func (s groupService) ListGroups(ctx context.Context, req *connect.Request[tierqv1.ListGroupsRequest]) (*connect.Response[tierqv1.ListGroupsResponse], error) {
	groups, err := s.backend.ListGroups(ctx, req.Msg.GetQueue(), req.Msg.Partition)
	if n, ok := several(err); ok {
		parts, err := forEach(ctx, req.Msg, n, s.ListGroups)
		if err != nil {
			return nil, err
		}
		lists := make([][]*tierqv1.Group, n)
		for i, p := range parts {
			lists[i] = p.GetGroups()
		}
		return connect.NewResponse(&tierqv1.ListGroupsResponse{Groups: mergeGroups(lists)}), nil
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ListGroupsRequest]) (*connect.Response[tierqv1.ListGroupsResponse], error) {
			return s.client(host).ListGroups(ctx, r)
		})
	}
	out := &tierqv1.ListGroupsResponse{}
	for _, g := range groups {
		out.Groups = append(out.Groups, protoGroup(g))
	}
	s.askHomes(ctx, req.Msg.GetQueue(), req.Msg.Partition, out.Groups)
	return connect.NewResponse(out), nil
}

// homeAnswer bounds the wait for what another host knows as the home of groups.
const homeAnswer = time.Second

// askHomes adds what only the homes of groups know, as far as they answer in time. The hosts of the fleet ask each other
// once: a host that was asked by another one does not ask on.
func (s groupService) askHomes(ctx context.Context, queueName string, partition Partition, groups []*tierqv1.Group) {
	if s.forward == nil || len(groups) == 0 {
		return
	}
	self, byHome := s.backend.Fleet().Self, map[uint64]map[uint64]*tierqv1.Group{}
	for _, g := range groups {
		if g.HomeHost == self || g.HomeHost == 0 {
			continue
		}
		if byHome[g.HomeHost] == nil {
			byHome[g.HomeHost] = map[uint64]*tierqv1.Group{}
		}
		byHome[g.HomeHost][g.Id] = g
	}
	ctx, cancel := context.WithTimeout(ctx, homeAnswer)
	defer cancel()
	var asked sync.WaitGroup
	for host, wanted := range byHome {
		asked.Go(func() {
			resp, err := s.client(host).ListGroups(ctx, connect.NewRequest(&tierqv1.ListGroupsRequest{Queue: queueName, Partition: partition}))
			if err != nil {
				return
			}
			for _, told := range resp.Msg.GetGroups() {
				if g := wanted[told.GetId()]; g != nil && told.GetHomeHost() == host {
					g.InFlight, g.WaitingReceives, g.Parked = told.GetInFlight(), told.GetWaitingReceives(), told.GetParked()
				}
			}
		})
	}
	asked.Wait()
}

func (s groupService) DeleteGroup(ctx context.Context, req *connect.Request[tierqv1.DeleteGroupRequest]) (*connect.Response[tierqv1.DeleteGroupResponse], error) {
	if req.Msg.Partition == nil {
		return s.deleteEverywhere(ctx, req.Msg)
	}
	if err := s.backend.DeleteGroup(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetName()), queue.GroupID(req.Msg.GetId())); err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.DeleteGroupRequest]) (*connect.Response[tierqv1.DeleteGroupResponse], error) {
			return s.client(host).DeleteGroup(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.DeleteGroupResponse{}), nil
}

// oneStart refuses an address as the start of a group in several partitions.
func oneStart(s *tierqv1.Start, n int) error {
	if s.GetAt() == "address" {
		return code.New(code.InvalidArgument, "partition: start.address is of one partition, the queue has %d: name it, or start by time", n)
	}
	return nil
}

func (s groupService) ResetGroup(ctx context.Context, req *connect.Request[tierqv1.ResetGroupRequest]) (*connect.Response[tierqv1.ResetGroupResponse], error) {
	start, err := startOf(req.Msg.GetStart())
	if err != nil {
		return nil, err
	}
	g, err := s.backend.ResetGroup(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetName()), start)
	if n, ok := several(err); ok {
		if err := oneStart(req.Msg.GetStart(), n); err != nil {
			return nil, err
		}
		return eachGroup(ctx, req.Msg, n, s.ResetGroup, (*tierqv1.ResetGroupResponse).GetGroup, func(g *tierqv1.Group) *tierqv1.ResetGroupResponse {
			return &tierqv1.ResetGroupResponse{Group: g}
		})
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ResetGroupRequest]) (*connect.Response[tierqv1.ResetGroupResponse], error) {
			return s.client(host).ResetGroup(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.ResetGroupResponse{Group: protoGroup(g)}), nil
}

func (s groupService) MoveGroup(ctx context.Context, req *connect.Request[tierqv1.MoveGroupRequest]) (*connect.Response[tierqv1.MoveGroupResponse], error) {
	if req.Msg.GetToHost() == 0 {
		return nil, code.New(code.InvalidArgument, "to_host: name the host that the group shall move to")
	}
	g, err := s.backend.MoveGroup(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetName()), req.Msg.GetToHost())
	if n, ok := several(err); ok {
		return eachGroup(ctx, req.Msg, n, s.MoveGroup, (*tierqv1.MoveGroupResponse).GetGroup, func(g *tierqv1.Group) *tierqv1.MoveGroupResponse {
			return &tierqv1.MoveGroupResponse{Group: g}
		})
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.MoveGroupRequest]) (*connect.Response[tierqv1.MoveGroupResponse], error) {
			return s.client(host).MoveGroup(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.MoveGroupResponse{Group: protoGroup(g)}), nil
}

// Receive is never forwarded: the home's address goes back to the client, which keeps it.
func (s groupService) Receive(ctx context.Context, req *connect.Request[tierqv1.ReceiveRequest]) (*connect.Response[tierqv1.ReceiveResponse], error) {
	r, err := receive(req.Msg)
	if err != nil {
		return nil, err
	}
	ds, epoch, err := s.backend.Receive(ctx, r)
	var many *SeveralError
	if errors.As(err, &many) {
		out, err := s.receiveAny(ctx, r, &many.Queue)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(out), nil
	}
	if err != nil {
		return nil, err
	}
	n, _ := s.backend.PartitionCount(ctx, r.Queue)
	out := &tierqv1.ReceiveResponse{Epoch: uint64(epoch), Messages: make([]*tierqv1.Message, len(ds)), Partitions: n}
	for i, d := range ds {
		out.Messages[i] = protoMessage(d, r.Partition)
	}
	return connect.NewResponse(out), nil
}

func receive(m *tierqv1.ReceiveRequest) (Receive, error) {
	r := Receive{
		Queue: m.GetQueue(), Partition: m.Partition, Group: groupName(m.GetGroup()), Max: int(m.GetMaxMessages()), MaxBytes: int(m.GetMaxBytes()),
		Wait: 5 * time.Second, Consumer: m.GetConsumer(), MinIndex: queue.Index(m.GetMinIndex()),
	}
	if r.Max == 0 {
		r.Max = 1
	}
	if r.Max > maxReceive {
		return r, code.New(code.InvalidArgument, "max_messages: %d, at most %d are allowed", r.Max, maxReceive)
	}
	if r.MaxBytes == 0 {
		r.MaxBytes = 4 << 20
	}
	r.MaxBytes = min(r.MaxBytes, maxReceiveBytes)
	if m.WaitMs != nil {
		r.Wait = time.Duration(m.GetWaitMs()) * time.Millisecond
	}
	if r.Wait > maxWait {
		return r, code.New(code.InvalidArgument, "wait_ms: %d, at most %d are allowed", m.GetWaitMs(), maxWait.Milliseconds())
	}
	if len(r.Consumer) > queue.MaxNameBytes {
		return r, code.New(code.InvalidArgument, "consumer: %d bytes, at most %d are allowed", len(r.Consumer), queue.MaxNameBytes)
	}
	if m.LeaseMs != nil {
		if err := withinLease("lease_ms", m.GetLeaseMs()); err != nil {
			return r, err
		}
		lease := time.Duration(m.GetLeaseMs()) * time.Millisecond
		r.Lease = &lease
	}
	return r, nil
}

// withinLease refuses a lease, or a delay of a nack, that is too long.
func withinLease(field string, ms uint64) error {
	if limit := uint64(maxLease.Milliseconds()); ms > limit {
		return code.New(code.InvalidArgument, "%s: %d, at most %d (12 h) are allowed", field, ms, limit)
	}
	return nil
}

func protoMessage(d Delivery, partition Partition) *tierqv1.Message {
	m := &tierqv1.Message{
		Address: uint64(d.Message.Address), Receipt: d.Receipt, Body: d.Message.Body, Headers: protoHeaders(d.Message.Headers), Key: d.Message.Key,
		Attempt: d.Attempt, PublishedUnixMs: uint64(d.Message.Stamp), LeaseMs: uint64(d.Lease.Milliseconds()), Seq: uint64(d.Message.Seq),
		FirstDeliveredUnixMs: uint64(d.FirstDelivered), Round: d.Round, LastFailure: d.Reason,
	}
	if d.Message.Producer.Kind == queue.ProducerClient {
		m.ProducerId = d.Message.Producer.ID
	}
	if partition != nil {
		m.Partition = *partition
	}
	return m
}

func protoHeaders(in []queue.Header) []*tierqv1.Header {
	if len(in) == 0 {
		return nil
	}
	out := make([]*tierqv1.Header, len(in))
	for i, h := range in {
		out[i] = &tierqv1.Header{Name: h.Name, Value: h.Value}
	}
	return out
}

func (s groupService) Ack(ctx context.Context, req *connect.Request[tierqv1.AckRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	m := req.Msg
	return s.settle(ctx, Settle{Kind: SettleAck, Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Receipts: m.GetReceipts()})
}

func (s groupService) Nack(ctx context.Context, req *connect.Request[tierqv1.NackRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	m := req.Msg
	r := Settle{Kind: SettleNack, Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Receipts: m.GetReceipts(), Reason: m.GetReason()}
	if m.DelayMs != nil {
		if err := withinLease("delay_ms", m.GetDelayMs()); err != nil {
			return nil, err
		}
		d := time.Duration(m.GetDelayMs()) * time.Millisecond
		r.Delay = &d
	}
	return s.settle(ctx, r)
}

func (s groupService) Release(ctx context.Context, req *connect.Request[tierqv1.ReleaseRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	m := req.Msg
	return s.settle(ctx, Settle{Kind: SettleRelease, Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Receipts: m.GetReceipts()})
}

func (s groupService) Reject(ctx context.Context, req *connect.Request[tierqv1.RejectRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	m := req.Msg
	return s.settle(ctx, Settle{Kind: SettleReject, Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Receipts: m.GetReceipts(), Reason: m.GetReason()})
}

func (s groupService) Extend(ctx context.Context, req *connect.Request[tierqv1.ExtendRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	m := req.Msg
	if err := withinLease("lease_ms", m.GetLeaseMs()); err != nil {
		return nil, err
	}
	return s.settle(ctx, Settle{Kind: SettleExtend, Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Receipts: m.GetReceipts(), Lease: time.Duration(m.GetLeaseMs()) * time.Millisecond})
}

// settle is not forwarded, as only the home knows the leases and the client keeps its address; but for receipts of several
// partitions, which the client cannot tell apart.
func (s groupService) settle(ctx context.Context, r Settle) (*connect.Response[tierqv1.SettleResponse], error) {
	r.Group = groupName(r.Group)
	switch {
	case len(r.Receipts) == 0:
		return nil, code.New(code.BatchEmpty, "receipts: the batch is empty: send at least one receipt")
	case len(r.Receipts) > maxSettle:
		return nil, code.New(code.BatchTooLarge, "receipts: %d in one call, at most %d are allowed: split it", len(r.Receipts), maxSettle)
	case len(r.Reason) > 255:
		return nil, code.New(code.InvalidArgument, "reason: %d bytes, at most 255 are allowed", len(r.Reason))
	}
	results, err := s.backend.Settle(ctx, r)
	var many *SeveralError
	if errors.As(err, &many) {
		out, err := s.settleAny(ctx, r, &many.Queue)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(out), nil
	}
	if err != nil {
		return nil, err
	}
	out := &tierqv1.SettleResponse{Results: make([]*tierqv1.SettleResult, len(results))}
	for i, res := range results {
		p := &tierqv1.SettleResult{Address: uint64(res.Address), Already: res.Already}
		if res.Err != nil {
			e := asCode(res.Err)
			s.onRefusal(e.Code)
			p.Code, p.Name, p.Text, p.Effect = uint32(e.Code), e.Code.String(), sentence(e), effect(e.Effect)
		}
		out.Results[i] = p
	}
	return connect.NewResponse(out), nil
}

// settleOver makes a settle at another host.
func (s groupService) settleOver(ctx context.Context, c tierqv1connect.GroupServiceClient, r Settle) (*connect.Response[tierqv1.SettleResponse], error) {
	switch r.Kind {
	case SettleAck:
		return c.Ack(ctx, connect.NewRequest(&tierqv1.AckRequest{Queue: r.Queue, Partition: r.Partition, Group: r.Group, Receipts: r.Receipts}))
	case SettleNack:
		m := &tierqv1.NackRequest{Queue: r.Queue, Partition: r.Partition, Group: r.Group, Receipts: r.Receipts, Reason: r.Reason}
		if r.Delay != nil {
			ms := uint64(r.Delay.Milliseconds())
			m.DelayMs = &ms
		}
		return c.Nack(ctx, connect.NewRequest(m))
	case SettleRelease:
		return c.Release(ctx, connect.NewRequest(&tierqv1.ReleaseRequest{Queue: r.Queue, Partition: r.Partition, Group: r.Group, Receipts: r.Receipts}))
	case SettleReject:
		return c.Reject(ctx, connect.NewRequest(&tierqv1.RejectRequest{Queue: r.Queue, Partition: r.Partition, Group: r.Group, Receipts: r.Receipts, Reason: r.Reason}))
	}
	return c.Extend(ctx, connect.NewRequest(&tierqv1.ExtendRequest{
		Queue: r.Queue, Partition: r.Partition, Group: r.Group, Receipts: r.Receipts, LeaseMs: uint64(r.Lease.Milliseconds()),
	}))
}

func (s groupService) ListDeadLetters(ctx context.Context, req *connect.Request[tierqv1.ListDeadLettersRequest]) (*connect.Response[tierqv1.ListDeadLettersResponse], error) {
	m := req.Msg
	limit, err := pageOf(m.GetLimit())
	if err != nil {
		return nil, err
	}
	r, err := deadOf(m.GetQueue(), m.Partition, m.GetGroup(), nil, m)
	if err != nil {
		return nil, err
	}
	r.Limit = limit
	dead, next, err := s.backend.ListDead(ctx, r)
	if n, ok := several(err); ok {
		return s.listDeadOfAll(ctx, m, n, limit)
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.ListDeadLettersRequest]) (*connect.Response[tierqv1.ListDeadLettersResponse], error) {
			return s.client(host).ListDeadLetters(ctx, r)
		})
	}
	out := &tierqv1.ListDeadLettersResponse{NextAddress: uint64(next)}
	for _, d := range dead {
		out.DeadLetters = append(out.DeadLetters, &tierqv1.DeadLetter{
			Address: uint64(d.Address), Attempts: d.Attempts, Reason: d.Reason, FirstFailureUnixMs: uint64(d.FirstFailure), DeadUnixMs: uint64(d.DeadAt),
			Body: d.Message.Body, Headers: protoHeaders(d.Message.Headers), Key: d.Message.Key, Partition: m.GetPartition(),
			ExportNumber: d.ExportNumber, ExportState: exportState(d.ExportState), TargetShard: d.Target,
		})
	}
	return connect.NewResponse(out), nil
}

func (s groupService) RedriveDeadLetters(ctx context.Context, req *connect.Request[tierqv1.RedriveDeadLettersRequest]) (*connect.Response[tierqv1.RedriveDeadLettersResponse], error) {
	m := req.Msg
	r, err := deadOf(m.GetQueue(), m.Partition, m.GetGroup(), m.GetAddresses(), m)
	if err != nil {
		return nil, err
	}
	r.Limit, r.DryRun, r.Rate = int(min(m.GetLimit(), math.MaxInt32)), m.GetDryRun(), int(m.GetRatePerSecond())
	reply, err := s.backend.RedriveDead(ctx, r)
	if n, ok := several(err); ok {
		return s.redriveAll(ctx, m, n)
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.RedriveDeadLettersRequest]) (*connect.Response[tierqv1.RedriveDeadLettersResponse], error) {
			return s.client(host).RedriveDeadLetters(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.RedriveDeadLettersResponse{
		Redriven: uint64(reply.Done), Skipped: uint64(reply.Skipped), NextAddress: uint64(reply.Next), Matched: uint64(reply.Matched),
	}), nil
}

func (s groupService) PurgeDeadLetters(ctx context.Context, req *connect.Request[tierqv1.PurgeDeadLettersRequest]) (*connect.Response[tierqv1.PurgeDeadLettersResponse], error) {
	m := req.Msg
	r, err := deadOf(m.GetQueue(), m.Partition, m.GetGroup(), m.GetAddresses(), m)
	if err != nil {
		return nil, err
	}
	r.Limit, r.DryRun = int(min(m.GetLimit(), math.MaxInt32)), m.GetDryRun()
	reply, err := s.backend.PurgeDead(ctx, r)
	if n, ok := several(err); ok {
		return s.purgeDeadOfAll(ctx, m, n)
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.PurgeDeadLettersRequest]) (*connect.Response[tierqv1.PurgeDeadLettersResponse], error) {
			return s.client(host).PurgeDeadLetters(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.PurgeDeadLettersResponse{Purged: uint64(reply.Done), NextAddress: uint64(reply.Next), Matched: uint64(reply.Matched)}), nil
}

// listDeadOfAll, redriveAll and purgeDeadOfAll go through the partitions.
func (s groupService) listDeadOfAll(ctx context.Context, m *tierqv1.ListDeadLettersRequest, n, limit int) (*connect.Response[tierqv1.ListDeadLettersResponse], error) {
	out := &tierqv1.ListDeadLettersResponse{}
	var err error
	out.NextPartition, out.NextAddress, err = walk(ctx, n, m.GetFromPartition(), m.GetFromAddress(), uint64(limit), func(p uint32, from, left uint64) (uint64, uint64, error) {
		one := inPartition(m, p)
		one.FromAddress, one.Limit = from, uint32(left)
		resp, err := s.ListDeadLetters(ctx, connect.NewRequest(one))
		if err != nil {
			return 0, 0, err
		}
		out.DeadLetters = append(out.DeadLetters, resp.Msg.GetDeadLetters()...)
		return uint64(len(resp.Msg.GetDeadLetters())), resp.Msg.GetNextAddress(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

func (s groupService) redriveAll(ctx context.Context, m *tierqv1.RedriveDeadLettersRequest, n int) (*connect.Response[tierqv1.RedriveDeadLettersResponse], error) {
	if len(m.GetAddresses()) > 0 {
		return nil, code.New(code.InvalidArgument, "partition: addresses are of one partition, the queue has %d: name it", n)
	}
	out := &tierqv1.RedriveDeadLettersResponse{}
	var err error
	out.NextPartition, out.NextAddress, err = walk(ctx, n, m.GetFromPartition(), m.GetFromAddress(), m.GetLimit(), func(p uint32, from, left uint64) (uint64, uint64, error) {
		one := inPartition(m, p)
		one.FromAddress, one.Limit = from, left
		resp, err := s.RedriveDeadLetters(ctx, connect.NewRequest(one))
		if err != nil {
			return 0, 0, err
		}
		r := resp.Msg
		out.Redriven, out.Skipped, out.Matched = out.Redriven+r.GetRedriven(), out.Skipped+r.GetSkipped(), out.Matched+r.GetMatched()
		return r.GetRedriven() + r.GetSkipped() + r.GetMatched(), r.GetNextAddress(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

func (s groupService) purgeDeadOfAll(ctx context.Context, m *tierqv1.PurgeDeadLettersRequest, n int) (*connect.Response[tierqv1.PurgeDeadLettersResponse], error) {
	if len(m.GetAddresses()) > 0 {
		return nil, code.New(code.InvalidArgument, "partition: addresses are of one partition, the queue has %d: name it", n)
	}
	out := &tierqv1.PurgeDeadLettersResponse{}
	var err error
	out.NextPartition, out.NextAddress, err = walk(ctx, n, m.GetFromPartition(), m.GetFromAddress(), m.GetLimit(), func(p uint32, from, left uint64) (uint64, uint64, error) {
		one := inPartition(m, p)
		one.FromAddress, one.Limit = from, left
		resp, err := s.PurgeDeadLetters(ctx, connect.NewRequest(one))
		if err != nil {
			return 0, 0, err
		}
		r := resp.Msg
		out.Purged, out.Matched = out.Purged+r.GetPurged(), out.Matched+r.GetMatched()
		return r.GetPurged() + r.GetMatched(), r.GetNextAddress(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

// maxDeadAddresses bounds the dead letters that one call names.
const maxDeadAddresses = 10_000

// deadOf checks what the three calls about dead letters have in common.
func deadOf(queueName string, partition Partition, group string, named []uint64, m interface {
	GetReasonPrefix() string
	GetOlderThanMs() uint64
	GetFromAddress() uint64
}) (Dead, error) {
	from, err := addressOf("from_address", m.GetFromAddress())
	switch {
	case err != nil:
		return Dead{}, err
	case len(named) > maxDeadAddresses:
		return Dead{}, code.New(code.BatchTooLarge, "addresses: %d in one call, at most %d are allowed: split it", len(named), maxDeadAddresses)
	case len(named) > 0 && (from != 0 || m.GetReasonPrefix() != "" || m.GetOlderThanMs() != 0):
		return Dead{}, code.New(code.InvalidArgument, "addresses: they exclude from_address, reason_prefix and older_than_ms")
	case len(m.GetReasonPrefix()) > maxReason:
		return Dead{}, code.New(code.InvalidArgument, "reason_prefix: %d bytes, at most %d are allowed", len(m.GetReasonPrefix()), maxReason)
	case m.GetOlderThanMs() > maxDurationMs:
		return Dead{}, code.New(code.InvalidArgument, "older_than_ms: %d is more than ten years", m.GetOlderThanMs())
	}
	return Dead{
		Queue: queueName, Partition: partition, Group: groupName(group), Addresses: addresses(named), From: from, ReasonPrefix: m.GetReasonPrefix(),
		OlderThan: time.Duration(m.GetOlderThanMs()) * time.Millisecond,
	}, nil
}

func addresses(in []uint64) []queue.Address {
	out := make([]queue.Address, len(in))
	for i, a := range in {
		out[i] = queue.Address(a)
	}
	return out
}

// DefaultGroup is the group of receives that name none.
const DefaultGroup = "$default"

func groupName(name string) string {
	if name == "" {
		return DefaultGroup
	}
	return name
}

func validGroup(field, name string) error {
	if name == DefaultGroup {
		return nil
	}
	return validName(field, name)
}

// validName refuses a name that no queue or group may have, naming the field.
func validName(field, name string) error {
	bad := name == "" || len(name) > queue.MaxNameBytes || name[0] == '.' || name[0] == '$'
	for i := 0; i < len(name) && !bad; i++ {
		c := name[i]
		bad = !(c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-')
	}
	if bad {
		return code.New(code.InvalidName, "%s: %q is not a name: use 1 to %d of A-Z a-z 0-9 . _ - that begin with neither . nor $", field, name, queue.MaxNameBytes)
	}
	return nil
}

func startOf(s *tierqv1.Start) (queue.Start, error) {
	switch s.GetAt() {
	case "", "earliest":
		return queue.Start{Kind: queue.StartEarliest}, nil
	case "latest":
		return queue.Start{Kind: queue.StartLatest}, nil
	case "address":
		return queue.Start{Kind: queue.StartAddress, At: s.GetAddress()}, nil
	case "time":
		return queue.Start{Kind: queue.StartTime, At: s.GetUnixMs()}, nil
	}
	return queue.Start{}, code.New(code.InvalidArgument, "start.at: %q: use earliest, latest, address or time", s.GetAt())
}

func groupConfig(c *tierqv1.GroupConfig) queue.GroupConfig {
	return queue.GroupConfig{
		LeaseMs: c.GetLeaseMs(), MaxAttempts: c.GetMaxAttempts(), BackoffBaseMs: c.GetBackoffBaseMs(), BackoffFactorPermille: c.GetBackoffFactorPermille(),
		BackoffCapMs: c.GetBackoffCapMs(), JitterPermille: c.GetJitterPermille(), DelaysMs: c.GetDelaysMs(), MaxInFlight: c.GetMaxInFlight(),
		MaxInFlightPerConsumer: c.GetMaxInFlightPerConsumer(), SingleActiveConsumer: c.GetSingleActiveConsumer(), Paused: c.GetPaused(),
		RecordAfterMs:   c.GetRecordAfterMs(),
		DeadLetterQueue: c.GetDeadLetterQueue(),
	}
}

func protoGroupConfig(c queue.GroupConfig) *tierqv1.GroupConfig {
	return &tierqv1.GroupConfig{
		LeaseMs: c.LeaseMs, MaxAttempts: c.MaxAttempts, BackoffBaseMs: c.BackoffBaseMs, BackoffFactorPermille: c.BackoffFactorPermille,
		BackoffCapMs: c.BackoffCapMs, JitterPermille: c.JitterPermille, DelaysMs: c.DelaysMs, MaxInFlight: c.MaxInFlight,
		MaxInFlightPerConsumer: c.MaxInFlightPerConsumer, SingleActiveConsumer: c.SingleActiveConsumer, Paused: c.Paused,
		RecordAfterMs:   c.RecordAfterMs,
		DeadLetterQueue: c.DeadLetterQueue,
	}
}

func protoGroup(g GroupInfo) *tierqv1.Group {
	return &tierqv1.Group{
		Queue: g.Queue, Partition: g.Partition, Name: g.Name, Id: uint64(g.ID), Config: protoGroupConfig(g.Config), HomeHost: g.HomeHost, HomeApi: g.HomeAPI,
		Epoch: uint64(g.Epoch), Floor: uint64(g.Floor), Unfinished: g.Counters.Unfinished, Acked: g.Counters.Acked, Dead: g.Counters.Dead,
		Retrying: g.Counters.Retrying - g.Counters.Leased, InFlight: uint64(g.InFlight), WaitingReceives: uint64(g.Waiting),
		ConfigVersion: g.ConfigVersion, StartAddress: uint64(g.Start), Exported: g.Counters.Exported, Expired: g.Counters.Expired,
		Purged: g.Counters.Purged, Cancelled: g.Counters.Cancelled, RetriesTotal: g.Counters.Retries, DeadTotal: g.Counters.DeadTotal,
		RedrivenTotal: g.Counters.Redriven, OldestAddress: uint64(g.Oldest), OldestAgeMs: uint64(g.OldestAge.Milliseconds()),
		Exports: g.Exports, Parked: protoParked(g.Parked),
	}
}
