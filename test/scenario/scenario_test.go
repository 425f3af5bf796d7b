package scenario

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/node"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// callTime bounds every call of a script.
const callTime = 20 * time.Second

// TestScenarios runs every script, in the order of names, against one fleet.
func TestScenarios(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute: not under -short")
	}
	c := openFleet(t)
	scripts, err := filepath.Glob("testdata/script/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, scripts)
	for _, path := range scripts {
		name := strings.TrimSuffix(filepath.Base(path), ".txt")
		t.Run(name, func(t *testing.T) {
			s := &script{c: c, queue: name, receipts: map[string]string{}, epochs: map[string]uint64{}, waiting: map[string]chan string{}, changed: time.Now()}
			datadriven.RunTest(t, path, s.run)
		})
	}
}

// openFleet starts a fleet in this process that ends with the test.
func openFleet(t *testing.T) *client.Client {
	t.Helper()
	c, _ := openFleetAt(t)
	return c
}

// openFleetAt is openFleet, and tells the API addresses of the hosts.
func openFleetAt(t *testing.T) (*client.Client, []string) {
	t.Helper()
	api, admin := freeport.For(t), freeport.For(t)
	dev, err := node.OpenDev(node.DevConfig{Dir: t.TempDir(), API: api, Admin: admin}, zap.NewNop())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	var addrs []string
	for _, n := range dev.Nodes {
		require.NoError(t, n.AwaitReady(ctx))
		if a := n.APIAddr(); a != nil {
			addrs = append(addrs, a.String())
		}
	}
	c, err := client.New(client.Options{Addrs: addrs})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c, addrs
}

// script is one running script.
type script struct {
	c        *client.Client
	queue    string
	keyed    bool
	receipts map[string]string
	epochs   map[string]uint64
	waiting  map[string]chan string
	asked    time.Time // when the last directive that changes something was sent
	changed  time.Time // and when it was answered
}

// run does one directive and returns what it prints. Failures of the fleet are printed as their codes.
func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	directive := *d // a receive of the background reads it later
	a := args{t, &directive}
	out, err := "", error(nil)
	sent := time.Now()
	switch d.Cmd {
	case "queue":
		out, err = s.create(ctx, a)
	case "group":
		out, err = s.group(ctx, a)
	case "publish":
		out, err = s.publish(ctx, a)
	case "receive":
		return s.receive(a)
	case "join":
		return s.join(a)
	case "ack", "nack", "release", "reject", "extend":
		out, err = s.settle(ctx, a)
	case "move":
		var g *tierqv1.Group
		if g, err = s.c.MoveGroup(ctx, s.queue, a.first(), uint64(a.number("to"))); err == nil {
			out = fmt.Sprintf("home=%d %s\n", g.HomeHost, s.epochOf(g))
		}
	case "reset":
		var g *tierqv1.Group
		if g, err = s.c.ResetGroup(ctx, s.queue, a.first(), &tierqv1.Start{At: a.text("at")}); err == nil {
			out = fmt.Sprintf("%s floor=%d unfinished=%d\n", s.epochOf(g), g.Floor, g.Unfinished)
		}
	case "delete":
		err = s.c.DeleteGroup(ctx, s.queue, a.first())
	case "dead":
		return s.dead(ctx, a)
	case "redrive":
		var n uint64
		if n, _, err = s.c.RedriveDeadLetters(ctx, s.queue, a.first()); err == nil {
			out = fmt.Sprintf("redriven %d\n", n)
		}
	case "purge":
		var n uint64
		if n, err = s.c.PurgeDeadLetters(ctx, s.queue, a.first()); err == nil {
			out = fmt.Sprintf("purged %d\n", n)
		}
	case "stats":
		return s.stats(ctx, a)
	case "digest":
		return s.digest(t)
	default:
		t.Fatalf("%s: no such directive: %s", d.Pos, d.Cmd)
	}
	s.asked, s.changed = sent, time.Now()
	if err != nil {
		return nameOf(err)
	}
	if out == "" {
		out = "ok\n"
	}
	return out
}

func nameOf(err error) string {
	var e *code.Error
	if errors.As(err, &e) {
		return e.Code.String() + "\n"
	}
	return err.Error() + "\n"
}

func (s *script) create(ctx context.Context, a args) (string, error) {
	o := &tierqv1.QueueOptions{MaxMessages: uint64(a.number("max-messages")), MaxDelayMs: a.millis("max-delay"), MaxBodyBytes: uint32(a.number("max-body"))}
	if a.text("ordering") == "key" {
		o.Ordering, s.keyed = tierqv1.Ordering_ORDERING_KEY, true
	}
	res, err := s.c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: s.queue, Options: o})
	if err != nil {
		return "", err
	}
	var roles []string
	for _, r := range res.Queue.Partitions[0].Replicas {
		roles = append(roles, r.Role)
	}
	return "replicas: " + strings.Join(roles, " ") + "\n", nil
}

func (s *script) group(ctx context.Context, a args) (string, error) {
	cfg := &tierqv1.GroupConfig{
		MaxAttempts: uint32(a.number("max-attempts")), LeaseMs: a.millis("lease"), MaxInFlight: uint32(a.number("max-in-flight")),
	}
	for _, d := range a.list("delays") {
		cfg.DelaysMs = append(cfg.DelaysMs, millis(a.t, d))
	}
	g, err := s.c.CreateGroup(ctx, &tierqv1.CreateGroupRequest{
		Queue: s.queue, Name: a.first(), Config: cfg, HomeHost: uint64(a.number("home")), Start: &tierqv1.Start{At: a.text("from")},
	})
	if err != nil {
		return "", err
	}
	s.epochOf(g)
	return fmt.Sprintf("home=%d unfinished=%d\n", g.HomeHost, g.Unfinished), nil
}

// epochOf says whether a group's epoch is another one than it was. Its number is not the script's: a home that was not
// known to be one when its process started takes an epoch of its own before its first delivery.
func (s *script) epochOf(g *tierqv1.Group) string {
	before := s.epochs[g.Name]
	s.epochs[g.Name] = g.Epoch
	switch {
	case g.Epoch < before:
		return "epoch fell"
	case g.Epoch == before:
		return "same epoch"
	}
	return "next epoch"
}

func (s *script) publish(ctx context.Context, a args) (string, error) {
	var msgs []client.Message
	for line := range strings.Lines(a.d.Input) {
		line = strings.TrimSuffix(line, "\n")
		m := client.Message{Delay: a.duration("delay"), TTL: a.duration("ttl"), DedupID: []byte(a.text("dedup")), Body: []byte(line)}
		if key, body, ok := strings.Cut(line, ": "); ok && s.keyed {
			m.Key, m.Body = []byte(key), []byte(body)
		}
		msgs = append(msgs, m)
	}
	ps, err := s.c.Publish(ctx, s.queue, msgs...)
	if len(ps) == 0 {
		return "", err
	}
	var out strings.Builder
	for _, p := range ps {
		switch {
		case p.Err != nil:
			fmt.Fprintf(&out, "%s\n", p.Err.Code)
		case p.Duplicate:
			fmt.Fprintf(&out, "address=%d duplicate\n", p.Address)
		default:
			fmt.Fprintf(&out, "address=%d\n", p.Address)
		}
	}
	return out.String(), nil
}

// receive takes messages, or lets a receive wait in the background.
func (s *script) receive(a args) string {
	name := a.text("background")
	if name == "" {
		return s.take(a, s.asked, s.changed)
	}
	answer := make(chan string, 1)
	s.waiting[name] = answer
	go func() { answer <- s.take(a, time.Time{}, time.Time{}) }()
	return "waits\n"
}

// take receives. after= and within= are times since asked, and since changed: neither demands that a machine be quick.
func (s *script) take(a args, asked, changed time.Time) string {
	ctx, cancel := context.WithTimeout(context.Background(), callTime+5*time.Second)
	defer cancel()
	wait := a.duration("wait")
	if wait == 0 {
		wait = client.NoWait
	}
	ds, err := s.c.Receive(ctx, s.queue, a.first(), client.ReceiveOptions{Max: max(1, a.number("max")), Wait: wait, Lease: a.duration("lease"), Consumer: a.text("consumer")})
	now := time.Now()
	switch {
	case err != nil:
		return nameOf(err)
	case len(ds) == 0:
		return "nothing\n"
	case a.duration("after") > now.Sub(asked):
		return fmt.Sprintf("too early: address=%d\n", ds[0].Address)
	case a.has("within") && a.duration("within") < now.Sub(changed):
		return fmt.Sprintf("too late: address=%d\n", ds[0].Address)
	}
	var out strings.Builder
	for _, d := range ds {
		name := a.text("as")
		if name == "" {
			name = strconv.FormatUint(d.Address, 10)
		}
		if a.text("background") == "" {
			s.receipts[name] = d.Receipt
		}
		fmt.Fprintf(&out, "address=%d attempt=%d body=%s", d.Address, d.Attempt, d.Body)
		if len(d.Key) > 0 {
			fmt.Fprintf(&out, " key=%s", d.Key)
		}
		out.WriteByte('\n')
	}
	return out.String()
}

// join waits for a receive of the background; it must answer soon after the last change.
func (s *script) join(a args) string {
	answer, ok := s.waiting[a.first()]
	if !ok {
		a.t.Fatalf("%s: nothing waits as %s", a.d.Pos, a.first())
	}
	delete(s.waiting, a.first())
	limit := callTime
	if a.has("within") {
		limit = a.duration("within")
	}
	late := time.NewTimer(time.Until(s.changed.Add(limit)))
	defer late.Stop()
	select {
	case text := <-answer:
		return text
	case <-late.C:
		return "too late\n"
	}
}

func (s *script) settle(ctx context.Context, a args) (string, error) {
	var receipts []string
	for _, name := range a.rest() {
		r, ok := s.receipts[name]
		if !ok {
			a.t.Fatalf("%s: no receipt is called %s", a.d.Pos, name)
		}
		receipts = append(receipts, r)
	}
	var rs []client.Settled
	var err error
	switch group := a.first(); a.d.Cmd {
	case "ack":
		rs, err = s.c.Ack(ctx, s.queue, group, receipts...)
	case "nack":
		delay := time.Duration(-1)
		if a.has("delay") {
			delay = a.duration("delay")
		}
		rs, err = s.c.Nack(ctx, s.queue, group, delay, "the script nacks", receipts...)
	case "release":
		rs, err = s.c.Release(ctx, s.queue, group, receipts...)
	case "reject":
		rs, err = s.c.Reject(ctx, s.queue, group, "the script rejects", receipts...)
	default:
		rs, err = s.c.Extend(ctx, s.queue, group, a.duration("lease"), receipts...)
	}
	if len(rs) == 0 {
		return "", err
	}
	var out strings.Builder
	for _, r := range rs {
		switch {
		case r.Err != nil:
			fmt.Fprintf(&out, "%s\n", r.Err.Code)
		default:
			out.WriteString("ok\n")
		}
	}
	return out.String(), nil
}

func (s *script) dead(ctx context.Context, a args) string {
	dead, _, err := s.c.ListDeadLetters(ctx, s.queue, a.first(), 0, 0)
	if err != nil {
		return nameOf(err)
	}
	var out strings.Builder
	for _, d := range dead {
		fmt.Fprintf(&out, "address=%d attempts=%d reason=%q body=%s\n", d.Address, d.Attempts, d.Reason, d.Body)
	}
	if out.Len() == 0 {
		return "none\n"
	}
	return out.String()
}

func (s *script) stats(ctx context.Context, a args) string {
	q, err := s.c.DescribeQueue(ctx, s.queue)
	if err != nil {
		return nameOf(err)
	}
	for _, g := range q.Groups {
		if g.Name == a.first() {
			return fmt.Sprintf("floor=%d unfinished=%d acked=%d dead=%d retrying=%d\n", g.Floor, g.Unfinished, g.Acked, g.Dead, g.Retrying)
		}
	}
	return "no such group\n"
}

// digest waits until the replicas are at one index, where their state must be the same (G7).
func (s *script) digest(t *testing.T) string {
	result := ""
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), callTime)
		defer cancel()
		res, err := s.c.ShardDigest(ctx, s.queue, 0)
		if err != nil || len(res.Replicas) != 2 || res.Replicas[0].Error != "" || res.Replicas[1].Error != "" {
			return false
		}
		one, two := res.Replicas[0], res.Replicas[1]
		if one.AppliedIndex != two.AppliedIndex {
			return false
		}
		result = "equal on 2 replicas\n"
		if one.Digest != two.Digest {
			result = fmt.Sprintf("at index %d: %s and %s\n", one.AppliedIndex, one.Digest, two.Digest)
		}
		return true
	}, callTime, 20*time.Millisecond)
	return result
}

// args reads a directive's arguments: words, and key=value.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) first() string {
	if len(a.d.CmdArgs) == 0 || len(a.d.CmdArgs[0].Vals) > 0 {
		a.t.Fatalf("%s: %s needs a name first", a.d.Pos, a.d.Cmd)
	}
	return a.d.CmdArgs[0].Key
}

// rest are the words after the first.
func (a args) rest() []string {
	var out []string
	for _, c := range a.d.CmdArgs[1:] {
		if len(c.Vals) == 0 {
			out = append(out, c.Key)
		}
	}
	return out
}

func (a args) has(key string) bool { return a.d.HasArg(key) }

func (a args) list(key string) []string {
	c, ok := a.d.Arg(key)
	if !ok {
		return nil
	}
	return c.Vals
}

func (a args) text(key string) string {
	if vs := a.list(key); len(vs) > 0 {
		return vs[0]
	}
	return ""
}

func (a args) number(key string) int {
	text := a.text(key)
	if text == "" {
		return 0
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		a.t.Fatalf("%s: %s=%s is no number", a.d.Pos, key, text)
	}
	return n
}

func (a args) duration(key string) time.Duration {
	text := a.text(key)
	if text == "" {
		return 0
	}
	v, err := time.ParseDuration(text)
	if err != nil {
		a.t.Fatalf("%s: %s: %v", a.d.Pos, key, err)
	}
	return v
}

func (a args) millis(key string) uint64 { return uint64(a.duration(key).Milliseconds()) }

func millis(t *testing.T, text string) uint64 {
	v, err := time.ParseDuration(text)
	require.NoError(t, err)
	return uint64(v.Milliseconds())
}
