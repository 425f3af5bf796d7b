package node

import (
	"context"
	"sync"
)

// leadership tells when a shard gets another leader. What was proposed through the former one may never be answered: the engine
// forwards a proposal once, and a leader that is replaced, or dies, or hands over, drops it silently. Who may propose the same
// bytes again need not wait for the deadline to learn that. The zero value is ready to use.
type leadership struct {
	mu   sync.Mutex
	term uint64
	ctx  context.Context // ends with the present leader
	end  context.CancelFunc
}

// current returns a context that ends when another leader is known.
func (l *leadership) current() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.currentLocked()
}

func (l *leadership) currentLocked() context.Context {
	if l.ctx == nil {
		l.ctx, l.end = context.WithCancel(context.Background())
	}
	return l.ctx
}

// elected notes that a leader is known, of a term, and says whether that is news.
func (l *leadership) elected(term uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term <= l.term {
		return false
	}
	l.term = term
	l.currentLocked()
	l.end()
	l.ctx = nil
	return true
}
