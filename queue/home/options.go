package home

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
)

// minReceiptKey is the least length of the secret that keys receipts.
const minReceiptKey = 16

// EnsureDefaults fills zero values.
func (o *Options) EnsureDefaults() {
	if o.HomeLease == 0 {
		o.HomeLease = DefaultHomeLease
	}
	if o.ProposeTimeout == 0 {
		o.ProposeTimeout = 5 * time.Second
	}
	if o.MaxWaiters == 0 {
		o.MaxWaiters = 10_000
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Rand == nil {
		o.Rand = rand.Uint64
	}
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	need := func(ok bool, what string) {
		if !ok {
			errs = append(errs, fmt.Errorf("home options: %s", what))
		}
	}
	need(o.Self != 0, "Self is 0: name the replica")
	need(o.Reader != nil, "Reader is nil")
	need(o.Propose != nil, "Propose is nil")
	need(o.ReadIndex != nil, "ReadIndex is nil")
	need(o.Stamp != nil, "Stamp is nil")
	need(o.Boot != nil, "Boot is nil")
	need(len(o.ReceiptKey) >= minReceiptKey, "ReceiptKey is shorter than 16 bytes")
	need(o.HomeLease >= 10*time.Millisecond, "HomeLease is below 10 ms")
	need(o.ProposeTimeout > 0, "ProposeTimeout is not positive")
	need(o.MaxWaiters > 0, "MaxWaiters is not positive")
	return errors.Join(errs...)
}
