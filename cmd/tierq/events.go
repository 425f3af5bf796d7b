package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// maxEvents is what a host keeps.
const maxEvents = 2000

func eventsCommand(a *app) *cobra.Command {
	r := &tierqv1.ListEventsRequest{}
	c := &cobra.Command{
		Use:   "events",
		Short: "show what has happened on the hosts lately: elections, levels of the quorum, moves, full disks",
		Long: "Show what has happened on the full hosts lately, oldest first. Each host keeps its newest 2,000 events in memory, from its\n" +
			"start on; its log has them all, as lines with the field \"event\". A host that does not answer is named on stderr.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.Limit == 0 || r.Limit > maxEvents {
				return usagef("--limit is 1 to %d", maxEvents)
			}
			if r.Queue != "" {
				if err := checkName("queue", r.Queue); err != nil {
					return err
				}
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error { return a.printEvents(ctx, c, r) })
		},
	}
	fs := c.Flags()
	fs.Uint64Var(&r.Host, "host", 0, "only those of one host (default: of all full hosts)")
	fs.StringVar(&r.Queue, "queue", "", "only those of a queue's partitions")
	fs.StringVar(&r.Event, "event", "", "only those of a name, for example quorum")
	fs.Uint32Var(&r.Limit, "limit", 100, "at most so many of each host, the newest")
	return c
}

// hostEvent is one host's event.
type hostEvent struct {
	host uint64
	*tierqv1.FleetEvent
}

func (a *app) printEvents(ctx context.Context, c *client.Client, r *tierqv1.ListEventsRequest) error {
	hosts := []uint64{r.Host}
	if r.Host == 0 {
		st, err := c.FleetStatus(ctx)
		if err != nil {
			return err
		}
		hosts = nil
		for _, h := range st.Hosts {
			if h.Role == "full" {
				hosts = append(hosts, h.Id)
			}
		}
	}
	var events []hostEvent
	failed := map[uint64]error{}
	for _, id := range hosts {
		res, err := c.ListEvents(ctx, &tierqv1.ListEventsRequest{Host: id, Queue: r.Queue, Event: r.Event, Limit: r.Limit})
		if err != nil {
			failed[id] = err
			continue
		}
		for _, e := range res.Events {
			events = append(events, hostEvent{id, e})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(failed)) {
		if len(failed) == len(hosts) {
			return failed[id]
		}
		fmt.Fprintf(a.err, "tierq: host %d: %v\n", id, failed[id])
	}
	slices.SortStableFunc(events, func(x, y hostEvent) int { return cmp.Compare(x.TimeUnixMs, y.TimeUnixMs) })
	t := newTable("TIME", "HOST", "EVENT", "QUEUE", "PARTITION", "SHARD", "TEXT", "DETAILS", "SEQ")
	for _, e := range events {
		t.add(time.UnixMilli(int64(e.TimeUnixMs)).UTC().Format("2006-01-02T15:04:05.000Z"), e.host, e.Event, e.Queue, e.Partition, e.Shard, e.Text, details(e.Details), e.Seq)
	}
	return a.print(t)
}

// details are a line's fields in order of their names.
func details(fields map[string]string) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		value := fields[key]
		if strings.ContainsAny(value, " =") {
			value = fmt.Sprintf("%q", value)
		}
		b.WriteString(key + "=" + value)
	}
	return b.String()
}
