package node

import "github.com/prometheus/client_golang/prometheus"

// metrics are a host's own series, all named tierq_*. Safe for concurrent use.
type metrics struct {
	published     prometheus.Counter
	publishedB    prometheus.Counter
	duplicates    prometheus.Counter
	refused       *prometheus.CounterVec
	delivered     prometheus.Counter
	settled       *prometheus.CounterVec
	forwarded     prometheus.Counter
	batchMessages prometheus.Histogram
	commitSeconds prometheus.Histogram
	homesReplaced prometheus.Counter
	chores        prometheus.Counter
	exported      prometheus.Counter
	exportGivenUp prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		published:     prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_messages_published_total", Help: "Messages stored by publishes that this host answered as the leader's host."}),
		publishedB:    prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_bytes_published_total", Help: "Body, header and key bytes of those messages."}),
		duplicates:    prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_publish_duplicates_total", Help: "Messages answered with the address of an earlier copy."}),
		refused:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tierq_refusals_total", Help: "Calls refused or failed, by code."}, []string{"code"}),
		delivered:     prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_messages_delivered_total", Help: "Messages handed out by homes on this host, redeliveries included."}),
		settled:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tierq_messages_settled_total", Help: "Receipts answered OK by homes on this host, by kind."}, []string{"kind"}),
		forwarded:     prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_calls_forwarded_total", Help: "Calls handed to another host of the fleet."}),
		batchMessages: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "tierq_batch_messages", Help: "Messages per proposed Enqueue command.", Buckets: prometheus.ExponentialBuckets(1, 2, 14)}),
		commitSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "tierq_commit_seconds", Help: "From proposing an Enqueue command to its apply on the leader's host.", Buckets: prometheus.ExponentialBuckets(0.00025, 2, 16)}),
		homesReplaced: prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_homes_replaced_total", Help: "Homes that this host, as the leader's, proposed to replace because their host was silent."}),
		chores:        prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_housekeeping_proposals_total", Help: "Retention commands proposed: reclaim, park, expire, drop."}),
	}
	m.exported = prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_outbox_exported_total", Help: "Dead letters that homes on this host have carried to their dead-letter queues."})
	m.exportGivenUp = prometheus.NewCounter(prometheus.CounterOpts{Name: "tierq_outbox_given_up_total", Help: "Dead letters that no queue could take, which stay where they are."})
	reg.MustRegister(m.exported, m.exportGivenUp, m.published, m.publishedB, m.duplicates, m.refused, m.delivered, m.settled, m.forwarded,
		m.batchMessages, m.commitSeconds, m.homesReplaced, m.chores)
	return m
}

// countExports counts what an outbox has done.
func (m *metrics) countExports(exported, givenUp int) {
	m.exported.Add(float64(exported))
	m.exportGivenUp.Add(float64(givenUp))
}

// buildInfo is the series that says which program a host runs.
func buildInfo(version string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tierq_build_info", Help: "1; the version of the program that this host runs is the label.", ConstLabels: prometheus.Labels{"version": version},
	})
	g.Set(1)
	return g
}
