package fault

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var errEnough = errors.New("enough")

// realLines returns the first n lines of the standard library's source, in the order of the files' names: real text of all
// lengths, with empty lines, tabs, and bytes beyond ASCII.
func realLines(t *testing.T, n int) [][]byte {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.EvalSymlinks(filepath.Join(strings.TrimSpace(string(out)), "src"))
	if err != nil {
		t.Fatal(err)
	}
	var lines [][]byte
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		lines = append(lines, bytes.Split(raw, []byte{'\n'})...)
		if len(lines) >= n {
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		t.Fatal(err)
	}
	if len(lines) < n {
		t.Fatalf("%s has %d lines, %d are needed", root, len(lines), n)
	}
	return lines[:n]
}

func TestRealLines(t *testing.T) {
	lines := realLines(t, 2000)
	require.Len(t, lines, 2000)
	require.Equal(t, lines[:1000], realLines(t, 1000), "the order is fixed")
	require.True(t, bytes.HasPrefix(lines[0], []byte("// ")), "%q", lines[0])
}
