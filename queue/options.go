package queue

import (
	"errors"
	"fmt"
)

// Hour and Day are durations on the shard's clock, in milliseconds.
const (
	Hour = 3_600_000
	Day  = 24 * Hour
)

// Bounds of options and configurations.
const (
	MaxLeaseMs     = 12 * Hour
	MaxTTLMs       = 10 * 365 * Day
	MaxDelayMsHard = 365 * Day
	MaxDedupMs     = 7 * Day
	MaxPartitions  = 1024
	MaxDelays      = 32
	MaxAttempts    = 1000
)

// EnsureDefaults fills zero values.
func (o *QueueOptions) EnsureDefaults() {
	orDefault(&o.MaxBodyBytes, 1<<20)
	orDefault(&o.MaxBytes, 16<<30)
	orDefault(&o.MaxDelayMs, 30*Day)
	orDefault(&o.DedupMs, 5*60_000)
	orDefault(&o.Partitions, 1)
}

// Validate joins every problem, each naming its field and bounds. Call EnsureDefaults before.
func (o *QueueOptions) Validate() error {
	var p problems
	p.check(o.Ordering <= OrderKey, "Ordering %d is unknown", o.Ordering)
	p.check(o.Overflow <= OverflowDropOldest, "Overflow %d is unknown", o.Overflow)
	p.check(o.Durability <= DurabilityStrict, "Durability %d is unknown", o.Durability)
	p.check(o.Mode <= ModeLog, "Mode %d is unknown", o.Mode)
	p.between("MaxBodyBytes", uint64(o.MaxBodyBytes), 1, MaxBodyBytesHard)
	p.check(o.MaxBytes >= uint64(o.MaxBodyBytes), "MaxBytes %d is below MaxBodyBytes %d", o.MaxBytes, o.MaxBodyBytes)
	p.between("TTLMs", o.TTLMs, 0, MaxTTLMs)
	p.between("MaxDelayMs", o.MaxDelayMs, 1, MaxDelayMsHard)
	p.between("RetainMs", o.RetainMs, 0, MaxTTLMs)
	p.between("DedupMs", o.DedupMs, 1, MaxDedupMs)
	p.between("Partitions", uint64(o.Partitions), 1, MaxPartitions)
	p.check(o.Partition < max(o.Partitions, 1), "Partition %d is not below Partitions %d", o.Partition, o.Partitions)
	retains := o.RetainMs != 0 || o.RetainBytes != 0 || o.RetainMessages != 0
	p.check(o.Mode == ModeLog || !retains, "RetainMs, RetainBytes and RetainMessages need Mode log")
	return errors.Join(p...)
}

// EnsureDefaults fills zero values.
func (c *GroupConfig) EnsureDefaults() {
	orDefault(&c.LeaseMs, 30_000)
	orDefault(&c.MaxAttempts, 5)
	orDefault(&c.BackoffBaseMs, 1_000)
	orDefault(&c.BackoffFactorPermille, 2_000)
	orDefault(&c.BackoffCapMs, max(30_000, c.BackoffBaseMs))
	orDefault(&c.JitterPermille, 100)
	orDefault(&c.MaxInFlight, 20_000)
	orDefault(&c.RecordAfterMs, 1_000)
}

// Validate joins every problem, each naming its field and bounds. Call EnsureDefaults before.
func (c *GroupConfig) Validate() error {
	var p problems
	p.between("LeaseMs", c.LeaseMs, 1, MaxLeaseMs)
	p.between("MaxAttempts", uint64(c.MaxAttempts), 1, MaxAttempts)
	p.between("BackoffBaseMs", c.BackoffBaseMs, 1, MaxDelayMsHard)
	p.between("BackoffFactorPermille", uint64(c.BackoffFactorPermille), 1_000, 100_000)
	p.between("BackoffCapMs", c.BackoffCapMs, c.BackoffBaseMs, MaxDelayMsHard)
	p.between("JitterPermille", uint64(c.JitterPermille), 0, 1_000)
	p.between("MaxInFlight", uint64(c.MaxInFlight), 1, 10_000_000)
	p.between("MaxInFlightPerConsumer", uint64(c.MaxInFlightPerConsumer), 0, uint64(c.MaxInFlight))
	p.between("RecordAfterMs", c.RecordAfterMs, 1, MaxLeaseMs)
	p.between("length of DelaysMs", uint64(len(c.DelaysMs)), 0, MaxDelays)
	for i, d := range c.DelaysMs {
		p.between(fmt.Sprintf("DelaysMs[%d]", i), d, 0, MaxDelayMsHard)
	}
	if c.DeadLetterQueue != "" {
		if err := ValidateName(c.DeadLetterQueue); err != nil {
			p = append(p, fmt.Errorf("DeadLetterQueue: %w", err))
		}
	}
	return errors.Join(p...)
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

type problems []error

func (p *problems) check(ok bool, format string, args ...any) {
	if !ok {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

func (p *problems) between(field string, v, low, high uint64) {
	p.check(v >= low && v <= high, "%s %d is not in [%d, %d]", field, v, low, high)
}
