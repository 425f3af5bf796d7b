package node

import (
	"encoding/json"
	"fmt"
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
	known := map[string][]string{ // the labels of each series
		// Only there when something is wrong, or with TLS.
		"tierq_outbox_parked_seconds":      {"queue", "partition", "group", "code"},
		"tierq_queue_growing_seconds":      {"queue", "phase"},
		"tierq_refusals_total":             {"code"},
		"tierq_certificate_expiry_seconds": {"use"},
	}
	for _, n := range f.d.Nodes {
		families, err := n.gatherer().Gather()
		require.NoError(t, err)
		for _, m := range families {
			var labels []string
			for _, l := range m.GetMetric()[0].GetLabel() {
				labels = append(labels, l.GetName())
			}
			for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
				known[m.GetName()+suffix] = labels
			}
		}
	}
	series := regexp.MustCompile(`\btierq_[a-z_]+`)
	label := regexp.MustCompile(`([a-z_]+) *=~?"|by \(([a-z, ]+)\)|\$labels\.([a-z]+)|\{\{([a-z]+)\}\}`)
	check := func(where, expr, text string) {
		names := series.FindAllString(expr, -1)
		require.NotEmpty(t, names, "%s: %s", where, expr)
		labels := []string{"instance", "le"} // Prometheus's own, and the histograms'
		for _, name := range names {
			require.Contains(t, known, name, "%s: no host exposes it", where)
			labels = append(labels, known[name]...)
		}
		for _, m := range label.FindAllStringSubmatch(expr+text, -1) {
			for l := range strings.SplitSeq(strings.Join(m[1:], ""), ", ") {
				require.Contains(t, labels, l, "%s: no such label: %s %s", where, expr, text)
			}
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
	for _, g := range rules.Groups {
		require.NotEmpty(t, g.Rules)
		for _, r := range g.Rules {
			check(r.Alert, r.Expr, r.Annotations["summary"])
			require.Contains(t, []string{"page", "warn"}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			_, anchor, _ := strings.Cut(r.Annotations["runbook_url"], "#")
			require.Contains(t, string(runbook), fmt.Sprintf("<a id=%q></a>\n", anchor), "%s: the runbook has no such section", r.Alert)
		}
	}

	raw, err = os.ReadFile("../docs/operating/dashboard.json")
	require.NoError(t, err)
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	require.NoError(t, json.Unmarshal(raw, &board))
	require.NotEmpty(t, board.Panels)
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			check(p.Title, target.Expr, target.LegendFormat)
		}
	}
}
