package api

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// adminBackend records what reaches it; every other method panics on its nil embedded interface.
type adminBackend struct {
	Backend
	dead    Dead
	options queue.QueueOptions
	purge   PurgeQueue
	change  ChangeDelayed
	lookup  queue.PublishLookup
	delayed DelayedPage
	err     error
}

func (b *adminBackend) RedriveDead(_ context.Context, r Dead) (DeadReply, error) {
	b.dead = r
	return DeadReply{Done: 3, Skipped: 1, Next: 9}, b.err
}

func (b *adminBackend) ConfigureQueue(_ context.Context, name string, o queue.QueueOptions) (QueueInfo, error) {
	b.options = o
	return QueueInfo{Name: name, Options: o}, b.err
}

func (b *adminBackend) PurgeQueue(_ context.Context, r PurgeQueue) (PurgeReply, error) {
	b.purge = r
	return PurgeReply{Purged: 7, To: 8}, b.err
}

func (b *adminBackend) ChangeDelayed(_ context.Context, r ChangeDelayed) (queue.Stamp, error) {
	b.change = r
	return 42, b.err
}

func (b *adminBackend) LookupPublish(context.Context, LookupPublish) (queue.PublishLookup, bool, error) {
	return b.lookup, true, b.err
}

func (b *adminBackend) ListDelayed(context.Context, ListDelayed) (DelayedPage, error) {
	return b.delayed, b.err
}

func (b *adminBackend) Browse(context.Context, Browse) ([]queue.StoredMessage, queue.Address, error) {
	return []queue.StoredMessage{{Address: 4, Body: []byte("hello"), Producer: queue.Producer{Kind: queue.ProducerClient, ID: 6}, Seq: 2}}, 5, b.err
}

func TestAdminRefusesBadInput(t *testing.T) {
	s := serve(t, Options{Backend: &fakeBackend{}}) // whatever came through would panic
	for name, tc := range map[string]struct{ call, body, want string }{
		"purge of nothing":         {"AdminService/PurgeQueue", `{"queue":"q"}`, "exactly one"},
		"purge of both":            {"AdminService/PurgeQueue", `{"queue":"q","all":true,"toAddress":"4"}`, "exactly one"},
		"purge beyond addresses":   {"AdminService/PurgeQueue", `{"queue":"q","toAddress":"281474976710656"}`, "to_address"},
		"configure on no version":  {"AdminService/ConfigureQueue", `{"queue":"q","options":{}}`, "options.version"},
		"group on no version":      {"AdminService/ConfigureGroup", `{"queue":"q","name":"g"}`, "expected_version"},
		"explain two things":       {"AdminService/ExplainGroup", `{"queue":"q","address":"1","key":"YQ=="}`, "at most one"},
		"explain a long key":       {"AdminService/ExplainGroup", `{"queue":"q","key":"` + strings.Repeat("YWFh", 90) + `"}`, "key"},
		"a page of 1001":           {"AdminService/ListDelayed", `{"queue":"q","limit":1001}`, "limit"},
		"browse 1001":              {"AdminService/Browse", `{"queue":"q","limit":1001}`, "limit"},
		"cancel nothing":           {"AdminService/CancelDelayed", `{"queue":"q"}`, "begin at 1"},
		"reschedule to now":        {"AdminService/RescheduleDelayed", `{"queue":"q","address":"1"}`, "delay_ms"},
		"lookup of nobody":         {"AdminService/LookupPublish", `{"queue":"q","seq":"1"}`, "producer_id"},
		"lookup of seq 0":          {"AdminService/LookupPublish", `{"queue":"q","producerId":"1"}`, "seq"},
		"dead addresses and more":  {"GroupService/RedriveDeadLetters", `{"queue":"q","addresses":["1"],"reasonPrefix":"x"}`, "exclude"},
		"dead with a long reason":  {"GroupService/PurgeDeadLetters", `{"queue":"q","reasonPrefix":"` + strings.Repeat("x", 256) + `"}`, "reason_prefix"},
		"dead older than ages":     {"GroupService/ListDeadLetters", `{"queue":"q","olderThanMs":"9999999999999"}`, "older_than_ms"},
		"dead list of 1001":        {"GroupService/ListDeadLetters", `{"queue":"q","limit":1001}`, "limit"},
		"dead beyond addresses":    {"GroupService/RedriveDeadLetters", `{"queue":"q","fromAddress":"281474976710656"}`, "from_address"},
		"reschedule beyond an age": {"AdminService/RescheduleDelayed", `{"queue":"q","address":"1","delayMs":"9999999999999"}`, "delay_ms"},
	} {
		t.Run(name, func(t *testing.T) {
			status, out := post(t, s, tc.call, tc.body)
			require.Equal(t, http.StatusBadRequest, status)
			require.Contains(t, out["message"], tc.want)
		})
	}
}

func TestAdminPassesRequestsOn(t *testing.T) {
	b := &adminBackend{}
	s := serve(t, Options{Backend: b})
	_, out := post(t, s, "GroupService/RedriveDeadLetters", `{"queue":"q","reasonPrefix":"time","olderThanMs":"1500","fromAddress":"5","limit":"100","ratePerSecond":20,"dryRun":true}`)
	require.Equal(t, Dead{Queue: "q", Group: DefaultGroup, Addresses: []queue.Address{}, From: 5, Limit: 100, ReasonPrefix: "time", OlderThan: 1500 * time.Millisecond, Rate: 20, DryRun: true}, b.dead)
	require.Equal(t, map[string]any{"redriven": "3", "skipped": "1", "nextAddress": "9"}, out)

	_, out = post(t, s, "AdminService/ConfigureQueue", `{"queue":"q","options":{"version":"3","mode":"QUEUE_MODE_LOG","retainMs":"60000","paused":true,"dedupMs":"5"}}`)
	require.Equal(t, queue.QueueOptions{Version: 3, Mode: queue.ModeLog, RetainMs: 60000, Paused: true, DedupMs: 5}, b.options)
	require.Equal(t, "QUEUE_MODE_LOG", out["queue"].(map[string]any)["options"].(map[string]any)["mode"])

	_, out = post(t, s, "AdminService/PurgeQueue", `{"queue":"q","all":true,"operationId":"77"}`)
	require.Equal(t, PurgeQueue{Queue: "q", All: true, OperationID: 77}, b.purge)
	require.Equal(t, map[string]any{"purged": "7", "purgedTo": "8"}, out)

	_, out = post(t, s, "AdminService/RescheduleDelayed", `{"queue":"q","address":"3","delayMs":"1000","expectedVisibleUnixMs":"9"}`)
	require.Equal(t, ChangeDelayed{Queue: "q", Address: 3, Expected: 9, Delay: time.Second}, b.change)
	require.Equal(t, map[string]any{"address": "3", "visibleUnixMs": "42"}, out)

	_, out = post(t, s, "AdminService/Browse", `{"queue":"q","maxBodyBytes":2}`)
	require.Equal(t, "5", out["nextAddress"])
	m := out["messages"].([]any)[0].(map[string]any)
	require.Equal(t, "aGU=", m["body"], "cut to two bytes")
	require.Equal(t, "5", m["bodyBytes"])
	require.Equal(t, "6", m["producerId"])

	b.delayed = DelayedPage{Messages: []DelayedMessage{{MessageHead: queue.MessageHead{Address: 1, VisibleAt: 10, Bytes: 3}}}, More: true, Next: queue.DelayedKey{VisibleAt: 10, Address: 1}, Total: 2}
	_, out = post(t, s, "AdminService/ListDelayed", `{"queue":"q"}`)
	require.Equal(t, map[string]any{"visibleUnixMs": "10", "address": "1"}, out["next"])
	require.Equal(t, map[string]any{"address": "1", "visibleUnixMs": "10", "bytes": "3"}, out["messages"].([]any)[0])

	b.err = code.New(code.Skipped, "")
	status, _ := post(t, s, "AdminService/CancelDelayed", `{"queue":"q","address":"3"}`)
	require.Equal(t, http.StatusBadRequest, status)
}

func TestLookupOutcomes(t *testing.T) {
	for want, tc := range map[string]struct {
		found queue.PublishLookup
		seq   queue.Seq
	}{
		"unknown-producer": {queue.PublishLookup{}, 1},
		"stored":           {queue.PublishLookup{Known: true, Low: 1, Last: 5, Address: 3}, 4},
		"forgotten":        {queue.PublishLookup{Known: true, Low: 5, Last: 9}, 4},
		"not-stored":       {queue.PublishLookup{Known: true, Low: 2, Last: 3}, 4},
	} {
		require.Equal(t, want, lookupOutcome(tc.found, tc.seq))
	}
}

// A call that another host must answer is forwarded once; where nothing forwards, the refusal names the host.
func TestAdminForwards(t *testing.T) {
	there := serve(t, Options{Backend: &adminBackend{}})
	away := &adminBackend{err: &ElsewhereError{Host: 2, Cause: &code.Error{Code: code.NotOwner, Effect: code.EffectNone, LeaderAPI: "there:1"}}}
	forward := func(host uint64) (*http.Client, string) {
		require.Equal(t, uint64(2), host)
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(true)
		tr := &http.Transport{Protocols: p}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}, there.URL
	}
	_, out := post(t, serve(t, Options{Backend: away, Forward: forward}), "AdminService/PurgeQueue", `{"queue":"q","all":true}`)
	require.Equal(t, "7", out["purged"])
	status, _ := post(t, serve(t, Options{Backend: away}), "AdminService/PurgeQueue", `{"queue":"q","all":true}`)
	require.Equal(t, http.StatusBadRequest, status)
}

// lister is one host that is home of one group, and knows no more of the other's than the state says.
type lister struct {
	Backend
	self uint64
}

func (l *lister) Fleet() Fleet { return Fleet{Self: l.self} }

func (l *lister) ListGroups(_ context.Context, name string, _ Partition) ([]GroupInfo, error) {
	out := []GroupInfo{{Queue: name, HomeHost: 1}, {Queue: name, HomeHost: 2}, {Queue: name, HomeHost: 3}}
	for i := range out {
		out[i].ID = queue.GroupID(i + 1)
	}
	out[l.self-1].InFlight = 10 * int(l.self)
	return out, nil
}

// A list of groups has what their homes know; a home that does not answer leaves its groups' part out.
func TestListGroupsAsksHomes(t *testing.T) {
	two := serve(t, Options{Backend: &lister{self: 2}})
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: p}
	t.Cleanup(tr.CloseIdleConnections)
	forward := func(host uint64) (*http.Client, string) {
		if host == 2 {
			return &http.Client{Transport: tr}, two.URL
		}
		return &http.Client{Transport: tr}, "http://127.0.0.1:1"
	}
	_, out := post(t, serve(t, Options{Backend: &lister{self: 1}, Forward: forward}), "GroupService/ListGroups", `{"queue":"q"}`)
	var got []any
	for _, g := range out["groups"].([]any) {
		got = append(got, g.(map[string]any)["inFlight"])
	}
	require.Equal(t, []any{"10", "20", nil}, got)
}
