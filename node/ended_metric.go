package node

import "github.com/prometheus/client_golang/prometheus"

var (
	descEnded    = prometheus.NewDesc("tierq_hosts_ended_total", "Other hosts that this one saw end: their connections broke and their ports refuse new ones.", nil, nil)
	descHastened = prometheus.NewDesc("tierq_elections_hastened_total", "Elections that this host began at once because the leader's host had ended.", nil, nil)
)

// endedCollector counts the hosts that have ended when it is asked.
type endedCollector struct{ n *Node }

// Describe implements prometheus.Collector.
func (c endedCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descEnded
	ch <- descHastened
}

// Collect implements prometheus.Collector.
func (c endedCollector) Collect(ch chan<- prometheus.Metric) {
	hosts, elections := c.n.raft.Ended()
	ch <- prometheus.MustNewConstMetric(descEnded, prometheus.CounterValue, float64(hosts))
	ch <- prometheus.MustNewConstMetric(descHastened, prometheus.CounterValue, float64(elections))
}
