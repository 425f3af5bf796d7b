package api

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/hands"
)

// streamService implements tierq.v1.StreamService.
type streamService struct{ *Server }

var _ tierqv1connect.StreamServiceHandler = streamService{}

const (
	// publishPipeline bounds the publishes of one stream that are in flight; the next request is read when one ends.
	publishPipeline = 64
	// Defaults and bounds of a consumer's window.
	defaultWindowMessages = 256
	defaultWindowBytes    = 2 << 20
	maxWindowMessages     = 10_000
	maxWindowBytes        = 64 << 20
	// pushBatch and pushBytes bound the messages of one push, settlePipeline the settles of one stream that are in flight.
	pushBatch      = 256
	pushBytes      = 4 << 20
	settlePipeline = 64
	// pushWait is the long poll behind a stream. The consumer does not see its end, unless no leader is known then: a consumer
	// of a home that is cut off from the fleet is told so within this time.
	pushWait = 5 * time.Second
	// releaseTimeout bounds the release of what a closed stream still held.
	releaseTimeout = 3 * time.Second
)

// PublishStream publishes in the order of the requests and answers in that order.
func (s streamService) PublishStream(ctx context.Context, stream *connect.BidiStream[tierqv1.PublishRequest, tierqv1.PublishStreamResponse]) error {
	type slot chan *tierqv1.PublishStreamResponse
	order := make(chan slot, publishPipeline)
	sent := make(chan error, 1)
	go func() { // the only sender
		var err error
		for one := range order {
			out := <-one
			if err == nil {
				err = stream.Send(out)
			}
		}
		sent <- err
	}()
	var wg sync.WaitGroup
	workers := hands.New()
	defer workers.Close()
	var failed error
	for {
		req, err := stream.Receive()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				failed = err
			}
			break
		}
		one := make(slot, 1)
		order <- one
		wg.Add(1)
		s.publishOne(ctx, workers, req, func(out *tierqv1.PublishStreamResponse) { one <- out; wg.Done() })
	}
	wg.Wait()
	close(order)
	return errors.Join(failed, <-sent)
}

// publishOne hands a publish to the backend before it returns, so that requests keep their order, and answers later.
func (s streamService) publishOne(ctx context.Context, workers *hands.Hands, req *tierqv1.PublishRequest, tell func(*tierqv1.PublishStreamResponse)) {
	began := time.Now()
	answer := func(out *tierqv1.PublishStreamResponse) {
		out.ServedUs = uint32(min(max(time.Since(began).Microseconds(), 1), math.MaxUint32))
		tell(out)
	}
	p, err := publish(req)
	if err == nil {
		err = s.admit(ctx, len(req.GetMessages()))
	}
	if err != nil {
		answer(s.refusedPublish(err))
		return
	}
	queued := make(chan struct{})
	workers.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, defaultDeadline)
		defer cancel()
		p.Queued = sync.OnceFunc(func() { close(queued) })
		defer p.Queued()
		reply, err := s.backend.Publish(ctx, p)
		if err == nil {
			answer(&tierqv1.PublishStreamResponse{Outcome: &tierqv1.PublishStreamResponse_Published{Published: protoPublish(reply, p.Partition)}})
			return
		}
		var many *SeveralError
		if errors.As(err, &many) {
			whole, err := queueService(s).publishAny(ctx, req, &many.Queue)
			if err != nil {
				answer(s.refusedPublish(err))
				return
			}
			answer(&tierqv1.PublishStreamResponse{Outcome: &tierqv1.PublishStreamResponse_Published{Published: whole}})
			return
		}
		resp, err := elsewhere(ctx, s.Server, err, req, func(ctx context.Context, host uint64, r *connect.Request[tierqv1.PublishRequest]) (*connect.Response[tierqv1.PublishResponse], error) {
			return queueService(s).client(host).Publish(ctx, r)
		})
		if err != nil {
			answer(s.refusedPublish(err))
			return
		}
		answer(&tierqv1.PublishStreamResponse{Outcome: &tierqv1.PublishStreamResponse_Published{Published: resp.Msg}})
	})
	<-queued
}

func (s streamService) refusedPublish(err error) *tierqv1.PublishStreamResponse {
	detail := detailOf(err)
	s.onRefusal(code.Code(detail.Code))
	return &tierqv1.PublishStreamResponse{Outcome: &tierqv1.PublishStreamResponse_Refused{Refused: detail}}
}

// detailOf returns the detail that a refusal has or gets.
func detailOf(err error) *tierqv1.ErrorDetail {
	if ce, ok := err.(*connect.Error); ok {
		for _, d := range ce.Details() {
			if v, err := d.Value(); err == nil {
				if out, ok := v.(*tierqv1.ErrorDetail); ok {
					return out
				}
			}
		}
	}
	return Detail(asCode(err))
}

// Consume pushes deliveries and takes settles until the consumer closes its side, the home changes, or the context ends. After a
// drain it only takes settles.
func (s streamService) Consume(ctx context.Context, stream *connect.BidiStream[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse]) error {
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	if first.GetStart() == nil {
		return toConnect(code.New(code.InvalidArgument, "request: the first request of a stream must be start"))
	}
	c, err := newConsumer(s, stream, first.GetStart())
	if err != nil {
		return toConnect(err)
	}
	return toConnect(c.run(ctx))
}

// consumer is one Consume stream.
type consumer struct {
	s        streamService
	stream   *connect.BidiStream[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse]
	receive  Receive
	window   int
	windowB  int
	sendMu   sync.Mutex
	handlers int        // messages that the consumer works on at once; 0: it did not say
	finished bool       // the handler is about to return: nothing may be sent any more. Guarded by sendMu
	mu       sync.Mutex // guards the window too
	room     *sync.Cond
	held     map[string]*heldMessage // receipts that are out
	out      int                     // those of them that take room, with their bytes
	outB     int
	handed   uint64 // messages handed out since the stream began
	draining bool
	ended    bool
	broken   bool     // the consumer went away without a word
	unsent   []string // written by push, read when it has ended
	stopPush context.CancelFunc
}

// heldMessage takes room from its hand-out until its settle arrives, and is held until that is answered.
type heldMessage struct {
	order uint64 // of hand-out
	bytes int
	freed bool
}

func newConsumer(s streamService, stream *connect.BidiStream[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse], m *tierqv1.ConsumeStart) (*consumer, error) {
	wait := uint32(pushWait.Milliseconds())
	r, err := receive(&tierqv1.ReceiveRequest{Queue: m.GetQueue(), Partition: m.Partition, Group: m.GetGroup(), Consumer: m.GetConsumer(), LeaseMs: m.LeaseMs, WaitMs: &wait})
	if err != nil {
		return nil, err
	}
	c := &consumer{s: s, stream: stream, receive: r, window: int(m.GetWindowMessages()), windowB: int(m.GetWindowBytes()), held: map[string]*heldMessage{},
		handlers: int(m.GetHandlers())}
	c.room = sync.NewCond(&c.mu)
	if c.window == 0 {
		c.window = defaultWindowMessages
	}
	if c.windowB == 0 {
		c.windowB = defaultWindowBytes
	}
	if c.window > maxWindowMessages || c.windowB > maxWindowBytes {
		return nil, code.New(code.InvalidArgument, "window: %d messages and %d bytes, at most %d and %d are allowed", c.window, c.windowB, maxWindowMessages, maxWindowBytes)
	}
	return c, nil
}

func (c *consumer) run(ctx context.Context) error {
	defer c.finish()
	call := ctx
	var telling sync.WaitGroup
	defer telling.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	partitions, _ := c.s.backend.PartitionCount(ctx, c.receive.Queue)
	if err := c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Started{
		Started: &tierqv1.ConsumeStarted{WindowMessages: uint32(c.window), WindowBytes: uint32(c.windowB), Windowed: true, Partitions: partitions},
	}}); err != nil {
		return err
	}
	telling.Go(func() { c.tellGrowth(ctx, partitions) })
	var pushing context.Context
	pushing, c.stopPush = context.WithCancel(ctx)
	defer c.stopPush()
	pushed := make(chan error, 1)
	go func() { pushed <- c.push(pushing) }()
	read := make(chan error, 1)
	go func() { read <- c.read(ctx) }()
	closed := false
	var err error
	select {
	case err = <-pushed: // the home changed, sending failed, or it drains
		if err == nil {
			c.release(c.unsent)
			c.unsent = nil
			select { // what is out may still be settled
			case err = <-read:
				closed = err == nil
				c.breaks(err)
			case <-ctx.Done():
			}
		}
	case err = <-read: // the consumer closed its side, or broke off
		closed = err == nil
		c.breaks(err)
		cancel()
		c.end()
		<-pushed
	}
	cancel()
	c.end()
	if closed {
		c.release(slices.Collect(maps.Keys(c.held)))
	}
	c.release(c.unsent)
	c.breaks(call.Err())
	c.settleAll(SettleUnseen, c.unseen())
	return err
}

// tellGrowth tells the consumer, until ctx ends, when its queue has more partitions than it was told.
func (c *consumer) tellGrowth(ctx context.Context, told uint32) {
	for {
		n, changed := c.s.backend.PartitionCount(ctx, c.receive.Queue)
		if n > told {
			told = n
			// A failed send ends the stream at its reader.
			_ = c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Partitions{Partitions: n}})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func (c *consumer) end() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.room.Broadcast()
}

// push hands out while the window has room, until the stream drains or ends.
func (c *consumer) push(ctx context.Context) error {
	for {
		n, b, ok := c.awaitRoom()
		if !ok || ctx.Err() != nil {
			return nil
		}
		r := c.receive
		r.Max, r.MaxBytes = min(n, pushBatch), min(b, pushBytes)
		call, cancel := context.WithTimeout(ctx, pushWait+longPollSlack)
		ds, _, err := c.s.backend.Receive(call, r)
		cancel()
		if ctx.Err() != nil {
			for _, d := range ds {
				c.unsent = append(c.unsent, d.Receipt)
			}
			return nil
		}
		if err != nil && !pauses(err) {
			return err
		}
		if len(ds) == 0 {
			continue
		}
		ds, surplus := c.hold(ds)
		c.release(surplus)
		if len(ds) == 0 {
			continue
		}
		out := &tierqv1.ConsumeMessages{Messages: make([]*tierqv1.Message, len(ds))}
		for i, d := range ds {
			out.Messages[i] = protoMessage(d, r.Partition)
		}
		if err := c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Messages{Messages: out}}); err != nil {
			c.breaks(err)
			return err
		}
	}
}

// breaks notes that the consumer is gone, if there is an error.
func (c *consumer) breaks(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken = c.broken || err != nil
}

// unseen is what no handler of a consumer that broke off can have had: it works on messages in their order, so that is all but the
// first few of what it has not settled.
func (c *consumer) unseen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.broken || c.handlers == 0 {
		return nil
	}
	var out []string
	for r, h := range c.held {
		if !h.freed {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Compare(c.held[a].order, c.held[b].order) })
	return out[min(c.handlers, len(out)):]
}

// pauses says whether a refusal is one that the next long poll may find over: the group is paused, or its consumers hold as much as
// they may. Both come at the end of the wait.
func pauses(err error) bool {
	switch asCode(err).Code {
	case code.ConsumerLimit, code.GroupPaused:
		return true
	}
	return false
}

// awaitRoom waits until the window has room for a message; false when the stream ends or drains.
func (c *consumer) awaitRoom() (messages, bytes int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.ended && !c.draining && (c.out >= c.window || c.outB >= c.windowB) {
		c.room.Wait()
	}
	return c.window - c.out, c.windowB - c.outB, !c.ended && !c.draining
}

// hold takes deliveries into the window. What has no room any more, because it was made smaller, is not sent but given back.
func (c *consumer) hold(ds []Delivery) (held []Delivery, surplus []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	room := min(max(c.window-c.out, 0), len(ds))
	for _, d := range ds[:room] {
		size := len(d.Message.Body) + len(d.Message.Key)
		c.handed++
		c.held[d.Receipt] = &heldMessage{order: c.handed, bytes: size}
		c.out++
		c.outB += size
	}
	for _, d := range ds[room:] {
		surplus = append(surplus, d.Receipt)
	}
	return ds[:room], surplus
}

// free gives the window back what the consumer is done with. What becomes of it need not be known for that: an ack takes a
// commit, which the next messages do not wait for.
func (c *consumer) free(receipts []string) {
	c.mu.Lock()
	for _, r := range receipts {
		if h := c.held[r]; h != nil && !h.freed {
			h.freed = true
			c.out--
			c.outB -= h.bytes
		}
	}
	c.mu.Unlock()
	c.room.Broadcast()
}

// settled forgets what is no longer out.
func (c *consumer) settled(receipts []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range receipts {
		delete(c.held, r)
	}
}

// resize replaces the window.
func (c *consumer) resize(w *tierqv1.ConsumeWindow) error {
	messages, bytes := int(w.GetMessages()), int(w.GetBytes())
	if messages > maxWindowMessages || bytes > maxWindowBytes {
		return code.New(code.InvalidArgument, "window: %d messages and %d bytes, at most %d and %d are allowed", messages, bytes, maxWindowMessages, maxWindowBytes)
	}
	c.mu.Lock()
	c.window = messages
	if bytes > 0 {
		c.windowB = bytes
	}
	handed := c.handed
	c.mu.Unlock()
	c.room.Broadcast()
	if w.GetId() != 0 {
		// A failed send ends the stream at its reader.
		_ = c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Windowed{Windowed: &tierqv1.ConsumeWindowed{Id: w.GetId(), Handed: handed}}})
	}
	return nil
}

// send sends one response, unless the stream is finished: a settle may be answered later than that.
func (c *consumer) send(m *tierqv1.ConsumeResponse) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if c.finished {
		return io.ErrClosedPipe
	}
	return c.stream.Send(m)
}

func (c *consumer) finish() {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	c.finished = true
}

// read takes settles until the consumer closes its side; those in flight are answered before it returns.
func (c *consumer) read(ctx context.Context) error {
	slots := make(chan struct{}, settlePipeline)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		req, err := c.stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case req.GetDrain():
			c.mu.Lock()
			c.draining = true
			c.mu.Unlock()
			c.room.Broadcast()
			c.stopPush() // what the long poll brings from now on is given back
		case req.GetWindow() != nil:
			if err := c.resize(req.GetWindow()); err != nil {
				return err
			}
		case req.GetSettle() != nil:
			if req.GetSettle().GetKind() != "extend" {
				c.free(req.GetSettle().GetReceipts())
			}
			hurry := len(slots) >= settlePipeline/2 // the next ones, windows and extends among them, must not wait for patient ones
			slots <- struct{}{}
			wg.Add(1)
			go func() {
				defer func() { <-slots; wg.Done() }()
				c.settle(ctx, req.GetSettle(), hurry)
			}()
		default:
			return code.New(code.InvalidArgument, "request: a stream is started once; then send settle, window or drain")
		}
	}
}

var settleKinds = map[string]SettleKind{"ack": SettleAck, "nack": SettleNack, "release": SettleRelease, "reject": SettleReject, "extend": SettleExtend}

func (c *consumer) settle(ctx context.Context, m *tierqv1.ConsumeSettle, hurry bool) {
	out := &tierqv1.ConsumeSettled{Id: m.GetId()}
	results, err := c.settleResults(ctx, m, hurry)
	if err != nil { // the whole call was refused: so is every receipt
		e := asCode(err)
		results = make([]*tierqv1.SettleResult, len(m.GetReceipts()))
		for i := range results {
			results[i] = &tierqv1.SettleResult{Code: uint32(e.Code), Name: e.Code.String(), Text: sentence(e), Effect: effect(e.Effect)}
		}
	}
	if m.GetKind() != "extend" {
		c.settled(m.GetReceipts())
	}
	out.Results = results
	// A failed send ends the stream at its reader.
	_ = c.send(&tierqv1.ConsumeResponse{Response: &tierqv1.ConsumeResponse_Settled{Settled: out}})
}

func (c *consumer) settleResults(ctx context.Context, m *tierqv1.ConsumeSettle, hurry bool) ([]*tierqv1.SettleResult, error) {
	kind, ok := settleKinds[m.GetKind()]
	if !ok {
		return nil, code.New(code.InvalidArgument, "settle.kind: %q: use ack, nack, release, reject or extend", m.GetKind())
	}
	if err := errors.Join(withinLease("settle.lease_ms", m.GetLeaseMs()), withinLease("settle.delay_ms", m.GetDelayMs())); err != nil {
		return nil, err
	}
	r := Settle{Kind: kind, Queue: c.receive.Queue, Partition: c.receive.Partition, Group: c.receive.Group, Receipts: m.GetReceipts(), Reason: m.GetReason(), Lease: time.Duration(m.GetLeaseMs()) * time.Millisecond, Patient: m.GetPatient() && !hurry}
	if m.DelayMs != nil {
		d := time.Duration(m.GetDelayMs()) * time.Millisecond
		r.Delay = &d
	}
	ctx, cancel := context.WithTimeout(ctx, defaultDeadline)
	defer cancel()
	resp, err := groupService{c.s.Server}.settle(ctx, r)
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetResults(), nil
}

// release gives leases back without counting: after a clean close what the consumer did not settle, and always what
// never left. A consumer that broke off may have seen its messages: their leases run out, and those count that a handler may
// have had.
func (c *consumer) release(receipts []string) { c.settleAll(SettleRelease, receipts) }

// settleAll settles without the consumer.
func (c *consumer) settleAll(kind SettleKind, receipts []string) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	for len(receipts) > 0 && ctx.Err() == nil {
		part := receipts[:min(len(receipts), maxSettle)]
		receipts = receipts[len(part):]
		_, _ = c.s.backend.Settle(ctx, Settle{Kind: kind, Queue: c.receive.Queue, Partition: c.receive.Partition, Group: c.receive.Group, Receipts: part})
	}
}
