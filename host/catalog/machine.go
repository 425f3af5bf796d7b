package catalog

import (
	"fmt"
	"io"
	"sync"

	"github.com/lni/dragonboat/v4/statemachine"
)

// Machine makes the catalog's state machine and lets its host read it. One Machine serves one replica on one host, also
// over a stop and a new start of it.
type Machine struct {
	// OnChange is called after a change, in the apply goroutine: it must not block. May be nil.
	OnChange func()
	// OnPoison is called once, in the apply goroutine, when a committed entry cannot be decoded, before the apply waits
	// for Release: the caller then stops the replica from another goroutine and calls Release. It must not block.
	OnPoison func(error)

	mu      sync.Mutex // guards current, and apply against Seal
	current *State
	release chan struct{}
}

// Create is dragonboat's CreateStateMachineFunc.
func (m *Machine) Create(shardID, replicaID uint64) statemachine.IStateMachine {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.current = NewState()
	m.release = make(chan struct{})
	return &machine{owner: m, state: m.current, release: m.release}
}

// View returns the catalog as it was last applied on this host, nil before the replica was created.
func (m *Machine) View() *View {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.current == nil {
		return nil
	}
	return m.current.Seal()
}

// Release lets a poisoned apply return, after the replica was stopped. It may be called more than once.
func (m *Machine) Release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.release == nil {
		return
	}
	select {
	case <-m.release:
	default:
		close(m.release)
	}
}

// machine adapts a State to dragonboat's regular, in-memory state machine.
type machine struct {
	owner    *Machine
	state    *State
	release  chan struct{}
	poisoned bool
}

// Update applies one entry. An entry that cannot be decoded is not applied, ever: a newer version wrote it, and to skip it
// would make this replica differ from the others.
func (m *machine) Update(entry statemachine.Entry) (statemachine.Result, error) {
	c, err := Decode(entry.Cmd)
	if err != nil || m.poisoned {
		m.poison(entry.Index, err)
		return statemachine.Result{}, nil
	}
	m.owner.mu.Lock()
	before := m.state.d.version
	r := m.state.Apply(entry.Index, c)
	changed := m.state.d.version != before
	m.owner.mu.Unlock()
	if changed && m.owner.OnChange != nil {
		m.owner.OnChange()
	}
	return statemachine.Result{Value: uint64(r.Code), Data: EncodeResult(r)}, nil
}

func (m *machine) poison(index uint64, err error) {
	if !m.poisoned {
		m.poisoned = true
		if m.owner.OnPoison != nil {
			m.owner.OnPoison(fmt.Errorf("catalog entry %d: %w", index, err))
		}
	}
	<-m.release
}

// Lookup returns the *View of the applied state; the query is ignored.
func (m *machine) Lookup(any) (any, error) {
	m.owner.mu.Lock()
	defer m.owner.mu.Unlock()
	return m.state.Seal(), nil
}

// SaveSnapshot writes the encoded view. A poisoned machine refuses, as the engine would record an index that it has not applied.
func (m *machine) SaveSnapshot(w io.Writer, _ statemachine.ISnapshotFileCollection, _ <-chan struct{}) error {
	if m.poisoned {
		return statemachine.ErrSnapshotAborted
	}
	m.owner.mu.Lock()
	v := m.state.Seal()
	m.owner.mu.Unlock()
	_, err := w.Write(EncodeView(v))
	return err
}

// RecoverFromSnapshot replaces the state. An error stops the process: the engine has no other copy.
func (m *machine) RecoverFromSnapshot(r io.Reader, _ []statemachine.SnapshotFile, _ <-chan struct{}) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("read the catalog's snapshot: %w", err)
	}
	d, err := decodeData(b)
	if err != nil {
		return err
	}
	m.owner.mu.Lock()
	m.state.d = d
	m.state.view.Store(nil)
	m.owner.mu.Unlock()
	if m.owner.OnChange != nil {
		m.owner.OnChange()
	}
	return nil
}

// Close has nothing to close.
func (m *machine) Close() error { return nil }
