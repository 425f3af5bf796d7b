package witness

import (
	"strings"
	"testing"

	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"
)

func TestRoles(t *testing.T) {
	for _, c := range []struct {
		role                               Role
		name                               string
		votes, state, leads, initialMember bool
	}{
		{None, "none", false, false, false, false},
		{Full, "full", true, true, true, true},
		{NonVoting, "non-voting", false, true, false, false},
		{Witness, "witness", true, false, false, false},
	} {
		require.Equal(t, c.name, c.role.String())
		require.Equal(t, c.votes, c.role.Votes(), c.name)
		require.Equal(t, c.state, c.role.HoldsState(), c.name)
		require.Equal(t, c.leads, c.role.MayLead(), c.name)
		require.Equal(t, c.initialMember, CheckInitial(1, c.role) == nil, c.name)
	}
	require.Equal(t, "Role(9)", Role(9).String())
	require.ErrorIs(t, CheckInitial(4, Witness), ErrInitialMember)
}

func TestCheckRoleChange(t *testing.T) {
	roles := []Role{None, Full, NonVoting, Witness}
	for _, from := range roles {
		for _, to := range roles {
			err := CheckRoleChange(4, from, to)
			if from == None || to == None || from == to || from == NonVoting && to == Full {
				require.NoError(t, err, "%v to %v", from, to)
			} else {
				require.ErrorIs(t, err, ErrRoleChange, "%v to %v", from, to)
			}
		}
	}
}

func TestCheckTransfer(t *testing.T) {
	m := sample()
	require.NoError(t, CheckTransfer(m, 1))
	for _, replicaID := range []uint64{3, 4, 9, 77} {
		require.ErrorIs(t, CheckTransfer(m, replicaID), ErrTransfer)
	}
}

func TestConfigStartsAsBorn(t *testing.T) {
	base := config.Config{ReplicaID: 4, ShardID: 1, ElectionRTT: 20, HeartbeatRTT: 1, SnapshotEntries: 20000, CompactionOverhead: 5000}
	for _, role := range []Role{Full, NonVoting, Witness} {
		cfg := Config(base, role)
		require.NoError(t, cfg.Validate(), role)
		require.Equal(t, role == Witness, cfg.IsWitness)
		require.Equal(t, role == NonVoting, cfg.IsNonVoting)
		require.Equal(t, role == Witness, cfg.SnapshotEntries == 0)
	}
}

func TestCheckPlacement(t *testing.T) {
	voters := []Place{{1, "rack-a"}, {2, ""}}
	require.NoError(t, CheckPlacement(Place{3, "rack-b"}, voters))
	require.NoError(t, CheckPlacement(Place{3, ""}, voters), "unnamed domains are not one domain")
	require.ErrorIs(t, CheckPlacement(Place{1, "rack-b"}, voters), ErrSameDomain)
	require.ErrorIs(t, CheckPlacement(Place{2, "rack-b"}, voters), ErrSameDomain)
	require.ErrorIs(t, CheckPlacement(Place{3, "rack-a"}, voters), ErrSameDomain)
}

func TestStubStateMachine(t *testing.T) {
	m := NewStateMachine(1, 4)
	require.NotNil(t, m)
	_, err := m.Lookup("anything")
	require.ErrorIs(t, err, ErrNoState)
	require.Panics(t, func() { _, _ = m.Update(statemachine.Entry{Index: 5, Cmd: []byte("body")}) })
	require.ErrorIs(t, m.SaveSnapshot(nil, nil, nil), statemachine.ErrSnapshotAborted)
	require.NoError(t, m.RecoverFromSnapshot(strings.NewReader("state"), nil, nil))
	require.NoError(t, m.Close())
}
