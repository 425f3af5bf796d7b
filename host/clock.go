package host

import (
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/tierq/tierq/host/event"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

const (
	// wallInterval is how often the wall clock is read again.
	wallInterval = 10 * time.Second
	// wallAgreement is how near the wall clock must be to the median of the reachable hosts to be taken up.
	wallAgreement = 500 * time.Millisecond
	// wallStep is the greatest step that a host takes up when no other host can be asked.
	wallStep = time.Hour
	// firstReads is how often the wall clock is read after the start, until another host was heard of, for wallInterval at most.
	firstReads = 50 * time.Millisecond
	// skewedReads is how often it is read while it is not taken up.
	skewedReads = time.Second
)

// bootTime reads the clock that counts from boot, also while the machine is suspended.
func bootTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("BUG: CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(t.Nano())
}

// Clock is a host's time: boot time for what is measured, and wall time that moves with boot time and is compared
// with the other hosts' before a step of it is taken up.
type Clock struct {
	wall func() time.Time
	boot func() time.Duration

	mu        sync.Mutex
	accepted  int64         // unix ms that was last taken up
	at        time.Duration // boot time of that
	nextRead  time.Duration // boot time of the next reading
	begun     time.Duration // boot time at which the clock was made
	compared  bool          // the clock was compared with another host's since then
	skewed    bool
	tolerated time.Duration // the offset that an operator has accepted
	peers     func() []time.Duration

	// onSkew, if set, hears whenever the wall clock is refused, or taken up again. It is called under mu.
	onSkew func(refused bool)
}

// newClock takes up the wall clock as it is until the first other host can be asked. peers returns how far ahead of this host's wall
// clock those of the reachable hosts are, this host not included.
func newClock(wall func() time.Time, boot func() time.Duration, peers func() []time.Duration) *Clock {
	c := &Clock{wall: wall, boot: boot, peers: peers}
	c.accepted, c.at = wall().UnixMilli(), boot()
	c.begun, c.nextRead = c.at, c.at
	return c
}

// Boot returns the time since boot, for leases, deadlines and waits.
func (c *Clock) Boot() time.Duration { return c.boot() }

// Wall returns the accepted wall time. It fails with CLOCK_SKEW while this host's clock differs from the fleet's.
func (c *Clock) Wall() (queue.Stamp, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.boot()
	if now >= c.nextRead {
		c.readLocked(now)
	}
	if c.skewed {
		return 0, code.New(code.ClockSkew, "%s", code.ClockSkew.Info().Text)
	}
	return c.goesByLocked(now), nil
}

func (c *Clock) goesByLocked(now time.Duration) queue.Stamp {
	return queue.Stamp(c.accepted + (now - c.at).Milliseconds())
}

// readLocked reads the wall clock and takes it up if the reachable hosts agree, or, when there are none, if it has made no great
// step.
func (c *Clock) readLocked(now time.Duration) {
	wall, others := c.wall().UnixMilli(), c.peers()
	c.compared = c.compared || len(others) > 0
	c.nextRead = now + wallInterval
	if !c.compared && now-c.begun < wallInterval {
		c.nextRead = now + firstReads
	}
	step, was := c.stepLocked(wall, now), c.skewed
	switch low, high := medians(append(others, 0)); {
	case len(others) == 0:
		c.skewed = step.Abs() > wallStep
	case agrees(low, 0) && agrees(high, 0):
		c.skewed, c.tolerated = false, 0
	case agrees(low, 0) || agrees(high, 0): // as many say so as not: the one whose clock has stepped is wrong
		c.skewed = step.Abs() > wallAgreement
	default:
		c.skewed = c.tolerated == 0 || !agrees(nearer(low, high), c.tolerated)
	}
	if c.onSkew != nil && c.skewed != was {
		c.onSkew(c.skewed)
	}
	if c.skewed {
		c.nextRead = now + skewedReads
	} else {
		c.accepted, c.at = wall, now
	}
}

// tellSkew is the clock's onSkew.
func (h *RaftHost) tellSkew(refused bool) {
	if refused {
		h.log.Warn("this host's clock differs from the fleet's: it is not taken up, and calls are refused", event.Is("clock"), zap.Bool("refused", true))
		return
	}
	h.log.Info("this host's clock agrees with the fleet's again", event.Is("clock"), zap.Bool("refused", false))
}

// stepLocked is by how much the wall clock has moved more than boot time since it was last taken up.
func (c *Clock) stepLocked(wall int64, now time.Duration) time.Duration {
	return time.Duration(wall-c.accepted)*time.Millisecond - (now - c.at)
}

func agrees(offset, with time.Duration) bool { return (offset - with).Abs() <= wallAgreement }

// ClockReading is a host's clock as it is, and as the host goes by it.
type ClockReading struct {
	Wall    queue.Stamp   // of the machine
	GoesBy  queue.Stamp   // what this host stamps with; while Refused, what it would have stamped with
	Offset  time.Duration // how far the median of the reachable hosts, this one included, is ahead of Wall
	Asked   int           // other hosts that are reachable
	Refused bool          // the wall clock is not taken up: calls are refused with CLOCK_SKEW
}

// Reading reads the wall clock again and says what has become of it.
func (c *Clock) Reading() ClockReading {
	c.mu.Lock()
	defer c.mu.Unlock()
	now, others := c.boot(), c.peers()
	c.readLocked(now)
	return ClockReading{
		Wall: queue.Stamp(c.wall().UnixMilli()), GoesBy: c.goesByLocked(now), Offset: nearer(medians(append(others, 0))), Asked: len(others), Refused: c.skewed,
	}
}

// Accept takes up the wall clock as it is, whatever the other hosts say; an operator asked for it. It stays so while the difference to the
// others does, and this process runs.
func (c *Clock) Accept() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.accepted, c.at, c.skewed = c.wall().UnixMilli(), c.boot(), false
	c.tolerated = 0
	if offset := nearer(medians(append(c.peers(), 0))); !agrees(offset, 0) {
		c.tolerated = offset
	}
	c.nextRead = c.at + wallInterval
}

// Skewed says whether this host's clock differs from the fleet's.
func (c *Clock) Skewed() bool {
	_, err := c.Wall()
	return err != nil
}

// medians returns the middle one twice, or of an even number the two in the middle. It sorts offsets.
func medians(offsets []time.Duration) (low, high time.Duration) {
	slices.Sort(offsets)
	n := len(offsets)
	return offsets[(n-1)/2], offsets[n/2]
}

// nearer returns the offset that is nearer to this host's clock.
func nearer(low, high time.Duration) time.Duration {
	if low.Abs() < high.Abs() {
		return low
	}
	return high
}

// shardClock remembers a shard's clock as this host last applied it, and when.
type shardClock struct {
	mu    sync.Mutex
	clock queue.Stamp
	at    time.Duration // boot time
}

// observe takes up a clock that was applied at a boot time.
func (s *shardClock) observe(clock queue.Stamp, at time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if clock > s.clock {
		s.clock, s.at = clock, at
	}
}

// now returns the shard's clock, moved by the boot time since.
func (s *shardClock) now(boot time.Duration) queue.Stamp {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock == 0 {
		return 0
	}
	return s.clock + queue.Stamp((boot - s.at).Milliseconds())
}
