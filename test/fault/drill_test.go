package fault

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

var (
	drillsFlag     = flag.Bool("drills", false, "run every drill of the runbook, not only the three cheapest")
	transcriptFlag = flag.String("drill.transcript", "", "directory in which the drills write what they typed and saw")
)

// drill stages one failure, and types what a section of the runbook says.
type drill struct {
	section string
	blocks  []string // that it runs
	run     func(*drilling)
	kind    drillKind
	name    string // where a section has several drills
}

type drillKind uint8

const (
	long   drillKind = iota // has hosts of its own, under -drills
	shared                  // breaks and mends one fleet of two full hosts and a witness, with others of its kind, under -drills
	quick                   // the same, in every run
)

// drills are all of them.
var drills = []drill{
	{"RB-1", []string{"look", "start", "over"}, drillDegraded, quick, ""},
	{"RB-3", []string{"look", "start", "over"}, drillKilled, quick, ""},
	{"RB-4", []string{"look", "start", "over"}, drillNoLeader, quick, ""},
	{"RB-6", []string{"look", "start", "over"}, drillWitnessDown, shared, ""},
	{"RB-11", []string{"look", "host", "witness", "over"}, drillUpgrade, shared, ""},
	{"RB-13", []string{"look", "over"}, drillBacklog, shared, ""},
	{"RB-14", []string{"look", "redrive", "over"}, drillDeadLetters, shared, ""},
	{"RB-15", []string{"look", "purge", "over"}, drillRefusals, shared, ""},
	{"RB-16", []string{"look", "cancel", "start", "over"}, drillGrowth, shared, ""},
	{"RB-17", []string{"look", "accept", "over"}, drillClock, shared, ""},
	{"RB-1", []string{"look", "over"}, drillReadOnly, long, "no-outcome"},
	{"RB-2", []string{"look", "verify", "replace", "over"}, drillDivergent, long, ""},
	{"RB-5", []string{"look", "purge", "over"}, drillDiskLow, long, ""},
	{"RB-6", []string{"look", "replace", "over"}, drillWitnessLost, long, "replaced"},
	{"RB-7", []string{"save", "verify", "start", "restore", "over"}, drillBothLost, long, ""},
	{"RB-8", []string{"look", "stop", "plan", "take", "new-fleet", "over"}, drillNewestLost, long, ""},
	{"RB-8", []string{"look", "stop", "plan", "take", "in-place", "over"}, drillNewestLostInPlace, long, "in-place"},
	{"RB-9", []string{"look", "join", "lost", "drain", "over"}, drillHostReplaced, long, ""},
	{"RB-10", []string{"look", "rotate", "over"}, drillCertificates, long, ""},
	{"RB-12", []string{"look", "over"}, drillSlowDisk, long, ""},
}

// TestFaultDrill runs the runbook's own commands, as they are on the page, against the failures that its sections are about, under
// load, and keeps the account. The three cheapest drills run always, the others under -drills.
func TestFaultDrill(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	var f *fleet
	for _, d := range drills {
		if d.kind == long {
			continue
		}
		if d.kind == quick || *drillsFlag {
			if f == nil {
				f = newFleet(t, 2, 1)
			}
			f.drill(t, d)
		}
	}
}

// TestFaultDrills does the same with the drills that take hosts of their own.
func TestFaultDrills(t *testing.T) {
	needsProcesses(t)
	if !*drillsFlag {
		t.Skip("takes minutes: run with -drills, as make fault-quick and CI do")
	}
	for _, d := range drills {
		if d.kind == long {
			(*fleet)(nil).drill(t, d)
		}
	}
}

// drilling is one drill under way.
type drilling struct {
	t       *testing.T
	name    string
	f       *fleet // nil until the drill has made one, where it needs its own
	section *section
	ran     map[string]bool
	vars    map[string]string
	bin     string // directory in which the program's name is tierq
	text    strings.Builder
	began   time.Time
}

// drill runs one drill as a subtest, and checks that it ran the blocks that it says.
func (f *fleet) drill(t *testing.T, d drill) {
	t.Helper()
	sections := readRunbook(t)
	s := sections[slices.IndexFunc(sections, func(s *section) bool { return s.id == d.section })]
	name := strings.TrimSuffix(d.section+"-"+d.name, "-")
	t.Run(name, func(t *testing.T) {
		r := &drilling{t: t, name: name, section: s, ran: map[string]bool{}, vars: map[string]string{}, bin: t.TempDir(), began: time.Now()}
		require.NoError(t, os.Symlink(tierq(t), filepath.Join(r.bin, "tierq")))
		fmt.Fprintf(&r.text, "%s %s\n\n", s.id, s.title)
		defer r.store()
		if f != nil {
			r.use(f)
		}
		d.run(r)
		require.Equal(t, slices.Sorted(slices.Values(d.blocks)), slices.Sorted(maps.Keys(r.ran)), "the blocks that it ran")
	})
}

// use binds the variables that are a fleet's. The fleet reports to the drill's test from now on.
func (d *drilling) use(f *fleet) {
	d.f = f
	var admins []string
	for _, h := range f.full() {
		admins = append(admins, h.admin)
	}
	d.set("TIERQ_ADDR", strings.Join(f.addrs(), ","))
	d.set("TIERQ_ADMIN", strings.Join(admins, ","))
}

func (d *drilling) set(name, value string) { d.vars[name] = value }

// at binds the variables of the host at hand.
func (d *drilling) at(h *host) {
	d.set("HOST", strconv.FormatUint(h.id, 10))
	d.set("CONFIG", h.config)
	d.set("DIR", h.dir)
	d.set("ADMIN", h.admin)
	d.set("PID", strconv.Itoa(h.pid()))
}

// say writes a line for the reader of the transcript.
func (d *drilling) say(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	d.t.Log(line)
	fmt.Fprintf(&d.text, "\n# %.1f s: %s\n", time.Since(d.began).Seconds(), line)
}

// store writes the transcript: -v prints it, -drill.transcript keeps it.
func (d *drilling) store() {
	d.t.Log("transcript\n" + d.text.String())
	if *transcriptFlag == "" {
		return
	}
	name := filepath.Join(*transcriptFlag, strings.ToLower(d.name)+".txt")
	if err := errors.Join(os.MkdirAll(*transcriptFlag, 0o755), os.WriteFile(name, []byte(d.text.String()), 0o600)); err != nil {
		d.t.Error(err)
	}
}

// do runs a block of the section, line by line, and returns what it printed.
func (d *drilling) do(name string) string {
	d.t.Helper()
	from := d.text.Len()
	b := d.section.block(d.t, name)
	d.ran[name] = true
	fmt.Fprintf(&d.text, "\n# %.1f s, %s (%s)\n", time.Since(d.began).Seconds(), b.part, name)
	for _, c := range b.commands {
		d.command(b, c)
	}
	return d.text.String()[from:]
}

var (
	startsHost = regexp.MustCompile(`^tierq (serve|witness) --config (\S+)$`)
	stopsHost  = regexp.MustCompile(`^kill -TERM "?\$PID"?$`)
)

// command types one line, and again until what its comment says is so.
func (d *drilling) command(b block, c command) {
	d.t.Helper()
	comment := ""
	if c.want.kind != "" {
		comment = "  # " + c.want.text
	}
	fmt.Fprintf(&d.text, "$ %s%s\n", expand(c.text, d.vars), comment)
	if m := startsHost.FindStringSubmatch(c.text); m != nil {
		d.startHost(m[1], expand(m[2], d.vars))
		return
	}
	if stopsHost.MatchString(c.text) {
		d.stopHost(c)
		return
	}
	began, times := time.Now(), 0
	var r run
	err := poll(readyWithin, func() error {
		times++
		r = d.shell(c.text)
		if b.name == "look" && r.exit == exitRefused {
			return nil
		}
		err := c.want.check(r.exit, r.stdout, d.vars)
		if err != nil && c.want.kind == "" {
			return nil // is not to be repeated: judged below
		}
		return err
	})
	d.text.WriteString(r.stdout + r.stderr)
	if r.exit != 0 {
		fmt.Fprintf(&d.text, "(exit %d)\n", r.exit)
	}
	if times > 1 {
		fmt.Fprintf(&d.text, "(typed %d times in %v)\n", times, time.Since(began).Round(100*time.Millisecond))
	}
	failed := err != nil || c.want.kind == "" && r.exit != 0 && (b.name != "look" || r.exit != exitRefused)
	require.False(d.t, failed, "%s, block %s: %s\nexit %d, %v\n%s%s", d.section.id, b.name, expand(c.text, d.vars), r.exit, err, r.stdout, r.stderr)
}

// shell runs one line as a shell does.
func (d *drilling) shell(line string) run {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*readyWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-euc", line)
	cmd.Env = append(os.Environ(), "PATH="+d.bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	for name, value := range d.vars {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Dir = d.bin
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	r := run{stdout: stdout.String(), stderr: stderr.String()}
	var ee *exec.ExitError
	switch {
	case ctx.Err() != nil:
		d.t.Fatalf("%s hung; stdout %q stderr %q", line, r.stdout, r.stderr)
	case errors.As(err, &ee):
		r.exit = ee.ExitCode()
	case err != nil:
		d.t.Fatal(err)
	}
	return r
}

// startHost does what a line that starts a host says; the process goes on when the line is done.
func (d *drilling) startHost(verb, config string) {
	d.t.Helper()
	i := slices.IndexFunc(d.f.hosts, func(h *host) bool { return h.config == config })
	require.GreaterOrEqual(d.t, i, 0, "no host has the file %s", config)
	h := d.f.hosts[i]
	require.Equal(d.t, verb == "witness", h.role == "witness", "%s for a %s host", verb, h.role)
	require.False(d.t, h.running(), "host %d runs already", h.id)
	h.start()
}

// stopHost runs a line that ends the process at hand, and waits for its end.
func (d *drilling) stopHost(c command) {
	d.t.Helper()
	i := slices.IndexFunc(d.f.hosts, func(h *host) bool { return strconv.Itoa(h.pid()) == d.vars["PID"] })
	require.GreaterOrEqual(d.t, i, 0, "no host is process %s", d.vars["PID"])
	require.Zero(d.t, d.f.hosts[i].endedBy(func() { require.Zero(d.t, d.shell(c.text).exit) }), "its exit status")
}

// endedBy lets do end the process, and returns the process's exit status.
func (h *host) endedBy(do func()) int {
	h.f.t.Helper()
	h.mu.Lock()
	cmd, done := h.cmd, h.done
	h.wanted = true
	h.mu.Unlock()
	do()
	select {
	case <-done:
	case <-time.After(stopWithin):
		h.f.t.Fatalf("host %d did not stop within %v", h.id, stopWithin)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cmd = nil
	return cmd.ProcessState.ExitCode()
}

// traffic is a publisher and consumers of one queue, with their books.
type traffic struct {
	d             *drilling
	queue         string
	a             *account
	stopPublisher func()
	stopConsumers func()
}

// dripEvery is the pace of a drill's publisher, drillLease how long its consumers may hold a message, in milliseconds.
const (
	dripEvery  = 4 * time.Millisecond
	drillLease = 4000
)

// load creates a queue with a group and lets messages flow through it until finish.
func (d *drilling) load(queue string, o *tierqv1.QueueOptions) *traffic {
	d.t.Helper()
	c := d.f.client(client.Options{PublishTimeout: 2 * readyWithin})
	d.f.createQueue(c, queue, o)
	d.f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: queue, Name: "workers", Config: &tierqv1.GroupConfig{LeaseMs: drillLease}})
	l := &traffic{d: d, queue: queue, a: newAccount()}
	l.stopConsumers = consume(d.f, l.a, queue, "workers", 2, nil)
	l.stopPublisher = drip(d.t, c, l.a, queue)
	d.set("QUEUE", queue)
	d.set("GROUP", "workers")
	awaitAcks(d.t, l.a, 100)
	d.f.awaitTwoCopies(queue)
	return l
}

// goesOn waits until more messages are published and acked.
func (l *traffic) goesOn() {
	l.d.t.Helper()
	awaitProgress(l.d.t, l.a, 50)
	awaitAcks(l.d.t, l.a, 50)
}

// finish ends the load, and checks the account: nothing that was acknowledged is lost.
func (l *traffic) finish() {
	t := l.d.t
	t.Helper()
	l.goesOn()
	l.stopPublisher()
	l.d.f.awaitFinished(l.queue, "workers", readyWithin)
	l.stopConsumers()
	l.d.f.awaitConverged(l.queue)
	s := l.a.verify(t)
	require.Zero(t, s.lost+s.refused+s.unknown)
	l.d.say("%s; longest time between two acknowledgements %v", s, l.a.longestGap.Round(time.Millisecond))
}

// drip publishes at a low pace until the returned function is called, which waits for every answer.
func drip(t *testing.T, c *client.Client, a *account, queue string) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(dripEvery)
		defer tick.Stop()
		var answers sync.WaitGroup
		defer answers.Wait()
		for id := uint64(1); ; id++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				publishOne(c, a, queue, id, fmt.Appendf(nil, "drill %d", id), &answers)
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(stop)
	return stop
}
