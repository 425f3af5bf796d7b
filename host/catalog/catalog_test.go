package catalog

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lni/dragonboat/v4/statemachine"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

// defaults are a queue's options as a proposer completes them.
func defaults() queue.QueueOptions {
	var o queue.QueueOptions
	o.EnsureDefaults()
	return o
}

// fleet is a catalog with hosts, the members of the first three, and each host in its own domain.
func fleet(t testing.TB, roles ...HostRole) *State {
	t.Helper()
	s := NewState()
	members := []Replica{{ID: 1, HostID: 1, Birth: BirthInitial}, {ID: 2, HostID: 2, Birth: BirthInitial}}
	apply(t, s, &InitFleet{FleetID: FleetID{7}, MACKey: [32]byte{9}, Members: members}, code.OK)
	for i, role := range roles {
		apply(t, s, &RegisterHost{host(uint64(i+1), role)}, code.OK)
	}
	return s
}

func host(id uint64, role HostRole) Host {
	return Host{ID: id, Role: role, RaftAddr: fmt.Sprintf("h%d:1", id), PeerAddr: fmt.Sprintf("h%d:2", id), ClientAddr: fmt.Sprintf("h%d:3", id), Domain: fmt.Sprintf("rack%d", id)}
}

// apply applies a command as the log does: encoded. It checks the invariants, and that a refusal changes nothing.
func apply(t testing.TB, s *State, c Command, want code.Code) Result {
	t.Helper()
	before := EncodeView(s.Seal())
	decoded, err := Decode(Encode(c))
	require.NoError(t, err)
	r := s.Apply(1, decoded)
	require.Equal(t, want, r.Code, r.Detail)
	require.NoError(t, s.Check())
	after := EncodeView(s.Seal())
	if want != code.OK {
		require.Equal(t, before, after, "a refusal changes nothing")
		require.NotEmpty(t, r.Detail)
	}
	again, err := DecodeResult(EncodeResult(r))
	require.NoError(t, err)
	require.Equal(t, r, again)
	return r
}

func TestFirstFleetWins(t *testing.T) {
	s := NewState()
	apply(t, s, &RegisterHost{host(1, HostFull)}, code.MutationFenced)
	members := []Replica{{ID: 1, HostID: 4, Birth: BirthInitial}, {ID: 2, HostID: 2, Birth: BirthWitness}}
	apply(t, s, &InitFleet{FleetID: FleetID{1}}, code.InvalidArgument)
	apply(t, s, &InitFleet{FleetID: FleetID{1}, Members: members[1:]}, code.InvalidArgument)
	apply(t, s, &InitFleet{Members: members}, code.InvalidArgument)
	require.Equal(t, FleetID{1}, apply(t, s, &InitFleet{FleetID: FleetID{1}, MACKey: [32]byte{5}, Members: members}, code.OK).Fleet)
	require.Equal(t, FleetID{1}, apply(t, s, &InitFleet{FleetID: FleetID{2}, MACKey: [32]byte{6}, Members: members}, code.OK).Fleet)
	v := s.Seal()
	require.Equal(t, [32]byte{5}, v.MACKey())
	p, _ := v.Placement(ShardID)
	require.Equal(t, map[queue.ReplicaID]uint64{1: 4}, p.Initial())
}

// TestLateHost: an old registration that commits late does not bring back old addresses.
func TestLateHost(t *testing.T) {
	s := fleet(t, HostFull, HostFull)
	old := host(1, HostFull)
	moved := old
	moved.RaftAddr, moved.Version = "elsewhere:1", 1
	require.EqualValues(t, 2, apply(t, s, &RegisterHost{moved}, code.OK).Host.Version)
	require.EqualValues(t, 2, apply(t, s, &RegisterHost{moved}, code.OK).Host.Version, "the same again is the same")
	require.EqualValues(t, 2, apply(t, s, &RegisterHost{old}, code.MutationFenced).Host.Version, "the refusal says what to decide on")
	other := host(1, HostWitness)
	other.Version = 2
	apply(t, s, &RegisterHost{other}, code.MutationFenced)
	empty := fleet(t)
	apply(t, empty, &RegisterHost{host(2, HostWitness)}, code.MutationFenced) // it is an initial member of the catalog
	for _, bad := range []Host{{}, {ID: 9}, {ID: 9, Role: HostFull}, {ID: 9, Role: HostFull, RaftAddr: strings.Repeat("x", 300), PeerAddr: "p"}} {
		apply(t, s, &RegisterHost{bad}, code.InvalidArgument)
	}
}

func TestQueueLifecycle(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostWitness)
	create := &CreateQueue{OperationID: 11, Name: "q", Options: defaults(), Replicas: 2, Witnesses: 1}
	q := apply(t, s, create, code.OK).Queue
	require.Equal(t, []uint64{2}, q.Shards)
	require.EqualValues(t, 1, q.ID)
	require.Equal(t, DefaultTenant, q.Tenant)

	again := *create
	again.OperationID = 12
	require.Equal(t, q, apply(t, s, &again, code.OK).Queue, "the same creation is the same queue, whoever asks")
	other := *create
	other.Options.TTLMs = 5
	require.Equal(t, q, apply(t, s, &other, code.QueueExistsMismatch).Queue)

	change := defaults()
	change.TTLMs = 5
	change.Version = 1
	changed := apply(t, s, &ConfigureQueue{Name: "q", ExpectedID: q.ID, Options: change}, code.OK).Queue
	require.EqualValues(t, 2, changed.Options.Version)
	apply(t, s, &ConfigureQueue{Name: "q", ExpectedID: q.ID, Options: change}, code.OK)
	change.TTLMs = 6
	apply(t, s, &ConfigureQueue{Name: "q", ExpectedID: q.ID, Options: change}, code.MutationFenced)
	change.Version, change.Partitions = 2, 4
	apply(t, s, &ConfigureQueue{Name: "q", ExpectedID: q.ID, Options: change}, code.InvalidArgument)
	apply(t, s, &ConfigureQueue{Name: "nope", Options: change}, code.UnknownQueue)

	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q", ExpectedID: q.ID + 1}, code.MutationFenced)
	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q", ExpectedID: q.ID}, code.OK)
	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q", ExpectedID: q.ID}, code.OK)
	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q"}, code.UnknownQueue)
	apply(t, s, create, code.MutationFenced) // a late copy brings nothing back

	fresh := *create
	fresh.OperationID = 13
	second := apply(t, s, &fresh, code.OK).Queue
	require.Equal(t, []uint64{3}, second.Shards, "shard ids are never reused")
	require.EqualValues(t, 2, second.ID)
	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q", ExpectedID: q.ID}, code.OK) // a late copy deletes nothing else

	v := s.Seal()
	tomb, ok := v.Placement(2)
	require.True(t, ok)
	require.True(t, tomb.Deleted)
	require.Len(t, tomb.Initial(), 2, "a deleted shard keeps its members for ever")
	_, ok = v.QueueOfShard(2)
	require.False(t, ok)
	found, ok := v.QueueOfShard(3)
	require.True(t, ok)
	require.Equal(t, second, found)
}

func TestCreateRefusals(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostWitness)
	for _, c := range []struct {
		create CreateQueue
		want   code.Code
	}{
		{CreateQueue{Name: "q", Replicas: 2, Witnesses: 1}, code.InvalidArgument},
		{CreateQueue{OperationID: 1, Name: "", Replicas: 2, Witnesses: 1}, code.InvalidName},
		{CreateQueue{OperationID: 1, Name: ".q", Replicas: 2, Witnesses: 1}, code.InvalidName},
		{CreateQueue{OperationID: 1, Name: "a/b", Replicas: 2, Witnesses: 1}, code.InvalidName},
		{CreateQueue{OperationID: 1, Name: strings.Repeat("a", 81), Replicas: 2, Witnesses: 1}, code.InvalidName},
		{CreateQueue{OperationID: 1, Tenant: "$", Name: "q", Replicas: 2, Witnesses: 1}, code.InvalidName},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 1}, code.InvalidArgument},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 2}, code.InvalidArgument},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 4}, code.InvalidArgument},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 3, Witnesses: 1}, code.InvalidArgument},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 3}, code.NoPlacement},
		{CreateQueue{OperationID: 1, Name: "q", Replicas: 2, Witnesses: 1, Options: queue.QueueOptions{Partitions: MaxPartitions + 1}}, code.InvalidArgument},
	} {
		apply(t, s, &c.create, c.want)
	}
}

// TestWitnessDomain: the one witness host shares a domain with the least loaded full host, which is therefore not taken.
func TestWitnessDomain(t *testing.T) {
	s := fleet(t)
	for _, h := range []Host{host(1, HostFull), host(2, HostFull), host(3, HostFull), host(4, HostWitness)} {
		if h.ID == 4 {
			h.Domain = "rack1"
		}
		apply(t, s, &RegisterHost{h}, code.OK)
	}
	q := apply(t, s, &CreateQueue{OperationID: 1, Name: "q", Options: defaults(), Replicas: 2, Witnesses: 1}, code.OK).Queue
	p, _ := s.Seal().Placement(q.Shards[0])
	require.Equal(t, map[queue.ReplicaID]uint64{1: 3, 2: 2}, p.Initial(), "host 3 has no replica of the catalog")
	require.Equal(t, Replica{ID: 3, HostID: 4, Birth: BirthWitness}, p.Replicas[2])
}

func TestReplicaReports(t *testing.T) {
	s := fleet(t, HostFull, HostFull, HostWitness)
	shard := apply(t, s, &CreateQueue{OperationID: 1, Name: "q", Options: defaults(), Replicas: 2, Witnesses: 1}, code.OK).Queue.Shards[0]
	report := func(replica queue.ReplicaID, kind ReportKind, nonce uint64, want code.Code) {
		t.Helper()
		apply(t, s, &ReplicaReport{Shard: shard, Replica: replica, Kind: kind, Nonce: nonce}, want)
	}
	report(1, ReportLost, 0, code.MutationFenced)
	report(1, ReportStarted, 0, code.InvalidArgument)
	report(1, ReportStarted, 5, code.OK)
	report(1, ReportStarted, 5, code.OK)
	report(1, ReportStarted, 6, code.MutationFenced) // another process had its votes
	report(1, ReportLost, 0, code.OK)
	report(1, ReportStarted, 5, code.MutationFenced)
	report(3, ReportMember, 0, code.OK)
	report(9, ReportMember, 0, code.NotReplica)
	report(1, 77, 0, code.Malformed)
	report(2, ReportRemoved, 0, code.MutationFenced)
	apply(t, s, &ReplicaReport{Shard: 99, Replica: 1, Kind: ReportMember}, code.UnknownPartition)
	apply(t, s, &DeleteQueue{OperationID: 1, Name: "q"}, code.OK)
	report(2, ReportStarted, 8, code.QueueRetired)
	report(2, ReportRemoved, 0, code.OK)
	report(2, ReportRemoved, 0, code.OK)
	p, _ := s.Seal().Placement(shard)
	require.Equal(t, ReplicaLost, p.Replicas[0].State)
	require.Equal(t, ReplicaRemoved, p.Replicas[1].State)
	require.True(t, p.Replicas[2].Member)
}

// TestPlacementProperties: whatever the hosts, a placement has the layout, distinct hosts and domains, and only fails
// if the domains do not suffice; and load is even where all domains are.
func TestPlacementProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewState()
		s.Apply(1, &InitFleet{FleetID: FleetID{1}, Members: []Replica{{ID: 1, HostID: 1, Birth: BirthInitial}}})
		domains := make(map[HostRole]map[string]bool)
		n := rapid.IntRange(1, 9).Draw(t, "hosts")
		for i := range n {
			h := host(uint64(i+1), rapid.SampledFrom([]HostRole{HostFull, HostFull, HostWitness}).Draw(t, "role"))
			h.Domain = rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "domain")
			s.Apply(1, &RegisterHost{h})
			if domains[h.Role] == nil {
				domains[h.Role] = make(map[string]bool)
			}
			domains[h.Role][h.failureDomain()] = true
		}
		for i := range rapid.IntRange(1, 6).Draw(t, "queues") {
			layout := rapid.SampledFrom([][2]uint32{{3, 0}, {5, 0}, {2, 1}}).Draw(t, "layout")
			r := s.Apply(1, &CreateQueue{OperationID: uint64(i + 1), Name: fmt.Sprint("q", i), Replicas: layout[0], Witnesses: layout[1]})
			if r.Code == code.NoPlacement {
				if layout[1] == 0 && len(domains[HostFull]) >= int(layout[0]) {
					t.Fatalf("%d domains and no placement: %s", len(domains[HostFull]), r.Detail)
				}
				continue
			}
			if err := s.Check(); err != nil || r.Code != code.OK {
				t.Fatal(r.Code, r.Detail, err)
			}
			v := s.Seal()
			p, _ := v.Placement(r.Queue.Shards[0])
			used := make(map[string]bool)
			for _, m := range p.Replicas {
				h, _ := v.Host(m.HostID)
				if used[h.failureDomain()] || (m.Birth == BirthWitness) != (h.Role == HostWitness) {
					t.Fatalf("placed as %+v", p.Replicas)
				}
				used[h.failureDomain()] = true
			}
			if len(p.Initial()) != int(layout[0]) || len(p.Replicas) != int(layout[0]+layout[1]) {
				t.Fatalf("placed as %+v", p.Replicas)
			}
		}
	})
}

// TestReplicasAgree applies random commands to two catalogs, one of which is saved and restored on the way; every result and
// the state must be the same, and earlier views must not change.
func TestReplicasAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := NewState(), NewState()
		var old *View
		var oldBytes []byte
		for i := range rapid.IntRange(1, 120).Draw(t, "commands") {
			c := drawCommand(t)
			ra, rb := a.Apply(uint64(i+1), c), b.Apply(uint64(i+1), c)
			if !bytes.Equal(EncodeResult(ra), EncodeResult(rb)) {
				t.Fatalf("%+v and %+v", ra, rb)
			}
			if err := a.Check(); err != nil {
				t.Fatal(err)
			}
			switch rapid.IntRange(0, 7).Draw(t, "then") {
			case 0:
				d, err := decodeData(EncodeView(b.Seal()))
				if err != nil {
					t.Fatal(err)
				}
				b = &State{d: d}
			case 1:
				old = a.Seal()
				oldBytes = EncodeView(old)
			}
		}
		if !bytes.Equal(EncodeView(a.Seal()), EncodeView(b.Seal())) {
			t.Fatal("the states differ")
		}
		if old != nil && !bytes.Equal(EncodeView(old), oldBytes) {
			t.Fatal("a view has changed")
		}
	})
}

func drawCommand(t *rapid.T) Command {
	small := func(label string) uint64 { return rapid.Uint64Range(0, 5).Draw(t, label) }
	name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
	switch rapid.IntRange(0, 16).Draw(t, "command") {
	case 0:
		return &InitFleet{FleetID: FleetID{byte(small("fleet"))}, Members: []Replica{{ID: 1, HostID: 1, Birth: BirthInitial}}}
	case 1, 2:
		h := host(small("host"), rapid.SampledFrom([]HostRole{HostFull, HostWitness}).Draw(t, "role"))
		h.Version = small("version")
		return &RegisterHost{h}
	case 3:
		layout := rapid.SampledFrom([][2]uint32{{3, 0}, {2, 1}, {1, 0}}).Draw(t, "layout")
		return &CreateQueue{OperationID: small("operation"), Name: name, Replicas: layout[0], Witnesses: layout[1],
			Options: queue.QueueOptions{Partitions: uint32(small("partitions"))}}
	case 4:
		return &ConfigureQueue{Name: name, ExpectedID: small("id"), Options: queue.QueueOptions{Version: small("version"), TTLMs: small("ttl")}}
	case 5:
		return &DeleteQueue{OperationID: small("operation"), Name: name, ExpectedID: small("id")}
	case 6:
		return &JoinHost{Host: host(small("host"), HostFull), Incarnation: small("incarnation"), TokenID: small("token"), NowMs: small("now")}
	case 7:
		return &CreateJoinToken{Token: JoinToken{ID: small("token"), ExpiresMs: small("expires")}, NowMs: small("now")}
	case 8:
		return &DrainHost{HostID: small("host"), Cancel: rapid.Bool().Draw(t, "cancel")}
	case 9:
		return &RemoveHost{HostID: small("host"), Lost: rapid.Bool().Draw(t, "lost")}
	case 10:
		return &StartMove{Shard: small("shard"), From: queue.ReplicaID(small("replica")), ToHost: small("host")}
	case 11:
		return &MoveReport{Shard: small("shard"), To: queue.ReplicaID(small("replica")), Event: MoveEvent(rapid.Uint8Range(0, 7).Draw(t, "event"))}
	case 14, 15:
		return &Reseat{Shard: small("shard"), From: queue.ReplicaID(small("replica")), ToHost: small("host")}
	case 12:
		return &GrowQueue{Name: name, ExpectedID: small("id"), Partitions: uint32(small("partitions")), NowMs: small("now")}
	case 13:
		return &GrowthReport{QueueID: small("id"), Growth: small("growth") + FirstQueueShard, Event: GrowthEvent(small("event"))}
	default:
		return &ReplicaReport{Shard: small("shard"), Replica: queue.ReplicaID(small("replica")), Kind: ReportKind(small("kind")), Nonce: small("nonce")}
	}
}

// golden are one value of each record, whose bytes can never change.
func golden() map[string][]byte {
	options := queue.QueueOptions{Version: 3, Ordering: queue.OrderKey, MaxBodyBytes: 1 << 20, MaxBytes: 16 << 30, DedupMs: 300_000, Partitions: 1}
	q := Queue{ID: 4, Tenant: "default", Name: "orders", Options: options, Replicas: 2, Witnesses: 1, Shards: []uint64{5, 6}, OperationID: 77}
	members := []Replica{
		{ID: 1, HostID: 1, Birth: BirthInitial, State: ReplicaStarted, Nonce: 9},
		{ID: 2, HostID: 3, Birth: BirthWitness, State: ReplicaLost, Member: true},
	}
	h := Host{ID: 3, Role: HostWitness, RaftAddr: "r:1", PeerAddr: "p:2", ClientAddr: "", Domain: "d", Version: 2}
	v := newView(data{
		version: 12, fleet: FleetID{1, 2}, macKey: [32]byte{3, 4}, nextShard: 7, nextQueue: 5,
		hosts: map[uint64]Host{3: h, 1: host(1, HostFull)}, queues: map[QueueKey]Queue{q.Key(): q},
		placements: map[uint64]Placement{5: {Shard: 5, QueueID: 4, Replicas: members, Deleted: true}, 1: {Shard: 1, Replicas: members}},
		created:    map[uint64]uint64{77: 4, 3: 1},
	})
	return map[string][]byte{
		"init-fleet":        Encode(&InitFleet{FleetID: FleetID{1, 2}, MACKey: [32]byte{3, 4}, Members: members}),
		"register-host":     Encode(&RegisterHost{h}),
		"create-queue":      Encode(&CreateQueue{OperationID: 77, Tenant: "default", Name: "orders", Options: options, Replicas: 2, Witnesses: 1}),
		"configure-queue":   Encode(&ConfigureQueue{Tenant: "default", Name: "orders", ExpectedID: 4, Options: options}),
		"delete-queue":      Encode(&DeleteQueue{OperationID: 78, Tenant: "default", Name: "orders", ExpectedID: 4}),
		"move-queue":        Encode(&MoveQueue{ExpectedID: 9, FromTenant: StagingTenant, FromName: "00000000000000ff-1", ToTenant: "default", ToName: "orders", ReplaceID: 4}),
		"replica-report":    Encode(&ReplicaReport{Shard: 5, Replica: 2, Kind: ReportStarted, Nonce: 9}),
		"result":            EncodeResult(Result{Code: code.QueueExistsMismatch, Detail: "other", Version: 12, Index: 13, Fleet: FleetID{1}, Host: h, Queue: q}),
		"view":              EncodeView(v),
		"join-host":         Encode(&JoinHost{Host: h, Incarnation: 5, TokenID: 6, TokenHash: [32]byte{7}, NowMs: 8}),
		"create-join-token": Encode(&CreateJoinToken{Token: JoinToken{ID: 6, Hash: [32]byte{7}, ExpiresMs: 9}, NowMs: 8}),
		"drain-host":        Encode(&DrainHost{HostID: 3, Cancel: true}),
		"remove-host":       Encode(&RemoveHost{HostID: 3, Lost: true}),
		"start-move":        Encode(&StartMove{Shard: 5, From: 2, ToHost: 4}),
		"reseat":            Encode(&Reseat{Shard: 5, From: 2, ToHost: 4}),
		"move-report":       Encode(&MoveReport{Shard: 5, To: 3, Event: MovePromoted}),
		"view-sections":     EncodeView(goldenSections(v)),
		"view-access":       EncodeView(goldenAccess(v)),
		"put-tenant":        Encode(&PutTenant{Tenant{ID: 2, Name: "acme", MaxQueues: 3, PublishRate: 4, Version: 5}}),
		"put-tenant-bytes":  Encode(&PutTenant{Tenant{ID: 2, Name: "acme", MaxQueues: 3, PublishRate: 4, MaxBytes: 6, Version: 5}}),
		"view-tenant-bytes": EncodeView(goldenTenantBytes(v)),
		"delete-tenant":     Encode(&DeleteTenant{Name: "acme"}),
		"create-token":      Encode(&CreateAccessToken{AccessToken{ID: 6, Hash: [32]byte{7}, Tenant: "acme", Roles: RoleProduce | RoleConsume, Name: "web"}}),
		"revoke-token":      Encode(&RevokeAccessToken{ID: 6}),
		"grow-queue":        Encode(&GrowQueue{Tenant: "default", Name: "orders", ExpectedID: 4, Partitions: 3}),
		"growth-report":     Encode(&GrowthReport{QueueID: 4, Growth: 8, Event: GrowthCancelled}),
		"view-growth":       EncodeView(goldenGrowth(v)),
		"grow-queue-begun":  Encode(&GrowQueue{Tenant: "default", Name: "orders", ExpectedID: 4, Partitions: 3, NowMs: 5}),
		"view-growth-begun": EncodeView(goldenGrowthBegun(v)),
	}
}

// goldenSections is a view with every section.
func goldenSections(v *View) *View {
	d := v.d
	d.incarnations = map[uint64]uint64{3: 30, 1: 10}
	d.hostStates = map[uint64]HostState{3: HostLost}
	d.removed = map[uint64]bool{2: true}
	d.moves = map[uint64]Move{1: {Shard: 1, From: 1, To: 2, Step: MoveLeave, Undo: true}}
	d.joinTokens = map[uint64]JoinToken{6: {ID: 6, Hash: [32]byte{7}, ExpiresMs: 9}}
	return newView(d)
}

func TestGoldenBytes(t *testing.T) {
	for name, b := range golden() {
		path := filepath.Join("testdata", name+".v1.hex")
		if *rewrite {
			require.NoError(t, os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o644))
		}
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, strings.TrimSpace(string(want)), hex.EncodeToString(b), name)
	}
	v, err := DecodeView(golden()["view"])
	require.NoError(t, err)
	require.Equal(t, golden()["view"], EncodeView(v))
	v, err = DecodeView(golden()["view-tenant-bytes"])
	require.NoError(t, err)
	require.Equal(t, golden()["view-tenant-bytes"], EncodeView(v))
	v, err = DecodeView(golden()["view-sections"])
	require.NoError(t, err)
	require.Equal(t, golden()["view-sections"], EncodeView(v))
}

func TestViewCorruption(t *testing.T) {
	for _, b := range [][]byte{golden()["view"], golden()["view-sections"]} {
		for i := range b {
			bad := bytes.Clone(b)
			bad[i] ^= 0x10
			_, err := DecodeView(bad)
			require.ErrorIs(t, err, ErrCorrupt, "byte %d", i)
			_, err = DecodeView(b[:i])
			require.ErrorIs(t, err, ErrCorrupt, "cut at %d", i)
		}
	}
}

// TestMachine drives the adapter as the engine does.
func TestMachine(t *testing.T) {
	changes := 0
	poisoned := make(chan error, 1)
	m := &Machine{OnChange: func() { changes++ }, OnPoison: func(err error) { poisoned <- err }}
	require.Nil(t, m.View())
	sm := m.Create(ShardID, 1)
	update := func(index uint64, c Command) {
		t.Helper()
		r, err := sm.Update(statemachine.Entry{Index: index, Cmd: Encode(c)})
		require.NoError(t, err)
		require.EqualValues(t, code.OK, r.Value)
	}
	update(3, &InitFleet{FleetID: FleetID{1}, Members: []Replica{{ID: 1, HostID: 1, Birth: BirthInitial}}})
	update(4, &RegisterHost{host(1, HostFull)})
	update(5, &RegisterHost{host(1, HostFull)})
	require.Equal(t, 2, changes, "a repetition is no change")
	require.Same(t, m.View(), m.View())
	var snapshot bytes.Buffer
	require.NoError(t, sm.SaveSnapshot(&snapshot, nil, nil))

	restored := (&Machine{}).Create(ShardID, 1)
	require.NoError(t, restored.RecoverFromSnapshot(bytes.NewReader(snapshot.Bytes()), nil, nil))
	v, err := restored.Lookup(nil)
	require.NoError(t, err)
	require.Equal(t, EncodeView(m.View()), EncodeView(v.(*View)))
	require.ErrorIs(t, restored.RecoverFromSnapshot(strings.NewReader("short"), nil, nil), ErrCorrupt)

	// An entry of a newer version waits until the replica is stopped, and is not applied.
	done := make(chan statemachine.Result)
	go func() {
		r, _ := sm.Update(statemachine.Entry{Index: 6, Cmd: []byte{99, 1}})
		done <- r
	}()
	require.ErrorContains(t, <-poisoned, "entry 6")
	m.Release()
	m.Release()
	require.Zero(t, <-done)
	require.ErrorIs(t, sm.SaveSnapshot(&snapshot, nil, nil), statemachine.ErrSnapshotAborted)
	require.NoError(t, sm.Close())
}

func FuzzDecode(f *testing.F) {
	for _, b := range golden() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := Decode(b)
		if err != nil {
			return
		}
		require.Equal(t, b, Encode(c), "one value has one encoding")
		fleet(t, HostFull, HostFull, HostWitness).Apply(9, c)
	})
}

func FuzzDecodeView(f *testing.F) {
	f.Add(golden()["view"])
	f.Add(golden()["view-sections"])
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeView(b)
		if err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		EncodeView(v)
	})
}

func FuzzDecodeResult(f *testing.F) {
	f.Add(golden()["result"])
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeResult(b); err == nil {
			require.Equal(t, b, EncodeResult(r))
		}
	})
}
