package replica

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/tierq/tierq/queue"
)

// writeEvidence keeps a poison entry: a text that says what happened, then the entry as hexadecimal. It returns the
// file's path, "" when nothing was written.
func (r *Replica) writeEvidence(p *queue.PoisonError) (path string, err error) {
	if r.opts.EvidenceDir == "" {
		return "", nil
	}
	if err := os.MkdirAll(r.opts.EvidenceDir, 0o750); err != nil {
		return "", fmt.Errorf("make the evidence directory: %w", err)
	}
	path = filepath.Join(r.opts.EvidenceDir, fmt.Sprintf("poison-shard%d-replica%d-index%d.txt", r.shard, r.replica, uint64(p.Index)))
	text := fmt.Sprintf("shard %d replica %d index %d\ncause: %v\n%s\nentry: %x\n", r.shard, r.replica, uint64(p.Index), p.Cause, p.Stack, p.Command)
	if err := writeDurably(path, text); err != nil {
		return "", fmt.Errorf("write the evidence %s: %w", path, err)
	}
	return path, nil
}

func writeDurably(path, text string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(text); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Sync(); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}
