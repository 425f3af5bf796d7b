package api

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/tierq/tierq/queue"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// fakeBackend answers what a test sets; every other method panics on its nil embedded interface.
type fakeBackend struct {
	Backend
	publish func(Publish) (PublishReply, error)
	receive func(Receive) ([]Delivery, queue.Epoch, error)
	settle  func(Settle) ([]SettleResult, error)
	calls   int
}

func (f *fakeBackend) Publish(_ context.Context, r Publish) (PublishReply, error) {
	f.calls++
	return f.publish(r)
}

func (f *fakeBackend) PartitionCount(context.Context, string) (uint32, <-chan struct{}) {
	return 1, nil
}

func (f *fakeBackend) Receive(_ context.Context, r Receive) ([]Delivery, queue.Epoch, error) {
	f.calls++
	return f.receive(r)
}

func (f *fakeBackend) Settle(_ context.Context, r Settle) ([]SettleResult, error) {
	f.calls++
	return f.settle(r)
}

// serve starts a server on loopback; HTTP/2 without TLS and HTTP/1.1.
func serve(t *testing.T, o Options) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	NewServer(o).Mount(mux)
	s := httptest.NewUnstartedServer(mux)
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	s.Config.Protocols = p
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// post sends JSON as curl would and returns the status and the decoded answer.
func post(t *testing.T, s *httptest.Server, procedure, body string) (int, map[string]any) {
	t.Helper()
	resp, err := http.Post(s.URL+"/tierq.v1."+procedure, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var out map[string]any
	require.NoError(t, json.Unmarshal(raw, &out), string(raw))
	return resp.StatusCode, out
}

func TestPublishRefusesBadInput(t *testing.T) {
	f := &fakeBackend{}
	s := serve(t, Options{Backend: f})
	many := strings.Repeat(`{"body":"YQ=="},`, queue.MaxBatchMessages) + `{"body":"YQ=="}`
	for name, tc := range map[string]struct{ body, want string }{
		"empty batch":       {`{"queue":"q"}`, "send at least one message"},
		"oversize batch":    {`{"queue":"q","messages":[` + many + `]}`, "split it"},
		"seq alone":         {`{"queue":"q","messages":[{"body":"YQ==","seq":"4"}]}`, "a seq needs a producer_id"},
		"low alone":         {`{"queue":"q","low":"3","messages":[{"body":"YQ=="}]}`, "need a producer id"},
		"no first seq":      {`{"queue":"q","producerId":"9","messages":[{"body":"YQ=="}]}`, "begin at 1"},
		"seq falls":         {`{"queue":"q","producerId":"9","messages":[{"seq":"4"},{"seq":"4"}]}`, "does not rise"},
		"long key":          {`{"queue":"q","messages":[{"key":"` + strings.Repeat("YWFh", 90) + `"}]}`, "messages[0].key"},
		"header no name":    {`{"queue":"q","messages":[{"headers":[{"value":"YQ=="}]}]}`, "headers[0].name"},
		"delay of an aeon":  {`{"queue":"q","messages":[{"delayMs":"9999999999999"}]}`, "delay_ms"},
		"bad base64":        {`{"queue":"q","messages":[{"body":"%%%"}]}`, "body"},
		"unknown field":     {`{"queue":"q","mesages":[]}`, "send at least one message"},
		"body of 17 MiB":    {`{"queue":"q","messages":[{"body":"` + strings.Repeat("YWFh", 17<<20/3) + `"}]}`, "no queue allows more than"},
		"wrong type number": {`{"queue":7}`, "queue"},
	} {
		t.Run(name, func(t *testing.T) {
			status, out := post(t, s, "QueueService/Publish", tc.body)
			require.NotEqual(t, http.StatusOK, status)
			require.Contains(t, out["message"], tc.want)
		})
	}
	require.Zero(t, f.calls, "bad input must not reach the fleet")
}

func TestNotOwnerIsReadableJSON(t *testing.T) {
	f := &fakeBackend{receive: func(Receive) ([]Delivery, queue.Epoch, error) {
		return nil, 0, &code.Error{Code: code.NotOwner, Effect: code.EffectNone, HomeHost: 2, HomeAPI: "127.0.0.1:7288", Epoch: 5, Text: "host 2 at 127.0.0.1:7288 is the home: go there"}
	}}
	s := serve(t, Options{Backend: f})
	status, out := post(t, s, "GroupService/Receive", `{"queue":"q"}`)
	require.Equal(t, http.StatusBadRequest, status)
	require.Contains(t, out["message"], "127.0.0.1:7288")
	detail := out["details"].([]any)[0].(map[string]any)
	require.Equal(t, "tierq.v1.ErrorDetail", detail["type"])
	require.Equal(t, "127.0.0.1:7288", detail["debug"].(map[string]any)["homeApi"])
	require.Equal(t, "NOT_OWNER", detail["debug"].(map[string]any)["name"])
}

func TestReceiveDefaults(t *testing.T) {
	var got Receive
	f := &fakeBackend{receive: func(r Receive) ([]Delivery, queue.Epoch, error) { got = r; return nil, 3, nil }}
	s := serve(t, Options{Backend: f})
	status, _ := post(t, s, "GroupService/Receive", `{"queue":"q"}`)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, DefaultGroup, got.Group)
	require.Equal(t, 1, got.Max)
	require.EqualValues(t, 5e9, got.Wait)
	require.Nil(t, got.Lease)
	require.Equal(t, 4<<20, got.MaxBytes)
	status, _ = post(t, s, "GroupService/Receive", `{"queue":"q","maxBytes":4294967295}`)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, 32<<20, got.MaxBytes, "an answer is held in memory, and clients take 64 MiB")
	for _, body := range []string{`{"queue":"q","maxMessages":1001}`, `{"queue":"q","waitMs":20001}`, `{"queue":"q","leaseMs":"43200001"}`} {
		status, _ := post(t, s, "GroupService/Receive", body)
		require.Equal(t, http.StatusBadRequest, status, body)
	}
}

func TestSettleAnswersEachReceipt(t *testing.T) {
	f := &fakeBackend{settle: func(r Settle) ([]SettleResult, error) {
		return []SettleResult{{Address: 4}, {Err: &code.Error{Code: code.StaleOwner, Effect: code.EffectNone}}}, nil
	}}
	s := serve(t, Options{Backend: f})
	status, out := post(t, s, "GroupService/Ack", `{"queue":"q","receipts":["a","b"]}`)
	require.Equal(t, http.StatusOK, status)
	second := out["results"].([]any)[1].(map[string]any)
	require.Equal(t, "STALE_OWNER", second["name"])
	status, out = post(t, s, "GroupService/Ack", `{"queue":"q"}`)
	require.Equal(t, http.StatusBadRequest, status)
	require.Contains(t, out["message"], "at least one receipt")
}

// TestForwardOnce sends a publish to a host that must forward it, and to one that may not.
func TestForwardOnce(t *testing.T) {
	leader := &fakeBackend{publish: func(p Publish) (PublishReply, error) {
		if bytes.Equal(p.Publish.Messages[0].Body, []byte("full")) {
			return PublishReply{}, &code.Error{Code: code.QueueFull, Effect: code.EffectNone}
		}
		return PublishReply{Result: queue.PublishResult{Code: code.OK, Messages: []queue.MessageResult{{Code: code.OK, Address: 11}}}}, nil
	}}
	peer := serve(t, Options{Backend: leader})
	follower := &fakeBackend{publish: func(Publish) (PublishReply, error) {
		return PublishReply{}, &ElsewhereError{Host: 2, Cause: &code.Error{Code: code.StaleLeader, Effect: code.EffectNone, LeaderAPI: "x"}}
	}}
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	forward := func(host uint64) (*http.Client, string) {
		require.Equal(t, uint64(2), host)
		return &http.Client{Transport: &http.Transport{Protocols: h2}}, peer.URL
	}
	client := func(o Options) tierqv1connect.QueueServiceClient {
		return tierqv1connect.NewQueueServiceClient(http.DefaultClient, serve(t, o).URL)
	}
	request := func(body string) *connect.Request[tierqv1.PublishRequest] {
		return connect.NewRequest(&tierqv1.PublishRequest{Queue: "q", Messages: []*tierqv1.OutMessage{{Body: []byte(body)}}})
	}
	c := client(Options{Backend: follower, Forward: forward})
	resp, err := c.Publish(t.Context(), request("a"))
	require.NoError(t, err)
	require.Equal(t, uint64(11), resp.Msg.Results[0].Address)

	_, err = c.Publish(t.Context(), request("full"))
	require.Equal(t, uint32(code.QueueFull), wireDetail(t, err).Code, "the other host's refusal passes through")

	_, err = client(Options{Backend: follower}).Publish(t.Context(), request("a"))
	d := wireDetail(t, err)
	require.Equal(t, uint32(code.StaleLeader), d.Code, "a host that was forwarded to does not forward again")
	require.Equal(t, "x", d.LeaderApi)

	peer.Close()
	_, err = c.Publish(t.Context(), request("a"))
	require.Equal(t, tierqv1.Effect_EFFECT_NONE, wireDetail(t, err).Effect, "a host that cannot be dialled got nothing")
}

func wireDetail(t *testing.T, err error) *tierqv1.ErrorDetail {
	t.Helper()
	var ce *connect.Error
	require.ErrorAs(t, err, &ce)
	require.NotEmpty(t, ce.Details())
	v, err := ce.Details()[0].Value()
	require.NoError(t, err)
	return v.(*tierqv1.ErrorDetail)
}
