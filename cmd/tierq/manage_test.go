package main

import (
	"cmp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

const someTime = 1_700_000_000_000

// answers sets what the fleet says to the administrative calls.
func answers(f *clienttest.Fleet) {
	options := &tierqv1.QueueOptions{MaxBodyBytes: 1 << 20, MaxBytes: 16 << 30, MaxDelayMs: 1000, DedupMs: 300, Version: 2}
	clienttest.Answer(f, func(r *tierqv1.PurgeQueueRequest) (*tierqv1.PurgeQueueResponse, error) {
		if r.OperationId == 0 {
			return nil, code.New(code.InvalidArgument, "no operation id")
		}
		return &tierqv1.PurgeQueueResponse{Purged: 7, PurgedTo: max(r.ToAddress, 7)}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ConfigureQueueRequest) (*tierqv1.ConfigureQueueResponse, error) {
		o := r.Options
		o.MaxBytes, o.Version = 16<<30, o.Version+1
		return &tierqv1.ConfigureQueueResponse{Queue: &tierqv1.Queue{Name: r.Queue, Options: o}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.PauseQueueRequest) (*tierqv1.PauseQueueResponse, error) {
		options.Paused = true
		return &tierqv1.PauseQueueResponse{Queue: &tierqv1.Queue{Name: r.Queue, Options: options}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ResumeQueueRequest) (*tierqv1.ResumeQueueResponse, error) {
		options.Paused = false
		return &tierqv1.ResumeQueueResponse{Queue: &tierqv1.Queue{Name: r.Queue, Options: options}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ConfigureGroupRequest) (*tierqv1.ConfigureGroupResponse, error) {
		return &tierqv1.ConfigureGroupResponse{Group: &tierqv1.Group{Name: r.Name, Config: r.Config, ConfigVersion: r.ExpectedVersion + 1}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.PauseGroupRequest) (*tierqv1.PauseGroupResponse, error) {
		return &tierqv1.PauseGroupResponse{Group: &tierqv1.Group{Name: r.Name, Config: &tierqv1.GroupConfig{Paused: true}, ConfigVersion: 2}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ResumeGroupRequest) (*tierqv1.ResumeGroupResponse, error) {
		return &tierqv1.ResumeGroupResponse{Group: &tierqv1.Group{Name: r.Name, Config: &tierqv1.GroupConfig{}, ConfigVersion: 3}}, nil
	})
	clienttest.Answer(f, func(*tierqv1.ListConsumersRequest) (*tierqv1.ListConsumersResponse, error) {
		return &tierqv1.ListConsumersResponse{Consumers: []*tierqv1.Consumer{
			{Name: "one", InFlight: 2, Active: true, Messages: []*tierqv1.HeldMessage{{Address: 4, Attempt: 1, HeldMs: 20, LeftMs: 29980}}}, {InFlight: 1},
		}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ExplainGroupRequest) (*tierqv1.ExplainGroupResponse, error) {
		return &tierqv1.ExplainGroupResponse{Verdict: "retrying", Text: "attempt 1 failed", Address: max(r.Address, 3), Attempts: 1, NotBeforeUnixMs: someTime, Key: r.Key}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ListDelayedRequest) (*tierqv1.ListDelayedResponse, error) {
		if r.After != nil {
			return &tierqv1.ListDelayedResponse{Messages: []*tierqv1.DelayedMessage{{Address: 2, VisibleUnixMs: someTime + 1500, PublishedUnixMs: someTime, Bytes: 5, Key: []byte("k")}}}, nil
		}
		return &tierqv1.ListDelayedResponse{Next: &tierqv1.DelayedPosition{Address: 9}, Messages: []*tierqv1.DelayedMessage{{Address: 9, VisibleUnixMs: someTime, PublishedUnixMs: someTime}}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.CancelDelayedRequest) (*tierqv1.ChangeDelayedResponse, error) {
		if r.ExpectedVisibleUnixMs != 0 && r.ExpectedVisibleUnixMs != someTime+1500 {
			return nil, code.New(code.Skipped, "it is due at another time: list and decide again")
		}
		return &tierqv1.ChangeDelayedResponse{Address: r.Address}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.RescheduleDelayedRequest) (*tierqv1.ChangeDelayedResponse, error) {
		return &tierqv1.ChangeDelayedResponse{Address: r.Address, VisibleUnixMs: someTime + r.DelayMs}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.BrowseRequest) (*tierqv1.BrowseResponse, error) {
		m := &tierqv1.BrowsedMessage{Address: max(r.FromAddress, 1), PublishedUnixMs: someTime, Body: []byte("hello"), BodyBytes: 5, ProducerId: 6, Seq: 2}
		return &tierqv1.BrowseResponse{Messages: []*tierqv1.BrowsedMessage{m}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.ListEventsRequest) (*tierqv1.ListEventsResponse, error) {
		if r.Host == 2 {
			return nil, code.New(code.Unavailable, "host 2 must answer itself")
		}
		e := &tierqv1.FleetEvent{Seq: 4, TimeUnixMs: someTime + 5, Event: cmp.Or(r.Event, "leader"), Text: "this host leads", Shard: 2, Queue: "q", Details: map[string]string{"term": "3", "error": "a b"}}
		return &tierqv1.ListEventsResponse{Host: r.Host, Newest: 4, Events: []*tierqv1.FleetEvent{e}}, nil
	})
	clienttest.Answer(f, func(r *tierqv1.LookupPublishRequest) (*tierqv1.LookupPublishResponse, error) {
		return &tierqv1.LookupPublishResponse{Outcome: "stored", Address: r.Seq + 1, Exists: true, Low: 1, LastSeq: 5}, nil
	})
}

// The columns are frozen: scripts count them. A new one goes to the end.
func TestGoldenAdminTables(t *testing.T) {
	s := newShell(t, 2)
	answers(s.fleet)
	s.ok("queue", "create", "q", "--max-body-bytes", "9")
	s.ok("group", "create", "q", "g", "--lease", "5s")
	for _, c := range []struct{ args, want string }{
		{"queue purge q --all", "QUEUE  PURGED  PURGED_TO\nq      7       7\n"},
		{"queue purge q --to 9 --json", `{"queue":"q","purged":7,"purged_to":9}` + "\n"},
		{"queue pause q", "QUEUE  PAUSED  VERSION\nq      yes     2\n"},
		{"queue resume q --json", `{"queue":"q","paused":false,"version":2}` + "\n"},
		{"queue configure q --ttl 2s --mode log --retain-age 1h", "QUEUE  VERSION  PAUSED  MODE  ORDERING  OVERFLOW  DURABILITY  MAX_BODY_BYTES  MAX_BYTES    MAX_MESSAGES  TTL_MS  MAX_DELAY_MS  RETAIN_MS  RETAIN_BYTES  RETAIN_MESSAGES  DEDUP_MS  STRICT_SEQUENCE\n" +
			"q      1        no      log   none      reject    available   9               17179869184  0             2000    0             3600000    0             0                0         no\n"},
		{"group configure q g --max-attempts 3 --delays 1s,2s --backoff-factor 1.5 --record-after 2s", "GROUP  CONFIG_VERSION  PAUSED  LEASE_MS  MAX_ATTEMPTS  BACKOFF_MS  BACKOFF_FACTOR  BACKOFF_CAP_MS  JITTER_PERMILLE  DELAYS_MS  MAX_IN_FLIGHT  MAX_IN_FLIGHT_PER_CONSUMER  SINGLE_ACTIVE_CONSUMER  RECORD_AFTER_MS  DEAD_LETTER_QUEUE\n"},
		{"group pause q g", "GROUP  PAUSED  CONFIG_VERSION\ng      yes     2\n"},
		{"group resume q g --json", `{"group":"g","paused":false,"config_version":3}` + "\n"},
		{"group lag q", "GROUP  UNFINISHED  IN_FLIGHT  RETRYING  DEAD  WAITING  OLDEST_ADDRESS  OLDEST_AGE_MS  PAUSED  EXPORTS  PARKED\ng      0           0          0         0     0        0               0              no      0        -\n"},
		{"group consumers q g", "CONSUMER  IN_FLIGHT  ACTIVE\none       2          yes\n-         1          no\n"},
		{"group consumers q g --messages", "CONSUMER  ADDRESS  ATTEMPT  HELD_MS  LEFT_MS  PARTITION\none       4        1        20       29980    0\n"},
		{"group explain q g 5 --json", `{"verdict":"retrying","address":5,"attempts":1,"not_before":"2023-11-14T22:13:20Z","consumer":"","lease_ends":"0001-01-01T00:00:00Z","blocked_by":0,"behind":0,"ready":0,"in_flight":0,"retrying":0,"blocked":0,"waiting":0,"text":"attempt 1 failed"}` + "\n"},
		{"group explain q g --key k", "VERDICT   ADDRESS  ATTEMPTS  NOT_BEFORE            CONSUMER  LEASE_ENDS  BLOCKED_BY  BEHIND  READY  IN_FLIGHT  RETRYING  BLOCKED  WAITING  TEXT\n" +
			"retrying  3        1         2023-11-14T22:13:20Z  -         -           0           0       0      0          0         0        0        attempt 1 failed\n"},
		{"delayed list q", "ADDRESS  DUE                   PUBLISHED             BYTES  KEY  PARTITION\n9        2023-11-14T22:13:20Z  2023-11-14T22:13:20Z  0      -    0\n2        2023-11-14T22:13:21Z  2023-11-14T22:13:20Z  5      k    0\n"},
		{"delayed list q --limit 1 --json", `[{"address":9,"due":"2023-11-14T22:13:20Z","published":"2023-11-14T22:13:20Z","bytes":0,"key":"","partition":0}]` + "\n"},
		{"delayed cancel q 2 --due 2023-11-14T22:13:21.5Z", "ADDRESS  RESULT\n2        cancelled\n"},
		{"delayed reschedule q 2 --delay 10s --json", `{"address":2,"due":"2023-11-14T22:13:30Z"}` + "\n"},
		{"browse q", "ADDRESS  PUBLISHED             DUE  EXPIRES  KEY  BYTES  PRODUCER  SEQ  BODY   PARTITION\n1        2023-11-14T22:13:20Z  -    -        -    5      6         2    hello  0\n"},
		{"browse q --from 4 --json", `[{"address":4,"published":"2023-11-14T22:13:20Z","due":"0001-01-01T00:00:00Z","expires":"0001-01-01T00:00:00Z","key":"","bytes":5,"producer":6,"seq":2,"body":"hello","body_base64":null,"partition":0}]` + "\n"},
		{"events --queue q", "TIME                      HOST  EVENT   QUEUE  PARTITION  SHARD  TEXT             DETAILS             SEQ\n2023-11-14T22:13:20.005Z  1     leader  q      0          2      this host leads  error=\"a b\" term=3  4\n"},
		{"events --host 1 --event quorum --json", `[{"time":"2023-11-14T22:13:20.005Z","host":1,"event":"quorum","queue":"q","partition":0,"shard":2,"text":"this host leads","details":"error=\"a b\" term=3","seq":4}]` + "\n"},
		{"lookup q 6 2", "OUTCOME  ADDRESS  EXISTS  PRODUCER_EPOCH  LOW  LAST_SEQ\nstored   3        yes     0               1    5\n"},
	} {
		got := s.ok(strings.Fields(c.args)...)
		if strings.HasPrefix(c.args, "group configure") {
			require.Equal(t, strings.Fields(c.want), strings.Fields(strings.SplitAfter(got, "\n")[0]), c.args)
			require.Contains(t, strings.Join(strings.Fields(got), " "), "g 1 no 5000 3 0 1.50 0 0 1000,2000 0 0 no 2000")
			continue
		}
		require.Equal(t, c.want, got, c.args)
	}
}

func TestAdminUsage(t *testing.T) {
	s := newShell(t, 1)
	answers(s.fleet)
	s.ok("queue", "create", "q")
	for args, text := range map[string]string{
		"queue purge q":                           "--all",
		"queue purge q --all --to 4":              "--all",
		"queue configure q --mode tape":           "work or log",
		"queue configure q --ttl -1s":             "--ttl",
		"group explain q g x":                     "address",
		"group explain q g 4 --key k":             "exclude",
		"group configure q g --lease 13h":         "--lease",
		"group configure q g --delays 1s,-1s":     "--delays",
		"group configure q g --record-after 13h":  "--record-after",
		"group create q h --record-after -1s":     "--record-after",
		"group claim q g":                         "--min-idle",
		"group claim q g --min-idle 13h":          "--min-idle",
		"group claim q g --min-idle 1m --max 0":   "--max",
		"delayed reschedule q 4":                  "--delay",
		"delayed cancel q 4 --due yesterday":      "--due",
		"delayed list q --limit 0":                "--limit",
		"browse q --limit 0":                      "--limit",
		"lookup q me 1":                           "producer",
		"lookup q 1 0":                            "seq",
		"send q x --atomic":                       "--lines",
		"send q --lines --expect-last 3":          "--atomic",
		"settle extend q r":                       "--lease",
		"settle nack q r --delay 13h":             "--delay",
		"dead redrive q":                          "--reason",
		"dead redrive q 4 --reason x":             "exclude",
		"dead purge q --all --older -1s":          "--older",
		"dead list q --older -1s":                 "--older",
		"queue create log2 --mode work --ttl -1s": "--ttl",
	} {
		_, errs, exit := s.run(strings.Fields(args)...)
		require.Equal(t, exitUsage, exit, "%s: %s", args, errs)
		require.Contains(t, errs, text, args)
	}
	_, errs, exit := s.run("delayed", "cancel", "q", "2", "--due", "2023-11-14T22:13:20Z")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "SKIPPED")
	_, errs, exit = s.run("group", "configure", "q", "nosuch")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "UNKNOWN_GROUP")
}

// A receipt from receive --json settles its message.
func TestSettle(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q")
	s.stdin = strings.NewReader("a\nb\nc\n")
	require.Equal(t, "QUEUE  ACKED  FIRST_ADDRESS  LAST_ADDRESS  DUPLICATE  DATA_COPIES  SHARD  INDEX\nq      3      1              3             no         2            2      4\n",
		s.ok("send", "q", "--lines", "--atomic"))
	receipt := func() string {
		t.Helper()
		_, rest, ok := strings.Cut(s.ok("receive", "q", "--json"), `"receipt":"`)
		require.True(t, ok)
		receipt, _, _ := strings.Cut(rest, `"`)
		return receipt
	}
	one := receipt()
	require.Equal(t, "ADDRESS  RESULT  ALREADY  RECEIPT\n1        OK      no       "+one+"\n", s.ok("settle", "extend", "q", one, "--lease", "1m"))
	s.ok("settle", "ack", "q", one)
	s.ok("settle", "nack", "q", receipt(), "--delay", "0s", "--reason", "no")
	s.ok("settle", "release", "q", receipt())
	s.ok("settle", "reject", "q", receipt(), "--reason", "bad")
	require.Contains(t, s.ok("dead", "list", "q"), "bad")
	out, errs, exit := s.run("settle", "ack", "q", "garbage")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "INVALID_RECEIPT")
	require.Contains(t, out, "INVALID_RECEIPT")
}

// A selection is treated in as many calls as it takes; one that fails says where to go on.
func TestDeadSelection(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q")
	s.ok("group", "create", "q", "g")
	s.stdin = strings.NewReader(strings.Repeat("x\n", 12))
	s.ok("send", "q", "--lines")
	s.fleet.Kill("q", "g", "timeout: upstream", 1, 2, 3, 4, 5, 6, 7)
	s.fleet.Kill("q", "g", "invalid", 8, 9, 10, 11, 12)
	run := func(args string) string { return s.ok(append(strings.Fields(args), "--group", "g")...) }
	require.Equal(t, 5, strings.Count(run("dead list q --reason invalid --json"), `"address"`))
	require.Equal(t, "MATCHED\n7\n", run("dead redrive q --reason timeout --dry-run --rate 5"))
	require.Equal(t, "MATCHED\n5\n", run("dead purge q --reason invalid --dry-run"))
	require.Equal(t, "REDRIVEN  SKIPPED\n3         0\n", run("dead redrive q --reason timeout --rate 5 --limit 3"))
	calls := 0
	s.fleet.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Procedure == "RedriveDeadLetters" {
			if calls++; calls == 2 {
				return clienttest.Fate{Err: code.New(code.LimitReached, "no more: enough")}
			}
		}
		return clienttest.Fate{}
	})
	out, errs, exit := s.run("dead", "redrive", "q", "--reason", "timeout", "--rate", "5", "--group", "g")
	require.Equal(t, exitRefused, exit)
	require.Equal(t, "REDRIVEN  SKIPPED\n2         0\n", out)
	require.Contains(t, errs, "go on with --from 6")
	require.Equal(t, "REDRIVEN  SKIPPED\n2         0\n", run("dead redrive q --reason timeout --rate 5 --from 6"))
	require.Equal(t, "PURGED\n4\n", run("dead purge q --all --limit 4"))
	require.Equal(t, "PURGED\n1\n", run("dead purge q --older 0s --reason invalid"))
}

// Idle messages change hands, and with --release are anybody's.
func TestGroupClaim(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q")
	s.ok("group", "create", "q", "g", "--record-after", "500ms")
	s.stdin = strings.NewReader("a\nb\n")
	s.ok("send", "q", "--lines")
	ds := s.ok("receive", "q", "--group", "g", "--max", "2", "--json")
	receipt := strings.Split(ds, `"`)[5]
	clienttest.Answer(s.fleet, func(r *tierqv1.ClaimIdleRequest) (*tierqv1.ClaimIdleResponse, error) {
		if r.MinIdleMs != 60_000 || r.MaxMessages != 10 || r.Consumer != "me" || r.GetLeaseMs() != 5000 || r.Group != "g" || r.Partition != nil && r.GetPartition() != 3 {
			return nil, code.New(code.InvalidArgument, "%v", r)
		}
		return &tierqv1.ClaimIdleResponse{DeadLettered: 1, Skipped: 2, Messages: []*tierqv1.Message{{Address: 1, Receipt: receipt, Body: []byte("a"), Attempt: 2}}}, nil
	})
	args := strings.Fields("group claim q g --min-idle 1m --max 10 --consumer me --lease 5s")
	out, errs, exit := s.run(args...)
	require.Zero(t, exit, errs)
	require.Equal(t, "a\n", out)
	require.Equal(t, "claimed 1, released 0, dead-lettered 1, settled meanwhile 2\n", errs)
	out, errs, exit = s.run(append(args, "--release", "--json", "--partition", "3")...)
	require.Zero(t, exit, errs)
	require.Contains(t, out, `"attempt":2`)
	require.Equal(t, "claimed 1, released 1, dead-lettered 1, settled meanwhile 2\n", errs)
}
