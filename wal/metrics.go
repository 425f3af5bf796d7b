package wal

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the log's numbers. They count whether or not they are registered.
type metrics struct {
	reg          prometheus.Registerer
	syncSeconds  prometheus.Histogram
	writeSeconds prometheus.Histogram
	sealSeconds  prometheus.Histogram
	batchBytes   prometheus.Histogram
	batchSaves   prometheus.Histogram
	written      prometheus.Counter
	rewritten    prometheus.Counter
	reclaimed    prometheus.Counter
	cacheHits    prometheus.Counter
	cacheMisses  prometheus.Counter
	freeBytes    prometheus.Gauge
	all          []prometheus.Collector
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	seconds := prometheus.ExponentialBuckets(0.00005, 2, 16)
	m := &metrics{reg: reg}
	m.syncSeconds = m.histogram("tierq_wal_fsync_seconds", "Time of one fdatasync of the Raft log.", seconds)
	m.writeSeconds = m.histogram("tierq_wal_write_seconds", "Time of one write to the Raft log, before its fdatasync.", seconds)
	m.sealSeconds = m.histogram("tierq_wal_seal_seconds", "Time of sealing a full segment of the Raft log.", seconds)
	m.batchBytes = m.histogram("tierq_wal_batch_bytes", "Bytes that one fdatasync made durable.", prometheus.ExponentialBuckets(64, 4, 10))
	m.batchSaves = m.histogram("tierq_wal_batch_saves", "Callers that one fdatasync served.", prometheus.LinearBuckets(1, 1, 8))
	m.written = m.counter("tierq_wal_written_bytes_total", "Bytes of batches written to the Raft log.")
	m.rewritten = m.counter("tierq_wal_rewritten_bytes_total", "Bytes of live entries copied forward so that their segment could go.")
	m.reclaimed = m.counter("tierq_wal_reclaimed_bytes_total", "Bytes of segments that were freed.")
	m.cacheHits = m.counter("tierq_wal_cache_hits_total", "Records of entries read back from memory.")
	m.cacheMisses = m.counter("tierq_wal_cache_misses_total", "Records of entries read back from disk.")
	m.freeBytes = prometheus.NewGauge(prometheus.GaugeOpts{Name: "tierq_wal_disk_free_bytes",
		Help: "Free space of the Raft log's file system."})
	m.all = append(m.all, m.freeBytes)
	if reg == nil {
		return m, nil
	}
	for i, c := range m.all {
		if err := reg.Register(c); err != nil {
			m.all = m.all[:i]
			m.unregister()
			return nil, fmt.Errorf("wal: register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) histogram(name, help string, buckets []float64) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	m.all = append(m.all, h)
	return h
}

func (m *metrics) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	m.all = append(m.all, c)
	return c
}

func (m *metrics) unregister() {
	if m.reg == nil {
		return
	}
	for _, c := range m.all {
		m.reg.Unregister(c)
	}
}

func (m *metrics) batchWritten(bytes, saves int, write, sync time.Duration) {
	m.written.Add(float64(bytes))
	m.batchBytes.Observe(float64(bytes))
	m.batchSaves.Observe(float64(saves))
	m.writeSeconds.Observe(write.Seconds())
	m.syncSeconds.Observe(sync.Seconds())
}

func (m *metrics) rotated(d time.Duration) { m.sealSeconds.Observe(d.Seconds()) }

// segmentCollector reports each segment's size and live share at scrape time.
type segmentCollector struct{ l *Log }

var (
	liveRatioDesc = prometheus.NewDesc("tierq_wal_segment_live_ratio",
		"Share of a segment of the Raft log that something still needs.", []string{"segment"}, nil)
	segmentBytesDesc = prometheus.NewDesc("tierq_wal_segment_bytes",
		"Size of all segments of the Raft log.", nil, nil)
	replicasDesc = prometheus.NewDesc("tierq_wal_replicas", "Replicas in the Raft log.", nil, nil)
	spansDesc    = prometheus.NewDesc("tierq_wal_index_spans",
		"Stretches of entries in the Raft log's index, which takes 40 bytes of memory for each.", nil, nil)
)

func (c segmentCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- liveRatioDesc
	ch <- segmentBytesDesc
	ch <- replicasDesc
	ch <- spansDesc
}

func (c segmentCollector) Collect(ch chan<- prometheus.Metric) {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	total, spans := int64(0), 0
	for _, s := range c.l.segments {
		total += int64(s.h.size)
		ch <- prometheus.MustNewConstMetric(liveRatioDesc, prometheus.GaugeValue,
			float64(s.live)/float64(s.h.size), fmt.Sprintf("%d", s.h.seq))
	}
	for _, r := range c.l.replicas {
		spans += len(r.spans)
	}
	ch <- prometheus.MustNewConstMetric(segmentBytesDesc, prometheus.GaugeValue, float64(total))
	ch <- prometheus.MustNewConstMetric(replicasDesc, prometheus.GaugeValue, float64(len(c.l.replicas)))
	ch <- prometheus.MustNewConstMetric(spansDesc, prometheus.GaugeValue, float64(spans))
}

// registerSegments adds the collector that needs the log itself.
func (m *metrics) registerSegments(l *Log) error {
	if m.reg == nil {
		return nil
	}
	c := segmentCollector{l}
	if err := m.reg.Register(c); err != nil {
		return errors.Join(errors.New("wal: register metrics"), err)
	}
	m.all = append(m.all, c)
	return nil
}
