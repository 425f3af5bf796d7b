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
	host   string        // the one that is spoken of
	served time.Duration // by it, on an average; 0: it has not said
	way    time.Duration // there and back: the least of late, as a busy process takes its time to read an answer
}

// heard takes the times of one answer of a host: as it was waited for, and as the host says that it took; 0: it does not say.
func (f *fill) heard(host string, took, served time.Duration) {
	way := max(took-served, 0)
	if f.served == 0 || served <= 0 || host != f.host {
		*f = fill{host: host, served: max(served, 0), way: way}
		return
	}
	f.served += (min(served, 4*f.served) - f.served) / 8 // one that hung says little of the next
	f.way = min(way, f.way+f.way/64+time.Microsecond)    // up slowly, for a way that has become longer
}

// leastPatience bounds patience from below. What a host takes counts in it up to mostServed: where requests hang, so does their average.
const (
	leastPatience = 100 * time.Millisecond
	mostServed    = 50 * time.Millisecond
)

// patience is how old the last request in flight is when nothing waits for an answer any more.
func (f *fill) patience() time.Duration {
	return max(leastPatience, 4*(min(f.served, mostServed)+f.way))
}

// small is how many small requests may be in flight.
func (f *fill) small() int {
	if f.served <= 0 {
		return math.MaxInt
	}
	return 1 + int((f.way+f.served/2)/f.served)
}
