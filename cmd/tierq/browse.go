package main

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// browseBodyBytes is how much of a body a line for people shows.
const browseBodyBytes = 64

func browseCommand(a *app) *cobra.Command {
	var from uint64
	var limit uint32
	var in partitionFlag
	c := &cobra.Command{
		Use:   "browse QUEUE",
		Short: "look at messages without taking them",
		Long: "Show stored messages in address order: delayed, leased and dead ones too, and nothing changes. For people a body is cut to\n" +
			"64 bytes; --json prints it whole.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			if limit < 1 {
				return usagef("--limit %d: it is at least 1", limit)
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				return a.browse(ctx, c, &tierqv1.BrowseRequest{Queue: args[0], Partition: in.given, FromAddress: from}, limit)
			})
		},
	}
	c.Flags().Uint64Var(&from, "from", 0, "from this address on")
	c.Flags().Uint32Var(&limit, "limit", 100, "most messages")
	in.add(c, "all, one after the other")
	return c
}

func (a *app) browse(ctx context.Context, c *client.Client, req *tierqv1.BrowseRequest, limit uint32) error {
	t := newTable("ADDRESS", "PUBLISHED", "DUE", "EXPIRES", "KEY", "BYTES", "PRODUCER", "SEQ", "BODY")
	if a.json {
		t.columns = append(t.columns, "BODY_BASE64")
	} else {
		cut := uint32(browseBodyBytes)
		req.MaxBodyBytes = &cut
	}
	t.columns = append(t.columns, "PARTITION")
	for limit > 0 {
		req.Limit = min(limit, 1000)
		res, err := c.Browse(ctx, req)
		if err != nil {
			return err
		}
		for _, m := range res.Messages {
			t.rows = append(t.rows, append(browseRow(m, a.json), m.Partition))
		}
		limit -= min(limit, uint32(len(res.Messages)))
		req.FromPartition = res.NextPartition
		if req.FromAddress = res.NextAddress; res.NextAddress == 0 {
			break
		}
	}
	return a.print(t)
}

func browseRow(m *tierqv1.BrowsedMessage, whole bool) []any {
	row := []any{m.Address, stamp(m.PublishedUnixMs), stamp(m.VisibleUnixMs), stamp(m.ExpiresUnixMs), string(m.Key), m.BodyBytes, m.ProducerId, m.Seq}
	if !whole {
		return append(row, strings.ToValidUTF8(string(m.Body), "?"))
	}
	text, raw := jsonBody(m.Body)
	row = append(row, text, json.RawMessage("null"))
	if raw != nil {
		row[len(row)-1] = raw
	}
	return row
}

func lookupCommand(a *app) *cobra.Command {
	var in partitionFlag
	c := &cobra.Command{
		Use:   "lookup QUEUE PRODUCER SEQ",
		Short: "tell whether and where a producer's seq was stored",
		Long: "Tell what became of a publish: stored (and its address), not-stored (it can still be published), forgotten (it lies below\n" +
			"what the producer has declared answered), or unknown-producer.",
		Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			producer, err := strconv.ParseUint(args[1], 10, 64)
			if err != nil || producer == 0 {
				return usagef("producer %q: it is the producer's number, as `tierq browse` shows it", args[1])
			}
			seq, err := strconv.ParseUint(args[2], 10, 63)
			if err != nil || seq == 0 {
				return usagef("seq %q: it is a number from 1", args[2])
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.LookupPublish(ctx, args[0], producer, seq, in.list()...)
				if err != nil {
					return err
				}
				t := newTable("OUTCOME", "ADDRESS", "EXISTS", "PRODUCER_EPOCH", "LOW", "LAST_SEQ")
				t.add(res.Outcome, res.Address, res.Exists, res.ProducerEpoch, res.Low, res.LastSeq)
				return a.printOne(t)
			})
		},
	}
	in.add(c, onlyPartition)
	return c
}
