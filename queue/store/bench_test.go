package store

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func benchShard(b *testing.B) *Shard {
	s := openMem(b)
	for id := range uint64(100) {
		h := shard(b, s, id+1)
		for i := range 20 {
			put(b, h, fmt.Sprintf("k%03d", i), "value of some length")
		}
	}
	return shard(b, s, 50)
}

func BenchmarkSnapshot(b *testing.B) {
	h := benchShard(b)
	for _, c := range []struct {
		name string
		take func() *Snapshot
	}{{"long", h.Snapshot}, {"read", h.ReadSnapshot}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_ = c.take().Close()
			}
		})
	}
}

func BenchmarkView(b *testing.B) {
	h := benchShard(b)
	key := []byte("k007")
	b.ReportAllocs()
	for b.Loop() {
		found, err := h.View(key, func([]byte) error { return nil })
		if err != nil || !found {
			b.Fatal(err)
		}
	}
}

func BenchmarkCommit(b *testing.B) {
	h := benchShard(b)
	key, value := []byte("k007"), make([]byte, 256)
	b.ReportAllocs()
	for b.Loop() {
		batch := h.NewBatch()
		batch.Set(key, value)
		batch.Set([]byte("meta"), value[:64])
		require.NoError(b, h.Commit(batch))
	}
}
