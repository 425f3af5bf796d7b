package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue/code"
)

func TestMoveQueue(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostWitness)
	make := func(op uint64, tenant, name string) Queue {
		return apply(t, s, &CreateQueue{OperationID: op, Tenant: tenant, Name: name, Options: defaults(), Replicas: 2, Witnesses: 1}, code.OK).Queue
	}
	old, staged := make(1, "", "orders"), make(2, StagingTenant, "x-1")
	move := MoveQueue{ExpectedID: staged.ID, FromTenant: StagingTenant, FromName: "x-1", ToName: "orders"}
	apply(t, s, &move, code.QueueExistsMismatch)
	wrong := move
	wrong.ReplaceID = staged.ID
	apply(t, s, &wrong, code.QueueExistsMismatch)
	wrong = move
	wrong.ToName, wrong.ReplaceID = "other", old.ID
	apply(t, s, &wrong, code.MutationFenced)
	wrong.ToName, wrong.ReplaceID = ".x", 0
	apply(t, s, &wrong, code.InvalidName)
	wrong.ToName, wrong.ExpectedID = "other", 0
	apply(t, s, &wrong, code.InvalidArgument)

	move.ReplaceID = old.ID
	q := apply(t, s, &move, code.OK).Queue
	require.Equal(t, QueueKey{DefaultTenant, "orders"}, q.Key())
	require.Equal(t, staged.Shards, q.Shards)
	version := s.Seal().Version()
	apply(t, s, &move, code.OK)
	require.Equal(t, version, s.Seal().Version(), "the same again changes nothing")
	p, _ := s.Seal().Placement(old.Shards[0])
	require.True(t, p.Deleted)
	_, ok := s.Seal().Queue(StagingTenant, "x-1")
	require.False(t, ok)
	found, _ := s.Seal().QueueOfShard(staged.Shards[0])
	require.Equal(t, q, found)
	require.NoError(t, s.Check())

	third := make(3, StagingTenant, "x-2")
	apply(t, s, &MoveQueue{ExpectedID: third.ID, FromTenant: StagingTenant, FromName: "x-2", ToName: "copy"}, code.OK)
	require.NoError(t, s.Check())
}
