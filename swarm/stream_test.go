package swarm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

type pair struct{ key, value []byte }

func eachOf(pairs []pair) Each {
	return func(yield func(key, value []byte) error) error {
		for _, p := range pairs {
			if err := yield(p.key, p.value); err != nil {
				return err
			}
		}
		return nil
	}
}

func space(n int, size int) []pair {
	list := []pair{{[]byte{0x01}, []byte("meta")}}
	for a := range n {
		list = append(list, pair{binary.BigEndian.AppendUint64([]byte{kindMessage}, uint64(a)), bytes.Repeat([]byte{byte(a)}, size)})
	}
	return append(list, pair{[]byte{0x11, 9}, nil})
}

func readAll(t testing.TB, b []byte) (Header, []pair, Summary, error) {
	var h Header
	var got []pair
	s, err := Read(bytes.NewReader(b), func(x Header) error { h = x; return nil }, func(k, v []byte) error {
		got = append(got, pair{bytes.Clone(k), append([]byte{}, v...)})
		return nil
	})
	return h, got, s, err
}

func TestStreamRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 5000} {
		for _, size := range []int{0, 100, 300 << 10} {
			if n*size > 64<<20 {
				continue
			}
			in := space(n, size)
			var b bytes.Buffer
			h := Header{Shard: 7, Index: 42, FormatLevel: 2}
			wrote, err := Write(&b, h, eachOf(in))
			require.NoError(t, err)
			got, out, read, err := readAll(t, b.Bytes())
			require.NoError(t, err)
			require.Equal(t, h, got)
			require.Equal(t, wrote, read)
			require.Len(t, out, len(in))
			again, buckets, err := Digest(eachOf(out))
			require.NoError(t, err)
			require.Equal(t, wrote, again)
			require.Len(t, buckets, 2+(n+BucketAddresses-1)/BucketAddresses)
		}
	}
}

func TestDigestTellsOneBucket(t *testing.T) {
	a, b := space(10_000, 10), space(10_000, 10)
	b[5000].value = []byte("other")
	s1, l1, err := Digest(eachOf(a))
	require.NoError(t, err)
	s2, l2, err := Digest(eachOf(b))
	require.NoError(t, err)
	require.NotEqual(t, s1.Root, s2.Root)
	differ := 0
	for i := range l1 {
		if l1[i].Hash != l2[i].Hash {
			differ++
			require.EqualValues(t, BucketAddresses, l1[i].First)
		}
	}
	require.Equal(t, 1, differ)
}

// goldenStream is part of the format: shard 7, index 42, level 2; 01 -> "meta", 02 0000000000000001 -> "hello".
const goldenStream = "544945525153544d" + "0001" + "0000" + "00000002" + "0000000000000007" + "000000000000002a" + "f81abf13" +
	"01" + "00000017" + "00000002" + "91ed80a3" + "0101" + "046d657461" + "09020000000000000001" + "0568656c6c6f" +
	"02" + "0000000000000002" + "0000000000000013" + "a31ab62eb06646cbb7c66208ddd39f13687d885e63e9ed76b7c5a98c68786baa" + "68bd6b4f"

func TestStreamGolden(t *testing.T) {
	var b bytes.Buffer
	_, err := Write(&b, Header{Shard: 7, Index: 42, FormatLevel: 2}, eachOf([]pair{
		{[]byte{1}, []byte("meta")}, {binary.BigEndian.AppendUint64([]byte{2}, 1), []byte("hello")},
	}))
	require.NoError(t, err)
	got := hex.EncodeToString(b.Bytes())
	require.Equal(t, goldenStream, got)
}

// TestStreamDamage flips every byte and cuts at every length: each must be found.
func TestStreamDamage(t *testing.T) {
	var b bytes.Buffer
	_, err := Write(&b, Header{Shard: 7, Index: 42}, eachOf(space(20, 5)))
	require.NoError(t, err)
	whole := b.Bytes()
	for i := range whole {
		bad := bytes.Clone(whole)
		bad[i] ^= 0x20
		_, _, _, err := readAll(t, bad)
		require.ErrorIs(t, err, ErrCorrupt, "byte %d", i)
		_, _, _, err = readAll(t, whole[:i])
		require.ErrorIs(t, err, ErrCorrupt, "cut at %d", i)
	}
	_, _, _, err = readAll(t, append(bytes.Clone(whole), 0))
	require.ErrorIs(t, err, ErrCorrupt)
}

func TestWriterRefuses(t *testing.T) {
	w, err := NewWriter(io.Discard, Header{})
	require.NoError(t, err)
	require.NoError(t, w.Add([]byte{2}, nil))
	require.Error(t, w.Add([]byte{2}, nil))
	_, err = w.Close()
	require.Error(t, err, "an error sticks")
}

func TestInstallerStopsAndChecksTheShard(t *testing.T) {
	var i Installer
	var b bytes.Buffer
	require.NoError(t, i.Save(&b, 3, 9, 2, eachOf(space(10, 10)), nil))
	nothing := func(_, _ []byte) error { return nil }
	index, err := i.Load(bytes.NewReader(b.Bytes()), 3, nothing, nil)
	require.NoError(t, err)
	require.EqualValues(t, 9, index)
	_, err = i.Load(bytes.NewReader(b.Bytes()), 4, nothing, nil)
	require.ErrorIs(t, err, ErrCorrupt)
	stop := make(chan struct{})
	close(stop)
	_, err = i.Load(bytes.NewReader(b.Bytes()), 3, nothing, stop)
	require.ErrorIs(t, err, ErrStopped)
	require.ErrorIs(t, i.Save(io.Discard, 3, 9, 2, eachOf(space(10, 10)), stop), ErrStopped)
	full := errors.New("disk full")
	_, err = i.Load(bytes.NewReader(b.Bytes()), 3, func(_, _ []byte) error { return full }, nil)
	require.ErrorIs(t, err, full)
}

func FuzzRead(f *testing.F) {
	for _, n := range []int{0, 3} {
		var b bytes.Buffer
		_, err := Write(&b, Header{Shard: 1, Index: 2}, eachOf(space(n, 3)))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, pairs, s, err := readAll(t, b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("an error that does not wrap ErrCorrupt: %v", err)
			}
			return
		}
		again, _, err := Digest(eachOf(pairs))
		if err != nil || again != s {
			t.Fatalf("%v: %+v is read as %+v of %+v", err, s, again, h)
		}
	})
}

// TestVerifyNamesTheChunk: what a check says of a pair is told with the offset of its chunk.
func TestVerifyNamesTheChunk(t *testing.T) {
	var b bytes.Buffer
	want, err := Write(&b, Header{Shard: 7, Index: 42}, eachOf(space(2000, 1000)))
	require.NoError(t, err)
	h, s, err := Verify(bytes.NewReader(b.Bytes()), func(_, _ []byte) error { return nil })
	require.NoError(t, err)
	require.Equal(t, want, s)
	require.Equal(t, Header{Shard: 7, Index: 42}, h)
	bad := errors.New("no message")
	_, _, err = Verify(bytes.NewReader(b.Bytes()), func(key, _ []byte) error {
		if len(key) == 9 && key[8] == 0xff {
			return bad
		}
		return nil
	})
	require.ErrorIs(t, err, ErrCorrupt)
	require.ErrorContains(t, err, "at offset 36: key 02 00 00 00 00 00 00 00 ff: no message")
}
