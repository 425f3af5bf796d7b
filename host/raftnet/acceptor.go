package raftnet

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
)

// acceptor is the side of a transport that takes what other hosts send: it accepts their connections, bounds how many there are, and ends them.
type acceptor struct {
	listen string // host:port to bind
	log    *zap.Logger
	// serve takes what comes by a connection until that ends, and returns why; nil at its orderly end. It may close it.
	serve func(c net.Conn) error

	ctx    context.Context // ends with close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener
	inbound  map[net.Conn]struct{}
	closed   bool
}

// newAcceptor binds nothing before start. Set serve first.
func newAcceptor(listen string, log *zap.Logger) *acceptor {
	a := &acceptor{listen: listen, log: log, inbound: make(map[net.Conn]struct{})}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	return a
}

// start binds and accepts.
func (a *acceptor) start() error {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := lc.Listen(a.ctx, "tcp", a.listen)
	if err != nil {
		return fmt.Errorf("the Raft address %s cannot be bound: %w", a.listen, err)
	}
	a.mu.Lock()
	a.listener = l
	a.mu.Unlock()
	a.tasks.Go(func() { a.accept(l) })
	return nil
}

// close ends the listener and all connections from elsewhere, and waits for their goroutines.
func (a *acceptor) close() {
	a.cancel()
	a.mu.Lock()
	a.closed = true
	if a.listener != nil {
		_ = a.listener.Close()
	}
	for c := range a.inbound {
		_ = c.Close()
	}
	a.mu.Unlock()
	a.tasks.Wait()
}

// accept never gives up before close: what stops it for a while, as too many open files, passes.
func (a *acceptor) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			if a.ctx.Err() != nil {
				return
			}
			a.log.Error("a connection to the Raft port was not accepted", zap.Error(err))
			select {
			case <-time.After(acceptPause):
			case <-a.ctx.Done():
				return
			}
			continue
		}
		setUserTimeout(c)
		if !a.enter(c) {
			_ = c.Close()
			continue
		}
		go func() {
			defer a.leave(c)
			if err := a.serve(c); err != nil && a.ctx.Err() == nil {
				a.log.Info("a connection to the Raft port ended", zap.Stringer("from", c.RemoteAddr()), zap.Error(err))
			}
		}()
	}
}

// enter counts a connection in, unless there are too many or the transport is closed.
func (a *acceptor) enter(c net.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	if len(a.inbound) >= maxInbound {
		a.log.Error("a connection to the Raft port was refused: there are too many", zap.Stringer("from", c.RemoteAddr()))
		return false
	}
	a.inbound[c] = struct{}{}
	a.tasks.Add(1)
	return true
}

func (a *acceptor) leave(c net.Conn) {
	_ = c.Close()
	a.mu.Lock()
	delete(a.inbound, c)
	a.mu.Unlock()
	a.tasks.Done()
}
