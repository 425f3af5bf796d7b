package node

import (
	"fmt"
	"sync"
	"time"

	"github.com/tierq/tierq/host/catalog"
	"github.com/tierq/tierq/queue/code"
)

const (
	// quotaLook is how old the sum may be that a publish is checked with.
	quotaLook = 100 * time.Millisecond
	// quotaOpenPercent of its quota is what a tenant that was over it must come down to.
	quotaOpenPercent = 95
)

// byteQuota is what one tenant stores, as this host last added it up.
type byteQuota struct {
	mu     sync.Mutex
	looked time.Time
	max    uint64
	stored uint64
	over   bool
}

// look adds up again when the last sum is old, or the quota is another one, and says whether publishes are refused. Once they are, they are
// until the sum is well below the quota.
func (q *byteQuota) look(limit uint64, now time.Time, sum func() uint64) (over bool, stored uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.max != limit || now.Sub(q.looked) >= quotaLook {
		if q.max != limit {
			q.over = false
		}
		q.max, q.looked, q.stored = limit, now, sum()
		opens := limit/100*quotaOpenPercent + limit%100*quotaOpenPercent/100
		q.over = q.stored >= limit || q.over && q.stored >= opens
	}
	return q.over, q.stored
}

// admitBytes refuses publishes of a tenant whose queues store what they may.
func (n *Node) admitBytes(t catalog.Tenant) error {
	if t.MaxBytes == 0 {
		return nil
	}
	n.access.mu.Lock()
	q := n.access.bytes[t.Name]
	if q == nil {
		q = new(byteQuota)
		n.access.bytes[t.Name] = q
	}
	n.access.mu.Unlock()
	over, stored := q.look(t.MaxBytes, time.Now(), func() uint64 { return n.tenantBytes(n.view(), t.Name) })
	if !over {
		return nil
	}
	return &code.Error{Code: code.QuotaExceeded, Effect: code.EffectNone, RetryAfterMs: 1000,
		Text: fmt.Sprintf("the tenant's queues store %d bytes and may store %d: consume, purge, or raise the quota with `tierq tenant put`", stored, t.MaxBytes)}
}

// tenantBytes adds up what a tenant's queues store: of each partition the newest that this host has or was told.
func (n *Node) tenantBytes(v *catalog.View, tenant string) (sum uint64) {
	for _, q := range v.Queues(tenant) {
		for _, shard := range q.Shards {
			sum += n.shardBytes(v, shard)
		}
	}
	return sum
}

func (n *Node) shardBytes(v *catalog.View, shard uint64) (bytes uint64) {
	var applied uint64
	if r, ok := n.raft.Reader(shard); ok {
		m := r.Meta()
		applied, bytes = uint64(m.Applied), m.Counters.Bytes
	}
	p, _ := v.Placement(shard)
	for _, r := range p.Replicas {
		if r.Birth == catalog.BirthWitness || r.HostID == n.id {
			continue
		}
		if told, ok := n.raft.Peers().Reported(r.HostID, shard); ok && told.Applied > applied {
			applied, bytes = told.Applied, told.StoredBytes
		}
	}
	return bytes
}
