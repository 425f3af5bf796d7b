// Package wal is the Raft log of a whole host: one log of segments, behind dragonboat's raftio.ILogDB, that
// every shard of the host shares.
//
// It exists for two reasons. A log per shard pays an fsync per shard, so that 48 busy shards run at a
// seventh of one shard's rate; here one fdatasync covers whatever is waiting (commit.go). And neither of
// dragonboat's own logs can carry G1: one panics the process on a torn page, the other silently drops
// acknowledged entries behind a flipped byte; here a torn tail is told from corruption, and corruption is
// named and refused (recover.go).
//
// A save travels so: SaveRaftState → submit, where the first caller leads and takes all who wait → encode into
// one batch, applied to the index in the same order → one write over a pre-written page range of the
// active segment → fdatasync → everybody wakes. Reads go index → cache of recent batches → disk.
//
// Files, all in Options.Dir:
//
//	0000000000000007.seg   segment 7: header page, batches of records, then, once it is full, footer and trailer
//	0000000000000009.spare pre-written, for a later segment
//	LOCK                   held while the log is open
//
// What must hold, and where it is seen to:
//  1. A save with entries, a snapshot, or another term or vote is durable when it returns (writeGroup).
//  2. A batch is there whole or not at all, and is one write; the next is written after its fsync (batch).
//  3. Only the newest segment with batches lacks a trailer, and the segment after a sealed one exists (rotate).
//  4. What a segment alone says is written again before the segment is freed, and the record that it is freed is
//     durable before its file is touched (reclaimOnce, discard).
//  5. The entries of a replica between its compacted-to and last index are all there (replica.Check).
//
// The package knows nothing of queues, catalogs or clocks. The rules of a shard's membership come in as a
// function (Options.WitnessMembership).
package wal
