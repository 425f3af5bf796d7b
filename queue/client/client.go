// Package client is the Go client of a TierQ fleet. It knows the public API and the registry of codes, and nothing of
// Raft, disks, or a host's insides.
//
// A Client is safe for concurrent use; a process needs one per fleet. It
//
//   - publishes idempotently: every message has a seq of this client's producer, and a publish whose outcome is unknown
//     is sent again with the same seq until it is answered or its deadline passes (G2);
//   - goes where the work is: a partition's leader for publishes, a group's home for deliveries, both learned from the
//     hosts' answers and forgotten when they fail (G4);
//   - keeps a link per address whose states are listed at State; no state of it is a trap.
//
// Every error is a *code.Error. Its Effect tells what a caller may do: EffectNone, nothing happened; EffectMaybe, it may
// have happened and only the idempotent repeat, which the client did until the deadline, would have told.
package client

import (
	"context"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/hands"
)

// Client talks to one fleet. See the package's doc. Made by New, ended by Close.
type Client struct {
	opts           Options
	randomProducer bool
	scheme         string
	router         *router
	log            *zap.Logger

	base    context.Context // ends when the client is closed
	end     context.CancelFunc
	wg      sync.WaitGroup
	hands   *hands.Hands // that batches are sent from
	refresh chan struct{}
	buffer  *buffer

	openMu sync.Mutex // below every other lock
	open   map[*publish]struct{}

	mu      sync.Mutex
	placers map[string]*placer
	stubs   map[string]*apis
	streams map[streamKey]*stream
	closing bool // no new publish
	ended   bool // no new stream
	fleetID string
}

// New checks o and returns a client. It does no call: an unreachable fleet is found by the first one.
func New(o Options) (*Client, error) {
	random := o.ProducerID == 0
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, &code.Error{Code: code.InvalidArgument, Effect: code.EffectNone, Text: err.Error(), Cause: err}
	}
	c := &Client{
		opts: o, randomProducer: random, scheme: o.scheme(), log: o.Logger,
		hands:   hands.New(),
		refresh: make(chan struct{}, 1),
		stubs:   map[string]*apis{},
		streams: map[streamKey]*stream{},
		placers: map[string]*placer{},
		open:    map[*publish]struct{}{},
		buffer:  newBuffer(o.MaxBufferedMessages, o.MaxBufferedBytes),
	}
	c.router = newRouter(o.Addrs, o.Clock, c.reconnectPause, func() time.Duration { return c.jitter(o.RetryCap, o.RetryCap, 0) })
	c.base, c.end = context.WithCancel(context.Background())
	if o.RefreshEvery > 0 {
		c.wg.Add(1)
		go c.keepLearning()
	}
	return c, nil
}

// ProducerID returns the number that names this client's producer.
func (c *Client) ProducerID() uint64 { return c.opts.ProducerID }

// Links returns the state of the link to every known address.
func (c *Client) Links() map[string]State { return c.router.states() }

// Reconnect forgets what is known against the addresses: a pause ends, and a link that was lost (Fatal) is tried again.
func (c *Client) Reconnect() { c.router.reset() }

// Close refuses new publishes, waits until the buffered ones are answered or ctx ends, and ends everything. What was not
// answered by then fails: with EffectNone if it was never sent, else with EffectMaybe. It returns ctx's error if something
// was cut off. May be called twice, and concurrently with any other call, which then fails.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()
	err := c.flush(ctx)
	c.end()
	c.failStreams()
	c.wg.Wait()
	c.hands.Close()
	c.router.close()
	if t, ok := c.opts.HTTPClient.Transport.(*http.Transport); ok {
		t.CloseIdleConnections()
	}
	return err
}

func (c *Client) apisOf(addr string) *apis {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.stubs[addr]
	if a == nil {
		a = newAPIs(wholeMessages{c.opts.withToken(c.opts.HTTPClient)}, c.scheme, addr)
		c.stubs[addr] = a
	}
	return a
}

// wantRefresh asks for the fleet's addresses to be learned soon.
func (c *Client) wantRefresh() {
	select {
	case c.refresh <- struct{}{}:
	default:
	}
}

// refreshGap is the least time between two refreshes, however many calls fail.
const refreshGap = time.Second

// keepLearning asks for the fleet's addresses at the start, now and then, and soon after a failure.
func (c *Client) keepLearning() {
	defer c.wg.Done()
	for {
		c.learnOnce()
		if c.sleep(c.base, refreshGap) != nil {
			return
		}
		every := c.opts.RefreshEvery
		select {
		case <-c.refresh:
		case <-c.opts.Clock.After(every/2 + c.jitter(every, every, 0)):
		case <-c.base.Done():
			return
		}
	}
}

// learnOnce takes the hosts' API addresses from FleetStatus. A host of another fleet than the first one heard of is lost.
func (c *Client) learnOnce() {
	ctx, cancel := context.WithTimeout(c.base, c.opts.AttemptTimeout)
	defer cancel()
	l, _, _ := c.router.pick(route{}, "")
	if l == nil {
		return
	}
	st, e := try(ctx, c, how{idempotent: true}, c.opts.AttemptTimeout, l, fleetStatus, &fleetStatusRequest{})
	if e != nil {
		if c.base.Err() == nil {
			c.log.Debug("fleet status", zap.String("addr", l.addr), zap.Error(e))
		}
		return
	}
	if !c.sameFleet(st.FleetId) {
		l.refused(code.New(code.WrongFleet, "%s belongs to fleet %s, the other addresses to %s: fix the addresses", l.addr, st.FleetId, c.fleetID))
		return
	}
	var addrs []string
	for _, h := range st.Hosts {
		if h.Role == "witness" || h.Api == "" {
			continue
		}
		if a := completeAddr(h.Api, l.addr); a != "" {
			addrs = append(addrs, a)
		}
	}
	c.router.learn(addrs)
}

func (c *Client) sameFleet(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fleetID == "" {
		c.fleetID = id
	}
	return id == "" || c.fleetID == id
}
