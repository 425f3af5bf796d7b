package queue_test

import (
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
)

// generator draws commands that mostly fit a naive state. Its wall clock moves by itself.
type generator struct {
	t      *rapid.T
	n      *naive
	now    queue.Stamp
	nextOp uint64
	// strict leaves out what a proposer never sends: acks of addresses that do not exist yet, purges above the last
	// address, epochs and change numbers that the group has not come to. Late copies of those would be right when it has.
	strict bool
	// huge lets stamps jump by days and years.
	huge bool
	// idempotent gives every publish a producer: others are never proposed twice.
	idempotent bool
}

const modelStart queue.Stamp = 1_700_000_000_000

func newGenerator(t *rapid.T, n *naive) *generator {
	return &generator{t: t, n: n, now: modelStart, nextOp: 1}
}

// intn draws from [0, n), evenly: integers are drawn with a bias to small ones, so they are scattered. The simplest
// draw gives 0, so put the simplest choice first.
func (g *generator) intn(label string, n int) int {
	if n <= 1 {
		return 0
	}
	u := rapid.Uint64Range(0, 1<<24-1).Draw(g.t, label)
	return int((u * 0x9e3779b97f4a7c15 >> 32) % uint64(n))
}

// chance is true in percent of 100 draws.
func (g *generator) chance(label string, percent int) bool { return g.intn(label, 100) >= 100-percent }

func pick[T any](g *generator, label string, list ...T) T {
	return list[g.intn(label, len(list))]
}

func (g *generator) stamp() queue.Stamp {
	switch g.intn("step", 12) {
	case 8:
		g.now += 60_000
	case 9:
		g.now += 6 * 60_000
	case 10:
		if g.huge {
			g.now += queue.Stamp(pick(g, "jump", uint64(queue.Hour), 25*queue.Hour))
		}
	case 11:
		if g.huge && g.chance("huge", 30) {
			return g.now + 400*queue.Day // the clock follows by an hour only
		}
	default:
		g.now += queue.Stamp(g.intn("ms", 2000))
	}
	if g.chance("old", 10) {
		return g.now - queue.Stamp(g.intn("age", 100_000))
	}
	return g.now
}

func (g *generator) command() queue.Command {
	s := g.stamp()
	if len(g.n.groups) == 0 && (g.strict || g.chance("first group", 60)) {
		return g.create(s)
	}
	if g.strict && g.n.last == 0 {
		return g.enqueue(s)
	}
	switch k := g.intn("command", 20); {
	case k < 6:
		return g.enqueue(s)
	case k < 9:
		return g.ack(s)
	case k < 15:
		return g.expire(s)
	case k < 16:
		return g.home(s)
	case k < 17:
		return g.group(s)
	default:
		return g.retention(s)
	}
}

// --- Enqueue ---

func (g *generator) enqueue(s queue.Stamp) *queue.Enqueue {
	c := &queue.Enqueue{Stamp: s}
	if g.chance("bulk", 6) {
		p := queue.Publish{}
		seq := queue.Seq(0)
		if g.idempotent {
			p.Producer = modelProducers[1]
			seq = g.producer(&p)
		}
		for range 65 + g.intn("bulk size", 70) {
			p.Messages = append(p.Messages, queue.Message{Seq: seq, Body: []byte("bulk")})
			if g.idempotent {
				seq++
			}
		}
		c.Publishes = append(c.Publishes, p)
		return c
	}
	for range 1 + g.intn("publishes", 3) {
		c.Publishes = append(c.Publishes, g.publish())
	}
	return c
}

var modelProducers = []queue.Producer{
	{},
	{Kind: queue.ProducerClient, ID: 1}, {Kind: queue.ProducerClient, ID: 2}, {Kind: queue.ProducerClient, ID: 3},
	{Kind: queue.ProducerOutbox, ID: 7, Sub: 9},
}

func (g *generator) publish() queue.Publish {
	p := queue.Publish{Producer: pick(g, "producer", modelProducers...)}
	if g.idempotent && p.Producer.Kind == queue.ProducerNone {
		p.Producer = modelProducers[3]
	}
	first := queue.Seq(0)
	if p.Producer.Kind != queue.ProducerNone {
		first = g.producer(&p)
	}
	p.Atomic = g.chance("atomic", 20)
	if p.CheckLast = g.chance("check last", 15); p.CheckLast {
		p.ExpectedLast = g.n.last
		if g.chance("other last", 25) {
			p.ExpectedLast = queue.Address(g.intn("expected last", int(g.n.last)+1))
		}
	}
	for i := range 1 + g.intn("messages", 4) {
		m := g.message()
		if first > 0 {
			m.Seq = first
			first += queue.Seq(1)
			if i > 0 && g.chance("gap", 8) {
				first++
			}
		}
		p.Messages = append(p.Messages, m)
	}
	return p
}

// producer fills in epoch, low and contiguity, and returns the first seq.
func (g *generator) producer(p *queue.Publish) queue.Seq {
	last, low := queue.Seq(0), queue.Seq(0)
	p.ProducerEpoch = 1
	if x := g.n.producers[p.Producer]; x != nil {
		last, low, p.ProducerEpoch = x.last, x.low, x.epoch
	}
	switch g.intn("epoch", 20) {
	case 18:
		p.ProducerEpoch++
	case 19:
		p.ProducerEpoch--
	}
	p.Contiguous = g.chance("contiguous", 20)
	first := last + 1
	switch g.intn("seq", 10) {
	case 6, 7:
		first = 1 + queue.Seq(g.intn("old seq", int(last)+1))
	case 8:
		first += queue.Seq(g.intn("ahead", 4))
	case 9:
		first = max(low, 1) + queue.ProducerWindow - 2 + queue.Seq(g.intn("window", 4))
	}
	p.Low = g.lowOf(p.Producer, first, last, low)
	return first
}

// lowOf draws a low. A strict generator's producers tell theirs always or never, as clients do.
func (g *generator) lowOf(p queue.Producer, first, last, low queue.Seq) queue.Seq {
	kind := g.intn("low", 4)
	if g.strict {
		kind = kind % 3
		if p.ID == 2 {
			kind = 3
		}
	}
	switch kind {
	case 0:
		return max(low, 1)
	case 1:
		return first
	case 2:
		return 1 + queue.Seq(g.intn("any low", int(last)+2))
	}
	return 0
}

func (g *generator) message() queue.Message {
	m := queue.Message{Body: []byte("0123456789012345678901234567890123456789")[:g.intn("body", 41)]}
	if g.chance("key", 40) {
		m.Key = []byte(pick(g, "key name", "a", "b"))
	}
	if g.chance("dedup", 20) {
		m.DedupID = []byte(fmt.Sprintf("id-%d", g.intn("dedup id", 6)))
	}
	if g.chance("header", 10) {
		m.Headers = []queue.Header{{Name: "h", Value: []byte("v")}, {Name: "empty"}}
	}
	if g.chance("delay", 25) {
		delays := []uint64{1_000, 5_000, 60_000, queue.Hour, 40 * queue.Day}
		m.VisibleAt = g.now + queue.Stamp(pick(g, "delay ms", delays...))
	}
	if g.chance("ttl", 20) {
		m.ExpiresAt = g.now + queue.Stamp(pick(g, "ttl ms", uint64(500), 5_000, 60_000))
	}
	return m
}

// --- choices from the state ---

func (g *generator) anyGroup() *naiveGroup {
	ids := g.n.groupIDs()
	if len(ids) == 0 {
		return nil
	}
	return g.n.groups[ids[g.intn("group", len(ids))]]
}

// target names a group and an epoch, right most of the time.
func (g *generator) target() (x *naiveGroup, id queue.GroupID, epoch queue.Epoch) {
	x = g.anyGroup()
	if x == nil {
		return nil, 1 + queue.GroupID(g.intn("no group", int(g.n.nextGroup)+1)), 1
	}
	id, epoch = x.info.ID, x.info.Epoch
	switch g.intn("aim", 20) {
	case 17:
		epoch--
	case 18:
		if !g.strict {
			epoch++
		}
	case 19:
		id = 1 + queue.GroupID(g.intn("other group", int(g.n.nextGroup)-1))
		if other := g.n.groups[id]; g.strict && other != nil {
			x, epoch = other, other.info.Epoch
		}
	}
	return x, id, epoch
}

// unfinished draws an address, most often one that the group has not finished.
func (g *generator) unfinished(x *naiveGroup) queue.Address {
	var list []queue.Address
	if x != nil {
		for _, a := range g.n.addresses() {
			if !x.finished(a) {
				list = append(list, a)
			}
		}
	}
	if x != nil && len(x.dead) > 0 && g.chance("dead", 35) {
		return g.dead(x)
	}
	if len(list) == 0 || g.chance("any address", 10) {
		return g.anyAddress()
	}
	return list[g.intn("address", len(list))]
}

func (g *generator) dead(x *naiveGroup) queue.Address {
	var list []queue.Address
	for a := range x.dead {
		list = append(list, a)
	}
	slices.Sort(list)
	return list[g.intn("dead letter", len(list))]
}

func (g *generator) anyAddress() queue.Address {
	extra := 2
	if g.strict {
		extra = 0
	}
	return 1 + queue.Address(g.intn("address", max(int(g.n.last)+extra, 1)))
}

func (g *generator) storedAddress() queue.Address {
	list := g.n.addresses()
	if len(list) == 0 || g.chance("any address", 10) {
		return g.anyAddress()
	}
	return list[g.intn("stored", len(list))]
}

func (g *generator) ack(s queue.Stamp) queue.Command {
	x, id, epoch := g.target()
	c := &queue.Ack{Stamp: s, Group: id, Epoch: epoch}
	for range 1 + g.intn("ranges", 4) {
		a := g.unfinished(x)
		r := queue.AddressRange{First: a, Last: a}
		if g.chance("range", 30) {
			r.Last += queue.Address(g.intn("range length", 80))
			if g.strict {
				r.Last = max(min(r.Last, g.n.last), r.First)
			}
		}
		c.Ranges = append(c.Ranges, r)
	}
	return c
}

func (g *generator) expire(s queue.Stamp) queue.Command {
	x, id, epoch := g.target()
	c := &queue.Expire{Stamp: s, Group: id, Epoch: epoch}
	for range 1 + g.intn("entries", 4) {
		c.Entries = append(c.Entries, g.expireEntry(x))
	}
	return c
}

func (g *generator) expireEntry(x *naiveGroup) queue.ExpireEntry {
	e := queue.ExpireEntry{Address: g.unfinished(x)}
	dead := false
	if x != nil {
		state := g.n.state(x, e.Address)
		e.Change, e.Attempts = state.Retry.Change, state.Retry.Attempts
		dead = x.dead[e.Address] != nil
	}
	if g.chance("old change", 12) && e.Change > 0 {
		e.Change--
	}
	kinds := []queue.ExpireKind{queue.ExpireUpdate, queue.ExpireDead, queue.ExpireLease, queue.ExpireRelease, queue.ExpireClaim}
	if dead != g.chance("wrong kind", 10) {
		kinds = []queue.ExpireKind{queue.ExpireRedrive, queue.ExpireExport}
	}
	e.Kind = pick(g, "kind", kinds...)
	switch e.Kind {
	case queue.ExpireUpdate:
		e.Attempts++
		e.NotBefore = g.now + 1000
		e.Reason = "nack"
	case queue.ExpireDead:
		e.Attempts++
		e.Reason = "attempts"
	case queue.ExpireLease:
		e.Lease = queue.LeaseName{Epoch: queue.Epoch(1 + g.intn("issued", 3)), Number: uint64(1 + g.intn("lease", 100))}
		e.NotBefore = pick(g, "begun", 0, g.now)
		e.Deadline = g.now + queue.Stamp(pick(g, "lease ms", uint64(500), 30_000))
		e.Consumer = "c"
	case queue.ExpireExport:
		e.ExportState = queue.ExportExporting
		if dead && x.dead[e.Address].ExportState == queue.ExportExporting != g.chance("wrong state", 20) {
			e.ExportState = queue.ExportDone
		}
		if g.chance("give up", 20) { // the target is gone; no target can take it
			e.ExportState = pick(g, "back", queue.ExportPending, queue.ExportNone)
		}
		e.Target = uint64(1 + g.intn("target", 8)/7)
	}
	return e
}

// --- Group and Home ---

func (g *generator) config() queue.GroupConfig {
	var c queue.GroupConfig
	c.EnsureDefaults()
	if g.chance("dead-letter queue", 40) {
		c.DeadLetterQueue = "dead"
	}
	if g.chance("delays", 10) {
		c.DelaysMs = []uint64{1, 2}
	}
	return c
}

func (g *generator) start() queue.Start {
	s := queue.Start{Kind: queue.StartKind(g.intn("start", 4))}
	switch s.Kind {
	case queue.StartAddress:
		s.At = uint64(g.intn("start address", int(g.n.last)+3))
	case queue.StartTime:
		s.At = uint64(g.now) - uint64(g.intn("start age", 20_000))
	}
	return s
}

func (g *generator) operation() uint64 {
	if g.nextOp > 1 && g.chance("known operation", 8) {
		return 1 + uint64(g.intn("operation", int(g.nextOp)-1))
	}
	g.nextOp++
	return g.nextOp - 1
}

func (g *generator) create(s queue.Stamp) *queue.Group {
	return &queue.Group{Stamp: s, Op: queue.GroupCreate, OperationID: g.operation(), Name: pick(g, "name", "a", "b", "c"),
		Start: g.start(), Config: g.config(), FirstHome: queue.ReplicaID(1 + g.intn("home", 3))}
}

func (g *generator) group(s queue.Stamp) queue.Command {
	op := queue.GroupOp(1 + g.intn("op", 4))
	if op == queue.GroupCreate {
		return g.create(s)
	}
	if op == queue.GroupDelete && g.chance("rather reset", 60) {
		op = queue.GroupReset
	}
	x, id, epoch := g.target()
	c := &queue.Group{Stamp: s, Op: op, ID: id, ExpectedEpoch: epoch}
	switch op {
	case queue.GroupReset:
		c.Start = g.start()
	case queue.GroupConfigure:
		c.Config = g.config()
		if x != nil {
			c.ExpectedVersion = x.info.ConfigVersion - uint64(g.intn("old version", 10)/9)
		}
	}
	if g.chance("operation", 30) {
		c.OperationID = g.operation()
	}
	return c
}

func (g *generator) home(s queue.Stamp) queue.Command {
	x, id, epoch := g.target()
	c := &queue.Home{Stamp: s, Group: id, ExpectedEpoch: epoch, NewHome: queue.ReplicaID(1 + g.intn("home", 3)), Released: g.chance("released", 30)}
	if x != nil {
		c.ExpectedHome = x.info.Home
	}
	if g.chance("wrong home", 10) {
		c.ExpectedHome++
	}
	return c
}

// --- Retention ---

func (g *generator) retention(s queue.Stamp) queue.Command {
	c := &queue.Retention{Stamp: s}
	if g.chance("operation", 15) {
		c.OperationID = g.operation()
	}
	last := int(g.n.last)
	switch g.intn("retention", 14) {
	case 0, 1, 2:
		c.ReclaimLine = queue.Address(g.intn("line", last+1))
	case 3, 4:
		for range 1 + g.intn("count", 4) {
			c.Reclaim = append(c.Reclaim, g.storedAddress())
		}
	case 5, 6:
		for range 1 + g.intn("count", 4) {
			c.Park = append(c.Park, g.storedAddress())
		}
		if g.chance("and line", 50) {
			c.ReclaimLine = g.n.last
		}
	case 7, 8, 9:
		g.delayedChanges(c)
	case 10:
		c.DropTo = g.low(last)
	case 11:
		c.PurgeTo = g.low(last)
	case 12:
		c.Options = g.queueOptions()
	case 13:
		c.FormatLevel = uint32(g.intn("level", 4))
		c.Retire = g.chance("retire", 2)
		if !g.strict && g.chance("forget", 40) { // else its late copy would meet an outbox that exists again
			c.Forget = []queue.Producer{{Kind: queue.ProducerOutbox, ID: 7, Sub: 9}, {Kind: queue.ProducerOutbox, ID: 7, Sub: 10}}
		}
	}
	return c
}

// low draws an address from the lower part of the partition, so that something is left.
func (g *generator) low(last int) queue.Address {
	return min(queue.Address(1+int(g.n.line)+g.intn("above the line", 8)), queue.Address(last))
}

func (g *generator) delayedChanges(c *queue.Retention) {
	for range 1 + g.intn("count", 3) {
		d := queue.DelayedChange{Address: g.storedAddress()}
		for _, a := range g.n.addresses() {
			if m := g.n.messages[a]; m.delayed && m.VisibleAt > g.n.clock && g.chance("this one", 60) {
				d.Address = a
				break
			}
		}
		if m := g.n.messages[d.Address]; m != nil {
			d.Expected = m.VisibleAt
		}
		if g.chance("wrong time", 10) {
			d.Expected++
		}
		if g.chance("reschedule", 50) {
			d.NewVisibleAt = g.now + queue.Stamp(1_000+g.intn("new delay", 100_000))
		}
		c.Delayed = append(c.Delayed, d)
	}
}

func (g *generator) queueOptions() *queue.QueueOptions {
	o := g.n.options
	switch g.intn("option", 9) {
	case 0:
		o.MaxMessages = uint64(5 + g.intn("max messages", 20))
	case 1:
		o.MaxMessages, o.Overflow, o.MaxBodyBytes, o.MaxBytes = 0, queue.OverflowReject, 1<<20, 1<<30
	case 2:
		o.Overflow = queue.OverflowDropOldest
	case 3:
		o.MaxBodyBytes, o.MaxBytes = 30, uint64(100+g.intn("max bytes", 400))
	case 4:
		o.Ordering = queue.OrderKey - o.Ordering
	case 5:
		o.Mode = queue.ModeLog - o.Mode
	case 6:
		o.TTLMs = 3000 - o.TTLMs
	case 7:
		o.StrictSequence = !o.StrictSequence
	case 8:
		o.MaxDelayMs = 10_000
	}
	if o.Mode == queue.ModeWork {
		o.RetainMs, o.RetainBytes, o.RetainMessages = 0, 0, 0
	}
	if g.chance("old options", 15) {
		o.Version--
	}
	return &o
}
