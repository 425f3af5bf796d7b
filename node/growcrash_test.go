package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// A queue grows again and again while it is published into, consumed from, and given groups, and each time the host that drives the growth
// stops somewhere on the way, or all hosts do: the others go on where it was, or they do when they are back. No message is lost, every
// group is in every partition, and the clients come to use them all.
func TestGrowWhileDriversStop(t *testing.T) {
	t.Parallel()
	b := &growthBreaker{}
	f := &growFleet{faultFleet: openFaultFleet(t, layoutOf{full: 3, config: func(c *Config) { c.growthAt = b.at }}, 2*time.Minute), b: b, partitions: 1}
	f.open()
	for _, r := range []struct {
		name string
		stop growthStop
		more int
		all  bool // stop all hosts
	}{
		{"the plan is recorded", growthStop{step: growthBegun}, 1, false},
		{"some shards have a leader", growthStop{step: growthBegun, leaders: 1}, 2, false},
		{"all is ready to be opened", growthStop{step: growthOpening}, 1, true},
		{"they are open", growthStop{step: growthFinishing}, 1, false},
	} {
		began := time.Now()
		f.grow(r.name, r.stop, r.more, r.all)
		f.Logf("%s: %v", r.name, time.Since(began))
	}
	f.finish()
}

// growthStop is where the driver of a growth stops: at a step, once so many of the new shards have a leader.
type growthStop struct {
	step    growthStep
	leaders int
}

// growthBreaker holds the first driver that comes to a place, until its host is stopped.
type growthBreaker struct {
	mu      sync.Mutex
	armed   bool
	stop    growthStop
	leaders func(g catalog.Growth) int
	held    chan uint64 // the host
}

func (b *growthBreaker) arm(s growthStop, leaders func(catalog.Growth) int) <-chan uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed, b.stop, b.leaders, b.held = true, s, leaders, make(chan uint64, 1)
	return b.held
}

func (b *growthBreaker) at(ctx context.Context, host uint64, s growthStep, g catalog.Growth) {
	b.mu.Lock()
	hold := b.armed && s == b.stop.step && b.leaders(g) >= b.stop.leaders
	if hold {
		b.armed = false
		b.held <- host
	}
	b.mu.Unlock()
	if hold {
		<-ctx.Done() // it does nothing more
	}
}

// growFleet is a fleet whose queue q grows, with clients that go on all the time.
type growFleet struct {
	*faultFleet
	b          *growthBreaker
	c          *client.Client
	partitions int
	groups     []string
	publishing context.Context
	stopAll    []func()
	consuming  context.CancelFunc
	consumed   chan error

	mu        sync.Mutex
	published map[string]uint32 // acknowledged, with its partition
	delivered map[string]int
	acked     map[string]bool
	from      map[uint32]bool // partitions of deliveries
	faults    []string
}

func (f *growFleet) open() {
	f.published, f.delivered, f.acked, f.from = map[string]uint32{}, map[string]int{}, map[string]bool{}, map[uint32]bool{}
	f.c = f.client()
	for _, g := range []string{"all", "idle"} {
		f.group(g)
	}
	var stop context.CancelFunc
	f.publishing, stop = context.WithCancel(f.ctx)
	var publishers sync.WaitGroup
	for i := range 2 {
		c := f.client()
		publishers.Go(func() { f.publish(c, i) })
	}
	f.stopAll = append(f.stopAll, stop, publishers.Wait)
	var consuming context.Context
	consuming, f.consuming = context.WithCancel(f.ctx)
	f.consumed = make(chan error, 1)
	c := f.client()
	go func() { f.consumed <- f.consume(consuming, c) }()
}

func (f *growFleet) client() *client.Client {
	f.Helper()
	o := client.Options{}
	for _, n := range f.full() {
		o.Addrs = append(o.Addrs, n.APIAddr().String())
	}
	c, err := client.New(o)
	require.NoError(f, err)
	f.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// group makes a group by a client, as people do: it is repeated until it is answered.
func (f *growFleet) group(name string) {
	f.Helper()
	_, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "q", Name: name})
	require.NoError(f, err)
	f.groups = append(f.groups, name)
}

// publish sends one message after the other, each until it is acknowledged.
func (f *growFleet) publish(c *client.Client, who int) {
	for i := 0; f.publishing.Err() == nil; i++ {
		body := fmt.Sprintf("%d/%d", who, i)
		rs, err := c.Publish(f.ctx, "q", client.Message{Body: []byte(body)})
		f.mu.Lock()
		if err != nil {
			f.faults = append(f.faults, fmt.Sprintf("publish %s: %v", body, err))
		} else {
			f.published[body] = rs[0].Partition
		}
		f.mu.Unlock()
		pause(f.publishing, 2*time.Millisecond)
	}
}

func (f *growFleet) consume(ctx context.Context, c *client.Client) error {
	return c.Consume(ctx, "q", "all", func(_ context.Context, d *client.Delivery) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.acked[string(d.Body)] {
			f.faults = append(f.faults, fmt.Sprintf("%s was delivered after its ack was answered", d.Body))
		}
		f.delivered[string(d.Body)]++
		f.from[d.Partition] = true
		return nil
	}, client.ConsumeOptions{Concurrency: 2, OnSettled: func(d *client.Delivery, s client.Settled) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if s.Err == nil {
			f.acked[string(d.Body)] = true
		}
	}})
}

// grow lets the queue grow, stops the driver on the way, or all hosts, and waits until the growth is over and its partitions are used.
func (f *growFleet) grow(name string, s growthStop, more int, all bool) {
	f.Helper()
	held := f.b.arm(s, f.leaders)
	f.partitions += more
	_, err := f.c.GrowQueue(f.ctx, "q", uint32(f.partitions))
	require.NoError(f, err)
	var host uint64
	select {
	case host = <-held:
	case <-f.ctx.Done():
		f.Fatalf("no driver came to where %s", name)
	}
	f.told(host, more)
	stopped := []int{int(host) - 1}
	if all {
		stopped = []int{int(host) - 1, int(host) % 3, int(host+1) % 3}
	}
	for _, i := range stopped {
		f.crash(i)
	}
	if all {
		for _, i := range stopped {
			f.start(i)
		}
		stopped = nil
	}
	f.group(fmt.Sprintf("while-%d", f.partitions))
	f.grown()
	for _, i := range stopped {
		f.start(i)
	}
	f.used()
	f.grown()
}

// told: whoever asks, by any host, hears of the growth that a host drives, which has the metric; others do not.
func (f *growFleet) told(driver uint64, more int) {
	f.Helper()
	for i, n := range f.nodes {
		c, err := client.New(client.Options{Addrs: []string{n.APIAddr().String()}, RefreshEvery: -1})
		require.NoError(f, err)
		var gs []*tierqv1.Growth
		require.Eventually(f, func() bool {
			gs, err = c.Growths(f.ctx, "q")
			return err == nil && len(gs) == 1 && gs[0].Host == driver
		}, time.Minute, 20*time.Millisecond, "host %d", i+1)
		require.EqualValues(f, f.partitions-more, gs[0].From)
		require.EqualValues(f, f.partitions, gs[0].To)
		require.Contains(f, []string{"shards", "groups", "last-look"}, gs[0].Phase)
		require.NoError(f, c.Close(f.ctx))
	}
	series := 0
	for _, n := range f.nodes {
		series += growingSeries(f, n)
	}
	require.Equal(f, 1, series, "one host has the metric")
}

// crash stops a host as clients see a crash: their streams break.
func (f *growFleet) crash(i int) {
	f.Helper()
	_ = f.nodes[i].api.Close()
	f.stop(i)
}

// leaders is how many of a growth's shards have a leader, as any host knows.
func (f *growFleet) leaders(g catalog.Growth) int {
	known := map[uint64]bool{}
	for _, n := range f.running() {
		for _, s := range g.Shards {
			if _, _, _, ok := n.raft.Leader(s); ok {
				known[s] = true
			}
		}
	}
	return len(known)
}

// grown waits until every host that runs knows of all partitions and of no growth.
func (f *growFleet) grown() {
	f.Helper()
	f.eventually(fmt.Sprintf("%d partitions", f.partitions), func() bool {
		return !slices.ContainsFunc(f.running(), func(n *Node) bool {
			q, _ := n.view().Queue("", "q")
			return len(q.Shards) != f.partitions || len(n.view().Growths()) > 0
		})
	})
}

// used waits until messages have been published into every partition and consumed from each.
func (f *growFleet) used() {
	f.Helper()
	f.eventually("all partitions are used", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		into := map[uint32]bool{}
		for _, p := range f.published {
			into[p] = true
		}
		return len(into) == f.partitions && len(f.from) == f.partitions
	})
}

// finish stops the publishers, lets the consumer finish, and closes the account.
func (f *growFleet) finish() {
	f.Helper()
	for _, stop := range f.stopAll {
		stop()
	}
	f.eventually("everything is acked", func() bool {
		list, err := f.c.ListGroups(f.ctx, "q")
		i := slices.IndexFunc(list, func(g *tierqv1.Group) bool { return g.Name == "all" })
		return err == nil && list[i].Acked >= uint64(len(f.published))
	})
	f.consuming()
	require.NoError(f, <-f.consumed)
	require.Empty(f, f.faults)
	again := 0
	for body := range f.published {
		require.Positive(f, f.delivered[body], "%s was acknowledged and never delivered", body)
		again += f.delivered[body] - 1
	}
	require.Len(f, f.delivered, len(f.published), "nothing came that was not published")
	list, err := f.c.ListGroups(f.ctx, "q")
	require.NoError(f, err)
	require.Len(f, list, len(f.groups))
	for _, g := range list {
		require.Len(f, g.Partitions, f.partitions, g.Name)
		switch {
		case g.Name == "all":
			require.EqualValues(f, len(f.published), g.Acked)
			require.Zero(f, g.Unfinished)
		case g.Acked+g.Dead+g.Expired+g.Purged+g.Cancelled+g.Exported > 0:
			f.Fatalf("nobody has had anything of group %s: %v", g.Name, g)
		default: // every group begins with the first message
			require.EqualValues(f, len(f.published), g.Unfinished, g.Name)
		}
	}
	f.Logf("account: acknowledged %d, delivered %d (%d again), lost 0, groups %d in %d partitions", len(f.published), len(f.delivered), again, len(f.groups), f.partitions)
}
