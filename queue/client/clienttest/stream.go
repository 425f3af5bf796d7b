package clienttest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// What a stream carries is counted, and asked of the hook, under the names of the unary calls: Publish, Ack, Nack, Release,
// Reject, Extend. The streams themselves are PublishStream and Consume, and every push of messages is Push. A lost request or
// answer breaks the whole stream.

// SetStreams says whether hosts speak PublishStream and Consume; without, they answer as a host or proxy that does not know
// them.
func (f *Fleet) SetStreams(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.noStreams = !on
}

// SetServed sets how long hosts say, beside the answers of a stream, that they took; 0: they say nothing.
func (f *Fleet) SetServed(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.served = d
}

func (f *Fleet) servedMicros() uint32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return uint32(f.served.Microseconds())
}

func (f *Fleet) streamless() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.noStreams
}

// inStream asks the hook about something that a stream carries, and reports whether it is to be broken off before, and after.
func (v *view) inStream(ctx context.Context, c Call) (before, after bool, refused error) {
	fate := v.h.f.ask(v.h, c)
	if fate.Hold != nil {
		select {
		case <-fate.Hold:
		case <-ctx.Done():
		}
	}
	if fate.Err != nil {
		refused = fate.Err
	}
	return fate.LoseRequest, fate.LoseAnswer, refused
}

var errNoStreams = connect.NewError(connect.CodeUnimplemented, errors.New("not here"))

func (v *view) PublishStream(ctx context.Context, stream *connect.BidiStream[tierqv1.PublishRequest, tierqv1.PublishStreamResponse]) error {
	if v.h.f.streamless() {
		return errNoStreams
	}
	if before, _, refused := v.inStream(ctx, Call{Procedure: "PublishStream"}); before {
		panic(http.ErrAbortHandler)
	} else if refused != nil {
		return Refusal(refused.(*code.Error))
	}
	for {
		req, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		before, after, refused := v.inStream(ctx, Call{Procedure: "Publish", Publish: req})
		if before {
			panic(http.ErrAbortHandler)
		}
		out := &tierqv1.PublishStreamResponse{ServedUs: v.h.f.servedMicros()}
		if refused == nil {
			var res *connect.Response[tierqv1.PublishResponse]
			if res, refused = v.Publish(ctx, connect.NewRequest(req)); refused == nil {
				out.Outcome = &tierqv1.PublishStreamResponse_Published{Published: res.Msg}
			}
		}
		if refused != nil {
			out.Outcome = &tierqv1.PublishStreamResponse_Refused{Refused: detailOf(refused)}
		}
		if after {
			panic(http.ErrAbortHandler)
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

func detailOf(err error) *tierqv1.ErrorDetail {
	var e *code.Error
	if errors.As(err, &e) {
		err = Refusal(e)
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		for _, d := range ce.Details() {
			if v, err := d.Value(); err == nil {
				if out, ok := v.(*tierqv1.ErrorDetail); ok {
					return out
				}
			}
		}
	}
	return &tierqv1.ErrorDetail{Code: uint32(code.Internal), Effect: tierqv1.Effect_EFFECT_MAYBE}
}

// consuming is one Consume stream.
type consuming struct {
	v      *view
	stream *connect.BidiStream[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse]
	start  *tierqv1.ConsumeStart

	sendMu sync.Mutex
	over   bool // guarded by sendMu: the handler is about to return

	// Guarded by the fleet's mu.
	window   int
	handed   uint64
	out      map[string]bool // receipts that take room
	held     map[string]bool
	told     uint32 // how many partitions the consumer knows of; push's own once it runs
	draining bool
	ended    bool
}

func (v *view) Consume(ctx context.Context, stream *connect.BidiStream[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse]) error {
	f := v.h.f
	if f.streamless() {
		return errNoStreams
	}
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	if before, _, refused := v.inStream(ctx, Call{Procedure: "Consume"}); before {
		panic(http.ErrAbortHandler)
	} else if refused != nil {
		return Refusal(refused.(*code.Error))
	}
	c := &consuming{v: v, stream: stream, start: first.GetStart(), out: map[string]bool{}, held: map[string]bool{}}
	c.window = int(c.start.GetWindowMessages())
	if c.window == 0 {
		c.window = 256
	}
	f.mu.Lock()
	c.told = f.hintLocked(c.start.GetQueue())
	f.mu.Unlock()
	if err := c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Started{Started: &tierqv1.ConsumeStarted{WindowMessages: uint32(c.window), Windowed: true, Partitions: c.told}}}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		c.sendMu.Lock()
		defer c.sendMu.Unlock()
		c.over = true
	}()
	ends := make(chan error, 2)
	var both sync.WaitGroup
	defer both.Wait()
	both.Go(func() { ends <- c.push(ctx) })
	read := make(chan error, 1)
	go func() { read <- c.read(ctx) }() // ends with the stream
	select {
	case err = <-ends:
		cancel()
	case err = <-read:
		cancel()
		c.finish(err == nil)
	}
	if errors.Is(err, errBroken) {
		panic(http.ErrAbortHandler)
	}
	return err
}

// errBroken ends a stream as a lost connection does.
var errBroken = errors.New("broken")

func (c *consuming) send(m *tierqv1.ConsumeResponse) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.over {
		return io.ErrClosedPipe
	}
	return c.stream.Send(m)
}

// finish releases, after a clean close, what is still held.
func (c *consuming) finish(clean bool) {
	f := c.v.h.f
	f.mu.Lock()
	c.ended = true
	var left []string
	for r := range c.held {
		left = append(left, r)
	}
	f.wakeLocked()
	f.mu.Unlock()
	if clean && len(left) > 0 {
		_, _ = c.v.settle(c.start.Queue, c.start.Partition, c.start.Group, left, func(_ *queueState, g *groupState, a uint64) { delete(g.leases, a) })
	}
}

func (c *consuming) push(ctx context.Context) error {
	f := c.v.h.f
	for {
		f.mu.Lock()
		q, g, err := c.v.homeLocked(c.start.Queue, c.start.Partition, c.start.Group)
		if err != nil || c.ended {
			f.mu.Unlock()
			return err
		}
		var ms []*tierqv1.Message
		if room := c.window - len(c.out); room > 0 && !c.draining {
			ms = f.leaseLocked(q, g, room)
			c.handed += uint64(len(ms))
			for _, m := range ms {
				c.out[m.Receipt], c.held[m.Receipt] = true, true
			}
		}
		changed := f.changed
		if len(ms) == 0 {
			g.waiting++
		}
		partitions := f.hintLocked(c.start.Queue)
		f.mu.Unlock()
		if partitions > c.told {
			c.told = partitions
			_ = c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Partitions{Partitions: partitions}})
		}
		if len(ms) == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			f.mu.Lock()
			g.waiting--
			f.mu.Unlock()
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		before, after, _ := c.v.inStream(ctx, Call{Procedure: "Push"})
		if before {
			return errBroken
		}
		if err := c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Messages{Messages: &tierqv1.ConsumeMessages{Messages: ms}}}); err != nil {
			return err
		}
		if after {
			return errBroken
		}
	}
}

func (c *consuming) read(ctx context.Context) error {
	f := c.v.h.f
	for {
		req, err := c.stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		f.mu.Lock()
		if w := req.GetWindow(); w != nil {
			c.window = int(w.Messages)
		}
		c.draining = c.draining || req.GetDrain()
		for _, r := range req.GetSettle().GetReceipts() {
			if req.GetSettle().Kind != "extend" {
				delete(c.out, r)
			}
		}
		handed := c.handed
		f.wakeLocked()
		f.mu.Unlock()
		if w := req.GetWindow(); w.GetId() != 0 {
			if err := c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Windowed{Windowed: &tierqv1.ConsumeWindowed{Id: w.Id, Handed: handed}}}); err != nil {
				return err
			}
		}
		if s := req.GetSettle(); s != nil {
			if err := c.settle(ctx, s); err != nil {
				return err
			}
		}
	}
}

func (c *consuming) settle(ctx context.Context, s *tierqv1.ConsumeSettle) error {
	before, after, refused := c.v.inStream(ctx, Call{Procedure: strings.ToUpper(s.Kind[:1]) + s.Kind[1:]})
	if before {
		return errBroken
	}
	var res *tierqv1.SettleResponse
	if refused == nil {
		var got *connect.Response[tierqv1.SettleResponse]
		if got, refused = c.v.settle(c.start.Queue, c.start.Partition, c.start.Group, s.Receipts, c.v.settling(s.Kind, s.Reason)); refused == nil {
			res = got.Msg
		}
	}
	if refused != nil {
		d := detailOf(refused)
		res = &tierqv1.SettleResponse{}
		for range s.Receipts {
			res.Results = append(res.Results, &tierqv1.SettleResult{Code: d.Code, Name: d.Name, Text: d.Text, Effect: d.Effect})
		}
	}
	f := c.v.h.f
	f.mu.Lock()
	if s.Kind != "extend" {
		for _, r := range s.Receipts {
			delete(c.held, r)
		}
	}
	f.mu.Unlock()
	if after {
		return errBroken
	}
	return c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Settled{Settled: &tierqv1.ConsumeSettled{Id: s.Id, Results: res.Results}}})
}

// settling is what a kind of settle does to a message whose lease is current.
func (v *view) settling(kind, reason string) func(*queueState, *groupState, uint64) {
	switch kind {
	case "ack":
		return func(_ *queueState, g *groupState, a uint64) { g.acked[a] = true; delete(g.leases, a) }
	case "nack":
		return func(_ *queueState, g *groupState, a uint64) { g.fails[a]++; delete(g.leases, a) }
	case "release":
		return func(_ *queueState, g *groupState, a uint64) { delete(g.leases, a) }
	case "reject":
		return func(q *queueState, g *groupState, a uint64) { g.kill(q.messages[a-1], g.fails[a]+1, reason) }
	}
	return func(*queueState, *groupState, uint64) {}
}
