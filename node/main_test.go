package node

import (
	"flag"
	"os"
	"testing"
)

// TestMain runs more fleets at once than there are cores: they wait more than they compute. -parallel on the command line counts.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "4")
	os.Exit(m.Run())
}
