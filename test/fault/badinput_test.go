package fault

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// The exit codes of the command line.
const (
	exitUsage       = 2
	exitUnreachable = 3
	exitRefused     = 4
)

// cliTime is how long a command may take that answers by itself in well below a second: a machine may be busy.
const cliTime = 90 * time.Second

// run is one ended process.
type run struct {
	exit           int
	stdout, stderr string
}

// cli runs the binary with stdin until it ends, or fails the test when it hangs.
func cli(t *testing.T, within time.Duration, stdin []byte, args ...string) run {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, tierq(t), args...)
	cmd.Dir = t.TempDir()
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	r := run{stdout: stdout.String(), stderr: stderr.String()}
	var ee *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Fatalf("tierq %s hung for %v; stdout %q stderr %q", strings.Join(args, " "), within, r.stdout, r.stderr)
	case errors.As(err, &ee):
		r.exit = ee.ExitCode()
	case err != nil:
		t.Fatal(err)
	}
	return r
}

// requireOneLine checks that a text is one line that says more than a code.
func requireOneLine(t *testing.T, text string, hints ...string) {
	t.Helper()
	text = strings.TrimSuffix(text, "\n")
	require.NotEmpty(t, text)
	require.NotContains(t, text, "\n", "an error is one line")
	require.Less(t, len(text), 600, "an error is short: %.700s", text)
	for _, h := range hints {
		require.Contains(t, text, h)
	}
}

// TestFaultBadInput: whatever cannot be done is refused at once with one line that says what to do, and changes nothing.
func TestFaultBadInput(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "good", nil)
	home := f.full()[0]
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "good", Name: "g", HomeHost: home.id})
	_, err := c.Publish(context.Background(), "good", client.Message{Body: []byte("one")})
	require.NoError(t, err)
	before := f.contents("good")

	t.Run("HTTP", func(t *testing.T) { badHTTP(t, home) })
	t.Run("publish results", func(t *testing.T) { badPublishes(t, home) })
	t.Run("receipts", func(t *testing.T) { badReceipts(t, home) })
	t.Run("command line", func(t *testing.T) { badCommands(t, home) })
	require.Equal(t, before, f.contents("good"), "nothing may have changed")
	qs, err := c.ListQueues(context.Background(), "")
	require.NoError(t, err)
	require.Len(t, qs, 1, "no queue was created")

	t.Run("hosts", func(t *testing.T) { badHosts(t, f) })
	require.Equal(t, before, f.contents("good"), "nothing may have changed")
	f.noteGroups(t, "good", totals{sent: 1, acknowledged: 1}, "g")
}

// contents is what a queue holds and what its groups know. Some refusals are decided by the state machine and counted in it,
// so its digest may change.
type contents struct {
	Messages, Bytes, Delayed, Last uint64
	Groups                         []groupStats
}

func (f *fleet) contents(queue string) contents {
	f.t.Helper()
	f.awaitConverged(queue)
	q, err := f.describe(queue)
	require.NoError(f.t, err)
	return contents{q.Messages, q.Bytes, q.Delayed, q.LastAddress, mustStats(f.t, f.leaderHost(queue), queue).Partitions[0].Groups}
}

func badHTTP(t *testing.T, h *host) {
	long := strings.Repeat("n", 81)
	body := func(n int) string { return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("b"), n)) }
	batch := func(n int) string { return "[" + strings.TrimSuffix(strings.Repeat(`{"body":"eA=="},`, n), ",") + "]" }
	for _, tc := range []struct {
		name, method, body string
		want               code.Code // 0: refused before the registry, any sentence will do
	}{
		{"queue without a name", "QueueService/CreateQueue", `{}`, code.InvalidName},
		{"queue name begins with a dot", "QueueService/CreateQueue", `{"name":".x"}`, code.InvalidName},
		{"queue name begins with $", "QueueService/CreateQueue", `{"name":"$x"}`, code.InvalidName},
		{"queue name with a slash", "QueueService/CreateQueue", `{"name":"../etc"}`, code.InvalidName},
		{"queue name with a space", "QueueService/CreateQueue", `{"name":"a b"}`, code.InvalidName},
		{"queue name beyond ASCII", "QueueService/CreateQueue", `{"name":"schön"}`, code.InvalidName},
		{"queue name with a line break", "QueueService/CreateQueue", `{"name":"a\nb"}`, code.InvalidName},
		{"queue name of 81", "QueueService/CreateQueue", `{"name":"` + long + `"}`, code.InvalidName},
		{"queue with one replica", "QueueService/CreateQueue", `{"name":"x","replicas":1}`, 0},
		{"queue with more replicas than hosts", "QueueService/CreateQueue", `{"name":"x","replicas":3}`, code.NoPlacement},
		{"queue that exists with other options", "QueueService/CreateQueue", `{"name":"good","options":{"maxBodyBytes":4096}}`, code.QueueExistsMismatch},
		{"queue with a limit beyond the greatest", "QueueService/CreateQueue", `{"name":"x","options":{"maxBodyBytes":99999999}}`, code.InvalidArgument},
		{"group name begins with a dot", "GroupService/CreateGroup", `{"queue":"good","name":".x"}`, code.InvalidName},
		{"group name of 81", "GroupService/CreateGroup", `{"queue":"good","name":"` + long + `"}`, code.InvalidName},
		{"group at an unknown host", "GroupService/CreateGroup", `{"queue":"good","name":"x","homeHost":"9"}`, code.UnknownHost},
		{"group at a witness", "GroupService/CreateGroup", `{"queue":"good","name":"x","homeHost":"3"}`, code.InvalidArgument},
		{"group that exists with other options", "GroupService/CreateGroup", `{"queue":"good","name":"g","config":{"maxAttempts":9}}`, code.GroupExistsMismatch},
		{"group in an unknown queue", "GroupService/CreateGroup", `{"queue":"nosuch","name":"x"}`, code.UnknownQueue},
		{"describe an unknown queue", "QueueService/DescribeQueue", `{"name":"nosuch"}`, code.UnknownQueue},
		{"delete an unknown queue", "QueueService/DeleteQueue", `{"name":"nosuch"}`, code.UnknownQueue},
		{"publish to an unknown queue", "QueueService/Publish", `{"queue":"nosuch","messages":[{"body":"eA=="}]}`, code.UnknownQueue},
		{"publish to an unknown partition", "QueueService/Publish", `{"queue":"good","partition":7,"messages":[{"body":"eA=="}]}`, code.UnknownPartition},
		{"an empty batch", "QueueService/Publish", `{"queue":"good"}`, code.BatchEmpty},
		{"an oversize batch", "QueueService/Publish", `{"queue":"good","messages":` + batch(10_001) + `}`, code.BatchTooLarge},
		{"a body beyond any queue's limit", "QueueService/Publish", `{"queue":"good","messages":[{"body":"` + body(16<<20) + `"}]}`, code.TooLarge},
		{"a request beyond any limit", "QueueService/Publish", `{"queue":"good","messages":[{"body":"` + body(30<<20) + `"}]}`, 0},
		{"a seq without a producer", "QueueService/Publish", `{"queue":"good","messages":[{"body":"eA==","seq":"1"}]}`, code.ProducerSeqInvalid},
		{"seqs that fall", "QueueService/Publish", `{"queue":"good","producerId":"7","messages":[{"body":"eA==","seq":"2"},{"body":"eA==","seq":"1"}]}`, code.ProducerSeqInvalid},
		{"the wrong last address", "QueueService/Publish", `{"queue":"good","expectedLastAddress":"77","messages":[{"body":"eA=="}]}`, code.ExpectedLastAddress},
		{"receive from an unknown queue", "GroupService/Receive", `{"queue":"nosuch"}`, code.UnknownQueue},
		{"receive from an unknown group", "GroupService/Receive", `{"queue":"good","group":"nosuch"}`, code.UnknownGroup},
		{"receive too much", "GroupService/Receive", `{"queue":"good","group":"g","maxMessages":1001}`, code.InvalidArgument},
		{"receive for too long", "GroupService/Receive", `{"queue":"good","group":"g","waitMs":20001}`, code.InvalidArgument},
		{"a lease beyond 12 h", "GroupService/Receive", `{"queue":"good","group":"g","leaseMs":"43200001"}`, code.InvalidArgument},
		{"ack in an unknown group", "GroupService/Ack", `{"queue":"good","group":"nosuch","receipts":["x"]}`, code.UnknownGroup},
		{"an empty ack", "GroupService/Ack", `{"queue":"good","group":"g"}`, code.BatchEmpty},
		{"an oversize ack", "GroupService/Ack", `{"queue":"good","group":"g","receipts":[` + strings.TrimSuffix(strings.Repeat(`"x",`, 1025), ",") + `]}`, code.BatchTooLarge},
		{"move to nowhere", "GroupService/MoveGroup", `{"queue":"good","name":"g"}`, code.InvalidArgument},
		{"move to an unknown host", "GroupService/MoveGroup", `{"queue":"good","name":"g","toHost":"9"}`, code.UnknownHost},
		{"move an unknown group", "GroupService/MoveGroup", `{"queue":"good","name":"nosuch","toHost":"1"}`, code.UnknownGroup},
		{"delete an unknown group", "GroupService/DeleteGroup", `{"queue":"good","name":"nosuch"}`, code.UnknownGroup},
		{"dead letters of an unknown group", "GroupService/ListDeadLetters", `{"queue":"good","group":"nosuch"}`, code.UnknownGroup},
		{"redrive in an unknown group", "GroupService/RedriveDeadLetters", `{"queue":"good","group":"nosuch"}`, code.UnknownGroup},
		{"no JSON", "QueueService/DescribeQueue", `{"name":`, 0},
		{"a wrong type", "QueueService/DescribeQueue", `{"name":["x"]}`, 0},
		{"no such call", "QueueService/Nosuch", `{}`, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, answer := h.post(t, tc.method, tc.body)
			require.GreaterOrEqual(t, status, 400, "%.300s", answer)
			if tc.want == 0 {
				require.Less(t, status, 600)
				return
			}
			require.Less(t, status, 500, "%.300s", answer)
			r := h.postRefused(t, tc.method, tc.body)
			require.Len(t, r.Details, 1, "%.300s", answer)
			d := r.Details[0].Debug
			require.Equal(t, tc.want.String(), d.Name, r.Message)
			require.Equal(t, "EFFECT_NONE", d.Effect)
			requireOneLine(t, r.Message, tc.want.String())
		})
	}
}

// badPublishes are refused message by message.
func badPublishes(t *testing.T, h *host) {
	for _, tc := range []struct {
		name, message string
		want          code.Code
	}{
		{"a body beyond the queue's limit", `{"body":"` + base64.StdEncoding.EncodeToString(make([]byte, 1<<20+1)) + `"}`, code.TooLarge},
		{"a delay beyond the queue's limit", `{"body":"eA==","delayMs":"2592000001"}`, code.DelayTooLong},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, answer := h.post(t, "QueueService/Publish", `{"queue":"good","messages":[`+tc.message+`]}`)
			require.Contains(t, string(answer), tc.want.String(), "status %d", status)
		})
	}
}

// badReceipts are refused receipt by receipt, at the home.
func badReceipts(t *testing.T, h *host) {
	for name, receipt := range map[string]string{
		"empty": "", "one letter": "x", "binary": "\x00\xff", "the right length": strings.Repeat("A", 87), "very long": strings.Repeat("A", 100_000),
	} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range settleKinds {
				res, err := h.settle(kind, "good", "g", strings.ToValidUTF8(receipt, "?"))
				require.NoError(t, err)
				require.Equal(t, code.InvalidReceipt, code.Code(res.Code), res.Text)
				require.Equal(t, "INVALID_RECEIPT", res.Name)
				requireOneLine(t, res.Text, "receive")
			}
		})
	}
}

func badCommands(t *testing.T, h *host) {
	big := make([]byte, 2<<20)
	nobody := freeport.For(t)
	for _, tc := range []struct {
		name  string
		stdin []byte
		args  []string
		exit  int
		hint  string
	}{
		{"no such command", nil, []string{"nosuch"}, exitUsage, "nosuch"},
		{"no such flag", nil, []string{"send", "--nosuch", "good", "x"}, exitUsage, "nosuch"},
		{"send without a queue", nil, []string{"send"}, exitUsage, ""},
		{"send to an unknown queue", nil, []string{"send", "nosuch", "x"}, exitRefused, "tierq queue create"},
		{"send a body that is too large", big, []string{"send", "--lines", "good"}, exitRefused, "TOO_LARGE"},
		{"receive from an unknown queue", nil, []string{"receive", "nosuch"}, exitRefused, "tierq queue create"},
		{"receive from an unknown group", nil, []string{"receive", "good", "--group", "nosuch"}, exitRefused, "tierq group create"},
		{"create a queue with a bad name", nil, []string{"queue", "create", ".bad"}, exitUsage, "names are"},
		{"create a queue that exists otherwise", nil, []string{"queue", "create", "good", "--max-body-bytes", "4096"}, exitRefused, "QUEUE_EXISTS_MISMATCH"},
		{"create a group with a bad name", nil, []string{"group", "create", "good", "$bad"}, exitUsage, "names are"},
		{"describe an unknown queue", nil, []string{"queue", "describe", "nosuch"}, exitRefused, "tierq queue create"},
		{"delete an unknown group", nil, []string{"group", "delete", "good", "nosuch"}, exitRefused, "tierq group create"},
		{"move to an unknown host", nil, []string{"group", "move", "good", "g", "9"}, exitRefused, "UNKNOWN_HOST"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := cli(t, cliTime, tc.stdin, append([]string{"--addr", h.api}, tc.args...)...)
			require.Equal(t, tc.exit, r.exit, "stdout %q stderr %q", r.stdout, r.stderr)
			requireOneLine(t, r.stderr, tc.hint)
			t.Logf("exit %d: %s", r.exit, strings.TrimSpace(r.stderr))
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		r := cli(t, cliTime, nil, "--addr", nobody, "send", "good", "x")
		require.Equal(t, exitUnreachable, r.exit, "stdout %q stderr %q", r.stdout, r.stderr)
		requireOneLine(t, r.stderr, nobody)
	})
}

// badHosts are hosts that must not start, beside a fleet that must not notice.
func badHosts(t *testing.T, f *fleet) {
	h := f.full()[0]
	good := f.yaml(h)
	write := func(t *testing.T, text string) string {
		path := filepath.Join(t.TempDir(), "host.yaml")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	// elsewhere is h's file with ports and a directory of its own, so that only what a case changes is wrong.
	elsewhere := func(t *testing.T) string {
		text := strings.ReplaceAll(good, h.dir, filepath.Join(t.TempDir(), "data"))
		for _, a := range []string{h.raft, h.peer, h.api, h.admin} {
			text = strings.ReplaceAll(text, a, freeport.For(t))
		}
		return text
	}
	refuse := func(t *testing.T, text string, hints ...string) {
		t.Helper()
		r := cli(t, cliTime, nil, "serve", "--config", write(t, text))
		require.NotZero(t, r.exit)
		requireOneLine(t, r.stderr, hints...)
		t.Logf("exit %d: %s", r.exit, strings.TrimSpace(r.stderr))
	}
	t.Run("no configuration file", func(t *testing.T) {
		r := cli(t, cliTime, nil, "serve", "--config", filepath.Join(t.TempDir(), "nosuch.yaml"))
		require.NotZero(t, r.exit)
		requireOneLine(t, r.stderr, "nosuch.yaml")
	})
	t.Run("unknown key", func(t *testing.T) { refuse(t, elsewhere(t)+"colour: red\n", `"colour"`) })
	t.Run("unknown key of a host", func(t *testing.T) {
		refuse(t, strings.Replace(elsewhere(t), "role: full", "role: full, rack: 4", 1), `"rack"`)
	})
	t.Run("a host that is not listed", func(t *testing.T) {
		refuse(t, strings.Replace(elsewhere(t), "host: 1\n", "host: 9\n", 1), "9")
	})
	t.Run("open to the world without TLS", func(t *testing.T) {
		text := elsewhere(t)
		port := freeport.For(t)[len("127.0.0.1"):]
		i := strings.Index(text, "api: ")
		end := i + strings.IndexByte(text[i:], '}')
		refuse(t, text[:i]+"api: 0.0.0.0"+port+text[end:], "insecure")
	})
	for _, port := range []string{"api", "admin", "raft", "peer"} {
		t.Run(port+" port in use", func(t *testing.T) {
			l, err := net.Listen("tcp", freeport.For(t))
			require.NoError(t, err)
			defer func() { _ = l.Close() }()
			text := elsewhere(t)
			i := strings.Index(text, port+": ") + len(port+": ")
			end := i + strings.IndexAny(text[i:], ",}\n")
			refuse(t, text[:i]+l.Addr().String()+text[end:], l.Addr().String())
		})
	}
	t.Run("second process on one data directory", func(t *testing.T) {
		text := elsewhere(t)
		i := strings.Index(text, "data: ") + len("data: ")
		end := i + strings.IndexByte(text[i:], '\n')
		refuse(t, text[:i]+h.dir+text[end:], h.dir, fmt.Sprint(h.pid()))
	})
	t.Run("another host's data directory", func(t *testing.T) {
		two := f.full()[1]
		two.kill()
		text := elsewhere(t)
		i := strings.Index(text, "data: ") + len("data: ")
		end := i + strings.IndexByte(text[i:], '\n')
		refuse(t, text[:i]+two.dir+text[end:], two.dir, "host 2")
		two.restart()
	})
}
