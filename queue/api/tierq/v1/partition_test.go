package tierqv1

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The partition of a key never changes: these are the vectors of docs/format/partition.md.
func TestPartitionOfKeyGolden(t *testing.T) {
	for _, v := range []struct {
		key  string
		want [4]uint32 // of 2, 4, 7 and 64 partitions
	}{
		{"", [4]uint32{0, 2, 1, 38}},
		{"a", [4]uint32{1, 3, 1, 27}},
		{"b", [4]uint32{0, 0, 2, 16}},
		{"customer-1", [4]uint32{0, 2, 2, 26}},
		{"customer-2", [4]uint32{1, 3, 3, 51}},
		{"\x00", [4]uint32{1, 3, 2, 59}},
		{"\xff\xfe", [4]uint32{0, 0, 4, 32}},
		{strings.Repeat("k", 255), [4]uint32{0, 0, 5, 24}},
	} {
		var got [4]uint32
		for i, n := range []uint32{2, 4, 7, 64} {
			got[i] = PartitionOfKey([]byte(v.key), n)
		}
		require.Equal(t, v.want, got, "key %q", v.key)
		require.Zero(t, PartitionOfKey([]byte(v.key), 1))
	}
}

func TestPartitionsAreEven(t *testing.T) {
	const keys = 40_000
	for _, n := range []uint32{2, 3, 4, 16, 64} {
		for _, format := range []string{"%d", "user-%d", "%08d", "%d.eu"} {
			count := make([]int, n)
			for i := range keys {
				count[PartitionOfKey(fmt.Appendf(nil, format, i), n)]++
			}
			for p, c := range count {
				require.InEpsilon(t, keys/int(n), c, 0.25, "partition %d of %d, keys like %s", p, n, format)
			}
		}
	}
}

func TestPartitionOfMessage(t *testing.T) {
	p, ok := (&OutMessage{Key: []byte("k"), DedupId: []byte("d")}).PartitionOf(7)
	require.True(t, ok)
	require.Equal(t, PartitionOfKey([]byte("k"), 7), p)
	p, ok = (&OutMessage{DedupId: []byte("d")}).PartitionOf(7)
	require.True(t, ok)
	require.Equal(t, PartitionOfKey([]byte("d"), 7), p)
	_, ok = (&OutMessage{Body: []byte("b")}).PartitionOf(7)
	require.False(t, ok)
}
