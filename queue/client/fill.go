package client

import (
	"math"
	"time"
)

// What a further request must carry while others of its partition are in flight: below that it waits for one of them and fills. Those at
// the host's door would wait there for the same commit, and each costs both sides about as much with one message as with fifty.
const (
	fillMessages = 512
	fillBytes    = 256 << 10
)

// fill knows how many small requests keep a host busy: one, and as many more as are on their way meanwhile. The zero fill has heard
// nothing yet and holds nothing back.
type fill struct {
	served time.Duration // by hosts, on an average; 0: none has said
	way    time.Duration // there and back: the least of late, as a busy process takes its time to read an answer
}

// heard takes the times of one answer: as it was waited for, and as the host says that it took.
func (f *fill) heard(took, served time.Duration) {
	if served <= 0 {
		return
	}
	way := max(took-served, 0)
	if f.served == 0 {
		f.served, f.way = served, way
		return
	}
	f.served += (served - f.served) / 8
	f.way = min(way, f.way+f.way/64+time.Microsecond) // up slowly, for a way that has become longer
}

// small is how many small requests may be in flight.
func (f *fill) small() int {
	if f.served <= 0 {
		return math.MaxInt
	}
	return 1 + int((f.way+f.served/2)/f.served)
}
