package home

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"pgregory.net/rapid"
)

var goldenSecret = []byte("a secret that every host knows")

var goldenReceipt = Receipt{
	Shard: 0x0102030405060708, Recovery: 3, Group: 17, Lease: queue.LeaseName{Epoch: 1<<32 + 5, Number: 99}, Address: 1<<48 - 1,
}

// The text of a receipt is held by consumers across upgrades.
func TestReceiptGolden(t *testing.T) {
	const want = "AQECAwQFBgcIAAAAAAAAAAMAAAAAAAAAEQAAAAEAAAAFAAD_______8AAAAAAAAAY-MDE2g4RU1yUH3luftuPfA"
	s := NewReceipts(goldenSecret)
	require.Equal(t, want, s.Encode(goldenReceipt))
	got, err := s.Decode(want)
	require.NoError(t, err)
	require.Equal(t, goldenReceipt, got)
}

func TestReceiptRoundTrip(t *testing.T) {
	s := NewReceipts(goldenSecret)
	rapid.Check(t, func(t *rapid.T) {
		u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		r := Receipt{
			Shard: u("shard"), Recovery: u("recovery"), Group: queue.GroupID(u("group")),
			Lease: queue.LeaseName{Epoch: queue.Epoch(u("epoch")), Number: u("number")}, Address: queue.Address(u("address")),
		}
		text := s.Encode(r)
		require.Len(t, text, receiptText)
		got, err := s.Decode(text)
		require.NoError(t, err)
		require.Equal(t, r, got)
	})
}

// Any other text than the one that was given out is refused, and nothing tells why.
func TestReceiptForgeries(t *testing.T) {
	s := NewReceipts(goldenSecret)
	text := s.Encode(goldenReceipt)
	refused := func(what, text string) {
		t.Helper()
		_, err := s.Decode(text)
		require.Equal(t, code.InvalidReceipt, refusal(t, err), what)
	}
	for i := range text {
		for _, c := range "Ag-_=\n\r +/" {
			if text[i] != byte(c) {
				refused("another character", text[:i]+string(c)+text[i+1:])
			}
		}
		refused("cut", text[:i])
	}
	refused("padded", text+"=")
	refused("with a line break", text+"\n")
	refused("twice", text+text)
	_, err := NewReceipts([]byte("another secret, of another fleet")).Decode(text)
	require.Error(t, err)
	require.False(t, strings.ContainsAny(text, "+/="), "safe in a URL")
}

func FuzzReceiptDecode(f *testing.F) {
	s := NewReceipts(goldenSecret)
	f.Add(s.Encode(goldenReceipt))
	f.Add("")
	f.Add(strings.Repeat("A", receiptText))
	f.Fuzz(func(t *testing.T, text string) {
		if r, err := s.Decode(text); err == nil {
			require.Equal(t, text, s.Encode(r), "one text a receipt")
		}
	})
}

func TestBackoff(t *testing.T) {
	p := policy(queue.GroupConfig{})
	var got []uint64
	for n := uint32(1); n <= 8; n++ {
		got = append(got, backoffMs(&p, n, 0))
	}
	require.Equal(t, []uint64{1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000}, got)
	p.JitterPermille = 100
	require.Equal(t, uint64(1000), backoffMs(&p, 1, 0))
	require.Equal(t, uint64(1100), backoffMs(&p, 1, 1<<64-1), "the greatest jitter")
	p.DelaysMs = []uint64{5, 50, 500}
	p.JitterPermille = 0
	require.Equal(t, uint64(5), backoffMs(&p, 1, 0))
	require.Equal(t, uint64(500), backoffMs(&p, 9, 0))
	wild := queue.GroupConfig{BackoffBaseMs: 1 << 62, BackoffCapMs: 1 << 63, BackoffFactorPermille: 1 << 31}
	require.LessOrEqual(t, backoffMs(&wild, 1<<31, 7), uint64(1<<63))
}

func TestCutReason(t *testing.T) {
	require.Equal(t, "short", cutReason("short"))
	require.Len(t, cutReason(strings.Repeat("x", 300)), MaxReason)
	long := strings.Repeat("é", 200)
	cut := cutReason(long)
	require.Len(t, cut, MaxReason-1, "not in the middle of a character")
	require.True(t, strings.HasPrefix(long, cut))
}
