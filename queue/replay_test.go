package queue_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
	"github.com/tierq/tierq/queue/store"
)

// recording is a run of commands with the digest after each: digests[i] is that at index i.
type recording struct {
	source   *queue.QueueStateMachine // at the last index
	commands [][]byte
	results  []string
	digests  [][32]byte
}

func digest(t *rapid.T, s *queue.QueueStateMachine) (queue.Index, [32]byte) {
	i, d, err := s.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return i, d
}

func record(t *rapid.T, m *queuetest.Machine) *recording {
	r := &recording{source: m.QueueStateMachine}
	n := newNaive()
	g := newGenerator(t, n)
	g.huge = true
	_, d := digest(t, m.QueueStateMachine)
	r.digests = append(r.digests, d)
	for range 1 + g.intn("commands", 40) {
		b, err := queue.EncodeCommand(nil, g.command())
		if err != nil {
			t.Fatal(err)
		}
		r.commands = append(r.commands, b)
		index := queue.Index(len(r.commands))
		r.results = append(r.results, apply(t, m.QueueStateMachine, index, b))
		c, err := queue.DecodeCommand(b)
		if err != nil {
			t.Fatal(err)
		}
		n.apply(index, c)
		i, d := digest(t, m.QueueStateMachine)
		if i != index {
			t.Fatalf("digest at %s, want %s", i, index)
		}
		r.digests = append(r.digests, d)
	}
	return r
}

func apply(t *rapid.T, s *queue.QueueStateMachine, index queue.Index, cmd []byte) string {
	r, err := s.Apply(index, cmd)
	if err != nil {
		t.Fatalf("apply %s: %v", index, err)
	}
	return string(queue.EncodeResult(nil, &r))
}

// replay applies what a state has not seen up to an index; answers and digests must be those of the recording.
// between runs before each command.
func (r *recording) replay(t *rapid.T, s *queue.QueueStateMachine, to queue.Index, between func()) {
	from, _ := r.same(t, s)
	for i := from + 1; i <= to; i++ {
		if between != nil {
			between()
		}
		if got := apply(t, s, i, r.commands[i-1]); got != r.results[i-1] {
			t.Fatalf("%s is answered otherwise on replay", i)
		}
		r.same(t, s)
	}
}

func (r *recording) same(t *rapid.T, s *queue.QueueStateMachine) (queue.Index, [32]byte) {
	i, d := digest(t, s)
	if int(i) >= len(r.digests) || d != r.digests[i] {
		if i == r.end() {
			t.Log(differences(t, r.source.Shard(), s.Shard()))
		}
		t.Fatalf("another digest at %s of %s", i, r.end())
	}
	return i, d
}

// differences lists the keys that differ.
func differences(t *rapid.T, a, b *store.Shard) string {
	left, right := dump(t, a), dump(t, b)
	out := ""
	for k, v := range left {
		if other, ok := right[k]; !ok || other != v {
			out += fmt.Sprintf("key %x: %x and %x\n", k, v, right[k])
		}
	}
	for k, v := range right {
		if _, ok := left[k]; !ok {
			out += fmt.Sprintf("key %x: only the second has %x\n", k, v)
		}
	}
	return out
}

func dump(t *rapid.T, h *store.Shard) map[string]string {
	it, err := h.NewIter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer it.Close()
	all := map[string]string{}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		if err != nil {
			t.Fatal(err)
		}
		all[string(it.Key())] = string(v)
	}
	return all
}

func (r *recording) end() queue.Index { return queue.Index(len(r.commands)) }

func openMachine(t *rapid.T, h *store.Shard, opts queue.Options) *queue.QueueStateMachine {
	s, err := queue.Open(h, opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// install copies a state's key space into another shard, as an install does: a new incarnation beside the live one.
func install(t *rapid.T, from, to *store.Shard) {
	snap := from.Snapshot()
	defer snap.Close()
	it, err := snap.NewIter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer it.Close()
	in, err := to.BeginInstall()
	if err != nil {
		t.Fatal(err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.Value()
		if err == nil {
			err = in.Set(it.Key(), v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := in.Finish(); err != nil {
		t.Fatal(err)
	}
}

// TestReplay applies one run of commands to several states (G7): with another size of the producer cache; reopened
// and read at random moments; installed from another replica in the middle, over a state of its own. Every answer
// and the digest after every command must be those of the first.
func TestReplay(t *testing.T) {
	machines := newShards(t)
	rapid.Check(t, func(rt *rapid.T) {
		source := machines.open()
		r := record(rt, source)

		small := openMachine(rt, machines.open().Shard(), queue.Options{ProducerCache: 1})
		r.replay(rt, small, r.end(), nil)

		restless := machines.open().QueueStateMachine
		r.replay(rt, restless, r.end(), func() {
			if rapid.Bool().Draw(rt, "reopen") {
				restless = openMachine(rt, restless.Shard(), queue.Options{})
			}
		})

		middle := queue.Index(rapid.IntRange(0, len(r.commands)).Draw(rt, "install at"))
		behind := queue.Index(rapid.IntRange(0, int(middle)).Draw(rt, "behind at"))
		sender, receiver := machines.open(), machines.open()
		r.replay(rt, sender.QueueStateMachine, middle, nil)
		r.replay(rt, receiver.QueueStateMachine, behind, nil)
		install(rt, sender.Shard(), receiver.Shard())
		if err := receiver.Reload(); err != nil {
			rt.Fatal(err)
		}
		if i, _ := r.same(rt, receiver.QueueStateMachine); i != middle {
			rt.Fatalf("installed %s, want %s", i, middle)
		}
		r.replay(rt, receiver.QueueStateMachine, r.end(), nil)
		if err := receiver.Check(); err != nil {
			rt.Fatal(err)
		}
	})
}

// TestReplayAfterPowerLoss cuts the power at a random moment of a run: the state found is that of an index not below
// the last Sync, and the rest of the run leads to the same state as ever.
func TestReplayAfterPowerLoss(t *testing.T) {
	machines := newShards(t)
	rapid.Check(t, func(rt *rapid.T) {
		r := record(rt, machines.open())
		fs := vfs.NewCrashableMem()
		st := openAt(rt, fs)
		defer st.Close()
		h, err := st.Shard(1)
		if err != nil {
			rt.Fatal(err)
		}
		s := openMachine(rt, h, queue.Options{})
		synced := queue.Index(0)
		crash := queue.Index(rapid.IntRange(0, len(r.commands)).Draw(rt, "crash at"))
		r.replay(rt, s, crash, func() {
			if rapid.IntRange(0, 5).Draw(rt, "sync") == 5 {
				synced = s.Meta().Applied
				h.Sync()
			}
		})
		after := fs.CrashClone(vfs.CrashCloneCfg{
			UnsyncedDataPercent: rapid.IntRange(0, 100).Draw(rt, "kept"),
			RNG:                 rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1)),
		})
		st2 := openAt(rt, after)
		defer st2.Close()
		h, err = st2.Shard(1)
		if err != nil {
			rt.Fatal(err)
		}
		s = openMachine(rt, h, queue.Options{})
		if i, _ := r.same(rt, s); i < synced || i > crash {
			rt.Fatalf("found %s after a crash at %s with a sync at %s", i, crash, synced)
		}
		r.replay(rt, s, r.end(), nil)
		if err := s.Check(); err != nil {
			rt.Fatal(err)
		}
	})
}

func openAt(t *rapid.T, fs vfs.FS) *store.Store {
	st, err := store.Open("queue", store.Options{FS: fs, MemTableBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// TestClampedCommandIsForgotten: a dedup id and an operation that a clamped command brought are forgotten in their
// time, by a replica that has run all along as by one that was opened since.
func TestClampedCommandIsForgotten(t *testing.T) {
	m := queuetest.New(t)
	m.Do(publish(t0, "first"))
	p := publish(t0+100*queue.Hour, "clamped") // the clock follows by an hour
	p.Publishes[0].Messages[0].DedupID = []byte("id")
	m.Do(p)
	m.Do(&queue.Retention{Stamp: t0 + 100*queue.Hour, OperationID: 1})
	require.Equal(t, t0+2*queue.Hour, m.Meta().Clock)

	other := m.Replay()
	for at := t0 + 2*queue.Hour; at < t0+30*queue.Hour; at += queue.Hour {
		require.NoError(t, other.Reload())
		for _, x := range []*queuetest.Machine{m, other} {
			x.Do(publish(at, "later"))
		}
		_, want, err := m.Digest()
		require.NoError(t, err)
		_, got, err := other.Digest()
		require.NoError(t, err)
		require.Equal(t, want, got, "at %d h", (at-t0)/queue.Hour)
	}
	p.Stamp = m.Meta().Clock
	require.False(t, m.Do(p).Publishes[0].Messages[0].Duplicate)
}

// TestClampedCommandForgetsNothing: a stamp far ahead must not make a dedup id that is still due look run out.
func TestClampedCommandForgetsNothing(t *testing.T) {
	m := queuetest.New(t)
	p := publish(t0, "once")
	p.Publishes[0].Messages[0].DedupID = []byte("id")
	first := m.Do(p).Publishes[0].Messages[0].Address
	p.Stamp = t0 + 100*queue.Hour
	again := m.Do(p).Publishes[0].Messages[0]
	require.True(t, again.Duplicate)
	require.Equal(t, first, again.Address)
	m.RequireSame()
}
