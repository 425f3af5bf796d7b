package home

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// fakeRaft is one shard: a log that every replica applies, with controllable delays and losses. It runs in a
// synctest bubble, so time is the bubble's.
type fakeRaft struct {
	t     *testing.T
	start time.Time

	mu       sync.Mutex
	log      []queue.Command  // index i is log[i-1]
	waits    map[int]fakeWait // by index
	replicas []*fakeReplica
	noQuorum bool
	delay    time.Duration // from proposal to commit
	readFor  time.Duration // how long a read index takes
}

// fakeWait is a proposer that waits for its replica's apply.
type fakeWait struct {
	by     *fakeReplica
	answer chan queue.Result
}

// fakeReplica is one process with its replica.
type fakeReplica struct {
	raft    *fakeRaft
	id      queue.ReplicaID
	state   *fakeState
	applied int
	stalled bool          // applies nothing
	cut     bool          // reaches no leader
	skew    time.Duration // of its wall clock
	noClock bool          // its wall clock is refused
	keeper  *Keeper
	// fate, when set, decides what becomes of a proposal.
	fate  func(queue.Command) fate
	seen  []queue.Command // everything proposed here
	at    []time.Duration // when
	reads atomic.Int64    // ReadIndexes asked here
}

type fate int

const (
	fateCommit fate = iota
	fateLost        // never appended, answered "maybe"
	fateRefuse      // never queued, answered so
	fateSilent      // committed, but answered "maybe"
	fateHang        // never appended; the answer comes at the deadline
)

const stampZero = queue.Stamp(1_000_000)

func newFakeRaft(t *testing.T, replicas int, o queue.QueueOptions) *fakeRaft {
	r := &fakeRaft{t: t, start: time.Now(), waits: map[int]fakeWait{}, delay: time.Millisecond}
	for i := range replicas {
		r.replicas = append(r.replicas, &fakeReplica{raft: r, id: queue.ReplicaID(i + 1), state: newFakeState(o)})
	}
	return r
}

func (r *fakeRaft) boot() time.Duration { return time.Since(r.start) }
func (r *fakeRaft) stamp() queue.Stamp  { return stampZero + queue.Stamp(r.boot()/time.Millisecond) }

// stamp is what this replica's host would put into a command; 0 while its clock is refused.
func (p *fakeReplica) stamp() queue.Stamp {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	if p.noClock {
		return 0
	}
	return stampZero + queue.Stamp((p.raft.boot()+p.skew)/time.Millisecond)
}

func (p *fakeReplica) setClock(skew time.Duration, refused bool) {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	p.skew, p.noClock = skew, refused
}

// open starts a process on a replica. Its state is what was applied, or what a test put there.
func (p *fakeReplica) open() *Keeper {
	k, err := NewKeeper(Options{
		Shard: 7, Self: p.id, Reader: p.state, Propose: p.propose, ReadIndex: p.readIndex,
		Stamp: p.stamp, Boot: p.raft.boot, ReceiptKey: []byte("0123456789abcdef"), ProposeTimeout: time.Second,
		Rand: func() uint64 { return 0 },
	})
	require.NoError(p.raft.t, err)
	p.raft.mu.Lock()
	p.keeper = k
	p.raft.mu.Unlock()
	return k
}

// close ends the process cleanly, as far as its own goroutines go.
func (p *fakeReplica) close() {
	if p.keeper != nil {
		require.NoError(p.raft.t, p.keeper.Close(context.Background()))
	}
}

// restart is a kill and a start of the process.
func (p *fakeReplica) restart() *Keeper {
	p.close()
	return p.open()
}

func (p *fakeReplica) propose(ctx context.Context, cmd queue.Command) (queue.Result, error) {
	p.raft.mu.Lock()
	p.seen, p.at = append(p.seen, cmd), append(p.at, p.raft.boot())
	f := fateCommit
	if p.fate != nil {
		f = p.fate(cmd)
	}
	cut, delay := p.cut || p.raft.noQuorum, p.raft.delay
	p.raft.mu.Unlock()
	maybe := code.Maybe(code.QuorumLost, context.DeadlineExceeded, "no answer")
	switch {
	case f == fateRefuse:
		return queue.Result{}, code.New(code.NoLeader, "no leader")
	case f == fateLost:
		return queue.Result{}, maybe
	case cut || f == fateHang:
		<-ctx.Done()
		return queue.Result{}, maybe
	}
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return queue.Result{}, maybe
	}
	answer := p.raft.commit(cmd, p)
	if f == fateSilent {
		return queue.Result{}, maybe
	}
	select {
	case res := <-answer:
		return res, nil
	case <-ctx.Done():
		return queue.Result{}, maybe
	}
}

// commit appends an entry and lets every replica that can apply it. The channel gets what by answers.
func (r *fakeRaft) commit(cmd queue.Command, by *fakeReplica) <-chan queue.Result {
	answer := make(chan queue.Result, 1)
	r.mu.Lock()
	r.log = append(r.log, cmd)
	if by != nil {
		r.waits[len(r.log)] = fakeWait{by, answer}
	}
	r.mu.Unlock()
	for _, p := range r.replicas {
		p.catchUp()
	}
	return answer
}

// catchUp applies what is committed.
func (p *fakeReplica) catchUp() {
	for {
		p.raft.mu.Lock()
		if p.stalled || p.applied == len(p.raft.log) {
			p.raft.mu.Unlock()
			return
		}
		p.applied++
		index := p.applied
		res, a := p.state.apply(queue.Index(index), p.raft.log[index-1])
		k := p.keeper
		w := p.raft.waits[index]
		p.raft.mu.Unlock()
		if k != nil {
			k.Applied(a)
		}
		if w.by == p {
			w.answer <- res
		}
	}
}

// stall stops a replica's applies, or lets it catch up.
func (p *fakeReplica) stall(on bool) {
	p.raft.mu.Lock()
	p.stalled = on
	p.raft.mu.Unlock()
	p.catchUp()
}

func (p *fakeReplica) setCut(on bool) {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	p.cut = on
}

// setDelay sets how long a proposal takes to commit.
func (r *fakeRaft) setDelay(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.delay = d
}

func (p *fakeReplica) setFate(f func(queue.Command) fate) {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	p.fate = f
}

// commands lists what was proposed here.
func (p *fakeReplica) commands() []queue.Command {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	return slices.Clone(p.seen)
}

// times lists when commands were proposed here.
func (p *fakeReplica) times() []time.Duration {
	p.raft.mu.Lock()
	defer p.raft.mu.Unlock()
	return slices.Clone(p.at)
}

func (p *fakeReplica) readIndex(ctx context.Context) error {
	p.reads.Add(1)
	p.raft.mu.Lock()
	cut, at, takes := p.cut || p.raft.noQuorum, len(p.raft.log), p.raft.readFor
	p.raft.mu.Unlock()
	if cut {
		<-ctx.Done()
		return code.New(code.NoLeader, "no leader")
	}
	if takes > 0 {
		select {
		case <-time.After(takes):
		case <-ctx.Done():
			return code.New(code.NoLeader, "read index timed out")
		}
	}
	for {
		p.raft.mu.Lock()
		done := p.applied >= at
		p.raft.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return code.New(code.NoLeader, "read index timed out")
		}
	}
}

// must commits a command at once and returns what the first replica answers.
func (r *fakeRaft) must(cmd queue.Command) queue.Result {
	r.t.Helper()
	res := <-r.commit(cmd, r.replicas[0])
	require.Equal(r.t, code.OK, res.Code)
	return res
}

// create makes a group.
func (r *fakeRaft) create(name string, home *fakeReplica, cfg queue.GroupConfig) queue.GroupID {
	r.t.Helper()
	return r.must(&queue.Group{Stamp: r.stamp(), Op: queue.GroupCreate, Name: name, FirstHome: home.id, Config: cfg}).Group
}

// send appends messages with bodies "1", "2", … by address.
func (r *fakeRaft) send(n int, change ...func(*queue.Message)) {
	r.t.Helper()
	p := queue.Publish{}
	last := r.replicas[0].state.Meta().Last
	for i := range n {
		m := queue.Message{Body: fmt.Append(nil, int(last)+i+1)}
		for _, f := range change {
			f(&m)
		}
		p.Messages = append(p.Messages, m)
	}
	r.must(&queue.Enqueue{Stamp: r.stamp(), Publishes: []queue.Publish{p}})
}

// giveHome commits an unreleased Home, as the leader's housekeeping does.
func (r *fakeRaft) giveHome(id queue.GroupID, to *fakeReplica) {
	r.t.Helper()
	g, _ := r.replicas[0].state.Group(id)
	r.must(&queue.Home{Stamp: r.stamp(), Group: id, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: to.id})
}
