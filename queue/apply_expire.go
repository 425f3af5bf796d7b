package queue

// maxRewriteBytes bounds the message bytes that one command copies to park or reschedule messages, beyond the first.
const maxRewriteBytes = 1 << 20

// Expire carries what a group's home decided about single messages.
//
// Refused as a whole: what Validate refuses; UnknownGroup; StaleOwner, with home and epoch, unless the epoch equals
// the group's. An entry applies only if the message is the group's, unfinished, and at the change number that the
// entry names; otherwise it is skipped and its result tells what is stored. Each applied entry moves the change
// number by one.
//
//	update   not dead           attempts, not-before and reason as given; drops the recorded lease
//	dead     not dead           a dead letter, parked; with a dead-letter queue it gets the next export number
//	lease    not dead           records the lease, or moves its deadline; from level 4 on not-before is when it was handed out
//	release  not dead           attempts stay; not-before as given; drops the recorded lease
//	claim    not dead           attempts + 1; drops the recorded lease; the claim generation moves by one per command
//	redrive  dead, not exporting  attempts 0, round + 1
//	export   dead               moves it along its export: see expirer.export
//
// A dead entry is also skipped, with the stored change number unchanged, when the messages that the command parked
// before it exceed maxRewriteBytes: propose it again.
//
// Version 1: as above.
func (t *tx) expire(c *Expire, r *Result) {
	g := t.fenced(c.Group, c.Epoch, r)
	if g == nil {
		return
	}
	x := &expirer{tx: t, g: g, finisher: newFinisher(t, g), seen: make(map[Address]*entryState, len(c.Entries))}
	defer x.finisher.close()
	r.Expires = make([]ExpireResult, len(c.Entries))
	for i := range c.Entries {
		r.Expires[i] = x.entry(&c.Entries[i])
	}
	if x.claimed {
		g.claims++
	}
}

// expirer is one Expire being applied.
type expirer struct {
	*tx
	g         *group
	finisher  *finisher
	seen      map[Address]*entryState
	rewritten uint64
	claimed   bool
}

// entryState is what the group keeps about one message.
type entryState struct {
	finished bool
	isDead   bool
	retry    retryValue
	leased   bool
	dead     DeadLetter
}

func (e *entryState) result(applied bool) ExpireResult {
	r := ExpireResult{Applied: applied, Finished: e.finished, Dead: e.isDead,
		Change: e.retry.Change, Round: e.retry.Round, Attempts: e.retry.Attempts}
	if e.isDead {
		r.Change, r.Round, r.Attempts = e.dead.Change, e.dead.Round, e.dead.Attempts
	}
	return r
}

// load reads the state of an address, once per command.
func (x *expirer) load(a Address) *entryState {
	if e := x.seen[a]; e != nil {
		return e
	}
	e := &entryState{}
	x.seen[a] = e
	f := x.finisher
	if !x.g.owns(a, x.meta.Last) || x.isFinished(x.g, a) {
		e.finished = true
		return e
	}
	if f.dead.has(a) {
		var err error
		e.dead, err = readDead(a, f.dead.value())
		check(err)
		e.isDead = true
		return e
	}
	if f.retry.has(a) {
		check(e.retry.decode(f.retry.value()))
	}
	e.leased = f.lease.has(a)
	return e
}

func (x *expirer) entry(c *ExpireEntry) ExpireResult {
	e := x.load(c.Address)
	r := e.result(false)
	if e.finished || r.Change != c.Change {
		return r
	}
	deadKind := c.Kind == ExpireRedrive || c.Kind == ExpireExport
	if deadKind != e.isDead || !x.apply(c, e) {
		return r
	}
	return e.result(true)
}

// apply returns false when the entry is skipped for a reason of its own.
func (x *expirer) apply(c *ExpireEntry, e *entryState) bool {
	switch c.Kind {
	case ExpireUpdate:
		e.retry.Attempts, e.retry.NotBefore, e.retry.Reason = c.Attempts, c.NotBefore, c.Reason
		if e.retry.firstFailure == 0 {
			e.retry.firstFailure = x.meta.Clock
		}
		x.g.c.Retries++
		x.dropLease(c.Address, e)
	case ExpireDead:
		return x.die(c, e)
	case ExpireLease:
		x.recordLease(c, e)
	case ExpireRelease:
		e.retry.NotBefore = c.NotBefore
		x.dropLease(c.Address, e)
	case ExpireClaim:
		e.retry.Attempts++
		x.claimed = true
		x.dropLease(c.Address, e)
	case ExpireRedrive:
		return x.redrive(c, e)
	case ExpireExport:
		return x.export(c, e)
	}
	x.putRetry(c.Address, e)
	return true
}

// putRetry writes the retry state under the next change number.
func (x *expirer) putRetry(a Address, e *entryState) {
	if e.retry.Change == 0 {
		x.g.c.Retrying++
	}
	e.retry.Change++
	x.b.Set(appendGroupAddressKey(x.key[:0], kindRetry, x.g.id, a), e.retry.encode(x.val[:0]))
}

func (x *expirer) recordLease(c *ExpireEntry, e *entryState) {
	if !e.leased {
		e.leased = true
		x.g.c.Leased++
	}
	l := RecordedLease{Name: c.Lease, Deadline: c.Deadline, Attempts: c.Attempts, Consumer: c.Consumer}
	if x.meta.FormatLevel >= levelLeaseBegun {
		l.Begun = c.NotBefore
	}
	x.b.Set(appendGroupAddressKey(x.key[:0], kindLease, x.g.id, c.Address), putLease(x.val[:0], &l))
}

func (x *expirer) dropLease(a Address, e *entryState) {
	if !e.leased {
		return
	}
	e.leased = false
	x.g.c.Leased--
	x.b.Delete(appendGroupAddressKey(x.key[:0], kindLease, x.g.id, a))
}

func (x *expirer) die(c *ExpireEntry, e *entryState) bool {
	if !x.park(c.Address, messageDied, &x.rewritten) {
		return false
	}
	x.dropLease(c.Address, e)
	if e.retry.Change != 0 {
		x.g.c.Retrying--
		x.b.Delete(appendGroupAddressKey(x.key[:0], kindRetry, x.g.id, c.Address))
	}
	e.isDead = true
	e.dead = DeadLetter{Address: c.Address, Change: e.retry.Change, Round: e.retry.Round, Attempts: c.Attempts,
		Reason: c.Reason, FirstFailure: e.retry.firstFailure, DeadAt: x.meta.Clock}
	if e.dead.FirstFailure == 0 {
		e.dead.FirstFailure = x.meta.Clock
	}
	e.retry = retryValue{}
	if x.g.config.DeadLetterQueue != "" {
		x.number(&e.dead)
	}
	x.g.c.Dead++
	x.g.c.DeadTotal++
	x.putDeadLetter(e)
	return true
}

func (x *expirer) putDeadLetter(e *entryState) {
	e.dead.Change++
	x.b.Set(appendGroupAddressKey(x.key[:0], kindDead, x.g.id, e.dead.Address), putDead(x.val[:0], &e.dead))
}

func (x *expirer) redrive(c *ExpireEntry, e *entryState) bool {
	d := &e.dead
	if d.ExportState >= ExportExporting {
		return false
	}
	x.dropExport(x.g, d)
	x.b.Delete(appendGroupAddressKey(x.key[:0], kindDead, x.g.id, c.Address))
	e.isDead = false
	e.retry = retryValue{RetryState: RetryState{Change: d.Change + 1, Round: d.Round + 1, NotBefore: c.NotBefore}}
	x.b.Set(appendGroupAddressKey(x.key[:0], kindRetry, x.g.id, c.Address), e.retry.encode(x.val[:0]))
	e.dead = DeadLetter{}
	x.g.c.Dead--
	x.g.c.Retrying++
	x.g.c.Redriven++
	x.event.Redrive = true
	return true
}

// park moves a message out of the way of the reclaim line, with a flag that says why. It returns false when the
// command has rewritten enough already; a message that is parked stays as it is.
func (t *tx) park(a Address, flag byte, rewritten *uint64) bool {
	value, ok, err := t.r.Get(appendMessageKey(t.key[:0], a))
	check(err)
	if !ok {
		return true // parked already
	}
	h, err := readHead(value)
	check(err)
	if *rewritten > 0 && *rewritten+h.size > maxRewriteBytes {
		return false
	}
	*rewritten += h.size + 1
	moved, err := rewriteMessage(value, h.flags|flag, h.visibleAt)
	check(err)
	t.b.Delete(appendMessageKey(t.key[:0], a))
	t.b.Set(appendKey1(t.key[:0], kindParked, uint64(a)), moved)
	count := t.count(a)
	count.messages--
	count.bytes -= h.size
	count.parked++
	count.parkedBytes += h.size
	t.meta.Counters.Parked++
	return true
}
