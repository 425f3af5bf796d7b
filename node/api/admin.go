package api

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Admin is the part of a Backend that administrators use. Its rules are the Backend's.
type Admin interface {
	PurgeQueue(ctx context.Context, r PurgeQueue) (PurgeReply, error)
	// ConfigureQueue replaces a queue's options; o.Version is the version that the change was decided on.
	ConfigureQueue(ctx context.Context, queue string, o queue.QueueOptions) (QueueInfo, error)
	PauseQueue(ctx context.Context, queue string, paused bool) (QueueInfo, error)
	// GrowQueue begins a growth to so many partitions, and CancelGrowth ends one that is not open yet. The fleet goes on with it by itself.
	GrowQueue(ctx context.Context, queue string, partitions uint32) (QueueInfo, error)
	CancelGrowth(ctx context.Context, queue string) (QueueInfo, error)
	// Growths are those under way, of one queue or of all (""), as the host knows that does the work.
	Growths(ctx context.Context, queue string) ([]Growth, error)
	// GroupPartitions are those in which a group of the queue is to be, read linearizably if the catalog can be read.
	GroupPartitions(ctx context.Context, queue string) (Partitions, error)
	// ConfigureGroup replaces what a client can set of a group's policy.
	ConfigureGroup(ctx context.Context, queue string, p Partition, group string, cfg queue.GroupConfig, version uint64) (GroupInfo, error)
	PauseGroup(ctx context.Context, queue string, p Partition, group string, paused bool) (GroupInfo, error)
	// Consumers and Explain are answered by the group's home.
	Consumers(ctx context.Context, queue string, p Partition, group string, withMessages bool) (Consumers, error)
	Explain(ctx context.Context, r Explain) (Explanation, error)
	// ClaimIdle is answered by the group's home.
	ClaimIdle(ctx context.Context, r ClaimIdle) (Claimed, error)
	ListDelayed(ctx context.Context, r ListDelayed) (DelayedPage, error)
	// ChangeDelayed cancels or reschedules, and returns when the message becomes due: 0 after a cancel.
	ChangeDelayed(ctx context.Context, r ChangeDelayed) (queue.Stamp, error)
	Browse(ctx context.Context, r Browse) ([]queue.StoredMessage, queue.Address, error)
	LookupPublish(ctx context.Context, r LookupPublish) (found queue.PublishLookup, exists bool, err error)
}

// PurgeQueue removes everything up to To, or what there is when All is set.
type PurgeQueue struct {
	Queue       string
	Partition   Partition
	To          queue.Address
	All         bool
	OperationID uint64
}

// PurgeReply says how many messages went. Repeated: the operation had been done before.
type PurgeReply struct {
	Purged   uint64
	To       queue.Address
	Repeated bool
}

// Consumers is what a group's home knows of its consumers.
type Consumers struct {
	Consumers []Consumer
	InFlight  int
	Waiting   int
	Max       uint32
	HomeHost  uint64
	HomeAPI   string
	Epoch     queue.Epoch
}

// Consumer is what one consumer name holds.
type Consumer struct {
	Name     string
	InFlight int
	Active   bool
	Held     []Held
}

// Held is one message that a consumer holds.
type Held struct {
	Address   queue.Address
	Attempt   uint32
	For, Left time.Duration
}

// Explain asks about a message, a key, or with neither about the group as a whole.
type Explain struct {
	Queue     string
	Partition Partition
	Group     string
	Address   queue.Address
	Key       []byte
}

// Explanation is why something is not delivered. Verdict is one of those that tierq.proto lists.
type Explanation struct {
	Verdict, Text string
	Address       queue.Address
	Attempts      uint32
	Reason        string
	NotBefore     queue.Stamp
	Deadline      queue.Stamp
	Consumer      string
	BlockedBy     queue.Address
	Key           []byte
	Behind        int
	HomeHost      uint64
	HomeState     string
	Ready         int
	InFlight      int
	Retrying      int
	BlockedKeys   int
	Blocked       int
	Unresolved    int
	Waiting       int
	Group         queue.GroupInfo
}

// ListDelayed asks for a page of the delayed messages behind After.
type ListDelayed struct {
	Queue     string
	Partition Partition
	After     queue.DelayedKey
	Limit     int
	Bodies    bool
}

// DelayedPage is a page in due order; More says that Next goes on.
type DelayedPage struct {
	Messages []DelayedMessage
	Next     queue.DelayedKey
	More     bool
	Total    uint64
}

// DelayedMessage is one delayed message; Message only when bodies were asked for.
type DelayedMessage struct {
	queue.MessageHead
	Message queue.StoredMessage
}

// ChangeDelayed cancels a delayed message, or makes it due Delay from now. Expected 0 is whatever it is now.
type ChangeDelayed struct {
	Queue     string
	Partition Partition
	Address   queue.Address
	Expected  queue.Stamp
	Cancel    bool
	Delay     time.Duration
}

// Browse asks for stored messages from an address on.
type Browse struct {
	Queue     string
	Partition Partition
	From      queue.Address
	Limit     int
	MaxBytes  int
}

// LookupPublish asks for a seq of a client's producer.
type LookupPublish struct {
	Queue     string
	Partition Partition
	Producer  queue.Producer
	Seq       queue.Seq
}

// Bounds of the administrative calls.
const (
	defaultPage = 100
	maxPage     = 1000
	// browseBytes bounds the bodies of one answer, but for the last one.
	browseBytes = 4 << 20
	maxReason   = 255
)

// adminService implements tierq.v1.AdminService.
type adminService struct{ *Server }

func (s adminService) client(host uint64) tierqv1connect.AdminServiceClient {
	httpClient, base := s.forward(host)
	return tierqv1connect.NewAdminServiceClient(httpClient, base, connect.WithGRPC())
}

// over forwards a call that another host must answer.
func over[Req, Resp any](ctx context.Context, s adminService, err error, m *Req,
	call func(tierqv1connect.AdminServiceClient, context.Context, *connect.Request[Req]) (*connect.Response[Resp], error)) (*connect.Response[Resp], error) {
	return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[Req]) (*connect.Response[Resp], error) {
		return call(s.client(host), ctx, r)
	})
}

func (s adminService) PurgeQueue(ctx context.Context, req *connect.Request[tierqv1.PurgeQueueRequest]) (*connect.Response[tierqv1.PurgeQueueResponse], error) {
	m := req.Msg
	to, err := addressOf("to_address", m.GetToAddress())
	switch {
	case err != nil:
		return nil, err
	case (to == 0) != m.GetAll():
		return nil, code.New(code.InvalidArgument, "to_address, all: give exactly one of them")
	}
	r, err := s.backend.PurgeQueue(ctx, PurgeQueue{Queue: m.GetQueue(), Partition: m.Partition, To: to, All: m.GetAll(), OperationID: m.GetOperationId()})
	if n, ok := several(err); ok {
		return s.purgeAll(ctx, m, n)
	}
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.PurgeQueue)
	}
	return connect.NewResponse(&tierqv1.PurgeQueueResponse{Purged: r.Purged, PurgedTo: uint64(r.To), Repeated: r.Repeated}), nil
}

// purgeAll purges every partition. Each remembers the operation for itself.
func (s adminService) purgeAll(ctx context.Context, m *tierqv1.PurgeQueueRequest, n int) (*connect.Response[tierqv1.PurgeQueueResponse], error) {
	if !m.GetAll() {
		return nil, code.New(code.InvalidArgument, "partition: to_address is of one partition, the queue has %d: name it", n)
	}
	parts, err := forEach(ctx, m, n, s.PurgeQueue)
	if err != nil {
		return nil, err
	}
	out := &tierqv1.PurgeQueueResponse{Repeated: true}
	for _, p := range parts {
		out.Purged += p.GetPurged()
		out.Repeated = out.Repeated && p.GetRepeated()
	}
	return connect.NewResponse(out), nil
}

func (s adminService) ConfigureQueue(ctx context.Context, req *connect.Request[tierqv1.ConfigureQueueRequest]) (*connect.Response[tierqv1.ConfigureQueueResponse], error) {
	m := req.Msg
	if m.GetOptions().GetVersion() == 0 {
		return nil, code.New(code.InvalidArgument, "options.version: name the version that the change was decided on, as DescribeQueue tells it")
	}
	o := queueOptions(m.GetOptions())
	o.Version = m.GetOptions().GetVersion()
	info, err := s.backend.ConfigureQueue(ctx, m.GetQueue(), o)
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.ConfigureQueue)
	}
	return connect.NewResponse(&tierqv1.ConfigureQueueResponse{Queue: protoQueue(info)}), nil
}

func (s adminService) PauseQueue(ctx context.Context, req *connect.Request[tierqv1.PauseQueueRequest]) (*connect.Response[tierqv1.PauseQueueResponse], error) {
	info, err := s.backend.PauseQueue(ctx, req.Msg.GetQueue(), true)
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.PauseQueue)
	}
	return connect.NewResponse(&tierqv1.PauseQueueResponse{Queue: protoQueue(info)}), nil
}

func (s adminService) ResumeQueue(ctx context.Context, req *connect.Request[tierqv1.ResumeQueueRequest]) (*connect.Response[tierqv1.ResumeQueueResponse], error) {
	info, err := s.backend.PauseQueue(ctx, req.Msg.GetQueue(), false)
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.ResumeQueue)
	}
	return connect.NewResponse(&tierqv1.ResumeQueueResponse{Queue: protoQueue(info)}), nil
}

func (s adminService) ConfigureGroup(ctx context.Context, req *connect.Request[tierqv1.ConfigureGroupRequest]) (*connect.Response[tierqv1.ConfigureGroupResponse], error) {
	m := req.Msg
	if m.GetExpectedVersion() == 0 {
		return nil, code.New(code.InvalidArgument, "expected_version: name the config version that the change was decided on, as ListGroups tells it")
	}
	if m.Partition == nil {
		return s.configureEverywhere(ctx, m)
	}
	g, err := s.backend.ConfigureGroup(ctx, m.GetQueue(), m.Partition, groupName(m.GetName()), groupConfig(m.GetConfig()), m.GetExpectedVersion())
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.ConfigureGroup)
	}
	return connect.NewResponse(&tierqv1.ConfigureGroupResponse{Group: protoGroup(g)}), nil
}

func (s adminService) PauseGroup(ctx context.Context, req *connect.Request[tierqv1.PauseGroupRequest]) (*connect.Response[tierqv1.PauseGroupResponse], error) {
	if req.Msg.Partition == nil {
		g, err := groupEverywhere(ctx, s.Server, req.Msg.GetQueue(), req.Msg, s.PauseGroup, (*tierqv1.PauseGroupResponse).GetGroup)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&tierqv1.PauseGroupResponse{Group: g}), nil
	}
	g, err := s.backend.PauseGroup(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetName()), true)
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.PauseGroup)
	}
	return connect.NewResponse(&tierqv1.PauseGroupResponse{Group: protoGroup(g)}), nil
}

func (s adminService) ResumeGroup(ctx context.Context, req *connect.Request[tierqv1.ResumeGroupRequest]) (*connect.Response[tierqv1.ResumeGroupResponse], error) {
	if req.Msg.Partition == nil {
		g, err := groupEverywhere(ctx, s.Server, req.Msg.GetQueue(), req.Msg, s.ResumeGroup, (*tierqv1.ResumeGroupResponse).GetGroup)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&tierqv1.ResumeGroupResponse{Group: g}), nil
	}
	g, err := s.backend.PauseGroup(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetName()), false)
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.ResumeGroup)
	}
	return connect.NewResponse(&tierqv1.ResumeGroupResponse{Group: protoGroup(g)}), nil
}

func (s adminService) ListConsumers(ctx context.Context, req *connect.Request[tierqv1.ListConsumersRequest]) (*connect.Response[tierqv1.ListConsumersResponse], error) {
	c, err := s.backend.Consumers(ctx, req.Msg.GetQueue(), req.Msg.Partition, groupName(req.Msg.GetGroup()), req.Msg.GetWithMessages())
	if n, ok := several(err); ok {
		parts, err := forEach(ctx, req.Msg, n, s.ListConsumers)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(mergeConsumers(parts)), nil
	}
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.ListConsumers)
	}
	out := &tierqv1.ListConsumersResponse{
		InFlight: uint64(c.InFlight), MaxInFlight: uint64(c.Max), WaitingReceives: uint64(c.Waiting), HomeHost: c.HomeHost, HomeApi: c.HomeAPI, Epoch: uint64(c.Epoch),
	}
	for _, x := range c.Consumers {
		p := &tierqv1.Consumer{Name: x.Name, InFlight: uint64(x.InFlight), Active: x.Active}
		for _, h := range x.Held {
			p.Messages = append(p.Messages, &tierqv1.HeldMessage{
				Address: uint64(h.Address), Attempt: h.Attempt, Partition: req.Msg.GetPartition(), HeldMs: uint64(h.For.Milliseconds()), LeftMs: uint64(h.Left.Milliseconds()),
			})
		}
		out.Consumers = append(out.Consumers, p)
	}
	return connect.NewResponse(out), nil
}

// mergeConsumers puts together what the homes of all partitions know of a group's consumers.
func mergeConsumers(parts []*tierqv1.ListConsumersResponse) *tierqv1.ListConsumersResponse {
	out := &tierqv1.ListConsumersResponse{HomeHost: parts[0].GetHomeHost(), HomeApi: parts[0].GetHomeApi(), Epoch: parts[0].GetEpoch()}
	byName := map[string]*tierqv1.Consumer{}
	for _, p := range parts {
		out.InFlight += p.GetInFlight()
		out.MaxInFlight += p.GetMaxInFlight()
		out.WaitingReceives += p.GetWaitingReceives()
		for _, c := range p.GetConsumers() {
			sum := byName[c.GetName()]
			if sum == nil {
				sum = &tierqv1.Consumer{Name: c.GetName()}
				byName[c.GetName()] = sum
				out.Consumers = append(out.Consumers, sum)
			}
			sum.InFlight += c.GetInFlight()
			sum.Active = sum.Active || c.GetActive()
			sum.Messages = append(sum.Messages, c.GetMessages()...)
		}
	}
	return out
}

func (s adminService) ExplainGroup(ctx context.Context, req *connect.Request[tierqv1.ExplainGroupRequest]) (*connect.Response[tierqv1.ExplainGroupResponse], error) {
	m := req.Msg
	a, err := addressOf("address", m.GetAddress())
	switch {
	case err != nil:
		return nil, err
	case a != 0 && len(m.GetKey()) > 0:
		return nil, code.New(code.InvalidArgument, "address, key: give at most one of them")
	case len(m.GetKey()) > queue.MaxKeyBytes:
		return nil, code.New(code.InvalidArgument, "key: %d bytes, at most %d are allowed", len(m.GetKey()), queue.MaxKeyBytes)
	}
	e, err := s.backend.Explain(ctx, Explain{Queue: m.GetQueue(), Partition: m.Partition, Group: groupName(m.GetGroup()), Address: a, Key: m.GetKey()})
	if n, ok := several(err); ok && a == 0 {
		return s.explainAll(ctx, m, n)
	}
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.ExplainGroup)
	}
	return connect.NewResponse(&tierqv1.ExplainGroupResponse{
		Verdict: e.Verdict, Text: e.Text, Address: uint64(e.Address), Attempts: e.Attempts, Reason: e.Reason, NotBeforeUnixMs: uint64(e.NotBefore),
		LeaseDeadlineUnixMs: uint64(e.Deadline), LeaseConsumer: e.Consumer, BlockedBy: uint64(e.BlockedBy), Key: e.Key, Behind: uint64(e.Behind),
		HomeHost: e.HomeHost, Epoch: uint64(e.Group.Epoch), HomeState: e.HomeState, Ready: uint64(e.Ready), InFlight: uint64(e.InFlight),
		MaxInFlight: uint64(e.Group.Config.MaxInFlight), Retrying: uint64(e.Retrying), BlockedKeys: uint64(e.BlockedKeys), BlockedMessages: uint64(e.Blocked),
		Unresolved: uint64(e.Unresolved), WaitingReceives: uint64(e.Waiting), Unfinished: e.Group.Counters.Unfinished, Dead: e.Group.Counters.Dead,
		Partition: m.GetPartition(),
	}), nil
}

// explainAll explains a key in its partition, and a group as a whole in all of them.
func (s adminService) explainAll(ctx context.Context, m *tierqv1.ExplainGroupRequest, n int) (*connect.Response[tierqv1.ExplainGroupResponse], error) {
	if len(m.GetKey()) > 0 {
		return s.ExplainGroup(ctx, connect.NewRequest(inPartition(m, tierqv1.PartitionOfKey(m.GetKey(), uint32(n)))))
	}
	parts, err := forEach(ctx, m, n, s.ExplainGroup)
	if err != nil {
		return nil, err
	}
	worst := parts[0]
	for _, p := range parts {
		if stuck(p) && !stuck(worst) || p.GetVerdict() == "ready" && worst.GetVerdict() == "idle" {
			worst = p
		}
	}
	out := proto.Clone(worst).(*tierqv1.ExplainGroupResponse)
	out.Text = fmt.Sprintf("partition %d: %s", out.GetPartition(), out.GetText())
	out.Ready, out.InFlight, out.Retrying, out.BlockedKeys, out.BlockedMessages, out.Unresolved, out.WaitingReceives, out.Unfinished, out.Dead = 0, 0, 0, 0, 0, 0, 0, 0, 0
	for _, p := range parts {
		out.Ready += p.GetReady()
		out.InFlight += p.GetInFlight()
		out.Retrying += p.GetRetrying()
		out.BlockedKeys += p.GetBlockedKeys()
		out.BlockedMessages += p.GetBlockedMessages()
		out.Unresolved += p.GetUnresolved()
		out.WaitingReceives += p.GetWaitingReceives()
		out.Unfinished += p.GetUnfinished()
		out.Dead += p.GetDead()
	}
	out.Partitions = parts
	return connect.NewResponse(out), nil
}

// stuck says that something is left and that it does not come out by itself.
func stuck(e *tierqv1.ExplainGroupResponse) bool {
	return e.GetUnfinished() > 0 && e.GetVerdict() != "ready" && e.GetVerdict() != "idle"
}

func (s adminService) ListDelayed(ctx context.Context, req *connect.Request[tierqv1.ListDelayedRequest]) (*connect.Response[tierqv1.ListDelayedResponse], error) {
	m := req.Msg
	limit, err := pageOf(m.GetLimit())
	if err != nil {
		return nil, err
	}
	after, err := addressOf("after.address", m.GetAfter().GetAddress())
	if err != nil {
		return nil, err
	}
	p, err := s.backend.ListDelayed(ctx, ListDelayed{
		Queue: m.GetQueue(), Partition: m.Partition, Limit: limit, Bodies: m.GetWithBodies(),
		After: queue.DelayedKey{VisibleAt: min(queue.Stamp(m.GetAfter().GetVisibleUnixMs()), queue.MaxStamp), Address: after},
	})
	if n, ok := several(err); ok {
		return s.listDelayedOfAll(ctx, m, n, limit)
	}
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.ListDelayed)
	}
	out := &tierqv1.ListDelayedResponse{Total: p.Total}
	for i := range p.Messages {
		one := protoDelayed(&p.Messages[i])
		one.Partition = m.GetPartition()
		out.Messages = append(out.Messages, one)
	}
	if p.More {
		out.Next = &tierqv1.DelayedPosition{VisibleUnixMs: uint64(p.Next.VisibleAt), Address: uint64(p.Next.Address), Partition: m.GetPartition()}
	}
	return connect.NewResponse(out), nil
}

// listDelayedOfAll merges a page of each partition by due time, then partition, then address.
func (s adminService) listDelayedOfAll(ctx context.Context, m *tierqv1.ListDelayedRequest, n, limit int) (*connect.Response[tierqv1.ListDelayedResponse], error) {
	after := m.GetAfter()
	parts, err := forEach(ctx, m, n, func(ctx context.Context, r *connect.Request[tierqv1.ListDelayedRequest]) (*connect.Response[tierqv1.ListDelayedResponse], error) {
		switch p := r.Msg.GetPartition(); {
		case after == nil || p == after.GetPartition():
		case p < after.GetPartition(): // had its turn at this time
			r.Msg.After.Address = uint64(queue.MaxAddress)
		default:
			r.Msg.After.Address = 0
		}
		return s.ListDelayed(ctx, r)
	})
	if err != nil {
		return nil, err
	}
	out, more := &tierqv1.ListDelayedResponse{}, false
	end := &tierqv1.DelayedPosition{VisibleUnixMs: math.MaxUint64} // where the pages that are cut go on, the first one
	for _, p := range parts {
		out.Total += p.GetTotal()
		out.Messages = append(out.Messages, p.GetMessages()...)
		if next := p.GetNext(); next != nil {
			more = true
			if comparePositions(next, end) < 0 {
				end = next
			}
		}
	}
	at := func(d *tierqv1.DelayedMessage) *tierqv1.DelayedPosition {
		return &tierqv1.DelayedPosition{VisibleUnixMs: d.GetVisibleUnixMs(), Partition: d.GetPartition(), Address: d.GetAddress()}
	}
	slices.SortFunc(out.Messages, func(a, b *tierqv1.DelayedMessage) int { return comparePositions(at(a), at(b)) })
	// Behind the end of a page that is cut, its partition may have more.
	if i := slices.IndexFunc(out.Messages, func(d *tierqv1.DelayedMessage) bool { return comparePositions(at(d), end) > 0 }); i >= 0 {
		out.Messages = out.Messages[:i]
	}
	if len(out.Messages) > limit {
		out.Messages, more = out.Messages[:limit], true
		end = at(out.Messages[limit-1])
	}
	if more {
		out.Next = end
	}
	return connect.NewResponse(out), nil
}

func comparePositions(a, b *tierqv1.DelayedPosition) int {
	return cmp.Or(cmp.Compare(a.GetVisibleUnixMs(), b.GetVisibleUnixMs()), cmp.Compare(a.GetPartition(), b.GetPartition()), cmp.Compare(a.GetAddress(), b.GetAddress()))
}

func protoDelayed(m *DelayedMessage) *tierqv1.DelayedMessage {
	return &tierqv1.DelayedMessage{
		Address: uint64(m.Address), VisibleUnixMs: uint64(m.VisibleAt), PublishedUnixMs: uint64(m.Stamp), Bytes: uint64(m.Bytes), Key: m.Key,
		Body: m.Message.Body, Headers: protoHeaders(m.Message.Headers),
	}
}

func (s adminService) CancelDelayed(ctx context.Context, req *connect.Request[tierqv1.CancelDelayedRequest]) (*connect.Response[tierqv1.ChangeDelayedResponse], error) {
	m := req.Msg
	a, err := realAddress("address", m.GetAddress())
	if err != nil {
		return nil, err
	}
	_, err = s.backend.ChangeDelayed(ctx, ChangeDelayed{
		Queue: m.GetQueue(), Partition: m.Partition, Address: a, Expected: queue.Stamp(m.GetExpectedVisibleUnixMs()), Cancel: true,
	})
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.CancelDelayed)
	}
	return connect.NewResponse(&tierqv1.ChangeDelayedResponse{Address: uint64(a)}), nil
}

func (s adminService) RescheduleDelayed(ctx context.Context, req *connect.Request[tierqv1.RescheduleDelayedRequest]) (*connect.Response[tierqv1.ChangeDelayedResponse], error) {
	m := req.Msg
	a, err := realAddress("address", m.GetAddress())
	switch {
	case err != nil:
		return nil, err
	case m.GetDelayMs() == 0 || m.GetDelayMs() > maxDurationMs:
		return nil, code.New(code.InvalidArgument, "delay_ms: %d, use 1 to %d: the message becomes due so long from now", m.GetDelayMs(), uint64(maxDurationMs))
	}
	at, err := s.backend.ChangeDelayed(ctx, ChangeDelayed{
		Queue: m.GetQueue(), Partition: m.Partition, Address: a, Expected: queue.Stamp(m.GetExpectedVisibleUnixMs()),
		Delay: time.Duration(m.GetDelayMs()) * time.Millisecond,
	})
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.RescheduleDelayed)
	}
	return connect.NewResponse(&tierqv1.ChangeDelayedResponse{Address: uint64(a), VisibleUnixMs: uint64(at)}), nil
}

func (s adminService) Browse(ctx context.Context, req *connect.Request[tierqv1.BrowseRequest]) (*connect.Response[tierqv1.BrowseResponse], error) {
	m := req.Msg
	limit, err := pageOf(m.GetLimit())
	if err != nil {
		return nil, err
	}
	from, err := addressOf("from_address", m.GetFromAddress())
	if err != nil {
		return nil, err
	}
	list, next, err := s.backend.Browse(ctx, Browse{Queue: m.GetQueue(), Partition: m.Partition, From: from, Limit: limit, MaxBytes: browseBytes})
	if n, ok := several(err); ok {
		return s.browseAll(ctx, m, n, limit)
	}
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.Browse)
	}
	out := &tierqv1.BrowseResponse{NextAddress: uint64(next)}
	for i := range list {
		one := protoBrowsed(&list[i], m.MaxBodyBytes)
		one.Partition = m.GetPartition()
		out.Messages = append(out.Messages, one)
	}
	return connect.NewResponse(out), nil
}

// browseAll goes through the partitions; bytes are bounded per partition.
func (s adminService) browseAll(ctx context.Context, m *tierqv1.BrowseRequest, n, limit int) (*connect.Response[tierqv1.BrowseResponse], error) {
	out, bytes := &tierqv1.BrowseResponse{}, 0
	var err error
	out.NextPartition, out.NextAddress, err = walk(ctx, n, m.GetFromPartition(), m.GetFromAddress(), uint64(limit), func(p uint32, from, left uint64) (uint64, uint64, error) {
		if bytes >= browseBytes {
			return 0, max(from, 1), nil
		}
		one := inPartition(m, p)
		one.FromAddress, one.Limit = from, uint32(left)
		resp, err := s.Browse(ctx, connect.NewRequest(one))
		if err != nil {
			return 0, 0, err
		}
		for _, b := range resp.Msg.GetMessages() {
			bytes += len(b.GetBody())
		}
		out.Messages = append(out.Messages, resp.Msg.GetMessages()...)
		return uint64(len(resp.Msg.GetMessages())), resp.Msg.GetNextAddress(), nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

func protoBrowsed(m *queue.StoredMessage, most *uint32) *tierqv1.BrowsedMessage {
	out := &tierqv1.BrowsedMessage{
		Address: uint64(m.Address), PublishedUnixMs: uint64(m.Stamp), VisibleUnixMs: uint64(m.VisibleAt), ExpiresUnixMs: uint64(m.ExpiresAt),
		Key: m.Key, Headers: protoHeaders(m.Headers), Body: m.Body, BodyBytes: uint64(len(m.Body)), Seq: uint64(m.Seq),
	}
	if most != nil && len(out.Body) > int(*most) {
		out.Body = out.Body[:*most]
	}
	if m.Producer.Kind == queue.ProducerClient {
		out.ProducerId = m.Producer.ID
	}
	return out
}

func (s adminService) LookupPublish(ctx context.Context, req *connect.Request[tierqv1.LookupPublishRequest]) (*connect.Response[tierqv1.LookupPublishResponse], error) {
	m := req.Msg
	switch {
	case m.GetProducerId() == 0:
		return nil, code.New(code.InvalidArgument, "producer_id: name the producer whose publish is looked for")
	case m.GetSeq() == 0 || queue.Seq(m.GetSeq()) > queue.MaxSeq:
		return nil, code.New(code.InvalidArgument, "seq: %d, use 1 to %d", m.GetSeq(), queue.MaxSeq)
	}
	seq := queue.Seq(m.GetSeq())
	found, exists, err := s.backend.LookupPublish(ctx, LookupPublish{
		Queue: m.GetQueue(), Partition: m.Partition, Producer: queue.Producer{Kind: queue.ProducerClient, ID: m.GetProducerId()}, Seq: seq,
	})
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.LookupPublish)
	}
	return connect.NewResponse(&tierqv1.LookupPublishResponse{
		Outcome: lookupOutcome(found, seq), Address: uint64(found.Address), Exists: exists, ProducerEpoch: found.Epoch, Low: uint64(found.Low), LastSeq: uint64(found.Last),
	}), nil
}

func lookupOutcome(l queue.PublishLookup, seq queue.Seq) string {
	switch {
	case !l.Known:
		return "unknown-producer"
	case l.Address != 0:
		return "stored"
	case seq < l.Low:
		return "forgotten"
	}
	return "not-stored"
}

// addressOf checks an address that may be 0, realAddress one that may not.
func addressOf(field string, a uint64) (queue.Address, error) {
	if queue.Address(a) > queue.MaxAddress {
		return 0, code.New(code.InvalidArgument, "%s: %d, addresses end at %d", field, a, uint64(queue.MaxAddress))
	}
	return queue.Address(a), nil
}

func realAddress(field string, a uint64) (queue.Address, error) {
	if a == 0 {
		return 0, code.New(code.InvalidArgument, "%s: addresses begin at 1", field)
	}
	return addressOf(field, a)
}

func pageOf(limit uint32) (int, error) {
	if limit > maxPage {
		return 0, code.New(code.InvalidArgument, "limit: %d, at most %d are allowed", limit, maxPage)
	}
	if limit == 0 {
		limit = defaultPage
	}
	return int(limit), nil
}
