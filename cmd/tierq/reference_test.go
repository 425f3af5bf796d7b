package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

var updateFlag = flag.Bool("update", false, "write docs/reference/cli.md anew")

const referencePath = "../../docs/reference/cli.md"

// TestReference: docs/reference/cli.md is what the commands say of themselves. After a change:
// go test ./cmd/tierq -run TestReference -update
func TestReference(t *testing.T) {
	t.Setenv("TIERQ_ADDR", "")
	var b strings.Builder
	b.WriteString("# Command line\n\nEvery command of `tierq`, as `tierq COMMAND --help` tells it. Exit codes: 0 done, 1 a fault of this machine (a file, a\npipe), 2 wrong use, 3 nobody answered, 4 refused, or a check that did not hold.\n")
	root := (&app{}).rootCommand()
	describe(&b, root)
	if *updateFlag {
		require.NoError(t, os.WriteFile(referencePath, []byte(b.String()), 0o600))
	}
	have, err := os.ReadFile(referencePath)
	require.NoError(t, err)
	require.Equal(t, b.String(), string(have), "docs/reference/cli.md is not fresh: go test ./cmd/tierq -run TestReference -update")
}

func describe(b *strings.Builder, c *cobra.Command) {
	if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
		return
	}
	if c.Runnable() || !c.HasParent() {
		fmt.Fprintf(b, "\n## %s\n\n", c.CommandPath())
		text := c.Long
		if text == "" {
			text = c.Short
		}
		fmt.Fprintf(b, "%s\n\n    %s\n", strings.TrimSpace(text), c.UseLine())
		flags := c.NonInheritedFlags()
		if flags.HasAvailableFlags() {
			b.WriteString("\n| flag | default | meaning |\n|---|---|---|\n")
			flags.VisitAll(func(f *pflag.Flag) { describeFlag(b, f) })
		}
	}
	for _, sub := range c.Commands() {
		describe(b, sub)
	}
}

func describeFlag(b *strings.Builder, f *pflag.Flag) {
	if f.Hidden || f.Name == "help" {
		return
	}
	name, usage := pflag.UnquoteUsage(f)
	value := ""
	if f.DefValue != "" && f.DefValue != "[]" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "0s" {
		value = "`" + f.DefValue + "`"
	}
	if name != "" {
		name = " " + name
	}
	fmt.Fprintf(b, "| `--%s%s` | %s | %s |\n", f.Name, name, value, strings.ReplaceAll(usage, "|", "\\|"))
}

// TestRunbookCommands: every command and flag that a page for operators tells to type exists.
func TestRunbookCommands(t *testing.T) {
	pages, err := filepath.Glob("../../docs/operating/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	typed := regexp.MustCompile("(?m)(?:`tierq ([^`\\n]+)`|^tierq (.+)$)") // in a text, or a line of a block
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range typed.FindAllStringSubmatch(string(text), -1) {
			var path []string
			line := regexp.MustCompile(` [#>|] `).Split(m[1]+m[2], 2)[0] // what the shell takes
			words := strings.Fields(line)
			for len(path) < len(words) && strings.ToLower(words[len(path)]) == words[len(path)] && words[len(path)][0] != '-' {
				path = append(path, words[len(path)])
			}
			c, rest, err := (&app{}).rootCommand().Find(path)
			require.NoError(t, err, "%s: %s", page, m[0])
			require.True(t, len(rest) == 0 || !c.HasSubCommands(), "%s: %s", page, m[0]) // the rest are arguments
			require.True(t, c.Runnable(), "%s: %s", page, m[0])
			for _, w := range words {
				if name, ok := strings.CutPrefix(w, "--"); ok {
					require.NotNil(t, c.Flag(name), "%s: %s has no flag --%s", page, m[0], name)
				}
			}
		}
	}
}
