package catalog

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// goldenGrowth is a view with a queue that grows.
func goldenGrowth(v *View) *View {
	d := v.d
	d.growths = map[uint64]Growth{4: {QueueID: 4, Shards: []uint64{8, 9}}, 2: {QueueID: 2, Opened: true, Shards: []uint64{3}}}
	return newView(d)
}

// goldenGrowthBegun is one of whose growths it is known when it began.
func goldenGrowthBegun(v *View) *View {
	v = goldenGrowth(v)
	g := v.d.growths[4]
	g.BegunMs = 5
	v.d.growths[4] = g
	return v
}

func TestGrowthBegun(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: defaults(), Replicas: 3}, code.OK).Queue
	c := &GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 3, NowMs: 7}
	apply(t, s, c, code.OK)
	c.NowMs = 9
	apply(t, s, c, code.OK) // the same again changes nothing
	v, err := DecodeView(EncodeView(s.Seal()))
	require.NoError(t, err)
	g, _ := v.Growth(q.ID)
	require.EqualValues(t, 7, g.BegunMs)
	apply(t, s, &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthOpened}, code.OK)
	g, _ = s.Seal().Growth(q.ID)
	require.EqualValues(t, 7, g.BegunMs)
	apply(t, s, &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthFinished}, code.OK)
	require.Empty(t, s.d.growthsBegun())
	b := Encode(c)
	_, err = Decode(b[:len(b)-8])
	require.NoError(t, err, "of before there was a time")
	_, err = Decode(append(b[:len(b)-8], make([]byte, 8)...))
	require.Error(t, err, "one value has one encoding")
}

// grownQueue is a fleet of four with a queue of one partition that grows to three.
func grownQueue(t testing.TB) (*State, Queue, Growth) {
	s := fleet(t, HostFull, HostFull, HostFull, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: defaults(), Replicas: 3}, code.OK).Queue
	r := apply(t, s, &GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 3}, code.OK)
	require.Equal(t, q, r.Queue, "the new partitions are not open")
	g, ok := s.Seal().Growth(q.ID)
	require.True(t, ok)
	return s, q, g
}

func TestGrowQueue(t *testing.T) {
	s, q, g := grownQueue(t)
	v := s.Seal()
	require.Len(t, g.Shards, 2)
	require.Equal(t, []Growth{g}, v.Growths())
	require.Equal(t, slices.Concat(q.Shards, g.Shards), v.AllShards(q))
	for i, shard := range g.Shards {
		p, ok := v.Placement(shard)
		require.True(t, ok)
		require.Equal(t, uint32(i+1), p.Partition)
		require.Len(t, p.Initial(), 3)
		o, ok := v.OptionsOf(shard)
		require.True(t, ok, "hosts run it")
		require.Equal(t, uint32(i+1), o.Partition)
		require.Equal(t, uint32(3), o.Partitions, "it has the number that there will be")
		require.NoError(t, o.Validate())
	}
	o, _ := v.OptionsOf(q.Shards[0])
	require.Equal(t, q.Options, o)
	grow := GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 3}
	require.Equal(t, v.Version(), apply(t, s, &grow, code.OK).Version, "the same again changes nothing")
	for _, other := range []uint32{1, 2, 4} {
		c := grow
		c.Partitions = other
		require.Contains(t, apply(t, s, &c, code.MutationFenced).Detail, "growing to 3")
	}
	decoded, err := DecodeView(EncodeView(v))
	require.NoError(t, err)
	require.Equal(t, v.d.growths, decoded.d.growths)

	report := func(e GrowthEvent) *GrowthReport {
		return &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: e}
	}
	apply(t, s, report(GrowthFinished), code.MutationFenced)
	got := apply(t, s, report(GrowthOpened), code.OK).Queue
	require.Equal(t, append(q.Shards, g.Shards...), got.Shards)
	require.Equal(t, uint32(3), got.Options.Partitions)
	require.Equal(t, q.Options.Version+1, got.Options.Version, "a change that was decided on before is fenced")
	require.Equal(t, got.Shards, s.Seal().AllShards(got))
	require.Equal(t, s.Seal().Version(), apply(t, s, report(GrowthOpened), code.OK).Version, "the same again changes nothing")
	require.Equal(t, q.Shards, v.d.queues[q.Key()].Shards, "a view that was taken before is as it was")
	apply(t, s, report(GrowthCancelled), code.MutationFenced)
	apply(t, s, &grow, code.OK)
	more := grow
	more.Partitions = 4
	apply(t, s, &more, code.MutationFenced) // it is not finished

	apply(t, s, report(GrowthFinished), code.OK)
	require.Empty(t, s.Seal().Growths())
	require.Equal(t, s.Seal().Version(), apply(t, s, report(GrowthFinished), code.OK).Version)
	require.Equal(t, s.Seal().Version(), apply(t, s, report(GrowthOpened), code.OK).Version)
	require.Equal(t, s.Seal().Version(), apply(t, s, &grow, code.OK).Version, "it has them")
	again := CreateQueue{OperationID: 2, Name: "orders", Options: defaults(), Replicas: 3}
	require.Contains(t, apply(t, s, &again, code.QueueExistsMismatch).Detail, "tierq queue grow")
	apply(t, s, &more, code.OK) // it may grow again
	next, _ := s.Seal().Growth(q.ID)
	require.Len(t, next.Shards, 1)
	p, _ := s.Seal().Placement(next.ID())
	require.Equal(t, uint32(3), p.Partition)
}

func TestCancelGrowth(t *testing.T) {
	s, q, g := grownQueue(t)
	cancel := &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthCancelled}
	require.Equal(t, q, apply(t, s, cancel, code.OK).Queue)
	for _, shard := range g.Shards {
		p, _ := s.Seal().Placement(shard)
		require.True(t, p.Deleted, "its hosts remove the replicas")
	}
	require.Empty(t, s.Seal().Growths())
	require.Equal(t, s.Seal().Version(), apply(t, s, cancel, code.OK).Version)
	apply(t, s, &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthOpened}, code.MutationFenced)
	apply(t, s, &GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 2}, code.OK)
	next, _ := s.Seal().Growth(q.ID)
	require.Greater(t, next.ID(), g.Shards[1], "no shard id is used twice")
	apply(t, s, &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthOpened}, code.MutationFenced)
	require.Equal(t, s.Seal().Version(), apply(t, s, cancel, code.OK).Version, "a late copy does not cancel the next growth")
}

func TestGrowQueueRefusals(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull)
	two := defaults()
	two.Partitions = 2
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "orders", Options: two, Replicas: 3}, code.OK).Queue
	keyed := defaults()
	keyed.Ordering = queue.OrderKey
	k := apply(t, s, &CreateQueue{OperationID: 2, Name: "keyed", Options: keyed, Replicas: 3}, code.OK).Queue
	for name, c := range map[string]struct {
		command Command
		want    code.Code
		text    string
	}{
		"no such queue":  {&GrowQueue{Name: "nobody", ExpectedID: q.ID, Partitions: 3}, code.UnknownQueue, "does not exist"},
		"another queue":  {&GrowQueue{Name: "orders", ExpectedID: 9, Partitions: 3}, code.MutationFenced, "another one"},
		"no id":          {&GrowQueue{Name: "orders", Partitions: 3}, code.InvalidArgument, "id"},
		"fewer":          {&GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: 1}, code.InvalidArgument, "only get more"},
		"none":           {&GrowQueue{Name: "orders", ExpectedID: q.ID}, code.InvalidArgument, "only get more"},
		"too many":       {&GrowQueue{Name: "orders", ExpectedID: q.ID, Partitions: MaxPartitions + 1}, code.InvalidArgument, "at most 64"},
		"key order":      {&GrowQueue{Name: "keyed", ExpectedID: k.ID, Partitions: 2}, code.InvalidArgument, "create another queue"},
		"no growth":      {&GrowthReport{QueueID: q.ID, Growth: 99, Event: GrowthOpened}, code.MutationFenced, "cancelled"},
		"unknown event":  {&GrowthReport{QueueID: q.ID, Growth: 99, Event: 9}, code.Malformed, "unknown"},
		"no queue of id": {&GrowthReport{QueueID: 77, Growth: 99, Event: GrowthOpened}, code.UnknownQueue, "77"},
	} {
		require.Contains(t, apply(t, s, c.command, c.want).Detail, c.text, name)
	}
}

func TestDeleteWhileGrowing(t *testing.T) {
	s, q, g := grownQueue(t)
	apply(t, s, &DeleteQueue{OperationID: 2, Name: "orders", ExpectedID: q.ID}, code.OK)
	for _, shard := range slices.Concat(q.Shards, g.Shards) {
		p, _ := s.Seal().Placement(shard)
		require.True(t, p.Deleted, "its hosts remove the replicas")
	}
	require.Empty(t, s.Seal().Growths())
	apply(t, s, &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthOpened}, code.UnknownQueue)
}

// The catalog's part of a growth under any order of commands, repeated, late, and of several drivers: the number of partitions never falls,
// partitions keep their shards, and a growth that was reported open stays so.
func TestGrowthModel(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		s := fleet(t, HostFull, HostFull, HostFull)
		q := apply(t, s, &CreateQueue{OperationID: 1, Name: "q", Options: defaults(), Replicas: 3}, code.OK).Queue
		var known []Growth // as drivers saw them, some of long ago
		for range rapid.IntRange(1, 25).Draw(r, "steps") {
			var c Command = &GrowQueue{Name: "q", ExpectedID: q.ID, Partitions: rapid.Uint32Range(0, 9).Draw(r, "partitions")}
			if len(known) > 0 && rapid.Bool().Draw(r, "report") {
				g := rapid.SampledFrom(known).Draw(r, "growth")
				c = &GrowthReport{QueueID: q.ID, Growth: g.ID(), Event: GrowthEvent(rapid.Uint8Range(1, 3).Draw(r, "event"))}
			}
			res := s.Apply(1, c)
			if err := s.Check(); err != nil {
				r.Fatal(err)
			}
			v, err := DecodeView(EncodeView(s.Seal()))
			if err != nil {
				r.Fatal(err)
			}
			now, _ := v.Queue("", "q")
			if len(now.Shards) < len(q.Shards) || !slices.Equal(now.Shards[:len(q.Shards)], q.Shards) {
				r.Fatalf("partitions %v became %v", q.Shards, now.Shards)
			}
			if got, ok := c.(*GrowthReport); ok && res.Code == code.OK {
				in := slices.Contains(now.Shards, got.Growth)
				if in != (got.Event != GrowthCancelled) {
					r.Fatalf("%+v was done, and its partitions are among %v: %v", got, now.Shards, in)
				}
			}
			q = now
			if g, ok := v.Growth(q.ID); ok && !slices.ContainsFunc(known, func(k Growth) bool { return k.ID() == g.ID() }) {
				known = append(known, g)
			}
		}
	})
}
