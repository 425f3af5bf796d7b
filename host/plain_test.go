package host

import (
	"testing"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/raftio"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/tierq/tierq/host/freeport"
	"github.com/tierq/tierq/host/raftnet"
)

//go:linkname newTCPTransport github.com/lni/dragonboat/v4/internal/transport.NewTCPTransport
func newTCPTransport(nhc config.NodeHostConfig, requests raftio.MessageHandler, chunks raftio.ChunkHandler) raftio.ITransport

// TestPlainSpeaksTheEnginesFormat: hosts from before raftnet.Plain send and receive by the engine's own transport, and a fleet is
// upgraded host by host.
func TestPlainSpeaksTheEnginesFormat(t *testing.T) {
	const patience = 30 * time.Second
	batches, chunks := make(chan raftpb.MessageBatch, 8), make(chan raftpb.Chunk, 8)
	onBatch := func(b raftpb.MessageBatch) { batches <- b }
	onChunk := func(c raftpb.Chunk) bool { chunks <- c; return true }
	plainAt, engineAt := freeport.For(t), freeport.For(t)
	plain := raftnet.NewPlain(plainAt, zaptest.NewLogger(t), onBatch, onChunk)
	engine := newTCPTransport(config.NodeHostConfig{RaftAddress: engineAt}, onBatch, onChunk)
	for _, tr := range []raftio.ITransport{plain, engine} {
		require.NoError(t, tr.Start())
		t.Cleanup(func() { require.NoError(t, tr.Close()) })
	}
	for name, way := range map[string]struct {
		from raftio.ITransport
		to   string
	}{"to the engine": {plain, engineAt}, "from the engine": {engine, plainAt}} {
		t.Run(name, func(t *testing.T) {
			c, err := way.from.GetConnection(t.Context(), way.to)
			require.NoError(t, err)
			defer c.Close()
			for _, size := range []int{0, 10, 3 << 20} {
				sent := raftpb.MessageBatch{SourceAddress: "a", BinVer: 2, Requests: []raftpb.Message{{
					Type: raftpb.Replicate, To: 2, From: 1, ShardID: 7, LogIndex: 9, HintHigh: 5, Entries: []raftpb.Entry{{Index: 10, Cmd: make([]byte, size)}},
				}}}
				require.NoError(t, c.SendMessageBatch(sent))
				select {
				case got := <-batches:
					require.Equal(t, "a", got.SourceAddress)
					require.Equal(t, uint64(5), got.Requests[0].HintHigh)
					require.Len(t, got.Requests[0].Entries[0].Cmd, size)
				case <-time.After(patience):
					require.FailNow(t, "nothing arrived")
				}
			}
			s, err := way.from.GetSnapshotConnection(t.Context(), way.to)
			require.NoError(t, err)
			for i := range uint64(3) {
				require.NoError(t, s.SendChunk(raftpb.Chunk{ShardID: 7, ChunkId: i, Data: make([]byte, 1<<20)}))
			}
			s.Close()
			require.Len(t, chunks, 3, "Close returns when all were taken")
			for range 3 {
				<-chunks
			}
		})
	}
}

// BenchmarkPlain takes one small message at a time from one transport to another of its kind.
func BenchmarkPlain(b *testing.B) {
	arrived := make(chan struct{}, 1)
	onBatch := func(raftpb.MessageBatch) { arrived <- struct{}{} }
	onChunk := func(raftpb.Chunk) bool { return true }
	for _, kind := range []struct {
		name string
		make func(address string) raftio.ITransport
	}{
		{"engine", func(a string) raftio.ITransport {
			return newTCPTransport(config.NodeHostConfig{RaftAddress: a}, onBatch, onChunk)
		}},
		{"plain", func(a string) raftio.ITransport { return raftnet.NewPlain(a, zap.NewNop(), onBatch, onChunk) }},
	} {
		b.Run(kind.name, func(b *testing.B) {
			address := freeport.For(b)
			tr := kind.make(address)
			require.NoError(b, tr.Start())
			defer func() { require.NoError(b, tr.Close()) }()
			c, err := tr.GetConnection(b.Context(), address)
			require.NoError(b, err)
			defer c.Close()
			batch := raftpb.MessageBatch{SourceAddress: "a", BinVer: 2, Requests: []raftpb.Message{replicate(7, 2, 9, 1)}}
			began := cpuTime(b)
			b.ResetTimer()
			for range b.N {
				require.NoError(b, c.SendMessageBatch(batch))
				<-arrived
			}
			b.ReportMetric(float64((cpuTime(b)-began).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

// cpuTime is what this process has taken of processors.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
