package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/certs/certstest"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/store"
)

// awaitMetric waits until a host's metrics have a line: what an alert is about.
func (d *drilling) awaitMetric(h *host, line string) {
	d.t.Helper()
	eventually(d.t, readyWithin, line, func() error {
		page, err := h.get("/metrics")
		if err == nil && !strings.Contains(string(page), line+"\n") {
			err = errNotYet
		}
		return err
	})
	d.say("host %d shows %s", h.id, line)
}

// awaitState waits for a quorum state of the drill's queue.
func (d *drilling) awaitState(h *host, state int) {
	d.t.Helper()
	d.awaitMetric(h, fmt.Sprintf("tierq_quorum_state{partition=\"0\",queue=%q} %d", d.vars["QUEUE"], state))
}

// witness is the fleet's only one.
func (f *fleet) witness() *host {
	for _, h := range f.hosts {
		if h.role == "witness" && !h.gone {
			return h
		}
	}
	f.t.Fatal("there is no witness")
	return nil
}

// newHost lays a host that may join, and binds its variables.
func (d *drilling) newHost(role string) *host {
	d.t.Helper()
	h := d.f.layHost(role)
	require.NoError(d.t, os.WriteFile(h.config, []byte(d.f.yaml(h)), 0o600))
	d.set("NEW_HOST", strconv.FormatUint(h.id, 10))
	d.set("NEW_CONFIG", h.config)
	d.set("TOKEN_FILE", filepath.Join(d.t.TempDir(), "token"))
	return h
}

// wipe is the loss of a machine with its disk. Its directory may be a file system of its own.
func (d *drilling) wipe(h *host) {
	d.t.Helper()
	d.say("kill -9 of host %d (%s), and its disk is gone", h.id, h.role)
	h.kill()
	require.NoError(d.t, os.RemoveAll(h.dir))
}

// drillDegraded is RB-1: the other full host of a strict queue is lost. Its publishes are refused until it is back, nobody is
// elected, and the leader's host runs through.
func drillDegraded(d *drilling) {
	l := d.load("rb-1", &tierqv1.QueueOptions{Durability: tierqv1.Durability_DURABILITY_STRICT})
	leader := d.f.leaderHost("rb-1")
	other := d.f.other(leader)
	term, pid := mustStats(d.t, leader, "rb-1").Partitions[0].Term, leader.pid()
	d.at(other)
	d.say("kill -9 of host %d; host %d leads in term %d", other.id, leader.id, term)
	other.kill()
	d.awaitState(leader, 2)
	d.do("look")
	d.do("start")
	d.do("over")
	require.Equal(d.t, term, mustStats(d.t, leader, "rb-1").Partitions[0].Term, "nobody was elected")
	require.Equal(d.t, pid, leader.pid())
	d.awaitState(leader, 0)
	l.finish()
}

// drillDivergent is RB-2: a byte of a stored message of the replica that does not lead is another one.
func drillDivergent(d *drilling) {
	d.use(newFleet(d.t, 2, 1))
	l := d.keep("rb-2", 200)
	leader := d.f.leaderHost("rb-2")
	wrong := d.f.other(leader)
	q, err := d.f.describe("rb-2")
	require.NoError(d.t, err)
	wrong.stop()
	damage(d.t, wrong, q.Partitions[0].Shard)
	wrong.restart()
	d.f.awaitTwoCopies("rb-2")
	d.say("one byte of a message on host %d has changed; host %d leads", wrong.id, d.f.leaderHost("rb-2").id)
	d.at(wrong)
	d.do("look")
	require.NotZero(d.t, d.shell("tierq shard digest $QUEUE --wait").exit)
	d.newHost("full")
	d.do("verify")
	d.do("replace")
	wrong.gone = true
	d.use(d.f)
	d.do("over")
	l.consumeAll(d.f)
}

// damage changes the last byte of the body of one stored message of a stopped host.
func damage(t *testing.T, h *host, shard uint64) {
	t.Helper()
	s, err := store.Open(filepath.Join(h.dir, "state"), store.Options{})
	require.NoError(t, err)
	space, err := s.Shard(shard)
	require.NoError(t, err)
	const kindMessage, sum = 0x02, 4 // docs/format/keys.md
	it, err := space.NewIter([]byte{kindMessage}, []byte{kindMessage + 1})
	require.NoError(t, err)
	require.True(t, it.First())
	value, err := it.Value()
	require.NoError(t, err)
	value = bytes.Clone(value)
	value[len(value)-sum-1] ^= 1
	b := space.NewBatch()
	b.Set(bytes.Clone(it.Key()), value)
	require.NoError(t, it.Close())
	require.NoError(t, space.Commit(b))
	require.NoError(t, s.Close())
}

// drillKilled is RB-3: kill -9 of the leader.
func drillKilled(d *drilling) {
	l := d.load("rb-3", nil)
	leader := d.f.leaderHost("rb-3")
	term := mustStats(d.t, leader, "rb-3").Partitions[0].Term
	d.at(leader)
	d.say("kill -9 of host %d, which leads in term %d", leader.id, term)
	leader.kill()
	l.goesOn()
	d.do("look")
	d.do("start")
	d.do("over")
	require.Greater(d.t, mustStats(d.t, d.f.leaderHost("rb-3"), "rb-3").Partitions[0].Term, term)
	l.finish()
}

// drillNoLeader is RB-4: of two full hosts and a witness two are lost.
func drillNoLeader(d *drilling) {
	l := d.load("rb-4", nil)
	leader := d.f.leaderHost("rb-4")
	other, witness := d.f.other(leader), d.f.witness()
	d.at(other)
	d.set("WITNESS_CONFIG", witness.config)
	d.say("kill -9 of host %d and host %d, the witness; host %d leads", other.id, witness.id, leader.id)
	witness.kill()
	other.kill()
	d.awaitState(leader, 3)
	d.do("look")
	d.do("start")
	d.do("over")
	l.finish()
}

// drillDiskLow is RB-5: the disk of the leader's host is nearly full.
func drillDiskLow(d *drilling) {
	f := layFleet(d.t, 2, 1)
	for _, h := range f.full() {
		mountSmall(d.t, h.dir, 192<<20)
		f.prepend(h, "low_space_bytes: 67108864\n")
	}
	f.startAll()
	d.use(f)
	scratch := d.keep("rb-5-scratch", 50)
	l := d.load("rb-5", nil)
	leader := f.leaderHost("rb-5")
	d.at(leader)
	ballast := filepath.Join(leader.dir, "ballast")
	fill(d.t, ballast, leader.dir, 48<<20)
	d.awaitMetric(leader, "tierq_disk_low 1")
	d.do("look")
	d.set("QUEUE", "rb-5-scratch")
	d.do("purge")
	require.Zero(d.t, f.stored("rb-5-scratch"))
	scratch.stopPublisher()
	d.set("QUEUE", "rb-5")
	d.say("space is added")
	require.NoError(d.t, os.Remove(ballast))
	d.do("over")
	l.finish()
}

// drillWitnessDown is RB-6 when the witness comes back.
func drillWitnessDown(d *drilling) {
	l := d.load("rb-6", nil)
	witness := d.f.witness()
	d.at(witness)
	d.set("WITNESS_CONFIG", witness.config)
	d.say("kill -9 of host %d, the witness", witness.id)
	witness.kill()
	d.awaitMetric(d.f.full()[0], fmt.Sprintf("tierq_host_heard{host=\"%d\",role=\"witness\"} 0", witness.id))
	d.do("look")
	d.do("start")
	d.do("over")
	l.finish()
}

// drillWitnessLost is RB-6 when it does not.
func drillWitnessLost(d *drilling) {
	d.use(newFleet(d.t, 2, 1))
	l := d.load("rb-6", nil)
	witness := d.f.witness()
	d.at(witness)
	d.wipe(witness)
	d.awaitMetric(d.f.full()[0], fmt.Sprintf("tierq_host_heard{host=\"%d\",role=\"witness\"} 0", witness.id))
	d.do("look")
	d.newHost("witness")
	d.do("replace")
	witness.gone = true
	d.do("over")
	other := d.f.other(d.f.leaderHost("rb-6"))
	d.say("the new witness votes: kill -9 of host %d, and publishes go on", other.id)
	other.kill()
	l.goesOn()
	other.restart()
	d.f.awaitTwoCopies("rb-6")
	l.finish()
}

// drillBothLost is RB-7: both full hosts of the fleet are gone, and a backup is there.
func drillBothLost(d *drilling) {
	d.use(newFleet(d.t, 2, 1))
	l := d.keep("rb-7", 200)
	d.set("BACKUP", filepath.Join(d.t.TempDir(), "backup"))
	d.do("save")
	const later = 50
	l.publishUncounted(later)
	for _, h := range d.f.hosts {
		d.wipe(h)
	}
	d.do("verify")
	d.startNewFleet("start")
	d.do("restore")
	d.do("over")
	d.say("%d messages were published after the backup: lost, as the page says", later)
	l.consumeAll(d.f)
}

// startNewFleet lays a fleet of new hosts and runs the block that starts it.
func (d *drilling) startNewFleet(block string) {
	d.t.Helper()
	f := layFleet(d.t, 2, 1)
	d.use(f)
	d.at(f.host(1))
	d.set("NEW_CONFIG", f.host(2).config)
	d.set("NEW_HOST", "2")
	d.set("WITNESS_CONFIG", f.host(3).config)
	d.do(block)
}

// drillNewestLost is RB-8: the host with the newest copy is gone, and its fleet is left.
func drillNewestLost(d *drilling) {
	d.use(newFleet(d.t, 2, 1))
	l := d.keep("rb-8", 200)
	d.loseNewest(l)
	old := d.f
	d.startNewFleet("new-fleet")
	d.do("over")
	l.consumeAll(d.f)
	for _, h := range old.hosts {
		h.kill()
	}
}

// drillNewestLostInPlace is RB-8 in a fleet that still has its catalog.
func drillNewestLostInPlace(d *drilling) {
	f := newFleet(d.t, 3, 1)
	d.use(f)
	l := d.keep("rb-8", 200)
	gone, survivor := d.loseNewest(l)
	d.at(survivor)
	d.set("GONE_HOST", strconv.FormatUint(gone.id, 10))
	d.do("in-place")
	gone.gone = true
	d.use(f)
	d.do("over")
	l.consumeAll(f)
}

// loseNewest loses the leader's host while the other full replica lacks messages, and takes what that one has into a backup.
func (d *drilling) loseNewest(l *traffic) (gone, survivor *host) {
	d.t.Helper()
	gone = d.f.leaderHost(l.queue)
	q, err := d.f.describe(l.queue)
	require.NoError(d.t, err)
	var witness *host
	for _, r := range q.Partitions[0].Replicas {
		switch h := d.f.host(r.Host); {
		case h.role == "witness":
			witness = h
		case h != gone:
			survivor = h
		}
	}
	d.say("kill -9 of host %d; host %d leads", survivor.id, gone.id)
	survivor.kill()
	const later = 50
	l.publishUncounted(later)
	d.say("%d messages were published with one data copy", later)
	d.wipe(gone)
	survivor.start()
	d.at(survivor)
	d.awaitState(survivor, 3)
	d.do("look")
	d.do("stop")
	wal := filepath.Join(d.t.TempDir(), "wal")
	require.NoError(d.t, os.CopyFS(wal, os.DirFS(filepath.Join(witness.dir, "wal"))))
	d.set("WITNESS_WAL", wal)
	d.set("BACKUP", filepath.Join(d.t.TempDir(), "recovered"))
	printed := d.do("plan")
	number := regexp.MustCompile(`--accept (\d+)`).FindStringSubmatch(printed)
	require.NotNil(d.t, number, printed)
	d.set("NUMBER", number[1])
	d.do("take")
	return gone, survivor
}

// drillHostReplaced is RB-9: a full host is lost with its disk and replaced, then another one that runs.
func drillHostReplaced(d *drilling) {
	d.use(newFleet(d.t, 2, 1))
	l := d.load("rb-9", nil)
	lost := d.f.other(d.f.leaderHost("rb-9"))
	d.at(lost)
	d.wipe(lost)
	l.goesOn()
	d.do("look")
	d.newHost("full")
	d.do("join")
	d.do("lost")
	lost.gone = true
	d.use(d.f)
	d.do("over")
	l.goesOn()
	d.newHost("full")
	drained := d.f.leaderHost("rb-9")
	d.at(drained)
	d.say("host %d, which leads, is to be replaced too", drained.id)
	d.do("join")
	require.Equal(d.t, exitRefused, drained.endedBy(func() { d.do("drain") }), "its exit status")
	drained.gone = true
	d.use(d.f) // neither of the first two addresses is left
	d.do("over")
	l.finish()
}

// drillCertificates is RB-10: every certificate of every host is replaced under load.
func drillCertificates(d *drilling) {
	const day = 24 * time.Hour
	f := layFleet(d.t, 2, 1)
	ca, roots := f.secure(10 * day)
	f.startAll()
	d.use(f)
	d.set("TIERQ_CA", roots)
	d.set("CA", roots)
	l := d.load("rb-10", nil)
	for _, h := range f.hosts {
		d.at(h)
		for _, use := range []string{"peer", "api"} {
			if use == "api" && h.role == "witness" {
				continue
			}
			d.set("CERT", filepath.Join(h.certs(use), "cert.pem"))
			d.set("KEY", filepath.Join(h.certs(use), "key.pem"))
			cert, key := ca.Issue(40*day, "127.0.0.1")
			certstest.Write(d.t, d.vars["CERT"]+".new", cert)
			certstest.Write(d.t, d.vars["KEY"]+".new", key)
			d.do("look")
			d.do("rotate")
			l.goesOn()
		}
		d.do("over")
	}
	l.finish()
}

// secure configures mutual TLS between the hosts of a fleet that does not run yet, and TLS for its clients. roots is the file of the CA.
func (f *fleet) secure(validFor time.Duration) (ca *certstest.CA, roots string) {
	t := f.t
	t.Helper()
	ca = certstest.NewCA(t, "drill")
	for _, h := range f.hosts {
		cert, key, roots := ca.Files(h.certs("peer"), validFor, "127.0.0.1")
		f.prepend(h, fmt.Sprintf("tls: {cert: %s, key: %s, ca: %s}\n", cert, key, roots))
		if h.role == "full" {
			cert, key, _ := ca.Files(h.certs("api"), validFor, "127.0.0.1")
			f.prepend(h, fmt.Sprintf("api_tls: {cert: %s, key: %s}\n", cert, key))
		}
	}
	roots = filepath.Join(f.dir, "roots.pem")
	certstest.Write(t, roots, ca.PEM)
	var err error
	f.tls, err = certs.Open(certs.Options{Files: certs.Files{CA: roots}})
	require.NoError(t, err)
	return ca, roots
}

// certs is the directory of a host's certificate for the ports between hosts (peer), or for its clients (api).
func (h *host) certs(use string) string {
	return filepath.Join(h.f.dir, fmt.Sprintf("%s-%d", use, h.id))
}

// drillUpgrade is RB-11: to another version of the program, and back.
func drillUpgrade(d *drilling) {
	l := d.load("rb-11", nil)
	d.do("look")
	now := versionOf(d.t, d.f.hosts[0])
	d.roll(l, otherTierq(d.t))
	require.NotEqual(d.t, now, versionOf(d.t, d.f.hosts[0]))
	d.do("over")
	d.roll(l, "")
	require.Equal(d.t, now, versionOf(d.t, d.f.hosts[0]))
	d.do("over")
	l.finish()
}

// roll puts another program in place on one host after the other.
func (d *drilling) roll(l *traffic, program string) {
	d.t.Helper()
	w := d.f.witness()
	for _, h := range append(d.f.full(), w) {
		d.at(h)
		was := versionOf(d.t, h)
		h.program = program
		if h == w {
			d.set("WITNESS_CONFIG", w.config)
			d.do("witness")
		} else {
			d.do("host")
		}
		l.goesOn()
		d.say("host %d ran %s, and runs %s", h.id, was, versionOf(d.t, h))
	}
}

// versionOf asks a host which program it runs.
func versionOf(t *testing.T, h *host) string {
	t.Helper()
	version := "a version that does not say so"
	eventually(t, readyWithin, fmt.Sprintf("host %d says its version", h.id), func() error {
		page, err := h.get("/metrics")
		if m := regexp.MustCompile(`tierq_build_info\{version="([^"]*)"\} 1`).FindSubmatch(page); m != nil {
			version = string(m[1])
		}
		return err
	})
	return version
}

// drillBacklog is RB-13: nobody receives.
func drillBacklog(d *drilling) {
	l := d.keep("rb-13", 100)
	d.do("look")
	l.consumeAll(d.f)
	d.do("over")
}

// drillDeadLetters is RB-14: a consumer rejects.
func drillDeadLetters(d *drilling) {
	const messages = 5
	c := d.f.client(client.Options{})
	d.keepIn(c, "rb-14", messages)
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	settle := func(how func(receipts []string) ([]client.Settled, error)) {
		for left := messages; left > 0; {
			got, err := c.Receive(ctx, "rb-14", "workers", client.ReceiveOptions{Max: left})
			require.NoError(d.t, err)
			for _, m := range got {
				s, err := how([]string{m.Receipt})
				require.NoError(d.t, err)
				require.Nil(d.t, s[0].Err)
			}
			left -= len(got)
		}
	}
	settle(func(r []string) ([]client.Settled, error) {
		return c.Reject(ctx, "rb-14", "workers", "no such customer", r...)
	})
	d.do("look")
	d.do("redrive")
	d.do("over")
	settle(func(r []string) ([]client.Settled, error) { return c.Ack(ctx, "rb-14", "workers", r...) })
	d.say("all %d were received again and acked", messages)
}

// drillGrowth is RB-16: a queue grows while the witness is away. The growth is given up once, and begun again.
func drillGrowth(d *drilling) {
	l := d.keep("rb-16", 100)
	witness := d.f.witness()
	d.at(witness)
	d.set("WITNESS_CONFIG", witness.config)
	d.say("kill -9 of host %d, the witness", witness.id)
	witness.kill()
	for _, h := range d.f.full() { // until then they take it for one that votes
		d.awaitMetric(h, fmt.Sprintf("tierq_host_heard{host=\"%d\",role=\"witness\"} 0", witness.id))
	}
	c := d.f.client(client.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 2*readyWithin)
	defer cancel()
	grow := func() {
		d.say("tierq queue grow rb-16 --partitions 2")
		_, err := c.GrowQueue(ctx, "rb-16", 2)
		require.NoError(d.t, err)
	}
	grow()
	d.do("look")
	d.do("cancel")
	grow()
	d.do("start")
	eventually(d.t, readyWithin, "two partitions", func() error {
		q, err := c.DescribeQueue(ctx, "rb-16")
		if err == nil && len(q.Partitions) != 2 {
			err = fmt.Errorf("there are %d", len(q.Partitions))
		}
		return err
	})
	d.do("over")
	l.consumeAll(d.f)
}

// drillClock is RB-17, on clocks that are right: a process cannot move the clock of its machine. TestClockJumps moves an injected one.
func drillClock(d *drilling) {
	l := d.keep("rb-17", 10)
	d.set("QUEUE", "rb-17")
	d.set("HOST", strconv.FormatUint(d.f.leaderHost("rb-17").id, 10))
	d.do("look")
	d.do("accept")
	d.do("over")
	l.consumeAll(d.f)
}

// drillRefusals is RB-15: a queue is full.
func drillRefusals(d *drilling) {
	c := d.f.client(client.Options{PublishTimeout: 2 * time.Second})
	d.f.createQueue(c, "rb-15", &tierqv1.QueueOptions{MaxMessages: 10})
	d.set("QUEUE", "rb-15")
	publish := func() error {
		p, err := c.Publish(context.Background(), "rb-15", client.Message{Body: []byte("x")})
		if err == nil && p[0].Err != nil {
			err = p[0].Err
		}
		return err
	}
	var err error
	for n := 0; err == nil; n++ {
		require.Less(d.t, n, 20, "the queue has no bound")
		err = publish()
	}
	require.Equal(d.t, code.QueueFull, codeOf(err), "%v", err)
	d.say("a publish is refused: %v", err)
	d.do("look")
	d.do("purge")
	d.do("over")
	require.NoError(d.t, publish())
}

// keep publishes messages that nobody receives yet.
func (d *drilling) keep(queue string, n int) *traffic {
	d.t.Helper()
	return d.keepIn(d.f.client(client.Options{}), queue, n)
}

func (d *drilling) keepIn(c *client.Client, queue string, n int) *traffic {
	d.t.Helper()
	d.createQueue(c, queue)
	l := &traffic{d: d, queue: queue, a: newAccount(), stopPublisher: func() {}}
	var answers sync.WaitGroup
	for id := range uint64(n) {
		publishOne(c, l.a, queue, id+1, fmt.Appendf(nil, "kept %d", id), &answers)
	}
	answers.Wait()
	published, _ := l.a.counts()
	require.Equal(d.t, n, published)
	eventually(d.t, readyWithin, "both copies have them", func() error { return d.twoCopies(queue) })
	d.say("%d messages were published to queue %s", n, queue)
	return l
}

// createQueue makes a queue of two full replicas and a witness with a group, whatever other hosts there are.
func (d *drilling) createQueue(c *client.Client, queue string) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	_, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: queue, Replicas: 2, Witnesses: 1})
	require.NoError(d.t, err)
	d.f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: queue, Name: "workers", Config: &tierqv1.GroupConfig{LeaseMs: drillLease}})
	d.set("QUEUE", queue)
	d.set("GROUP", "workers")
}

// twoCopies is nil once both full replicas of a queue have applied the same.
func (d *drilling) twoCopies(queue string) error {
	ds, err := d.f.digests(queue)
	if err != nil {
		return err
	}
	if len(ds) != 2 {
		return fmt.Errorf("%d replicas", len(ds))
	}
	if ds[0].Error != "" || ds[1].Error != "" || ds[0].AppliedIndex != ds[1].AppliedIndex {
		return fmt.Errorf("%v", ds)
	}
	d.f.awaitTwoCopies(queue)
	return nil
}

// publishUncounted publishes messages that the page says may be lost: no account expects them.
func (l *traffic) publishUncounted(n int) {
	t := l.d.t
	t.Helper()
	c := l.d.f.client(client.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	for i := range n {
		p, err := c.Publish(ctx, l.queue, client.Message{Body: fmt.Appendf(nil, "lost %d", i)})
		require.NoError(t, err)
		require.Nil(t, p[0].Err)
	}
	require.NoError(t, c.Close(ctx))
}

// consumeAll receives and acks all that was kept, at any fleet, and checks the account.
func (l *traffic) consumeAll(f *fleet) {
	t := l.d.t
	t.Helper()
	published, _ := l.a.counts()
	stop := consume(f, l.a, l.queue, "workers", 1, nil)
	eventually(t, readyWithin, fmt.Sprintf("%d messages are received and acked", published), func() error {
		if _, acked := l.a.counts(); acked < published {
			return fmt.Errorf("%d are acked", acked)
		}
		return nil
	})
	stop()
	s := l.a.verify(t)
	require.Zero(t, s.lost)
	l.d.say("%s", s)
}

// prepend adds a line to a host's file.
func (f *fleet) prepend(h *host, line string) {
	f.t.Helper()
	raw, err := os.ReadFile(h.config)
	if err = errors.Join(err, os.WriteFile(h.config, append([]byte(line), raw...), 0o600)); err != nil {
		f.t.Fatal(err)
	}
}

// startAll starts every host and waits until all are ready.
func (f *fleet) startAll() {
	f.t.Helper()
	for _, h := range f.hosts {
		h.start()
	}
	f.awaitReady()
}
