package queue_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
)

// settle proposes chores until there are none, and fails if they do not end: an idle shard writes nothing.
func settle(t *testing.T, m *queuetest.Machine, now queue.Stamp) {
	t.Helper()
	from := queue.Address(0)
	for range 200 {
		c, err := m.Chores(now, from)
		require.NoError(t, err)
		if c.Empty() && c.Next == 0 {
			return
		}
		if from = c.Next; !c.Empty() {
			m.Do(c.Retention(now))
		}
	}
	t.Fatal("chores do not end")
}

// TestChoresFreeAStalledLine: one message that nobody finishes must not hold the space of 70,000 that are finished.
func TestChoresFreeAStalledLine(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	const n = 70_000
	for range n / 10_000 {
		p := queue.Publish{Messages: make([]queue.Message, 10_000)}
		m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{p}})
	}
	ack := func(first, last queue.Address) {
		for a := first; a <= last; a += 1024 {
			m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: a, Last: min(last, a+1023)}}})
		}
	}
	settle(t, m, t0)
	require.Zero(t, m.Meta().Counters.Parked, "a backlog that nobody has read is not stalled")
	ack(2, 60_000)
	settle(t, m, t0)
	require.Zero(t, m.Meta().Line)
	ack(60_001, n)
	settle(t, m, t0)
	require.EqualValues(t, n, m.Meta().Line)
	require.EqualValues(t, 1, m.Meta().Counters.Messages)
	ack(1, 1)
	require.Zero(t, m.Meta().Counters.Messages)
	m.RequireSame()
}

// TestChoresNoticeExpiryAfterALookWithoutAny: the hint that nothing expires ends with the first message that does.
func TestChoresNoticeExpiryAfterALookWithoutAny(t *testing.T) {
	m := queuetest.New(t)
	create(t, m, "g", queue.Start{})
	m.Do(publish(t0, "stays"))
	settle(t, m, t0)
	c := publish(t0, "goes")
	c.Publishes[0].Messages[0].ExpiresAt = t0 + 10
	m.Do(c)
	settle(t, m, t0+20)
	require.EqualValues(t, 1, m.Meta().Counters.Expired)
	require.EqualValues(t, 1, m.Meta().Counters.Messages)
	m.RequireSame()
}

// TestChoresExpireWhatIsLeasedNoMore: a recorded lease keeps an expired message until its deadline, and no longer.
func TestChoresExpireWhatIsLeasedNoMore(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	c := publish(t0, "a")
	c.Publishes[0].Messages[0].ExpiresAt = t0 + 10
	m.Do(c)
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{{
		Kind: queue.ExpireLease, Address: 1, Lease: queue.LeaseName{Epoch: 1, Number: 1}, Deadline: t0 + 100,
	}}})
	settle(t, m, t0+99)
	require.EqualValues(t, 1, m.Meta().Counters.Messages)
	settle(t, m, t0+100)
	require.Zero(t, m.Meta().Counters.Messages)
	m.RequireSame()
}

// TestChoresTakeWhatADeletedGroupLeft: parked messages that only a deleted group wanted go.
func TestChoresTakeWhatADeletedGroupLeft(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	create(t, m, "other", queue.Start{Kind: queue.StartLatest})
	m.Do(publish(t0, "a"))
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: 1, Attempts: 5}}})
	o, _ := m.GroupByName("other")
	m.Do(&queue.Ack{Stamp: t0, Group: o.ID, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 1}}})
	m.Do(&queue.Group{Stamp: t0, Op: queue.GroupDelete, ID: g, ExpectedEpoch: 1})
	settle(t, m, t0)
	require.Zero(t, m.Meta().Counters.Messages)
	m.RequireSame()
}
