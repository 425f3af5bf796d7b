package host

import (
	"context"
	"errors"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
)

// reconnecting makes connections for messages that are made anew when the other host's process is no longer the one that they
// lead to. Without it the first messages on such a connection are lost, and the engine then sends nothing to that host for up to a
// second. Hosts that do not lead send one another nothing but votes, so those would be what is lost.
type reconnecting struct {
	raftio.ITransport
	ctx     context.Context
	process func(target string) uint64 // which process is at an address; 0: not known
}

// GetConnection implements raftio.ITransport.
func (t *reconnecting) GetConnection(ctx context.Context, target string) (raftio.IConnection, error) {
	c := &reconnectingConn{t: t, target: target}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// reconnectingConn is one such connection. Not safe for concurrent use.
type reconnectingConn struct {
	t       *reconnecting
	target  string
	under   raftio.IConnection // nil: there is none
	process uint64
}

func (c *reconnectingConn) connect(ctx context.Context) (err error) {
	c.process = c.t.process(c.target)
	c.under, err = c.t.ITransport.GetConnection(ctx, c.target)
	return err
}

// Close implements raftio.IConnection.
func (c *reconnectingConn) Close() {
	if c.under != nil {
		c.under.Close()
		c.under = nil
	}
}

// SendMessageBatch implements raftio.IConnection. A batch that could not be sent is sent once more on a new connection: what a
// transport does not take whole, the other host does not take at all.
func (c *reconnectingConn) SendMessageBatch(batch raftpb.MessageBatch) error {
	var failed error
	if c.under != nil && c.process == c.t.process(c.target) {
		if failed = c.under.SendMessageBatch(batch); failed == nil {
			return nil
		}
	}
	c.Close()
	if err := c.connect(c.t.ctx); err != nil {
		return errors.Join(failed, err)
	}
	return c.under.SendMessageBatch(batch)
}
