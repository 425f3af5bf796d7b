// Package peer is the API that the hosts of one fleet offer one another, over HTTP/2, beside the Raft transport.
//
// Peers is one host's side of it: a listener with a mux, on which the packages that need to talk to another host register
// their services (Handle), and a client for each other host (Client), with connections that are kept. Every request and answer
// carries the fleet's and the sender's id, and neither side accepts a stranger: a host that took another's address, or an
// address of another fleet, is refused with WRONG_FLEET before anything is read.
//
// Of its own, the package serves PeerService: who a host is, the catalog for the hosts that hold no replica of it, and a
// report from every host to every other, from which follow who is alive, how far its replicas are, and whose clock is off.
//
// It knows no shard, catalog or engine: what it tells and asks comes from a Backend.
package peer
