package fault

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// lan is a network of namespaces: every host of a fleet has one, with its own address, and a bridge joins them and this process.
//
// Packets from one host to another are lost when the first one looks for the second at a hardware address that nobody has. That
// works in one direction alone, is seen by neither side, and needs no packet filter.
type lan struct {
	t      *testing.T
	prefix string // of the namespaces' names
	bridge string
	subnet string // its first three bytes
	hosts  int
}

const nobodysAddress = "02:00:00:00:00:ff"

// newLAN makes a network for so many hosts, which goes with the test. It skips the test where that is not permitted.
func newLAN(t *testing.T, hosts int) *lan {
	t.Helper()
	pid := os.Getpid()
	l := &lan{t: t, prefix: fmt.Sprintf("tierq-%d-", pid), bridge: fmt.Sprintf("tqb%d", pid), subnet: fmt.Sprintf("10.213.%d", pid%250), hosts: hosts}
	removeStale(t)
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("needs network namespaces, and there is no ip command: install iproute2")
	}
	if out, err := exec.Command("ip", "link", "add", l.bridge, "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("needs network namespaces, and may not make a bridge: run it as root, with CAP_NET_ADMIN: %s", strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() { removeLAN(t, l.prefix, l.bridge) })
	if out, err := exec.Command("ip", "netns", "add", l.namespace(1)).CombinedOutput(); err != nil {
		t.Skipf("needs network namespaces, and may not make one: run it as root, with CAP_SYS_ADMIN: %s", strings.TrimSpace(string(out)))
	}
	l.ip("addr", "add", l.subnet+".254/24", "dev", l.bridge)
	l.ip("link", "set", l.bridge, "up")
	for i := 1; i <= hosts; i++ {
		l.join(i)
	}
	return l
}

func (l *lan) namespace(host int) string { return l.prefix + strconv.Itoa(host) }
func (l *lan) address(host int) string   { return fmt.Sprintf("%s.%d", l.subnet, host) }
func hardware(host int) string           { return fmt.Sprintf("02:00:00:00:00:%02x", host) }

// join makes a host's namespace and its cable to the bridge. Where the other hosts are is set, and not asked for.
func (l *lan) join(host int) {
	l.t.Helper()
	ns, cable := l.namespace(host), fmt.Sprintf("tqv%d-%d", os.Getpid(), host)
	if host > 1 {
		l.ip("netns", "add", ns)
	}
	l.ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", ns)
	l.ip("link", "set", cable, "master", l.bridge, "up")
	l.ip("-n", ns, "link", "set", "lo", "up")
	l.ip("-n", ns, "link", "set", "eth0", "address", hardware(host))
	l.ip("-n", ns, "addr", "add", l.address(host)+"/24", "dev", "eth0")
	l.ip("-n", ns, "link", "set", "eth0", "up")
	for other := 1; other <= l.hosts; other++ {
		if other != host {
			l.see(host, other, hardware(other))
		}
	}
}

func (l *lan) see(host, other int, at string) {
	l.t.Helper()
	l.ip("-n", l.namespace(host), "neigh", "replace", l.address(other), "lladdr", at, "dev", "eth0", "nud", "permanent")
}

// cut loses what one host sends to another, heal ends all cuts.
func (l *lan) cut(from, to int) { l.see(from, to, nobodysAddress) }

func (l *lan) heal() {
	for from := 1; from <= l.hosts; from++ {
		for to := 1; to <= l.hosts; to++ {
			if from != to {
				l.see(from, to, hardware(to))
			}
		}
	}
}

func (l *lan) ip(args ...string) {
	l.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		l.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// removeLAN removes what there is; the cables go with their namespaces.
func removeLAN(t *testing.T, prefix, bridge string) {
	for _, ns := range namespaces() {
		if strings.HasPrefix(ns, prefix) {
			if out, err := exec.Command("ip", "netns", "del", ns).CombinedOutput(); err != nil {
				t.Errorf("namespace %s is left behind: %v: %s", ns, err, out)
			}
		}
	}
	_ = exec.Command("ip", "link", "del", bridge).Run()
}

func namespaces() (names []string) {
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 0 {
			names = append(names, f[0])
		}
	}
	return names
}

// removeStale removes what test processes have left behind that were killed.
func removeStale(t *testing.T) {
	for _, ns := range namespaces() {
		parts := strings.Split(ns, "-")
		if len(parts) != 3 || parts[0] != "tierq" {
			continue
		}
		if _, err := os.Stat(filepath.Join("/proc", parts[1])); errors.Is(err, os.ErrNotExist) {
			removeLAN(t, "tierq-"+parts[1]+"-", "tqb"+parts[1])
		}
	}
}

// newFleetOn starts full hosts, each in a namespace of its own.
func newFleetOn(t *testing.T, l *lan) *fleet {
	t.Helper()
	f := layFleet(t, l.hosts, 0)
	for i, h := range f.hosts {
		for _, a := range []*string{&h.raft, &h.peer, &h.api, &h.admin} {
			_, port, err := net.SplitHostPort(*a)
			require.NoError(t, err)
			*a = net.JoinHostPort(l.address(i+1), port)
		}
		h.within = []string{"ip", "netns", "exec", l.namespace(i + 1)}
	}
	for _, h := range f.hosts {
		require.NoError(t, os.WriteFile(h.config, []byte(f.yaml(h)+"insecure: [api, raft, peer, admin]\n"), 0o600))
		h.start()
	}
	f.awaitReady()
	return f
}

// TestFaultCutPackets loses the packets that a leader sends to the other hosts, then those that they send to one, under load: another
// host leads, clients go on, and nothing that was acknowledged is lost. Clients reach every host all the time.
func TestFaultCutPackets(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	newRand(t)
	l := newLAN(t, 3)
	f := newFleetOn(t, l)
	c := f.client(client.Options{PublishTimeout: 60 * time.Second})
	f.createQueue(c, "cut", nil)
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "cut", Name: "g", Config: &tierqv1.GroupConfig{LeaseMs: 3000}})
	a := newAccount()
	stopConsumers := consume(f, a, "cut", "g", 2, func(*client.Delivery) (ending, error) { return acked, nil })
	stopPublisher := publishAt(t, c, a, "cut", 300)
	awaitProgress(t, a, 100)
	for _, direction := range []string{"egress", "ingress"} {
		old := f.leaderHost("cut")
		began := time.Now()
		for _, h := range f.hosts {
			switch {
			case h == old:
			case direction == "egress":
				l.cut(int(old.id), int(h.id))
			default:
				l.cut(int(h.id), int(old.id))
			}
		}
		next := f.awaitOtherLeader("cut", old)
		took := time.Since(began)
		awaitProgress(t, a, 100)
		awaitAcks(t, a, 100)
		measured(t, "cut of the %s of the leader's host: another host leads after %v", direction, took.Round(time.Millisecond))
		l.heal()
		for _, h := range f.hosts {
			f.awaitCaughtUp(h, "cut")
		}
		f.awaitTwoCopies("cut")
		t.Logf("host %d led, then host %d", old.id, next)
	}
	awaitProgress(t, a, 100)
	stopPublisher()
	g := f.awaitFinished("cut", "g", readyWithin)
	stopConsumers()
	f.awaitConverged("cut")
	s := a.verify(t)
	require.Zero(t, s.refused+s.unknown)
	require.EqualValues(t, s.acknowledged, g.Counters.Assigned)
	require.EqualValues(t, s.acknowledged, g.Counters.Acked)
}

// awaitOtherLeader waits until the other hosts agree on a leader that is not the old one.
func (f *fleet) awaitOtherLeader(queue string, old *host) (leader uint64) {
	f.t.Helper()
	eventually(f.t, readyWithin, "the other hosts have another leader", func() error {
		leader = 0
		for _, h := range f.hosts {
			if h == old {
				continue
			}
			q, err := h.describe(queue)
			if err != nil {
				return err
			}
			at := q.Partitions[0].LeaderHost
			if at == 0 || at == old.id || leader != 0 && at != leader {
				return errNotYet
			}
			leader = at
		}
		return nil
	})
	return leader
}
