package home

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// chaos is a shard of three replicas whose homes are moved, killed, cut off and stalled while consumers follow them.
type chaos struct {
	t    *testing.T
	r    *fakeRaft
	id   queue.GroupID
	rng  *rand.Rand
	mu   sync.Mutex
	done map[queue.Address]bool // acks answered OK
	out  map[queue.Address]int  // deliveries
	stop chan struct{}
}

// G4, G5: whatever happens to homes, an acked message is never delivered again, and every message is acked in the end.
func TestChaos(t *testing.T) {
	for seed := range uint64(8) {
		bubble(t, 3, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, _ *Keeper) {
			t.Logf("seed %d", seed)
			c := &chaos{
				t: t, r: r, rng: rand.New(rand.NewPCG(seed, 1)),
				done: map[queue.Address]bool{}, out: map[queue.Address]int{}, stop: make(chan struct{}),
			}
			c.run()
		})
	}
}

const chaosMessages = 300

func (c *chaos) run() {
	for _, p := range c.r.replicas[1:] {
		p.open()
	}
	synctest.Wait()
	c.id = c.r.create("g", c.r.replicas[0], queue.GroupConfig{LeaseMs: 3000, MaxAttempts: 1000, BackoffCapMs: 1000})
	var consumers sync.WaitGroup
	for n := range 4 {
		rng := rand.New(rand.NewPCG(c.rng.Uint64(), uint64(n)))
		consumers.Go(func() { c.consume(rng) })
	}
	for range chaosMessages {
		c.r.commit(&queue.Enqueue{Stamp: c.r.stamp(), Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte("x")}}}}}, nil)
		pass(time.Duration(c.rng.IntN(60)) * time.Millisecond)
		if c.rng.IntN(10) == 0 {
			c.disturb()
		}
	}
	c.heal()
	for begun := c.r.boot(); !c.drained(); pass(time.Second) {
		require.Less(c.t, c.r.boot()-begun, 5*time.Minute, "messages are stuck")
	}
	close(c.stop)
	consumers.Wait()
	for _, p := range c.r.replicas {
		done, _, _ := p.state.Deliverables(c.id, 0, 1, true)
		require.Empty(c.t, done)
	}
}

// disturb does something to the fleet; the next disturbance of a replica heals it first.
func (c *chaos) disturb() {
	p := c.r.replicas[c.rng.IntN(3)]
	other := c.r.replicas[c.rng.IntN(3)]
	p.setCut(false)
	p.stall(false)
	switch c.rng.IntN(7) {
	case 0:
		c.giveHome(p)
	case 1:
		p.setCut(true)
		c.giveHome(other)
	case 2:
		p.stall(true)
	case 3:
		p.restart()
	case 4:
		k := p.keeper
		go func() { _ = k.Move(within(2*time.Second), "g", other.id) }()
	case 5:
		lose := rand.New(rand.NewPCG(c.rng.Uint64(), 2))
		p.setFate(func(queue.Command) fate { return fate(lose.IntN(4)) })
	case 6:
		p.setFate(nil)
	}
}

// giveHome is the leader's housekeeping, answered by nobody: its view may be old.
func (c *chaos) giveHome(to *fakeReplica) {
	c.r.mu.Lock()
	g, _ := to.state.Group(c.id)
	c.r.mu.Unlock()
	c.r.commit(&queue.Home{Stamp: c.r.stamp(), Group: c.id, ExpectedHome: g.Home, ExpectedEpoch: g.Epoch, NewHome: to.id}, nil)
}

func (c *chaos) heal() {
	for _, p := range c.r.replicas {
		p.setCut(false)
		p.setFate(nil)
		p.stall(false)
	}
}

func (c *chaos) drained() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	left, _, _ := c.r.replicas[0].state.Deliverables(c.id, 0, 1, true)
	return len(left) == 0
}

// consume follows the home as the replicas name it, and does all that consumers do.
func (c *chaos) consume(rng *rand.Rand) {
	at := 0
	for {
		select {
		case <-c.stop:
			return
		case <-time.After(time.Duration(rng.IntN(20)) * time.Millisecond):
		}
		c.r.mu.Lock()
		k := c.r.replicas[at].keeper
		c.r.mu.Unlock()
		ds, err := k.Receive(within(3*time.Second), "g", ReceiveRequest{Max: 1 + rng.IntN(5), Wait: time.Duration(rng.IntN(2000)) * time.Millisecond})
		if err != nil || len(ds) == 0 && rng.IntN(4) == 0 {
			at = rng.IntN(3)
			if home, _, ok := k.HomeOf("g"); ok && rng.IntN(2) == 0 {
				at = int(home) - 1
			}
			continue
		}
		c.deliver(k, ds)
		for _, d := range ds {
			c.finish(k, d, rng)
		}
	}
}

// deliver notes what a keeper has handed out. While a message is delivered under an epoch, no lease of an older one may
// be on record: whoever had it was honoured until it ended.
func (c *chaos) deliver(k *Keeper, ds []Delivery) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range ds {
		a := d.Message.Address
		if _, old, _, _ := k.o.Reader.RetryOf(c.id, a); old.Name.Epoch != 0 && old.Name.Epoch < d.lease.Epoch {
			c.t.Errorf("%s: delivered under epoch %v beside the recorded lease %v", a, d.lease.Epoch, old)
		}
		if c.done[a] {
			c.t.Errorf("%s: delivered after an ack that was answered OK", a)
		}
		c.out[a]++
	}
}

func (c *chaos) finish(k *Keeper, d Delivery, rng *rand.Rand) {
	switch rng.IntN(8) {
	case 0:
		return // forgotten: the lease runs out
	case 1:
		_, _ = k.Nack(within(time.Second), "g", []NackItem{{Receipt: d.Receipt}})
		return
	case 2:
		_, _ = k.Release(within(time.Second), "g", []string{d.Receipt})
		return
	case 3:
		pass(time.Duration(rng.IntN(4000)) * time.Millisecond)
	case 4:
		pass(time.Duration(rng.IntN(1500)) * time.Millisecond)
		_, _ = k.Extend(within(time.Second), "g", []ExtendItem{{Receipt: d.Receipt, Lease: 3 * time.Second}})
		pass(time.Duration(rng.IntN(2000)) * time.Millisecond)
		c.r.mu.Lock()
		k = c.r.replicas[rng.IntN(3)].keeper // the receipt may be good elsewhere
		c.r.mu.Unlock()
	case 5:
		got, err := k.ClaimIdle(within(time.Second), "g", ClaimRequest{MinIdle: time.Second, Max: 3})
		if err == nil {
			c.deliver(k, got.Deliveries)
			for _, d := range got.Deliveries {
				c.finish(k, d, rng)
			}
		}
	}
	ack := k.Ack
	if rng.IntN(2) == 0 {
		ack = k.AckPatiently
	}
	items, err := ack(within(2*time.Second), "g", []string{d.Receipt})
	if err == nil && items[0].Code == code.OK {
		c.mu.Lock()
		c.done[d.Message.Address] = true
		c.mu.Unlock()
	}
}
