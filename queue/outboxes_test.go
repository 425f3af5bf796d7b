package queue_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// TestOutboxesAreForgottenByNameOnly: no time and no number of producers makes a shard forget an outbox, whose repeats must
// find their first address; a command that names it does.
func TestOutboxesAreForgottenByNameOnly(t *testing.T) {
	m := queuetest.New(t)
	from := func(shard, group uint64) *queue.Enqueue {
		e := publish(t0, "copy")
		e.Publishes[0].Producer, e.Publishes[0].Low = queue.Producer{Kind: queue.ProducerOutbox, ID: shard, Sub: group}, 1
		e.Publishes[0].Messages[0].Seq = 1
		return e
	}
	for _, x := range [][2]uint64{{7, 1}, {7, 2}, {9, 1}} {
		require.Equal(t, code.OK, m.Do(from(x[0], x[1])).Publishes[0].Messages[0].Code)
	}
	for now := t0; now < t0+3*queue.Day; now += queue.Hour {
		m.Do(&queue.Retention{Stamp: now})
	}
	require.True(t, m.Do(from(7, 1)).Publishes[0].Messages[0].Duplicate)
	all, err := m.Outboxes(queue.Producer{}, 10)
	require.NoError(t, err)
	require.Equal(t, []queue.Producer{{Kind: queue.ProducerOutbox, ID: 7, Sub: 1}, {Kind: queue.ProducerOutbox, ID: 7, Sub: 2}, {Kind: queue.ProducerOutbox, ID: 9, Sub: 1}}, all)
	rest, err := m.Outboxes(all[0], 1)
	require.NoError(t, err)
	require.Equal(t, all[1:2], rest)

	forget := &queue.Retention{Stamp: t0, Forget: []queue.Producer{all[0], {Kind: queue.ProducerOutbox, ID: 70, Sub: 1}}}
	m.Do(forget)
	m.Do(forget)
	all, err = m.Outboxes(queue.Producer{}, 10)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.EqualValues(t, 2, m.Meta().Counters.Producers)
	require.False(t, m.Do(from(7, 1)).Publishes[0].Messages[0].Duplicate)
	m.RequireSame()
}
