package swarm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// The stream (docs/format/stream.md): a header, chunks, a footer, and nothing after it. Integers are big-endian.
// Part of the format.
const (
	magic   = "TIERQSTM"
	version = 1

	headerBytes = 8 + 2 + 2 + 4 + 8 + 8 + 4
	frameBytes  = 1 + 4 + 4 + 4
	footerBytes = 1 + 8 + 8 + 32 + 4

	tagChunk  = 1
	tagFooter = 2

	// chunkBytes is the payload at which a writer ends a chunk. A larger pair has a chunk of its own.
	chunkBytes = 256 << 10
	// MaxKeyBytes and MaxValueBytes bound a pair.
	MaxKeyBytes   = 1 << 10
	MaxValueBytes = 32 << 20
	maxChunkBytes = chunkBytes + MaxKeyBytes + MaxValueBytes + 2*binary.MaxVarintLen64
)

var (
	// ErrCorrupt is wrapped by every error about the stream's bytes: they are damaged, cut short, or of a newer version.
	ErrCorrupt = errors.New("swarm: corrupt stream")
	// ErrStopped is returned when stop was closed.
	ErrStopped = errors.New("swarm: stopped")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header says what a stream holds.
type Header struct {
	Shard       uint64
	Index       uint64 // the state is that after this entry
	FormatLevel uint32
}

func (h Header) append(dst []byte) []byte {
	from := len(dst)
	dst = append(dst, magic...)
	dst = binary.BigEndian.AppendUint16(dst, version)
	dst = binary.BigEndian.AppendUint16(dst, 0) // flags
	dst = binary.BigEndian.AppendUint32(dst, h.FormatLevel)
	dst = binary.BigEndian.AppendUint64(dst, h.Shard)
	dst = binary.BigEndian.AppendUint64(dst, h.Index)
	return appendSum(dst, from)
}

// appendSum appends the checksum of what follows from.
func appendSum(dst []byte, from int) []byte {
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[from:], castagnoli))
}

// sumFits checks the checksum at the end of b.
func sumFits(b []byte) bool {
	n := len(b) - 4
	return crc32.Checksum(b[:n], castagnoli) == binary.BigEndian.Uint32(b[n:])
}

func checkPair(key, value []byte) error {
	if len(key) == 0 || len(key) > MaxKeyBytes || len(value) > MaxValueBytes {
		return fmt.Errorf("swarm: a key of %d bytes with a value of %d: keys have 1 to %d, values at most %d", len(key), len(value), MaxKeyBytes, MaxValueBytes)
	}
	return nil
}

// Writer writes a stream. After an error every call fails.
type Writer struct {
	w      io.Writer
	digest Digester
	last   []byte
	chunk  []byte // frame and payload
	pairs  uint32
	err    error
}

// NewWriter writes the header.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	if _, err := w.Write(h.append(nil)); err != nil {
		return nil, err
	}
	return &Writer{w: w, chunk: make([]byte, frameBytes, frameBytes+chunkBytes)}, nil
}

// Add writes a pair. Keys must strictly ascend.
func (w *Writer) Add(key, value []byte) error {
	if w.err == nil {
		w.err = w.add(key, value)
	}
	return w.err
}

func (w *Writer) add(key, value []byte) error {
	if err := checkPair(key, value); err != nil {
		return err
	}
	if w.last != nil && bytes.Compare(key, w.last) <= 0 {
		return fmt.Errorf("swarm: key % x does not follow % x", key, w.last)
	}
	w.last = append(w.last[:0], key...)
	if n := len(w.chunk) - frameBytes; n > 0 && n+len(key)+len(value) > chunkBytes {
		if err := w.flush(); err != nil {
			return err
		}
	}
	w.digest.Add(key, value)
	w.chunk = binary.AppendUvarint(w.chunk, uint64(len(key)))
	w.chunk = append(w.chunk, key...)
	w.chunk = binary.AppendUvarint(w.chunk, uint64(len(value)))
	w.chunk = append(w.chunk, value...)
	w.pairs++
	return nil
}

// flush writes the chunk.
func (w *Writer) flush() error {
	if w.pairs == 0 {
		return nil
	}
	payload := w.chunk[frameBytes:]
	w.chunk[0] = tagChunk
	binary.BigEndian.PutUint32(w.chunk[1:], uint32(len(payload)))
	binary.BigEndian.PutUint32(w.chunk[5:], w.pairs)
	sum := crc32.Update(crc32.Checksum(w.chunk[:9], castagnoli), castagnoli, payload)
	binary.BigEndian.PutUint32(w.chunk[9:], sum)
	_, err := w.w.Write(w.chunk)
	w.chunk, w.pairs = w.chunk[:frameBytes], 0
	return err
}

// Close writes the footer and returns the summary. It does not close the writer below.
func (w *Writer) Close() (Summary, error) {
	if w.err == nil {
		w.err = w.flush()
	}
	if w.err != nil {
		return Summary{}, w.err
	}
	s := w.digest.Sum()
	_, err := w.w.Write(s.append(nil))
	w.err = errors.New("swarm: the stream is closed")
	return s, err
}

func (s Summary) append(dst []byte) []byte {
	from := len(dst)
	dst = append(dst, tagFooter)
	dst = binary.BigEndian.AppendUint64(dst, s.Keys)
	dst = binary.BigEndian.AppendUint64(dst, s.Bytes)
	return appendSum(append(dst, s.Root[:]...), from)
}

// Write streams a key space.
func Write(w io.Writer, h Header, each Each) (Summary, error) {
	out, err := NewWriter(w, h)
	if err != nil {
		return Summary{}, err
	}
	if err := each(out.Add); err != nil {
		return Summary{}, err
	}
	return out.Close()
}

// Read reads a stream to its end. It calls accept with the header first, and put with every pair, in ascending order
// of key; key and value are valid during the call only. It returns the first error of those, an error that wraps
// ErrCorrupt, or the error of r. Only after it returned nil is what put got known to be whole: the footer's count and
// root are checked last. Memory is bounded by the largest pair.
func Read(r io.Reader, accept func(Header) error, put func(key, value []byte) error) (Summary, error) {
	in := &reader{r: bufio.NewReaderSize(r, 64<<10), put: put}
	h, err := in.header()
	if err == nil {
		err = accept(h)
	}
	for err == nil && !in.ended {
		err = in.frame()
	}
	if err != nil {
		return Summary{}, err
	}
	return in.sum, nil
}

type reader struct {
	r      *bufio.Reader
	put    func(key, value []byte) error
	digest Digester
	last   []byte
	buf    []byte
	offset int64 // of what is read next
	ended  bool
	sum    Summary
}

func (r *reader) corrupt(format string, args ...any) error {
	return fmt.Errorf("%w at offset %d: "+format, append([]any{ErrCorrupt, r.offset}, args...)...)
}

// take reads n bytes into the buffer after those that it keeps. It grows as bytes come, not by what a length says.
func (r *reader) take(keep, n int) ([]byte, error) {
	r.buf = r.buf[:keep]
	for n > 0 {
		step := min(n, 1<<20)
		at := len(r.buf)
		if cap(r.buf)-at < step {
			r.buf = append(make([]byte, 0, max(2*cap(r.buf), at+step)), r.buf...)
		}
		r.buf = r.buf[:at+step]
		if _, err := io.ReadFull(r.r, r.buf[at:]); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil, r.corrupt("it is cut short")
			}
			return nil, err
		}
		n -= step
	}
	return r.buf, nil
}

func (r *reader) header() (Header, error) {
	b, err := r.take(0, headerBytes)
	if err != nil {
		return Header{}, err
	}
	switch v := binary.BigEndian.Uint16(b[8:]); {
	case string(b[:8]) != magic:
		return Header{}, r.corrupt("it begins with % x, not with %q", b[:8], magic)
	case v != version:
		return Header{}, r.corrupt("version %d: this binary reads version %d", v, version)
	case !sumFits(b):
		return Header{}, r.corrupt("wrong checksum of the header")
	case binary.BigEndian.Uint16(b[10:]) != 0:
		return Header{}, r.corrupt("unknown flags %04x", b[10:12])
	}
	r.offset += headerBytes
	return Header{FormatLevel: binary.BigEndian.Uint32(b[12:]), Shard: binary.BigEndian.Uint64(b[16:]), Index: binary.BigEndian.Uint64(b[24:])}, nil
}

// frame reads a chunk or the footer.
func (r *reader) frame() error {
	b, err := r.take(0, 1)
	if err != nil {
		return err
	}
	switch b[0] {
	case tagChunk:
		return r.chunk()
	case tagFooter:
		return r.footer()
	}
	return r.corrupt("unknown tag %d", b[0])
}

func (r *reader) chunk() error {
	b, err := r.take(1, frameBytes-1)
	if err != nil {
		return err
	}
	n, pairs := binary.BigEndian.Uint32(b[1:]), binary.BigEndian.Uint32(b[5:])
	if n > maxChunkBytes || pairs == 0 {
		return r.corrupt("a chunk of %d bytes and %d pairs", n, pairs)
	}
	b, err = r.take(frameBytes, int(n))
	if err != nil {
		return err
	}
	payload := b[frameBytes:]
	if crc32.Update(crc32.Checksum(b[:9], castagnoli), castagnoli, payload) != binary.BigEndian.Uint32(b[9:]) {
		return r.corrupt("wrong checksum of a chunk")
	}
	for ; pairs > 0; pairs-- {
		if payload, err = r.pair(payload); err != nil {
			return err
		}
	}
	if len(payload) != 0 {
		return r.corrupt("%d bytes after the last pair of a chunk", len(payload))
	}
	r.offset += int64(len(b))
	return nil
}

// pair takes one pair off a payload.
func (r *reader) pair(b []byte) (rest []byte, err error) {
	key, b, ok := field(b, MaxKeyBytes)
	if !ok || len(key) == 0 {
		return nil, r.corrupt("a bad key")
	}
	value, b, ok := field(b, MaxValueBytes)
	if !ok {
		return nil, r.corrupt("a bad value")
	}
	if r.last != nil && bytes.Compare(key, r.last) <= 0 {
		return nil, r.corrupt("key % x does not follow % x", key, r.last)
	}
	r.last = append(r.last[:0], key...)
	r.digest.Add(key, value)
	return b, r.put(key, value)
}

func field(b []byte, most uint64) (f, rest []byte, ok bool) {
	n, used := binary.Uvarint(b)
	if used <= 0 || n > most || n > uint64(len(b)-used) {
		return nil, nil, false
	}
	end := used + int(n)
	return b[used:end], b[end:], true
}

func (r *reader) footer() error {
	b, err := r.take(1, footerBytes-1)
	if err != nil {
		return err
	}
	if !sumFits(b) {
		return r.corrupt("wrong checksum of the footer")
	}
	s := Summary{Keys: binary.BigEndian.Uint64(b[1:]), Bytes: binary.BigEndian.Uint64(b[9:]), Root: [32]byte(b[17:49])}
	if got := r.digest.Sum(); got != s {
		return r.corrupt("the footer says %d keys, %d bytes, root %x; read were %d, %d, %x", s.Keys, s.Bytes, s.Root[:8], got.Keys, got.Bytes, got.Root[:8])
	}
	r.offset += footerBytes
	if _, err := r.r.ReadByte(); err == nil {
		return r.corrupt("bytes after the footer")
	} else if !errors.Is(err, io.EOF) {
		return err
	}
	r.ended, r.sum = true, s
	return nil
}
