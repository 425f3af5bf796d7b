package fault

import (
	"context"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
	"github.com/tierq/tierq/queue/code"
)

// receive takes one message at h, waiting for it; lease 0 keeps the group's.
func (h *host) receive(queue, group string, lease time.Duration) (*tierqv1.Message, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*callTime)
	defer cancel()
	wait := uint32(4000)
	req := &tierqv1.ReceiveRequest{Queue: queue, Group: group, MaxMessages: 1, WaitMs: &wait}
	if lease > 0 {
		ms := uint64(lease.Milliseconds())
		req.LeaseMs = &ms
	}
	res, err := h.raw().group.Receive(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	if len(res.Msg.Messages) == 0 {
		return nil, errNotYet
	}
	return res.Msg.Messages[0], nil
}

// settleKinds are the five things that a consumer does with a receipt.
var settleKinds = []string{"ack", "nack", "release", "reject", "extend"}

// settle does one of them at h, for one receipt.
func (h *host) settle(kind, queue, group, receipt string) (*tierqv1.SettleResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*callTime)
	defer cancel()
	g, receipts := h.raw().group, []string{receipt}
	var res *connect.Response[tierqv1.SettleResponse]
	var err error
	switch kind {
	case "ack":
		res, err = g.Ack(ctx, connect.NewRequest(&tierqv1.AckRequest{Queue: queue, Group: group, Receipts: receipts}))
	case "nack":
		res, err = g.Nack(ctx, connect.NewRequest(&tierqv1.NackRequest{Queue: queue, Group: group, Receipts: receipts}))
	case "release":
		res, err = g.Release(ctx, connect.NewRequest(&tierqv1.ReleaseRequest{Queue: queue, Group: group, Receipts: receipts}))
	case "reject":
		res, err = g.Reject(ctx, connect.NewRequest(&tierqv1.RejectRequest{Queue: queue, Group: group, Receipts: receipts}))
	default:
		res, err = g.Extend(ctx, connect.NewRequest(&tierqv1.ExtendRequest{Queue: queue, Group: group, Receipts: receipts, LeaseMs: 60_000}))
	}
	if err != nil {
		return nil, err
	}
	if len(res.Msg.Results) != 1 {
		return nil, fmt.Errorf("%d results to one receipt", len(res.Msg.Results))
	}
	return res.Msg.Results[0], nil
}

// requireRefused settles with a receipt in every way: each must be refused with the code, and change nothing.
func requireRefused(t *testing.T, f *fleet, h *host, queue, group, receipt string, want code.Code) {
	t.Helper()
	before := f.frozen(queue)
	for _, kind := range settleKinds {
		res, err := h.settle(kind, queue, group, receipt)
		require.NoError(t, err, kind)
		require.Equal(t, want, code.Code(res.Code), "%s: %s %s", kind, res.Name, res.Text)
		require.Equal(t, tierqv1.Effect_EFFECT_NONE, res.Effect, kind)
		require.NotEmpty(t, res.Text, kind)
	}
	require.Equal(t, before, f.frozen(queue), "nothing may have changed")
}

// frozen is everything about a queue that a refused call must leave as it is.
type frozen struct {
	Digest  string
	Applied uint64
	Groups  []groupStats
}

func (f *fleet) frozen(queue string) frozen {
	f.t.Helper()
	d := f.awaitConverged(queue)
	s, err := f.leaderHost(queue).stats(queue)
	if err != nil {
		f.t.Fatal(err)
	}
	return frozen{d.Digest, d.AppliedIndex, s.Partitions[0].Groups}
}

// TestFaultReceipts: a receipt of a recorded lease is good at every later home: after a planned move, after its home's host
// was killed, and after it was restarted. One of a lease that was not recorded, from before its group was deleted and
// created again, or from before its lease ran out and somebody else got the message, is refused and changes nothing.
func TestFaultReceipts(t *testing.T) {
	needsProcesses(t)
	t.Parallel()
	newRand(t)
	f := newFleet(t, 2, 1)
	c := f.client(client.Options{})
	f.createQueue(c, "receipts", nil)
	_, err := c.Publish(context.Background(), "receipts", client.Message{Body: []byte("the only one")})
	require.NoError(t, err)
	one, two := f.full()[0], f.full()[1]
	// No group records by itself: what is recorded here is so because it was extended, or moved.
	const never = 3600_000
	group := func(name string, home *host) {
		f.createGroup(c, &tierqv1.CreateGroupRequest{Queue: "receipts", Name: name, HomeHost: home.id, Config: &tierqv1.GroupConfig{
			DelaysMs: []uint64{1}, RecordAfterMs: never,
		}})
	}
	take := func(h *host, group string, lease time.Duration) *tierqv1.Message {
		var m *tierqv1.Message
		eventually(t, 2*callTime, fmt.Sprintf("group %s delivers at host %d", group, h.id), func() (err error) {
			m, err = h.receive("receipts", group, lease)
			return err
		})
		require.Equal(t, "the only one", string(m.Body))
		return m
	}
	settle := func(h *host, kind, group, receipt string) {
		t.Helper()
		eventually(t, readyWithin, fmt.Sprintf("%s at host %d", kind, h.id), func() error {
			res, err := h.settle(kind, "receipts", group, receipt)
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("%s: %s", res.Name, res.Text)
			}
			return err
		})
	}
	finish := func(h *host, group, receipt string) {
		t.Helper()
		settle(h, "ack", group, receipt)
		f.awaitFinished("receipts", group, callTime)
	}

	group("holds", one) // it finishes nothing, so that the message is not reclaimed when the others have

	t.Run("from before a planned move", func(t *testing.T) {
		group("moved", one)
		held := take(one, "moved", 0)
		_, err := c.MoveGroup(context.Background(), "receipts", "moved", two.id)
		require.NoError(t, err)
		_, err = one.settle("ack", "receipts", "moved", held.Receipt)
		require.Equal(t, code.NotOwner, codeOf(err), "%v", err)
		require.Equal(t, two.api, detailOf(err).HomeApi)
		_, err = two.receive("receipts", "moved", 0)
		require.ErrorIs(t, err, errNotYet, "a planned move redelivers nothing")
		settle(two, "extend", "moved", held.Receipt)
		_, err = c.MoveGroup(context.Background(), "receipts", "moved", one.id)
		require.NoError(t, err)
		finish(one, "moved", held.Receipt)
		requireRefused(t, f, one, "receipts", "moved", held.Receipt, code.StaleOwner)
	})

	t.Run("from before the group was deleted and created again", func(t *testing.T) {
		group("again", one)
		old := take(one, "again", 0)
		require.NoError(t, c.DeleteGroup(context.Background(), "receipts", "again"))
		group("again", one)
		requireRefused(t, f, one, "receipts", "again", old.Receipt, code.StaleOwner)
		now := take(one, "again", 0)
		requireRefused(t, f, one, "receipts", "again", old.Receipt, code.StaleOwner)
		finish(one, "again", now.Receipt)
	})

	t.Run("from before the lease ran out and the message was delivered again", func(t *testing.T) {
		group("expired", one)
		old := take(one, "expired", 200*time.Millisecond)
		now := take(one, "expired", 0)
		require.Equal(t, old.Address, now.Address)
		require.Equal(t, old.Attempt+1, now.Attempt)
		requireRefused(t, f, one, "receipts", "expired", old.Receipt, code.UnknownDelivery)
		finish(one, "expired", now.Receipt)
	})

	t.Run("from before a restart of the same home", func(t *testing.T) {
		group("restarted", one)
		group("kept", one)
		f.awaitConverged("receipts")
		old := take(one, "restarted", 0)
		kept := take(one, "kept", 0)
		settle(one, "extend", "kept", kept.Receipt)
		before, err := f.group("receipts", "restarted")
		require.NoError(t, err)
		two.pause() // or it would lead, and give the group a new home meanwhile
		one.kill()
		one.restart()
		now := take(one, "restarted", 0)
		_, err = one.receive("receipts", "kept", 0)
		require.ErrorIs(t, err, errNotYet, "its lease is recorded")
		two.resume()
		require.Equal(t, old.Address, now.Address)
		eventually(t, readyWithin, "host 2 is back", func() error { _, err := two.applied("receipts"); return err })
		after, err := f.group("receipts", "restarted")
		require.NoError(t, err)
		require.Equal(t, before.HomeHost, after.HomeHost, "the home is the same")
		require.Greater(t, after.Epoch, before.Epoch)
		requireRefused(t, f, one, "receipts", "restarted", old.Receipt, code.StaleOwner)
		finish(one, "restarted", now.Receipt)
		finish(one, "kept", kept.Receipt)
	})

	t.Run("from before its home's host was killed", func(t *testing.T) {
		group("killed", one)
		group("lost", one)
		f.awaitConverged("receipts")
		held, lost := take(one, "killed", 0), take(one, "lost", 0)
		settle(one, "extend", "killed", held.Receipt)
		one.kill()
		settle(two, "extend", "killed", held.Receipt)
		_, err := two.receive("receipts", "killed", 0)
		require.ErrorIs(t, err, errNotYet)
		again := take(two, "lost", 0)
		one.restart()
		eventually(t, readyWithin, "host 1 is back", func() error { _, err := one.applied("receipts"); return err })
		requireRefused(t, f, two, "receipts", "lost", lost.Receipt, code.StaleOwner)
		finish(two, "lost", again.Receipt)
		finish(two, "killed", held.Receipt)
	})
	// Each of the 8 groups had the message, and four had it again after its lease was lost.
	f.noteGroups(t, "receipts", totals{sent: 1, acknowledged: 1, deliveries: 11, duplicates: 4}, "holds", "moved", "again", "expired", "restarted", "kept", "killed", "lost")
}
