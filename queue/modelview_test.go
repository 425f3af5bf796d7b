package queue_test

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/tierq/tierq/queue"
)

// observed is everything that a reader of a state can see, W of the lanes apart.
type observed struct {
	Meta     queue.Meta
	Messages []queue.StoredMessage
	Due      []queue.DelayedKey
	NextDue  queue.Stamp
	Groups   []observedGroup
}

type observedGroup struct {
	Info         queue.GroupInfo // without Floor and WatermarkBytes
	Deliverables []queue.Deliverable
	InPlace      []queue.Deliverable
	Stragglers   []queue.Deliverable
	Retrying     []queue.Deliverable
	Dead         []queue.DeadLetter
	Exports      []queue.DeadLetter // in order of number
	States       []observedState
}

// observedState is what a group says of one address.
type observedState struct {
	Address  queue.Address
	Finished bool
	Retry    queue.RetryState
	Lease    queue.RecordedLease
	Found    bool
}

// timeless is what must not change when a command is applied again: everything but the applied index, the clock, the
// counts of what was answered without being stored, and the count of producers that answers are remembered for.
func (o observed) timeless() observed {
	o.Meta.Applied, o.Meta.Clock = 0, 0
	c := &o.Meta.Counters
	c.Duplicates, c.Refused, c.Producers = 0, 0, 0
	return o
}

// probes are the addresses whose state is looked at one by one: all of a small state, of a large one a spread and the
// last ones.
func probes(last queue.Address) []queue.Address {
	var list []queue.Address
	recent := max(last, 14) - 13
	for a := queue.Address(1); a < recent; a += max(last/8, 1) {
		list = append(list, a)
	}
	for a := recent; a <= last+1; a++ {
		list = append(list, a)
	}
	return list
}

// observedFrom is the first address whose message is read: reading those of a long past would take all the time.
func observedFrom(last queue.Address) queue.Address { return max(last, 601) - 600 }

// --- the naive state ---

func (n *naive) observe() observed {
	o := observed{Meta: n.meta()}
	for _, a := range n.addresses() {
		m := n.messages[a]
		if a >= observedFrom(n.last) {
			o.Messages = append(o.Messages, tidy(m.StoredMessage))
		}
		if m.delayed {
			o.Due = append(o.Due, queue.DelayedKey{VisibleAt: m.VisibleAt, Address: a})
		}
	}
	slices.SortFunc(o.Due, func(x, y queue.DelayedKey) int {
		if x.VisibleAt != y.VisibleAt {
			return int(int64(x.VisibleAt) - int64(y.VisibleAt))
		}
		return int(int64(x.Address) - int64(y.Address))
	})
	if len(o.Due) > 0 {
		o.NextDue = o.Due[0].VisibleAt
	}
	for _, id := range n.groupIDs() {
		o.Groups = append(o.Groups, n.observeGroup(n.groups[id]))
	}
	return o
}

func (n *naive) meta() queue.Meta {
	m := queue.Meta{Applied: n.applied, Clock: n.clock, Last: n.last, Line: n.line, FormatLevel: n.level,
		Retired: n.retired, Options: n.options, Counters: n.counters}
	c := &m.Counters
	c.Messages, c.Bytes = n.stored()
	for _, x := range n.messages {
		if x.Parked {
			c.Parked++
		}
		if x.delayed {
			c.Delayed++
		}
	}
	c.Producers = uint64(len(n.producers))
	return m
}

func (n *naive) observeGroup(g *naiveGroup) observedGroup {
	o := observedGroup{Info: n.info(g)}
	for _, a := range n.addresses() {
		if g.finished(a) {
			continue
		}
		if d := g.dead[a]; d != nil {
			letter := *d
			letter.Message = tidy(n.messages[a].StoredMessage)
			o.Dead = append(o.Dead, letter)
			if d.ExportNumber != 0 {
				o.Exports = append(o.Exports, letter)
			}
			continue
		}
		d := n.deliverable(g, a)
		o.Deliverables = append(o.Deliverables, d)
		if !d.Parked {
			o.InPlace = append(o.InPlace, d)
		} else if !n.messages[a].delayed {
			o.Stragglers = append(o.Stragglers, d)
		}
		if d.HasRetry || d.HasLease {
			o.Retrying = append(o.Retrying, d)
		}
	}
	slices.SortFunc(o.Exports, func(x, y queue.DeadLetter) int { return cmp.Compare(x.ExportNumber, y.ExportNumber) })
	for _, a := range probes(n.last) {
		o.States = append(o.States, n.state(g, a))
	}
	return o
}

func (n *naive) state(g *naiveGroup, a queue.Address) observedState {
	s := observedState{Address: a, Finished: a <= n.last && g.finished(a)}
	if d := g.dead[a]; d != nil {
		s.Retry = queue.RetryState{Change: d.Change, Round: d.Round, Attempts: d.Attempts, Reason: d.Reason}
		s.Found = true
	}
	if x := g.retries[a]; x != nil {
		s.Retry, s.Lease, s.Found = x.RetryState, g.leases[a], true
	}
	return s
}

func (n *naive) deliverable(g *naiveGroup, a queue.Address) queue.Deliverable {
	m := n.messages[a]
	d := queue.Deliverable{Address: a, VisibleAt: m.VisibleAt, ExpiresAt: m.ExpiresAt, Parked: m.Parked, Size: int(m.size)}
	if n.options.Ordering == queue.OrderKey {
		d.Key = m.Key
	}
	if x := g.retries[a]; x != nil {
		d.Retry, d.HasRetry = x.RetryState, true
	}
	d.Lease, d.HasLease = g.leases[a]
	return d
}

func (n *naive) info(g *naiveGroup) queue.GroupInfo {
	i := g.info
	c := &i.Counters
	c.Dead, c.Retrying, c.Leased = uint64(len(g.dead)), uint64(len(g.retries)), uint64(len(g.leases))
	c.Assigned = uint64(len(g.assigned))
	for _, d := range g.dead {
		if d.ExportNumber != 0 {
			i.Exports++
		}
	}
	for a := range g.assigned {
		switch g.fates[a] {
		case acked:
			c.Acked++
		case exported:
			c.Exported++
		case expired:
			c.Expired++
		case purged:
			c.Purged++
		case cancelled:
			c.Cancelled++
		default:
			if g.dead[a] == nil {
				c.Unfinished++
			}
		}
	}
	return i
}

// checkLanes compares W and W_floor of all lanes. Between two recomputations W may stay behind, and no more.
func (n *naive) checkLanes(s *queue.QueueStateMachine) error {
	for _, id := range n.groupIDs() {
		g := n.groups[id]
		w, ok := s.Watermark(id)
		info, _ := s.Group(id)
		if !ok {
			return fmt.Errorf("group %d has no watermark", id)
		}
		if err := w.Check(); err != nil {
			return err
		}
		floor := w.W(0)
		for lane := range queue.LaneCount {
			l, fresh := w.Lane(lane), n.w(g, queue.Address(lane))
			if l.W < g.settled[lane] || l.W > fresh {
				return fmt.Errorf("group %d lane %d: W %s, recomputed %s, now %s", id, lane, l.W, g.settled[lane], fresh)
			}
			if l.Floor != g.floor {
				return fmt.Errorf("group %d lane %d: W_floor %s, want %s", id, lane, l.Floor, g.floor)
			}
			floor = min(floor, l.W)
		}
		if info.Floor != floor || info.WatermarkBytes != w.EncodedBytes() {
			return fmt.Errorf("group %d: floor %s in %d bytes, want %s in %d", id, info.Floor, info.WatermarkBytes, floor, w.EncodedBytes())
		}
	}
	return nil
}

// --- the real state ---

// pages collects a paged read.
func pages[T any](read func(from queue.Address) ([]T, queue.Address, error)) ([]T, error) {
	var all []T
	from := queue.Address(0)
	for {
		list, next, err := read(from)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
		if next == 0 {
			return all, nil
		}
		if next <= from {
			return nil, fmt.Errorf("page from %s goes on at %s", from, next)
		}
		from = next
	}
}

// walkMessages reads by one MessageReader what was read one by one, up and then down, and beyond it.
func walkMessages(s queue.Reader, want []queue.StoredMessage, last queue.Address) error {
	r := s.Messages()
	defer r.Close()
	read := func(a queue.Address, want *queue.StoredMessage) error {
		m, ok, err := r.Message(a)
		if err != nil || ok != (want != nil) || ok && !reflect.DeepEqual(tidy(m), *want) {
			return fmt.Errorf("message %s by a walk: %+v, %t, %v; alone %+v", a, m, ok, err, want)
		}
		return nil
	}
	var errs []error
	for i := range want {
		errs = append(errs, read(want[i].Address, &want[i]))
	}
	for i := range want {
		w := &want[len(want)-1-i]
		errs = append(errs, read(w.Address, w))
	}
	return errors.Join(append(errs, read(last+1, nil))...)
}

// observe reads everything through Reader, in pages of a size.
func observe(s queue.Reader, page int) (observed, error) {
	meta, infos := s.ReadStats()
	o := observed{Meta: meta}
	for a := observedFrom(meta.Last); a <= meta.Last; a++ {
		m, ok, err := s.Message(a)
		if err != nil {
			return o, err
		}
		if ok {
			o.Messages = append(o.Messages, tidy(m))
		}
	}
	err := walkMessages(s, o.Messages, meta.Last)
	if err != nil {
		return o, err
	}
	if o.Due, err = due(s, page); err != nil {
		return o, err
	}
	if o.NextDue, _, err = s.NextDue(queue.DelayedKey{}); err != nil {
		return o, err
	}
	for _, info := range infos {
		g, err := observeGroup(s, info, page, meta.Last)
		if err != nil {
			return o, fmt.Errorf("group %d: %w", info.ID, err)
		}
		o.Groups = append(o.Groups, g)
	}
	return o, nil
}

// exports reads the index by export number in pages of a size.
func exports(s queue.Reader, id queue.GroupID, page int) (all []queue.DeadLetter, err error) {
	r, ok := s.(interface {
		Exports(id queue.GroupID, from uint64, limit, maxBytes int, withBody bool) ([]queue.DeadLetter, error)
	})
	if !ok {
		return nil, fmt.Errorf("%T has no exports", s)
	}
	from := uint64(0)
	for {
		list, err := r.Exports(id, from, page, 1<<20, true)
		if err != nil || len(list) == 0 {
			return all, err
		}
		for _, d := range list {
			d.Message = tidy(d.Message)
			all = append(all, d)
		}
		from = list[len(list)-1].ExportNumber + 1
	}
}

func due(s queue.Reader, page int) (all []queue.DelayedKey, err error) {
	var after queue.DelayedKey
	for {
		list, err := s.Due(after, queue.MaxStamp, page)
		if err != nil || len(list) == 0 {
			return all, err
		}
		all = append(all, list...)
		after = list[len(list)-1]
	}
}

func observeGroup(s queue.Reader, info queue.GroupInfo, page int, last queue.Address) (o observedGroup, err error) {
	id := info.ID
	o.Info = info
	o.Info.Floor, o.Info.WatermarkBytes = 0, 0
	if len(o.Info.Config.DelaysMs) == 0 {
		o.Info.Config.DelaysMs = nil
	}
	lists := []struct {
		to   *[]queue.Deliverable
		read func(from queue.Address) ([]queue.Deliverable, queue.Address, error)
	}{
		{&o.Deliverables, func(from queue.Address) ([]queue.Deliverable, queue.Address, error) {
			return s.Deliverables(id, from, page, true)
		}},
		{&o.InPlace, func(from queue.Address) ([]queue.Deliverable, queue.Address, error) {
			return s.Deliverables(id, from, page, false)
		}},
		{&o.Stragglers, func(from queue.Address) ([]queue.Deliverable, queue.Address, error) {
			return s.ParkedStragglers(id, from, page)
		}},
		{&o.Retrying, func(from queue.Address) ([]queue.Deliverable, queue.Address, error) {
			return s.Retrying(id, from, page)
		}},
	}
	for _, l := range lists {
		if *l.to, err = pages(l.read); err != nil {
			return o, err
		}
	}
	o.Dead, err = pages(func(from queue.Address) ([]queue.DeadLetter, queue.Address, error) {
		return s.DeadLetters(id, from, page, true)
	})
	if err != nil {
		return o, err
	}
	for i := range o.Dead {
		o.Dead[i].Message = tidy(o.Dead[i].Message)
	}
	if o.Exports, err = exports(s, id, page); err != nil {
		return o, err
	}
	for _, a := range probes(last) {
		x := observedState{Address: a}
		if x.Finished, err = s.Finished(id, a); err != nil {
			return o, err
		}
		if x.Retry, x.Lease, x.Found, err = s.RetryOf(id, a); err != nil {
			return o, err
		}
		o.States = append(o.States, x)
	}
	return o, nil
}

// tidy makes empty slices nil, so that only what they hold is compared.
func tidy(m queue.StoredMessage) queue.StoredMessage {
	if len(m.Key) == 0 {
		m.Key = nil
	}
	if len(m.Body) == 0 {
		m.Body = nil
	}
	m.Headers = append([]queue.Header(nil), m.Headers...)
	for i := range m.Headers {
		if len(m.Headers[i].Value) == 0 {
			m.Headers[i].Value = nil
		}
	}
	return m
}

// checkSums checks doctor's sums on what a state says of itself.
func checkSums(o observed) error {
	c := o.Meta.Counters
	if c.Published != c.Messages+c.Reclaimed+c.Purged+c.Dropped+c.Expired+c.Cancelled {
		return fmt.Errorf("published is not stored + reclaimed + purged + dropped + expired + cancelled: %+v", c)
	}
	for _, g := range o.Groups {
		c := g.Info.Counters
		if c.Assigned != c.Unfinished+c.Acked+c.Dead+c.Exported+c.Expired+c.Purged+c.Cancelled {
			return fmt.Errorf("group %d: assigned is not unfinished + acked + dead + exported + expired + purged + cancelled: %+v", g.Info.ID, c)
		}
		if c.Unfinished != uint64(len(g.Deliverables)) || c.Dead != uint64(len(g.Dead)) {
			return fmt.Errorf("group %d: %d deliverable and %d dead, counters %+v", g.Info.ID, len(g.Deliverables), len(g.Dead), c)
		}
	}
	return nil
}
