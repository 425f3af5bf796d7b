package node

import (
	"context"
	"fmt"
	"time"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// Explain implements api.Backend at the group's home: first what the state says about the message, then what the home
// knows, then what holds up the whole group.
func (n *Node) Explain(ctx context.Context, r api.Explain) (api.Explanation, error) {
	d, g, err := n.atHome(ctx, r.Queue, r.Partition, r.Group)
	if err != nil {
		return api.Explanation{}, err
	}
	x := &explainer{d: d, meta: d.reader.Meta(), group: g, stats: d.statsOf(g.ID), now: d.raft.Stamp()}
	x.out = api.Explanation{
		Group: g, HomeHost: n.groupInfo(r.Queue, d, g).HomeHost, HomeState: x.stats.State.String(), Ready: x.stats.Ready, InFlight: x.stats.Leased,
		Retrying: x.stats.Retrying, BlockedKeys: x.stats.BlockedKeys, Blocked: x.stats.Blocked, Unresolved: x.stats.Unresolved, Waiting: x.stats.Waiters,
	}
	if x.stats.Group == 0 {
		x.out.HomeState = "unused" // nobody has asked this home for the group since it started
	}
	switch {
	case r.Address != 0:
		err = x.message(r.Address)
	case len(r.Key) > 0:
		err = x.key(ctx, r.Key)
	default:
		x.whole()
	}
	return x.out, err
}

// explainer finds what holds up one message, key, or group.
type explainer struct {
	d     *desk
	meta  queue.Meta
	group queue.GroupInfo
	stats home.GroupStats
	now   queue.Stamp
	out   api.Explanation
}

func (x *explainer) say(verdict, format string, args ...any) {
	x.out.Verdict, x.out.Text = verdict, fmt.Sprintf(format, args...)
}

// at writes a stamp for people.
func at(s queue.Stamp) string {
	return time.UnixMilli(int64(s)).UTC().Format("2006-01-02T15:04:05.000Z")
}

// message explains one message.
func (x *explainer) message(a queue.Address) error {
	x.out.Address = a
	switch {
	case a > x.meta.Last:
		x.say("unknown", "no message has this address yet: the last one is %d", uint64(x.meta.Last))
		return nil
	case a <= x.group.Start:
		x.say("not-owned", "the group starts behind address %d: reset the group to an earlier start to get it", uint64(x.group.Start))
		return nil
	}
	finished, err := x.d.reader.Finished(x.group.ID, a)
	if err != nil {
		return x.d.readFault(err)
	}
	if finished {
		x.say("finished", "the group has finished it: it was acked, purged, cancelled, or expired")
		return nil
	}
	m, ok, err := x.d.reader.Message(a)
	if err != nil {
		return x.d.readFault(err)
	}
	if !ok {
		x.say("finished", "it is not stored any more")
		return nil
	}
	x.out.Key = m.Key
	return x.stored(&m)
}

// stored explains an unfinished message by what the state and the home know of it.
func (x *explainer) stored(m *queue.StoredMessage) error {
	retry, lease, failed, err := x.d.reader.RetryOf(x.group.ID, m.Address)
	if err != nil {
		return x.d.readFault(err)
	}
	if failed {
		x.out.Attempts, x.out.Reason = retry.Attempts, retry.Reason
	}
	dead, _, err := x.d.reader.DeadLetters(x.group.ID, m.Address, 1, false)
	if err != nil {
		return x.d.readFault(err)
	}
	seen, err := x.d.keeper.Look(x.group.Name, m.Address)
	if err != nil {
		return err
	}
	switch {
	case len(dead) == 1 && dead[0].Address == m.Address:
		x.dead(&dead[0])
	case seen.Leased:
		x.out.Consumer, x.out.Deadline = seen.Held.Consumer, x.now+queue.Stamp(seen.Held.Left.Milliseconds())
		x.say("leased", "%s has held it for %s, and may until %s: it is waiting for the ack", consumerName(seen.Held.Consumer), seen.Held.HeldFor.Round(time.Millisecond), at(x.out.Deadline))
	case !seen.Serving && lease.Deadline > x.now:
		x.out.Consumer, x.out.Deadline = lease.Consumer, lease.Deadline
		x.say("leased", "%s may hold it until %s", consumerName(lease.Consumer), at(lease.Deadline))
	case m.ExpiresAt != 0 && m.ExpiresAt <= x.now:
		x.say("expired", "its time to live ended at %s: it is not delivered any more", at(m.ExpiresAt))
	case m.VisibleAt > x.now:
		x.out.NotBefore = m.VisibleAt
		x.say("delayed", "it becomes due at %s: `tierq delayed reschedule` or `cancel` change that", at(m.VisibleAt))
	case max(retry.NotBefore, seen.NotBefore) > x.now:
		x.out.NotBefore = max(retry.NotBefore, seen.NotBefore)
		x.say("retrying", "attempt %d failed, the next one is due at %s", retry.Attempts, at(x.out.NotBefore))
	default:
		return x.ready(m, seen)
	}
	return nil
}

// dead explains a dead letter.
func (x *explainer) dead(d *queue.DeadLetter) {
	since := fmt.Sprintf("it has been a dead letter since %s after %d attempts: ", at(d.DeadAt), d.Attempts)
	parked := x.d.parkedExport(x.group.ID)
	switch to := x.group.Config.DeadLetterQueue; {
	case d.ExportState == queue.ExportExporting && parked != nil:
		x.say("dead", "%sit is being published to dead-letter queue %s, which does not take it (%s): it is tried again", since, parked.Queue, parked.Text)
	case d.ExportState == queue.ExportExporting:
		x.say("dead", "%sit is being published to the dead-letter queue: redrive it from there", since)
	case d.ExportState == queue.ExportPending && parked != nil:
		x.say("dead", "%sit waits for dead-letter queue %s behind dead letter %d (%s): `tierq dead redrive` and `purge` still work", since, parked.Queue, uint64(parked.Address), parked.Text)
	case d.ExportState == queue.ExportPending && to != "":
		x.say("dead", "%sit goes on to dead-letter queue %s next", since, to)
	case to != "":
		x.say("dead", "%sit stays here, as it died before the group named a dead-letter queue, or no queue can take it: redrive it with `tierq dead redrive`, or purge it", since)
	default:
		x.say("dead", "%sredrive it with `tierq dead redrive`, or purge it", since)
	}
}

func consumerName(name string) string {
	if name == "" {
		return "a consumer without a name"
	}
	return fmt.Sprintf("consumer %q", name)
}

// ready explains a message that could be delivered by itself.
func (x *explainer) ready(m *queue.StoredMessage, seen home.Seen) error {
	head, err := x.headOf(m, seen)
	if err != nil {
		return err
	}
	switch {
	case head != 0:
		x.out.BlockedBy = head
		x.say("blocked", "message %d of the same key must be finished first: explain that one", uint64(head))
	case x.obstacle():
	case seen.Unresolved:
		x.say("unresolved", "what became of its last delivery is being recorded: it goes on when a quorum has answered")
	case seen.Serving && !seen.Tracked && seen.Full:
		x.say("beyond-look-ahead", "too many messages before it are retrying, delayed, or behind a slow key: finish, purge, or dead-letter some of them")
	default:
		x.idle("ready", "it is the next to be handed out, or behind others that are ready")
	}
	return nil
}

// headOf finds the message of the same key that goes first; 0: none.
func (x *explainer) headOf(m *queue.StoredMessage, seen home.Seen) (queue.Address, error) {
	if seen.Head != 0 || len(m.Key) == 0 || x.meta.Options.Ordering != queue.OrderKey || seen.Tracked {
		return seen.Head, nil
	}
	r, err := x.d.admin()
	if err != nil {
		return 0, err
	}
	list, _, err := r.OfKey(x.group.ID, m.Key, 0, 1)
	if err != nil || len(list) == 0 || list[0].Address == m.Address {
		return 0, x.d.readFault(err)
	}
	return list[0].Address, nil
}

// obstacle looks for what holds up the whole group; false when nothing does.
func (x *explainer) obstacle() bool {
	s := &x.stats
	switch {
	case x.meta.Options.Paused:
		x.say("paused-queue", "the queue is paused: `tierq queue resume` ends it")
	case x.group.Config.Paused:
		x.say("paused-group", "the group is paused: `tierq group resume` ends it")
	case s.Waiters > 0 && s.State != home.GateOpen && (s.Ready > 0 || s.State != home.GateLease): // with nothing to hand out no lease is taken
		x.say("no-home-lease", "the home may not hand out now (%s): it needs a quorum of the shard, and a new home waits for the old one's lease", s.State)
	case s.Leased >= int(x.group.Config.MaxInFlight) && s.Leased > 0:
		x.say("in-flight-limit", "%d messages are in flight, which is the group's limit: ack some, or raise it with `tierq group configure`", s.Leased)
	default:
		return false
	}
	return true
}

// idle is the verdict on what could be handed out at once.
func (x *explainer) idle(verdict, text string) {
	if x.stats.Waiters == 0 {
		text += ": no consumer asks for messages now"
	}
	x.say(verdict, "%s", text)
}

// key explains the first unfinished message of a key.
func (x *explainer) key(ctx context.Context, key []byte) error {
	if x.meta.Options.Ordering != queue.OrderKey {
		return code.New(code.InvalidArgument, "key: the queue has no key order, so no message waits for another: explain an address")
	}
	r, err := x.d.admin()
	if err != nil {
		return err
	}
	var found []queue.Deliverable
	from := queue.Address(0)
	for pages := 0; pages < maxKeyPages && ctx.Err() == nil; pages++ {
		list, next, err := r.OfKey(x.group.ID, key, from, maxBehind+1-len(found))
		if err != nil {
			return x.d.readFault(err)
		}
		if found = append(found, list...); next == 0 || len(found) > maxBehind {
			break
		}
		from = next
	}
	x.out.Key = key
	if len(found) == 0 {
		x.say("finished", "the group has no unfinished message of this key, as far as was looked")
		return nil
	}
	x.out.Behind = len(found) - 1
	return x.message(found[0].Address)
}

// maxBehind bounds how many messages behind a key's head are counted, maxKeyPages the reads for it.
const (
	maxBehind   = 1000
	maxKeyPages = 64
)

// whole explains a group.
func (x *explainer) whole() {
	c, s := &x.group.Counters, &x.stats
	if x.obstacle() {
		return
	}
	switch parked := x.d.parkedExport(x.group.ID); {
	case c.Unfinished == 0 && parked != nil:
		x.say("dead-letters-parked", "everything is finished but %d dead letters, which dead-letter queue %s does not take: %s", x.group.Exports, parked.Queue, parked.Text)
	case c.Unfinished == 0:
		x.say("idle", "everything is finished: %d acked, %d dead, %d sent on to a dead-letter queue", c.Acked, c.Dead, c.Exported)
	case s.Ready > 0 || s.More:
		x.idle("ready", "messages are ready to be handed out")
	case s.Leased > 0:
		x.say("leased", "%d messages are with consumers, none is ready", s.Leased)
	case s.Retrying > 0:
		x.say("retrying", "%d messages wait for their next attempt or their time, none is ready", s.Retrying)
	default:
		x.idle("ready", fmt.Sprintf("%d messages are unfinished, delayed ones included", c.Unfinished))
	}
}
