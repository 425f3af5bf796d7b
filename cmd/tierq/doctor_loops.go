package main

import (
	"context"
	"slices"
	"strings"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// deadLetterWays are the queues to which each queue's groups send their dead letters.
type deadLetterWays map[string][]string

func (w deadLetterWays) add(queue string, gs []*tierqv1.Group) {
	w[queue] = nil
	for _, g := range gs {
		for _, p := range append(g.GetPartitions(), g) {
			if to := p.GetConfig().GetDeadLetterQueue(); to != "" && !slices.Contains(w[queue], to) {
				w[queue] = append(w[queue], to)
			}
		}
	}
	slices.Sort(w[queue])
}

// follow asks for the queues that are led to and not known yet. One that is missing leads nowhere.
func (w deadLetterWays) follow(ctx context.Context, c *client.Client) {
	var ask []string
	for _, to := range w {
		ask = append(ask, to...)
	}
	for len(ask) > 0 {
		name := ask[0]
		ask = ask[1:]
		if _, known := w[name]; known {
			continue
		}
		gs, err := c.ListGroups(ctx, name)
		if err != nil {
			gs = nil
		}
		w.add(name, gs)
		ask = append(ask, w[name]...)
	}
}

// back is the shortest way from a queue that comes back to it; nil if none does.
func (w deadLetterWays) back(queue string) []string {
	ways, seen := [][]string{{queue}}, map[string]bool{}
	for len(ways) > 0 {
		way := ways[0]
		ways = ways[1:]
		for _, to := range w[way[len(way)-1]] {
			next := append(slices.Clone(way), to)
			if to == queue {
				return next
			}
			if !seen[to] {
				seen[to] = true
				ways = append(ways, next)
			}
		}
	}
	return nil
}

// examineLoops tells of dead letters that would come back to where they died. The fleet refuses to configure that, but two groups that are
// configured in one moment get past it.
func (d *doctor) examineLoops(w deadLetterWays, names []string) {
	for _, name := range names {
		if len(w[name]) == 0 {
			continue
		}
		way := w.back(name)
		d.check("dead-letter-loop", name, way == nil, resultWarn, "dead letters come back to it, until they have gone round too often and stay: %s: let one of these queues' groups name another dead-letter queue",
			strings.Join(way, " -> "))
	}
}
