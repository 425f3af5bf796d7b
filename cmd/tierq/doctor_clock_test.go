package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
)

func TestDoctorClocks(t *testing.T) {
	s := newShell(t, 1)
	l := &tierqv1.ListHostsResponse{Hosts: []*tierqv1.FleetHost{
		{Id: 1, ClockKnown: true}, {Id: 2, ClockKnown: true, ClockOffsetMs: 100}, {Id: 3, ClockKnown: true, ClockOffsetMs: -900}, {Id: 4}}}
	clienttest.Answer(s.fleet, func(*tierqv1.ListHostsRequest) (*tierqv1.ListHostsResponse, error) { return l, nil })
	out := s.ok("doctor")
	require.Regexp(t, `(?m)^clock +warn +host 3 +its clock is -900ms ahead of the others`, out)
	l.Hosts[1].ClockRefused = true
	out, _, exit := s.run("doctor")
	require.Equal(t, exitRefused, exit)
	require.Regexp(t, `(?m)^clock +fail +host 2 .*tierq doctor --accept-clock 2`, out)

	clienttest.Answer(s.fleet, func(r *tierqv1.AcceptClockRequest) (*tierqv1.AcceptClockResponse, error) {
		return &tierqv1.AcceptClockResponse{Host: r.Host, WallUnixMs: 3_600_000, GoesByUnixMs: 1000, OffsetMs: -3_599_000, Asked: 2, Refused: true, Accepted: !r.DryRun}, nil
	})
	out, errs, exit := s.run("doctor", "--accept-clock", "2")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "nothing was changed")
	require.Equal(t, "HOST  CLOCK                     GOES_BY                   OTHERS_AHEAD_MS  OTHERS  REFUSED  ACCEPTED\n"+
		"2     1970-01-01T01:00:00.000Z  1970-01-01T00:00:01.000Z  -3599000         2       yes      no\n", out)
	require.Contains(t, s.ok("doctor", "--accept-clock", "2", "--yes", "--json"), `"accepted":true`)
}
