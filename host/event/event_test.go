package event

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func all(*Event) bool { return true }

// TestRing: lines with a name are kept with what they say, whatever the log's own level is; others are not.
func TestRing(t *testing.T) {
	written, lines := observer.New(zapcore.ErrorLevel)
	r := NewRing(10)
	log := r.Watch(zap.New(written)).With(zap.Uint64("host", 3)).With(zap.Uint64("shard", 7))
	log.Info("an ordinary line")
	log.Debug("too quiet to be one", Is("quiet"))
	log.Info("it has changed", Is("quorum"), zap.String("from", "healthy"), zap.Error(errors.New("broken")), zap.Duration("after", time.Second))
	log.Error("worse", Is("failed"))
	events, newest := r.Since(0, 100, all)
	require.Len(t, events, 2)
	require.EqualValues(t, 2, newest)
	e := events[0]
	require.EqualValues(t, 1, e.Seq)
	require.False(t, e.Time.IsZero())
	e.Time = time.Time{}
	require.Equal(t, Event{Seq: 1, Name: "quorum", Text: "it has changed", Shard: 7, Details: map[string]string{"from": "healthy", "error": "broken", "after": "1s"}}, e)
	require.Equal(t, "failed", events[1].Name)
	require.Equal(t, 1, lines.Len(), "the log has what its level lets through")
}

// TestRingIsBounded: the newest are kept, and a caller sees by the numbers what it has missed.
func TestRingIsBounded(t *testing.T) {
	r := NewRing(3)
	log := r.Watch(zap.NewNop())
	for i := range 10 {
		log.Info(fmt.Sprint(i+1), Is("e"))
		events, newest := r.Since(0, 100, all)
		require.EqualValues(t, i+1, newest)
		require.Len(t, events, min(i+1, 3))
		for j, e := range events {
			require.Equal(t, fmt.Sprint(e.Seq), e.Text)
			require.EqualValues(t, max(0, i-2)+j+1, e.Seq)
		}
	}
	events, _ := r.Since(9, 100, all)
	require.Len(t, events, 1)
	events, _ = r.Since(0, 2, all)
	require.Equal(t, "9", events[0].Text, "the newest two")
	events, _ = r.Since(0, 100, func(e *Event) bool { return e.Text == "8" })
	require.Len(t, events, 1)
	events, newest := r.Since(10, 100, all)
	require.Empty(t, events)
	require.EqualValues(t, 10, newest)
}
