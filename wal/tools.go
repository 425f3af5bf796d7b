package wal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/lni/dragonboat/v4/raftpb"
	"go.uber.org/zap"
)

// The tools read a log's directory, or a copy of it, without its lock and without writing. On a live log
// they see it as it was at some moment; a segment that goes away meanwhile is left out.

// Problem is one thing that Verify found wrong.
type Problem struct {
	Path      string `json:"path"`
	Offset    int64  `json:"offset"`
	ShardID   uint64 `json:"shard,omitempty"`
	ReplicaID uint64 `json:"replica,omitempty"`
	Reason    string `json:"reason"`
}

func (p Problem) String() string {
	return (&CorruptionError{Path: p.Path, Offset: p.Offset, ShardID: p.ShardID, ReplicaID: p.ReplicaID, Reason: p.Reason}).Error()
}

// SegmentReport is what Verify and Stats say of one segment.
type SegmentReport struct {
	Path       string  `json:"path"`
	Sequence   uint64  `json:"sequence"`
	SizeBytes  int64   `json:"size_bytes"`
	DataBytes  int64   `json:"data_bytes"` // up to the end of the last batch
	Sealed     bool    `json:"sealed"`
	Batches    int     `json:"batches,omitempty"`    // Verify
	Records    int     `json:"records,omitempty"`    // Verify
	TornAt     int64   `json:"torn_at,omitempty"`    // Verify: a tail that the next open will cut
	LiveBytes  int64   `json:"live_bytes,omitempty"` // Stats
	LiveRatio  float64 `json:"live_ratio"`           // Stats: LiveBytes by SizeBytes
	References int     `json:"references,omitempty"` // Stats: how many things need the segment
}

// ReplicaReport is what Stats says of one replica.
type ReplicaReport struct {
	ShardID       uint64 `json:"shard"`
	ReplicaID     uint64 `json:"replica"`
	Term          uint64 `json:"term"`
	Vote          uint64 `json:"vote"`
	Commit        uint64 `json:"commit"`
	First         uint64 `json:"first"` // 0 without entries
	Last          uint64 `json:"last"`
	SnapshotIndex uint64 `json:"snapshot_index"`
	EntryBytes    int64  `json:"entry_bytes"` // of the records that hold its entries
	Spans         int    `json:"spans"`
	Witness       bool   `json:"witness"`
	Removed       bool   `json:"removed"`
}

// Report is the answer of Verify and Stats.
type Report struct {
	Dir      string          `json:"dir"`
	Segments []SegmentReport `json:"segments"`
	Replicas []ReplicaReport `json:"replicas,omitempty"` // Stats
	Problems []Problem       `json:"problems,omitempty"` // Verify
}

// toolLog is a Log that only recovers.
func toolLog(dir string, fs fileSystem) *Log {
	m, _ := newMetrics(nil) // without a registerer there is no error
	return &Log{o: Options{Dir: dir, HostID: anyHost, Logger: zap.NewNop()}, fs: fs, logger: zap.NewNop(),
		metrics: m, replicas: make(map[replicaKey]*replica), cache: batchCache{low: 1}}
}

// segmentFiles lists the sequences of the segments in dir.
func segmentFiles(fs fileSystem, dir string) ([]uint64, error) {
	names, err := fs.List(dir)
	if err != nil {
		return nil, fmt.Errorf("wal: list %s: %w", dir, err)
	}
	var seqs []uint64
	for _, n := range names {
		if q, ok := parseSegmentName(n); ok {
			seqs = append(seqs, q)
		}
	}
	if len(seqs) == 0 {
		return nil, fmt.Errorf("wal: there is no segment in %s", dir)
	}
	sort.Slice(seqs, func(i, j int) bool { return seqs[i] < seqs[j] })
	return seqs, nil
}

// Verify reads every byte of the log in dir that means something and checks all of it: headers, batches,
// records, footers against records, trailers, and that every segment and every entry that must be there is.
// It goes on after a problem and returns all; an error means that it could not read. What it sees of a log that
// is being written may not fit together, so it looks again before it says that something is wrong.
func Verify(dir string) (Report, error) {
	return settle(func() (Report, error) { return verify(dir, readOnlyFS{}) })
}

// toolAttempts is how often the tools look at a log before they believe that it is damaged.
const toolAttempts = 3

func settle(look func() (Report, error)) (rep Report, err error) {
	for range toolAttempts {
		if rep, err = look(); err == nil && len(rep.Problems) == 0 {
			break
		}
	}
	return rep, err
}

func verify(dir string, fs fileSystem) (Report, error) {
	rep := Report{Dir: dir}
	seqs, err := segmentFiles(fs, dir)
	if err != nil {
		return rep, err
	}
	for _, q := range seqs {
		seg, err := verifySegment(fs, dir, q)
		switch {
		case err == nil:
			rep.Segments = append(rep.Segments, seg)
		case errors.Is(err, os.ErrNotExist):
		default:
			if err := rep.note(err); err != nil {
				return rep, err
			}
		}
	}
	if len(rep.Problems) > 0 {
		return rep, nil
	}
	// Each segment is whole; now what they say together.
	l := toolLog(dir, fs)
	_, err = l.inspect()
	return rep, rep.note(err)
}

// note takes a corruption in as a problem; another error comes back.
func (r *Report) note(err error) error {
	var c *CorruptionError
	if !errors.As(err, &c) {
		return err
	}
	r.Problems = append(r.Problems, Problem{Path: c.Path, Offset: c.Offset, ShardID: c.ShardID, ReplicaID: c.ReplicaID, Reason: c.Reason})
	return nil
}

// verifySegment checks one segment from end to end.
func verifySegment(fs fileSystem, dir string, seq uint64) (SegmentReport, error) {
	s, err := loadSegment(fs, dir, seq, anyHost)
	if err != nil {
		return SegmentReport{}, err
	}
	defer func() { _ = s.closeIdle() }()
	data, err := s.readAll(fs)
	if err != nil {
		return SegmentReport{}, err
	}
	sc, err := scanSegment(s.segment, data, nil)
	if err != nil {
		return SegmentReport{}, err
	}
	rep := SegmentReport{Path: s.path, Sequence: seq, SizeBytes: int64(s.h.size), DataBytes: sc.end, Sealed: s.sealOK,
		Batches: sc.batches, Records: sc.records, TornAt: sc.tornAt}
	if s.trailer && !s.sealOK {
		return rep, s.corrupt(int64(s.h.size)-pageBytes, replicaKey{}, s.sealWhy)
	}
	if !s.sealOK {
		return rep, nil
	}
	rep.TornAt = 0
	if s.off != sc.end {
		return rep, s.corrupt(sc.end, replicaKey{}, fmt.Sprintf("batches end here, the trailer says at %d", s.off))
	}
	listed, err := s.items(fs)
	if err != nil {
		return rep, err
	}
	return rep, s.compareFooter(listed, sc.items)
}

// compareFooter compares the footer with what the records give.
func (r *recovered) compareFooter(listed, records []footerItem) error {
	var b footerBuilder
	for _, it := range records {
		b.add(it)
	}
	want, err := decodeFooter(b.encode())
	if err != nil {
		return err
	}
	for _, l := range [...][]footerItem{want, listed} {
		sort.Slice(l, func(i, j int) bool {
			return l[i].off < l[j].off || l[i].off == l[j].off && l[i].first < l[j].first
		})
	}
	if len(want) != len(listed) {
		return r.corrupt(r.off, replicaKey{}, fmt.Sprintf("footer lists %d records, the segment has %d", len(listed), len(want)))
	}
	for i := range want {
		if want[i] != listed[i] {
			return r.corrupt(int64(want[i].off), replicaKey{want[i].shardID, want[i].replicaID}, "footer and record differ")
		}
	}
	return nil
}

// inspect recovers the index without changing anything.
func (l *Log) inspect() ([]*recovered, error) {
	segs, err := l.loadSegments()
	defer func() {
		for _, s := range segs {
			_ = s.closeIdle()
		}
	}()
	if err != nil {
		return nil, err
	}
	end, err := l.findEnd(segs)
	if err != nil {
		return nil, err
	}
	live, _, err := end.splitGarbage(segs)
	if err != nil {
		return nil, err
	}
	return live, l.buildIndex(live)
}

// Stats says what the log in dir holds: of each segment how much is live, and of each replica its state. It
// returns an error that wraps ErrCorrupt if the log could not be opened as it is.
func Stats(dir string) (Report, error) {
	return settle(func() (Report, error) { return stats(dir, readOnlyFS{}) })
}

func stats(dir string, fs fileSystem) (Report, error) {
	rep := Report{Dir: dir}
	if _, err := segmentFiles(fs, dir); err != nil {
		return rep, err
	}
	l := toolLog(dir, fs)
	segs, err := l.inspect()
	if err != nil {
		return rep, err
	}
	for _, s := range segs {
		rep.Segments = append(rep.Segments, SegmentReport{Path: s.path, Sequence: s.h.seq, SizeBytes: int64(s.h.size),
			DataBytes: s.off, Sealed: s.sealed, LiveBytes: s.live, LiveRatio: float64(s.live) / float64(s.h.size), References: s.pins})
	}
	for _, r := range l.replicas {
		rep.Replicas = append(rep.Replicas, r.report())
	}
	sort.Slice(rep.Replicas, func(i, j int) bool {
		a, b := &rep.Replicas[i], &rep.Replicas[j]
		return a.ShardID < b.ShardID || a.ShardID == b.ShardID && a.ReplicaID < b.ReplicaID
	})
	return rep, nil
}

func (r *replica) report() ReplicaReport {
	rep := ReplicaReport{ShardID: r.key.shardID, ReplicaID: r.key.replicaID, Term: r.m.state.Term, Vote: r.m.state.Vote,
		Commit: r.m.state.Commit, Last: r.m.last, SnapshotIndex: r.snapIndex, Spans: len(r.spans),
		Witness: r.isWitness(), Removed: r.m.removed, EntryBytes: r.spanBytes}
	if len(r.spans) > 0 {
		rep.First = r.spans[0].first
	}
	return rep
}

// Print writes the report for people.
func (r Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	var errs []error
	line := func(format string, args ...any) {
		if _, err := fmt.Fprintf(t, format, args...); err != nil {
			errs = append(errs, err)
		}
	}
	line("SEGMENT\tSEALED\tSIZE\tDATA\tLIVE\tRATIO\tBATCHES\tRECORDS\n")
	for _, s := range r.Segments {
		line("%d\t%t\t%d\t%d\t%d\t%.3f\t%d\t%d\n", s.Sequence, s.Sealed, s.SizeBytes, s.DataBytes, s.LiveBytes, s.LiveRatio, s.Batches, s.Records)
	}
	if len(r.Replicas) > 0 {
		line("\nSHARD\tREPLICA\tTERM\tVOTE\tCOMMIT\tFIRST\tLAST\tSNAPSHOT\tBYTES\tSPANS\tWITNESS\n")
	}
	for _, p := range r.Replicas {
		line("%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%t\n", p.ShardID, p.ReplicaID, p.Term, p.Vote, p.Commit, p.First, p.Last,
			p.SnapshotIndex, p.EntryBytes, p.Spans, p.Witness)
	}
	for _, s := range r.Segments {
		if s.TornAt > 0 {
			line("%s: torn tail at offset %d, which the next open will cut\n", s.Path, s.TornAt)
		}
	}
	for _, p := range r.Problems {
		line("%s\n", p)
	}
	return errors.Join(append(errs, t.Flush())...)
}

// Dump writes every record of the log at path, a directory or one segment file, to w, a line each. It goes on
// after a damaged segment and returns what was wrong, joined.
func Dump(w io.Writer, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	if !st.IsDir() {
		seq, ok := parseSegmentName(filepath.Base(path))
		if !ok {
			return fmt.Errorf("wal: %s is not a segment: its name is not 16 hex digits and %s", path, segmentSuffix)
		}
		return dumpSegment(w, readOnlyFS{}, filepath.Dir(path), seq)
	}
	return dump(w, path, readOnlyFS{})
}

func dump(w io.Writer, dir string, fs fileSystem) error {
	seqs, err := segmentFiles(fs, dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, q := range seqs {
		if err := dumpSegment(w, fs, dir, q); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func dumpSegment(w io.Writer, fs fileSystem, dir string, seq uint64) error {
	s, err := loadSegment(fs, dir, seq, anyHost)
	if err != nil {
		return err
	}
	defer func() { _ = s.closeIdle() }()
	data, err := s.readAll(fs)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "segment %d host %d size %d sealed %t\n", s.h.seq, s.h.hostID, s.h.size, s.sealOK); err != nil {
		return err
	}
	sc, err := scanSegment(s.segment, data, func(off int64, r record) error {
		_, err := fmt.Fprintf(w, "%d:%d %s %s\n", s.h.seq, off, r.typ, describe(&r))
		return err
	})
	if err == nil && sc.tornAt > 0 && !s.sealOK {
		_, err = fmt.Fprintf(w, "%d:%d torn tail: %s\n", s.h.seq, sc.tornAt, sc.tornWhy)
	}
	return err
}

// describe says what a record holds, on one line.
func describe(r *record) string {
	switch r.typ {
	case recLiveSet, recFreed:
		seqs, err := decodeSeqs(r.body)
		return orError(fmt.Sprint(seqs), err)
	}
	what, err := describeBody(r)
	return fmt.Sprintf("shard %d replica %d %s", r.shardID, r.replicaID, orError(what, err))
}

func orError(s string, err error) string {
	if err != nil {
		return err.Error()
	}
	return s
}

func describeBody(r *record) (string, error) {
	switch r.typ {
	case recEntries, recMoved:
		return describeEntries(r.body)
	case recRuns, recRunsMoved:
		runs, err := decodeRuns(r.body)
		parts := make([]string, len(runs))
		for i, x := range runs {
			parts[i] = fmt.Sprintf("%d..%d term %d", x.first, x.last(), x.term)
		}
		return strings.Join(parts, ", "), err
	case recMeta:
		m, err := decodeMeta(r.body)
		return fmt.Sprintf("term %d vote %d commit %d last %d compacted-to %d removed %t floor %d:%d",
			m.state.Term, m.state.Vote, m.state.Commit, m.last, m.compactedTo, m.removed, m.floor.seq, m.floor.off), err
	case recSnapshot:
		var ss raftpb.Snapshot
		err := ss.Unmarshal(r.body)
		return fmt.Sprintf("index %d term %d on-disk-index %d witness %t members %v non-voting %v witnesses %v",
			ss.Index, ss.Term, ss.OnDiskIndex, ss.Witness, ss.Membership.Addresses, ss.Membership.NonVotings, ss.Membership.Witnesses), err
	case recBootstrap:
		var b raftpb.Bootstrap
		err := b.Unmarshal(r.body)
		return fmt.Sprintf("join %t members %v", b.Join, b.Addresses), err
	default:
		return fmt.Sprintf("%d bytes", len(r.body)), nil
	}
}

func describeEntries(body []byte) (string, error) {
	var first, last raftpb.Entry
	n, bytes := 0, 0
	err := decodeEntries(body, func(e *raftpb.Entry) bool {
		if n == 0 {
			first = *e
		}
		last = *e
		n++
		bytes += len(e.Cmd)
		return true
	})
	return fmt.Sprintf("%d..%d term %d..%d, %d entries, %d bytes of commands", first.Index, last.Index, first.Term, last.Term, n, bytes), err
}
