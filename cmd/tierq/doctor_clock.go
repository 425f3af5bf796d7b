package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// clockAgreement is how far a host's clock may be from the median of all.
const clockAgreement = 500 * time.Millisecond

// examineClocks compares the clocks of the hosts that are heard of.
func (d *doctor) examineClocks(hosts []*tierqv1.FleetHost) {
	var offsets []int64
	for _, h := range hosts {
		if h.ClockKnown {
			offsets = append(offsets, h.ClockOffsetMs)
		}
	}
	if len(offsets) == 0 {
		return
	}
	slices.Sort(offsets)
	median := offsets[len(offsets)/2]
	for _, h := range hosts {
		if !h.ClockKnown {
			continue
		}
		subject := fmt.Sprintf("host %d", h.Id)
		off := time.Duration(h.ClockOffsetMs-median) * time.Millisecond
		d.check("clock", subject, !h.ClockRefused, resultFail,
			"its clock is refused, so it stamps and delivers nothing: set it right, or see `tierq doctor --accept-clock %d`; it is %v ahead of the others", h.Id, off)
		d.check("clock", subject, h.ClockRefused || off.Abs() <= clockAgreement, resultWarn, "its clock is %v ahead of the others: set it right", off)
	}
}

// acceptClock shows a host's clock and, with yes, makes the host take it up.
func (a *app) acceptClock(ctx context.Context, text string, yes bool) error {
	id, err := hostID(text)
	if err != nil {
		return err
	}
	return a.withClient(ctx, func(ctx context.Context, c *client.Client) error {
		r, err := c.AcceptClock(ctx, id, !yes)
		if err != nil {
			return err
		}
		t := newTable("HOST", "CLOCK", "GOES_BY", "OTHERS_AHEAD_MS", "OTHERS", "REFUSED", "ACCEPTED")
		at := func(ms uint64) string { return time.UnixMilli(int64(ms)).UTC().Format("2006-01-02T15:04:05.000Z") }
		t.add(r.Host, at(r.WallUnixMs), at(r.GoesByUnixMs), r.OffsetMs, r.Asked, r.Refused, r.Accepted)
		if err := a.printOne(t); err != nil || r.Accepted {
			return err
		}
		return &checkError{fmt.Sprintf("nothing was changed. If CLOCK is right, say it with --yes: host %d then goes by it, and delays and TTLs of what it leads or "+
			"delivers end earlier or later by the difference. If it is wrong, set it right: the host takes it up by itself", id)}
	})
}
