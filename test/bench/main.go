// Command bench sets TierQ beside other systems on this machine, in one run, with one load generator: JetStream and RabbitMQ
// with three processes, three replicas and an fsync before every confirmation, as TierQ, and Redis with one process, an fsync
// and no replica. It prints a table with the ratios for each.
//
// Usage, from the repository's root: make bench-peers, or
//
//	cd test/bench && go run . [-only tierq,nats] [-rows TEXT] [-duration 3s] [-rounds 1] [-clients 1000] [-crowd 60s] [-tierq PATH]
//
// JetStream is part of this binary. RabbitMQ and Redis are Debian's packages rabbitmq-server and redis-server; what is not
// installed is left out.
//
// Everything is on loopback and in a temporary directory, and ends by itself.
package main

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// peer is a system under load. Its methods are called by many goroutines.
type peer interface {
	Name() string
	// Queues makes n queues and forgets those of the row before.
	Queues(ctx context.Context, n int) error
	// Sync publishes one message and waits for its confirmation.
	Sync(ctx context.Context, queue int, body []byte) error
	// Connect opens clients, each with connections of its own, in place of those of the row before; 0: only the one that
	// Async calls shared.
	Connect(ctx context.Context, clients int) error
	// Async publishes one message through a client, or the shared one, and calls done once when it is confirmed or has failed.
	Async(ctx context.Context, client, queue int, body []byte, done func(error))
	// Consume hands every message of a queue to handle and acknowledges it, until ctx ends.
	Consume(ctx context.Context, queue int, handle func(body []byte)) error
	Close()
}

// system is a peer that can be started.
type system struct {
	name string
	// about heads its table.
	about string
	// have says that its programs are on this machine, debian which package has them; nil and "": it needs none.
	have   func() bool
	debian string
	// crowd makes it take the row of many clients even if -only does not name it.
	crowd bool
	start func(ctx context.Context, dir string) (peer, error)
}

// systems are all peers in the order in which they run. TierQ's binary is at program.
func systems(program *string) []system {
	return []system{
		{name: "nats", about: "JetStream: 3 nodes, 3 replicas, sync always", crowd: true, start: startNATS},
		{name: "tierq", crowd: true, start: func(ctx context.Context, dir string) (peer, error) { return startTierQ(ctx, *program, dir) }},
		{name: "rabbit", about: "RabbitMQ: 3 nodes, quorum queues of 3 replicas, sync before the confirm", have: haveRabbit, debian: "rabbitmq-server", start: startRabbit},
		{name: "redis", about: "Redis streams, appendfsync always: one node, no failover: the stretch mark", have: haveRedis, debian: "redis-server", start: startRedis},
	}
}

// choose returns the systems that run: those that only names, all if it is empty, but not those whose programs are not here.
func choose(all []system, only string) ([]system, error) {
	var names, chosen []string
	for _, s := range all {
		names = append(names, s.name)
	}
	if only != "" {
		chosen = strings.Split(only, ",")
	}
	for _, c := range chosen {
		if !slices.Contains(names, c) {
			return nil, fmt.Errorf("-only: %q is none of %s", c, strings.Join(names, ", "))
		}
	}
	var out []system
	for _, s := range all {
		named := slices.Contains(chosen, s.name)
		if only != "" && !named {
			continue
		}
		if s.have != nil && !s.have() {
			fmt.Printf("%s: left out, its programs are not here (Debian: apt install %s)\n", s.name, s.debian)
			continue
		}
		s.crowd = s.crowd || named
		out = append(out, s)
	}
	return out, nil
}

// shared is the client that all rows have.
const shared = -1

// row is one kind of work.
type row struct {
	name     string
	bytes    int
	inFlight int
	queues   int
	consume  bool
	// rate, if set, makes the load an open loop: so many messages a second whatever is answered, and latency counts from the
	// moment at which each was due to the moment at which a handler has it.
	rate int
	// clients share out that rate.
	clients int
}

var allRows = []row{
	{name: "publish, 1 synchronous producer", bytes: 256, inFlight: 1, queues: 1},
	{name: "publish, 1 queue", bytes: 256, inFlight: 1024, queues: 1},
	{name: "publish, 1 queue", bytes: 1024, inFlight: 1024, queues: 1},
	{name: "publish, 8 queues", bytes: 256, inFlight: 1024, queues: 8},
	{name: "publish, 48 queues", bytes: 256, inFlight: 1024, queues: 48},
	{name: "publish, deliver, ack, 1 queue", bytes: 256, inFlight: 1024, queues: 1, consume: true},
	{name: "the same at 10,000/s, due to handled", bytes: 256, queues: 1, consume: true, rate: 10_000},
}

// figures are what one row gave.
type figures struct {
	rate     float64
	p50, p99 time.Duration
	failed   int64
	// lost is what was confirmed and not handled within drainTime, of a row with a rate.
	lost int64
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
	program := flag.String("tierq", "", "the tierq binary; built if empty")
	only := flag.String("only", "", "only these of tierq, nats, rabbit, redis, with commas between; rabbit and redis take the last row only if they are named here")
	match := flag.String("rows", "", "only rows with this in their name")
	clients := flag.Int("clients", 1000, "clients of the last row, which is not repeated; 0 leaves it out")
	crowd := flag.Duration("crowd", time.Minute, "how long the last row takes")
	flag.Parse()
	rows := slices.DeleteFunc(slices.Clone(allRows), func(r row) bool { return !strings.Contains(r.name, *match) })
	chosen, err := choose(systems(program), *only)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "tierq-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if *program == "" {
		*program = filepath.Join(dir, "tierq")
		build := exec.CommandContext(ctx, "go", "build", "-o", *program, "./cmd/tierq")
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
	all := map[string][][]figures{}
	for round := range *rounds {
		for _, s := range chosen {
			got, err := measure(ctx, filepath.Join(dir, fmt.Sprint(s.name, round)), s.start, rows, *seconds)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			all[s.name] = append(all[s.name], got)
		}
	}
	report(chosen, rows, all, disk)
	if *clients == 0 {
		return nil
	}
	fmt.Println()
	last := row{name: fmt.Sprintf("%d clients, 8 queues, 10,000/s", *clients), bytes: 256, queues: 8, consume: true, rate: 10_000, clients: *clients}
	for _, s := range chosen {
		if !s.crowd {
			continue
		}
		// A cluster that cannot carry the rate is a result, not the end of the run.
		if _, err := measure(ctx, filepath.Join(dir, s.name+"-crowd"), s.start, []row{last}, *crowd); err != nil {
			fmt.Printf("%-6s %s: %v\n", s.name, last.name, err)
		}
	}
	return ctx.Err()
}

// measure starts a system and runs every row on it.
func measure(ctx context.Context, dir string, start func(context.Context, string) (peer, error), rows []row, d time.Duration) ([]figures, error) {
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
		fmt.Printf("%-6s %-36s %5d B %5d in flight: %9.0f/s  p50 %8v  p99 %8v  failed %d", p.Name(), r.name, r.bytes, r.inFlight, f.rate, f.p50.Round(10*time.Microsecond), f.p99.Round(10*time.Microsecond), f.failed)
		if r.rate > 0 {
			fmt.Printf("  not handled %d", f.lost)
		}
		fmt.Println()
		out = append(out, f)
	}
	return out, nil
}

// load runs one row: a warm-up of a third of the time, but at most 5 s, then the measured part.
func load(ctx context.Context, p peer, r row, d time.Duration) (figures, error) {
	if err := p.Queues(ctx, r.queues); err != nil {
		return figures{}, err
	}
	if err := p.Connect(ctx, r.clients); err != nil {
		return figures{}, err
	}
	g := &generator{peer: p, row: r, body: make([]byte, r.bytes)}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begin := time.Now().Add(min(d/3, 5*time.Second))
	g.from, g.until = begin, begin.Add(d)
	if r.consume {
		handle := func([]byte) { g.delivered.Add(1) }
		if r.rate > 0 {
			handle = g.handled
		}
		for q := range r.queues {
			go func() { _ = p.Consume(ctx, q, handle) }()
		}
	}
	if r.rate > 0 {
		return g.open(ctx)
	}
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
		g.peer.Async(ctx, shared, i%g.row.queues, g.body, func(err error) {
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

// drainTime is how long what was confirmed may take to be handled after the last publish.
const drainTime = 20 * time.Second

// open publishes at the row's rate, in ticks of a millisecond.
func (g *generator) open(ctx context.Context) (figures, error) {
	var confirmed atomic.Int64
	var wg sync.WaitGroup
	began, each := time.Now(), time.Second/time.Duration(g.row.rate)
	ticks := time.NewTicker(time.Millisecond)
	defer ticks.Stop()
	for sent := 0; ctx.Err() == nil; <-ticks.C {
		for ; ; sent++ {
			due := began.Add(time.Duration(sent) * each)
			if due.After(time.Now()) {
				break
			}
			if due.After(g.until) {
				return g.drain(ctx, &wg, &confirmed)
			}
			body := make([]byte, g.row.bytes)
			binary.LittleEndian.PutUint64(body, uint64(due.UnixNano()))
			client := shared
			if g.row.clients > 0 {
				client = sent % g.row.clients
			}
			wg.Add(1)
			g.peer.Async(ctx, client, max(client, 0)%g.row.queues, body, func(err error) {
				if err == nil {
					confirmed.Add(1)
				} else {
					g.failed.Add(1)
				}
				wg.Done()
			})
		}
	}
	return figures{}, ctx.Err()
}

// handled notes a message of an open loop: its body begins with the moment at which it was due.
func (g *generator) handled(body []byte) {
	g.delivered.Add(1)
	due := time.Unix(0, int64(binary.LittleEndian.Uint64(body)))
	if due.After(g.from) && due.Before(g.until) {
		took := time.Since(due)
		g.mu.Lock()
		g.took = append(g.took, took)
		g.mu.Unlock()
	}
}

// drain waits for the answers and for the handlers. A message that comes twice makes up for one that does not; the tests count
// those, this is about time.
func (g *generator) drain(ctx context.Context, wg *sync.WaitGroup, confirmed *atomic.Int64) (figures, error) {
	deadline := time.Now().Add(drainTime)
	answered := make(chan struct{})
	go func() { wg.Wait(); close(answered) }()
	select {
	case <-answered:
	case <-time.After(drainTime):
	}
	for g.delivered.Load() < confirmed.Load() && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	lost := confirmed.Load() - g.delivered.Load()
	g.mu.Lock()
	n := int64(len(g.took))
	g.mu.Unlock()
	f, err := g.figures(ctx, n)
	f.lost = max(lost, 0)
	return f, err
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

// report prints a table for each peer, with the medians and TierQ's ratios to it.
func report(ran []system, rows []row, all map[string][][]figures, disk time.Duration) {
	if len(all["tierq"]) == 0 || len(ran) == 1 {
		return
	}
	for _, s := range ran {
		if s.name != "tierq" {
			table(s, rows, all["tierq"], all[s.name])
		}
	}
	if len(rows) != len(allRows) {
		return
	}
	one, many := median(all["tierq"], 1), median(all["tierq"], 4)
	lone := median(all["tierq"], 0)
	fmt.Printf("\ntierq: 8 queues / 1 queue %.2f, 48 queues / 1 queue %.2f; lone publish P50 / fdatasync P50 %.2f\n",
		median(all["tierq"], 3).rate/one.rate, many.rate/one.rate, float64(lone.p50)/float64(disk))
}

func table(s system, rows []row, tierq, peer [][]figures) {
	fmt.Printf("\n%s\n%-36s %6s %10s %10s %7s %10s %10s %7s\n", s.about, "work", "bytes", "tierq/s", s.name+"/s", "ratio", "tierq p50", s.name+" p50", "ratio")
	for i, r := range rows {
		t, p := median(tierq, i), median(peer, i)
		fmt.Printf("%-36s %6d %10.0f %10.0f %7.2f %10v %10v %7.2f\n", r.name, r.bytes, t.rate, p.rate, t.rate/p.rate,
			t.p50.Round(10*time.Microsecond), p.p50.Round(10*time.Microsecond), float64(t.p50)/float64(p.p50))
	}
}

func median(rounds [][]figures, i int) figures {
	var fs []figures
	for _, r := range rounds {
		fs = append(fs, r[i])
	}
	slices.SortFunc(fs, func(a, b figures) int { return int(a.rate - b.rate) })
	return fs[len(fs)/2]
}
