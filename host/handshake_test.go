package host

import (
	"context"
	"testing"

	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// loopTransport hands what is sent to the handlers of another host.
type loopTransport struct {
	raftio.ITransport
	messages raftio.MessageHandler
	chunks   raftio.ChunkHandler
	taken    bool
}

func (l *loopTransport) GetConnection(context.Context, string) (raftio.IConnection, error) {
	return loopConn{l}, nil
}

func (l *loopTransport) GetSnapshotConnection(context.Context, string) (raftio.ISnapshotConnection, error) {
	return loopConn{l}, nil
}

type loopConn struct{ l *loopTransport }

func (c loopConn) Close() {}

func (c loopConn) SendMessageBatch(b raftpb.MessageBatch) error {
	c.l.messages(b)
	return nil
}

func (c loopConn) SendChunk(chunk raftpb.Chunk) error {
	c.l.taken = c.l.chunks(chunk)
	return nil
}

// TestFleetInRaftHandshake: what comes from another fleet is dropped before the engine sees it, and told; the engine sees what it would without.
func TestFleetInRaftHandshake(t *testing.T) {
	const mine, other = "00112233445566778899aabbccddeeff", "10112233445566778899aabbccddeeff"
	for name, tc := range map[string]struct {
		from, to string
		taken    bool
	}{
		"the same": {mine, mine, true}, "another": {other, mine, false}, "the caller has none yet": {"", mine, true}, "the callee has none yet": {mine, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			core, seen := observer.New(zap.ErrorLevel)
			g := &gatekeeper{fleet: func() string { return tc.to }, deployment: 1, log: zap.New(core)}
			var batches []raftpb.MessageBatch
			var chunks []raftpb.Chunk
			loop := &loopTransport{
				messages: g.messages(func(b raftpb.MessageBatch) { batches = append(batches, b) }),
				chunks:   g.chunks(func(c raftpb.Chunk) bool { chunks = append(chunks, c); return true }),
			}
			tr := &signingTransport{loop, func() string { return tc.from }}
			c, err := tr.GetConnection(t.Context(), "h:1")
			require.NoError(t, err)
			require.NoError(t, c.SendMessageBatch(raftpb.MessageBatch{SourceAddress: Target(2), DeploymentId: 1}))
			s, err := tr.GetSnapshotConnection(t.Context(), "h:1")
			require.NoError(t, err)
			require.NoError(t, s.SendChunk(raftpb.Chunk{ShardID: 3, From: 2, DeploymentId: 1}))
			require.Equal(t, tc.taken, loop.taken)
			if !tc.taken {
				require.Empty(t, batches)
				require.Empty(t, chunks)
				require.Equal(t, 1, seen.Len(), "told once in a while")
				require.Contains(t, seen.All()[0].Message, "another fleet")
				return
			}
			require.Equal(t, []raftpb.MessageBatch{{SourceAddress: Target(2), DeploymentId: 1}}, batches)
			require.Equal(t, []raftpb.Chunk{{ShardID: 3, From: 2, DeploymentId: 1}}, chunks)
			require.Zero(t, seen.Len())
		})
	}
}
