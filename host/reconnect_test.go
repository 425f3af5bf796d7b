package host

import (
	"context"
	"errors"
	"testing"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
)

// dialled is a transport whose connections are made as the test says.
type dialled struct {
	raftio.ITransport
	conns []*dialledConn
	err   error
}

type dialledConn struct {
	recorder
	err error
}

func (d *dialled) GetConnection(context.Context, string) (raftio.IConnection, error) {
	if d.err != nil {
		return nil, d.err
	}
	c := &dialledConn{}
	d.conns = append(d.conns, c)
	return c, nil
}

func (c *dialledConn) SendMessageBatch(b raftpb.MessageBatch) error {
	if c.err != nil {
		return c.err
	}
	return c.recorder.SendMessageBatch(b)
}

// TestReconnect: a vote reaches a host that was restarted since anything was last sent to it.
func TestReconnect(t *testing.T) {
	d, process := &dialled{}, uint64(1)
	transport := &reconnecting{ITransport: d, ctx: context.Background(), process: func(string) uint64 { return process }}
	c, err := transport.GetConnection(context.Background(), "h:1")
	require.NoError(t, err)
	vote := raftpb.MessageBatch{Requests: []raftpb.Message{{Type: raftpb.RequestPreVote}}}
	require.NoError(t, c.SendMessageBatch(vote))
	require.NoError(t, c.SendMessageBatch(vote))
	require.Len(t, d.conns, 1)
	require.Len(t, d.conns[0].sent, 2)

	process = 2 // a write to the former process would not fail
	require.NoError(t, c.SendMessageBatch(vote))
	require.Len(t, d.conns, 2)
	require.True(t, d.conns[0].closed)
	require.Len(t, d.conns[1].sent, 1)

	d.conns[1].err = errors.New("reset by peer")
	require.NoError(t, c.SendMessageBatch(vote), "what was not taken goes by a new connection")
	require.Len(t, d.conns, 3)
	require.True(t, d.conns[1].closed)
	require.Len(t, d.conns[2].sent, 1)

	d.conns[2].err, d.err = errors.New("broken pipe"), errors.New("refused")
	require.ErrorIs(t, c.SendMessageBatch(vote), d.err, "the engine hears of a host that is gone")
	require.True(t, d.conns[2].closed)
	c.Close()
}
