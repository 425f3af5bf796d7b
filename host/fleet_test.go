package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/host/freeport"
)

// patience bounds every wait for something that must happen.
const patience = 90 * time.Second

// testFleet is several hosts in this process, on loopback.
type testFleet struct {
	t           *testing.T
	dir         string
	mu          sync.Mutex // guards hosts where a test says so
	specs       []HostSpec
	joined      []HostSpec // with a token, later
	hosts       map[uint64]*RaftHost
	tune        func(*Config)   // may be nil
	beforeStart func(*RaftHost) // called before a host starts; may be nil
}

// newTestFleet lists full hosts first and witness hosts behind them, and starts none.
func newTestFleet(t *testing.T, full, witnesses int) *testFleet {
	t.Helper()
	if testing.Short() {
		t.Skip("starts several hosts")
	}
	t.Parallel()
	f := &testFleet{t: t, dir: t.TempDir(), hosts: make(map[uint64]*RaftHost)}
	for i := range full + witnesses {
		spec := HostSpec{
			ID: uint64(i + 1), Role: catalog.HostFull,
			RaftAddr: freeport.For(t), PeerAddr: freeport.For(t), ClientAddr: fmt.Sprintf("client-%d:1", i+1),
			Domain: fmt.Sprintf("rack-%d", i+1),
		}
		if i >= full {
			spec.Role, spec.ClientAddr = catalog.HostWitness, ""
		}
		f.specs = append(f.specs, spec)
	}
	t.Cleanup(func() {
		for id := range f.hosts {
			f.stop(id)
		}
	})
	return f
}

func (f *testFleet) config(id uint64) Config {
	logger := zap.NewNop()
	if os.Getenv("TIERQ_TEST_LOG") != "" {
		logger, _ = zap.NewDevelopment()
		logger = logger.With(zap.Uint64("host", id))
	}
	c := Config{
		HostID: id, Hosts: f.specs, DataDir: filepath.Join(f.dir, fmt.Sprintf("host-%d", id)), Logger: logger,
		RTT: 10 * time.Millisecond, ElectionTicks: 20, HeartbeatTicks: 2,
		ReconcileInterval: 200 * time.Millisecond, ReportInterval: 50 * time.Millisecond, Silence: 500 * time.Millisecond,
		Installer: wholeStates{},
	}
	if f.tune != nil {
		f.tune(&c)
	}
	return c
}

func (f *testFleet) start(ids ...uint64) {
	f.t.Helper()
	for _, id := range ids {
		h, err := Open(f.config(id))
		require.NoError(f.t, err)
		f.hosts[id] = h
		if f.beforeStart != nil {
			f.beforeStart(h)
		}
		h.Start()
	}
}

// startAll starts every host and waits until all are registered.
func (f *testFleet) startAll() {
	f.t.Helper()
	for _, spec := range f.specs {
		f.start(spec.ID)
	}
	f.ready()
}

func (f *testFleet) ready() {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, h := range f.hosts {
		require.NoError(f.t, h.AwaitReady(ctx), "host %d", h.HostID())
	}
}

func (f *testFleet) stop(id uint64) {
	f.t.Helper()
	if h, ok := f.hosts[id]; ok {
		delete(f.hosts, id)
		require.NoError(f.t, h.Close())
	}
}

func (f *testFleet) stopAll() {
	f.t.Helper()
	for _, spec := range f.specs {
		f.stop(spec.ID)
	}
}

// eventually waits for a state.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, patience, 5*time.Millisecond, what)
}

// members waits until every replica of a shard is started and, if it is not initial, a member.
func (f *testFleet) settled(shard uint64) {
	f.t.Helper()
	for _, h := range f.hosts {
		eventually(f.t, fmt.Sprintf("shard %d is settled as host %d sees it", shard, h.HostID()), func() bool {
			p, ok := h.Catalog().Placement(shard)
			if !ok {
				return false
			}
			for _, r := range p.Replicas {
				if r.State != catalog.ReplicaStarted || r.Birth != catalog.BirthInitial && !r.Member {
					return false
				}
			}
			return true
		})
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFleetForms(t *testing.T) {
	for _, layout := range []struct{ full, witnesses, members int }{{2, 1, 3}, {3, 0, 3}, {3, 2, 3}, {2, 0, 2}} {
		t.Run(fmt.Sprintf("%d+%d", layout.full, layout.witnesses), func(t *testing.T) {
			f := newTestFleet(t, layout.full, layout.witnesses)
			f.startAll()
			f.settled(catalog.ShardID)
			fleet := f.hosts[1].Fleet()
			require.NotZero(t, fleet)
			for _, h := range f.hosts {
				require.Equal(t, fleet, h.Fleet())
				eventually(t, "every host knows all hosts", func() bool { return len(h.Catalog().Hosts()) == len(f.specs) })
				p, ok := h.Catalog().Placement(catalog.ShardID)
				require.True(t, ok)
				require.Len(t, p.Replicas, layout.members)
				require.Equal(t, f.hosts[1].Catalog().MACKey(), h.Catalog().MACKey())
				eventually(t, "every host hears every other", func() bool {
					for _, other := range f.specs {
						if alive, _ := h.Alive(other.ID); !alive {
							return false
						}
					}
					return true
				})
				eventually(t, "every host knows who leads", func() bool {
					_, hostID, _, ok := h.Leader(catalog.ShardID)
					return ok && hostID != 0
				})
			}
		})
	}
}
