package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

func TestHostCommands(t *testing.T) {
	s := newShell(t, 1)
	list := &tierqv1.ListHostsResponse{
		Hosts: []*tierqv1.FleetHost{
			{Id: 1, Role: "full", State: "active", Alive: true, Replicas: 3, Leaders: 2, Domain: "a", Api: "h1:1", Peer: "h1:2", Raft: "h1:3"},
			{Id: 2, Role: "witness", State: "lost", Replicas: 2, Domain: "b", Peer: "h2:2", Raft: "h2:3"},
		},
		Moves: []*tierqv1.ReplicaMove{
			{Shard: 2, Queue: "q", Replica: 3, FromHost: 2, ToHost: 5, Step: "catch-up", Why: "lost"},
			{Shard: 1, Replica: 3, FromHost: 2, Step: "blocked", Why: "lost", Reason: "let another witness host join"},
		},
	}
	clienttest.Answer(s.fleet, func(*tierqv1.ListHostsRequest) (*tierqv1.ListHostsResponse, error) { return list, nil })
	require.Equal(t, "HOST  ROLE     STATE   ALIVE  REPLICAS  LEADERS  MOVING  DOMAIN  API   PEER  RAFT\n"+
		"1     full     active  yes    3         2        0       a       h1:1  h1:2  h1:3\n"+
		"2     witness  lost    no     2         0        1       b       -     h2:2  h2:3\n", s.ok("host", "list"))
	require.Equal(t, "QUEUE      PARTITION  SHARD  REPLICA  FROM  TO  STEP      WHY   REASON\n"+
		"q          0          2      3        2     5   catch-up  lost  -\n"+
		"(catalog)  0          1      3        2     0   blocked   lost  let another witness host join\n", s.ok("host", "list", "--moves"))

	clienttest.Answer(s.fleet, func(r *tierqv1.CreateJoinTokenRequest) (*tierqv1.CreateJoinTokenResponse, error) {
		require.EqualValues(t, 60_000, r.TtlMs)
		return &tierqv1.CreateJoinTokenResponse{Token: "tierq-join-1-00", ExpiresMs: 0}, nil
	})
	require.Equal(t, `{"token":"tierq-join-1-00","expires":"1970-01-01T00:00:00Z"}`+"\n", s.ok("host", "token", "--ttl", "1m", "--json"))
	file := filepath.Join(t.TempDir(), "token")
	clienttest.Answer(s.fleet, func(*tierqv1.CreateJoinTokenRequest) (*tierqv1.CreateJoinTokenResponse, error) {
		return nil, code.New(code.LimitReached, "64 join tokens wait to be used")
	})
	_, _, exit := s.run("host", "token", "--file", file)
	require.Equal(t, exitRefused, exit)
	clienttest.Answer(s.fleet, func(*tierqv1.CreateJoinTokenRequest) (*tierqv1.CreateJoinTokenResponse, error) {
		return &tierqv1.CreateJoinTokenResponse{Token: "tierq-join-1-00", ExpiresMs: 0}, nil
	})
	require.Contains(t, s.ok("host", "token", "--ttl", "1m", "--file", file), "in "+file, "the attempt that failed has left nothing")
	token, err := joinToken("", file)
	require.NoError(t, err)
	require.Equal(t, "tierq-join-1-00", token)
	_, errs, exit := s.run("host", "token", "--ttl", "1m", "--file", file)
	require.Equal(t, exitUsage, exit, "a file that is there is not replaced: %s", errs)

	clienttest.Answer(s.fleet, func(r *tierqv1.RemoveHostRequest) (*tierqv1.RemoveHostResponse, error) {
		if !r.Lost {
			return nil, code.New(code.MutationFenced, "host %d still has 2 replicas: drain it", r.Host)
		}
		return &tierqv1.RemoveHostResponse{Removed: r.Host == 9}, nil
	})
	_, errs, exit = s.run("host", "remove", "2")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "still has 2 replicas")
	require.Equal(t, "HOST  RESULT\n2     being-replaced\n", s.ok("host", "remove", "2", "--lost"))
	require.Equal(t, "HOST  RESULT\n9     removed\n", s.ok("host", "remove", "9", "--lost"))
}

// A drain says what is left whenever that changes, and goes on in the fleet when the command ends.
func TestHostDrain(t *testing.T) {
	s := newShell(t, 1)
	host := &tierqv1.FleetHost{Id: 1, Role: "full", State: "active", Replicas: 2, Leaders: 1}
	clienttest.Answer(s.fleet, func(r *tierqv1.DrainHostRequest) (*tierqv1.DrainHostResponse, error) {
		host.State = "draining"
		if r.Cancel {
			host.State = "active"
		}
		return &tierqv1.DrainHostResponse{}, nil
	})
	asked := 0
	clienttest.Answer(s.fleet, func(*tierqv1.ListHostsRequest) (*tierqv1.ListHostsResponse, error) {
		if asked++; asked > 1 {
			host.Replicas, host.Leaders = 0, 0
		}
		return &tierqv1.ListHostsResponse{Hosts: []*tierqv1.FleetHost{host}}, nil
	})
	out, errs, exit := s.run("host", "drain", "1")
	require.Equal(t, exitOK, exit, errs)
	require.Equal(t, "HOST  STATE     REPLICAS  LEADERS  MOVING\n1     draining  0         0        0\n", out)
	require.Equal(t, "host 1: 2 replicas and 1 leaders left, 0 replicas are moving\nhost 1: 0 replicas and 0 leaders left, 0 replicas are moving\n", errs)
	require.Contains(t, s.ok("host", "drain", "1", "--cancel"), "active")

	clienttest.Answer(s.fleet, func(*tierqv1.ListHostsRequest) (*tierqv1.ListHostsResponse, error) {
		return &tierqv1.ListHostsResponse{
			Hosts: []*tierqv1.FleetHost{{Id: 1, Replicas: 2}},
			Moves: []*tierqv1.ReplicaMove{{FromHost: 1, Step: "blocked", Reason: "let another full host join"}},
		}, nil
	})
	_, errs, exit = s.run("host", "drain", "1", "--timeout", "1s")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "1 have nowhere to go: let another full host join: it goes on; run `tierq host drain 1` again")
}

func TestRebalance(t *testing.T) {
	s := newShell(t, 1)
	var calls []bool
	clienttest.Answer(s.fleet, func(r *tierqv1.RebalanceRequest) (*tierqv1.RebalanceResponse, error) {
		calls = append(calls, r.DryRun)
		switch len(calls) {
		case 1, 2, 3:
			return &tierqv1.RebalanceResponse{
				Moves:   []*tierqv1.ReplicaMove{{Queue: "q", Shard: 2, FromHost: 1, ToHost: 4}},
				Leaders: []*tierqv1.LeaderMove{{Queue: "r", Shard: 3, FromHost: 1, ToHost: 2}},
				Started: 1, UnderWay: 1,
			}, nil
		}
		return &tierqv1.RebalanceResponse{Leaders: []*tierqv1.LeaderMove{{Queue: "r", Shard: 3, FromHost: 1, ToHost: 2}}}, nil
	})
	moved := 0
	clienttest.Answer(s.fleet, func(r *tierqv1.MoveLeaderRequest) (*tierqv1.MoveLeaderResponse, error) {
		moved++
		require.EqualValues(t, 3, r.Shard)
		require.EqualValues(t, 2, r.ToHost)
		return &tierqv1.MoveLeaderResponse{}, nil
	})
	want := "MOVES    QUEUE  PARTITION  SHARD  FROM  TO\nreplica  q      0          2      1     4\nleader   r      0          3      1     2\n"
	require.Equal(t, want, s.ok("rebalance", "--dry-run"))
	require.Equal(t, []bool{true}, calls)
	require.Equal(t, want, s.ok("rebalance"))
	require.Equal(t, []bool{true, true, false, false}, calls)
	require.Equal(t, 1, moved)
}

func TestHostUsage(t *testing.T) {
	s := newShell(t, 1)
	file := filepath.Join(t.TempDir(), "host.yaml")
	require.NoError(t, os.WriteFile(file, []byte("host: 1\n"), 0o600))
	for _, c := range []struct{ args, text string }{
		{"host", "list, token, join, drain, remove"},
		{"host drain one", "tierq host list"},
		{"host remove 0", "a number from 1"},
		{"host token --ttl 200h", "up to 168h"},
		{"host join --token x", "--config"},
		{"host join --config " + file, "--token-file"},
		{"host join --config " + file + " --token x --token-file y", "--token-file"},
		{"host join --config " + file + " --token-file nosuch", "nosuch"},
		{"host join --config " + file + " --token x", "hosts"},
	} {
		_, errs, exit := s.run(strings.Fields(c.args)...)
		require.Equal(t, exitUsage, exit, "%s: %s", c.args, errs)
		require.Contains(t, errs, c.text, c.args)
		require.Equal(t, 1, strings.Count(errs, "\n"), "one line: %s", errs)
	}
}
