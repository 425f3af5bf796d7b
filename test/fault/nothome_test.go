package fault

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// refusal is a refused call as somebody with curl sees it.
type refusal struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Message string `json:"message"`
	Details []struct {
		Type  string `json:"type"`
		Debug struct {
			Code     uint32 `json:"code"`
			Name     string `json:"name"`
			Effect   string `json:"effect"`
			HomeHost string `json:"homeHost"`
			HomeAPI  string `json:"homeApi"`
			Epoch    string `json:"epoch"`
		} `json:"debug"`
	} `json:"details"`
}

// post is `curl -H 'Content-Type: application/json' -d BODY http://ADDR/tierq.v1.METHOD`.
func (h *host) post(t *testing.T, method, body string) (status int, answer []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*callTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+h.api+"/tierq.v1."+method, bytes.NewReader([]byte(body)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	answer, err = io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, answer
}

// postRefused posts what must be refused.
func (h *host) postRefused(t *testing.T, method, body string) refusal {
	t.Helper()
	status, answer := h.post(t, method, body)
	require.NotEqual(t, http.StatusOK, status, "%s", answer)
	var r refusal
	require.NoError(t, json.Unmarshal(answer, &r), "%s", answer)
	r.Status = status
	return r
}

// TestFaultNotHome: a consumer that comes to a host that is not its group's home is sent to the right one: as readable JSON
// for curl, and by itself for the Go client and the command line.
func TestFaultNotHome(t *testing.T) {
	needsProcesses(t)
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "sent-home", nil)
	home, wrong := f.full()[0], f.full()[1]
	f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "sent-home", Name: "g", HomeHost: home.id})
	publish := func(body string) uint64 {
		t.Helper()
		ps, err := c.Publish(context.Background(), "sent-home", client.Message{Body: []byte(body)})
		require.NoError(t, err)
		return ps[0].Address
	}
	f.awaitConverged("sent-home")

	t.Run("curl", func(t *testing.T) {
		for _, call := range []struct{ method, body string }{
			{"GroupService/Receive", `{"queue":"sent-home","group":"g","waitMs":20000}`},
			{"GroupService/Ack", `{"queue":"sent-home","group":"g","receipts":["x"]}`},
		} {
			r := wrong.postRefused(t, call.method, call.body) // one that was let wait would be answered, with nothing
			require.Equal(t, "failed_precondition", r.Code)
			require.Contains(t, r.Message, home.api, "the sentence names the address to go to")
			require.Len(t, r.Details, 1)
			d := r.Details[0].Debug
			require.Equal(t, "NOT_OWNER", d.Name)
			require.Equal(t, uint32(code.NotOwner), d.Code)
			require.Equal(t, "EFFECT_NONE", d.Effect)
			require.Equal(t, home.api, d.HomeAPI)
			require.Equal(t, "1", d.HomeHost)
			t.Logf("%s: %s", call.method, r.Message)
		}
	})

	t.Run("Go client", func(t *testing.T) {
		address := publish("for the Go client")
		lost := f.client(client.Options{Addrs: []string{wrong.api}, RefreshEvery: -1})
		ds, err := lost.Receive(context.Background(), "sent-home", "g", client.ReceiveOptions{})
		require.NoError(t, err)
		require.Len(t, ds, 1)
		require.Equal(t, address, ds[0].Address)
		_, err = lost.Ack(context.Background(), "sent-home", "g", ds[0].Receipt)
		require.NoError(t, err)
	})

	t.Run("command line", func(t *testing.T) {
		publish("for the command line")
		r := cli(t, cliTime, nil, "--addr", wrong.api, "receive", "sent-home", "--group", "g", "--ack")
		require.Zero(t, r.exit, r.stderr)
		require.Equal(t, "for the command line\n", r.stdout)
	})

	t.Run("Go client, a moved group", func(t *testing.T) {
		follower := f.client(client.Options{Addrs: []string{home.api}, RefreshEvery: -1})
		_, err := follower.Receive(context.Background(), "sent-home", "g", client.ReceiveOptions{Wait: client.NoWait})
		require.NoError(t, err)
		_, err = c.MoveGroup(context.Background(), "sent-home", "g", wrong.id)
		require.NoError(t, err)
		address := publish("after the move")
		ds, err := follower.Receive(context.Background(), "sent-home", "g", client.ReceiveOptions{})
		require.NoError(t, err)
		require.Len(t, ds, 1)
		require.Equal(t, address, ds[0].Address)
		_, err = follower.Ack(context.Background(), "sent-home", "g", ds[0].Receipt)
		require.NoError(t, err)
		_, err = c.MoveGroup(context.Background(), "sent-home", "g", home.id)
		require.NoError(t, err)
	})

	g := f.awaitFinished("sent-home", "g", callTime)
	const sent = 3
	require.EqualValues(t, sent, g.Counters.Acked)
	f.noteGroups(t, "sent-home", totals{sent: sent, acknowledged: sent, deliveries: sent}, "g")
}
