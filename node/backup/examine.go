package backup

import (
	"context"
	"io"
)

// Examined is what reading one replica whole found.
type Examined struct {
	Partition int
	API       string    // of its host
	Found     Partition // without File
	Err       error     // why it could not be read to its end, or what is wrong with a record
}

// Examine reads every full replica of a queue that is there, each at one index, and checks every record by itself. Nothing is kept. It
// fails when the queue cannot be found; what is wrong with a replica is in its own result.
func Examine(ctx context.Context, from Source, name string, progress Progress) ([]Examined, error) {
	r, err := from.SnapshotQueue(ctx, name)
	if err != nil {
		return nil, err
	}
	var all []Examined
	for number, p := range r.Partitions {
		for _, addr := range p.Apis {
			t := newTee(io.Discard, meterOf(progress, name, number, 0))
			sourceErr := from.SaveShard(ctx, addr, name, uint32(number), t)
			out, err := t.end(sourceErr)
			all = append(all, Examined{Partition: number, API: addr, Found: out, Err: err})
		}
	}
	return all, nil
}
