package fault

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// account keeps the books of one queue with one group: every message that was sent, what the fleet said about it, and
// every time that a consumer had it. Safe for concurrent use.
//
// The rules that verify checks:
//
//	no loss          a message that was acknowledged was acked by a consumer, or is a dead letter
//	no invention     what is received was sent, byte by byte, and was not refused before ("nothing was stored")
//	no resurrection  a message whose ack was answered OK is never received after that (G5)
//	one address      a message keeps its address, also when its publish was repeated, and shares it with no other
//	attempts         a message's attempts never fall within a round, and rise with every nack that was answered OK
//	one lease        under one epoch a message is not handed out again while its lease lasts and nobody settled it (G4)
//	fenced           an ack is not answered OK once the message was handed out under a later epoch
type account struct {
	mu       sync.Mutex
	entries  map[uint64]*entry
	problems []string

	acknowledged int // answered OK
	acked        int // acks answered OK
	lastAnswer   time.Time
	longestGap   time.Duration // between two acknowledgements
	lastAck      time.Time
	longestAck   time.Duration // between two acks

	lastDelivery    time.Time
	longestDelivery time.Duration // between two deliveries
}

// entry is one message.
type entry struct {
	body      []byte
	outcome   outcome
	address   uint64
	delivered []delivered
	dead      bool
}

type outcome uint8

const (
	open         outcome = iota // sent, not answered
	acknowledged                // stored
	refused                     // answered: nothing was stored
	unknown                     // may be stored
)

// delivered is one time that a consumer had a message.
type delivered struct {
	attempt  uint32
	epoch    uint64    // of its lease; 0 if not known
	until    time.Time // when its lease ends at the latest
	asked    bool      // somebody has begun to settle it
	end      ending
	needless bool // it came although the ack of the one before it had been answered OK
}

// overtakenBy says whether a consumer that looks at d now has had it since before the other delivery was made: it is of
// an older epoch, whose home was lost with the lease. Its ack must be refused, which settled checks.
func (d delivered) overtakenBy(other delivered) bool {
	return d.epoch != 0 && d.epoch < other.epoch
}

type ending uint8

const (
	notSettled ending = iota
	acked             // answered OK
	nacked            // answered OK
	rejected          // answered OK
	ackRefused        // the answer says that nothing was changed
	ackUnknown        // the answer never came
)

func newAccount() *account { return &account{entries: map[uint64]*entry{}} }

// maxProblems bounds what a failed test prints.
const maxProblems = 20

func (a *account) problemLocked(format string, args ...any) {
	if len(a.problems) <= maxProblems {
		a.problems = append(a.problems, fmt.Sprintf(format, args...))
	}
}

// bodyOf makes a message's body: its number and its text. Numbers make equal texts distinct.
func bodyOf(id uint64, text []byte) []byte {
	b := strconv.AppendUint(make([]byte, 0, len(text)+8), id, 10)
	return append(append(b, '\t'), text...)
}

// sending notes a message before it is sent.
func (a *account) sending(id uint64, body []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.entries[id] = &entry{body: body}
}

// answered notes how a publish ended.
func (a *account) answered(id uint64, p client.Published) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.entries[id]
	switch {
	case p.Err == nil:
		e.outcome = acknowledged
		a.acknowledged++
		if p.Address != 0 {
			a.sameAddressLocked(id, e, p.Address)
		}
		a.lastAnswer = lengthen(&a.longestGap, a.lastAnswer)
	case p.Err.Effect == code.EffectNone:
		e.outcome = refused
		if len(e.delivered) > 0 {
			a.problemLocked("message %d was received although its publish was refused: %v", id, p.Err)
		}
	default:
		e.outcome = unknown
	}
}

// resetGaps lets the longest times begin anew; the one that runs goes on.
func (a *account) resetGaps() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.longestGap, a.longestAck, a.longestDelivery = 0, 0, 0
}

// gaps are the longest times between two acknowledgements and between two deliveries.
func (a *account) gaps() (publish, deliver time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.longestGap, a.longestDelivery
}

// stood are the longest times between two acknowledgements and between two acks since it was last asked.
func (a *account) stood() (publish, ack time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	publish, ack = a.longestGap, a.longestAck
	a.longestGap, a.longestAck = 0, 0
	return publish, ack
}

// lengthen takes the time since last into the longest gap, and returns now.
func lengthen(gap *time.Duration, last time.Time) time.Time {
	now := time.Now()
	if !last.IsZero() {
		*gap = max(*gap, now.Sub(last))
	}
	return now
}

func (a *account) sameAddressLocked(id uint64, e *entry, address uint64) {
	if e.address != 0 && e.address != address {
		a.problemLocked("message %d has address %d and address %d", id, e.address, address)
	}
	e.address = address
}

// turn names one delivery of one message; the zero value, of a message that nobody sent.
type turn struct {
	id  uint64
	nth int
}

// received notes a delivery, before anything is done about it.
func (a *account) received(d *client.Delivery) turn {
	return a.got(d.Body, d.Address, delivered{attempt: d.Attempt, epoch: epochOf(d.Receipt), until: time.Now().Add(d.Lease)})
}

// epochOf reads a receipt (docs/format/receipt.md): the epoch of its lease is the fourth number after the version byte.
func epochOf(receipt string) uint64 {
	raw, err := base64.RawURLEncoding.DecodeString(receipt)
	if err != nil || len(raw) < 1+6*8 {
		return 0
	}
	return binary.BigEndian.Uint64(raw[1+3*8:])
}

func (a *account) got(body []byte, address uint64, now delivered) turn {
	a.mu.Lock()
	defer a.mu.Unlock()
	number, _, _ := bytes.Cut(body, []byte{'\t'})
	id, _ := strconv.ParseUint(string(number), 10, 64)
	e := a.entries[id]
	switch {
	case e == nil:
		a.problemLocked("address %d was received but never sent: %.60q", address, body)
		return turn{}
	case !bytes.Equal(e.body, body):
		a.problemLocked("message %d was sent as %.60q and received as %.60q", id, e.body, body)
	case e.outcome == refused:
		a.problemLocked("message %d was received although its publish was refused", id)
	}
	if address != 0 {
		a.sameAddressLocked(id, e, address)
	}
	if n := len(e.delivered); n > 0 {
		before := e.delivered[n-1]
		now.needless = before.end == acked && !now.overtakenBy(before)
	}
	least := uint32(1)
	for _, before := range e.delivered {
		if now.overtakenBy(before) {
			continue
		}
		if before.epoch != 0 && before.epoch == now.epoch && !before.asked && time.Now().Before(before.until) {
			a.problemLocked("message %d was handed out twice under epoch %d within one lease", id, now.epoch)
		}
		switch before.end {
		case acked:
			a.problemLocked("message %d was received again after its ack was answered OK (epoch %d, attempt %d; before epoch %d, attempt %d)", id, now.epoch, now.attempt, before.epoch, before.attempt)
		case rejected:
			a.problemLocked("message %d was received again after it was rejected", id)
		case nacked:
			least = max(least, before.attempt+1)
		default:
			least = max(least, before.attempt)
		}
	}
	if now.attempt != 0 && now.attempt < least {
		a.problemLocked("message %d was received as attempt %d after at least %d", id, now.attempt, least-1)
	}
	e.delivered = append(e.delivered, now)
	a.lastDelivery = lengthen(&a.longestDelivery, a.lastDelivery)
	return turn{id, len(e.delivered) - 1}
}

// settling notes that a delivery is about to be settled: from now on it may be handed out again.
func (a *account) settling(n turn) {
	if n.id == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.entries[n.id].delivered[n.nth].asked = true
}

// settled notes how the settling of one delivery ended; want is what it was settled as.
func (a *account) settled(n turn, want ending, err *code.Error) {
	if n.id == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	end := want
	switch {
	case err == nil: // as wanted
	case err.Effect == code.EffectMaybe:
		end = ackUnknown
	default:
		end = ackRefused
	}
	ds := a.entries[n.id].delivered
	if end == acked {
		a.acked++
		for _, d := range ds {
			if d.epoch > ds[n.nth].epoch && ds[n.nth].epoch != 0 {
				a.problemLocked("message %d: the ack of epoch %d was answered OK after a delivery under epoch %d", n.id, ds[n.nth].epoch, d.epoch)
			}
		}
		a.lastAck = lengthen(&a.longestAck, a.lastAck)
	}
	ds[n.nth].end = end
}

// deadLetter notes that a message lies among the dead letters.
func (a *account) deadLetter(body []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	number, _, _ := bytes.Cut(body, []byte{'\t'})
	id, _ := strconv.ParseUint(string(number), 10, 64)
	if e := a.entries[id]; e == nil || !bytes.Equal(e.body, body) {
		a.problemLocked("a dead letter was never sent: %.60q", body)
	} else {
		e.dead = true
	}
}

// totals are what an account adds up to.
type totals struct {
	sent, acknowledged, refused, unknown int
	distinct, deliveries, duplicates     int
	explained                            int // duplicates that follow a delivery whose ack had not been answered OK by then
	acked, dead, ackUnknown, lost        int
}

func (s totals) String() string {
	return fmt.Sprintf("sent %d, acknowledged %d, refused %d, unknown %d, delivered %d (distinct %d), duplicates %d (explained %d), acked %d, acks of unknown outcome %d, dead %d, lost %d",
		s.sent, s.acknowledged, s.refused, s.unknown, s.deliveries, s.distinct, s.duplicates, s.explained, s.acked, s.ackUnknown, s.dead, s.lost)
}

// totals adds up. A message counts as finished when a consumer acked it, when an ack of it has an unknown outcome and it
// did not come again (the group's own counters tell the rest), or when it is dead.
func (a *account) totals() totals {
	a.mu.Lock()
	defer a.mu.Unlock()
	var s totals
	addresses := make(map[uint64]uint64, len(a.entries))
	for id, e := range a.entries {
		s.sent++
		switch e.outcome {
		case acknowledged:
			s.acknowledged++
		case refused:
			s.refused++
		default:
			s.unknown++
		}
		if e.address != 0 {
			if other, ok := addresses[e.address]; ok {
				a.problemLocked("messages %d and %d share address %d", id, other, e.address)
			}
			addresses[e.address] = id
		}
		a.countLocked(&s, id, e)
	}
	return s
}

func (a *account) countLocked(s *totals, id uint64, e *entry) {
	finished := e.dead
	for i, d := range e.delivered {
		switch d.end {
		case acked:
			s.acked++
			finished = true
		case ackUnknown:
			s.ackUnknown++
			finished = true
		case rejected:
			finished = true
		}
		if i > 0 {
			s.duplicates++
			if !d.needless {
				s.explained++
			}
		}
	}
	s.deliveries += len(e.delivered)
	if len(e.delivered) > 0 {
		s.distinct++
	}
	if e.dead {
		s.dead++
	}
	if e.outcome == acknowledged && !finished {
		s.lost++
		a.problemLocked("message %d at address %d was acknowledged and is lost: %+v", id, e.address, e.delivered)
	}
}

// verify notes the line of account and fails the test on everything that the rules forbid.
func (a *account) verify(t *testing.T) totals {
	t.Helper()
	return a.verifyPart(t, "")
}

// verifyPart is verify for one of several accounts of a scenario.
func (a *account) verifyPart(t *testing.T, part string) totals {
	t.Helper()
	s := a.totals()
	noteAccount(t, part, s)
	t.Log(s)
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, p := range a.problems {
		if i == maxProblems {
			t.Error("and more")
			break
		}
		t.Error(p)
	}
	if s.duplicates != s.explained {
		t.Errorf("%d duplicates are not explained", s.duplicates-s.explained)
	}
	return s
}

// counts are for waiting.
func (a *account) counts() (acknowledged, acked int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.acknowledged, a.acked
}

// TestAccountFindsBreaches proves that the books notice each kind of breach: a checker that cannot fail proves nothing.
func TestAccountFindsBreaches(t *testing.T) {
	body := bodyOf(1, []byte("x"))
	deliver := func(a *account, address uint64, attempt uint32) turn {
		return a.got(body, address, delivered{attempt: attempt})
	}
	under := func(a *account, epoch uint64) turn {
		return a.got(body, 7, delivered{attempt: 1, epoch: epoch, until: time.Now().Add(time.Hour)})
	}
	none := &code.Error{Code: code.StaleOwner, Effect: code.EffectNone}
	for name, tc := range map[string]struct {
		do   func(a *account)
		want string
	}{
		"good": {func(a *account) {
			a.answered(1, client.Published{Address: 7})
			a.settled(deliver(a, 7, 1), acked, nil)
		}, ""},
		"good after a refused ack": {func(a *account) {
			a.answered(1, client.Published{Address: 7})
			a.settled(deliver(a, 7, 1), acked, none)
			a.settled(deliver(a, 7, 1), acked, nil)
		}, ""},
		"unknown and never received": {func(a *account) {
			a.answered(1, client.Published{Err: code.Maybe(code.QuorumLost, nil, "")})
		}, ""},
		"good when it came again before its ack was answered": {func(a *account) {
			a.answered(1, client.Published{Address: 7})
			first := deliver(a, 7, 1)
			a.settled(deliver(a, 7, 2), acked, nil)
			a.settled(first, acked, nil)
			require.Equal(t, 1, a.totals().explained)
		}, ""},
		"lost":                {func(a *account) { a.answered(1, client.Published{Address: 7}) }, "is lost"},
		"received, not acked": {func(a *account) { a.answered(1, client.Published{Address: 7}); deliver(a, 7, 1) }, "is lost"},
		"invented":            {func(a *account) { a.got(bodyOf(2, nil), 8, delivered{}) }, "never sent"},
		"changed":             {func(a *account) { a.got(append(bodyOf(1, nil), 'y'), 7, delivered{}) }, "received as"},
		"refused":             {func(a *account) { a.answered(1, client.Published{Err: none}); deliver(a, 7, 1) }, "although its publish was refused"},
		"resurrected": {func(a *account) {
			a.answered(1, client.Published{Address: 7})
			a.settled(deliver(a, 7, 1), acked, nil)
			deliver(a, 7, 1)
		}, "after its ack was answered OK"},
		"second address": {func(a *account) { a.answered(1, client.Published{Address: 7}); deliver(a, 8, 1) }, "address 7 and address 8"},
		"attempts fell": {func(a *account) {
			a.settled(deliver(a, 7, 2), nacked, nil)
			deliver(a, 7, 2)
		}, "as attempt 2 after at least 2"},
		"two leases": {func(a *account) { under(a, 3); under(a, 3) }, "handed out twice under epoch 3"},
		"good under another epoch": {func(a *account) {
			under(a, 3)
			a.settled(under(a, 4), acked, nil)
		}, ""},
		"good when looked at late": {func(a *account) {
			a.answered(1, client.Published{Address: 7})
			a.settled(under(a, 4), acked, nil)
			a.settled(under(a, 3), acked, none)
		}, ""},
		"looked at late and not fenced": {func(a *account) {
			a.settled(under(a, 4), acked, nil)
			a.settled(under(a, 3), acked, nil)
		}, "after a delivery under epoch 4"},
		"not fenced": {func(a *account) {
			old := under(a, 3)
			under(a, 4)
			a.settled(old, acked, nil)
		}, "after a delivery under epoch 4"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAccount()
			a.sending(1, body)
			tc.do(a)
			a.totals()
			if tc.want == "" {
				require.Empty(t, a.problems)
				return
			}
			require.NotEmpty(t, a.problems)
			require.Contains(t, a.problems[0], tc.want)
		})
	}
}
