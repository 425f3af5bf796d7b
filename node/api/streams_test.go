package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

func streamClient(t *testing.T, o Options) tierqv1connect.StreamServiceClient {
	t.Helper()
	c, _ := breakableClient(t, o)
	return c
}

// breakableClient is a streamClient whose connection can be lost.
func breakableClient(t *testing.T, o Options) (c tierqv1connect.StreamServiceClient, lose func()) {
	t.Helper()
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	conns := make(chan net.Conn, 1)
	tr := &http.Transport{Protocols: p, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err == nil {
			conns <- c
		}
		return c, err
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return tierqv1connect.NewStreamServiceClient(&http.Client{Transport: tr}, serve(t, o).URL, connect.WithGRPC()), func() { _ = (<-conns).Close() }
}

// TestPublishStreamKeepsOrder answers publishes in reverse and expects the stream's answers in order.
func TestPublishStreamKeepsOrder(t *testing.T) {
	const n = 20
	var mu sync.Mutex
	var arrived []string
	all := make(chan struct{})
	release := make([]chan struct{}, n)
	for i := range release {
		release[i] = make(chan struct{})
	}
	f := &slowBackend{publish: func(p Publish) (PublishReply, error) {
		mu.Lock()
		i := len(arrived)
		arrived = append(arrived, string(p.Publish.Messages[0].Body))
		if len(arrived) == n {
			close(all)
		}
		mu.Unlock()
		p.Queued()
		<-release[i]
		if i == 7 {
			return PublishReply{}, &code.Error{Code: code.QueueFull, Effect: code.EffectNone}
		}
		return PublishReply{Result: queue.PublishResult{Code: code.OK, Messages: []queue.MessageResult{{Code: code.OK, Address: queue.Address(i + 1)}}}}, nil
	}}
	stream := streamClient(t, Options{Backend: f}).PublishStream(t.Context())
	for i := range n {
		require.NoError(t, stream.Send(&tierqv1.PublishRequest{Queue: "q", Messages: []*tierqv1.OutMessage{{Body: fmt.Append(nil, i)}}}))
	}
	<-all
	for _, r := range slices.Backward(release) {
		close(r)
	}
	for i := range n {
		require.Equal(t, fmt.Sprint(i), arrived[i], "the backend saw the requests in order")
		resp, err := stream.Receive()
		require.NoError(t, err)
		if i == 7 {
			require.Equal(t, uint32(code.QueueFull), resp.GetRefused().GetCode())
			continue
		}
		require.Equal(t, uint64(i+1), resp.GetPublished().GetResults()[0].GetAddress())
	}
	require.NoError(t, stream.CloseRequest())
	_, err := stream.Receive()
	require.Error(t, err)
	require.NoError(t, stream.CloseResponse())
}

// slowBackend is fakeBackend without its unsynchronised call counter.
type slowBackend struct {
	Backend
	publish func(Publish) (PublishReply, error)
}

func (f *slowBackend) Publish(_ context.Context, r Publish) (PublishReply, error) {
	return f.publish(r)
}

// shelf is a backend that has messages 1..n and records what is out.
type shelf struct {
	Backend
	mu       sync.Mutex
	cond     *sync.Cond
	next, n  int
	out      map[string]bool
	acked    []string
	released []string
	unseen   []string
	moved    bool
	refusals []*code.Error // of the next receives

	partitions uint32
	grown      chan struct{}
}

func newShelf(n int) *shelf {
	s := &shelf{n: n, out: map[string]bool{}, partitions: 1, grown: make(chan struct{})}
	s.cond = sync.NewCond(&s.mu)
	return s
}

// PartitionCount implements Backend.
func (s *shelf) PartitionCount(context.Context, string) (uint32, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.partitions, s.grown
}

// grow gives the queue n partitions.
func (s *shelf) grow(n uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partitions = n
	close(s.grown)
	s.grown = make(chan struct{})
}

func (s *shelf) Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	stop := context.AfterFunc(ctx, s.cond.Broadcast)
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refusals) > 0 {
		e := s.refusals[0]
		s.refusals = s.refusals[1:]
		return nil, 0, e
	}
	for s.next == s.n && !s.moved && ctx.Err() == nil {
		s.cond.Wait()
	}
	if s.moved {
		return nil, 0, &code.Error{Code: code.NotOwner, Effect: code.EffectNone, HomeAPI: "elsewhere:1"}
	}
	var ds []Delivery
	for ; len(ds) < r.Max && s.next < s.n; s.next++ {
		d := Delivery{Receipt: fmt.Sprint("r", s.next), Message: queue.StoredMessage{Address: queue.Address(s.next + 1), Body: make([]byte, 10)}}
		s.out[d.Receipt] = true
		ds = append(ds, d)
	}
	return ds, 1, nil
}

func (s *shelf) Settle(_ context.Context, r Settle) ([]SettleResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Kind == SettleUnseen {
		s.unseen = append(s.unseen, r.Receipts...)
		s.cond.Broadcast()
		return make([]SettleResult, len(r.Receipts)), nil
	}
	for _, rc := range r.Receipts {
		delete(s.out, rc)
	}
	if r.Kind == SettleRelease {
		s.released = append(s.released, r.Receipts...)
	} else {
		s.acked = append(s.acked, r.Receipts...)
	}
	s.cond.Broadcast()
	return make([]SettleResult, len(r.Receipts)), nil
}

// TestConsumeWindow acks some, then leaves: what is out never exceeds the window, and what is left is released.
func TestConsumeWindow(t *testing.T) {
	s := newShelf(100)
	stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 8}}}))
	first, err := stream.Receive()
	require.NoError(t, err)
	require.Equal(t, uint32(8), first.GetStarted().GetWindowMessages())
	got, id, settled := 0, uint64(0), 0
	for got < 40 {
		resp, err := stream.Receive()
		require.NoError(t, err)
		var receipts []string
		for _, m := range resp.GetMessages().GetMessages() {
			receipts = append(receipts, m.GetReceipt())
		}
		if len(receipts) == 0 {
			continue
		}
		got += len(receipts)
		require.LessOrEqual(t, got-settled, 8, "what is out never exceeds the window")
		settled += len(receipts)
		id++
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: id, Kind: "ack", Receipts: receipts}}}))
	}
	require.NoError(t, stream.CloseRequest())
	for err == nil {
		_, err = stream.Receive()
	}
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.out) == 0 && len(s.acked)+len(s.released) == s.next
	}, 30*time.Second, time.Millisecond)
	require.GreaterOrEqual(t, len(s.acked), 40)
}

// TestConsumeTellsGrowth: a stream begins with how many partitions the queue has, and tells of more, once.
func TestConsumeTellsGrowth(t *testing.T) {
	s := newShelf(0)
	stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q"}}}))
	first, err := stream.Receive()
	require.NoError(t, err)
	require.EqualValues(t, 1, first.GetStarted().GetPartitions())
	for _, n := range []uint32{1, 3, 2, 3, 4} { // one that is not more is not told
		s.grow(n)
		if n == 3 && first.GetPartitions() == 3 || n < 3 {
			continue
		}
		first, err = stream.Receive()
		require.NoError(t, err)
		require.Equal(t, n, first.GetPartitions())
	}
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

// TestConsumeMoved ends the stream with the new home's address.
func TestConsumeMoved(t *testing.T) {
	s := newShelf(0)
	stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q"}}}))
	_, err := stream.Receive()
	require.NoError(t, err)
	s.mu.Lock()
	s.moved = true
	s.mu.Unlock()
	s.cond.Broadcast()
	_, err = stream.Receive()
	require.Equal(t, "elsewhere:1", wireDetail(t, err).HomeApi)
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

func TestConsumeRefusesBadStart(t *testing.T) {
	c := streamClient(t, Options{Backend: newShelf(0)})
	for name, req := range map[string]*tierqv1.ConsumeRequest{
		"not start":  {Request: &tierqv1.ConsumeRequest_Drain{Drain: true}},
		"big window": {Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 1 << 20}}},
	} {
		t.Run(name, func(t *testing.T) {
			stream := c.Consume(t.Context())
			require.NoError(t, stream.Send(req))
			_, err := stream.Receive()
			require.Equal(t, uint32(code.InvalidArgument), wireDetail(t, err).Code)
			_ = stream.CloseRequest()
			_ = stream.CloseResponse()
		})
	}
}

// lateSettle answers settles only after the receive that runs beside them has failed.
type lateSettle struct {
	*shelf
	failed chan struct{}
}

func (l *lateSettle) Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	ds, epoch, err := l.shelf.Receive(ctx, r)
	if err != nil {
		close(l.failed)
	}
	return ds, epoch, err
}

func (l *lateSettle) Settle(ctx context.Context, r Settle) ([]SettleResult, error) {
	<-l.failed
	return l.shelf.Settle(ctx, r)
}

// heldSettle answers no settle before all are there.
type heldSettle struct {
	*shelf
	came chan bool // each one's Patient
	free chan struct{}
}

func (h *heldSettle) Settle(ctx context.Context, r Settle) ([]SettleResult, error) {
	h.came <- r.Patient
	<-h.free
	return h.shelf.Settle(ctx, r)
}

// TestConsumePatience: a patient settle is one at the backend too, but no more of a stream than leave room for what comes behind them.
func TestConsumePatience(t *testing.T) {
	h := &heldSettle{newShelf(settlePipeline), make(chan bool, settlePipeline), make(chan struct{})}
	stream := streamClient(t, Options{Backend: h}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: settlePipeline}}}))
	var receipts []string
	for len(receipts) < settlePipeline {
		resp, err := stream.Receive()
		require.NoError(t, err)
		for _, m := range resp.GetMessages().GetMessages() {
			receipts = append(receipts, m.GetReceipt())
		}
	}
	for i, r := range receipts {
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: uint64(i), Kind: "ack", Receipts: []string{r}, Patient: i > 0}}}))
	}
	patient := 0
	for range receipts {
		if <-h.came {
			patient++
		}
	}
	close(h.free)
	require.Equal(t, settlePipeline/2-1, patient, "the first does not say so")
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

// TestConsumeEndsBesideSettles ends streams while their settles are in flight: those find the stream finished.
func TestConsumeEndsBesideSettles(t *testing.T) {
	for range 50 {
		s := &lateSettle{newShelf(8), make(chan struct{})}
		stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 16}}}))
		_, err := stream.Receive()
		require.NoError(t, err)
		resp, err := stream.Receive()
		require.NoError(t, err)
		for i, m := range resp.GetMessages().GetMessages() {
			require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: uint64(i), Kind: "ack", Receipts: []string{m.GetReceipt()}}}}))
		}
		s.mu.Lock()
		s.moved = true
		s.mu.Unlock()
		s.cond.Broadcast()
		for err == nil {
			_, err = stream.Receive()
		}
		require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
	}
}

// TestConsumeResized pauses a stream, and opens its window again.
func TestConsumeResized(t *testing.T) {
	s := newShelf(100)
	stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
	send := func(r *tierqv1.ConsumeRequest) { require.NoError(t, stream.Send(r)) }
	window := func(n uint32) {
		send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Window{Window: &tierqv1.ConsumeWindow{Messages: n}}})
	}
	var receipts []string
	receive := func(n int) {
		t.Helper()
		for len(receipts) < n {
			resp, err := stream.Receive()
			require.NoError(t, err)
			for _, m := range resp.GetMessages().GetMessages() {
				receipts = append(receipts, m.GetReceipt())
			}
		}
		require.Len(t, receipts, n)
	}
	send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 2}}})
	receive(2)
	window(5)
	receive(5)
	window(0)
	send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: 1, Kind: "ack", Receipts: receipts}}})
	for {
		resp, err := stream.Receive()
		require.NoError(t, err)
		require.Nil(t, resp.GetMessages(), "a window of 0 is a pause")
		if resp.GetSettled() != nil {
			break
		}
	}
	window(3)
	receive(8)
	window(1 << 20)
	_, err := stream.Receive()
	require.Equal(t, uint32(code.InvalidArgument), wireDetail(t, err).Code)
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

func consume(t *testing.T, b Backend, window uint32) *connect.BidiStreamForClient[tierqv1.ConsumeRequest, tierqv1.ConsumeResponse] {
	t.Helper()
	stream := streamClient(t, Options{Backend: b}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: window}}}))
	_, err := stream.Receive()
	require.NoError(t, err)
	return stream
}

// TestConsumeOutlastsPauses: a paused group, or one that is out of credit, ends no stream; a lost leader does.
func TestConsumeOutlastsPauses(t *testing.T) {
	s := newShelf(1)
	s.refusals = []*code.Error{code.New(code.GroupPaused, ""), code.New(code.ConsumerLimit, "")}
	stream := consume(t, s, 8)
	resp, err := stream.Receive()
	require.NoError(t, err)
	require.Len(t, resp.GetMessages().GetMessages(), 1)
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))

	s = newShelf(1)
	s.refusals = []*code.Error{code.New(code.NoLeader, "")}
	stream = consume(t, s, 8)
	_, err = stream.Receive()
	require.Equal(t, uint32(code.NoLeader), wireDetail(t, err).Code)
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

// parked is a shelf whose receives hand out what there is even when their context has ended meanwhile.
type parked struct {
	*shelf
	waiting chan struct{}
}

func (p *parked) Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	p.mu.Lock()
	empty := p.next == p.n
	p.mu.Unlock()
	if empty {
		close(p.waiting)
		<-ctx.Done()
		p.mu.Lock()
		p.n++
		p.mu.Unlock()
		ctx = context.WithoutCancel(ctx)
	}
	return p.shelf.Receive(ctx, r)
}

// TestConsumeDrains: a drained stream hands out nothing more, gives back what came meanwhile, and still takes settles.
func TestConsumeDrains(t *testing.T) {
	s := &parked{newShelf(2), make(chan struct{})}
	stream := consume(t, s, 8)
	resp, err := stream.Receive()
	require.NoError(t, err)
	got := resp.GetMessages().GetMessages()
	require.Len(t, got, 2)
	<-s.waiting
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Drain{Drain: true}}))
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.Equal(s.released, []string{"r2"})
	}, 30*time.Second, time.Millisecond)
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: 1, Kind: "ack", Receipts: []string{got[0].GetReceipt()}}}}))
	resp, err = stream.Receive()
	require.NoError(t, err)
	require.EqualValues(t, 1, resp.GetSettled().GetId())
	require.NoError(t, stream.CloseRequest())
	_, err = stream.Receive()
	require.ErrorIs(t, err, io.EOF)
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Equal(t, []string{"r0"}, s.acked)
	require.Equal(t, []string{"r2", got[1].GetReceipt()}, s.released)
}

// A smaller window is in force when it is confirmed: what was handed out before is on its way, and nothing comes after it.
func TestConsumeWindowIsConfirmed(t *testing.T) {
	s := newShelf(100)
	stream := streamClient(t, Options{Backend: s}).Consume(t.Context())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 8}}}))
	first, err := stream.Receive()
	require.NoError(t, err)
	require.True(t, first.GetStarted().GetWindowed())
	require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Window{Window: &tierqv1.ConsumeWindow{Messages: 3, Id: 7}}}))
	var receipts []string
	var confirmed *tierqv1.ConsumeWindowed
	for confirmed == nil || uint64(len(receipts)) < confirmed.GetHanded() {
		resp, err := stream.Receive()
		require.NoError(t, err)
		for _, m := range resp.GetMessages().GetMessages() {
			receipts = append(receipts, m.GetReceipt())
		}
		if resp.GetWindowed() != nil {
			confirmed = resp.GetWindowed()
		}
	}
	require.EqualValues(t, 7, confirmed.GetId())
	out := max(len(receipts), 3)
	if len(receipts) < 3 { // the window came first
		for len(receipts) < 3 {
			resp, err := stream.Receive()
			require.NoError(t, err)
			for _, m := range resp.GetMessages().GetMessages() {
				receipts = append(receipts, m.GetReceipt())
			}
		}
	}
	require.Len(t, receipts, out)
	// One at a time is settled: nothing comes before fewer than three are out.
	for i, r := range receipts {
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: uint64(i + 1), Kind: "ack", Receipts: []string{r}}}}))
		for answered := false; !answered; {
			resp, err := stream.Receive()
			require.NoError(t, err)
			answered = resp.GetSettled() != nil
			if n := len(resp.GetMessages().GetMessages()); n > 0 {
				require.LessOrEqual(t, len(receipts)-i-1+n, 3)
			}
		}
		if len(receipts)-i-1 < 3 {
			break
		}
	}
	require.NoError(t, errors.Join(stream.CloseRequest(), stream.CloseResponse()))
}

// A message that was fetched under a larger window than the present one is given back, not sent.
func TestConsumeSurplusIsGivenBack(t *testing.T) {
	c := &consumer{window: 2, held: map[string]*heldMessage{}}
	held, surplus := c.hold([]Delivery{{Receipt: "a"}, {Receipt: "b"}, {Receipt: "c"}})
	require.Len(t, held, 2)
	require.Equal(t, []string{"c"}, surplus)
	require.Equal(t, []int{2, 2}, []int{c.out, int(c.handed)})
}

// A consumer that breaks off may have had as many messages as it has handlers, the oldest; a clean close gives all back.
func TestConsumeBreakOff(t *testing.T) {
	for handlers, want := range map[uint32][]string{0: nil, 2: {"r3", "r4", "r5"}, 9: nil} {
		s := newShelf(6)
		c, breakOff := breakableClient(t, Options{Backend: s})
		stream := c.Consume(t.Context())
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Start{Start: &tierqv1.ConsumeStart{Queue: "q", WindowMessages: 6, Handlers: handlers}}}))
		for got := 0; got < 6; {
			resp, err := stream.Receive()
			require.NoError(t, err)
			got += len(resp.GetMessages().GetMessages())
		}
		require.NoError(t, stream.Send(&tierqv1.ConsumeRequest{Request: &tierqv1.ConsumeRequest_Settle{Settle: &tierqv1.ConsumeSettle{Id: 1, Kind: "ack", Receipts: []string{"r0"}}}}))
		for settled := false; !settled; {
			resp, err := stream.Receive()
			require.NoError(t, err)
			settled = resp.GetSettled() != nil
		}
		breakOff()
		require.Eventually(t, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.unseen) >= len(want)
		}, 30*time.Second, time.Millisecond, "%d handlers", handlers)
		s.mu.Lock()
		require.Equal(t, want, s.unseen)
		require.Empty(t, s.released)
		s.mu.Unlock()
	}
}
