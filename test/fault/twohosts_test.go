package fault

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
)

// TestFaultTwoOfOneHost starts a second process as a host that runs: on the same data directory, and on a copy of it. Both are refused, and the first
// one goes on.
func TestFaultTwoOfOneHost(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	f := newFleet(t, 2, 1)
	twice := f.hosts[1]
	// second starts the host with ports of its own, and returns what it says when it has ended.
	second := func(dir string) string {
		t.Helper()
		text := f.yaml(twice)
		for _, address := range []string{twice.raft, twice.peer, twice.api, twice.admin} {
			text = strings.ReplaceAll(text, address, freeport.For(t))
		}
		text = strings.Replace(text, "data: "+twice.dir+"\n", "data: "+dir+"\n", 1)
		config := filepath.Join(t.TempDir(), "second.yaml")
		require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
		ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
		defer cancel()
		var out bytes.Buffer
		cmd := exec.CommandContext(ctx, tierq(t), "serve", "--config", config)
		cmd.Stdout, cmd.Stderr = &out, &out
		require.Error(t, cmd.Run(), "it is refused")
		require.NoError(t, ctx.Err(), "it ends by itself; it says:\n%s", out.String())
		return out.String()
	}
	require.Contains(t, second(twice.dir), "is in use by")

	twice.stop()
	copied := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(copied, os.DirFS(twice.dir)))
	twice.restart()
	require.Contains(t, second(copied), "host 2 run")
	twice.awaitReady()
}
