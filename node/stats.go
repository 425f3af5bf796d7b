package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/home"
)

// QueueStats is what /stats shows of one queue on this host. Frozen names: only fields are added.
type QueueStats struct {
	Queue      string           `json:"queue"`
	ID         uint64           `json:"id"`
	Host       uint64           `json:"host"`
	Partitions []PartitionStats `json:"partitions"`
}

// PartitionStats is one partition at one applied index. Leader is 0 while none is known.
type PartitionStats struct {
	Partition   int            `json:"partition"`
	Shard       uint64         `json:"shard"`
	Here        bool           `json:"here"` // this host holds a full replica
	Replica     uint64         `json:"replica,omitempty"`
	LeaderHost  uint64         `json:"leader_host"`
	Term        uint64         `json:"leader_epoch"`
	QuorumState int            `json:"quorum_state"`
	DataCopies  int            `json:"data_copies"` // known at the leader's host only
	Applied     uint64         `json:"applied"`
	LogCommit   uint64         `json:"log_commit"` // the Raft log's marks, read after the rest; all 0 where they are not known
	LogLast     uint64         `json:"log_last"`
	LogSnapshot uint64         `json:"log_snapshot"`
	Clock       uint64         `json:"clock_unix_ms"`
	Last        uint64         `json:"last_address"`
	Line        uint64         `json:"line"`
	FormatLevel uint32         `json:"format_level"`
	Recovery    uint64         `json:"recovery_number"`
	Counters    queue.Counters `json:"counters"`
	Groups      []GroupStats   `json:"groups"`
}

// GroupStats is one group; what is known at its home only is 0 elsewhere.
type GroupStats struct {
	Name           string              `json:"name"`
	ID             uint64              `json:"id"`
	HomeReplica    uint64              `json:"home_replica"`
	HomeHost       uint64              `json:"home_host"`
	Epoch          uint64              `json:"epoch"`
	Start          uint64              `json:"start"`
	Floor          uint64              `json:"floor"`
	WatermarkBytes int                 `json:"watermark_bytes"`
	MaxInFlight    uint32              `json:"max_in_flight"`
	MaxPerConsumer uint32              `json:"max_in_flight_per_consumer"` // 0: no limit of its own
	Counters       queue.GroupCounters `json:"counters"`
	AtHome         *home.GroupStats    `json:"at_home,omitempty"`
	// DeadLetterQueue is where dead letters go on to, Exports how many are on their way or wait for it.
	DeadLetterQueue string       `json:"dead_letter_queue,omitempty"`
	Exports         uint64       `json:"exports"`
	Parked          *ParkedStats `json:"parked,omitempty"`
}

// ParkedStats is why dead letters do not go on to their dead-letter queue; at the home only.
type ParkedStats struct {
	Code            string `json:"code"`
	Text            string `json:"text"`
	ForMs           uint64 `json:"for_ms"`
	Address         uint64 `json:"address"`
	DeadLetterQueue string `json:"dead_letter_queue"`
}

// stats reads one queue; every partition at one applied index.
func (n *Node) stats(ctx context.Context, name string) (any, error) {
	if tenant, own, ok := strings.Cut(name, "/"); ok {
		ctx, name = api.WithTenant(ctx, tenant), own
	}
	q, err := n.queueByName(ctx, name)
	if err != nil {
		return nil, err
	}
	return n.queueStats(q), nil
}

func (n *Node) allStats(context.Context) (any, error) {
	out := []QueueStats{}
	for _, q := range n.view().AllQueues() {
		out = append(out, n.queueStats(q))
	}
	return out, nil
}

// statsName is a queue's name beside those of all tenants: of another tenant than the default one, after it and a slash.
func statsName(q catalog.Queue) string {
	if q.Tenant == catalog.DefaultTenant {
		return q.Name
	}
	return q.Tenant + "/" + q.Name
}

func (n *Node) queueStats(q catalog.Queue) QueueStats {
	out := QueueStats{Queue: statsName(q), ID: q.ID, Host: n.id}
	for i, shard := range q.Shards {
		p := PartitionStats{Partition: i, Shard: shard, Groups: []GroupStats{}}
		if _, host, term, ok := n.raft.Leader(shard); ok {
			p.LeaderHost, p.Term = host, term
			if host == n.id {
				p.DataCopies = n.raft.InSync(shard)
			}
			p.QuorumState = int(n.quorumAt(shard, host))
		} else {
			p.QuorumState = quorumElecting
		}
		n.mu.RLock()
		d := n.desks[shard]
		n.mu.RUnlock()
		if d != nil {
			n.fillPartition(&p, d)
		}
		out.Partitions = append(out.Partitions, p)
	}
	return out
}

func (n *Node) fillPartition(p *PartitionStats, d *desk) {
	meta, groups := d.reader.ReadStats()
	p.Here, p.Replica = true, uint64(d.self)
	p.Applied, p.Clock, p.Last, p.Line = uint64(meta.Applied), uint64(meta.Clock), uint64(meta.Last), uint64(meta.Line)
	p.FormatLevel, p.Recovery, p.Counters = meta.FormatLevel, meta.RecoveryNumber, meta.Counters
	atHome := map[queue.GroupID]home.GroupStats{}
	for _, s := range d.keeper.Stats() {
		atHome[s.Group] = s
	}
	for _, g := range groups {
		gs := GroupStats{
			Name: g.Name, ID: uint64(g.ID), HomeReplica: uint64(g.Home), Epoch: uint64(g.Epoch), Start: uint64(g.Start), Floor: uint64(g.Floor),
			WatermarkBytes: g.WatermarkBytes, MaxInFlight: g.Config.MaxInFlight, MaxPerConsumer: g.Config.MaxInFlightPerConsumer, Counters: g.Counters,
		}
		if h, ok := n.view().HostOf(d.shard, g.Home); ok {
			gs.HomeHost = h.ID
		}
		if s, ok := atHome[g.ID]; ok && g.Home == d.self {
			gs.AtHome = &s
		}
		gs.DeadLetterQueue, gs.Exports = g.Config.DeadLetterQueue, g.Exports
		if x := d.parkedExport(g.ID); x != nil {
			gs.Parked = &ParkedStats{Code: x.Code.String(), Text: x.Text, ForMs: uint64(x.For.Milliseconds()), Address: uint64(x.Address), DeadLetterQueue: x.Queue}
		}
		p.Groups = append(p.Groups, gs)
	}
	if m, ok := n.raft.LogMarks(d.shard); ok {
		p.LogCommit, p.LogLast, p.LogSnapshot = m.Commit, m.Last, m.Snapshot
	}
}

// healthy is nil while the process works: a failed fsync ends it, so there is no unhealthy state that answers.
func (n *Node) healthy() error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.closing {
		return code.New(code.ShuttingDown, "")
	}
	return nil
}

// ready is nil once the host is in its fleet and every shard that it holds has a leader.
func (n *Node) ready() error {
	if err := n.healthy(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // only ask, do not wait
	if err := n.raft.AwaitReady(ctx); err != nil {
		return err
	}
	n.mu.RLock()
	defer n.mu.RUnlock()
	var errs []error
	for shard := range n.desks {
		if _, host, _, ok := n.raft.Leader(shard); !ok || !n.Alive(host) {
			errs = append(errs, fmt.Errorf("shard %d has no leader", shard))
		}
	}
	return errors.Join(errs...)
}

// gatherer joins our series with the engine's own.
func (n *Node) gatherer() prometheus.Gatherer {
	return prometheus.Gatherers{n.registry, host.EngineGatherer()}
}

// collector reads gauges when they are asked for.
type collector struct{ n *Node }

var (
	descUptime  = prometheus.NewDesc("tierq_host_uptime_seconds", "Time since this host started.", nil, nil)
	descDesks   = prometheus.NewDesc("tierq_replicas", "Full replicas that run on this host.", nil, nil)
	descQuorum  = prometheus.NewDesc("tierq_quorum_state", "0 healthy, 1 soft, 2 read-only, 3 electing, 4 quarantined.", []string{"queue", "partition"}, nil)
	descTerm    = prometheus.NewDesc("tierq_leader_epoch", "Raft term of the leader as this host knows it; only rises.", []string{"queue", "partition"}, nil)
	descLast    = prometheus.NewDesc("tierq_partition_last_address", "Greatest address of the partition; a decrease is fatal.", []string{"queue", "partition"}, nil)
	descStored  = prometheus.NewDesc("tierq_partition_messages", "Messages stored.", []string{"queue", "partition"}, nil)
	descBytes   = prometheus.NewDesc("tierq_partition_bytes", "Their bytes.", []string{"queue", "partition"}, nil)
	descLag     = prometheus.NewDesc("tierq_group_unfinished", "Messages that the group has not finished.", []string{"queue", "partition", "group"}, nil)
	descFlight  = prometheus.NewDesc("tierq_group_in_flight", "Messages leased now; at the home only.", []string{"queue", "partition", "group"}, nil)
	descWaiting = prometheus.NewDesc("tierq_group_waiting_receives", "Receives that wait; at the home only.", []string{"queue", "partition", "group"}, nil)
	descRetries = prometheus.NewDesc("tierq_group_retries_total", "Failures recorded.", []string{"queue", "partition", "group"}, nil)
	descExports = prometheus.NewDesc("tierq_outbox_waiting", "Dead letters on their way to the dead-letter queue, or waiting for it.", []string{"queue", "partition", "group"}, nil)
	descParked  = prometheus.NewDesc("tierq_outbox_parked_seconds", "For how long the group's dead letters have not gone on, by reason; at the home only.", []string{"queue", "partition", "group", "code"}, nil)
	descCopies  = prometheus.NewDesc("tierq_data_copies", "Full replicas that are in sync; at the leader's host only.", []string{"queue", "partition"}, nil)
	descCert    = prometheus.NewDesc("tierq_certificate_expiry_seconds", "Until the certificate in use ends, by use: peer, api. Below 0: it has ended.", []string{"use"}, nil)
	descClock   = prometheus.NewDesc("tierq_clock_offset_seconds", "How far the median of the reachable hosts' clocks is ahead of this host's.", nil, nil)
	descRefused = prometheus.NewDesc("tierq_clock_refused", "1: this host does not take up its wall clock, and refuses calls with CLOCK_SKEW.", nil, nil)
	descLow     = prometheus.NewDesc("tierq_disk_low", "1: the data disk is nearly full and publishes are refused.", nil, nil)
	descPeer    = prometheus.NewDesc("tierq_host_heard", "1: the other host is heard of, 0: it is silent.", []string{"host", "role"}, nil)
	descGrowing = prometheus.NewDesc("tierq_queue_growing_seconds", "For how long the queue has been on its way to more partitions, by what it is at: shards, groups, last-look; at the host that leads the catalog only.", []string{"queue", "phase"}, nil)
	descDead    = prometheus.NewDesc("tierq_group_dead", "Dead letters now.", []string{"queue", "partition", "group"}, nil)
)

func newCollector(n *Node) prometheus.Collector { return collector{n} }

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descUptime, descDesks, descCert, descClock, descRefused, descLow, descPeer, descQuorum, descCopies, descTerm, descLast, descStored, descBytes, descLag, descFlight, descWaiting, descRetries, descDead, descExports, descParked, descGrowing} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	n := c.n
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descUptime, nowSince(n))
	n.mu.RLock()
	gauge(descDesks, float64(len(n.desks)))
	n.mu.RUnlock()
	for use, ends := range n.certEnds() {
		gauge(descCert, time.Until(ends).Seconds(), use)
	}
	clock := n.raft.Clock().Reading()
	gauge(descClock, clock.Offset.Seconds())
	gauge(descRefused, bit(clock.Refused))
	gauge(descLow, bit(n.raft.SpaceIsLow()))
	for _, h := range n.view().Hosts() {
		if h.ID != n.id {
			gauge(descPeer, bit(n.Alive(h.ID)), itoa(h.ID), h.Role.String())
		}
	}
	if n.leadsCatalog() {
		for _, g := range n.growths(n.view(), "", "") {
			gauge(descGrowing, g.For.Seconds(), g.Queue, g.Phase)
		}
	}
	for _, q := range n.view().AllQueues() {
		name := statsName(q)
		for _, p := range n.queueStats(q).Partitions {
			if !p.Here {
				continue
			}
			part := itoa(uint64(p.Partition))
			gauge(descQuorum, float64(p.QuorumState), name, part)
			gauge(descTerm, float64(p.Term), name, part)
			if p.LeaderHost == n.id {
				gauge(descCopies, float64(p.DataCopies), name, part)
			}
			gauge(descLast, float64(p.Last), name, part)
			gauge(descStored, float64(p.Counters.Messages), name, part)
			gauge(descBytes, float64(p.Counters.Bytes), name, part)
			for _, g := range p.Groups {
				gauge(descLag, float64(g.Counters.Unfinished), name, part, g.Name)
				gauge(descDead, float64(g.Counters.Dead), name, part, g.Name)
				gauge(descExports, float64(g.Exports), name, part, g.Name)
				if g.Parked != nil {
					gauge(descParked, float64(g.Parked.ForMs)/1000, name, part, g.Name, g.Parked.Code)
				}
				ch <- prometheus.MustNewConstMetric(descRetries, prometheus.CounterValue, float64(g.Counters.Retries), name, part, g.Name)
				if g.AtHome != nil {
					gauge(descFlight, float64(g.AtHome.Leased), name, part, g.Name)
					gauge(descWaiting, float64(g.AtHome.Waiters), name, part, g.Name)
				}
			}
		}
	}
}
