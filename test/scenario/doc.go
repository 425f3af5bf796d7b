// Package scenario runs scripts against a whole fleet, two full hosts and a witness on real loopback TCP in one process:
// what a user sees of publish, delivery, failure and order, without kills (test/fault has those).
//
// A script is a file of testdata/script. Each has a queue of its own, and directives of one shared fleet:
//
//	queue [ordering=key] [max-messages=N] [max-delay=D]      creates the script's queue
//	group NAME [home=HOST] [max-attempts=N] [delays=D,D..] [lease=D] [max-in-flight=N] [from=latest]
//	publish [delay=D] [ttl=D] [dedup=ID]                     a message for every input line; "key: body" in a keyed queue
//	receive GROUP [max=N] [wait=D] [lease=D] [as=NAME] [after=D] [within=D]
//	receive GROUP .. background=NAME                         a receive that waits while the script goes on
//	join NAME [within=D]                                     its answer
//	ack|nack|release|reject|extend GROUP RECEIPT.. [delay=D] [lease=D]
//	move GROUP to=HOST                                       hands the home over
//	reset GROUP, delete GROUP, dead GROUP, redrive GROUP, purge GROUP, stats GROUP, digest
//
// A receipt is called by its message's address, or by the receive's as=NAME. after and within bound how long after the last
// directive that changed something a message may come; "too early" or "too late" is printed, not the time, so that a script
// has one right answer. -rewrite writes it.
package scenario
