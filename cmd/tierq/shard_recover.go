package main

import (
	"bufio"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node/backup"
)

func shardRecover(a *app) *cobra.Command {
	var others, queues []string
	var tenant string
	var accept uint64
	c := &cobra.Command{
		Use:   "recover DATA_DIR BACKUP_DIR",
		Short: "forced recovery: take what a stopped host has of its queues, when the newest copies are gone for good",
		Long: "Take the queues of a stopped full host, with all that its Raft log has, into a backup, from which `tierq snapshot restore`\n" +
			"makes new shards. It says what may be lost and asks for the number that it names, or takes it by --accept. It changes\n" +
			"nothing in the data directory. --other names data directories, or copies of their wal directories, of other stopped hosts, as of the\n" +
			"witness: their logs tell how far the shards had got.",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := backup.OpenPlan(args[0], others, tenant, queues)
			if err != nil {
				return backupError(err)
			}
			defer func() { _ = p.Close() }()
			if err := a.printPlan(p); err != nil {
				return err
			}
			if err := a.confirm(p, accept, cmd.Flags().Changed("accept")); err != nil {
				return err
			}
			m, err := p.Save(args[1], a.reporter("recovered"))
			if err != nil {
				return err
			}
			fmt.Fprintf(a.err, "%d queues are in %s: restore them by `tierq snapshot restore %s`, into this fleet with --replace, or into a new one\n", len(m.Queues), args[1], args[1])
			return nil
		},
	}
	f := c.Flags()
	f.StringArrayVar(&others, "other", nil, "data directory, or copy of the wal directory, of another stopped host; may be repeated")
	f.StringArrayVar(&queues, "queue", nil, "only this queue; may be repeated (default: all)")
	f.StringVar(&tenant, "tenant", "", "the tenant whose queues to take (default: the default tenant)")
	f.Uint64Var(&accept, "accept", 0, "the number that confirms what may be lost, for scripts")
	return c
}

func (a *app) printPlan(p *backup.Plan) error {
	t := newTable("QUEUE", "PARTITION", "SHARD", "REPLICA", "APPLIED_INDEX", "LAST_INDEX", "LAST_KNOWN_INDEX", "MAY_BE_LOST", "DATA_COPIES")
	for i := range p.Shards {
		s := &p.Shards[i]
		lost, last, copies := "unknown", "unknown", 1
		if n, ok := s.MayBeLost(); ok {
			lost, last = strconv.FormatUint(n, 10), strconv.FormatUint(s.Known, 10)
		}
		if s.NoCopy() {
			lost, copies = "all", 0
		}
		t.add(s.Queue.Name, s.Partition, s.Shard, uint64(s.Replica), uint64(s.Applied), s.Last, last, lost, copies)
	}
	return a.print(t)
}

// confirm takes the number that the plan names: by the flag, or from the terminal.
func (a *app) confirm(p *backup.Plan, accept uint64, given bool) error {
	n := p.Number()
	fmt.Fprintf(a.err, "All up to LAST_INDEX is kept. What was written behind it, up to MAY_BE_LOST log entries with their messages and acks, is lost, and\n"+
		"acked messages may come again. Receipts and producers of before are refused. The other copies must never be started again.\n")
	if names := p.Missing(); len(names) > 0 {
		fmt.Fprintf(a.err, "This host has not all of %s: that is left out.\n", strings.Join(names, ", "))
	}
	if !given && isTerminal(a.out) {
		fmt.Fprintf(a.err, "Type %d to go on: ", n)
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		if v, err := strconv.ParseUint(strings.TrimSpace(line), 10, 64); err == nil {
			accept, given = v, true
		}
	}
	switch {
	case !given:
		return &checkError{fmt.Sprintf("nothing was done: to go on, give --accept %d", n)}
	case accept != n:
		return &checkError{fmt.Sprintf("nothing was done: the number is %d, not %d: the host's state is another one than you have seen, so look again", n, accept)}
	}
	return nil
}
