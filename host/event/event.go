// Package event keeps what has happened on a host lately where its operators can ask for it. An event is a line of the log that
// has a name: what makes one logs as ever, with Is among the fields, and a Ring beside the log's core keeps the newest of them.
//
// Names are stable, for scripts; docs/operating/events.md lists them.
package event

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Key is the field of a log line that names an event.
const Key = "event"

// Is makes a line of the log an event.
func Is(name string) zap.Field { return zap.String(Key, name) }

// Event is one that a Ring has kept.
type Event struct {
	// Seq numbers a host's events from 1, since its process started, without gaps.
	Seq  uint64
	Time time.Time
	Name string
	Text string
	// Shard is the shard that it is about, 0: none.
	Shard uint64
	// Details are the line's other fields, in words.
	Details map[string]string
}

// shardKey is the field that names a shard; skipped are fields that say nothing new beside an Event.
const shardKey = "shard"

var skipped = map[string]bool{Key: true, shardKey: true, "host": true}

// Ring keeps the newest events of a process, in memory only. It is safe for concurrent use.
type Ring struct {
	mu     sync.Mutex
	events []Event // a ring once it is full: the oldest is at next
	next   int
	limit  int
	seq    uint64
}

// NewRing makes a ring of the newest limit events.
func NewRing(limit int) *Ring { return &Ring{limit: max(limit, 1)} }

// Watch returns log, which feeds the ring from now on whatever the level of log is.
func (r *Ring) Watch(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return zapcore.NewTee(c, core{ring: r}) }))
}

// Since returns the newest events after seq, oldest first, at most limit of those that pass; and the newest seq that there is. What is between
// was not kept, or is left out by limit. The events must not be modified.
func (r *Ring) Since(seq uint64, limit int, pass func(*Event) bool) (events []Event, newest uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.events) - 1; i >= 0 && len(events) < limit; i-- {
		e := &r.events[(r.next+i)%len(r.events)]
		if e.Seq <= seq {
			break
		}
		if pass(e) {
			events = append(events, *e)
		}
	}
	for i, j := 0, len(events)-1; i < j; i, j = i+1, j-1 {
		events[i], events[j] = events[j], events[i]
	}
	return events, r.seq
}

func (r *Ring) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seq++
	e.Seq = r.seq
	if len(r.events) < r.limit {
		r.events = append(r.events, e)
		return
	}
	r.events[r.next] = e
	r.next = (r.next + 1) % r.limit
}

// core is a zapcore.Core that keeps events and writes nothing.
type core struct {
	ring   *Ring
	fields []zapcore.Field
}

// Enabled implements zapcore.Core. Below info there are no events, so that what is quiet stays cheap.
func (c core) Enabled(l zapcore.Level) bool { return l >= zapcore.InfoLevel }

// With implements zapcore.Core.
func (c core) With(fields []zapcore.Field) zapcore.Core {
	return core{c.ring, append(c.fields[:len(c.fields):len(c.fields)], fields...)}
}

// Check implements zapcore.Core.
func (c core) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Sync implements zapcore.Core.
func (c core) Sync() error { return nil }

// Write implements zapcore.Core.
func (c core) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	name := ""
	for i := range fields {
		if fields[i].Key == Key {
			name = fields[i].String
		}
	}
	if name == "" {
		return nil
	}
	e := Event{Time: entry.Time, Name: name, Text: entry.Message, Details: map[string]string{}}
	values := zapcore.NewMapObjectEncoder()
	for _, fs := range [2][]zapcore.Field{c.fields, fields} {
		for _, f := range fs {
			f.AddTo(values)
		}
	}
	if shard, ok := values.Fields[shardKey].(uint64); ok {
		e.Shard = shard
	}
	for key, value := range values.Fields {
		if !skipped[key] && !strings.HasSuffix(key, "Verbose") {
			e.Details[key] = fmt.Sprint(value)
		}
	}
	c.ring.add(e)
	return nil
}
