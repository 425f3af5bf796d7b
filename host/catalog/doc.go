// Package catalog is the state machine of shard 1, in which a fleet keeps what it knows of itself: its id, its hosts, its
// queues, where every replica lives, and the key of its receipts.
//
// Everything that decides is in a command or in the state: placements are computed in apply, from the hosts that the state
// knows, so every replica of the catalog computes the same one. A refusal is a result with a registry code. The package knows
// no clock, disk or network.
//
//	command (Encode, Decode) ─► State.Apply ─► Result
//	                              │
//	                              └─► View: an immutable copy, as bytes on the wire and on the disks of hosts that
//	                                  are not members (EncodeView, DecodeView)
//
// Ids are never reused: shard ids count up from 2, queue ids from 1, and each shard's replica ids from 1. A deleted shard
// keeps its placement for ever, with the role that each replica was born in, since a host that comes back after a year must
// still be told what to do with the replica on its disk.
//
// Apply and the machine around it are called by one goroutine at a time; a View may be used by any number.
package catalog
