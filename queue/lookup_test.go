package queue_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
)

// A producer's seq is found by its address, and below low nobody can tell.
func TestLookupPublish(t *testing.T) {
	m := queuetest.New(t)
	p := queue.Producer{Kind: queue.ProducerClient, ID: 9}
	l, err := m.LookupPublish(p, 1)
	require.NoError(t, err)
	require.Equal(t, queue.PublishLookup{}, l)
	send := func(low queue.Seq, seqs ...queue.Seq) {
		c := queue.Publish{Producer: p, ProducerEpoch: 3, Low: low}
		for _, s := range seqs {
			c.Messages = append(c.Messages, queue.Message{Seq: s})
		}
		m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{c}})
	}
	m.Do(publish(t0, "another's"))
	send(1, 1, 2, 5)
	send(3, 6)
	l, err = m.LookupPublish(p, 5)
	require.NoError(t, err)
	require.Equal(t, queue.PublishLookup{Known: true, Epoch: 3, Low: 3, Last: 6, Address: 4}, l)
	for _, s := range []queue.Seq{2, 4, 7} { // forgotten, left out, not yet
		l, err = m.LookupPublish(p, s)
		require.NoError(t, err)
		require.Zero(t, l.Address)
	}
}

// Browsing shows what some group still wants, wherever it lies, in address order and in pages; it changes nothing.
func TestBrowse(t *testing.T) {
	m := queuetest.New(t)
	read := func(from queue.Address, limit, bytes int) (got []queue.Address, next queue.Address) {
		t.Helper()
		list, next, err := m.Browse(from, limit, bytes)
		require.NoError(t, err)
		for _, x := range list {
			got = append(got, x.Address)
		}
		return got, next
	}
	m.Do(publish(t0, "a", "b", "c"))
	got, next := read(0, 10, 1<<20)
	require.Equal(t, []queue.Address{1, 2, 3}, got, "without groups everything is shown")
	require.Zero(t, next)
	g := create(t, m, "g", queue.Start{})
	m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("late"), VisibleAt: t0 + 1000}}}}})
	m.Do(publish(t0, "e"))
	m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 2, Last: 2}}})
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: 3, Attempts: 1}}})
	got, next = read(0, 10, 1<<20)
	require.Equal(t, []queue.Address{1, 3, 4, 5}, got, "dead and delayed ones are there, the finished one is not")
	require.Zero(t, next)
	got, next = read(2, 2, 1<<20)
	require.Equal(t, []queue.Address{3, 4}, got)
	require.Equal(t, queue.Address(5), next)
	got, next = read(0, 10, 1)
	require.Equal(t, []queue.Address{1}, got)
	require.Equal(t, queue.Address(2), next)
	m.RequireSame()
}

// The oldest message of a group is the one that was deliverable first.
func TestOldest(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	oldest := func(now queue.Stamp) (queue.Address, queue.Stamp) {
		t.Helper()
		a, since, found, err := m.Oldest(g, now)
		require.NoError(t, err)
		require.Equal(t, found, a != 0)
		return a, since
	}
	a, _ := oldest(t0)
	require.Zero(t, a)
	m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{{Messages: []queue.Message{{VisibleAt: t0 + 1000}}}}})
	a, _ = oldest(t0 + 999)
	require.Zero(t, a, "not due")
	m.Do(publish(t0+2000, "b", "c"))
	h, ok, err := m.Head(1)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, queue.MessageHead{Address: 1, Stamp: t0, VisibleAt: t0 + 1000, Key: []byte{}}, h)
	_, ok, err = m.Head(9)
	require.NoError(t, err)
	require.False(t, ok)
	a, since := oldest(t0 + 2000)
	require.Equal(t, queue.Address(1), a)
	require.Equal(t, t0+1000, since)
	m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 2}}})
	a, since = oldest(t0 + 3000)
	require.Equal(t, queue.Address(3), a)
	require.Equal(t, t0+2000, since)
	m.Do(&queue.Retention{Stamp: t0 + 3000, Park: []queue.Address{3}})
	a, _ = oldest(t0 + 3000)
	require.Equal(t, queue.Address(3), a, "a parked straggler counts")
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: 3, Attempts: 1}}})
	a, _ = oldest(t0 + 3000)
	require.Zero(t, a, "a dead letter does not")
}

// One key's messages are listed in address order.
func TestOfKey(t *testing.T) {
	m := queuetest.New(t)
	o := m.Meta().Options
	o.EnsureDefaults()
	o.Ordering = queue.OrderKey
	m.Do(&queue.Retention{Stamp: t0, Options: &o})
	g := create(t, m, "g", queue.Start{})
	for _, k := range []string{"x", "y", "x", "", "x"} {
		m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{{Messages: []queue.Message{{Key: []byte(k)}}}}})
	}
	list, next, err := m.OfKey(g, []byte("x"), 2, 1)
	require.NoError(t, err)
	require.Equal(t, queue.Address(3), list[0].Address)
	require.NotZero(t, next)
	list, next, err = m.OfKey(g, []byte("x"), next, 5)
	require.NoError(t, err)
	require.Equal(t, queue.Address(5), list[0].Address)
	require.Zero(t, next)
}
