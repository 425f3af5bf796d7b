package swarm

import (
	"bufio"
	"io"
)

// Verify is Read for a stream that is only looked at: check gets every pair, and an error of it is reported like damage, with the
// offset of the chunk that holds the pair.
func Verify(r io.Reader, check func(key, value []byte) error) (Header, Summary, error) {
	in := &reader{r: bufio.NewReaderSize(r, 64<<10)}
	in.put = func(key, value []byte) error {
		if err := check(key, value); err != nil {
			return in.corrupt("key % x: %v", key, err)
		}
		return nil
	}
	h, err := in.header()
	for err == nil && !in.ended {
		err = in.frame()
	}
	if err != nil {
		return h, Summary{}, err
	}
	return h, in.sum, nil
}
