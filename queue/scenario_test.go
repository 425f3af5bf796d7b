package queue_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/queuetest"
)

// TestScenarios runs testdata/scenario: one directive per command or read, times in ms after the start. Every file
// ends with a check of all invariants and a replay. Directives and their arguments are those of scenario.run.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenario", func(t *testing.T, path string) {
		s := &scenario{t: t, m: queuetest.New(t)}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			defer func() {
				if err := s.m.Check(); err != nil {
					d.Fatalf(t, "%v", err)
				}
			}()
			return s.run(d)
		})
		s.m.RequireSame()
	})
}

type scenario struct {
	t    *testing.T
	m    *queuetest.Machine
	now  queue.Stamp
	last []byte // the last command
}

// args reads arguments by name, and remembers what was asked for wrongly.
type args struct {
	d    *datadriven.TestData
	s    *scenario
	line map[string]string
}

func (a args) text(name string) string {
	if a.line != nil {
		return a.line[name]
	}
	for _, c := range a.d.CmdArgs {
		if c.Key == name {
			return strings.Join(c.Vals, ",")
		}
	}
	return ""
}

func (a args) has(name string) bool {
	if a.line != nil {
		_, ok := a.line[name]
		return ok
	}
	return a.d.HasArg(name)
}

func (a args) num(name string) uint64 {
	v := a.text(name)
	if v == "" {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, 64)
	require.NoError(a.s.t, err, "%s: %s=%s", a.d.Pos, name, v)
	return n
}

// at reads a time: ms after the start, 0 for none.
func (a args) at(name string) queue.Stamp {
	if !a.has(name) {
		return 0
	}
	return t0 + queue.Stamp(a.num(name))
}

// group reads a group by name, or its epoch, which may be given as epoch=n.
func (a args) group() (queue.GroupID, queue.Epoch) {
	g, ok := a.s.m.GroupByName(a.text("group"))
	id := g.ID
	if !ok {
		id = queue.GroupID(max(a.num("id"), 99))
	}
	if a.has("epoch") {
		return id, queue.Epoch(a.num("epoch"))
	}
	return id, g.Epoch
}

// lines splits the input into words: a first one, and name=value pairs.
func (a args) lines() []args {
	var list []args
	for _, l := range strings.Split(strings.TrimSpace(a.d.Input), "\n") {
		m := map[string]string{}
		for i, w := range strings.Fields(l) {
			k, v, _ := strings.Cut(w, "=")
			if i == 0 && v == "" {
				k, v = "", w
			}
			m[k] = v
		}
		if len(m) > 0 {
			list = append(list, args{a.d, a.s, m})
		}
	}
	return list
}

func (s *scenario) run(d *datadriven.TestData) string {
	a := args{d: d, s: s}
	if a.has("at") {
		s.now = t0 + queue.Stamp(a.num("at"))
	} else if s.now == 0 {
		s.now = t0
	}
	if out, ok := s.read(d.Cmd, a); ok {
		return out
	}
	if d.Cmd == "again" {
		return s.result(s.m.Raw(s.last))
	}
	cmd, err := queue.EncodeCommand(nil, s.command(d.Cmd, a))
	if err != nil {
		return err.Error() + "\n"
	}
	s.last = cmd
	return s.result(s.m.Raw(cmd))
}

func (s *scenario) command(name string, a args) queue.Command {
	id, epoch := a.group()
	switch name {
	case "publish":
		return s.publish(a)
	case "ack":
		return &queue.Ack{Stamp: s.now, Group: id, Epoch: epoch, Ranges: ranges(a.text("addresses"))}
	case "create", "delete", "reset", "configure":
		return s.groupCommand(name, a)
	case "expire":
		return s.expire(a)
	case "home":
		g, _ := s.m.Group(id)
		c := &queue.Home{Stamp: s.now, Group: id, ExpectedHome: g.Home, ExpectedEpoch: epoch, NewHome: queue.ReplicaID(a.num("to")), Released: a.has("released")}
		if a.has("from") {
			c.ExpectedHome = queue.ReplicaID(a.num("from"))
		}
		return c
	case "retention", "options":
		return s.retention(a)
	}
	a.d.Fatalf(s.t, "unknown directive %s", name)
	return nil
}

func ranges(text string) (list []queue.AddressRange) {
	for _, w := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		first, last, ok := strings.Cut(w, "-")
		if !ok {
			last = first
		}
		x, _ := strconv.ParseUint(first, 10, 64)
		y, _ := strconv.ParseUint(last, 10, 64)
		list = append(list, queue.AddressRange{First: queue.Address(x), Last: queue.Address(y)})
	}
	return list
}

func addresses(text string) (list []queue.Address) {
	for _, r := range ranges(text) {
		for a := r.First; a <= r.Last; a++ {
			list = append(list, a)
		}
	}
	return list
}

func (s *scenario) publish(a args) queue.Command {
	p := queue.Publish{ProducerEpoch: a.num("producer-epoch"), Low: queue.Seq(a.num("low")), Atomic: a.has("atomic"),
		Contiguous: a.has("contiguous"), CheckLast: a.has("last"), ExpectedLast: queue.Address(a.num("last"))}
	if a.has("producer") {
		p.Producer = queue.Producer{Kind: queue.ProducerClient, ID: a.num("producer")}
	}
	for _, l := range a.lines() {
		p.Messages = append(p.Messages, queue.Message{Body: []byte(l.text("")), Seq: queue.Seq(l.num("seq")), Key: []byte(l.text("key")),
			DedupID: []byte(l.text("dedup")), VisibleAt: l.at("visible"), ExpiresAt: l.at("expires")})
	}
	for range a.num("count") {
		p.Messages = append(p.Messages, queue.Message{Body: make([]byte, a.num("size"))})
	}
	return &queue.Enqueue{Stamp: s.now, Publishes: []queue.Publish{p}}
}

func (s *scenario) groupCommand(name string, a args) queue.Command {
	id, epoch := a.group()
	g, _ := s.m.Group(id)
	c := &queue.Group{Stamp: s.now, OperationID: a.num("op"), ID: id, ExpectedEpoch: epoch, ExpectedVersion: g.ConfigVersion}
	if a.has("version") {
		c.ExpectedVersion = a.num("version")
	}
	kind, at, _ := strings.Cut(a.text("start"), ":")
	c.Start.At, _ = strconv.ParseUint(at, 10, 64)
	c.Start.Kind = map[string]queue.StartKind{"latest": queue.StartLatest, "address": queue.StartAddress, "time": queue.StartTime}[kind]
	if c.Start.Kind == queue.StartTime {
		c.Start.At += uint64(t0)
	}
	c.Config = config(a.text("dead-letter-queue"))
	if a.has("max-attempts") {
		c.Config.MaxAttempts = uint32(a.num("max-attempts"))
	}
	switch name {
	case "create":
		c.Op, c.Name, c.ID, c.ExpectedEpoch, c.ExpectedVersion = queue.GroupCreate, a.text("group"), 0, 0, 0
		if c.OperationID == 0 {
			c.OperationID = uint64(len(s.m.Log)) + 1000
		}
		c.FirstHome = queue.ReplicaID(max(a.num("home"), 1))
	case "delete":
		c.Op, c.Config = queue.GroupDelete, queue.GroupConfig{}
	case "reset":
		c.Op, c.Config = queue.GroupReset, queue.GroupConfig{}
	case "configure":
		c.Op = queue.GroupConfigure
	}
	return c
}

func (s *scenario) expire(a args) queue.Command {
	id, epoch := a.group()
	c := &queue.Expire{Stamp: s.now, Group: id, Epoch: epoch}
	kinds := map[string]queue.ExpireKind{"update": 1, "dead": 2, "lease": 3, "release": 4, "claim": 5, "redrive": 6, "export": 7}
	for _, l := range a.lines() {
		e := queue.ExpireEntry{Kind: kinds[l.text("")], Address: queue.Address(l.num("address")), Attempts: uint32(l.num("attempts")),
			NotBefore: l.at("not-before"), Reason: l.text("reason"), Deadline: l.at("deadline"), Consumer: l.text("consumer"), Target: l.num("target")}
		state, _, _, err := s.m.RetryOf(id, e.Address)
		require.NoError(s.t, err)
		e.Change = state.Change
		if l.has("change") {
			e.Change = queue.Change(l.num("change"))
		}
		if e.Kind == queue.ExpireLease {
			e.Lease = queue.LeaseName{Epoch: epoch, Number: l.num("lease")}
			if l.has("issued") {
				e.Lease.Epoch = queue.Epoch(l.num("issued"))
			}
		}
		e.ExportState = map[string]queue.ExportState{"none": queue.ExportNone, "pending": queue.ExportPending, "exporting": queue.ExportExporting, "done": queue.ExportDone}[l.text("state")]
		c.Entries = append(c.Entries, e)
	}
	return c
}

func (s *scenario) retention(a args) queue.Command {
	c := &queue.Retention{Stamp: s.now, OperationID: a.num("op"), ReclaimLine: queue.Address(a.num("line")), Reclaim: addresses(a.text("reclaim")),
		DropTo: queue.Address(a.num("drop")), PurgeTo: queue.Address(a.num("purge")), Park: addresses(a.text("park")),
		Retire: a.has("retire"), FormatLevel: uint32(a.num("level")), CheckpointID: a.num("checkpoint")}
	for _, l := range a.lines() {
		c.Delayed = append(c.Delayed, queue.DelayedChange{Address: queue.Address(l.num("address")), Expected: l.at("expected"), NewVisibleAt: l.at("to")})
	}
	if a.d.Cmd != "options" {
		return c
	}
	o := s.m.Meta().Options
	if a.has("version") {
		o.Version = a.num("version")
	}
	if a.has("max-messages") {
		o.MaxMessages = a.num("max-messages")
	}
	if a.has("max-bytes") {
		o.MaxBytes = a.num("max-bytes")
		o.MaxBodyBytes = uint32(min(o.MaxBytes, uint64(o.MaxBodyBytes)))
	}
	if a.has("ttl") {
		o.TTLMs = a.num("ttl")
	}
	if a.has("max-delay") {
		o.MaxDelayMs = a.num("max-delay")
	}
	if a.has("drop-oldest") {
		o.Overflow = queue.OverflowDropOldest
	}
	if a.has("log") {
		o.Mode = queue.ModeLog
	}
	if a.has("key-order") {
		o.Ordering = queue.OrderKey
	}
	c.Options = &o
	return c
}

// result prints what matters of a result.
func (s *scenario) result(r queue.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", r.Code)
	if r.Group != 0 {
		fmt.Fprintf(&b, " group=%d epoch=%d home=%d version=%d", r.Group, r.Epoch, r.Home, r.Version)
	} else if r.Version != 0 {
		fmt.Fprintf(&b, " version=%d", r.Version)
	}
	b.WriteString("\n")
	for _, p := range r.Publishes {
		fmt.Fprintf(&b, "publish %s last=%d\n", p.Code, uint64(p.Last))
		for i, m := range p.Messages {
			if i >= 8 {
				fmt.Fprintf(&b, "  and %d more\n", len(p.Messages)-i)
				break
			}
			fmt.Fprintf(&b, "  %s", m.Code)
			if m.Address != 0 {
				fmt.Fprintf(&b, " address=%d", uint64(m.Address))
			}
			if m.Duplicate {
				b.WriteString(" duplicate")
			}
			b.WriteString("\n")
		}
	}
	if len(r.Acks) > 0 {
		names := [...]string{"unknown", "acked", "already", "dead"}
		var words []string
		for i, n := 0, 0; i < len(r.Acks); i += n {
			for n = 1; i+n < len(r.Acks) && r.Acks[i+n] == r.Acks[i]; n++ {
			}
			words = append(words, fmt.Sprintf("%d %s", n, names[r.Acks[i]]))
		}
		fmt.Fprintf(&b, "%s\n", strings.Join(words, ", "))
	}
	for _, e := range r.Expires {
		verb := "skipped"
		if e.Applied {
			verb = "applied"
		}
		fmt.Fprintf(&b, "%s change=%d round=%d attempts=%d", verb, e.Change, e.Round, e.Attempts)
		if e.Finished {
			b.WriteString(" finished")
		}
		if e.Dead {
			b.WriteString(" dead")
		}
		b.WriteString("\n")
	}
	for _, c := range r.Delayed {
		fmt.Fprintf(&b, "delayed %s\n", c)
	}
	return b.String()
}

// read runs the directives that change nothing.
func (s *scenario) read(name string, a args) (string, bool) {
	var b strings.Builder
	id, _ := a.group()
	switch name {
	case "stats":
		s.stats(&b)
	case "deliverables":
		list, _, err := s.m.Deliverables(id, queue.Address(a.num("from")), 100, a.has("parked"))
		require.NoError(s.t, err)
		s.deliverables(&b, list)
	case "stragglers":
		list, _, err := s.m.ParkedStragglers(id, 0, 100)
		require.NoError(s.t, err)
		s.deliverables(&b, list)
	case "retrying":
		list, _, err := s.m.Retrying(id, 0, 100)
		require.NoError(s.t, err)
		s.deliverables(&b, list)
	case "dead":
		s.dead(&b, id)
	case "exports":
		list, err := s.m.Exports(id, a.num("from"), 100, 1<<20, true)
		require.NoError(s.t, err)
		for _, d := range list {
			fmt.Fprintf(&b, "%d address=%d body=%s state=%d target=%d\n", d.ExportNumber, uint64(d.Address), d.Message.Body, d.ExportState, d.Target)
		}
	case "due":
		list, err := s.m.Due(queue.DelayedKey{}, a.at("until"), 100)
		require.NoError(s.t, err)
		for _, k := range list {
			fmt.Fprintf(&b, "%d visible=%d\n", uint64(k.Address), k.VisibleAt-t0)
		}
	case "message":
		m, ok, err := s.m.Message(queue.Address(a.num("address")))
		require.NoError(s.t, err)
		if ok {
			fmt.Fprintf(&b, "%s stamp=%d parked=%v\n", m.Body, m.Stamp-t0, m.Parked)
		}
	case "chores":
		c, err := s.m.Chores(s.now, 0)
		require.NoError(s.t, err)
		fmt.Fprintf(&b, "line=%d reclaim=%v park=%d drop=%d\n", uint64(c.Line), c.Reclaim, len(c.Park), uint64(c.DropTo))
	case "reopen":
		require.NoError(s.t, s.m.Reload())
	default:
		return "", false
	}
	if b.Len() == 0 {
		return "none\n", true
	}
	return b.String(), true
}

func (s *scenario) stats(b *strings.Builder) {
	m, groups := s.m.ReadStats()
	c := m.Counters
	fmt.Fprintf(b, "last=%d line=%d clock=%d messages=%d bytes=%d parked=%d delayed=%d\n", uint64(m.Last), uint64(m.Line), m.Clock-t0, c.Messages, c.Bytes, c.Parked, c.Delayed)
	fmt.Fprintf(b, "published=%d duplicates=%d refused=%d reclaimed=%d purged=%d dropped=%d expired=%d cancelled=%d producers=%d\n",
		c.Published, c.Duplicates, c.Refused, c.Reclaimed, c.Purged, c.Dropped, c.Expired, c.Cancelled, c.Producers)
	for _, g := range groups {
		x := g.Counters
		fmt.Fprintf(b, "%s: epoch=%d home=%d start=%d floor=%d bytes=%d assigned=%d unfinished=%d acked=%d dead=%d exported=%d expired=%d purged=%d cancelled=%d retrying=%d leased=%d\n",
			g.Name, g.Epoch, g.Home, uint64(g.Start), uint64(g.Floor), g.WatermarkBytes, x.Assigned, x.Unfinished, x.Acked, x.Dead, x.Exported, x.Expired, x.Purged, x.Cancelled, x.Retrying, x.Leased)
	}
}

func (s *scenario) deliverables(b *strings.Builder, list []queue.Deliverable) {
	for _, d := range list {
		fmt.Fprintf(b, "%d", uint64(d.Address))
		if d.Parked {
			b.WriteString(" parked")
		}
		if len(d.Key) > 0 {
			fmt.Fprintf(b, " key=%s", d.Key)
		}
		if d.HasRetry {
			fmt.Fprintf(b, " change=%d round=%d attempts=%d", d.Retry.Change, d.Retry.Round, d.Retry.Attempts)
		}
		if d.HasLease {
			fmt.Fprintf(b, " lease=%s/%d deadline=%d", d.Lease.Name.Epoch, d.Lease.Name.Number, d.Lease.Deadline-t0)
		}
		b.WriteString("\n")
	}
}

func (s *scenario) dead(b *strings.Builder, id queue.GroupID) {
	list, _, err := s.m.DeadLetters(id, 0, 100, true)
	require.NoError(s.t, err)
	for _, d := range list {
		fmt.Fprintf(b, "%d body=%s round=%d attempts=%d reason=%s export=%d/%d\n", uint64(d.Address), d.Message.Body, d.Round, d.Attempts, d.Reason, d.ExportNumber, d.ExportState)
	}
}
