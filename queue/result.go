package queue

import "github.com/tierq/tierq/queue/code"

// Result is what apply answered to one command. It travels as bytes (EncodeResult, DecodeResult; golden bytes).
//
// Code is the command's own outcome: code.OK when it took effect or its per-item results tell, otherwise the
// refusal, and then nothing changed. code.Unknown (a command skipped because index <= applied) means the
// outcome cannot be told: the caller treats it as maybe applied.
type Result struct {
	Code  code.Code
	Index Index // the entry's index
	Clock Stamp // the shard's clock after this apply

	Publishes []PublishResult // Enqueue: one per publish
	Acks      []AckState      // Ack: one per address, ranges expanded in order
	Expires   []ExpireResult  // Expire: one per entry
	Delayed   []code.Code     // Retention.Delayed: one per change
	Group     GroupID         // Group create: the id
	Epoch     Epoch           // Group, Home: the epoch after; on a refusal the stored one
	Home      ReplicaID       // Group, Home: the home after; on a refusal the stored one
	Version   uint64          // Group configure, Retention options: the config version after
}

// PublishResult answers one publish. When Code is not OK nothing of the publish was stored and Messages is nil
// (atomic publishes, expected-last, stale producer epoch, queue full before the first message …).
type PublishResult struct {
	Code     code.Code
	Last     Address // the partition's last address after it
	Messages []MessageResult
}

// MessageResult answers one message of a publish.
type MessageResult struct {
	Code      code.Code
	Address   Address // the first address of a duplicate
	Duplicate bool
	// StoredIndex-free: a duplicate's first commit lies at or below the result's Index.
}

// AckState is the outcome of one acked address. Part of the format; do not renumber.
type AckState uint8

const (
	AckUnknown AckState = 0 // never existed, or above the last address, or not the group's
	AckDone    AckState = 1 // finished now
	AckAlready AckState = 2 // was finished before
	AckDead    AckState = 3 // a dead letter whose export has begun: not acked
)

// ExpireResult is the outcome of one Expire entry.
type ExpireResult struct {
	Applied  bool   // false: skipped
	Change   Change // the stored change number after it
	Round    uint32
	Attempts uint32
	Finished bool // the message is finished (why it was skipped)
	Dead     bool // the message is dead after it
}
