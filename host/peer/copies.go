package peer

import (
	"context"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/peer/peerv1"
)

// CopyReport is how far a full replica has its shard on this host's disk.
type CopyReport struct {
	Shard, Replica uint64
	Durable, Term  uint64 // the last durable entry
	Applied        uint64
}

const (
	// copyRetry is the pause before a broken stream of reports is opened again.
	copyRetry = 100 * time.Millisecond
	// copyAlive is how often an idle stream is written to, so that its end is noticed, and copyAgain how often
	// everything is told again, which repairs whatever a report that got lost left behind.
	copyAlive = 500 * time.Millisecond
	copyAgain = 5 * time.Second
	// copyPause is how long a report may wait for others that nobody waits for.
	copyPause = 20 * time.Millisecond
)

// copySender tells one host about copies: what waits is one report a shard, so what moves while a send is under way
// costs one more. A new stream begins with everything that the host is to know.
type copySender struct {
	p      *Peers
	hostID uint64

	mu      sync.Mutex
	waiting map[uint64]CopyReport
	wake    chan struct{}
	later   chan struct{} // something waits that may wait for copyPause
}

// ReportCopy tells a host about a replica of this one; it does not block. Reports of one shard are told in order, and
// only the last of those that wait. One that may be late waits up to copyPause: the host knows what matters by another way.
func (p *Peers) ReportCopy(hostID uint64, r CopyReport, late bool) {
	if s := p.copySender(hostID); s != nil {
		s.put(r, late)
	}
}

// copySender returns a host's sender; nil after Close.
func (p *Peers) copySender(hostID uint64) *copySender {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.copies[hostID]
	if ok || p.closed {
		return s
	}
	s = &copySender{p: p, hostID: hostID, waiting: map[uint64]CopyReport{}, wake: make(chan struct{}, 1), later: make(chan struct{}, 1)}
	p.copies[hostID] = s
	p.tasks.Add(1)
	go func() {
		defer p.tasks.Done()
		s.run()
	}()
	return s
}

func (s *copySender) put(r CopyReport, late bool) {
	s.mu.Lock()
	s.waiting[r.Shard] = r
	s.mu.Unlock()
	wake := s.wake
	if late {
		wake = s.later
	}
	select {
	case wake <- struct{}{}:
	default:
	}
}

// pause waits for what comes in copyPause, unless something that may not wait does.
func (s *copySender) pause(ctx context.Context) {
	timer := time.NewTimer(copyPause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-s.wake:
	case <-timer.C:
	}
	select {
	case <-s.later: // it goes along
	default:
	}
}

// run opens a stream when there is something to tell, and again when it breaks.
func (s *copySender) run() {
	ctx := s.p.ctx
	select {
	case <-ctx.Done():
		return
	case <-s.wake:
	case <-s.later:
	}
	for {
		err := s.stream(ctx)
		if ctx.Err() != nil {
			return
		}
		s.p.log.Debug("reports of copies broke off", zap.Uint64("peer", s.hostID), zap.Error(err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(copyRetry):
		}
	}
}

// stream sends until it fails or ctx ends.
func (s *copySender) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := s.p.Service(s.hostID).Copies(ctx)
	ticker := time.NewTicker(copyAlive)
	defer ticker.Stop()
	var told time.Time
	for {
		if time.Since(told) >= copyAgain {
			told = time.Now()
			s.all()
		}
		if err := c.Send(s.take()); err != nil {
			if _, rerr := c.CloseAndReceive(); rerr != nil {
				return rerr
			}
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.wake:
		case <-s.later:
			s.pause(ctx)
		case <-ticker.C:
		}
	}
}

// all makes everything wait that the host is to know. What moves meanwhile comes after it.
func (s *copySender) all() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.waiting)
	for _, r := range s.p.cfg.Backend.CopiesFor(s.hostID) {
		s.waiting[r.Shard] = r
	}
}

func (s *copySender) take() *peerv1.CopiesRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := &peerv1.CopiesRequest{Reports: make([]*peerv1.CopyReport, 0, len(s.waiting))}
	for _, r := range s.waiting {
		m.Reports = append(m.Reports, &peerv1.CopyReport{
			ShardId: r.Shard, ReplicaId: r.Replica, DurableIndex: r.Durable, DurableTerm: r.Term, AppliedIndex: r.Applied,
		})
	}
	clear(s.waiting)
	return m
}

// newStream makes a host's latest stream of reports the one whose end counts.
func (p *Peers) newStream(hostID uint64) (stream uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.streams[hostID]++
	return p.streams[hostID]
}

// endStream tells the backend that a host reports no more, unless it has opened a newer stream since: of a cut
// connection the old end may be noticed last.
func (p *Peers) endStream(hostID, stream uint64) {
	p.mu.Lock()
	latest := p.streams[hostID] == stream
	p.mu.Unlock()
	if latest {
		p.cfg.Backend.CopiesEnded(hostID)
	}
}

// Copies takes another host's reports until its stream ends.
func (s *service) Copies(_ context.Context, stream *connect.ClientStream[peerv1.CopiesRequest]) (*connect.Response[peerv1.CopiesResponse], error) {
	hostID, err := strconv.ParseUint(stream.RequestHeader().Get(hostHeader), 10, 64)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	defer s.p.endStream(hostID, s.p.newStream(hostID))
	for stream.Receive() {
		m := stream.Msg()
		reports := make([]CopyReport, len(m.Reports))
		for i, r := range m.Reports {
			reports[i] = CopyReport{Shard: r.ShardId, Replica: r.ReplicaId, Durable: r.DurableIndex, Term: r.DurableTerm, Applied: r.AppliedIndex}
		}
		s.p.cfg.Backend.CopiesReported(hostID, reports)
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&peerv1.CopiesResponse{}), nil
}
