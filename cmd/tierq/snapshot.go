package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tierq/tierq/node/backup"
	"github.com/tierq/tierq/queue/client"
)

func snapshotCommand(a *app) *cobra.Command {
	return parent("snapshot", "back queues up to a directory, and restore them", snapshotSave(a), snapshotList(a), snapshotVerify(a), snapshotRestore(a))
}

// withPatience runs f with a client for as long as it takes, or --timeout: backups are as large as queues are. An interrupt ends it.
func (a *app) withPatience(ctx context.Context, f func(context.Context, *client.Client) error) error {
	o, err := a.options()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if a.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.timeout)
		defer cancel()
	}
	return withOptions(ctx, o, f)
}

// reporter prints, on stderr, what a backup or restore does, at most once a second, and a partition's beginning and end.
func (a *app) reporter(verb string) backup.Progress {
	var last time.Time
	key := ""
	return func(queue string, partition int, done, total uint64) {
		now, this := time.Now(), fmt.Sprint(queue, "\x00", partition)
		if this == key && now.Sub(last) < time.Second && (total == 0 || done < total) {
			return
		}
		key, last = this, now
		of := ""
		if total > 0 {
			of = fmt.Sprintf(" of %d", total)
		}
		fmt.Fprintf(a.err, "%s %s partition %d: %d%s bytes\n", verb, queue, partition, done, of)
	}
}

func snapshotSave(a *app) *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "save QUEUE... DIR",
		Short: "save queues whole to a new directory, while they go on",
		Long: "Save queues, with messages, groups, attempts, dead letters and delayed messages, to a new directory. Each partition is saved\n" +
			"at one index, streamed from one of its replicas. The directory is a backup once it has a " + backup.ManifestFile + ".",
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, queues := args[len(args)-1], args[:len(args)-1]
			if all == (len(queues) > 0) {
				return usagef("name queues and a directory, or --all and a directory")
			}
			for _, q := range queues {
				if err := checkName("queue", q); err != nil {
					return err
				}
			}
			return a.withPatience(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if all {
					list, err := c.ListQueues(ctx, "")
					if err != nil {
						return err
					}
					for _, q := range list {
						queues = append(queues, q.Name)
					}
				}
				if len(queues) == 0 {
					return &checkError{"the fleet has no queues: there is nothing to save"}
				}
				m, err := backup.Save(ctx, c, queues, dir, a.reporter("saved"))
				if err != nil {
					return err
				}
				return a.printBackup(m)
			})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "every queue of the fleet")
	return c
}

func (a *app) printBackup(m *backup.Manifest) error {
	t := newTable("QUEUE", "PARTITION", "SHARD", "INDEX", "KEYS", "BYTES", "FILE", "SHA256")
	for _, q := range m.Queues {
		for n, p := range q.Partitions {
			t.add(q.Name, n, p.Shard, p.Index, p.Keys, p.Bytes, p.File, p.SHA256)
		}
	}
	return a.print(t)
}

func snapshotList(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "list DIR",
		Short: "list the backups in a directory, or the backup that it is",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			list, err := backup.List(args[0])
			if err != nil {
				return backupError(err)
			}
			t := newTable("DIR", "CREATED", "FLEET", "QUEUES", "PARTITIONS", "BYTES", "ID", "ERROR")
			damaged := 0
			for _, e := range list {
				if e.Err != nil {
					damaged++
					t.add(e.Dir, "", "", 0, 0, 0, "", e.Err.Error())
					continue
				}
				partitions, bytes := 0, uint64(0)
				for _, q := range e.Manifest.Queues {
					partitions += len(q.Partitions)
					for _, p := range q.Partitions {
						bytes += p.Bytes
					}
				}
				created := time.UnixMilli(e.Manifest.CreatedMs).UTC().Format(time.RFC3339)
				t.add(e.Dir, created, e.Manifest.Fleet, len(e.Manifest.Queues), partitions, bytes, e.Manifest.ID, "")
			}
			if err := a.print(t); err != nil {
				return err
			}
			if damaged > 0 {
				return &checkError{fmt.Sprintf("%d backups have a damaged manifest: restore that file, or take the backup again", damaged)}
			}
			return nil
		},
	}
}

func snapshotVerify(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "verify DIR",
		Short: "check every checksum and record of a backup, without a fleet; exit 4 when something is wrong",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			m, err := backup.Verify(args[0], a.reporter("verified"))
			if err != nil {
				return backupError(err)
			}
			return a.printBackup(m)
		},
	}
}

// backupError tells a wrong path, which the user can mend, from a damaged backup.
func backupError(err error) error {
	switch {
	case err == nil:
		return nil
	case backup.IsCorrupt(err):
		return &checkError{err.Error() + ": nothing of it may be used: take another backup"}
	case errors.Is(err, fs.ErrNotExist):
		return usagef("%v", err)
	}
	return err
}

func snapshotRestore(a *app) *cobra.Command {
	var o backup.RestoreOptions
	var replace, abort bool
	c := &cobra.Command{
		Use:   "restore DIR",
		Short: "restore the queues of a backup, under their own names or one as another",
		Long: "Restore queues into this fleet, which need not be the one that they are from. All of the backup is verified before anything\n" +
			"is created. A queue appears under its name when it is whole. Repeat the command after any failure: it goes on.\n" +
			"Producers must register again (0x0012), and receipts of before are refused.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, n := range [...]string{o.As, o.Queue} {
				if n != "" {
					if err := checkName("queue", n); err != nil {
						return err
					}
				}
			}
			o.Progress = a.reporter("restored")
			return a.withPatience(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if abort {
					return backupError(backup.Abort(ctx, c, args[0], o))
				}
				if replace {
					if err := replaced(ctx, c, args[0], &o); err != nil {
						return backupError(err)
					}
				}
				return a.restore(ctx, c, args[0], o)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.Queue, "queue", "", "restore this queue of the backup only")
	f.StringVar(&o.As, "as", "", "the restored queue's name, for one queue")
	f.BoolVar(&replace, "replace", false, "take the place of the queue that has the name, which is deleted then; for one queue")
	f.BoolVar(&abort, "abort", false, "remove what an unfinished restore of this backup, under these names, has made")
	f.Uint32Var(&o.Replicas, "replicas", 0, "full replicas of the restored queues: 2, 3 or 5 (default: as they were)")
	f.Uint32Var(&o.Witnesses, "witnesses", 0, "with --replicas: witnesses, 1 with 2 replicas")
	return c
}

// replaced finds the queue that the restored one replaces.
func replaced(ctx context.Context, c *client.Client, dir string, o *backup.RestoreOptions) error {
	name, err := backup.NameOf(dir, *o)
	if err != nil {
		return err
	}
	q, err := c.SnapshotQueue(ctx, name)
	if err != nil {
		return err
	}
	o.Replace = q.QueueId
	return nil
}

func (a *app) restore(ctx context.Context, c backup.Target, dir string, o backup.RestoreOptions) error {
	done, err := backup.Restore(ctx, c, dir, o)
	t := newTable("QUEUE", "QUEUE_ID", "PARTITIONS", "WAS_COMPLETE")
	for _, r := range done {
		t.add(r.Name, r.QueueID, r.Partitions, r.Before)
	}
	if len(done) > 0 || err == nil {
		if perr := a.print(t); perr != nil {
			return perr
		}
	}
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return errors.New("interrupted: the same command goes on where this one stopped, with --abort it removes what there is")
	}
	return backupError(err)
}

var _ backup.Target = (*client.Client)(nil)
