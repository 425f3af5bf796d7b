// Command bench sets TierQ beside a JetStream cluster on this machine, in one run, with one load generator: three
// processes each, three replicas, fsync before every confirmation. It prints a table and the ratios.
//
// Usage, from the repository's root: make bench-peers, or
//
//	cd test/bench && go run . [-seconds 3] [-rounds 1] [-tierq PATH]
//
// Everything is on loopback and in a temporary directory, and ends by itself.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// peer is a system under load. Its methods are called by many goroutines.
type peer interface {
	Name() string
	// Queues makes n queues and forgets those of the row before.
	Queues(ctx context.Context, n int) error
	// Sync publishes one message and waits for its confirmation.
	Sync(ctx context.Context, queue int, body []byte) error
	// Async publishes one message and calls done once when it is confirmed or has failed.
	Async(ctx context.Context, queue int, body []byte, done func(error))
	// Consume hands every message of a queue to handle and acknowledges it, until ctx ends.
	Consume(ctx context.Context, queue int, handle func(body []byte)) error
	Close()
}

// row is one kind of work.
type row struct {
	name     string
	bytes    int
	inFlight int
	queues   int
	consume  bool
}

var rows = []row{
	{"publish, 1 synchronous producer", 256, 1, 1, false},
	{"publish, 1 queue", 256, 1024, 1, false},
	{"publish, 1 queue", 1024, 1024, 1, false},
	{"publish, 8 queues", 256, 1024, 8, false},
	{"publish, 48 queues", 256, 1024, 48, false},
	{"publish, deliver, ack, 1 queue", 256, 1024, 1, true},
}

// figures are what one row gave.
type figures struct {
	rate     float64
	p50, p99 time.Duration
	failed   int64
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == natsNode {
		runNATSNode(os.Args[2:])
		return
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	seconds := flag.Duration("duration", 3*time.Second, "how long each row takes, after a third of it as warm-up")
	rounds := flag.Int("rounds", 1, "how often all rows are repeated; the median counts")
	binary := flag.String("tierq", "", "the tierq binary; built if empty")
	only := flag.String("only", "", "tierq or nats")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp("", "tierq-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if *binary == "" {
		*binary = filepath.Join(dir, "tierq")
		build := exec.CommandContext(ctx, "go", "build", "-o", *binary, "./cmd/tierq")
		build.Dir = filepath.Join("..", "..")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return fmt.Errorf("build tierq: %w", err)
		}
	}
	disk, err := fdatasyncP50(dir)
	if err != nil {
		return err
	}
	fmt.Printf("disk: fdatasync of an appended 4 KiB, P50 %v\n", disk.Round(time.Microsecond))
	start := map[string]func(context.Context, string) (peer, error){
		"tierq": func(ctx context.Context, d string) (peer, error) { return startTierQ(ctx, *binary, d) },
		"nats":  startNATS,
	}
	all := map[string][][]figures{}
	for round := range *rounds {
		for _, name := range []string{"nats", "tierq"} {
			if *only != "" && *only != name {
				continue
			}
			got, err := measure(ctx, filepath.Join(dir, fmt.Sprint(name, round)), start[name], *seconds)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			all[name] = append(all[name], got)
		}
	}
	report(all, disk)
	return nil
}

// measure starts a system and runs every row on it.
func measure(ctx context.Context, dir string, start func(context.Context, string) (peer, error), d time.Duration) ([]figures, error) {
	p, err := start(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	var out []figures
	for _, r := range rows {
		f, err := load(ctx, p, r, d)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		fmt.Printf("%-6s %-34s %5d B %5d in flight: %9.0f/s  p50 %8v  p99 %8v  failed %d\n", p.Name(), r.name, r.bytes, r.inFlight, f.rate, f.p50.Round(10*time.Microsecond), f.p99.Round(10*time.Microsecond), f.failed)
		out = append(out, f)
	}
	return out, nil
}

// load runs one row: a warm-up of a third of the time, then the measured part.
func load(ctx context.Context, p peer, r row, d time.Duration) (figures, error) {
	if err := p.Queues(ctx, r.queues); err != nil {
		return figures{}, err
	}
	g := &generator{peer: p, row: r, body: make([]byte, r.bytes)}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if r.consume {
		for q := range r.queues {
			go func() { _ = p.Consume(ctx, q, func([]byte) { g.delivered.Add(1) }) }()
		}
	}
	begin := time.Now().Add(d / 3)
	g.from, g.until = begin, begin.Add(d)
	if r.inFlight == 1 {
		return g.synchronous(ctx)
	}
	return g.pipelined(ctx)
}

type generator struct {
	peer        peer
	row         row
	body        []byte
	from, until time.Time

	mu        sync.Mutex
	took      []time.Duration
	failed    atomic.Int64
	delivered atomic.Int64
}

func (g *generator) note(began time.Time, err error) {
	now := time.Now()
	if err != nil {
		g.failed.Add(1)
		return
	}
	if now.After(g.from) && now.Before(g.until) {
		g.mu.Lock()
		g.took = append(g.took, now.Sub(began))
		g.mu.Unlock()
	}
}

func (g *generator) synchronous(ctx context.Context) (figures, error) {
	for time.Now().Before(g.until) && ctx.Err() == nil {
		began := time.Now()
		g.note(began, g.peer.Sync(ctx, 0, g.body))
	}
	return g.figures(ctx, int64(len(g.took)))
}

// backlog is the most messages that may wait for a consumer in a row with one.
const backlog = 20_000

func (g *generator) pipelined(ctx context.Context) (figures, error) {
	slots := make(chan struct{}, g.row.inFlight)
	var wg sync.WaitGroup
	var sent int64
	deliveredBefore, measured := int64(0), false
	for i := 0; time.Now().Before(g.until) && ctx.Err() == nil; i++ {
		if !measured && time.Now().After(g.from) {
			measured, deliveredBefore = true, g.delivered.Load()
		}
		for g.row.consume && sent-g.delivered.Load() > backlog && time.Now().Before(g.until) {
			time.Sleep(time.Millisecond)
		}
		slots <- struct{}{}
		wg.Add(1)
		sent++
		began := time.Now()
		g.peer.Async(ctx, i%g.row.queues, g.body, func(err error) {
			g.note(began, err)
			<-slots
			wg.Done()
		})
	}
	delivered := g.delivered.Load() - deliveredBefore
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		return figures{}, fmt.Errorf("publishes were not answered within 30 s")
	}
	if g.row.consume {
		return g.figures(ctx, delivered)
	}
	return g.figures(ctx, int64(len(g.took)))
}

func (g *generator) figures(ctx context.Context, count int64) (figures, error) {
	if err := ctx.Err(); err != nil {
		return figures{}, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.took) == 0 {
		return figures{}, fmt.Errorf("nothing was confirmed (%d failed)", g.failed.Load())
	}
	slices.Sort(g.took)
	return figures{
		rate: float64(count) / g.until.Sub(g.from).Seconds(), p50: g.took[len(g.took)/2], p99: g.took[len(g.took)*99/100], failed: g.failed.Load(),
	}, nil
}

// report prints the medians and TierQ's ratios to the other.
func report(all map[string][][]figures, disk time.Duration) {
	if len(all["tierq"]) == 0 || len(all["nats"]) == 0 {
		return
	}
	fmt.Printf("\n%-34s %6s %10s %10s %7s %10s %10s %7s\n", "work", "bytes", "tierq/s", "nats/s", "ratio", "tierq p50", "nats p50", "ratio")
	for i, r := range rows {
		t, n := median(all["tierq"], i), median(all["nats"], i)
		fmt.Printf("%-34s %6d %10.0f %10.0f %7.2f %10v %10v %7.2f\n", r.name, r.bytes, t.rate, n.rate, t.rate/n.rate,
			t.p50.Round(10*time.Microsecond), n.p50.Round(10*time.Microsecond), float64(t.p50)/float64(n.p50))
	}
	one, many := median(all["tierq"], 1), median(all["tierq"], 4)
	lone := median(all["tierq"], 0)
	fmt.Printf("\ntierq: 8 queues / 1 queue %.2f, 48 queues / 1 queue %.2f; lone publish P50 / fdatasync P50 %.2f\n",
		median(all["tierq"], 3).rate/one.rate, many.rate/one.rate, float64(lone.p50)/float64(disk))
}

func median(rounds [][]figures, i int) figures {
	var fs []figures
	for _, r := range rounds {
		fs = append(fs, r[i])
	}
	slices.SortFunc(fs, func(a, b figures) int { return int(a.rate - b.rate) })
	return fs[len(fs)/2]
}
