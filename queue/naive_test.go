package queue_test

import (
	"bytes"
	"reflect"
	"slices"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// naive is a second implementation of the six commands: maps, linear walks, nothing cached, nothing incremental.
// Everything that the real state counts as it goes along is counted here by looking at all there is. It knows nothing
// of keys, ranges or lanes but the definition of W.
type naive struct {
	applied    queue.Index
	clock      queue.Stamp
	last, line queue.Address
	level      uint32
	retired    bool
	options    queue.QueueOptions
	// counters holds only what is history: sums of what is stored are worked out by meta.
	counters queue.Counters

	messages  map[queue.Address]*naiveMessage
	producers map[queue.Producer]*naiveProducer
	dedups    map[string]naiveDedup
	ops       map[uint64]naiveOp
	groups    map[queue.GroupID]*naiveGroup
	nextGroup queue.GroupID

	// Of the command being applied.
	stamp   queue.Stamp
	clamped bool
	used    map[queue.Producer]*naiveProducer
}

type naiveMessage struct {
	queue.StoredMessage
	size    uint64
	delayed bool // it has an entry in the delayed index
}

type naiveProducer struct {
	epoch     uint64
	low, last queue.Seq
	seqs      map[queue.Seq]queue.Address
	use       queue.Stamp
	changed   bool
}

type naiveDedup struct {
	address   queue.Address
	expiresAt queue.Stamp
}

type naiveOp struct {
	command   []byte
	result    queue.Result
	expiresAt queue.Stamp
}

// fate is how a group finished a message.
type fate int

const (
	acked fate = iota + 1
	exported
	expired
	purged
	cancelled
)

type naiveGroup struct {
	info    queue.GroupInfo // without what is worked out: floor, watermark, and the sums of counters
	created queue.Start
	// floor is W_floor: nothing at or below it is unfinished.
	floor    queue.Address
	assigned map[queue.Address]bool // messages that are or were the group's
	fates    map[queue.Address]fate
	retries  map[queue.Address]*naiveRetry
	leases   map[queue.Address]queue.RecordedLease
	dead     map[queue.Address]*queue.DeadLetter
	exports  uint64
	// settled is W of the 64 lanes as last recomputed; touched asks for it at the command's end.
	settled [64]queue.Address
	touched bool
}

type naiveRetry struct {
	queue.RetryState
	firstFailure queue.Stamp
}

func newNaive() *naive {
	n := &naive{level: queue.NewShardFormatLevel, nextGroup: 1,
		messages: map[queue.Address]*naiveMessage{}, producers: map[queue.Producer]*naiveProducer{},
		dedups: map[string]naiveDedup{}, ops: map[uint64]naiveOp{}, groups: map[queue.GroupID]*naiveGroup{}}
	n.options.EnsureDefaults()
	return n
}

func (n *naive) apply(index queue.Index, c queue.Command) queue.Result {
	if index <= n.applied {
		return queue.Result{Code: code.Unknown, Index: index, Clock: n.clock}
	}
	n.applied = index
	n.tick(c.CommandStamp())
	n.used = map[queue.Producer]*naiveProducer{}
	r := queue.Result{Code: code.OK}
	switch c := c.(type) {
	case *queue.Enqueue:
		n.enqueue(c, &r)
	case *queue.Ack:
		n.ack(c, &r)
	case *queue.Group:
		same := *c
		same.Stamp, same.FirstHome = 0, 0
		n.once(c.OperationID, &same, &r, func() { n.group(c, &r) })
	case *queue.Expire:
		n.expire(c, &r)
	case *queue.Home:
		n.home(c, &r)
	case *queue.Retention:
		same := *c
		same.Stamp = 0
		n.once(c.OperationID, &same, &r, func() { n.retention(c, &r) })
	}
	n.forget()
	for _, g := range n.groups {
		if g.touched {
			n.settle(g)
		}
	}
	r.Index, r.Clock = index, n.clock
	return r
}

// tick: forward only, at most an hour a command, except from 0, where a new shard takes the time as it is told.
func (n *naive) tick(stamp queue.Stamp) {
	n.stamp, n.clamped = stamp, false
	switch {
	case stamp <= n.clock:
	case n.clock != 0 && stamp > n.clock+queue.Hour:
		n.clock += queue.Hour
		n.clamped = true
	default:
		n.clock = stamp
	}
}

// once answers a known operation as before; another command under its id is refused.
func (n *naive) once(id uint64, same queue.Command, r *queue.Result, apply func()) {
	if id == 0 {
		apply()
		return
	}
	command, err := queue.EncodeCommand(nil, same)
	if err != nil {
		panic(err)
	}
	if op, ok := n.ops[id]; ok {
		*r = op.result
		if !bytes.Equal(op.command, command) {
			*r = queue.Result{Code: code.MutationFenced}
		}
		return
	}
	apply()
	n.ops[id] = naiveOp{command: command, result: *r, expiresAt: n.clock + 24*queue.Hour}
}

// forget: a clamped command forgets nothing by age.
func (n *naive) forget() {
	if n.clamped {
		return
	}
	for id, d := range n.dedups {
		if d.expiresAt <= n.clock {
			delete(n.dedups, id)
		}
	}
	for id, op := range n.ops {
		if op.expiresAt <= n.clock {
			delete(n.ops, id)
		}
	}
	for name, p := range n.producers {
		if name.Kind != queue.ProducerOutbox && p.use+24*queue.Hour <= n.clock && n.used[name] == nil {
			delete(n.producers, name)
		}
	}
}

func (n *naive) stored() (messages, size uint64) {
	for _, m := range n.messages {
		messages++
		size += m.size
	}
	return messages, size
}

// addresses lists what is stored, in order.
func (n *naive) addresses() []queue.Address {
	list := make([]queue.Address, 0, len(n.messages))
	for a := range n.messages {
		list = append(list, a)
	}
	slices.Sort(list)
	return list
}

func (n *naive) groupIDs() []queue.GroupID {
	list := make([]queue.GroupID, 0, len(n.groups))
	for id := range n.groups {
		list = append(list, id)
	}
	slices.Sort(list)
	return list
}

// --- Enqueue ---

func (n *naive) enqueue(c *queue.Enqueue, r *queue.Result) {
	if n.retired {
		n.counters.Refused += uint64(len(c.Publishes))
		r.Code = code.QueueRetired
		return
	}
	if n.options.Overflow == queue.OverflowDropOldest {
		n.makeRoom(c)
	}
	for i := range c.Publishes {
		pr := n.publish(&c.Publishes[i])
		if pr.Code != code.OK {
			n.counters.Refused++
		}
		r.Publishes = append(r.Publishes, pr)
	}
	for name, p := range n.used {
		if n.producers[name] == nil && p.changed {
			n.producers[name] = p
		}
	}
}

func (n *naive) overflows(messages, size uint64) bool {
	return size > n.options.MaxBytes || n.options.MaxMessages > 0 && messages > n.options.MaxMessages
}

// mayStore says no to what was answered before the command, and to what is refused however much room there is.
func (n *naive) mayStore(p *queue.Publish, m *queue.Message) bool {
	if p.CheckLast && p.ExpectedLast < n.last {
		return false
	}
	if x := n.producers[p.Producer]; x != nil && x.epoch >= p.ProducerEpoch {
		if _, known := x.seqs[m.Seq]; known || x.epoch > p.ProducerEpoch || m.Seq < x.low {
			return false
		}
	}
	if d, ok := n.dedups[string(m.DedupID)]; ok && len(m.DedupID) > 0 && (n.clamped || d.expiresAt > n.clock) {
		return false
	}
	c := n.admit(m, 0, 0)
	return m.Seq >= p.Low && (c == code.OK || c == code.QueueFull)
}

// makeRoom drops the oldest messages until what the command brings fits, or nothing is left.
func (n *naive) makeRoom(c *queue.Enqueue) {
	var messages, size uint64
	for i := range c.Publishes {
		p := &c.Publishes[i]
		for k := range p.Messages {
			if n.mayStore(p, &p.Messages[k]) {
				messages++
				size += uint64(p.Messages[k].Bytes())
			}
		}
	}
	if messages == 0 {
		return
	}
	if n.overflows(messages, size) { // more than ever fits: empty the queue as far as it must be
		size = min(size, n.options.MaxBytes)
		if n.options.MaxMessages > 0 {
			messages = min(messages, n.options.MaxMessages)
		}
	}
	there, thereSize := n.stored()
	var to queue.Address
	for _, a := range n.addresses() {
		if !n.overflows(there+messages, thereSize+size) {
			break
		}
		there--
		thereSize -= n.messages[a].size
		to = a
	}
	n.drop(to, false)
}

func (n *naive) producer(p *queue.Publish) *naiveProducer {
	if p.Producer.Kind == queue.ProducerNone {
		return nil
	}
	if x := n.used[p.Producer]; x != nil {
		return x
	}
	x := n.producers[p.Producer]
	if x == nil {
		x = &naiveProducer{epoch: p.ProducerEpoch, seqs: map[queue.Seq]queue.Address{}}
	}
	return x
}

func (n *naive) publish(p *queue.Publish) queue.PublishResult {
	x := n.producer(p)
	if x != nil && p.ProducerEpoch < x.epoch {
		return queue.PublishResult{Code: code.ProducerEpochStale, Last: n.last}
	}
	if c := n.trial(p, x); c != code.OK {
		return queue.PublishResult{Code: c, Last: n.last}
	}
	if x != nil {
		n.used[p.Producer] = x
		x.begin(p)
		x.use = max(x.use, n.clock-n.clock%60_000)
	}
	r := queue.PublishResult{Code: code.OK}
	for i := range p.Messages {
		r.Messages = append(r.Messages, n.message(p, &p.Messages[i], x))
	}
	r.Last = n.last
	return r
}

// begin takes up a new epoch, which starts a new sequence, and low.
func (x *naiveProducer) begin(p *queue.Publish) {
	if p.ProducerEpoch > x.epoch {
		x.epoch, x.low, x.last, x.seqs = p.ProducerEpoch, 0, 0, map[queue.Seq]queue.Address{}
	}
	x.raise(p.Low)
}

func (x *naiveProducer) raise(low queue.Seq) {
	x.low = max(x.low, low)
	for s := range x.seqs {
		if s < x.low {
			delete(x.seqs, s)
		}
	}
}

// accept notes an answered seq; a producer that does not tell its low is remembered 1,023 seqs back.
func (x *naiveProducer) accept(s queue.Seq, a queue.Address, low queue.Seq) {
	if _, known := x.seqs[s]; !known {
		x.seqs[s] = a
	}
	x.last = max(x.last, s)
	if low == 0 && x.last > 1023 {
		x.raise(x.last - 1023)
	}
	x.changed = true
}

func (x *naiveProducer) clone() *naiveProducer {
	if x == nil {
		return nil
	}
	c := *x
	c.seqs = map[queue.Seq]queue.Address{}
	for s, a := range x.seqs {
		c.seqs[s] = a
	}
	return &c
}

// trial says whether a publish is refused as a whole, by carrying it out on copies.
func (n *naive) trial(p *queue.Publish, x *naiveProducer) code.Code {
	if !p.Atomic && !p.CheckLast {
		return code.OK
	}
	x = x.clone()
	if x != nil {
		x.begin(p)
	}
	fresh := false
	messages, size := n.stored()
	for i := range p.Messages {
		m := &p.Messages[i]
		_, duplicate, c := n.classify(p, m, x)
		if c == code.OK && !duplicate {
			fresh = true
			c = n.admit(m, messages, size)
		}
		if c == code.OK && !duplicate {
			messages++
			size += uint64(m.Bytes())
		}
		if c != code.OK && p.Atomic {
			return c
		}
		if c == code.OK && x != nil {
			x.accept(m.Seq, 0, p.Low)
		}
	}
	if p.CheckLast && fresh && p.ExpectedLast != n.last {
		return code.ExpectedLastAddress
	}
	return code.OK
}

func (n *naive) classify(p *queue.Publish, m *queue.Message, x *naiveProducer) (queue.Address, bool, code.Code) {
	if x != nil {
		if a, ok := x.seqs[m.Seq]; ok {
			return a, true, code.OK
		}
		contiguous := p.Producer.Kind != queue.ProducerOutbox &&
			(p.Contiguous || n.options.StrictSequence || n.options.Ordering == queue.OrderKey)
		switch {
		case m.Seq < x.low:
			return 0, false, code.SeqExpired
		case p.Low != 0 && m.Seq > x.low+queue.ProducerWindow:
			return 0, false, code.Backpressure
		case contiguous && x.last != 0 && m.Seq != x.last+1:
			return 0, false, code.SeqGap
		}
	}
	if len(m.DedupID) > 0 {
		// A clamped command forgets nothing by age.
		if d, ok := n.dedups[string(m.DedupID)]; ok && (n.clamped || d.expiresAt > n.clock) {
			return d.address, true, code.OK
		}
	}
	return 0, false, code.OK
}

func (n *naive) admit(m *queue.Message, messages, size uint64) code.Code {
	switch {
	case len(m.Body) > int(n.options.MaxBodyBytes):
		return code.TooLarge
	case m.VisibleAt > max(n.clock, n.stamp)+queue.Stamp(n.options.MaxDelayMs):
		return code.DelayTooLong
	case n.overflows(messages+1, size+uint64(m.Bytes())):
		return code.QueueFull
	}
	return code.OK
}

func (n *naive) message(p *queue.Publish, m *queue.Message, x *naiveProducer) queue.MessageResult {
	a, duplicate, c := n.classify(p, m, x)
	if c == code.OK && !duplicate {
		messages, size := n.stored()
		c = n.admit(m, messages, size)
	}
	if c != code.OK {
		return queue.MessageResult{Code: c}
	}
	if duplicate {
		n.counters.Duplicates++
	} else {
		a = n.append(p, m)
	}
	if x != nil {
		x.accept(m.Seq, a, p.Low)
	}
	return queue.MessageResult{Code: code.OK, Address: a, Duplicate: duplicate}
}

func (n *naive) append(p *queue.Publish, m *queue.Message) queue.Address {
	n.last++
	s := &naiveMessage{size: uint64(m.Bytes())}
	s.StoredMessage = queue.StoredMessage{Address: n.last, Stamp: n.clock, ExpiresAt: m.ExpiresAt,
		Producer: p.Producer, Seq: m.Seq, Key: m.Key, Headers: m.Headers, Body: m.Body}
	if s.ExpiresAt == 0 && n.options.TTLMs > 0 {
		s.ExpiresAt = n.clock + queue.Stamp(n.options.TTLMs)
	}
	if m.VisibleAt > n.clock {
		s.VisibleAt, s.Parked, s.delayed = m.VisibleAt, true, true
	}
	n.messages[n.last] = s
	for _, g := range n.groups {
		g.assigned[n.last] = true
	}
	if len(m.DedupID) > 0 {
		n.dedups[string(m.DedupID)] = naiveDedup{n.last, n.clock + queue.Stamp(n.options.DedupMs)}
	}
	c := &n.counters
	c.Published++
	c.PublishedBytes += s.size
	if p.Producer.Kind == queue.ProducerNone {
		c.NonIdempotent++
	}
	return n.last
}

// --- what groups have finished ---

func (g *naiveGroup) finished(a queue.Address) bool {
	return !g.assigned[a] || g.fates[a] != 0
}

func (g *naiveGroup) owns(a, last queue.Address) bool { return a > g.info.Start && a <= last }

// finish ends a message for a group with everything that the group keeps about it.
func (g *naiveGroup) finish(a queue.Address, f fate) {
	g.touched = true
	g.fates[a] = f
	delete(g.retries, a)
	delete(g.leases, a)
	delete(g.dead, a)
}

func (n *naive) finishedByAll(a queue.Address) bool {
	for _, g := range n.groups {
		if !g.finished(a) {
			return false
		}
	}
	return true
}

// settle recomputes W of every lane: the address before the next existing, unfinished one, or the last address.
func (n *naive) settle(g *naiveGroup) {
	for lane := range g.settled {
		g.settled[lane] = n.w(g, queue.Address(lane))
	}
	g.touched = false
}

func (n *naive) w(g *naiveGroup, lane queue.Address) queue.Address {
	w := n.last
	for a := range g.assigned {
		if a%64 == lane && g.fates[a] == 0 {
			w = min(w, a-1)
		}
	}
	return w
}

// release deletes a parked message that the last group has finished.
func (n *naive) release(a queue.Address) {
	m := n.messages[a]
	if m != nil && m.Parked && n.options.Mode != queue.ModeLog && n.finishedByAll(a) {
		delete(n.messages, a)
		n.counters.Reclaimed++
	}
}

func (n *naive) fenced(id queue.GroupID, epoch queue.Epoch, r *queue.Result) *naiveGroup {
	g := n.groups[id]
	switch {
	case g == nil:
		r.Code = code.UnknownGroup
		return nil
	case g.info.Epoch != epoch:
		r.Code, r.Group, r.Epoch, r.Home = code.StaleOwner, id, g.info.Epoch, g.info.Home
		return nil
	}
	return g
}

// --- Ack ---

func (n *naive) ack(c *queue.Ack, r *queue.Result) {
	g := n.fenced(c.Group, c.Epoch, r)
	if g == nil {
		return
	}
	for _, x := range c.Ranges {
		for a := x.First; a <= x.Last; a++ {
			r.Acks = append(r.Acks, n.ackOne(g, a))
		}
	}
	g.touched = true
}

func (n *naive) ackOne(g *naiveGroup, a queue.Address) queue.AckState {
	switch {
	case !g.owns(a, n.last):
		return queue.AckUnknown
	case g.finished(a):
		return queue.AckAlready
	case g.dead[a] != nil && g.dead[a].ExportState >= queue.ExportExporting:
		return queue.AckDead
	}
	f := acked
	if g.dead[a] != nil {
		f = purged
	}
	g.finish(a, f)
	n.release(a)
	return queue.AckDone
}

// --- Group ---

func describe(r *queue.Result, g *naiveGroup) {
	r.Group, r.Epoch, r.Home, r.Version = g.info.ID, g.info.Epoch, g.info.Home, g.info.ConfigVersion
}

func (n *naive) group(c *queue.Group, r *queue.Result) {
	if c.Op == queue.GroupCreate {
		n.create(c, r)
		return
	}
	g := n.groups[c.ID]
	if g == nil {
		r.Code = code.UnknownGroup
		return
	}
	if c.Op == queue.GroupConfigure && c.ExpectedVersion != g.info.ConfigVersion ||
		c.Op != queue.GroupConfigure && c.ExpectedEpoch != g.info.Epoch {
		r.Code = code.MutationFenced
		describe(r, g)
		return
	}
	switch c.Op {
	case queue.GroupDelete:
		delete(n.groups, c.ID)
	case queue.GroupReset:
		g.info.Epoch++
		n.begin(g, c.Start)
	case queue.GroupConfigure:
		g.info.Config = withDefaults(c.Config)
		g.info.ConfigVersion++
	}
	g.touched = true
	describe(r, g)
}

func withDefaults(c queue.GroupConfig) queue.GroupConfig {
	c.EnsureDefaults()
	if len(c.DelaysMs) == 0 {
		c.DelaysMs = nil
	}
	return c
}

func (n *naive) create(c *queue.Group, r *queue.Result) {
	for _, g := range n.groups {
		if g.info.Name != c.Name {
			continue
		}
		if g.created != c.Start || !reflect.DeepEqual(g.info.Config, withDefaults(c.Config)) {
			r.Code = code.GroupExistsMismatch
		}
		describe(r, g)
		return
	}
	g := &naiveGroup{created: c.Start}
	g.info = queue.GroupInfo{ID: n.nextGroup, Name: c.Name, Config: withDefaults(c.Config), ConfigVersion: 1,
		Home: c.FirstHome, HomeIndex: n.applied, Released: true, Epoch: 1}
	n.nextGroup++
	n.begin(g, c.Start)
	n.groups[g.info.ID] = g
	g.touched = true
	describe(r, g)
}

// begin makes a group start anew: what is stored above its start is its own.
func (n *naive) begin(g *naiveGroup, s queue.Start) {
	start := n.line
	switch s.Kind {
	case queue.StartLatest:
		start = n.last
	case queue.StartAddress:
		start = queue.Address(max(s.At, 1) - 1)
	case queue.StartTime:
		start = n.last
		for a, m := range n.messages {
			if a > n.line && m.Stamp >= queue.Stamp(s.At) {
				start = min(start, a-1)
			}
		}
	}
	g.info.Start = min(max(start, n.line), n.last)
	g.floor = g.info.Start
	g.assigned, g.fates = map[queue.Address]bool{}, map[queue.Address]fate{}
	g.retries, g.leases = map[queue.Address]*naiveRetry{}, map[queue.Address]queue.RecordedLease{}
	g.dead = map[queue.Address]*queue.DeadLetter{}
	for a := range n.messages {
		if a > g.info.Start {
			g.assigned[a] = true
		}
	}
}

// --- Home ---

func (n *naive) home(c *queue.Home, r *queue.Result) {
	g := n.groups[c.Group]
	if g == nil {
		r.Code = code.UnknownGroup
		return
	}
	if g.info.Home != c.ExpectedHome || g.info.Epoch != c.ExpectedEpoch {
		r.Code = code.MutationFenced
	} else {
		g.info.Epoch++
		g.info.Home, g.info.HomeIndex, g.info.Released = c.NewHome, n.applied, c.Released
	}
	describe(r, g)
}

// --- Expire ---

func (n *naive) expire(c *queue.Expire, r *queue.Result) {
	g := n.fenced(c.Group, c.Epoch, r)
	if g == nil {
		return
	}
	claimed := false
	for i := range c.Entries {
		e := n.expireOne(g, &c.Entries[i])
		claimed = claimed || e.Applied && c.Entries[i].Kind == queue.ExpireClaim
		r.Expires = append(r.Expires, e)
	}
	if claimed {
		g.info.ClaimGeneration++
	}
	g.touched = true
}

func (n *naive) expireOne(g *naiveGroup, e *queue.ExpireEntry) queue.ExpireResult {
	a := e.Address
	switch {
	case !g.owns(a, n.last) || g.finished(a):
		return queue.ExpireResult{Finished: true}
	case g.dead[a] != nil:
		return n.expireDead(g, e, g.dead[a])
	}
	x := g.retries[a]
	if x == nil {
		x = &naiveRetry{}
	}
	r := queue.ExpireResult{Change: x.Change, Round: x.Round, Attempts: x.Attempts}
	if e.Change != x.Change || e.Kind == queue.ExpireRedrive || e.Kind == queue.ExpireExport {
		return r
	}
	if e.Kind == queue.ExpireDead {
		d := n.die(g, e, x)
		return queue.ExpireResult{Applied: true, Dead: true, Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	}
	g.retries[a] = x
	x.Change++
	if e.Kind == queue.ExpireLease {
		g.leases[a] = queue.RecordedLease{Name: e.Lease, Deadline: e.Deadline, Attempts: e.Attempts, Consumer: e.Consumer}
		if l := g.leases[a]; n.level >= 4 {
			l.Begun = e.NotBefore
			g.leases[a] = l
		}
	} else {
		delete(g.leases, a)
	}
	switch e.Kind {
	case queue.ExpireUpdate:
		x.Attempts, x.NotBefore, x.Reason = e.Attempts, e.NotBefore, e.Reason
		g.info.Counters.Retries++
		if x.firstFailure == 0 {
			x.firstFailure = n.clock
		}
	case queue.ExpireRelease:
		x.NotBefore = e.NotBefore
	case queue.ExpireClaim:
		x.Attempts++
	}
	return queue.ExpireResult{Applied: true, Change: x.Change, Round: x.Round, Attempts: x.Attempts}
}

func (n *naive) die(g *naiveGroup, e *queue.ExpireEntry, x *naiveRetry) *queue.DeadLetter {
	delete(g.retries, e.Address)
	delete(g.leases, e.Address)
	d := &queue.DeadLetter{Address: e.Address, Change: x.Change + 1, Round: x.Round, Attempts: e.Attempts,
		Reason: e.Reason, FirstFailure: x.firstFailure, DeadAt: n.clock}
	if d.FirstFailure == 0 {
		d.FirstFailure = n.clock
	}
	if g.info.Config.DeadLetterQueue != "" {
		g.exports++
		d.ExportNumber, d.ExportState = g.exports, queue.ExportPending
	}
	g.dead[e.Address] = d
	g.info.Counters.DeadTotal++
	n.messages[e.Address].Parked = true
	return d
}

// expireDead applies an entry to a dead letter: only redrive and export concern one.
func (n *naive) expireDead(g *naiveGroup, e *queue.ExpireEntry, d *queue.DeadLetter) queue.ExpireResult {
	skipped := queue.ExpireResult{Dead: true, Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	if e.Change != d.Change {
		return skipped
	}
	switch {
	case e.Kind == queue.ExpireRedrive && d.ExportState < queue.ExportExporting:
		delete(g.dead, e.Address)
		g.info.Counters.Redriven++
		x := &naiveRetry{RetryState: queue.RetryState{Change: d.Change + 1, Round: d.Round + 1, NotBefore: e.NotBefore}}
		g.retries[e.Address] = x
		return queue.ExpireResult{Applied: true, Change: x.Change, Round: x.Round}
	case e.Kind == queue.ExpireExport && e.ExportState == queue.ExportExporting && d.ExportState < queue.ExportExporting:
		if d.ExportNumber == 0 {
			g.exports++
			d.ExportNumber = g.exports
		}
		d.ExportState, d.Target = queue.ExportExporting, e.Target
		d.Change++
		return queue.ExpireResult{Applied: true, Dead: true, Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	case e.Kind == queue.ExpireExport && e.ExportState == queue.ExportPending &&
		d.ExportState == queue.ExportExporting && d.Target == e.Target:
		d.ExportState, d.Target = queue.ExportPending, 0
		d.Change++
		return queue.ExpireResult{Applied: true, Dead: true, Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	case e.Kind == queue.ExpireExport && e.ExportState == queue.ExportNone && d.ExportState == queue.ExportPending:
		d.ExportState, d.ExportNumber = queue.ExportNone, 0
		d.Change++
		return queue.ExpireResult{Applied: true, Dead: true, Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	case e.Kind == queue.ExpireExport && e.ExportState == queue.ExportDone &&
		d.ExportState == queue.ExportExporting && d.Target == e.Target:
		g.finish(e.Address, exported)
		n.release(e.Address)
		return queue.ExpireResult{Applied: true, Finished: true}
	}
	return skipped
}

// --- Retention ---

func (n *naive) retention(c *queue.Retention, r *queue.Result) {
	r.Version = n.options.Version
	switch {
	case c.Options != nil && c.Options.Version != n.options.Version:
		r.Code = code.MutationFenced
		return
	case c.FormatLevel > queue.NewShardFormatLevel:
		r.Code = code.LimitReached
		return
	}
	n.reclaimTo(c.ReclaimLine)
	for _, a := range c.Reclaim {
		n.reclaim(a)
	}
	n.drop(c.DropTo, false)
	n.drop(c.PurgeTo, true)
	for _, a := range c.Park {
		if m := n.messages[a]; m != nil && a > n.line && !n.finishedByAll(a) {
			m.Parked = true
		}
	}
	for _, d := range c.Delayed {
		r.Delayed = append(r.Delayed, n.changeDelayed(d))
	}
	if c.Options != nil {
		version := n.options.Version
		n.options = *c.Options
		n.options.EnsureDefaults()
		n.options.Version = version + 1
	}
	for _, p := range c.Forget {
		delete(n.producers, p)
	}
	n.retired = n.retired || c.Retire
	n.level = max(n.level, c.FormatLevel)
	r.Version = n.options.Version
}

// reclaimTo moves the line, never past a message in place that somebody may still want.
func (n *naive) reclaimTo(to queue.Address) {
	to = n.countable(n.finishedLine(min(to, n.last)))
	for a := n.line + 1; a <= to; a++ {
		if m := n.messages[a]; m != nil && !m.Parked {
			delete(n.messages, a)
			n.counters.Reclaimed++
		}
		n.line = a
	}
}

func (n *naive) finishedLine(to queue.Address) queue.Address {
	keeps := n.options.Mode == queue.ModeLog || len(n.groups) == 0
	for a := n.line + 1; a <= to; a++ {
		if m := n.messages[a]; m != nil && !m.Parked && (keeps || !n.finishedByAll(a)) {
			return a - 1
		}
	}
	return to
}

// countable lowers a line that ends within a bucket of 4,096 addresses, so that at most MaxHousekeeping of that bucket's messages in
// place are below it: what is above is reclaimed by a later command, or counted as expired by this one.
func (n *naive) countable(to queue.Address) queue.Address {
	const bucket = 4096
	if to%bucket == bucket-1 || to == n.last {
		return to
	}
	inPlace := 0
	for a := max(n.line+1, to-to%bucket); a <= to; a++ {
		if m := n.messages[a]; m != nil && !m.Parked {
			if inPlace++; inPlace > queue.MaxHousekeeping {
				return a - 1
			}
		}
	}
	return to
}

// reclaim deletes one message that is finished, or has run out and is neither leased nor dead.
func (n *naive) reclaim(a queue.Address) {
	m := n.messages[a]
	if m == nil {
		return
	}
	ranOut := m.ExpiresAt != 0 && m.ExpiresAt <= n.clock && !n.clamped
	if ranOut {
		for _, g := range n.groups {
			l, leased := g.leases[a]
			if !g.finished(a) && g.dead[a] == nil && !(leased && l.Deadline > n.clock) {
				g.finish(a, expired)
			}
		}
	}
	keeps := n.options.Mode == queue.ModeLog || len(n.groups) == 0
	if keeps && !ranOut || !n.finishedByAll(a) {
		return
	}
	delete(n.messages, a)
	if ranOut {
		n.counters.Expired++
	} else {
		n.counters.Reclaimed++
	}
}

// drop finishes everything at or below an address for everybody and deletes it.
func (n *naive) drop(to queue.Address, purge bool) {
	to = min(to, n.last)
	for _, g := range n.groups {
		for a := range g.assigned {
			if a <= to && g.fates[a] == 0 {
				f := expired
				if purge {
					f = purged
				}
				g.finish(a, f)
			}
		}
		if to > g.floor {
			g.floor, g.touched = to, true
		}
	}
	for a := range n.messages {
		if a > to {
			continue
		}
		delete(n.messages, a)
		if purge {
			n.counters.Purged++
		} else {
			n.counters.Dropped++
		}
	}
	n.line = max(n.line, to)
}

func (n *naive) changeDelayed(d queue.DelayedChange) code.Code {
	m := n.messages[d.Address]
	switch {
	case m == nil:
		return code.UnknownMessage
	case !m.delayed || m.VisibleAt != d.Expected || m.VisibleAt <= n.clock:
		return code.Skipped
	case d.NewVisibleAt != 0:
		m.VisibleAt = d.NewVisibleAt
		return code.OK
	}
	for _, g := range n.groups {
		if !g.finished(d.Address) {
			g.finish(d.Address, cancelled)
		}
	}
	delete(n.messages, d.Address)
	n.counters.Cancelled++
	return code.OK
}
