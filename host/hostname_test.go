package host

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/host/freeport"
)

// TestAdoptHostname moves a real NodeHost's data, with a snapshot, from another hostname to this machine's
// and opens them.
func TestAdoptHostname(t *testing.T) {
	if testing.Short() {
		t.Skip("starts NodeHosts")
	}
	const shardID = 3
	h := &engineHost{hostID: 5, replicaID: 1, dir: t.TempDir(), registry: NewRegistry(), address: freeport.For(t)}
	former, err := AdoptHostname(h.dir)
	require.NoError(t, err, "a directory that was never used")
	require.Empty(t, former)

	members := map[uint64]string{1: Target(5)}
	h.start(t, shardID, members)
	require.EqualValues(t, 1, h.increment(t, shardID))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = h.nodeHost.SyncRequestSnapshot(ctx, shardID, dragonboat.SnapshotOption{OverrideCompactionOverhead: true})
	require.NoError(t, err)
	require.EqualValues(t, 2, h.increment(t, shardID))
	h.stop()

	// The machine had another name then.
	hostname, err := os.Hostname()
	require.NoError(t, err)
	former, err = adoptHostname(h.dir, "elsewhere")
	require.NoError(t, err)
	require.Equal(t, hostname, former)
	require.NoDirExists(t, filepath.Join(h.dir, hostname))

	former, err = AdoptHostname(h.dir)
	require.NoError(t, err)
	require.Equal(t, "elsewhere", former)
	h.start(t, shardID, members)
	require.EqualValues(t, 2, h.read(t, shardID))
	require.EqualValues(t, 3, h.increment(t, shardID))
	h.stop()
	former, err = AdoptHostname(h.dir)
	require.NoError(t, err)
	require.Empty(t, former, "nothing left to do")
}

// dataDirOf returns a directory that looks like one whose engine ran on a machine called hostname.
func dataDirOf(t *testing.T, hostname string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, hostname, "data"), 0o750))
	require.NoError(t, writeStatus(filepath.Join(dir, statusFile), statusOf(hostname)))
	return dir
}

func TestAdoptHostnameAfterACrash(t *testing.T) {
	dir := dataDirOf(t, "old")
	// The crash: moved, record not yet written, a half-written next record beside it.
	require.NoError(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(dir, "new")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, statusFile+".next"), []byte("torn"), 0o600))
	former, err := adoptHostname(dir, "new")
	require.NoError(t, err)
	require.Equal(t, "old", former)
	status, err := readStatus(filepath.Join(dir, statusFile))
	require.NoError(t, err)
	require.Equal(t, statusOf("new"), status, "everything but the name is kept")
	require.NoFileExists(t, filepath.Join(dir, statusFile+".next"))
}

func TestAdoptHostnameMindsCase(t *testing.T) {
	dir := dataDirOf(t, "Host-A")
	former, err := adoptHostname(dir, "host-a")
	require.NoError(t, err)
	require.Equal(t, "Host-A", former)
	require.DirExists(t, filepath.Join(dir, "host-a", "data"))
}

func TestAdoptHostnameRefuses(t *testing.T) {
	t.Run("both directories", func(t *testing.T) {
		dir := dataDirOf(t, "old")
		require.NoError(t, os.Mkdir(filepath.Join(dir, "new"), 0o750))
		_, err := adoptHostname(dir, "new")
		require.ErrorContains(t, err, "move away the one")
	})
	t.Run("neither directory", func(t *testing.T) {
		dir := dataDirOf(t, "old")
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "old")))
		_, err := adoptHostname(dir, "new")
		require.ErrorContains(t, err, "does not exist")
	})
	t.Run("a name that is a path", func(t *testing.T) {
		dir := dataDirOf(t, "old")
		for _, name := range []string{"", ".", "..", "a/b"} {
			_, err := adoptHostname(dir, name)
			require.ErrorContains(t, err, "cannot be a directory name")
		}
		require.DirExists(t, filepath.Join(dir, "old", "data"))
	})
	t.Run("torn record", func(t *testing.T) {
		dir := dataDirOf(t, "old")
		path := filepath.Join(dir, statusFile)
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		for cut := range data {
			require.NoError(t, os.WriteFile(path, data[:cut], 0o600))
			_, err = adoptHostname(dir, "new")
			require.ErrorContains(t, err, "checksum", "cut at %d", cut)
		}
		require.DirExists(t, filepath.Join(dir, "old", "data"))
	})
}

func statusOf(hostname string) raftpb.RaftDataStatus {
	return raftpb.RaftDataStatus{
		Address: "127.0.0.1:7189", BinVer: 210, LogdbType: "tierq-wal", Hostname: hostname, DeploymentId: 1,
		StepWorkerCount: 1, LogdbShardCount: 1, MaxSessionCount: 4096, EntryBatchSize: 48,
	}
}
