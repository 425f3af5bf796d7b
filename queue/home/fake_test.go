package home

import (
	"cmp"
	"slices"
	"sync"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// fakeState is a naive shard state: what the ledger reads and what its commands do, in maps. Each replica of a test
// has its own and applies the same log.
type fakeState struct {
	mu       sync.Mutex
	meta     queue.Meta
	messages map[queue.Address]*fakeMessage
	groups   map[queue.GroupID]*fakeGroup
	nextID   queue.GroupID
	readErr  error
}

type fakeMessage struct {
	queue.StoredMessage
	delayed bool // an entry of the delayed index stands for it
}

type fakeGroup struct {
	info  queue.GroupInfo
	done  map[queue.Address]bool
	retry map[queue.Address]queue.RetryState
	lease map[queue.Address]queue.RecordedLease
	dead  map[queue.Address]*queue.DeadLetter
}

func newFakeState(o queue.QueueOptions) *fakeState {
	return &fakeState{
		meta:     queue.Meta{Options: o},
		messages: map[queue.Address]*fakeMessage{}, groups: map[queue.GroupID]*fakeGroup{}, nextID: 1,
	}
}

// apply executes one entry.
func (s *fakeState) apply(index queue.Index, cmd queue.Command) (queue.Result, queue.Applied) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.meta.Applied = index
	s.meta.Clock = max(s.meta.Clock, cmd.CommandStamp())
	res := queue.Result{Code: code.OK, Index: index, Clock: s.meta.Clock}
	a := queue.Applied{Index: index}
	switch c := cmd.(type) {
	case *queue.Enqueue:
		s.enqueue(c, &a)
	case *queue.Ack:
		s.ack(c, &res)
	case *queue.Expire:
		s.expire(c, &res, &a)
	case *queue.Group:
		s.group(c, index, &res, &a)
	case *queue.Home:
		s.home(c, index, &res, &a)
	case *queue.Retention:
		s.retention(c, &a)
	}
	a.Last = s.meta.Last
	return res, a
}

func (s *fakeState) enqueue(c *queue.Enqueue, a *queue.Applied) {
	for _, p := range c.Publishes {
		for _, m := range p.Messages {
			s.meta.Last++
			d := m.VisibleAt > s.meta.Clock
			s.messages[s.meta.Last] = &fakeMessage{delayed: d, StoredMessage: queue.StoredMessage{
				Address: s.meta.Last, Stamp: s.meta.Clock, VisibleAt: m.VisibleAt, ExpiresAt: m.ExpiresAt,
				Key: m.Key, Headers: m.Headers, Body: m.Body, Parked: d,
			}}
			a.Appended, a.Delayed = true, a.Delayed || d
		}
	}
}

func (s *fakeState) fenced(id queue.GroupID, e queue.Epoch, res *queue.Result) *fakeGroup {
	g := s.groups[id]
	switch {
	case g == nil:
		res.Code = code.UnknownGroup
		return nil
	case g.info.Epoch != e:
		res.Code, res.Epoch, res.Home = code.StaleOwner, g.info.Epoch, g.info.Home
		return nil
	}
	return g
}

func (s *fakeState) ack(c *queue.Ack, res *queue.Result) {
	g := s.fenced(c.Group, c.Epoch, res)
	if g == nil {
		return
	}
	for _, r := range c.Ranges {
		for x := r.First; x <= r.Last; x++ {
			switch {
			case g.done[x]:
				res.Acks = append(res.Acks, queue.AckAlready)
			case s.messages[x] == nil:
				res.Acks = append(res.Acks, queue.AckUnknown)
			case g.dead[x] != nil && g.dead[x].ExportState >= queue.ExportExporting:
				res.Acks = append(res.Acks, queue.AckDead)
			default:
				res.Acks = append(res.Acks, queue.AckDone)
				g.finish(x)
			}
		}
	}
}

func (g *fakeGroup) finish(a queue.Address) {
	g.done[a] = true
	delete(g.retry, a)
	delete(g.lease, a)
	delete(g.dead, a)
}

func (s *fakeState) expire(c *queue.Expire, res *queue.Result, a *queue.Applied) {
	g := s.fenced(c.Group, c.Epoch, res)
	if g == nil {
		return
	}
	for _, x := range c.Entries {
		res.Expires = append(res.Expires, s.expireOne(g, x, a))
	}
}

func (s *fakeState) expireOne(g *fakeGroup, x queue.ExpireEntry, a *queue.Applied) queue.ExpireResult {
	st := g.retry[x.Address]
	d := g.dead[x.Address]
	if d != nil {
		st = queue.RetryState{Change: d.Change, Round: d.Round, Attempts: d.Attempts}
	}
	r := queue.ExpireResult{Change: st.Change, Round: st.Round, Attempts: st.Attempts, Dead: d != nil}
	if g.done[x.Address] || s.messages[x.Address] == nil {
		r.Finished = true
		return r
	}
	if x.Change != st.Change || (d != nil) != (x.Kind == queue.ExpireRedrive) {
		return r
	}
	st.Change++
	delete(g.lease, x.Address)
	switch x.Kind {
	case queue.ExpireUpdate:
		st.Attempts, st.NotBefore, st.Reason = x.Attempts, x.NotBefore, x.Reason
	case queue.ExpireDead:
		g.dead[x.Address] = &queue.DeadLetter{
			Address: x.Address, Change: st.Change, Round: st.Round, Attempts: x.Attempts, Reason: x.Reason,
			DeadAt: s.meta.Clock,
		}
		s.messages[x.Address].Parked = true
		r.Dead = true
		st.Attempts = x.Attempts
	case queue.ExpireRedrive:
		delete(g.dead, x.Address)
		st.Round, st.Attempts, st.NotBefore = st.Round+1, 0, 0
		a.Redrive, r.Dead = true, false
	case queue.ExpireRelease:
		st.NotBefore = x.NotBefore
	case queue.ExpireClaim:
		st.Attempts++
	case queue.ExpireLease:
		g.lease[x.Address] = queue.RecordedLease{Name: x.Lease, Begun: x.NotBefore, Deadline: x.Deadline, Attempts: x.Attempts, Consumer: x.Consumer}
	}
	g.retry[x.Address] = st
	r.Applied, r.Change, r.Round, r.Attempts = true, st.Change, st.Round, st.Attempts
	return r
}

func (s *fakeState) group(c *queue.Group, index queue.Index, res *queue.Result, a *queue.Applied) {
	switch c.Op {
	case queue.GroupCreate:
		id := s.nextID
		s.nextID++
		s.groups[id] = &fakeGroup{
			info: queue.GroupInfo{
				ID: id, Name: c.Name, Config: c.Config, Home: c.FirstHome, HomeIndex: index, Released: true, Epoch: 1,
			},
			done: map[queue.Address]bool{}, retry: map[queue.Address]queue.RetryState{},
			lease: map[queue.Address]queue.RecordedLease{}, dead: map[queue.Address]*queue.DeadLetter{},
		}
		res.Group, res.Epoch, res.Home = id, 1, c.FirstHome
		a.Groups = append(a.Groups, id)
	case queue.GroupDelete:
		delete(s.groups, c.ID)
		a.Groups = append(a.Groups, c.ID)
	case queue.GroupConfigure:
		s.groups[c.ID].info.Config = c.Config
		a.Groups = append(a.Groups, c.ID)
	case queue.GroupReset:
		g := s.groups[c.ID]
		g.info.Epoch++
		clear(g.done)
		clear(g.retry)
		clear(g.lease)
		clear(g.dead)
		a.Groups, a.Redrive = append(a.Groups, c.ID), true
	}
}

func (s *fakeState) home(c *queue.Home, index queue.Index, res *queue.Result, a *queue.Applied) {
	g := s.groups[c.Group]
	if g == nil {
		res.Code = code.UnknownGroup
		return
	}
	i := &g.info
	if i.Home != c.ExpectedHome || i.Epoch != c.ExpectedEpoch {
		res.Code, res.Epoch, res.Home = code.MutationFenced, i.Epoch, i.Home
		return
	}
	i.Home, i.Epoch, i.HomeIndex, i.Released = c.NewHome, i.Epoch+1, index, c.Released
	res.Home, res.Epoch = i.Home, i.Epoch
	a.Groups = append(a.Groups, i.ID)
}

func (s *fakeState) retention(c *queue.Retention, a *queue.Applied) {
	for x := queue.Address(1); x <= c.PurgeTo; x++ {
		for _, g := range s.groups {
			g.finish(x)
		}
		delete(s.messages, x)
		a.Redrive = true
	}
	for _, x := range c.Park {
		s.messages[x].Parked = true
	}
	for _, d := range c.Delayed {
		m := s.messages[d.Address]
		a.Delayed = true
		if d.NewVisibleAt != 0 {
			m.VisibleAt = d.NewVisibleAt
			continue
		}
		for _, g := range s.groups {
			g.finish(d.Address)
		}
		delete(s.messages, d.Address)
	}
	if c.Options != nil {
		s.meta.Options = *c.Options
	}
}

// The read side.

func (s *fakeState) Meta() queue.Meta {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.meta
}

func (s *fakeState) ReadStats() (queue.Meta, []queue.GroupInfo) { return s.Meta(), s.Groups() }

func (s *fakeState) Groups() []queue.GroupInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []queue.GroupInfo
	for _, g := range s.groups {
		out = append(out, g.described())
	}
	slices.SortFunc(out, func(a, b queue.GroupInfo) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

func (s *fakeState) Group(id queue.GroupID) (queue.GroupInfo, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[id]
	if g == nil {
		return queue.GroupInfo{}, false
	}
	return g.described(), true
}

// described is the group with the counters that a home looks at.
func (g *fakeGroup) described() queue.GroupInfo {
	i := g.info
	i.Counters.Leased, i.Counters.Retrying = uint64(len(g.lease)), uint64(len(g.retry))
	return i
}

func (s *fakeState) GroupByName(name string) (queue.GroupInfo, bool) {
	for _, g := range s.Groups() {
		if g.Name == name {
			return g, true
		}
	}
	return queue.GroupInfo{}, false
}

func (s *fakeState) Message(a queue.Address) (queue.StoredMessage, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.messages[a]
	if m == nil || s.readErr != nil {
		return queue.StoredMessage{}, false, s.readErr
	}
	return m.StoredMessage, true, nil
}

// oneByOne is a queue.MessageReader that reads one by one.
type oneByOne struct{ messageSource }

func (oneByOne) Close() {}

func (s *fakeState) Messages() queue.MessageReader { return oneByOne{s} }

func (s *fakeState) Finished(id queue.GroupID, a queue.Address) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[id]
	return g != nil && (a <= g.info.Start || g.done[a]), s.readErr
}

// collect lists what want accepts of a group's unfinished, not dead messages, in address order.
func (s *fakeState) collect(id queue.GroupID, from queue.Address, limit int, want func(*fakeMessage, *queue.Deliverable) bool) ([]queue.Deliverable, queue.Address, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[id]
	var out []queue.Deliverable
	if g == nil || s.readErr != nil {
		return nil, 0, s.readErr
	}
	for a := max(from, g.info.Start+1); a <= s.meta.Last; a++ {
		m := s.messages[a]
		if m == nil || g.done[a] || g.dead[a] != nil {
			continue
		}
		d := queue.Deliverable{Address: a, VisibleAt: m.VisibleAt, ExpiresAt: m.ExpiresAt, Parked: m.Parked, Key: m.Key, Size: len(m.Body)}
		d.Retry, d.HasRetry = g.retry[a]
		d.Lease, d.HasLease = g.lease[a]
		if !want(m, &d) {
			continue
		}
		if len(out) == limit {
			return out, a, nil
		}
		out = append(out, d)
	}
	return out, 0, nil
}

func (s *fakeState) Deliverables(id queue.GroupID, from queue.Address, limit int, withParked bool) ([]queue.Deliverable, queue.Address, error) {
	return s.collect(id, from, limit, func(_ *fakeMessage, d *queue.Deliverable) bool { return withParked || !d.Parked })
}

func (s *fakeState) ParkedStragglers(id queue.GroupID, from queue.Address, limit int) ([]queue.Deliverable, queue.Address, error) {
	return s.collect(id, from, limit, func(m *fakeMessage, d *queue.Deliverable) bool { return d.Parked && !m.delayed })
}

func (s *fakeState) Retrying(id queue.GroupID, from queue.Address, limit int) ([]queue.Deliverable, queue.Address, error) {
	return s.collect(id, from, limit, func(_ *fakeMessage, d *queue.Deliverable) bool { return d.HasRetry || d.HasLease })
}

func (s *fakeState) Due(after queue.DelayedKey, upTo queue.Stamp, limit int) ([]queue.DelayedKey, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []queue.DelayedKey
	for a, m := range s.messages {
		k := queue.DelayedKey{VisibleAt: m.VisibleAt, Address: a}
		if m.delayed && compareKeys(k, after) > 0 && k.VisibleAt <= upTo {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, compareKeys)
	return out[:min(limit, len(out))], s.readErr
}

func (s *fakeState) NextDue(after queue.DelayedKey) (queue.Stamp, bool, error) {
	all, err := s.Due(after, queue.Stamp(1<<62), 1)
	if len(all) == 0 {
		return 0, false, err
	}
	return all[0].VisibleAt, true, err
}

func compareKeys(a, b queue.DelayedKey) int {
	return cmp.Or(cmp.Compare(a.VisibleAt, b.VisibleAt), cmp.Compare(a.Address, b.Address))
}

func (s *fakeState) DeadLetters(id queue.GroupID, from queue.Address, limit int, _ bool) ([]queue.DeadLetter, queue.Address, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []queue.DeadLetter
	for a, d := range s.groups[id].dead {
		if a >= from {
			out = append(out, *d)
		}
	}
	slices.SortFunc(out, func(a, b queue.DeadLetter) int { return cmp.Compare(a.Address, b.Address) })
	if len(out) > limit {
		return out[:limit], out[limit].Address, s.readErr
	}
	return out, 0, s.readErr
}

func (s *fakeState) RetryOf(id queue.GroupID, a queue.Address) (queue.RetryState, queue.RecordedLease, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[id]
	st := g.retry[a]
	l, has := g.lease[a]
	return st, l, has, s.readErr
}

func (s *fakeState) Digest() (queue.Index, [32]byte, error) { return s.Meta().Applied, [32]byte{}, nil }
