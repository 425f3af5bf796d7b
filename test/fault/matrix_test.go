package fault

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// matrixRow is a row of the table in docs/concepts/availability.md.
type matrixRow struct{ queue, down, publish, copies, state, deliver string }

// matrixRows reads the table of the page.
func matrixRows(t *testing.T) []matrixRow {
	t.Helper()
	raw, err := os.ReadFile("../../docs/concepts/availability.md")
	require.NoError(t, err)
	var rows []matrixRow
	for line := range strings.Lines(string(raw)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 6 {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if cells[0] == "available" || cells[0] == "strict" {
			rows = append(rows, matrixRow{cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]})
		}
	}
	require.NotEmpty(t, rows)
	return rows
}

// TestFaultMatrix takes the hosts of two full replicas and a witness down as each row of docs/concepts/availability.md says, and sees
// exactly what the row promises.
func TestFaultMatrix(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	rows := matrixRows(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "available", nil)
	f.createQueue(c, "strict", &tierqv1.QueueOptions{Durability: tierqv1.Durability_DURABILITY_STRICT})
	for _, q := range []string{"available", "strict"} {
		f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: q, Name: "g"})
	}
	f.published = map[string]*totals{"available": {}, "strict": {}}
	var downs []string
	for _, r := range rows {
		if !slices.Contains(downs, r.down) {
			downs = append(downs, r.down)
		}
	}
	for _, down := range downs {
		// A message for the deliveries of this row, while everything runs.
		for _, q := range []string{"available", "strict"} {
			eventually(t, readyWithin, "publish to "+q, func() error {
				// A leader that is lost while there is one copy leaves a shard that waits for it: not a row of the table.
				res, err := f.matrixPublish(f.full()[0], q)
				if err == nil && res.DataCopies < 2 {
					err = errNotYet
				}
				return err
			})
		}
		stopped := f.matrixDown(down)
		for _, r := range rows {
			if r.down == down {
				began := time.Now()
				f.checkRow(r)
				t.Logf("%+v: as it says after %v", r, time.Since(began).Round(time.Millisecond))
			}
		}
		for _, h := range stopped {
			h.start()
		}
		f.awaitReady()
	}
	for queue, s := range f.published {
		s.lost = f.lost(queue, "g", s.acknowledged)
		noteAccount(t, queue, *s)
		require.Zero(t, s.lost)
	}
}

// matrixDown kills the hosts that a row names by their part, and starts the one that it says is back; the leader is that of
// queue "available".
func (f *fleet) matrixDown(down string) []*host {
	leader := f.leaderHost("available")
	parts := map[string][]*host{
		"leader": {leader}, "other full": {f.other(leader)}, "witness": {f.hosts[len(f.hosts)-1]}, "both full": {leader, f.other(leader)},
	}
	down, back, _ := strings.Cut(strings.TrimSuffix(down, " back"), ", then ")
	var stopped []*host
	for part := range strings.SplitSeq(down, " and ") {
		stopped = append(stopped, parts[part]...)
	}
	for _, h := range stopped {
		h.kill()
	}
	for _, h := range parts[back] {
		h.start() // the rows tell when it serves; the catalog, which makes it ready, may wait for the other one
		stopped = slices.DeleteFunc(stopped, func(s *host) bool { return s == h })
	}
	return stopped
}

// matrixPublish publishes once at a host, which forwards.
func (f *fleet) matrixPublish(h *host, queue string) (*tierqv1.PublishResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	books := f.published[queue]
	books.sent++
	res, err := h.raw().queue.Publish(ctx, connect.NewRequest(&tierqv1.PublishRequest{Queue: queue, Messages: []*tierqv1.OutMessage{{Body: []byte("x")}}}))
	if err != nil {
		return nil, err
	}
	if res.Msg.Results[0].Code == 0 {
		books.acknowledged++
	}
	return res.Msg, nil
}

// checkUnreachable is checkRow while no full host runs: the witness, which does, serves nobody.
func (f *fleet) checkUnreachable(r matrixRow) {
	f.t.Helper()
	require.Equal(f.t, matrixRow{r.queue, r.down, "unreachable", "-", "-", "no"}, r)
	for _, h := range f.full() {
		eventually(f.t, 60*time.Second, fmt.Sprintf("%+v", r), func() error {
			_, err := f.matrixPublish(h, r.queue)
			require.Error(f.t, err)
			require.Zero(f.t, codeOf(err), "nobody answers")
			if connect.CodeOf(err) != connect.CodeUnavailable {
				return err // of a connection from before, which broke under the request
			}
			return nil
		})
	}
	_, err := f.hosts[len(f.hosts)-1].get("/healthz")
	require.NoError(f.t, err, "the witness waits")
}

// checkRow waits until a row's outcome is there: an election and the leaving of the in-sync set take a moment.
func (f *fleet) checkRow(r matrixRow) {
	f.t.Helper()
	var up *host
	for _, h := range f.full() {
		if h.running() {
			up = h
		}
	}
	if up == nil {
		f.checkUnreachable(r)
		return
	}
	eventually(f.t, 60*time.Second, fmt.Sprintf("%+v", r), func() error {
		res, err := f.matrixPublish(up, r.queue)
		publish, copies := "OK", "-"
		if err != nil {
			publish = codeOf(err).String()
		} else {
			copies = fmt.Sprint(res.DataCopies)
			if res.Warning != 0 {
				publish = "OK, FOLLOWER_LAG"
			}
		}
		if publish != r.publish || copies != r.copies {
			return fmt.Errorf("publish: %s, copies %s (%v)", publish, copies, err)
		}
		return nil
	})
	eventually(f.t, 60*time.Second, fmt.Sprintf("the state of %+v", r), func() error {
		metrics, err := up.get("/metrics")
		if want := fmt.Sprintf("tierq_quorum_state{partition=\"0\",queue=%q} %s\n", r.queue, r.state); err == nil && !strings.Contains(string(metrics), want) {
			for line := range strings.Lines(string(metrics)) {
				if strings.HasPrefix(line, "tierq_quorum_state{") {
					err = fmt.Errorf("%w%s", errNotYet, line)
				}
			}
		}
		return err
	})
	deliver := func() (err error) {
		for _, h := range f.full() {
			if !h.running() {
				continue
			}
			var m *tierqv1.Message
			if m, err = h.receive(r.queue, "g", time.Minute); err != nil {
				continue // not the home
			}
			f.published[r.queue].deliveries++
			res, err := h.settle("ack", r.queue, "g", m.Receipt)
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("ack: %s", res.Text)
			}
			return err
		}
		return err
	}
	if r.deliver == "yes" {
		eventually(f.t, 60*time.Second, fmt.Sprintf("deliver and ack of %+v", r), deliver)
		return
	}
	eventually(f.t, 60*time.Second, fmt.Sprintf("no delivery of %+v", r), func() error {
		if err := deliver(); err == nil {
			return errNotYet
		}
		return nil
	})
}
