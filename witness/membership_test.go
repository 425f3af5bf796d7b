package witness

import (
	"fmt"
	"maps"
	"testing"

	"github.com/lni/dragonboat/v4/raftpb"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sample is a shard that has every kind of member.
func sample() raftpb.Membership {
	return raftpb.Membership{
		ConfigChangeId: 10,
		Addresses:      map[uint64]string{1: "host-a", 2: "host-b"},
		NonVotings:     map[uint64]string{3: "host-c"},
		Witnesses:      map[uint64]string{4: "host-d"},
		Removed:        map[uint64]bool{9: true},
	}
}

func change(kind raftpb.ConfigChangeType, replicaID uint64, address string) raftpb.ConfigChange {
	return raftpb.ConfigChange{ConfigChangeId: 10, Type: kind, ReplicaID: replicaID, Address: address}
}

func TestApplyRules(t *testing.T) {
	stale := change(raftpb.AddNode, 5, "host-e")
	stale.ConfigChangeId = 9
	initial := stale
	initial.Initialize = true
	for _, c := range []struct {
		name             string
		cc               raftpb.ConfigChange
		ordered, refused bool
	}{
		{"add full", change(raftpb.AddNode, 5, "host-e"), true, false},
		{"add non-voting", change(raftpb.AddNonVoting, 5, "host-e"), true, false},
		{"add witness", change(raftpb.AddWitness, 5, "host-e"), true, false},
		{"promote", change(raftpb.AddNode, 3, "host-c"), true, false},
		{"promote, spelled otherwise", change(raftpb.AddNode, 3, " HOST-c "), true, false},
		{"remove full", change(raftpb.RemoveNode, 2, ""), true, false},
		{"remove non-voting", change(raftpb.RemoveNode, 3, ""), true, false},
		{"remove witness", change(raftpb.RemoveNode, 4, ""), true, false},
		{"remove a stranger", change(raftpb.RemoveNode, 77, ""), true, false},
		{"remove twice", change(raftpb.RemoveNode, 9, ""), true, false},
		{"initial member is exempt from order", initial, true, false},
		{"stale but unordered", stale, false, false},

		{"1 stale", stale, true, true},
		{"2 removed id, full", change(raftpb.AddNode, 9, "host-e"), true, true},
		{"2 removed id, non-voting", change(raftpb.AddNonVoting, 9, "host-e"), true, true},
		{"2 removed id, witness", change(raftpb.AddWitness, 9, "host-e"), true, true},
		{"3 full again", change(raftpb.AddNode, 1, "host-e"), true, true},
		{"3 non-voting again", change(raftpb.AddNonVoting, 3, "host-e"), true, true},
		{"3 witness again", change(raftpb.AddWitness, 4, "host-e"), true, true},
		{"4 full's address", change(raftpb.AddNode, 5, "HOST-A"), true, true},
		{"4 non-voting's address", change(raftpb.AddWitness, 5, " host-c"), true, true},
		{"4 witness's address", change(raftpb.AddNonVoting, 5, "host-d"), true, true},
		{"5 full to non-voting", change(raftpb.AddNonVoting, 1, "host-a"), true, true},
		{"6 full to witness", change(raftpb.AddWitness, 1, "host-a"), true, true},
		{"7 witness to full", change(raftpb.AddNode, 4, "host-d"), true, true},
		{"8 witness to non-voting", change(raftpb.AddNonVoting, 4, "host-d"), true, true},
		{"9 non-voting to witness", change(raftpb.AddWitness, 3, "host-c"), true, true},
		{"10 promote at another address", change(raftpb.AddNode, 3, "host-e"), true, true},
		{"12 unknown type", change(raftpb.ConfigChangeType(42), 5, "host-e"), true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := sample()
			next, accepted := Apply(before, c.cc, 11, c.ordered)
			require.Equal(t, sample(), before, "the input is never changed")
			require.Equal(t, !c.refused, accepted)
			if c.refused {
				require.Equal(t, before, next)
				return
			}
			require.EqualValues(t, 11, next.ConfigChangeId)
		})
	}
}

func TestApplyKeepsTheLastFullReplica(t *testing.T) {
	m := sample()
	delete(m.Addresses, 2)
	_, accepted := Apply(m, change(raftpb.RemoveNode, 1, ""), 11, true)
	require.False(t, accepted, "rule 11: the only full replica, whatever else there is")
	next, accepted := Apply(m, change(raftpb.RemoveNode, 4, ""), 11, true)
	require.True(t, accepted)
	require.Equal(t, None, RoleOf(next, 4))
	require.True(t, next.Removed[4])
}

func TestApplyEffects(t *testing.T) {
	next, _ := Apply(sample(), change(raftpb.AddNode, 3, "HOST-C"), 11, true)
	require.Equal(t, Full, RoleOf(next, 3))
	require.Equal(t, "HOST-C", next.Addresses[3], "spelled as in the change")
	require.NotContains(t, next.NonVotings, uint64(3))
	next, _ = Apply(raftpb.Membership{}, change(raftpb.AddWitness, 3, "host-c"), 11, false)
	require.Equal(t, Witness, RoleOf(next, 3), "nil maps are empty maps")
}

// TestApplyInvariants: whatever is proposed, a replica has one role, addresses are distinct, removed ids stay
// out, and the last full replica stays in.
func TestApplyInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := raftpb.Membership{}
		for index := uint64(1); index <= 60; index++ {
			cc := drawChange(t, m)
			cc.Initialize = index <= 2
			before := fmt.Sprint(m)
			next, accepted := Apply(m, cc, index, true)
			require.Equal(t, before, fmt.Sprint(m))
			if !accepted {
				require.Equal(t, before, fmt.Sprint(next))
			}
			had := len(m.Addresses)
			m = next
			checkMembership(t, m)
			require.False(t, had > 0 && len(m.Addresses) == 0)
		}
	})
}

func checkMembership(t require.TestingT, m raftpb.Membership) {
	addresses, ids := map[string]bool{}, map[uint64]bool{}
	for _, members := range []map[uint64]string{m.Addresses, m.NonVotings, m.Witnesses} {
		for id, address := range members {
			require.False(t, ids[id] || m.Removed[id], "replica %d has two roles, or was removed", id)
			require.False(t, addresses[address], "two members at %s", address)
			ids[id], addresses[address] = true, true
		}
	}
}

// drawChange draws a change that is as often right as wrong: few ids and addresses, and the order id mostly
// the present one.
func drawChange(t *rapid.T, m raftpb.Membership) raftpb.ConfigChange {
	cc := raftpb.ConfigChange{
		Type:           rapid.SampledFrom([]raftpb.ConfigChangeType{raftpb.AddNode, raftpb.AddNonVoting, raftpb.AddWitness, raftpb.RemoveNode}).Draw(t, "type"),
		ReplicaID:      rapid.Uint64Range(1, 8).Draw(t, "replica"),
		Address:        fmt.Sprintf("host-%d", rapid.IntRange(1, 8).Draw(t, "address")),
		ConfigChangeId: m.ConfigChangeId,
	}
	if rapid.IntRange(0, 9).Draw(t, "stale") == 0 {
		cc.ConfigChangeId++
	}
	return cc
}

func entry(index uint64, cc raftpb.ConfigChange) raftpb.Entry {
	return raftpb.Entry{Index: index, Term: 1, Type: raftpb.ConfigChangeEntry, Cmd: raftpb.MustMarshal(&cc)}
}

func initialMember(replicaID uint64) raftpb.ConfigChange {
	return raftpb.ConfigChange{Type: raftpb.AddNode, ReplicaID: replicaID, Address: fmt.Sprintf("host-%d", replicaID), Initialize: true}
}

func TestReplayFromTheBeginning(t *testing.T) {
	add := raftpb.ConfigChange{Type: raftpb.AddWitness, ReplicaID: 3, Address: "host-3", ConfigChangeId: 2}
	again := raftpb.ConfigChange{Type: raftpb.AddWitness, ReplicaID: 4, Address: "host-3", ConfigChangeId: 5}
	m, err := Membership(raftpb.Membership{}, []raftpb.Entry{
		entry(1, initialMember(1)), entry(2, initialMember(2)),
		{Index: 4, Term: 2, Type: raftpb.MetadataEntry}, entry(5, add), entry(9, again),
	})
	require.NoError(t, err)
	require.Equal(t, raftpb.Membership{
		ConfigChangeId: 5, // the one at 9 was committed and refused: its address was in use
		Addresses:      map[uint64]string{1: "host-1", 2: "host-2"},
		NonVotings:     map[uint64]string{},
		Witnesses:      map[uint64]string{3: "host-3"},
		Removed:        map[uint64]bool{},
	}, m)
}

// TestReplaySplits: a log replayed in two parts, by way of a snapshot between them, gives what it gives in one.
func TestReplaySplits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ordered := rapid.Bool().Draw(t, "ordered")
		entries := []raftpb.Entry{entry(1, initialMember(1))}
		m, err := Replay(raftpb.Membership{}, entries, ordered)
		require.NoError(t, err)
		for index := uint64(2); index < 40; index++ {
			cc := drawChange(t, m)
			m, _ = Apply(m, cc, index, ordered)
			entries = append(entries, entry(index, cc))
		}
		whole, err := Replay(raftpb.Membership{}, entries, ordered)
		require.NoError(t, err)
		require.Equal(t, m, whole)
		cut := rapid.IntRange(1, len(entries)).Draw(t, "cut")
		base, err := Replay(raftpb.Membership{}, entries[:cut], ordered)
		require.NoError(t, err)
		kept := clone(base)
		parts, err := Replay(base, entries[cut:], ordered)
		require.NoError(t, err)
		require.Equal(t, whole, parts)
		require.Equal(t, kept, base)
		parts.Addresses[99] = "changed by the caller"
		require.Equal(t, kept, base, "the result shares nothing with the base")
	})
}

func TestReplayRefusesAnUnlikelyLog(t *testing.T) {
	first := entry(1, initialMember(1))
	unknown := entry(2, raftpb.ConfigChange{Type: raftpb.ConfigChangeType(42), ReplicaID: 5})
	torn := entry(2, initialMember(2))
	torn.Cmd = torn.Cmd[:len(torn.Cmd)-3]
	for _, c := range []struct {
		name    string
		base    raftpb.Membership
		entries []raftpb.Entry
		message string
	}{
		{"nothing", raftpb.Membership{}, nil, "no full replica"},
		{"no initial member", raftpb.Membership{}, []raftpb.Entry{{Index: 1}}, "no full replica"},
		{"index repeats", raftpb.Membership{}, []raftpb.Entry{first, first}, "index 1 follows 1"},
		{"below the base", sample(), []raftpb.Entry{first}, "index 1 follows 10"},
		{"unknown type", raftpb.Membership{}, []raftpb.Entry{first, unknown}, "unknown type 42"},
		{"torn", raftpb.Membership{}, []raftpb.Entry{first, torn}, "decode the one at index 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := Membership(c.base, c.entries)
			require.ErrorContains(t, err, c.message)
			require.Empty(t, maps.Collect(maps.All(m.Addresses)))
		})
	}
}
