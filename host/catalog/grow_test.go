package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// goldenGrowth is a view with a queue that grows.
func goldenGrowth(v *View) *View {
	d := v.d
	d.growths = map[uint64]Growth{4: {QueueID: 4, Shards: []uint64{8, 9}}}
	return newView(d)
}

func TestGrowQueue(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: defaults(), Replicas: 3}, code.OK).Queue
	grow := GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 3}
	r := apply(t, s, &grow, code.OK)
	require.Equal(t, q, r.Queue, "the new partitions are not open")
	require.NoError(t, s.Check())
	v := s.Seal()
	g, ok := v.Growth(q.ID)
	require.True(t, ok)
	require.Len(t, g.Shards, 2)
	for i, shard := range g.Shards {
		p, ok := v.Placement(shard)
		require.True(t, ok)
		require.Equal(t, uint32(i+1), p.Partition)
		require.Len(t, p.Initial(), 3)
		of, ok := v.QueueOfShard(shard)
		require.True(t, ok, "hosts run it")
		require.Equal(t, q.ID, of.ID)
	}
	require.Equal(t, v.Version(), apply(t, s, &grow, code.OK).Version, "the same again changes nothing")
	other := grow
	other.Partitions = 4
	apply(t, s, &other, code.MutationFenced)

	decoded, err := DecodeView(EncodeView(v))
	require.NoError(t, err)
	require.Equal(t, v.d.growths, decoded.d.growths)

	open := OpenQueue{Name: "orders", ExpectedID: q.ID, Partitions: 3}
	wrong := open
	wrong.Partitions = 2
	apply(t, s, &wrong, code.MutationFenced)
	got := apply(t, s, &open, code.OK).Queue
	require.Equal(t, append(q.Shards, g.Shards...), got.Shards)
	require.Equal(t, uint32(3), got.Options.Partitions)
	require.Equal(t, q.Options.Version+1, got.Options.Version, "a change that was decided on before is fenced")
	require.NoError(t, s.Check())
	require.Equal(t, s.Seal().Version(), apply(t, s, &open, code.OK).Version, "the same again changes nothing")
	_, ok = s.Seal().Growth(q.ID)
	require.False(t, ok)
	require.Equal(t, q.Shards, v.d.queues[q.Key()].Shards, "a view that was taken before is as it was")

	apply(t, s, &other, code.OK) // it may grow again
	require.NoError(t, s.Check())
}

func TestGrowQueueRefusals(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: defaults(), Replicas: 3}, code.OK).Queue
	keyed := defaults()
	keyed.Ordering = queue.OrderKey
	k := apply(t, s, &CreateQueue{OperationID: 2, Name: "keyed", Options: keyed, Replicas: 3}, code.OK).Queue
	before := s.Seal().Version()
	for name, c := range map[string]struct {
		command Command
		want    code.Code
		text    string
	}{
		"no such queue":     {&GrowQueue{Name: "nobody", ExpectedID: q.ID, Partitions: 2}, code.UnknownQueue, "does not exist"},
		"another queue":     {&GrowQueue{Name: "orders", ExpectedID: 9, Partitions: 2}, code.MutationFenced, "another one"},
		"no id":             {&GrowQueue{Name: "orders", Partitions: 2}, code.InvalidArgument, "id"},
		"no more":           {&GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 1}, code.InvalidArgument, "only get more"},
		"too many":          {&GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: MaxPartitions + 1}, code.InvalidArgument, "at most 64"},
		"key order":         {&GrowQueue{Name: "keyed", ExpectedID: k.ID, Partitions: 2}, code.InvalidArgument, "create another queue"},
		"open without grow": {&OpenQueue{Name: "orders", ExpectedID: q.ID, Partitions: 2}, code.MutationFenced, "not growing"},
		"open without id":   {&OpenQueue{Name: "orders", Partitions: 1}, code.InvalidArgument, "id"},
	} {
		require.Contains(t, apply(t, s, c.command, c.want).Detail, c.text, name)
	}
	require.Equal(t, before, s.Seal().Version())
}

func TestDeleteWhileGrowing(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: defaults(), Replicas: 3}, code.OK).Queue
	apply(t, s, &GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 2}, code.OK)
	g, _ := s.Seal().Growth(q.ID)
	apply(t, s, &DeleteQueue{OperationID: 2, Name: "orders", ExpectedID: q.ID}, code.OK)
	require.NoError(t, s.Check())
	p, _ := s.Seal().Placement(g.Shards[0])
	require.True(t, p.Deleted, "its hosts remove the replicas")
	_, ok := s.Seal().Growth(q.ID)
	require.False(t, ok)
	apply(t, s, &OpenQueue{Name: "orders", ExpectedID: q.ID, Partitions: 2}, code.UnknownQueue)
}
