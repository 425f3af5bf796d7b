package node

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"

	"github.com/tierq/tierq/queue"
)

// testAlerts: every series that the alert rules and the dashboard name is one that a host with traffic exposes, and every
// rule leads to a section of the runbook.
func testAlerts(f *adminFleet) {
	t := f.t
	f.create("alerts", queue.QueueOptions{})
	f.group("alerts", "g", queue.GroupConfig{})
	f.reject("alerts", "g", "m", 3)
	known := map[string]bool{
		// Only there when something is wrong.
		"tierq_outbox_parked_seconds": true, "tierq_refusals_total": true,
	}
	for _, n := range f.d.Nodes {
		families, err := n.gatherer().Gather()
		require.NoError(t, err)
		for _, m := range families {
			known[m.GetName()] = true
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				known[m.GetName()+suffix] = true
			}
		}
	}
	series := regexp.MustCompile(`\btierq_[a-z_]+`)
	check := func(where, expr string) {
		names := series.FindAllString(expr, -1)
		require.NotEmpty(t, names, "%s: %s", where, expr)
		for _, name := range names {
			require.True(t, known[name], "%s: no host exposes %s", where, name)
		}
		require.Equal(t, strings.Count(expr, "("), strings.Count(expr, ")"), "%s: %s", where, expr)
	}

	raw, err := os.ReadFile("../docs/operating/alerts.yaml")
	require.NoError(t, err)
	var rules struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(raw, &rules))
	runbook, err := os.ReadFile("../docs/operating/runbook.md")
	require.NoError(t, err)
	anchors := map[string]bool{}
	for line := range strings.Lines(string(runbook)) {
		if title, ok := strings.CutPrefix(strings.TrimSpace(line), "## "); ok {
			anchors[strings.ReplaceAll(strings.ToLower(title), " ", "-")] = true
		}
	}
	for _, g := range rules.Groups {
		require.NotEmpty(t, g.Rules)
		for _, r := range g.Rules {
			check(r.Alert, r.Expr)
			require.Contains(t, []string{"page", "warn"}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			_, anchor, _ := strings.Cut(r.Annotations["runbook"], "#")
			require.True(t, anchors[anchor], "%s: the runbook has no section %q", r.Alert, anchor)
		}
	}

	raw, err = os.ReadFile("../docs/operating/dashboard.json")
	require.NoError(t, err)
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	require.NoError(t, json.Unmarshal(raw, &board))
	require.NotEmpty(t, board.Panels)
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			check(p.Title, target.Expr)
		}
	}
}
