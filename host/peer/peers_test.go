package peer

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/peer/peerv1"
	"github.com/tierq/tierq/queue/code"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 90 * time.Second

// testHost is a backend with settable answers.
type testHost struct {
	Backend
	*Peers
	id    uint64
	fleet atomic.Value // string
	wall  atomic.Int64 // added to the wall clock, ms
	low   atomic.Bool

	refusals atomic.Value // error
	lost     atomic.Uint64

	mu     sync.Mutex
	shards []ShardReport
	others []uint64
	view   []byte
	err    error
}

func (h *testHost) Identity() Identity {
	return Identity{HostID: h.id, Fleet: h.fleet.Load().(string), Members: []Member{{Replica: 1, HostID: 2, Birth: 1}}}
}

func (h *testHost) Hosts() []uint64 { return h.others }

func (h *testHost) LowSpace() bool     { return h.low.Load() }
func (h *testHost) ClockRefused() bool { return h.low.Load() }
func (h *testHost) Damaged() []DamagedReplica {
	if h.low.Load() {
		return []DamagedReplica{{Shard: 3, Replica: 4}}
	}
	return nil
}
func (h *testHost) Refused(err error)        { h.refusals.Store(err) }
func (h *testHost) ConnectionLost(id uint64) { h.lost.Store(id) }
func (h *testHost) Reports() ([]ShardReport, uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]ShardReport(nil), h.shards...), 5
}

func (h *testHost) report(shards ...ShardReport) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.shards = shards
}

func (h *testHost) CatalogAfter(ctx context.Context, version uint64) (uint64, []byte) {
	if version < 3 {
		return 3, h.view
	}
	<-ctx.Done()
	return version, nil
}

func (h *testHost) ReadCatalog(context.Context) (uint64, []byte, error) { return 0, nil, h.failure() }

func (h *testHost) ProposeCatalog(_ context.Context, command []byte) ([]byte, error) {
	return command, h.failure()
}

func (h *testHost) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

func (h *testHost) failure() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// newPair returns two hosts that know each other's address and belong to fleet "f".
func newPair(t *testing.T) (a, b *testHost) {
	t.Helper()
	return newPairWith(t, func(*Config) {})
}

func newPairWith(t *testing.T, adjust func(*Config)) (a, b *testHost) {
	t.Helper()
	hosts, began := make(map[uint64]*testHost), time.Now()
	for _, id := range []uint64{1, 2} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		h := &testHost{id: id, others: []uint64{3 - id}, view: []byte("view")}
		h.fleet.Store("f")
		cfg := Config{
			HostID: id, Listener: l, Backend: h, Logger: zap.NewNop(),
			Fleet: func() string { return h.fleet.Load().(string) },
			Address: func(id uint64) (string, bool) {
				other, ok := hosts[id]
				if !ok {
					return "", false
				}
				return other.Addr().String(), true
			},
			Interval: 10 * time.Millisecond, Silence: 300 * time.Millisecond, CommandLevel: 7,
			Boot: func() time.Duration { return time.Since(began) },
			Wall: func() time.Time { return time.Now().Add(time.Duration(h.wall.Load()) * time.Millisecond) },
		}
		adjust(&cfg)
		h.Peers = New(cfg)
		hosts[id] = h
	}
	t.Cleanup(func() {
		for _, h := range hosts {
			require.NoError(t, h.Close())
			require.NoError(t, h.Close(), "twice")
		}
	})
	return hosts[1], hosts[2]
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, patience, time.Millisecond, what)
}

func codeOf(t *testing.T, err error) *code.Error {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, FromConnect(err), &e)
	return e
}

func TestCatalogService(t *testing.T) {
	a, b := newPair(t)
	b.Start()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := a.Service(2)
	hello, err := a.HelloAt(ctx, 2, b.Addr().String())
	require.NoError(t, err)
	require.EqualValues(t, 2, hello.HostId)
	require.Equal(t, "f", hello.FleetId)
	require.Len(t, hello.Members, 1)
	_, err = a.HelloAt(ctx, 1, b.Addr().String())
	require.Equal(t, code.WrongFleet, codeOf(t, err).Code, "another host is at that address")

	w, err := s.WatchCatalog(ctx, connect.NewRequest(&peerv1.WatchCatalogRequest{AfterVersion: 1, WaitMs: 10_000}))
	require.NoError(t, err)
	require.EqualValues(t, 3, w.Msg.Version)
	require.Equal(t, "view", string(w.Msg.View))
	w, err = s.WatchCatalog(ctx, connect.NewRequest(&peerv1.WatchCatalogRequest{AfterVersion: 3, WaitMs: 1}))
	require.NoError(t, err)
	require.Empty(t, w.Msg.View)

	p, err := s.ProposeCatalog(ctx, connect.NewRequest(&peerv1.ProposeCatalogRequest{Command: []byte("c")}))
	require.NoError(t, err)
	require.Equal(t, "c", string(p.Msg.Result))
	want := &code.Error{Code: code.NotOwner, Effect: code.EffectMaybe, Text: "text", HomeHost: 1, HomeAPI: "h", Epoch: 2, LeaderHost: 3, LeaderAPI: "l", RetryAfterMs: 4}
	b.fail(want)
	_, err = s.ProposeCatalog(ctx, connect.NewRequest(&peerv1.ProposeCatalogRequest{}))
	require.Equal(t, want, FromConnect(err), "an error arrives whole")
	b.fail(errors.New("a secret of this host"))
	_, err = s.ReadCatalog(ctx, connect.NewRequest(&peerv1.ReadCatalogRequest{}))
	require.Equal(t, code.Internal, codeOf(t, err).Code)
	require.NotContains(t, err.Error(), "secret")
}

func TestStrangersAreRefused(t *testing.T) {
	a, b := newPair(t)
	b.Handle("/other/", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	b.Start()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	call := func() error {
		_, err := a.Service(2).ProposeCatalog(ctx, connect.NewRequest(&peerv1.ProposeCatalogRequest{}))
		return err
	}
	require.NoError(t, call())
	a.fleet.Store("g")
	e := codeOf(t, call())
	require.Equal(t, code.WrongFleet, e.Code)
	require.Contains(t, e.Text, "fleet f")
	require.Contains(t, e.Text, "fleet g")
	hello, err := a.HelloAt(ctx, 2, b.Addr().String())
	require.NoError(t, err, "anybody may ask")
	require.Equal(t, "f", hello.FleetId)
	a.fleet.Store("")
	require.Equal(t, code.Unavailable, codeOf(t, call()).Code, "the caller is of no fleet yet")
	a.fleet.Store("f")
	_, err = a.Service(9).ProposeCatalog(ctx, connect.NewRequest(&peerv1.ProposeCatalogRequest{}))
	require.Equal(t, code.UnknownHost, codeOf(t, err).Code)

	// Other packages' services are behind the same door.
	client, url := a.Client(2)
	resp, err := client.Get(url + "/other/x")
	require.NoError(t, err)
	require.Equal(t, http.StatusNoContent, resp.StatusCode)
	require.Equal(t, 2, resp.ProtoMajor)
	require.NoError(t, resp.Body.Close())
	resp, err = http.Post("http://"+b.Addr().String()+"/tierq.peer.v1.PeerService/Report", "application/json", strings.NewReader("{}"))
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.NotEqual(t, http.StatusOK, resp.StatusCode)
	require.Contains(t, string(body), "clients use the API address")
	http.DefaultClient.CloseIdleConnections()
}

func TestReports(t *testing.T) {
	a, b := newPair(t)
	alive, _ := a.Alive(2)
	require.False(t, alive, "never heard of")
	a.report(ShardReport{Shard: 4, Replica: 1, Applied: 9, Leader: 1, Term: 2}, ShardReport{Shard: 5, Replica: 2})
	b.wall.Store(60_000)
	a.Start()
	b.Start()
	eventually(t, "both are alive", func() bool {
		x, _ := a.Alive(2)
		y, _ := b.Alive(1)
		return x && y
	})
	eventually(t, "the report arrives", func() bool { r, ok := b.Reported(1, 4); return ok && r.Applied == 9 && r.Leader == 1 })
	require.EqualValues(t, 5, b.CatalogVersion(1))
	a.report(ShardReport{Shard: 4, Replica: 1, Applied: 10, Leader: 2, Term: 3})
	eventually(t, "a change arrives", func() bool { r, _ := b.Reported(1, 4); return r.Applied == 10 && r.Leader == 2 })
	_, ok := b.Reported(1, 5)
	require.False(t, ok, "what is gone is gone")
	eventually(t, "clocks are compared", func() bool {
		o := a.ClockOffsets()
		return len(o) == 1 && (o[0]-time.Minute).Abs() < time.Second
	})

	// A report that builds on one that was lost is not taken, and asks for all.
	take := func(r *peerv1.ReportRequest) bool {
		t.Helper()
		needFull, err := b.takeReport(r, "from", time.Now())
		require.NoError(t, err)
		return needFull
	}
	require.True(t, take(&peerv1.ReportRequest{HostId: 7, ProcessId: 1, Sequence: 3}))
	require.False(t, take(&peerv1.ReportRequest{HostId: 7, ProcessId: 1, Sequence: 4, Full: true, Shards: []*peerv1.ShardReport{{ShardId: 8}}}))
	require.False(t, take(&peerv1.ReportRequest{HostId: 7, ProcessId: 1, Sequence: 5}))
	require.True(t, take(&peerv1.ReportRequest{HostId: 7, ProcessId: 1, Sequence: 7}))
	require.True(t, take(&peerv1.ReportRequest{HostId: 7, ProcessId: 2, Sequence: 8}))
	_, ok = b.Reported(7, 8)
	require.True(t, ok)

	require.True(t, take(&peerv1.ReportRequest{HostId: 9, Sequence: 1, Shards: []*peerv1.ShardReport{{ShardId: 8}}}), "it builds on nothing")
	_, err := a.Service(2).Report(t.Context(), connect.NewRequest(&peerv1.ReportRequest{HostId: 8, ProcessId: 1, Sequence: 1, Full: true}))
	require.Equal(t, code.WrongFleet, codeOf(t, err).Code, "a host speaks for itself only")
	alive, _ = b.Alive(8)
	require.False(t, alive)

	require.NoError(t, b.Close())
	eventually(t, "the silence is noticed", func() bool { alive, since := a.Alive(2); return !alive && since >= 300*time.Millisecond })
	require.Empty(t, a.ClockOffsets(), "a silent host's clock does not count")
	_, err = a.Service(2).ReadCatalog(context.Background(), connect.NewRequest(&peerv1.ReadCatalogRequest{}))
	e := codeOf(t, err)
	require.Equal(t, code.Unavailable, e.Code)
	require.Equal(t, code.EffectNone, e.Effect, "nothing was sent")
}

// TestCloseEndsHandlers: Close waits for handlers, which see their context end.
func TestCloseEndsHandlers(t *testing.T) {
	a, b := newPair(t)
	b.Start()
	entered := make(chan struct{})
	var left atomic.Bool
	b.Handle("/hang", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done()
		left.Store(true)
	}))
	client, url := a.Client(2)
	done := make(chan error, 1)
	go func() {
		resp, err := client.Get(url + "/hang")
		if err == nil {
			err = resp.Body.Close()
		}
		done <- err
	}()
	<-entered
	require.NoError(t, b.Close())
	require.True(t, left.Load())
	<-done
}

// TestTwins: of two processes that report as one host the one that came later is refused, whoever reports when; a host that is started again is not.
func TestTwins(t *testing.T) {
	a, b := newPair(t)
	a.Start()
	b.Start()
	tell := func(process uint64) error {
		_, err := b.takeReport(&peerv1.ReportRequest{HostId: 7, ProcessId: process, Full: true}, "addr", time.Now())
		return err
	}
	for _, process := range []uint64{1, 1, 2, 1, 1, 2, 3, 2} { // starts, with reports that were under way
		require.NoError(t, tell(process))
	}
	other, from := b.otherProcess(7, 9)
	require.EqualValues(t, 3, other)
	require.Equal(t, "addr", from)
	other, _ = b.otherProcess(7, 3)
	require.Zero(t, other)
	for range 2 {
		require.NoError(t, tell(4)) // a copy
		require.NoError(t, tell(3))
	}
	require.NoError(t, tell(4))
	require.NoError(t, tell(3))
	require.Equal(t, code.HostRefused, codeOf(t, tell(4)).Code)
	require.ErrorContains(t, tell(4), "host 7 runs twice")
	require.NoError(t, tell(3))
	require.NoError(t, tell(5), "a new start")

	// A host that is told so is told by its backend, too.
	eventually(t, "they report", func() bool { ok, _ := b.Alive(1); return ok })
	b.Peers.mu.Lock()
	b.Peers.others[1].twins.refused, b.Peers.others[1].twins.present = a.processID, 99
	b.Peers.mu.Unlock()
	eventually(t, "it is told", func() bool { return a.refusals.Load() != nil })
	require.Equal(t, code.HostRefused, codeOf(t, a.refusals.Load().(error)).Code)
}
