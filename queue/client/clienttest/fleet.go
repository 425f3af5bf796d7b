// Package clienttest is a fleet in memory that speaks tierq.v1 over real HTTP/2 on loopback, for tests of the client and
// of what is built on it. It has hosts that can be stopped, restarted on another port, and frozen, one state shared by
// all, and hooks that refuse calls or lose answers. It knows no disk, no Raft, and no time: leases end when a test says so.
package clienttest

import (
	"context"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// Fate is what a hook decides about one call.
type Fate struct {
	// Err refuses the call; nothing happens.
	Err *code.Error
	// LoseRequest breaks the stream before anything happens, LoseAnswer after the call took effect.
	LoseRequest bool
	LoseAnswer  bool
	// Moved says NOT_OWNER of the first so many receipts of a settle, which changes nothing about them.
	Moved int
	// Hold keeps the answer back until the channel is closed or the caller is gone.
	Hold <-chan struct{}
}

// Fleet is the shared state. Hosts are numbered from 1.
type Fleet struct {
	t testing.TB

	mu     sync.Mutex
	hosts  []*Host
	queues map[string]*queueState
	nextID uint64
	// Leader and Home are the hosts that lead every queue and are home to every group; a group made by CreateGroup with
	// a home keeps that.
	leader  uint64
	home    uint64
	epoch   uint64
	term    uint64
	lease   uint64
	changed chan struct{} // closed and replaced when messages or homes change
	hook    func(Call) Fate
	calls   map[string]int
	// Digests overrides ShardDigest's answer.
	digests []*tierqv1.ReplicaDigest
	// What the administrative calls answer, by the request's type.
	answers   map[reflect.Type]any
	strict    bool
	noStreams bool
	served    time.Duration
	noHints   bool // answers do not tell how many partitions there are
}

// Call describes a call to a hook.
type Call struct {
	Host      uint64
	Procedure string // for example "Publish"
	N         int    // the how manieth call of that procedure, from 1
	Publish   *tierqv1.PublishRequest
}

// Host is one server of the fleet.
type Host struct {
	ID   uint64
	Addr string
	f    *Fleet
	srv  *http.Server
	done chan struct{}
}

// New starts a fleet of n full hosts; host 1 leads and is home. The test's cleanup stops it.
func New(t testing.TB, n int) *Fleet {
	t.Helper()
	f := &Fleet{t: t, queues: map[string]*queueState{}, nextID: 2, leader: 1, home: 1, epoch: 1, term: 3, changed: make(chan struct{}), calls: map[string]int{}}
	for i := range n {
		h := &Host{ID: uint64(i + 1), f: f}
		f.hosts = append(f.hosts, h)
		h.start(t, "127.0.0.1:0")
	}
	t.Cleanup(func() {
		for i := range f.hosts {
			f.Stop(uint64(i + 1))
		}
	})
	return f
}

func (h *Host) start(t testing.TB, addr string) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	v := &view{h: h}
	opt := connect.WithInterceptors(&interceptor{h})
	mux.Handle(tierqv1connect.NewQueueServiceHandler(v, opt))
	mux.Handle(tierqv1connect.NewGroupServiceHandler(v, opt))
	mux.Handle(tierqv1connect.NewStatusServiceHandler(v, opt))
	mux.Handle(tierqv1connect.NewStreamServiceHandler(v, opt))
	mux.Handle(tierqv1connect.NewAdminServiceHandler(adminView{h.f}, opt))
	mux.Handle(tierqv1connect.NewFleetServiceHandler(hostsView{h.f}, opt))
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: mux, Protocols: p}
	done := make(chan struct{})
	h.f.mu.Lock()
	h.Addr, h.srv, h.done = ln.Addr().String(), srv, done
	h.f.mu.Unlock()
	go func() {
		defer close(done)
		_ = srv.Serve(ln)
	}()
}

// Stop kills a host: its connections break.
func (f *Fleet) Stop(host uint64) {
	f.mu.Lock()
	h := f.hosts[host-1]
	srv, done := h.srv, h.done
	h.srv = nil
	f.mu.Unlock()
	if srv != nil {
		_ = srv.Close()
		<-done
	}
}

// Restart starts a stopped host on another port, or on addr if that is not empty.
func (f *Fleet) Restart(host uint64, addr string) {
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	f.hosts[host-1].start(f.t, addr)
}

// Addr returns a host's API address.
func (f *Fleet) Addr(host uint64) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hosts[host-1].Addr
}

// Addrs returns all API addresses.
func (f *Fleet) Addrs() []string {
	var out []string
	for i := range f.hosts {
		out = append(out, f.Addr(uint64(i+1)))
	}
	return out
}

// SetLeader moves the leadership of every queue; host 0: nobody leads.
func (f *Fleet) SetLeader(host uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leader = host
	f.term++
}

// SetHome makes host the home of every group, under a new epoch.
func (f *Fleet) SetHome(host uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.home = host
	f.epoch++
	for _, q := range f.queues {
		for _, part := range q.parts {
			part.home = 0
			for _, g := range part.groups {
				g.expireAll()
			}
		}
	}
	f.wakeLocked()
}

// SetPartitionHome makes host the home of every group of one partition, under a new epoch.
func (f *Fleet) SetPartitionHome(queue string, p uint32, host uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	part := f.queues[queue].parts[p]
	part.home = host
	part.moves++
	for _, g := range part.groups {
		g.expireAll()
	}
	f.wakeLocked()
}

// SetPartitionLeader moves the leadership of one partition.
func (f *Fleet) SetPartitionLeader(queue string, p uint32, host uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queues[queue].parts[p].leader = host
}

// SetStrictSequence makes every queue demand contiguous seqs, as `ordering: key` does.
func (f *Fleet) SetStrictSequence(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.strict = on
}

// SetHook installs a hook that is asked before every call; nil removes it.
func (f *Fleet) SetHook(h func(Call) Fate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = h
}

// SetDigests overrides what ShardDigest answers.
func (f *Fleet) SetDigests(ds []*tierqv1.ReplicaDigest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.digests = ds
}

// Calls returns how often a procedure was called on all hosts together.
func (f *Fleet) Calls(procedure string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[procedure]
}

// Bodies returns the stored bodies of a queue in address order, partition by partition.
func (f *Fleet) Bodies(queue string) []string {
	var out []string
	for _, list := range f.PartitionBodies(queue) {
		out = append(out, list...)
	}
	return out
}

// PartitionBodies returns the stored bodies of each partition in address order.
func (f *Fleet) PartitionBodies(queue string) [][]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queues[queue]
	if q == nil {
		return nil
	}
	out := make([][]string, len(q.parts))
	for i, part := range q.parts {
		for _, m := range part.messages {
			out[i] = append(out[i], string(m.Body))
		}
	}
	return out
}

// groupParts returns a group in every partition.
func (f *Fleet) groupParts(queue, group string) []*groupState {
	var out []*groupState
	if q := f.queues[queue]; q != nil {
		for _, part := range q.parts {
			if g := part.groups[group]; g != nil {
				out = append(out, g)
			}
		}
	}
	return out
}

// Waiting returns how many receives are parked.
func (f *Fleet) Waiting(queue, group string) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := uint64(0)
	for _, g := range f.groupParts(queue, group) {
		n += g.waiting
	}
	return n
}

// Outstanding returns how many messages of a group are leased, and how many are acked.
func (f *Fleet) Outstanding(queue, group string) (leased, acked int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range f.groupParts(queue, group) {
		leased, acked = leased+len(g.leases), acked+len(g.acked)
	}
	return leased, acked
}

// MostLeased returns the greatest number of messages of a group that were leased at once in one partition.
func (f *Fleet) MostLeased(queue, group string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	most := 0
	for _, g := range f.groupParts(queue, group) {
		most = max(most, g.most)
	}
	return most
}

// Leased says whether a receipt names a lease of one of a queue's partitions that has not ended.
func (f *Fleet) Leased(queue, group string, partition uint32, receipt string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queues[queue].parts[partition]
	_, c := f.checkLocked(q, q.groups[group], receipt)
	return c == code.OK
}

// ExpireLeases ends all leases of a group.
func (f *Fleet) ExpireLeases(queue, group string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range f.groupParts(queue, group) {
		g.expireAll()
	}
	f.wakeLocked()
}

// Kill makes dead letters of messages after five failures.
func (f *Fleet) Kill(queue, group, reason string, addresses ...uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queues[queue]
	for _, a := range addresses {
		q.groups[group].kill(q.messages[a-1], 5, reason)
	}
}

func (f *Fleet) wakeLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *Fleet) apiLocked(host uint64) string {
	if host == 0 || int(host) > len(f.hosts) {
		return ""
	}
	return f.hosts[host-1].Addr
}

// interceptor asks the hook.
type interceptor struct{ h *Host }

func (i *interceptor) WrapStreamingClient(n connect.StreamingClientFunc) connect.StreamingClientFunc {
	return n
}
func (i *interceptor) WrapStreamingHandler(n connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return n
}
func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		fate := i.h.f.fateOf(i.h, req)
		if fate.LoseRequest {
			panic(http.ErrAbortHandler)
		}
		if fate.Err != nil {
			return nil, Refusal(fate.Err)
		}
		if fate.Moved > 0 {
			takeReceipts(req, fate.Moved)
		}
		res, err := next(ctx, req)
		if fate.Moved > 0 && err == nil {
			tellMoved(res, fate.Moved)
		}
		if fate.Hold != nil {
			select {
			case <-fate.Hold:
			case <-ctx.Done():
			}
		}
		if fate.LoseAnswer {
			panic(http.ErrAbortHandler)
		}
		return res, err
	}
}

func (f *Fleet) fateOf(h *Host, req connect.AnyRequest) Fate {
	proc := req.Spec().Procedure
	c := Call{Procedure: proc[strings.LastIndexByte(proc, '/')+1:]}
	c.Publish, _ = req.Any().(*tierqv1.PublishRequest)
	return f.ask(h, c)
}

// ask counts a call and asks the hook.
func (f *Fleet) ask(h *Host, c Call) Fate {
	f.mu.Lock()
	f.calls[c.Procedure]++
	c.Host, c.N = h.ID, f.calls[c.Procedure]
	hook := f.hook
	f.mu.Unlock()
	if hook == nil {
		return Fate{}
	}
	return hook(c)
}

// Refusal makes the error that a host answers with.
func Refusal(e *code.Error) error {
	ce := connect.NewError(connect.CodeFailedPrecondition, e)
	effect := tierqv1.Effect(e.Effect)
	d, err := connect.NewErrorDetail(&tierqv1.ErrorDetail{
		Code: uint32(e.Code), Name: e.Code.String(), Effect: effect, Text: e.Text, HomeHost: e.HomeHost, HomeApi: e.HomeAPI,
		Epoch: e.Epoch, LeaderHost: e.LeaderHost, LeaderApi: e.LeaderAPI, RetryAfterMs: e.RetryAfterMs,
	})
	if err == nil {
		ce.AddDetail(d)
	}
	return ce
}
