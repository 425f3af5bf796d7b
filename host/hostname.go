package host

import (
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/lni/dragonboat/v4/raftpb"
)

// The engine keeps its data in <dir>/<hostname>/…, records that hostname in <dir>/dragonboat.ds, and refuses
// to start, or starts on an empty directory, once the machine has another name: a container's has one at each
// start. It has no option for it, so the data are moved to the new name before the engine looks.

// statusFile is the engine's record of what a data directory belongs to: statusHashBytes of a checksum, then a
// raftpb.RaftDataStatus.
const (
	statusFile      = "dragonboat.ds"
	statusHashBytes = 8
)

// AdoptHostname makes the engine's data in dir, a NodeHostDir or WALDir, those of this machine's present
// hostname. It returns the name that they were kept under if that was another one, else "", also for a
// directory that the engine has never used.
//
// The caller must hold the lock of the data directory, and call it before NewNodeHost. A crash in the middle
// leaves a directory that the next call completes. On an error the data are as they were, or half way to where
// the next call takes them; the error says what an operator has to look at.
func AdoptHostname(dir string) (former string, err error) {
	hostname, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("adopt hostname: %w", err)
	}
	return adoptHostname(dir, hostname)
}

func adoptHostname(dir, hostname string) (former string, err error) {
	if err := checkHostname(hostname); err != nil {
		return "", err
	}
	path := filepath.Join(dir, statusFile)
	status, err := readStatus(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	// Exactly: the engine forgives another case in the record, and then opens a directory of that case.
	if status.Hostname == "" || status.Hostname == hostname {
		return "", nil
	}
	// The data move first. If the record did, a crash before the move would give the engine an empty directory
	// under a name that it has no reason to doubt.
	former = status.Hostname
	if err := moveHostDir(dir, former, hostname); err != nil {
		return "", err
	}
	status.Hostname = hostname
	if err := writeStatus(path, status); err != nil {
		return "", err
	}
	return former, nil
}

// checkHostname refuses a name that cannot be one directory's; the engine panics on an empty one.
func checkHostname(name string) error {
	if name != filepath.Base(name) || name == "." || name == ".." {
		return fmt.Errorf("adopt hostname: %q cannot be a directory name: give this machine a hostname", name)
	}
	return nil
}

// moveHostDir renames <dir>/<from> to <dir>/<to>, durably. That only <to> exists means that an earlier call
// did it.
func moveHostDir(dir, from, to string) error {
	if err := checkHostname(from); err != nil {
		return err
	}
	oldPath, newPath := filepath.Join(dir, from), filepath.Join(dir, to)
	hasOld, err := exists(oldPath)
	if err != nil {
		return err
	}
	hasNew, err := exists(newPath)
	if err != nil {
		return err
	}
	switch {
	case hasOld && hasNew:
		return fmt.Errorf("adopt hostname: both %s and %s exist, and %s names the first: move away the one that is left over from a failed start", oldPath, newPath, statusFile)
	case !hasOld && !hasNew:
		return fmt.Errorf("adopt hostname: %s says that the data are in %s, which does not exist: restore it, or replace this host with a fresh one", statusFile, oldPath)
	case hasOld:
		if err := os.Rename(oldPath, newPath); err != nil {
			return fmt.Errorf("adopt hostname: %w", err)
		}
	}
	// Also when an earlier call renamed: it may have died before its sync.
	return syncDirectory(dir)
}

func readStatus(path string) (raftpb.RaftDataStatus, error) {
	var status raftpb.RaftDataStatus
	data, err := os.ReadFile(path)
	if err != nil {
		return status, fmt.Errorf("adopt hostname: %w", err)
	}
	if len(data) < statusHashBytes || !bytes.Equal(data[:statusHashBytes], statusHash(data[statusHashBytes:])) {
		return status, fmt.Errorf("adopt hostname: %s does not match its checksum: if this host has never served, remove its data directory and start again, else restore the file", path)
	}
	if err := status.Unmarshal(data[statusHashBytes:]); err != nil {
		return status, fmt.Errorf("adopt hostname: decode %s: %w", path, err)
	}
	return status, nil
}

// writeStatus replaces the record at path, durably: after a crash there is the old one or the new one, whole.
func writeStatus(path string, status raftpb.RaftDataStatus) error {
	body, err := status.Marshal()
	if err != nil {
		return fmt.Errorf("adopt hostname: encode %s: %w", path, err)
	}
	next := path + ".next"
	if err := writeSynced(next, append(statusHash(body), body...)); err != nil {
		return fmt.Errorf("adopt hostname: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("adopt hostname: %w", err)
	}
	return syncDirectory(filepath.Dir(path))
}

// statusHash is the engine's checksum of a flag file: the second half of the body's MD5.
func statusHash(body []byte) []byte {
	sum := md5.Sum(body)
	return append([]byte(nil), sum[len(sum)-statusHashBytes:]...)
}

// writeSynced creates or truncates path, writes data, and returns once they are on disk.
func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDirectory makes renames and creations in dir durable.
func syncDirectory(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
