package api

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// growing is a queue that grows: its groups by shard, and the catalog's part. Every call waits at its begin until the test lets it happen,
// in one moment.
type growing struct {
	Backend
	t *testing.T

	shards   []uint64
	open     int
	finished bool
	groups   map[uint64]map[string]GroupInfo
	nextID   queue.GroupID

	mu    sync.Mutex
	gates []gate

	// promised are the groups that a creation has answered for and no deletion has begun for, with their ids in the open partitions.
	promised map[string]map[uint64]queue.GroupID
}

type gate struct {
	actor string
	pass  chan error
}

type actorKey struct{}

var errCrash = code.New(code.Internal, "the caller has crashed")

// wait is how every call begins.
func (g *growing) wait(ctx context.Context) error {
	actor, _ := ctx.Value(actorKey{}).(string)
	pass := make(chan error)
	g.mu.Lock()
	g.gates = append(g.gates, gate{actor, pass})
	g.mu.Unlock()
	return <-pass
}

func (g *growing) waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.gates)
}

func (g *growing) take(i int) gate {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.gates[i]
	g.gates = slices.Delete(g.gates, i, i+1)
	return next
}

func (g *growing) Fleet() Fleet { return Fleet{Self: 1} }

func (g *growing) GroupPartitions(ctx context.Context, _ string) (Partitions, error) {
	if err := g.wait(ctx); err != nil {
		return Partitions{}, err
	}
	return Partitions{Shards: slices.Clone(g.shards), Open: g.open}, nil
}

func (g *growing) in(ctx context.Context, p Partition) (map[string]GroupInfo, error) {
	if err := g.wait(ctx); err != nil {
		return nil, err
	}
	if int(*p) >= len(g.shards) {
		return nil, code.New(code.UnknownPartition, "")
	}
	return g.groups[g.shards[*p]], nil
}

func (g *growing) CreateGroup(ctx context.Context, r CreateGroup) (GroupInfo, error) {
	in, err := g.in(ctx, r.Partition)
	if err != nil {
		return GroupInfo{}, err
	}
	cfg := r.Config
	cfg.EnsureDefaults()
	have, ok := in[r.Name]
	switch {
	case ok && (have.Config.MaxAttempts != cfg.MaxAttempts || have.Start != queue.Address(r.Start.Kind)):
		return have, code.New(code.GroupExistsMismatch, "")
	case !ok:
		g.nextID++
		have = GroupInfo{Partition: *r.Partition, GroupInfo: queue.GroupInfo{ID: g.nextID, Name: r.Name, Config: cfg, ConfigVersion: 1, Start: queue.Address(r.Start.Kind)}}
		in[r.Name] = have
	}
	return have, nil
}

func (g *growing) ListGroups(ctx context.Context, _ string, p Partition) ([]GroupInfo, error) {
	in, err := g.in(ctx, p)
	return slices.SortedFunc(maps.Values(in), func(a, b GroupInfo) int { return cmp.Compare(a.ID, b.ID) }), err
}

func (g *growing) DeleteGroup(ctx context.Context, _ string, p Partition, group string, id queue.GroupID) error {
	in, err := g.in(ctx, p)
	if err != nil {
		return err
	}
	if id != 0 && int(*p) < g.open {
		return code.New(code.MutationFenced, "")
	}
	if have, ok := in[group]; !ok || id != 0 && have.ID != id {
		return code.New(code.UnknownGroup, "")
	}
	delete(in, group)
	return nil
}

func (g *growing) ConfigureGroup(ctx context.Context, _ string, p Partition, group string, cfg queue.GroupConfig, version uint64) (GroupInfo, error) {
	in, err := g.in(ctx, p)
	if err != nil {
		return GroupInfo{}, err
	}
	have, ok := in[group]
	switch {
	case !ok:
		return have, code.New(code.UnknownGroup, "")
	case have.ConfigVersion != version:
		return have, code.New(code.MutationFenced, "")
	}
	have.Config, have.ConfigVersion = cfg, have.ConfigVersion+1
	in[group] = have
	return have, nil
}

// drive is a driver as the node's, over a catalog that is one moment.
func (g *growing) drive(ctx context.Context, s *Server) error {
	for {
		if err := g.wait(ctx); err != nil {
			return err
		}
		if g.finished || len(g.shards) == 1 {
			return nil
		}
		opened := g.open == len(g.shards)
		level, err := s.MatchGroups(ctx, "q", 1, len(g.shards), !opened)
		if err != nil {
			return err
		}
		if !level {
			continue
		}
		if err := g.wait(ctx); err != nil {
			return err
		}
		if opened {
			g.finished = true
		} else {
			g.open = len(g.shards)
		}
	}
}

// check checks, after every step, that a group that was promised is in every open partition, and stays the same there.
func (g *growing) check() {
	for name, ids := range g.promised {
		for _, shard := range g.shards[:g.open] {
			have, ok := g.groups[shard][name]
			require.True(g.t, ok, "group %s is not in shard %d, which is open", name, shard)
			if old := ids[shard]; old != 0 {
				require.Equal(g.t, old, have.ID, "group %s was made anew in shard %d", name, shard)
			}
			ids[shard] = have.ID
		}
	}
}

// user makes random calls about one group, and repeats each until it is answered, as a person does.
func (g *growing) user(ctx context.Context, s *Server, random *rand.Rand, name string) {
	groups, admin := groupService{s}, adminService{s}
	exists := false
	for range 4 {
		create, begun := !exists, random.IntN(3) == 0
		for {
			var err error
			switch {
			case create:
				start := "earliest"
				if begun {
					start = "latest"
				}
				_, err = groups.CreateGroup(ctx, connect.NewRequest(&tierqv1.CreateGroupRequest{Queue: "q", Name: name, Start: &tierqv1.Start{At: start}}))
				if err == nil {
					g.promised[name] = map[uint64]queue.GroupID{}
				}
				exists = true
			case begun:
				delete(g.promised, name)
				_, err = groups.DeleteGroup(ctx, connect.NewRequest(&tierqv1.DeleteGroupRequest{Queue: "q", Name: name}))
				exists = false
			default:
				var version uint64
				if version, err = g.versionOf(ctx, groups, name); err == nil {
					_, err = admin.ConfigureGroup(ctx, connect.NewRequest(&tierqv1.ConfigureGroupRequest{
						Queue: "q", Name: name, Config: &tierqv1.GroupConfig{MaxAttempts: random.Uint32N(99) + 1}, ExpectedVersion: version}))
				}
			}
			if err == nil || code.Code(detailOf(err).GetCode()) == code.UnknownGroup && !exists {
				break
			}
		}
	}
}

func (g *growing) versionOf(ctx context.Context, s groupService, name string) (uint64, error) {
	have, err := s.groupIn(ctx, "q", 0, name)
	return have.GetConfigVersion(), err
}

// Groups are made, deleted and configured while a queue grows; drivers and callers crash anywhere. A
// group that exists is in every partition from the moment it opens, and in the end with the same policy.
func TestGroupsWhileGrowing(t *testing.T) {
	rounds := 400
	if testing.Short() {
		rounds = 100
	}
	first := rand.Uint64()
	t.Logf("seed %d", first)
	for round := range uint64(rounds) {
		synctest.Test(t, func(t *testing.T) { growOnce(t, first+round) })
		if t.Failed() {
			t.Fatalf("seed %d", first+round)
		}
	}
}

func growOnce(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 1))
	g := &growing{t: t, shards: []uint64{10}, open: 1, groups: map[uint64]map[string]GroupInfo{10: {}, 11: {}, 12: {}}, promised: map[string]map[uint64]queue.GroupID{}}
	s := NewServer(Options{Backend: g})
	var wg sync.WaitGroup
	live := 0
	var mu sync.Mutex
	begin := func(actor string, f func(context.Context)) {
		live++
		wg.Go(func() {
			f(context.WithValue(context.Background(), actorKey{}, actor))
			mu.Lock()
			live--
			mu.Unlock()
		})
	}
	for i := range 3 {
		own := rand.New(rand.NewPCG(seed, uint64(i)+2))
		begin(fmt.Sprintf("user %d", i), func(ctx context.Context) { g.user(ctx, s, own, fmt.Sprintf("g%d", i)) })
	}
	grows, drivers, driven := random.IntN(60), 0, 0
	crashed := map[string]bool{}
	for step := 0; ; step++ {
		synctest.Wait()
		g.check()
		if step > 5000 {
			panic(fmt.Sprintf("seed %d: no end: open %d, %+v", seed, g.open, g.groups))
		}
		if step == grows {
			g.shards = append(g.shards, 11, 12)
		}
		if len(g.shards) > 1 && (drivers == 0 || crashed[fmt.Sprintf("driver %d", drivers)] || driven == drivers) && !g.finished {
			drivers++
			begin(fmt.Sprintf("driver %d", drivers), func(ctx context.Context) { _ = g.drive(ctx, s); driven = drivers })
			continue
		}
		gates := g.waiting()
		if gates == 0 {
			mu.Lock()
			ended := live == 0
			mu.Unlock()
			if !ended {
				<-time.After(growPause) // of the bubble's clock: a call waits for a partition
				continue
			}
			if g.finished {
				break
			}
			if len(g.shards) == 1 {
				grows = step + 1
				continue
			}
			panic("nobody drives the growth")
		}
		next := g.take(random.IntN(gates))
		var err error
		switch {
		case crashed[next.actor]:
			err = errCrash
		case random.IntN(40) == 0 && next.actor[0] == 'd' && drivers < 6: // the next one begins
			crashed[next.actor] = true
			err = errCrash
		case random.IntN(60) == 0 && next.actor[0] == 'u':
			err = errCrash
		}
		next.pass <- err
	}
	wg.Wait()
	for name := range g.groups[10] {
		for _, shard := range []uint64{11, 12} {
			require.Equal(t, g.groups[10][name].Config, g.groups[shard][name].Config, "group %s in shard %d, seed %d", name, shard, seed)
		}
	}
}
