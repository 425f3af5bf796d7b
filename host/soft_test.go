package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestApplySoftSettingsReachesTheEngine(t *testing.T) {
	for range 3 {
		settings, err := ApplySoftSettings(false)
		require.NoError(t, err)
		require.Len(t, settings, 8)
		for _, s := range settings {
			require.NotEqual(t, s.Default, s.Value, s.Name)
		}
	}
	// Asked of the engine's own symbols, which another package may read: the values are what was set.
	require.EqualValues(t, 128, engineProposalQueue)
	require.GreaterOrEqual(t, engineReceiveQueue, uint64(256))
	require.Less(t, engineMinEntrySlice, engineEntrySlice)
	require.EqualValues(t, 4<<20, engineMaxEntrySize)
	require.EqualValues(t, 4<<20, engineMaxApplySize)
}

func TestApplySoftSettingsNamesAStrangeVariable(t *testing.T) {
	good, gone := uint64(10), uint64(0)
	settings, err := applySoftSettings([]softVariable{
		{SoftSetting{"Good", 10, 20}, &good, 0},
		{SoftSetting{"Gone", 7, 9}, &gone, 0}, // a linkname to a variable that no longer exists reads as zero
	})
	require.Nil(t, settings)
	require.ErrorContains(t, err, "Gone is 0, expected its default 7")
	require.EqualValues(t, 10, good, "nothing may be set when anything is strange")
}

func TestCheckStraySettings(t *testing.T) {
	for _, name := range strayNames {
		dir := t.TempDir()
		require.NoError(t, CheckStraySettings(dir))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("{}"), 0o600))
		err := CheckStraySettings(dir)
		require.ErrorContains(t, err, name)
		require.ErrorContains(t, err, "remove it")
		require.False(t, strings.Contains(err.Error(), "\n"))
	}
}

// TestApplySoftSettingsOfOneProfile: the engine's settings are the process's, so that its hosts have one profile.
func TestApplySoftSettingsOfOneProfile(t *testing.T) {
	_, err := ApplySoftSettings(false)
	require.NoError(t, err)
	_, err = ApplySoftSettings(true)
	require.ErrorContains(t, err, "hosts of one process have the same profile")
	require.EqualValues(t, 256, engineReceiveQueue)
	for _, v := range softVariables() {
		require.LessOrEqual(t, v.many, v.Value, v.Name)
	}
}
