package fault

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

const operating = "../../docs/operating/"

// section is one procedure of the runbook.
type section struct {
	id, title string
	parts     map[string]string // text by name
	order     []string
	blocks    []block
}

// block is one fenced block of commands.
type block struct {
	part, name string
	commands   []command
}

// command is one line of a block, and what its comment says to wait for.
type command struct {
	text string
	want expectation
}

// parts are those of every section, in this order.
var parts = []string{"Alert", "Meaning", "Already done", "Do", "Over"}

var (
	anchorLine  = regexp.MustCompile(`^<a id="(rb-\d+)"></a>$`)
	headingLine = regexp.MustCompile(`^## (RB-\d+) (.+)$`)
	partStart   = regexp.MustCompile(`^\*\*([A-Z][a-z ]+)\.?\*\*`)
	fenceStart  = regexp.MustCompile("^```sh( [a-z-]+)?$")
)

// readRunbook parses the page.
func readRunbook(t *testing.T) []*section {
	t.Helper()
	raw, err := os.ReadFile(operating + "runbook.md")
	require.NoError(t, err)
	sections, err := parseRunbook(string(raw))
	require.NoError(t, err)
	require.NotEmpty(t, sections)
	return sections
}

func parseRunbook(text string) ([]*section, error) {
	var all []*section
	var s *section
	var fence *block
	anchor, part := "", ""
	for i, line := range strings.Split(text, "\n") {
		switch {
		case fence != nil && line == "```":
			s.blocks = append(s.blocks, *fence)
			fence = nil
		case fence != nil:
			c, err := parseCommand(line)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", i+1, err)
			}
			fence.commands = append(fence.commands, c)
		case anchorLine.MatchString(line):
			anchor = anchorLine.FindStringSubmatch(line)[1]
		case strings.HasPrefix(line, "## "):
			m := headingLine.FindStringSubmatch(line)
			if m == nil || strings.ToLower(m[1]) != anchor {
				return nil, fmt.Errorf("line %d: %q is not a section with an anchor of its own before it", i+1, line)
			}
			s, part, anchor = &section{id: m[1], title: m[2], parts: map[string]string{}}, "", ""
			all = append(all, s)
		case s == nil: // before the first section
		case fenceStart.MatchString(line):
			name := strings.TrimSpace(fenceStart.FindStringSubmatch(line)[1])
			if part == "" || name == "" {
				return nil, fmt.Errorf("line %d: a block of commands needs a name and stands in a part", i+1)
			}
			fence = &block{part: part, name: name}
		case strings.HasPrefix(line, "```"):
			return nil, fmt.Errorf("line %d: %q: what to type is ```sh NAME", i+1, line)
		default:
			if m := partStart.FindStringSubmatch(line); m != nil {
				part = m[1]
				s.order = append(s.order, part)
			}
			s.parts[part] += line + "\n"
		}
	}
	return all, nil
}

// parseCommand takes a line apart: the command, and the comment behind two blanks.
func parseCommand(line string) (command, error) {
	text, comment, found := strings.Cut(line, "  # ")
	c := command{text: strings.TrimSpace(text)}
	if c.text == "" || strings.HasPrefix(c.text, "#") {
		return c, fmt.Errorf("%q is no command", line)
	}
	if !found {
		return c, nil
	}
	var err error
	c.want, err = parseExpectation(strings.TrimSpace(comment))
	return c, err
}

// block returns a block by its name.
func (s *section) block(t *testing.T, name string) block {
	t.Helper()
	i := slices.IndexFunc(s.blocks, func(b block) bool { return b.name == name })
	require.GreaterOrEqual(t, i, 0, "%s has no block %s", s.id, name)
	return s.blocks[i]
}

// rule is one alert of alerts.yaml.
type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func readAlerts(t *testing.T) []rule {
	t.Helper()
	raw, err := os.ReadFile(operating + "alerts.yaml")
	require.NoError(t, err)
	var file struct{ Groups []struct{ Rules []rule } }
	require.NoError(t, yaml.Unmarshal(raw, &file))
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

// TestRunbookForm: every section of the runbook has its five parts in order, ends in commands that verify it, uses only the variables that the page defines, and every
// one of its blocks is run by a drill. Alerts and sections name each other.
func TestRunbookForm(t *testing.T) {
	raw, err := os.ReadFile(operating + "runbook.md")
	require.NoError(t, err)
	defined := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, m := range regexp.MustCompile("`([A-Z_]+)`").FindAllStringSubmatch(cells[1], -1) {
				defined[m[1]] = true
			}
		}
	}
	run := map[string]bool{}
	for _, d := range drills {
		for _, name := range d.blocks {
			run[d.section+"/"+name] = true
		}
	}
	alerts := map[string]string{} // anchor by name
	for _, r := range readAlerts(t) {
		_, anchor, _ := strings.Cut(r.Annotations["runbook_url"], "runbook.md#")
		alerts[r.Alert] = anchor
	}
	named := map[string][]string{} // anchors that name an alert
	blocks := 0
	for _, s := range readRunbook(t) {
		require.Equal(t, parts, s.order, s.id)
		names := regexp.MustCompile("`(TierQ[A-Za-z]+)`").FindAllStringSubmatch(s.parts["Alert"], -1)
		for _, m := range names {
			require.Contains(t, alerts, m[1], "%s names an alert that alerts.yaml does not have", s.id)
			named[m[1]] = append(named[m[1]], strings.ToLower(s.id))
		}
		if len(names) == 0 {
			require.Contains(t, s.parts["Alert"], "None", "%s: the part says so where there is no alert", s.id)
		}
		verified := false
		for _, b := range s.blocks {
			blocks++
			require.True(t, run[s.id+"/"+b.name], "%s: no drill runs block %q", s.id, b.name)
			verified = verified || b.part == "Over"
			for _, c := range b.commands {
				for _, m := range regexp.MustCompile(`\$([A-Za-z_]+)`).FindAllStringSubmatch(c.text+" "+c.want.text, -1) {
					require.True(t, defined[m[1]], "%s: %s: the page does not define $%s", s.id, c.text, m[1])
				}
			}
		}
		require.True(t, verified, "%s: nothing verifies that it is over", s.id)
	}
	require.Len(t, run, blocks, "a drill runs a block that the page does not have, or two blocks of a section have one name")
	for alert, anchor := range alerts {
		require.Contains(t, named[alert], anchor, "%s: the section that it leads to does not name it", alert)
	}
}

// TestRunbookLinks: what other pages and the program say of a section of the runbook is there.
func TestRunbookLinks(t *testing.T) {
	anchors := map[string]bool{}
	for _, s := range readRunbook(t) {
		anchors[strings.ToLower(s.id)] = true
	}
	pages, err := filepath.Glob("../../docs/*/*.md")
	require.NoError(t, err)
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		require.NoError(t, err)
		link := regexp.MustCompile(`runbook\.md#([a-z0-9-]+)`)
		if filepath.Base(page) == "runbook.md" {
			link = regexp.MustCompile(`\]\(#([a-z0-9-]+)\)`)
		}
		for _, m := range link.FindAllStringSubmatch(string(raw), -1) {
			require.True(t, anchors[m[1]], "%s: the runbook has no section %s", page, m[1])
		}
	}
}

func TestParseRunbook(t *testing.T) {
	page := "# R\n\n<a id=\"rb-9\"></a>\n\n## RB-9 Title\n\n**Alert.** `TierQX`.\n\n**Over** when\n\n```sh over\ntierq x $A   # every row: A 1, B two words\ntierq y\n```\n"
	got, err := parseRunbook(page)
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.Equal(t, "RB-9", got[0].id)
	require.Equal(t, []string{"Alert", "Over"}, got[0].order)
	b := got[0].block(t, "over")
	require.Equal(t, "Over", b.part)
	require.Equal(t, "tierq x $A", b.commands[0].text)
	require.Equal(t, "every row: A 1, B two words", b.commands[0].want.text)
	require.Equal(t, expectation{}, b.commands[1].want)
	for bad, want := range map[string]string{
		strings.Replace(page, "rb-9", "rb-8", 1):                                 "anchor",
		strings.Replace(page, "```sh over", "```sh", 1):                          "name",
		strings.Replace(page, "```sh over", "```", 1):                            "sh NAME",
		strings.Replace(page, "every row", "each row", 1):                        "each row",
		strings.Replace(page, "**Alert.** `TierQX`.\n\n**Over** when\n", "x", 1): "stands in a part",
	} {
		_, err := parseRunbook(bad)
		require.ErrorContains(t, err, want)
	}
}
