package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// catalogShard is what the catalog's shard is called where a queue is named.
const catalogShard = 1

func shardRebuild(a *app) *cobra.Command {
	var host uint64
	var noWait, ofCatalog bool
	c := &cobra.Command{
		Use:   "rebuild QUEUE[/PARTITION] --host HOST",
		Short: "make the replica of one host anew, from the others, on the same host, and wait for it",
		Long: "Make a replica that is wrong anew on its own host: it leaves its shard, its data are removed, and a new one is filled from the others. It is\n" +
			"refused with REPLICA_NEEDED if the others could not go on meanwhile. Until it has ended the queue has one copy less. A lost replica is\n" +
			"rebuilt without this. It goes on in the fleet when this command ends. Exit 4 when --timeout ends before it has.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case host == 0:
				return usagef("say --host: the host whose replica is wrong, as `tierq shard verify` or `tierq host list` shows")
			case ofCatalog == (len(args) == 1):
				return usagef("name a queue, or say --catalog")
			}
			return a.withClientFor(cmd.Context(), time.Hour, func(ctx context.Context, c *client.Client) error {
				shard := uint64(catalogShard)
				if !ofCatalog {
					var err error
					if shard, err = findShard(ctx, c, args[0]); err != nil {
						return err
					}
				}
				if err := c.RebuildReplica(ctx, shard, host); err != nil {
					return err
				}
				return a.awaitRebuild(ctx, c, shard, host, noWait)
			})
		},
	}
	f := c.Flags()
	f.Uint64Var(&host, "host", 0, "the host whose replica is made anew")
	f.BoolVar(&noWait, "no-wait", false, "begin it and return")
	f.BoolVar(&ofCatalog, "catalog", false, "the replica of the catalog, in place of a queue's")
	return c
}

// findShard returns the shard that QUEUE or QUEUE/PARTITION names; of a queue with several partitions one must be named.
func findShard(ctx context.Context, c *client.Client, text string) (uint64, error) {
	name, number, named := strings.Cut(text, "/")
	if err := checkName("queue", name); err != nil {
		return 0, err
	}
	q, err := c.LocateQueue(ctx, name)
	if err != nil {
		return 0, err
	}
	if !named && len(q.Partitions) > 1 {
		return 0, usagef("queue %s has %d partitions: say which one, as %s/0", name, len(q.Partitions), name)
	}
	partition := uint64(0)
	if named {
		if partition, err = strconv.ParseUint(number, 10, 32); err != nil {
			return 0, usagef("partition %q: it is a number from 0", number)
		}
	}
	for _, p := range q.Partitions {
		if uint64(p.Number) == partition {
			return p.Shard, nil
		}
	}
	return 0, usagef("queue %s has no partition %d", name, partition)
}

// awaitRebuild says what a rebuild waits for whenever that changes, until it has ended.
func (a *app) awaitRebuild(ctx context.Context, c *client.Client, shard, host uint64, noWait bool) error {
	said := ""
	for {
		l, err := c.ListHosts(ctx)
		if err == nil {
			text := rebuildProgress(l.Moves, shard, host)
			if text == "" || noWait {
				t := newTable("SHARD", "HOST", "RESULT")
				result := "rebuilt"
				if text != "" {
					result = text
				}
				t.add(shard, host, result)
				return a.printOne(t)
			}
			if text != said {
				said = text
				fmt.Fprintln(a.err, text)
			}
		}
		select {
		case <-ctx.Done():
			return &checkError{fmt.Sprintf("%s: it goes on; `tierq host list --moves` shows how far it is", said)}
		case <-time.After(drainPause):
		}
	}
}

// rebuildProgress says what a rebuild waits for, "" when it has ended.
func rebuildProgress(moves []*tierqv1.ReplicaMove, shard, host uint64) string {
	for _, m := range moves {
		if m.Shard == shard && m.FromHost == host {
			return rebuildSteps[m.Step]
		}
	}
	return ""
}

var rebuildSteps = map[string]string{
	"planned":  "waits until the fleet has fewer moves under way",
	"blocked":  "cannot be done now",
	"yield":    "hands its homes over",
	"clear":    "leaves the shard",
	"wipe":     "removes its data",
	"add":      "the new replica is added",
	"catch-up": "the new replica is filled",
}
