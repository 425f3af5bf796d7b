package queue_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/queuetest"
)

// TestLateCopies applies every command of a run again, after it and after commands that follow it. A copy must be
// refused or harmless, which means, by command:
//
//   - Enqueue: a message that was stored before is not stored again. As long as its producer's epoch is current and
//     its seq not below low, the copy is answered with the first address (G2). A message that was refused may be
//     stored now: that is its first commit.
//   - Ack, Expire, Group, Home: nothing changes that a reader can see, but the applied index and the clock. An ack that was
//     refused for a dead letter in the middle of its export may finish it once that was taken back: that is its first commit,
//     and its caller was told that the outcome is unknown. After a redrive of the letter a home lets no such copy be under way in that
//     epoch (TestLateCopyOfARefusedPurge of queue/home), so none is made here.
//   - Retention: what groups have finished, may receive, or have dead does not change, except for messages whose time
//     to live is over. What everybody has finished may be deleted, and what somebody has not may be parked.
//
// Everything is compared with the naive state too.
func TestLateCopies(t *testing.T) {
	machines := newShards(t)
	rapid.Check(t, func(rt *rapid.T) {
		p := &pair{t: t, real: machines.open(), naive: newNaive()}
		g := newGenerator(rt, p.naive)
		g.strict, g.idempotent = true, true
		l := &lateCopies{pair: p}
		for range 1 + g.intn("commands", 30) {
			l.first(rt, g.command())
			for _, i := range l.choose(g) {
				if !l.redrivenSince(i) {
					l.again(rt, i)
				}
			}
			p.compare(rt)
		}
	})
}

// lateCopies is a run with what its commands were answered first.
type lateCopies struct {
	*pair
	commands [][]byte
	// stored holds, by command, publish and message, the first address; 0 while it was never stored.
	stored [][][]queue.Address
	// acks holds, by command, what each address of an ack was answered last; nil for others, and for those refused as a whole.
	acks [][]queue.AckState
	// rounds holds, by command, the dead letters that an ack was refused for, and the round that each was in first.
	rounds []map[queue.Address]uint32
}

func (l *lateCopies) first(t *rapid.T, c queue.Command) {
	l.apply(t, c)
	l.commands = append(l.commands, l.log[len(l.log)-1])
	var stored [][]queue.Address
	if c, ok := c.(*queue.Enqueue); ok {
		stored = make([][]queue.Address, len(c.Publishes))
		for i := range c.Publishes {
			stored[i] = make([]queue.Address, len(c.Publishes[i].Messages))
		}
	}
	l.stored, l.acks, l.rounds = append(l.stored, stored), append(l.acks, nil), append(l.rounds, map[queue.Address]uint32{})
	l.remember(len(l.commands)-1, l.result)
}

func (l *lateCopies) remember(i int, r queue.Result) {
	l.acks[i] = slices.Clone(r.Acks)
	if slices.Contains(r.Acks, queue.AckDead) {
		c := l.decoded(i).(*queue.Ack)
		for k, a := range addressesOf(c) {
			if _, again := l.rounds[i][a]; !again && r.Acks[k] == queue.AckDead {
				l.rounds[i][a] = l.naive.groups[c.Group].round(a)
			}
		}
	}
	for k, p := range r.Publishes {
		for m := range p.Messages {
			if l.stored[i][k][m] == 0 {
				l.stored[i][k][m] = p.Messages[m].Address
			}
		}
	}
}

// redrivenSince says whether an ack of the present epoch was refused for a dead letter that was redriven since.
func (l *lateCopies) redrivenSince(i int) bool {
	if len(l.rounds[i]) == 0 {
		return false
	}
	c := l.decoded(i).(*queue.Ack)
	g := l.naive.groups[c.Group]
	if g == nil || g.info.Epoch != c.Epoch {
		return false
	}
	for a, round := range l.rounds[i] {
		if g.round(a) > round {
			return true
		}
	}
	return false
}

// round is how often a message was redriven, 0 once it is finished.
func (g *naiveGroup) round(a queue.Address) uint32 {
	switch {
	case g.dead[a] != nil:
		return g.dead[a].Round
	case g.retries[a] != nil:
		return g.retries[a].Round
	}
	return 0
}

func (l *lateCopies) decoded(i int) queue.Command {
	c, err := queue.DecodeCommand(l.commands[i])
	require.NoError(l.t, err)
	return c
}

func addressesOf(c *queue.Ack) (list []queue.Address) {
	for _, x := range c.Ranges {
		for a := x.First; a <= x.Last; a++ {
			list = append(list, a)
		}
	}
	return list
}

// choose draws which commands come again: all of a short run, the last one and some of a long one.
func (l *lateCopies) choose(g *generator) (list []int) {
	n := len(l.commands)
	if n <= 8 {
		for i := range n {
			list = append(list, i)
		}
		return list
	}
	list = append(list, n-1)
	for range 6 {
		list = append(list, g.intn("again", n))
	}
	return list
}

func (l *lateCopies) again(t *rapid.T, i int) {
	before := l.naive.observe()
	l.applyBytes(t, l.commands[i])
	after := l.naive.observe()
	c := l.decoded(i)
	if err := l.harmless(i, c, before, after); err != nil {
		t.Fatalf("a late copy of command %d, %s, did harm: %v\nanswer %+v, before %v", i, describeCommand(c), err, l.result, l.acks[i])
	}
	l.remember(i, l.result)
}

func (l *lateCopies) harmless(i int, c queue.Command, before, after observed) error {
	switch c := c.(type) {
	case *queue.Enqueue:
		return l.harmlessEnqueue(i, c, before, after)
	case *queue.Ack:
		gone := l.finishedDead(i, c)
		return same(before.timeless().without(c.Group, gone), after.timeless().without(c.Group, gone))
	case *queue.Retention:
		return same(essence(before, after.Meta.Clock), essence(after, after.Meta.Clock))
	}
	return same(before.timeless(), after.timeless())
}

// finishedDead are the dead letters that a copy of an ack finished, having been refused for them. What it finished beside them is not among
// them, and so shows.
func (l *lateCopies) finishedDead(i int, c *queue.Ack) map[queue.Address]bool {
	gone := map[queue.Address]bool{}
	for k, a := range addressesOf(c) {
		if k < len(l.result.Acks) && k < len(l.acks[i]) && l.result.Acks[k] == queue.AckDone && l.acks[i][k] == queue.AckDead {
			gone[a] = true
		}
	}
	return gone
}

// without leaves out some dead letters of a group, and the counts of what goes with them.
func (o observed) without(id queue.GroupID, gone map[queue.Address]bool) observed {
	if len(gone) == 0 {
		return o
	}
	m := &o.Meta.Counters
	m.Messages, m.Bytes, m.Parked, m.Delayed, m.Reclaimed = 0, 0, 0, 0, 0
	o.Due, o.NextDue = but(o.Due, func(d queue.DelayedKey) bool { return gone[d.Address] }), 0
	o.Messages = but(o.Messages, func(m queue.StoredMessage) bool { return gone[m.Address] })
	o.Groups = slices.Clone(o.Groups)
	for i := range o.Groups {
		g := &o.Groups[i]
		if g.Info.ID != id {
			continue
		}
		g.Info.Exports, g.Info.Counters.Dead, g.Info.Counters.Purged = 0, 0, 0
		dead := func(d queue.DeadLetter) bool { return gone[d.Address] }
		g.Dead, g.Exports = but(g.Dead, dead), but(g.Exports, dead)
		g.States = but(g.States, func(s observedState) bool { return gone[s.Address] })
	}
	return o
}

// but returns a list without some of it, nil if nothing is left.
func but[T any](list []T, leave func(T) bool) (out []T) {
	for _, x := range list {
		if !leave(x) {
			out = append(out, x)
		}
	}
	return out
}

func same(before, after observed) error {
	if reflect.DeepEqual(before, after) {
		return nil
	}
	return fmt.Errorf("%s", difference("", reflect.ValueOf(before), reflect.ValueOf(after)))
}

// difference names the fields that differ, and both their values.
func difference(path string, before, after reflect.Value) (text string) {
	switch kind := before.Kind(); {
	case reflect.DeepEqual(before.Interface(), after.Interface()):
	case kind == reflect.Struct:
		for i := range before.NumField() {
			text += difference(path+"."+before.Type().Field(i).Name, before.Field(i), after.Field(i))
		}
	case kind == reflect.Slice && before.Len() == after.Len():
		for i := range before.Len() {
			text += difference(fmt.Sprintf("%s[%d]", path, i), before.Index(i), after.Index(i))
		}
	default:
		text = fmt.Sprintf("\n%s before: %+v\n%s after:  %+v", path, before, path, after)
	}
	return text
}

func (l *lateCopies) harmlessEnqueue(i int, c *queue.Enqueue, before, after observed) error {
	fresh := 0
	for k := range c.Publishes {
		r := queue.PublishResult{Code: l.result.Code}
		if l.result.Code == code.OK {
			r = l.result.Publishes[k]
		}
		for m := range c.Publishes[k].Messages {
			first := l.stored[i][k][m]
			var answer queue.MessageResult
			if r.Code == code.OK {
				answer = r.Messages[m]
			}
			switch {
			case first != 0 && answer.Code == code.OK && (!answer.Duplicate || answer.Address != first):
				return fmt.Errorf("publish %d message %d was stored at %s, the copy is answered %+v", k, m, first, answer)
			case first != 0 && answer.Code != code.OK && l.mustKnow(&c.Publishes[k], m, i, k):
				return fmt.Errorf("publish %d message %d was stored at %s, the copy is refused: %+v", k, m, first, r)
			case first == 0 && answer.Code == code.OK && !answer.Duplicate:
				fresh++
			}
		}
	}
	if fresh == 0 && l.nothingRefused() {
		return same(before.timeless(), after.timeless())
	}
	if got := after.Meta.Counters.Published - before.Meta.Counters.Published; got != uint64(fresh) {
		return fmt.Errorf("%d messages were stored, %d of them for the first time", got, fresh)
	}
	return nil
}

// nothingRefused says whether the copy was answered with duplicates only: then a queue that drops its oldest had to
// make no room either.
func (l *lateCopies) nothingRefused() bool {
	if l.naive.options.Overflow == queue.OverflowReject {
		return true
	}
	for _, p := range l.result.Publishes {
		for _, m := range p.Messages {
			if m.Code != code.OK {
				return false
			}
		}
		if p.Code != code.OK {
			return false
		}
	}
	return true
}

// mustKnow says whether the answer to a stored message must still be known: its producer is at the same epoch, and
// has declared no seq of the publish answered. A retired queue refuses everything; so does an atomic publish, or one
// with an expected last address, as a whole.
func (l *lateCopies) mustKnow(p *queue.Publish, m, i, k int) bool {
	x := l.naive.producers[p.Producer]
	if l.naive.retired || x == nil || x.epoch != p.ProducerEpoch {
		return false
	}
	whole := p.Atomic || p.CheckLast
	for at := range p.Messages {
		if (at == m || whole) && (l.stored[i][k][at] == 0 || p.Messages[at].Seq < x.low) {
			return false
		}
	}
	return true
}

// essence is what housekeeping must not change at a time: what groups may receive, have finished or have dead,
// without where messages lie, and without those whose time to live is over.
func essence(o observed, clock queue.Stamp) observed {
	o = o.timeless()
	c := &o.Meta.Counters
	c.Messages, c.Bytes, c.Parked, c.Delayed, c.Reclaimed, c.Expired = 0, 0, 0, 0, 0, 0
	o.Meta.Line = 0
	o.Messages, o.NextDue = nil, 0
	ranOut := map[queue.Address]bool{}
	groups := make([]observedGroup, len(o.Groups))
	for i, g := range o.Groups {
		g.InPlace, g.Stragglers, g.Retrying = nil, nil, nil
		g.Deliverables = nil
		for _, d := range o.Groups[i].Deliverables {
			if d.ExpiresAt != 0 && d.ExpiresAt <= clock {
				ranOut[d.Address] = true
				continue
			}
			d.Parked = false
			g.Deliverables = append(g.Deliverables, d)
		}
		g.Dead = append([]queue.DeadLetter(nil), g.Dead...)
		for k := range g.Dead {
			g.Dead[k].Message.Parked = false
		}
		k := &g.Info.Counters
		k.Unfinished, k.Expired = k.Unfinished+k.Expired, 0
		k.Retrying, k.Leased = 0, 0
		g.States = nil
		groups[i] = g
	}
	o.Groups = groups
	var due []queue.DelayedKey
	for _, d := range o.Due {
		for i := range groups {
			if !ranOut[d.Address] && delivers(groups[i], d.Address) {
				due = append(due, d)
				break
			}
		}
	}
	o.Due = due
	return o
}

func delivers(g observedGroup, a queue.Address) bool {
	for _, d := range g.Deliverables {
		if d.Address == a {
			return true
		}
	}
	return false
}

// TestRepeatDropsNothing: on a full queue that drops its oldest, what was answered before is answered again without
// making room for it; so is what is refused anyhow.
func TestRepeatDropsNothing(t *testing.T) {
	m := queuetest.New(t)
	g := create(t, m, "g", queue.Start{})
	o := m.Meta().Options
	o.MaxMessages, o.Overflow, o.MaxBodyBytes = 3, queue.OverflowDropOldest, 10
	require.Equal(t, code.OK, m.Do(&queue.Retention{Stamp: t0, Options: &o}).Code)
	p := publish(t0, "a", "b")
	p.Publishes[0].Producer = queue.Producer{Kind: queue.ProducerClient, ID: 1}
	p.Publishes[0].Low = 1
	p.Publishes[0].Messages[0].Seq, p.Publishes[0].Messages[1].Seq = 1, 2
	m.Do(p)
	m.Do(publish(t0, "c"))
	large := publish(t0, "larger than the queue allows")
	stale := publish(t0, "too late")
	stale.Publishes[0].CheckLast = true
	for _, again := range []queue.Command{p, large, stale} {
		m.Do(again)
		list, _, err := m.Deliverables(g, 0, 10, true)
		require.NoError(t, err)
		require.Len(t, list, 3, "%+v", again)
	}
	m.Do(publish(t0, "d"))
	list, _, err := m.Deliverables(g, 0, 10, true)
	require.NoError(t, err)
	require.Len(t, list, 3)
	require.Equal(t, queue.Address(2), list[0].Address)
	m.RequireSame()
}

// TestRefusedPublishLeavesNoEpoch: a publish that is refused as a whole stores nothing of its producer, so one after
// it in the same command is answered as if it came in a command of its own.
func TestRefusedPublishLeavesNoEpoch(t *testing.T) {
	m := queuetest.New(t)
	c := publish(t0, "refused")
	c.Publishes = append(c.Publishes, publish(t0, "stored").Publishes[0])
	for i := range c.Publishes {
		c.Publishes[i].Producer = queue.Producer{Kind: queue.ProducerClient, ID: 1}
		c.Publishes[i].Messages[0].Seq = 1
	}
	c.Publishes[0].ProducerEpoch = 2
	c.Publishes[0].CheckLast, c.Publishes[0].ExpectedLast = true, 7
	r := m.Do(c)
	require.Equal(t, code.ExpectedLastAddress, r.Publishes[0].Code)
	require.Equal(t, code.OK, r.Publishes[1].Code)
	m.RequireSame()
}
