package queue

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrFormat is wrapped by every error of a decoder: the bytes are not what an encoder of a version that this binary
// knows has written.
var ErrFormat = errors.New("queue: malformed encoding")

func formatErrorf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrFormat}, args...)...)
}

// appendUint appends an unsigned LEB128 number in its shortest form.
func appendUint[T ~uint8 | ~uint16 | ~uint32 | ~uint64](dst []byte, v T) []byte {
	return binary.AppendUvarint(dst, uint64(v))
}

// appendBytes appends a length and the bytes.
func appendBytes[T ~[]byte | ~string](dst []byte, v T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(v)))
	return append(dst, v...)
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// decoder reads an encoding from front to back. It keeps the first error, after which every read gives zero values;
// callers look at err once at the end. Slices that it returns alias the input.
type decoder struct {
	b    []byte
	off  int
	err  error
	slab []Message // messages not yet given out
}

func (d *decoder) failf(format string, args ...any) {
	if d.err == nil {
		d.err = formatErrorf("at byte %d: %s", d.off, fmt.Sprintf(format, args...))
		d.b = d.b[:0]
		d.off = 0
	}
}

func (d *decoder) remaining() int { return len(d.b) - d.off }

// finish returns the first error; bytes that nobody read are one.
func (d *decoder) finish() error {
	if d.err == nil && d.remaining() > 0 {
		d.failf("%d bytes too many", d.remaining())
	}
	return d.err
}

func (d *decoder) byte() byte {
	if d.remaining() < 1 {
		d.failf("input ends early")
		return 0
	}
	v := d.b[d.off]
	d.off++
	return v
}

func (d *decoder) bool(field string) bool {
	v := d.byte()
	if v > 1 {
		d.failf("%s: %d is no boolean", field, v)
	}
	return v == 1
}

// uint reads a number of at most max; a form longer than needed is refused, so that every value has one encoding.
func (d *decoder) uint(field string, max uint64) uint64 {
	v, n := binary.Uvarint(d.b[d.off:])
	switch {
	case n == 0:
		d.failf("%s: input ends early", field)
		return 0
	case n < 0 || n > 1 && d.b[d.off+n-1] == 0:
		d.failf("%s: not a number in its shortest form", field)
		return 0
	case v > max:
		d.failf("%s: %d is above %d", field, v, max)
		return 0
	}
	d.off += n
	return v
}

func (d *decoder) uint64(field string) uint64 { return d.uint(field, 1<<64-1) }

func (d *decoder) uint32(field string) uint32 { return uint32(d.uint(field, 1<<32-1)) }

// count reads how many items follow, each of at least minBytes: more than the input can hold are refused before
// anything is allocated for them.
func (d *decoder) count(field string, max, minBytes int) int {
	n := int(d.uint(field, uint64(max)))
	if n > d.remaining()/minBytes {
		d.failf("%s: %d items cannot be in %d bytes", field, n, d.remaining())
		return 0
	}
	return n
}

// bytes reads a length and that many bytes, at most max. Empty is nil.
func (d *decoder) bytes(field string, max int) []byte {
	n := int(d.uint(field, uint64(max)))
	if n > d.remaining() {
		d.failf("%s: %d bytes announced, %d there", field, n, d.remaining())
		return nil
	}
	if n == 0 {
		return nil
	}
	v := d.b[d.off : d.off+n : d.off+n]
	d.off += n
	return v
}

func (d *decoder) string(field string, max int) string { return string(d.bytes(field, max)) }
