package home

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierq/tierq/queue"
	"github.com/tierq/tierq/queue/code"
)

// bubble runs a test on a shard of n replicas, the first of which has a keeper.
func bubble(t *testing.T, n int, o queue.QueueOptions, f func(r *fakeRaft, k *Keeper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newFakeRaft(t, n, o)
		k := r.replicas[0].open()
		synctest.Wait()
		f(r, k)
		for _, p := range r.replicas {
			p.close()
		}
	})
}

func within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// get receives and expects no error.
func get(t *testing.T, k *Keeper, req ReceiveRequest) []Delivery {
	t.Helper()
	ds, err := k.Receive(within(time.Minute), "g", req)
	require.NoError(t, err)
	return ds
}

// bodies lists what was delivered.
func bodies(ds []Delivery) []int {
	var out []int
	for _, d := range ds {
		n, _ := strconv.Atoi(string(d.Message.Body))
		out = append(out, n)
	}
	return out
}

func receipts(ds ...Delivery) []string {
	var out []string
	for _, d := range ds {
		out = append(out, d.Receipt)
	}
	return out
}

// ack acks and returns the codes.
func ack(t *testing.T, k *Keeper, rs ...string) []code.Code {
	t.Helper()
	return codes(t)(k.Ack(within(10*time.Second), "g", rs))
}

func codes(t *testing.T) func([]ItemResult, error) []code.Code {
	return func(items []ItemResult, err error) []code.Code {
		t.Helper()
		require.NoError(t, err)
		var out []code.Code
		for _, i := range items {
			out = append(out, i.Code)
		}
		return out
	}
}

func refusal(t *testing.T, err error) code.Code {
	t.Helper()
	var e *code.Error
	require.ErrorAs(t, err, &e)
	return e.Code
}

// A new group of a new queue is served at once: no wait of a new home, no timer.
func TestReceiveAckOfANewGroup(t *testing.T) {
	bubble(t, 1, queue.QueueOptions{}, func(r *fakeRaft, k *Keeper) {
		r.create("g", r.replicas[0], queue.GroupConfig{})
		r.send(3)
		before := r.boot()
		ds := get(t, k, ReceiveRequest{Max: 10})
		require.Equal(t, []int{1, 2, 3}, bodies(ds))
		require.Equal(t, before, r.boot(), "a receive with messages ready waited")
		require.EqualValues(t, 1, ds[0].Attempt)
		require.Equal(t, []code.Code{code.OK, code.OK, code.OK}, ack(t, k, receipts(ds...)...))
		require.Equal(t, r.delay, r.boot()-before, "an ack with nothing in flight waited")
		require.Empty(t, get(t, k, ReceiveRequest{Max: 10}))
		require.Equal(t, []code.Code{code.OK}, ack(t, k, ds[0].Receipt), "a repeated ack learns that it took effect")
	})
}
