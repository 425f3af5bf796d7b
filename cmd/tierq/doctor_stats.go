package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// What /stats answers, as far as the checks need it.
type (
	queueStats struct {
		Queue      string           `json:"queue"`
		Host       uint64           `json:"host"`
		Partitions []partitionStats `json:"partitions"`
	}
	partitionStats struct {
		Partition int          `json:"partition"`
		Here      bool         `json:"here"`
		Applied   uint64       `json:"applied"`
		Last      uint64       `json:"last_address"`
		Line      uint64       `json:"line"`
		Commit    uint64       `json:"log_commit"`
		LogLast   uint64       `json:"log_last"`
		Snapshot  uint64       `json:"log_snapshot"`
		Groups    []groupStats `json:"groups"`
	}
	groupStats struct {
		Name        string        `json:"name"`
		ID          uint64        `json:"id"`
		HomeReplica uint64        `json:"home_replica"`
		Epoch       uint64        `json:"epoch"`
		Start       uint64        `json:"start"`
		Floor       uint64        `json:"floor"`
		MaxInFlight uint64        `json:"max_in_flight"`
		MaxConsumer uint64        `json:"max_in_flight_per_consumer"`
		Exports     uint64        `json:"exports"`
		Counters    groupCounters `json:"counters"`
		AtHome      *atHome       `json:"at_home"`
	}
	groupCounters struct {
		Assigned, Unfinished, Acked, Dead, Exported, Expired, Purged, Cancelled, Retrying, Leased uint64
	}
	atHome struct {
		Epoch            uint64
		Leased, Retrying uint64
		Unresolved       uint64
		State            json.RawMessage
		Consumers        []consumerStats
	}
	consumerStats struct {
		Name   string
		Leased uint64
	}
)

const statsTimeout = 5 * time.Second

// examineStats reads /stats of every admin listener and checks each host's own state, and that hosts agree.
func (d *doctor) examineStats(ctx context.Context, admin, queues []string) {
	seen := map[string]seenGroup{}
	homes := map[string]uint64{}
	for _, addr := range admin {
		for _, queue := range queues {
			st, err := readStats(ctx, addr, queue)
			d.check("stats", addr, err == nil, resultWarn, "%v", err)
			if err != nil {
				break
			}
			for _, p := range st.Partitions {
				if p.Here {
					d.examinePartition(st, p, seen, homes)
				}
			}
		}
	}
}

func readStats(ctx context.Context, addr, queue string) (*queueStats, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/stats?queue="+url.QueryEscape(queue), nil)
	if err != nil {
		return nil, fmt.Errorf("admin address %q is not host:port", addr)
	}
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := hc.Do(req)
	if err != nil {
		return nil, fmt.Errorf("cannot read /stats: %w", err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
	if err != nil {
		return nil, fmt.Errorf("cannot read /stats: %w", err)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/stats answered %d: %s", res.StatusCode, strings.TrimSpace(string(body[:min(len(body), 200)])))
	}
	st := new(queueStats)
	if err := json.Unmarshal(body, st); err != nil {
		return nil, fmt.Errorf("/stats is not what this version reads: %w", err)
	}
	return st, nil
}

// seenGroup is what another host said of a group at an applied index.
type seenGroup struct {
	host, home, epoch, floor uint64
}

func (d *doctor) examinePartition(st *queueStats, p partitionStats, seen map[string]seenGroup, homes map[string]uint64) {
	at := fmt.Sprintf("host %d %s/%d", st.Host, st.Queue, p.Partition)
	d.examineLog(at, p)
	d.check("line", at, p.Line <= p.Last+1, resultFail, "the reclaim line %d lies above the last address %d", p.Line, p.Last)
	for _, g := range p.Groups {
		subject := at + " " + g.Name
		c := g.Counters
		sum := c.Unfinished + c.Acked + c.Dead + c.Exported + c.Expired + c.Purged + c.Cancelled
		d.check("sums", subject, c.Assigned == sum, resultFail,
			"assigned %d is not unfinished %d + acked %d + dead %d + exported %d + expired %d + purged %d + cancelled %d",
			c.Assigned, c.Unfinished, c.Acked, c.Dead, c.Exported, c.Expired, c.Purged, c.Cancelled)
		d.check("exports", subject, g.Exports <= c.Dead, resultFail, "%d dead letters are on their way to another queue, of %d", g.Exports, c.Dead)
		d.check("floor", subject, g.Floor <= p.Last, resultFail, "the floor %d lies above the last address %d", g.Floor, p.Last)
		d.check("retry-entries", subject, c.Retrying <= c.Unfinished, resultFail, "%d retry entries of %d unfinished", c.Retrying, c.Unfinished)

		name := fmt.Sprintf("%s/%d %s", st.Queue, p.Partition, g.Name)
		key := fmt.Sprintf("%s %d at %d", name, g.ID, p.Applied)
		mine := seenGroup{st.Host, g.HomeReplica, g.Epoch, g.Floor}
		if other, ok := seen[key]; ok && other.host != mine.host {
			other.host = mine.host
			d.check("agree", name, other == mine, resultFail, "hosts say different things of it at applied index %d", p.Applied)
		}
		seen[key] = mine
		if g.AtHome != nil {
			d.examineLedger(subject, g)
			epoch := fmt.Sprintf("%s %d epoch %d", name, g.ID, g.AtHome.Epoch)
			other, taken := homes[epoch]
			d.check("one-home", name, !taken || other == st.Host, resultFail, "hosts %d and %d both are its home in epoch %d", other, st.Host, g.AtHome.Epoch)
			homes[epoch] = st.Host
		}
	}
}

// examineLog checks the marks of a replica's Raft log, which are read at one moment, after the applied index: none of them may lie
// above the last entry, or entries are gone that this host has answered for.
func (d *doctor) examineLog(at string, p partitionStats) {
	if p.LogLast == 0 {
		return // not known
	}
	d.check("commit", at, p.Commit <= p.LogLast, resultFail, "index %d is committed, and the log ends at %d", p.Commit, p.LogLast)
	d.check("snapshot", at, p.Snapshot <= p.LogLast, resultFail, "the snapshot is at index %d, and the log ends at %d", p.Snapshot, p.LogLast)
	d.check("applied", at, p.Applied <= p.LogLast, resultFail, "index %d is applied, and the log ends at %d", p.Applied, p.LogLast)
}

// examineLedger checks what a group's home has handed out. The ledger is read a moment after the counters, and takes up later what
// apply has finished, hence the unresolved ones, and the warning.
func (d *doctor) examineLedger(subject string, g groupStats) {
	h := g.AtHome
	const lowered = "%d leased, at most %d are allowed: unless the limit was lowered a moment ago, report it"
	d.check("ledger", subject, g.MaxInFlight == 0 || h.Leased <= g.MaxInFlight, resultFail, lowered, h.Leased, g.MaxInFlight)
	d.check("leases", subject, h.Leased <= g.Counters.Unfinished+h.Unresolved, resultWarn, "%d leased of %d unfinished: look again", h.Leased, g.Counters.Unfinished)
	held := uint64(0)
	for _, c := range h.Consumers {
		held += c.Leased
		d.check("consumers", subject+" "+c.Name, g.MaxConsumer == 0 || c.Leased <= g.MaxConsumer, resultFail, lowered, c.Leased, g.MaxConsumer)
	}
	d.check("consumers", subject, held <= h.Leased, resultFail, "the consumers hold %d, the group %d", held, h.Leased)
}
