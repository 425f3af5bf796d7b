package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue"
)

const identityFile = "identity.json"

const identityVersion = 1

// placeFile says where the data directory was at the last start: a copy of it is elsewhere.
const placeFile = "place"

// placeOf names a directory on its machine: a line with the machine's name and the directory's device and inode.
func placeOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", fmt.Errorf("look at the data directory %s: %w", dir, err)
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("the machine's name: %w", err)
	}
	return fmt.Sprintf("1 %q %d %d\n", name, st.Dev, st.Ino), nil
}

// identity is what a data directory belongs to. The fleet is empty until the host has learned it.
type identity struct {
	Version int
	HostID  uint64
	Role    string
	Fleet   string
	// Incarnation is a random number of this directory; a host that comes back with another one has lost its data. 0 in directories from
	// before there were any.
	Incarnation uint64 `json:",omitempty"`
	// Catalog are the catalog's members as they were when the fleet was formed: replica ids, hosts and births.
	Catalog  []identityMember `json:",omitempty"`
	Checksum uint32           // CRC-32C of the same with Checksum 0
}

type identityMember struct {
	Replica uint64
	HostID  uint64
	Birth   uint8
}

var crcTable = crc32.MakeTable(crc32.Castagnoli)

func (id identity) encode() ([]byte, error) {
	id.Checksum = 0
	b, err := json.Marshal(id)
	if err != nil {
		return nil, err
	}
	id.Checksum = crc32.Checksum(b, crcTable)
	return json.MarshalIndent(id, "", "  ")
}

// members returns the catalog's members.
func (id identity) members() []catalog.Replica {
	var rs []catalog.Replica
	for _, m := range id.Catalog {
		rs = append(rs, catalog.Replica{ID: queue.ReplicaID(m.Replica), HostID: m.HostID, Birth: catalog.Birth(m.Birth)})
	}
	return rs
}

func (id *identity) setMembers(rs []catalog.Replica) {
	id.Catalog = nil
	for _, r := range rs {
		id.Catalog = append(id.Catalog, identityMember{Replica: uint64(r.ID), HostID: r.HostID, Birth: uint8(r.Birth)})
	}
}

// openIdentity reads the identity of a data directory, or writes that of a new one, and refuses another host's.
func openIdentity(dir string, self HostSpec) (identity, error) {
	id, err := readIdentity(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := checkUnused(dir); err != nil {
			return identity{}, err
		}
		id = identity{Version: identityVersion, HostID: self.ID, Role: self.Role.String(), Incarnation: rand.Uint64() | 1}
		return id, writeIdentity(dir, id)
	}
	if err != nil {
		return identity{}, err
	}
	if id.HostID != self.ID {
		return identity{}, fmt.Errorf("data directory %s belongs to host %d, but this is host %d: use the directory of host %d, or configure this host as %d",
			dir, id.HostID, self.ID, self.ID, id.HostID)
	}
	if id.Role != self.Role.String() {
		return identity{}, fmt.Errorf("data directory %s belongs to a %s host, but host %d is configured as %v: a host never changes its role",
			dir, id.Role, self.ID, self.Role)
	}
	if id.Incarnation == 0 {
		id.Incarnation = rand.Uint64() | 1
		return id, writeIdentity(dir, id)
	}
	return id, nil
}

// checkUnused refuses a directory that holds data and no identity: it lost the file that says whose they are.
func checkUnused(dir string) error {
	for _, sub := range []string{raftDir, walDir, stateDir, journalFile} {
		found, err := exists(filepath.Join(dir, sub))
		if err != nil {
			return fmt.Errorf("look into the data directory: %w", err)
		}
		if found {
			return fmt.Errorf("data directory %s has data but no %s: restore that file, or replace this host with a fresh one", dir, identityFile)
		}
	}
	return nil
}

func readIdentity(dir string) (identity, error) {
	path := filepath.Join(dir, identityFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return identity{}, fmt.Errorf("read the host's identity: %w", err)
	}
	var id identity
	if err := json.Unmarshal(b, &id); err != nil {
		return identity{}, fmt.Errorf("%s is damaged, restore it: %w", path, err)
	}
	if id.Version != identityVersion {
		return identity{}, fmt.Errorf("%s has version %d, which this binary does not know: upgrade", path, id.Version)
	}
	sum := id.Checksum
	id.Checksum = 0
	body, err := json.Marshal(id)
	if err != nil {
		return identity{}, err
	}
	if crc32.Checksum(body, crcTable) != sum {
		return identity{}, fmt.Errorf("%s does not match its checksum: restore it", path)
	}
	return id, nil
}

// writeIdentity replaces the identity, durably.
func writeIdentity(dir string, id identity) error {
	b, err := id.encode()
	if err != nil {
		return fmt.Errorf("write the host's identity: %w", err)
	}
	return replaceFile(filepath.Join(dir, identityFile), append(b, '\n'))
}

// replaceFile replaces path, durably: after a crash there is the old content or the new one, whole.
func replaceFile(path string, b []byte) error {
	next := path + ".next"
	if err := writeSynced(next, b); err != nil {
		return fmt.Errorf("write %s: %w", next, err)
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(path))
}
