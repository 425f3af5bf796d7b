// Package arch holds the arrows between the packages as one table and fails on any other.
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"sort"
	"strings"
	"testing"
)

const module = "github.com/tierq/tierq"

// rule is what one package may import: ours by path prefix below the module ("queue/..." stands for all below), and
// whether dragonboat.
type rule struct {
	ours       []string
	dragonboat bool
}

// rules is the whole table: a package that is not in it fails, and so does an arrow that is not in it.
var rules = map[string]rule{
	"queue/code":                        {},
	"queue/api/tierq/v1":                {},
	"queue/api/tierq/v1/tierqv1connect": {ours: []string{"queue/api/tierq/v1"}},
	"queue/store":                       {},
	"queue":                             {ours: []string{"queue/code", "queue/store"}},
	"queue/queuetest":                   {ours: []string{"queue", "queue/code", "queue/store"}},
	"queue/replica":                     {ours: []string{"queue", "queue/store", "queue/code"}, dragonboat: true},
	"queue/home":                        {ours: []string{"queue", "queue/code"}},
	"queue/certs":                       {},
	"queue/certs/certstest":             {},
	"queue/hands":                       {},
	"queue/client":                      {ours: []string{"queue/certs", "queue/code", "queue/hands", "queue/api/..."}},
	"queue/client/clienttest":           {ours: []string{"queue/code", "queue/api/..."}},
	"wal":                               {dragonboat: true},
	"witness":                           {dragonboat: true},
	"swarm":                             {},
	"host":                              {ours: []string{"queue/certs", "wal", "witness", "queue", "queue/code", "queue/store", "queue/replica", "host/catalog", "host/event", "host/peer", "host/peer/...", "host/raftnet"}, dragonboat: true},
	"host/event":                        {},
	"host/catalog":                      {ours: []string{"wal", "witness", "queue", "queue/code", "queue/store", "queue/replica"}, dragonboat: true},
	"host/peer":                         {ours: []string{"queue/certs", "wal", "witness", "queue", "queue/code", "queue/store", "queue/replica", "host/catalog", "host/peer/..."}, dragonboat: true},
	"host/raftnet":                      {ours: []string{"queue/certs"}, dragonboat: true},
	"host/freeport":                     {},
	"host/faultnet":                     {dragonboat: true},
	"host/peer/peerv1":                  {},
	"host/peer/peerv1/peerv1connect":    {ours: []string{"host/peer/peerv1"}},
	"node/api":                          {ours: []string{"queue", "queue/code", "queue/hands", "queue/api/...", "host/event", "host/peer"}},
	"node/admin":                        {ours: []string{"queue", "queue/code", "queue/api/...", "host/peer"}},
	"node/backup":                       {ours: []string{"host", "wal", "swarm", "queue", "queue/code", "queue/api/..."}},
	"node/outbox":                       {ours: []string{"queue", "queue/code", "host/event"}},
	"node":                              {ours: []string{"queue/certs", "queue/...", "queue", "wal", "witness", "swarm", "host", "host/...", "node/..."}},
	"cmd/tierq":                         {ours: []string{"queue/certs", "node", "node/backup", "queue/client", "queue/code", "queue/api/...", "wal"}},
	"test/arch":                         {},
	"test/scenario":                     {ours: []string{"*"}, dragonboat: true},
	"test/fault":                        {ours: []string{"*"}, dragonboat: true},
	"test/bench":                        {ours: []string{"*"}, dragonboat: true},
}

type pkg struct {
	ImportPath string
	Imports    []string
}

func TestArrows(t *testing.T) {
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		r, ok := rules[name]
		if !ok {
			t.Errorf("%s is not in the table of packages: add it with the arrows it needs, or move its code", name)
			continue
		}
		for _, imp := range p.Imports {
			check(t, name, r, imp)
		}
	}
}

func check(t *testing.T, name string, r rule, imp string) {
	t.Helper()
	switch {
	case strings.HasPrefix(imp, "github.com/lni/dragonboat"):
		if !r.dragonboat {
			t.Errorf("%s imports %s: only the packages named in the table may", name, imp)
		}
	case strings.HasPrefix(imp, "github.com/cockroachdb/pebble/") && !strings.HasPrefix(imp, "github.com/cockroachdb/pebble/v2"),
		imp == "github.com/cockroachdb/pebble":
		t.Errorf("%s imports pebble v1 (%s): it breaks the Raft engine's build, use pebble/v2", name, imp)
	case strings.HasPrefix(imp, module+"/"):
		if target := strings.TrimPrefix(imp, module+"/"); !allowed(r.ours, target) {
			t.Errorf("%s -> %s is not an arrow of the table", name, target)
		}
	}
}

func allowed(ours []string, target string) bool {
	for _, o := range ours {
		if o == target || o == "*" && !strings.HasPrefix(target, "cmd/") {
			return true
		}
		if prefix, ok := strings.CutSuffix(o, "..."); ok && strings.HasPrefix(target, prefix) {
			return true
		}
	}
	return false
}

// list returns the module's packages with what their non-test files import.
func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	var pkgs []pkg
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) < 5 {
		t.Fatalf("go list named only %d packages", len(pkgs))
	}
	sort.Slice(pkgs, func(i, j int) bool { return pkgs[i].ImportPath < pkgs[j].ImportPath })
	return pkgs
}

// TestPinned fails when something drags in a version of pebble v1 other than the one that the Raft engine builds with.
func TestPinned(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "github.com/cockroachdb/pebble").Output()
	if err != nil {
		t.Fatalf("go list -m: %v", err)
	}
	const want = "v0.0.0-20221207173255-0f086d933dac"
	if got := strings.TrimSpace(string(out)); got != want {
		t.Errorf("pebble v1 is at %s, the Raft engine builds with %s only: find and drop the dependency that raised it", got, want)
	}
}
