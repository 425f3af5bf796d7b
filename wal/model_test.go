package wal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand"
	"testing"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// generator makes operations as Raft would: entries follow one another and never replace committed
// ones, commit indexes, terms and snapshots never move back.
type generator struct {
	rng      *rand.Rand
	source   *source // rng's, of a generator of newSeeded
	keys     []replicaKey
	replicas map[replicaKey]*genReplica
	maxCmd   int
	witness  bool
}

type genReplica struct {
	term, vote, commit, last, snapshot, compacted uint64
	started                                       bool
}

// newSeeded returns a generator all of which follows from the seed, and which can be cloned.
func newSeeded(seed int64) *generator {
	s := newSource(seed)
	rng := rand.New(s)
	g := newGenerator(rng, 1+rng.Intn(4), []int{20, 400, 20000}[rng.Intn(3)])
	g.witness = rng.Intn(4) == 0
	g.source = s
	return g
}

func newGenerator(rng *rand.Rand, shards int, maxCmd int) *generator {
	g := &generator{rng: rng, replicas: map[replicaKey]*genReplica{}, maxCmd: maxCmd}
	for i := 1; i <= shards; i++ {
		k := replicaKey{uint64(i), uint64(1 + i%3)}
		g.keys = append(g.keys, k)
		g.replicas[k] = &genReplica{term: 1}
	}
	return g
}

// op is one call of the log. apply makes it; it is used for the log and for its model. uds is what it saves, or names its
// replica.
type op struct {
	what  string
	uds   []raftpb.Update
	apply func(l raftio.ILogDB) error
}

// String says what x does. It costs more than to do it in memory, so it is made for failures alone.
func (x op) String() string {
	s := x.what
	for i := range x.uds {
		ud := &x.uds[i]
		s += fmt.Sprintf(" %v state %+v snapshot at %d entries %d", replicaKey{ud.ShardID, ud.ReplicaID}, ud.State, ud.Snapshot.Index, len(ud.EntriesToSave))
		if len(ud.EntriesToSave) > 0 {
			s += fmt.Sprintf(" from %d", ud.EntriesToSave[0].Index)
		}
	}
	return s
}

// source is a rand.Source64 (SplitMix64) whose state can be copied.
type source uint64

func newSource(seed int64) *source {
	s := source(seed)
	return &s
}

func (s *source) Uint64() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func (s *source) Int63() int64    { return int64(s.Uint64() >> 1) }
func (s *source) Seed(seed int64) { *s = source(seed) }

// randomBytes is where the commands of entries are cut from. A piece of it is found nowhere else in it.
var randomBytes = func() []byte {
	b := make([]byte, 1<<20)
	_, _ = rand.New(newSource(1)).Read(b)
	return b
}()

func (g *generator) state(r *genReplica) raftpb.State {
	return raftpb.State{Term: r.term, Vote: r.vote, Commit: r.commit}
}

func (g *generator) entries(r *genReplica, first uint64, n int) []raftpb.Entry {
	ents := make([]raftpb.Entry, 0, n)
	for i := 0; i < n; i++ {
		e := raftpb.Entry{Index: first + uint64(i), Term: r.term, Type: raftpb.EntryType(g.rng.Intn(3))}
		if g.witness && g.rng.Intn(8) > 0 {
			e.Type = raftpb.MetadataEntry
			ents = append(ents, e)
			continue
		}
		if g.rng.Intn(4) > 0 {
			e.Key, e.ClientID, e.SeriesID = g.rng.Uint64(), g.rng.Uint64(), g.rng.Uint64()
			e.RespondedTo = uint64(g.rng.Intn(1000))
		}
		if n := g.rng.Intn(g.maxCmd + 1); n > 0 {
			at := g.rng.Intn(len(randomBytes) - n + 1)
			e.Cmd = randomBytes[at : at+n : at+n]
		}
		ents = append(ents, e)
	}
	return ents
}

func (g *generator) snapshot(k replicaKey, index, term uint64) raftpb.Snapshot {
	return raftpb.Snapshot{ShardID: k.shardID, Index: index, Term: term, Filepath: fmt.Sprintf("ss-%d", index),
		Type: raftpb.OnDiskStateMachine, Membership: raftpb.Membership{ConfigChangeId: 1, Addresses: map[uint64]string{1: "a"}}}
}

// update makes one replica's part of a save.
func (g *generator) update(k replicaKey) raftpb.Update {
	r := g.replicas[k]
	ud := raftpb.Update{ShardID: k.shardID, ReplicaID: k.replicaID}
	r.started = true
	switch p := g.rng.Intn(20); {
	case p < 3: // a new term, perhaps a vote
		r.term += uint64(1 + g.rng.Intn(2))
		r.vote = uint64(g.rng.Intn(4))
	case p < 7 && r.commit < r.last: // the commit index alone
		r.commit += uint64(g.rng.Int63n(int64(r.last-r.commit))) + 1
	case p == 7: // a snapshot of the leader's replaces the log
		r.last += uint64(1 + g.rng.Intn(50))
		r.commit, r.snapshot, r.compacted = r.last, r.last, r.last
		ud.Snapshot = g.snapshot(k, r.last, r.term)
		if g.rng.Intn(2) == 0 {
			ud.EntriesToSave = g.entries(r, r.last+1, 1+g.rng.Intn(5))
			r.last += uint64(len(ud.EntriesToSave))
		}
	default:
		first := r.last + 1
		if r.last > r.commit && g.rng.Intn(4) == 0 { // another leader's entries
			r.term++
			first = r.commit + 1 + uint64(g.rng.Int63n(int64(r.last-r.commit)))
		}
		ud.EntriesToSave = g.entries(r, first, 1+g.rng.Intn(12))
		r.last = ud.EntriesToSave[len(ud.EntriesToSave)-1].Index
		if g.rng.Intn(3) == 0 {
			r.commit += uint64(g.rng.Int63n(int64(r.last-r.commit) + 1))
		}
	}
	ud.State = g.state(r)
	return ud
}

func (g *generator) next() op {
	k := g.keys[g.rng.Intn(len(g.keys))]
	r := g.replicas[k]
	of := []raftpb.Update{{ShardID: k.shardID, ReplicaID: k.replicaID}}
	switch p := g.rng.Intn(30); {
	case p == 0:
		b := raftpb.Bootstrap{Addresses: map[uint64]string{uint64(g.rng.Intn(3)): "x"}, Type: raftpb.OnDiskStateMachine}
		return op{"bootstrap", of, func(l raftio.ILogDB) error { return l.SaveBootstrapInfo(k.shardID, k.replicaID, b) }}
	case p <= 3 && r.commit > r.snapshot:
		r.snapshot += 1 + uint64(g.rng.Int63n(int64(r.commit-r.snapshot)))
		ud := raftpb.Update{ShardID: k.shardID, ReplicaID: k.replicaID, Snapshot: g.snapshot(k, r.snapshot, r.term)}
		return op{"snapshot", []raftpb.Update{ud}, func(l raftio.ILogDB) error { return l.SaveSnapshots([]raftpb.Update{ud}) }}
	case p <= 6 && r.snapshot > r.compacted:
		r.compacted += 1 + uint64(g.rng.Int63n(int64(r.snapshot-r.compacted)))
		to := r.compacted
		return op{fmt.Sprintf("compact to %d", to), of, func(l raftio.ILogDB) error { return l.RemoveEntriesTo(k.shardID, k.replicaID, to) }}
	}
	var uds []raftpb.Update
	for _, i := range g.rng.Perm(len(g.keys))[:1+g.rng.Intn(min(3, len(g.keys)))] {
		uds = append(uds, g.update(g.keys[i]))
	}
	return op{"save", uds, func(l raftio.ILogDB) error { return l.SaveRaftState(uds, 1) }}
}

// clone copies a generator of newSeeded: both go on the same way.
func (g *generator) clone() *generator {
	s := *g.source
	c := *g
	c.source, c.rng, c.replicas = &s, rand.New(&s), map[replicaKey]*genReplica{}
	for k, r := range g.replicas {
		x := *r
		c.replicas[k] = &x
	}
	return &c
}

// clone copies the model.
func (m *memoryLog) clone() *memoryLog {
	c := newMemoryLog()
	for k, r := range m.replicas {
		x := *r
		x.entries = append([]raftpb.Entry(nil), r.entries...)
		c.replicas[k] = &x
	}
	return c
}

// view is what dragonboat can learn of one replica.
type view struct {
	state    raftpb.State
	noState  bool
	first    uint64
	entries  []raftpb.Entry
	snapshot raftpb.Snapshot
	boot     *raftpb.Bootstrap
}

func viewOf(l raftio.ILogDB, k replicaKey) (view, error) {
	var v view
	ss, err := l.GetSnapshot(k.shardID, k.replicaID)
	if err != nil {
		return v, err
	}
	v.snapshot = ss
	if b, err := l.GetBootstrapInfo(k.shardID, k.replicaID); err == nil {
		v.boot = &b
	} else if !errors.Is(err, raftio.ErrNoBootstrapInfo) {
		return v, err
	}
	rs, err := l.ReadRaftState(k.shardID, k.replicaID, ss.Index)
	if errors.Is(err, raftio.ErrNoSavedLog) {
		v.noState = true
		return v, nil
	}
	if err != nil {
		return v, err
	}
	v.state = rs.State
	// What dragonboat's reader sees begins behind the snapshot.
	v.first = ss.Index + 1
	if last := rs.FirstIndex + rs.EntryCount - 1; rs.EntryCount > 0 && last > ss.Index {
		v.entries, _, err = l.IterateEntries(nil, 0, k.shardID, k.replicaID, v.first, last+1, noLimit)
		if err == nil && uint64(len(v.entries)) != last-ss.Index {
			err = fmt.Errorf("%v: %d entries from %d, want up to %d", k, len(v.entries), v.first, last)
		}
	}
	return v, err
}

// diff says how got differs from want, leaving the commit index out.
func (want view) diff(got view) error {
	if want.noState != got.noState || want.state.Term != got.state.Term || want.state.Vote != got.state.Vote {
		return fmt.Errorf("state %+v (none %t), want %+v (none %t)", got.state, got.noState, want.state, want.noState)
	}
	if want.snapshot.Index != got.snapshot.Index || want.snapshot.Term != got.snapshot.Term || want.snapshot.Filepath != got.snapshot.Filepath {
		return fmt.Errorf("snapshot %+v, want %+v", got.snapshot, want.snapshot)
	}
	if (want.boot == nil) != (got.boot == nil) || want.boot != nil && fmt.Sprint(*want.boot) != fmt.Sprint(*got.boot) {
		return fmt.Errorf("bootstrap %+v, want %+v", got.boot, want.boot)
	}
	if len(want.entries) != len(got.entries) || want.first != got.first {
		return fmt.Errorf("%d entries from %d, want %d from %d", len(got.entries), got.first, len(want.entries), want.first)
	}
	for i := range want.entries {
		if !equalEntry(&want.entries[i], &got.entries[i]) {
			return fmt.Errorf("entry %+v, want %+v", got.entries[i], want.entries[i])
		}
	}
	return nil
}

func equalEntry(a, b *raftpb.Entry) bool {
	return a.Term == b.Term && a.Index == b.Index && a.Type == b.Type && a.Key == b.Key && a.ClientID == b.ClientID &&
		a.SeriesID == b.SeriesID && a.RespondedTo == b.RespondedTo && bytes.Equal(a.Cmd, b.Cmd)
}

// sameAs compares the log with its model. Commit indexes may be behind the model's if durableOnly.
func sameAs(l raftio.ILogDB, m *memoryLog, keys []replicaKey, behind bool) error {
	for _, k := range keys {
		want, err := viewOf(m, k)
		if err != nil {
			return fmt.Errorf("model: %w", err)
		}
		got, err := viewOf(l, k)
		if err != nil {
			return err
		}
		if err := want.diff(got); err != nil {
			return fmt.Errorf("shard %d replica %d: %w", k.shardID, k.replicaID, err)
		}
		if got.state.Commit != want.state.Commit && !(behind && got.state.Commit < want.state.Commit) {
			return fmt.Errorf("shard %d replica %d: commit %d, want %d", k.shardID, k.replicaID, got.state.Commit, want.state.Commit)
		}
		if !got.noState && got.state.Commit < got.snapshot.Index {
			return fmt.Errorf("shard %d replica %d: commit %d is below the snapshot at %d", k.shardID, k.replicaID, got.state.Commit, got.snapshot.Index)
		}
	}
	return nil
}

func testOptions(segmentBytes int64) Options {
	o := Options{Kind: KindOwn, Dir: "/log", SegmentBytes: segmentBytes, RewriteBytesPerSecond: 1 << 40}
	o.EnsureDefaults()
	return o
}

func TestModelWithRestarts(t *testing.T) {
	t.Parallel()
	seeds := int64(30)
	if testing.Short() {
		seeds = 6
	}
	for seed := int64(1); seed <= seeds; seed++ {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			rng := rand.New(rand.NewSource(seed))
			fs := newCrashFS()
			o := crashOptions(seed)
			l, err := openFS(o, fs)
			require.NoError(t, err)
			g := newGenerator(rng, 1+rng.Intn(6), []int{10, 300, 5000}[rng.Intn(3)])
			g.witness = rng.Intn(3) == 0
			m := newMemoryLog()
			for i := 0; i < 1500; i++ {
				o1 := g.next()
				require.NoError(t, o1.apply(m), "%v", o1)
				require.NoError(t, o1.apply(l), "%v", o1)
				if rng.Intn(100) == 0 {
					require.NoError(t, sameAs(l, m, g.keys, false), "step %d: %v", i, o1)
					require.NoError(t, l.Check())
				}
				if rng.Intn(200) == 0 {
					require.NoError(t, l.Close())
					l, err = openFS(o, fs)
					require.NoError(t, err)
					require.NoError(t, sameAs(l, m, g.keys, false), "restart at step %d: %v", i, o1)
					require.NoError(t, l.Check())
				}
			}
			require.NoError(t, l.Close())
		})
	}
}
