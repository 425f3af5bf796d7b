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

// TestGuides runs the shell blocks of every page of docs/guides, each page from top to bottom, as a reader would: the
// program is built, and the fleet is a development fleet. Every command must succeed.
func TestGuides(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program and opens a fleet: not under -short")
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	program := filepath.Join(t.TempDir(), "tierq")
	out, err := exec.Command("go", "build", "-o", program, "github.com/tierq/tierq/cmd/tierq").CombinedOutput()
	require.NoError(t, err, string(out))
	_, addrs := openFleetAt(t)
	pages, err := filepath.Glob("../../docs/guides/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	for _, page := range pages {
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			text, err := os.ReadFile(page)
			require.NoError(t, err)
			blocks := shellBlocks(string(text))
			require.NotEmpty(t, blocks, "a guide shows what to type")
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			for _, block := range blocks {
				cmd := exec.CommandContext(ctx, bash, "-eu", "-o", "pipefail", "-x", "-c", block)
				cmd.Dir = t.TempDir()
				cmd.Env = append(os.Environ(), "TIERQ_ADDR="+strings.Join(addrs, ","), "TIERQ_ADMIN=",
					"PATH="+filepath.Dir(program)+string(os.PathListSeparator)+os.Getenv("PATH"))
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &out
				require.NoError(t, cmd.Run(), "%s\n%s", block, &out)
				t.Log("\n" + out.String())
			}
		})
	}
}

var fence = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// shellBlocks returns the fenced blocks of a page that are commands.
func shellBlocks(text string) (blocks []string) {
	for _, m := range fence.FindAllStringSubmatch(text, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}
