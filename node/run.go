package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/host/freeport"
)

// procs makes GOMAXPROCS at least 4: a blocking fsync holds a scheduler slot, so on two cores two slots would stand
// idle while the disk works.
func procs() {
	if runtime.GOMAXPROCS(0) < 4 {
		runtime.GOMAXPROCS(max(4, 2*runtime.NumCPU()))
	}
}

// collect lets a host for many shards keep less garbage beside what its replicas hold, unless GOGC says otherwise.
func collect(p Profile) {
	if _, set := os.LookupEnv("GOGC"); p == ProfileManyShards && !set {
		debug.SetGCPercent(manyShardsGC)
	}
}

// manyShardsGC is GOGC in the profile many-shards.
const manyShardsGC = 50

// Run opens one host and serves until ctx ends, then stops it gracefully.
func Run(ctx context.Context, cfg Config, log *zap.Logger) error {
	procs()
	collect(cfg.Profile)
	n, err := Open(cfg, Listeners{}, log)
	if err != nil {
		return err
	}
	fields := []zap.Field{event.Is("host-serves"), zap.String("version", cfg.Version), zap.String("role", string(cfg.Self().Role)), zap.String("data", cfg.Data)}
	if a := n.APIAddr(); a != nil {
		fields = append(fields, zap.String("api", a.String()))
	}
	if a := n.AdminAddr(); a != nil {
		fields = append(fields, zap.String("admin", a.String()))
	}
	n.log.Info("host serves", fields...)
	select {
	case <-n.raft.Refused():
		return errors.Join(n.raft.Refusal(), n.Close())
	case <-ctx.Done():
	}
	n.log.Info("host stops: homes are handed over first", event.Is("host-stops"))
	return n.Close()
}

// NewLogger logs as JSON lines to stderr from a level on.
func NewLogger(level string) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, err
	}
	c := zap.NewProductionConfig()
	c.Level = zap.NewAtomicLevelAt(l)
	c.Sampling = nil
	c.EncoderConfig.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	c.DisableStacktrace = true
	return c.Build()
}

// DevConfig configures a fleet in one process for development.
type DevConfig struct {
	// Dir holds the three hosts' data. Defaults to ./tierq-data.
	Dir string
	// API and Admin are the addresses of host 1. Default to 127.0.0.1:7188 and 127.0.0.1:7191. The others get free ports.
	API, Admin string
	// Log is the level for the log on stderr. Defaults to warn.
	Log string
	// Version is the program's, as it is shown to operators.
	Version string
	// Out gets what to try next, once the fleet serves.
	Out io.Writer
}

// Dev is a running development fleet: two full hosts and a witness.
type Dev struct {
	Nodes []*Node
}

// RunDev runs a development fleet until ctx ends.
func RunDev(ctx context.Context, c DevConfig) error {
	procs()
	if c.Log == "" {
		c.Log = "warn"
	}
	log, err := NewLogger(c.Log)
	if err != nil {
		return fmt.Errorf("log: %q is not a level: use debug, info, warn or error", c.Log)
	}
	d, err := OpenDev(c, log)
	if err != nil {
		return err
	}
	ready, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	for _, n := range d.Nodes {
		if err := n.AwaitReady(ready); err != nil {
			if ctx.Err() != nil {
				return d.Close()
			}
			return errors.Join(fmt.Errorf("the fleet did not form: %w", err), d.Close())
		}
	}
	d.announce(c)
	<-ctx.Done()
	_, _ = fmt.Fprintln(c.Out, "stopping")
	return d.Close()
}

// OpenDev opens the three hosts of a development fleet on real loopback TCP.
func OpenDev(c DevConfig, log *zap.Logger) (_ *Dev, err error) {
	if c.Dir == "" {
		c.Dir = "tierq-data"
	}
	if c.API == "" {
		c.API = "127.0.0.1:7188"
	}
	if c.Admin == "" {
		c.Admin = "127.0.0.1:7191"
	}
	hosts, err := devHosts(c)
	if err != nil {
		return nil, err
	}
	d := &Dev{}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	for i, h := range hosts {
		cfg := Config{Host: h.ID, Data: filepath.Join(c.Dir, "host-"+itoa(h.ID)), Hosts: hosts, Admin: "127.0.0.1:0", Log: c.Log, Version: c.Version}
		if i == 0 {
			cfg.Admin = c.Admin
		}
		n, err := Open(cfg, Listeners{}, log)
		if err != nil {
			return d, fmt.Errorf("host %d: %w", h.ID, err)
		}
		d.Nodes = append(d.Nodes, n)
	}
	return d, nil
}

// devHosts lists the fleet: host 1 at the given address, everything else on free ports.
func devHosts(c DevConfig) ([]HostConfig, error) {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return nil, err
	}
	ports, err := FreePorts(8)
	if err != nil {
		return nil, err
	}
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports[i]) }
	return []HostConfig{
		{ID: 1, Role: RoleFull, Raft: at(0), Peer: at(1), API: c.API, Domain: "a"},
		{ID: 2, Role: RoleFull, Raft: at(2), Peer: at(3), API: at(4), Domain: "b"},
		{ID: 3, Role: RoleWitness, Raft: at(5), Peer: at(6), Domain: "c"},
	}, nil
}

// FreePorts returns n different loopback ports that were free a moment ago.
func FreePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		p, err := freeport.Get()
		if err != nil {
			return nil, err
		}
		ports = append(ports, p)
	}
	return ports, nil
}

// Close stops the hosts together.
func (d *Dev) Close() error {
	errs := make([]error, len(d.Nodes))
	var wg sync.WaitGroup
	for i, n := range d.Nodes {
		wg.Go(func() { errs[i] = n.stop() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (d *Dev) announce(c DevConfig) {
	out := c.Out
	one, two := d.Nodes[0], d.Nodes[1]
	_, _ = fmt.Fprintf(out, `TierQ development fleet: 2 full hosts and a witness in this process, data in %s

  host 1  full     API %s   admin http://%s
  host 2  full     API %s
  host 3  witness

Try in another terminal (go build -o tierq ./cmd/tierq):

  ./tierq queue create orders
  ./tierq send orders "hello"
  ./tierq receive orders --ack
  ./tierq leader get orders
  ./tierq doctor

Ctrl-C stops it; the data stay.
`, c.Dir, one.APIAddr(), one.AdminAddr(), two.APIAddr())
}
