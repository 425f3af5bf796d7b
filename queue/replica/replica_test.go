package replica_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	sm "github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/replica"
	"github.com/tierq/tierq/queue/store"
)

const t0 queue.Stamp = 1_700_000_000_000

// plain is an Installer without checksums.
type plain struct{ fail error }

func (p plain) Save(w io.Writer, _, index uint64, _ uint32, each func(func(key, value []byte) error) error, _ <-chan struct{}) error {
	if p.fail != nil {
		return p.fail
	}
	if _, err := w.Write(binary.BigEndian.AppendUint64(nil, index)); err != nil {
		return err
	}
	return each(func(key, value []byte) error {
		b := binary.BigEndian.AppendUint32(nil, uint32(len(key)))
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(value))), key...)
		_, err := w.Write(append(b, value...))
		return err
	})
}

func (p plain) Load(r io.Reader, _ uint64, set func(key, value []byte) error, _ <-chan struct{}) (uint64, error) {
	b, err := io.ReadAll(r)
	if err != nil || len(b) < 8 {
		return 0, errors.Join(err, io.ErrUnexpectedEOF)
	}
	index, b := binary.BigEndian.Uint64(b), b[8:]
	for len(b) > 0 {
		k, v := binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
		if err := set(b[8:8+k], b[8+k:8+k+v]); err != nil {
			return 0, err
		}
		b = b[8+k+v:]
	}
	return index, nil
}

// rig is a replica driven by hand.
type rig struct {
	*replica.Replica
	stop    chan struct{}
	stuck   chan error
	applied []queue.Applied
	index   uint64
}

func newRig(t *testing.T, change func(*replica.Options)) *rig {
	t.Helper()
	st, err := store.Open("store", store.Options{FS: vfs.NewMem(), MemTableBytes: 4 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, st.Close()) })
	r := &rig{stop: make(chan struct{}), stuck: make(chan error, 1)}
	opts := replica.Options{Store: st, Installer: plain{}, EvidenceDir: t.TempDir(),
		OnApplied: func(_, _ uint64, a queue.Applied) { r.applied = append(r.applied, a) },
		OnStuck:   func(_, _ uint64, err error, _ string) { r.stuck <- err },
	}
	if change != nil {
		change(&opts)
	}
	r.Replica = replica.New(7, 1, opts)
	at, err := r.Open(r.stop)
	require.NoError(t, err)
	require.Zero(t, at)
	return r
}

func (r *rig) entries(t *testing.T, cmds ...queue.Command) []sm.Entry {
	t.Helper()
	var list []sm.Entry
	for _, c := range cmds {
		b, err := queue.EncodeCommand(nil, c)
		require.NoError(t, err)
		r.index++
		list = append(list, sm.Entry{Index: r.index, Cmd: b})
	}
	return list
}

func publish(body string) *queue.Enqueue {
	return &queue.Enqueue{Stamp: t0, Publishes: []queue.Publish{{Messages: []queue.Message{{Body: []byte(body)}}}}}
}

func TestUpdateAnswersAndTells(t *testing.T) {
	r := newRig(t, nil)
	in := r.entries(t, publish("a"), &queue.Home{Stamp: t0, Group: 9, NewHome: 1}, publish("b"))
	out, err := r.Update(in)
	require.NoError(t, err)
	require.EqualValues(t, code.OK, out[0].Result.Value)
	require.EqualValues(t, code.UnknownGroup, out[1].Result.Value, "a refusal is a result")
	result, err := queue.DecodeResult(out[2].Result.Data)
	require.NoError(t, err)
	require.Equal(t, queue.Index(3), result.Index)
	require.Equal(t, []queue.Applied{{Index: 3, Last: 2, Appended: true}}, r.applied)
	out, err = r.Update(in[2:])
	require.NoError(t, err)
	require.EqualValues(t, code.Unknown, out[0].Result.Value, "an index at or below the applied one cannot be told")
	require.Equal(t, queue.Address(2), r.Reader().Meta().Last)
	require.Len(t, r.applied, 1)
	last, err := r.Lookup(func(q queue.Reader) any { return q.Meta().Last })
	require.NoError(t, err)
	require.Equal(t, queue.Address(2), last)
	_, err = r.Lookup("last?")
	require.Error(t, err)
}

// TestPoisonStopsOneReplica: Update waits to be stopped, and nothing of the entry or of what follows is applied.
func TestPoisonStopsOneReplica(t *testing.T) {
	var evidence string
	dir := t.TempDir()
	r := newRig(t, func(o *replica.Options) {
		o.EvidenceDir = dir
		was := o.OnStuck
		o.OnStuck = func(s, p uint64, err error, path string) { evidence = path; was(s, p, err, path) }
	})
	in := r.entries(t, publish("a"), publish("poison"), publish("b"))
	in[1].Cmd = []byte{1, 99, 0}
	done := make(chan []sm.Entry)
	go func() {
		out, err := r.Update(in)
		if err != nil {
			out = nil
		}
		done <- out
	}()
	err := <-r.stuck
	var poison *queue.PoisonError
	require.ErrorAs(t, err, &poison)
	require.Equal(t, queue.Index(2), poison.Index)
	select {
	case <-done:
		t.Fatal("Update returned before the replica was stopped")
	default:
	}
	close(r.stop)
	out := <-done
	require.Len(t, out, 3)
	require.EqualValues(t, code.OK, out[0].Result.Value)
	require.Zero(t, out[1].Result.Value)
	require.Zero(t, out[2].Result.Value)
	require.Equal(t, queue.Index(1), r.Reader().Meta().Applied)
	text, err := os.ReadFile(evidence)
	require.NoError(t, err)
	require.Contains(t, string(text), "entry: 016300")
	out, err = r.Update(r.entries(t, publish("c")))
	require.NoError(t, err)
	require.Zero(t, out[0].Result.Value)
	// dragonboat counts the entry as applied: it must neither record nor stream that.
	require.Equal(t, replica.EngineOutOfDate, r.Sync())
	ctx, err := r.PrepareSnapshot()
	require.NoError(t, err)
	require.Equal(t, sm.ErrSnapshotStopped, r.SaveSnapshot(ctx, io.Discard, nil))
}

func TestSnapshotMovesTheState(t *testing.T) {
	a, b := newRig(t, nil), newRig(t, nil)
	_, err := a.Update(a.entries(t, publish("a"), publish("b")))
	require.NoError(t, err)
	ctx, err := a.PrepareSnapshot()
	require.NoError(t, err)
	_, at2, err := a.Machine().Digest()
	require.NoError(t, err)
	_, err = a.Update(a.entries(t, publish("later")))
	require.NoError(t, err)
	var stream bytes.Buffer
	require.NoError(t, a.SaveSnapshot(ctx, &stream, nil))
	_, err = b.Update(b.entries(t, publish("own")))
	require.NoError(t, err)
	before := b.Machine().Shard().Incarnation()
	require.NoError(t, b.RecoverFromSnapshot(&stream, b.stop))
	require.Greater(t, b.Machine().Shard().Incarnation(), before)
	index, digest, err := b.Machine().Digest()
	require.NoError(t, err)
	require.Equal(t, queue.Index(2), index)
	require.Equal(t, at2, digest, "the incarnation is in no digest")
	require.NoError(t, b.Machine().Check())
	b.index = 2
	_, err = b.Update(b.entries(t, publish("later")))
	require.NoError(t, err)
	_, da, _ := a.Machine().Digest()
	_, db, _ := b.Machine().Digest()
	require.Equal(t, da, db)
}

func TestSaveMapsItsErrors(t *testing.T) {
	r := newRig(t, func(o *replica.Options) { o.Installer = plain{fail: errors.New("no")} })
	ctx, _ := r.PrepareSnapshot()
	require.Equal(t, sm.ErrSnapshotAborted, r.SaveSnapshot(ctx, io.Discard, nil))
	ctx, _ = r.PrepareSnapshot()
	stop := make(chan struct{})
	close(stop)
	require.Equal(t, sm.ErrSnapshotStopped, r.SaveSnapshot(ctx, io.Discard, stop))
	r = newRig(t, nil)
	ctx, _ = r.PrepareSnapshot()
	require.Equal(t, sm.ErrSnapshotStreaming, r.SaveSnapshot(ctx, failing{}, nil), "the writer's error comes back as it is")
	r = newRig(t, func(o *replica.Options) { o.MaySave = func(_, _ uint64) error { return errors.New("no slot") } })
	ctx, _ = r.PrepareSnapshot()
	require.Equal(t, sm.ErrSnapshotAborted, r.SaveSnapshot(ctx, io.Discard, nil))
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, sm.ErrSnapshotStreaming }

// TestFailedInstallKeepsTheOldState: it waits to be stopped, and may be tried again.
func TestFailedInstallKeepsTheOldState(t *testing.T) {
	r := newRig(t, nil)
	_, err := r.Update(r.entries(t, publish("a")))
	require.NoError(t, err)
	_, want, _ := r.Machine().Digest()
	done, stop := make(chan error), make(chan struct{})
	go func() { done <- r.RecoverFromSnapshot(bytes.NewReader([]byte{1, 2}), stop) }()
	require.Error(t, <-r.stuck)
	close(stop)
	require.Equal(t, sm.ErrSnapshotStopped, <-done)
	_, got, err := r.Machine().Digest()
	require.NoError(t, err)
	require.Equal(t, want, got)
	// A stream whose keys are of another index than it says is refused before it replaces anything.
	other := newRig(t, nil)
	_, err = other.Update(other.entries(t, publish("x"), publish("y")))
	require.NoError(t, err)
	ctx, err := other.PrepareSnapshot()
	require.NoError(t, err)
	var stream bytes.Buffer
	require.NoError(t, other.SaveSnapshot(ctx, &stream, nil))
	binary.BigEndian.PutUint64(stream.Bytes(), 9)
	stop = make(chan struct{})
	incarnation := r.Machine().Shard().Incarnation()
	go func() { done <- r.RecoverFromSnapshot(&stream, stop) }()
	require.ErrorContains(t, <-r.stuck, "its keys say")
	close(stop)
	require.Equal(t, sm.ErrSnapshotStopped, <-done)
	require.Equal(t, incarnation, r.Machine().Shard().Incarnation())
	_, got, err = r.Machine().Digest()
	require.NoError(t, err)
	require.Equal(t, want, got)
	stale := bytes.NewReader(binary.BigEndian.AppendUint64(nil, 1))
	require.NoError(t, r.RecoverFromSnapshot(stale, nil), "a stream that is not newer changes nothing")
	_, got, _ = r.Machine().Digest()
	require.Equal(t, want, got)
}

func TestCheckpointSnapshotStandsAtItsEntry(t *testing.T) {
	var at queue.Index
	var keys int
	r := newRig(t, func(o *replica.Options) {
		o.OnCheckpoint = func(_, _, id uint64, index queue.Index, s *store.Snapshot) {
			defer s.Close()
			at = index
			it, err := s.NewIter(nil, nil)
			if err != nil {
				return
			}
			for ok := it.First(); ok; ok = it.Next() {
				keys++
			}
			_ = it.Close()
		}
	})
	_, err := r.Update(r.entries(t, publish("a"), &queue.Retention{Stamp: t0, CheckpointID: 5}, publish("b")))
	require.NoError(t, err)
	require.Equal(t, queue.Index(2), at)
	require.Equal(t, 3, keys, "meta, one message, one count")
}

// TestUpdateTellsOfExports: what single entries of an Update changed is told together, each group once.
func TestUpdateTellsOfExports(t *testing.T) {
	r := newRig(t, nil)
	config := queue.GroupConfig{DeadLetterQueue: "dead"}
	config.EnsureDefaults()
	die := func(a queue.Address) *queue.Expire {
		return &queue.Expire{Stamp: t0, Group: 1, Epoch: 1, Entries: []queue.ExpireEntry{{Kind: queue.ExpireDead, Address: a, Attempts: 1}}}
	}
	_, err := r.Update(r.entries(t, &queue.Group{Stamp: t0, Op: queue.GroupCreate, OperationID: 1, Name: "g", Config: config, FirstHome: 1},
		publish("a"), publish("b"), die(1), die(2), publish("c")))
	require.NoError(t, err)
	require.Equal(t, []queue.Applied{{Index: 6, Last: 3, Appended: true, Groups: []queue.GroupID{1}, Exports: []queue.GroupID{1}}}, r.applied)
}
