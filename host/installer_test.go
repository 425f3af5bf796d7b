package host

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
)

// wholeStates is an installer without checksums: index, then lengths, keys and values.
type wholeStates struct{}

func (wholeStates) Save(w io.Writer, _, index uint64, _ uint32, each func(func(key, value []byte) error) error, _ <-chan struct{}) error {
	b := bufio.NewWriter(w)
	put := func(p []byte) error {
		_, err := b.Write(append(binary.AppendUvarint(nil, uint64(len(p))), p...))
		return err
	}
	if _, err := b.Write(binary.BigEndian.AppendUint64(nil, index)); err != nil {
		return err
	}
	if err := each(func(key, value []byte) error { return errors.Join(put(key), put(value)) }); err != nil {
		return err
	}
	return b.Flush()
}

func (wholeStates) Load(r io.Reader, _ uint64, set func(key, value []byte) error, _ <-chan struct{}) (uint64, error) {
	b := bufio.NewReader(r)
	var head [8]byte
	if _, err := io.ReadFull(b, head[:]); err != nil {
		return 0, err
	}
	for {
		key, err := readPart(b)
		if errors.Is(err, io.EOF) {
			return binary.BigEndian.Uint64(head[:]), nil
		}
		if err != nil {
			return 0, err
		}
		value, err := readPart(b)
		if err != nil {
			return 0, io.ErrUnexpectedEOF
		}
		if err := set(key, value); err != nil {
			return 0, err
		}
	}
}

func readPart(b *bufio.Reader) ([]byte, error) {
	n, err := binary.ReadUvarint(b)
	if err != nil {
		return nil, err
	}
	p := make([]byte, n)
	_, err = io.ReadFull(b, p)
	return p, err
}
