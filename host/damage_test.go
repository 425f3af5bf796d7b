package host

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

// tables returns the store's table files that contain a text.
func (f *testFleet) tables(id uint64, text string) []string {
	f.t.Helper()
	found, err := filepath.Glob(filepath.Join(f.config(id).DataDir, stateDir, "*.sst"))
	require.NoError(f.t, err)
	var out []string
	for _, path := range found {
		b, err := os.ReadFile(path)
		require.NoError(f.t, err)
		if bytes.Contains(b, []byte(text)) {
			out = append(out, path)
		}
	}
	return out
}

// fill publishes bodies that are found again in the store's files, and makes them durable.
func (f *testFleet) fill(shard uint64, text string) {
	f.t.Helper()
	random := rand.NewChaCha8([32]byte([]byte(text + strings.Repeat("x", 32))[:32])) // so that they are stored as they are, in blocks of their own
	for seq := range 30 {
		body := make([]byte, 6000)
		_, _ = random.Read(body)
		h := f.leader(shard)
		stamp, err := h.Stamp(shard)
		require.NoError(f.t, err)
		cmd, err := queue.EncodeCommand(nil, &queue.Enqueue{Stamp: stamp, Publishes: []queue.Publish{{
			Producer: queue.Producer{Kind: queue.ProducerClient, ID: 3}, Low: 1,
			Messages: []queue.Message{{Seq: queue.Seq(seq + 1), Body: append(fmt.Appendf(nil, "%s-%d-", text, seq), body...)}},
		}}})
		require.NoError(f.t, err)
		_, err = h.Propose(within(f.t, patience), shard, cmd)
		require.NoError(f.t, err)
	}
}

// TestDamagedStore: one shard's messages are damaged on a host's disk. The host starts and serves its other shard; the damaged replica is
// found when its state is read, stopped, and made anew on the same host. A store that does not open at all costs the host its
// replicas, and nobody a message.
func TestDamagedStore(t *testing.T) {
	f := newTestFleet(t, 2, 1)
	f.startAll()
	a, b := f.create(1, "a", 2, 1).Shards[0], f.create(2, "b", 2, 1).Shards[0]
	for _, shard := range []uint64{a, b} {
		f.settled(shard)
	}
	f.fill(a, "alpha-body")
	f.hosts[2].states.store.Sync()
	f.fill(b, "beta-body")
	f.equal(a, 1, 2)
	f.equal(b, 1, 2)
	f.hosts[2].states.store.Sync()
	f.stop(2)

	// A flipped byte in the middle of a body of shard a.
	hit := 0
	for _, path := range f.tables(2, "alpha-body-15") {
		content, err := os.ReadFile(path)
		require.NoError(t, err)
		for at := bytes.Index(content, []byte("alpha-body-15")); at >= 0; at = -1 {
			content[at+3] ^= 0xff
			hit++
		}
		require.NoError(t, os.WriteFile(path, content, 0o600))
	}
	require.NotZero(t, hit, "no table has a body as it was published")
	had := queue.ReplicaID(f.replicaOn(a, 2))
	f.start(2)
	f.ready()
	eventually(t, "the other shard is served", func() bool { _, ok := f.hosts[2].Reader(b); return ok })
	eventually(t, "the damage is found and the replica rebuilt", func() bool {
		if h := f.hosts[2]; len(h.Damaged()) == 0 {
			if _, ok := h.Reader(a); ok { // whoever reads it whole, as `tierq shard digest` does, tells of it
				_, err := digest(h, a)
				h.ReadFailed(a, err)
			}
		}
		p, _ := f.hosts[1].Catalog().Placement(a)
		r, _ := p.OnHost(2)
		_, moves := f.hosts[1].Catalog().Move(a)
		return r.ID > had && r.Votes() && !moves
	})
	f.equal(a, 1, 2)
	f.equal(b, 1, 2)
	require.Empty(t, f.hosts[2].Damaged())
	require.EqualValues(t, 2, f.replicaOn(b, 2), "the other shard's replica is the one that it was")

	// Now the whole store cannot be opened.
	f.stop(2)
	found, err := filepath.Glob(filepath.Join(f.config(2).DataDir, stateDir, "MANIFEST-*"))
	require.NoError(t, err)
	for _, path := range found {
		require.NoError(t, os.Truncate(path, 20))
	}
	hadA, hadB := queue.ReplicaID(f.replicaOn(a, 2)), queue.ReplicaID(f.replicaOn(b, 2))
	f.start(2)
	f.rebuilt(a, 2, hadA)
	f.rebuilt(b, 2, hadB)
	f.equal(a, 1, 2)
	f.equal(b, 1, 2)
	kept, err := filepath.Glob(filepath.Join(f.config(2).DataDir, stateDir+".damaged-*"))
	require.NoError(t, err)
	require.Len(t, kept, 1, "nothing is thrown away")
	require.EqualValues(t, 2, f.replicaOn(catalog.ShardID, 2))
}
