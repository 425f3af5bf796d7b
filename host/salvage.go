package host

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/lni/dragonboat/v4/raftpb"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/store"
	"github.com/tierq/tierq/wal"
	"github.com/tierq/tierq/witness"
)

// Salvage reads the full replicas of a stopped host, for a forced recovery: when a shard's newest copies are gone for good, what
// this host has is all there is. It takes the data directory's lock, opens the log and the store as a start would, and
// changes neither a replica's log nor its state, so that the host may be started again afterwards.
type Salvage struct {
	dir   string
	lock  *dirLock
	id    identity
	view  *catalog.View
	log   *wal.Log
	store *store.Store
}

// SalvageShard is a full replica of a queue's partition on this host.
type SalvageShard struct {
	Queue     catalog.Queue
	Partition uint32
	Shard     uint64
	Replica   queue.ReplicaID
	Term      uint64 // the greatest the replica has seen
	Applied   queue.Index
	Commit    uint64 // what the replica knew to be committed, as last saved
	Last      uint64 // the last entry of its log
	LastTerm  uint64
}

// OpenSalvage opens the data directory of a stopped host. A host that runs, or a directory that does not know its fleet's queues,
// is refused.
func OpenSalvage(dir string) (_ *Salvage, err error) {
	if _, err := os.Stat(filepath.Join(dir, identityFile)); err != nil {
		return nil, fmt.Errorf("%s is not the data directory of a host: %w", dir, err)
	}
	s := &Salvage{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	if s.id, err = readIdentity(dir); err != nil {
		return nil, err
	}
	if s.id.Role != catalog.HostFull.String() {
		return nil, fmt.Errorf("%s is of a %s host, which holds no messages: use that of a full host", dir, s.id.Role)
	}
	b, err := os.ReadFile(filepath.Join(dir, catalogFile))
	if err != nil {
		return nil, fmt.Errorf("the copy of the catalog, which names the queues: %w", err)
	}
	if s.view, err = catalog.DecodeView(b); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, catalogFile), err)
	}
	s.log, err = wal.Open(wal.Options{Dir: filepath.Join(dir, walDir), HostID: s.id.HostID, WitnessMembership: witness.Membership})
	if err != nil {
		return nil, err
	}
	s.store, err = store.Open(filepath.Join(dir, stateDir), store.Options{})
	return s, err
}

// Close releases everything.
func (s *Salvage) Close() error {
	var errs []error
	if s.store != nil {
		errs = append(errs, s.store.Close())
	}
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.release())
	}
	return errors.Join(errs...)
}

// HostID returns the id of the host, and Fleet that of its fleet.
func (s *Salvage) HostID() uint64 { return s.id.HostID }

// Fleet returns the fleet's id.
func (s *Salvage) Fleet() string { return s.id.Fleet }

// Shards lists the partitions of a tenant's queues, by name and number, as this host last knew them; tenant "" is the default one. A
// partition of which it has no full replica has Replica 0.
func (s *Salvage) Shards(tenant string) ([]SalvageShard, error) {
	var list []SalvageShard
	for _, q := range s.view.Queues(tenant) {
		for number, shard := range q.Shards {
			sh, err := s.shard(q, uint32(number), shard)
			if err != nil {
				return nil, fmt.Errorf("queue %s, partition %d: %w", q.Name, number, err)
			}
			list = append(list, sh)
		}
	}
	slices.SortFunc(list, func(a, b SalvageShard) int {
		return cmp.Or(cmp.Compare(a.Queue.Name, b.Queue.Name), cmp.Compare(a.Partition, b.Partition))
	})
	return list, nil
}

func (s *Salvage) shard(q catalog.Queue, number uint32, shard uint64) (SalvageShard, error) {
	out := SalvageShard{Queue: q, Partition: number, Shard: shard}
	p, _ := s.view.Placement(shard)
	r, ok := p.OnHost(s.id.HostID)
	if !ok || r.Birth == catalog.BirthWitness {
		return out, nil
	}
	rs, err := s.log.ReadRaftState(shard, uint64(r.ID), 0)
	if err != nil {
		return out, nil //nolint:nilerr // it was placed here and never started
	}
	h, err := s.store.Shard(shard)
	if err != nil {
		return out, err
	}
	m, err := queue.Open(h, queue.Options{})
	if err != nil {
		return out, err
	}
	out.Replica, out.Applied, out.Term, out.Commit = r.ID, m.Meta().Applied, rs.State.Term, rs.State.Commit
	out.Last, out.LastTerm, err = s.lastEntry(shard, uint64(r.ID))
	out.Last = max(out.Last, uint64(out.Applied))
	return out, err
}

func (s *Salvage) lastEntry(shard, replica uint64) (index, term uint64, err error) {
	ss, err := s.log.GetSnapshot(shard, replica)
	if err != nil {
		return 0, 0, err
	}
	rs, err := s.log.ReadRaftState(shard, replica, ss.Index)
	if err != nil || rs.EntryCount == 0 {
		return ss.Index, ss.Term, err
	}
	last := rs.FirstIndex + rs.EntryCount - 1
	list, _, err := s.log.IterateEntries(nil, 0, shard, replica, last, last+1, math.MaxUint64)
	if err != nil || len(list) != 1 {
		return last, 0, errors.Join(err, fmt.Errorf("the log's last entry %d cannot be read", last))
	}
	return last, list[0].Term, nil
}

// tailBytes bounds the entries that are read from the log at once.
const tailBytes = 4 << 20

// Stream rebuilds a replica's state beside the host's own, in a directory that must not exist and is left for the caller to remove:
// a copy of what the store holds, on which all of the log's entries behind it are applied, committed or not. What was answered
// is among them, as far as it reached this host. save then gets the state.
func (s *Salvage) Stream(sh SalvageShard, work string, save func(*queue.Frozen) error) (err error) {
	st, err := store.Open(work, store.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	if err := s.copyState(sh.Shard, st); err != nil {
		return err
	}
	h, err := st.Shard(sh.Shard)
	if err != nil {
		return err
	}
	m, err := queue.Open(h, queue.Options{})
	if err != nil {
		return err
	}
	if err := s.applyTail(sh, m); err != nil {
		return err
	}
	if err := begin(sh, m); err != nil {
		return err
	}
	z := m.Freeze()
	return errors.Join(save(z), z.Close())
}

// begin gives a shard that has applied nothing yet its options, so that there is a state to save.
func begin(sh SalvageShard, m *queue.QueueStateMachine) error {
	if m.Meta().Applied > 0 {
		return nil
	}
	o := sh.Queue.Options
	o.Partition, o.Version = sh.Partition, m.Meta().Options.Version
	cmd, err := queue.EncodeCommand(nil, &queue.Retention{Options: &o})
	if err == nil {
		_, err = m.Apply(1, cmd)
	}
	return err
}

func (s *Salvage) copyState(shard uint64, to *store.Store) error {
	from, err := s.store.Shard(shard)
	if err != nil {
		return err
	}
	h, err := to.Shard(shard)
	if err != nil {
		return err
	}
	into, err := h.BeginInstall()
	if err != nil {
		return err
	}
	snap := from.Snapshot()
	defer func() { _ = snap.Close() }()
	it, err := snap.NewIter(nil, nil)
	if err != nil {
		return errors.Join(err, into.Abort())
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var v []byte
		if v, err = it.Value(); err == nil {
			err = into.Set(it.Key(), v)
		}
	}
	if err = errors.Join(err, it.Err(), it.Close()); err != nil {
		return errors.Join(err, into.Abort())
	}
	return into.Finish()
}

// applyTail applies the log's entries above what the store held.
func (s *Salvage) applyTail(sh SalvageShard, m *queue.QueueStateMachine) error {
	for next := uint64(sh.Applied) + 1; next <= sh.Last; {
		list, _, err := s.log.IterateEntries(nil, 0, sh.Shard, uint64(sh.Replica), next, sh.Last+1, tailBytes)
		if err != nil {
			return err
		}
		if len(list) == 0 {
			return fmt.Errorf("the log of shard %d has no entry %d: it is not the log that belongs to this store", sh.Shard, next)
		}
		for i := range list {
			if list[i].Index != next {
				return fmt.Errorf("the log of shard %d has entry %d where %d is due", sh.Shard, list[i].Index, next)
			}
			cmd, err := payload(&list[i])
			if err == nil && cmd != nil {
				_, err = m.Apply(queue.Index(next), cmd)
			}
			if err != nil {
				return fmt.Errorf("entry %d of shard %d: %w", next, sh.Shard, err)
			}
			next++
		}
	}
	return nil
}

// payload returns the command in an entry, nil for those that are the engine's own.
func payload(e *raftpb.Entry) ([]byte, error) {
	switch {
	case e.IsConfigChange() || e.IsEmpty():
		return nil, nil
	case e.Type == raftpb.ApplicationEntry:
		return e.Cmd, nil
	case e.Type == raftpb.EncodedEntry && e.Cmd[0] == 0: // version 0, not compressed, no session
		return e.Cmd[1:], nil
	}
	return nil, fmt.Errorf("its type %v, header % x, is not one that this version writes", e.Type, e.Cmd[:min(len(e.Cmd), 1)])
}
