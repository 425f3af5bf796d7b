package queue_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
	"github.com/tierq/tierq/queue/store"
)

// pair is the real state and the naive one, side by side.
type pair struct {
	t      testing.TB
	real   *queuetest.Machine
	naive  *naive
	log    [][]byte
	result queue.Result // of the last command
	// reached counts outcomes, if not nil.
	reached map[string]int
}

// reach notes what a command came to, item by item.
func (p *pair) reach(c queue.Command, r queue.Result) {
	if p.reached == nil {
		return
	}
	p.reached[fmt.Sprintf("%T %s", c, r.Code)]++
	if c, ok := c.(*queue.Group); ok {
		p.reached[fmt.Sprintf("group op %d %s", c.Op, r.Code)]++
	}
	for _, x := range r.Publishes {
		p.reached["publish "+x.Code.String()]++
		for _, m := range x.Messages {
			p.reached[fmt.Sprintf("message %s duplicate=%v", m.Code, m.Duplicate)]++
		}
	}
	for _, a := range r.Acks {
		p.reached[fmt.Sprintf("ack %d", a)]++
	}
	for i, x := range r.Expires {
		p.reached[fmt.Sprintf("expire %d applied=%v finished=%v dead=%v", c.(*queue.Expire).Entries[i].Kind, x.Applied, x.Finished, x.Dead)]++
	}
	for i, x := range r.Delayed {
		p.reached[fmt.Sprintf("delayed cancel=%v %s", c.(*queue.Retention).Delayed[i].NewVisibleAt == 0, x)]++
	}
}

// apply applies a command to both and compares the answers field by field.
func (p *pair) apply(t *rapid.T, c queue.Command) {
	b, err := queue.EncodeCommand(nil, c)
	if err != nil {
		t.Fatalf("the generator made a command that is refused before it is proposed: %v", err)
	}
	p.applyBytes(t, b)
}

func (p *pair) applyBytes(t *rapid.T, b []byte) {
	p.log = append(p.log, b)
	c, err := queue.DecodeCommand(b)
	if err != nil {
		t.Fatalf("decode: %v", err)
	}
	index := p.naive.applied + 1
	if e, ok := c.(*queue.Enqueue); !ok || len(e.Publishes[0].Messages) < 10 {
		t.Logf("%s: %s", index, describeCommand(c))
	}
	got, err := p.real.Apply(index, b)
	if err != nil {
		t.Fatalf("apply %s %+v: %v", index, c, err)
	}
	want := p.naive.apply(index, c)
	p.result = got
	p.reach(c, got)
	wantBytes, gotBytes := queue.EncodeResult(nil, &want), queue.EncodeResult(nil, &got)
	if string(wantBytes) != string(gotBytes) {
		t.Fatalf("%s: %s\n got %+v\nwant %+v", index, describeCommand(c), got, want)
	}
	back, err := queue.DecodeResult(gotBytes)
	if err != nil || !reflect.DeepEqual(queue.EncodeResult(nil, &back), gotBytes) {
		t.Fatalf("result does not travel: %v", err)
	}
}

func (p *pair) several(t *rapid.T, g *generator) {
	for range 1 + g.intn("several", 8) {
		p.apply(t, g.command())
	}
}

// compare compares everything that can be read.
func (p *pair) compare(t *rapid.T) {
	page := 1 + int(p.naive.applied)%7
	if p.naive.last > 80 {
		page *= 16
	}
	got, err := observe(p.real, page)
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	if want := p.naive.observe(); !reflect.DeepEqual(got, want) {
		requireSame(t, want, got)
	}
	if err := checkSums(got); err != nil {
		t.Fatal(err)
	}
	if err := p.naive.checkLanes(p.real.QueueStateMachine); err != nil {
		t.Fatal(err)
	}
	if err := p.real.Check(); err != nil {
		t.Fatalf("check: %v", err)
	}
}

// keepHouse does what the shard's housekeeper would, until there is nothing to do: it must come to an end, since an
// idle shard writes nothing, and leave nothing behind.
func (p *pair) keepHouse(t *rapid.T) {
	now := p.naive.clock
	from := queue.Address(0)
	for round := 0; ; round++ {
		c, err := p.real.Chores(now, from)
		if err != nil {
			t.Fatal(err)
		}
		if c.Empty() && c.Next == 0 {
			break
		}
		if round == 50 {
			t.Fatalf("housekeeping does not come to an end: %+v", c)
		}
		if from = c.Next; !c.Empty() {
			p.apply(t, c.Retention(now))
		}
	}
	if err := p.naive.kept(now); err != nil {
		t.Fatalf("after housekeeping: %v", err)
	}
}

// kept says what housekeeping has left undone.
func (n *naive) kept(now queue.Stamp) error {
	keeps := n.options.Mode == queue.ModeLog || len(n.groups) == 0
	line := n.last
	for _, a := range n.addresses() {
		m := n.messages[a]
		if !m.Parked && (keeps || !n.finishedByAll(a)) {
			line = min(line, a-1)
		}
		if m.Parked && !keeps && n.finishedByAll(a) {
			return fmt.Errorf("%s is parked and nobody wants it", a)
		}
		if m.ExpiresAt != 0 && m.ExpiresAt <= now && !n.held(a) {
			return fmt.Errorf("%s has run out", a)
		}
	}
	if n.line != line {
		return fmt.Errorf("the line is %s, and could be %s", n.line, line)
	}
	return nil
}

// held says whether a group has a message dead or leased.
func (n *naive) held(a queue.Address) bool {
	for _, g := range n.groups {
		if _, leased := g.leases[a]; leased || g.dead[a] != nil {
			return true
		}
	}
	return false
}

// requireSame names the part that differs first, since a whole state is long.
func requireSame(t *rapid.T, want, got observed) {
	require.Equal(t, want.Meta, got.Meta)
	require.Equal(t, want.Messages, got.Messages)
	require.Equal(t, want.Due, got.Due)
	require.Equal(t, len(want.Groups), len(got.Groups), "groups")
	for i := range want.Groups {
		require.Equal(t, want.Groups[i], got.Groups[i])
	}
	require.Equal(t, want, got)
}

func describeCommand(c queue.Command) string {
	return fmt.Sprintf("%T %+v", c, reflect.Indirect(reflect.ValueOf(c)).Interface())
}

// shards hands out fresh shards of one store, since opening a store costs more than a whole run.
type shards struct {
	t    testing.TB
	st   *store.Store
	next uint64
}

func newShards(t testing.TB) *shards { return &shards{t: t, st: queuetest.OpenStore(t)} }

func (s *shards) open() *queuetest.Machine {
	s.next++
	return queuetest.Open(s.t, s.st, s.next)
}

// TestModel drives the real state and the naive one with the same commands: most fit the state, some were decided on
// an older one, some are late copies of earlier ones, some carry stamps far ahead. Everything that can be read must be
// the same after each. Some runs begin far up, across the border of two buckets.
func TestModel(t *testing.T) {
	machines := newShards(t)
	reached := map[string]int{}
	rapid.Check(t, func(rt *rapid.T) {
		p := &pair{t: t, real: machines.open(), naive: newNaive(), reached: reached}
		g := newGenerator(rt, p.naive)
		g.huge = true
		if g.chance("across buckets", 15) {
			p.approachBucket(rt, g)
		}
		var held [][]byte // decided, on their way
		rt.Repeat(map[string]func(*rapid.T){
			"command":  func(rt *rapid.T) { g.t = rt; p.apply(rt, g.command()) },
			"commands": func(rt *rapid.T) { g.t = rt; p.several(rt, g) },
			"and more": func(rt *rapid.T) { g.t = rt; p.several(rt, g) },
			"hold back": func(rt *rapid.T) {
				g.t = rt
				b, err := queue.EncodeCommand(nil, g.command())
				if err != nil {
					rt.Fatal(err)
				}
				held = append(held, b)
			},
			"commit late": func(rt *rapid.T) {
				if len(held) == 0 {
					rt.Skip("nothing is held back")
				}
				p.applyBytes(rt, rapid.SampledFrom(held).Draw(rt, "held"))
			},
			"commit again": func(rt *rapid.T) {
				if len(p.log) == 0 {
					rt.Skip("nothing was applied")
				}
				p.applyBytes(rt, rapid.SampledFrom(p.log).Draw(rt, "again"))
			},
			"old index": func(rt *rapid.T) {
				if len(p.log) == 0 {
					rt.Skip("nothing was applied")
				}
				r, err := p.real.Apply(queue.Index(rapid.Uint64Range(0, uint64(p.naive.applied)).Draw(rt, "index")), p.log[0])
				if err != nil || r.Code != code.Unknown {
					rt.Fatalf("an old index: %+v, %v", r, err)
				}
			},
			"reopen": func(rt *rapid.T) {
				if err := p.real.Reload(); err != nil {
					rt.Fatal(err)
				}
			},
			"keep house": p.keepHouse,
			"":           p.compare,
		})
	})
	list := make([]string, 0, len(reached))
	for what, n := range reached {
		list = append(list, fmt.Sprintf("%s: %d", what, n))
	}
	slices.Sort(list)
	t.Logf("reached:\n%s", strings.Join(list, "\n"))
}

// approachBucket leads a shard shortly before address 4,096, where the second bucket of counts begins.
func (p *pair) approachBucket(t *rapid.T, g *generator) {
	bulk := func(n int) {
		m := make([]queue.Message, n)
		p.apply(t, &queue.Enqueue{Stamp: g.now, Publishes: []queue.Publish{{Messages: m}}})
	}
	for range 20 {
		bulk(200)
		p.apply(t, &queue.Retention{Stamp: g.now, PurgeTo: p.naive.last - 3})
	}
	bulk(40 + g.intn("before the bucket", 80))
}

// TestGoneBelowTheLine: an address that was gone before a group began stays gone for it when the line passes, also
// while something that the group has parked keeps its floor below.
func TestGoneBelowTheLine(t *testing.T) {
	m := queuetest.New(t)
	a := create(t, m, "a", queue.Start{})
	p := publish(t0, "1", "runs out", "3")
	p.Publishes[0].Messages[1].ExpiresAt = t0 + 1
	m.Do(p)
	m.Do(&queue.Retention{Stamp: t0 + 1, Reclaim: []queue.Address{2}})
	b := create(t, m, "b", queue.Start{})
	m.Do(&queue.Expire{Stamp: t0 + 1, Group: b, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: 1}}})
	for _, g := range []queue.GroupID{a, b} {
		m.Do(&queue.Ack{Stamp: t0 + 1, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 3, Last: 3}}})
	}
	m.Do(&queue.Ack{Stamp: t0 + 1, Group: a, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 1}}})
	m.Do(&queue.Retention{Stamp: t0 + 1, ReclaimLine: 3})
	require.Equal(t, queue.Address(3), m.Meta().Line)
	finished, err := m.Finished(b, 2)
	require.NoError(t, err)
	require.True(t, finished)
	list, _, err := m.Deliverables(b, 0, 10, true)
	require.NoError(t, err)
	require.Empty(t, list)
	m.RequireSame()
}
