package queue

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// lane record helpers: bytes as a writer with other ideas might have left them.
func rawLane(presence byte, w, floor, recomputed Address) []byte {
	b := []byte{presence}
	return appendU48(appendU48(appendU48(b, w), floor), recomputed)
}

func rawLanes(lane func(i int) []byte) []byte {
	var b []byte
	for i := range LaneCount {
		b = append(b, lane(i)...)
	}
	return b
}

func diverged() Watermark {
	w := NewWatermark(100)
	for i := range LaneCount {
		w.Set(i, Address(1000+i*7))
	}
	return w
}

func TestWatermarkGolden(t *testing.T) {
	empty, start, top, many := Watermark{}, NewWatermark(0), NewWatermark(MaxAddress), diverged()
	golden(t, "watermark_empty", "64 empty lanes", empty.Encode())
	golden(t, "watermark_start", "64 lanes at address 0, present", start.Encode())
	golden(t, "watermark_top", "64 lanes at the greatest address", top.Encode())
	golden(t, "watermark_diverged", "floor 100, lane i at 1000 + 7i", many.Encode())
}

func TestWatermarkRoundTripsInBothLengths(t *testing.T) {
	one := NewWatermark(5)
	one.Set(63, 9)
	for _, c := range []struct {
		w     Watermark
		bytes int
	}{
		{Watermark{}, 19}, {NewWatermark(0), 19}, {NewWatermark(7), 19}, {NewWatermark(MaxAddress), 19},
		{diverged(), 1216}, {one, 1216},
	} {
		blob := c.w.Encode()
		require.Len(t, blob, c.bytes)
		require.Equal(t, c.bytes, c.w.EncodedBytes())
		require.Equal(t, c.bytes == 19, c.w.Uniform())
		got, err := DecodeWatermark(LayoutPackedV2, blob)
		require.NoError(t, err)
		require.Equal(t, c.w, got)
		require.Equal(t, blob, got.Encode())
	}
}

func TestWatermarkOfAnyOtherLengthIsRefused(t *testing.T) {
	for n := 0; n <= 1300; n++ {
		_, err := DecodeWatermark(LayoutPackedV2, make([]byte, n))
		switch n {
		case LaneBytes: // 64 empty lanes
			require.NoError(t, err)
		case WatermarkBytes: // 64 empty lanes in the long form
			require.ErrorContains(t, err, "lanes are all equal")
		default:
			require.ErrorIs(t, err, ErrWatermark)
			require.ErrorContains(t, err, fmt.Sprintf("packed-v2 of %d bytes: want 19 or 1216", n))
		}
		_, err = DecodeWatermark(LayoutPackedV1, make([]byte, n))
		require.Equal(t, n == WatermarkBytes, err == nil, "packed-v1 of %d bytes: %v", n, err)
	}
}

func TestWatermarkLaneThatBreaksAnInvariantIsRefused(t *testing.T) {
	good := rawLane(1, 9, 9, 9) // W at its floor is fine
	other := rawLane(1, 10, 9, 10)
	_, err := DecodeWatermark(LayoutPackedV2, good)
	require.NoError(t, err)

	type bad struct {
		lane []byte
		text string
	}
	cases := []bad{
		{rawLane(1, 9, 3, 8), "W 9 is not W_recomputed 8"},
		{rawLane(1, 8, 3, 9), "W 8 is not W_recomputed 9"},
		{rawLane(1, 9, 10, 9), "W 9 is below W_floor 10"},
		{rawLane(1, 0, 1, 0), "W 0 is below W_floor 1"},
	}
	for p := 2; p <= 255; p++ {
		cases = append(cases, bad{rawLane(byte(p), 9, 9, 9), fmt.Sprintf("presence %d is neither 0 nor 1", p)})
	}
	for at := 1; at < LaneBytes; at++ { // each byte of an empty lane
		b := make([]byte, LaneBytes)
		b[at] = 1
		cases = append(cases, bad{b, "an empty lane is not all zero"})
	}
	for _, c := range cases {
		_, err := DecodeWatermark(LayoutPackedV2, c.lane)
		require.ErrorIs(t, err, ErrWatermark)
		require.ErrorContains(t, err, "lane 0: "+c.text)
		for _, layout := range []string{LayoutPackedV1, LayoutPackedV2} {
			for _, at := range []int{0, 17, 63} {
				_, err := DecodeWatermark(layout, rawLanes(func(i int) []byte {
					if i == at {
						return c.lane
					}
					return other
				}))
				require.ErrorContains(t, err, fmt.Sprintf("lane %d: %s", at, c.text))
			}
		}
	}
}

func TestWatermarkLongFormOfEqualLanesIsRefused(t *testing.T) {
	blob := rawLanes(func(int) []byte { return rawLane(1, 9, 3, 9) })
	_, err := DecodeWatermark(LayoutPackedV2, blob)
	require.ErrorContains(t, err, "its writer stores 19 bytes")
	blob[LaneBytes*5+6]++ // W of lane 5
	blob[LaneBytes*5+18]++
	_, err = DecodeWatermark(LayoutPackedV2, blob)
	require.NoError(t, err)
}

func TestWatermarkV1IsReadAndTheNextWriteIsV2(t *testing.T) {
	for _, w := range []Watermark{NewWatermark(7), diverged(), {}} {
		v1 := w.AppendV1(nil)
		require.Len(t, v1, WatermarkBytes)
		got, err := DecodeWatermark(LayoutPackedV1, v1)
		require.NoError(t, err)
		require.Equal(t, w, got)
		require.Equal(t, w.Encode(), got.Encode())
	}
}

// A reader that knows only v1 is stopped by the name, and were it not, by the length.
func TestWatermarkV2StopsAnOldReaderTwice(t *testing.T) {
	w := NewWatermark(7)
	blob := w.Encode()
	_, err := DecodeWatermark(LayoutPackedV1, blob)
	require.ErrorContains(t, err, "packed-v1 of 19 bytes: want 1216")
	for _, layout := range []string{"packed-v3", "", "PACKED-V2", "packed-v2 "} {
		_, err = DecodeWatermark(layout, blob)
		require.ErrorIs(t, err, ErrWatermark)
		require.ErrorContains(t, err, fmt.Sprintf("layout %q is unknown", layout))
	}
}

func TestWatermarkPresentAtZeroIsNotEmpty(t *testing.T) {
	empty, start := Watermark{}, NewWatermark(0)
	require.NotEqual(t, empty, start)
	require.NotEqual(t, empty.Encode(), start.Encode())
	require.False(t, empty.Covers(0))
	require.True(t, start.Covers(0))
	require.False(t, start.Covers(1))
	mixed := start
	mixed.lanes[9] = Lane{}
	require.False(t, mixed.Uniform())
	got, err := DecodeWatermark(LayoutPackedV2, mixed.Encode())
	require.NoError(t, err)
	require.Equal(t, mixed, got)
}

func TestWatermarkFloorIsThatOfTheStuckLane(t *testing.T) {
	w := NewWatermark(10)
	for i := range LaneCount {
		if i != 42 {
			w.Set(i, 1_000_000)
		}
	}
	require.Equal(t, Address(10), w.Floor())
	require.Equal(t, WatermarkBytes, w.EncodedBytes(), "however far the others run ahead")
	require.False(t, w.Covers(64+42))
	require.True(t, w.Covers(64+43))
	w.Set(42, 1_000_000)
	require.Equal(t, Address(1_000_000), w.Floor())
	require.Equal(t, LaneBytes, w.EncodedBytes(), "it heals to the short form")
}

func TestWatermarkRaise(t *testing.T) {
	w := NewWatermark(10)
	w.Set(3, 500)
	w.Raise(100)
	require.Equal(t, Lane{Present: true, W: 500, Floor: 100, Recomputed: 500}, w.Lane(3))
	require.Equal(t, Lane{Present: true, W: 100, Floor: 100, Recomputed: 100}, w.Lane(4))
	before := w
	w.Raise(50)
	require.Equal(t, before, w, "a floor does not sink")
	require.NoError(t, w.Check())
	var empty Watermark
	empty.Raise(5)
	require.Equal(t, NewWatermark(5), empty)
}

func TestWatermarkRefusesBugs(t *testing.T) {
	w := NewWatermark(10)
	require.Panics(t, func() { w.Set(1, 9) }, "below the floor")
	require.Panics(t, func() { w.Set(1, MaxAddress+1) }, "does not fit 48 bits")
	require.Equal(t, NewWatermark(10), w)
	over := NewWatermark(MaxAddress + 1)
	require.ErrorIs(t, over.Check(), ErrWatermark)
	require.Panics(t, func() { over.Encode() })
}

// Lanes are independent: whatever the order in which they move, the bytes are the same.
func TestWatermarkConvergesInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := Address(rapid.Uint64Max(1000).Draw(t, "start"))
		to := rapid.SliceOfN(rapid.Uint64Range(1000, 1010), LaneCount, LaneCount).Draw(t, "to")
		order := rapid.Permutation(indices()).Draw(t, "order")
		a, b := NewWatermark(start), NewWatermark(start)
		for i := range LaneCount {
			a.Set(i, Address(to[i]))
			b.Set(order[i], Address(to[order[i]]))
		}
		require.Equal(t, a.Encode(), b.Encode())
		require.Equal(t, Address(minOf(to)), a.Floor())
		got, err := DecodeWatermark(LayoutPackedV2, a.Encode())
		require.NoError(t, err)
		require.Equal(t, a, got)
	})
}

func indices() []int {
	all := make([]int, LaneCount)
	for i := range all {
		all[i] = i
	}
	return all
}

func minOf(list []uint64) uint64 {
	least := list[0]
	for _, v := range list {
		least = min(least, v)
	}
	return least
}

// FuzzDecodeWatermark: never a panic, and nothing is accepted that the writer of that layout cannot have produced.
func FuzzDecodeWatermark(f *testing.F) {
	w := diverged()
	f.Add(false, w.Encode())
	f.Add(true, w.AppendV1(nil))
	f.Add(false, make([]byte, LaneBytes))
	start := NewWatermark(77)
	f.Add(false, start.Encode())
	f.Fuzz(func(t *testing.T, v1 bool, blob []byte) {
		layout := LayoutPackedV2
		if v1 {
			layout = LayoutPackedV1
		}
		w, err := DecodeWatermark(layout, blob)
		if err != nil {
			require.ErrorIs(t, err, ErrWatermark)
			return
		}
		require.NoError(t, w.Check())
		again := w.Encode()
		if v1 {
			again = w.AppendV1(nil)
		}
		require.Equal(t, blob, again)
	})
}

func TestWatermarkFlippedBytesNeverPassAsAnotherEncoding(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	w := diverged()
	good := w.Encode()
	for range 5000 {
		b := bytes.Clone(good)
		b[rng.IntN(len(b))] ^= byte(1 + rng.IntN(255))
		got, err := DecodeWatermark(LayoutPackedV2, b)
		if err == nil { // only a floor can change unseen, downwards or up to W
			require.NotEqual(t, w, got)
			require.NoError(t, got.Check())
			for i := range LaneCount {
				require.Equal(t, w.W(i), got.W(i), "W is stored twice")
			}
		}
	}
}

func BenchmarkWatermark(b *testing.B) {
	for _, c := range []struct {
		name string
		w    Watermark
	}{{"uniform", NewWatermark(1 << 40)}, {"diverged", diverged()}} {
		blob := c.w.Encode()
		buf := make([]byte, 0, WatermarkBytes)
		b.Run("encode/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.ReportMetric(float64(len(blob)), "bytes")
			for b.Loop() {
				buf = c.w.Append(buf[:0])
			}
		})
		b.Run("decode/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = DecodeWatermark(LayoutPackedV2, blob)
			}
		})
		b.Run("compare/"+c.name, func(b *testing.B) {
			other := c.w
			for b.Loop() {
				if c.w != other {
					b.Fatal("differs")
				}
			}
		})
	}
}
