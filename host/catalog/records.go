package catalog

import "github.com/tierq/tierq/queue"

// The records inside commands, results and views. The version of the container decides their layout.

func (e *encoder) host(h Host) {
	e.u64(h.ID)
	e.u8(uint8(h.Role))
	e.str(h.RaftAddr)
	e.str(h.PeerAddr)
	e.str(h.ClientAddr)
	e.str(h.Domain)
	e.u64(h.Version)
}

func (d *decoder) host() Host {
	return Host{
		ID:         d.u64(),
		Role:       HostRole(d.u8()),
		RaftAddr:   d.str(),
		PeerAddr:   d.str(),
		ClientAddr: d.str(),
		Domain:     d.str(),
		Version:    d.u64(),
	}
}

func (e *encoder) replica(r Replica) {
	e.u64(uint64(r.ID))
	e.u64(r.HostID)
	e.u8(uint8(r.Birth))
	e.u8(uint8(r.State))
	e.bool(r.Member)
	e.u64(r.Nonce)
}

const replicaBytes = 8 + 8 + 1 + 1 + 1 + 8

func (d *decoder) replica() Replica {
	return Replica{
		ID:     queue.ReplicaID(d.u64()),
		HostID: d.u64(),
		Birth:  Birth(d.u8()),
		State:  ReplicaState(d.u8()),
		Member: d.bool(),
		Nonce:  d.u64(),
	}
}

func (e *encoder) replicas(rs []Replica) {
	e.u32(uint32(len(rs)))
	for _, r := range rs {
		e.replica(r)
	}
}

func (d *decoder) replicas() []Replica {
	n := d.count(replicaBytes)
	if n == 0 {
		return nil
	}
	rs := make([]Replica, n)
	for i := range rs {
		rs[i] = d.replica()
	}
	return rs
}

func (e *encoder) placement(p Placement) {
	e.u64(p.Shard)
	e.u64(p.QueueID)
	e.u32(p.Partition)
	e.replicas(p.Replicas)
	e.bool(p.Deleted)
}

func (d *decoder) placement() Placement {
	return Placement{
		Shard:     d.u64(),
		QueueID:   d.u64(),
		Partition: d.u32(),
		Replicas:  d.replicas(),
		Deleted:   d.bool(),
	}
}

func (e *encoder) queue(q Queue) {
	e.u64(q.ID)
	e.str(q.Tenant)
	e.str(q.Name)
	e.options(q.Options)
	e.u32(q.Replicas)
	e.u32(q.Witnesses)
	e.u32(uint32(len(q.Shards)))
	for _, s := range q.Shards {
		e.u64(s)
	}
	e.u64(q.OperationID)
}

func (d *decoder) queue() Queue {
	q := Queue{
		ID:        d.u64(),
		Tenant:    d.str(),
		Name:      d.str(),
		Options:   d.options(),
		Replicas:  d.u32(),
		Witnesses: d.u32(),
	}
	if n := d.count(8); n > 0 {
		q.Shards = make([]uint64, n)
		for i := range q.Shards {
			q.Shards[i] = d.u64()
		}
	}
	q.OperationID = d.u64()
	return q
}

func (e *encoder) options(o queue.QueueOptions) { e.str(string(queue.AppendQueueOptions(nil, o))) }

func (d *decoder) options() queue.QueueOptions {
	b := d.str()
	if d.err != nil {
		return queue.QueueOptions{}
	}
	o, err := queue.DecodeQueueOptions([]byte(b))
	if err != nil {
		d.err = errMalformed
	}
	return o
}
