package main

import (
	"fmt"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// examineMoves says which replicas are lost or damaged, and what is done about it.
func (d *doctor) examineMoves(moves []*tierqv1.ReplicaMove) {
	wrong := 0
	for _, m := range moves {
		switch m.Why {
		case "lost", "damaged", "rebuild", "silent":
		default:
			if m.Step != "blocked" {
				continue
			}
		}
		wrong++
		d.check("replicas", moveSubject(m), false, resultWarn, "%s", moveText(m))
	}
	if wrong == 0 {
		d.check("replicas", "", true, resultWarn, "")
	}
}

func moveSubject(m *tierqv1.ReplicaMove) string {
	if m.Queue == "" {
		return "(catalog)"
	}
	return fmt.Sprintf("%s/%d", m.Queue, m.Partition)
}

func moveText(m *tierqv1.ReplicaMove) string {
	what := fmt.Sprintf("the replica on host %d", m.FromHost)
	switch m.Why {
	case "lost", "damaged", "silent":
		what += " is " + m.Why
	case "draining":
		what += " is to leave its host"
	}
	switch {
	case m.Step == "blocked":
		return fmt.Sprintf("%s and cannot be replaced now: %s", what, m.Reason)
	case m.ToHost == m.FromHost && rebuildSteps[m.Step] != "":
		return fmt.Sprintf("%s, and is made anew there: %s", what, rebuildSteps[m.Step])
	}
	return fmt.Sprintf("%s, and is replaced on host %d: %s", what, m.ToHost, m.Step)
}
