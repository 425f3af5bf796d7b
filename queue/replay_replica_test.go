package queue_test

import (
	"bytes"
	"encoding/gob"
	"io"
	"testing"

	sm "github.com/lni/dragonboat/v4/statemachine"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
	"github.com/tierq/tierq/queue/replica"
)

// gobInstaller streams a key space as gob: what is tested is the state, not the stream.
type gobInstaller struct{}

func (gobInstaller) Save(w io.Writer, _, index uint64, _ uint32, each func(func(key, value []byte) error) error, _ <-chan struct{}) error {
	e := gob.NewEncoder(w)
	if err := e.Encode(index); err != nil {
		return err
	}
	return each(func(key, value []byte) error { return e.Encode([2][]byte{key, value}) })
}

func (gobInstaller) Load(r io.Reader, _ uint64, set func(key, value []byte) error, _ <-chan struct{}) (index uint64, err error) {
	d := gob.NewDecoder(r)
	if err := d.Decode(&index); err != nil {
		return 0, err
	}
	for {
		var pair [2][]byte
		if err := d.Decode(&pair); err != nil {
			if err == io.EOF {
				return index, nil
			}
			return 0, err
		}
		if err := set(pair[0], pair[1]); err != nil {
			return 0, err
		}
	}
}

// update applies entries up to an index in Updates of random size. Each Update may begin with entries that were
// applied before; those are answered with code.Unknown.
func (r *recording) update(t *rapid.T, x *replica.Replica, to queue.Index) {
	for at := x.Machine().Meta().Applied; at < to; at = x.Machine().Meta().Applied {
		first := at + 1 - queue.Index(rapid.IntRange(0, min(2, int(at))).Draw(t, "again"))
		last := min(to, at+queue.Index(rapid.IntRange(1, 9).Draw(t, "batch")))
		var entries []sm.Entry
		for i := first; i <= last; i++ {
			entries = append(entries, sm.Entry{Index: uint64(i), Cmd: bytes.Clone(r.commands[i-1])})
		}
		out, err := x.Update(entries)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range out {
			i := queue.Index(e.Index)
			if i <= at && e.Result.Value != uint64(code.Unknown) {
				t.Fatalf("%s was applied before and is answered %x", i, e.Result.Value)
			}
			if i > at && string(e.Result.Data) != r.results[i-1] {
				t.Fatalf("%s is answered otherwise in a batch", i)
			}
		}
		r.same(t, x.Machine())
	}
}

// TestReplayThroughReplica applies one run of commands through the adapter in batches of any size, streams the state
// in the middle to a replica that had one of its own, and goes on with both (G7).
func TestReplayThroughReplica(t *testing.T) {
	machines := newShards(t)
	rapid.Check(t, func(rt *rapid.T) {
		r := record(rt, machines.open())
		open := func() *replica.Replica {
			machines.next++
			x := replica.New(machines.next, 1, replica.Options{Store: machines.st, Installer: gobInstaller{}})
			if _, err := x.Open(nil); err != nil {
				rt.Fatal(err)
			}
			return x
		}
		sender, receiver := open(), open()
		middle := queue.Index(rapid.IntRange(1, len(r.commands)).Draw(rt, "install at"))
		r.update(rt, sender, middle)
		r.update(rt, receiver, queue.Index(rapid.IntRange(0, int(middle)-1).Draw(rt, "behind at")))
		moment, err := sender.PrepareSnapshot()
		if err != nil {
			rt.Fatal(err)
		}
		r.update(rt, sender, r.end()) // the stream is of the moment, whatever comes after
		var stream bytes.Buffer
		if err := sender.SaveSnapshot(moment, &stream, nil); err != nil {
			rt.Fatal(err)
		}
		if err := receiver.RecoverFromSnapshot(&stream, nil); err != nil {
			rt.Fatal(err)
		}
		if i, _ := r.same(rt, receiver.Machine()); i != middle {
			rt.Fatalf("installed %s, want %s", i, middle)
		}
		r.update(rt, receiver, r.end())
		if err := receiver.Machine().Check(); err != nil {
			rt.Fatal(err)
		}
	})
}
