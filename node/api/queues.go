package api

import (
	"context"
	"errors"
	"math"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// queueService implements tierq.v1.QueueService.
type queueService struct{ *Server }

func (s queueService) client(host uint64) tierqv1connect.QueueServiceClient {
	httpClient, base := s.forward(host)
	return tierqv1connect.NewQueueServiceClient(httpClient, base, connect.WithGRPC())
}

func (s queueService) CreateQueue(ctx context.Context, req *connect.Request[tierqv1.CreateQueueRequest]) (*connect.Response[tierqv1.CreateQueueResponse], error) {
	m := req.Msg
	opts := queueOptions(m.GetOptions())
	if err := validName("name", m.GetName()); err != nil {
		return nil, err
	}
	info, created, err := s.backend.CreateQueue(ctx, CreateQueue{
		Name: m.GetName(), Options: opts, Partitions: m.GetPartitions(), Replicas: int(m.GetReplicas()), Witnesses: int(m.GetWitnesses()), OperationID: m.GetOperationId(),
	})
	if err != nil {
		return elsewhere(ctx, s.Server, err, m, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.CreateQueueRequest]) (*connect.Response[tierqv1.CreateQueueResponse], error) {
			return s.client(host).CreateQueue(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.CreateQueueResponse{Queue: protoQueue(info), Created: created}), nil
}

func (s queueService) ListQueues(ctx context.Context, req *connect.Request[tierqv1.ListQueuesRequest]) (*connect.Response[tierqv1.ListQueuesResponse], error) {
	infos, err := s.backend.ListQueues(ctx, req.Msg.GetPrefix())
	if err != nil {
		return nil, err
	}
	out := &tierqv1.ListQueuesResponse{}
	for _, i := range infos {
		out.Queues = append(out.Queues, protoQueue(i))
	}
	return connect.NewResponse(out), nil
}

func (s queueService) DescribeQueue(ctx context.Context, req *connect.Request[tierqv1.DescribeQueueRequest]) (*connect.Response[tierqv1.DescribeQueueResponse], error) {
	info, err := s.backend.DescribeQueue(ctx, req.Msg.GetName(), req.Msg.Partition)
	if n, ok := several(err); ok {
		parts, err := s.describeEach(ctx, req.Msg, n)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&tierqv1.DescribeQueueResponse{Queue: mergeQueue(parts)}), nil
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.DescribeQueueRequest]) (*connect.Response[tierqv1.DescribeQueueResponse], error) {
			return s.client(host).DescribeQueue(ctx, r)
		})
	}
	q := protoQueue(info)
	groupService(s).askHomes(ctx, q.GetName(), req.Msg.Partition, q.GetGroups())
	return connect.NewResponse(&tierqv1.DescribeQueueResponse{Queue: q}), nil
}

// describeEach describes every partition, at its leader's host if that answers: only there is it known how many disks hold
// new messages.
func (s queueService) describeEach(ctx context.Context, m *tierqv1.DescribeQueueRequest, n int) ([]*tierqv1.Queue, error) {
	info, err := s.backend.LocateQueue(ctx, m.GetName())
	if err != nil {
		return nil, err
	}
	self := s.backend.Fleet().Self
	parts, err := forEach(ctx, m, n, func(ctx context.Context, r *connect.Request[tierqv1.DescribeQueueRequest]) (*connect.Response[tierqv1.DescribeQueueResponse], error) {
		if p := int(r.Msg.GetPartition()); p < len(info.Partitions) && s.forward != nil {
			if leader := info.Partitions[p].LeaderHost; leader != 0 && leader != self {
				asked, cancel := context.WithTimeout(ctx, homeAnswer)
				defer cancel()
				if resp, err := s.client(leader).DescribeQueue(asked, connect.NewRequest(r.Msg)); err == nil {
					groupService(s).askHomes(ctx, m.GetName(), r.Msg.Partition, resp.Msg.GetQueue().GetGroups())
					return resp, nil
				}
			}
		}
		return s.DescribeQueue(ctx, r)
	})
	out := make([]*tierqv1.Queue, len(parts))
	for i, p := range parts {
		out[i] = p.GetQueue()
	}
	return out, err
}

func (s queueService) LocateQueue(ctx context.Context, req *connect.Request[tierqv1.LocateQueueRequest]) (*connect.Response[tierqv1.LocateQueueResponse], error) {
	info, err := s.backend.LocateQueue(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	q := protoQueue(info)
	return connect.NewResponse(&tierqv1.LocateQueueResponse{Id: q.GetId(), Ordering: q.GetOptions().GetOrdering(), Partitions: q.GetPartitions()}), nil
}

func (s queueService) DeleteQueue(ctx context.Context, req *connect.Request[tierqv1.DeleteQueueRequest]) (*connect.Response[tierqv1.DeleteQueueResponse], error) {
	if err := s.backend.DeleteQueue(ctx, req.Msg.GetName()); err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.DeleteQueueRequest]) (*connect.Response[tierqv1.DeleteQueueResponse], error) {
			return s.client(host).DeleteQueue(ctx, r)
		})
	}
	return connect.NewResponse(&tierqv1.DeleteQueueResponse{}), nil
}

func (s queueService) Publish(ctx context.Context, req *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
	if err := s.admit(ctx, len(req.Msg.GetMessages())); err != nil {
		return nil, err
	}
	return s.publishOne(ctx, req)
}

// publishOne publishes what was admitted.
func (s queueService) publishOne(ctx context.Context, req *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
	p, err := publish(req.Msg)
	if err != nil {
		return nil, err
	}
	reply, err := s.backend.Publish(ctx, p)
	var many *SeveralError
	if errors.As(err, &many) {
		resp, err := s.publishAny(ctx, req.Msg, &many.Queue)
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(resp), nil
	}
	if err != nil {
		return elsewhere(ctx, s.Server, err, req.Msg, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
			return s.client(host).Publish(ctx, r)
		})
	}
	return connect.NewResponse(protoPublish(reply, p.Partition)), nil
}

// publish checks a request and turns it into what a partition takes.
func publish(m *tierqv1.PublishRequest) (Publish, error) {
	n := len(m.GetMessages())
	switch {
	case n == 0:
		return Publish{}, code.New(code.BatchEmpty, "messages: the batch is empty: send at least one message")
	case n > queue.MaxBatchMessages:
		return Publish{}, code.New(code.BatchTooLarge, "messages: %d in one batch, at most %d are allowed: split it", n, queue.MaxBatchMessages)
	case m.GetProducerId() == 0 && (m.GetLow() != 0 || m.GetProducerEpoch() != 0 || m.GetContiguous()):
		return Publish{}, code.New(code.ProducerSeqInvalid, "producer_id: low, producer_epoch and contiguous need a producer id")
	}
	p := Publish{Queue: m.GetQueue(), Partition: m.Partition, Publish: queue.Publish{
		Low: queue.Seq(m.GetLow()), ProducerEpoch: m.GetProducerEpoch(), Contiguous: m.GetContiguous(), Atomic: m.GetAtomic(),
		CheckLast: m.ExpectedLastAddress != nil, ExpectedLast: queue.Address(m.GetExpectedLastAddress()),
		Messages: make([]queue.Message, n),
	}}
	if m.GetProducerId() != 0 {
		p.Publish.Producer = queue.Producer{Kind: queue.ProducerClient, ID: m.GetProducerId()}
	}
	seq := queue.Seq(0)
	for i, in := range m.GetMessages() {
		if err := message(&p, i, in, m.GetProducerId() != 0, &seq); err != nil {
			return Publish{}, err
		}
	}
	return p, nil
}

func message(p *Publish, i int, in *tierqv1.OutMessage, hasProducer bool, last *queue.Seq) error {
	out := &p.Publish.Messages[i]
	seq := queue.Seq(in.GetSeq())
	switch {
	case !hasProducer && seq != 0:
		return code.New(code.ProducerSeqInvalid, "messages[%d].seq: a seq needs a producer_id", i)
	case hasProducer && seq == 0 && i == 0:
		return code.New(code.ProducerSeqInvalid, "messages[0].seq: a producer's seqs begin at 1: set it")
	case hasProducer && seq == 0:
		seq = *last + 1
	case hasProducer && seq <= *last:
		return code.New(code.ProducerSeqInvalid, "messages[%d].seq: %d does not rise in the batch", i, seq)
	}
	*last = seq
	if len(in.GetBody()) > queue.MaxBodyBytesHard {
		return code.New(code.TooLarge, "messages[%d].body: %d bytes, no queue allows more than %d", i, len(in.GetBody()), queue.MaxBodyBytesHard)
	}
	if len(in.GetKey()) > queue.MaxKeyBytes {
		return code.New(code.InvalidArgument, "messages[%d].key: %d bytes, at most %d are allowed", i, len(in.GetKey()), queue.MaxKeyBytes)
	}
	if len(in.GetDedupId()) > queue.MaxKeyBytes {
		return code.New(code.InvalidArgument, "messages[%d].dedup_id: %d bytes, at most %d are allowed", i, len(in.GetDedupId()), queue.MaxKeyBytes)
	}
	headers, err := headers(i, in.GetHeaders())
	if err != nil {
		return err
	}
	*out = queue.Message{Seq: seq, DedupID: in.GetDedupId(), Key: in.GetKey(), Headers: headers, Body: in.GetBody()}
	if err := durationMs(&p.Delays, len(p.Publish.Messages), i, "delay_ms", in.GetDelayMs()); err != nil {
		return err
	}
	return durationMs(&p.TTLs, len(p.Publish.Messages), i, "ttl_ms", in.GetTtlMs())
}

// maxDurationMs bounds any duration of the API: 10 years.
const maxDurationMs = 10 * 365 * 24 * 3600 * 1000

func durationMs(list *[]time.Duration, n, i int, field string, ms uint64) error {
	if ms == 0 {
		return nil
	}
	if ms > maxDurationMs {
		return code.New(code.InvalidArgument, "messages[%d].%s: %d is more than ten years", i, field, ms)
	}
	if *list == nil {
		*list = make([]time.Duration, n)
	}
	(*list)[i] = time.Duration(ms) * time.Millisecond
	return nil
}

func headers(i int, in []*tierqv1.Header) ([]queue.Header, error) {
	if len(in) == 0 {
		return nil, nil
	}
	if len(in) > queue.MaxHeaders {
		return nil, code.New(code.InvalidArgument, "messages[%d].headers: %d headers, at most %d are allowed", i, len(in), queue.MaxHeaders)
	}
	out, bytes := make([]queue.Header, len(in)), 0
	for j, h := range in {
		if h.GetName() == "" {
			return nil, code.New(code.InvalidArgument, "messages[%d].headers[%d].name: empty", i, j)
		}
		out[j] = queue.Header{Name: h.GetName(), Value: h.GetValue()}
		bytes += len(h.GetName()) + len(h.GetValue())
	}
	if bytes > queue.MaxHeaderBytes {
		return nil, code.New(code.InvalidArgument, "messages[%d].headers: %d bytes, at most %d are allowed", i, bytes, queue.MaxHeaderBytes)
	}
	return out, nil
}

func protoPublish(r PublishReply, partition Partition) *tierqv1.PublishResponse {
	out := &tierqv1.PublishResponse{
		Shard: r.Shard, Index: uint64(r.Index), DataCopies: r.DataCopies, LeaderHost: r.LeaderHost, LeaderApi: r.LeaderAPI, Warning: r.Warning, Partitions: r.Partitions,
		Results: make([]*tierqv1.PublishResult, len(r.Result.Messages)),
	}
	results := make([]tierqv1.PublishResult, len(r.Result.Messages))
	for i, m := range r.Result.Messages {
		p := &results[i]
		p.Address, p.Duplicate = uint64(m.Address), m.Duplicate
		if partition != nil {
			p.Partition = *partition
		}
		if m.Code != code.OK {
			p.Code, p.Name, p.Text = uint32(m.Code), m.Code.String(), m.Code.Info().Text
		}
		out.Results[i] = p
	}
	return out
}

func queueOptions(o *tierqv1.QueueOptions) queue.QueueOptions {
	return queue.QueueOptions{
		Ordering: queue.Ordering(clampEnum(int32(o.GetOrdering()))), StrictSequence: o.GetStrictSequence(),
		Overflow: queue.Overflow(clampEnum(int32(o.GetOverflow()))), Durability: queue.Durability(clampEnum(int32(o.GetDurability()))),
		MaxBodyBytes: o.GetMaxBodyBytes(), MaxBytes: o.GetMaxBytes(), MaxMessages: o.GetMaxMessages(),
		TTLMs: o.GetTtlMs(), MaxDelayMs: o.GetMaxDelayMs(),
		Mode: queue.Mode(clampEnum(int32(o.GetMode()))), Paused: o.GetPaused(), DedupMs: o.GetDedupMs(),
		RetainMs: o.GetRetainMs(), RetainBytes: o.GetRetainBytes(), RetainMessages: o.GetRetainMessages(),
	}
}

// clampEnum keeps an unknown enum number out of range instead of wrapping it into a known one.
func clampEnum(v int32) uint8 {
	if v < 0 || v > math.MaxUint8 {
		return math.MaxUint8
	}
	return uint8(v)
}

func protoOptions(o queue.QueueOptions) *tierqv1.QueueOptions {
	return &tierqv1.QueueOptions{
		Ordering: tierqv1.Ordering(o.Ordering), StrictSequence: o.StrictSequence, Overflow: tierqv1.Overflow(o.Overflow),
		Durability: tierqv1.Durability(o.Durability), MaxBodyBytes: o.MaxBodyBytes, MaxBytes: o.MaxBytes,
		MaxMessages: o.MaxMessages, TtlMs: o.TTLMs, MaxDelayMs: o.MaxDelayMs,
		Mode: tierqv1.QueueMode(o.Mode), Paused: o.Paused, RetainMs: o.RetainMs, RetainBytes: o.RetainBytes, RetainMessages: o.RetainMessages,
		DedupMs: o.DedupMs, Version: o.Version,
	}
}

func protoQueue(i QueueInfo) *tierqv1.Queue {
	q := &tierqv1.Queue{
		Name: i.Name, Id: i.ID, Options: protoOptions(i.Options), Messages: i.Messages, Bytes: i.Bytes, Delayed: i.Delayed, LastAddress: uint64(i.Last),
		GrowingTo: i.GrowingTo,
	}
	for _, p := range i.Partitions {
		pp := &tierqv1.Partition{
			Number: p.Number, Shard: p.Shard, LeaderHost: p.LeaderHost, LeaderEpoch: p.Term, LeaderApi: p.LeaderAPI,
			QuorumState: p.QuorumState, DataCopies: p.DataCopies,
		}
		for _, r := range p.Replicas {
			pp.Replicas = append(pp.Replicas, &tierqv1.Replica{ReplicaId: uint64(r.Replica), Host: r.Host, Role: r.Role, Api: r.API})
		}
		q.Partitions = append(q.Partitions, pp)
	}
	for _, g := range i.Groups {
		q.Groups = append(q.Groups, protoGroup(g))
	}
	return q
}
