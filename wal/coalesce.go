package wal

import (
	"sort"
)

// The index has one span for each record with live entries, so what it takes would follow the number of saves: a shard
// whose every save holds one small entry has a span for each. When all spans take more than Options.IndexBytes,
// the entries of the longest lists are copied together, records' worth at a time, the way that reclaiming moves them.

const (
	// spanBytes is what a span takes.
	spanBytes = 40
	// minStretch is how many spans must become one for it to be worth the copy. As a record made of so many is as
	// large as eight, no entry is copied often.
	minStretch = 8
)

// coalescer is the reclaimer's.
type coalescer struct {
	l    *Log
	done uint64 // the segment that was active when nothing was left to do; only a sealed one brings more
}

// once makes one record of many, and reports whether there may be more to do.
func (c *coalescer) once() (again bool, err error) {
	k, spans, urgent := c.pick()
	if len(spans) == 0 {
		return false, nil
	}
	n, err := c.l.moveSpans(spans[0].seg, k, spans)
	if err != nil {
		return false, err
	}
	p := pace{l: c.l, urgent: urgent}
	return true, p.spend(n)
}

// pick returns a stretch of one of the longest lists, if the index takes too much.
func (c *coalescer) pick() (k replicaKey, spans []span, urgent bool) {
	l := c.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.active.h.seq == c.done {
		return replicaKey{}, nil, false
	}
	total, limit := 0, int(l.o.IndexBytes/spanBytes)
	for _, r := range l.replicas {
		total += len(r.spans)
	}
	if total > limit {
		for _, r := range l.longestLocked(max(2*minStretch, limit/len(l.replicas))) {
			if s := r.smallStretch(); s != nil {
				return r.key, append([]span(nil), s...), total > 2*limit
			}
		}
	}
	c.done = l.active.h.seq
	return replicaKey{}, nil, false
}

// longestLocked lists the replicas with more than floor spans, the longest first.
func (l *Log) longestLocked(floor int) []*replica {
	var rs []*replica
	for _, r := range l.replicas {
		if len(r.spans) > floor {
			rs = append(rs, r)
		}
	}
	sort.Slice(rs, func(i, j int) bool { return len(rs[i].spans) > len(rs[j].spans) })
	return rs
}

// smallStretch returns the first neighbouring spans in one sealed segment that make about one record, if those are many.
func (r *replica) smallStretch() []span {
	for i := 0; i < len(r.spans); {
		seg, bytes, n := r.spans[i].seg, 0, i
		for n < len(r.spans) && r.spans[n].seg == seg && bytes < maxRecordBytes {
			bytes += int(r.spans[n].size)
			n++
		}
		if seg != nil && seg.sealed && !seg.freed && n-i >= minStretch {
			return r.spans[i:n]
		}
		i = n
	}
	return nil
}
