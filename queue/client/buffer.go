package client

import (
	"context"
	"sync"

	"github.com/tierq/tierq/queue/code"
)

// buffer bounds what is published and not answered yet, by messages and by bytes. Waiters are served in order.
//
// Invariant: messages ≤ maxMessages and bytes ≤ maxBytes; a waiter waits only while what is ahead of it does not fit.
type buffer struct {
	maxMessages int
	maxBytes    int64

	mu       sync.Mutex
	messages int
	bytes    int64
	waiters  []*waiter
}

type waiter struct {
	messages int
	bytes    int64
	ready    chan struct{}
	gone     bool
}

func newBuffer(messages int, bytes int64) *buffer {
	return &buffer{maxMessages: messages, maxBytes: bytes}
}

// clamp makes a publish that is larger than the whole buffer fit an empty one.
func (b *buffer) clamp(messages int, bytes int64) (int, int64) {
	return min(messages, b.maxMessages), min(bytes, b.maxBytes)
}

// take takes room if there is some and nobody waits for it. The arguments must be clamped, and given back with release.
func (b *buffer) take(messages int, bytes int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(messages, bytes)
}

func (b *buffer) takeLocked(messages int, bytes int64) bool {
	if len(b.waiters) != 0 || !b.fitsLocked(messages, bytes) {
		return false
	}
	b.messages, b.bytes = b.messages+messages, b.bytes+bytes
	return true
}

// acquire is take, waiting for room until ctx ends unless fail is set.
func (b *buffer) acquire(ctx context.Context, messages int, bytes int64, fail bool) *code.Error {
	b.mu.Lock()
	if b.takeLocked(messages, bytes) {
		b.mu.Unlock()
		return nil
	}
	if fail {
		b.mu.Unlock()
		return code.New(code.Backpressure, "the client's publish buffer is full: wait for answers, or raise MaxBufferedMessages or MaxBufferedBytes")
	}
	w := &waiter{messages: messages, bytes: bytes, ready: make(chan struct{})}
	b.waiters = append(b.waiters, w)
	b.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	return b.leave(ctx, w)
}

func (b *buffer) leave(ctx context.Context, w *waiter) *code.Error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	default:
	}
	w.gone = true
	b.wakeLocked()
	return &code.Error{Code: code.Backpressure, Effect: code.EffectNone, Text: "the time ran out while the client's publish buffer was full", Cause: ctx.Err()}
}

func (b *buffer) release(messages int, bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.messages, b.bytes = b.messages-messages, b.bytes-bytes
	b.wakeLocked()
}

func (b *buffer) fitsLocked(messages int, bytes int64) bool {
	return b.messages+messages <= b.maxMessages && b.bytes+bytes <= b.maxBytes
}

func (b *buffer) wakeLocked() {
	for len(b.waiters) > 0 {
		w := b.waiters[0]
		if !w.gone {
			if !b.fitsLocked(w.messages, w.bytes) {
				return
			}
			b.messages, b.bytes = b.messages+w.messages, b.bytes+w.bytes
			close(w.ready)
		}
		b.waiters = b.waiters[1:]
	}
}
