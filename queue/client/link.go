package client

import (
	"fmt"
	"sync"
	"time"

	"github.com/tierq/tierq/queue/code"
)

// State is where the link to one address stands.
//
//	             use                answered
//	Disconnected ───► Connecting ─────────────► Ready
//	     ▲              │    ▲                  │   ▲
//	     │       failed │    │ due       failed │   │ answered
//	     │              ▼    │                  ▼   │
//	     │              └──► Backoff ◄──────────────┘
//	     │ reset
//	   Fatal ◄── refused, from Connecting, Ready and Backoff
//
// close leads from every state to Closed, the only state without a way out. Fatal is left by the user alone.
type State uint8

const (
	// Disconnected: never used, or reset.
	Disconnected State = iota + 1
	// Connecting: the first call is on its way.
	Connecting
	// Ready: the last thing heard from the address was an answer.
	Ready
	// Backoff: the address did not answer; it is tried again when its pause is over.
	Backoff
	// Fatal: the address answered that it will not serve this client (another fleet, no right): Reconnect or Close.
	Fatal
	// Closed: the client was closed.
	Closed
)

// Event is what happens to a link.
type Event uint8

const (
	// EventUse: a call picked the address.
	EventUse Event = iota + 1
	// EventAnswered: the host answered, be it with a refusal.
	EventAnswered
	// EventFailed: no connection, a broken one, or no answer in time.
	EventFailed
	// EventDue: the pause is over and a call picked the address.
	EventDue
	// EventRefused: the host will not serve this client until its user changes something.
	EventRefused
	// EventReset: the user asked to try again.
	EventReset
	// EventClose: the client was closed.
	EventClose
)

var stateNames = [...]string{Disconnected: "disconnected", Connecting: "connecting", Ready: "ready", Backoff: "backoff", Fatal: "fatal", Closed: "closed"}

var eventNames = [...]string{EventUse: "use", EventAnswered: "answered", EventFailed: "failed", EventDue: "due", EventRefused: "refused", EventReset: "reset", EventClose: "close"}

func (s State) String() string {
	if s == 0 || int(s) >= len(stateNames) {
		return fmt.Sprintf("state(%d)", uint8(s))
	}
	return stateNames[s]
}

func (e Event) String() string {
	if e == 0 || int(e) >= len(eventNames) {
		return fmt.Sprintf("event(%d)", uint8(e))
	}
	return eventNames[e]
}

// transitions is the whole machine. An event that is not listed for a state leaves it as it is: calls overlap, and the
// answer to one may come after the failure of another.
var transitions = map[State]map[Event]State{
	Disconnected: {EventUse: Connecting, EventClose: Closed},
	Connecting:   {EventAnswered: Ready, EventFailed: Backoff, EventRefused: Fatal, EventClose: Closed},
	Ready:        {EventFailed: Backoff, EventRefused: Fatal, EventClose: Closed},
	Backoff:      {EventDue: Connecting, EventAnswered: Ready, EventRefused: Fatal, EventReset: Disconnected, EventClose: Closed},
	Fatal:        {EventReset: Disconnected, EventClose: Closed},
	Closed:       {},
}

// link is the state of one address. Safe for concurrent use.
type link struct {
	addr string

	mu       sync.Mutex
	state    State
	failures int       // since the last answer
	due      time.Time // Backoff: not before
	denied   int       // AUTH_FAILED in a row
	fatal    *code.Error
}

// maxAuthAttempts is how often a refused token is tried before the link is given up.
const maxAuthAttempts = 5

func newLink(addr string) *link { return &link{addr: addr, state: Disconnected} }

func (l *link) fire(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fireLocked(e)
}

func (l *link) fireLocked(e Event) bool {
	next, ok := transitions[l.state][e]
	if ok {
		l.state = next
	}
	return ok
}

// usable reports whether a call may take the link at now, and else when it will be (zero time: not by waiting).
func (l *link) usable(now time.Time) (bool, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.state {
	case Fatal, Closed:
		return false, time.Time{}
	case Backoff:
		return !now.Before(l.due), l.due
	}
	return true, now
}

// take marks the link as used by a call that starts now.
func (l *link) take(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Backoff && !now.Before(l.due) {
		l.fireLocked(EventDue)
		return
	}
	l.fireLocked(EventUse)
}

// answered notes that the host is there.
func (l *link) answered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fireLocked(EventAnswered)
	l.failures, l.denied = 0, 0
}

// failed notes that the host is not there, and reports whether it was until now. A failure of a call that overlapped another one's
// failure does not lengthen the pause.
func (l *link) failed(now time.Time, pause func(n int) time.Duration) (news bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	news = l.state == Ready
	if !l.fireLocked(EventFailed) {
		return false
	}
	l.due = now.Add(pause(l.failures))
	l.failures++
	return news
}

// renew takes a pause for the first of its row: the host may be back since it began.
func (l *link) renew(now time.Time, pause func(n int) time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != Backoff || l.failures == 0 {
		return
	}
	if due := now.Add(pause(0)); due.Before(l.due) {
		l.due = due
	}
	l.failures = 1
}

// hasten ends the pause at t if it would end later.
func (l *link) hasten(t time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Backoff && l.due.After(t) {
		l.due = t
	}
}

// refused notes an answer that only the user can do something about. It reports whether the link is lost.
func (l *link) refused(e *code.Error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e.Code == code.AuthFailed {
		if l.denied++; l.denied < maxAuthAttempts {
			l.fireLocked(EventAnswered)
			return false
		}
	}
	l.fireLocked(EventRefused)
	l.fatal = e
	return true
}

func (l *link) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fireLocked(EventReset)
	l.failures, l.denied, l.fatal = 0, 0, nil
}

func (l *link) snapshot() (State, *code.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state, l.fatal
}
