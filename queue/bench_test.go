package queue_test

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
	"github.com/tierq/tierq/queue/store"
)

// BenchmarkPublishAck applies batches of publishes by one producer and their acks, and moves the line now and then.
func BenchmarkPublishAck(b *testing.B) {
	for _, batch := range []int{1, 16, 512} {
		b.Run(map[int]string{1: "batch1", 16: "batch16", 512: "batch512"}[batch], func(b *testing.B) { benchPublishAck(b, batch) })
	}
}

func benchPublishAck(b *testing.B, batch int) {
	st, err := store.Open(b.TempDir(), store.Options{FS: vfs.Default})
	require.NoError(b, err)
	defer st.Close()
	m := queuetest.Open(b, st, 1)
	g := create(b, m, "g", queue.Start{})
	body := make([]byte, 256)
	apply := func(c queue.Command) {
		cmd, err := queue.EncodeCommand(nil, c)
		require.NoError(b, err)
		_, err = m.Apply(m.Meta().Applied+1, cmd)
		require.NoError(b, err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	seq := queue.Seq(0)
	for n := 0; n < b.N; n += batch {
		p := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: 1}, Low: seq + 1}
		for range batch {
			seq++
			p.Messages = append(p.Messages, queue.Message{Seq: seq, Body: body})
		}
		apply(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{p}})
		apply(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: queue.Address(seq) - queue.Address(batch) + 1, Last: queue.Address(seq)}}})
		if n/batch%64 == 0 {
			apply(&queue.Retention{Stamp: t0, ReclaimLine: queue.Address(seq)})
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}

// BenchmarkDeliverables lists a backlog with holes.
func BenchmarkDeliverables(b *testing.B) {
	m := queuetest.New(b)
	g := create(b, m, "g", queue.Start{})
	for range 100 {
		p := queue.Publish{}
		for range 1000 {
			p.Messages = append(p.Messages, queue.Message{Body: make([]byte, 256)})
		}
		m.Do(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{p}})
	}
	for a := queue.Address(2); a < 100_000; a += 1000 {
		m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: a, Last: a + 900}}})
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		list, _, err := m.Deliverables(g, 50_000, 64, false)
		require.NoError(b, err)
		require.Len(b, list, 64)
	}
}

// BenchmarkAckAboveStuck acks, a little out of order, above messages that stay unfinished, as a group does that has
// messages waiting for another try. The time per ack must not grow with what was acked since the last flush.
func BenchmarkAckAboveStuck(b *testing.B) {
	st, err := store.Open(b.TempDir(), store.Options{FS: vfs.Default})
	require.NoError(b, err)
	defer st.Close()
	m := queuetest.Open(b, st, 1)
	g := create(b, m, "g", queue.Start{})
	apply := func(c queue.Command) {
		cmd, err := queue.EncodeCommand(nil, c)
		require.NoError(b, err)
		_, err = m.Apply(m.Meta().Applied+1, cmd)
		require.NoError(b, err)
	}
	const batch = 32
	for n := 0; n < b.N+256; n += 512 {
		p := queue.Publish{Messages: make([]queue.Message, 512)}
		for i := range p.Messages {
			p.Messages[i].Body = []byte("x")
		}
		apply(&queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{p}})
	}
	b.ReportAllocs()
	b.ResetTimer()
	for at := queue.Address(129); at <= queue.Address(b.N)+128; at += 2 * batch {
		for _, first := range []queue.Address{at + batch, at} { // the first 128 are stuck
			apply(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: first, Last: first + batch - 1}}})
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}
