package catalog

import (
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// placed is a fleet of full hosts 1 to 3, a witness host 4 and a full host 5, with one queue of two full replicas and a witness.
func placed(t *testing.T) (*State, uint64) {
	t.Helper()
	s := fleet(t, HostFull, HostFull, HostFull, HostWitness, HostFull)
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "q", Options: defaults(), Replicas: 2, Witnesses: 1}, code.OK).Queue
	for _, id := range []queue.ReplicaID{1, 2, 3} {
		apply(t, s, &ReplicaReport{Shard: q.Shards[0], Replica: id, Kind: ReportStarted, Nonce: 7}, code.OK)
	}
	apply(t, s, &ReplicaReport{Shard: q.Shards[0], Replica: 3, Kind: ReportMember}, code.OK)
	return s, q.Shards[0]
}

func TestMoveSteps(t *testing.T) {
	s, shard := placed(t)
	p, _ := s.Seal().Placement(shard)
	require.Equal(t, []uint64{3, 5, 4}, []uint64{p.Replicas[0].HostID, p.Replicas[1].HostID, p.Replicas[2].HostID})
	apply(t, s, &StartMove{Shard: 99, From: 1, ToHost: 1}, code.UnknownPartition)
	apply(t, s, &StartMove{Shard: shard, From: 9, ToHost: 1}, code.NotReplica)
	apply(t, s, &StartMove{Shard: shard, From: 1, ToHost: 99}, code.UnknownHost)
	apply(t, s, &StartMove{Shard: shard, From: 1, ToHost: 4}, code.InvalidArgument) // a witness host
	apply(t, s, &StartMove{Shard: shard, From: 1, ToHost: 5}, code.NoPlacement)     // has a replica
	apply(t, s, &DrainHost{HostID: 2}, code.OK)
	apply(t, s, &StartMove{Shard: shard, From: 1, ToHost: 2}, code.NoPlacement)
	start := &StartMove{Shard: shard, From: 1, ToHost: 1}
	apply(t, s, start, code.OK)
	apply(t, s, start, code.OK) // the same again
	apply(t, s, &StartMove{Shard: shard, From: 2, ToHost: 1}, code.MutationFenced)

	at := func() Move { m, _ := s.Seal().Move(shard); return m }
	report := func(e MoveEvent, want code.Code) {
		t.Helper()
		apply(t, s, &MoveReport{Shard: shard, To: 4, Event: e}, want)
	}
	require.Equal(t, Move{Shard: shard, From: 1, To: 4, Step: MoveAdd}, at())
	p, _ = s.Seal().Placement(shard)
	require.Equal(t, Replica{ID: 4, HostID: 1, Birth: BirthNonVoting}, p.Replicas[3])
	report(MoveDone, code.MutationFenced)
	report(MoveLeft, code.MutationFenced)
	report(77, code.Malformed)
	report(MoveAdded, code.OK)
	report(MoveAdded, code.OK)
	require.Equal(t, MoveCatchUp, at().Step)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 4, Kind: ReportStarted, Nonce: 9}, code.OK)
	report(MovePromoted, code.OK)
	report(MoveAdded, code.OK) // a late copy
	require.Equal(t, MoveLeave, at().Step)
	require.True(t, s.Seal().Leaves(shard, 1))
	report(MoveLeft, code.OK)
	report(MovePromoted, code.OK)
	require.Equal(t, MoveRemove, at().Step)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 1, Kind: ReportRemoved}, code.MutationFenced) // it is in the shard yet
	report(MoveDone, code.OK)
	for _, e := range []MoveEvent{MoveAdded, MovePromoted, MoveLeft, MoveDone, MoveAborted} {
		report(e, code.OK) // late copies
	}
	apply(t, s, &MoveReport{Shard: shard, To: 9, Event: MoveDone}, code.NotReplica)
	p, _ = s.Seal().Placement(shard)
	require.Equal(t, ReplicaRetired, p.Replicas[0].State)
	require.True(t, p.Replicas[3].Votes())
	require.Equal(t, map[queue.ReplicaID]uint64{1: 3, 2: 5}, p.Initial(), "the initial members are the same for ever")
	require.Equal(t, map[uint64]int{1: 2, 2: 1, 4: 1, 5: 1}, s.Seal().Load())

	// Its host has it on disk yet, so it cannot come back there.
	apply(t, s, &StartMove{Shard: shard, From: 4, ToHost: 3}, code.NoPlacement)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 1, Kind: ReportStarted, Nonce: 7}, code.MutationFenced)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 1, Kind: ReportRemoved}, code.OK)
	apply(t, s, &StartMove{Shard: shard, From: 4, ToHost: 3}, code.OK)
	m, _ := s.Seal().Move(shard)
	require.EqualValues(t, 5, m.To, "ids are not reused")

	// It is given up: the new replica goes, the old one stays.
	apply(t, s, &MoveReport{Shard: shard, To: 5, Event: MoveAdded}, code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 5, Event: MoveAborted}, code.OK)
	require.True(t, s.Seal().Leaves(shard, 5))
	require.False(t, s.Seal().Leaves(shard, 4))
	apply(t, s, &MoveReport{Shard: shard, To: 5, Event: MoveDone}, code.OK)
	p, _ = s.Seal().Placement(shard)
	require.Equal(t, ReplicaRetired, p.Replicas[4].State)
	apply(t, s, &DeleteQueue{OperationID: 3, Name: "q"}, code.OK)
	require.Empty(t, s.Seal().Moves())
}

func TestMoveOfAWitness(t *testing.T) {
	s, shard := placed(t)
	apply(t, s, &RegisterHost{host(6, HostWitness)}, code.OK)
	apply(t, s, &StartMove{Shard: shard, From: 3, ToHost: 1}, code.InvalidArgument)
	apply(t, s, &StartMove{Shard: shard, From: 3, ToHost: 6}, code.OK)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveAdded}, code.OK)
	m, _ := s.Seal().Move(shard)
	require.Equal(t, MoveRemove, m.Step, "a witness has no state to catch up with, and no homes")
	p, _ := s.Seal().Placement(shard)
	require.True(t, p.Replicas[3].Member)
	require.Equal(t, BirthWitness, p.Replicas[3].Birth)
}

func TestMovesAreBounded(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostFull, HostFull)
	for i := range MaxMoves + 1 {
		name := string(rune('a' + i))
		q := apply(t, s, &CreateQueue{OperationID: uint64(i + 1), Name: name, Options: defaults(), Replicas: 3}, code.OK).Queue
		p, _ := s.Seal().Placement(q.Shards[0])
		var free uint64
		for id := uint64(1); id <= 4; id++ {
			if _, ok := p.OnHost(id); !ok {
				free = id
			}
		}
		want := code.OK
		if i == MaxMoves {
			want = code.LimitReached
		}
		apply(t, s, &StartMove{Shard: q.Shards[0], From: 1, ToHost: free}, want)
	}
}

func TestHostsJoinByToken(t *testing.T) {
	s := fleet(t, HostFull, HostFull)
	token, text := NewJoinToken(9)
	id, hash, err := ParseJoinToken(text + "\n")
	require.NoError(t, err)
	require.Equal(t, token, JoinToken{ID: id, Hash: hash, ExpiresMs: 9})
	_, access := NewAccessToken("", RoleProduce, "")
	for _, bad := range []string{"", "tierq-join-", "tierq-join-4d-00", text[1:], text[len("tierq-join-"):], text + "00", "tierq-join-0-" + text[len(text)-64:], access} {
		_, _, err := ParseJoinToken(bad)
		require.ErrorContains(t, err, "not a join token")
	}
	id, hash, err = ParseJoinToken("tierq-join-4d-" + strings.Repeat("00", 32))
	require.NoError(t, err)
	require.EqualValues(t, 77, id)
	require.Equal(t, sha256.Sum256(make([]byte, 32)), hash)
	apply(t, s, &CreateJoinToken{Token: JoinToken{ID: 77, Hash: hash, ExpiresMs: 100}, NowMs: 100}, code.InvalidArgument)
	apply(t, s, &CreateJoinToken{Token: JoinToken{ID: 77, Hash: hash, ExpiresMs: 100}, NowMs: 10}, code.OK)
	apply(t, s, &CreateJoinToken{Token: JoinToken{ID: 77, Hash: hash, ExpiresMs: 100}, NowMs: 10}, code.OK)
	apply(t, s, &CreateJoinToken{Token: JoinToken{ID: 77, ExpiresMs: 100}, NowMs: 10}, code.MutationFenced)

	join := func(id, incarnation, token uint64, hash [32]byte, now uint64) *JoinHost {
		return &JoinHost{Host: host(id, HostFull), Incarnation: incarnation, TokenID: token, TokenHash: hash, NowMs: now}
	}
	apply(t, s, join(3, 5, 77, [32]byte{}, 20), code.AuthFailed)
	apply(t, s, join(3, 5, 78, hash, 20), code.AuthFailed)
	apply(t, s, join(3, 5, 78, [32]byte{}, 20), code.AuthFailed)
	apply(t, s, join(3, 5, 77, hash, 100), code.AuthFailed) // expired
	apply(t, s, join(3, 0, 77, hash, 20), code.InvalidArgument)
	apply(t, s, join(3, 5, 77, hash, 20), code.OK)
	apply(t, s, join(3, 5, 77, hash, 20), code.OK)               // the answer was lost
	apply(t, s, join(4, 6, 77, hash, 20), code.AuthFailed)       // used
	apply(t, s, join(3, 6, 0, [32]byte{}, 20), code.HostRefused) // its disk is empty
	moved := join(3, 5, 0, [32]byte{}, 20)
	moved.Host.RaftAddr, moved.Host.Version = "else:1", 1
	apply(t, s, moved, code.OK)
	known := join(1, 8, 0, [32]byte{}, 0)
	known.Host.Version = 1
	apply(t, s, known, code.OK) // a host from before incarnations gets one
	known.Incarnation = 9
	apply(t, s, known, code.HostRefused)
}

func TestHostsLeave(t *testing.T) {
	s, shard := placed(t)
	apply(t, s, &DrainHost{HostID: 99}, code.UnknownHost)
	apply(t, s, &DrainHost{HostID: 3}, code.OK)
	apply(t, s, &DrainHost{HostID: 3}, code.OK)
	require.Equal(t, HostDraining, s.Seal().HostState(3))
	apply(t, s, &DrainHost{HostID: 3, Cancel: true}, code.OK)
	require.Equal(t, HostActive, s.Seal().HostState(3))
	apply(t, s, &RemoveHost{HostID: 99}, code.UnknownHost)
	apply(t, s, &RemoveHost{HostID: 3}, code.MutationFenced)

	// A host that is lost stays until its replicas are replaced, and never comes back.
	apply(t, s, &RemoveHost{HostID: 3, Lost: true}, code.OK)
	apply(t, s, &RemoveHost{HostID: 3, Lost: true}, code.OK)
	apply(t, s, &DrainHost{HostID: 3, Cancel: true}, code.MutationFenced)
	apply(t, s, &JoinHost{Host: host(3, HostFull), Incarnation: 4}, code.HostRefused)
	require.Equal(t, 1, s.Seal().Left(3))
	plans := s.Seal().Evacuation(func(uint64) bool { return true })
	require.Equal(t, []Planned{{Shard: shard, From: 1, FromHost: 3, ToHost: 1, Why: "lost"}}, plans)
	apply(t, s, plans[0].Command(), code.OK)
	for _, e := range []MoveEvent{MoveAdded, MovePromoted, MoveLeft} {
		apply(t, s, &MoveReport{Shard: shard, To: 4, Event: e}, code.OK)
	}
	apply(t, s, &RemoveHost{HostID: 3}, code.MutationFenced)
	apply(t, s, &MoveReport{Shard: shard, To: 4, Event: MoveDone}, code.OK)
	apply(t, s, &RemoveHost{HostID: 3}, code.OK)
	apply(t, s, &RemoveHost{HostID: 3}, code.OK)
	require.True(t, s.Seal().RemovedHost(3))
	_, ok := s.Seal().Host(3)
	require.False(t, ok)
	apply(t, s, &JoinHost{Host: host(3, HostFull), Incarnation: 4}, code.HostRefused)
	apply(t, s, &RegisterHost{host(3, HostFull)}, code.HostRefused)
}

func TestPlans(t *testing.T) {
	s, shard := placed(t)
	all := func(uint64) bool { return true }
	require.Empty(t, s.Seal().Evacuation(all))
	apply(t, s, &DrainHost{HostID: 4}, code.OK)
	plans := s.Seal().Evacuation(all)
	require.Len(t, plans, 1)
	require.Zero(t, plans[0].ToHost)
	require.Contains(t, plans[0].Reason, "let another witness host join")
	apply(t, s, &RegisterHost{host(6, HostWitness)}, code.OK)
	require.EqualValues(t, 6, s.Seal().Evacuation(all)[0].ToHost)
	require.Zero(t, s.Seal().Evacuation(func(id uint64) bool { return id != 6 })[0].ToHost)

	// What is lost goes first; the catalog has plans of its own.
	apply(t, s, &DrainHost{HostID: 1}, code.OK)
	apply(t, s, &ReplicaReport{Shard: shard, Replica: 2, Kind: ReportLost}, code.OK)
	plans = s.Seal().Evacuation(all)
	require.Equal(t, []Planned{
		{Shard: shard, From: 2, FromHost: 5, ToHost: 2, Why: "lost"},
	}, plans)

	// Four queues were made when there were three full hosts; then a fourth one came.
	s = fleet(t, HostFull, HostFull, HostFull)
	for i := range 4 {
		q := apply(t, s, &CreateQueue{OperationID: uint64(i + 1), Name: string(rune('a' + i)), Options: defaults(), Replicas: 3}, code.OK).Queue
		for _, id := range []queue.ReplicaID{1, 2, 3} {
			apply(t, s, &ReplicaReport{Shard: q.Shards[0], Replica: id, Kind: ReportStarted, Nonce: 7}, code.OK)
		}
	}
	require.Empty(t, s.Seal().Rebalance(all))
	apply(t, s, &RegisterHost{host(4, HostFull)}, code.OK)
	plans = s.Seal().Rebalance(all)
	require.Len(t, plans, 3, "5, 5 and 4 replicas become 4, 4, 3 and 3: %+v", plans)
	seen := map[uint64]bool{}
	for _, m := range plans {
		require.EqualValues(t, 4, m.ToHost)
		require.False(t, seen[m.Shard], "one move at a time")
		seen[m.Shard] = true
		apply(t, s, m.Command(), code.OK)
	}
	require.Empty(t, s.Seal().Rebalance(all), "what is under way counts")
	apply(t, s, &DrainHost{HostID: 4}, code.OK)
	require.Empty(t, s.Seal().Rebalance(func(id uint64) bool { return id != 1 }))
}
