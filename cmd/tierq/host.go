package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

func fleetHostCommand(a *app) *cobra.Command {
	return parent("host", "let hosts join the fleet and leave it", hostList(a), hostToken(a), hostJoin(a), hostDrain(a), hostRemove(a))
}

func hostID(text string) (uint64, error) {
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil || id == 0 {
		return 0, usagef("host %q: it is a number from 1, as `tierq host list` shows", text)
	}
	return id, nil
}

func hostList(a *app) *cobra.Command {
	var moves bool
	c := &cobra.Command{
		Use:   "list",
		Short: "show the hosts and what each has; with --moves the replicas that are being replaced",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				l, err := c.ListHosts(ctx)
				if err != nil {
					return err
				}
				if moves {
					return a.print(movesTable(l.Moves))
				}
				t := newTable("HOST", "ROLE", "STATE", "ALIVE", "REPLICAS", "LEADERS", "MOVING", "DOMAIN", "API", "PEER", "RAFT")
				for _, h := range l.Hosts {
					t.add(h.Id, h.Role, h.State, h.Alive, h.Replicas, h.Leaders, movingFrom(l.Moves, h.Id), h.Domain, h.Api, h.Peer, h.Raft)
				}
				return a.print(t)
			})
		},
	}
	c.Flags().BoolVar(&moves, "moves", false, "show the replicas that are, or should be, on their way, and what each waits for")
	return c
}

// movingFrom counts the replicas of a host that are being replaced.
func movingFrom(moves []*tierqv1.ReplicaMove, host uint64) (n int) {
	for _, m := range moves {
		if m.FromHost == host && m.Step != "planned" && m.Step != "blocked" {
			n++
		}
	}
	return n
}

func movesTable(moves []*tierqv1.ReplicaMove) *table {
	t := newTable("QUEUE", "PARTITION", "SHARD", "REPLICA", "FROM", "TO", "STEP", "WHY", "REASON")
	for _, m := range moves {
		name := m.Queue
		if name == "" {
			name = "(catalog)"
		}
		t.add(name, m.Partition, m.Shard, m.Replica, m.FromHost, m.ToHost, m.Step, m.Why, m.Reason)
	}
	return t
}

func hostToken(a *app) *cobra.Command {
	var ttl time.Duration
	var file string
	c := &cobra.Command{
		Use:   "token",
		Short: "make a token with which one new host can join, once; it is shown once, or written to --file",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ttl <= 0 || ttl > 7*24*time.Hour {
				return usagef("--ttl %v: use up to 168h", ttl)
			}
			keep := func(token string) (string, error) { return token, nil }
			kept := file == ""
			if file != "" {
				f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // before there is a token that would be lost
				if err != nil {
					return usagef("--file: %v", err)
				}
				keep = func(token string) (string, error) {
					_, err := f.WriteString(token + "\n")
					kept = err == nil
					return "in " + file, errors.Join(err, f.Close())
				}
			}
			err := a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.CreateJoinToken(ctx, uint64(ttl.Milliseconds()))
				if err != nil {
					return err
				}
				shown, err := keep(res.Token)
				if err != nil {
					return err
				}
				t := newTable("TOKEN", "EXPIRES")
				t.add(shown, time.UnixMilli(int64(res.ExpiresMs)).UTC().Format(time.RFC3339))
				return a.printOne(t)
			})
			if !kept { // what is left of the file would stand in the way of the next attempt
				err = errors.Join(err, os.Remove(file))
			}
			return err
		},
	}
	c.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long it can be used")
	c.Flags().StringVar(&file, "file", "", "write the token to this new file, as tierq host join --token-file takes it, and do not show it")
	return c
}

func hostJoin(a *app) *cobra.Command {
	var path, token, tokenFile string
	c := &cobra.Command{
		Use:   "join --config FILE --token TOKEN",
		Short: "take a new host into a running fleet; then start it with `tierq serve` or `tierq witness`",
		Long: "Take the host that a file describes into the fleet of the other hosts in the file's list. Its data directory must be empty. The\n" +
			"files of the other hosts need no change.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return usagef("say --config: the YAML file of the new host")
			}
			token, err := joinToken(token, tokenFile)
			if err != nil {
				return err
			}
			cfg, err := node.LoadConfig(path)
			if err != nil {
				return configError(err)
			}
			log, err := node.NewLogger(cfg.Log)
			if err != nil {
				return usagef("%s: log: %q is not a level: use debug, info, warn or error", path, cfg.Log)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), a.tryFor(30*time.Second))
			defer cancel()
			if err := hostError(node.Join(ctx, cfg, token, log)); err != nil {
				return err
			}
			t := newTable("HOST", "RESULT", "NEXT")
			t.add(cfg.Host, "joined", "tierq "+commandOf(cfg.Self().Role)+" --config "+path)
			return a.printOne(t)
		},
	}
	c.Flags().StringVar(&path, "config", "", "YAML file of the new host")
	c.Flags().StringVar(&token, "token", "", "the token that tierq host token made")
	c.Flags().StringVar(&tokenFile, "token-file", "", "a file with the token, which then is not in the list of processes")
	return c
}

func joinToken(token, path string) (string, error) {
	switch {
	case (token == "") == (path == ""):
		return "", usagef("say --token or --token-file: `tierq host token` makes one")
	case token != "":
		return token, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", usagef("--token-file: %v", err)
	}
	return strings.TrimSpace(string(b)), nil
}

func hostDrain(a *app) *cobra.Command {
	var cancel, noWait bool
	c := &cobra.Command{
		Use:   "drain HOST",
		Short: "move every replica, leader and home away from a host, and wait for it",
		Long: "Move every replica, leader and home away from a host. It goes on in the fleet when this command ends: run it again to see how far\n" +
			"it is. Exit 4 when --timeout ends before the host is empty.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := hostID(args[0])
			if err != nil {
				return err
			}
			return a.withClientFor(cmd.Context(), time.Hour, func(ctx context.Context, c *client.Client) error {
				if err := c.DrainHost(ctx, id, cancel); err != nil {
					return err
				}
				if cancel || noWait {
					return a.printDrain(ctx, c, id)
				}
				return a.awaitDrain(ctx, c, id)
			})
		},
	}
	c.Flags().BoolVar(&cancel, "cancel", false, "take new replicas again; moves that are under way end")
	c.Flags().BoolVar(&noWait, "no-wait", false, "begin it and return")
	return c
}

const drainPause = 500 * time.Millisecond

// awaitDrain says what is left whenever that changes, until nothing is.
func (a *app) awaitDrain(ctx context.Context, c *client.Client, id uint64) error {
	said := ""
	for {
		l, err := c.ListHosts(ctx)
		if err == nil {
			text, left := drainProgress(l, id)
			if text != said {
				said = text
				fmt.Fprintln(a.err, text)
			}
			if !left {
				return a.printDrain(ctx, c, id)
			}
		}
		select {
		case <-ctx.Done():
			return &checkError{fmt.Sprintf("%s: it goes on; run `tierq host drain %d` again to watch", said, id)}
		case <-time.After(drainPause):
		}
	}
}

// drainProgress says what a host has left.
func drainProgress(l *tierqv1.ListHostsResponse, id uint64) (text string, left bool) {
	i := slices.IndexFunc(l.Hosts, func(h *tierqv1.FleetHost) bool { return h.Id == id })
	if i < 0 {
		return fmt.Sprintf("host %d is not in the fleet", id), false
	}
	h := l.Hosts[i]
	text = fmt.Sprintf("host %d: %d replicas and %d leaders left, %d replicas are moving", id, h.Replicas, h.Leaders, movingFrom(l.Moves, id))
	blocked, reason := 0, ""
	for _, m := range l.Moves {
		if m.FromHost == id && m.Step == "blocked" {
			blocked, reason = blocked+1, m.Reason
		}
	}
	if blocked > 0 {
		text += fmt.Sprintf("; %d have nowhere to go: %s", blocked, reason)
	}
	return text, h.Replicas > 0
}

func (a *app) printDrain(ctx context.Context, c *client.Client, id uint64) error {
	l, err := c.ListHosts(ctx)
	if err != nil {
		return err
	}
	t := newTable("HOST", "STATE", "REPLICAS", "LEADERS", "MOVING")
	for _, h := range l.Hosts {
		if h.Id == id {
			t.add(h.Id, h.State, h.Replicas, h.Leaders, movingFrom(l.Moves, id))
		}
	}
	return a.print(t)
}

func hostRemove(a *app) *cobra.Command {
	var lost bool
	c := &cobra.Command{
		Use:   "remove HOST",
		Short: "remove a drained host, or with --lost one that is gone for good; its id is never used again",
		Long: "Remove a host that has no replicas any more. With --lost its replicas are replaced on other hosts without it, and it goes when that is\n" +
			"done: say it only of a host that never comes back, as it is not taken back. A queue of two full replicas and a witness whose other full\n" +
			"replica is behind loses what only the lost host had: `tierq leader get QUEUE` shows DATA_COPIES.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := hostID(args[0])
			if err != nil {
				return err
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				removed, err := c.RemoveHost(ctx, id, lost)
				if err != nil {
					return err
				}
				t := newTable("HOST", "RESULT")
				if removed {
					t.add(id, "removed")
				} else {
					t.add(id, "being-replaced")
				}
				return a.printOne(t)
			})
		},
	}
	c.Flags().BoolVar(&lost, "lost", false, "the host and its disk are gone for good")
	return c
}

func rebalanceCommand(a *app) *cobra.Command {
	var dryRun, noWait bool
	c := &cobra.Command{
		Use:   "rebalance",
		Short: "even out replicas and leaders among the hosts, and wait for it; --dry-run shows what would move",
		Long: "Move replicas from the hosts that have the most to those that have the least, in distinct failure domains, and then leaders. A few moves go\n" +
			"on at once; this command begins the next ones as they end. What is begun goes on without it: run it again to go on.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClientFor(cmd.Context(), time.Hour, func(ctx context.Context, c *client.Client) error {
				plan, err := c.Rebalance(ctx, true)
				if err != nil {
					return err
				}
				if err := a.print(rebalanceTable(plan)); err != nil || dryRun {
					return err
				}
				return a.rebalance(ctx, c, noWait)
			})
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only show the moves")
	c.Flags().BoolVar(&noWait, "no-wait", false, "begin as many moves as may go on at once, and return")
	return c
}

func rebalanceTable(p *tierqv1.RebalanceResponse) *table {
	t := newTable("MOVES", "QUEUE", "PARTITION", "SHARD", "FROM", "TO")
	for _, m := range p.Moves {
		t.add("replica", m.Queue, m.Partition, m.Shard, m.FromHost, m.ToHost)
	}
	for _, m := range p.Leaders {
		t.add("leader", m.Queue, m.Partition, m.Shard, m.FromHost, m.ToHost)
	}
	return t
}

// rebalance begins moves until none is left, then moves the leaders.
func (a *app) rebalance(ctx context.Context, c *client.Client, noWait bool) error {
	said := ""
	for {
		plan, err := c.Rebalance(ctx, false)
		if err != nil {
			return err
		}
		if text := fmt.Sprintf("%d replicas are moving, %d are left to move", plan.UnderWay, len(plan.Moves)-int(plan.Started)); text != said {
			said = text
			fmt.Fprintln(a.err, text)
		}
		switch {
		case noWait:
			return nil
		case plan.UnderWay == 0:
			return moveLeaders(ctx, c, plan.Leaders)
		}
		select {
		case <-ctx.Done():
			return &checkError{said + ": run `tierq rebalance` again to go on"}
		case <-time.After(drainPause):
		}
	}
}

func moveLeaders(ctx context.Context, c *client.Client, moves []*tierqv1.LeaderMove) error {
	for _, m := range moves {
		if err := c.MoveLeader(ctx, m.Shard, m.ToHost); err != nil {
			return fmt.Errorf("leader of queue %s to host %d: %w", m.Queue, m.ToHost, err)
		}
	}
	return nil
}
