package fault

import (
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

var (
	seedFlag   = flag.Uint64("seed", 20260730, "seed of everything that is random")
	roundsFlag = flag.Int("rounds", 2, "rounds of kills in TestFaultKillLoop")
	linesFlag  = flag.Int("lines", 120_000, "lines of real text in TestFaultRealInput")
	binaryFlag = flag.String("tierq", "", "the binary to test; by default one is built")
	otherFlag  = flag.String("other", "", "another version's binary, for the drill of upgrades; by default the same program is built under another version")
	logFlag    = flag.String("log", "info", "log level of the hosts")
	keepFlag   = flag.Bool("keep", false, "keep data and logs of passed tests too")
)

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "3") // more than cores: fleets wait more than they compute
	flag.Parse()
	status := m.Run()
	printLedger(os.Stdout)
	if program.dir != "" {
		_ = os.RemoveAll(program.dir)
	}
	os.Exit(status)
}

// needsProcesses skips a test that starts processes under -short.
func needsProcesses(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes: not under -short")
	}
}

// newRand returns this test's own random numbers and prints how to repeat them.
func newRand(t *testing.T) *rand.Rand {
	t.Helper()
	t.Logf("seed %d (repeat with -seed=%d)", *seedFlag, *seedFlag)
	return rand.New(rand.NewPCG(*seedFlag, 0x7469657271))
}

// program is what was built for this run.
var program struct {
	mu    sync.Mutex
	dir   string
	built map[string]string // by version
}

// otherVersion is what the second binary says it is.
const otherVersion = "0.0.0-other"

// tierq returns the path of the program under test.
func tierq(t *testing.T) string {
	t.Helper()
	return build(t, *binaryFlag, "")
}

// otherTierq returns the path of a program of another version.
func otherTierq(t *testing.T) string {
	t.Helper()
	return build(t, *otherFlag, otherVersion)
}

// build returns given, or builds the program under a version, once a run.
func build(t *testing.T, given, version string) string {
	t.Helper()
	if given != "" {
		return given
	}
	program.mu.Lock()
	defer program.mu.Unlock()
	if program.built == nil {
		dir, err := os.MkdirTemp("", "tierq-bin-")
		if err != nil {
			t.Fatal(err)
		}
		program.dir, program.built = dir, map[string]string{}
	}
	if path, ok := program.built[version]; ok {
		return path
	}
	path := filepath.Join(program.dir, "tierq"+version)
	// Without debug information: writing it takes as long as the rest of the link.
	cmd := exec.Command("go", "build", "-ldflags=-s -w -X main.version="+version, "-o", path, "github.com/tierq/tierq/cmd/tierq")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the binary: %v\n%s", err, out)
	}
	program.built[version] = path
	return path
}

// pollEvery is how often a state that only an outside view shows is looked at.
const pollEvery = 20 * time.Millisecond

var errNotYet = errors.New("not yet")

// eventually waits until cond returns nil, and fails the test when that takes longer than within.
func eventually(t *testing.T, within time.Duration, what string, cond func() error) {
	t.Helper()
	if err := poll(within, cond); err != nil {
		t.Fatalf("%s: not within %v: %v", what, within, err)
	}
}

// poll returns nil as soon as cond does, else its last error when within has passed.
func poll(within time.Duration, cond func() error) error {
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		err := cond()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return err
		}
	}
}
