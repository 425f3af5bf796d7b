package host

import (
	"context"
	"sync"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/peer"
	"github.com/tierq/tierq/queue"
)

// copyTimeout is how long a full replica may make no progress on an entry that waits for it before it is no more in
// sync.
const copyTimeout = 300 * time.Millisecond

// copies is what the hosts of this host's shards told about their full replicas' disks (G1). A shard of two full
// replicas and a witness commits when the leader and the witness have an entry, so whether a second disk holds the
// bodies must be told by the other full replica.
//
// A report counts for index i if its term is the leader's and durable >= i: by Raft's log matching the whole prefix is
// then the leader's. Else only if applied >= i: what is applied is committed, and on that disk.
type copies struct {
	mu     sync.Mutex
	shards map[uint64]*shardCopies
}

// newborn is how long after the start of a new shard here its other full replicas are expected to tell of themselves for the first time.
const newborn = time.Second

type shardCopies struct {
	replicas map[uint64]*copyState // by replica id, without this host's own
	expected int                   // the other full replicas of a new shard
	until    time.Time             // they are expected
	changed  chan struct{}         // closed at the next report; nil: nobody waits for it
	toldTerm uint64                // the term of told
	told     uint64                // the last index that a witness was sent by this host in toldTerm
}

// copyState is one other full replica.
type copyState struct {
	host    uint64
	report  peer.CopyReport
	at      time.Time // of the last progress
	inSync  bool
	rejoin  uint64 // the index that it must have to be in sync again; 0: not asked yet
	present bool   // its host's stream is open
}

func newCopies() *copies { return &copies{shards: map[uint64]*shardCopies{}} }

func (c *copies) shardLocked(shard uint64) *shardCopies {
	s, ok := c.shards[shard]
	if !ok {
		s = &shardCopies{replicas: map[uint64]*copyState{}}
		c.shards[shard] = s
	}
	return s
}

func (s *shardCopies) signalLocked() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

func (s *shardCopies) waitLocked() <-chan struct{} {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// expect says that a shard is new, and how many other full replicas it has.
func (c *copies) expect(shard uint64, others int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shardLocked(shard)
	s.expected, s.until = others, time.Now().Add(newborn)
}

// newborn says whether a shard is new here, and what to wait for.
func (c *copies) newborn(shard uint64) (bool, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.shards[shard]
	if !ok {
		return false, nil // it has stopped
	}
	return time.Now().Before(s.until), s.waitLocked()
}

// CopiesReported implements peer.Backend.
func (b *peerBackend) CopiesReported(hostID uint64, reports []peer.CopyReport) {
	h := b.h
	for _, r := range reports {
		if v, ok := h.replicas.Load(r.Shard); ok { // else it has stopped, and a late report would never be forgotten
			_, term := h.ownLeader(r.Shard)
			h.copies.report(hostID, r, term, v.(*running).applied.Load())
		}
	}
}

// CopiesEnded implements peer.Backend: a broken connection puts the host's replicas out of sync at once.
func (b *peerBackend) CopiesEnded(hostID uint64) { b.h.copies.ended(hostID) }

func (c *copies) report(hostID uint64, r peer.CopyReport, term, leaderApplied uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shardLocked(r.Shard)
	st, ok := s.replicas[r.Replica]
	if !ok {
		st = &copyState{}
		s.replicas[r.Replica] = st
	}
	st.host, st.present = hostID, true
	st.takeLocked(r, term, leaderApplied)
	s.signalLocked()
}

// marked takes what a replica has told beside a Raft message (marks.go). It counts only while its host's stream of reports is
// open: else nothing would tell of its end.
func (c *copies) marked(r peer.CopyReport, term, leaderApplied uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.shards[r.Shard]
	if !ok {
		return
	}
	if st, ok := s.replicas[r.Replica]; ok && st.present {
		st.takeLocked(r, term, leaderApplied)
		s.signalLocked()
	}
}

// takeLocked takes up a report. Reports come by two ways and may overtake one another: none takes back what another of its term, or of a
// later one, has told, but for one that says that the log does not count (term 0).
func (st *copyState) takeLocked(r peer.CopyReport, term, leaderApplied uint64) {
	if was := st.report; r.Term != 0 && r.Term <= was.Term {
		if r.Term < was.Term || r.Durable < was.Durable {
			r.Term, r.Durable = was.Term, was.Durable
		}
		r.Applied = max(r.Applied, was.Applied)
	}
	st.report, st.at = r, time.Now()
	if !st.inSync {
		if st.rejoin == 0 {
			st.rejoin = max(leaderApplied, 1)
		}
		// The catalog, which is in memory, reports no applied index.
		if st.inSync = r.Applied >= st.rejoin || r.Shard == catalog.ShardID && covers(r, term, st.rejoin); st.inSync {
			st.rejoin = 0
		}
	}
}

func (c *copies) ended(hostID uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.shards {
		for _, st := range s.replicas {
			if st.host == hostID {
				if st.present && time.Now().Before(s.until) {
					s.expected-- // it is known to be away
				}
				st.inSync, st.present, st.rejoin = false, false, 0
				st.report = peer.CopyReport{} // another process may come back, with another disk
			}
		}
		s.signalLocked()
	}
}

// forget drops what is known of a shard; its replica on this host has stopped.
func (c *copies) forget(shard uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.shards[shard]; ok {
		s.signalLocked()
		delete(c.shards, shard)
	}
}

// covers says whether a report counts for an index under the leader's term.
func covers(r peer.CopyReport, term, index uint64) bool {
	return r.Term == term && r.Durable >= index || r.Applied >= index
}

// look counts the disks beside this host's that hold an index, and those that may yet. Those of a new shard may, unless only replicas that are in
// sync are asked for.
func (c *copies) look(shard, term, index uint64, synced bool) (have, may int, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shardLocked(shard)
	have, may = s.countLocked(term, index)
	if !synced && time.Now().Before(s.until) {
		may = max(may, s.expected-have)
	}
	return have, may, s.waitLocked()
}

func (s *shardCopies) countLocked(term, index uint64) (have, may int) {
	for _, st := range s.replicas {
		switch {
		case st.present && covers(st.report, term, index):
			have++
		case st.inSync:
			may++
		}
	}
	return have, may
}

// late puts the replicas out of sync that have made no progress for copyTimeout on an index that waits for them.
func (c *copies) late(shard, term, index uint64, since time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shardLocked(shard)
	for _, st := range s.replicas {
		progress := st.at
		if since.After(progress) {
			progress = since
		}
		if st.inSync && !covers(st.report, term, index) && time.Since(progress) >= copyTimeout {
			st.inSync, st.rejoin = false, 0
		}
	}
	s.signalLocked()
}

// inSync counts the other full replicas that are in sync and have all that a witness has: those that can lead when this
// host is lost. One that comes back counts when it has caught up with what the witness was told without it.
func (c *copies) inSync(shard uint64) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.shards[shard]; ok {
		for _, st := range s.replicas {
			if st.inSync && covers(st.report, s.toldTerm, s.told) {
				n++
			}
		}
	}
	return n
}

// mayTell says whether a witness may be sent entries up to an index, and takes it that it is, if so: every other full
// replica that is in sync has them on its disk. (One of them may be new and have no vote yet: it is not enough.)
func (c *copies) mayTell(shard, term, index uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.shardLocked(shard)
	if _, may := s.countLocked(term, index); may > 0 {
		return false
	}
	s.tellLocked(term, index)
	return true
}

// voters counts those of some full replicas that are in sync and have an index on disk.
func (c *copies) voters(shard, term, index uint64, among func(replica uint64) bool) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.shards[shard]; ok {
		for id, st := range s.replicas {
			if st.present && st.inSync && covers(st.report, term, index) && among(id) {
				n++
			}
		}
	}
	return n
}

// tell takes it that a witness is sent entries up to an index.
func (c *copies) tell(shard, term, index uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shardLocked(shard).tellLocked(term, index)
}

func (s *shardCopies) tellLocked(term, index uint64) {
	if term > s.toldTerm {
		s.toldTerm, s.told = term, 0
	}
	if term == s.toldTerm {
		s.told = max(s.told, index)
	}
}

// needsReports says whether a shard's commits may leave the bodies on one disk: it has two full replicas and a witness.
// With three full replicas and no witness every quorum holds two.
func needsReports(p catalog.Placement) bool {
	for _, r := range p.Replicas {
		if r.Birth == catalog.BirthWitness && r.State != catalog.ReplicaRemoved {
			return true
		}
	}
	return false
}

// InSync returns how many full replicas of a shard that this host leads are in sync, this host's included.
func (h *RaftHost) InSync(shard uint64) int {
	p, ok := h.placement(shard)
	if !ok {
		return 1
	}
	if !needsReports(p) {
		return 2
	}
	return 1 + h.copies.inSync(shard)
}

// AwaitInSync is InSync, but while a shard is new here, for at most a second, it waits for the other full replicas to tell of themselves.
func (h *RaftHost) AwaitInSync(ctx context.Context, shard uint64) int {
	if n := h.InSync(shard); n > 1 {
		return n
	}
	for {
		young, changed := h.copies.newborn(shard)
		n := h.InSync(shard)
		if n > 1 || !young {
			return n
		}
		timer := time.NewTimer(copyTimeout / 3)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return n
		case <-h.ctx.Done():
			return n
		}
		timer.Stop()
	}
}

// AwaitCopies waits until two full replicas have a committed entry of a shard that this host leads on disk, and returns
// 2, or 1 as soon as no other full replica is in sync (G1). It returns at the latest when ctx ends.
func (h *RaftHost) AwaitCopies(ctx context.Context, shard uint64, index queue.Index) int {
	p, ok := h.placement(shard)
	if ok && !needsReports(p) {
		return 2
	}
	_, term := h.ownLeader(shard)
	return h.awaitCopies(ctx, shard, term, uint64(index), false)
}

// awaitCopies is AwaitCopies for an entry that a leader of a term sent. With all it waits until no full replica is in sync
// that lacks the entry.
func (h *RaftHost) awaitCopies(ctx context.Context, shard, term, index uint64, all bool) int {
	began := time.Now()
	var timer *time.Timer
	for {
		have, may, changed := h.copies.look(shard, term, index, all)
		switch {
		case have > 0 && (!all || may == 0):
			return 2
		case may == 0:
			return 1
		}
		if timer == nil {
			timer = time.NewTimer(copyTimeout)
			defer timer.Stop()
		}
		select {
		case <-changed:
		case <-timer.C:
			h.copies.late(shard, term, index, began)
			timer.Reset(copyTimeout / 3)
		case <-ctx.Done():
			return 1
		case <-h.ctx.Done():
			return 1
		}
	}
}

// tellCopy tells the leader's host what this host's full replica has on disk. It is called by the log's and the apply
// goroutines and does not block.
func (h *RaftHost) tellCopy(run *running) {
	if !run.reportsCopies() {
		return
	}
	leader, _ := h.ownLeader(run.shard)
	h.tellCopyTo(run, leader)
}

// tellCopyTo is tellCopy for a leader that the engine has told of and does not know itself yet.
func (h *RaftHost) tellCopyTo(run *running, leader queue.ReplicaID) {
	if !run.reportsCopies() || leader == 0 || leader == run.id {
		return
	}
	if host, ok := h.hostOf(run.shard, leader); ok && host != h.cfg.HostID {
		h.peers.ReportCopy(host, run.copyReport(), run.marksFor(leader))
	}
}

// CopiesFor implements peer.Backend.
func (b *peerBackend) CopiesFor(hostID uint64) []peer.CopyReport {
	h := b.h
	var out []peer.CopyReport
	h.replicas.Range(func(_, v any) bool {
		run := v.(*running)
		if !run.reportsCopies() {
			return true
		}
		leader, _ := h.ownLeader(run.shard)
		if host, ok := h.hostOf(run.shard, leader); ok && leader != 0 && leader != run.id && host == hostID {
			out = append(out, run.copyReport())
		}
		return true
	})
	return out
}

// reportsCopies says whether a leader elsewhere needs to know of this replica's disk.
func (r *running) reportsCopies() bool {
	return !r.witness && r.hasWitness.Load()
}

// copyReport says how far the replica is. While a state that came whole is not installed yet, the log's word does not
// count: what it covers is not on this disk.
func (r *running) copyReport() peer.CopyReport {
	out := peer.CopyReport{Shard: r.shard, Replica: uint64(r.id), Applied: r.applied.Load()}
	r.lastMu.Lock()
	out.Durable, out.Term = r.lastIndex, r.lastTerm
	r.lastMu.Unlock()
	if out.Applied < r.received.Load() {
		out.Durable, out.Term = 0, 0
	}
	return out
}
