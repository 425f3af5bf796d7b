package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

type benchFlags struct {
	dir       string
	duration  time.Duration
	sizes     []int
	inFlight  []int
	queues    int
	replicas  uint32
	witnesses uint32
	unordered bool
	progress  bool
}

func benchCommand(a *app) *cobra.Command {
	f := benchFlags{sizes: []int{256, 1024}, inFlight: []int{1, 1024}, queues: 1}
	c := &cobra.Command{
		Use:   "bench",
		Short: "measure confirmed publishes beside the disk's own sync and a bare propose loop",
		Long: "Publish into a scratch queue, and put the figures beside what bounds them: the time of one fdatasync of 4 KiB in --dir\n" +
			"(run it on a host's disk), and a loop at the leader that only proposes. X_SYNC is P50 over that fdatasync; OF_PROPOSE\n" +
			"is the rate over the loop's. With --queues the messages go to as many scratch queues in turn; the loop is that of one.\n" +
			"The scratch queues are deleted at the end.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return a.bench(cmd.Context(), f)
		},
	}
	fs := c.Flags()
	fs.StringVar(&f.dir, "dir", ".", "directory on the disk to measure")
	fs.DurationVar(&f.duration, "duration", 5*time.Second, "how long each run takes")
	fs.IntSliceVar(&f.sizes, "size", f.sizes, "body sizes in bytes")
	fs.IntSliceVar(&f.inFlight, "in-flight", f.inFlight, "messages in flight")
	fs.IntVar(&f.queues, "queues", f.queues, "scratch queues")
	fs.Uint32Var(&f.replicas, "replicas", 0, "full replicas of each scratch queue (default: what the fleet can hold)")
	fs.Uint32Var(&f.witnesses, "witnesses", 0, "its witnesses")
	fs.BoolVar(&f.unordered, "unordered", false, "several requests at once; messages may be stored out of order")
	fs.BoolVar(&f.progress, "progress", false, "draw progress also when stderr is no terminal")
	return c
}

func (f *benchFlags) check() error {
	if f.duration <= 0 || f.duration > 10*time.Minute {
		return usagef("--duration %s: it is above 0 and at most 10m", f.duration)
	}
	for _, n := range f.sizes {
		if n < 0 || n > 1<<20 {
			return usagef("--size %d: it is 0 to %d", n, 1<<20)
		}
	}
	for _, n := range f.inFlight {
		if n < 1 || n > 8192 {
			return usagef("--in-flight %d: it is 1 to 8192", n)
		}
	}
	if f.queues < 1 || f.queues > 1000 {
		return usagef("--queues %d: it is 1 to 1000", f.queues)
	}
	if len(f.sizes) == 0 || len(f.inFlight) == 0 {
		return usagef("--size and --in-flight need a value each")
	}
	return nil
}

// bench is one run of the command.
type bench struct {
	a      *app
	f      benchFlags
	queues []string
	sync   time.Duration // P50

	// For the progress line.
	done, total atomic.Int64 // milliseconds
	what        atomic.Value
}

func (a *app) bench(ctx context.Context, f benchFlags) error {
	b := &bench{a: a, f: f}
	b.total.Store(int64(len(f.sizes)*len(f.inFlight)) * 2 * f.duration.Milliseconds())
	b.what.Store("fdatasync")
	o, err := a.options()
	if err != nil {
		return err
	}
	o.FailFast = true
	t := newTable("BYTES", "IN_FLIGHT", "QUEUES", "PER_SECOND", "P50_US", "P99_US", "FDATASYNC_P50_US", "X_SYNC", "PROPOSE_PER_SECOND", "PROPOSE_P50_US", "OF_PROPOSE", "MESSAGES")
	err = withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		defer b.cleanUp(ctx, c)
		for range f.queues {
			name := fmt.Sprintf("bench-%08x", rand.Uint32())
			if _, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: name, Replicas: f.replicas, Witnesses: f.witnesses}); err != nil {
				return err
			}
			b.queues = append(b.queues, name)
		}
		stop := startProgress(a.err, f.progress, b.line)
		defer stop()
		return b.runAll(ctx, c, t)
	})
	if err != nil {
		return err
	}
	return a.print(t)
}

func (b *bench) cleanUp(ctx context.Context, c *client.Client) {
	ctx = context.WithoutCancel(ctx)
	for _, q := range b.queues {
		within, cancel := context.WithTimeout(ctx, b.a.tryFor(10*time.Second))
		err := c.DeleteQueue(within, q)
		cancel()
		if err != nil {
			b.a.complain(fmt.Sprintf("the scratch queue stays: delete it with `tierq queue delete %s`: %v", q, err))
		}
	}
}

func (b *bench) line() (int64, int64, string) {
	return b.done.Load(), b.total.Load(), b.what.Load().(string)
}

func (b *bench) runAll(ctx context.Context, c *client.Client, t *table) error {
	var err error
	if b.sync, err = measureSync(b.f.dir, min(b.f.duration, 2*time.Second)); err != nil {
		return err
	}
	for _, size := range b.f.sizes {
		for _, n := range b.f.inFlight {
			b.what.Store(fmt.Sprintf("%d bytes, %d in flight", size, n))
			r, err := b.publish(ctx, size, n)
			if err != nil {
				return err
			}
			b.done.Add(b.f.duration.Milliseconds())
			p, err := b.propose(ctx, c, size, n)
			if err != nil {
				return err
			}
			b.done.Add(b.f.duration.Milliseconds())
			rate, loop := perSecond(int64(r.n), r.took), perSecond(int64(p.Messages), time.Duration(p.ElapsedUs)*time.Microsecond)
			t.add(size, n, b.f.queues, round(rate), r.p50.Microseconds(), r.p99.Microseconds(), b.sync.Microseconds(), round(ratio(float64(r.p50), float64(b.sync))),
				round(loop), p.P50Us, round(ratio(rate, loop)), r.n)
		}
	}
	return nil
}

func perSecond(n int64, d time.Duration) float64 { return ratio(float64(n), d.Seconds()) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// proposeBatch is how many messages the bare loop puts into a command when many are in flight.
const proposeBatch = 128

// propose runs the bare loop with as many messages in flight.
func (b *bench) propose(ctx context.Context, c *client.Client, size, inFlight int) (*tierqv1.BenchProposeResponse, error) {
	batch := min(inFlight, proposeBatch)
	return c.BenchPropose(ctx, &tierqv1.BenchProposeRequest{
		Queue: b.queues[0], MessageBytes: uint32(size), Batch: uint32(batch), InFlight: uint32(max(1, inFlight/batch)), DurationMs: uint32(b.f.duration.Milliseconds()),
	})
}

type benchRun struct {
	n        int
	took     time.Duration
	p50, p99 time.Duration
}

// publish keeps inFlight messages in flight for the duration: the client's buffer is that large, and blocks.
func (b *bench) publish(ctx context.Context, size, inFlight int) (benchRun, error) {
	o, err := b.a.options()
	if err != nil {
		return benchRun{}, err
	}
	o.Unordered, o.MaxBufferedMessages, o.PublishTimeout = b.f.unordered, inFlight, b.a.tryFor(10*time.Second)
	body := make([]byte, size)
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
	var r benchRun
	err = withOptions(ctx, o, func(ctx context.Context, c *client.Client) error {
		for _, q := range b.queues {
			if _, err := c.Publish(ctx, q, client.Message{Body: body}); err != nil {
				return err // also finds the leader
			}
		}
		r, err = drive(ctx, c, b.queues, body, inFlight, b.f.duration)
		return err
	})
	return r, err
}

// drive publishes to queues in turn for d and waits for every answer.
func drive(ctx context.Context, c *client.Client, queues []string, body []byte, inFlight int, d time.Duration) (benchRun, error) {
	futures := make(chan *client.Future, inFlight)
	var took []time.Duration
	var failed error
	stop := make(chan struct{})
	counted := make(chan struct{})
	go func() {
		defer close(counted)
		for f := range futures {
			p, err := f.Wait(context.Background())
			if err != nil && failed == nil {
				failed = err
				close(stop)
			}
			took = append(took, p.Elapsed)
		}
	}()
	began := time.Now()
	for i := 0; time.Since(began) < d && ctx.Err() == nil && !closed(stop); i++ {
		futures <- c.PublishAsync(ctx, queues[i%len(queues)], client.Message{Body: body})
	}
	close(futures)
	<-counted
	elapsed := time.Since(began)
	switch {
	case ctx.Err() != nil:
		return benchRun{}, errors.New("stopped")
	case failed != nil:
		return benchRun{}, failed
	}
	slices.Sort(took)
	return benchRun{n: len(took), took: elapsed, p50: quantile(took, 50), p99: quantile(took, 99)}, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// quantile reads sorted times; nothing measured is 0.
func quantile(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, len(sorted)*percent/100)]
}

// measureSync returns the P50 of appending 4 KiB to a file in dir and syncing its data, over at most d.
func measureSync(dir string, d time.Duration) (time.Duration, error) {
	f, err := os.CreateTemp(dir, ".tierq-bench-*")
	if err != nil {
		return 0, code.New(code.InvalidArgument, "--dir %s cannot be written: name a directory on the disk to measure", dir)
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}()
	const maxSyncs = 2000
	block := make([]byte, 4096)
	var took []time.Duration
	for began := time.Now(); time.Since(began) < d && len(took) < maxSyncs; {
		if _, err := f.Write(block); err != nil {
			return 0, fmt.Errorf("measure %s: %w", dir, err)
		}
		t := time.Now()
		if err := syncData(f); err != nil {
			return 0, fmt.Errorf("measure %s: %w", dir, err)
		}
		took = append(took, time.Since(t))
	}
	slices.Sort(took)
	return quantile(took, 50), nil
}
