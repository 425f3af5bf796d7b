package catalog

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"maps"

	"github.com/tierq/tierq/queue/code"
)

// HostState is what the fleet means to do with a host. Part of the format; do not renumber.
type HostState uint8

const (
	// HostActive gets replicas.
	HostActive HostState = 0
	// HostDraining gets none, and those that it has are moved away.
	HostDraining HostState = 1
	// HostLost is gone for good: its replicas are replaced without it, and it never joins again.
	HostLost HostState = 2
)

// String returns the state's name.
func (s HostState) String() string {
	switch s {
	case HostActive:
		return "active"
	case HostDraining:
		return "draining"
	case HostLost:
		return "lost"
	}
	return fmt.Sprintf("HostState(%d)", uint8(s))
}

// MaxJoinTokens bounds the join tokens that are neither used nor expired.
const MaxJoinTokens = 128

// JoinToken lets one host join, once, until it expires. The secret itself is not kept.
type JoinToken struct {
	ID        uint64
	Hash      [sha256.Size]byte
	ExpiresMs uint64 // wall clock, unix milliseconds
}

// JoinHost adds a host, or changes its addresses or domain, as RegisterHost does, under the incarnation of its data directory: a random
// number that the directory got when it was made. A known host with another one has lost its data, and with them its votes: it is
// refused with HostRefused, as is one that was removed. A host that the catalog does not know needs a token, which is used up by it, unless
// TokenID is 0: the host that proposes then answers for it, as its own list of hosts names the newcomer.
type JoinHost struct {
	Host        Host
	Incarnation uint64
	TokenID     uint64
	TokenHash   [sha256.Size]byte
	NowMs       uint64 // the proposer's wall clock, unix milliseconds; for the token
}

// CreateJoinToken stores a token's hash. Those that have expired by NowMs are dropped.
type CreateJoinToken struct {
	Token JoinToken
	NowMs uint64
}

// DrainHost begins to move everything away from a host, or with Cancel ends that. The same again is OK.
type DrainHost struct {
	HostID uint64
	Cancel bool
}

// RemoveHost removes a host that has no replicas any more; its id is never used again. With Lost it declares a host to be gone for good:
// its replicas are lost, and the host goes once they are replaced. The same again is OK.
type RemoveHost struct {
	HostID uint64
	Lost   bool
}

func (*JoinHost) tag() uint8        { return tagJoinHost }
func (*CreateJoinToken) tag() uint8 { return tagCreateJoinToken }
func (*DrainHost) tag() uint8       { return tagDrainHost }
func (*RemoveHost) tag() uint8      { return tagRemoveHost }

func (c *JoinHost) encode(e *encoder) {
	e.host(c.Host)
	e.u64(c.Incarnation)
	e.u64(c.TokenID)
	e.b = append(e.b, c.TokenHash[:]...)
	e.u64(c.NowMs)
}

func (d *decoder) joinHost() *JoinHost {
	c := &JoinHost{Host: d.host(), Incarnation: d.u64(), TokenID: d.u64()}
	copy(c.TokenHash[:], d.take(len(c.TokenHash)))
	c.NowMs = d.u64()
	return c
}

func (c *CreateJoinToken) encode(e *encoder) {
	e.joinToken(c.Token)
	e.u64(c.NowMs)
}

func (c *DrainHost) encode(e *encoder) {
	e.u64(c.HostID)
	e.bool(c.Cancel)
}

func (c *RemoveHost) encode(e *encoder) {
	e.u64(c.HostID)
	e.bool(c.Lost)
}

func (e *encoder) joinToken(t JoinToken) {
	e.u64(t.ID)
	e.b = append(e.b, t.Hash[:]...)
	e.u64(t.ExpiresMs)
}

func (d *decoder) joinToken() JoinToken {
	t := JoinToken{ID: d.u64()}
	copy(t.Hash[:], d.take(len(t.Hash)))
	t.ExpiresMs = d.u64()
	return t
}

func (s *State) joinHost(c *JoinHost, r *Result) (bool, *refusal) {
	id := c.Host.ID
	_, known := s.d.hosts[id]
	r.Host = s.d.hosts[id]
	have := s.d.incarnations[id]
	switch {
	case c.Incarnation == 0:
		return false, refuse(code.InvalidArgument, "host %d does not name the incarnation of its data directory", id)
	case s.d.removed[id] || s.d.hostStates[id] == HostLost:
		return false, refuse(code.HostRefused, "host %d was removed from the fleet, and a removed id is never used again: give this host another id and an empty data directory, and let it join with a token (`tierq host token`, `tierq host join`)", id)
	case known && have != 0 && have != c.Incarnation:
		return false, refuse(code.HostRefused, "host %d is in the fleet with another data directory, in which its votes are: bring that directory back; if it is gone for good, run `tierq host remove %d --lost`, give this host another id, and let it join with a token (`tierq host token`, `tierq host join`)", id, id)
	case !known && c.TokenID != 0:
		if refused := s.checkToken(c); refused != nil {
			return false, refused
		}
	}
	changed, refused := s.registerHost(&RegisterHost{Host: c.Host}, r)
	if refused != nil {
		return false, refused
	}
	if have == 0 {
		s.d.incarnations[id] = c.Incarnation
		changed = true
	}
	if !known {
		delete(s.d.joinTokens, c.TokenID)
	}
	return changed, nil
}

// checkToken compares in constant time, and takes as long for a token that does not exist.
func (s *State) checkToken(c *JoinHost) *refusal {
	t, ok := s.d.joinTokens[c.TokenID]
	equal := subtle.ConstantTimeCompare(t.Hash[:], c.TokenHash[:]) == 1
	if !ok || !equal || c.NowMs >= t.ExpiresMs {
		return refuse(code.AuthFailed, "the join token is wrong, used, or expired: make another one with `tierq host token`")
	}
	return nil
}

func (s *State) createJoinToken(c *CreateJoinToken) (bool, *refusal) {
	if c.Token.ID == 0 || c.Token.ExpiresMs <= c.NowMs {
		return false, refuse(code.InvalidArgument, "a join token needs an id and a time in which it can be used")
	}
	if have, ok := s.d.joinTokens[c.Token.ID]; ok {
		if have != c.Token {
			return false, refuse(code.MutationFenced, "the join token's id was given out")
		}
		return false, nil
	}
	live := 0
	for _, t := range s.d.joinTokens {
		if t.ExpiresMs > c.NowMs {
			live++
		}
	}
	if live >= MaxJoinTokens {
		return false, refuse(code.LimitReached, "%d join tokens wait to be used: wait until some have expired", MaxJoinTokens)
	}
	maps.DeleteFunc(s.d.joinTokens, func(_ uint64, t JoinToken) bool { return t.ExpiresMs <= c.NowMs })
	s.d.joinTokens[c.Token.ID] = c.Token
	return true, nil
}

func (s *State) drainHost(c *DrainHost, r *Result) (bool, *refusal) {
	h, ok := s.d.hosts[c.HostID]
	if !ok {
		return false, unknownHost(c.HostID)
	}
	r.Host = h
	want := HostDraining
	if c.Cancel {
		want = HostActive
	}
	switch have := s.d.hostStates[c.HostID]; have {
	case want:
		return false, nil
	case HostLost:
		return false, refuse(code.MutationFenced, "host %d was declared lost: its replicas are being replaced", c.HostID)
	}
	s.setHostState(c.HostID, want)
	return true, nil
}

func unknownHost(id uint64) *refusal {
	return refuse(code.UnknownHost, "host %d is not in the fleet: `tierq host list` names those that are", id)
}

func (s *State) setHostState(id uint64, state HostState) {
	if state == HostActive {
		delete(s.d.hostStates, id)
		return
	}
	s.d.hostStates[id] = state
}

func (s *State) removeHost(c *RemoveHost, r *Result) (bool, *refusal) {
	h, ok := s.d.hosts[c.HostID]
	switch {
	case s.d.removed[c.HostID]:
		return false, nil
	case !ok:
		return false, unknownHost(c.HostID)
	}
	r.Host = h
	lost := s.d.hostStates[c.HostID] == HostLost
	if c.Lost && !lost {
		s.forfeitAll(c.HostID)
	}
	left := s.left(c.HostID, c.Lost || lost)
	switch {
	case left == 0:
		delete(s.d.hosts, c.HostID)
		delete(s.d.hostStates, c.HostID)
		delete(s.d.incarnations, c.HostID)
		s.d.removed[c.HostID] = true
		return true, nil
	case !c.Lost:
		return false, refuse(code.MutationFenced, "host %d still has %d replicas: `tierq host drain %d` moves them away, and with `--lost` the host is taken for gone for good and they are replaced without it", c.HostID, left, c.HostID)
	case lost:
		return false, nil
	}
	s.setHostState(c.HostID, HostLost)
	s.loseReplicas(c.HostID)
	return true, nil
}

// left counts the replicas that keep a host in the fleet. One that is out of its shard waits for the host to remove its data, unless the
// host is lost.
func (s *State) left(hostID uint64, lost bool) (n int) {
	for _, p := range s.d.placements {
		for _, r := range p.Replicas {
			if r.HostID == hostID && r.State != ReplicaRemoved && !(lost && (r.State == ReplicaRetired || p.Deleted)) {
				n++
			}
		}
	}
	return n
}

// loseReplicas takes the replicas of a host for lost, and those that it never started too: they must not be started by whoever comes in its
// place.
func (s *State) loseReplicas(hostID uint64) {
	for shard, p := range s.d.placements {
		if p.Deleted {
			continue
		}
		for i, r := range p.Replicas {
			if r.HostID == hostID && !r.State.Gone() {
				r.State = ReplicaLost
				s.setReplica(shard, i, r)
			}
		}
	}
}

// setReplica replaces one replica of a placement, whose slice views may share.
func (s *State) setReplica(shard uint64, i int, r Replica) {
	p := s.d.placements[shard]
	replicas := make([]Replica, len(p.Replicas))
	copy(replicas, p.Replicas)
	replicas[i] = r
	p.Replicas = replicas
	s.d.placements[shard] = p
}
