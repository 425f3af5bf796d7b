package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/node/outbox"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// TestExports: dead letters go to the queue that their group names, in a fleet of two full hosts and a witness.
func TestExports(t *testing.T) {
	onOneFleet(t, 90*time.Second, map[string]func(*adminFleet){
		"moves": testExportsOverMoves, "loops": testExportLoops, "full": testExportsToAFullQueue, "deleted": testExportsToADeletedQueue, "B16 ring": testB16Ring,
	})
}

func (f *adminFleet) stored(queueName string) (list []queue.StoredMessage) {
	f.t.Helper()
	for from := queue.Address(0); ; {
		type page struct {
			list []queue.StoredMessage
			next queue.Address
		}
		p := must(f, func(n *Node) (page, error) {
			list, next, err := n.Browse(f.ctx, api.Browse{Queue: queueName, From: from, Limit: 1000, MaxBytes: 1 << 20})
			return page{list, next}, err
		})
		if list = append(list, p.list...); p.next == 0 {
			return list
		}
		from = p.next
	}
}

// reject sends messages and rejects each.
func (f *adminFleet) reject(queueName, group, prefix string, n int) (bodies []string) {
	f.t.Helper()
	var p queue.Publish
	for i := range n {
		bodies = append(bodies, fmt.Sprint(prefix, i))
		p.Messages = append(p.Messages, queue.Message{Body: []byte(bodies[i])})
	}
	f.send(queueName, p)
	for left := n; left > 0; {
		ds := f.receive(queueName, group, "", left)
		f.settle(api.SettleReject, queueName, group, "bad", ds...)
		left -= len(ds)
	}
	return bodies
}

func (f *adminFleet) exported(queueName, group string, n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		g := f.info(queueName, group)
		return g.Exports == 0 && g.Counters.Exported == uint64(n)
	}, 60*time.Second, 20*time.Millisecond)
}

// testExportsOverMoves moves the home and the leaders of both queues while dead letters flow: one copy of each arrives.
func testExportsOverMoves(f *adminFleet) {
	f.create("orders", queue.QueueOptions{})
	f.create("orders.dead", queue.QueueOptions{})
	f.group("orders", "g", queue.GroupConfig{DeadLetterQueue: "orders.dead"})
	var want []string
	for round := range 4 {
		want = append(want, f.reject("orders", "g", fmt.Sprintf("%d-", round), 40)...)
		other := f.d.Nodes[round%2].id
		must(f, func(n *Node) (api.GroupInfo, error) { return n.MoveGroup(f.ctx, "orders", nil, "g", other) })
		for _, name := range []string{"orders", "orders.dead"} {
			f.moveLeader(name)
		}
	}
	f.exported("orders", "g", len(want))
	var got []string
	for _, m := range f.stored("orders.dead") {
		got = append(got, string(m.Body))
	}
	slices.Sort(want) // settles of one call may be applied in any order
	slices.Sort(got)
	require.Equal(f.t, want, got, "one copy of each")
	info, err := f.d.Nodes[0].DescribeQueue(f.ctx, "orders", nil)
	require.NoError(f.t, err)
	require.Zero(f.t, info.Messages)
	m := f.stored("orders.dead")[0]
	headers := map[string]string{}
	for _, h := range m.Headers {
		headers[h.Name] = string(h.Value)
	}
	require.Equal(f.t, "orders", headers[outbox.HeaderQueue])
	require.Equal(f.t, "g", headers[outbox.HeaderGroup])
	require.Equal(f.t, "bad", headers[outbox.HeaderReason])
	require.Equal(f.t, "1", headers[outbox.HeaderHops])
	for _, q := range []string{"orders", "orders.dead"} {
		f.sameDigests(q)
	}
}

// moveLeader hands a queue's leader to the other full host.
func (f *adminFleet) moveLeader(name string) {
	f.t.Helper()
	q, ok := f.d.Nodes[0].view().Queue("", name)
	require.True(f.t, ok)
	require.Eventually(f.t, func() bool {
		for _, n := range f.d.Nodes[:2] {
			dsk, err := n.desk(q.Shards[0])
			if err != nil || !dsk.leads() {
				continue
			}
			ctx, cancel := context.WithTimeout(f.ctx, 5*time.Second)
			defer cancel()
			if n.raft.TransferLeader(ctx, q.Shards[0], dsk.otherReplica()) == nil {
				return true
			}
		}
		return false
	}, 30*time.Second, 50*time.Millisecond)
}

func (f *adminFleet) sameDigests(name string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		one, err1 := f.d.Nodes[0].Digest(f.ctx, name, 0)
		two, err2 := f.d.Nodes[1].Digest(f.ctx, name, 0)
		return err1 == nil && err2 == nil && one.Applied == two.Applied && one.Digest == two.Digest
	}, 90*time.Second, 50*time.Millisecond)
}

func testExportLoops(f *adminFleet) {
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		f.create("loop."+name, queue.QueueOptions{})
	}
	name := func(queueName, group, to string) error {
		_, err := try(f, func(n *Node) (api.GroupInfo, error) {
			return n.CreateGroup(f.ctx, api.CreateGroup{Queue: queueName, Name: group, Config: queue.GroupConfig{DeadLetterQueue: to}})
		})
		return err
	}
	f.refused(code.InvalidArgument, name("loop.a", "self", "loop.a"))
	f.refused(code.UnknownQueue, name("loop.a", "missing", "loop.none"))
	require.NoError(f.t, name("loop.a", "g", "loop.b"))
	require.NoError(f.t, name("loop.b", "g", "loop.c"))
	err := name("loop.c", "g", "loop.a")
	f.refused(code.InvalidArgument, err)
	require.Contains(f.t, err.Error(), "loop.c -> loop.a -> loop.b -> loop.c")
	require.NoError(f.t, name("loop.c", "plain", ""))
	require.NoError(f.t, name("loop.c", "on", "loop.d"))
	require.NoError(f.t, name("loop.d", "g", "loop.e"), "a chain of five is none")
	f.refused(code.InvalidArgument, name("loop.e", "g", "loop.b"))
	version := f.info("loop.c", "plain").ConfigVersion
	_, err = try(f, func(n *Node) (api.GroupInfo, error) {
		return n.ConfigureGroup(f.ctx, "loop.c", nil, "plain", queue.GroupConfig{DeadLetterQueue: "loop.b"}, version)
	})
	f.refused(code.InvalidArgument, err)
	require.NoError(f.t, name("loop.a", "g", "loop.b"), "the same creation again")
}

// testExportsToAFullQueue: they park, everybody can see why, a redrive of what waits works, and they go on by themselves.
func testExportsToAFullQueue(f *adminFleet) {
	f.create("full", queue.QueueOptions{})
	f.create("full.dead", queue.QueueOptions{MaxMessages: 3})
	f.group("full", "g", queue.GroupConfig{DeadLetterQueue: "full.dead"})
	f.reject("full", "g", "m", 40)
	var p *api.ParkedExport
	require.Eventually(f.t, func() bool {
		p = f.atHomeParked("full", "g")
		return p != nil && p.Code == code.QueueFull
	}, 30*time.Second, 20*time.Millisecond)
	require.Equal(f.t, "full.dead", p.Queue)
	require.Len(f.t, f.stored("full.dead"), 3)
	g := f.info("full", "g")
	require.EqualValues(f.t, 37, g.Exports)
	require.EqualValues(f.t, 3, g.Counters.Exported)
	e := f.explain("full", "g", 0, "")
	require.Equal(f.t, "dead-letters-parked", e.Verdict)
	require.Contains(f.t, e.Text, "full.dead")
	require.Contains(f.t, f.explain("full", "g", p.Address, "").Text, "does not take it")
	stats := must(f, func(n *Node) (*ParkedStats, error) {
		if n.id != g.HomeHost {
			return nil, &api.ElsewhereError{Host: g.HomeHost, Cause: code.New(code.NotOwner, "")}
		}
		q, _ := n.view().Queue("", "full")
		return n.queueStats(q).Partitions[0].Groups[0].Parked, nil
	})
	require.Equal(f.t, "QUEUE_FULL", stats.Code)
	families, err := f.d.Nodes[0].gatherer().Gather()
	require.NoError(f.t, err)
	var waiting float64
	for _, m := range families {
		for _, x := range m.GetMetric() {
			if m.GetName() == "tierq_outbox_waiting" && x.GetLabel()[2].GetValue() == "full" {
				waiting = x.GetGauge().GetValue()
			}
		}
	}
	require.EqualValues(f.t, 37, waiting)

	dead := must(f, func(n *Node) ([]queue.DeadLetter, error) {
		list, _, err := n.ListDead(f.ctx, api.Dead{Queue: "full", Group: "g", Limit: 100})
		return list, err
	})
	require.Len(f.t, dead, 37)
	var waits, moving []queue.Address
	for _, d := range dead {
		if d.ExportState == queue.ExportPending {
			waits = append(waits, d.Address)
		} else {
			moving = append(moving, d.Address)
		}
	}
	require.NotEmpty(f.t, moving)
	require.NotEmpty(f.t, waits)
	reply := must(f, func(n *Node) (api.DeadReply, error) {
		return n.RedriveDead(f.ctx, api.Dead{Queue: "full", Group: "g", Addresses: []queue.Address{moving[0], waits[0]}})
	})
	require.Equal(f.t, 1, reply.Done, "what waits can be redriven")
	require.Equal(f.t, 1, reply.Skipped, "what is being published cannot")
	reply = must(f, func(n *Node) (api.DeadReply, error) {
		return n.PurgeDead(f.ctx, api.Dead{Queue: "full", Group: "g", Addresses: []queue.Address{moving[0], waits[1]}})
	})
	require.Equal(f.t, 1, reply.Done)
	require.EqualValues(f.t, 1, f.info("full", "g").Counters.Purged)

	v := must(f, func(n *Node) (api.QueueInfo, error) { return n.DescribeQueue(f.ctx, "full.dead", nil) })
	o := v.Options
	o.MaxMessages = 0
	must(f, func(n *Node) (api.QueueInfo, error) { return n.ConfigureQueue(f.ctx, "full.dead", o) })
	f.exported("full", "g", 38)
	require.Nil(f.t, f.atHomeParked("full", "g"))
	require.Len(f.t, f.stored("full.dead"), 38)
}

// testB16Ring: a ring that got past the check, as two changes at once may. Messages go round a bounded number of times, only
// when somebody has received them, and none is lost: in the end each lies where it died last, and can be drained.
func testB16Ring(f *adminFleet) {
	queues := []string{"ring.a", "ring.b"}
	for i, name := range queues {
		f.create(name, queue.QueueOptions{})
		must(f, func(n *Node) (queue.GroupInfo, error) {
			_, d, err := n.deskOf(f.ctx, name, nil)
			if err != nil {
				return queue.GroupInfo{}, err
			}
			return d.createGroup(f.ctx, "g", queue.GroupConfig{DeadLetterQueue: queues[1-i]}, queue.Start{}, 0, operation(0))
		})
	}
	const messages = 10
	f.bodies("ring.a", messages)
	round := 0
	for ; f.unfinished(queues...) > 0; round++ {
		require.LessOrEqual(f.t, round, outbox.MaxHops, "messages go round for ever")
		name := queues[round%2]
		for left := messages; left > 0; {
			ds := f.receive(name, "g", "", left)
			f.settle(api.SettleReject, name, "g", "bad", ds...)
			left -= len(ds)
		}
		require.Eventually(f.t, func() bool { return f.info(name, "g").Exports == 0 }, 30*time.Second, 10*time.Millisecond)
	}
	require.Equal(f.t, outbox.MaxHops+1, round)
	last := queues[(round-1)%2]
	g := f.info(last, "g")
	require.EqualValues(f.t, messages, g.Counters.Dead, "none was dropped")
	dead := must(f, func(n *Node) ([]queue.DeadLetter, error) {
		list, _, err := n.ListDead(f.ctx, api.Dead{Queue: last, Group: "g", Limit: 100})
		return list, err
	})
	require.Equal(f.t, outbox.MaxHops, outbox.Hops(dead[0].Message.Headers))
	require.Contains(f.t, f.explain(last, "g", dead[0].Address, "").Text, "no queue can take it")
	reply := must(f, func(n *Node) (api.DeadReply, error) { return n.RedriveDead(f.ctx, api.Dead{Queue: last, Group: "g"}) })
	require.Equal(f.t, messages, reply.Done)
	for left := messages; left > 0; {
		ds := f.receive(last, "g", "", left)
		f.settle(api.SettleAck, last, "g", "", ds...)
		left -= len(ds)
	}
	require.Zero(f.t, f.unfinished(queues...))
}

func (f *adminFleet) unfinished(queues ...string) (n uint64) {
	for _, name := range queues {
		n += f.info(name, "g").Counters.Unfinished
	}
	return n
}

// atHomeParked is why a group's dead letters do not go on; nil while nobody can tell.
func (f *adminFleet) atHomeParked(queueName, group string) *api.ParkedExport {
	for _, n := range f.d.Nodes[:2] {
		gs, err := n.ListGroups(f.ctx, queueName, nil)
		if err != nil {
			continue // it has no leader now
		}
		for _, g := range gs {
			if g.Name == group && g.HomeHost == n.id {
				return g.Parked
			}
		}
	}
	return nil
}

// testExportsToADeletedQueue: what waits for a queue that was deleted goes to the one that has its name then.
func testExportsToADeletedQueue(f *adminFleet) {
	f.create("deleted", queue.QueueOptions{})
	f.create("deleted.dead", queue.QueueOptions{MaxMessages: 1})
	f.group("deleted", "g", queue.GroupConfig{DeadLetterQueue: "deleted.dead"})
	f.reject("deleted", "g", "m", 5)
	require.Eventually(f.t, func() bool { return f.atHomeParked("deleted", "g") != nil }, 30*time.Second, 20*time.Millisecond)
	must(f, func(n *Node) (bool, error) { return true, n.DeleteQueue(f.ctx, "deleted.dead") })
	require.Eventually(f.t, func() bool {
		p := f.atHomeParked("deleted", "g")
		return p != nil && p.Code == code.UnknownQueue && strings.Contains(p.Text, "deleted.dead")
	}, 30*time.Second, 20*time.Millisecond)
	require.EqualValues(f.t, 4, f.info("deleted", "g").Exports, "nothing is dropped")
	f.create("deleted.dead", queue.QueueOptions{})
	f.exported("deleted", "g", 5)
	require.Len(f.t, f.stored("deleted.dead"), 4)
}

// waitingExports makes n dead letters of shop, whose queue shop.dead has room for fewer, and waits until the rest waits.
func (f *adminFleet) waitingExports(room uint64, n int) (bodies []string) {
	f.t.Helper()
	f.create("shop", queue.QueueOptions{})
	f.create("shop.dead", queue.QueueOptions{MaxMessages: room})
	f.group("shop", "g", queue.GroupConfig{DeadLetterQueue: "shop.dead"})
	bodies = f.reject("shop", "g", "m", n)
	require.Eventually(f.t, func() bool { return f.atHomeParked("shop", "g") != nil }, 30*time.Second, 20*time.Millisecond)
	return bodies
}

// TestExportsOverARestart stops the fleet while dead letters are parked on their way; the fleet that comes back goes on.
func TestExportsOverARestart(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	dir := t.TempDir()
	d := openDev(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	f := &adminFleet{t: t, d: d, ctx: ctx}
	want := f.waitingExports(5, 30)
	require.NoError(t, d.Close())

	d = openDev(t, dir)
	defer func() { require.NoError(t, d.Close()) }()
	f.d = d
	require.Eventually(t, func() bool { return f.atHomeParked("shop", "g") != nil }, 40*time.Second, 20*time.Millisecond)
	o := must(f, func(n *Node) (api.QueueInfo, error) { return n.DescribeQueue(f.ctx, "shop.dead", nil) }).Options
	o.MaxMessages = 0
	must(f, func(n *Node) (api.QueueInfo, error) { return n.ConfigureQueue(f.ctx, "shop.dead", o) })
	f.exported("shop", "g", len(want))
	var got []string
	for _, m := range f.stored("shop.dead") {
		got = append(got, string(m.Body))
	}
	slices.Sort(want)
	slices.Sort(got)
	require.Equal(t, want, got)
}

// TestExportsOverALostHost: the home's host, which leads both queues, stops without handing anything over while dead letters
// flow. The other one goes on, with one copy of each.
func TestExportsOverALostHost(t *testing.T) {
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	t.Parallel()
	d := openDev(t, t.TempDir())
	defer func() { _ = d.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	f := &adminFleet{t: t, d: d, ctx: ctx}
	want := f.waitingExports(20, 60)
	lost, rest := d.Nodes[0], d.Nodes[1]
	if f.info("shop", "g").HomeHost == rest.id {
		lost, rest = rest, lost
	}
	for _, name := range []string{"shop", "shop.dead"} {
		q, _ := rest.view().Queue("", name)
		if dsk, err := rest.desk(q.Shards[0]); err == nil && dsk.leads() {
			f.moveLeader(name)
		}
	}
	o := must(f, func(n *Node) (api.QueueInfo, error) { return n.DescribeQueue(f.ctx, "shop.dead", nil) }).Options
	o.MaxMessages = 0
	must(f, func(n *Node) (api.QueueInfo, error) { return n.ConfigureQueue(f.ctx, "shop.dead", o) })
	require.NoError(t, lost.stop())
	f.d = &Dev{Nodes: []*Node{rest, rest}}
	f.exported("shop", "g", len(want))
	var got []string
	for _, m := range f.stored("shop.dead") {
		got = append(got, string(m.Body))
	}
	slices.Sort(want)
	slices.Sort(got)
	require.Equal(t, want, got)
}
