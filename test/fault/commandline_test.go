package fault

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
)

// commandLines is how many lines of real text TestFaultCommandLine sends.
const commandLines = 30_000

// TestFaultCommandLine is TestFaultRealInput for people: `tierq send --lines < FILE` into two `tierq receive --ack
// --follow`, with a kill -9 of the host that is home and leader in the middle.
func TestFaultCommandLine(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	one := f.full()[0]
	r := cli(t, cliTime, nil, "--addr", one.api, "queue", "create", "text")
	require.Zero(t, r.exit, r.stderr)
	f.awaitConverged("text")
	r = cli(t, cliTime, nil, "--addr", one.api, "group", "create", "text", "readers", "--home", strconv.FormatUint(f.leaderHost("text").id, 10))
	require.Zero(t, r.exit, r.stderr)

	a := newAccount()
	var file bytes.Buffer
	for i, text := range realLines(t, commandLines) {
		body := bodyOf(uint64(i+1), bytes.TrimSuffix(text, []byte{'\r'}))
		a.sending(uint64(i+1), body)
		file.Write(append(body, '\n'))
	}
	path := filepath.Join(t.TempDir(), "lines.txt")
	require.NoError(t, os.WriteFile(path, file.Bytes(), 0o600))

	addrs := f.addrs()[0] + "," + f.addrs()[1]
	readers := []*reader{startReader(t, a, addrs), startReader(t, a, addrs)}
	sender := startSender(t, path, addrs)

	home := f.homeHost("text", "readers")
	awaitRead(t, readers, commandLines/10)
	t.Logf("kill -9 of host %d, home and leader, after %d lines", home.id, read(readers))
	home.kill()
	awaitRead(t, readers, min(commandLines, read(readers)+commandLines/20))
	home.restart()

	sent := sender()
	require.Zero(t, sent.exit, "stdout %q stderr %q", sent.stdout, sent.stderr)
	t.Logf("send: %s", lastLine(sent.stdout))
	for id := range uint64(commandLines) {
		a.answered(id+1, client.Published{}) // exit 0: every line is stored
	}
	g := f.awaitFinished("text", "readers", readyWithin)
	require.EqualValues(t, commandLines, g.Counters.Acked)
	open := 0
	for _, r := range readers {
		open += r.stop(t)
	}
	f.awaitConverged("text")

	s := a.totals()
	noteAccount(t, "", s)
	require.Empty(t, a.problems)
	require.Equal(t, commandLines, s.distinct)
	require.LessOrEqual(t, s.duplicates, open, "a duplicate follows an ack that was refused or not answered")
}

// reader is one `tierq receive --ack --follow`.
type reader struct {
	cmd    *exec.Cmd
	stderr lockedBuffer
	done   chan struct{} // its stdout ended

	mu   sync.Mutex
	read int
}

func startReader(t *testing.T, a *account, addrs string) *reader {
	t.Helper()
	r := &reader{done: make(chan struct{})}
	r.cmd = exec.Command(tierq(t), "--addr", addrs, "receive", "text", "--group", "readers", "--ack", "--follow")
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r.cmd.Stderr = &r.stderr
	out, err := r.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, r.cmd.Start())
	t.Cleanup(func() { _ = r.cmd.Process.Kill() })
	go func() {
		defer close(r.done)
		b := bufio.NewReader(out)
		for {
			line, err := b.ReadBytes('\n')
			if err == io.EOF && len(line) == 0 {
				return
			}
			if err != nil {
				t.Errorf("receive: %v after %q", err, line)
				return
			}
			// What is printed is acked next; which acks were refused is known as a number only, when it ends.
			a.settled(a.got(line[:len(line)-1], 0, delivered{}), ackUnknown, nil)
			r.mu.Lock()
			r.read++
			r.mu.Unlock()
		}
	}()
	return r
}

// lockedBuffer is what a running process has written so far.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var readerSummary = regexp.MustCompile(`received (\d+), acked (\d+), `)

// stop is Ctrl-C. It returns how many acks were not OK, by the command's own count.
func (r *reader) stop(t *testing.T) int {
	t.Helper()
	require.NoError(t, r.cmd.Process.Signal(os.Interrupt))
	select {
	case <-r.done:
	case <-time.After(stopWithin):
		t.Fatal("receive does not stop")
	}
	require.NoError(t, r.cmd.Wait(), r.stderr.String())
	m := readerSummary.FindStringSubmatch(r.stderr.String())
	require.NotNil(t, m, r.stderr.String())
	t.Log(lastLine(r.stderr.String()))
	received, err := strconv.Atoi(m[1])
	require.NoError(t, err)
	acked, err := strconv.Atoi(m[2])
	require.NoError(t, err)
	return received - acked
}

func read(rs []*reader) (n int) {
	for _, r := range rs {
		r.mu.Lock()
		n += r.read
		r.mu.Unlock()
	}
	return n
}

func awaitRead(t *testing.T, rs []*reader, n int) {
	t.Helper()
	eventually(t, readyWithin, fmt.Sprintf("%d lines are received", n), func() error {
		if got := read(rs); got < n {
			return fmt.Errorf("%d are; stderr of the readers %q %q", got, rs[0].stderr.String(), rs[1].stderr.String())
		}
		return nil
	})
}

// startSender runs `tierq send --lines < path`; the returned function waits for its end.
func startSender(t *testing.T, path, addrs string) func() run {
	t.Helper()
	in, err := os.Open(path)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	cmd := exec.CommandContext(ctx, tierq(t), "--addr", addrs, "send", "text", "--lines")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &stdout, &stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { cancel(); _ = in.Close() })
	return func() run {
		_ = cmd.Wait()
		return run{exit: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	}
}

func lastLine(s string) string {
	lines := bytes.Split(bytes.TrimSpace([]byte(s)), []byte{'\n'})
	return string(lines[len(lines)-1])
}
