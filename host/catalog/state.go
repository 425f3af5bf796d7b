package catalog

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// State is the catalog. Apply is called by one goroutine; View may be called beside it.
//
// Invariants, checked by Check:
//  1. shard and queue ids lie below the next ones; shards of queues begin at FirstQueueShard;
//  2. a queue's shards are placed, not deleted, and name it; a placement of a queue that is not deleted belongs to one;
//  3. replica ids of a placement ascend from 1, and no two of its replicas that are not removed are on one host;
//  4. a witness is never an initial member;
//  5. a move is of a shard that is not deleted, between two of its replicas that are not out of it, or as checkReseat has it; and there
//     are at most MaxMoves;
//  6. a growth is of a queue, and its shards are placed, not deleted, and numbered as the queue's last partitions: behind the others
//     until it is opened, among them from then on.
type State struct {
	d    data
	view atomic.Pointer[View] // of the present version, or nil
}

// data is everything that a snapshot holds. The slices inside its records are never changed in place: Views share them.
type data struct {
	version   uint64
	fleet     FleetID
	macKey    [32]byte
	nextShard uint64
	nextQueue uint64

	hosts      map[uint64]Host
	queues     map[QueueKey]Queue
	placements map[uint64]Placement
	created    map[uint64]uint64 // operation id of a creation → queue id, for ever

	incarnations map[uint64]uint64    // host → that of its data directory
	hostStates   map[uint64]HostState // without the active ones
	removed      map[uint64]bool      // ids of removed hosts, for ever
	moves        map[uint64]Move      // by shard
	joinTokens   map[uint64]JoinToken
	tenants      map[uint64]Tenant
	accessTokens map[uint64]AccessToken
	growths      map[uint64]Growth // by queue id
}

// NewState returns the catalog of a fleet that does not exist yet.
func NewState() *State {
	return &State{d: data{
		nextShard:  FirstQueueShard,
		nextQueue:  1,
		hosts:      make(map[uint64]Host),
		queues:     make(map[QueueKey]Queue),
		placements: make(map[uint64]Placement),
		created:    make(map[uint64]uint64),

		incarnations: make(map[uint64]uint64),
		hostStates:   make(map[uint64]HostState),
		removed:      make(map[uint64]bool),
		moves:        make(map[uint64]Move),
		joinTokens:   make(map[uint64]JoinToken),
		tenants:      make(map[uint64]Tenant),
		accessTokens: make(map[uint64]AccessToken),
		growths:      make(map[uint64]Growth),
	}}
}

// refusal is why a command changes nothing.
type refusal struct {
	code   code.Code
	detail string
}

func refuse(c code.Code, format string, args ...any) *refusal {
	return &refusal{code: c, detail: fmt.Sprintf(format, args...)}
}

// Apply executes one command at its index in the log. A refusal changes nothing. It depends on nothing but the state and
// its arguments.
func (s *State) Apply(index uint64, c Command) Result {
	r := Result{Code: code.OK, Index: index}
	changed, refused := s.apply(c, &r)
	if refused != nil {
		r.Code, r.Detail = refused.code, refused.detail
	} else if changed {
		s.d.version++
		s.view.Store(nil)
	}
	r.Version = s.d.version
	return r
}

func (s *State) apply(c Command, r *Result) (changed bool, _ *refusal) {
	if _, ok := c.(*InitFleet); !ok && s.d.fleet == (FleetID{}) {
		return false, refuse(code.MutationFenced, "the fleet has no id yet: wait until its first hosts have formed it")
	}
	switch c := c.(type) {
	case *InitFleet:
		return s.initFleet(c, r)
	case *RegisterHost:
		return s.registerHost(c, r)
	case *CreateQueue:
		return s.createQueue(c, r)
	case *ConfigureQueue:
		return s.configureQueue(c, r)
	case *DeleteQueue:
		return s.deleteQueue(c)
	case *MoveQueue:
		return s.moveQueue(c, r)
	case *ReplicaReport:
		return s.reportReplica(c)
	case *JoinHost:
		return s.joinHost(c, r)
	case *CreateJoinToken:
		return s.createJoinToken(c)
	case *DrainHost:
		return s.drainHost(c, r)
	case *RemoveHost:
		return s.removeHost(c, r)
	case *PutTenant:
		return s.putTenant(c)
	case *DeleteTenant:
		return s.deleteTenant(c)
	case *CreateAccessToken:
		return s.createAccessToken(c)
	case *RevokeAccessToken:
		return s.revokeAccessToken(c)
	case *GrowQueue:
		return s.growQueue(c, r)
	case *GrowthReport:
		return s.reportGrowth(c, r)
	case *StartMove:
		return s.startMove(c)
	case *MoveReport:
		return s.reportMove(c)
	case *Reseat:
		return s.reseat(c)
	}
	return false, refuse(code.Malformed, "unknown command")
}

func (s *State) initFleet(c *InitFleet, r *Result) (bool, *refusal) {
	if s.d.fleet != (FleetID{}) {
		r.Fleet = s.d.fleet
		return false, nil
	}
	if c.FleetID == (FleetID{}) || len(c.Members) == 0 {
		return false, refuse(code.InvalidArgument, "a fleet needs an id and the members of its catalog")
	}
	for i, m := range c.Members {
		if m.ID != queue.ReplicaID(i+1) || m.HostID == 0 || m.State != ReplicaPlanned || m.Birth != BirthInitial && m.Birth != BirthWitness {
			return false, refuse(code.InvalidArgument, "member %d of the catalog is not replica %d, planned, initial or witness", i, i+1)
		}
	}
	s.d.fleet, s.d.macKey = c.FleetID, c.MACKey
	s.d.placements[ShardID] = Placement{Shard: ShardID, Replicas: slices.Clone(c.Members)}
	r.Fleet = c.FleetID
	return true, nil
}

func (s *State) registerHost(c *RegisterHost, r *Result) (bool, *refusal) {
	old, known := s.d.hosts[c.Host.ID]
	r.Host = old
	if refused := checkHost(c.Host); refused != nil {
		return false, refused
	}
	if s.d.removed[c.Host.ID] {
		return false, refuse(code.HostRefused, "host %d was removed from the fleet: give this host another id", c.Host.ID)
	}
	if known && old.Role != c.Host.Role {
		return false, refuse(code.MutationFenced, "host %d is registered as %v and never changes its role: give this host another id", old.ID, old.Role)
	}
	if same := c.Host; known {
		if same.Version = old.Version; same == old {
			return false, nil
		}
	}
	if c.Host.Version != old.Version {
		return false, refuse(code.MutationFenced, "host %d has changed: it is at version %d", c.Host.ID, old.Version)
	}
	if refused := s.checkNewcomer(c.Host); !known && refused != nil {
		return false, refused
	}
	next := c.Host
	next.Version++
	s.d.hosts[next.ID] = next
	r.Host = next
	return true, nil
}

// checkNewcomer refuses a host that is one too many, or a witness that holds the catalog since the fleet was formed.
func (s *State) checkNewcomer(h Host) *refusal {
	if len(s.d.hosts) >= MaxHosts {
		return refuse(code.LimitReached, "the fleet has %d hosts", MaxHosts)
	}
	p := s.d.placements[ShardID]
	if r, ok := p.OnHost(h.ID); ok && h.Role == HostWitness && r.Birth != BirthWitness {
		return refuse(code.MutationFenced, "host %d holds the catalog and is no witness: give this host another id", h.ID)
	}
	return nil
}

func checkHost(h Host) *refusal {
	switch {
	case h.ID == 0:
		return refuse(code.InvalidArgument, "host ids begin at 1")
	case h.Role != HostFull && h.Role != HostWitness:
		return refuse(code.InvalidArgument, "host %d has no role", h.ID)
	case h.RaftAddr == "" || h.PeerAddr == "":
		return refuse(code.InvalidArgument, "host %d needs a Raft address and a peer address", h.ID)
	case max(len(h.RaftAddr), len(h.PeerAddr), len(h.ClientAddr)) > MaxAddressBytes:
		return refuse(code.InvalidArgument, "an address of host %d is longer than %d bytes", h.ID, MaxAddressBytes)
	case len(h.Domain) > MaxDomainBytes:
		return refuse(code.InvalidArgument, "the domain of host %d is longer than %d bytes", h.ID, MaxDomainBytes)
	}
	return nil
}

func (s *State) createQueue(c *CreateQueue, r *Result) (bool, *refusal) {
	want, refused := wanted(c)
	if refused != nil {
		return false, refused
	}
	if q, ok := s.d.queues[want.Key()]; ok {
		r.Queue = q
		return false, compare(q, want)
	}
	if id, ok := s.d.created[c.OperationID]; ok {
		return false, refuse(code.MutationFenced, "this creation was done before, as queue %d, which was deleted since", id)
	}
	if refused := s.d.mayOwnMore(want.Tenant); refused != nil {
		return false, refused
	}
	placed, refused := s.place(want)
	if refused != nil {
		return false, refused
	}
	want.ID = s.d.nextQueue
	s.d.nextQueue++
	for partition, members := range placed {
		p := Placement{Shard: s.d.nextShard, QueueID: want.ID, Partition: uint32(partition), Replicas: members}
		s.d.nextShard++
		s.d.placements[p.Shard] = p
		want.Shards = append(want.Shards, p.Shard)
	}
	s.d.queues[want.Key()] = want
	s.d.created[c.OperationID] = want.ID
	r.Queue = want
	return true, nil
}

// wanted checks a creation and returns the queue it asks for, without ids and shards.
func wanted(c *CreateQueue) (Queue, *refusal) {
	q := Queue{Tenant: c.Tenant, Name: c.Name, Options: c.Options, Replicas: c.Replicas, Witnesses: c.Witnesses, OperationID: c.OperationID}
	if q.Tenant == "" {
		q.Tenant = DefaultTenant
	}
	q.Options.Version, q.Options.Partition = 1, 0
	q.Options.Partitions = max(q.Options.Partitions, 1)
	switch {
	case c.OperationID == 0:
		return q, refuse(code.InvalidArgument, "a creation needs an operation id")
	case !validName(q.Name):
		return q, refuse(code.InvalidName, "%q is not a queue's name: %s", clip(q.Name), code.InvalidName.Info().Text)
	case !validName(q.Tenant):
		return q, refuse(code.InvalidName, "%q is not a tenant's name: %s", clip(q.Tenant), code.InvalidName.Info().Text)
	case q.Options.Partitions > MaxPartitions:
		return q, refuse(code.InvalidArgument, "a queue has at most %d partitions, not %d", MaxPartitions, q.Options.Partitions)
	}
	return q, checkLayout(q.Replicas, q.Witnesses)
}

// compare says whether an existing queue is the one that a creation asks for.
func compare(have, want Queue) *refusal {
	options := want.Options
	options.Version = have.Options.Version
	if have.Options == options && have.Replicas == want.Replicas && have.Witnesses == want.Witnesses {
		return nil
	}
	if options.Partitions != have.Options.Partitions {
		return refuse(code.QueueExistsMismatch, "queue %s exists with other options: it has %d partitions, not %d (`tierq queue grow` gives a queue more)", have.Name, have.Options.Partitions, options.Partitions)
	}
	return refuse(code.QueueExistsMismatch, "queue %s exists with other options", have.Name)
}

func (s *State) configureQueue(c *ConfigureQueue, r *Result) (bool, *refusal) {
	q, refused := s.find(c.Tenant, c.Name, c.ExpectedID)
	if refused != nil {
		return false, refused
	}
	r.Queue = q
	next := c.Options
	next.Partition, next.Version = 0, q.Options.Version
	next.Partitions = max(next.Partitions, 1)
	if next == q.Options {
		return false, nil
	}
	if next.Partitions != q.Options.Partitions {
		return false, refuse(code.InvalidArgument, "queue %s has %d partitions: only `tierq queue grow` changes that", q.Name, q.Options.Partitions)
	}
	if c.Options.Version != q.Options.Version {
		return false, refuse(code.MutationFenced, "the options of queue %s are at version %d, this was decided on %d", q.Name, q.Options.Version, c.Options.Version)
	}
	next.Version++
	q.Options = next
	s.d.queues[q.Key()] = q
	r.Queue = q
	return true, nil
}

// find returns a queue by name; expectedID 0 is any.
func (s *State) find(tenant, name string, expectedID uint64) (Queue, *refusal) {
	if tenant == "" {
		tenant = DefaultTenant
	}
	q, ok := s.d.queues[QueueKey{tenant, name}]
	if !ok {
		return q, refuse(code.UnknownQueue, "queue %q does not exist", clip(name))
	}
	if expectedID != 0 && q.ID != expectedID {
		return q, refuse(code.MutationFenced, "queue %s is another one now: it has id %d, not %d", name, q.ID, expectedID)
	}
	return q, nil
}

func (s *State) deleteQueue(c *DeleteQueue) (bool, *refusal) {
	q, refused := s.find(c.Tenant, c.Name, c.ExpectedID)
	if refused != nil {
		if s.wasDeleted(c.ExpectedID) {
			return false, nil
		}
		return false, refused
	}
	s.drop(q)
	return true, nil
}

// wasDeleted says whether a queue id was given out and its queue is gone.
func (s *State) wasDeleted(queueID uint64) bool {
	if queueID == 0 || queueID >= s.d.nextQueue {
		return false
	}
	_, exists := s.d.queueByID(queueID)
	return !exists
}

func (s *State) reportReplica(c *ReplicaReport) (bool, *refusal) {
	p, ok := s.d.placements[c.Shard]
	if !ok {
		return false, refuse(code.UnknownPartition, "shard %d is not in the catalog", c.Shard)
	}
	i := slices.IndexFunc(p.Replicas, func(r Replica) bool { return r.ID == c.Replica })
	if i < 0 {
		return false, refuse(code.NotReplica, "shard %d has no replica %d", c.Shard, c.Replica)
	}
	next, refused := moved(p, p.Replicas[i], c)
	if refused != nil || next == p.Replicas[i] {
		return false, refused
	}
	p.Replicas = slices.Clone(p.Replicas)
	p.Replicas[i] = next
	s.d.placements[p.Shard] = p
	if m := s.d.moves[p.Shard]; next.State == ReplicaRemoved && m.Step == MoveWipe && m.From == next.ID {
		s.wiped(m)
	}
	return true, nil
}

// moved returns the replica as it is after a report.
func moved(p Placement, r Replica, c *ReplicaReport) (Replica, *refusal) {
	switch c.Kind {
	case ReportStarted:
		return started(p, r, c)
	case ReportMember:
		r.Member = true
	case ReportLost:
		if r.State == ReplicaPlanned {
			return r, refuse(code.MutationFenced, "replica %d of shard %d was never started", r.ID, p.Shard)
		}
		if !r.State.Gone() {
			r.State = ReplicaLost
		}
	case ReportRemoved:
		if !p.Deleted && r.State != ReplicaRetired && r.State != ReplicaRemoved {
			return r, refuse(code.MutationFenced, "shard %d is not deleted, and replica %d is not out of it", p.Shard, r.ID)
		}
		r.State = ReplicaRemoved
	default:
		return r, refuse(code.Malformed, "unknown report of a replica")
	}
	return r, nil
}

func started(p Placement, r Replica, c *ReplicaReport) (Replica, *refusal) {
	switch {
	case c.Nonce == 0:
		return r, refuse(code.InvalidArgument, "a start needs a nonce")
	case p.Deleted:
		return r, refuse(code.QueueRetired, "shard %d is deleted", p.Shard)
	case r.State == ReplicaPlanned:
		r.State, r.Nonce = ReplicaStarted, c.Nonce
		return r, nil
	case r.State == ReplicaStarted && r.Nonce == c.Nonce:
		return r, nil
	}
	return r, refuse(code.MutationFenced, "replica %d of shard %d was started before, and is %v", r.ID, p.Shard, r.State)
}

// Check returns an error that names the first invariant that does not hold.
func (s *State) Check() error {
	for _, shard := range slices.Sorted(maps.Keys(s.d.placements)) {
		if err := s.checkPlacement(s.d.placements[shard]); err != nil {
			return err
		}
	}
	for key, q := range s.d.queues {
		if q.Key() != key || q.ID == 0 || q.ID >= s.d.nextQueue {
			return fmt.Errorf("invariant 1: queue %v has id %d, the next is %d", key, q.ID, s.d.nextQueue)
		}
		for i, shard := range q.Shards {
			if p, ok := s.d.placements[shard]; !ok || p.Deleted || p.QueueID != q.ID || p.Partition != uint32(i) {
				return fmt.Errorf("invariant 2: partition %d of queue %v is at shard %d, which is %+v", i, key, shard, p)
			}
		}
	}
	if err := s.checkGrowths(); err != nil {
		return err
	}
	return s.checkMoves()
}

func (s *State) checkPlacement(p Placement) error {
	if p.Shard == 0 || p.Shard >= s.d.nextShard || (p.Shard < FirstQueueShard) != (p.QueueID == 0) {
		return fmt.Errorf("invariant 1: shard %d of queue %d, the next is %d", p.Shard, p.QueueID, s.d.nextShard)
	}
	hosts := make(map[uint64]bool)
	for i, r := range p.Replicas {
		if r.ID != queue.ReplicaID(i+1) || hosts[r.HostID] {
			return fmt.Errorf("invariant 3: shard %d: %+v", p.Shard, p.Replicas)
		}
		hosts[r.HostID] = r.State != ReplicaRemoved
		if h, ok := s.d.hosts[r.HostID]; ok && h.Role == HostWitness && r.Birth != BirthWitness {
			return fmt.Errorf("invariant 4: shard %d has replica %d, %v, on the witness host %d", p.Shard, r.ID, r.Birth, r.HostID)
		}
	}
	return nil
}

// validName accepts 1 to 80 of A-Z a-z 0-9 . _ -, not beginning with . or $.
func validName(name string) bool {
	if name == "" || len(name) > queue.MaxNameBytes || name[0] == '.' {
		return false
	}
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// clip bounds what a refusal repeats of a name that may be anything.
func clip(s string) string {
	if len(s) > queue.MaxNameBytes {
		return s[:queue.MaxNameBytes]
	}
	return s
}
