package api

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// Calls about a queue of several partitions that name none: each handler makes itself once more for every partition, so
// that every partition's part goes where that partition is served, and puts the answers together.

// needsPartition refuses what only makes sense in one partition.
func needsPartition(q *QueueInfo) *code.Error {
	return code.New(code.InvalidArgument, "partition: queue %q has %d: name one of them, from 0", q.Name, len(q.Partitions))
}

// Unwrap returns the refusal of calls that are not made for each partition.
func (e *SeveralError) Unwrap() error { return needsPartition(&e.Queue) }

// several reports whether a call is to be made for each partition, of how many.
func several(err error) (int, bool) {
	var e *SeveralError
	if errors.As(err, &e) {
		return len(e.Queue.Partitions), true
	}
	return 0, false
}

// request is a pointer to a request's type.
type request[T any] interface {
	*T
	proto.Message
}

// inPartition copies a request and names a partition in it.
func inPartition[Req any, P request[Req]](m P, p uint32) P {
	one := proto.Clone(m).(P)
	r := one.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName("partition"), protoreflect.ValueOfUint32(p))
	return one
}

// forEach makes a call for n partitions side by side. Its error is the first partition's that has one; what the others did
// stays done, so every such call may be repeated.
func forEach[Req, Resp any, P request[Req]](ctx context.Context, m P, n int,
	call func(context.Context, *connect.Request[Req]) (*connect.Response[Resp], error)) ([]*Resp, error) {
	out, errs := make([]*Resp, n), make([]error, n)
	var wg sync.WaitGroup
	for p := range n {
		wg.Go(func() {
			resp, err := call(ctx, connect.NewRequest((*Req)(inPartition(m, uint32(p)))))
			if err != nil {
				errs[p] = ofPartition(uint32(p), err)
				return
			}
			out[p] = resp.Msg
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// ofPartition says in which partition a call for all of them failed.
func ofPartition(p uint32, err error) error {
	var e *code.Error
	if ce, ok := err.(*connect.Error); ok || !errors.As(err, &e) {
		_ = ce
		return err
	}
	out := *e
	out.Text = fmt.Sprintf("partition %d: %s", p, sentence(e))
	return &out
}

// mergeGroup sums a group over its partitions.
func mergeGroup(parts []*tierqv1.Group) *tierqv1.Group {
	sum := proto.Clone(parts[0]).(*tierqv1.Group)
	sum.Partitions = parts
	for _, g := range parts[1:] {
		sum.Unfinished += g.GetUnfinished()
		sum.Acked += g.GetAcked()
		sum.Dead += g.GetDead()
		sum.Retrying += g.GetRetrying()
		sum.InFlight += g.GetInFlight()
		sum.WaitingReceives += g.GetWaitingReceives()
		sum.Exported += g.GetExported()
		sum.Expired += g.GetExpired()
		sum.Purged += g.GetPurged()
		sum.Cancelled += g.GetCancelled()
		sum.RetriesTotal += g.GetRetriesTotal()
		sum.DeadTotal += g.GetDeadTotal()
		sum.RedrivenTotal += g.GetRedrivenTotal()
		sum.Exports += g.GetExports()
		if sum.Parked == nil {
			sum.Parked = g.GetParked()
		}
		if g.GetOldestAgeMs() > sum.GetOldestAgeMs() {
			sum.OldestAgeMs, sum.OldestAddress = g.GetOldestAgeMs(), g.GetOldestAddress()
		}
	}
	return sum
}

// mergeGroups puts the lists of all partitions together, by name, in the order of the first partition that has it.
func mergeGroups(lists [][]*tierqv1.Group) []*tierqv1.Group {
	var names []string
	byName := map[string][]*tierqv1.Group{}
	for _, list := range lists {
		for _, g := range list {
			if byName[g.GetName()] == nil {
				names = append(names, g.GetName())
			}
			byName[g.GetName()] = append(byName[g.GetName()], g)
		}
	}
	out := make([]*tierqv1.Group, len(names))
	for i, name := range names {
		out[i] = mergeGroup(byName[name])
	}
	return out
}

// groupsOf collects the groups of answers that have one each.
func groupsOf[Resp any](parts []*Resp, group func(*Resp) *tierqv1.Group) []*tierqv1.Group {
	out := make([]*tierqv1.Group, len(parts))
	for i, p := range parts {
		out[i] = group(p)
	}
	return out
}

// eachGroup is forEach for calls that answer with the group.
func eachGroup[Req, Resp any, P request[Req]](ctx context.Context, m P, n int, call func(context.Context, *connect.Request[Req]) (*connect.Response[Resp], error),
	get func(*Resp) *tierqv1.Group, answer func(*tierqv1.Group) *Resp) (*connect.Response[Resp], error) {
	parts, err := forEach(ctx, m, n, call)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(answer(mergeGroup(groupsOf(parts, get)))), nil
}

// mergeQueue sums a queue over its partitions. What only a partition's leader knows of it is in its own part.
func mergeQueue(parts []*tierqv1.Queue) *tierqv1.Queue {
	sum := proto.Clone(parts[0]).(*tierqv1.Queue)
	lists := make([][]*tierqv1.Group, len(parts))
	for i, q := range parts {
		lists[i] = q.GetGroups()
		if i < len(sum.Partitions) && i < len(q.GetPartitions()) {
			sum.Partitions[i] = q.Partitions[i]
		}
		if i > 0 {
			sum.Messages += q.GetMessages()
			sum.Bytes += q.GetBytes()
			sum.Delayed += q.GetDelayed()
			sum.LastAddress = max(sum.LastAddress, q.GetLastAddress())
		}
	}
	sum.Groups = mergeGroups(lists)
	return sum
}

// turns counts batches that have no partition of their own, per queue.
type turns struct{ byQueue sync.Map }

func (t *turns) next(q *QueueInfo) uint32 {
	n, _ := t.byQueue.LoadOrStore(q.ID, func() *atomic.Uint32 {
		c := new(atomic.Uint32)
		c.Store(rand.Uint32()) // hosts do not go in step
		return c
	}())
	return n.(*atomic.Uint32).Add(1) % uint32(len(q.Partitions))
}

// publishAny publishes a batch that names no partition of several: in parts by key, or whole.
func (s queueService) publishAny(ctx context.Context, m *tierqv1.PublishRequest, q *QueueInfo) (*tierqv1.PublishResponse, error) {
	switch {
	case m.GetProducerId() != 0:
		return nil, code.New(code.InvalidArgument, "partition: queue %q has %d, and a producer's seqs count per partition: choose the partition, then number", q.Name, len(q.Partitions))
	case m.ExpectedLastAddress != nil:
		return nil, code.New(code.InvalidArgument, "partition: expected_last_address is of one partition, queue %q has %d: name it", q.Name, len(q.Partitions))
	}
	parts := s.split(m, q)
	if m.GetAtomic() && len(parts) > 1 {
		return nil, code.New(code.AtomicPartitions, "atomic: the keys of the messages belong to %d partitions: %s", len(parts), code.AtomicPartitions.Info().Text)
	}
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() {
			resp, err := s.publishOne(ctx, connect.NewRequest(p.request))
			if p.err = err; err == nil {
				p.response = resp.Msg
			}
		})
	}
	wg.Wait()
	return joinPublish(parts, len(m.GetMessages()))
}

// publishPart is what one partition gets of a batch.
type publishPart struct {
	request  *tierqv1.PublishRequest
	places   []int // in the batch
	response *tierqv1.PublishResponse
	err      error
}

// split gives every message its partition; messages of one partition keep their order.
func (s queueService) split(m *tierqv1.PublishRequest, q *QueueInfo) []*publishPart {
	n := uint32(len(q.Partitions))
	whole, chosen := uint32(0), false
	byPartition := map[uint32]*publishPart{}
	var out []*publishPart
	for i, one := range m.GetMessages() {
		p, ok := one.PartitionOf(n)
		if !ok {
			if !chosen {
				whole, chosen = s.turns.next(q), true
			}
			p = whole
		}
		part := byPartition[p]
		if part == nil {
			part = &publishPart{request: &tierqv1.PublishRequest{Queue: m.GetQueue(), Atomic: m.GetAtomic(), Partition: proto.Uint32(p)}}
			byPartition[p] = part
			out = append(out, part)
		}
		part.request.Messages = append(part.request.Messages, one)
		part.places = append(part.places, i)
	}
	return out
}

// joinPublish puts the answers of a split batch together. A batch of which nothing was answered fails as a whole, and its outcome is unknown
// if that of a part is.
func joinPublish(parts []*publishPart, n int) (*tierqv1.PublishResponse, error) {
	out := &tierqv1.PublishResponse{Results: make([]*tierqv1.PublishResult, n)}
	var failed error
	unknown := false
	for _, p := range parts {
		if p.err != nil {
			e := detailOf(p.err)
			if maybe := e.GetEffect() == tierqv1.Effect_EFFECT_MAYBE; failed == nil || maybe && !unknown {
				failed, unknown = p.err, maybe
			}
			for _, i := range p.places {
				out.Results[i] = &tierqv1.PublishResult{Code: e.GetCode(), Name: e.GetName(), Text: e.GetText(), Partition: p.request.GetPartition()}
			}
			continue
		}
		r := p.response
		if len(out.Parts) == 0 {
			out.Shard, out.Index, out.LeaderHost, out.LeaderApi, out.Warning, out.DataCopies = r.Shard, r.Index, r.LeaderHost, r.LeaderApi, r.Warning, r.DataCopies
		}
		out.DataCopies, out.Partitions = min(out.DataCopies, r.DataCopies), max(out.Partitions, r.Partitions)
		out.Parts = append(out.Parts, &tierqv1.PublishedPart{Partition: p.request.GetPartition(), Shard: r.Shard, Index: r.Index, DataCopies: r.DataCopies})
		for j, i := range p.places {
			out.Results[i] = r.Results[j]
		}
	}
	if len(out.Parts) == 0 {
		return nil, failed
	}
	return out, nil
}

// receiveAny serves a receive that names no partition from those whose home is this host: what is ready at once, else what
// comes first.
func (s groupService) receiveAny(ctx context.Context, r Receive, q *QueueInfo) (*tierqv1.ReceiveResponse, error) {
	if r.MinIndex != 0 {
		return nil, code.New(code.InvalidArgument, "partition: min_index is of one partition, queue %q has %d: name it", q.Name, len(q.Partitions))
	}
	n := uint32(len(q.Partitions))
	a := &anyReceive{s: s, r: r, out: &tierqv1.ReceiveResponse{Partitions: n}}
	a.lookAround(ctx, s.turns.next(q), n)
	switch {
	case len(a.out.Messages) > 0 || r.Wait == 0 && len(a.here) > 0:
	case len(a.here) == 0:
		return nil, a.failed
	default:
		if err := a.wait(ctx); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(a.out.Elsewhere, func(x, y *tierqv1.PartitionHome) int { return cmp.Compare(x.Partition, y.Partition) })
	return a.out, nil
}

// anyReceive is one receive over the partitions that are served here.
type anyReceive struct {
	s groupService
	r Receive

	mu     sync.Mutex
	here   []uint32
	out    *tierqv1.ReceiveResponse
	failed error
}

func (a *anyReceive) of(p uint32) Receive {
	one := a.r
	one.Partition = &p
	return one
}

// lookPatience is how long a look at one partition holds up the next: one whose home waits for a quorum answers late.
const lookPatience = 20 * time.Millisecond

// lookAround looks at n partitions, from one on, until there is enough. One after the other, as each wants what the others have
// left; but those that answer late are waited for side by side, and not at all once there is something.
func (a *anyReceive) lookAround(ctx context.Context, first, n uint32) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var looks sync.WaitGroup
	for i := uint32(0); i < n && a.got() < a.r.Max; i++ {
		done := make(chan struct{})
		looks.Go(func() {
			defer close(done)
			a.look(ctx, (first+i)%n)
		})
		select {
		case <-done:
		case <-time.After(lookPatience):
		}
	}
	if a.got() > 0 {
		stop()
	}
	looks.Wait()
}

// got counts the messages that there are.
func (a *anyReceive) got() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.out.Messages)
}

// look takes what one partition has ready, as far as there is room.
func (a *anyReceive) look(ctx context.Context, p uint32) {
	r := a.of(p)
	r.Wait = 0
	r.Max, r.MaxBytes = a.room()
	if r.Max <= 0 || r.MaxBytes <= 0 {
		return
	}
	ds, epoch, err := a.s.backend.Receive(ctx, r)
	if a.told(p, err) {
		return
	}
	if rest := a.take(p, ds, uint64(epoch)); len(rest) > 0 {
		a.s.giveBack(a.r, p, rest)
	}
}

// room is what may still be taken.
func (a *anyReceive) room() (messages, bytes int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	bytes = a.r.MaxBytes
	for _, m := range a.out.Messages {
		bytes -= len(m.GetBody())
	}
	return a.r.Max - len(a.out.Messages), bytes
}

// told notes a partition that is served elsewhere.
func (a *anyReceive) told(p uint32, err error) bool {
	var e *code.Error
	if err == nil || !errors.As(err, &e) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed == nil {
		a.failed = err
	}
	switch e.Code {
	case code.NotOwner, code.NotReplica, code.NoLeader, code.UnknownGroup, code.InvalidArgument:
		a.out.Elsewhere = append(a.out.Elsewhere, &tierqv1.PartitionHome{Partition: p, Host: e.HomeHost, Api: e.HomeAPI, Epoch: e.Epoch})
		return true
	}
	return false // paused, at a limit, without a quorum: it may get better within the wait
}

// take takes what a partition that is served here has handed out, and returns what there is no room for.
func (a *anyReceive) take(p uint32, ds []Delivery, epoch uint64) (rest []Delivery) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.here = append(a.here, p)
	if len(ds) > 0 || a.out.Epoch == 0 {
		a.out.Epoch = epoch
	}
	n := min(len(ds), a.r.Max-len(a.out.Messages))
	for _, d := range ds[:n] {
		a.out.Messages = append(a.out.Messages, protoMessage(d, &p))
	}
	return ds[n:]
}

// wait waits for the first partition that has something. What another one has handed out in the same moment is given back
// without counting.
func (a *anyReceive) wait(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	var first sync.Once
	var failed error
	var leaderless atomic.Int64
	for _, p := range a.here {
		wg.Go(func() {
			ds, epoch, err := a.s.backend.Receive(ctx, a.of(p))
			won := false
			switch {
			case err == nil || ctx.Err() != nil:
			case asCode(err).Code == code.NoLeader: // at the end of its wait, which is the others' too
				a.told(p, err)
				leaderless.Add(1)
				first.Do(func() { failed = err })
			default:
				first.Do(func() {
					if a.told(p, err) {
						stop() // its home has moved: the caller learns where to
					} else {
						failed = err
					}
				})
			}
			if len(ds) == 0 {
				return
			}
			a.mu.Lock()
			won = len(a.out.Messages) == 0
			if won {
				a.out.Epoch = uint64(epoch)
				for _, d := range ds {
					a.out.Messages = append(a.out.Messages, protoMessage(d, &p))
				}
			}
			a.mu.Unlock()
			stop()
			if !won {
				a.s.giveBack(a.r, p, ds)
			}
		})
	}
	wg.Wait()
	switch {
	case len(a.out.Messages) > 0:
		return nil
	case int(leaderless.Load()) == len(a.here):
		return failed // nothing is served here any more
	case len(a.out.Elsewhere) > 0:
		return nil
	}
	return failed
}

// giveBack releases what never left.
func (s groupService) giveBack(r Receive, p uint32, ds []Delivery) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	receipts := make([]string, len(ds))
	for i, d := range ds {
		receipts[i] = d.Receipt
	}
	_, _ = s.backend.Settle(ctx, Settle{Kind: SettleRelease, Queue: r.Queue, Partition: &p, Group: r.Group, Receipts: receipts})
}

// shardOfReceipt reads the shard of a receipt (docs/format/receipt.md). The home checks the receipt.
func shardOfReceipt(text string) (uint64, bool) {
	if len(text) < 12 {
		return 0, false
	}
	raw, err := base64.RawURLEncoding.DecodeString(text[:12])
	if err != nil || raw[0] != 1 {
		return 0, false
	}
	return binary.BigEndian.Uint64(raw[1:]), true
}

// settleAny settles receipts of several partitions, each at its home: only there are they known, and a receipt tells its
// partition to hosts alone.
func (s groupService) settleAny(ctx context.Context, r Settle, q *QueueInfo) (*tierqv1.SettleResponse, error) {
	places := map[uint64][]int{}
	var shards []uint64
	out := &tierqv1.SettleResponse{Results: make([]*tierqv1.SettleResult, len(r.Receipts))}
	for i, receipt := range r.Receipts {
		shard, ok := shardOfReceipt(receipt)
		if !ok || !slices.ContainsFunc(q.Partitions, func(p PartitionInfo) bool { return p.Shard == shard }) {
			out.Results[i] = refusedSettle(&code.Error{Code: code.InvalidReceipt, Effect: code.EffectNone})
			continue
		}
		if places[shard] == nil {
			shards = append(shards, shard)
		}
		places[shard] = append(places[shard], i)
	}
	errs := make([]error, len(shards))
	var wg sync.WaitGroup
	for n, shard := range shards {
		wg.Go(func() {
			one := r
			one.Receipts = make([]string, len(places[shard]))
			for j, i := range places[shard] {
				one.Receipts[j] = r.Receipts[i]
			}
			for _, p := range q.Partitions {
				if p.Shard == shard {
					one.Partition = &p.Number
				}
			}
			results, err := s.settleAtHome(ctx, one)
			errs[n] = err
			for j, i := range places[shard] {
				if err != nil {
					out.Results[i] = refusedSettle(asCode(err))
				} else {
					out.Results[i] = results[j]
				}
			}
		})
	}
	wg.Wait()
	if len(shards) == 1 && len(places[shards[0]]) == len(r.Receipts) && errs[0] != nil {
		return nil, errs[0]
	}
	return out, nil
}

func refusedSettle(e *code.Error) *tierqv1.SettleResult {
	return &tierqv1.SettleResult{Code: uint32(e.Code), Name: e.Code.String(), Text: sentence(e), Effect: effect(e.Effect)}
}

// settleAtHome settles receipts of one partition here, or at the home: where this host takes it to be, and once more where that
// one says it is.
func (s groupService) settleAtHome(ctx context.Context, r Settle) ([]*tierqv1.SettleResult, error) {
	resp, err := s.settle(ctx, r)
	if err == nil {
		return resp.Msg.GetResults(), nil
	}
	var e *code.Error
	if s.forward == nil || !errors.As(err, &e) || e.HomeHost == 0 || e.HomeHost == s.backend.Fleet().Self || e.Effect != code.EffectNone {
		return nil, err
	}
	host := e.HomeHost
	s.onForward()
	resp, err = s.settleOver(ctx, s.client(host), r)
	if err == nil {
		return resp.Msg.GetResults(), nil
	}
	if host = s.nextHop(host, detailOf(forwardFailure(err))); host == 0 {
		return nil, codeOfForward(err)
	}
	s.onForward()
	if resp, err = s.settleOver(ctx, s.client(host), r); err != nil {
		return nil, codeOfForward(err)
	}
	return resp.Msg.GetResults(), nil
}

// codeOfForward reads another host's refusal.
func codeOfForward(err error) error {
	err = forwardFailure(err)
	ce, ok := err.(*connect.Error)
	if !ok {
		return err
	}
	d := detailOf(ce)
	effects := map[tierqv1.Effect]code.Effect{tierqv1.Effect_EFFECT_NONE: code.EffectNone, tierqv1.Effect_EFFECT_DONE: code.EffectDone}
	e := &code.Error{Code: code.Code(d.GetCode()), Effect: code.EffectMaybe, Text: d.GetText(), HomeHost: d.GetHomeHost(), HomeAPI: d.GetHomeApi(), Epoch: d.GetEpoch(), RetryAfterMs: d.GetRetryAfterMs()}
	if known, ok := effects[d.GetEffect()]; ok {
		e.Effect = known
	}
	return e
}

// walk makes a call about addresses partition by partition, from one on, until one of them is not through or limit items
// are treated (0: no limit). one answers how many it treated and where its partition goes on, 0 at its end. The place to go
// on from is returned, address 0 at the end of the last partition. An error behind the first step is left for the next
// walk to meet, as an answer would deny what was done.
func walk(ctx context.Context, n int, from uint32, address, limit uint64,
	one func(partition uint32, address, left uint64) (done, next uint64, err error)) (uint32, uint64, error) {
	if int(from) >= n {
		return 0, 0, code.New(code.UnknownPartition, "from_partition: %d, the queue has %d, numbered from 0", from, n)
	}
	treated := uint64(0)
	for p := from; ; p++ {
		left := uint64(0)
		if limit > 0 {
			left = limit - treated
		}
		done, next, err := one(p, address, left)
		treated += done
		switch {
		case err != nil && p == from:
			return 0, 0, err
		case err != nil:
			return p, max(address, 1), nil
		case next != 0 || int(p) == n-1:
			return p, next, nil
		}
		address = 1
		if limit > 0 && treated >= limit || short(ctx) {
			return p + 1, address, nil
		}
	}
}

// walkMargin is how long before its deadline a walk begins no further partition.
const walkMargin = 2 * time.Second

func short(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && time.Until(end) < walkMargin
}
