package main

import (
	"fmt"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// examineNext says what the loss of each further host would cost a queue: one row for a host whose loss stops something.
func (d *doctor) examineNext(q *tierqv1.Queue, hosts []*tierqv1.Host) {
	alive := map[uint64]bool{}
	for _, h := range hosts {
		alive[h.Id] = h.Alive
	}
	for _, p := range q.Partitions {
		for _, r := range p.Replicas {
			if alive[r.Host] {
				cost := costOf(q, p, alive, r.Host)
				d.check("next-loss", fmt.Sprintf("%s/%d", q.Name, p.Number), cost == "", resultWarn, "%s", cost)
			}
		}
	}
}

// costOf says what stops when a host that is alive stops too, "" if nothing does for longer than an election.
func costOf(q *tierqv1.Queue, p *tierqv1.Partition, alive map[uint64]bool, stops uint64) string {
	voters, left, full := 0, 0, 0
	for _, r := range p.Replicas {
		if r.Role == "non-voting" {
			continue
		}
		voters++
		if alive[r.Host] && r.Host != stops {
			left++
			if r.Role == "full" {
				full++
			}
		}
	}
	switch strict := q.GetOptions().GetDurability() == tierqv1.Durability_DURABILITY_STRICT; {
	case left <= voters/2:
		return fmt.Sprintf("if host %d stops now, queue %s stands still because %d of its %d voters are left, and %d are needed: nothing is published or acked until one is back",
			stops, q.Name, left, voters, voters/2+1)
	case full == 0:
		return fmt.Sprintf("if host %d stops now, queue %s stands still because no full replica is left", stops, q.Name)
	case p.DataCopies == 1 && stops == p.LeaderHost:
		return fmt.Sprintf("if host %d stops now, queue %s stands still because that host has messages that no other has: it must come back", stops, q.Name)
	case strict && full < 2:
		return fmt.Sprintf("if host %d stops now, queue %s is read-only because it is strict and one full replica is left: deliveries and acks go on", stops, q.Name)
	}
	return ""
}
