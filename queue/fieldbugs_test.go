package queue_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// Bugs that other queues have had, named by their number in the project's list, at the state machine.

// said publishes messages of one producer with rising seqs.
func said(stamp queue.Stamp, id uint64, low queue.Seq, seqs ...queue.Seq) *queue.Enqueue {
	p := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: id}, ProducerEpoch: 1, Low: low}
	for _, s := range seqs {
		p.Messages = append(p.Messages, queue.Message{Seq: s, Body: fmt.Append(nil, id, "/", s)})
	}
	return &queue.Enqueue{Stamp: stamp, Publishes: []queue.Publish{p}}
}

// finishAll acks everything for a group and reclaims it.
func finishAll(t *testing.T, m *queuetest.Machine, g queue.GroupID, stamp queue.Stamp) {
	t.Helper()
	last := m.Meta().Last
	require.Equal(t, code.OK, m.Do(&queue.Ack{Stamp: stamp, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: last}}}).Code)
	m.Do(&queue.Retention{Stamp: stamp, ReclaimLine: last})
	require.Zero(t, m.Meta().Counters.Messages)
}

// B13: a dedup id holds through consumption, reclaim, purge and restart, is not prolonged by a repeat, and ends with its window.
func TestB13DedupOutlivesItsMessage(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	send := func(at queue.Stamp, body string) queue.MessageResult {
		return m.Do(&queue.Enqueue{Stamp: at, Publishes: []queue.Publish{{Messages: []queue.Message{{DedupID: []byte("x"), Body: []byte(body)}}}}}).Publishes[0].Messages[0]
	}
	first := send(t0, "one")
	require.False(t, first.Duplicate)
	finishAll(t, m, g, t0)
	again := queue.MessageResult{Code: code.OK, Address: first.Address, Duplicate: true}
	require.Equal(t, again, send(t0+1000, "another body"))
	require.NoError(t, m.Reload())
	require.Equal(t, again, send(t0+100_000, "one"))
	m.Do(&queue.Retention{Stamp: t0 + 100_000, PurgeTo: m.Meta().Last})
	require.Equal(t, again, send(t0+298_000, "one"))
	after := send(t0+302_000, "one")
	require.False(t, after.Duplicate, "a repeat does not extend the window")
	require.Greater(t, after.Address, first.Address)
	m.RequireSame()
}

// B17: a message that ages out while it is delayed, or failed, leaves no ghost, and the counters close.
func TestB17ExpiryLeavesNoGhost(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	e := publish(t0, "delayed", "failed", "leased", "stays")
	for i := range 3 {
		e.Publishes[0].Messages[i].ExpiresAt = t0 + 60_000
	}
	e.Publishes[0].Messages[0].VisibleAt = t0 + 50_000
	require.Equal(t, code.OK, m.Do(e).Code)
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{
		{Kind: queue.ExpireUpdate, Address: 2, Attempts: 1, NotBefore: t0 + 1000, Reason: "no"},
		{Kind: queue.ExpireLease, Address: 3, Lease: queue.LeaseName{Epoch: 1, Number: 1}, Deadline: t0 + 30_000, Consumer: "c"},
	}})
	m.Do(&queue.Retention{Stamp: t0 + 61_000, Reclaim: []queue.Address{1, 2, 3}})
	require.NoError(t, m.Check())
	list, _, err := m.Deliverables(g, 0, 10, true)
	require.NoError(t, err)
	require.Len(t, list, 1)
	i, _ := m.Group(g)
	require.EqualValues(t, 1, i.Counters.Unfinished)
	require.Zero(t, i.Counters.Leased)
	m.RequireSame()
}

// B19: what was acked, in whatever state it was before, does not come back after a restart, nor in a replay.
func TestB19FinishedStaysFinished(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	e := publish(t0, "plain", "failed", "delayed", "redriven")
	e.Publishes[0].Messages[2].VisibleAt = t0 + 10_000
	require.Equal(t, code.OK, m.Do(e).Code)
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{
		{Kind: queue.ExpireUpdate, Address: 2, Attempts: 2, Reason: "no"}, {Kind: queue.ExpireDead, Address: 4, Attempts: 5, Reason: "no"},
	}})
	dead, _, err := m.DeadLetters(g, 0, 10, false)
	require.NoError(t, err)
	require.Len(t, dead, 1)
	r := m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireRedrive, Address: 4, Change: dead[0].Change}}})
	require.True(t, r.Expires[0].Applied)
	r = m.Do(&queue.Ack{Stamp: t0 + 11_000, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 4}}})
	require.Equal(t, []queue.AckState{queue.AckDone, queue.AckDone, queue.AckDone, queue.AckDone}, r.Acks)
	for range 3 {
		require.NoError(t, m.Reload())
		list, _, err := m.Deliverables(g, 0, 10, true)
		require.NoError(t, err)
		require.Empty(t, list)
		i, _ := m.Group(g)
		require.Zero(t, i.Counters.Unfinished+i.Counters.Dead)
	}
	m.RequireSame()
}

// B24: the same seq again is the first address and nothing new, also after its message is gone and after a restart.
func TestB24SameSeqSameAddress(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	first := m.Do(said(t0, 7, 1, 1, 2, 3)).Publishes[0].Messages
	require.NoError(t, m.Reload())
	finishAll(t, m, g, t0)
	again := m.Do(said(t0+1, 7, 1, 1, 2, 3, 4)).Publishes[0].Messages
	for i, r := range again[:3] {
		require.Equal(t, queue.MessageResult{Code: code.OK, Address: first[i].Address, Duplicate: true}, r)
	}
	require.Equal(t, queue.MessageResult{Code: code.OK, Address: 4}, again[3])
	require.EqualValues(t, 4, m.Meta().Last)
	m.RequireSame()
}

// B26: a producer whose messages are all gone goes on after any pause: within its day its old seqs are known, and after that it
// is forgotten and begins anywhere. A new epoch fences the old process.
func TestB26QuietProducer(t *testing.T) {
	const day = 24 * 3600 * 1000
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	m.Do(said(t0, 7, 1, 1, 2, 3, 4, 5))
	finishAll(t, m, g, t0)
	require.NoError(t, m.Reload())
	hourly := func(from, to queue.Stamp) { // the shard's clock moves by an hour a command at most
		for at := from; at <= to; at += 3_000_000 {
			m.Do(&queue.Retention{Stamp: at})
		}
	}
	hourly(t0, t0+day-10_000)
	r := m.Do(said(t0+day-10_000, 7, 4, 5, 6)).Publishes[0].Messages
	require.True(t, r[0].Duplicate)
	require.Equal(t, queue.MessageResult{Code: code.OK, Address: 6}, r[1])
	hourly(t0+day, t0+2*day+3_600_000)
	r = m.Do(said(t0+2*day+3_600_000, 7, 7, 7)).Publishes[0].Messages
	require.Equal(t, queue.MessageResult{Code: code.OK, Address: 7}, r[0])
	young := said(t0+2*day+3_600_000, 7, 1, 1)
	young.Publishes[0].ProducerEpoch = 2
	require.Equal(t, code.OK, m.Do(young).Publishes[0].Messages[0].Code)
	require.Equal(t, code.ProducerEpochStale, m.Do(said(t0+2*day+3_600_000, 7, 8, 8)).Publishes[0].Code)
	m.RequireSame()
}

// B38: acks above one message that nobody finishes are all remembered, over restarts, and cost ranges, not messages.
func TestB38HolesAboveAnOldMessage(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	const n = 4096
	bodies := make([]string, n)
	require.Equal(t, code.OK, m.Do(publish(t0, bodies...)).Code)
	for from := queue.Address(2); from <= n; from += 512 {
		m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: from, Last: min(from+511, n)}}})
	}
	require.NoError(t, m.Reload())
	list, _, err := m.Deliverables(g, 0, 10, true)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.EqualValues(t, 1, list[0].Address)
	i, _ := m.Group(g)
	require.EqualValues(t, n-1, i.Counters.Acked)
	m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 1}}})
	i, _ = m.Group(g)
	require.Equal(t, queue.Address(n), i.Floor)
	require.Equal(t, 19, i.WatermarkBytes, "nothing is left of the holes")
	m.RequireSame()
}

// B39: a full queue refuses what comes in, and everything that gives out goes on: a failure, an ack, a dead letter. What is
// finished makes room at once.
func TestB39FullQueueDrains(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	o := queue.QueueOptions{Version: m.Meta().Options.Version, MaxMessages: 4}
	o.EnsureDefaults()
	require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: t0, Options: &o}).Code)
	require.Equal(t, code.OK, m.Do(publish(t0, "a", "b", "c", "d")).Publishes[0].Messages[3].Code)
	require.Equal(t, code.QueueFull, m.Do(publish(t0, "e")).Publishes[0].Messages[0].Code)
	r := m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{
		{Kind: queue.ExpireUpdate, Address: 1, Attempts: 1, Reason: "no"}, {Kind: queue.ExpireDead, Address: 2, Attempts: 5, Reason: "no"},
	}})
	require.True(t, r.Expires[0].Applied && r.Expires[1].Applied)
	r = m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 4}}})
	require.Equal(t, code.OK, r.Code)
	m.Do(&queue.Retention{Stamp: t0, ReclaimLine: 4})
	require.Equal(t, code.OK, m.Do(publish(t0, "e")).Publishes[0].Messages[0].Code)
	m.RequireSame()
}
