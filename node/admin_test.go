package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// adminFleet is one development fleet for all tests of the administrative calls.
type adminFleet struct {
	t   *testing.T
	d   *Dev
	ctx context.Context
}

// try calls f at one full host and, if that says elsewhere, at the other; it repeats what a starting fleet refuses.
func try[T any](f *adminFleet, call func(*Node) (T, error)) (T, error) {
	f.t.Helper()
	for {
		var out T
		var err error
		for _, n := range f.d.Nodes[:2] {
			var where *api.ElsewhereError
			out, err = call(n)
			var c *code.Error
			if !errors.As(err, &where) && !(errors.As(err, &c) && c.Code == code.NotOwner) {
				break
			}
		}
		var c *code.Error
		again := errors.As(err, &c) && (c.Code == code.NoLeader || c.Code == code.StaleLeader || c.Code == code.NotOwner || c.Code == code.NotReplica || c.Code == code.ReadOnlyDegraded)
		if !again || f.ctx.Err() != nil {
			return out, err
		}
		select {
		case <-f.ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func must[T any](f *adminFleet, call func(*Node) (T, error)) T {
	f.t.Helper()
	out, err := try(f, call)
	require.NoError(f.t, err)
	return out
}

func (f *adminFleet) refused(want code.Code, err error) {
	f.t.Helper()
	var c *code.Error
	require.ErrorAs(f.t, err, &c)
	require.Equal(f.t, want, c.Code, err.Error())
	require.Equal(f.t, code.EffectNone, c.Effect)
}

func (f *adminFleet) create(name string, o queue.QueueOptions) {
	f.t.Helper()
	must(f, func(n *Node) (bool, error) {
		_, ok, err := n.CreateQueue(f.ctx, api.CreateQueue{Name: name, Options: o})
		return ok, err
	})
}

func (f *adminFleet) group(queueName, name string, cfg queue.GroupConfig) api.GroupInfo {
	f.t.Helper()
	return must(f, func(n *Node) (api.GroupInfo, error) {
		return n.CreateGroup(f.ctx, api.CreateGroup{Queue: queueName, Name: name, Config: cfg})
	})
}

func (f *adminFleet) info(queueName, name string) api.GroupInfo {
	f.t.Helper()
	for _, g := range must(f, func(n *Node) ([]api.GroupInfo, error) { return n.ListGroups(f.ctx, queueName, nil) }) {
		if g.Name == name {
			return g
		}
	}
	f.t.Fatalf("no group %s", name)
	return api.GroupInfo{}
}

func (f *adminFleet) send(queueName string, p queue.Publish, delays ...time.Duration) []queue.Address {
	f.t.Helper()
	reply, err := publishAnywhere(f.ctx, f.d, api.Publish{Queue: queueName, Publish: p, Delays: delays})
	require.NoError(f.t, err)
	var out []queue.Address
	for _, m := range reply.Result.Messages {
		require.Equal(f.t, code.OK, m.Code)
		out = append(out, m.Address)
	}
	return out
}

func (f *adminFleet) bodies(queueName string, n int) []queue.Address {
	f.t.Helper()
	var p queue.Publish
	for i := range n {
		p.Messages = append(p.Messages, queue.Message{Body: fmt.Append(nil, "body ", i)})
	}
	return f.send(queueName, p)
}

func (f *adminFleet) receive(queueName, group, consumer string, most int) []api.Delivery {
	f.t.Helper()
	return must(f, func(n *Node) ([]api.Delivery, error) {
		ds, _, err := n.Receive(f.ctx, api.Receive{Queue: queueName, Group: group, Consumer: consumer, Max: most, MaxBytes: 1 << 20, Wait: 5 * time.Second})
		return ds, err
	})
}

func (f *adminFleet) settle(kind api.SettleKind, queueName, group, reason string, ds ...api.Delivery) {
	f.t.Helper()
	r := api.Settle{Kind: kind, Queue: queueName, Group: group, Reason: reason}
	for _, d := range ds {
		r.Receipts = append(r.Receipts, d.Receipt)
	}
	for _, res := range must(f, func(n *Node) ([]api.SettleResult, error) { return n.Settle(f.ctx, r) }) {
		require.NoError(f.t, res.Err)
	}
}

func (f *adminFleet) explain(queueName, group string, a queue.Address, key string) api.Explanation {
	f.t.Helper()
	return must(f, func(n *Node) (api.Explanation, error) {
		return n.Explain(f.ctx, api.Explain{Queue: queueName, Group: group, Address: a, Key: []byte(key)})
	})
}

// onOneFleet runs tests one after the other on one fleet.
func onOneFleet(t *testing.T, each time.Duration, tests map[string]func(*adminFleet)) {
	t.Helper()
	d, _ := devFleet(t, time.Duration(len(tests))*each)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), each)
			defer cancel()
			test(&adminFleet{t: t, d: d, ctx: ctx})
		})
	}
}

func TestAdmin(t *testing.T) {
	onOneFleet(t, time.Minute, map[string]func(*adminFleet){
		"purge": testPurge, "options": testOptions, "group": testGroupPolicy, "delayed": testDelayed, "browse": testBrowse,
		"lookup": testLookup, "consumers": testConsumers, "explain": testExplain, "dead": testDead, "claim": testClaim, "alerts": testAlerts,
	})
}

func testPurge(f *adminFleet) {
	f.create("purge", queue.QueueOptions{})
	f.group("purge", "g", queue.GroupConfig{})
	f.bodies("purge", 10)
	held := f.receive("purge", "g", "c", 2)
	f.send("purge", queue.Publish{Messages: []queue.Message{{Body: []byte("late")}}}, time.Hour)
	purge := func(r api.PurgeQueue) (api.PurgeReply, error) {
		r.Queue = "purge"
		return try(f, func(n *Node) (api.PurgeReply, error) { return n.PurgeQueue(f.ctx, r) })
	}
	got, err := purge(api.PurgeQueue{To: 4, OperationID: 70})
	require.NoError(f.t, err)
	require.Equal(f.t, api.PurgeReply{Purged: 4, To: 4}, got)
	got, err = purge(api.PurgeQueue{To: 4, OperationID: 70})
	require.NoError(f.t, err)
	require.Zero(f.t, got.Purged, "the same operation again removes nothing")
	_, err = purge(api.PurgeQueue{To: 9, OperationID: 70})
	f.refused(code.MutationFenced, err)
	got, err = purge(api.PurgeQueue{All: true, OperationID: 71})
	require.NoError(f.t, err)
	require.Equal(f.t, api.PurgeReply{Purged: 7, To: 11}, got, "the delayed one too")
	f.bodies("purge", 1)
	got, err = purge(api.PurgeQueue{All: true, OperationID: 71})
	require.NoError(f.t, err)
	require.True(f.t, got.Repeated)
	g := f.info("purge", "g")
	require.EqualValues(f.t, 11, g.Counters.Purged)
	require.EqualValues(f.t, 1, g.Counters.Unfinished, "what came after the purge is there")
	require.EqualValues(f.t, 12, g.Oldest)
	res := must(f, func(n *Node) ([]api.SettleResult, error) {
		return n.Settle(f.ctx, api.Settle{Kind: api.SettleAck, Queue: "purge", Group: "g", Receipts: []string{held[0].Receipt}})
	})
	require.Len(f.t, res, 1, "an ack of a purged message is answered")
	_, err = try(f, func(n *Node) (api.PurgeReply, error) {
		return n.PurgeQueue(f.ctx, api.PurgeQueue{Queue: "none", All: true})
	})
	f.refused(code.UnknownQueue, err)
}

func testOptions(f *adminFleet) {
	f.create("options", queue.QueueOptions{})
	f.group("options", "g", queue.GroupConfig{})
	configure := func(o queue.QueueOptions) (api.QueueInfo, error) {
		return try(f, func(n *Node) (api.QueueInfo, error) { return n.ConfigureQueue(f.ctx, "options", o) })
	}
	got, err := configure(queue.QueueOptions{Version: 1, MaxMessages: 2})
	require.NoError(f.t, err)
	require.EqualValues(f.t, 2, got.Options.Version)
	require.EqualValues(f.t, 2, got.Options.MaxMessages)
	_, err = configure(queue.QueueOptions{Version: 1, MaxMessages: 9})
	f.refused(code.MutationFenced, err)
	_, err = configure(queue.QueueOptions{Version: 2, Ordering: queue.OrderKey})
	f.refused(code.InvalidArgument, err)
	_, err = configure(queue.QueueOptions{Version: 2, RetainMs: 5})
	f.refused(code.InvalidArgument, err)
	f.bodies("options", 2)
	reply, err := publishAnywhere(f.ctx, f.d, api.Publish{Queue: "options", Publish: queue.Publish{Messages: []queue.Message{{Body: []byte("x")}}}})
	if err == nil {
		require.Equal(f.t, code.QueueFull, reply.Result.Messages[0].Code)
	}

	pause := func(paused bool) {
		info := must(f, func(n *Node) (api.QueueInfo, error) { return n.PauseQueue(f.ctx, "options", paused) })
		require.Equal(f.t, paused, info.Options.Paused)
	}
	pause(true)
	pause(true)
	require.Equal(f.t, "paused-queue", f.explain("options", "g", 1, "").Verdict)
	_, err = try(f, func(n *Node) (int, error) {
		ds, _, err := n.Receive(f.ctx, api.Receive{Queue: "options", Group: "g", Max: 1, MaxBytes: 1, Wait: 3 * time.Second})
		return len(ds), err
	})
	f.refused(code.GroupPaused, err)
	pause(false)
	require.Len(f.t, f.receive("options", "g", "", 2), 2)
}

func testGroupPolicy(f *adminFleet) {
	f.create("policy", queue.QueueOptions{})
	g := f.group("policy", "g", queue.GroupConfig{})
	configure := func(cfg queue.GroupConfig, version uint64) (api.GroupInfo, error) {
		return try(f, func(n *Node) (api.GroupInfo, error) { return n.ConfigureGroup(f.ctx, "policy", nil, "g", cfg, version) })
	}
	got, err := configure(queue.GroupConfig{MaxAttempts: 2, BackoffBaseMs: 10, BackoffCapMs: 20}, g.ConfigVersion)
	require.NoError(f.t, err)
	require.Equal(f.t, g.ConfigVersion+1, got.ConfigVersion)
	require.Equal(f.t, g.Epoch, got.Epoch, "receipts stay good")
	_, err = configure(queue.GroupConfig{MaxAttempts: 3}, g.ConfigVersion)
	f.refused(code.MutationFenced, err)
	_, err = configure(queue.GroupConfig{MaxAttempts: 100000}, got.ConfigVersion)
	f.refused(code.InvalidArgument, err)
	f.bodies("policy", 1)
	first := f.receive("policy", "g", "", 1)
	f.settle(api.SettleNack, "policy", "g", "broken", first...)
	again := f.receive("policy", "g", "", 1)
	require.EqualValues(f.t, 2, again[0].Attempt)
	require.Equal(f.t, "broken", again[0].Reason)
	require.Equal(f.t, first[0].FirstDelivered, again[0].FirstDelivered)
	f.settle(api.SettleNack, "policy", "g", "broken", again...) // the second failure is the last one
	require.EqualValues(f.t, 1, f.info("policy", "g").Counters.Dead)

	pause := func(paused bool) api.GroupInfo {
		return must(f, func(n *Node) (api.GroupInfo, error) { return n.PauseGroup(f.ctx, "policy", nil, "g", paused) })
	}
	require.True(f.t, pause(true).Config.Paused)
	version := pause(true).ConfigVersion
	require.Equal(f.t, version, pause(true).ConfigVersion, "pausing again changes nothing")
	require.EqualValues(f.t, 2, pause(true).Config.MaxAttempts)
	f.bodies("policy", 1)
	_, err = try(f, func(n *Node) (int, error) {
		ds, _, err := n.Receive(f.ctx, api.Receive{Queue: "policy", Group: "g", Max: 1, MaxBytes: 1, Wait: 3 * time.Second})
		return len(ds), err
	})
	f.refused(code.GroupPaused, err)
	require.False(f.t, pause(false).Config.Paused)
	require.Len(f.t, f.receive("policy", "g", "", 1), 1)
}

func testDelayed(f *adminFleet) {
	f.create("delayed", queue.QueueOptions{MaxDelayMs: 2 * queue.Hour})
	f.group("delayed", "g", queue.GroupConfig{})
	f.send("delayed", queue.Publish{Messages: []queue.Message{{Body: []byte("b")}, {Body: []byte("a")}, {Body: []byte("c")}}}, time.Hour, time.Minute, 90*time.Minute)
	list := func(after queue.DelayedKey, limit int) api.DelayedPage {
		return must(f, func(n *Node) (api.DelayedPage, error) {
			return n.ListDelayed(f.ctx, api.ListDelayed{Queue: "delayed", After: after, Limit: limit, Bodies: true})
		})
	}
	order := func(p api.DelayedPage) (out string) {
		for _, m := range p.Messages {
			out += string(m.Message.Body)
		}
		return out
	}
	page := list(queue.DelayedKey{}, 2)
	require.Equal(f.t, "ab", order(page))
	require.True(f.t, page.More)
	require.EqualValues(f.t, 3, page.Total)
	require.Equal(f.t, "c", order(list(page.Next, 2)))
	change := func(c api.ChangeDelayed) (queue.Stamp, error) {
		c.Queue = "delayed"
		return try(f, func(n *Node) (queue.Stamp, error) { return n.ChangeDelayed(f.ctx, c) })
	}
	seen := page.Messages[0].VisibleAt
	_, err := change(api.ChangeDelayed{Address: 2, Expected: seen + 1, Delay: time.Hour})
	f.refused(code.Skipped, err)
	_, err = change(api.ChangeDelayed{Address: 2, Delay: 3 * time.Hour})
	f.refused(code.DelayTooLong, err)
	due, err := change(api.ChangeDelayed{Address: 2, Expected: seen, Delay: 70 * time.Minute})
	require.NoError(f.t, err)
	require.Greater(f.t, due, seen)
	require.Equal(f.t, "bac", order(list(queue.DelayedKey{}, 10)))
	_, err = change(api.ChangeDelayed{Address: 1, Cancel: true})
	require.NoError(f.t, err)
	_, err = change(api.ChangeDelayed{Address: 1, Cancel: true})
	f.refused(code.UnknownMessage, err)
	require.Equal(f.t, "delayed", f.explain("delayed", "g", 3, "").Verdict)
	require.Equal(f.t, "finished", f.explain("delayed", "g", 1, "").Verdict)
	_, err = change(api.ChangeDelayed{Address: 3, Delay: time.Millisecond})
	require.NoError(f.t, err)
	got := f.receive("delayed", "g", "", 1)
	require.Len(f.t, got, 1)
	require.Equal(f.t, "c", string(got[0].Message.Body))
	require.EqualValues(f.t, 1, f.info("delayed", "g").Counters.Cancelled)
}

func testBrowse(f *adminFleet) {
	f.create("browse", queue.QueueOptions{})
	f.group("browse", "g", queue.GroupConfig{})
	f.bodies("browse", 5)
	f.settle(api.SettleAck, "browse", "g", "", f.receive("browse", "g", "", 1)...)
	for _, n := range f.d.Nodes[:2] { // any replica
		list, next, err := n.Browse(f.ctx, api.Browse{Queue: "browse", Limit: 3, MaxBytes: 1 << 20})
		require.NoError(f.t, err)
		require.Equal(f.t, queue.Address(2), list[0].Address, "the acked one is not shown")
		require.Equal(f.t, "body 1", string(list[0].Body))
		require.Equal(f.t, queue.Address(5), next)
	}
	require.EqualValues(f.t, 4, f.info("browse", "g").Counters.Unfinished, "browsing changes nothing")
}

func testLookup(f *adminFleet) {
	f.create("lookup", queue.QueueOptions{})
	f.bodies("lookup", 1)
	p := queue.Producer{Kind: queue.ProducerClient, ID: 88}
	f.send("lookup", queue.Publish{Producer: p, Low: 1, Messages: []queue.Message{{Seq: 1}, {Seq: 2}}})
	for _, n := range f.d.Nodes[:2] {
		found, exists, err := n.LookupPublish(f.ctx, api.LookupPublish{Queue: "lookup", Producer: p, Seq: 2})
		require.NoError(f.t, err)
		require.True(f.t, exists)
		require.Equal(f.t, queue.PublishLookup{Known: true, Low: 1, Last: 2, Address: 3}, found)
		found, _, err = n.LookupPublish(f.ctx, api.LookupPublish{Queue: "lookup", Producer: queue.Producer{Kind: queue.ProducerClient, ID: 89}, Seq: 2})
		require.NoError(f.t, err)
		require.False(f.t, found.Known)
	}
}

func testConsumers(f *adminFleet) {
	f.create("consumers", queue.QueueOptions{})
	f.group("consumers", "g", queue.GroupConfig{})
	f.bodies("consumers", 6)
	f.receive("consumers", "g", "one", 2)
	f.receive("consumers", "g", "two", 1)
	f.receive("consumers", "g", "", 1)
	c := must(f, func(n *Node) (api.Consumers, error) { return n.Consumers(f.ctx, "consumers", nil, "g", true) })
	require.Equal(f.t, 4, c.InFlight)
	held := map[string][]queue.Address{}
	for _, x := range c.Consumers {
		require.Len(f.t, x.Held, x.InFlight)
		for _, h := range x.Held {
			held[x.Name] = append(held[x.Name], h.Address)
			require.Positive(f.t, h.Left)
		}
	}
	require.Equal(f.t, map[string][]queue.Address{"one": {1, 2}, "two": {3}, "": {4}}, held)
	version := f.info("consumers", "g").ConfigVersion
	must(f, func(n *Node) (api.GroupInfo, error) {
		return n.ConfigureGroup(f.ctx, "consumers", nil, "g", queue.GroupConfig{MaxInFlight: 4}, version)
	})
	require.Equal(f.t, "in-flight-limit", f.explain("consumers", "g", 5, "").Verdict)
	require.Equal(f.t, "in-flight-limit", f.explain("consumers", "g", 0, "").Verdict)
}

func testExplain(f *adminFleet) {
	f.create("explain", queue.QueueOptions{Ordering: queue.OrderKey})
	f.group("explain", "g", queue.GroupConfig{})
	var p queue.Publish
	for _, k := range []string{"a", "a", "b", "b", "c", "d"} {
		p.Messages = append(p.Messages, queue.Message{Key: []byte(k), Body: []byte(k)})
	}
	f.send("explain", p)
	verdict := func(a queue.Address) string {
		f.t.Helper()
		e := f.explain("explain", "g", a, "")
		require.NotEmpty(f.t, e.Text)
		return e.Verdict
	}
	require.Equal(f.t, "ready", verdict(1), "nobody has asked yet")
	require.Equal(f.t, "blocked", verdict(2))
	ds := f.receive("explain", "g", "slow", 4)
	require.Len(f.t, ds, 4, "one of each key")
	f.settle(api.SettleAck, "explain", "g", "", ds[3])
	f.settle(api.SettleNack, "explain", "g", "broken", ds[1])
	f.settle(api.SettleReject, "explain", "g", "bad", ds[2])
	e := f.explain("explain", "g", 1, "")
	require.Equal(f.t, "leased", e.Verdict)
	require.Equal(f.t, "slow", e.Consumer)
	e = f.explain("explain", "g", 2, "")
	require.Equal(f.t, "blocked", e.Verdict)
	require.EqualValues(f.t, 1, e.BlockedBy)
	require.Equal(f.t, "dead", verdict(5))
	require.Equal(f.t, "finished", verdict(6))
	require.Equal(f.t, "unknown", verdict(7))
	e = f.explain("explain", "g", 0, "b")
	require.EqualValues(f.t, 3, e.Address)
	require.Equal(f.t, 1, e.Behind)
	require.Contains(f.t, []string{"retrying", "ready"}, e.Verdict)
	require.EqualValues(f.t, 1, e.Attempts)
	require.NotEmpty(f.t, f.explain("explain", "g", 0, "").Verdict)
	must(f, func(n *Node) (api.GroupInfo, error) { return n.PauseGroup(f.ctx, "explain", nil, "g", true) })
	require.Equal(f.t, "paused-group", f.explain("explain", "g", 0, "").Verdict)
	late := must(f, func(n *Node) (api.GroupInfo, error) {
		return n.CreateGroup(f.ctx, api.CreateGroup{Queue: "explain", Name: "late", Start: queue.Start{Kind: queue.StartLatest}})
	})
	require.EqualValues(f.t, 6, late.Start)
	require.Equal(f.t, "not-owned", f.explain("explain", "late", 1, "").Verdict)
	require.Equal(f.t, "idle", f.explain("explain", "late", 0, "").Verdict)
}

func testDead(f *adminFleet) {
	f.create("dead", queue.QueueOptions{})
	f.group("dead", "g", queue.GroupConfig{})
	f.bodies("dead", 20)
	ds := f.receive("dead", "g", "", 20)
	require.Len(f.t, ds, 20)
	f.settle(api.SettleReject, "dead", "g", "timeout: upstream", ds[:15]...)
	f.settle(api.SettleReject, "dead", "g", "invalid", ds[15:]...)
	list := func(r api.Dead) ([]queue.DeadLetter, queue.Address) {
		r.Queue, r.Group = "dead", "g"
		type page struct {
			list []queue.DeadLetter
			next queue.Address
		}
		p := must(f, func(n *Node) (page, error) {
			l, next, err := n.ListDead(f.ctx, r)
			return page{l, next}, err
		})
		return p.list, p.next
	}
	got, next := list(api.Dead{Limit: 10, ReasonPrefix: "timeout"})
	require.Len(f.t, got, 10)
	require.Equal(f.t, "body 0", string(got[0].Message.Body))
	require.Equal(f.t, queue.Address(11), next)
	got, next = list(api.Dead{Limit: 10, ReasonPrefix: "timeout", From: next})
	require.Len(f.t, got, 5)
	require.Zero(f.t, next)
	got, _ = list(api.Dead{Limit: 10, OlderThan: time.Hour})
	require.Empty(f.t, got)
	redrive := func(r api.Dead) api.DeadReply {
		r.Queue, r.Group = "dead", "g"
		return must(f, func(n *Node) (api.DeadReply, error) { return n.RedriveDead(f.ctx, r) })
	}
	require.Equal(f.t, api.DeadReply{Matched: 15}, redrive(api.Dead{ReasonPrefix: "timeout", DryRun: true}))
	require.Equal(f.t, api.DeadReply{Matched: 1}, redrive(api.Dead{Addresses: []queue.Address{20, 99}, DryRun: true}))
	require.EqualValues(f.t, 20, f.info("dead", "g").Counters.Dead)
	first := redrive(api.Dead{ReasonPrefix: "timeout", Limit: 4})
	require.Equal(f.t, api.DeadReply{Done: 4, Next: 5}, first)
	begun := time.Now()
	require.Equal(f.t, api.DeadReply{Done: 11}, redrive(api.Dead{ReasonPrefix: "timeout", From: first.Next, Rate: 20}))
	require.GreaterOrEqual(f.t, time.Since(begun), 450*time.Millisecond, "eleven at twenty a second, in steps of two")
	ctx, cancel := context.WithTimeout(f.ctx, endMargin+300*time.Millisecond)
	defer cancel()
	slow := must(f, func(n *Node) (api.DeadReply, error) {
		return n.RedriveDead(ctx, api.Dead{Queue: "dead", Group: "g", Rate: 5})
	})
	require.Less(f.t, slow.Done, 5)
	require.NotZero(f.t, slow.Next, "the call ends before its deadline, and says where to go on")
	purged := must(f, func(n *Node) (api.DeadReply, error) {
		return n.PurgeDead(f.ctx, api.Dead{Queue: "dead", Group: "g", From: slow.Next})
	})
	require.Equal(f.t, 5-slow.Done, purged.Done)
	require.EqualValues(f.t, 0, f.info("dead", "g").Counters.Dead)
}
