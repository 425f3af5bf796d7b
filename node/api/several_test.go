package api

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// parted is one host of a fleet whose queue q has four partitions, shards 10 to 13. It holds and is home to some of them;
// for the others it names the other host.
type parted struct {
	Backend
	self, other uint64
	here        map[uint32]bool

	mu       sync.Mutex
	stored   map[uint32][]string
	ready    map[uint32]int // messages to hand out
	settled  map[uint32][]string
	released []string
	refuse   map[uint32]*code.Error
	// late partitions let a receive that does not wait, wait: for ever, or until so many of them have been asked
	late     map[uint32]int
	looking  int           // looks at late partitions so far
	together chan struct{} // closed: they are enough
	// leaderless partitions refuse a long poll at its end
	leaderless map[uint32]bool
	arrive     chan struct{} // closed: something is ready
}

func newParted(self, other uint64, here ...uint32) *parted {
	p := &parted{
		self: self, other: other, here: map[uint32]bool{}, stored: map[uint32][]string{}, ready: map[uint32]int{}, settled: map[uint32][]string{},
		refuse: map[uint32]*code.Error{}, arrive: make(chan struct{}), together: make(chan struct{}),
	}
	for _, n := range here {
		p.here[n] = true
	}
	return p
}

func (p *parted) PartitionCount(context.Context, string) (uint32, <-chan struct{}) { return 4, nil }

func (p *parted) Fleet() Fleet { return Fleet{Self: p.self} }

func (p *parted) info() QueueInfo {
	q := QueueInfo{Name: "q", ID: 7}
	for n := range uint32(4) {
		q.Partitions = append(q.Partitions, PartitionInfo{Number: n, Shard: 10 + uint64(n)})
	}
	return q
}

// find is how every method begins.
func (p *parted) find(n Partition) (uint32, error) {
	if n == nil {
		return 0, &SeveralError{p.info()}
	}
	if e := p.refuse[*n]; e != nil {
		return *n, e
	}
	if !p.here[*n] {
		return *n, &ElsewhereError{Host: p.other, Cause: &code.Error{Code: code.NotReplica, Effect: code.EffectNone, LeaderHost: p.other}}
	}
	return *n, nil
}

func (p *parted) Publish(_ context.Context, r Publish) (PublishReply, error) {
	n, err := p.find(r.Partition)
	if err != nil {
		return PublishReply{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	reply := PublishReply{Shard: 10 + uint64(n), Index: 100 + queue.Index(n), DataCopies: n%2 + 1, Result: queue.PublishResult{Code: code.OK}}
	for _, m := range r.Publish.Messages {
		p.stored[n] = append(p.stored[n], string(m.Body))
		reply.Result.Messages = append(reply.Result.Messages, queue.MessageResult{Code: code.OK, Address: queue.Address(len(p.stored[n]))})
	}
	return reply, nil
}

func receiptOf(partition uint32, i int) string {
	raw := binary.BigEndian.AppendUint64([]byte{1}, 10+uint64(partition))
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(raw, "receipt %3d", i))
}

func (p *parted) Receive(ctx context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	n, err := p.find(r.Partition)
	if _, ok := err.(*ElsewhereError); ok {
		return nil, 0, &code.Error{Code: code.NotOwner, Effect: code.EffectNone, HomeHost: p.other, HomeAPI: fmt.Sprintf("host-%d:1", p.other), Epoch: 3}
	}
	if err != nil {
		return nil, 0, err
	}
	if late := p.late[n]; late > 0 && r.Wait == 0 && !p.meet(ctx, late) {
		return nil, 0, &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone}
	}
	for waited := false; ; waited = true {
		p.mu.Lock()
		var out []Delivery
		for ; p.ready[n] > 0 && len(out) < r.Max; p.ready[n]-- {
			out = append(out, Delivery{Receipt: receiptOf(n, p.ready[n]), Message: queue.StoredMessage{Address: queue.Address(p.ready[n])}})
		}
		p.mu.Unlock()
		if waited && len(out) == 0 && p.leaderless[n] {
			return nil, 0, &code.Error{Code: code.NoLeader, Effect: code.EffectNone}
		}
		if len(out) > 0 || waited || r.Wait == 0 {
			return out, 5, nil
		}
		select {
		case <-p.arrive:
		case <-ctx.Done():
			return nil, 0, &code.Error{Code: code.DeadlineExceeded, Effect: code.EffectNone}
		case <-time.After(r.Wait):
		}
	}
}

// meet waits until so many are in it, or ctx ends.
func (p *parted) meet(ctx context.Context, n int) bool {
	p.mu.Lock()
	if p.looking++; p.looking == n {
		close(p.together)
	}
	p.mu.Unlock()
	select {
	case <-p.together:
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *parted) Settle(_ context.Context, r Settle) ([]SettleResult, error) {
	n, err := p.find(r.Partition)
	if _, ok := err.(*ElsewhereError); ok {
		return nil, &code.Error{Code: code.NotOwner, Effect: code.EffectNone, HomeHost: p.other, HomeAPI: "x:1"}
	}
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.Kind == SettleRelease {
		p.released = append(p.released, r.Receipts...)
	} else {
		p.settled[n] = append(p.settled[n], r.Receipts...)
	}
	out := make([]SettleResult, len(r.Receipts))
	for i := range out {
		out[i].Address = queue.Address(n) + 1
	}
	return out, nil
}

func (p *parted) DeleteGroup(_ context.Context, _ string, n Partition, _ string, _ queue.GroupID) error {
	_, err := p.find(n)
	return err
}

func (p *parted) GroupPartitions(context.Context, string) (Partitions, error) {
	return Partitions{Shards: []uint64{10, 11, 12, 13}, Open: 4}, nil
}

// twoHosts serves partitions 0 and 1 at one host and 2 and 3 at another, which forward to each other, and returns clients of
// the first.
func twoHosts(t *testing.T) (one, two *parted, q tierqv1connect.QueueServiceClient, g tierqv1connect.GroupServiceClient) {
	one, two = newParted(1, 2, 0, 1), newParted(2, 1, 2, 3)
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	peer := serve(t, Options{Backend: two})
	front := serve(t, Options{Backend: one, Forward: func(uint64) (*http.Client, string) { return &http.Client{Transport: tr}, peer.URL }})
	hc := &http.Client{Transport: tr}
	return one, two, tierqv1connect.NewQueueServiceClient(hc, front.URL), tierqv1connect.NewGroupServiceClient(hc, front.URL)
}

func batch(keys ...string) *tierqv1.PublishRequest {
	m := &tierqv1.PublishRequest{Queue: "q"}
	for i, k := range keys {
		m.Messages = append(m.Messages, &tierqv1.OutMessage{Body: fmt.Append(nil, i), Key: []byte(k)})
	}
	return m
}

func publishOn(t *testing.T, c tierqv1connect.QueueServiceClient, m *tierqv1.PublishRequest) *tierqv1.PublishResponse {
	t.Helper()
	resp, err := c.Publish(t.Context(), connect.NewRequest(m))
	require.NoError(t, err)
	return resp.Msg
}

// A batch is split by key, forwarded where its parts belong, and answered in its order; without keys it stays whole.
func TestPublishIsSplit(t *testing.T) {
	one, two, c, _ := twoHosts(t)
	keys := []string{"a", "b", "customer-1", "a", "customer-2", "b"} // of partitions 3 0 2 3 3 0
	resp := publishOn(t, c, batch(keys...))
	require.Equal(t, map[uint32][]string{0: {"1", "5"}}, one.stored)
	require.Equal(t, map[uint32][]string{2: {"2"}, 3: {"0", "3", "4"}}, two.stored)
	for i, want := range []struct{ p, a int }{{3, 1}, {0, 1}, {2, 1}, {3, 2}, {3, 3}, {0, 2}} {
		r := resp.Results[i]
		require.Equal(t, []int{want.p, want.a}, []int{int(r.Partition), int(r.Address)}, "message %d", i)
	}
	require.Len(t, resp.Parts, 3)
	require.EqualValues(t, 1, resp.DataCopies, "the least of the parts")

	first := publishOn(t, c, batch("", "", "")).Results[0].Partition
	for i := range uint32(8) {
		resp := publishOn(t, c, batch("", ""))
		require.Empty(t, resp.Parts[1:])
		require.Equal(t, (first+1+i)%4, resp.Results[0].Partition, "batches take turns")
		require.Equal(t, resp.Results[0].Partition, resp.Results[1].Partition)
	}
}

func TestPublishOverPartitionsRefused(t *testing.T) {
	one, two, c, _ := twoHosts(t)
	refused := func(m *tierqv1.PublishRequest, want code.Code) {
		t.Helper()
		_, err := c.Publish(t.Context(), connect.NewRequest(m))
		require.Equal(t, uint32(want), wireDetail(t, err).Code)
	}
	m := batch("a", "b")
	m.Atomic = true
	refused(m, code.AtomicPartitions)
	m = batch("a")
	m.ExpectedLastAddress = new(uint64)
	refused(m, code.InvalidArgument)
	m = batch("a")
	m.ProducerId, m.Messages[0].Seq = 9, 1
	refused(m, code.InvalidArgument)
	require.Empty(t, one.stored)
	require.Empty(t, two.stored)
	m.Partition = proto.Uint32(3)
	require.EqualValues(t, 3, publishOn(t, c, m).Results[0].Partition)
	m = batch("a", "a")
	m.Atomic = true
	require.EqualValues(t, 3, publishOn(t, c, m).Results[1].Partition)

	// One part is refused: its messages say so, the others are stored. All are: the call fails.
	one.refuse[0] = &code.Error{Code: code.QueueFull, Effect: code.EffectNone}
	resp := publishOn(t, c, batch("a", "b"))
	require.Zero(t, resp.Results[0].Code)
	require.Equal(t, "QUEUE_FULL", resp.Results[1].Name)
	refused(batch("b", "b"), code.QueueFull)
}

// A batch of which no part is known to be stored, and one may be, is of unknown outcome: whoever repeats what is told to have no effect
// would store that part twice.
func TestSplitPublishOfUnknownOutcome(t *testing.T) {
	none := &publishPart{request: &tierqv1.PublishRequest{}, places: []int{0}, err: &code.Error{Code: code.NoLeader, Effect: code.EffectNone}}
	maybe := &publishPart{request: &tierqv1.PublishRequest{}, places: []int{1}, err: code.Maybe(code.QuorumLost, nil, "")}
	for _, parts := range [][]*publishPart{{none, maybe}, {maybe, none}} {
		_, err := joinPublish(parts, 2)
		require.Equal(t, tierqv1.Effect_EFFECT_MAYBE, detailOf(err).GetEffect())
	}
	_, err := joinPublish([]*publishPart{none, none}, 2)
	require.Equal(t, tierqv1.Effect_EFFECT_NONE, detailOf(err).GetEffect())
}

// A receive serves what is at home here and names the other homes; what waits is answered by whichever comes first.
func TestReceiveFromAny(t *testing.T) {
	one, _, _, c := twoHosts(t)
	receive := func(m *tierqv1.ReceiveRequest) *tierqv1.ReceiveResponse {
		t.Helper()
		m.Queue, m.Group = "q", "g"
		resp, err := c.Receive(t.Context(), connect.NewRequest(m))
		require.NoError(t, err)
		return resp.Msg
	}
	one.ready[0], one.ready[1] = 3, 4
	got := receive(&tierqv1.ReceiveRequest{MaxMessages: 5})
	require.Len(t, got.Messages, 5)
	got = receive(&tierqv1.ReceiveRequest{MaxMessages: 50})
	require.Len(t, got.Messages, 2)
	require.Len(t, got.Elsewhere, 2)
	require.Equal(t, []uint32{2, 3}, []uint32{got.Elsewhere[0].Partition, got.Elsewhere[1].Partition})
	require.Equal(t, "host-2:1", got.Elsewhere[0].Api)
	require.EqualValues(t, 3, got.Elsewhere[0].Epoch)
	require.Empty(t, receive(&tierqv1.ReceiveRequest{WaitMs: proto.Uint32(0)}).Messages)

	// Both partitions get something while it waits: one is taken, and what the other handed out is given back.
	answer := make(chan *tierqv1.ReceiveResponse)
	go func() { answer <- receive(&tierqv1.ReceiveRequest{MaxMessages: 10, WaitMs: proto.Uint32(10_000)}) }()
	time.AfterFunc(20*time.Millisecond, func() {
		one.mu.Lock()
		one.ready[0], one.ready[1] = 2, 2
		one.mu.Unlock()
		close(one.arrive)
	})
	got = <-answer
	require.Len(t, got.Messages, 2)
	one.mu.Lock()
	require.Equal(t, 4, len(got.Messages)+len(one.released)+one.ready[0]+one.ready[1], "nothing is lost between them")
	one.mu.Unlock()

	one.here = nil
	_, err := c.Receive(t.Context(), connect.NewRequest(&tierqv1.ReceiveRequest{Queue: "q", Group: "g"}))
	require.Equal(t, uint32(code.NotOwner), wireDetail(t, err).Code)
	_, err = c.Receive(t.Context(), connect.NewRequest(&tierqv1.ReceiveRequest{Queue: "q", Group: "g", MinIndex: 4}))
	require.Equal(t, uint32(code.InvalidArgument), wireDetail(t, err).Code)
}

// never is more looks at late partitions than there are.
const never = 1000

// Partitions whose homes wait for a quorum hold up nobody that has something, and each other no longer than one of them takes.
func TestLateLooksSideBySide(t *testing.T) {
	one, _, _, c := twoHosts(t)
	one.here = map[uint32]bool{0: true, 1: true, 2: true, 3: true}
	one.late = map[uint32]int{0: never, 1: never, 3: never}
	one.ready[2] = 1
	m := &tierqv1.ReceiveRequest{Queue: "q", Group: "g", MaxMessages: 5, WaitMs: proto.Uint32(0)}
	for range 3 { // wherever it begins
		resp, err := c.Receive(t.Context(), connect.NewRequest(m))
		require.NoError(t, err)
		require.Len(t, resp.Msg.Messages, 1)
		one.ready[2] = 1
	}

	one, _, _, c = twoHosts(t)
	one.here = map[uint32]bool{0: true, 1: true, 2: true, 3: true}
	one.late = map[uint32]int{0: 4, 1: 4, 2: 4, 3: 4} // none answers before all four were asked
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := c.Receive(ctx, connect.NewRequest(m))
	require.NoError(t, err)
	require.Empty(t, resp.Msg.Messages)

	// All come with something at the end: as much as was asked for is kept.
	one.ready = map[uint32]int{0: 2, 1: 2, 2: 2, 3: 2}
	m.MaxMessages = 3
	resp, err = c.Receive(t.Context(), connect.NewRequest(m))
	require.NoError(t, err)
	one.mu.Lock()
	defer one.mu.Unlock()
	require.LessOrEqual(t, len(resp.Msg.Messages), 3)
	left := 0
	for _, n := range one.ready {
		left += n
	}
	require.Equal(t, 8, left+len(resp.Msg.Messages)+len(one.released))
}

// A wait that ends without a leader is told: of all that is served here as the refusal, of some of it as partitions elsewhere.
func TestReceiveFromAnyWithoutLeader(t *testing.T) {
	one, _, _, c := twoHosts(t)
	one.leaderless = map[uint32]bool{0: true, 1: true}
	m := &tierqv1.ReceiveRequest{Queue: "q", Group: "g", WaitMs: proto.Uint32(1)}
	_, err := c.Receive(t.Context(), connect.NewRequest(m))
	require.Equal(t, uint32(code.NoLeader), wireDetail(t, err).Code)
	require.Equal(t, tierqv1.Effect_EFFECT_NONE, wireDetail(t, err).Effect)
	one.leaderless = map[uint32]bool{1: true}
	resp, err := c.Receive(t.Context(), connect.NewRequest(m))
	require.NoError(t, err)
	require.Len(t, resp.Msg.Elsewhere, 3)
	require.EqualValues(t, 1, resp.Msg.Elsewhere[0].Partition)
}

// Receipts find their partitions, and the homes of those.
func TestSettleByReceipt(t *testing.T) {
	one, two, _, c := twoHosts(t)
	receipts := []string{receiptOf(3, 1), receiptOf(0, 1), "nonsense", receiptOf(1, 1), receiptOf(3, 2), receiptOf(0, 2)[:11] + "AAAAAAAAA"}
	resp, err := c.Ack(t.Context(), connect.NewRequest(&tierqv1.AckRequest{Queue: "q", Group: "g", Receipts: receipts}))
	require.NoError(t, err)
	var codes []string
	for _, r := range resp.Msg.Results {
		codes = append(codes, r.Name)
	}
	require.Equal(t, []string{"", "", "INVALID_RECEIPT", "", "", "INVALID_RECEIPT"}, codes)
	require.Equal(t, receipts[0:1], two.settled[3][:1])
	require.Equal(t, receipts[4], two.settled[3][1])
	require.Equal(t, []string{receipts[3]}, one.settled[1])
	_, err = c.Nack(t.Context(), connect.NewRequest(&tierqv1.NackRequest{Queue: "q", Group: "g", Receipts: []string{receiptOf(2, 9)}, DelayMs: proto.Uint64(5)}))
	require.NoError(t, err)
	require.Len(t, two.settled[2], 1)
	two.refuse[2] = &code.Error{Code: code.NoLeader, Effect: code.EffectNone}
	_, err = c.Ack(t.Context(), connect.NewRequest(&tierqv1.AckRequest{Queue: "q", Group: "g", Receipts: []string{receiptOf(2, 9)}}))
	require.Equal(t, uint32(code.NoLeader), wireDetail(t, err).Code, "one partition's refusal is the call's, which clients may repeat")
}

// A host without a replica takes another one for the home, which says who is: what it may not repeat goes on there, and no further.
func TestForwardedOnceMore(t *testing.T) {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	hosts, urls := map[uint64]*parted{1: newParted(1, 2), 2: newParted(2, 3), 3: newParted(3, 4, 0, 1, 2), 4: newParted(4, 1, 3)}, map[uint64]string{}
	for id := range uint64(3) {
		urls[id+2] = serve(t, Options{Backend: hosts[id+2]}).URL
	}
	hops := 0
	front := serve(t, Options{Backend: hosts[1], OnForward: func() { hops++ }, Forward: func(host uint64) (*http.Client, string) {
		return &http.Client{Transport: tr}, urls[host]
	}})
	groups := tierqv1connect.NewGroupServiceClient(&http.Client{Transport: tr}, front.URL)
	resp, err := groups.Ack(t.Context(), connect.NewRequest(&tierqv1.AckRequest{Queue: "q", Group: "g", Receipts: []string{receiptOf(1, 1)}}))
	require.NoError(t, err)
	require.Empty(t, resp.Msg.Results[0].Name)
	require.Equal(t, []string{receiptOf(1, 1)}, hosts[3].settled[1])
	require.Equal(t, 2, hops)
	m := batch("")
	m.Partition = proto.Uint32(2)
	publishOn(t, tierqv1connect.NewQueueServiceClient(&http.Client{Transport: tr}, front.URL), m)
	require.Len(t, hosts[3].stored[2], 1)
	require.Equal(t, 4, hops)
	_, err = groups.Ack(t.Context(), connect.NewRequest(&tierqv1.AckRequest{Queue: "q", Group: "g", Receipts: []string{receiptOf(3, 1)}}))
	require.Equal(t, uint32(code.NotOwner), wireDetail(t, err).Code)
	require.EqualValues(t, 4, wireDetail(t, err).HomeHost)
	_, err = groups.DeleteGroup(t.Context(), connect.NewRequest(&tierqv1.DeleteGroupRequest{Queue: "q", Name: "g", Partition: proto.Uint32(3)}))
	require.Equal(t, uint32(code.NotReplica), wireDetail(t, err).Code)
	require.Equal(t, 8, hops)
}

// A group that a call before has deleted from some partitions is deleted from the others.
func TestDeleteEverywhere(t *testing.T) {
	one, two, _, c := twoHosts(t)
	del := func() error {
		_, err := c.DeleteGroup(t.Context(), connect.NewRequest(&tierqv1.DeleteGroupRequest{Queue: "q", Name: "g"}))
		return err
	}
	unknown := &code.Error{Code: code.UnknownGroup, Effect: code.EffectNone}
	one.refuse[1], two.refuse[2] = unknown, unknown
	require.NoError(t, del())
	one.refuse[0], two.refuse[3] = unknown, unknown
	require.Equal(t, uint32(code.UnknownGroup), wireDetail(t, del()).Code)
	two.refuse[3] = &code.Error{Code: code.NoLeader, Effect: code.EffectNone}
	require.Contains(t, wireDetail(t, del()).Text, "leader")
}

// A walk goes on where it ended, whatever bounds it.
func TestWalk(t *testing.T) {
	const n = 3
	list := [n][]uint64{{1, 4, 9}, {}, {2, 3}}
	for limit := range uint64(7) {
		for page := uint64(1); page < 4; page++ {
			var got []string
			p, a, err := uint32(0), uint64(0), error(nil)
			for range 20 {
				p, a, err = walk(t.Context(), n, p, a, limit, func(p uint32, from, left uint64) (done, next uint64, err error) {
					for _, x := range list[p] {
						if x < from {
							continue
						}
						if done == page || limit > 0 && done == left {
							return done, x, nil
						}
						got = append(got, fmt.Sprint(p, "/", x))
						done++
					}
					return done, 0, nil
				})
				require.NoError(t, err)
				if a == 0 {
					break
				}
			}
			require.Equal(t, []string{"0/1", "0/4", "0/9", "2/2", "2/3"}, got, "limit %d page %d", limit, page)
		}
	}
	_, _, err := walk(t.Context(), n, 3, 0, 0, nil)
	require.Error(t, err)
	// An error behind the first partition is left for the next walk.
	p, a, err := walk(t.Context(), n, 0, 0, 0, func(p uint32, _, _ uint64) (uint64, uint64, error) {
		if p == 1 {
			return 0, 0, context.Canceled
		}
		return 1, 0, nil
	})
	require.NoError(t, err)
	require.Equal(t, []uint64{1, 1}, []uint64{uint64(p), a})
}

// delayedShelf has delayed messages in each partition, as (due, address).
type delayedShelf struct {
	Backend
	due [4][]queue.DelayedKey
}

func (d *delayedShelf) ListDelayed(_ context.Context, r ListDelayed) (DelayedPage, error) {
	if r.Partition == nil {
		return DelayedPage{}, &SeveralError{QueueInfo{Name: "q", Partitions: make([]PartitionInfo, 4)}}
	}
	page := DelayedPage{Total: uint64(len(d.due[*r.Partition]))}
	for _, k := range d.due[*r.Partition] {
		if k.VisibleAt < r.After.VisibleAt || k.VisibleAt == r.After.VisibleAt && k.Address <= r.After.Address {
			continue
		}
		if len(page.Messages) == r.Limit {
			page.More = true
			break
		}
		page.Messages = append(page.Messages, DelayedMessage{MessageHead: queue.MessageHead{Address: k.Address, VisibleAt: k.VisibleAt}})
		page.Next = k
	}
	return page, nil
}

// Delayed messages of all partitions come in one order, page by page, also where many are due at one time.
func TestDelayedOfAllPartitions(t *testing.T) {
	d := &delayedShelf{}
	var want []string
	for due := uint64(100); due < 110; due++ {
		for p := range d.due {
			for range (due + uint64(p)) % 4 {
				a := queue.Address(len(d.due[p]) + 1)
				d.due[p] = append(d.due[p], queue.DelayedKey{VisibleAt: queue.Stamp(due / 3), Address: a})
			}
		}
	}
	for due := queue.Stamp(33); due < 40; due++ {
		for p := range d.due {
			for _, k := range d.due[p] {
				if k.VisibleAt == due {
					want = append(want, fmt.Sprint(uint64(due), p, uint64(k.Address)))
				}
			}
		}
	}
	c := tierqv1connect.NewAdminServiceClient(http.DefaultClient, serve(t, Options{Backend: d}).URL)
	for _, limit := range []uint32{1, 2, 3, 7, 1000} {
		var got []string
		m := &tierqv1.ListDelayedRequest{Queue: "q", Limit: limit}
		for range 200 {
			resp, err := c.ListDelayed(t.Context(), connect.NewRequest(m))
			require.NoError(t, err)
			require.LessOrEqual(t, len(resp.Msg.Messages), int(limit))
			require.EqualValues(t, len(want), resp.Msg.Total)
			for _, x := range resp.Msg.Messages {
				got = append(got, fmt.Sprint(x.VisibleUnixMs, x.Partition, x.Address))
			}
			if m.After = resp.Msg.Next; m.After == nil {
				break
			}
		}
		require.Equal(t, want, got, "limit %d", limit)
	}
}
