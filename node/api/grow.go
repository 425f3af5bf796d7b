package api

import (
	"context"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// A queue that grows has partitions that are not open yet (docs/adr/0057). Nothing is published into them or received from them, but the
// queue's groups are made in them, so that no message comes before the groups that it is for.

// Partitions are a queue's shards by partition; those from Open on are not open yet.
type Partitions struct {
	Shards []uint64
	Open   int
}

// everywhere makes a call about a group in every partition, also in those that are not open yet: in partition 0 first, which decides, and
// then in the others side by side. If the queue has begun to grow meanwhile it goes on with the new ones: once it returns, whoever opens
// partitions after that has seen the group as the call has left it. It returns the answers of the open partitions. Its error is the first
// one's that has one; what the others did stays done, so every such call may be repeated.
func everywhere[Req, Resp any, P request[Req]](ctx context.Context, s *Server, queueName string, m P,
	call func(ctx context.Context, one P, partition int, at Partitions) (*Resp, error)) ([]*Resp, error) {
	done, absent := map[uint64]*Resp{}, map[uint64]bool{}
	for {
		at, err := s.backend.GroupPartitions(ctx, queueName)
		if err != nil {
			return nil, err
		}
		var todo []int
		for p, shard := range at.Shards {
			if done[shard] == nil && (p < at.Open || !absent[shard]) {
				todo = append(todo, p)
			}
		}
		switch {
		case len(todo) == 0:
			out := make([]*Resp, at.Open)
			for p := range out {
				out[p] = done[at.Shards[p]]
			}
			return out, nil
		case todo[0] == 0:
			todo = todo[:1]
		}
		answers, errs := make([]*Resp, len(todo)), make([]error, len(todo))
		var wg sync.WaitGroup
		for i, p := range todo {
			wg.Go(func() {
				answers[i], errs[i] = call(ctx, inPartition[Req, P](m, uint32(p)), p, at)
			})
		}
		wg.Wait()
		var waits error
		for i, p := range todo {
			if errs[i] == nil {
				done[at.Shards[p]] = answers[i]
				continue
			}
			if len(at.Shards) > 1 {
				errs[i] = ofPartition(uint32(p), errs[i])
			}
			switch {
			case p >= at.Open && code.Code(detailOf(errs[i]).GetCode()) == code.UnknownGroup:
				absent[at.Shards[p]] = true // it is made later, as it is in partition 0 then
			case p >= at.Open && comes(errs[i]):
				waits = errs[i]
			default:
				return nil, errs[i]
			}
		}
		if waits != nil && pause(ctx, growPause) != nil {
			return nil, waits
		}
	}
}

// growPause is how long a call waits for a partition that is being made.
const growPause = 50 * time.Millisecond

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// comes says whether a partition that is not open refuses a call because it is not there yet, or not any more.
func comes(err error) bool {
	c := code.Code(detailOf(err).GetCode())
	return c == code.UnknownPartition || c == code.QueueRetired || c.Info().Class == code.ClassTransient || c.Info().Class == code.ClassRenegotiate
}

// wholeGroup is the group of a call that was made everywhere.
func wholeGroup[Resp any](parts []*Resp, group func(*Resp) *tierqv1.Group) *tierqv1.Group {
	if len(parts) == 1 {
		return group(parts[0])
	}
	return mergeGroup(groupsOf(parts, group))
}

// createEverywhere makes a group. In partitions that are not open it begins at their beginning, which is behind nothing. Where the group
// is already it follows partition 0, which decides about policy and begin.
func (s groupService) createEverywhere(ctx context.Context, m *tierqv1.CreateGroupRequest) (*connect.Response[tierqv1.CreateGroupResponse], error) {
	parts, err := everywhere(ctx, s.Server, m.GetQueue(), m, func(ctx context.Context, one *tierqv1.CreateGroupRequest, p int, at Partitions) (*tierqv1.CreateGroupResponse, error) {
		if p >= at.Open {
			one.Start, one.HomeHost = nil, 0
		} else if at.Open > 1 {
			if err := oneStart(m.GetStart(), at.Open); err != nil {
				return nil, err
			}
		}
		resp, err := s.CreateGroup(ctx, connect.NewRequest(one))
		if err == nil {
			return resp.Msg, nil
		}
		if p == 0 || code.Code(detailOf(err).GetCode()) != code.GroupExistsMismatch {
			return nil, err
		}
		have, err := s.groupIn(ctx, m.GetQueue(), uint32(p), m.GetName())
		want := groupConfig(m.GetConfig())
		want.EnsureDefaults()
		switch {
		case err != nil:
			return nil, err
		case have == nil:
			return nil, code.New(code.Unavailable, "the group was deleted at once: repeat after a pause")
		case proto.Equal(have.GetConfig(), protoGroupConfig(want)):
			return &tierqv1.CreateGroupResponse{Group: have}, nil
		}
		changed, err := adminService(s).ConfigureGroup(ctx, connect.NewRequest(&tierqv1.ConfigureGroupRequest{
			Queue: m.GetQueue(), Name: m.GetName(), Config: m.GetConfig(), ExpectedVersion: have.GetConfigVersion(), Partition: one.Partition,
		}))
		if err != nil {
			return nil, err
		}
		return &tierqv1.CreateGroupResponse{Group: changed.Msg.GetGroup()}, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.CreateGroupResponse{Group: wholeGroup(parts, (*tierqv1.CreateGroupResponse).GetGroup)}), nil
}

// groupIn finds a group in one partition; nil if it is not there.
func (s groupService) groupIn(ctx context.Context, queueName string, p uint32, name string) (*tierqv1.Group, error) {
	list, err := s.groupsIn(ctx, queueName, p)
	return list[name], err
}

// groupsIn lists the groups of one partition by name.
func (s groupService) groupsIn(ctx context.Context, queueName string, p uint32) (map[string]*tierqv1.Group, error) {
	resp, err := s.ListGroups(ctx, connect.NewRequest(&tierqv1.ListGroupsRequest{Queue: queueName, Partition: &p}))
	if err != nil {
		return nil, err
	}
	out := map[string]*tierqv1.Group{}
	for _, g := range resp.Msg.GetGroups() {
		out[g.GetName()] = g
	}
	return out, nil
}

// deleteEverywhere deletes a group. Where it was deleted before, by a call that failed half way, it need not be.
func (s groupService) deleteEverywhere(ctx context.Context, m *tierqv1.DeleteGroupRequest) (*connect.Response[tierqv1.DeleteGroupResponse], error) {
	var mu sync.Mutex
	deleted, unknown := 0, error(nil)
	_, err := everywhere(ctx, s.Server, m.GetQueue(), m, func(ctx context.Context, one *tierqv1.DeleteGroupRequest, _ int, _ Partitions) (*tierqv1.DeleteGroupResponse, error) {
		resp, err := s.DeleteGroup(ctx, connect.NewRequest(one))
		mu.Lock()
		defer mu.Unlock()
		if err != nil && code.Code(detailOf(err).GetCode()) == code.UnknownGroup {
			unknown = err
			return &tierqv1.DeleteGroupResponse{}, nil
		}
		if err != nil {
			return nil, err
		}
		deleted++
		return resp.Msg, nil
	})
	switch {
	case err != nil:
		return nil, err
	case deleted == 0:
		return nil, unknown
	}
	return connect.NewResponse(&tierqv1.DeleteGroupResponse{}), nil
}

// configureEverywhere replaces a group's policy. The version of partition 0 decides; the others follow whatever version they are at, so
// that a call that failed half way is mended by the next.
func (s adminService) configureEverywhere(ctx context.Context, m *tierqv1.ConfigureGroupRequest) (*connect.Response[tierqv1.ConfigureGroupResponse], error) {
	name := groupName(m.GetName())
	parts, err := everywhere(ctx, s.Server, m.GetQueue(), m, func(ctx context.Context, one *tierqv1.ConfigureGroupRequest, p int, _ Partitions) (*tierqv1.ConfigureGroupResponse, error) {
		if p > 0 {
			g, err := groupService(s).groupIn(ctx, m.GetQueue(), uint32(p), name)
			if err != nil {
				return nil, err
			}
			if g != nil {
				one.ExpectedVersion = g.GetConfigVersion()
			}
		}
		resp, err := s.ConfigureGroup(ctx, connect.NewRequest(one))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&tierqv1.ConfigureGroupResponse{Group: wholeGroup(parts, (*tierqv1.ConfigureGroupResponse).GetGroup)}), nil
}

// groupEverywhere makes a call everywhere whose parts are independent of each other, and returns the group.
func groupEverywhere[Req, Resp any, P request[Req]](ctx context.Context, s *Server, queueName string, m P,
	call func(context.Context, *connect.Request[Req]) (*connect.Response[Resp], error), group func(*Resp) *tierqv1.Group) (*tierqv1.Group, error) {
	parts, err := everywhere(ctx, s, queueName, m, func(ctx context.Context, one P, _ int, _ Partitions) (*Resp, error) {
		resp, err := call(ctx, connect.NewRequest((*Req)(one)))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	return wholeGroup(parts, group), nil
}

// MatchGroups makes the groups of a queue's partitions from..to-1 those of partition 0, with its policies, and says whether they were so
// before. Groups that partition 0 does not have are deleted if closed says that the partitions are not open: calls about groups are made in
// partition 0 first, so one that is in another partition and, as a later look tells, not in partition 0 was deleted there. In a partition
// that is open none is deleted: somebody may be making it again.
func (s *Server) MatchGroups(ctx context.Context, queueName string, from, to int, closed bool) (level bool, err error) {
	g := &matching{s: groupService{s}, queue: queueName, closed: closed}
	have := make([]map[string]*tierqv1.Group, to)
	for p := from; p < to; p++ {
		if have[p], err = g.s.groupsIn(ctx, queueName, uint32(p)); err != nil {
			return false, ofPartition(uint32(p), err)
		}
	}
	want, err := g.s.groupsIn(ctx, queueName, 0)
	if err != nil {
		return false, ofPartition(0, err)
	}
	for p := from; p < to; p++ {
		if err := g.match(ctx, uint32(p), have[p], want); err != nil {
			return false, ofPartition(uint32(p), err)
		}
	}
	return g.changes == 0, nil
}

// matching is one look at all groups.
type matching struct {
	s       groupService
	queue   string
	closed  bool
	changes int
}

func (g *matching) match(ctx context.Context, p uint32, have, want map[string]*tierqv1.Group) error {
	for name, w := range want {
		h := have[name]
		switch {
		case h == nil:
			_, err := g.s.CreateGroup(ctx, connect.NewRequest(&tierqv1.CreateGroupRequest{Queue: g.queue, Name: name, Config: w.GetConfig(), Partition: &p}))
			if err != nil {
				return err
			}
		case !proto.Equal(h.GetConfig(), w.GetConfig()):
			_, err := adminService(g.s).ConfigureGroup(ctx, connect.NewRequest(&tierqv1.ConfigureGroupRequest{
				Queue: g.queue, Name: name, Config: w.GetConfig(), ExpectedVersion: h.GetConfigVersion(), Partition: &p,
			}))
			if err != nil {
				return err
			}
		default:
			continue
		}
		g.changes++
	}
	for name, h := range have {
		if want[name] == nil && g.closed {
			if err := g.delete(ctx, p, h); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *matching) delete(ctx context.Context, p uint32, h *tierqv1.Group) error {
	g.changes++
	_, err := g.s.DeleteGroup(ctx, connect.NewRequest(&tierqv1.DeleteGroupRequest{Queue: g.queue, Name: h.GetName(), Partition: &p, Id: h.GetId()}))
	if err != nil && code.Code(detailOf(err).GetCode()) == code.UnknownGroup {
		return nil
	}
	return err
}

// GrowQueue begins or cancels a growth; the catalog decides.
func (s adminService) GrowQueue(ctx context.Context, req *connect.Request[tierqv1.GrowQueueRequest]) (*connect.Response[tierqv1.GrowQueueResponse], error) {
	m := req.Msg
	if m.GetCancel() == (m.GetPartitions() != 0) {
		return nil, code.New(code.InvalidArgument, "partitions, cancel: give exactly one of them")
	}
	grow := s.backend.CancelGrowth
	if !m.GetCancel() {
		grow = func(ctx context.Context, name string) (QueueInfo, error) {
			return s.backend.GrowQueue(ctx, name, m.GetPartitions())
		}
	}
	info, err := grow(ctx, m.GetQueue())
	if err != nil {
		return over(ctx, s, err, m, tierqv1connect.AdminServiceClient.GrowQueue)
	}
	return connect.NewResponse(&tierqv1.GrowQueueResponse{Queue: protoQueue(info)}), nil
}

// Growth is a queue that grows; see tierqv1.Growth.
type Growth struct {
	Queue     string
	From, To  int
	Phase     string
	Begun     time.Time // zero: not known
	For       time.Duration
	Waits     string
	Shard     uint64
	Partition uint32
	Host      uint64
}

// ListGrowths tells how far growths are.
func (s adminService) ListGrowths(ctx context.Context, req *connect.Request[tierqv1.ListGrowthsRequest]) (*connect.Response[tierqv1.ListGrowthsResponse], error) {
	list, err := s.backend.Growths(ctx, req.Msg.GetQueue())
	if err != nil {
		return over(ctx, s, err, req.Msg, tierqv1connect.AdminServiceClient.ListGrowths)
	}
	out := &tierqv1.ListGrowthsResponse{}
	for _, g := range list {
		one := &tierqv1.Growth{
			Queue: g.Queue, From: uint32(g.From), To: uint32(g.To), Phase: g.Phase, ForMs: uint64(g.For.Milliseconds()), Waits: g.Waits,
			Shard: g.Shard, Partition: g.Partition, Host: g.Host,
		}
		if !g.Begun.IsZero() {
			one.BeganUnixMs = uint64(g.Begun.UnixMilli())
		}
		out.Growths = append(out.Growths, one)
	}
	return connect.NewResponse(out), nil
}
