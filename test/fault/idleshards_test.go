package fault

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

var idleFlag = flag.Int("idle", 0, "idle queues in TestFaultIdleShards, which does not run without it; 1000 is the full size")

// idleShardsTime is how long the idle fleet is watched.
const idleShardsTime = 30 * time.Second

// TestFaultIdleShards creates many queues on three full hosts, leaves them alone, and prints what their replicas cost: the time of
// creation, memory per replica, and CPU; then it publishes to every one of them.
func TestFaultIdleShards(t *testing.T) {
	needsProcesses(t)
	if *idleFlag <= 0 {
		t.Skip("takes minutes: ask for it with -idle=1000")
	}
	for _, profile := range []string{"default", "many-shards"} {
		t.Run(profile, func(t *testing.T) {
			newRand(t)
			f := layFleet(t, 3, 0)
			for _, h := range f.hosts {
				h.configure("profile: " + profile + "\n")
				h.start()
			}
			f.awaitReady()
			idleShards(t, f, profile)
		})
	}
}

func idleShards(t *testing.T, f *fleet, profile string) {
	c := f.client(client.Options{RefreshEvery: -1, PublishTimeout: 2 * readyWithin})
	empty := f.residentBytes()
	names := make([]string, *idleFlag)
	for i := range names {
		names[i] = fmt.Sprintf("idle-%04d", i+1)
	}
	took := f.createQueues(c, names)
	measured(t, "%s: %d queues x 3 replicas created in %v", profile, len(names), took.Round(time.Millisecond))

	f.awaitCalm()
	if *keepFlag {
		f.keepProfiles()
	}
	resident, cpu, began := f.residentBytes(), f.cpuAll(), time.Now()
	<-time.After(idleShardsTime) // what is measured is that nothing happens
	cores := float64(f.cpuAll()-cpu) / ticksPerSecond / time.Since(began).Seconds()
	replicas := 3 * len(names)
	each := float64(resident-empty) / float64(replicas) / (1 << 20)
	measured(t, "%s: idle, 3 hosts with %d replicas in all: %.2f cores in all (%.2f a host); memory %d MiB in all, %.3f MiB a replica", profile, replicas, cores, cores/3, resident>>20, each)

	a := newAccount()
	for i, name := range names {
		id := uint64(i + 1)
		body := bodyOf(id, []byte("wake"))
		a.sending(id, body)
		ps, err := c.Publish(context.Background(), name, client.Message{Body: body})
		require.NoError(t, err)
		a.answered(id, client.Published{Err: ps[0].Err}) // addresses are a queue's own
		var ds []*client.Delivery
		eventually(t, readyWithin, "queue "+name+" delivers its message", func() error {
			ds, err = c.Receive(context.Background(), name, "", client.ReceiveOptions{})
			if err == nil && len(ds) != 1 {
				err = errNotYet
			}
			return err
		})
		n := a.got(ds[0].Body, 0, delivered{})
		a.settling(n)
		rs, err := c.Ack(context.Background(), name, "", ds[0].Receipt)
		require.NoError(t, err)
		a.settled(n, acked, rs[0].Err)
	}
	measured(t, "%s: after a message in each: memory %d MiB in all", profile, f.residentBytes()>>20)
	a.verify(t)
}

// createQueues creates queues, several at once, and waits until every full host has its replica of each.
func (f *fleet) createQueues(c *client.Client, names []string) time.Duration {
	f.t.Helper()
	began := time.Now()
	work := make(chan string)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for name := range work {
				ctx, cancel := context.WithTimeout(context.Background(), 5*readyWithin) // all hosts share the machine
				if _, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: name}); err != nil {
					f.t.Errorf("create queue %s: %v", name, err)
				}
				cancel()
			}
		})
	}
	for _, name := range names {
		work <- name
	}
	close(work)
	workers.Wait()
	for _, h := range f.full() {
		f.awaitServed(h, names)
	}
	return time.Since(began)
}

// replicas counts the queues of which a host has a replica.
func (h *host) replicas() (int, error) {
	raw, err := h.get("/metrics")
	return strings.Count(string(raw), "\ntierq_quorum_state{"), err
}

// awaitCalm waits until the hosts use about as little CPU as they did shortly before: what came with creation is over.
func (f *fleet) awaitCalm() {
	f.t.Helper()
	const look = 5 * time.Second
	last, since := f.cpuAll(), time.Now()
	before := 1e9
	eventually(f.t, 5*time.Minute, "the fleet is calm", func() error {
		if time.Since(since) < look {
			return errNotYet
		}
		now := f.cpuAll()
		used := float64(now-last) / ticksPerSecond / time.Since(since).Seconds()
		calm := used > before*0.85
		last, since, before = now, time.Now(), used
		if calm {
			return nil
		}
		return fmt.Errorf("%.2f cores", used)
	})
}

// cpuAll is the CPU time of all hosts so far.
func (f *fleet) cpuAll() (sum int64) {
	f.t.Helper()
	for _, h := range f.hosts {
		sum += h.cpuTicks()
	}
	return sum
}

// residentBytes is the resident memory of all hosts, but for what of the files that they map is resident.
func (f *fleet) residentBytes() (sum int64) {
	f.t.Helper()
	for _, h := range f.hosts {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.pid()))
		require.NoError(f.t, err)
		for line := range strings.Lines(string(raw)) {
			if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
				kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
				require.NoError(f.t, err)
				sum += kib << 10
			}
		}
	}
	return sum
}

// keepProfiles writes what the first host's memory and CPU go to beside its log.
func (f *fleet) keepProfiles() {
	f.t.Helper()
	h := f.hosts[0]
	for _, page := range []string{"heap", "goroutine", "profile"} {
		url := "http://" + h.admin + "/debug/pprof/" + page
		if page == "profile" {
			url += "?seconds=10"
		}
		res, err := http.Get(url)
		require.NoError(f.t, err)
		raw, err := io.ReadAll(res.Body)
		require.NoError(f.t, errors.Join(err, res.Body.Close()))
		require.NoError(f.t, os.WriteFile(h.log+"."+page, raw, 0o600))
	}
}

// configure puts lines at the beginning of h's file.
func (h *host) configure(lines string) {
	h.f.t.Helper()
	raw, err := os.ReadFile(h.config)
	require.NoError(h.f.t, err)
	require.NoError(h.f.t, os.WriteFile(h.config, append([]byte(lines), raw...), 0o600))
}
