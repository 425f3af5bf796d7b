package fault

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

var scaleFlag = flag.Int("scale", 0, "messages of backlog in TestScale…, which do not run without it; 10000000 is the full size")

func needsScale(t *testing.T) {
	t.Helper()
	needsProcesses(t)
	if *scaleFlag <= 0 {
		t.Skip("needs minutes and a quiet machine: ask for it with -scale=10000000")
	}
}

// TestScaleBacklog fills a queue, and prints what a receive costs, how big the hosts are, and how long a restart takes at a
// hundredth, a tenth and all of it. Then it acks a tenth of it above one message that stays leased.
func TestScaleBacklog(t *testing.T) {
	needsScale(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{PublishTimeout: time.Minute})
	f.createQueue(c, "big", &tierqv1.QueueOptions{MaxBytes: 64 << 30})
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "big", Name: "workers"})
	t.Logf("%10s %12s %10s %10s %14s %14s %10s %10s", "MESSAGES", "PUBLISH/S", "P50", "P99", "HOST 1 RSS", "HOST 2 RSS", "DATA", "RESTART")
	sent := 0
	for _, part := range []int{*scaleFlag / 100, *scaleFlag / 10, *scaleFlag} {
		began := time.Now()
		f.fill(c, "big", part-sent)
		rate := float64(part-sent) / time.Since(began).Seconds()
		sent = part
		for _, h := range f.full() {
			f.awaitCaughtUp(h, "big") // a digest of ten million messages takes longer than a test waits
		}
		p50, p99 := f.timeReceives("big", "workers", 2000)
		one, two := f.host(1).rss(), f.host(2).rss()
		t.Logf("%10d %12.0f %10v %10v %14s %14s %10s %10v", sent, rate, p50, p99, one, two, mib(dirBytes(f.dir)), f.restartAll("big", "workers"))
	}
	f.ackAboveStuck(t, *scaleFlag/10)
	t.Logf("host 1 %s, host 2 %s", f.host(1).rss(), f.host(2).rss())
}

// fill publishes n messages of 100 bytes and waits for every answer.
func (f *fleet) fill(c *client.Client, queue string, n int) {
	f.t.Helper()
	body := []byte(strings.Repeat("x", 100))
	var failed atomic.Int64
	var answers sync.WaitGroup
	window := make(chan struct{}, 8192)
	for range n {
		window <- struct{}{}
		future := c.PublishAsync(context.Background(), queue, client.Message{Body: body})
		answers.Go(func() {
			if p, _ := future.Wait(context.Background()); p.Err != nil {
				failed.Add(1)
			}
			<-window
		})
	}
	answers.Wait()
	require.Zero(f.t, failed.Load())
}

// timeReceives receives single messages at the home and gives each back before the next.
func (f *fleet) timeReceives(queue, group string, n int) (p50, p99 time.Duration) {
	f.t.Helper()
	home := f.homeHost(queue, group)
	var m *tierqv1.Message
	eventually(f.t, readyWithin, "the home serves", func() (err error) {
		m, err = home.receive(queue, group, 0)
		return err
	})
	took := make([]time.Duration, 0, n)
	for range n {
		_, err := home.settle("release", queue, group, m.Receipt)
		require.NoError(f.t, err)
		began := time.Now()
		m, err = home.receive(queue, group, 0)
		require.NoError(f.t, err)
		took = append(took, time.Since(began))
	}
	_, err := home.settle("release", queue, group, m.Receipt)
	require.NoError(f.t, err)
	slices.Sort(took)
	return took[n/2].Round(time.Microsecond), took[n*99/100].Round(time.Microsecond)
}

// restartAll kills every host and returns how long it takes from their start to a message received.
func (f *fleet) restartAll(queue, group string) time.Duration {
	f.t.Helper()
	for _, h := range f.hosts {
		h.kill()
	}
	began := time.Now()
	for _, h := range f.hosts {
		h.start()
	}
	var m *tierqv1.Message
	var home *host
	eventually(f.t, readyWithin, "a message is received after the restart", func() (err error) {
		for _, home = range f.full() {
			if m, err = home.receive(queue, group, 0); err == nil {
				return nil
			}
		}
		return err
	})
	took := time.Since(began)
	_, err := home.settle("release", queue, group, m.Receipt)
	require.NoError(f.t, err)
	return took.Round(time.Millisecond)
}

// ackAboveStuck holds one message and acks n others.
func (f *fleet) ackAboveStuck(t *testing.T, n int) {
	t.Helper()
	home := f.homeHost("big", "workers")
	stuck, err := home.receive("big", "workers", 12*time.Hour)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var acked atomic.Int64
	var consumers sync.WaitGroup
	began := time.Now()
	for i := range 2 {
		c := f.client(client.Options{})
		consumers.Go(func() {
			_ = c.Consume(ctx, "big", "workers", func(context.Context, *client.Delivery) error { return nil }, client.ConsumeOptions{
				Concurrency: 8, MaxInFlight: 1024, Consumer: fmt.Sprint("scale-", i+1),
				OnSettled: func(_ *client.Delivery, s client.Settled) {
					if s.Err == nil && acked.Add(1) >= int64(n) {
						stop()
					}
				},
			})
		})
	}
	consumers.Wait()
	took := time.Since(began)
	require.GreaterOrEqual(t, acked.Load(), int64(n))
	g := f.groupStatsOf(home, "big", "workers")
	require.Less(t, g.Floor, stuck.Address)
	t.Logf("%d messages acked above a stuck one: %.0f/s; group %+v", acked.Load(), float64(acked.Load())/took.Seconds(), g)
	_, err = home.settle("ack", "big", "workers", stuck.Receipt)
	require.NoError(t, err)
}

func (f *fleet) groupStatsOf(h *host, queue, group string) groupStats {
	f.t.Helper()
	for _, g := range mustStats(f.t, h, queue).Partitions[0].Groups {
		if g.Name == group {
			return g
		}
	}
	f.t.Fatalf("host %d knows no group %s", h.id, group)
	return groupStats{}
}

// TestScaleGroups gives a queue a thousand groups, each of which receives and acks everything.
func TestScaleGroups(t *testing.T) {
	needsScale(t)
	const groups, messages = 1000, 100
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "wide", nil)
	began := time.Now()
	for i := range groups {
		f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "wide", Name: fmt.Sprintf("g%04d", i)})
	}
	t.Logf("%d groups created in %v", groups, time.Since(began).Round(time.Millisecond))
	f.fill(c, "wide", messages)
	began = time.Now()
	work := make(chan int)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for i := range work {
				f.drain(c, "wide", fmt.Sprintf("g%04d", i), messages)
			}
		})
	}
	for i := range groups {
		work <- i
	}
	close(work)
	workers.Wait()
	took := time.Since(began)
	t.Logf("%d deliveries acked in %v, %.0f/s; host 1 %s, host 2 %s", groups*messages, took.Round(time.Millisecond), groups*messages/took.Seconds(), f.host(1).rss(), f.host(2).rss())
	f.awaitConverged("wide")
	for _, g := range mustStats(t, f.host(1), "wide").Partitions[0].Groups {
		if g.Name != "$default" {
			require.EqualValues(t, messages, g.Counters.Acked, g.Name)
			require.NoError(t, g.balanced())
		}
	}
}

// drain receives and acks n messages of a group.
func (f *fleet) drain(c *client.Client, queue, group string, n int) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var acked atomic.Int64
	err := c.Consume(ctx, queue, group, func(context.Context, *client.Delivery) error { return nil }, client.ConsumeOptions{
		OnSettled: func(_ *client.Delivery, s client.Settled) {
			if s.Err == nil && acked.Add(1) >= int64(n) {
				stop()
			}
		},
	})
	if err != nil {
		f.t.Errorf("group %s: %v", group, err)
	}
}

// TestScaleConsumers lets a thousand consumers wait for one group's messages: each message comes once.
func TestScaleConsumers(t *testing.T) {
	needsScale(t)
	const consumers, messages = 1000, 50_000
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "busy", nil)
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "busy", Name: "workers"})
	home := f.homeHost("busy", "workers")
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var mu sync.Mutex
	seen := make(map[uint64]int)
	var acked atomic.Int64
	var running sync.WaitGroup
	for i := range consumers {
		running.Go(func() {
			for ctx.Err() == nil {
				wait := uint32(20_000)
				res, err := home.raw().group.Receive(ctx, connect.NewRequest(&tierqv1.ReceiveRequest{
					Queue: "busy", Group: "workers", MaxMessages: 10, WaitMs: &wait, Consumer: fmt.Sprint("c", i),
				}))
				if err != nil {
					continue // the end, or the group is not yet served
				}
				var receipts []string
				mu.Lock()
				for _, m := range res.Msg.Messages {
					seen[m.Address]++
					receipts = append(receipts, m.Receipt)
				}
				mu.Unlock()
				if len(receipts) == 0 {
					continue
				}
				settled, err := home.raw().group.Ack(ctx, connect.NewRequest(&tierqv1.AckRequest{Queue: "busy", Group: "workers", Receipts: receipts}))
				if err != nil {
					t.Errorf("ack: %v", err)
					return
				}
				for _, r := range settled.Msg.Results {
					if r.Code == 0 {
						acked.Add(1)
					}
				}
				if acked.Load() >= messages {
					stop()
				}
			}
		})
	}
	began := time.Now()
	f.fill(c, "busy", messages)
	published := time.Since(began)
	running.Wait()
	took := time.Since(began)
	require.Len(t, seen, messages)
	for a, n := range seen {
		require.Equal(t, 1, n, "address %d", a)
	}
	t.Logf("%d messages published in %v and acked by %d consumers after %v; home %s", messages, published.Round(time.Millisecond), consumers, took.Round(time.Millisecond), home.rss())
}

// rss is the resident memory of h's process.
func (h *host) rss() string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.pid()))
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return mib(kib << 10)
		}
	}
	return "unknown"
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
