package host

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// When a host's process ends, killed or not, its operating system closes its connections and refuses new ones, so the others can know at once
// what the silence of an election timeout would tell them later (docs/adr/0059). A host that has lost its connections from another one asks
// both of that one's ports. If both refuse, the host counts as silent; and the shards that it led get a new leader without waiting, if
// hosts with a quorum of a shard's replicas have lost it too. An unreachable machine, or one that is cut off, refuses nothing: there the
// election timeout decides, as ever.

const (
	// endedLooks is how often the ports of a lost host are asked, endedPause the pause between: a process that is killed closes its connections and
	// its listeners one after the other, and other hosts notice it at their own time.
	endedLooks = 12
	endedPause = 25 * time.Millisecond
	// endedDial bounds one attempt to connect, and one question to another host.
	endedDial = 200 * time.Millisecond
	// endedAgain is how long after one look at a lost host the next may begin: connections that come and go cost no more.
	endedAgain = time.Second

	// hastenFirst is when the first candidate of a shard begins its election, so that it has applied what is committed, or the engine would not
	// let it. The next one follows after hastenStep, with as much again at random divided by hastenSpread, and so on, in hastenRounds rounds, until a
	// leader is known.
	hastenFirst  = 10 * time.Millisecond
	hastenStep   = 100 * time.Millisecond
	hastenSpread = 2
	hastenRounds = 3
	// hastenAtOnce is how many elections begin within hastenFirst.
	hastenAtOnce = 32
)

// endings looks after hosts whose connections have ended.
type endings struct {
	h    *RaftHost
	news chan uint64 // hosts whose last connection has ended

	deliver atomic.Pointer[func(raftpb.Message)] // hands a message to the engine of this host

	looks    atomic.Uint64 // that are over
	ended    atomic.Uint64 // hosts that were found to have ended
	hastened atomic.Uint64 // elections that were begun for it

	again   time.Duration // endedAgain
	losses  losses
	refuses func(ctx context.Context, address string) bool
}

// losses is what the peer API knows of connections.
type losses interface {
	Lost(hostID uint64) bool
	Ended(hostID uint64) bool
	Answers(hostID uint64) bool
	AskLost(ctx context.Context, hostID, lost uint64) bool
}

func newEndings(h *RaftHost) *endings {
	return &endings{h: h, news: make(chan uint64, 64), again: endedAgain, refuses: refusesConnections}
}

// ConnectionLost implements peer.Backend.
func (b *peerBackend) ConnectionLost(hostID uint64) { b.h.endings.lost(hostID) }

// lost makes a host be looked at. It does not block: one too many is left to the election timeout.
func (e *endings) lost(hostID uint64) {
	select {
	case e.news <- hostID:
	default:
	}
}

// run looks at hosts that are lost until ctx ends: at each one at a time, and not again within e.again.
func (e *endings) run(ctx context.Context) {
	var looks sync.WaitGroup
	defer looks.Wait()
	next := map[uint64]time.Time{}
	done := make(chan uint64)
	busy := map[uint64]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case hostID := <-done:
			delete(busy, hostID)
		case hostID := <-e.news:
			if busy[hostID] || time.Now().Before(next[hostID]) {
				continue
			}
			busy[hostID], next[hostID] = true, time.Now().Add(e.again)
			looks.Go(func() {
				e.look(ctx, hostID)
				e.looks.Add(1)
				select {
				case done <- hostID:
				case <-ctx.Done():
				}
			})
		}
	}
}

// look asks a lost host's ports, and the other hosts, until nothing more is to be done or hoped for.
func (e *endings) look(ctx context.Context, hostID uint64) {
	var agree map[uint64]bool // the hosts that have lost it too; nil: it has not ended, as far as is known
	var begun map[uint64]bool // shards
	var elections sync.WaitGroup
	defer elections.Wait()
	for range endedLooks {
		if !e.losses.Lost(hostID) {
			return
		}
		if agree == nil && e.refusesAll(ctx, hostID) {
			if !e.losses.Ended(hostID) {
				return
			}
			e.noteEnded(hostID)
			agree, begun = map[uint64]bool{e.h.cfg.HostID: true}, map[uint64]bool{}
		}
		if agree != nil {
			e.ask(ctx, hostID, agree)
			shards := e.led(hostID, agree, begun)
			elections.Go(func() { e.hasten(ctx, hostID, shards) })
			if len(agree) == len(e.others(hostID))+1 {
				return
			}
		}
		pause(ctx, endedPause)
	}
}

// noteEnded says that a host has ended, to the log and to who waits for it.
func (e *endings) noteEnded(hostID uint64) {
	e.ended.Add(1)
	e.h.log.Info("host has ended: its ports refuse connections", zap.Uint64("peer", hostID))
	e.h.copies.ended(hostID)
	if e.h.cfg.OnEnded != nil {
		e.h.cfg.OnEnded(hostID)
	}
}

// refusesAll says whether both ports of a host refuse connections.
func (e *endings) refusesAll(ctx context.Context, hostID uint64) bool {
	raft, peer, ok := e.h.book.addresses(hostID)
	return ok && e.refuses(ctx, raft) && e.refuses(ctx, peer)
}

// refusesConnections says whether the operating system at an address is there, and nothing listens. That nothing answers is not a refusal.
func refusesConnections(ctx context.Context, address string) bool {
	d := net.Dialer{Timeout: endedDial}
	c, err := d.DialContext(ctx, "tcp", address)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// others are the hosts of the fleet but this one and another.
func (e *endings) others(but uint64) []uint64 {
	return slices.DeleteFunc(e.h.book.others(e.h.cfg.HostID), func(id uint64) bool { return id == but })
}

// ask asks the hosts that do not agree yet, all at once.
func (e *endings) ask(ctx context.Context, hostID uint64, agree map[uint64]bool) {
	ctx, cancel := context.WithTimeout(ctx, endedDial)
	defer cancel()
	asked := slices.DeleteFunc(e.others(hostID), func(other uint64) bool { return agree[other] || !e.losses.Answers(other) })
	var mu sync.Mutex // of agree, from here on
	var calls sync.WaitGroup
	for _, other := range asked {
		calls.Go(func() {
			if e.losses.AskLost(ctx, other, hostID) {
				mu.Lock()
				agree[other] = true
				mu.Unlock()
			}
		})
	}
	calls.Wait()
}

// lostShard is a shard whose leader has ended.
type lostShard struct {
	shard uint64
	run   *running
	dead  queue.ReplicaID
	term  uint64
	rank  int // of this host's replica among those that may lead
	ranks int
}

// led lists the shards that a host led, that this one may lead, and that have a quorum without it among the hosts that agree; those in
// begun are left out, and the others added to it.
func (e *endings) led(hostID uint64, agree, begun map[uint64]bool) []lostShard {
	var out []lostShard
	e.h.replicas.Range(func(_, v any) bool {
		run := v.(*running)
		if run.witness || begun[run.shard] {
			return true
		}
		leader, term := e.h.ownLeader(run.shard)
		p, ok := e.h.placement(run.shard)
		if r, led := p.Replica(leader); !ok || !led || r.HostID != hostID {
			return true
		}
		if s := (lostShard{shard: run.shard, run: run, dead: leader, term: term}); s.place(p, agree) {
			begun[run.shard] = true
			out = append(out, s)
		}
		return true
	})
	slices.SortFunc(out, func(a, b lostShard) int { return cmp.Compare(a.shard, b.shard) })
	return out
}

// place finds the rank of this host's replica: which goes first differs from shard to shard, so that one host does not get all of them. It
// returns false if there is no quorum, or the replica may not lead.
func (s *lostShard) place(p catalog.Placement, agree map[uint64]bool) bool {
	voters, with := 0, 0
	var may []queue.ReplicaID
	for _, r := range p.Replicas {
		if !r.Votes() {
			continue
		}
		voters++
		if !agree[r.HostID] || r.ID == s.dead {
			continue
		}
		with++
		if r.Birth != catalog.BirthWitness {
			may = append(may, r.ID)
		}
	}
	slices.Sort(may)
	own := slices.Index(may, s.run.id)
	if own < 0 || with <= voters/2 {
		return false
	}
	s.ranks = len(may)
	s.rank = (own + int(s.shard%uint64(s.ranks))) % s.ranks
	return true
}

// hastenTry is one attempt at an election.
type hastenTry struct {
	at time.Duration
	lostShard
}

// hastenPlan says when this host's replica of each shard tries.
func hastenPlan(shards []lostShard, random func() float64) []hastenTry {
	var out []hastenTry
	for i, s := range shards {
		late := time.Duration(i/hastenAtOnce) * hastenFirst
		for round := range hastenRounds {
			turn := time.Duration(round*s.ranks + s.rank)
			at := hastenFirst + late + turn*hastenStep + time.Duration(random()*float64(hastenStep)/hastenSpread)
			if turn == 0 {
				at = hastenFirst + late
			}
			out = append(out, hastenTry{at, s})
		}
	}
	slices.SortStableFunc(out, func(a, b hastenTry) int { return cmp.Compare(a.at, b.at) })
	return out
}

// hasten begins elections of shards whose leader has ended, until each has a leader.
func (e *endings) hasten(ctx context.Context, hostID uint64, shards []lostShard) {
	began := time.Now()
	for _, try := range hastenPlan(shards, rand.Float64) {
		pause(ctx, try.at-time.Since(began))
		if ctx.Err() != nil {
			return
		}
		leader, term := e.h.ownLeader(try.shard)
		if leader != 0 && (leader != try.dead || term != try.term) {
			continue // it has another one
		}
		e.hastened.Add(1)
		e.campaign(try.lostShard, term)
	}
}

// campaign makes this host's replica begin an election, if it still follows the leader of that term, or no leader in it: by the message with which
// that leader would hand over to it. Raft allows an election at any time. The term is that of the loss, so whatever happens in between
// makes the message one of the past, which is ignored.
func (e *endings) campaign(s lostShard, term uint64) {
	deliver := e.deliver.Load()
	if deliver == nil || !e.h.gate.enter() {
		return
	}
	defer e.h.gate.leave()
	e.h.log.Debug("an election begins at once", zap.Uint64("shard", s.shard), zap.Uint64("term", term))
	(*deliver)(raftpb.Message{Type: raftpb.TimeoutNow, ShardID: s.shard, To: uint64(s.run.id), From: uint64(s.dead), Term: term})
}

// connect takes the engine's own handler of messages that come from elsewhere.
func (e *endings) connect(requests raftio.MessageHandler, deployment uint64) {
	deliver := func(m raftpb.Message) {
		requests(raftpb.MessageBatch{DeploymentId: deployment, BinVer: raftio.TransportBinVersion, Requests: []raftpb.Message{m}})
	}
	e.deliver.Store(&deliver)
}

// Ended counts the hosts that were found to have ended, and the elections that were begun for it.
func (h *RaftHost) Ended() (hosts, elections uint64) {
	return h.endings.ended.Load(), h.endings.hastened.Load()
}
