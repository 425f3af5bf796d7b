package queue_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

const t0 queue.Stamp = 1_700_000_000_000

func publish(stamp queue.Stamp, bodies ...string) *queue.Enqueue {
	p := queue.Publish{}
	for _, b := range bodies {
		p.Messages = append(p.Messages, queue.Message{Body: []byte(b)})
	}
	return &queue.Enqueue{Stamp: stamp, Publishes: []queue.Publish{p}}
}

func config(deadLetterQueue string) queue.GroupConfig {
	c := queue.GroupConfig{DeadLetterQueue: deadLetterQueue}
	c.EnsureDefaults()
	return c
}

func create(t testing.TB, m *queuetest.Machine, name string, start queue.Start) queue.GroupID {
	t.Helper()
	r := m.Do(&queue.Group{Stamp: t0, Op: queue.GroupCreate, Name: name, Config: config(""), OperationID: uint64(len(m.Log)) + 1, Start: start, FirstHome: 1})
	require.Equal(t, code.OK, r.Code)
	return r.Group
}

func TestPublishAckReclaim(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	r := m.Do(publish(t0, "a", "b", "c"))
	require.Equal(t, code.OK, r.Publishes[0].Code)
	require.Equal(t, queue.Address(3), r.Publishes[0].Messages[2].Address)
	list, next, err := m.Deliverables(g, 0, 10, false)
	require.NoError(t, err)
	require.Zero(t, next)
	require.Len(t, list, 3)
	r = m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 2, Last: 4}, {First: 2, Last: 2}}})
	require.Equal(t, []queue.AckState{queue.AckDone, queue.AckDone, queue.AckUnknown, queue.AckAlready}, r.Acks)
	list, _, err = m.Deliverables(g, 0, 10, false)
	require.NoError(t, err)
	require.Len(t, list, 1)
	m.RequireSame()
	m.Do(&queue.Ack{Stamp: t0, Group: g, Epoch: 1, Ranges: []queue.AddressRange{{First: 1, Last: 1}}})
	m.Do(&queue.Retention{Stamp: t0, ReclaimLine: 3})
	require.Equal(t, queue.Address(3), m.Meta().Line)
	require.Zero(t, m.Meta().Counters.Messages)
	i, _ := m.Group(g)
	require.Equal(t, 19, i.WatermarkBytes)
	m.RequireSame()
}

// TestRandomCommands applies random commands, and after each few checks every invariant; at the end a replay and a
// reopened copy must be equal (G7).
func TestRandomCommands(t *testing.T) {
	runs := 16
	if testing.Short() {
		runs = 6
	}
	for i := range runs {
		seed := uint64(i)
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) { randomRun(t, seed) })
	}
}

func randomRun(t *testing.T, seed uint64) {
	m := queuetest.New(t)
	x := &randomizer{Rand: rand.New(rand.NewPCG(seed, 1)), m: m, now: t0, small: seed%2 == 0}
	if seed%3 == 0 {
		o := queue.QueueOptions{Version: m.Meta().Options.Version, Overflow: queue.OverflowDropOldest, MaxMessages: 200}
		o.EnsureDefaults()
		require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: t0, Options: &o}).Code)
	}
	for n := range 300 {
		c := x.command()
		r := m.Do(c)
		require.NoError(t, m.Check(), "seed %d, command %d %T %+v, result %+v", seed, n, c, c, r)
		if n%37 == 0 {
			_, before, err := m.Digest()
			require.NoError(t, err)
			require.NoError(t, m.Reload())
			require.NoError(t, m.Check())
			_, after, err := m.Digest()
			require.NoError(t, err)
			require.Equal(t, before, after)
		}
	}
	m.RequireSame()
}

type randomizer struct {
	*rand.Rand
	m     *queuetest.Machine
	now   queue.Stamp
	small bool
	seq   queue.Seq
}

func (x *randomizer) address() queue.Address {
	last := int(x.m.Meta().Last)
	return queue.Address(1 + x.IntN(last+2))
}

func (x *randomizer) group() queue.GroupInfo {
	all := x.m.Groups()
	if len(all) == 0 {
		return queue.GroupInfo{ID: 1}
	}
	return all[x.IntN(len(all))]
}

func (x *randomizer) command() queue.Command {
	x.now += queue.Stamp(x.IntN(400))
	if x.IntN(100) == 0 {
		x.now += 7200 * 1000
	}
	switch n := x.IntN(100); {
	case n < 30:
		return x.enqueue()
	case n < 62:
		return x.ack()
	case n < 82:
		return x.expire()
	case n < 86:
		g := x.group()
		return &queue.Home{Stamp: x.now, Group: g.ID, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: queue.ReplicaID(1 + x.IntN(3))}
	case n < 92:
		return x.groupCommand()
	default:
		return x.retention()
	}
}

func (x *randomizer) enqueue() queue.Command {
	c := &queue.Enqueue{Stamp: x.now}
	for range 1 + x.IntN(3) {
		p := queue.Publish{Atomic: x.IntN(4) == 0}
		withSeq := x.IntN(2) == 0
		if withSeq {
			p.Producer = queue.Producer{Kind: queue.ProducerClient, ID: uint64(1 + x.IntN(3))}
			p.Low = queue.Seq(x.IntN(int(x.seq) + 1))
		}
		size := 1 + x.IntN(40)
		if x.small {
			size = 1 + x.IntN(5)
		}
		for range size {
			m := queue.Message{Body: make([]byte, x.IntN(50))}
			if withSeq {
				x.seq++
				m.Seq = x.seq
			}
			if x.IntN(8) == 0 {
				m.VisibleAt = x.now + queue.Stamp(x.IntN(5000))
			}
			if x.IntN(10) == 0 {
				m.ExpiresAt = x.now + queue.Stamp(x.IntN(3000))
			}
			if x.IntN(10) == 0 {
				m.DedupID = []byte{byte(x.IntN(20))}
			}
			p.Messages = append(p.Messages, m)
		}
		c.Publishes = append(c.Publishes, p)
	}
	return c
}

func (x *randomizer) ack() queue.Command {
	g := x.group()
	c := &queue.Ack{Stamp: x.now, Group: g.ID, Epoch: g.Epoch}
	for range 1 + x.IntN(4) {
		a := x.address()
		if x.IntN(3) == 0 {
			a = g.Floor + 1
		}
		c.Ranges = append(c.Ranges, queue.AddressRange{First: a, Last: a + queue.Address(x.IntN(90))})
	}
	return c
}

func (x *randomizer) expire() queue.Command {
	g := x.group()
	c := &queue.Expire{Stamp: x.now, Group: g.ID, Epoch: g.Epoch}
	for range 1 + x.IntN(6) {
		e := queue.ExpireEntry{Kind: queue.ExpireKind(1 + x.IntN(7)), Address: x.address(), Attempts: uint32(x.IntN(6)), Reason: "x"}
		state, _, _, _ := x.m.RetryOf(g.ID, e.Address)
		e.Change = state.Change
		if e.Kind == queue.ExpireExport {
			e.ExportState = queue.ExportState(x.IntN(4))
		}
		if e.Kind == queue.ExpireLease {
			e.Lease, e.NotBefore, e.Deadline = queue.LeaseName{Epoch: g.Epoch, Number: 1}, x.now-queue.Stamp(x.IntN(2000)), x.now+2000
		}
		c.Entries = append(c.Entries, e)
	}
	dead, _, _ := x.m.DeadLetters(g.ID, 0, 5, false)
	for _, d := range dead {
		e := queue.ExpireEntry{Kind: queue.ExpireRedrive, Address: d.Address, Change: d.Change}
		if x.IntN(2) == 0 {
			e.Kind, e.ExportState = queue.ExpireExport, d.ExportState+1
			if d.ExportState == queue.ExportNone {
				e.ExportState = queue.ExportExporting
			}
		}
		c.Entries = append(c.Entries, e)
	}
	return c
}

func (x *randomizer) groupCommand() queue.Command {
	g := x.group()
	start := queue.Start{Kind: queue.StartKind(x.IntN(4))}
	switch start.Kind {
	case queue.StartAddress:
		start.At = uint64(x.address())
	case queue.StartTime:
		start.At = uint64(x.now) - uint64(x.IntN(10_000))
	}
	switch n := x.IntN(10); {
	case n < 5:
		dlq := ""
		if x.IntN(2) == 0 {
			dlq = "dlq"
		}
		return &queue.Group{Stamp: x.now, Op: queue.GroupCreate, Name: string(rune('a' + x.IntN(4))), OperationID: x.Uint64() | 1, Start: start, Config: config(dlq), FirstHome: 1}
	case n < 8:
		return &queue.Group{Stamp: x.now, Op: queue.GroupReset, ID: g.ID, ExpectedEpoch: g.Epoch, Start: start}
	}
	return &queue.Group{Stamp: x.now, Op: queue.GroupDelete, ID: g.ID, ExpectedEpoch: g.Epoch}
}

func (x *randomizer) retention() queue.Command {
	c := &queue.Retention{Stamp: x.now}
	switch x.IntN(10) {
	case 8, 9:
		chores, err := x.m.Chores(x.now, 0)
		if err == nil && !chores.Empty() {
			return chores.Retention(x.now)
		}
	case 0:
		c.PurgeTo = x.address()
	case 1:
		c.DropTo = x.m.Meta().Line + queue.Address(x.IntN(50))
	case 2:
		for range 10 {
			c.Park = append(c.Park, x.address())
		}
	case 3:
		due, _ := x.m.Due(queue.DelayedKey{}, queue.MaxStamp, 10)
		for _, d := range due {
			change := queue.DelayedChange{Address: d.Address, Expected: d.VisibleAt}
			if x.IntN(2) == 0 {
				change.NewVisibleAt = d.VisibleAt + 1000
			}
			c.Delayed = append(c.Delayed, change)
		}
	case 4:
		for range 40 {
			c.Reclaim = append(c.Reclaim, x.address())
		}
	default:
		c.ReclaimLine = x.m.Meta().Last
	}
	return c
}
