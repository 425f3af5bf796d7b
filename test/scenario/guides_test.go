package scenario

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestGuides runs the blocks of every page of docs/guides, and of the README, each page from top to bottom, as a reader would: commands in a shell,
// Go programs with go run. The program is built, and the fleet is a development fleet. Everything must succeed.
func TestGuides(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program and opens a fleet: not under -short")
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	program := filepath.Join(t.TempDir(), "tierq")
	out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", program, "github.com/tierq/tierq/cmd/tierq").CombinedOutput()
	require.NoError(t, err, string(out))
	_, addrs := openFleetAt(t)
	pages, err := filepath.Glob("../../docs/guides/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	// The README is for who has nothing yet: it builds the program, and speaks to the port of `tierq dev`.
	here := strings.NewReplacer("go build -o tierq ./cmd/tierq", "cp "+program+" tierq", "localhost:7188", addrs[0], "curl -s ", "curl -sf ")
	for _, page := range append(pages, "../../README.md") {
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			text, err := os.ReadFile(page)
			require.NoError(t, err)
			blocks := blocksOf(here.Replace(string(text)))
			require.NotEmpty(t, blocks, "a guide shows what to type")
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			for _, block := range blocks {
				var out bytes.Buffer
				cmd := block.command(ctx, t, bash)
				cmd.Env = append(os.Environ(), "TIERQ_ADDR="+strings.Join(addrs, ","), "TIERQ_ADMIN=",
					"PATH="+filepath.Dir(program)+string(os.PathListSeparator)+os.Getenv("PATH"))
				cmd.Stdout, cmd.Stderr = &out, &out
				require.NoError(t, cmd.Run(), "%s\n%s", block.text, &out)
				t.Log("\n" + out.String())
			}
		})
	}
}

var fence = regexp.MustCompile("(?ms)^```(sh|go)\n(.*?)^```$")

// A block is what a page shows between two fences: commands, or a whole Go program.
type block struct{ language, text string }

func blocksOf(page string) (blocks []block) {
	for _, m := range fence.FindAllStringSubmatch(page, -1) {
		blocks = append(blocks, block{m[1], m[2]})
	}
	return blocks
}

// command runs b: commands in an empty directory, a program within this module, whose client it imports.
func (b block) command(ctx context.Context, t *testing.T, bash string) *exec.Cmd {
	dir := t.TempDir()
	if b.language == "go" {
		file := filepath.Join(dir, "main.go")
		require.NoError(t, os.WriteFile(file, []byte(b.text), 0o600))
		return exec.CommandContext(ctx, "go", "run", "-ldflags=-s -w", file)
	}
	cmd := exec.CommandContext(ctx, bash, "-eu", "-o", "pipefail", "-x", "-c", b.text)
	cmd.Dir = dir
	return cmd
}
