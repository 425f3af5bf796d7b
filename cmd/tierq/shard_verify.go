package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node/backup"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func shardVerify(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "verify QUEUE",
		Short: "read every full replica whole and check each record by itself; exit 4 when one is damaged or not read",
		Long: "Read every full replica of a queue whole, while it goes on, and check each record by itself. When tierq shard digest says that two\n" +
			"replicas differ, this says which of them has a record with a wrong checksum. It moves all of the queue's bytes over the network.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("queue", args[0]); err != nil {
				return err
			}
			return a.withPatience(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				q, err := c.DescribeQueue(ctx, args[0])
				if err != nil {
					return err
				}
				found, err := backup.Examine(ctx, c, args[0], a.reporter("read"))
				if err != nil {
					return err
				}
				return a.printExamined(q, found)
			})
		},
	}
}

func (a *app) printExamined(q *tierqv1.Queue, found []backup.Examined) error {
	hosts := map[string]uint64{}
	full := 0
	for _, p := range q.Partitions {
		for _, r := range p.Replicas {
			if r.Role == "full" {
				hosts[r.Api] = r.Host
				full++
			}
		}
	}
	t := newTable("PARTITION", "HOST", "RESULT", "INDEX", "KEYS", "BYTES", "ERROR")
	bad := max(0, full-len(found))
	for _, e := range found {
		result, text := resultOK, ""
		if e.Err != nil {
			result, text = resultFail, e.Err.Error()
			bad++
		}
		t.add(e.Partition, hosts[e.API], result, e.Found.Index, e.Found.Keys, e.Found.Bytes, text)
	}
	if err := a.print(t); err != nil {
		return err
	}
	if bad > 0 {
		return &checkError{fmt.Sprintf("%d of %d replicas are damaged, or were not read", bad, max(full, len(found)))}
	}
	return nil
}
