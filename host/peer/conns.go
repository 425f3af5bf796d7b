package peer

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/tierq/tierq/host/peer/peerv1"
)

// A host that ends, whatever way, is noticed by the end of the connections that it has made to this one: its reports leave by them
// several times a second. That says less than it seems to, as a connection may break without its host; who wants to know asks the host's ports,
// and the other hosts.

// breakGrace is how long a host whose last connection has ended may take to be heard of again before it is silent, or half of
// Config.Silence if that is less.
const breakGrace = 500 * time.Millisecond

// inbound is a connection that another host has made. Guarded by Peers.mu.
type inbound struct {
	host   uint64 // 0: nothing has come by it yet
	closed bool
}

type inboundKey struct{}

// watchConns makes a server tell of its connections.
func (p *Peers) watchConns(s *http.Server) {
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		in := &inbound{}
		p.inbound.Store(c, in)
		return context.WithValue(ctx, inboundKey{}, in)
	}
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if state != http.StateClosed && state != http.StateHijacked {
			return
		}
		if in, ok := p.inbound.LoadAndDelete(c); ok {
			p.connEnded(in.(*inbound))
		}
	}
}

// connOf takes it that a request's connection is of a host of the fleet.
func (p *Peers) connOf(ctx context.Context, hostID uint64) {
	in, ok := ctx.Value(inboundKey{}).(*inbound)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if in.host == 0 && !in.closed {
		in.host = hostID
		p.conns[hostID]++
	}
}

// connEnded tells the backend when that was the last connection of a host.
func (p *Peers) connEnded(in *inbound) {
	p.mu.Lock()
	in.closed = true
	last := false
	if in.host != 0 {
		if p.conns[in.host]--; p.conns[in.host] == 0 {
			delete(p.conns, in.host)
			p.otherLocked(in.host).broke = time.Now()
			last = !p.closed
		}
	}
	p.mu.Unlock()
	if last {
		p.cfg.Backend.ConnectionLost(in.host)
	}
}

// connHasEnded says whether the connection of a request has ended.
func (p *Peers) connHasEnded(ctx context.Context) bool {
	in, ok := ctx.Value(inboundKey{}).(*inbound)
	p.mu.Lock()
	defer p.mu.Unlock()
	return ok && in.closed
}

// lost says whether nothing that a host has said is surely from after the end of its last connection.
func (o *other) lost() bool { return o.broke.After(o.sure) }

// alive says whether a host counts as alive for Peers.Alive.
func (o *other) alive(silence time.Duration) bool {
	switch {
	case o.heard.IsZero() || time.Since(o.heard) >= silence:
		return false
	case o.lost():
		return !o.ended && time.Since(o.broke) < min(breakGrace, silence/2)
	}
	return true
}

// dialled are the connections that this host has made lately, some of which may have ended. The zero value is ready to use.
type dialled struct {
	mu   sync.Mutex
	last map[string][]net.Conn // by address
}

// dialledEach is how many are remembered of each address: one is in use.
const dialledEach = 4

func (d *dialled) add(address string, c net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.last == nil {
		d.last = make(map[string][]net.Conn)
	}
	cs := append(d.last[address], c)
	d.last[address] = cs[max(0, len(cs)-dialledEach):]
}

// close ends them, so that the other hosts notice the end of this one.
func (d *dialled) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, cs := range d.last {
		for _, c := range cs {
			_ = c.Close()
		}
	}
	d.last = nil
}

// Lost says whether the last connection that a host had made to this one has ended, and nothing has been heard of it since.
func (p *Peers) Lost(hostID uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	return ok && p.conns[hostID] == 0 && o.lost()
}

// Ended takes it that a host that is lost has ended, as its ports show: it is silent at once, until it is heard of again. It returns false if
// it is not lost.
func (p *Peers) Ended(hostID uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.others[hostID]
	if !ok || p.conns[hostID] != 0 || !o.lost() {
		return false
	}
	o.ended = true
	return true
}

// AskLost asks a host whether it has lost another one; false without an answer.
func (p *Peers) AskLost(ctx context.Context, hostID, lost uint64) bool {
	resp, err := p.Service(hostID).Lost(ctx, connect.NewRequest(&peerv1.LostRequest{HostId: lost}))
	return err == nil && resp.Msg.Lost
}

// Lost implements PeerService.
func (s *service) Lost(_ context.Context, r *connect.Request[peerv1.LostRequest]) (*connect.Response[peerv1.LostResponse], error) {
	return connect.NewResponse(&peerv1.LostResponse{Lost: s.p.Lost(r.Msg.HostId)}), nil
}
