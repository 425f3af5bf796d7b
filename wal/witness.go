package wal

import (
	"fmt"

	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

// A witness's log holds no payloads: the leader sends it metadata entries, an index and a term each,
// and config changes whole. The log keeps the former as runs of one term, so what it holds grows with
// elections and membership changes alone.
//
// dragonboat never lets a witness take a snapshot, so at every start it would put all of that log
// through its state machine, one entry at a time. Instead the log presents, at open, a witness
// snapshot at the persisted commit index, as the leader would have sent it. Its membership is that
// of the newest snapshot before it, with the committed config changes applied by dragonboat's own
// rules: a config change that committed may still have been rejected. It is made once, at open, and does
// not move while dragonboat runs; the one in the log, if newer, wins.
//
// It becomes a snapshot record like any other with the replica's next write, in the same batch with
// the meta record that says that the entries below it are gone: dragonboat compacts a log up to a
// snapshot, and without the record nothing would be left to start the membership from. Until then a meta record says
// what was compacted before.

// synthesizeWitnesses makes a snapshot for every replica that is a witness. Log.mu is not needed yet.
func (l *Log) synthesizeWitnesses() error {
	if l.o.WitnessMembership == nil {
		return nil
	}
	for _, r := range l.replicas {
		if !r.isWitness() {
			continue
		}
		if err := l.synthesize(r); err != nil {
			return err
		}
	}
	return nil
}

// synthesize makes r's snapshot at the commit index, if there is something to make it of.
func (l *Log) synthesize(r *replica) error {
	old, err := r.snapshot()
	if err != nil {
		return err
	}
	index := min(r.m.state.Commit, r.m.last)
	if !r.m.hasState || index <= old.Index || index <= r.m.compactedTo || r.m.compactedTo > old.Index {
		return nil
	}
	changes, term, err := l.witnessChanges(r, old.Index, index)
	if err != nil || term == 0 {
		return err
	}
	members, err := l.o.WitnessMembership(old.Membership, changes)
	if err != nil || members.ConfigChangeId == 0 || len(members.Addresses) == 0 {
		// Its log is whole: it starts slower, and what is wrong with it is that shard's trouble alone.
		l.logger.Warn("a witness has no membership to make a snapshot of and replays its log",
			zap.Uint64("shard", r.key.shardID), zap.Uint64("replica", r.key.replicaID),
			zap.Uint64("index", index), zap.Error(err))
		return nil
	}
	ss := raftpb.Snapshot{ShardID: r.key.shardID, Index: index, Term: term, Membership: members,
		Witness: true, Type: r.smType(old.Type)}
	if r.snap, err = ss.Marshal(); err != nil {
		return fmt.Errorf("wal: marshal snapshot record: %w", err)
	}
	r.snapIndex = index
	r.made, r.madeFrom = true, r.m.compactedTo
	r.compactTo(index)
	r.snapDirty, r.metaDirty = true, true
	l.markDirtyLocked(r)
	return nil
}

// smType is the state machine's type: the bootstrap record's, or else what the older snapshot says.
func (r *replica) smType(old raftpb.StateMachineType) raftpb.StateMachineType {
	var b raftpb.Bootstrap
	if r.boot != nil && b.Unmarshal(r.boot) == nil && b.Type != raftpb.UnknownStateMachine {
		return b.Type
	}
	return old
}

// witnessChanges returns the config changes in (after, index], and the term of the entry at index, which
// is 0 if an entry is neither a config change nor bare metadata: then the replica is no witness.
func (l *Log) witnessChanges(r *replica, after, index uint64) (changes []raftpb.Entry, term uint64, err error) {
	for i := range r.spans {
		s := &r.spans[i]
		if s.first > index {
			break
		}
		if s.isRun() {
			term = s.aux
			continue
		}
		body, err := l.recordBody(s, nil, r.key)
		if err != nil {
			return nil, 0, err
		}
		whole := true
		err = decodeEntries(body, func(e *raftpb.Entry) bool {
			if e.Index < s.first || e.Index > min(s.last(), index) {
				return true
			}
			whole = whole && e.IsConfigChange()
			term = e.Term
			if e.Index > after {
				c := *e
				c.Cmd = append([]byte(nil), e.Cmd...)
				changes = append(changes, c)
			}
			return true
		})
		if err != nil {
			return nil, 0, s.seg.corrupt(int64(s.off), r.key, err.Error())
		}
		if !whole {
			return nil, 0, nil
		}
	}
	return changes, term, nil
}
