package api

import (
	"time"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/code"
)

// ParkedExport is why a group's dead letters do not get to their dead-letter queue, and for how long they have not.
type ParkedExport struct {
	Code    code.Code
	Text    string
	For     time.Duration
	Address queue.Address // of the letter that waits in front; 0: not known
	Queue   string
}

func protoParked(p *ParkedExport) *tierqv1.ParkedExport {
	if p == nil {
		return nil
	}
	return &tierqv1.ParkedExport{Code: uint32(p.Code), Name: p.Code.String(), Text: p.Text, ForMs: uint64(p.For.Milliseconds()),
		Address: uint64(p.Address), DeadLetterQueue: p.Queue}
}

func exportState(s queue.ExportState) string {
	switch s {
	case queue.ExportPending:
		return "pending"
	case queue.ExportExporting:
		return "exporting"
	}
	return ""
}
