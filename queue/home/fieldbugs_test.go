package home

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// Bugs that other queues have had, named by their number in the project's list, at a home. Others are beside the rules that they
// are about.

// B18: after a purge leased messages do not come back, old receipts delete nothing newer, and what is sent later is redelivered.
func TestB18PurgeOfLeasedMessages(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{LeaseMs: 2000, DelaysMs: []uint64{1}}, 3)
		old := get(t, k, ReceiveRequest{Max: 3})
		r.must(&queue.Retention{Stamp: r.stamp(), PurgeTo: 3})
		r.send(1)
		d := get(t, k, ReceiveRequest{Max: 10, Wait: time.Second})
		require.Equal(t, []int{4}, bodies(d))
		for _, o := range old {
			require.Equal(t, []code.Code{code.OK}, ack(t, k, o.Receipt), "finished is finished")
		}
		again := get(t, k, ReceiveRequest{Max: 10, Wait: 10 * time.Second})
		require.Equal(t, []int{4}, bodies(again))
		require.EqualValues(t, 2, again[0].Attempt)
		require.Equal(t, []code.Code{code.OK}, ack(t, k, again[0].Receipt))
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10, Wait: 10 * time.Second}))
	})
}

// B20: delayed messages are delivered once, never early, whoever is home when they fall due, and plain ones do not wait for them.
func TestB20DelayedOverHomes(t *testing.T) {
	two(t, func(t *testing.T, r *fakeRaft, ka, kb *Keeper) {
		id := serving(t, r, queue.GroupConfig{}, 0)
		due := map[int]queue.Stamp{}
		for i := range 10 {
			at := r.stamp() + queue.Stamp(1000*(i+1))
			r.send(1, func(m *queue.Message) { m.VisibleAt = at })
			due[i+1] = at
		}
		r.send(1)
		require.Equal(t, []int{11}, bodies(get(t, ka, ReceiveRequest{Max: 20})))
		seen := map[int]bool{}
		take := func(k *Keeper) {
			for _, d := range get(t, k, ReceiveRequest{Max: 20, Wait: 1500 * time.Millisecond}) {
				n := bodies([]Delivery{d})[0]
				if n == 11 {
					continue // its lease ended with its home
				}
				require.False(t, seen[n])
				require.EqualValues(t, 1, d.Attempt)
				require.LessOrEqual(t, due[n], r.stamp())
				require.Equal(t, []code.Code{code.OK}, ack(t, k, d.Receipt))
				seen[n] = true
			}
		}
		take(ka)
		take(ka)
		r.replicas[0].close()
		pass(2 * time.Second) // some fall due while nobody is home
		r.giveHome(id, r.replicas[1])
		for range 12 {
			take(kb)
		}
		require.Len(t, seen, 10)
	})
}

// B22: a clock that steps ends no lease and frees no delayed message before its time on this home.
func TestB22ClockSteps(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		serving(t, r, queue.GroupConfig{LeaseMs: 60_000}, 1)
		d := get(t, k, ReceiveRequest{})
		a.setClock(time.Hour, false)
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 10 * time.Second}), "leases go by boot time")
		a.setClock(-time.Hour, false)
		require.Empty(t, get(t, k, ReceiveRequest{Wait: 10 * time.Second}))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, d[0].Receipt))
	})
}

// B42: of many pollers exactly one is answered by one message, and those that wait cost it nothing.
func TestB42OneMessageForManyPollers(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		serving(t, r, queue.GroupConfig{}, 0)
		answers := make(chan []Delivery, 1000)
		for range 1000 {
			ch := receiveLater(k, ReceiveRequest{Wait: 20 * time.Second})
			go func() { answers <- (<-ch).ds }()
		}
		synctest.Wait()
		for n := 1; n <= 20; n++ {
			r.send(1)
			synctest.Wait()
			require.Len(t, answers, 1)
			require.Equal(t, []int{n}, bodies(<-answers))
		}
		pass(20 * time.Second)
		for range 980 {
			require.Empty(t, <-answers)
		}
		require.Zero(t, k.Stats()[0].Waiters)
	})
}

// B40: groups that nobody uses cost no command, however many there are.
func TestB40IdleGroupsCostNothing(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(t *testing.T, r *fakeRaft, k *Keeper) {
		a := r.replicas[0]
		for i := range 1000 {
			r.create(fmt.Sprint("g", i), a, queue.GroupConfig{})
		}
		r.send(10)
		begun := len(a.commands())
		pass(10 * time.Minute)
		require.Len(t, a.commands(), begun)
	})
}
