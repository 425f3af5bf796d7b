// Package home serves consumer groups at their home: the one replica of a shard that hands out a group's messages.
//
// A delivery is a local read: no consensus round per message. What makes that safe is said by four parts:
//
//   - Lease and Term: when deliveries may start (G4). A ReadIndex begun at boot time s that completes with this
//     replica still home lets it start deliveries until s + HomeLease. A new home waits 1.1 times as long from its own
//     apply, unless the old one said `released`. A process delivers only under an epoch that it obtained since it
//     started and since any install; it commits Home(self -> self) for that, and only when a consumer waits.
//   - Ledger: one group under one epoch, in memory, built from state that includes its own Home: ready, delayed,
//     leased, retrying, and which of its commands apply has not answered. It is a bounded look-ahead, whatever the
//     backlog (G9). With key order one message of a key is out at a time (G6).
//   - Receipts: the signed name of one lease.
//   - Keeper: all groups of one shard on this host. It drives the ledgers: calls of consumers, what the apply
//     goroutine tells, timers, reads and proposals.
//
// The package does not know Raft, hosts, or listeners: it is given a Reader of applied state, a function that
// proposes, one that asks a ReadIndex, and the clocks.
//
// # Life of a message in a ledger
//
//	            take                    ack ─► apply: finished
//	(state) ─► fresh ───► leased ──────────────────────────────► gone
//	   │         ▲          │ │ release: at once, uncounted
//	   │  its time comes    │ └───────► retrying (not-before 0)
//	   ▼         │          │ nack, run out, claimed ─► apply: attempts + 1
//	delayed ── retrying ◄───┤
//	                        │ reject, last attempt ─► apply: dead letter
//	                        └──────────────────────────────────► gone; redrive brings it back
//
// A message behind the head of its key is blocked until the head is finished or dead. A claimed message is leased again,
// by the claimer. While a command for a message is unresolved the message is in none of these: it gets no lease, and its
// lease does not run out. The command that records its lease is one of them, but an ack may go beside it. A command whose
// outcome is unknown is proposed again, the same bytes, until apply answers or the epoch ends, because a copy may
// commit at any later time.
//
// # What a home change costs
//
// A lease that is open for the group's record_after, and every extend, is recorded in the state; a new home honours
// recorded leases, and their receipts, to their deadlines. Others end with their epoch: their messages come again with
// the same attempt number, and their receipts are refused. A planned move records every lease first.
package home
