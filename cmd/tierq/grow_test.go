package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
)

// Whoever looks at a queue that grows is told how far it is and what it waits for; the doctor warns when it stands still.
func TestGrowthIsTold(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	s.ok("group", "create", "q", "g")
	require.Regexp(t, `(?m)^growth +ok`, s.ok("doctor"))
	require.NotContains(t, s.ok("queue", "describe", "q"), "WAITS_FOR")

	g := &tierqv1.Growth{Queue: "q", From: 1, To: 3, Phase: "shards", BeganUnixMs: 1_700_000_000_000, ForMs: 59_000, Waits: "shard 9 has no leader yet", Shard: 9, Partition: 2, Host: 1}
	clienttest.Answer(s.fleet, func(r *tierqv1.ListGrowthsRequest) (*tierqv1.ListGrowthsResponse, error) {
		require.Equal(t, "q", r.Queue)
		return &tierqv1.ListGrowthsResponse{Growths: []*tierqv1.Growth{g}}, nil
	})
	require.Contains(t, s.ok("queue", "describe", "q"), "FROM  TO  PHASE   SINCE                 HOST  PARTITION  SHARD  WAITS_FOR\n"+
		"1     3   shards  2023-11-14T22:13:20Z  1     2          9      shard 9 has no leader yet\n")
	require.Contains(t, s.ok("queue", "describe", "q", "--json"), `"growth":[{"from":1,"to":3,"phase":"shards",`)
	require.Regexp(t, `(?m)^growth +ok`, s.ok("doctor"), "it may take a minute")
	g.ForMs = 60_000
	require.Regexp(t, `(?m)^growth +warn +q +it grows from 1 to 3 partitions and is at shards, for 1m0s: shard 9 has no leader yet .*--cancel`, s.ok("doctor"))
	g.Phase, g.Waits, g.Shard, g.BeganUnixMs, g.ForMs = "last-look", "", 0, 0, 0
	require.Contains(t, s.ok("queue", "describe", "q"), "1     3   last-look  -      1     -          -      -\n")
}
