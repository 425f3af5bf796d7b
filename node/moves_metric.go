package node

import (
	"github.com/prometheus/client_golang/prometheus"
)

var descMoves = prometheus.NewDesc("tierq_replica_moves",
	"Replicas that are being replaced (moving), are to be (planned), or should be and have nowhere to go (blocked), as this host knows it.", []string{"state"}, nil)

var descDamaged = prometheus.NewDesc("tierq_replicas_damaged",
	"Replicas of this host whose state on its disk is damaged. They are stopped, or give up what they lead, and are rebuilt.", nil, nil)

// movesCollector counts the replicas that leave their hosts when it is asked.
type movesCollector struct{ n *Node }

// Describe implements prometheus.Collector.
func (c movesCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descMoves
	ch <- descDamaged
}

// Collect implements prometheus.Collector.
func (c movesCollector) Collect(ch chan<- prometheus.Metric) {
	v := c.n.view()
	count := map[string]int{"moving": len(v.Moves()), "planned": 0, "blocked": 0}
	for _, m := range c.n.raft.Planned() {
		if m.Possible() {
			count["planned"]++
		} else {
			count["blocked"]++
		}
	}
	ch <- prometheus.MustNewConstMetric(descDamaged, prometheus.GaugeValue, float64(len(c.n.raft.Damaged())))
	for state, n := range count {
		ch <- prometheus.MustNewConstMetric(descMoves, prometheus.GaugeValue, float64(n), state)
	}
}
