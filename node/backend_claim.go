package node

import (
	"context"

	"github.com/tierq/tierq/node/api"
	"github.com/tierq/tierq/queue/home"
)

// ClaimIdle implements api.Backend at the group's home.
func (n *Node) ClaimIdle(ctx context.Context, r api.ClaimIdle) (api.Claimed, error) {
	d, g, err := n.atHome(ctx, r.Queue, r.Partition, r.Group)
	if err != nil {
		return api.Claimed{}, err
	}
	req := home.ClaimRequest{Consumer: r.Consumer, MinIdle: r.MinIdle, Max: r.Max, MaxBytes: r.MaxBytes}
	if r.Lease != nil {
		req.Lease, req.HasLease = *r.Lease, true
	}
	got, err := d.keeper.ClaimIdle(ctx, r.Group, req)
	if err != nil {
		return api.Claimed{}, n.withHome(d, r.Group, err)
	}
	n.metrics.delivered.Add(float64(len(got.Deliveries)))
	return api.Claimed{Deliveries: deliveries(got.Deliveries), Dead: got.Dead, Skipped: got.Skipped, Epoch: g.Epoch}, nil
}

func deliveries(got []home.Delivery) []api.Delivery {
	out := make([]api.Delivery, len(got))
	for i, m := range got {
		out[i] = api.Delivery{
			Message: m.Message, Receipt: m.Receipt, Attempt: m.Attempt, Lease: m.Lease, FirstDelivered: m.FirstDelivered, Reason: m.Reason, Round: m.Round,
		}
	}
	return out
}
