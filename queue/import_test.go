package queue_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

type statePair struct{ key, value []byte }

// statePairs reads all keys of a machine, the shard's own record apart.
func statePairs(t testing.TB, m *queuetest.Machine) (own []byte, list []statePair) {
	t.Helper()
	s := m.Shard().Snapshot()
	defer s.Close()
	it, err := s.NewIter(nil, nil)
	require.NoError(t, err)
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		require.NoError(t, err)
		require.NoError(t, queue.VerifyPair(it.Key(), v))
		if queue.IsOwnRecord(it.Key()) {
			own = bytes.Clone(v)
			continue
		}
		list = append(list, statePair{bytes.Clone(it.Key()), bytes.Clone(v)})
	}
	require.NoError(t, it.Err())
	return own, list
}

// imports makes the commands of an import, of chunks of so many bytes.
func imports(t testing.TB, m *queuetest.Machine, id uint64, size int) (list []*queue.Retention) {
	own, pairs := statePairs(t, m)
	now := m.Meta().Clock
	var chunk []byte
	last := &queue.Import{ID: id, Meta: own}
	add := func() {
		list = append(list, &queue.Retention{Stamp: now, Import: &queue.Import{ID: id, Chunk: uint64(len(list)), Pairs: chunk}})
		chunk = nil
	}
	for _, p := range pairs {
		chunk = queue.AppendPair(chunk, p.key, p.value)
		last.Keys++
		last.Bytes += uint64(len(p.key) + len(p.value))
		if len(chunk) >= size {
			add()
		}
	}
	if chunk != nil {
		add()
	}
	last.Chunk = uint64(len(list))
	return append(list, &queue.Retention{Stamp: now, Import: last})
}

// seen is what consumers and administrators can see of a state.
type seen struct {
	messages []queue.StoredMessage
	groups   []queue.GroupInfo
	dead     [][]queue.DeadLetter
	delivers [][]queue.Deliverable
}

func see(t testing.TB, m *queuetest.Machine) (s seen) {
	t.Helper()
	meta := m.Meta()
	last := meta.Last
	_, pairs := statePairs(t, m)
	for _, p := range pairs {
		if p.key[0] != 0x02 && p.key[0] != 0x03 {
			continue
		}
		var a queue.Address
		for _, b := range p.key[1:] {
			a = a<<8 | queue.Address(b)
		}
		require.LessOrEqual(t, a, last)
		got, ok, err := m.Message(a)
		require.NoError(t, err)
		require.True(t, ok)
		s.messages = append(s.messages, got)
	}
	for _, g := range m.Groups() {
		list, _, err := m.Deliverables(g.ID, 0, 100_000, false)
		require.NoError(t, err)
		for i := range list { // recorded leases end
			list[i].Lease, list[i].HasLease = queue.RecordedLease{}, false
		}
		s.delivers = append(s.delivers, list)
		dead, _, err := m.DeadLetters(g.ID, 0, 100_000, true)
		require.NoError(t, err)
		s.dead = append(s.dead, dead)
		g.Home, g.HomeIndex, g.Released, g.Epoch, g.Counters.Leased, g.Floor, g.WatermarkBytes = 0, 0, false, 0, 0, 0, 0
		s.groups = append(s.groups, g)
	}
	return s
}

// TestImport brings a random state into a fresh shard by chunks, with a reopening at any of them, and continues it.
func TestImport(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) { importRun(t, seed) })
	}
}

func importRun(t *testing.T, seed uint64) {
	m := queuetest.New(t)
	x := &randomizer{Rand: rand.New(rand.NewPCG(seed, 7)), m: m, now: t0, small: true}
	for range 250 {
		m.Do(x.command())
	}
	before, saved := m.Meta(), see(t, m)
	require.NotEmpty(t, saved.messages)
	require.NotEmpty(t, saved.groups)

	to := queuetest.New(t)
	list := imports(t, m, 99, 600)
	require.Greater(t, len(list), 4)
	for i, c := range list {
		if i%3 == 1 {
			require.NoError(t, to.Reload())
		}
		require.Equal(t, code.Unavailable, orOK(to, i, publish(x.now, "x")))
		r := to.Do(c)
		require.Equal(t, code.OK, r.Code)
		require.EqualValues(t, i+1, r.Version)
		require.Equal(t, code.OK, to.Do(c).Code, "the same again")
		if i < len(list)-1 {
			require.Zero(t, to.Meta().Last)
			require.Empty(t, to.Groups())
		}
		if i+2 < len(list) {
			require.Equal(t, code.MutationFenced, to.Do(list[i+2]).Code, "a gap")
		}
	}
	p, ok := to.Importing()
	require.True(t, ok && p.Loaded)
	require.Equal(t, code.Unavailable, to.Do(publish(x.now, "x")).Code, "not before the recovery")
	require.Equal(t, before.Counters, to.Meta().Counters)

	require.Equal(t, code.OK, to.Do(&queue.Retention{Stamp: x.now, Recover: &queue.Recovery{Expected: before.RecoveryNumber}}).Code)
	require.Equal(t, code.MutationFenced, to.Do(&queue.Retention{Stamp: x.now, Recover: &queue.Recovery{Expected: before.RecoveryNumber}}).Code)
	require.Equal(t, code.MutationFenced, to.Do(list[0]).Code, "a late chunk")
	_, ok = to.Importing()
	require.False(t, ok)
	require.NoError(t, to.Check())
	require.Equal(t, saved, see(t, to))
	after := to.Meta()
	require.Equal(t, before.RecoveryNumber+1, after.RecoveryNumber)
	require.Equal(t, before.Last+1<<20, after.Last)
	for i, g := range to.Groups() {
		was := m.Groups()[i]
		require.Equal(t, was.Epoch+1<<32, g.Epoch)
		require.Zero(t, g.Home)
	}
	y := &randomizer{Rand: x.Rand, m: to, now: x.now, small: true, seq: x.seq}
	for range 60 {
		to.Do(y.command())
	}
	to.RequireSame()
}

func orOK(m *queuetest.Machine, i int, c queue.Command) code.Code {
	if i == 0 {
		return code.Unavailable // a fresh shard would take it
	}
	return m.Do(c).Code
}

func TestImportIsRefused(t *testing.T) {
	m := queuetest.New(t)
	m.Do(publish(t0, "a", "b"))
	list := imports(t, m, 99, 1<<20)
	require.Len(t, list, 2)
	require.Equal(t, code.MutationFenced, m.Do(list[0]).Code, "a shard that is not fresh")

	to := queuetest.New(t)
	o := to.Meta().Options
	o.MaxBodyBytes = 1000
	require.Equal(t, code.OK, to.Do(&queue.Retention{Stamp: t0, Options: &o}).Code, "options are no content")
	require.Equal(t, code.OK, to.Do(list[0]).Code)
	other := *list[1].Import
	other.ID++
	require.Equal(t, code.MutationFenced, to.Do(&queue.Retention{Stamp: t0, Import: &other}).Code, "another import")
	wrong := *list[1].Import
	wrong.Keys++
	require.Equal(t, code.MutationFenced, to.Do(&queue.Retention{Stamp: t0, Import: &wrong}).Code, "other totals")
	require.Equal(t, code.MutationFenced, to.Do(&queue.Retention{Stamp: t0, Recover: &queue.Recovery{}}).Code, "chunks are missing")
	require.Equal(t, code.Unavailable, to.Do(&queue.Retention{Stamp: t0, PurgeTo: 9}).Code)
	require.Equal(t, code.Unavailable, to.Do(&queue.Retention{Stamp: t0}).Code)
	o = to.Meta().Options
	o.MaxBodyBytes = 2000
	require.Equal(t, code.OK, to.Do(&queue.Retention{Stamp: t0, Options: &o}).Code, "options may change meanwhile")
	require.Equal(t, code.OK, to.Do(list[1]).Code)
	require.Equal(t, code.OK, to.Do(&queue.Retention{Stamp: t0, Recover: &queue.Recovery{}}).Code)
	require.EqualValues(t, 2000, to.Meta().Options.MaxBodyBytes)
	to.RequireSame()
	r := to.Do(publish(t0, "c"))
	require.Equal(t, queue.Address(2+1<<20+1), r.Publishes[0].Messages[0].Address)
	to.RequireSame()
}

// TestImportForgetsTargets: the shard that a dead letter was on its way to may be another queue's in another fleet.
func TestImportForgetsTargets(t *testing.T) {
	m := queuetest.New(t)
	r := m.Do(&queue.Group{Stamp: t0, Op: queue.GroupCreate, Name: "g", Config: config("dead"), OperationID: 1, FirstHome: 1})
	m.Do(publish(t0, "a", "b"))
	expire := func(e ...queue.ExpireEntry) {
		require.Equal(t, code.OK, m.Do(&queue.Expire{Stamp: t0, Group: r.Group, Epoch: 1, Entries: e}).Code)
	}
	expire(queue.ExpireEntry{Kind: queue.ExpireDead, Address: 1, Attempts: 5, Reason: "x"}, queue.ExpireEntry{Kind: queue.ExpireDead, Address: 2, Attempts: 5, Reason: "y"})
	expire(queue.ExpireEntry{Kind: queue.ExpireExport, Address: 1, Change: 1, ExportState: queue.ExportExporting, Target: 900})
	dead, _, err := m.DeadLetters(r.Group, 0, 10, false)
	require.NoError(t, err)
	require.Equal(t, queue.ExportExporting, dead[0].ExportState)

	to := queuetest.New(t)
	for _, c := range imports(t, m, 99, 1<<20) {
		require.Equal(t, code.OK, to.Do(c).Code)
	}
	require.Equal(t, code.OK, to.Do(&queue.Retention{Stamp: t0, Recover: &queue.Recovery{}}).Code)
	dead, _, err = to.DeadLetters(r.Group, 0, 10, false)
	require.NoError(t, err)
	require.Equal(t, queue.ExportPending, dead[0].ExportState)
	require.Zero(t, dead[0].Target)
	require.EqualValues(t, 1, dead[0].ExportNumber)
	require.NoError(t, to.Check())
	r = to.Do(publish(t0, "c"))
	g, _ := to.Group(1)
	last := r.Publishes[0].Messages[0].Address
	require.Equal(t, code.OK, to.Do(&queue.Expire{Stamp: t0, Group: g.ID, Epoch: g.Epoch, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: last, Attempts: 5, Reason: "z"}}}).Code)
	dead, _, err = to.DeadLetters(g.ID, last, 10, false)
	require.NoError(t, err)
	require.EqualValues(t, 2+1<<20+1, dead[0].ExportNumber, "no number is given twice")
}

func from(id, epoch uint64, low, seq queue.Seq) queue.Publish {
	return queue.Publish{Producer: queue.Producer{Kind: queue.ProducerClient, ID: id}, ProducerEpoch: epoch, Low: low,
		Messages: []queue.Message{{Seq: seq, Body: []byte("m")}}}
}

func publishes(list ...queue.Publish) *queue.Enqueue {
	return &queue.Enqueue{Stamp: t0, Publishes: list}
}

// TestRecoveryMakesProducersRegister: 0x0012 once for every producer that was there before, known to the state or not.
func TestRecoveryMakesProducersRegister(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	m.Do(publishes(from(1, 0, 1, 1), from(1, 0, 1, 2)))
	m.Do(&queue.Expire{Stamp: t0, Group: g, Epoch: 1, Entries: []queue.ExpireEntry{
		{Kind: queue.ExpireLease, Address: 1, Attempts: 0, Lease: queue.LeaseName{Epoch: 1, Number: 1}, Deadline: t0 + 30_000, Consumer: "c"}}})
	require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: t0, Recover: &queue.Recovery{}}).Code)
	info, _ := m.Group(g)
	require.Zero(t, info.Counters.Leased)
	code1 := func(p queue.Publish) code.Code {
		r := m.Do(publishes(p)).Publishes[0]
		if r.Code != code.OK {
			return r.Code
		}
		return r.Messages[0].Code
	}
	require.Equal(t, code.ProducerEpochStale, code1(from(1, 0, 1, 2)), "known, the same seq")
	require.Equal(t, code.ProducerEpochStale, code1(from(1, 0, 3, 3)), "known, the next seq")
	require.Equal(t, code.OK, code1(from(1, 1, 1, 1)))
	require.Equal(t, code.OK, code1(from(1, 1, 1, 2)))
	require.Equal(t, code.ProducerEpochStale, code1(from(2, 5, 7, 9)), "unknown, in the middle of a sequence")
	require.Equal(t, code.ProducerEpochStale, code1(from(2, 5, 7, 9)))
	require.Equal(t, code.OK, code1(from(2, 6, 9, 9)), "a new sequence may begin anywhere")
	require.Equal(t, code.OK, code1(from(2, 6, 9, 10)))
	require.Equal(t, code.OK, code1(from(3, 0, 1, 1)), "one that begins")
	require.Equal(t, code.OK, code1(from(3, 0, 1, 2)))
	require.NoError(t, m.Reload())
	require.Equal(t, code.OK, code1(from(3, 0, 1, 3)))
	require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: t0, Recover: &queue.Recovery{Expected: 1}}).Code)
	require.Equal(t, code.ProducerEpochStale, code1(from(3, 0, 1, 3)), "a second recovery")
	outbox := queue.Publish{Producer: queue.Producer{Kind: queue.ProducerOutbox, ID: 7, Sub: 1}, Low: 50, Messages: []queue.Message{{Seq: 50, Body: []byte("d")}}}
	require.Equal(t, code.OK, code1(outbox), "outboxes go on")
	m.RequireSame()
}
