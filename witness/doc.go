// Package witness holds the rules of a replica that votes and stores no payload.
//
// A witness receives (index, term) of every entry in place of the entry, config changes whole, and counts in
// elections and commit quorums like any voter. So two full replicas and a witness outlive any one of the
// three, at the disk of two. It cannot tell what was proposed, has no state, and never leads.
//
//	full       holds state, votes, leads. Born as an initial member, or by promotion of a non-voting one.
//	non-voting holds state, does not vote. Born by a config change; may be promoted.
//	witness    holds no state, votes, does not lead. Born by a config change; stays a witness until it is removed.
//
// Here are the state machine that the engine wants to see all the same (NewStateMachine), what a role may do
// (Role and the Check functions), and the engine's membership rules as pure functions (Apply, Replay), from
// which a host's log computes the membership of a witness without replaying it.
//
// The package knows no host, log, or catalog; all of it may be called from any goroutine.
package witness
