package clienttest

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// The limits that the state keeps, as the state machine does.
const producerWindow = 8192

// queueState is one partition of a queue; the first one has them all in parts.
type queueState struct {
	id        uint64
	number    uint32
	parts     []*queueState
	leader    uint64 // 0: the fleet's
	home      uint64 // 0: the fleet's
	moves     uint64 // of the home, on top of the fleet's
	options   *tierqv1.QueueOptions
	messages  []*tierqv1.Message
	producers map[uint64]*producerState
	groups    map[string]*groupState
	bytes     uint64
}

type producerState struct {
	epoch, low, last uint64
	seqs             map[uint64]uint64 // seq → address
}

type groupState struct {
	id      uint64
	config  *tierqv1.GroupConfig
	acked   map[uint64]bool
	dead    map[uint64]*tierqv1.DeadLetter
	leases  map[uint64]uint64 // address → lease number
	fails   map[uint64]uint32
	waiting uint64
	most    int // leases at once
}

func (g *groupState) expireAll() { clear(g.leases) }

func (g *groupState) kill(m *tierqv1.Message, attempts uint32, reason string) {
	g.dead[m.Address] = &tierqv1.DeadLetter{
		Address: m.Address, Attempts: attempts, Reason: reason, DeadUnixMs: m.PublishedUnixMs,
		FirstFailureUnixMs: m.PublishedUnixMs, Body: m.Body, Headers: m.Headers, Key: m.Key,
	}
	delete(g.leases, m.Address)
}

func (f *Fleet) leaderOf(q *queueState) uint64 {
	if q.leader != 0 {
		return q.leader
	}
	return f.leader
}

func (f *Fleet) homeOf(q *queueState) uint64 {
	if q.home != 0 {
		return q.home
	}
	return f.home
}

func (f *Fleet) epochOf(q *queueState) uint64 { return f.epoch + q.moves }

// view is the API at one host.
type view struct{ h *Host }

func refuse(c code.Code, format string, args ...any) error {
	return Refusal(code.New(c, format, args...))
}

// under answers a call with the fleet's lock held.
func under[Res any](v *view, answer func(f *Fleet) (*Res, error)) (*connect.Response[Res], error) {
	f := v.h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	res, err := answer(f)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// inQueue answers a call about a queue.
func inQueue[Res any](v *view, name string, answer func(*Fleet, *queueState) (*Res, error)) (*connect.Response[Res], error) {
	return under(v, func(f *Fleet) (*Res, error) {
		q, err := f.queueLocked(name)
		if err != nil {
			return nil, err
		}
		return answer(f, q)
	})
}

// inGroup answers a call about a group, at any host.
func inGroup[Res any](v *view, queue, name string, answer func(*Fleet, *queueState, *groupState) (*Res, error)) (*connect.Response[Res], error) {
	return under(v, func(f *Fleet) (*Res, error) {
		q, g, err := v.groupLocked(queue, name)
		if err != nil {
			return nil, err
		}
		return answer(f, q, g)
	})
}

func (f *Fleet) queueLocked(name string) (*queueState, error) {
	q := f.queues[name]
	if q == nil {
		return nil, refuse(code.UnknownQueue, "queue %q does not exist: create it with `tierq queue create %s`", name, name)
	}
	return q, nil
}

// partLocked finds a partition; nil is the only one.
func (f *Fleet) partLocked(name string, p *uint32) (*queueState, error) {
	q, err := f.queueLocked(name)
	switch {
	case err != nil:
		return nil, err
	case p == nil && len(q.parts) > 1:
		return nil, refuse(code.InvalidArgument, "partition: queue %q has %d: name one of them, from 0", name, len(q.parts))
	case p == nil:
		return q, nil
	case int(*p) >= len(q.parts):
		return nil, refuse(code.UnknownPartition, "")
	}
	return q.parts[*p], nil
}

func (v *view) CreateQueue(_ context.Context, r *connect.Request[tierqv1.CreateQueueRequest]) (*connect.Response[tierqv1.CreateQueueResponse], error) {
	f := v.h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	m := r.Msg
	if strings.HasPrefix(m.Name, ".") || strings.HasPrefix(m.Name, "$") || m.Name == "" || len(m.Name) > 80 || strings.ContainsAny(m.Name, " /") {
		return nil, refuse(code.InvalidName, "queue name %q: names are 1 to 80 of A-Z a-z 0-9 . _ - and begin with neither . nor $", m.Name)
	}
	q := f.queues[m.Name]
	created := q == nil
	if created {
		parts := make([]*queueState, max(m.Partitions, 1))
		for i := range parts {
			parts[i] = &queueState{id: f.nextID, number: uint32(i), options: m.Options, producers: map[uint64]*producerState{}, groups: map[string]*groupState{}}
			f.nextID++
		}
		q = parts[0]
		q.parts = parts
		f.queues[m.Name] = q
	} else if q.options.GetOrdering() != m.Options.GetOrdering() || q.options.GetMaxBodyBytes() != m.Options.GetMaxBodyBytes() {
		return nil, refuse(code.QueueExistsMismatch, "")
	}
	return connect.NewResponse(&tierqv1.CreateQueueResponse{Queue: f.wireLocked(m.Name, q), Created: created}), nil
}

// Grow gives a queue n partitions in all, with the groups that it has.
func (f *Fleet) Grow(queue string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queues[queue]
	for i := len(q.parts); i < n; i++ {
		part := &queueState{id: f.nextID, number: uint32(i), options: q.options, producers: map[uint64]*producerState{}, groups: map[string]*groupState{}}
		f.nextID++
		for name, g := range q.groups {
			part.groups[name] = newGroup(g.id, g.config)
		}
		q.parts = append(q.parts, part)
	}
	f.wakeLocked()
}

// SetGrowthHints says whether answers tell how many partitions a queue has, as they do unless hosts are of an earlier version.
func (f *Fleet) SetGrowthHints(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.noHints = !on
}

// hintLocked is what answers say of a queue's partitions.
func (f *Fleet) hintLocked(queue string) uint32 {
	if q := f.queues[queue]; q != nil && !f.noHints {
		return uint32(len(q.parts))
	}
	return 0
}

func (f *Fleet) wireLocked(name string, q *queueState) *tierqv1.Queue {
	out := &tierqv1.Queue{Name: name, Id: q.id, Options: q.options, Groups: f.groupsLocked(name, q)}
	for _, part := range q.parts {
		leader := f.leaderOf(part)
		p := &tierqv1.Partition{Number: part.number, Shard: part.id, LeaderHost: leader, LeaderEpoch: f.term, LeaderApi: f.apiLocked(leader), DataCopies: 2}
		if leader == 0 {
			p.QuorumState = 3
		}
		for i, h := range f.hosts {
			role := "full"
			if i == 2 {
				role = "witness"
			}
			p.Replicas = append(p.Replicas, &tierqv1.Replica{ReplicaId: h.ID, Host: h.ID, Role: role, Api: h.Addr})
		}
		out.Partitions = append(out.Partitions, p)
		out.Messages += uint64(len(part.messages))
		out.Bytes += part.bytes
		out.LastAddress = max(out.LastAddress, uint64(len(part.messages)))
	}
	return out
}

func (v *view) LocateQueue(_ context.Context, r *connect.Request[tierqv1.LocateQueueRequest]) (*connect.Response[tierqv1.LocateQueueResponse], error) {
	return inQueue(v, r.Msg.Name, func(f *Fleet, q *queueState) (*tierqv1.LocateQueueResponse, error) {
		w := f.wireLocked(r.Msg.Name, q)
		return &tierqv1.LocateQueueResponse{Id: w.Id, Ordering: w.Options.GetOrdering(), Partitions: w.Partitions}, nil
	})
}

func (f *Fleet) groupsLocked(queue string, q *queueState) []*tierqv1.Group {
	var out []*tierqv1.Group
	for name, g := range q.groups {
		out = append(out, f.groupLocked(queue, name, q, g))
	}
	slices.SortFunc(out, func(a, b *tierqv1.Group) int { return cmp.Compare(a.Id, b.Id) })
	return out
}

func (f *Fleet) groupLocked(queue, name string, q *queueState, g *groupState) *tierqv1.Group {
	w := &tierqv1.Group{
		Queue: queue, Name: name, Id: g.id, Config: g.config, HomeHost: f.homeOf(q), HomeApi: f.apiLocked(f.homeOf(q)), Epoch: f.epochOf(q),
		Acked: uint64(len(g.acked)), Dead: uint64(len(g.dead)), InFlight: uint64(len(g.leases)), WaitingReceives: g.waiting,
	}
	w.Unfinished = uint64(len(q.messages)) - w.Acked - w.Dead
	for w.Floor < uint64(len(q.messages)) && (g.acked[w.Floor+1] || g.dead[w.Floor+1] != nil) {
		w.Floor++
	}
	return w
}

func (v *view) ListQueues(_ context.Context, r *connect.Request[tierqv1.ListQueuesRequest]) (*connect.Response[tierqv1.ListQueuesResponse], error) {
	f := v.h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	res := &tierqv1.ListQueuesResponse{}
	for name, q := range f.queues {
		if strings.HasPrefix(name, r.Msg.Prefix) {
			res.Queues = append(res.Queues, f.wireLocked(name, q))
		}
	}
	slices.SortFunc(res.Queues, func(a, b *tierqv1.Queue) int { return cmp.Compare(a.Name, b.Name) })
	return connect.NewResponse(res), nil
}

func (v *view) DescribeQueue(_ context.Context, r *connect.Request[tierqv1.DescribeQueueRequest]) (*connect.Response[tierqv1.DescribeQueueResponse], error) {
	return inQueue(v, r.Msg.Name, func(f *Fleet, q *queueState) (*tierqv1.DescribeQueueResponse, error) {
		return &tierqv1.DescribeQueueResponse{Queue: f.wireLocked(r.Msg.Name, q)}, nil
	})
}

func (v *view) DeleteQueue(_ context.Context, r *connect.Request[tierqv1.DeleteQueueRequest]) (*connect.Response[tierqv1.DeleteQueueResponse], error) {
	return inQueue(v, r.Msg.Name, func(f *Fleet, _ *queueState) (*tierqv1.DeleteQueueResponse, error) {
		delete(f.queues, r.Msg.Name)
		return &tierqv1.DeleteQueueResponse{}, nil
	})
}

func (v *view) Publish(_ context.Context, r *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
	return under(v, func(f *Fleet) (*tierqv1.PublishResponse, error) {
		q, err := f.partLocked(r.Msg.Queue, r.Msg.Partition)
		if err != nil {
			return nil, err
		}
		leader := f.leaderOf(q)
		if leader != v.h.ID {
			e := code.New(code.NoLeader, "")
			if leader != 0 {
				e = code.New(code.NotReplica, "")
				e.LeaderHost, e.LeaderAPI = leader, f.apiLocked(leader)
			}
			return nil, Refusal(e)
		}
		res := &tierqv1.PublishResponse{Shard: q.id, LeaderHost: leader, LeaderApi: f.apiLocked(leader), DataCopies: 2, Partitions: f.hintLocked(r.Msg.Queue)}
		for _, m := range r.Msg.Messages {
			res.Results = append(res.Results, f.storeLocked(q, r.Msg, m))
		}
		res.Index = uint64(len(q.messages)) + 1
		f.wakeLocked()
		return res, nil
	})
}

func result(c code.Code) *tierqv1.PublishResult {
	return &tierqv1.PublishResult{Code: uint32(c), Name: c.String(), Text: c.Info().Text}
}

func (f *Fleet) storeLocked(q *queueState, r *tierqv1.PublishRequest, m *tierqv1.OutMessage) *tierqv1.PublishResult {
	p := q.producers[r.ProducerId]
	if p == nil || r.ProducerEpoch > p.epoch {
		p = &producerState{epoch: r.ProducerEpoch, seqs: map[uint64]uint64{}}
		q.producers[r.ProducerId] = p
	}
	p.low = max(p.low, r.Low)
	switch first := p.seqs[m.Seq]; {
	case r.ProducerEpoch < p.epoch:
		return result(code.ProducerEpochStale)
	case first != 0:
		return &tierqv1.PublishResult{Address: first, Duplicate: true}
	case m.Seq < p.low:
		return result(code.SeqExpired)
	case m.Seq >= p.low+producerWindow:
		return result(code.Backpressure)
	case (r.Contiguous || f.strict) && p.last != 0 && m.Seq != p.last+1: // any may be the first
		return result(code.SeqGap)
	case q.options.GetMaxBodyBytes() > 0 && len(m.Body) > int(q.options.GetMaxBodyBytes()):
		return result(code.TooLarge)
	}
	a := uint64(len(q.messages)) + 1
	p.seqs[m.Seq], p.last = a, max(p.last, m.Seq)
	q.messages = append(q.messages, &tierqv1.Message{
		Address: a, Body: m.Body, Headers: m.Headers, Key: m.Key, PublishedUnixMs: 1_700_000_000_000 + a,
		LeaseMs: 30_000, ProducerId: r.ProducerId, Seq: m.Seq,
	})
	q.bytes += uint64(len(m.Body))
	return &tierqv1.PublishResult{Address: a}
}

func newGroup(id uint64, c *tierqv1.GroupConfig) *groupState {
	return &groupState{id: id, config: c, acked: map[uint64]bool{}, dead: map[uint64]*tierqv1.DeadLetter{}, leases: map[uint64]uint64{}, fails: map[uint64]uint32{}}
}

func (v *view) CreateGroup(_ context.Context, r *connect.Request[tierqv1.CreateGroupRequest]) (*connect.Response[tierqv1.CreateGroupResponse], error) {
	return inQueue(v, r.Msg.Queue, func(f *Fleet, q *queueState) (*tierqv1.CreateGroupResponse, error) {
		for _, part := range q.parts {
			if part.groups[r.Msg.Name] == nil {
				part.groups[r.Msg.Name] = newGroup(uint64(len(part.groups))+1, r.Msg.Config)
			}
		}
		g := q.groups[r.Msg.Name]
		return &tierqv1.CreateGroupResponse{Group: f.groupLocked(r.Msg.Queue, r.Msg.Name, q, g)}, nil
	})
}

func (v *view) ListGroups(_ context.Context, r *connect.Request[tierqv1.ListGroupsRequest]) (*connect.Response[tierqv1.ListGroupsResponse], error) {
	return inQueue(v, r.Msg.Queue, func(f *Fleet, q *queueState) (*tierqv1.ListGroupsResponse, error) {
		return &tierqv1.ListGroupsResponse{Groups: f.groupsLocked(r.Msg.Queue, q)}, nil
	})
}

// homeLocked finds a group for a call that must be at its home.
func (v *view) homeLocked(queue string, p *uint32, group string) (*queueState, *groupState, error) {
	q, g, err := v.groupIn(queue, p, group)
	if err != nil {
		return nil, nil, err
	}
	if f := v.h.f; f.homeOf(q) != v.h.ID {
		home := f.homeOf(q)
		e := code.New(code.NotOwner, "group %q of queue %q is at host %d (%s): go there", group, queue, home, f.apiLocked(home))
		e.HomeHost, e.HomeAPI, e.Epoch = home, f.apiLocked(home), f.epochOf(q)
		return nil, nil, Refusal(e)
	}
	return q, g, nil
}

func (v *view) groupLocked(queue, group string) (*queueState, *groupState, error) {
	first := uint32(0)
	return v.groupIn(queue, &first, group)
}

func (v *view) groupIn(queue string, p *uint32, group string) (*queueState, *groupState, error) {
	q, err := v.h.f.partLocked(queue, p)
	if err != nil {
		return nil, nil, err
	}
	if group == "" {
		group = "$default"
		if q.groups[group] == nil {
			q.groups[group] = newGroup(uint64(len(q.groups))+1, nil)
		}
	}
	g := q.groups[group]
	if g == nil {
		return nil, nil, refuse(code.UnknownGroup, "queue %q has no group %q: create it with `tierq group create %s %s`", queue, group, queue, group)
	}
	return q, g, nil
}

func (v *view) DeleteGroup(_ context.Context, r *connect.Request[tierqv1.DeleteGroupRequest]) (*connect.Response[tierqv1.DeleteGroupResponse], error) {
	return inGroup(v, r.Msg.Queue, r.Msg.Name, func(f *Fleet, q *queueState, _ *groupState) (*tierqv1.DeleteGroupResponse, error) {
		delete(q.groups, r.Msg.Name)
		return &tierqv1.DeleteGroupResponse{}, nil
	})
}

func (v *view) ResetGroup(_ context.Context, r *connect.Request[tierqv1.ResetGroupRequest]) (*connect.Response[tierqv1.ResetGroupResponse], error) {
	return inGroup(v, r.Msg.Queue, r.Msg.Name, func(f *Fleet, q *queueState, g *groupState) (*tierqv1.ResetGroupResponse, error) {
		*g = *newGroup(g.id, g.config)
		f.epoch++
		return &tierqv1.ResetGroupResponse{Group: f.groupLocked(r.Msg.Queue, r.Msg.Name, q, g)}, nil
	})
}

func (v *view) MoveGroup(_ context.Context, r *connect.Request[tierqv1.MoveGroupRequest]) (*connect.Response[tierqv1.MoveGroupResponse], error) {
	return inGroup(v, r.Msg.Queue, r.Msg.Name, func(f *Fleet, q *queueState, g *groupState) (*tierqv1.MoveGroupResponse, error) {
		if r.Msg.ToHost == 0 || int(r.Msg.ToHost) > len(f.hosts) {
			return nil, refuse(code.UnknownHost, "the fleet has no host %d", r.Msg.ToHost)
		}
		f.home = r.Msg.ToHost
		f.epoch++
		f.wakeLocked()
		return &tierqv1.MoveGroupResponse{Group: f.groupLocked(r.Msg.Queue, r.Msg.Name, q, g)}, nil
	})
}

func (v *view) Receive(ctx context.Context, r *connect.Request[tierqv1.ReceiveRequest]) (*connect.Response[tierqv1.ReceiveResponse], error) {
	f := v.h.f
	wait := 5 * time.Second
	if r.Msg.WaitMs != nil {
		wait = time.Duration(*r.Msg.WaitMs) * time.Millisecond
	}
	over := time.After(wait)
	for {
		f.mu.Lock()
		q, g, err := v.homeLocked(r.Msg.Queue, r.Msg.Partition, r.Msg.Group)
		if err != nil {
			f.mu.Unlock()
			return nil, err
		}
		ms := f.leaseLocked(q, g, int(max(r.Msg.MaxMessages, 1)))
		epoch, changed, partitions := f.epochOf(q), f.changed, f.hintLocked(r.Msg.Queue)
		if len(ms) > 0 || wait == 0 {
			f.mu.Unlock()
			return connect.NewResponse(&tierqv1.ReceiveResponse{Messages: ms, Epoch: epoch, Partitions: partitions}), nil
		}
		g.waiting++
		f.mu.Unlock()
		ended := false
		select {
		case <-changed:
		case <-over:
			ended = true
		case <-ctx.Done():
			ended = true
		}
		f.mu.Lock()
		g.waiting--
		f.mu.Unlock()
		if ended {
			return connect.NewResponse(&tierqv1.ReceiveResponse{Epoch: epoch, Partitions: partitions}), nil
		}
	}
}

func (f *Fleet) leaseLocked(q *queueState, g *groupState, n int) []*tierqv1.Message {
	var out []*tierqv1.Message
	for _, m := range q.messages {
		if len(out) == n {
			break
		}
		if g.acked[m.Address] || g.dead[m.Address] != nil || g.leases[m.Address] != 0 {
			continue
		}
		f.lease++
		g.leases[m.Address] = f.lease
		c := &tierqv1.Message{
			Address: m.Address, Body: m.Body, Headers: m.Headers, Key: m.Key, PublishedUnixMs: m.PublishedUnixMs, LeaseMs: m.LeaseMs,
			ProducerId: m.ProducerId, Seq: m.Seq, Attempt: g.fails[m.Address] + 1,
			Receipt: fmt.Sprintf("r.%d.%d.%d", m.Address, f.epochOf(q), f.lease), Partition: q.number,
		}
		if q.number > 0 {
			c.Receipt += fmt.Sprintf(".%d", q.number)
		}
		out = append(out, c)
	}
	g.most = max(g.most, len(g.leases))
	return out
}

// checkLocked reads a receipt; code.OK when its lease is the current one.
func (f *Fleet) checkLocked(q *queueState, g *groupState, receipt string) (uint64, code.Code) {
	parts := strings.Split(receipt, ".")
	if len(parts) == 4 {
		parts = append(parts, "0")
	}
	if len(parts) != 5 || parts[0] != "r" {
		return 0, code.InvalidReceipt
	}
	var n [4]uint64
	for i := range n {
		v, err := strconv.ParseUint(parts[i+1], 10, 64)
		if err != nil {
			return 0, code.InvalidReceipt
		}
		n[i] = v
	}
	switch {
	case n[3] != uint64(q.number):
		return 0, code.InvalidReceipt
	case g.acked[n[0]]:
		return n[0], code.UnknownMessage
	case n[1] != f.epochOf(q):
		return n[0], code.StaleOwner
	case g.leases[n[0]] != n[2]:
		return n[0], code.UnknownDelivery
	}
	return n[0], code.OK
}

// settle answers receipts; f is called for those whose lease is current.
func (v *view) settle(queue string, p *uint32, group string, receipts []string, do func(*queueState, *groupState, uint64)) (*connect.Response[tierqv1.SettleResponse], error) {
	f := v.h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if q := f.queues[queue]; p == nil && q != nil && len(q.parts) > 1 && len(receipts) > 0 {
		of := uint32(0) // all of one partition, as far as this fleet goes
		if fields := strings.Split(receipts[0], "."); len(fields) == 5 {
			n, _ := strconv.ParseUint(fields[4], 10, 32)
			of = uint32(n)
		}
		p = &of
	}
	q, g, err := v.homeLocked(queue, p, group)
	if err != nil {
		return nil, err
	}
	res := &tierqv1.SettleResponse{}
	for _, r := range receipts {
		a, c := f.checkLocked(q, g, r)
		s := &tierqv1.SettleResult{Address: a, Effect: tierqv1.Effect_EFFECT_NONE}
		switch c {
		case code.OK:
			do(q, g, a)
			s.Effect = tierqv1.Effect_EFFECT_DONE
		case code.UnknownMessage:
			s.Already = true
		default:
			s.Code, s.Name, s.Text = uint32(c), c.String(), c.Info().Text
		}
		res.Results = append(res.Results, s)
	}
	f.wakeLocked()
	return connect.NewResponse(res), nil
}

func (v *view) Ack(_ context.Context, r *connect.Request[tierqv1.AckRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	return v.settle(r.Msg.Queue, r.Msg.Partition, r.Msg.Group, r.Msg.Receipts, v.settling("ack", ""))
}

func (v *view) Nack(_ context.Context, r *connect.Request[tierqv1.NackRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	return v.settle(r.Msg.Queue, r.Msg.Partition, r.Msg.Group, r.Msg.Receipts, v.settling("nack", ""))
}

func (v *view) Release(_ context.Context, r *connect.Request[tierqv1.ReleaseRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	return v.settle(r.Msg.Queue, r.Msg.Partition, r.Msg.Group, r.Msg.Receipts, v.settling("release", ""))
}

func (v *view) Reject(_ context.Context, r *connect.Request[tierqv1.RejectRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	return v.settle(r.Msg.Queue, r.Msg.Partition, r.Msg.Group, r.Msg.Receipts, v.settling("reject", r.Msg.Reason))
}

func (v *view) Extend(_ context.Context, r *connect.Request[tierqv1.ExtendRequest]) (*connect.Response[tierqv1.SettleResponse], error) {
	return v.settle(r.Msg.Queue, r.Msg.Partition, r.Msg.Group, r.Msg.Receipts, v.settling("extend", ""))
}

func (v *view) ListDeadLetters(_ context.Context, r *connect.Request[tierqv1.ListDeadLettersRequest]) (*connect.Response[tierqv1.ListDeadLettersResponse], error) {
	return inGroup(v, r.Msg.Queue, r.Msg.Group, func(f *Fleet, _ *queueState, g *groupState) (*tierqv1.ListDeadLettersResponse, error) {
		limit := int(r.Msg.Limit)
		if limit == 0 {
			limit = 100
		}
		res := &tierqv1.ListDeadLettersResponse{}
		for _, a := range slices.Sorted(mapKeys(g.dead)) {
			if a < r.Msg.FromAddress || !strings.HasPrefix(g.dead[a].Reason, r.Msg.ReasonPrefix) {
				continue
			}
			if len(res.DeadLetters) == limit {
				res.NextAddress = a
				break
			}
			res.DeadLetters = append(res.DeadLetters, g.dead[a])
		}
		return res, nil
	})
}

func mapKeys[V any](m map[uint64]V) func(func(uint64) bool) {
	return func(yield func(uint64) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// selectDeadLocked finds the dead letters that a request selects, at most so many, and where to go on (0: the end).
func selectDeadLocked(g *groupState, named []uint64, from uint64, reason string, most int) (list []uint64, next uint64) {
	if len(named) > 0 {
		return named, 0
	}
	for _, a := range slices.Sorted(mapKeys(g.dead)) {
		if a < from || !strings.HasPrefix(g.dead[a].Reason, reason) {
			continue
		}
		if len(list) == most {
			return list, a
		}
		list = append(list, a)
	}
	return list, 0
}

// pacedRound is how many dead letters a redrive at a rate treats in one call, for callers to go on.
const pacedRound = 2

// removeDeadLocked forgets dead letters.
func removeDeadLocked(g *groupState, addresses []uint64) uint64 {
	var n uint64
	for _, a := range addresses {
		if g.dead[a] != nil {
			delete(g.dead, a)
			n++
		}
	}
	return n
}

func (v *view) RedriveDeadLetters(_ context.Context, r *connect.Request[tierqv1.RedriveDeadLettersRequest]) (*connect.Response[tierqv1.RedriveDeadLettersResponse], error) {
	return under(v, func(f *Fleet) (*tierqv1.RedriveDeadLettersResponse, error) {
		_, g, err := v.homeLocked(r.Msg.Queue, new(uint32), r.Msg.Group)
		if err != nil {
			return nil, err
		}
		most := math.MaxInt
		if r.Msg.RatePerSecond > 0 {
			most = pacedRound
		}
		if r.Msg.Limit > 0 {
			most = min(most, int(r.Msg.Limit))
		}
		list, next := selectDeadLocked(g, r.Msg.Addresses, r.Msg.FromAddress, r.Msg.ReasonPrefix, most)
		if r.Msg.DryRun {
			return &tierqv1.RedriveDeadLettersResponse{Matched: uint64(len(list)), NextAddress: next}, nil
		}
		n := removeDeadLocked(g, list)
		f.wakeLocked()
		return &tierqv1.RedriveDeadLettersResponse{Redriven: n, Skipped: uint64(len(list)) - n, NextAddress: next}, nil
	})
}

func (v *view) PurgeDeadLetters(_ context.Context, r *connect.Request[tierqv1.PurgeDeadLettersRequest]) (*connect.Response[tierqv1.PurgeDeadLettersResponse], error) {
	return under(v, func(*Fleet) (*tierqv1.PurgeDeadLettersResponse, error) {
		_, g, err := v.homeLocked(r.Msg.Queue, new(uint32), r.Msg.Group)
		if err != nil {
			return nil, err
		}
		most := math.MaxInt
		if r.Msg.Limit > 0 {
			most = int(r.Msg.Limit)
		}
		list, next := selectDeadLocked(g, r.Msg.Addresses, r.Msg.FromAddress, r.Msg.ReasonPrefix, most)
		if r.Msg.DryRun {
			return &tierqv1.PurgeDeadLettersResponse{Matched: uint64(len(list)), NextAddress: next}, nil
		}
		for _, a := range list {
			g.acked[a] = true
		}
		return &tierqv1.PurgeDeadLettersResponse{Purged: removeDeadLocked(g, list), NextAddress: next}, nil
	})
}

func (v *view) FleetStatus(context.Context, *connect.Request[tierqv1.FleetStatusRequest]) (*connect.Response[tierqv1.FleetStatusResponse], error) {
	f := v.h.f
	f.mu.Lock()
	defer f.mu.Unlock()
	res := &tierqv1.FleetStatusResponse{FleetId: "f1", Host: v.h.ID, Version: "test", UptimeMs: 61_000, CatalogVersion: 7, CatalogLeaderHost: f.leader, CatalogLeaderEpoch: f.term}
	for _, h := range f.hosts {
		res.Hosts = append(res.Hosts, &tierqv1.Host{Id: h.ID, Role: "full", Api: h.Addr, Domain: "d" + strconv.Itoa(int(h.ID)), Alive: h.srv != nil, Self: h == v.h})
	}
	return connect.NewResponse(res), nil
}

func (v *view) ShardDigest(_ context.Context, r *connect.Request[tierqv1.ShardDigestRequest]) (*connect.Response[tierqv1.ShardDigestResponse], error) {
	return inQueue(v, r.Msg.Queue, func(f *Fleet, q *queueState) (*tierqv1.ShardDigestResponse, error) {
		ds := f.digests
		if ds == nil {
			for _, h := range f.hosts[:min(2, len(f.hosts))] {
				ds = append(ds, &tierqv1.ReplicaDigest{ReplicaId: h.ID, Host: h.ID, AppliedIndex: 12, Digest: "00ff"})
			}
		}
		return &tierqv1.ShardDigestResponse{Shard: q.id, Replicas: ds}, nil
	})
}

func (v *view) BenchPropose(_ context.Context, r *connect.Request[tierqv1.BenchProposeRequest]) (*connect.Response[tierqv1.BenchProposeResponse], error) {
	return connect.NewResponse(&tierqv1.BenchProposeResponse{Commands: 100, Messages: 100 * uint64(r.Msg.Batch), ElapsedUs: 1_000_000, P50Us: 900, P99Us: 2500}), nil
}
