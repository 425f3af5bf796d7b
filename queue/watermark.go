package queue

import (
	"errors"
	"fmt"
)

// Names of the layouts of a stored watermark (wm_layout). Part of the format.
const (
	// LayoutPackedV1 is always 64 lane records. It is read, and rewritten as v2 on the next write at format level 2.
	LayoutPackedV1 = "packed-v1"
	// LayoutPackedV2 is one lane record when all lanes are equal, 64 otherwise.
	LayoutPackedV2 = "packed-v2"
)

// Sizes of the packed watermark. Part of the format.
const (
	// LaneCount is how many lanes the addresses of a partition are dealt to: lane = address mod LaneCount.
	LaneCount = 64
	// LaneBytes is the length of one lane record: presence u8, W u48, W_floor u48, W_recomputed u48, big-endian.
	LaneBytes = 1 + 3*6
	// WatermarkBytes is the length of 64 lane records.
	WatermarkBytes = LaneCount * LaneBytes
)

// ErrWatermark is wrapped by every error of DecodeWatermark: the stored bytes are corrupt, or of a newer layout.
var ErrWatermark = errors.New("queue: watermark")

// Lane is one lane of a watermark. The zero value is an empty lane, which is not the same as a present one with W 0.
//
// Invariants: (1) an empty lane is all zero; (2) W = Recomputed; (3) W >= Floor; (4) W <= MaxAddress.
type Lane struct {
	Present bool
	// W is the greatest address such that every address of the lane at or below it is finished or does not exist.
	W Address
	// Floor is the least that W can be: the group's start or reset point, or the line after a drop. Finer state at or
	// below it is gone.
	Floor Address
	// Recomputed is W as worked out anew from the finished ranges; another value is corruption.
	Recomputed Address
}

// check returns the first invariant that does not hold.
func (l Lane) check() error {
	switch {
	case !l.Present && l != Lane{}:
		return fmt.Errorf("an empty lane is not all zero: %+v", l)
	case l.W != l.Recomputed:
		return fmt.Errorf("W %d is not W_recomputed %d", uint64(l.W), uint64(l.Recomputed))
	case l.W < l.Floor:
		return fmt.Errorf("W %d is below W_floor %d", uint64(l.W), uint64(l.Floor))
	case l.W > MaxAddress:
		return fmt.Errorf("W %d is above %d", uint64(l.W), uint64(MaxAddress))
	}
	return nil
}

// Watermark is what a consumer group has finished, 64 lanes of it. It is a plain value: a copy is independent, and ==
// compares state. The zero value has 64 empty lanes.
type Watermark struct {
	lanes [LaneCount]Lane
}

// NewWatermark returns a watermark whose lanes all stand at one address, W and floor: a group's start.
func NewWatermark(at Address) Watermark {
	var w Watermark
	for i := range w.lanes {
		w.lanes[i] = Lane{Present: true, W: at, Floor: at, Recomputed: at}
	}
	return w
}

// LaneOf returns the lane of an address.
func LaneOf(a Address) int { return int(a % LaneCount) }

// Lane returns lane i of 0..63.
func (w *Watermark) Lane(i int) Lane { return w.lanes[i] }

// W returns W of lane i.
func (w *Watermark) W(i int) Address { return w.lanes[i].W }

// Set moves W of lane i to at, which must not lie below the lane's floor or above MaxAddress: the caller worked it out
// from the finished ranges, so anything else is a bug.
func (w *Watermark) Set(i int, at Address) {
	l := Lane{Present: true, W: at, Floor: w.lanes[i].Floor, Recomputed: at}
	if err := l.check(); err != nil {
		panic(fmt.Sprintf("BUG: watermark lane %d: %v", i, err))
	}
	w.lanes[i] = l
}

// Raise lifts every lane's floor, and W where it lies lower, to at: what is at or below it is finished for good.
// Floors above it stay.
func (w *Watermark) Raise(at Address) {
	for i := range w.lanes {
		l := w.lanes[i]
		l.Present, l.Floor, l.W = true, max(l.Floor, at), max(l.W, at)
		l.Recomputed = l.W
		w.lanes[i] = l
	}
}

// Covers says whether an address lies at or below W of its lane.
func (w *Watermark) Covers(a Address) bool {
	l := &w.lanes[LaneOf(a)]
	return l.Present && a <= l.W
}

// Floor is the greatest address at or below which everything is finished: the least W of all lanes, 0 while one is
// empty.
func (w *Watermark) Floor() Address {
	floor := w.lanes[0].W
	for i := range w.lanes {
		floor = min(floor, w.lanes[i].W)
	}
	return floor
}

// Uniform says whether all lanes are equal: it is stored in LaneBytes.
func (w *Watermark) Uniform() bool {
	for i := 1; i < LaneCount; i++ {
		if w.lanes[i] != w.lanes[0] {
			return false
		}
	}
	return true
}

// EncodedBytes is the length that Append adds: LaneBytes or WatermarkBytes.
func (w *Watermark) EncodedBytes() int {
	if w.Uniform() {
		return LaneBytes
	}
	return WatermarkBytes
}

// Check returns the first invariant that a lane breaks.
func (w *Watermark) Check() error {
	for i := range w.lanes {
		if err := w.lanes[i].check(); err != nil {
			return fmt.Errorf("%w: lane %d: %w", ErrWatermark, i, err)
		}
	}
	return nil
}

// Append appends the packed-v2 blob: one state has one encoding. A watermark that breaks an invariant is a bug.
func (w *Watermark) Append(dst []byte) []byte {
	if w.Uniform() {
		return w.lanes[0].append(dst, 0)
	}
	return w.AppendV1(dst)
}

// Encode returns the packed-v2 blob.
func (w *Watermark) Encode() []byte { return w.Append(make([]byte, 0, w.EncodedBytes())) }

// AppendV1 appends the packed-v1 blob, as shards below format level 2 store it.
func (w *Watermark) AppendV1(dst []byte) []byte {
	for i := range w.lanes {
		dst = w.lanes[i].append(dst, i)
	}
	return dst
}

func (l Lane) append(dst []byte, lane int) []byte {
	if err := l.check(); err != nil {
		panic(fmt.Sprintf("BUG: watermark lane %d: %v", lane, err))
	}
	dst = appendBool(dst, l.Present)
	dst = appendU48(dst, l.W)
	dst = appendU48(dst, l.Floor)
	return appendU48(dst, l.Recomputed)
}

// DecodeWatermark reads a stored blob of a layout. It fails closed, with ErrWatermark: on a layout that it does not
// know, on any length but those of the layout, on a lane that breaks an invariant, and, in packed-v2, on 64 equal
// lanes in the long form, which no writer produces.
func DecodeWatermark(layout string, blob []byte) (Watermark, error) {
	switch layout {
	case LayoutPackedV1:
		if len(blob) != WatermarkBytes {
			return Watermark{}, watermarkErrorf("%s of %d bytes: want %d", layout, len(blob), WatermarkBytes)
		}
		return decodeLanes(blob)
	case LayoutPackedV2:
		return decodeV2(blob)
	}
	return Watermark{}, watermarkErrorf("layout %q is unknown: this binary reads %s and %s", layout, LayoutPackedV1, LayoutPackedV2)
}

func decodeV2(blob []byte) (Watermark, error) {
	switch len(blob) {
	case LaneBytes:
		l, err := decodeLane(blob, 0)
		if err != nil {
			return Watermark{}, err
		}
		var w Watermark
		for i := range w.lanes {
			w.lanes[i] = l
		}
		return w, nil
	case WatermarkBytes:
		w, err := decodeLanes(blob)
		if err == nil && w.Uniform() {
			return Watermark{}, watermarkErrorf("%s of %d bytes whose lanes are all equal: its writer stores %d bytes", LayoutPackedV2, len(blob), LaneBytes)
		}
		return w, err
	}
	return Watermark{}, watermarkErrorf("%s of %d bytes: want %d or %d", LayoutPackedV2, len(blob), LaneBytes, WatermarkBytes)
}

func decodeLanes(blob []byte) (Watermark, error) {
	var w Watermark
	for i := range w.lanes {
		l, err := decodeLane(blob[i*LaneBytes:], i)
		if err != nil {
			return Watermark{}, err
		}
		w.lanes[i] = l
	}
	return w, nil
}

func decodeLane(b []byte, lane int) (Lane, error) {
	if b[0] > 1 {
		return Lane{}, watermarkErrorf("lane %d: presence %d is neither 0 nor 1", lane, b[0])
	}
	l := Lane{Present: b[0] == 1, W: u48(b[1:]), Floor: u48(b[7:]), Recomputed: u48(b[13:])}
	if err := l.check(); err != nil {
		return Lane{}, watermarkErrorf("lane %d: %v", lane, err)
	}
	return l, nil
}

func watermarkErrorf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrWatermark}, args...)...)
}

func appendU48(dst []byte, a Address) []byte {
	return append(dst, byte(a>>40), byte(a>>32), byte(a>>24), byte(a>>16), byte(a>>8), byte(a))
}

func u48(b []byte) Address {
	_ = b[5]
	return Address(b[0])<<40 | Address(b[1])<<32 | Address(b[2])<<24 | Address(b[3])<<16 | Address(b[4])<<8 | Address(b[5])
}
