package peer

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/queue/code"
)

// clockTrip is how long an answer may take from which another host's clock is read: half of it is how wrong that may be.
const clockTrip = 400 * time.Millisecond

// other is what this host knows of another one. Guarded by Peers.mu.
type other struct {
	// What it told.
	heard     time.Time // monotonic; zero: never
	sure      time.Time // what was heard had not been sent before it
	broke     time.Time // when its last connection ended; zero: never
	ended     bool      // since then its ports have shown that it has ended
	reported  time.Time // the last report that was taken
	answered  time.Time // the last answer to a report of this host; zero: never
	processID uint64
	from      string // where the process calls from
	twins     twins
	sequence  uint64
	shards    map[uint64]ShardReport
	catalog   uint64 // version
	low       bool   // its disk is nearly full
	skewed    bool   // it does not take up its wall clock
	level     uint32 // of the catalog's commands that it understands
	damaged   []DamagedReplica

	// Its wall clock at boot time 0 of this host, as its last answer showed: a step of this host's own wall clock does not move it.
	wallMs  int64
	hasWall bool

	// What it was told.
	busy bool // a report is on its way
	sent uint64
	told map[uint64]ShardReport // nil: the next report must be full
	down bool                   // its silence was logged

	toldWrong time.Time // when it was last said that the two do not belong together
}

func (p *Peers) otherLocked(hostID uint64) *other {
	o, ok := p.others[hostID]
	if !ok {
		o = &other{}
		p.others[hostID] = o
	}
	return o
}

// Alive says whether a host has reported or answered within Config.Silence, and how long ago; of one that never did, it is
// not, since for ever. A host that is lost is silent after breakGrace, and at once if it has ended.
func (p *Peers) Alive(hostID uint64) (bool, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	if !ok || o.heard.IsZero() {
		return false, 1<<63 - 1
	}
	return o.alive(p.cfg.Silence), time.Since(o.heard)
}

// Answers says whether a host has answered a report of this one within Config.Silence. One that is alive and does not
// answer is not where this host looks for it: it can reach this host, but not the other way round.
func (p *Peers) Answers(hostID uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	return ok && !o.answered.IsZero() && time.Since(o.answered) < p.cfg.Silence && o.alive(p.cfg.Silence)
}

// Reported returns what a host last told of its replica of a shard. It may be old: see Alive.
func (p *Peers) Reported(hostID, shard uint64) (ShardReport, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	if !ok {
		return ShardReport{}, false
	}
	r, ok := o.shards[shard]
	return r, ok
}

// Process names the process that has last reported as a host; 0: none has. Another one is another number.
func (p *Peers) Process(hostID uint64) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o, ok := p.others[hostID]; ok {
		return o.processID
	}
	return 0
}

// LowSpace says whether a host that is heard of has told that its disk is nearly full.
func (p *Peers) LowSpace(hostID uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	return ok && o.low && o.alive(p.cfg.Silence)
}

// CommandLevel returns which commands of the catalog a host's version understands, as it last told; 0 of one that was never heard of.
func (p *Peers) CommandLevel(hostID uint64) uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o, ok := p.others[hostID]; ok {
		return o.level
	}
	return 0
}

// Damaged returns the replicas of a host that is heard of whose state on its disk is damaged, as it last told.
func (p *Peers) Damaged(hostID uint64) []DamagedReplica {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o, ok := p.others[hostID]; ok && o.alive(p.cfg.Silence) {
		return o.damaged
	}
	return nil
}

// CatalogVersion returns the version of a host's catalog as it last told.
func (p *Peers) CatalogVersion(hostID uint64) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o, ok := p.others[hostID]; ok {
		return o.catalog
	}
	return 0
}

// ClockOffsets returns how far ahead of this host's wall clock those of the hosts are that are alive.
func (p *Peers) ClockOffsets() []time.Duration {
	var offsets []time.Duration
	for _, o := range p.clockOffsets() {
		offsets = append(offsets, o)
	}
	return offsets
}

// ClockOffset is one of ClockOffsets; refused says that the host itself does not take its clock up.
func (p *Peers) ClockOffset(hostID uint64) (offset time.Duration, refused, ok bool) {
	offset, ok = p.clockOffsets()[hostID]
	p.mu.Lock()
	defer p.mu.Unlock()
	if o, known := p.others[hostID]; known {
		refused = o.skewed && o.alive(p.cfg.Silence)
	}
	return offset, refused, ok
}

func (p *Peers) clockOffsets() map[uint64]time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	since := p.cfg.Boot().Milliseconds() - p.cfg.Wall().UnixMilli()
	offsets := make(map[uint64]time.Duration)
	for id, o := range p.others {
		if o.hasWall && o.alive(p.cfg.Silence) {
			offsets[id] = time.Duration(o.wallMs+since) * time.Millisecond
		}
	}
	return offsets
}

// twins notices that two processes report as one host. A process that starts takes the place of the former one, which reports no more; when
// that one does, again and again, both run, and the one that came later is refused.
type twins struct {
	present uint64
	former  uint64 // the process before
	again   int    // reports of former since
	refused uint64 // the process that came later
}

// twinReports is how many reports of a process that was replaced show that it runs: one or two may have been under way.
const twinReports = 3

// seen notes a report of a process. Only that of the present one is taken; refused says that it never will be.
func (t *twins) seen(process uint64) (take, refused bool) {
	switch process {
	case t.present:
		return true, false
	case t.refused:
		return false, true
	case t.former:
		if t.again++; t.again < twinReports {
			return false, false
		}
		*t = twins{present: process, refused: t.present}
		return true, false
	}
	t.present, t.former, t.again = process, t.present, 0
	return true, false
}

// otherProcess returns the process that is heard of now as a host, if it is another one.
func (p *Peers) otherProcess(hostID, process uint64) (other uint64, from string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	if !ok || o.processID == process || o.processID == 0 || time.Since(o.reported) >= p.cfg.Silence {
		return 0, ""
	}
	return o.processID, o.from
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// takeReport takes up what another host tells, whose connection was there at a time. It returns true if the report builds on one that this
// host does not have.
func (p *Peers) takeReport(r *peerv1.ReportRequest, from string, at time.Time) (needFull bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.otherLocked(r.HostId)
	take, refused := o.twins.seen(r.ProcessId)
	if refused {
		err := code.New(code.HostRefused, "host %d runs twice: another process, which reports from %s, was there before this one: a data directory was copied; "+
			"stop this one, or give it an id and an empty data directory of its own", r.HostId, o.from)
		p.tellLocked(o, "a host runs twice, and the process that came later is refused; it calls from "+from, r.HostId, err)
		return false, err
	}
	if !take {
		return true, nil
	}
	o.heard, o.catalog, o.low, o.skewed = time.Now(), r.CatalogVersion, r.LowSpace, r.ClockRefused
	o.reported, o.from, o.sure = o.heard, from, later(o.sure, at)
	o.ended = o.ended && o.lost()
	o.level, o.damaged = r.CommandLevel, nil
	for _, d := range r.Damaged {
		o.damaged = append(o.damaged, DamagedReplica{Shard: d.ShardId, Replica: d.ReplicaId})
	}
	if !r.Full && (o.shards == nil || o.processID != r.ProcessId || o.sequence+1 != r.Sequence) {
		return true, nil
	}
	if r.Full {
		o.shards = make(map[uint64]ShardReport, len(r.Shards))
	}
	o.processID, o.sequence = r.ProcessId, r.Sequence
	for _, s := range r.Shards {
		if s.Gone {
			delete(o.shards, s.ShardId)
			continue
		}
		o.shards[s.ShardId] = ShardReport{
			Shard: s.ShardId, Replica: s.ReplicaId, Applied: s.AppliedIndex,
			LastIndex: s.LastIndex, LastTerm: s.LastTerm, Leader: s.LeaderId, Term: s.Term, StoredBytes: s.StoredBytes,
		}
	}
	return false, nil
}

// reportLoop reports to every other host each interval. A host that is slow to answer is not told again before it has.
func (p *Peers) reportLoop() {
	ticker := time.NewTicker(p.cfg.Interval)
	defer ticker.Stop()
	for {
		if p.cfg.Fleet() != "" {
			shards, version := p.cfg.Backend.Reports()
			about := &peerv1.ReportRequest{
				HostId: p.cfg.HostID, ProcessId: p.processID, CatalogVersion: version, LowSpace: p.cfg.Backend.LowSpace(),
				ClockRefused: p.cfg.Backend.ClockRefused(), CommandLevel: p.cfg.CommandLevel,
			}
			for _, d := range p.cfg.Backend.Damaged() {
				about.Damaged = append(about.Damaged, &peerv1.DamagedReplica{ShardId: d.Shard, ReplicaId: d.Replica})
			}
			for _, hostID := range p.cfg.Backend.Hosts() {
				p.report(hostID, shards, about)
			}
		}
		select {
		case <-p.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// report sends one report, in a goroutine of its own. about is what it says of the host itself; it is not changed.
func (p *Peers) report(hostID uint64, shards []ShardReport, about *peerv1.ReportRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.otherLocked(hostID)
	if o.busy {
		return
	}
	if p.closed {
		return
	}
	o.busy = true
	o.sent++
	r := proto.CloneOf(about)
	r.Sequence, r.Full, r.Shards = o.sent, o.told == nil, changes(o.told, shards)
	p.tasks.Add(1)
	go func() {
		defer p.tasks.Done()
		p.send(hostID, r, shards)
	}()
}

// changes returns the reports that told lacks or has otherwise, and those that are gone.
func changes(told map[uint64]ShardReport, shards []ShardReport) []*peerv1.ShardReport {
	var out []*peerv1.ShardReport
	present := make(map[uint64]bool, len(shards))
	for _, s := range shards {
		present[s.Shard] = true
		if old, ok := told[s.Shard]; ok && old == s {
			continue
		}
		out = append(out, &peerv1.ShardReport{
			ShardId: s.Shard, ReplicaId: s.Replica, AppliedIndex: s.Applied,
			LastIndex: s.LastIndex, LastTerm: s.LastTerm, LeaderId: s.Leader, Term: s.Term, StoredBytes: s.StoredBytes,
		})
	}
	for shard := range told {
		if !present[shard] {
			out = append(out, &peerv1.ShardReport{ShardId: shard, Gone: true})
		}
	}
	return out
}

func (p *Peers) send(hostID uint64, r *peerv1.ReportRequest, shards []ShardReport) {
	ctx, cancel := context.WithTimeout(p.ctx, p.cfg.Silence)
	defer cancel()
	began, before := time.Now(), p.cfg.Boot()
	resp, err := p.Service(hostID).Report(ctx, connect.NewRequest(r))
	took, after := time.Since(began), p.cfg.Boot()
	if e, _ := remote(err); e != nil && e.Code == code.HostRefused {
		p.cfg.Backend.Refused(e)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.otherLocked(hostID)
	o.busy = false
	if err != nil {
		o.told = nil
		// A host that refuses is there; it may not be of the fleet yet.
		e, answered := remote(err)
		if !answered {
			p.noteLocked(hostID, o, unheard(err))
		}
		if e = refusal(e, err); e != nil {
			p.tellLocked(o, "a host refuses this one, or is not the one that is looked for", hostID, e)
		}
		return
	}
	o.heard, o.sure = time.Now(), later(o.sure, began)
	o.ended = o.ended && o.lost()
	o.answered = o.heard
	if took <= clockTrip || !o.hasWall {
		o.wallMs, o.hasWall = resp.Msg.WallMs-(before+(after-before)/2).Milliseconds(), true
	}
	p.noteLocked(hostID, o, nil)
	if o.told = nil; !resp.Msg.NeedFull {
		o.told = make(map[uint64]ShardReport, len(shards))
		for _, s := range shards {
			o.told[s.Shard] = s
		}
	}
}

// unheard is why a report got no answer. It had no effect that anybody waits for, so that none came in time is not an unknown outcome.
func unheard(err error) error {
	var e *code.Error
	if errors.As(FromConnect(err), &e) && e.Code == code.QuorumLost {
		return &code.Error{Code: code.Unavailable, Effect: code.EffectNone, Text: "the other host did not answer in time", Cause: err}
	}
	return FromConnect(err)
}

// noteLocked logs that a host went silent or came back, once each.
func (p *Peers) noteLocked(hostID uint64, o *other, err error) {
	silent := time.Since(p.begun) >= 2*p.cfg.Silence && time.Since(o.heard) >= p.cfg.Silence
	switch {
	case err != nil && silent && !o.down && p.ctx.Err() == nil:
		o.down = true
		p.log.Warn("host is silent", zap.Uint64("peer", hostID), zap.Error(err))
	case err == nil && o.down:
		o.down = false
		p.log.Info("host is back", zap.Uint64("peer", hostID))
	}
}

// strangerEvery is how often a stranger is told of.
const strangerEvery = 10 * time.Second

// tellLocked logs what is wrong between this host and another one, once in a while.
func (p *Peers) tellLocked(o *other, what string, hostID uint64, err error) {
	if time.Since(o.toldWrong) >= strangerEvery && p.ctx.Err() == nil {
		o.toldWrong = time.Now()
		p.log.Error(what, zap.Uint64("peer", hostID), zap.Error(err))
	}
}

// refusal returns the error of a call if it says that the two hosts do not belong together.
func refusal(told *code.Error, err error) *code.Error {
	if told == nil && !errors.As(err, &told) {
		return nil
	}
	if told.Code == code.WrongFleet || told.Code == code.HostRefused {
		return told
	}
	return nil
}
