package api

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// claimBackend has a message for each partition of a queue of three; partition 2 has nobody at home.
type claimBackend struct {
	Backend
	asked  []ClaimIdle
	config queue.GroupConfig
}

func (b *claimBackend) ClaimIdle(_ context.Context, r ClaimIdle) (Claimed, error) {
	if r.Queue == "wide" && r.Partition == nil {
		return Claimed{}, &SeveralError{Queue: QueueInfo{Name: "wide", Partitions: make([]PartitionInfo, 3)}}
	}
	b.asked = append(b.asked, r)
	if r.Partition != nil && *r.Partition == 2 {
		return Claimed{}, code.New(code.NoLeader, "")
	}
	return Claimed{Dead: 1, Skipped: 2, Epoch: 9, Deliveries: []Delivery{{Receipt: "r", Attempt: 2, Message: queue.StoredMessage{Address: 5, Body: make([]byte, 10)}}}}, nil
}

func (b *claimBackend) GroupPartitions(context.Context, string) (Partitions, error) {
	return Partitions{Shards: []uint64{2}, Open: 1}, nil
}

func (b *claimBackend) CreateGroup(_ context.Context, r CreateGroup) (GroupInfo, error) {
	b.config = r.Config
	return GroupInfo{GroupInfo: queue.GroupInfo{Config: r.Config}}, nil
}

func TestClaimIdle(t *testing.T) {
	b := &claimBackend{}
	s := serve(t, Options{Backend: b})
	status, out := post(t, s, "GroupService/ClaimIdle", `{"queue":"q","consumer":"me","minIdleMs":"60000","maxMessages":7,"maxBytes":100,"leaseMs":"5000"}`)
	require.Equal(t, http.StatusOK, status)
	lease := 5 * time.Second
	require.Equal(t, []ClaimIdle{{Queue: "q", Group: DefaultGroup, Consumer: "me", MinIdle: time.Minute, Max: 7, MaxBytes: 100, Lease: &lease}}, b.asked)
	require.EqualValues(t, 1, out["deadLettered"])
	require.EqualValues(t, 2, out["skipped"])
	require.Equal(t, "9", out["epoch"])
	require.Equal(t, "5", out["messages"].([]any)[0].(map[string]any)["address"])

	b.asked = nil
	_, out = post(t, s, "GroupService/ClaimIdle", `{"queue":"wide","group":"g","maxMessages":2}`)
	require.Len(t, out["messages"], 2)
	require.Len(t, b.asked, 2, "enough: the third is not asked")
	require.Equal(t, 1, b.asked[1].Max)
	_, out = post(t, s, "GroupService/ClaimIdle", `{"queue":"wide","group":"g","maxMessages":5}`)
	require.Len(t, out["messages"], 2, "what was claimed before a partition failed is the caller's")
	require.EqualValues(t, 1, out["messages"].([]any)[1].(map[string]any)["partition"])

	b.asked = nil
	_, out = post(t, s, "GroupService/ClaimIdle", `{"queue":"wide","group":"g","maxMessages":5,"maxBytes":15}`)
	require.Len(t, out["messages"], 2)
	require.Equal(t, []int{15, 5}, []int{b.asked[0].MaxBytes, b.asked[1].MaxBytes})
	require.Len(t, b.asked, 2, "what there was room for is used up")

	for _, body := range []string{
		`{"queue":"q","minIdleMs":"43200001"}`, `{"queue":"q","maxMessages":1001}`, `{"queue":"q","leaseMs":"43200001"}`,
	} {
		status, _ = post(t, s, "GroupService/ClaimIdle", body)
		require.Equal(t, http.StatusBadRequest, status, body)
	}
}

func TestRecordAfterIsPassedOn(t *testing.T) {
	b := &claimBackend{}
	s := serve(t, Options{Backend: b})
	_, out := post(t, s, "GroupService/CreateGroup", `{"queue":"q","name":"g","config":{"recordAfterMs":"250"}}`)
	require.EqualValues(t, 250, b.config.RecordAfterMs)
	require.Equal(t, "250", out["group"].(map[string]any)["config"].(map[string]any)["recordAfterMs"])
}
