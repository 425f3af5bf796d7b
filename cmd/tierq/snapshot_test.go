package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSnapshotOffline: what needs no fleet, and how it is refused.
func TestSnapshotOffline(t *testing.T) {
	s := newShell(t, 1)
	manifest, err := os.ReadFile("../../node/backup/testdata/manifest.v1.json")
	require.NoError(t, err)
	dir := t.TempDir()
	one := filepath.Join(dir, "one")
	require.NoError(t, os.Mkdir(one, 0o755))
	path := filepath.Join(one, "manifest.json")
	require.NoError(t, os.WriteFile(path, manifest, 0o600))

	out, _, exit := s.run("snapshot", "list", dir)
	require.Zero(t, exit)
	require.Contains(t, out, "2025-11-29T23:00:00Z")
	require.Contains(t, out, "00000000feedf00d")
	_, errs, exit := s.run("snapshot", "verify", one)
	require.Equal(t, exitRefused, exit)
	require.Contains(t, errs, "orders.0.stream", "the stream is not there")
	_, errs, exit = s.run("snapshot", "restore", one)
	require.Equal(t, exitRefused, exit, "before the fleet is asked: %s", errs)

	require.NoError(t, os.WriteFile(path, bytes.Replace(manifest, []byte("orders"), []byte("0rders"), 1), 0o600))
	for _, args := range [][]string{{"list", dir}, {"verify", one}, {"restore", one}} {
		out, errs, exit = s.run(append([]string{"snapshot"}, args...)...)
		require.Equal(t, exitRefused, exit, "%v: %s", args, errs)
		require.Contains(t, out+errs, "manifest.json")
	}
	for _, args := range [][]string{
		{"snapshot", "save", dir}, {"snapshot", "save", "--all", "orders", dir}, {"snapshot", "save", "$x", dir},
		{"snapshot", "verify", filepath.Join(dir, "none")}, {"snapshot", "restore", one, "--as", "a/b"},
		{"shard", "recover", dir}, {"shard", "recover", filepath.Join(dir, "none"), dir},
	} {
		_, errs, exit = s.run(args...)
		require.Equal(t, exitUsage, exit, "%v: %s", args, errs)
	}
}
