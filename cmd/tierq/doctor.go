package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// doctor is one examination: every check is a row, one for all subjects that passed, one for each that did not.
type doctor struct {
	order    []string
	passed   map[string]int
	findings []finding
}

type finding struct{ check, result, subject, detail string }

const (
	resultOK   = "ok"
	resultWarn = "warn"
	resultFail = "fail"
)

func newDoctor() *doctor { return &doctor{passed: map[string]int{}} }

// check notes one assertion about one subject.
func (d *doctor) check(name, subject string, ok bool, bad, format string, args ...any) {
	if _, known := d.passed[name]; !known {
		d.passed[name] = 0
		d.order = append(d.order, name)
	}
	if ok {
		d.passed[name]++
		return
	}
	d.findings = append(d.findings, finding{name, bad, subject, fmt.Sprintf(format, args...)})
}

func (d *doctor) table() *table {
	t := newTable("CHECK", "RESULT", "SUBJECT", "DETAIL")
	for _, name := range d.order {
		if n := d.passed[name]; n > 0 {
			t.add(name, resultOK, fmt.Sprint(n), "")
		}
		for _, f := range d.findings {
			if f.check == name {
				t.add(f.check, f.result, f.subject, f.detail)
			}
		}
	}
	return t
}

func (d *doctor) failed() int {
	n := 0
	for _, f := range d.findings {
		if f.result == resultFail {
			n++
		}
	}
	return n
}

func doctorCommand(a *app) *cobra.Command {
	var admin, clock string
	var yes bool
	c := &cobra.Command{
		Use:   "doctor [QUEUE...]",
		Short: "check the invariants of the fleet, its queues and groups; exit 4 when one does not hold",
		Long: "Check what must hold at any moment: that hosts answer, that queues have leaders, quorums and copies, that replicas are\n" +
			"equal, that every group has one home, and that its counters add up. --admin names the hosts' admin listeners, whose\n" +
			"/stats are read at one applied index per shard; without it the sums are not checked.\n\n" +
			"--accept-clock HOST is for a host that refuses calls with CLOCK_SKEW although its clock is right: it shows the clock and, with --yes,\n" +
			"makes the host take it up until it starts again. Delays and TTLs of that host's partitions go by that clock from then on.",
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, q := range args {
				if err := checkName("queue", q); err != nil {
					return err
				}
			}
			if clock != "" {
				return a.acceptClock(cmd.Context(), clock, yes)
			}
			return a.withClientFor(cmd.Context(), time.Minute, func(ctx context.Context, c *client.Client) error {
				return a.examine(ctx, c, args, splitList(admin))
			})
		},
	}
	c.Flags().StringVar(&clock, "accept-clock", "", "the full host that is to take its clock up as it is; nothing is checked")
	c.Flags().BoolVar(&yes, "yes", false, "with --accept-clock: do it, after a look without")
	c.Flags().StringVar(&admin, "admin", os.Getenv("TIERQ_ADMIN"), "admin addresses of full hosts, separated by commas (env TIERQ_ADMIN)")
	return c
}

func splitList(s string) []string {
	var out []string
	for _, x := range strings.Split(s, ",") {
		if x = strings.TrimSpace(x); x != "" {
			out = append(out, x)
		}
	}
	return out
}

func (a *app) examine(ctx context.Context, c *client.Client, names, admin []string) error {
	d := newDoctor()
	st, err := c.FleetStatus(ctx)
	if err != nil {
		return err
	}
	d.examineFleet(st)
	if l, err := c.ListHosts(ctx); err == nil { // it takes an operator
		d.examineMoves(l.Moves)
		d.examineClocks(l.Hosts)
	}
	if ts, err := c.ListTenants(ctx); err == nil { // as does this
		d.examineTenants(ts)
	}
	if len(names) == 0 {
		qs, err := c.ListQueues(ctx, "")
		if err != nil {
			return err
		}
		for _, q := range qs {
			names = append(names, q.Name)
		}
	}
	ways := deadLetterWays{}
	for _, name := range names {
		q, err := c.DescribeQueue(ctx, name)
		if err != nil {
			return err
		}
		gs, err := c.ListGroups(ctx, name)
		if err != nil {
			return err
		}
		if err := a.askLeaders(ctx, q); err != nil { // only they know the copies
			return err
		}
		d.examineQueue(q, gs, st.Hosts)
		ways.add(name, gs)
		if growths, err := c.Growths(ctx, name); err == nil { // hosts of an earlier version do not tell
			d.examineGrowths(name, growths)
		}
		d.examineNext(q, st.Hosts)
		for _, p := range q.Partitions {
			dg, err := c.ShardDigest(ctx, name, p.Number)
			if err != nil {
				d.check("digests", name, false, resultWarn, "%v", err)
				continue
			}
			equal, _, detail := compareDigests(dg.Replicas)
			d.check("digests", name, equal, resultFail, "the replicas differ: %s", detail)
		}
	}
	ways.follow(ctx, c)
	d.examineLoops(ways, names)
	if len(admin) > 0 {
		d.examineStats(ctx, admin, names)
	}
	t := d.table()
	if err := a.print(t); err != nil {
		return err
	}
	if n := d.failed(); n > 0 {
		return &checkError{fmt.Sprintf("%d checks failed: see the rows that say fail", n)}
	}
	return nil
}

func (d *doctor) examineFleet(st *tierqv1.FleetStatusResponse) {
	for _, h := range st.Hosts {
		d.check("hosts", fmt.Sprintf("host %d", h.Id), h.Alive, resultWarn, "%s host silent for %d ms: start it, or see its log", h.Role, h.SilentMs)
	}
	d.check("catalog", "fleet "+st.FleetId, st.CatalogLeaderHost != 0, resultFail, "the catalog has no leader: bring back a majority of its hosts")
}

func (d *doctor) examineTenants(ts []*tierqv1.Tenant) {
	for _, t := range ts {
		if t.MaxBytes > 0 {
			d.check("tenant-bytes", t.Name, t.StoredBytes < t.MaxBytes, resultWarn, "its queues store %d bytes of %d, so publishes are refused: consume, purge, or raise the quota", t.StoredBytes, t.MaxBytes)
		}
	}
}

func (d *doctor) examineQueue(q *tierqv1.Queue, gs []*tierqv1.Group, hosts []*tierqv1.Host) {
	full := map[uint32]map[uint64]bool{} // hosts with a full replica, of each partition
	for _, p := range q.Partitions {
		subject := fmt.Sprintf("%s/%d", q.Name, p.Number)
		d.check("leader", subject, p.LeaderHost != 0, resultFail, "no leader: bring back a majority of its hosts")
		d.check("quorum", subject, p.QuorumState == 0 || p.LeaderHost == 0, resultWarn, "%s", quorumName(p.QuorumState))
		full[p.Number] = map[uint64]bool{}
		fulls := uint32(0)
		for _, r := range p.Replicas {
			if r.Role == "full" {
				fulls++
				full[p.Number][r.Host] = true
			}
		}
		d.check("copies", subject, p.DataCopies == 0 || p.DataCopies >= min(2, fulls), resultWarn, "only %d disk holds new messages", p.DataCopies)
	}
	alive := map[uint64]bool{}
	for _, h := range hosts {
		alive[h.Id] = h.Alive
	}
	for _, g := range gs {
		if len(g.Partitions) == 0 {
			d.examineGroup(q.Name+"/"+g.Name, g, full[0], alive)
			continue
		}
		d.check("everywhere", q.Name+"/"+g.Name, len(g.Partitions) == len(q.Partitions), resultFail,
			"the group is in %d of %d partitions: create it again as it is, or delete it", len(g.Partitions), len(q.Partitions))
		for _, p := range g.Partitions {
			d.examineGroup(fmt.Sprintf("%s/%d %s", q.Name, p.Partition, g.Name), p, full[p.Partition], alive)
		}
	}
}

func (d *doctor) examineGroup(subject string, g *tierqv1.Group, full, alive map[uint64]bool) {
	d.check("home", subject, g.HomeHost != 0 && full[g.HomeHost], resultFail, "host %d is home and holds no full replica", g.HomeHost)
	d.check("home-alive", subject, alive[g.HomeHost], resultWarn, "its home, host %d, is silent: another one takes over within seconds", g.HomeHost)
	// The queue and the group were read one after the other: only what later messages cannot break is checked.
	d.check("in-flight", subject, g.InFlight <= g.Unfinished+g.Acked, resultFail, "%d in flight of %d unfinished", g.InFlight, g.Unfinished)
	limit := uint64(g.GetConfig().GetMaxInFlight())
	d.check("limits", subject, limit == 0 || g.InFlight <= limit, resultFail, "%d in flight, at most %d are allowed", g.InFlight, limit)
	parked := g.GetParked()
	d.check("dead-letters", subject, parked == nil, resultWarn, "%d dead letters have waited %d ms for queue %s: %s", g.Exports, parked.GetForMs(), parked.GetDeadLetterQueue(), parked.GetText())
	d.check("retrying", subject, g.Retrying <= g.Unfinished, resultFail, "%d retrying of %d unfinished", g.Retrying, g.Unfinished)
}
