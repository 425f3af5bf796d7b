package arch

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	testName     = regexp.MustCompile("`(Test[A-Z]\\w*)`")
)

// TestTestingPage checks that every test that the pages in docs/internals name exists.
func TestTestingPage(t *testing.T) {
	tests := map[string]bool{}
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		raw, err := os.ReadFile(path)
		for _, m := range testFunction.FindAllStringSubmatch(string(raw), -1) {
			tests[m[1]] = true
		}
		return err
	}))
	pages, err := filepath.Glob("../../docs/internals/*.md")
	require.NoError(t, err)
	named := 0
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range testName.FindAllStringSubmatch(string(raw), -1) {
			named++
			require.True(t, tests[m[1]], "%s names %s, which does not exist", page, m[1])
		}
	}
	require.Greater(t, named, 50)
}
