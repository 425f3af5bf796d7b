package backup

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/tierq/tierq/host"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/swarm"
	"github.com/tierq/tierq/wal"
)

// Plan says what a forced recovery from a stopped host would keep, and what may be lost. Close it.
type Plan struct {
	Shards  []PlanShard
	salvage *host.Salvage
}

// PlanShard is one partition of a plan.
type PlanShard struct {
	host.SalvageShard
	// Known is the greatest index that any other log which was looked at has; 0: none was looked at that has the shard.
	Known     uint64
	KnownTerm uint64
}

// NoCopy says that this host has no full replica of the partition.
func (s *PlanShard) NoCopy() bool { return s.Replica == 0 }

// MayBeLost bounds the log entries that are lost, each of which may hold many messages; known is false when no other log tells.
//
// A log that has seen a later term may have replaced entries above this replica's commit index, so that is then the bound.
func (s *PlanShard) MayBeLost() (entries uint64, known bool) {
	if s.Known == 0 {
		return 0, false
	}
	base := s.Last
	if s.KnownTerm > s.LastTerm {
		base = min(base, max(s.Commit, uint64(s.Applied)))
	}
	return s.Known - min(base, s.Known), true
}

// OpenPlan opens the data directory of a stopped host, and looks into the logs of others, which are data directories or their wal
// directories, of hosts that are stopped or copies. It is for the queues of one tenant, "" is the default one; names selects some of them, nil is all.
func OpenPlan(dir string, others []string, tenant string, names []string) (*Plan, error) {
	s, err := host.OpenSalvage(dir)
	if err != nil {
		return nil, err
	}
	p := &Plan{salvage: s}
	if err := p.fill(others, tenant, names); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return p, nil
}

func (p *Plan) fill(others []string, tenant string, names []string) error {
	list, err := p.salvage.Shards(tenant)
	if err != nil {
		return err
	}
	known, err := lastKnown(others)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, n := range names {
		wanted[n] = true
	}
	found := map[string]bool{}
	for _, s := range list {
		if len(names) > 0 && !wanted[s.Queue.Name] {
			continue
		}
		found[s.Queue.Name] = true
		k := known[s.Shard]
		p.Shards = append(p.Shards, PlanShard{SalvageShard: s, Known: k.last, KnownTerm: k.term})
	}
	for _, n := range names {
		if !found[n] {
			return fmt.Errorf("this host knows no queue %s", n)
		}
	}
	if len(p.Shards) == 0 {
		return errors.New("this host knows no queue of this tenant")
	}
	return nil
}

type known struct{ last, term uint64 }

// lastKnown reads, per shard, how far other logs go. What a log only knows to be committed counts as well.
func lastKnown(dirs []string) (map[uint64]known, error) {
	out := map[uint64]known{}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "wal")); err == nil {
			dir = filepath.Join(dir, "wal")
		}
		r, err := wal.Stats(dir)
		if err != nil {
			return nil, err
		}
		for _, x := range r.Replicas {
			k := out[x.ShardID]
			out[x.ShardID] = known{max(k.last, x.Last, x.Commit), max(k.term, x.Term)}
		}
	}
	return out, nil
}

// Number is what the operator confirms: how many log entries are kept, over all partitions. Of another state of the host it is
// another one.
func (p *Plan) Number() (n uint64) {
	for i := range p.Shards {
		n += p.Shards[i].Last
	}
	return n
}

// Missing names the queues of which this host does not have every partition: they cannot be recovered from it as a whole.
func (p *Plan) Missing() (names []string) {
	for i := range p.Shards {
		s := &p.Shards[i]
		if n := len(names); s.NoCopy() && (n == 0 || names[n-1] != s.Queue.Name) {
			names = append(names, s.Queue.Name)
		}
	}
	return names
}

// Close ends the plan and releases the data directory.
func (p *Plan) Close() error { return p.salvage.Close() }

// Save writes what the plan keeps as a backup: of each queue of which this host has every partition, the state with all that the
// log has. Restoring it is the other half of the recovery.
func (p *Plan) Save(dir string, progress Progress) (*Manifest, error) {
	m, err := newManifest()
	if err != nil {
		return nil, err
	}
	m.Fleet = p.salvage.Fleet()
	if err := prepare(dir); err != nil {
		return nil, err
	}
	missing := map[string]bool{}
	for _, n := range p.Missing() {
		missing[n] = true
	}
	for i := range p.Shards {
		s := &p.Shards[i]
		if missing[s.Queue.Name] {
			continue
		}
		if s.Partition == 0 {
			m.Queues = append(m.Queues, Queue{Name: s.Queue.Name, ID: s.Queue.ID, Options: hex.EncodeToString(queue.AppendQueueOptions(nil, s.Queue.Options)),
				Replicas: s.Queue.Replicas, Witnesses: s.Queue.Witnesses})
		}
		out, err := p.saveShard(s, dir, progress)
		if err != nil {
			return nil, fmt.Errorf("queue %s, partition %d: %w", s.Queue.Name, s.Partition, err)
		}
		q := &m.Queues[len(m.Queues)-1]
		q.Partitions = append(q.Partitions, out)
	}
	if len(m.Queues) == 0 {
		return nil, errors.New("this host has no queue whole: use another host")
	}
	return m, m.write(dir)
}

func (p *Plan) saveShard(s *PlanShard, dir string, progress Progress) (out Partition, err error) {
	work := filepath.Join(dir, "work"+tempSuffix)
	if err := os.RemoveAll(work); err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	err = p.salvage.Stream(s.SalvageShard, work, func(z *queue.Frozen) error {
		var err error
		out, err = writeStream(dir, fileOf(s.Queue.Name, int(s.Partition)), meterOf(progress, s.Queue.Name, int(s.Partition), 0), func(w io.Writer) error {
			return new(swarm.Installer).Save(w, s.Shard, uint64(z.Meta.Applied), z.Meta.FormatLevel, z.Each, nil)
		})
		return err
	})
	out.Salvaged = &Salvaged{Host: p.salvage.HostID(), Replica: uint64(s.Replica), Term: s.Term, AppliedIndex: uint64(s.Applied),
		CommitIndex: s.Commit, LastIndex: s.Last, LastEntryTerm: s.LastTerm}
	return out, err
}
