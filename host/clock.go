package host

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

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

	mu       sync.Mutex
	accepted int64         // unix ms that was last taken up
	at       time.Duration // boot time of that
	nextRead time.Duration // boot time of the next reading
	skewed   bool
	peers    func() []time.Duration // wall clocks of reachable hosts, less this host's
}

// newClock takes up the wall clock as it is. peers returns how far ahead of this host's wall clock those of the reachable
// hosts are, this host not included.
func newClock(wall func() time.Time, boot func() time.Duration, peers func() []time.Duration) *Clock {
	c := &Clock{wall: wall, boot: boot, peers: peers}
	c.accepted, c.at = wall().UnixMilli(), boot()
	c.nextRead = c.at + wallInterval
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
	return queue.Stamp(c.accepted + (now - c.at).Milliseconds()), nil
}

// readLocked reads the wall clock and takes it up if the reachable hosts agree, or, when there are none, if it has made no great
// step.
func (c *Clock) readLocked(now time.Duration) {
	c.nextRead = now + wallInterval
	wall := c.wall().UnixMilli()
	others := c.peers()
	c.skewed = false
	if len(others) == 0 {
		step := time.Duration(wall-c.accepted)*time.Millisecond - (now - c.at)
		c.skewed = step.Abs() > wallStep
	} else if offset := median(append(others, 0)); offset.Abs() > wallAgreement {
		c.skewed = true
	}
	if !c.skewed {
		c.accepted, c.at = wall, now
	}
}

// Accept takes up the wall clock as it is, whatever the other hosts say; an operator asked for it.
func (c *Clock) Accept() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.accepted, c.at, c.skewed = c.wall().UnixMilli(), c.boot(), false
	c.nextRead = c.at + wallInterval
}

// Skewed says whether this host's clock differs from the fleet's.
func (c *Clock) Skewed() bool {
	_, err := c.Wall()
	return err != nil
}

// median returns the middle one, of two the one that is nearer to this host's clock.
func median(offsets []time.Duration) time.Duration {
	slices.Sort(offsets)
	n := len(offsets)
	low, high := offsets[(n-1)/2], offsets[n/2]
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
