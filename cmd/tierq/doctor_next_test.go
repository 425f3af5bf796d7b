package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
)

// TestCostOfNextFailure: two full hosts and a witness, by who is up and what the leader knows.
func TestCostOfNextFailure(t *testing.T) {
	for name, tc := range map[string]struct {
		strict bool
		down   uint64
		copies uint32
		stops  uint64
		want   string
	}{
		"nothing is lost":           {false, 0, 2, 1, ""},
		"witness":                   {false, 0, 2, 3, ""},
		"strict":                    {true, 0, 2, 2, "if host 2 stops now, queue orders is read-only because it is strict"},
		"strict, witness":           {true, 0, 2, 3, ""},
		"second host":               {false, 2, 1, 3, "1 of its 3 voters are left, and 2 are needed"},
		"only copy":                 {false, 0, 1, 1, "has messages that no other has"},
		"the host without the copy": {false, 0, 1, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			q := &tierqv1.Queue{Name: "orders", Options: &tierqv1.QueueOptions{}}
			if tc.strict {
				q.Options.Durability = tierqv1.Durability_DURABILITY_STRICT
			}
			p := &tierqv1.Partition{LeaderHost: 1, DataCopies: tc.copies, Replicas: []*tierqv1.Replica{
				{Host: 1, Role: "full"}, {Host: 2, Role: "full"}, {Host: 3, Role: "witness"}}}
			alive := map[uint64]bool{1: true, 2: tc.down != 2, 3: true}
			got := costOf(q, p, alive, tc.stops)
			if tc.want == "" {
				require.Empty(t, got)
				return
			}
			require.Contains(t, got, tc.want)
		})
	}
}
