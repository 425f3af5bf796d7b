package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/tierq/tierq/host/freeport"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/certs"
	"github.com/tierq/tierq/queue/client"
)

// Bounds of what a healthy fleet needs on a slow machine.
const (
	readyWithin = 60 * time.Second
	stopWithin  = 30 * time.Second
)

// fleet is a set of host processes of one test. All of them end with the test.
type fleet struct {
	t     *testing.T
	dir   string
	hosts []*host
	tls   *certs.Store // of clients, where the API speaks TLS

	published map[string]*totals // by queue, in TestFaultMatrix
}

// host is one process, or the place of one that does not run now.
type host struct {
	f                      *fleet
	id                     uint64
	role                   string
	raft, peer, api, admin string
	dir, config, log       string
	within                 []string // a command that runs the process somewhere else
	program                string   // that it runs next; empty: the one under test

	mu      sync.Mutex
	cmd     *exec.Cmd
	done    chan struct{} // closed when the process has ended
	wanted  bool          // its end is what the test wants
	gone    bool          // is in the fleet no more
	frozen  bool          // by pause
	exit    error
	started int
	calls   *raw // of an API without TLS, once there was a call
}

// newFleet starts full hosts and witnesses and waits until all are ready.
func newFleet(t *testing.T, full, witnesses int) *fleet {
	t.Helper()
	f := layFleet(t, full, witnesses)
	for _, h := range f.hosts {
		h.start()
	}
	f.awaitReady()
	return f
}

// layFleet writes the configuration of a fleet and starts nothing.
func layFleet(t *testing.T, full, witnesses int) *fleet {
	t.Helper()
	dir, err := os.MkdirTemp("", "tierq-fault-")
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, dir: dir}
	t.Cleanup(f.clean)
	for i := range full + witnesses {
		role := "full"
		if i >= full {
			role = "witness"
		}
		f.layHost(role)
	}
	for _, h := range f.hosts {
		if err := os.WriteFile(h.config, []byte(f.yaml(h)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// layHost gives the fleet a place for one more host, without a configuration file.
func (f *fleet) layHost(role string) *host {
	f.t.Helper()
	h := &host{f: f, id: uint64(len(f.hosts) + 1), role: role, raft: freeport.For(f.t), peer: freeport.For(f.t), admin: freeport.For(f.t)}
	if role == "full" {
		h.api = freeport.For(f.t)
	}
	name := fmt.Sprintf("host-%d", h.id)
	h.dir, h.config, h.log = filepath.Join(f.dir, name), filepath.Join(f.dir, name+".yaml"), filepath.Join(f.dir, name+".log")
	f.hosts = append(f.hosts, h)
	return h
}

// yaml is h's configuration file.
func (f *fleet) yaml(h *host) string {
	var b strings.Builder
	fmt.Fprintf(&b, "host: %d\ndata: %s\nadmin: %s\nlog: %s\nhosts:\n", h.id, h.dir, h.admin, *logFlag)
	for _, o := range f.hosts {
		fmt.Fprintf(&b, "  - {id: %d, role: %s, raft: %s, peer: %s, domain: d%d", o.id, o.role, o.raft, o.peer, o.id)
		if o.api != "" {
			fmt.Fprintf(&b, ", api: %s", o.api)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// clean ends the processes, and on failure prints the ends of their logs and keeps them.
func (f *fleet) clean() {
	for _, h := range f.hosts {
		if f.t.Failed() && h.running() {
			h.keepStacks()
		}
		h.kill()
	}
	for _, h := range f.hosts {
		if line := h.panicked(); line != "" {
			f.t.Errorf("host %d panicked: %s", h.id, line)
		}
	}
	if f.t.Failed() {
		for _, h := range f.hosts {
			f.t.Logf("host %d, the end of %s:\n%s", h.id, h.log, tail(h.log, 25))
		}
		f.t.Logf("data and logs are kept in %s", f.dir)
		return
	}
	if *keepFlag {
		f.t.Logf("data and logs are kept in %s", f.dir)
		return
	}
	_ = os.RemoveAll(f.dir)
}

// keepStacks writes what h's goroutines are doing beside its log.
func (h *host) keepStacks() {
	c := http.Client{Timeout: callTime}
	res, err := c.Get("http://" + h.admin + "/debug/pprof/goroutine?debug=2")
	if err != nil {
		h.f.t.Logf("host %d does not show its stacks: %v", h.id, err)
		return
	}
	defer res.Body.Close()
	stacks, err := io.ReadAll(res.Body)
	if err = errors.Join(err, os.WriteFile(h.log+".stacks", stacks, 0o600)); err != nil {
		h.f.t.Logf("host %d's stacks are not kept: %v", h.id, err)
	}
}

// start runs h's process. An end that the test did not ask for fails the test.
func (h *host) start() {
	t := h.f.t
	t.Helper()
	out, err := os.OpenFile(h.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	verb := "serve"
	if h.role == "witness" {
		verb = "witness"
	}
	args := slices.Concat(h.within, []string{h.binary(), verb, "--config", h.config})
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = h.f.dir
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // not even a killed test leaves processes behind
	h.mu.Lock()
	defer h.mu.Unlock()
	h.started++
	_, _ = fmt.Fprintf(out, "--- start %d of host %d\n", h.started, h.id)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	h.cmd, h.done, h.wanted, h.exit, h.frozen = cmd, done, false, nil, false
	go func() {
		err := cmd.Wait()
		h.mu.Lock()
		defer h.mu.Unlock()
		defer close(done)
		h.exit = err
		if !h.wanted {
			t.Errorf("host %d ended by itself: %v; the end of its log:\n%s", h.id, err, tail(h.log, 15))
		}
	}()
}

// binary is the program that h runs when it is started.
func (h *host) binary() string {
	h.f.t.Helper()
	if h.program != "" {
		return h.program
	}
	return tierq(h.f.t)
}

// kill is kill -9. It returns when the process is gone; a host that does not run stays as it is.
func (h *host) kill() {
	h.mu.Lock()
	cmd, done := h.cmd, h.done
	h.wanted = true
	h.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Kill()
	<-done
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cmd = nil
}

// stop asks for a graceful end and waits for it; the process must end by itself with status 0.
func (h *host) stop() {
	t := h.f.t
	t.Helper()
	h.mu.Lock()
	cmd, done := h.cmd, h.done
	h.wanted = true
	h.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-done:
	case <-time.After(stopWithin):
		t.Errorf("host %d did not stop within %v of SIGTERM", h.id, stopWithin)
		_ = cmd.Process.Kill()
		<-done
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cmd = nil
	if h.exit != nil {
		t.Errorf("host %d stopped with %v", h.id, h.exit)
	}
}

// pause freezes the process (SIGSTOP), resume lets it go on.
func (h *host) pause()  { h.signal(syscall.SIGSTOP) }
func (h *host) resume() { h.signal(syscall.SIGCONT) }

func (h *host) signal(s syscall.Signal) {
	h.f.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cmd == nil {
		h.f.t.Fatalf("host %d does not run", h.id)
	}
	if err := h.cmd.Process.Signal(s); err != nil {
		h.f.t.Fatal(err)
	}
	h.frozen = s == syscall.SIGSTOP
}

// running says whether the process is there and can answer.
func (h *host) running() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.cmd != nil && !h.frozen
}

func (h *host) pid() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cmd == nil {
		return 0
	}
	return h.cmd.Process.Pid
}

// restart starts h again after a kill and waits until it is ready.
func (h *host) restart() {
	h.f.t.Helper()
	h.start()
	h.awaitReady()
}

func (h *host) awaitReady() {
	h.f.t.Helper()
	began := time.Now()
	eventually(h.f.t, readyWithin, fmt.Sprintf("host %d is ready", h.id), h.ready)
	h.f.t.Logf("host %d ready after %v", h.id, time.Since(began).Round(time.Millisecond))
}

// ready asks the admin listener.
func (h *host) ready() error {
	h.mu.Lock()
	done := h.done
	h.mu.Unlock()
	select {
	case <-done:
		return errors.New("the process has ended")
	default:
	}
	_, err := h.get("/readyz")
	return err
}

// get reads a page of the admin listener.
func (h *host) get(path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.admin+path, nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", res.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
}

func (f *fleet) awaitReady() {
	f.t.Helper()
	for _, h := range f.hosts {
		h.awaitReady()
	}
}

func (f *fleet) host(id uint64) *host {
	f.t.Helper()
	if id < 1 || int(id) > len(f.hosts) {
		f.t.Fatalf("there is no host %d", id)
	}
	return f.hosts[id-1]
}

// full lists the full hosts of the fleet.
func (f *fleet) full() []*host {
	var out []*host
	for _, h := range f.hosts {
		if h.role == "full" && !h.gone {
			out = append(out, h)
		}
	}
	return out
}

func (f *fleet) other(not *host) *host {
	f.t.Helper()
	for _, h := range f.full() {
		if h != not {
			return h
		}
	}
	f.t.Fatal("there is no other full host")
	return nil
}

func (f *fleet) addrs() []string {
	var out []string
	for _, h := range f.full() {
		out = append(out, h.api)
	}
	return out
}

// client returns a client of the whole fleet that ends with the test; o may leave the addresses out.
func (f *fleet) client(o client.Options) *client.Client {
	f.t.Helper()
	if o.Addrs == nil {
		o.Addrs = f.addrs()
	}
	if o.Logger == nil {
		o.Logger = f.clientLog()
	}
	if o.TLS == nil {
		o.TLS = f.tls
	}
	c, err := client.New(o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

// clientLog collects what all clients of this fleet say.
func (f *fleet) clientLog() *zap.Logger {
	f.t.Helper()
	out, err := os.OpenFile(filepath.Join(f.dir, "clients.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = out.Close() })
	enc := zap.NewProductionEncoderConfig()
	enc.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(enc), out, zap.DebugLevel))
}

// createQueue creates a queue with the fleet's own layout and waits until every full replica of it is there.
func (f *fleet) createQueue(c *client.Client, name string, o *tierqv1.QueueOptions) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	if _, err := c.CreateQueue(ctx, &tierqv1.CreateQueueRequest{Name: name, Options: o}); err != nil {
		f.t.Fatalf("create queue %s: %v", name, err)
	}
	f.awaitConverged(name)
}

func (f *fleet) createGroup(c *client.Client, req *tierqv1.CreateGroupRequest) *tierqv1.Group {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	g, err := c.CreateGroup(ctx, req)
	if err != nil {
		f.t.Fatalf("create group %s: %v", req.Name, err)
	}
	return g
}

// tail returns the last lines of a file.
func tail(path string, lines int) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := bytes.Split(bytes.TrimRight(raw, "\n"), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}

// panicked returns the first line of a panic in h's log.
func (h *host) panicked() string {
	raw, err := os.ReadFile(h.log)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(raw)) {
		if strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") || strings.Contains(line, `"level":"panic"`) || strings.Contains(line, `"level":"fatal"`) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}
