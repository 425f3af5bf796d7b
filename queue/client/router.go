package client

import (
	"net"
	"strings"
	"sync"
	"time"

	"github.com/tierq/tierq/queue/code"
)

// route says whom a call wants to reach. The zero value is any full host.
type route struct {
	kind      routeKind
	queue     string
	partition uint32
	group     string
}

type routeKind uint8

const (
	toAny routeKind = iota
	toLeader
	toHome
)

// router knows the addresses of the fleet and who serves what. Hints are only hints: what they point to is tried first
// while it answers, and forgotten when it does not.
//
// Invariants: a seed is never removed; an address in backoff is passed over while another is usable; every hint that led
// to a failure is forgotten.
type router struct {
	clock Clock
	pause func(n int) time.Duration
	// hintPause bounds what is left of an address's pause when a hint names it.
	hintPause func() time.Duration

	mu      sync.Mutex
	seeds   []string
	learned []string
	links   map[string]*link
	cursor  int // into addrs(): the address that unhinted calls use
	hints   map[route]string
	closed  bool
}

// maxHints bounds the cache; beyond it everything is forgotten and learned again.
const maxHints = 100_000

func newRouter(seeds []string, clock Clock, pause func(int) time.Duration, hintPause func() time.Duration) *router {
	r := &router{clock: clock, pause: pause, hintPause: hintPause, links: map[string]*link{}, hints: map[route]string{}}
	for _, s := range seeds {
		r.seeds = appendNew(r.seeds, normalAddr(s))
	}
	return r
}

func normalAddr(a string) string {
	return strings.TrimPrefix(strings.TrimPrefix(strings.TrimSpace(a), "http://"), "https://")
}

func appendNew(list []string, a string) []string {
	for _, x := range list {
		if x == a {
			return list
		}
	}
	return append(list, a)
}

func (r *router) addrsLocked() []string {
	all := append([]string(nil), r.seeds...)
	for _, a := range r.learned {
		all = appendNew(all, a)
	}
	return all
}

func (r *router) linkLocked(addr string) *link {
	l := r.links[addr]
	if l == nil {
		l = newLink(addr)
		if r.closed {
			l.fire(EventClose)
		}
		r.links[addr] = l
	}
	return l
}

// pick chooses where a call goes now, or says how long to wait until an address may be tried. With neither a link nor a
// wait, no address will ever do: err says why. avoid is passed over while anything else is usable.
func (r *router) pick(to route, avoid string) (l *link, wait time.Duration, err *code.Error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock.Now()
	if addr, ok := r.hints[to]; ok && addr != avoid {
		if l := r.linkLocked(addr); takeIfUsable(l, now) {
			return l, 0, nil
		}
	}
	addrs := r.addrsLocked()
	var soonest time.Time
	var fallback *link
	for i := range addrs {
		l := r.linkLocked(addrs[(r.cursor+i)%len(addrs)])
		ok, due := l.usable(now)
		switch {
		case ok && l.addr != avoid:
			l.take(now)
			return l, 0, nil
		case ok:
			fallback = l
		case !due.IsZero() && (soonest.IsZero() || due.Before(soonest)):
			soonest = due
		}
	}
	if fallback != nil {
		fallback.take(now)
		return fallback, 0, nil
	}
	if !soonest.IsZero() {
		return nil, max(soonest.Sub(now), time.Millisecond), nil
	}
	return nil, 0, r.fatalLocked(addrs)
}

func takeIfUsable(l *link, now time.Time) bool {
	ok, _ := l.usable(now)
	if ok {
		l.take(now)
	}
	return ok
}

func (r *router) fatalLocked(addrs []string) *code.Error {
	for _, a := range addrs {
		if _, e := r.linkLocked(a).snapshot(); e != nil {
			return e
		}
	}
	return errClosed()
}

// hint remembers that addr serves to. An address without a host ("`:7188`") is completed from the one that named it. It
// returns the address, or "" if there is none to remember.
func (r *router) hint(to route, addr, namedBy string) string {
	addr = completeAddr(addr, namedBy)
	if addr == "" || to.kind == toAny {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.hints) >= maxHints {
		clear(r.hints)
	}
	r.hints[to] = addr
	// A host that is named as the one to go to is up in the fleet's eyes: do not sit out a long pause of our own.
	r.linkLocked(addr).hasten(r.clock.Now().Add(r.hintPause()))
	return addr
}

func completeAddr(addr, namedBy string) string {
	host, port, err := net.SplitHostPort(normalAddr(addr))
	if err != nil || port == "" || port == "0" {
		return ""
	}
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host, _, err = net.SplitHostPort(namedBy)
		if err != nil {
			return ""
		}
	}
	return net.JoinHostPort(host, port)
}

// usable reports whether a call may go to addr now.
func (r *router) usable(addr string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	ok, _ := r.linkLocked(addr).usable(r.clock.Now())
	return ok
}

// forget drops the hint for to if it still names addr.
func (r *router) forget(to route, addr string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hints[to] == addr {
		delete(r.hints, to)
	}
}

// failed notes that addr did not answer: its link pauses, unhinted calls move on, hints to it are dropped. If it did answer until
// now, the others are tried soon, however long they were away: one of them has to do its work.
func (r *router) failed(l *link) {
	now := r.clock.Now()
	news := l.failed(now, r.pause)
	r.mu.Lock()
	defer r.mu.Unlock()
	if news {
		for _, other := range r.links {
			if other != l {
				other.renew(now, r.pause)
			}
		}
	}
	r.moveOnLocked(l.addr)
	for to, a := range r.hints {
		if a == l.addr {
			delete(r.hints, to)
		}
	}
}

// moveOn lets unhinted calls use the next address if they use addr now.
func (r *router) moveOn(addr string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.moveOnLocked(addr)
}

func (r *router) moveOnLocked(addr string) {
	addrs := r.addrsLocked()
	if addrs[r.cursor%len(addrs)] == addr {
		r.cursor = (r.cursor + 1) % len(addrs)
	}
}

// learn replaces the learned addresses; seeds stay.
func (r *router) learn(addrs []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	current := ""
	if all := r.addrsLocked(); len(all) > 0 {
		current = all[r.cursor%len(all)]
	}
	r.learned = nil
	for _, a := range addrs {
		r.learned = appendNew(r.learned, a)
	}
	r.cursor = 0
	for i, a := range r.addrsLocked() {
		if a == current {
			r.cursor = i
		}
	}
	r.dropStrayLinksLocked()
}

// dropStrayLinksLocked forgets links to addresses that nothing names any more, so a fleet that moves does not leak them.
func (r *router) dropStrayLinksLocked() {
	named := map[string]bool{}
	for _, a := range r.addrsLocked() {
		named[a] = true
	}
	for _, a := range r.hints {
		named[a] = true
	}
	for a := range r.links {
		if !named[a] {
			delete(r.links, a)
		}
	}
}

// allFailed reports whether every known address is in Backoff, or lost.
func (r *router) allFailed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.addrsLocked() {
		if s, _ := r.linkLocked(a).snapshot(); s != Backoff && s != Fatal {
			return false
		}
	}
	return true
}

// list names the known addresses.
func (r *router) list() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.addrsLocked(), ", ")
}

func (r *router) states() map[string]State {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := map[string]State{}
	for _, a := range r.addrsLocked() {
		m[a], _ = r.linkLocked(a).snapshot()
	}
	return m
}

func (r *router) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.links {
		l.reset()
	}
}

func (r *router) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for _, l := range r.links {
		l.fire(EventClose)
	}
}

func errClosed() *code.Error {
	return &code.Error{Code: code.ShuttingDown, Effect: code.EffectNone, Text: "the client is closed"}
}
