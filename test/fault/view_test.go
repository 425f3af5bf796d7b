package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/api/tierq/v1/tierqv1connect"
	"github.com/tierq/tierq/queue/code"
)

// raw are the stubs of one host's API: nothing is followed, repeated, or remembered.
type raw struct {
	queue  tierqv1connect.QueueServiceClient
	group  tierqv1connect.GroupServiceClient
	status tierqv1connect.StatusServiceClient
}

func (h *host) raw() raw {
	if h.f.tls != nil {
		name, _, _ := net.SplitHostPort(h.api)
		return newRaw(&http.Client{Transport: &http.Transport{TLSClientConfig: h.f.tls.Client(name), DisableKeepAlives: true}}, "https://"+h.api)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.calls == nil {
		r := newRaw(http.DefaultClient, "http://"+h.api)
		h.calls = &r
	}
	return *h.calls
}

func newRaw(c *http.Client, base string) raw {
	return raw{
		queue:  tierqv1connect.NewQueueServiceClient(c, base),
		group:  tierqv1connect.NewGroupServiceClient(c, base),
		status: tierqv1connect.NewStatusServiceClient(c, base),
	}
}

// detailOf returns what a refused call says, nil if it says nothing.
func detailOf(err error) *tierqv1.ErrorDetail {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return nil
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if m, ok := v.(*tierqv1.ErrorDetail); ok {
				return m
			}
		}
	}
	return nil
}

// codeOf is the registry's code of a failed call; 0 if it has none.
func codeOf(err error) code.Code {
	var e *code.Error
	if errors.As(err, &e) {
		return e.Code
	}
	if d := detailOf(err); d != nil {
		return code.Code(d.Code)
	}
	return 0
}

// callTime bounds a call that looks at the fleet.
const callTime = 20 * time.Second

// describe asks the full hosts that run, in turn, until one answers.
func (f *fleet) describe(queue string) (*tierqv1.Queue, error) {
	err := errors.New("no full host runs")
	for _, h := range f.full() {
		if !h.running() {
			continue
		}
		var q *tierqv1.Queue
		if q, err = h.describe(queue); err == nil {
			return q, nil
		}
	}
	return nil, err
}

func (h *host) describe(queue string) (*tierqv1.Queue, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	res, err := h.raw().queue.DescribeQueue(ctx, connect.NewRequest(&tierqv1.DescribeQueueRequest{Name: queue}))
	if err != nil {
		return nil, fmt.Errorf("host %d: %w", h.id, err)
	}
	return res.Msg.Queue, nil
}

// leaderHost waits until a running host says who leads the queue.
func (f *fleet) leaderHost(queue string) *host {
	f.t.Helper()
	var id uint64
	eventually(f.t, readyWithin, "queue "+queue+" has a leader", func() error {
		q, err := f.describe(queue)
		if err != nil {
			return err
		}
		if id = q.Partitions[0].LeaderHost; id == 0 {
			return errNotYet
		}
		return nil
	})
	return f.host(id)
}

// group returns one group as the fleet describes it.
func (f *fleet) group(queue, name string) (*tierqv1.Group, error) {
	q, err := f.describe(queue)
	if err != nil {
		return nil, err
	}
	for _, g := range q.Groups {
		if g.Name == name {
			return g, nil
		}
	}
	return nil, fmt.Errorf("queue %s has no group %s", queue, name)
}

// homeHost waits until a running host says who is the group's home.
func (f *fleet) homeHost(queue, name string) *host {
	f.t.Helper()
	var id uint64
	eventually(f.t, readyWithin, "group "+name+" has a home", func() error {
		g, err := f.group(queue, name)
		if err != nil {
			return err
		}
		if id = g.HomeHost; id == 0 {
			return errNotYet
		}
		return nil
	})
	return f.host(id)
}

// queueStats is what the tests read of /stats.
type queueStats struct {
	Partitions []struct {
		Here       bool           `json:"here"`
		LeaderHost uint64         `json:"leader_host"`
		Term       uint64         `json:"leader_epoch"`
		Applied    uint64         `json:"applied"`
		Last       uint64         `json:"last_address"`
		Line       uint64         `json:"line"`
		Counters   map[string]any `json:"counters"`
		Groups     []groupStats   `json:"groups"`
	} `json:"partitions"`
}

type groupStats struct {
	Name     string `json:"name"`
	HomeHost uint64 `json:"home_host"`
	Epoch    uint64 `json:"epoch"`
	Floor    uint64 `json:"floor"`
	Counters struct {
		Assigned, Unfinished, Acked, Dead, Exported, Expired, Purged, Cancelled, Retries, Redriven, DeadTotal, Retrying, Leased uint64
	} `json:"counters"`
}

// balanced checks that what was assigned to the group is somewhere.
func (g groupStats) balanced() error {
	c := g.Counters
	if sum := c.Unfinished + c.Acked + c.Dead + c.Exported + c.Expired + c.Purged + c.Cancelled; sum != c.Assigned {
		return fmt.Errorf("group %s: %d assigned, but %d accounted for: %+v", g.Name, c.Assigned, sum, c)
	}
	return nil
}

// stats reads a queue's first partition off h's admin listener.
func (h *host) stats(queue string) (*queueStats, error) {
	body, err := h.get("/stats?queue=" + queue)
	if err != nil {
		return nil, fmt.Errorf("host %d: %w", h.id, err)
	}
	var s queueStats
	if err := json.Unmarshal(body, &s); err != nil {
		return nil, fmt.Errorf("host %d: %w", h.id, err)
	}
	if len(s.Partitions) == 0 || !s.Partitions[0].Here {
		return nil, fmt.Errorf("host %d holds no replica of %s yet", h.id, queue)
	}
	return &s, nil
}

func (h *host) applied(queue string) (uint64, error) {
	s, err := h.stats(queue)
	if err != nil {
		return 0, err
	}
	return s.Partitions[0].Applied, nil
}

// awaitCaughtUp waits until h has applied what the others had when the wait began.
func (f *fleet) awaitCaughtUp(h *host, queue string) {
	f.t.Helper()
	var target uint64
	for _, o := range f.full() {
		if o == h || !o.running() {
			continue
		}
		eventually(f.t, readyWithin, fmt.Sprintf("host %d shows its applied index", o.id), func() error {
			a, err := o.applied(queue)
			target = max(target, a)
			return err
		})
	}
	eventually(f.t, readyWithin, fmt.Sprintf("host %d has applied index %d", h.id, target), func() error {
		a, err := h.applied(queue)
		if err == nil && a < target {
			err = fmt.Errorf("applied %d", a)
		}
		return err
	})
}

// awaitTwoCopies waits until the leader says that both full replicas are in sync: from then on the loss of its host leaves
// a shard that goes on.
func (f *fleet) awaitTwoCopies(queue string) {
	f.t.Helper()
	eventually(f.t, readyWithin, "queue "+queue+" has two data copies", func() error {
		q, err := f.describe(queue)
		if err != nil {
			return err
		}
		leader := q.Partitions[0].LeaderHost
		if leader == 0 {
			return errNotYet
		}
		if q, err = f.host(leader).describe(queue); err != nil {
			return err
		}
		if n := q.Partitions[0].DataCopies; n < 2 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// digests asks for the digest of every full replica.
func (f *fleet) digests(queue string) ([]*tierqv1.ReplicaDigest, error) {
	err := errors.New("no full host runs")
	for _, h := range f.full() {
		if !h.running() {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*callTime)
		var res *connect.Response[tierqv1.ShardDigestResponse]
		res, err = h.raw().status.ShardDigest(ctx, connect.NewRequest(&tierqv1.ShardDigestRequest{Queue: queue}))
		cancel()
		if err == nil {
			return res.Msg.Replicas, nil
		}
	}
	return nil, err
}

// awaitConverged waits until every full replica has the same applied index, and fails at once if two differ there: equal
// index must mean equal state (G7). It returns the digest with its index.
func (f *fleet) awaitConverged(queue string) *tierqv1.ReplicaDigest {
	f.t.Helper()
	var out *tierqv1.ReplicaDigest
	eventually(f.t, readyWithin, "the replicas of "+queue+" converge", func() error {
		ds, err := f.digests(queue)
		if err != nil {
			return err
		}
		if len(ds) != len(f.full()) {
			return fmt.Errorf("%d of %d replicas", len(ds), len(f.full()))
		}
		for _, d := range ds {
			switch {
			case d.Error != "":
				return fmt.Errorf("host %d: %s", d.Host, d.Error)
			case d.AppliedIndex != ds[0].AppliedIndex:
				return fmt.Errorf("host %d is at %d, host %d at %d", d.Host, d.AppliedIndex, ds[0].Host, ds[0].AppliedIndex)
			case d.Digest != ds[0].Digest:
				f.t.Fatalf("at applied index %d host %d has digest %s and host %d has %s", d.AppliedIndex, d.Host, d.Digest, ds[0].Host, ds[0].Digest)
			}
		}
		out = ds[0]
		return nil
	})
	return out
}

// awaitFinished waits until every full replica says that the group has nothing left to do, and checks their sums.
func (f *fleet) awaitFinished(queue, group string, within time.Duration) groupStats {
	f.t.Helper()
	var last groupStats
	for _, h := range f.full() {
		eventually(f.t, within, fmt.Sprintf("group %s has finished everything, says host %d", group, h.id), func() error {
			s, err := h.stats(queue)
			if err != nil {
				return err
			}
			for _, g := range s.Partitions[0].Groups {
				if g.Name != group {
					continue
				}
				if err := g.balanced(); err != nil {
					f.t.Fatalf("host %d: %v", h.id, err)
				}
				if g.Counters.Unfinished != 0 {
					return fmt.Errorf("%d unfinished", g.Counters.Unfinished)
				}
				last = g
				return nil
			}
			return fmt.Errorf("no group %s", group)
		})
	}
	return last
}
