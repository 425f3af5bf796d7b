package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

func TestShardRebuild(t *testing.T) {
	s := newShell(t, 1)
	steps := []string{"yield", "clear", "clear", "wipe", "add", "catch-up"}
	asked := 0
	clienttest.Answer(s.fleet, func(r *tierqv1.RebuildReplicaRequest) (*tierqv1.RebuildReplicaResponse, error) {
		if r.Host == 9 {
			return nil, code.New(code.ReplicaNeeded, "no other full replica of shard %d runs", r.Shard)
		}
		require.EqualValues(t, catalogShard, r.Shard)
		return &tierqv1.RebuildReplicaResponse{}, nil
	})
	clienttest.Answer(s.fleet, func(*tierqv1.ListHostsRequest) (*tierqv1.ListHostsResponse, error) {
		l := &tierqv1.ListHostsResponse{Moves: []*tierqv1.ReplicaMove{{Shard: 7, Queue: "q", FromHost: 2, ToHost: 4, Step: "add", Why: "draining"}}}
		if asked < len(steps) {
			l.Moves = append(l.Moves, &tierqv1.ReplicaMove{Shard: catalogShard, FromHost: 2, ToHost: 2, Step: steps[asked], Why: "rebuild"})
		}
		asked++
		return l, nil
	})
	out, errs, exit := s.run("shard", "rebuild", "--catalog", "--host", "2")
	require.Zero(t, exit, errs)
	require.Equal(t, "SHARD  HOST  RESULT\n1      2     rebuilt\n", out)
	require.Equal(t, "hands its homes over\nleaves the shard\nremoves its data\nthe new replica is added\nthe new replica is filled\n", errs)
	asked = 1
	require.Contains(t, s.ok("shard", "rebuild", "--catalog", "--host", "2", "--no-wait"), "leaves the shard")

	_, errs, exit = s.run("shard", "rebuild", "--catalog", "--host", "9")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "no other full replica")
	for _, bad := range [][]string{{"q"}, {"--host", "2"}, {"q", "--catalog", "--host", "2"}, {"q/x", "--host", "2"}, {"q/9", "--host", "2"}} {
		_, errs, exit := s.run(append([]string{"shard", "rebuild"}, bad...)...)
		require.NotZero(t, exit, "%v: %s", bad, errs)
	}
}

func TestDoctorTellsOfReplicas(t *testing.T) {
	d := newDoctor()
	d.examineMoves([]*tierqv1.ReplicaMove{{Queue: "q", FromHost: 2, ToHost: 4, Step: "add", Why: "draining"}, {Step: "add", ToHost: 4, Why: "voters"}})
	require.Equal(t, 1, d.passed["replicas"])
	require.Empty(t, d.findings)
	d.examineMoves([]*tierqv1.ReplicaMove{
		{Queue: "q", FromHost: 2, ToHost: 2, Step: "wipe", Why: "lost"},
		{Queue: "q", Partition: 1, FromHost: 2, ToHost: 4, Step: "catch-up", Why: "damaged"},
		{FromHost: 3, Step: "blocked", Why: "draining", Reason: "let another full host join"},
	})
	require.Equal(t, []finding{
		{"replicas", resultWarn, "q/0", "the replica on host 2 is lost, and is made anew there: removes its data"},
		{"replicas", resultWarn, "q/1", "the replica on host 2 is damaged, and is replaced on host 4: catch-up"},
		{"replicas", resultWarn, "(catalog)", "the replica on host 3 is to leave its host and cannot be replaced now: let another full host join"},
	}, d.findings)
}
