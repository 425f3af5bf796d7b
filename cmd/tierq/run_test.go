package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client/clienttest"
	"github.com/tierq/tierq/queue/code"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shell runs command lines against a fleet in memory.
type shell struct {
	t     *testing.T
	fleet *clienttest.Fleet
	stdin io.Reader
}

func newShell(t *testing.T, hosts int) *shell {
	return &shell{t: t, fleet: clienttest.New(t, hosts)}
}

// run returns what a command line printed and its exit code. Addresses are replaced by names.
func (s *shell) run(args ...string) (stdout, stderr string, exit int) {
	s.t.Helper()
	in := s.stdin
	if in == nil {
		in = strings.NewReader("")
	}
	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	exit = run(ctx, append([]string{"--addr", strings.Join(s.fleet.Addrs(), ",")}, args...), in, &out, &errs)
	return s.mask(out.String()), s.mask(errs.String()), exit
}

// mask names addresses and drops the blanks that pad a column to them.
func (s *shell) mask(text string) string {
	pad := ""
	for i, a := range s.fleet.Addrs() {
		name := fmt.Sprintf("api%d", i+1)
		text = strings.ReplaceAll(text, a, name)
		pad = strings.Repeat(" ", len(a)-len(name))
	}
	return strings.ReplaceAll(text, "API  "+pad, "API  ")
}

// ok runs a command line that must succeed and returns its stdout.
func (s *shell) ok(args ...string) string {
	s.t.Helper()
	out, errs, exit := s.run(args...)
	require.Equal(s.t, exitOK, exit, "%v: %s", args, errs)
	return out
}

// The columns are frozen: scripts count them. A new one goes to the end.
func TestGoldenTables(t *testing.T) {
	s := newShell(t, 3)
	for _, c := range []struct{ args, want string }{
		{"queue create orders", "QUEUE   RESULT   ID  SHARD  LEADER  PARTITIONS\norders  created  2   2      1       1\n"},
		{"queue create orders", "QUEUE   RESULT   ID  SHARD  LEADER  PARTITIONS\norders  existed  2   2      1       1\n"},
		{"queue create keyed --ordering key --durability strict --json", `{"queue":"keyed","result":"created","id":3,"shard":3,"leader":1,"partitions":1}` + "\n"},
		{"queue list", "QUEUE   ID  PARTITIONS  ORDERING  DURABILITY  SHARD  LEADER  QUORUM\nkeyed   3   1           key       strict      3      1       healthy\norders  2   1           none      available   2      1       healthy\n"},
		{"queue list --prefix x --json", "[]\n"},
		{"group create orders billing --start latest --lease 10s", "GROUP    ID  HOME  EPOCH  FLOOR  UNFINISHED  IN_FLIGHT  RETRYING  DEAD  ACKED  WAITING  HOME_API\nbilling  1   1     1      0      0           0          0         0     0      0        api1\n"},
		{"send orders hello --key k --header a=b", "QUEUE   ADDRESS  DUPLICATE  DATA_COPIES  SHARD  INDEX  PARTITION\norders  1        no         2            2      2      0\n"},
		{"receive orders --group billing --ack", "hello\n"},
		{"group list orders", "GROUP    ID  HOME  EPOCH  FLOOR  UNFINISHED  IN_FLIGHT  RETRYING  DEAD  ACKED  WAITING  HOME_API\nbilling  1   1     1      1      0           0          0         0     1      0        api1\n"},
		{"leader get orders", "LEADER_ID  LEADER_EPOCH  QUORUM_STATE  DATA_COPIES  PARTITION  SHARD  LEADER_API\n1          3             healthy       2            0          2      api1\n"},
		{"shard digest orders", "SHARD  REPLICA  HOST  APPLIED_INDEX  DIGEST  ERROR\n2      1        1     12             00ff    -\n2      2        2     12             00ff    -\n"},
		{"group move orders billing 2", "GROUP    ID  HOME  EPOCH  FLOOR  UNFINISHED  IN_FLIGHT  RETRYING  DEAD  ACKED  WAITING  HOME_API\nbilling  1   2     2      1      0           0          0         0     1      0        api2\n"},
		{"group reset orders billing --start earliest --json", `[{"group":"billing","id":1}]`},
		{"status", "FLEET  HOST  VERSION  UPTIME_S  CATALOG_LEADER  CATALOG_EPOCH  CATALOG_VERSION\nf1     1     test     61        1               3              7\n\nHOST  ROLE  ALIVE  ANSWERS  API   DOMAIN  SILENT\n1     full  yes    yes      api1  d1      0s\n2     full  yes    no       api2  d2      0s\n3     full  yes    no       api3  d3      0s\n"},
		{"queue describe orders", "QUEUE   ID  MESSAGES  BYTES  DELAYED  LAST_ADDRESS  ORDERING  DURABILITY\norders  2   1         5      0        1             none      available\n\nPARTITION  SHARD  REPLICA  HOST  ROLE     LEADER  API\n0          2      1        1     full     yes     api1\n0          2      2        2     full     no      api2\n0          2      3        3     witness  no      api3\n\nGROUP    ID  HOME  EPOCH  FLOOR  UNFINISHED  IN_FLIGHT  RETRYING  DEAD  ACKED  WAITING  HOME_API\nbilling  1   2     3      0      1           0          0         0     0      0        api2\n"},
		{"group delete orders billing", "GROUP    RESULT\nbilling  deleted\n"},
		{"queue delete orders", "QUEUE   RESULT\norders  deleted\n"},
	} {
		got := s.ok(strings.Fields(c.args)...)
		if strings.HasPrefix(c.want, "[{") {
			require.Contains(t, got, `"group":"billing","id":1,"home":2`)
			continue
		}
		require.Equal(t, c.want, got, c.args)
	}
}

func TestErrorsTable(t *testing.T) {
	s := newShell(t, 1)
	out := s.ok("errors")
	require.Equal(t, len(code.All())+1, strings.Count(out, "\n"))
	require.Contains(t, out, "0x0021  NOT_OWNER")
	require.Contains(t, s.ok("--version"), "tierq version")
}

// Every error is one line that says what to do, and the exit code says of what kind it is; nothing is sent to a fleet
// for a command line that cannot be meant.
func TestExitCodes(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q")
	for _, c := range []struct {
		args string
		exit int
		text string
	}{
		{"bogus", exitUsage, `unknown command "bogus"`},
		{"queue", exitUsage, "create, list, describe, delete"},
		{"queue bogus", exitUsage, `no command "bogus"`},
		{"queue create", exitUsage, "accepts 1 arg"},
		{"queue create .bad", exitUsage, "names are 1 to 80"},
		{"queue create a --ordering sideways", exitUsage, "none or key"},
		{"queue create a --durability maybe", exitUsage, "available or strict"},
		{"queue create a --nosuch", exitUsage, "unknown flag"},
		{"queue list --timeout soon", exitUsage, "--timeout"},
		{"--addr nonsense queue list", exitUsage, "host:port"},
		{"send q", exitUsage, "--lines"},
		{"send q x --lines", exitUsage, "exclude"},
		{"send q x --header novalue", exitUsage, "name=value"},
		{"send q x --delay -1s", exitUsage, "below zero"},
		{"send q --lines --batch 9000", exitUsage, "1 to 8192"},
		{"receive q --output xml", exitUsage, "body or json"},
		{"receive q --wait 30s", exitUsage, "0 to 20s"},
		{"receive q --max 0", exitUsage, "at least 1"},
		{"group create q $bad", exitUsage, "names are"},
		{"group create q g --start yesterday", exitUsage, "earliest, latest"},
		{"group move q g here", exitUsage, "tierq status"},
		{"dead redrive q", exitUsage, "--all"},
		{"dead redrive q zero", exitUsage, "number from 1"},
		{"bench --duration 0s", exitUsage, "--duration"},
		{"bench --queues 0", exitUsage, "--queues"},
		{"queue describe nosuch", exitRefused, "tierq queue create nosuch"},
		{"send nosuch hello", exitRefused, "UNKNOWN_QUEUE"},
		{"receive q --group nosuch", exitRefused, "tierq group create q nosuch"},
		{"group move q nosuch 1", exitRefused, "UNKNOWN_GROUP"},
	} {
		out, errs, exit := s.run(strings.Fields(c.args)...)
		require.Equal(t, c.exit, exit, "%s: %s", c.args, errs)
		require.Contains(t, errs, c.text, c.args)
		require.Equal(t, 1, strings.Count(errs, "\n"), "one line: %s", errs)
		require.True(t, strings.HasPrefix(errs, "tierq: "))
		require.Empty(t, out, c.args)
	}
}

func TestUnreachable(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dead := ln.Addr().String()
	require.NoError(t, ln.Close())
	var asked atomic.Int64
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.NotFound(w, r)
	}))
	defer web.Close()
	for _, args := range [][]string{{"queue", "list"}, {"status"}, {"send", "q", "x"}, {"receive", "q"}, {"doctor"}, {"bench", "--dir", t.TempDir()}, {"shard", "digest", "q"}} {
		for _, addr := range []string{dead, web.Listener.Addr().String()} {
			var out, errs bytes.Buffer
			asked.Store(0)
			exit := run(context.Background(), append(args, "--addr", addr), strings.NewReader(""), &out, &errs)
			require.Equal(t, exitUnreachable, exit, "%v: %s", args, errs.String())
			require.Contains(t, errs.String(), addr)
			require.Equal(t, 1, strings.Count(errs.String(), "\n"), errs.String())
			require.LessOrEqual(t, asked.Load(), int64(2), "%v: goes on asking", args)
		}
	}
}

// Every line arrives byte for byte, whatever is lost on the way; repeats are counted, nothing is stored twice.
func TestSendLines(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	n := 0
	s.fleet.SetHook(func(c clienttest.Call) clienttest.Fate {
		if c.Publish == nil {
			return clienttest.Fate{}
		}
		n = c.N
		switch c.N {
		case 2:
			return clienttest.Fate{LoseAnswer: true}
		case 3:
			return clienttest.Fate{LoseRequest: true}
		}
		return clienttest.Fate{}
	})
	var want []string
	var text bytes.Buffer
	for i := range 5000 {
		line := fmt.Sprintf("line %d \t\xff\r", i)
		if i == 17 {
			line = ""
		}
		want = append(want, line)
		text.WriteString(line + "\n")
	}
	want = append(want, "no line end")
	text.WriteString("no line end")
	path := filepath.Join(t.TempDir(), "in")
	require.NoError(t, os.WriteFile(path, text.Bytes(), 0o600))
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	s.stdin = f
	out, errs, exit := s.run("send", "q", "--lines", "--batch", "500", "--progress")
	require.Equal(t, exitOK, exit, errs)
	require.Greater(t, n, 3)
	require.Contains(t, errs, "[==============================] 100%")
	require.Equal(t, want, s.fleet.Bodies("q"))
	cells := strings.Fields(strings.Split(out, "\n")[1])
	require.Equal(t, []string{"q", "5001"}, cells[:2])
	require.NotEqual(t, "0", cells[2], "duplicates are counted")
	require.Equal(t, []string{"0", "0"}, cells[3:5])
}

// A line that is refused ends the send: the summary says how far it came.
func TestSendLinesRefused(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q", "--max-body-bytes", "4")
	s.stdin = strings.NewReader("a\nb\nmuch too long\n")
	out, errs, exit := s.run("send", "q", "--lines", "--json")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "TOO_LARGE")
	require.Contains(t, out, `"acked":2,"duplicates":0,"refused":1,"unknown":0`)
	require.Equal(t, []string{"a", "b"}, s.fleet.Bodies("q"))
}

func TestReceive(t *testing.T) {
	s := newShell(t, 2)
	s.fleet.SetHome(2)
	s.ok("queue", "create", "q")
	s.stdin = strings.NewReader("one\ntwo\r\n\xfe\n")
	s.ok("send", "q", "--lines")

	out, errs, exit := s.run("receive", "q", "--max", "10", "--wait", "1s")
	require.Equal(t, exitOK, exit)
	require.Equal(t, "one\ntwo\r\n\xfe\n", out)
	require.Empty(t, errs)

	s.fleet.ExpireLeases("q", "$default")
	out, errs, exit = s.run("receive", "q", "--max", "2", "--output", "json", "--ack")
	require.Equal(t, exitOK, exit)
	require.Contains(t, out, `{"address":1,"receipt":"r.1.2.4","attempt":1,"published":"2023-11-14T22:13:20.001Z","body":"one"}`)
	require.Equal(t, 2, strings.Count(out, "\n"))
	require.Equal(t, "received 2, acked 2, refused acks 0, acks of unknown outcome 0\n", errs)

	out = s.ok("receive", "q", "--json")
	require.Contains(t, out, `"body_base64":"/g=="`)

	out, errs, exit = s.run("receive", "q", "--wait", "0s")
	require.Equal(t, exitOK, exit)
	require.Empty(t, out)
	require.Equal(t, "no message within 0s\n", errs)
}

// Following goes on over a move of the home, and ends well when it is stopped or has enough.
func TestReceiveFollow(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	s.stdin = strings.NewReader("1\n2\n3\n")
	s.ok("send", "q", "--lines")
	require.Equal(t, "1\n2\n3\n", s.ok("receive", "q", "--follow", "--max", "3", "--ack"))

	ctx, stop := context.WithCancel(context.Background())
	pr, pw := io.Pipe()
	done := make(chan int, 1)
	go func() {
		var errs bytes.Buffer
		done <- run(ctx, []string{"--addr", s.fleet.Addr(1), "receive", "q", "--follow", "--ack", "--wait", "1s"}, strings.NewReader(""), pw, &errs)
	}()
	read := make([]byte, 2)
	for i, b := range []string{"4", "5"} {
		s.ok("send", "q", b)
		_, err := io.ReadFull(pr, read)
		require.NoError(t, err)
		require.Equal(t, b+"\n", string(read))
		require.Eventually(t, func() bool { _, acked := s.fleet.Outstanding("q", "$default"); return acked == 4+i }, 90*time.Second, time.Millisecond)
		s.fleet.SetHome(2)
	}
	stop()
	require.Equal(t, exitOK, <-done)
}

func TestDeadLetters(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q")
	s.ok("group", "create", "q", "g")
	s.stdin = strings.NewReader("a\nb\nc\n")
	s.ok("send", "q", "--lines")
	s.fleet.Kill("q", "g", "it is\nbad", 1, 2, 3)
	require.Equal(t, "ADDRESS  ATTEMPTS  REASON     FIRST_FAILURE         DEAD                  BYTES  EXPORT  EXPORT_NUMBER  PARTITION\n"+
		"1        5         it is bad  2023-11-14T22:13:20Z  2023-11-14T22:13:20Z  1      -       0              0\n"+
		"2        5         it is bad  2023-11-14T22:13:20Z  2023-11-14T22:13:20Z  1      -       0              0\n", s.ok("dead", "list", "q", "--group", "g", "--limit", "2"))
	require.Contains(t, s.ok("dead", "list", "q", "--group", "g", "--from", "3", "--json"), `"bytes":1,"export":"","export_number":0,"body":"c","body_base64":null,"partition":0}]`)
	require.Equal(t, "REDRIVEN  SKIPPED\n1         1\n", s.ok("dead", "redrive", "q", "1", "9", "--group", "g"))
	require.Equal(t, "PURGED\n2\n", s.ok("dead", "purge", "q", "--all", "--group", "g"))
	require.Equal(t, "a\n", s.ok("receive", "q", "--group", "g"))
}

func TestDigestExit(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	s.fleet.SetDigests([]*tierqv1.ReplicaDigest{{ReplicaId: 1, Host: 1, AppliedIndex: 9, Digest: "aa"}, {ReplicaId: 2, Host: 2, AppliedIndex: 9, Digest: "bb"}})
	out, errs, exit := s.run("shard", "digest", "q")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "hosts 1 and 2 at index 9")
	require.Equal(t, 3, strings.Count(out, "\n"))
	out, errs, exit = s.run("doctor")
	require.Equal(t, exitRefused, exit)
	require.Regexp(t, `digests +fail +q +the replicas differ`, out)
	require.Contains(t, errs, "1 checks failed")

	s.fleet.SetDigests([]*tierqv1.ReplicaDigest{{ReplicaId: 1, Host: 1, AppliedIndex: 9, Digest: "aa"}, {ReplicaId: 2, Host: 2, AppliedIndex: 8, Digest: "bb"}})
	_, errs, exit = s.run("shard", "digest", "q")
	require.Equal(t, exitOK, exit)
	require.Contains(t, errs, "not comparable")
	_, errs, exit = s.run("shard", "digest", "q", "--wait", "--timeout", "300ms")
	require.NotEqual(t, exitOK, exit, errs)
}

func TestLeaderGetWithoutLeader(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	s.fleet.SetLeader(0)
	out, errs, exit := s.run("leader", "get", "q", "--json")
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "NO_LEADER")
	require.Contains(t, out, `"leader_id":0,"leader_epoch":4,"quorum_state":"electing"`)
}

// doctor passes on a sound fleet, and names what does not add up.
func TestDoctor(t *testing.T) {
	s := newShell(t, 2)
	s.ok("queue", "create", "q")
	s.ok("group", "create", "q", "g")
	s.ok("send", "q", "x")
	stats := `{"queue":"q","host":%d,"partitions":[{"partition":0,"here":true,"applied":9,"log_commit":9,"log_last":9,"log_snapshot":5,"last_address":1,"line":0,"groups":[
		{"name":"g","id":1,"home_replica":%d,"epoch":1,"start":1,"floor":0,"max_in_flight":1,"max_in_flight_per_consumer":1,"counters":{"Assigned":1,"Unfinished":1},"at_home":%s}]}]}`
	admin := func(body string) string {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			require.Equal(t, "/stats?queue=q", r.URL.String())
			_, _ = io.WriteString(w, body)
		}))
		t.Cleanup(srv.Close)
		return srv.Listener.Addr().String()
	}
	home := `{"Epoch":1,"Leased":1,"Retrying":0,"State":0,"Consumers":[{"Name":"c","Leased":1}]}`
	a1, a2 := admin(fmt.Sprintf(stats, 1, 1, home)), admin(fmt.Sprintf(stats, 2, 1, "null"))
	out := s.ok("doctor", "q", "--admin", a1+","+a2)
	require.NotContains(t, out, "fail")
	for _, check := range []string{"sums", "agree", "one-home", "ledger", "leader", "home", "digests"} {
		require.True(t, slices.ContainsFunc(strings.Split(out, "\n"), func(l string) bool { return strings.HasPrefix(l, check+" ") }), "%s in %s", check, out)
	}

	bad := admin(strings.NewReplacer(`"Assigned":1`, `"Assigned":3`, `"log_commit":9,"log_last":9,"log_snapshot":5`, `"log_commit":9,"log_last":4,"log_snapshot":5`).
		Replace(fmt.Sprintf(stats, 2, 2, `{"Epoch":1,"Leased":7,"Consumers":[{"Name":"c","Leased":8}]}`)))
	out, _, exit := s.run("doctor", "q", "--admin", a1+","+bad)
	require.Equal(t, exitRefused, exit)
	for _, check := range []string{"sums", "agree", "one-home", "ledger", "commit", "snapshot", "applied", "consumers"} {
		require.Regexp(t, `(?m)^`+check+` +fail`, out)
	}
	require.Regexp(t, `(?m)^consumers +fail .* at most 1 are allowed`, out)
	require.Regexp(t, `(?m)^consumers +fail .* the consumers hold 8, the group 7`, out)
	require.Regexp(t, `(?m)^leases +warn .* 7 leased of 1 unfinished`, out)
	out, _, exit = s.run("doctor", "--admin", "127.0.0.1:1")
	require.Equal(t, exitOK, exit)
	require.Regexp(t, `(?m)^stats +warn`, out)
}

func TestBench(t *testing.T) {
	s := newShell(t, 1)
	out := s.ok("bench", "--dir", t.TempDir(), "--duration", "50ms", "--size", "16", "--in-flight", "1,64", "--queues", "3")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, lines, 3)
	require.Equal(t, strings.Fields("BYTES IN_FLIGHT QUEUES PER_SECOND P50_US P99_US FDATASYNC_P50_US X_SYNC PROPOSE_PER_SECOND PROPOSE_P50_US OF_PROPOSE MESSAGES"), strings.Fields(lines[0]))
	require.Equal(t, "[]\n", s.ok("queue", "list", "--json"), "the scratch queue is deleted")
	_, errs, exit := s.run("bench", "--dir", "/nonexistent/dir", "--duration", "10ms")
	require.Equal(t, exitUsage, exit, errs)
}

// The log's tools check their path; what they print is the log's own business.
func TestLogTools(t *testing.T) {
	for _, verb := range []string{"dump", "verify", "stats"} {
		var out, errs bytes.Buffer
		exit := run(context.Background(), []string{"wal", verb, "/nonexistent/log"}, strings.NewReader(""), &out, &errs)
		require.Equal(t, exitUsage, exit, errs.String())
		require.Contains(t, errs.String(), "/nonexistent/log")
		require.Equal(t, 1, strings.Count(errs.String(), "\n"))
	}
}

// A host that cannot run says so in one line, before it touches anything.
func TestHostsThatCannotRun(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "host.yaml")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	hosts := "hosts:\n  - {id: 1, role: full, raft: 127.0.0.1:1, peer: 127.0.0.1:2, api: 127.0.0.1:3}\n" +
		"  - {id: 2, role: full, raft: 127.0.0.1:4, peer: 127.0.0.1:5, api: 127.0.0.1:6}\n" +
		"  - {id: 3, role: witness, raft: 127.0.0.1:7, peer: 127.0.0.1:8}\n"
	data := "data: " + filepath.Join(t.TempDir(), "data") + "\n"
	for _, c := range []struct {
		args []string
		text string
	}{
		{[]string{"serve"}, "--config"},
		{[]string{"serve", "--config", "/nonexistent.yaml"}, "/nonexistent.yaml"},
		{[]string{"serve", "--config", write("host: 1\ncolour: red\n" + data + hosts)}, `"colour"`},
		{[]string{"serve", "--config", write("host: 3\n" + data + hosts)}, "tierq witness"},
		{[]string{"witness", "--config", write("host: 1\n" + data + hosts)}, "tierq serve"},
		{[]string{"serve", "extra"}, "unknown command"},
		{[]string{"dev", "extra"}, "unknown command"},
	} {
		var out, errs bytes.Buffer
		exit := run(context.Background(), c.args, strings.NewReader(""), &out, &errs)
		require.Equal(t, exitUsage, exit, "%v: %s", c.args, errs.String())
		require.Contains(t, errs.String(), c.text)
		require.Equal(t, 1, strings.Count(errs.String(), "\n"), errs.String())
		require.Empty(t, out.String())
	}
}

// The number of partitions is for ever; whoever wants another one is told what to do.
func TestPartitionsCannotChange(t *testing.T) {
	s := newShell(t, 1)
	s.ok("queue", "create", "q", "--partitions", "3")
	s.ok("queue", "configure", "q", "--partitions", "3")
	_, errs, exit := s.run("queue", "configure", "q", "--partitions", "4")
	require.Equal(t, exitUsage, exit)
	require.Contains(t, errs, "create another queue with 4")
	_, errs, exit = s.run("browse", "q", "--partition", "x")
	require.Equal(t, exitUsage, exit, errs)
}
