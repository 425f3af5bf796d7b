package node

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEventsPage: the page names every event that the source makes, and no other.
func TestEventsPage(t *testing.T) {
	made := map[string]bool{}
	is := regexp.MustCompile(`event\.Is\("([^"]+)"\)`)
	for _, dir := range []string{"../host", "."} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range is.FindAllStringSubmatch(string(text), -1) {
				made[m[1]] = true
			}
			return err
		}))
	}
	page, err := os.ReadFile("../docs/operating/events.md")
	require.NoError(t, err)
	told := map[string]bool{}
	name := regexp.MustCompile("`([a-z-]+)`")
	for line := range strings.Lines(string(page)) {
		if first, _, ok := strings.Cut(strings.TrimPrefix(line, "| "), " | "); ok && strings.HasPrefix(line, "| `") {
			for _, m := range name.FindAllStringSubmatch(first, -1) {
				told[m[1]] = true
			}
		}
	}
	require.Equal(t, slices.Sorted(maps.Keys(made)), slices.Sorted(maps.Keys(told)))
}
