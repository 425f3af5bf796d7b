package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/host/faultnet"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/certs/certstest"
	"github.com/tierq/tierq/queue/code"
)

// faultFleet is a fleet in this process with a broken network between its hosts. It has one queue, "q", of one partition.
type faultFleet struct {
	*testing.T
	net     *faultnet.Net
	configs []Config
	adjust  func(*host.Config)
	log     *zap.Logger
	ctx     context.Context
	shard   uint64

	mu    sync.Mutex
	nodes []*Node // nil: it does not run
}

// layoutOf says what a faultFleet is made of.
type layoutOf struct {
	full, witnesses int
	tls             bool
	adjust          func(*host.Config)
	config          func(*Config)
}

// fleetTick is the tick of fault fleets: an election timeout is 300 ms, to twice that.
const fleetTick = 30 * time.Millisecond

// openFaultFleet opens a fleet whose hosts end with the test; within bounds the whole.
func openFaultFleet(t *testing.T, l layoutOf, within time.Duration) *faultFleet {
	t.Helper()
	if testing.Short() {
		t.Skip("-short opens no fleet")
	}
	procs()
	f := &faultFleet{T: t, net: faultnet.New(1), log: zaptest.NewLogger(t, zaptest.Level(zap.WarnLevel)), nodes: make([]*Node, l.full+l.witnesses)}
	f.adjust = func(c *host.Config) {
		c.RTT, c.Faults = fleetTick, f.net
		if l.adjust != nil {
			l.adjust(c)
		}
	}
	var cancel context.CancelFunc
	f.ctx, cancel = context.WithTimeout(context.Background(), within)
	t.Cleanup(cancel)
	f.lay(l)
	t.Cleanup(f.close)
	for i := range f.configs {
		f.start(i)
	}
	for _, n := range f.running() {
		require.NoError(t, n.AwaitReady(f.ctx))
	}
	info, _, err := f.nodes[0].CreateQueue(f.ctx, api.CreateQueue{Name: "q"})
	require.NoError(t, err)
	f.shard = info.Partitions[0].Shard
	return f
}

// lay makes the hosts' configurations.
func (f *faultFleet) lay(l layoutOf) {
	dir := f.TempDir()
	ports, err := FreePorts(3 * len(f.nodes))
	require.NoError(f, err)
	var hosts []HostConfig
	for i := range f.nodes {
		h := HostConfig{ID: uint64(i + 1), Role: RoleFull, Raft: addr(ports[3*i]), Peer: addr(ports[3*i+1]), API: addr(ports[3*i+2]), Domain: itoa(uint64(i))}
		if i >= l.full {
			h.Role, h.API = RoleWitness, ""
		}
		hosts = append(hosts, h)
	}
	var ca *certstest.CA
	if l.tls {
		ca = certstest.NewCA(f, "hosts")
	}
	for _, h := range hosts {
		c := Config{Host: h.ID, Data: filepath.Join(dir, "host-"+itoa(h.ID)), Hosts: hosts, Admin: "off"}
		if ca != nil {
			c.TLS = &TLSFiles{}
			c.TLS.Cert, c.TLS.Key, c.TLS.CA = ca.Files(filepath.Join(dir, "certs-"+itoa(h.ID)), time.Hour, "127.0.0.1")
		}
		if l.config != nil {
			l.config(&c)
		}
		f.configs = append(f.configs, c)
	}
}

func (f *faultFleet) start(i int) {
	f.Helper()
	n, err := open(f.configs[i], Listeners{}, f.log, f.adjust)
	require.NoError(f, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes[i] = n
}

// stop stops a host at once.
func (f *faultFleet) stop(i int) {
	f.Helper()
	f.mu.Lock()
	n := f.nodes[i]
	f.nodes[i] = nil
	f.mu.Unlock()
	require.NoError(f, n.stop())
}

func (f *faultFleet) close() {
	f.net.Heal()
	require.NoError(f, (&Dev{Nodes: f.running()}).Close())
}

// running are the hosts that run, full the full ones of them.
func (f *faultFleet) running() []*Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.nodes), func(n *Node) bool { return n == nil })
}

func (f *faultFleet) full() []*Node {
	return slices.DeleteFunc(f.running(), func(n *Node) bool { return n.cfg.Self().Role == RoleWitness })
}

// others are the ids of all hosts but one.
func (f *faultFleet) others(id uint64) (ids []uint64) {
	for _, c := range f.configs {
		if c.Host != id {
			ids = append(ids, c.Host)
		}
	}
	return ids
}

// deaf makes a host hear nobody, mute makes nobody hear it.
func (f *faultFleet) deaf(id uint64, r faultnet.Rule) {
	f.net.Change(func(set func(from, to uint64, r faultnet.Rule)) {
		for _, o := range f.others(id) {
			set(o, id, r)
		}
	})
}

func (f *faultFleet) mute(id uint64, r faultnet.Rule) {
	f.net.Change(func(set func(from, to uint64, r faultnet.Rule)) {
		for _, o := range f.others(id) {
			set(id, o, r)
		}
	})
}

// everywhere sets a rule in all directions.
func (f *faultFleet) everywhere(r faultnet.Rule) {
	f.net.Change(func(set func(from, to uint64, r faultnet.Rule)) {
		for _, c := range f.configs {
			for _, o := range f.others(c.Host) {
				set(c.Host, o, r)
			}
		}
	})
}

// eventually waits for a state as long as the whole test may take.
func (f *faultFleet) eventually(what string, ok func() bool) {
	f.Helper()
	for !ok() {
		pause(f.ctx, 5*time.Millisecond)
		if f.ctx.Err() != nil {
			f.Fatalf("never seen: %s; the hosts are:\n%s", what, f.describe())
		}
	}
}

// describe is one line for each host.
func (f *faultFleet) describe() (text string) {
	for _, n := range f.running() {
		_, at, term, ok := n.raft.Leader(f.shard)
		text += fmt.Sprintf("host %d: leader %d (%v) in term %d, level state %d, in sync %d", n.id, at, ok, term, f.level(n), n.raft.InSync(f.shard))
		for _, o := range f.others(n.id) {
			r, _ := n.raft.Peers().Reported(o, f.shard)
			text += fmt.Sprintf("; of %d: alive %v, %+v", o, n.Alive(o), r)
		}
		text += "\n"
	}
	return text
}

// leader is the host that says itself that it leads, in the greatest term of those that do; nil: none.
func (f *faultFleet) leader() (leads *Node) {
	var greatest uint64
	for _, n := range f.full() {
		if _, at, term, ok := n.raft.Leader(f.shard); ok && at == n.id && term > greatest {
			leads, greatest = n, term
		}
	}
	return leads
}

func (f *faultFleet) awaitLeader(but *Node) (leads *Node) {
	f.Helper()
	f.eventually("a leader", func() bool {
		leads = f.leader()
		return leads != nil && leads != but
	})
	return leads
}

// follower is a full host that does not lead.
func (f *faultFleet) follower() *Node {
	f.Helper()
	leads := f.awaitLeader(nil)
	for _, n := range f.full() {
		if n != leads {
			return n
		}
	}
	f.Fatal("no full host follows")
	return nil
}

// level is tierq_quorum_state as a host tells it.
func (f *faultFleet) level(n *Node) uint32 {
	q, ok := n.raft.Catalog().QueueOfShard(f.shard)
	if !ok {
		return quorumElecting
	}
	return n.queueInfo(q).Partitions[0].QuorumState
}

// awaitHealthy waits until every full host says that the partition is healthy: level 2.
func (f *faultFleet) awaitHealthy() {
	f.Helper()
	f.eventually("level 2 again", func() bool {
		for _, n := range f.full() {
			if f.level(n) != quorumHealthy {
				return false
			}
		}
		return f.leader() != nil && f.leader().raft.InSync(f.shard) >= 2
	})
}

// group creates a group with its home on a host.
func (f *faultFleet) group(name string, at *Node) {
	f.Helper()
	f.eventually("group "+name, func() bool {
		_, err := at.CreateGroup(f.ctx, api.CreateGroup{Queue: "q", Name: name, HomeHost: at.id, OperationID: 1})
		return err == nil
	})
}

// home is the host of a group's home, as a host sees it.
func (f *faultFleet) home(n *Node, group string) uint64 {
	d, err := n.desk(f.shard)
	if err != nil {
		return 0
	}
	g, _ := d.reader.GroupByName(group)
	at, _ := d.hostOf(g.Home)
	return at
}

// traffic publishes to a fault fleet and consumes from it, at any host that takes it, and keeps the account.
type traffic struct {
	f     *faultFleet
	group string
	// keep, if not nil, says whether a delivery is to be kept unacked.
	keep func() bool

	stop    chan struct{}
	stopped sync.WaitGroup

	mu        sync.Mutex
	acked     map[string]queue.Address // published and acknowledged, by body
	delivered map[string]int
	finished  map[string]time.Time // when the ack was answered, by body
	hands     []hand
	faults    []string
	refused   map[code.Code]int
	took      time.Duration // the longest refusal with ReadOnlyDegraded
}

// hand is one hand-out of messages.
type hand struct {
	host       uint64
	epoch      queue.Epoch
	begun, end time.Time
}

// startTraffic publishes and consumes until end is called.
func startTraffic(f *faultFleet, group string) *traffic {
	w := &traffic{
		f: f, group: group, stop: make(chan struct{}), acked: map[string]queue.Address{}, delivered: map[string]int{}, finished: map[string]time.Time{},
		refused: map[code.Code]int{},
	}
	for i := range uint64(2) {
		w.stopped.Go(func() { w.publish(i + 1) })
	}
	for i := range f.full() {
		w.stopped.Go(func() { w.consume(i) })
	}
	return w
}

func (w *traffic) over() bool {
	select {
	case <-w.stop:
		return true
	case <-w.f.ctx.Done():
		return true
	default:
		return false
	}
}

// publish sends one message after the other, each until it is acknowledged.
func (w *traffic) publish(producer uint64) {
	for seq := queue.Seq(1); !w.over(); seq++ {
		body := fmt.Sprintf("%d/%d", producer, seq)
		p := api.Publish{Queue: "q", Publish: queue.Publish{
			Producer: queue.Producer{Kind: queue.ProducerClient, ID: producer}, Low: seq, Messages: []queue.Message{{Seq: seq, Body: []byte(body)}},
		}}
		for first := queue.Address(0); ; {
			at, err := w.publishOnce(p)
			if err == nil && first != 0 && at != first {
				w.fault("message %s has addresses %d and %d", body, first, at)
			}
			if err == nil {
				w.mu.Lock()
				w.acked[body] = at
				w.mu.Unlock()
				break
			}
			if w.over() {
				return
			}
		}
		pause(w.f.ctx, 2*time.Millisecond)
	}
}

// publishOnce tries every full host once.
func (w *traffic) publishOnce(p api.Publish) (at queue.Address, err error) {
	for _, n := range w.f.full() {
		ctx, cancel := context.WithTimeout(w.f.ctx, 2*time.Second)
		began := time.Now()
		var reply api.PublishReply
		reply, err = n.Publish(ctx, p)
		took := time.Since(began)
		cancel()
		if err == nil {
			return reply.Result.Messages[0].Address, nil
		}
		var e *code.Error
		if errors.As(err, &e) {
			w.mu.Lock()
			w.refused[e.Code]++
			if e.Code == code.ReadOnlyDegraded {
				w.took = max(w.took, took)
			}
			w.mu.Unlock()
		}
	}
	pause(w.f.ctx, 5*time.Millisecond)
	return 0, err
}

// consume receives at one host and acks there.
func (w *traffic) consume(i int) {
	for !w.over() {
		w.f.mu.Lock()
		n := w.f.nodes[i]
		w.f.mu.Unlock()
		if n == nil || !w.receive(n) {
			pause(w.f.ctx, 5*time.Millisecond)
		}
	}
}

func (w *traffic) receive(n *Node) (some bool) {
	ctx, cancel := context.WithTimeout(w.f.ctx, 3*time.Second)
	defer cancel()
	begun := time.Now()
	ds, _, err := n.Receive(ctx, api.Receive{Queue: "q", Group: w.group, Max: 16, MaxBytes: 1 << 20, Wait: 100 * time.Millisecond})
	if err != nil || len(ds) == 0 {
		return false
	}
	d, err := n.desk(w.f.shard)
	if err != nil {
		return false
	}
	rc, err := d.receipt.Decode(ds[0].Receipt)
	if err != nil {
		w.fault("a receipt of host %d: %v", n.id, err)
	}
	w.noteHand(ds, hand{n.id, rc.Lease.Epoch, begun, time.Now()})
	if w.keep == nil || !w.keep() {
		w.ack(n, ds)
	}
	return true
}

// noteHand notes one hand-out.
func (w *traffic) noteHand(ds []api.Delivery, h hand) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hands = append(w.hands, h)
	for _, d := range ds {
		body := string(d.Message.Body)
		w.delivered[body]++
		if at, ok := w.finished[body]; ok && at.Before(h.begun) {
			w.faults = append(w.faults, fmt.Sprintf("host %d delivered %s again after its ack was answered", h.host, body))
		}
	}
}

func (w *traffic) ack(n *Node, ds []api.Delivery) {
	ctx, cancel := context.WithTimeout(w.f.ctx, 3*time.Second)
	defer cancel()
	s := api.Settle{Kind: api.SettleAck, Queue: "q", Group: w.group}
	for _, d := range ds {
		s.Receipts = append(s.Receipts, d.Receipt)
	}
	res, err := n.Settle(ctx, s)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, r := range res {
		if r.Err == nil {
			w.finished[string(ds[i].Message.Body)] = time.Now()
		}
	}
}

func (w *traffic) fault(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, fmt.Sprintf(format, args...))
}

// published and handed count so far.
func (w *traffic) published() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.acked)
}

func (w *traffic) handed() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.hands)
}

func (w *traffic) refusals(c code.Code) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refused[c]
}

// goesOn waits until more has been published and handed out.
func (w *traffic) goesOn() {
	w.f.Helper()
	p, h := w.published(), w.handed()
	w.f.eventually("publishes and deliveries go on", func() bool { return w.published() > p+5 && w.handed() > h+2 })
}

// end stops, waits until everything has been acked by a consumer, and closes the account.
func (w *traffic) end() {
	w.f.Helper()
	close(w.stop)
	w.stopped.Wait()
	w.stop = make(chan struct{})
	w.keep = nil
	var consumers sync.WaitGroup
	for i := range w.f.full() {
		consumers.Go(func() { w.consume(i) })
	}
	w.f.eventually("every host has nothing left to deliver", func() bool {
		for _, n := range w.f.full() {
			if w.left(n) {
				return false
			}
		}
		return true
	})
	close(w.stop)
	consumers.Wait()
	w.check()
}

// left says whether a host's replica has something to deliver, or is not there.
func (w *traffic) left(n *Node) bool {
	d, err := n.desk(w.f.shard)
	if err != nil {
		return true
	}
	g, ok := d.reader.GroupByName(w.group)
	c := g.Counters
	return !ok || c.Unfinished > 0 || c.Acked < uint64(w.published())
}

// check says what the account shows: G1, G2, G4 and G5.
func (w *traffic) check() {
	w.f.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Empty(w.f, w.faults)
	bodies, duplicates := map[queue.Address]string{}, 0
	for body, at := range w.acked {
		require.Empty(w.f, bodies[at], "%s has the address of another message", body)
		bodies[at] = body
		require.Positive(w.f, w.delivered[body], "%s was acknowledged and never delivered", body)
	}
	for _, n := range w.delivered {
		duplicates += n - 1
	}
	homes := map[queue.Epoch]uint64{}
	for _, h := range w.hands {
		if at, ok := homes[h.epoch]; ok {
			require.Equal(w.f, at, h.host, "two hosts delivered under epoch %d", h.epoch)
		}
		homes[h.epoch] = h.host
	}
	w.checkOrder()
	d, err := w.f.full()[0].desk(w.f.shard)
	require.NoError(w.f, err)
	g, _ := d.reader.GroupByName(w.group)
	require.Equal(w.f, g.Counters.Assigned, g.Counters.Acked, "%+v", g.Counters)
	w.f.Logf("account: acknowledged %d, delivered %d (%d again), lost 0, epochs %v, refused %v", len(w.acked), len(w.delivered), duplicates, homes, w.refused)
}

// checkOrder: once something was handed out under an epoch, nothing is under an older one, in calls that begin later.
func (w *traffic) checkOrder() {
	ended := map[queue.Epoch]time.Time{} // the end of an epoch's first hand-out
	for _, h := range w.hands {
		if at, ok := ended[h.epoch]; !ok || h.end.Before(at) {
			ended[h.epoch] = h.end
		}
	}
	epochs := slices.Sorted(maps.Keys(ended))
	for _, h := range w.hands {
		for _, e := range epochs {
			if e > h.epoch && h.begun.After(ended[e]) {
				w.f.Errorf("host %d delivered under epoch %d in a call that began %v after a delivery under epoch %d", h.host, h.epoch, h.begun.Sub(ended[e]), e)
			}
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
